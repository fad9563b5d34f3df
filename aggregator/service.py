"""The aggregator: gathers a roster, carries the method's exchanges out over MQTT, and checkpoints after each."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.checkpoint import Checkpoint
from fadefed.errors import ConnectionFailed, MessageError
from fadefed.federation import FINAL, Federation, Metrics, final_exchange
from fadefed.files import write_atomic
from fadefed.messages import Exchange, Reception
from fadefed.messages.codecs import coded_size
from fadefed.messages.wire import (
    CodedReport,
    H,
    Kind,
    Message,
    field_of,
    pack,
    pack_order,
    pack_shared,
    receive,
    scalars_of,
    unpack,
)
from fadefed.methods.method import Device
from fadefed.mqtt import Assembler, BrokerAddress, Session, Topics
from fadefed.mqtt.topics import DEVICE_NAME, GATEWAY

log = logging.getLogger("fadefed.aggregator")

RESEND_AFTER_S = 20.0  # an order unanswered for so long is sent again; it changes nothing if it was answered
RETURN_WAIT_S = 15.0  # after a restart, how long to wait for the devices that were there before


class Aggregator:
    """Runs one federation into `folder`: checkpoint, metrics.jsonl, summary.json.

    graphs: {file name: path} of the task's graphs. Start it again on the same folder and it goes on.
    """

    def __init__(
        self,
        federation: Federation,
        folder: Path,
        graphs: dict[str, Path],
        broker: BrokerAddress,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.federation = federation
        self.folder = folder
        self.progress = progress
        self.topics = Topics(federation.broker.prefix)
        self.server = federation.server()
        self.checkpoint_path = folder / "checkpoint"
        digest = hashlib.sha256(
            repr((federation.config, federation.method_options, federation.task)).encode()
        ).hexdigest()
        found = Checkpoint.load(self.checkpoint_path, digest)
        self.resumed = found is not None
        self.checkpoint = found or Checkpoint(os.urandom(8), digest)
        if self.checkpoint.server is not None:
            self.server.restore(self.checkpoint.server)
        self.files = {name: path.read_bytes() for name, path in graphs.items()}
        self.session = Session(
            broker,
            f"{federation.broker.prefix.replace('/', '-')}-{GATEWAY}",
            [self.topics.up("+", kind) for kind in ("status", "hello", "report/#")],
            keepalive_s=federation.broker.keepalive_s,
            expiry_s=0,
        )
        self.online: set[str] = set()
        self._joined: list[str] = []  # devices that said hello since the server last heard of joins
        self._left: list[str] = []
        self._samples: dict[str, int] = {name: entry[1] for name, entry in self.checkpoint.roster.items()}
        self._assembler = Assembler(most=4)
        self._open: Exchange | None = None
        self._published: int | None = None  # number of the shared tensors that this process has published last
        self._reception = Reception()
        self._reported_at: dict[str, float] = {}
        self._stopping = False
        self._mark = 0.0  # when the last exchange ended; an exchange's seconds run from here, checkpoint included

    @property
    def run_id(self) -> bytes:
        return self.checkpoint.run

    def stop(self) -> None:
        """End `run` soon, keeping the checkpoint; may be called from a signal handler."""
        self._stopping = True

    def run(self, wait_s: float | None = 30.0) -> dict[str, Any] | None:
        """To the end of the federation; the summary, or None when stopped before."""
        if self.checkpoint.finished:
            return self._tell_it_is_over()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.session.start(wait_s)
        metrics_path = self.folder / "metrics.jsonl"
        _trim_metrics(metrics_path, self.checkpoint.exchange)
        try:
            self._gather()
            with metrics_path.open("a") as stream:
                metrics = Metrics(stream)
                self._mark = time.monotonic()
                while not self._stopping:
                    if not self.online:
                        self._wait_for_any()
                        continue
                    exchange = self.server.next(self._roster())
                    if exchange is None:
                        return self._finish(metrics)
                    self._one_exchange(exchange, metrics)
        finally:
            self.session.flush(2.0)
            self.session.stop()
        return None

    def _tell_it_is_over(self) -> dict[str, Any]:
        """The run had finished before: tell boards that may not have heard, where the broker is there."""
        log.info("%s holds a finished run; nothing is left to do.", self.folder)
        try:
            self.session.start(3.0)
            self._announce(finished=True)
            self.session.flush()
            self.session.stop()
        except ConnectionFailed as error:
            log.info("Boards could not be told again: %s", error)
        return dict(json.loads((self.folder / "summary.json").read_text()))

    # --- roster -------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Announce the federation and wait for the devices it needs."""
        known = list(self.checkpoint.roster)
        if not known:
            log.info("Waiting for %d devices.", self.federation.config.devices)
            while len(self.online) < self.federation.config.devices and not self._stopping:
                self._handle(1.0)
            for name in sorted(self.online):  # numbers do not depend on who connected first
                self._number(name)
            self._joined.clear()
        else:
            expected = set(self.checkpoint.online)
            deadline = time.monotonic() + RETURN_WAIT_S
            while not (expected <= self.online and self.online) and not self._stopping:
                if time.monotonic() > deadline and self.online:
                    log.warning("Going on without %s.", ", ".join(sorted(expected - self.online)))
                    break
                self._handle(0.5)
        self._tell_server()

    def _number(self, name: str) -> None:
        """Give `name` its permanent number and tell the server."""
        roster = self.checkpoint.roster
        if name not in roster:
            roster[name] = [len(roster), self._samples[name]]
        self.server.joined(Device(name, *roster[name]))

    def _tell_server(self) -> None:
        """Pass joins and leaves on; only between exchanges, so that a server never changes under one."""
        joined, self._joined = sorted(self._joined), []
        left, self._left = self._left, []
        for name in joined:
            self._number(name)
        for name in left:
            if name not in self.online:
                self.server.left(name)

    def _roster(self) -> dict[str, Device]:
        entries = self.checkpoint.roster.items()
        return {name: Device(name, number, samples) for name, (number, samples) in entries if name in self.online}

    def _wait_for_any(self) -> None:
        """Nobody is online: wait until somebody is."""
        log.warning("No device is online; waiting.")
        while not self.online and not self._stopping:
            self._handle(1.0)
        self._tell_server()

    # --- exchanges ------------------------------------------------------------------------------------------

    def _one_exchange(self, exchange: Exchange, metrics: Metrics) -> Reception:
        """Send orders, collect until all have answered or the deadline, absorb, checkpoint."""
        exchange.number = self.checkpoint.exchange + 1
        self._open = exchange
        self._reception = Reception(absent=set(exchange.orders))
        self._reported_at = {}
        started = time.monotonic()
        self._publish_shared(exchange)
        for name in exchange.orders:
            self._send_order(name)
        deadline = started + self.federation.config.deadline_s
        resend = started + RESEND_AFTER_S
        while self._outstanding() and not self._stopping:
            now = time.monotonic()
            if now > deadline:
                log.warning(
                    "Exchange %d: no report from %s by the deadline.",
                    exchange.number,
                    ", ".join(self._outstanding()),
                )
                break
            if now > resend:
                resend = now + RESEND_AFTER_S
                for name in self._outstanding():
                    self._send_order(name)
            self._handle(min(deadline, resend) - now)
        if self._stopping:
            return self._reception
        self._open = None
        # In the roster's order, as the simulator has it: float sums must not depend on who answered first.
        reception = self._reception
        reception.reports = {name: reception.reports[name] for name in exchange.orders if name in reception.reports}
        reception.scalars = {name: reception.scalars[name] for name in exchange.orders if name in reception.scalars}
        results = self.server.absorb(exchange, reception) if exchange.phase != FINAL else {}
        self._tell_server()
        now = time.monotonic()
        row = metrics.add(exchange, reception, results | {"seconds": round(now - self._mark, 4)})
        self._mark = now
        # The row first: a kill between the two leaves a row too many, which the next start drops.
        self.checkpoint.exchange = exchange.number
        self.checkpoint.online = sorted(self.online)
        self.checkpoint.server = self.server.state()
        self.checkpoint.save(self.checkpoint_path)
        if self.progress is not None:
            self.progress(row)
        return reception

    def _outstanding(self) -> list[str]:
        """Devices that were asked, are online, and have not answered."""
        assert self._open is not None
        return [name for name in self._open.orders if name not in self._reported_at and name in self.online]

    def _publish_shared(self, exchange: Exchange) -> None:
        """Publish the shared tensors, unless those of the same number are out already."""
        number = exchange.shared_number or exchange.number
        if exchange.shared and number != self._published:
            self._published = number
            self.session.publish(self.topics.down("all", "shared"), pack_shared(self.run_id, exchange), retain=True)

    def _send_order(self, name: str) -> None:
        assert self._open is not None
        number = self.checkpoint.roster[name][0]
        order = pack_order(self.run_id, self._open, name, number)
        self.session.publish(self.topics.down(name, "order"), order)

    def _finish(self, metrics: Metrics) -> dict[str, Any]:
        """The final exchange, the summary, and word to all that the run is over."""
        exchange = final_exchange(self.server, self.federation.task, list(self._roster()))
        reception = self._one_exchange(exchange, metrics)
        devices = {name: dict(scalars) for name, scalars in sorted(reception.scalars.items())}
        summary = {
            "federation": self.federation.config.name,
            "method": self.federation.config.method,
            "run": self.run_id.hex(),
            "rounds": min(self.server.round, self.federation.config.rounds),
            "exchanges": self.checkpoint.exchange,
            "mean": _means(list(devices.values())),
            "devices": devices,
        }
        write_atomic(self.folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        self.checkpoint.finished = True
        self.checkpoint.save(self.checkpoint_path)
        self._announce(finished=True)
        return summary

    # --- messages -------------------------------------------------------------------------------------------

    def _announce(self, *, finished: bool = False) -> None:
        """Publish files and manifest, retained, and ask everybody to say hello."""
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}
        if not finished:
            for name, data in self.files.items():
                message = pack(Message(Kind.FILE, {H.DATA: data}))
                self.session.publish(self.topics.down("all", f"file/{hashes[name]}"), message, retain=True)
        manifest = self.federation.manifest() | {"files": {self.federation.task.name: hashes}}
        header: dict[int, Any] = {H.RUN: self.run_id, H.DATA: manifest, H.SCALARS: {"finished": finished}}
        self.session.publish(self.topics.down("all", "manifest"), pack(Message(Kind.MANIFEST, header)), retain=True)
        if not finished:
            self.session.publish(self.topics.down("all", "call"), pack(Message(Kind.CALL)))

    def _handle(self, timeout_s: float) -> None:
        """Wait for one event and take it in."""
        event = self.session.next_event(timeout_s)
        if event is None:
            return
        if event.kind == "connected":
            self._on_connected()
            return
        if event.kind == "disconnected":
            log.warning("The connection to the broker is lost; trying again.")
            return
        parsed = self.topics.parse(event.topic)
        if parsed is None or not DEVICE_NAME.fullmatch(parsed[1]) or parsed[2] not in ("status", "hello", "report"):
            return
        _, device, kind, index = parsed
        try:
            message = self._assembler.feed(f"{device}/{kind}", index, event.payload)
            if message is None:
                return
            if kind == "status":
                self._on_status(device, unpack(message, Kind.STATUS))
            elif kind == "hello":
                self._on_hello(device, unpack(message, Kind.HELLO))
            else:
                self._on_report(device, CodedReport.unpack(message), len(message))
        except MessageError as error:
            log.warning("Device %s: a message on %s is refused: %s", device, kind, error)

    def _on_connected(self) -> None:
        """Say everything again: the broker, or we, may have forgotten it."""
        self._announce()
        if self._open is not None:
            self._published = None
            self._publish_shared(self._open)
            for name in self._outstanding():
                self._send_order(name)

    def _on_status(self, device: str, message: Message) -> None:
        if scalars_of(message).get("online") is False and device in self.online:
            log.info("%s left.", device)
            self.online.discard(device)
            self._left.append(device)

    def _on_hello(self, device: str, message: Message) -> None:
        if field_of(message, H.RUN, bytes) != self.run_id:
            return
        error = field_of(message, H.ERROR, str, None)
        if error is not None:
            log.warning("%s cannot take part: %.500s", device, error)
            return
        samples = scalars_of(message).get("samples")
        if type(samples) is not int or samples < 1:
            raise MessageError("A hello gives the number of training examples, at least 1.")
        if device not in self.online:
            log.info("%s joined with %d examples.", device, samples)
            self._samples[device] = samples
            self.online.add(device)
            if device not in self._joined:
                self._joined.append(device)
        if self._open is not None and device in self._open.orders and device not in self._reported_at:
            self._send_order(device)

    def _on_report(self, device: str, report: CodedReport, size: int) -> None:
        exchange = self._open
        entry = self.checkpoint.roster.get(device)
        if report.run != self.run_id or entry is None or report.number != entry[0]:
            return
        if exchange is None or report.exchange < exchange.number:
            self._reception.late.add(device)
            return
        if report.exchange != exchange.number or device not in exchange.orders or device in self._reported_at:
            return  # a duplicate, or an answer to something never asked
        self._reported_at[device] = time.monotonic()
        # What the channel erased was sent all the same.
        erased = sum(coded_size(b.coded.codec, b.coded.shape) for b in report.bodies if b.coded.data is None)
        self._reception.uplink_bytes[device] = size + erased
        try:
            receive(exchange, device, report, self._reception)
        except MessageError as error:
            log.warning("%s", error)
            self._reception.refused.append(str(error))


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row})
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def _trim_metrics(path: Path, last_exchange: int) -> None:
    """Drop rows after the checkpoint: a kill between the two writes must not count an exchange twice."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["exchange"] <= last_exchange:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # a line cut off by the kill
    write_atomic(path, "".join(line + "\n" for line in kept).encode())
