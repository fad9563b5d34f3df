"""A federation's TOML file: one campaign with its method, task, data and channel; and what both runtimes do with it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from fadefed.config import TomlFile, fill
from fadefed.errors import ConfigError
from fadefed.learning import EngineName, Loss, Task
from fadefed.messages import Exchange, Order, Reception
from fadefed.methods import Method, find_method
from fadefed.methods.method import MethodClient, MethodServer, Settings
from fadefed.streams import stream
from fadefed.tasks import Dataset
from fadefed.tasks.sources import POOLS
from fadefed.tasks.splits import SPLITS

FINAL = "final"


@dataclass(frozen=True)
class FederationConfig:
    """The table [federation].

    devices: how many must have joined before the first exchange. engine: what the boards compute with.
    deadline_s: how long the gateway waits for the reports of an exchange; what comes later is an outage.
    evaluate_every: devices measure accuracy in every so many rounds.
    """

    name: str = "federation"
    method: str = "mtfeel"
    rounds: int = 300
    devices: int = 10
    seed: int = 0
    engine: EngineName = "onnx"
    deadline_s: float = 60.0
    evaluate_every: int = 10

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.devices < 1 or self.evaluate_every < 1:
            raise ConfigError("rounds, devices and evaluate_every must be at least 1.")
        if self.deadline_s <= 0:
            raise ConfigError("deadline_s must be above 0.")


@dataclass(frozen=True)
class TaskConfig:
    """The table [task]: a stack of dense layers. layers: widths from input to output. mix: of the bounded loss."""

    name: str = "mnist"
    layers: tuple[int, ...] = (784, 32, 10)
    loss: Literal["cross-entropy"] = "cross-entropy"
    mix: float = 0.1
    dtype: Literal["float32", "float64"] = "float32"


@dataclass(frozen=True)
class DataConfig:
    """The table [data]: how the simulator and the demo deal a pool of real data out to devices. Boards bring their own."""

    pool: Literal["mnist"] = "mnist"
    split: Literal["cohorts", "homogeneous"] = "cohorts"
    train: int = 20
    test: int = 80

    def __post_init__(self) -> None:
        if self.train < 1 or self.test < 0:
            raise ConfigError("train must be at least 1 and test at least 0.")


@dataclass(frozen=True)
class BrokerConfig:
    """The table [broker]: where the aggregator connects; with a channel emulator, the emulator's address.

    ca: CA certificate file that signs the broker's; its presence turns TLS on. prefix: of all topics.
    """

    host: str = "127.0.0.1"
    port: int = 1883
    username: str | None = None
    password: str | None = None
    ca: str | None = None
    prefix: str = "fadefed"
    keepalive_s: int = 30


@dataclass(frozen=True)
class Federation:
    """A federation as read from its file."""

    config: FederationConfig
    task: Task
    data: DataConfig
    method: Method
    options: Any
    broker: BrokerConfig
    file: TomlFile
    method_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> "Federation":
        """Read and check a federation file. Raises ConfigError naming file, line and mistake."""
        return cls.from_file(TomlFile.read(path))

    @classmethod
    def from_file(cls, file: TomlFile) -> "Federation":
        file.only("federation", "method", "task", "data", "channel", "broker")
        config = file.table("federation", FederationConfig, required=True)
        try:
            method = find_method(config.method)
        except ConfigError as error:
            raise ConfigError(f"{file.where('federation', 'method')}: {error}") from error
        options = file.table("method", method.config)
        task_config = file.table("task", TaskConfig)
        try:
            loss = Loss(task_config.loss, task_config.mix)
            task = Task(task_config.name, tuple(task_config.layers), loss, task_config.dtype)
        except ConfigError as error:
            raise ConfigError(f"{file.where('task')}: {error}") from error
        return cls(
            config,
            task,
            file.table("data", DataConfig),
            method,
            options,
            file.table("broker", BrokerConfig),
            file,
            dict(file.tables.get("method", {})),
        )

    def server(self) -> MethodServer:
        """The method's gateway half."""
        config = self.config
        return self.method.server(
            Settings((self.task,), config.rounds, config.seed, self.options, config.evaluate_every)
        )

    def client(self) -> MethodClient:
        """The method's board half."""
        return self.method.client([self.task], self.options)

    def manifest(self) -> dict[str, Any]:
        """What boards must know of this federation, as plain values (without the task's graphs)."""
        config = self.config
        return {
            "name": config.name,
            "method": config.method,
            "options": self.method_options,
            "seed": config.seed,
            "engine": config.engine,
            "tasks": [self.task.manifest()],
        }

    def deal(self) -> list[Dataset]:
        """The pool of real data, dealt out to `devices` devices by the stream (seed, "data")."""
        x, y = POOLS[self.data.pool]()
        rng = stream(self.config.seed, "data")
        return SPLITS[self.data.split](x, y, self.config.devices, self.data.train, self.data.test, rng)


def client_from_manifest(manifest: dict[str, Any]) -> MethodClient:
    """A board's client half from what `Federation.manifest` gave."""
    method = find_method(str(manifest["method"]))
    options = fill(method.config, dict(manifest["options"]), lambda key: f"the gateway's method option {key}")
    return method.client([Task.from_manifest(task) for task in manifest["tasks"]], options)


def device_name(number: int) -> str:
    """The name of simulated or demo device `number`; names sort as numbers do."""
    return f"device-{number:03d}"


def final_exchange(server: MethodServer, task: Task, roster: list[str]) -> Exchange:
    """The last exchange: each device gets the parameters it will run (unless only it knows them) and evaluates them."""
    orders = {}
    for name in roster:
        params = server.parameters_for(name)
        tensors = {(task.name, "parameters"): params} if params is not None else {}
        orders[name] = Order(tensors, {"evaluate": True})
    return Exchange(server.round, FINAL, server.round, orders, {})


class Metrics:
    """`metrics.jsonl`: one line per exchange, plain numbers only."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.rows: list[dict[str, Any]] = []

    def add(self, exchange: Exchange, reception: Reception, metrics: dict[str, Any]) -> dict[str, Any]:
        """Append what is known of one exchange; the row."""
        row: dict[str, Any] = {
            "exchange": exchange.number,
            "round": exchange.round,
            "phase": exchange.phase,
            "asked": len(exchange.orders),
            "reported": len(reception.reports),
            "erased": len(reception.erased),
            "signals": sum(map(len, reception.reports.values())) + len(reception.erased),
            "uplink_bytes": sum(reception.uplink_bytes.values()),
        }
        outages: dict[str, int] = {}
        for device, _ in reception.erased:
            outages[device] = outages.get(device, 0) + 1
        if outages:
            row["outages"] = dict(sorted(outages.items()))
        if reception.absent:
            row["absent"] = sorted(reception.absent)
        if reception.late:
            row["late"] = sorted(reception.late)
        if reception.refused:
            row["refused"] = reception.refused
        row |= {name: _plain(value) for name, value in metrics.items()}
        self.rows.append(row)
        if self._stream is not None:
            self._stream.write(json.dumps(row) + "\n")
            self._stream.flush()
        return row


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
