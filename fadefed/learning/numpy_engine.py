"""The NumPy engine: dense stacks forward and backward, batched over devices and models, in any float dtype."""

import numpy as np

from fadefed.learning.engine import find_task
from fadefed.learning.task import Batch, Task, logit_gradient, mean_losses
from fadefed.messages import Array


class NumpyEngine:
    """Engine in NumPy alone. The reference for the others, and the choice for float64."""

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks = {task.name: task for task in tasks}

    def losses(self, task: str, params: Array, batch: Batch) -> Array:
        spec = find_task(self.tasks, task)
        return mean_losses(spec, _forward(spec, params, batch.x)[-1], batch)

    def loss_and_gradient(self, task: str, params: Array, batch: Batch) -> tuple[Array, Array]:
        spec = find_task(self.tasks, task)
        activations = _forward(spec, params, batch.x)
        losses, delta = logit_gradient(spec, activations[-1], batch)
        gradient = np.empty((len(batch.x), params.shape[1], spec.layout.size), dtype=params.dtype)
        _backward(spec, params, activations, delta, gradient)
        return losses, gradient

    def chosen_gradients(self, task: str, params: Array, batch: Batch, chosen: Array) -> list[Array]:
        spec = find_task(self.tasks, task)
        # One forward pass of all models on the whole fleet: one large matrix product beats many small ones.
        activations = _forward(spec, params[None], batch.x)
        _, delta = logit_gradient(spec, activations[-1], batch)
        gradients = []
        for b, rows in enumerate(chosen):
            own = [activations[0][b : b + 1], *(layer[b : b + 1, rows] for layer in activations[1:])]
            gradient = np.empty((1, int(rows.sum()), spec.layout.size), dtype=params.dtype)
            _backward(
                spec,
                params[None, rows] if len(spec.layers) > 2 else params[None],
                own,
                delta[b : b + 1, rows],
                gradient,
            )
            gradients.append(gradient[0])
        return gradients

    def predict(self, task: str, params: Array, x: Array) -> Array:
        spec = find_task(self.tasks, task)
        return np.asarray(_forward(spec, params[None], x[None])[-1][0])

    def vjp(self, task: str, params: Array, x: Array, output_cotangent: Array) -> tuple[Array, Array]:
        spec = find_task(self.tasks, task)
        flat = params[None, None]
        activations = _forward(spec, flat, x[None])
        gradient = np.empty((1, 1, spec.layout.size), dtype=params.dtype)
        delta = output_cotangent[None, None].astype(params.dtype)
        x_cotangent = _backward(spec, flat, activations, delta, gradient, to_input=True)
        assert x_cotangent is not None
        return gradient[0, 0], x_cotangent[0, 0].reshape(x.shape)


def _weights(task: Task, params: Array) -> list[tuple[Array, Array]]:
    """(weight [B, M, out, in], bias [B, M, out]) of each layer: views of params [B, M, d]."""
    parts = list(task.layout.split(params).values())
    return list(zip(parts[::2], parts[1::2], strict=True))


def _forward(task: Task, params: Array, x: Array) -> list[Array]:
    """Activations: the input [B, n, in], then each layer's output [B, M, n, out] (after ReLU, but for the last)."""
    fleet, examples = x.shape[:2]
    x = x.reshape(fleet, examples, -1).astype(params.dtype, copy=False)
    models = params.shape[1]
    activations = [x]
    layers = _weights(task, params)
    for i, (weight, bias) in enumerate(layers):
        outputs, inputs = weight.shape[2:]
        if i == 0 and len(params) == 1:
            # The same models on every device: one matrix product [B n, in] x [in, M out] for the whole fleet.
            joined = x.reshape(fleet * examples, inputs) @ weight.reshape(models * outputs, inputs).T
            z = np.ascontiguousarray(joined.reshape(fleet, examples, models, outputs).transpose(0, 2, 1, 3))
        elif i == 0:
            z = np.matmul(x[:, None], weight.swapaxes(2, 3))
        else:
            z = np.matmul(activations[-1], weight.swapaxes(2, 3))
        z += bias[:, :, None, :]
        if i + 1 < len(layers):
            np.maximum(z, 0, out=z)
        activations.append(z)
    return activations


def _backward(
    task: Task,
    params: Array,
    activations: list[Array],
    delta: Array,
    gradient: Array,
    *,
    to_input: bool = False,
) -> Array | None:
    """Backpropagate delta [B, M, n, C] into gradient [B, M, d], in place; the input's cotangent where asked."""
    slots = _weights(task, gradient)
    for i in reversed(range(len(slots))):
        weight, bias = slots[i]
        inputs = activations[i][:, None] if i == 0 else activations[i]
        np.matmul(delta.swapaxes(2, 3), inputs, out=weight)
        delta.sum(axis=2, out=bias)
        if i == 0 and not to_input:
            return None
        delta = np.matmul(delta, _weights(task, params)[i][0])
        if i:
            delta *= activations[i] > 0
    return delta
