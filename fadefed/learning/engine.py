"""The engine: the only door to autodiff. A method is NumPy over these calls."""

from collections.abc import Iterator
from typing import Protocol

from fadefed.learning.task import Batch, Task
from fadefed.messages import Array


class Engine(Protocol):
    """Evaluates losses, gradients and predictions for flat parameters.

    B is the fleet axis, M the models. `params` [B, M, d] may have B = 1: the same models for every device of
    the batch. All arrays are NumPy arrays of the task's dtype. Unknown tasks raise EngineError.
    """

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks this engine knows; a task's `layout` names the slices of the flat vector."""
        ...

    def losses(self, task: str, params: Array, batch: Batch) -> Array:
        """Mean losses [B, M] of params [B, M, d]: a forward pass only."""
        ...

    def loss_and_gradient(self, task: str, params: Array, batch: Batch) -> tuple[Array, Array]:
        """Mean losses [B, M] and their gradients [B, M, d]."""
        ...

    def chosen_gradients(self, task: str, params: Array, batch: Batch, chosen: Array) -> Iterator[Array]:
        """Gradients of some of the shared models params [M, d] only: device after device, [chosen[b].sum(), d].

        chosen: bool [B, M]. Saves the backward passes that nobody asked for. Each array is valid until the next one
        is taken: the buffer, which fits the processor's cache, is used again.
        """
        ...

    def predict(self, task: str, params: Array, x: Array) -> Array:
        """Outputs [M, n, C] of params [M, d] on x [n, ...]."""
        ...

    def vjp(self, task: str, params: Array, x: Array, output_cotangent: Array) -> tuple[Array, Array]:
        """params [d], x [n, ...], cotangent [n, C] -> cotangents of params [d] and of x [n, ...]."""
        ...


def gradients_one_by_one(engine: Engine, task: str, params: Array, batch: Batch, chosen: Array) -> Iterator[Array]:
    """`chosen_gradients` by one call of `loss_and_gradient` per device."""
    for b in range(len(batch.x)):
        yield engine.loss_and_gradient(task, params[None, chosen[b]], batch.device(b))[1][0]
