"""The NumPy engine: dense stacks forward and backward, batched over devices and models, in any float dtype."""

from collections.abc import Iterator

import numpy as np

from fadefed.learning.task import Batch, Task, find_task, logit_gradient, mean_losses
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
        _backward(spec, _only_weights(spec, params), activations, delta, gradient)
        return losses, gradient

    def chosen_gradients(self, task: str, params: Array, batch: Batch, chosen: Array) -> Iterator[Array]:
        spec = find_task(self.tasks, task)
        # One forward pass of all models on the whole fleet: one large matrix product beats many small ones.
        activations = _forward(spec, params[None], batch.x)
        _, delta = logit_gradient(spec, activations[-1], batch)
        weights = _only_weights(spec, params[None])
        buffer = np.empty((1, int(chosen.sum(axis=1).max(initial=0)), spec.layout.size), dtype=params.dtype)
        for b, mask in enumerate(chosen):
            rows = np.flatnonzero(mask)
            own = [activations[0][b : b + 1], *(layer[b : b + 1, rows] for layer in activations[1:])]
            # The first layer's weights take no part in its own gradient; copying them would cost the most.
            own_weights = [weights[0], *(weight[:, rows] for weight in weights[1:])]
            gradient = buffer[:, : len(rows)]
            _backward(spec, own_weights, own, delta[b : b + 1, rows], gradient)
            yield gradient[0]

    def predict(self, task: str, params: Array, x: Array) -> Array:
        spec = find_task(self.tasks, task)
        return np.asarray(_forward(spec, params[None], x[None])[-1][0])

    def vjp(self, task: str, params: Array, x: Array, output_cotangent: Array) -> tuple[Array, Array]:
        spec = find_task(self.tasks, task)
        flat = params[None, None]
        activations = _forward(spec, flat, x[None])
        gradient = np.empty((1, 1, spec.layout.size), dtype=params.dtype)
        delta = output_cotangent[None, None].astype(params.dtype)
        x_cotangent = _backward(spec, _only_weights(spec, flat), activations, delta, gradient, to_input=True)
        assert x_cotangent is not None
        return gradient[0, 0], x_cotangent[0, 0].reshape(x.shape)


def _weights(task: Task, params: Array) -> list[tuple[Array, Array]]:
    """(weight [B, M, out, in], bias [B, M, out]) of each layer: views of params [B, M, d]."""
    parts = list(task.layout.split(params).values())
    return list(zip(parts[::2], parts[1::2], strict=True))


def _only_weights(task: Task, params: Array) -> list[Array]:
    return [weight for weight, _ in _weights(task, params)]


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
    weights: list[Array],
    activations: list[Array],
    delta: Array,
    gradient: Array,
    *,
    to_input: bool = False,
) -> Array | None:
    """Backpropagate delta [B, M, n, C] into gradient [B, M, d], in place; the input's cotangent where asked.

    weights: of each layer [B or 1, M, out, in].
    """
    slots = _weights(task, gradient)
    for i in reversed(range(len(slots))):
        weight_gradient, bias_gradient = slots[i]
        inputs = activations[i][:, None] if i == 0 else activations[i]
        np.matmul(delta.swapaxes(2, 3), inputs, out=weight_gradient)
        delta.sum(axis=2, out=bias_gradient)
        if i == 0 and not to_input:
            return None
        delta = np.matmul(delta, weights[i])
        if i:
            delta *= activations[i] > 0
    return delta
