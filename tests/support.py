"""Helpers for tests that run whole federations."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from aggregator import Aggregator
from fadefed.config import TomlFile
from fadefed.demo.processes import Processes
from fadefed.federation import Federation, device_name
from fadefed.mqtt import BrokerAddress
from fadefed.simulation import Simulation
from fadefed.tasks import save_npz

FADING = 'model = "outage"\nsnr_db = 3.0\nbandwidth_hz = 84833.3'


def federation_text(
    method: str = "mtfeel",
    *,
    rounds: int = 3,
    devices: int = 4,
    seed: int = 0,
    options: str = "",
    channel: str = FADING,
    data: str = "",
    more: str = "",
) -> str:
    return (
        f'[federation]\nmethod = "{method}"\nrounds = {rounds}\ndevices = {devices}\nseed = {seed}\n'
        f"evaluate_every = 5\n{more}\n[method]\n{options}\n[data]\n{data}\n[channel]\n{channel}\n"
    )


def federation(method: str = "mtfeel", **settings: Any) -> Federation:
    return Federation.from_file(TomlFile.parse(federation_text(method, **settings), "test.toml"))


class Lab:
    """A broker, a channel and clients as processes, and an aggregator in this one."""

    def __init__(
        self, processes: Processes, fed: Federation, graphs: Path, client_via: BrokerAddress | None = None
    ) -> None:
        self.processes, self.fed, self.graphs = processes, fed, graphs
        self.folder = processes.folder
        self.broker, _ = processes.broker()
        self.toml = self.folder / "federation.toml"
        self.toml.write_text(fed.file.text)
        self.gateway = processes.channel(self.toml, self.broker)
        self.datasets = fed.deal()

    def start_client(self, number: int, *options: str, broker: BrokerAddress | None = None) -> Any:
        name = device_name(number)
        path = self.folder / f"{name}.npz"
        save_npz(path, self.datasets[number])
        return self.processes.client(name, path, broker or self.broker, *options)

    def start_clients(self, *options: str) -> None:
        for number in range(len(self.datasets)):
            self.start_client(number, *options)

    def aggregator(
        self, progress: Callable[[dict[str, Any]], None] | None = None, broker: BrokerAddress | None = None
    ) -> Aggregator:
        files = {path.name: path for path in sorted(self.graphs.iterdir()) if path.name != "vjp.onnx"}
        return Aggregator(self.fed, self.folder / "run", files, broker or self.gateway, progress)


@contextlib.contextmanager
def lab(folder: Path, fed: Federation, graphs: Path) -> Iterator[Lab]:
    with Processes(folder) as processes:
        yield Lab(processes, fed, graphs)


@contextlib.contextmanager
def running(aggregator: Aggregator) -> Iterator[dict[str, Any]]:
    """Run `aggregator` in a thread; the dict gets `summary`, or `error`, when it has ended."""
    result: dict[str, Any] = {}

    def work() -> None:
        try:
            result["summary"] = aggregator.run()
        except Exception as error:
            result["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    result["thread"] = thread
    try:
        yield result
    finally:
        aggregator.stop()
        thread.join(30)


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The first true value of `condition()`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not true within {timeout_s} s: {condition}")


def final_models(aggregator: Aggregator) -> np.ndarray:
    return np.stack(
        [np.asarray(aggregator.server.parameters_for(name)) for name in sorted(aggregator.checkpoint.roster)]
    )


def simulated_models(fed: Federation, graphs: Path) -> np.ndarray:
    return Simulation(fed, mode="reference", engine="onnx", graphs=graphs).run().parameters
