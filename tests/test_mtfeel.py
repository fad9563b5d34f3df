"""The unit checks U1 to U20 of the MtFEEL reproduction protocol.

U7 is in test_codecs, U8 in test_engines, U15, U16 and U19 in test_channel.
"""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from channel_emu import LinkConfig
from fadefed.config import TomlFile
from fadefed.federation import Federation
from fadefed.learning import Batch, Loss, Task, open_engine
from fadefed.messages import Exchange, Reception
from fadefed.methods import mtfeel, sign_sgd
from fadefed.methods.method import Device, Settings
from fadefed.methods.mtfeel import (
    Config,
    alpha_gradient,
    default_kappa,
    gap_subgradient,
    penalised_objective,
    project_simplex,
    weighted_sign_sum,
)
from fadefed.simulation import Simulation
from fadefed.tasks import Dataset

SMALL = Task("t", (8, 5, 4), dtype="float64")


def datasets(count: int = 6, size: int = 6, features: int = 8, seed: int = 0) -> list[Dataset]:
    """Devices of two kinds: labels of odd and even ones follow different rules."""
    rng = np.random.default_rng(seed)
    result = []
    for i in range(count):
        x = rng.normal(size=(size, features))
        y = (x @ np.random.default_rng(i % 2).normal(size=(features, 4))).argmax(axis=1)
        result.append(Dataset(x, y, np.zeros(size, np.uint8)))
    return result


def simulation(
    options: str = "", data: list[Dataset] | None = None, rounds: int = 6, link: LinkConfig | None = None
) -> Simulation:
    data = data or datasets()
    text = (
        f'[federation]\nmethod = "mtfeel"\nrounds = {rounds}\ndevices = {len(data)}\n'
        f'[task]\nname = "t"\nlayers = [8, 5, 4]\ndtype = "float64"\n[method]\ndde_steps = 3\n{options}\n'
    )
    fed = Federation.from_file(TomlFile.parse(text))
    return Simulation(fed, engine="numpy", datasets=data, link=link or LinkConfig())


def run(options: str = "", **settings: object) -> mtfeel.Server:
    server = simulation(options, **settings).run().server  # type: ignore[arg-type]
    assert isinstance(server, mtfeel.Server)
    return server


def instance(rng: np.random.Generator) -> dict[str, np.ndarray]:
    size = int(rng.integers(2, 9))
    return {
        "alpha": project_simplex(rng.normal(size=(size, size)) * 0.3 + 1 / size),
        "losses": rng.uniform(0, 4.6, (size, size)),
        "discrepancy": rng.uniform(0, 4.6, (size, size)),
        "lam": rng.dirichlet(np.ones(size)),
        "n": rng.integers(1, 40, size).astype(float),
    }


def test_u1_simplex_projection() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        v = rng.normal(size=rng.integers(1, 9)) * 10 ** rng.uniform(-2, 2)
        x = project_simplex(v)
        assert (x >= 0).all() and abs(x.sum() - 1) <= 1e-12
        np.testing.assert_allclose(project_simplex(x), x, atol=1e-12)
        np.testing.assert_allclose(project_simplex(v + 3.7), x, atol=1e-12)
        assert (np.diff(x[np.argsort(v)]) >= -1e-12).all()
        assert np.abs(x - v).sum() == pytest.approx(
            abs(1 - np.maximum(v, 0).sum()) + np.maximum(-v, 0).sum(), abs=1e-11
        )


def test_u1_projection_matches_a_quadratic_programme() -> None:
    rng = np.random.default_rng(2)
    for _ in range(10):
        v = rng.normal(size=5)
        found = minimize(
            lambda x, v=v: ((x - v) ** 2).sum(), np.full(5, 0.2), jac=lambda x, v=v: 2 * (x - v), method="SLSQP",
            bounds=[(0, 1)] * 5, constraints={"type": "eq", "fun": lambda x: x.sum() - 1}, options={"ftol": 1e-15},
        )  # fmt: skip
        np.testing.assert_allclose(project_simplex(v), found.x, atol=1e-7)
        distance = ((project_simplex(v) - v) ** 2).sum()
        assert distance <= found.fun + 1e-9


def test_u2_rows_stay_on_the_simplex_even_when_all_is_lost() -> None:
    lossy = LinkConfig("outage", snr_db=-80.0, bandwidth_hz=10.0)
    for link in (LinkConfig(), lossy):
        sim = simulation(link=link)
        start = sim.server.w0.copy()
        for exchange in iter(sim.next_exchange, None):
            reception = sim.channel.carry(exchange, sim.answer(exchange))
            sim.server.absorb(exchange, reception)
            np.testing.assert_allclose(sim.server.A.sum(axis=1), 1, atol=1e-12)
            assert (sim.server.A >= 0).all()
        untouched = np.array_equal(sim.server.W, np.repeat(start[None], 6, axis=0))
        assert untouched == (link is lossy)  # U9: drop with nothing received leaves W


def test_u2_absent_devices_are_an_outage() -> None:
    sim = simulation()
    for exchange in iter(sim.next_exchange, None):
        sim.server.absorb(exchange, Reception(absent=set(exchange.orders)))
        np.testing.assert_allclose(sim.server.A.sum(axis=1), 1, atol=1e-12)
    assert sim.server.round == 6 and np.isfinite(sim.server.W).all()


@pytest.mark.parametrize("exponent", [1, 2])
def test_u3_alpha_gradient_matches_finite_differences(exponent: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        case, kappa = instance(rng), float(rng.uniform(1, 200))
        others = {name: case[name] for name in ("losses", "discrepancy", "lam", "n")}
        gradient = alpha_gradient(**case, kappa=kappa, exponent=exponent)
        literal = alpha_gradient(**case, kappa=kappa, exponent=exponent, sqrt2_error=True)
        numeric = np.zeros_like(gradient)
        for index in np.ndindex(*gradient.shape):
            step = np.zeros_like(gradient)
            step[index] = 1e-6
            up, down = (
                penalised_objective(case["alpha"] + sign * step, **others, kappa=kappa, exponent=exponent)
                for sign in (1, -1)
            )
            numeric[index] = (up - down) / 2e-6
        scale = np.abs(numeric).max()
        assert np.abs(gradient - numeric).max() <= 1e-6 * scale
        assert np.abs(literal - numeric).max() > 1e-3 * scale  # the printed sqrt(2) fails


def test_u4_uniform_lambda_only_rescales() -> None:
    case = instance(np.random.default_rng(4))
    case["lam"] = np.full(len(case["n"]), 1 / len(case["n"]))
    base = alpha_gradient(**case, kappa=30.0, exponent=1)
    case["lam"] = 3 * case["lam"]
    np.testing.assert_allclose(alpha_gradient(**case, kappa=30.0, exponent=1), 3 * base, rtol=1e-12)


def discrepancies(data: list[Dataset], steps: int, mode: str = "fast") -> np.ndarray:
    text = (
        f'[federation]\nmethod = "mtfeel"\nrounds = 1\ndevices = {len(data)}\n'
        f'[task]\nname = "t"\nlayers = [8, 5, 4]\ndtype = "float64"\n[method]\ndde_steps = {steps}\n'
    )
    fed = Federation.from_file(TomlFile.parse(text))
    sim = Simulation(fed, engine="numpy", datasets=data, link=LinkConfig(), mode=mode)  # type: ignore[arg-type]
    return np.asarray(sim.run().server.D)


def test_u5_discrepancy() -> None:
    data = datasets(5)
    data[3] = data[1]  # identical data
    previous = None
    for steps in (0, 1, 3, 6):
        found = discrepancies(data, steps)
        np.testing.assert_array_equal(found, found.T)
        assert (np.diag(found) == 0).all() and found.min() >= 0 and found.max() <= SMALL.loss_bound
        assert found[1, 3] == 0
        assert previous is None or (found >= previous).all()  # a running maximum
        previous = found
    np.testing.assert_array_equal(discrepancies(data, 3), discrepancies(data, 3, mode="reference"))
    order = [3, 0, 4, 2, 1]
    permuted = discrepancies([data[i] for i in order], 3)
    np.testing.assert_array_equal(permuted, discrepancies(data, 3)[np.ix_(order, order)])


def test_u5_without_ascent_it_is_the_gap_at_the_start() -> None:
    data = datasets(3)
    sim = simulation(data=data)
    engine = open_engine("numpy", [sim.federation.task])
    losses = engine.losses("t", sim.server.w0[None, None], sim.fleet.train)[:, 0]
    np.testing.assert_allclose(discrepancies(data, 0), np.abs(losses[:, None] - losses[None, :]), atol=1e-14)


def test_u5_matches_a_plain_loop() -> None:
    """The messages' discrepancy phase equals Algorithm 1 (as mended) written as the loop it is."""
    data = datasets(4)
    sim = simulation(data=data)
    engine = open_engine("numpy", [sim.federation.task])
    expected = np.zeros((4, 4))
    for j in range(4):
        for k in range(j + 1, 4):
            w, best = sim.server.w0.copy(), 0.0
            for _ in range(4):
                (loss_j, g_j), (loss_k, g_k) = (
                    engine.loss_and_gradient("t", w[None, None], sim.fleet.device(i).train) for i in (j, k)
                )
                best = max(best, abs(loss_j - loss_k).item())
                w = w + 0.05 * np.sign(loss_k - loss_j).item() * (g_k - g_j)[0, 0]
            expected[j, k] = expected[k, j] = best
    np.testing.assert_allclose(discrepancies(data, 3), expected, atol=1e-12)


@pytest.mark.slow
def test_u5_discrepancy_vanishes_within_a_cohort_as_data_grows() -> None:
    within, across = [], []
    for size in (20, 80, 320, 1280):
        found = discrepancies(datasets(8, size=size, seed=5), 10)
        kind = np.arange(8) % 2
        same = kind[:, None] == kind[None, :]
        upper = np.triu(np.ones((8, 8), dtype=bool), 1)
        within.append(found[upper & same].mean())
        across.append(found[upper & ~same].mean())
    assert within == sorted(within, reverse=True)
    assert within[-1] < 0.25 * across[-1]


@pytest.mark.parametrize("seed", range(6))
def test_u6_subgradient_of_the_gap(seed: int) -> None:
    engine = open_engine("numpy", [SMALL])
    rng = np.random.default_rng(seed)
    w = SMALL.initial(rng)
    sets = [Batch(rng.normal(size=(1, 9, 8)), rng.integers(0, 4, (1, 9)), np.ones((1, 9))) for _ in range(2)]

    def gap(v: np.ndarray) -> float:
        a, b = (engine.losses("t", v[None, None], s)[0, 0] for s in sets)
        return float(abs(a - b))

    for first, second in ((0, 1), (1, 0)):
        (lj, gj), (lk, gk) = (engine.loss_and_gradient("t", w[None, None], sets[i]) for i in (first, second))
        direction = gap_subgradient(lj.item(), lk.item(), gj[0, 0], gk[0, 0])
        for i in rng.choice(w.size, 10, replace=False):
            e = np.zeros(w.size)
            e[i] = 1e-6
            assert direction[i] == pytest.approx((gap(w + e) - gap(w - e)) / 2e-6, rel=1e-5, abs=1e-7)
        assert gap(w + 1e-4 * direction) >= gap(w)
        printed = (gj - gk)[0, 0] * (lk > lj).item() - (gk - gj)[0, 0] * (lj <= lk).item()  # eq. 8 as printed
        if lk > lj:
            assert gap(w + 1e-4 * printed) < gap(w)
        else:
            assert not printed.any()


def test_u9_weight_step_by_hand() -> None:
    server = mtfeel.Server(Settings((SMALL,), 9, 0, Config(eta=0.1, exchange="full")))
    for i, samples in enumerate((3, 1)):
        server.joined(Device(f"d{i}", i, samples))
    server.admit_waiting()
    server.A = np.array([[0.75, 0.25], [0.0, 1.0]])
    rng = np.random.default_rng(0)
    signs = rng.choice([-1, 1], size=(2, 2, server.w0.size)).astype(np.int8)
    reception = Reception({f"d{m}": {("t", f"sign/{k}"): signs[k, m] for k in range(2)} for m in range(2)})
    before = server.W.copy()
    server._weight_step(Exchange(1, "full", 1, {}, {}), reception)
    for k, lam in enumerate((0.75, 0.25)):
        expected = before[k] - 0.1 * lam * (server.A[k] @ signs[k])
        np.testing.assert_allclose(server.W[k], expected, atol=1e-15)
        assert np.abs(server.W[k] - before[k]).max() <= 0.1 * lam + 1e-15


@pytest.mark.parametrize("policy", ["drop", "renorm", "hold", "garbage"])
def test_u9_outage_policies(policy: str) -> None:
    server = mtfeel.Server(Settings((SMALL,), 9, 0, Config(eta=1.0, on_outage=policy)))  # type: ignore[arg-type]
    for i in range(2):
        server.joined(Device(f"d{i}", i, 1))
    server.admit_waiting()
    server.A[:] = 0.5
    ones = np.ones(server.w0.size, dtype=np.int8)
    both = Reception({f"d{m}": {("t", f"sign/{k}"): ones for k in range(2)} for m in range(2)})
    one = Reception({"d0": both.reports["d0"], "d1": {}}, erased={("d1", ("t", "sign/0"))})
    exchange = Exchange(1, "signs", 1, {}, {})
    start = server.W[0].copy()
    server._weight_step(exchange, both)
    np.testing.assert_allclose(server.W[0], start - 0.5, atol=1e-15)
    server._weight_step(exchange, one)
    step = start - 0.5 - server.W[0]
    if policy == "garbage":
        assert set(np.round(np.unique(step), 12)) == {0.0, 0.5}
    else:
        np.testing.assert_allclose(step, {"drop": 0.25, "renorm": 0.5, "hold": 0.5}[policy], atol=1e-15)


def test_u10_frozen_uniform_alpha_is_sign_sgd() -> None:
    server = run('frozen_alpha = true\nties = "plus"\neta = 0.06')
    assert (server.W[0] == server.W).all()
    text = (
        '[federation]\nmethod = "sign-sgd"\nrounds = 6\ndevices = 6\n[task]\nname = "t"\nlayers = [8, 5, 4]\n'
        'dtype = "float64"\n[method]\nlearning_rate = 0.01\nties = "plus"\n'
    )
    other = Simulation(
        Federation.from_file(TomlFile.parse(text)), engine="numpy", datasets=datasets(), link=LinkConfig()
    ).run()
    assert isinstance(other.server, sign_sgd.Server)
    np.testing.assert_allclose(server.W[0], other.server.w, atol=1e-12)


def test_u11_alpha_on_self_is_local_sign_sgd() -> None:
    sim = simulation('frozen_alpha = true\nties = "plus"\neta = 0.06')
    sim.server.admit_waiting()
    sim.server.A = np.eye(6)
    sim.run()
    engine = open_engine("numpy", [sim.federation.task])
    for k in range(6):
        w = sim.server.w0.copy()
        for _ in range(6):
            gradient = engine.loss_and_gradient("t", w[None, None], sim.fleet.device(k).train)[1][0, 0]
            w = w - 0.06 / 6 * np.where(gradient >= 0, 1, -1)
        np.testing.assert_allclose(sim.server.W[k], w, atol=1e-12)


def test_u12_the_retimed_recursion_is_the_printed_one() -> None:
    """Alpha first with skip_first_alpha_step equals: w step with alpha^t, then alpha step with losses at W^(t+1)."""
    total = 20
    sim = simulation('skip_first_alpha_step = true\nties = "plus"', rounds=total)
    sim.run()
    server = sim.server
    engine = open_engine("numpy", [sim.federation.task])
    size, rate = 6, 1 / math.sqrt(total)
    alpha, W = np.full((size, size), 1 / size), np.repeat(server.w0[None], size, axis=0)
    lam, n = np.full(size, 1 / size), np.full(size, 6.0)
    for t in range(total):
        _, gradients = engine.loss_and_gradient("t", W[None], sim.fleet.train)  # [m, k, d]
        signs = np.where(gradients >= 0, 1, -1)
        W = W - rate * lam[:, None] * np.einsum("km,mkd->kd", alpha, signs)
        if t + 1 < total:  # the printed algorithm's last alpha step is never used by weights
            losses = engine.losses("t", W[None], sim.fleet.train).T
            step = alpha_gradient(alpha, losses, server.D, lam, n, server.kappa, 1)
            alpha = project_simplex(alpha - rate * step)
    np.testing.assert_allclose(server.W, W, atol=1e-10)
    np.testing.assert_allclose(server.A, alpha, atol=1e-10)


@pytest.mark.parametrize(
    "link",
    [
        LinkConfig(),
        LinkConfig("outage", snr_db=0.0, bandwidth_hz=200.0),
        LinkConfig("outage", snr_db=0.0, bandwidth_hz=200.0, granularity="vector"),
        LinkConfig("flips", flip_probability=0.1),
    ],
    ids=lambda link: f"{link.model}-{link.granularity}",
)
def test_u13_support_only_exchange_changes_nothing(link: LinkConfig) -> None:
    options = "kappa = 3.0\nmu = 0.5\n"
    two_phase = simulation(options, link=link, rounds=12)
    full = simulation(options + 'exchange = "full"', link=link, rounds=12)
    rows = [sim.run().rows for sim in (two_phase, full)]
    np.testing.assert_allclose(two_phase.server.A, full.server.A, atol=1e-12)
    np.testing.assert_allclose(two_phase.server.W, full.server.W, atol=1e-12)
    sent = [sum(row["signals"] for row in r if row["phase"] in ("signs", "full")) for r in rows]
    assert 0 < sent[0] < sent[1]


def test_u14_relabelling_devices_permutes_the_result() -> None:
    data, order = datasets(), [3, 1, 5, 0, 4, 2]
    options = 'sign_codec = "ternary"\n'
    one = run(options, data=data)
    other = run(options, data=[data[i] for i in order])
    np.testing.assert_allclose(other.A, one.A[np.ix_(order, order)], atol=1e-9)
    np.testing.assert_allclose(other.W, one.W[order], atol=1e-9)


def test_u17_proposition_1_and_the_projected_gradient() -> None:
    rng = np.random.default_rng(17)
    for _ in range(200):
        case = instance(rng)
        size, bound, log_cover = len(case["n"]), 4.605, float(rng.uniform(1, 90))
        kappa = bound * math.sqrt(size / 2 * log_cover)
        zero = np.zeros_like(case["alpha"])
        penalty = alpha_gradient(case["alpha"], zero, zero, case["lam"], case["n"], kappa / size, 2)
        beta = bound / math.sqrt(2 * size) * math.sqrt(log_cover)
        assert (np.linalg.norm(penalty, axis=1) <= beta + 1e-12).all()
        gradient, mu = rng.normal(size=size), float(rng.uniform(0.01, 2))
        z = case["alpha"][0]
        projected = (z - project_simplex(z - mu * gradient)) / mu
        assert gradient @ projected >= projected @ projected - 1e-9


def test_u18_mixture_bound_on_a_finite_class() -> None:
    """Theorem 1 (a): sum lam_k L_k(w_k) <= sum lam_k A_kj L_j(w_k) + sum lam_k A_kj d_kj with d by brute force."""
    rng = np.random.default_rng(18)
    size, models = 3, 5
    losses = rng.uniform(0, 4, (models, size))  # L_j(w)
    d = np.abs(losses[:, :, None] - losses[:, None, :]).max(axis=0)
    lam, alpha = rng.dirichlet(np.ones(size)), project_simplex(rng.normal(size=(size, size)))
    for choice in np.ndindex(*[models] * size):
        own = sum(lam[k] * losses[choice[k], k] for k in range(size))
        mixed = sum(lam[k] * alpha[k, j] * (losses[choice[k], j] + d[k, j]) for k in range(size) for j in range(size))
        assert own <= mixed + 1e-12


def test_u20_byte_counters_follow_the_formulas() -> None:
    sim = simulation('exchange = "full"', rounds=2)
    rows = sim.run().rows
    d, size = sim.server.w0.size, 6
    for row in rows:
        if row["phase"] == "full":
            assert row["uplink_bytes"] == size * (size * math.ceil(d / 8) + 8 * size)  # losses are float64 here
    up = sum(row["uplink_bytes"] for row in rows if row["phase"] == "discrepancy")
    pairs, steps = size * (size - 1) // 2, 3
    first, last = size * 8 * (d + 1), 2 * pairs * 8
    assert up == first + (steps - 1) * 2 * pairs * 8 * (d + 1) + last


def test_weighted_sign_sum_equals_the_plain_sum() -> None:
    rng = np.random.default_rng(0)
    weights = project_simplex(rng.normal(size=19) * 0.2)
    signs = {m: rng.choice([-1, 1], 300).astype(np.int8) for m in range(19) if m % 3}
    expected = sum(weights[m] * signs[m] for m in signs)
    np.testing.assert_allclose(weighted_sign_sum(signs, weights, 300), expected, atol=1e-14)
    used = {m: v for m, v in signs.items() if weights[m] > 0}
    np.testing.assert_array_equal(weighted_sign_sum(used, weights, 300), weighted_sign_sum(signs, weights, 300))


def test_kappa_of_the_paper_setting() -> None:
    assert default_kappa(math.log(100), 30, 0.05, 0.1) == pytest.approx(170.4, abs=0.05)


def test_profiles() -> None:
    assert (Config().exponent, Config().diagonal_policy) == (1, "zero")
    literal = Config(profile="paper-literal")
    assert (literal.exponent, literal.diagonal_policy) == (2, "one")
    assert (np.diag(run('profile = "paper-literal"').D) == 1).all()
    found = run('diagonal = "rowmin"').D
    off = found + np.where(np.eye(6) > 0, np.inf, 0)
    np.testing.assert_array_equal(np.diag(found), off.min(axis=1))


def test_state_restores_to_the_bit_at_every_exchange() -> None:
    from fadefed.messages.wire import pack_state, unpack_state

    whole = simulation('on_outage = "hold"', link=LinkConfig("outage", snr_db=0.0, bandwidth_hz=200.0))
    broken = simulation('on_outage = "hold"', link=LinkConfig("outage", snr_db=0.0, bandwidth_hz=200.0))
    whole.run()
    for exchange in iter(broken.next_exchange, None):
        broken.server.absorb(exchange, broken.channel.carry(exchange, broken.answer(exchange)))
        stored = unpack_state(pack_state(broken.server.state()))
        broken.server = broken.federation.server()
        broken.server.restore(stored)
    np.testing.assert_array_equal(whole.server.W, broken.server.W)
    np.testing.assert_array_equal(whole.server.A, broken.server.A)


def test_a_device_that_joins_later_gets_its_pairs_and_its_row() -> None:
    sim = simulation(rounds=8)
    late = sim.devices.pop("device-005")
    server = sim.federation.server()
    sim.server = server
    for device in sim.devices.values():
        server.joined(device)
    phases = []
    for exchange in iter(sim.next_exchange, None):
        phases.append((exchange.round, exchange.phase, len(exchange.orders)))
        server.absorb(exchange, sim.channel.carry(exchange, sim.answer(exchange)))
        if exchange.round == 3 and exchange.phase == "losses":
            sim.devices["device-005"] = late
            server.joined(late)
    assert server.W.shape[0] == 6 and server.D[5, :5].min() > 0 and server.D.max() < SMALL.loss_bound
    assert (3, "signs", 5) in phases  # not within the round in which it came
    assert any(phase == "discrepancy" and number == 3 for number, phase, _ in phases)
    assert not np.array_equal(server.W[5], server.w0)


def test_an_unreachable_pair_does_not_stop_training() -> None:
    sim = simulation(rounds=3)
    for exchange in iter(sim.next_exchange, None):
        reports = sim.answer(exchange)
        if exchange.phase == "discrepancy":
            reports.pop("device-002", None)
        sim.server.absorb(exchange, sim.channel.carry(exchange, reports))
    assert sim.server.round == 3
    assert sim.server.D[2, 0] == pytest.approx(Loss().bound(4))  # unknown counts as different
    assert 0 < sim.server.D[0, 1] < Loss().bound(4)
