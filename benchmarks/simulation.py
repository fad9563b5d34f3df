"""Seconds per round of the paper's setting, against a plain loop, and the share of the machine's matrix-multiply rate."""

import time

import numpy as np

from benchmarks.common import median, options, show
from fadefed.experiments.mtfeel import ROUNDS, federation
from fadefed.methods import mtfeel
from fadefed.simulation import Simulation

WARM, COUNTED = 40, 40


def matmul_rate(size: int = 2048, repeats: int = 5) -> float:
    """FLOP/s of NumPy's float32 matrix product on all cores, best of several."""
    a = np.random.default_rng(0).random((size, size), dtype=np.float32)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def simulated(engine: str) -> tuple[list[float], float, Simulation]:
    """Seconds of rounds WARM + 1 .. WARM + COUNTED, and the FLOP of one of them (mean)."""
    simulation = Simulation(federation("mtfeel", 0), engine=engine)  # type: ignore[arg-type]
    server = simulation.server
    assert isinstance(server, mtfeel.Server)
    times: list[float] = []
    flop = 0.0
    mark = time.perf_counter()
    for exchange in iter(simulation.next_exchange, None):
        server.absorb(exchange, simulation.channel.carry(exchange, simulation.answer(exchange)))
        if exchange.phase != "signs":
            continue
        now = time.perf_counter()
        if server.round > WARM:
            times.append(now - mark)
            # Forward passes of all pairs for the losses; forward and the weights' backward for the support.
            pair = 2 * 20 * simulation.federation.task.layout.size
            flop += 900 * pair + int((server.A > 0).sum()) * 2 * pair
        mark = now
        if len(times) == COUNTED:
            break
    return times, flop / COUNTED, simulation


def main() -> None:
    arguments = options(__doc__).parse_args()
    rate = matmul_rate()
    rows = []
    results = {engine: simulated(engine) for engine in ("numpy", "torch")}
    # Only now: the simulator on NumPy does not import torch, whose many objects slow the garbage collector.
    from benchmarks.plain_loop import PlainLoop

    simulation = results["numpy"][2]
    train, server = simulation.fleet.train, simulation.server
    assert isinstance(server, mtfeel.Server)
    loop = PlainLoop(train.x, train.y, server.w0, server.D, server.kappa, ROUNDS)
    loop.round()
    loop_times = []
    for _ in range(10):
        start = time.perf_counter()
        loop.round()
        loop_times.append(time.perf_counter() - start)
    plain = median(loop_times)
    rows.append({"what": "plain loop, s per round", "value": plain})
    for engine, (times, flop, _) in results.items():
        seconds = median(times)
        rows.append({"what": f"simulator, {engine} engine, s per round", "value": seconds})
        rows.append({"what": f"simulator, {engine} engine, times faster", "value": plain / seconds, "target": ">= 5"})
        rows.append({"what": f"simulator, {engine} engine, share of matmul rate", "value": flop / seconds / rate})
    rows.append({"what": "matrix-multiply rate, GFLOP/s", "value": rate / 1e9})
    show("MtFEEL, 30 devices, d = 25,450, 20 images each", rows, arguments.json)


if __name__ == "__main__":
    main()
