import re

import numpy as np
import pytest

from fadefed import methods
from fadefed.learning import Batch, Task, open_engine
from fadefed.messages import Exchange, Order, Reception, Report, SignalSpec
from fadefed.methods import find_method, method
from fadefed.methods.method import Call, Device, MethodClient, MethodServer, Settings, answer
from fadefed.methods.one_model import weighted_sum
from fadefed.tasks import Dataset, Fleet

TASK = Task("toy", (6, 4, 3), dtype="float64")


def fleet(sizes: tuple[int, ...] = (5, 5, 5)) -> Fleet:
    rng = np.random.default_rng(0)
    return Fleet(
        [Dataset(rng.random((n + 2, 6)), rng.integers(0, 3, n + 2), np.array([0] * n + [1, 1])) for n in sizes], TASK
    )


def rounds(
    server: MethodServer, client: MethodClient, data: Fleet, count: int, lost: set[str] = frozenset()
) -> list[dict]:
    """Run `count` exchanges in memory, with the codecs' effect but without a channel."""
    roster = {f"d{i}": Device(f"d{i}", i, int(n)) for i, n in enumerate(data.train_counts)}
    for device in roster.values():
        server.joined(device)
    states: list[dict] = [{} for _ in roster]
    rows = []
    engine = open_engine("numpy", [TASK])
    from fadefed.messages.wire import receive

    for number in range(1, count + 1):
        exchange = server.next(roster)
        if exchange is None:
            break
        exchange.number = number
        reception = Reception(absent=set(exchange.orders))
        orders = list(exchange.orders.values())
        call = Call(exchange, orders, list(range(len(orders))), exchange.shared, data, engine, states, 0)
        for i, (report, state) in enumerate(answer(client, call)):
            states[i] = state
            if f"d{i}" not in lost:
                receive(exchange, f"d{i}", report, reception)
        rows.append(server.absorb(exchange, reception))
    return rows


def pair(name: str, count: int = 10, **options: object) -> tuple[MethodServer, MethodClient]:
    found = find_method(name)
    config = found.config(**options)
    return found.server(Settings((TASK,), count, 0, config)), found.client([TASK], config)


def full_gradient(w: np.ndarray, data: Fleet) -> np.ndarray:
    engine = open_engine("numpy", [TASK])
    return engine.loss_and_gradient("toy", w[None, None], data.train)[1][:, 0]


def toy() -> tuple[type[MethodServer], type[MethodClient]]:
    """The toy method in the interface's docstring, as code."""
    source = re.search(r"    class Server.*?return \[.*?\n", method.__doc__, re.S).group(0)
    names = {
        "MethodServer": MethodServer, "MethodClient": MethodClient, "SignalSpec": SignalSpec, "Report": Report, "np": np,
    }  # fmt: skip
    exec(re.sub(r"^    ", "", source, flags=re.M), names)
    return names["Server"], names["Client"]


def test_the_toy_method_is_gradient_descent() -> None:
    """A golden trajectory: 5 steps of w - 0.1 mean gradient, and the state restores to the bit."""
    server_class, client_class = toy()
    server = server_class(Settings((TASK,), 5, 0, None))
    data = fleet()
    expected = server.w.copy()
    for _ in range(5):
        expected = expected - 0.1 * full_gradient(expected, data).astype(np.float32).mean(axis=0)
    rows = rounds(server, client_class([TASK], None), data, 99)
    assert len(rows) == 5 and rows[-1] == {"devices": 3}
    np.testing.assert_allclose(server.w, expected, atol=1e-7)
    twin = server_class(Settings((TASK,), 5, 0, None))
    twin.restore(server.state())
    np.testing.assert_array_equal(twin.parameters_for("d0"), server.parameters_for("d0"))
    assert twin.round == server.round


def test_fedsgd_weighs_by_examples() -> None:
    server, client = pair("fedsgd", learning_rate=0.5, codec="float64", access="protected")
    data = fleet((2, 5, 9))
    expected = server.w.copy()
    for _ in range(3):
        expected -= 0.5 * np.average(full_gradient(expected, data), axis=0, weights=[2, 5, 9])
    rounds(server, client, data, 3)
    np.testing.assert_allclose(server.w, expected, atol=1e-12)


@pytest.mark.parametrize(("policy", "factor"), [("drop", 2 / 3), ("renorm", 1.0)])
def test_a_lost_gradient_shrinks_the_step_or_not(policy: str, factor: float) -> None:
    server, client = pair("fedsgd", learning_rate=0.5, codec="float64", on_outage=policy)
    data = fleet()
    start = server.w.copy()
    rounds(server, client, data, 1, lost={"d2"})
    expected = start - 0.5 * factor * full_gradient(start, data)[:2].mean(axis=0)
    np.testing.assert_allclose(server.w, expected, atol=1e-12)


def test_nothing_received_changes_nothing() -> None:
    for name in ("fedsgd", "sign-sgd", "fedavg"):
        server, client = pair(name)
        start = server.w.copy()
        rounds(server, client, fleet(), 2, lost={"d0", "d1", "d2"})
        np.testing.assert_array_equal(server.w, start)


@pytest.mark.parametrize("aggregate", ["mean", "majority"])
def test_sign_sgd(aggregate: str) -> None:
    server, client = pair("sign-sgd", learning_rate=0.1, aggregate=aggregate, ties="plus")
    data = fleet()
    expected = server.w.copy()
    for _ in range(4):
        signs = np.where(full_gradient(expected, data) >= 0, 1, -1)
        expected -= 0.1 * (signs.mean(axis=0) if aggregate == "mean" else np.sign(signs.sum(axis=0)))
    rounds(server, client, data, 4)
    np.testing.assert_allclose(server.w, expected, atol=1e-12)


def test_fedavg_with_one_full_batch_epoch_is_fedsgd() -> None:
    averaging = pair("fedavg", learning_rate=0.5, epochs=1, codec="float64")
    descent = pair("fedsgd", learning_rate=0.5, codec="float64")
    for server, client in (averaging, descent):
        rounds(server, client, fleet((3, 5, 5)), 3)
    np.testing.assert_allclose(averaging[0].w, descent[0].w, atol=1e-12)


def test_fedavg_minibatches_use_every_example_once_an_epoch() -> None:
    client = find_method("fedavg").client([TASK], find_method("fedavg").config(epochs=2, batch_size=2, codec="float64"))
    seen: list[int] = []

    class Spy:
        def loss_and_gradient(self, task: str, params: np.ndarray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
            seen.extend(int(v) for v in batch.x[0, :, 0])
            return np.zeros((1, 1)), np.zeros_like(params)

    data = Fleet([Dataset(np.arange(5.0)[:, None] * np.ones(6), np.zeros(5, int), np.zeros(5))], TASK)
    exchange = Exchange(1, "train", 1, {"d0": Order()}, {("toy", "update"): SignalSpec("float64")})
    shared = {("toy", "model"): np.zeros(TASK.layout.size)}
    client.respond(Call(exchange, [Order()], [0], shared, data, Spy(), [{}], 0))
    assert sorted(seen[:5]) == sorted(seen[5:]) == [0, 1, 2, 3, 4]
    assert seen[:5] != [0, 1, 2, 3, 4] or seen[5:] != [0, 1, 2, 3, 4]


def test_error_feedback_keeps_its_residual_in_the_state() -> None:
    server, client = pair("fedavg", learning_rate=0.2, epochs=2, codec="sign-feedback")
    start = open_engine("numpy", [TASK]).losses("toy", server.w[None, None], fleet().train).mean()
    rounds(server, client, fleet(), 10)
    end = open_engine("numpy", [TASK]).losses("toy", server.w[None, None], fleet().train).mean()
    assert end < start - 0.1


def test_local_devices_never_share_a_model() -> None:
    server, client = pair("local", learning_rate=0.3)
    assert server.parameters_for("d0") is None
    data = fleet()
    roster = {"d0": Device("d0", 0, 5)}
    exchange = server.next(roster)
    call = Call(exchange, [Order()], [0], exchange.shared, data.device(0), open_engine("numpy", [TASK]), [{}], 0)
    ((report, state),) = client.respond(call)
    assert not report.signals
    np.testing.assert_allclose(
        client.parameters(Order(), state), server.w - 0.3 * full_gradient(server.w, data.device(0))[0], atol=1e-12
    )


def test_a_diverged_device_reports_an_error_and_keeps_its_state() -> None:
    server, client = pair("sign-sgd")
    server.w[:] = np.nan
    exchange = server.next({"d0": Device("d0", 0, 5)})
    exchange.number = 3
    before = {"method": {"kept": 1}}
    call = Call(exchange, [Order()], [0], exchange.shared, fleet((5,)), open_engine("numpy", [TASK]), [before], 0)
    ((report, state),) = answer(client, call)
    assert report.error is not None and "sign" in report.error and "NaN" in report.error
    assert state is before and not report.bodies


def test_tie_bits_depend_on_round_device_and_signal_only() -> None:
    server, client = pair("sign-sgd")
    server.w[:] = 0
    data = Fleet([Dataset(np.zeros((2, 6)), np.array([0, 1]), np.zeros(2))] * 2, TASK)
    engine = open_engine("numpy", [TASK])
    exchange = server.next({f"d{i}": Device(f"d{i}", i, 2) for i in range(2)})
    shared = exchange.shared

    def coded(number: int, seed: int = 0) -> bytes:
        call = Call(exchange, [Order()], [number], shared, data.device(0), engine, [{}], seed)
        return answer(client, call)[0][0].bodies[0].coded.data

    together = answer(client, Call(exchange, [Order(), Order()], [0, 1], shared, data, engine, [{}, {}], 0))
    assert [report.bodies[0].coded.data for report, _ in together] == [coded(0), coded(1)]
    assert coded(0) != coded(1)
    assert coded(0) != coded(0, seed=1)


def test_weighted_sum_is_in_order() -> None:
    np.testing.assert_array_equal(weighted_sum([np.ones(2), 2 * np.ones(2)], np.array([0.5, 0.25])), [1, 1])


def test_unknown_methods_are_named() -> None:
    from fadefed.errors import ConfigError

    with pytest.raises(ConfigError, match="mtfeel"):
        methods.find_method("magic")
