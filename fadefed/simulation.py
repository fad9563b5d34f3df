"""The simulator: a whole federation in one process, without a broker.

Two modes. `reference`: the federation's own engine, one device at a time; an MQTT run with the same seed gives the
same parameters, bit for bit. `fast`: the whole fleet as one batch; it agrees with the reference
exchange by exchange to 1e-5, and on every sign where |g| > 1e-6.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
from threadpoolctl import threadpool_limits

from channel_emu import Channel, LinkConfig
from fadefed.federation import Federation, Metrics, device_name, final_exchange
from fadefed.learning import Engine, EngineName, Task, open_engine
from fadefed.messages import Array, Exchange, Order
from fadefed.messages.wire import CodedReport
from fadefed.methods.method import Call, Device, MethodClient, MethodServer, State, answer, evaluate
from fadefed.tasks import Dataset, Fleet

Progress = Callable[[dict[str, Any]], None]


@dataclass
class Result:
    """What a run gave: each device's final parameters [N, d] and accuracies [N], and the metrics of every exchange."""

    parameters: Array
    test_accuracy: Array
    train_accuracy: Array
    rows: list[dict[str, Any]]
    server: MethodServer

    def summary(self) -> dict[str, Any]:
        """What summary.json holds: means over devices, and each device's accuracies."""
        pairs = zip(self.test_accuracy, self.train_accuracy, strict=True)
        return {
            "mean": {
                "test_accuracy": float(np.nanmean(self.test_accuracy)),
                "train_accuracy": float(self.train_accuracy.mean()),
            },
            "devices": {
                device_name(i): {"test_accuracy": float(test), "train_accuracy": float(train)}
                for i, (test, train) in enumerate(pairs)
            },
        }


class Simulation:
    """A federation over `datasets` (by default the federation's own), ready to run."""

    def __init__(
        self,
        federation: Federation,
        *,
        mode: Literal["reference", "fast"] = "fast",
        engine: EngineName | Engine | None = None,
        datasets: list[Dataset] | None = None,
        graphs: Path | None = None,
        link: LinkConfig | None = None,
    ) -> None:
        """engine: by default the federation's in reference mode, `fast_engine()` in fast mode.

        graphs: the folder with the task's ONNX graphs, for the ONNX engine.
        """
        self.federation = federation
        self.mode = mode
        self.datasets = datasets if datasets is not None else federation.deal()
        name = engine or (federation.config.engine if mode == "reference" else fast_engine())
        if isinstance(name, str):
            self.engine = open_engine(name, [federation.task], {federation.task.name: graphs} if graphs else {})
        else:
            self.engine = name
        self.fleet = Fleet(self.datasets, federation.task)
        self.devices = {
            device_name(i): Device(device_name(i), i, data.train_count) for i, data in enumerate(self.datasets)
        }
        self.channel = Channel(link if link is not None else LinkConfig.read(federation.file))
        self.server = federation.server()
        self.client: MethodClient = federation.client()
        self.states: list[State] = [{} for _ in self.datasets]
        self.exchanges = 0
        for device in self.devices.values():
            self.server.joined(device)

    def run(self, metrics: TextIO | None = None, progress: Progress | None = None) -> Result:
        """All exchanges to the end, then each device's final model, evaluated on its own data."""
        # One thread in reference mode: matrix products then repeat to the bit.
        with threadpool_limits(limits=1 if self.mode == "reference" else None):
            log = Metrics(metrics)
            for exchange in iter(self.next_exchange, None):
                reports = self.answer(exchange)
                reception = self.channel.carry(exchange, reports)
                row = log.add(exchange, reception, self.server.absorb(exchange, reception))
                if progress is not None:
                    progress(row)
            return self._finish(log)

    def next_exchange(self) -> Exchange | None:
        """The server's next exchange, numbered; None at the end."""
        exchange = self.server.next(self.devices)
        if exchange is not None:
            self.exchanges += 1
            exchange.number = self.exchanges
        return exchange

    def answer(self, exchange: Exchange) -> dict[str, CodedReport]:
        """Every asked device's coded report; devices' states move on."""
        asked = [self.devices[name] for name in exchange.orders]
        if self.mode == "reference" or len(asked) <= 1:
            groups = [[device] for device in asked]
        else:
            groups = [asked]
        reports: dict[str, CodedReport] = {}
        for group in groups:
            numbers = [device.number for device in group]
            call = Call(
                exchange=exchange,
                orders=[exchange.orders[device.name] for device in group],
                numbers=numbers,
                shared=exchange.shared,
                fleet=self._fleet(numbers),
                engine=self.engine,
                states=[self.states[number] for number in numbers],
                seed=self.federation.config.seed,
            )
            for device, (report, state) in zip(group, answer(self.client, call), strict=True):
                reports[device.name] = report
                self.states[device.number] = state
        return reports

    def _fleet(self, numbers: list[int]) -> Fleet:
        if len(numbers) == len(self.datasets):
            return self.fleet
        if len(numbers) == 1:
            return self.fleet.device(numbers[0])
        return Fleet([self.datasets[number] for number in numbers], self.federation.task)

    def _finish(self, log: Metrics) -> Result:
        task = self.federation.task
        final = final_exchange(self.server, task, list(self.devices))
        parameters, test, train = [], [], []
        for name, device in self.devices.items():
            order: Order = final.orders[name]
            own = self.client.parameters(order, self.states[device.number].get("method", {}))
            measured = evaluate(task, self.engine, own, self.fleet.device(device.number))
            parameters.append(own)
            test.append(float(measured.get("test_accuracy", np.nan)))
            train.append(float(measured["train_accuracy"]))
        return Result(np.stack(parameters), np.array(test), np.array(train), log.rows, self.server)


@contextmanager
def temporary_graphs(task: Task) -> Iterator[Path]:
    """A folder with the task's ONNX graphs, for as long as the context lasts. Needs torch."""
    from fadefed.learning.export import export_task

    with tempfile.TemporaryDirectory() as folder:
        export_task(task, Path(folder))
        yield Path(folder)


def fast_engine() -> EngineName:
    """What the fast mode computes with: torch where there is a GPU, else NumPy, which measures faster on dense stacks."""
    return "torch" if shutil.which("nvidia-smi") else "numpy"
