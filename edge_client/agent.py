"""The agent: an explicit state machine around one MQTT session.

    CONNECTING -> WAITING (for a manifest) -> LOADING (task files) -> READY <-> WORKING -> FINISHED
    any of them -> OFFLINE -> back to WAITING, LOADING or READY when the broker is there again

It answers exchanges idempotently: report and state are committed together under the exchange's number before the
report is sent, so an order that comes again gets the same bytes and changes nothing.
"""

import hashlib
import logging
import time
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from edge_client.personal import finish
from edge_client.store import Commit, Store
from fadefed.errors import DataError, FadeFedError, MessageError
from fadefed.federation import FINAL, client_from_manifest
from fadefed.learning import Engine, Task, open_engine
from fadefed.learning.int8 import INT8
from fadefed.messages import Array, Exchange, Key, Order
from fadefed.messages.wire import (
    CodedReport,
    H,
    Kind,
    Message,
    field_of,
    pack,
    unpack,
    unpack_order,
    unpack_shared,
)
from fadefed.methods.method import Call, MethodClient, State, answer
from fadefed.mqtt import Assembler, BrokerAddress, Session, Topics
from fadefed.mqtt.topics import check_device_name
from fadefed.tasks import Dataset, Fleet

log = logging.getLogger("fadefed.client")


class AgentState(Enum):
    """Where the agent stands."""

    CONNECTING = "connecting"
    WAITING = "waiting for a federation"
    LOADING = "loading task files"
    READY = "ready"
    WORKING = "working"
    OFFLINE = "offline"
    FINISHED = "finished"


@dataclass(frozen=True)
class AgentConfig:
    """name: the device's id. folder: what it keeps. wait_s: how long to try for the broker at first (None: for ever).

    stay: wait for the next federation after one has finished.
    """

    name: str
    broker: BrokerAddress
    folder: Path
    prefix: str = "fadefed"
    keepalive_s: int = 30
    wait_s: float | None = 30.0
    stay: bool = False


@dataclass
class Joined:
    """A federation this device takes part in."""

    run: bytes
    manifest: dict[str, Any]
    files: dict[str, dict[str, str]]  # task -> file name -> sha256
    task: Task
    client: MethodClient
    fleet: Fleet
    engine: Engine | None = None
    state: State = field(default_factory=dict)
    commit: Commit | None = None  # the last answer, as it lies on disk
    finished: bool = False


class Agent:
    """One edge client. `run` returns when a federation has finished (unless it stays), or `stop` was called."""

    def __init__(self, config: AgentConfig, data: Dataset) -> None:
        self.config = config
        self.data = data
        self.state = AgentState.CONNECTING
        self.store = Store(config.folder)
        self.topics = Topics(config.prefix)
        name = check_device_name(config.name)
        self.session = Session(
            config.broker,
            f"{config.prefix.replace('/', '-')}-{name}",
            [self.topics.down("all", "#"), self.topics.down(name, "#")],
            will=(self.topics.up(name, "status"), _status(False)),
            keepalive_s=config.keepalive_s,
        )
        self._assembler = Assembler(most=2)
        self._joined: Joined | None = None
        self._shared: dict[int, dict[Key, Array]] = {}  # the latest, by the number of the exchange that published them
        self._shared_run = b""
        # An order whose shared tensors are not here yet.
        self._waiting: tuple[int, Exchange, Order, bytes] | None = None
        self._stopping = False
        self._done = False

    def run(self) -> None:
        """Connect and work until done. Raises FadeFedError for what the user must mend."""
        self.session.start(self.config.wait_s)
        try:
            while not (self._stopping or self._done):
                event = self.session.next_event(1.0)
                if event is None:
                    continue
                if event.kind == "connected":
                    self._on_connected()
                elif event.kind == "disconnected":
                    self._enter(AgentState.OFFLINE)
                else:
                    self._on_message(event.topic, event.payload)
        finally:
            if self.session.connected:
                self.session.publish(self.topics.up(self.config.name, "status"), _status(False), retain=True)
                self.session.flush(3.0)
            self.session.stop()

    def stop(self) -> None:
        """End `run` within a second; may be called from a signal handler."""
        self._stopping = True

    def _enter(self, state: AgentState) -> None:
        if state is not self.state:
            level = logging.DEBUG if AgentState.WORKING in (state, self.state) else logging.INFO
            log.log(level, "%s: %s -> %s", self.config.name, self.state.value, state.value)
            self.state = state

    # --- messages -------------------------------------------------------------------------------------------

    def _on_connected(self) -> None:
        self.session.publish(self.topics.up(self.config.name, "status"), _status(True), retain=True)
        if self._joined is None:
            self._enter(AgentState.WAITING)
        else:
            self._load()

    def _on_message(self, topic: str, payload: bytes) -> None:
        parsed = self.topics.parse(topic)
        if parsed is None:
            return
        _, target, kind, index = parsed
        try:
            message = self._assembler.feed(f"{target}/{kind}", index, payload)
            if message is None:
                return
            if kind == "manifest":
                self._on_manifest(message)
            elif kind.startswith("file/"):
                self._on_file(kind.removeprefix("file/"), message)
            elif kind == "shared":
                self._on_shared(message)
            elif kind == "call":
                unpack(message, Kind.CALL)
                self._hello()
            elif kind == "order":
                self._on_order(message)
        except MessageError as error:
            log.warning("%s: a message on %s is refused: %s", self.config.name, topic, error)

    def _on_manifest(self, data: bytes) -> None:
        message = unpack(data, Kind.MANIFEST)
        run = field_of(message, H.RUN, bytes)
        manifest = field_of(message, H.DATA, dict)
        if field_of(message, H.SCALARS, dict, {}).get("finished"):
            if self._joined is not None and self._joined.run == run and self._joined.finished:
                self._end()
            return
        if self._joined is not None and self._joined.run == run:
            return
        try:
            client = client_from_manifest(manifest)
            task = client.task
            files = {str(name): dict(entry) for name, entry in manifest["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MessageError(f"The federation's manifest is malformed ({type(error).__name__}: {error}).") from error
        try:
            self.data.check(task, f"The data of device {self.config.name}")
        except DataError as error:
            self._say_hello(run, error=str(error))
            self.session.flush()
            raise
        self._joined = Joined(run, manifest, files, task, client, Fleet([self.data], task))
        if self._shared_run != run:
            self._shared.clear()
        self._waiting = None
        self._joined.commit = self.store.last_commit(run)
        if self._joined.commit is not None:
            self._joined.state = self._joined.commit.state
        self._load()

    def _on_file(self, sha256: str, data: bytes) -> None:
        # Files may come before the manifest that names them.
        wanted = self._joined is None or any(sha256 in names.values() for names in self._joined.files.values())
        if wanted and len(sha256) == 64 and not self.store.has_file(sha256):
            message = unpack(data, Kind.FILE)
            self.store.put_file(sha256, field_of(message, H.DATA, bytes))
        if self._joined is not None and self._joined.engine is None:
            self._load()

    def _load(self) -> None:
        """Open the engine once all files are here, and say hello."""
        joined = self._joined
        assert joined is not None
        if joined.engine is None:
            self._enter(AgentState.LOADING)
            missing = [sha for names in joined.files.values() for sha in names.values() if not self.store.has_file(sha)]
            if missing:
                return
            graphs = {task: self.store.graphs(task, names) for task, names in joined.files.items()}
            joined.engine = open_engine(joined.manifest["engine"], [joined.task], graphs)
        self._enter(AgentState.READY)
        self._hello()

    def _hello(self) -> None:
        if self._joined is not None and self._joined.engine is not None:
            self._say_hello(self._joined.run)

    def _say_hello(self, run: bytes, error: str | None = None) -> None:
        header: dict[int, Any] = {H.RUN: run, H.SCALARS: {"samples": self.data.train_count}}
        if error is not None:
            header[H.ERROR] = error
        self.session.publish(self.topics.up(self.config.name, "hello"), pack(Message(Kind.HELLO, header)))

    def _on_shared(self, data: bytes) -> None:
        run, number, tensors = unpack_shared(data)
        if self._joined is not None and run != self._joined.run:
            return
        # Retained messages come in any order: these tensors may be here before the manifest of their run.
        self._shared_run, self._shared = run, {number: tensors}
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._answer(*waiting)

    def _on_order(self, data: bytes) -> None:
        run, number, exchange, order = unpack_order(data)
        joined = self._joined
        if joined is None or joined.engine is None or run != joined.run:
            return  # an order of a run we are not in (yet); the gateway sends it again after our hello
        digest = hashlib.sha256(data).digest()
        commit = joined.commit
        if commit is not None:
            if exchange.number < commit.exchange:
                return
            if exchange.number == commit.exchange:
                if digest == commit.digest:
                    self._send(commit.report)
                    return
                joined.state = commit.before
        self._answer(number, exchange, order, digest)

    # --- work ---------------------------------------------------------------------------------------------

    def _answer(self, number: int, exchange: Exchange, order: Order, digest: bytes) -> None:
        """Compute, commit, send; or remember the order until its shared tensors are here."""
        joined = self._joined
        assert joined is not None and joined.engine is not None
        shared: dict[Key, Array] = {}
        if exchange.shared_number is not None:
            if exchange.shared_number not in self._shared:
                self._waiting = (number, exchange, order, digest)
                return
            shared = self._shared[exchange.shared_number]
        self._enter(AgentState.WORKING)
        exchange.orders = {self.config.name: order}
        started = time.perf_counter()
        try:
            report, state = self._compute(joined, joined.engine, number, exchange, order, shared)
        except (KeyError, ValueError, IndexError, FadeFedError) as error:
            log.warning("%s: exchange %d cannot be answered: %s", self.config.name, exchange.number, error)
            text = f"{type(error).__name__}: {error}"
            report, state = CodedReport(exchange.number, exchange.slot, number, (), error=text), joined.state
        packed = replace(report, run=joined.run).pack()
        commit = Commit(joined.run, exchange.number, digest, packed, joined.state, state)
        self.store.commit(commit)
        joined.commit, joined.state = commit, state
        self._send(packed)
        log.debug("%s: exchange %d in %.3f s", self.config.name, exchange.number, time.perf_counter() - started)
        self._enter(AgentState.READY)
        if exchange.phase == FINAL:
            joined.finished = True

    def _compute(
        self,
        joined: Joined,
        engine: Engine,
        number: int,
        exchange: Exchange,
        order: Order,
        shared: dict[Key, Array],
    ) -> tuple[CodedReport, State]:
        if exchange.phase == FINAL:
            params = joined.client.parameters(order, joined.state.get("method", {}))
            names = joined.files.get(joined.task.name, {})
            template = self.store.file(names[INT8]) if INT8 in names else None
            scalars = finish(self.store, joined.task, engine, params, joined.fleet, template)
            results = ", ".join(f"{name} {value:.4g}" for name, value in scalars.items() if not isinstance(value, str))
            log.info("%s: the personal model is in %s: %s", self.config.name, self.store.folder, results)
            return CodedReport(exchange.number, exchange.slot, number, (), scalars), joined.state
        call = Call(
            exchange=exchange,
            orders=[order],
            numbers=[number],
            shared=shared,
            fleet=joined.fleet,
            engine=engine,
            states=[joined.state],
            seed=int(joined.manifest["seed"]),
        )
        return answer(joined.client, call)[0]

    def _send(self, report: bytes) -> None:
        self.session.publish(self.topics.up(self.config.name, "report"), report)

    def _end(self) -> None:
        self._enter(AgentState.FINISHED)
        if self.config.stay:
            self._joined = None
            self._enter(AgentState.WAITING)
        else:
            self._done = True


def _status(online: bool) -> bytes:
    return pack(Message(Kind.STATUS, {H.SCALARS: {"online": online}}))
