"""On the gateway: a task into ONNX graphs (gradient, predict, vjp) and the INT8 template. Needs torch and onnx."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch.func import vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fadefed.files import write_atomic
from fadefed.learning.int8 import INT8
from fadefed.learning.onnx_engine import GRADIENT, PREDICT, VJP
from fadefed.learning.task import Task
from fadefed.learning.torch_engine import forward_function, gradient_function

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def export_task(task: Task, folder: Path, *, with_vjp: bool = False) -> dict[str, Path]:
    """Write the task's graphs into `folder`; {file name: path}. Files that are there already are kept.

    The gradient graph takes params [M, d], x [n, in], y [n], weight [n] with M and n free and gives losses [M] and
    gradients [M, d]; it runs on plain ONNX Runtime.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = DTYPES[task.dtype]
    d, n, m = task.layout.size, 5, 3
    params, x = torch.randn(m, d, dtype=dtype) * 0.1, torch.rand(n, task.layers[0], dtype=dtype)
    y, weight = torch.arange(n) % task.classes, torch.ones(n, dtype=dtype)
    models, examples = (
        torch.export.Dim("models", min=1, max=1 << 16),
        torch.export.Dim("examples", min=1, max=1 << 24),
    )

    def trace(
        name: str, function: Callable[..., Any], inputs: dict[str, Any], outputs: list[str], dynamic: Any
    ) -> None:
        if not (folder / name).exists():
            write_atomic(folder / name, _export(function, inputs, outputs, dynamic))

    trace(
        GRADIENT,
        gradient_function(task),
        {"params": params, "x": x, "y": y, "weight": weight},
        ["losses", "gradients"],
        ({0: models}, {0: examples}, {0: examples}, {0: examples}),
    )
    trace(
        PREDICT,
        vmap(forward_function(task), in_dims=(0, None)),
        {"params": params, "x": x},
        ["outputs"],
        ({0: models}, {0: examples}),
    )
    names = [GRADIENT, PREDICT]
    if with_vjp:

        def pull(flat: torch.Tensor, inputs: torch.Tensor, cotangent: torch.Tensor) -> Any:
            return vjp(forward_function(task), flat, inputs)[1](cotangent)

        trace(
            VJP,
            pull,
            {"params": params[0], "x": x, "output_cotangent": torch.rand(n, task.classes, dtype=dtype)},
            ["params_cotangent", "x_cotangent"],
            (None, {0: examples}, {0: examples}),
        )
        names.append(VJP)
    if task.dtype == "float32":
        if not (folder / INT8).exists():
            write_atomic(folder / INT8, int8_template(task))
        names.append(INT8)
    return {name: folder / name for name in names}


def _export(function: Callable[..., Any], inputs: dict[str, Any], outputs: list[str], dynamic: Any) -> bytes:
    """Trace `function` with symbolic shapes and export it; the bytes of the ONNX file."""

    class Graph(torch.nn.Module):
        def __init__(self, traced: Any) -> None:
            super().__init__()
            self.traced = traced

        def forward(self, *arguments: torch.Tensor) -> Any:
            return self.traced(*arguments)

    for name in ("torch.onnx", "onnx_ir", "onnxscript"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        traced = make_fx(function, tracing_mode="symbolic")(*inputs.values())
        program = torch.onnx.export(
            Graph(traced),
            tuple(inputs.values()),
            dynamo=True,
            dynamic_shapes=(dynamic,),
            input_names=list(inputs),
            output_names=outputs,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    for node in model.graph.node:  # traces name the exporting machine's files
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    return bytes(model.SerializeToString())


def int8_template(task: Task) -> bytes:
    """A QDQ graph x [n, in] -> outputs [n, C] whose quantized weights, scales and zero points are placeholders.

    ONNX Runtime fuses it into integer kernels (QGemm) once `fadefed.learning.int8` has put real values in.
    """
    nodes: list[Any] = []
    constants: list[Any] = []

    def constant(name: str, value: Any) -> str:
        constants.append(numpy_helper.from_array(value, name))
        return name

    current = "x"
    depth = len(task.layers) - 1
    for i, (inputs, outputs) in enumerate(zip(task.layers[:-1], task.layers[1:], strict=True)):
        last = i + 1 == depth
        activation = [
            constant(f"scale{i}", np.array(1, np.float32)),
            constant(f"zero{i}", np.array(0, np.uint8)),
        ]
        weight = [
            constant(f"weight{i}", np.zeros((outputs, inputs), np.int8)),
            constant(f"weight_scale{i}", np.ones(outputs, np.float32)),
            constant(f"weight_zero{i}", np.zeros(outputs, np.int8)),
        ]
        bias = [
            constant(f"bias{i}", np.zeros(outputs, np.int32)),
            constant(f"bias_scale{i}", np.ones(outputs, np.float32)),
            constant(f"bias_zero{i}", np.zeros(outputs, np.int32)),
        ]
        result = "outputs" if last else f"sum{i}"
        nodes += [
            helper.make_node("QuantizeLinear", [current, *activation], [f"levels{i}"]),
            helper.make_node("DequantizeLinear", [f"levels{i}", *activation], [f"input{i}"]),
            helper.make_node("DequantizeLinear", weight, [f"real_weight{i}"], axis=0),
            helper.make_node("DequantizeLinear", bias, [f"real_bias{i}"], axis=0),
            helper.make_node("Gemm", [f"input{i}", f"real_weight{i}", f"real_bias{i}"], [result], transB=1),
        ]
        current = result
        if not last:
            nodes.append(helper.make_node("Relu", [current], [f"hidden{i}"]))
            current = f"hidden{i}"
    graph = helper.make_graph(
        nodes,
        f"{task.name}-int8",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["examples", task.layers[0]])],
        [helper.make_tensor_value_info("outputs", onnx.TensorProto.FLOAT, ["examples", task.classes])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
