"""What FedAvg, FedSGD and sign-SGD share: one model, one exchange per round, a weighted sum of what arrives."""

from abc import abstractmethod
from typing import Any

import numpy as np

from fadefed.messages import Array, Exchange, Key, Reception, SignalSpec
from fadefed.methods.method import Device, MethodServer, Roster, Settings, State, mean_metrics


class OneModelServer(MethodServer):
    """A server with one model w [d] of the first task, broadcast each round under the name "model"."""

    signal = "update"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.task = settings.tasks[0]
        self.w = settings.initial(self.task)
        self.samples: dict[str, int] = {}

    @abstractmethod
    def spec(self) -> SignalSpec:
        """Codec and access of the devices' signal."""

    @abstractmethod
    def step(self, updates: list[Array], weights: Array, total: float) -> None:
        """Move w, given what arrived: updates, their sample counts, and the sample count of all devices."""

    @property
    def key(self) -> Key:
        return (self.task.name, self.signal)

    def joined(self, device: Device) -> None:
        self.samples[device.name] = device.samples

    def next(self, roster: Roster) -> Exchange | None:
        self.round += 1
        if self.round > self.settings.rounds:
            return None
        return self.exchange("train", roster, {self.key: self.spec()}, shared={(self.task.name, "model"): self.w})

    def absorb(self, exchange: Exchange, reception: Reception) -> dict[str, Any]:
        arrived = [name for name in exchange.orders if reception.get(name, self.key) is not None]
        updates = [reception.reports[name][self.key] for name in arrived]
        if updates:
            weights = np.array([self.samples[name] for name in arrived], dtype=np.float64)
            self.step(updates, weights, float(sum(self.samples[name] for name in exchange.orders)))
        return mean_metrics(reception)

    def parameters_for(self, device: str) -> Array | None:
        return self.w

    def state(self) -> State:
        return super().state() | {"w": self.w, "samples": self.samples}


def weighted_sum(updates: list[Array], weights: Array) -> Array:
    """sum_m weights_m updates_m, float64, in the order given, so that it repeats to the bit."""
    total = np.zeros(updates[0].shape, dtype=np.float64)
    for update, weight in zip(updates, weights, strict=True):
        total += weight * update
    return total
