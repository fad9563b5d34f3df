"""Task: model, loss and schema, as the gateway ships it to boards; Batch: the examples an engine evaluates."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fadefed.errors import ConfigError, DataError, EngineError
from fadefed.learning.layout import Layout
from fadefed.messages import Array


@dataclass(frozen=True)
class Batch:
    """Examples over the fleet axis: x [B, n, *input_shape], y [B, n] integer labels, weight [B, n].

    Devices with fewer examples than n are padded with weight 0; a mean loss divides by the sum of weights.
    """

    x: Array
    y: Array
    weight: Array

    def device(self, b: int) -> "Batch":
        """The fleet of one that holds device b."""
        return Batch(self.x[b : b + 1], self.y[b : b + 1], self.weight[b : b + 1])

    def rows(self, index: Array) -> "Batch":
        """Examples index [B, m] of each device."""
        b = np.arange(len(self.x))[:, None]
        return Batch(self.x[b, index], self.y[b, index], self.weight[b, index])


@dataclass(frozen=True)
class Loss:
    """Cross-entropy with a bounded mix: l = -log((1 - mix) softmax_y + mix / C) (mtfeel spec 3.2).

    mix = 0 is plain cross-entropy, unbounded; with mix > 0 the loss is at most `bound` = log(C / mix).
    """

    kind: Literal["cross-entropy"] = "cross-entropy"
    mix: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.mix < 1:
            raise ConfigError(f"mix = {self.mix} must be at least 0 and less than 1; 0.1 bounds the loss by log(10 C).")

    def bound(self, classes: int) -> float:
        """The largest value the loss can take."""
        return math.log(classes / self.mix) if self.mix else math.inf


@dataclass(frozen=True)
class Task:
    """A model (a stack of dense layers with ReLU between them), its loss and its schema.

    layers: widths from input to output, [784, 32, 10] say; two widths make softmax regression.
    dtype: of parameters and inputs, float32 on boards.
    """

    name: str
    layers: tuple[int, ...]
    loss: Loss = field(default_factory=Loss)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if len(self.layers) < 2 or min(self.layers) < 1:
            raise ConfigError(
                f"layers = {list(self.layers)} needs at least an input and an output width, each at least 1."
            )

    @property
    def classes(self) -> int:
        return self.layers[-1]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.layers[0],)

    @property
    def layout(self) -> Layout:
        """Weight [out, in] and bias [out] of each layer, in order."""
        names, shapes = [], []
        for i, (inputs, outputs) in enumerate(zip(self.layers[:-1], self.layers[1:], strict=True)):
            names += [f"layer{i}.weight", f"layer{i}.bias"]
            shapes += [(outputs, inputs), (outputs,)]
        return Layout(tuple(names), tuple(shapes))

    @property
    def loss_bound(self) -> float:
        return self.loss.bound(self.classes)

    def initial(self, rng: np.random.Generator) -> Array:
        """He-normal weights and zero biases [d] (He et al., ICCV 2015)."""
        parts: list[Array] = []
        for shape in self.layout.shapes:
            if len(shape) == 2:
                parts.append(rng.normal(0.0, math.sqrt(2.0 / shape[1]), shape).ravel())
            else:
                parts.append(np.zeros(shape))
        return np.concatenate(parts).astype(self.dtype)

    def check(self, x: Array, y: Array, where: str) -> None:
        """Raises DataError when examples x [n, ...] and labels y [n] do not fit this task."""
        if x.shape[1:] != self.input_shape and math.prod(x.shape[1:]) != self.layers[0]:
            raise DataError(
                f"{where}: x has shape {list(x.shape)}; task '{self.name}' takes inputs of shape "
                f"[n, {self.layers[0]}]. Give this task's data, or change the task's first layer."
            )
        if len(x) != len(y):
            raise DataError(f"{where}: {len(x)} inputs but {len(y)} labels. Each input needs one label.")
        if len(y) == 0:
            raise DataError(f"{where}: holds no examples. Give at least one.")
        if y.dtype.kind not in "iu":
            raise DataError(f"{where}: y has dtype {y.dtype}; labels are integers from 0 to {self.classes - 1}.")
        if y.min() < 0 or y.max() >= self.classes:
            raise DataError(
                f"{where}: labels run from {y.min()} to {y.max()}; task '{self.name}' knows 0 to {self.classes - 1}."
            )
        if not np.isfinite(x).all():
            raise DataError(f"{where}: x holds NaN or infinity. Clean the data first.")

    def manifest(self) -> dict[str, Any]:
        """What a board needs to rebuild this task, as plain values."""
        return {
            "name": self.name,
            "layers": list(self.layers),
            "loss": {"kind": self.loss.kind, "mix": self.loss.mix},
            "dtype": self.dtype,
        }

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> "Task":
        return cls(
            str(manifest["name"]),
            tuple(int(n) for n in manifest["layers"]),
            Loss(manifest["loss"]["kind"], float(manifest["loss"]["mix"])),
            str(manifest["dtype"]),
        )


def mean_losses(task: Task, outputs: Array, batch: Batch) -> Array:
    """Weighted mean loss [B, M] of outputs (logits) [B, M, n, C] on the batch, in NumPy."""
    _, picked = _log_softmax_at(outputs, batch.y)
    mix = task.loss.mix
    losses = -np.log((1 - mix) * np.exp(picked) + mix / task.classes) if mix else -picked
    weight = batch.weight[:, None, :].astype(outputs.dtype)
    return np.asarray((losses * weight).sum(axis=2) / weight.sum(axis=2))


def accuracy(outputs: Array, batch: Batch) -> Array:
    """Weighted share [B, M] of examples whose largest output [B, M, n, C] is the label's."""
    hit = outputs.argmax(axis=3) == batch.y[:, None, :]
    weight = batch.weight[:, None, :]
    return np.asarray((hit * weight).sum(axis=2) / weight.sum(axis=2))


def _log_softmax_at(outputs: Array, y: Array) -> tuple[Array, Array]:
    """log softmax [B, M, n, C], and its value at the labels [B, M, n]."""
    shifted = outputs - outputs.max(axis=3, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=3, keepdims=True))
    index = np.broadcast_to(y[:, None, :, None], (*log_softmax.shape[:3], 1))
    return log_softmax, np.take_along_axis(log_softmax, index, axis=3)[..., 0]


def logit_gradient(task: Task, outputs: Array, batch: Batch) -> tuple[Array, Array]:
    """Losses [B, M] and the gradient of the weighted mean loss with respect to the outputs [B, M, n, C].

    (softmax - onehot) (1 - mix) softmax_y / p_tilde, weighted (mtfeel spec 3.2).
    """
    log_softmax, picked = _log_softmax_at(outputs, batch.y)
    mix = task.loss.mix
    softmax = np.exp(log_softmax)
    weight = batch.weight[:, None, :].astype(outputs.dtype)
    share = weight / weight.sum(axis=2, keepdims=True)
    if mix:
        mixed = (1 - mix) * np.exp(picked) + mix / task.classes
        losses, factor = -np.log(mixed), share * (1 - mix) * np.exp(picked) / mixed
    else:
        losses, factor = -picked, np.broadcast_to(share, picked.shape)
    onehot = np.arange(task.classes) == batch.y[:, None, :, None]
    gradient = (softmax - onehot) * factor[..., None]
    return (losses * share).sum(axis=2), gradient.astype(outputs.dtype, copy=False)


def find_task(tasks: dict[str, Task], name: str) -> Task:
    """The task `name`, or EngineError naming those known."""
    if name not in tasks:
        raise EngineError(f"The engine has no task '{name}'. It knows: {', '.join(sorted(tasks)) or 'none'}.")
    return tasks[name]
