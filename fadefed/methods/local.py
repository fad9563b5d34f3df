"""Local: each device trains alone; only losses and accuracies are reported. The baseline without a radio."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fadefed.errors import DataError
from fadefed.messages import Array, Exchange, Order, Reception, Report
from fadefed.methods.method import Call, MethodClient, MethodServer, Roster, Settings, State, mean_metrics


@dataclass(frozen=True)
class Config:
    """learning_rate: eta. steps_per_round: full-batch gradient steps between two reports."""

    learning_rate: float = 0.3
    steps_per_round: int = 1


class Server(MethodServer):
    """Hands out the common initial parameters once, then only counts rounds."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.task = settings.tasks[0]
        self.w = settings.initial(self.task)

    def next(self, roster: Roster) -> Exchange | None:
        self.round += 1
        if self.round > self.settings.rounds:
            return None
        exchange = self.exchange("train", roster, {}, shared={(self.task.name, "model"): self.w})
        exchange.shared_number = 1  # the initial model of the first exchange serves all rounds
        return exchange

    def absorb(self, exchange: Exchange, reception: Reception) -> dict[str, Any]:
        return mean_metrics(reception)

    def parameters_for(self, device: str) -> Array | None:
        return None


class Client(MethodClient):
    """w_k <- w_k - eta grad L(w_k, S_k) (mtfeel spec 3.6)."""

    def respond(self, call: Call) -> list[tuple[Report, State]]:
        start = call.shared[self.task.name, "model"]
        results: list[tuple[Report, State]] = []
        own = [state.get("w", start) for state in call.states]
        for b, w in enumerate(own):
            batch = call.batch(b)
            scalars: dict[str, Any] = {}
            for _ in range(self.options.steps_per_round):
                losses, gradients = call.engine.loss_and_gradient(self.task.name, w[None, None], batch)
                scalars.setdefault("train_loss", float(losses[0, 0]))
                w = (w - self.options.learning_rate * gradients[0, 0]).astype(start.dtype)
            own[b] = w
            results.append((Report({}, scalars), {"w": w}))
        if any(order.scalars.get("evaluate") for order in call.orders):
            for b, (report, _) in enumerate(results):
                one = replace(call, orders=[call.orders[b]], fleet=call.fleet.device(b))
                report.scalars.update(self.evaluation(one, own[b][None])[0])
        return results

    def parameters(self, order: Order, state: State) -> Array:
        if "w" not in state:
            raise DataError("This device has not trained yet, so it has no model of its own.")
        return np.asarray(state["w"])
