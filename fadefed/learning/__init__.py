"""Flat parameters, engines (ONNX Runtime, torch, NumPy), gradient graphs, quantization."""

from fadefed.learning.engine import Engine
from fadefed.learning.engines import EngineName, open_engine
from fadefed.learning.layout import Layout
from fadefed.learning.task import Batch, Loss, Task

__all__ = ["Batch", "Engine", "EngineName", "Layout", "Loss", "Task", "open_engine"]
