"""Which engine: each is imported only when asked for, so that a board never needs torch."""

from pathlib import Path
from typing import Literal

from fadefed.errors import EngineError
from fadefed.learning.engine import Engine
from fadefed.learning.task import Task

EngineName = Literal["onnx", "numpy", "torch"]


def open_engine(name: EngineName, tasks: list[Task], graphs: dict[str, Path] | None = None) -> Engine:
    """The engine `name` for `tasks`.

    `onnx` needs `graphs`: for each task a folder with its `gradient.onnx` and `predict.onnx`
    (`fadefed.learning.export` writes them). `torch` needs torch.
    """
    if name == "numpy":
        from fadefed.learning.numpy_engine import NumpyEngine

        return NumpyEngine(tasks)
    if name == "onnx":
        from fadefed.learning.onnx_engine import OnnxEngine

        return OnnxEngine(tasks, graphs or {})
    if name == "torch":
        try:
            from fadefed.learning.torch_engine import TorchEngine
        except ImportError as error:
            raise EngineError(
                "The torch engine needs torch: pip install 'fadefed[gateway]', or use engine = \"onnx\"."
            ) from error
        return TorchEngine(tasks)
    raise EngineError(f"Unknown engine '{name}'. Known: onnx, numpy, torch.")
