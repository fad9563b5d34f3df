"""The end of a run on a board: its personal model as INT8, beside fp32: accuracy, size, latency."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge_client.store import Store
from fadefed.files import write_atomic
from fadefed.learning import Engine, Task
from fadefed.learning.int8 import Int8Model, activation_ranges, quantize, weight_bits
from fadefed.messages import Array, Scalar
from fadefed.messages.wire import pack_state
from fadefed.methods.method import evaluate
from fadefed.tasks import Fleet

LATENCY_RUNS = 200


def finish(
    store: Store, task: Task, engine: Engine, params: Array, own: Fleet, template: Path | None
) -> dict[str, Scalar]:
    """Keep `params` [d], make its INT8 model, and measure both on this device's own examples.

    Ranges come from the training examples, accuracy from the test examples (from the training ones where there are
    no others). Latency is the median over single examples, in microseconds.
    """
    report = evaluate(task, engine, params, own)
    write_atomic(store.folder / "personal.model", pack_state({"task": task.manifest(), "parameters": params}))
    if template is None:
        return report
    bits = weight_bits()
    values = quantize(task, params, activation_ranges(task, params, own.train.x[0]), bits)
    model = Int8Model(template, values)
    write_atomic(store.folder / "personal.int8", pack_state({"task": task.manifest(), "values": values}))
    held_out = own.test if own.test.y.shape[1] else own.train
    x, y = held_out.x[0], held_out.y[0]
    report["int8_accuracy"] = float((model.predict(x).argmax(axis=1) == y).mean())
    report["fp32_accuracy"] = float((engine.predict(task.name, params[None], x)[0].argmax(axis=1) == y).mean())
    report["int8_bytes"] = model.size_bytes
    report["fp32_bytes"] = int(params.nbytes)
    report["int8_weight_bits"] = bits
    report["int8_latency_us"] = _median_us(lambda i: model.predict(x[i : i + 1]), len(x))
    report["fp32_latency_us"] = _median_us(lambda i: engine.predict(task.name, params[None], x[i : i + 1]), len(x))
    return report


def _median_us(predict: Callable[[int], Array], count: int) -> float:
    times = []
    for run in range(LATENCY_RUNS):
        start = time.perf_counter()
        predict(run % count)
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e6)
