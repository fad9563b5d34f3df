"""The torch engine: torch.func over flat parameters, batched over devices and models."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.func import grad_and_value, vjp, vmap

from fadefed.learning.engine import gradients_one_by_one
from fadefed.learning.task import Batch, Task, find_task, mean_losses
from fadefed.messages import Array

Function = Callable[..., Any]


def forward_function(task: Task) -> Function:
    """f(params [d], x [n, in]) -> outputs [n, C]: what every torch computation and exported graph starts from."""
    layout = task.layout

    def forward(params: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        # One split instead of slices: a slice's backward leaves index constants in an exported graph.
        parts = torch.split(params, list(layout.sizes))
        for i in range(0, len(parts), 2):
            x = x @ parts[i].view(layout.shapes[i]).T + parts[i + 1]
            if i + 2 < len(parts):
                x = torch.relu(x)
        return x

    return forward


def loss_function(task: Task) -> Function:
    """f(params [d], x [n, in], y [n], weight [n]) -> the weighted mean loss (mtfeel spec 3.2)."""
    forward = forward_function(task)
    mix, classes = task.loss.mix, task.classes

    def loss(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        log_softmax = F.log_softmax(forward(params, x), -1)
        # Labels are compared with arange: one_hot and gather trace values that an exporter cannot follow.
        onehot = (torch.arange(classes, device=y.device) == y[:, None]).to(log_softmax.dtype)
        picked = (log_softmax * onehot).sum(-1)
        losses = -torch.log((1 - mix) * picked.exp() + mix / classes) if mix else -picked
        return (losses * weight).sum() / weight.sum()

    return loss


def gradient_function(task: Task) -> Function:
    """f(params [M, d], x, y, weight) -> (losses [M], gradients [M, d])."""
    step = vmap(grad_and_value(loss_function(task)), in_dims=(0, None, None, None))

    def gradient(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Any:
        gradients, losses = step(params, x, y, weight)
        return losses, gradients

    return gradient


class TorchEngine:
    """Engine on torch, on a GPU where there is one and `device` is left to default."""

    def __init__(self, tasks: list[Task], device: str | None = None) -> None:
        self.tasks = {task.name: task for task in tasks}
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._gradient = {task.name: gradient_function(task) for task in tasks}
        self._loss = {task.name: vmap(loss_function(task), in_dims=(0, None, None, None)) for task in tasks}
        self._forward = {task.name: forward_function(task) for task in tasks}

    def losses(self, task: str, params: Array, batch: Batch) -> Array:
        if len(params) > 1:
            return self._numpy(self._over_fleet(task, self._loss, params, batch))
        # The same models everywhere: one pass over the whole fleet's examples, then each device's mean.
        fleet, examples = batch.y.shape
        outputs = self.predict(task, params[0], batch.x.reshape(fleet * examples, -1))
        return mean_losses(
            self.tasks[task], outputs.reshape(-1, fleet, examples, outputs.shape[-1]).swapaxes(0, 1), batch
        )

    def loss_and_gradient(self, task: str, params: Array, batch: Batch) -> tuple[Array, Array]:
        losses, gradients = self._over_fleet(task, self._gradient, params, batch)
        return self._numpy(losses), self._numpy(gradients)

    def chosen_gradients(self, task: str, params: Array, batch: Batch, chosen: Array) -> Iterator[Array]:
        return gradients_one_by_one(self, task, params, batch, chosen)

    def predict(self, task: str, params: Array, x: Array) -> Array:
        find_task(self.tasks, task)
        flat = self._tensor(params)
        with torch.no_grad():
            return self._numpy(vmap(self._forward[task], in_dims=(0, None))(flat, self._inputs(x, flat.dtype)))

    def vjp(self, task: str, params: Array, x: Array, output_cotangent: Array) -> tuple[Array, Array]:
        find_task(self.tasks, task)
        flat = self._tensor(params)
        pull: Function
        _, pull = vjp(self._forward[task], flat, self._inputs(x, flat.dtype))  # type: ignore[misc]
        params_cotangent, x_cotangent = pull(self._tensor(output_cotangent).to(flat.dtype))
        return self._numpy(params_cotangent), self._numpy(x_cotangent).reshape(x.shape)

    def _over_fleet(self, task: str, functions: dict[str, Function], params: Array, batch: Batch) -> Any:
        find_task(self.tasks, task)
        flat = self._tensor(params)
        arguments = (
            self._inputs(batch.x, flat.dtype, fleet=True),
            self._tensor(batch.y),
            self._tensor(batch.weight).to(flat.dtype),
        )
        with torch.no_grad():
            if len(batch.x) == 1:
                result = functions[task](flat[0], *(argument[0] for argument in arguments))
                return tuple(r[None] for r in result) if isinstance(result, tuple) else result[None]
            shared = len(flat) == 1
            over_fleet = vmap(functions[task], in_dims=(None if shared else 0, 0, 0, 0))
            return over_fleet(flat[0] if shared else flat, *arguments)

    def _inputs(self, x: Array, dtype: torch.dtype, *, fleet: bool = False) -> torch.Tensor:
        return self._tensor(x.reshape(*x.shape[: 2 if fleet else 1], -1)).to(dtype)

    def _tensor(self, array: Array) -> torch.Tensor:
        if not array.flags.writeable or not array.flags.c_contiguous:
            array = np.array(array)
        return torch.from_numpy(array).to(self.device)

    @staticmethod
    def _numpy(tensor: torch.Tensor) -> Array:
        return np.asarray(tensor.detach().cpu().numpy())
