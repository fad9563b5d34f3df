import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fadefed.errors import ConfigError, EngineError
from fadefed.learning import Batch, Engine, Loss, Task, open_engine
from fadefed.learning.export import export_task
from fadefed.learning.int8 import Int8Model, activation_ranges, exact_outputs, quantize, weight_bits
from fadefed.learning.task import accuracy, mean_losses
from tests.conftest import MNIST

TASKS = [MNIST, Task("soft", (20, 5)), Task("deep", (12, 9, 7, 3), Loss(mix=0.0))]


def a_batch(task: Task, fleet: int, examples: int, rng: np.random.Generator) -> Batch:
    """Ragged: device b has examples - b of weight 1, the rest are padding."""
    weight = (np.arange(examples) < np.maximum(1, examples - np.arange(fleet)[:, None])).astype(np.float32)
    x = rng.random((fleet, examples, task.layers[0]), dtype=np.float32)
    return Batch(x, rng.integers(0, task.classes, (fleet, examples)), weight)


@pytest.fixture(scope="module")
def engines(graphs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    folders = {"mnist": graphs}
    for task in TASKS[1:]:
        folders[task.name] = tmp_path_factory.mktemp(task.name)
        export_task(task, folders[task.name], with_vjp=True)
    return {name: open_engine(name, TASKS, folders) for name in ("numpy", "torch", "onnx")}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize(
    ("fleet", "models", "examples", "shared"), [(1, 1, 1, True), (3, 4, 6, True), (3, 2, 5, False)]
)
def test_engines_agree(
    engines: dict[str, Engine], task: Task, fleet: int, models: int, examples: int, shared: bool
) -> None:
    rng = np.random.default_rng(fleet)
    params = np.stack([[task.initial(rng) for _ in range(models)] for _ in range(1 if shared else fleet)])
    batch = a_batch(task, fleet, examples, rng)
    losses, gradients = engines["numpy"].loss_and_gradient(task.name, params, batch)
    assert losses.shape == (fleet, models) and gradients.shape == (fleet, models, task.layout.size)
    cotangent = rng.normal(size=(examples, task.classes)).astype(np.float32)
    reference = engines["numpy"].vjp(task.name, params[0, 0], batch.x[0], cotangent)
    for name in ("torch", "onnx"):
        engine = engines[name]
        own_losses, own_gradients = engine.loss_and_gradient(task.name, params, batch)
        np.testing.assert_allclose(own_losses, losses, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(own_gradients, gradients, rtol=1e-5, atol=1e-5)
        large = np.abs(gradients) > 1e-6
        np.testing.assert_array_equal(np.sign(own_gradients[large]), np.sign(gradients[large]))
        np.testing.assert_allclose(engine.losses(task.name, params, batch), losses, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            engine.predict(task.name, params[0], batch.x[0]),
            engines["numpy"].predict(task.name, params[0], batch.x[0]),
            rtol=1e-5,
            atol=1e-5,
        )
        for mine, other in zip(engine.vjp(task.name, params[0, 0], batch.x[0], cotangent), reference, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mix", [0.0, 0.1])
def test_gradient_matches_finite_differences(mix: float) -> None:  # mtfeel U8
    task = Task("tiny", (6, 5, 4), Loss(mix=mix), dtype="float64")
    rng = np.random.default_rng(1)
    engine = open_engine("numpy", [task])
    params, batch = task.initial(rng)[None, None], a_batch(task, 1, 7, rng)
    _, gradient = engine.loss_and_gradient("tiny", params, batch)
    for i in rng.choice(task.layout.size, 25, replace=False):
        step = np.zeros(task.layout.size)
        step[i] = 1e-6
        up, down = (engine.losses("tiny", params + sign * step, batch)[0, 0] for sign in (1, -1))
        assert gradient[0, 0, i] == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-8)


def test_loss_is_bounded_and_finite_for_extreme_outputs() -> None:  # mtfeel U8
    task = Task("t", (3, 10))
    outputs = np.full((1, 1, 2, 10), -1e4, dtype=np.float32)
    outputs[0, 0, :, 3] = 1e4
    for label, expected in ((3, -math.log(0.91)), (5, math.log(100))):
        batch = Batch(np.zeros((1, 2, 3), np.float32), np.full((1, 2), label), np.ones((1, 2), np.float32))
        assert mean_losses(task, outputs, batch)[0, 0] == pytest.approx(expected, rel=1e-6)
    assert task.loss_bound == pytest.approx(4.605, abs=1e-3)


def test_extreme_parameters_give_finite_gradients(engines: dict[str, Engine]) -> None:
    rng = np.random.default_rng(2)
    task = TASKS[1]
    params = (task.initial(rng) * 1e4)[None, None]
    for engine in engines.values():
        losses, gradients = engine.loss_and_gradient("soft", params, a_batch(task, 1, 5, rng))
        assert np.isfinite(losses).all() and np.isfinite(gradients).all()
        assert losses.max() <= task.loss_bound + 1e-6


def test_padding_changes_nothing() -> None:
    task, rng = TASKS[1], np.random.default_rng(3)
    engine = open_engine("numpy", [task])
    params = task.initial(rng)[None, None]
    batch = a_batch(task, 1, 4, rng)
    padded = Batch(
        np.pad(batch.x, ((0, 0), (0, 3), (0, 0))),
        np.pad(batch.y, ((0, 0), (0, 3))),
        np.pad(batch.weight, ((0, 0), (0, 3))),
    )
    for one, other in zip(
        engine.loss_and_gradient("soft", params, batch), engine.loss_and_gradient("soft", params, padded), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_accuracy_weighs_examples() -> None:
    outputs = np.array([[[[1.0, 0], [0, 1], [1, 0]]]])
    batch = Batch(np.zeros((1, 3, 1)), np.array([[0, 0, 0]]), np.array([[1.0, 1, 0]]))
    assert accuracy(outputs, batch)[0, 0] == 0.5


def test_gradient_graph_is_small_and_has_no_baked_constants(graphs: Path) -> None:
    import onnx
    from onnx import numpy_helper

    data = (graphs / "gradient.onnx").read_bytes()
    assert len(data) < 200_000
    constants = [numpy_helper.to_array(constant) for constant in onnx.load_from_string(data).graph.initializer]
    assert max((constant.size for constant in constants), default=0) < 100
    assert str(Path.cwd()).encode() not in data  # no path of the exporting machine


def test_board_engine_does_not_import_torch(graphs: Path) -> None:
    code = (
        "import sys, numpy as np; from pathlib import Path; import edge_client, fadefed.cli\n"
        "from fadefed.learning import *\n"
        f"t = Task('mnist', (784, 32, 10)); e = open_engine('onnx', [t], {{'mnist': Path({str(graphs)!r})}})\n"
        "b = Batch(np.ones((1, 2, 784), 'f4'), np.zeros((1, 2), int), np.ones((1, 2), 'f4'))\n"
        "e.loss_and_gradient('mnist', np.ones((1, 1, t.layout.size), 'f4'), b)\n"
        "print([m for m in ('torch', 'onnx', 'mlxtend', 'matplotlib', 'mqtt5', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_int8_equals_exact_dequantized_arithmetic(graphs: Path, low: float) -> None:
    rng = np.random.default_rng(4)
    params = MNIST.initial(rng)
    params[784 * 32 : 784 * 32 + 32] = rng.normal(size=32)
    x = (rng.random((64, 784)) * (1 - low) + low).astype(np.float32)
    values = quantize(MNIST, params, activation_ranges(MNIST, params, x), weight_bits())
    outputs = Int8Model(graphs / "int8.onnx", values).predict(x)
    exact = exact_outputs(MNIST, values, x)
    np.testing.assert_allclose(outputs, exact, rtol=1e-4, atol=1e-4)
    fp32 = open_engine("numpy", [MNIST]).predict("mnist", params[None], x)[0]
    assert np.abs(exact - fp32).max() < 0.05 * np.abs(fp32).max()


def test_int8_survives_dead_rows(graphs: Path) -> None:
    params = np.zeros(MNIST.layout.size, np.float32)
    x = np.zeros((3, 784), np.float32)
    values = quantize(MNIST, params, activation_ranges(MNIST, params, x), 8)
    np.testing.assert_array_equal(Int8Model(graphs / "int8.onnx", values).predict(x), np.zeros((3, 10)))


def test_errors_say_what_is_known(tmp_path: Path) -> None:
    engine = open_engine("numpy", [MNIST])
    with pytest.raises(EngineError, match="no task 'cifar'.*mnist"):
        engine.losses("cifar", np.zeros((1, 1, 1)), a_batch(MNIST, 1, 1, np.random.default_rng(0)))
    with pytest.raises(EngineError, match="predict.onnx"):
        open_engine("onnx", [MNIST], {"mnist": tmp_path}).predict("mnist", np.zeros((1, 1)), np.zeros((1, 784)))
    (tmp_path / "predict.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match="cannot load"):
        open_engine("onnx", [MNIST], {"mnist": tmp_path}).predict("mnist", np.zeros((1, 1)), np.zeros((1, 784)))
    with pytest.raises(ConfigError, match="mix"):
        Loss(mix=1.5)
    with pytest.raises(ConfigError, match="layers"):
        Task("t", (3,))
