"""sign-SGD: one bit per parameter up; the gateway takes the mean or the majority of the signs.

Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018 (majority vote);
the mean variant is mtfeel spec 3.6's SIGN-FEDSGD default.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fadefed.messages import Array, SignalSpec
from fadefed.methods import fedsgd
from fadefed.methods.one_model import OneModelServer, weighted_sum


@dataclass(frozen=True)
class Config:
    """learning_rate: eta. aggregate: weighted `mean` of signs, or the sign of their sum (`majority`).

    on_outage: `drop` lost terms from the mean (the step shrinks), or `renorm` by what arrived.
    """

    learning_rate: float = 0.01
    aggregate: Literal["mean", "majority"] = "mean"
    on_outage: Literal["drop", "renorm"] = "drop"
    ties: Literal["random", "plus"] = "random"


class Server(OneModelServer):
    """mean: w <- w - eta sum_m (n_m / n) s_m; majority: w <- w - eta sign(sum_m s_m)."""

    signal = "sign"

    def spec(self) -> SignalSpec:
        return SignalSpec("sign", "digital", self.settings.options.ties)

    def step(self, updates: list[Array], weights: Array, total: float) -> None:
        options = self.settings.options
        if options.aggregate == "majority":
            votes = np.zeros(self.w.shape, dtype=np.int32)
            for update in updates:
                votes += update
            direction = np.sign(votes)
        else:
            scale = total if options.on_outage == "drop" else weights.sum()
            direction = weighted_sum(updates, weights / scale)
        self.w = (self.w - options.learning_rate * direction).astype(self.w.dtype)


class Client(fedsgd.Client):
    """The sign of FedSGD's gradient: the same tensor, reported through a sign codec."""

    signal = "sign"
