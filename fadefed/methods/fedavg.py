"""FedAvg: local epochs on each device, updates averaged (McMahan et al., AISTATS 2017, Algorithm 1).

Devices report their update (new minus old parameters), so that it can be compressed: `codec = "sign-feedback"`
sends one bit per parameter with error feedback (Karimireddy et al., ICML 2019).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fadefed.learning import Batch
from fadefed.messages import Access, Array, Report, SignalSpec
from fadefed.methods.method import Call, MethodClient, State
from fadefed.methods.one_model import OneModelServer, weighted_sum


@dataclass(frozen=True)
class Config:
    """epochs: local passes E. batch_size: examples per local step B, 0 for all. server_rate: 1 is plain averaging."""

    learning_rate: float = 0.3
    epochs: int = 5
    batch_size: int = 0
    server_rate: float = 1.0
    codec: Literal["float32", "float16", "int8", "sign-scale", "sign-feedback", "float64"] = "float32"
    access: Access = "digital"


class Server(OneModelServer):
    """w <- w + server_rate sum_m (n_m / n) (w_m - w), over the devices that arrived."""

    def spec(self) -> SignalSpec:
        return SignalSpec(self.settings.options.codec, self.settings.options.access)

    def step(self, updates: list[Array], weights: Array, total: float) -> None:
        direction = weighted_sum(updates, weights / weights.sum())
        self.w = (self.w + self.settings.options.server_rate * direction).astype(self.w.dtype)


class Client(MethodClient):
    """E epochs of SGD from the broadcast model; a fleet whose devices have equally many examples runs as one batch."""

    def respond(self, call: Call) -> list[tuple[Report, State]]:
        model = call.shared[self.task.name, "model"]
        counts = call.fleet.train_counts
        if (counts == counts[0]).all():
            fleet = [(list(range(len(call.orders))), call.fleet.train)]
        else:
            fleet = [([b], call.batch(b)) for b in range(len(call.orders))]
        measured = self.evaluation(call, model[None])
        results: list[tuple[Report, State]] = []
        for members, batch in fleet:
            local, first_losses = self._train(call, model, members, batch)
            for i, b in enumerate(members):
                scalars = {"train_loss": float(first_losses[i]), **measured[b]}
                results.append((Report({(self.task.name, "update"): local[i] - model}, scalars), {}))
        return results

    def _train(self, call: Call, model: Array, members: list[int], batch: Batch) -> tuple[Array, Array]:
        """Local parameters [B, d] after E epochs, and each device's mean loss over its first epoch [B]."""
        count = batch.y.shape[1]
        size = self.options.batch_size or count
        rngs = [call.rng(b, "batches") for b in members]
        local = np.repeat(model[None], len(members), axis=0)
        first: list[Array] = []
        for epoch in range(self.options.epochs):
            orders = np.stack([rng.permutation(count) if size < count else np.arange(count) for rng in rngs])
            for start in range(0, count, size):
                chosen = batch if size >= count else batch.rows(orders[:, start : start + size])
                losses, gradients = call.engine.loss_and_gradient(self.task.name, local[:, None], chosen)
                local = local - self.options.learning_rate * gradients[:, 0]
                if epoch == 0:
                    first.append(losses[:, 0])
        return local.astype(model.dtype), np.mean(first, axis=0)
