"""A link: which impairments act between each device and the gateway, and the channel that carries reports over it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from channel_emu.bitflip import flip_bits
from channel_emu.outage import in_outage, load, rayleigh_outage_probability, snr_linear
from channel_emu.rayleigh import power_gains
from fadefed.config import TomlFile
from fadefed.errors import ConfigError, MessageError
from fadefed.messages import Exchange, Reception
from fadefed.messages.wire import Body, CodedReport, receive

Gain = Callable[[str, int], float]
"""(block, device number) -> power gain |h|^2."""


@dataclass(frozen=True)
class LinkConfig:
    """The table [channel] of a TOML file.

    model: `none`, `outage` (Rayleigh block fading, capacity outage) or `flips` (binary symmetric channel).
    seed: of the channel's own streams.
    snr_db: mean received SNR of every device, or a list indexed by device number (the last entry serves the rest).
    bandwidth_hz, slot_s: each signal has its own resource block of this size; load = bits / (bandwidth_hz slot_s).
    granularity: one fade per `device` and slot for all its signals, or one per `vector` (signal).
    flip_probability: of each bit of a digital signal.
    """

    model: Literal["none", "outage", "flips"] = "none"
    seed: int = 0
    snr_db: float | list[float] = 10.0
    bandwidth_hz: float = 100_000.0
    slot_s: float = 1.0
    granularity: Literal["device", "vector"] = "device"
    flip_probability: float = 0.0

    def __post_init__(self) -> None:
        if self.bandwidth_hz <= 0 or self.slot_s <= 0:
            raise ConfigError("bandwidth_hz and slot_s must be above 0.")
        if not 0 <= self.flip_probability <= 1:
            raise ConfigError("flip_probability must lie between 0 and 1.")
        if isinstance(self.snr_db, list) and not self.snr_db:
            raise ConfigError("snr_db = [] gives no SNR; give a number or at least one entry.")

    @classmethod
    def read(cls, file: TomlFile) -> "LinkConfig":
        """The table [channel] of `file`; without one, an error-free link."""
        return file.table("channel", cls)

    def snr(self, number: int) -> float:
        """Mean SNR of device `number`, linear."""
        values = self.snr_db if isinstance(self.snr_db, list) else [self.snr_db]
        return float(snr_linear(values[min(number, len(values) - 1)]))

    def outage_probability(self, bits: float, number: int = 0) -> float:
        """The closed form for a signal of `bits` bits from device `number`; 0 where the model has no outage."""
        if self.model != "outage":
            return 0.0
        return float(rayleigh_outage_probability(self.snr(number), load(bits, self.bandwidth_hz, self.slot_s)))


class Channel:
    """Carries coded reports over the link. Stateless: every draw is a function of (seed, slot, signal, device)."""

    def __init__(self, config: LinkConfig) -> None:
        self.config = config

    def impair(self, reports: Sequence[CodedReport]) -> list[CodedReport]:
        """What the link makes of reports of one slot: digital signals erased or with bits flipped, the rest as it was."""
        config = self.config
        if config.model == "none" or not reports:
            return list(reports)
        numbers = [report.number for report in reports]
        slot = reports[0].slot
        gains: dict[str, Mapping[int, float]] = {}

        def gain(block: str, number: int) -> float:
            if block not in gains:
                gains[block] = dict(zip(numbers, power_gains(config.seed, slot, block, numbers), strict=True))
            return gains[block][number]

        return [
            report.with_bodies(tuple(self._impair(body, report, gain) for body in report.bodies)) for report in reports
        ]

    def _impair(self, body: Body, report: CodedReport, gain: Gain) -> Body:
        config = self.config
        data = body.coded.data
        if body.access == "protected" or data is None:
            return body
        if body.access == "superposed":
            raise MessageError(f"Signal {'/'.join(body.key)} is superposed; this channel carries digital signals only.")
        name = "/".join(body.key)
        bits = body.coded.bits
        if config.model == "flips":
            flipped = flip_bits(data, bits, config.flip_probability, config.seed, report.slot, name, report.number)
            return replace(body, coded=replace(body.coded, data=flipped))
        power = gain("" if config.granularity == "device" else name, report.number)
        r = load(bits, config.bandwidth_hz, config.slot_s)
        if in_outage(np.float64(power), config.snr(report.number), r):
            return replace(body, coded=replace(body.coded, data=None))
        return body

    def carry(self, exchange: Exchange, reports: Mapping[str, CodedReport]) -> Reception:
        """What of `reports` {device: report} the gateway receives. Refused reports count as absent."""
        reception = Reception(absent=set(exchange.orders))
        impaired = self.impair(list(reports.values()))
        for device, sent, report in zip(reports, reports.values(), impaired, strict=True):
            reception.uplink_bytes[device] = sum(len(body.coded.data or b"") for body in sent.bodies)
            try:
                receive(exchange, device, report, reception)
            except MessageError as error:
                reception.refused.append(str(error))
        return reception
