from pathlib import Path

import numpy as np
import pytest

from channel_emu import LinkConfig
from fadefed.messages import Key
from fadefed.simulation import Simulation
from tests.support import federation


@pytest.mark.parametrize("method", ["mtfeel", "sign-sgd", "fedavg", "fedsgd", "local"])
def test_fast_mode_agrees_with_reference_exchange_by_exchange(method: str, graphs: Path) -> None:
    """From identical inputs: floats to 1e-5, and every sign where |g| > 1e-6 (design.md, Equality)."""
    fed = federation(method, rounds=4, devices=5, options="dde_steps = 2" if method == "mtfeel" else "")
    reference = Simulation(fed, mode="reference", engine="onnx", graphs=graphs)
    fast = [Simulation(fed, engine=engine) for engine in ("torch", "numpy")]
    task = fed.task.name
    for exchange in iter(reference.next_exchange, None):
        expected = reference.answer(exchange)
        for simulation in fast:
            found = simulation.answer(exchange)
            for name, report in expected.items():
                assert [body.key for body in found[name].bodies] == [body.key for body in report.bodies]
                for mine, other in zip(found[name].bodies, report.bodies, strict=True):
                    if other.coded.codec == "sign":
                        gradient = _gradient(reference, exchange.shared, name, other.key, task)
                        large = np.abs(gradient) > 1e-6
                        np.testing.assert_array_equal(_decoded(mine)[large], _decoded(other)[large])
                    else:
                        np.testing.assert_allclose(_decoded(mine), _decoded(other), rtol=1e-4, atol=1e-5)
        reference.server.absorb(exchange, reference.channel.carry(exchange, expected))


def _decoded(body: object) -> np.ndarray:
    from fadefed.messages.codecs import decode

    return np.asarray(decode(body.coded))  # type: ignore[attr-defined]


def _gradient(simulation: Simulation, shared: dict, name: str, key: Key, task: str) -> np.ndarray:
    models = shared.get((task, "models"), shared.get((task, "model")))
    model = models if models.ndim == 1 else models[int(key[1].split("/")[1])]
    batch = simulation.fleet.device(simulation.devices[name].number).train
    return simulation.engine.loss_and_gradient(task, model[None, None], batch)[1][0, 0]


def test_the_same_seed_gives_the_same_run_and_another_seed_does_not() -> None:  # mtfeel E13
    runs = [Simulation(federation(rounds=5, seed=seed), engine="numpy").run() for seed in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0].parameters, runs[1].parameters)
    assert runs[0].rows == runs[1].rows
    assert not np.array_equal(runs[0].parameters, runs[2].parameters)


def test_an_error_free_channel_equals_none() -> None:  # mtfeel U19
    none, free = LinkConfig(), LinkConfig("outage", snr_db=400.0)
    runs = [Simulation(federation(rounds=4), engine="numpy", link=link).run() for link in (none, free)]
    np.testing.assert_array_equal(runs[0].parameters, runs[1].parameters)


def test_mtfeel_beats_local_and_sign_sgd_on_real_digits() -> None:
    """The demo's claim at a third of its length, error free."""
    accuracy = {}
    for method, options in (("mtfeel", ""), ("sign-sgd", "learning_rate = 0.01"), ("local", "")):
        fed = federation(method, rounds=80, devices=10, options=options, channel="")
        result = Simulation(fed, engine="numpy").run()
        accuracy[method] = float(result.test_accuracy.mean())
    assert accuracy["mtfeel"] > accuracy["local"] + 0.03
    assert accuracy["mtfeel"] > accuracy["sign-sgd"] + 0.03
