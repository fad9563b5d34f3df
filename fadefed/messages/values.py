"""Exchange, Order, Report, Reception: what passes between a gateway and its devices, as values."""

from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

Array = NDArray[Any]
Key = tuple[str, str]
"""A tensor's name: (task, name). Of a report's tensors, called signals, `name` may be `family/member`,
as in ("mnist", "sign/7"): all members of a family share one `SignalSpec`, and each is one vector on the air."""

Access = Literal["protected", "digital", "superposed"]
Scalar = int | float | str | bool


@dataclass(frozen=True)
class SignalSpec:
    """How one signal of a report is coded and how it reaches the gateway.

    codec: see `fadefed.messages.codecs`.
    access: `protected` (error free), `digital` (fades and flips), `superposed` (summed on the air).
    ties: what a sign codec sends for an exact zero: a seeded `random` bit, or always `plus`.
    """

    codec: str
    access: Access = "protected"
    ties: Literal["random", "plus"] = "random"


@dataclass
class Order:
    """What one device is told in one exchange, beside the shared tensors."""

    tensors: dict[Key, Array] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)


@dataclass
class Exchange:
    """One order down and one report up, for each device in `orders`.

    number: counts the federation's exchanges from 1; the runtime sets it.
    round: one step of learning; a round may take several exchanges, each with its own `phase`.
    slot: the channel's clock.
    shared: tensors for all devices, published once. `shared_number` names the exchange that first
      published them, so that a later phase can reuse them without sending them again (None: this one).
    answers: for each signal family of the report its codec and access.
    """

    round: int
    phase: str
    slot: int
    orders: dict[str, Order]
    answers: dict[Key, SignalSpec]
    shared: dict[Key, Array] = field(default_factory=dict)
    shared_number: int | None = None
    number: int = 0

    def spec(self, key: Key) -> SignalSpec | None:
        """The spec of signal `key`, or of the family it belongs to; None when the exchange asks no such signal."""
        return self.answers.get(key) or self.answers.get((key[0], key[1].partition("/")[0]))


@dataclass
class Report:
    """What one device answers: signals by name, and scalars, which travel in the protected header."""

    signals: dict[Key, Array] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)


@dataclass
class Reception:
    """What of one exchange reached the gateway.

    reports: signals that arrived, as decoded (a sign signal is int8, -1 or +1).
    scalars: of every device whose report arrived, in part or whole.
    erased: (device, signal) pairs that the link lost and announced.
    absent: devices that were asked and gave no usable report; late: those that answered after the deadline
      of an earlier exchange.
    refused: why a report was not used, a sentence each. uplink_bytes: what each device sent.
    sums: superposed signals; then no single device's tensor is visible in `reports`.
    """

    reports: dict[str, dict[Key, Array]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    erased: set[tuple[str, Key]] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    sums: dict[Key, Array] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    uplink_bytes: dict[str, int] = field(default_factory=dict)

    def get(self, device: str, key: Key) -> Array | None:
        """The signal `key` of `device`, or None where it was lost."""
        return self.reports.get(device, {}).get(key)
