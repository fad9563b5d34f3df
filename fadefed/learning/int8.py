"""INT8 on the board: quantize parameters that never leave it, in NumPy, into a template graph.

The gateway ships `int8.onnx`, a QDQ graph whose weights, scales and zero points are placeholders
(`fadefed.learning.export.int8_template`). A board measures the range of each layer's input on its own data, quantizes
its parameters, and opens a session in which its values replace the placeholders. No `onnx` package needed.

Activations: 8 bits unsigned, asymmetric, per tensor (signed ones ONNX Runtime converts to unsigned when it opens the
session, from the placeholder's zero point, before it has seen the real one). Weights: symmetric, one scale per
output. x86 processors without VNNI sum integer products in 16 bits and saturate with 8-bit weights, so they get
7 (`weight_bits`).
"""

import platform
from pathlib import Path

import numpy as np

from fadefed.learning.onnx_engine import open_session
from fadefed.learning.task import Task
from fadefed.messages import Array

INT8 = "int8.onnx"


def weight_bits() -> int:
    """Bits that an INT8 weight may use on this processor without saturating: 8, or 7 on x86 without VNNI."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i686"):
        return 8
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return 7
    return 8 if "avx512_vnni" in flags or "avx_vnni" in flags else 7


def activation_ranges(task: Task, params: Array, x: Array) -> list[tuple[float, float]]:
    """(lowest, highest) value of each layer's input for params [d] on x [n, ...]; both sides include 0."""
    ranges = []
    parts = list(task.layout.split(params).values())
    values = x.reshape(len(x), -1).astype(np.float32)
    for weight, bias in zip(parts[::2], parts[1::2], strict=True):
        ranges.append((min(0.0, float(values.min())), max(0.0, float(values.max()))))
        values = np.maximum(values @ weight.T + bias, 0)
    return ranges


def quantize(task: Task, params: Array, ranges: list[tuple[float, float]], bits: int) -> dict[str, Array]:
    """The template's initializers for params [d]: int8 weights, int32 biases, scales and zero points.

    `bits` of a weight: 8 uses -127..127, 7 uses -63..63.
    """
    levels = 2 ** (bits - 1) - 1
    parts = list(task.layout.split(params).values())
    values: dict[str, Array] = {}
    for i, (low, high) in enumerate(ranges):
        weight, bias = parts[2 * i], parts[2 * i + 1]
        scale = np.float32(max(high - low, 1e-8) / 255)
        zero = np.uint8(np.clip(round(-low / float(scale)), 0, 255))
        weight_scale = np.abs(weight).max(axis=1) / np.float32(levels)
        weight_scale = np.where(weight_scale > 0, weight_scale, np.float32(1)).astype(np.float32)
        bias_scale = (scale * weight_scale).astype(np.float32)
        values |= {
            f"scale{i}": np.array(scale),
            f"zero{i}": np.array(zero),
            f"weight{i}": np.rint(weight / weight_scale[:, None]).astype(np.int8),
            f"weight_scale{i}": weight_scale,
            f"bias{i}": np.clip(np.rint(bias / bias_scale), -(2**31) + 1, 2**31 - 1).astype(np.int32),
            f"bias_scale{i}": bias_scale,
        }
    return values


def exact_outputs(task: Task, values: dict[str, Array], x: Array) -> Array:
    """What the quantized model means: dequantized arithmetic in float64 [n, C]. The reference INT8 is tested against."""
    current = x.reshape(len(x), -1).astype(np.float64)
    depth = len(task.layers) - 1
    for i in range(depth):
        scale, zero = float(values[f"scale{i}"]), int(values[f"zero{i}"])
        levels = np.clip(np.rint(current.astype(np.float32) / np.float32(scale)) + zero, 0, 255)
        weight = values[f"weight{i}"] * values[f"weight_scale{i}"][:, None].astype(np.float64)
        current = ((levels - zero) * scale) @ weight.T + values[f"bias{i}"] * values[f"bias_scale{i}"].astype(
            np.float64
        )
        if i + 1 < depth:
            current = np.maximum(current, 0)
    return current


class Int8Model:
    """A personal INT8 model: the template graph with this board's values in it."""

    def __init__(self, template: Path, values: dict[str, Array]) -> None:
        self.values = values
        self._session = open_session(template, values)

    @property
    def size_bytes(self) -> int:
        """Bytes of the quantized parameters with their scales."""
        return sum(value.nbytes for value in self.values.values())

    def predict(self, x: Array) -> Array:
        """Outputs [n, C] for x [n, ...]."""
        (outputs,) = self._session.run(["outputs"], {"x": x.reshape(len(x), -1).astype(np.float32)})
        return np.asarray(outputs)
