"""The ONNX Runtime engine: runs gradient graphs that the gateway exported, so that a board needs no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fadefed.errors import EngineError
from fadefed.learning.engine import gradients_one_by_one
from fadefed.learning.task import Batch, Task, find_task, mean_losses
from fadefed.messages import Array

GRADIENT = "gradient.onnx"
PREDICT = "predict.onnx"
VJP = "vjp.onnx"


def open_session(model: Path | bytes, initializers: dict[str, Array] | None = None, threads: int = 1) -> Any:
    """An ONNX Runtime session whose results repeat: one thread, no spinning.

    `initializers` replace the graph's constants of the same name, so that weights that never leave a board
    can be put into a template graph. Raises EngineError when the file is missing or not a graph.
    """
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    values = {}
    for name, array in (initializers or {}).items():
        values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        options.add_initializer(name, values[name])
    source = model if isinstance(model, bytes) else str(model)
    try:
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own unrelated exception types
        raise EngineError(
            f"ONNX Runtime cannot load the graph {model if isinstance(model, Path) else ''}: {error}"
        ) from error
    session.kept_alive = values  # the session reads these buffers for as long as it lives
    return session


class OnnxEngine:
    """Engine on ONNX Runtime. `graphs` gives each task's folder of graphs; sessions open on first use."""

    def __init__(self, tasks: list[Task], graphs: dict[str, Path]) -> None:
        self.tasks = {task.name: task for task in tasks}
        self._graphs = graphs
        self._sessions: dict[tuple[str, str], Any] = {}

    def losses(self, task: str, params: Array, batch: Batch) -> Array:
        spec = find_task(self.tasks, task)
        rows = []
        for b in range(len(batch.x)):
            one = batch.device(b)
            outputs = self.predict(task, params[b if len(params) > 1 else 0], one.x[0])
            rows.append(mean_losses(spec, outputs[None], one)[0])
        return np.stack(rows)

    def loss_and_gradient(self, task: str, params: Array, batch: Batch) -> tuple[Array, Array]:
        spec = find_task(self.tasks, task)
        session = self._session(task, GRADIENT)
        losses, gradients = [], []
        for b in range(len(batch.x)):
            loss, gradient = session.run(
                ["losses", "gradients"],
                {
                    "params": _plain(params[b if len(params) > 1 else 0], spec.dtype),
                    "x": _plain(batch.x[b].reshape(batch.x.shape[1], -1), spec.dtype),
                    "y": _plain(batch.y[b], "int64"),
                    "weight": _plain(batch.weight[b], spec.dtype),
                },
            )
            losses.append(loss)
            gradients.append(gradient)
        if len(losses) == 1:
            return losses[0][None], gradients[0][None]
        return np.stack(losses), np.stack(gradients)

    def chosen_gradients(self, task: str, params: Array, batch: Batch, chosen: Array) -> Iterator[Array]:
        return gradients_one_by_one(self, task, params, batch, chosen)

    def predict(self, task: str, params: Array, x: Array) -> Array:
        spec = find_task(self.tasks, task)
        (outputs,) = self._session(task, PREDICT).run(
            ["outputs"],
            {"params": _plain(params, spec.dtype), "x": _plain(x.reshape(len(x), -1), spec.dtype)},
        )
        return np.asarray(outputs)

    def vjp(self, task: str, params: Array, x: Array, output_cotangent: Array) -> tuple[Array, Array]:
        spec = find_task(self.tasks, task)
        params_cotangent, x_cotangent = self._session(task, VJP).run(
            ["params_cotangent", "x_cotangent"],
            {
                "params": _plain(params, spec.dtype),
                "x": _plain(x.reshape(len(x), -1), spec.dtype),
                "output_cotangent": _plain(output_cotangent, spec.dtype),
            },
        )
        return params_cotangent, x_cotangent.reshape(x.shape)

    def _session(self, task: str, name: str) -> Any:
        if (task, name) not in self._sessions:
            folder = self._graphs.get(task)
            if folder is None or not (folder / name).exists():
                raise EngineError(f"Task '{task}' came without the graph {name}. Export it on the gateway.")
            self._sessions[task, name] = open_session(folder / name)
        return self._sessions[task, name]


def _plain(array: Array, dtype: str) -> Array:
    return np.ascontiguousarray(array, dtype=dtype)
