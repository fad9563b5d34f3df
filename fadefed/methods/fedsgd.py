"""FedSGD: full-precision gradients, averaged (McMahan et al., AISTATS 2017, the E = 1, B = inf case of FedAvg)."""

from dataclasses import dataclass
from typing import Literal

from fadefed.messages import Access, Array, Report, SignalSpec
from fadefed.methods.method import Call, MethodClient, State
from fadefed.methods.one_model import OneModelServer, weighted_sum


@dataclass(frozen=True)
class Config:
    """learning_rate: eta. codec: of the gradients. on_outage: `drop` lost terms, or `renorm` by what arrived."""

    learning_rate: float = 0.3
    codec: Literal["float32", "float16", "int8", "float64"] = "float32"
    access: Access = "digital"
    on_outage: Literal["drop", "renorm"] = "drop"


class Server(OneModelServer):
    """w <- w - eta sum_m (n_m / n) grad_m (mtfeel spec 3.6)."""

    signal = "gradient"

    def spec(self) -> SignalSpec:
        return SignalSpec(self.settings.options.codec, self.settings.options.access)

    def step(self, updates: list[Array], weights: Array, total: float) -> None:
        scale = total if self.settings.options.on_outage == "drop" else weights.sum()
        direction = weighted_sum(updates, weights / scale)
        self.w = (self.w - self.settings.options.learning_rate * direction).astype(self.w.dtype)


class Client(MethodClient):
    """The gradient of the mean loss on all training examples."""

    signal = "gradient"

    def respond(self, call: Call) -> list[tuple[Report, State]]:
        model = call.shared[self.task.name, "model"]
        losses, gradients = call.engine.loss_and_gradient(self.task.name, model[None, None], call.fleet.train)
        measured = self.evaluation(call, model[None])
        return [
            (
                Report(
                    {(self.task.name, self.signal): gradients[b, 0]},
                    {"train_loss": float(losses[b, 0]), **measured[b]},
                ),
                {},
            )
            for b in range(len(call.orders))
        ]
