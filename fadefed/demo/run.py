"""The demo: broker, channel, aggregator and ten clients; then baselines in the simulator, pictures and a table."""

import contextlib
import io
import json
import logging
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from aggregator import Aggregator
from channel_emu import LinkConfig
from fadefed.config import TomlFile
from fadefed.demo.pictures import draw_accuracy, draw_alpha, draw_outages
from fadefed.demo.processes import BrokerKind, Processes
from fadefed.errors import ConfigError
from fadefed.federation import Federation, device_name
from fadefed.files import write_atomic
from fadefed.learning.export import export_task
from fadefed.messages import Array
from fadefed.messages.wire import unpack_state
from fadefed.simulation import Simulation
from fadefed.tasks import Dataset, save_npz
from fadefed.tasks.splits import cohort_of

DEVICES = 10
MARK = "demo.toml"

CONFIG = """# The federation that `fadefed demo` ran.
[federation]
name = "demo"
method = "mtfeel"
rounds = {rounds}
devices = {devices}
seed = {seed}
deadline_s = 30.0
evaluate_every = {every}

[task]
name = "mnist"
layers = [784, 32, 10]

[data]
pool = "mnist"
split = "cohorts"
train = 20
test = 80

[channel]
model = "outage"
seed = {seed}
snr_db = {snr_db}
# A sign vector of 25,450 bits then loads the link with r = 0.3 bit/s/Hz.
bandwidth_hz = 84833.3
slot_s = 1.0
"""

BASELINES = (
    ("sign-SGD, mean", "sign-sgd", "learning_rate = 0.01", True),
    ("Local", "local", "learning_rate = 0.3", True),
    ("FedSGD, float32", "fedsgd", "learning_rate = 1.0", False),
    ("FedAvg, float32, E = 5", "fedavg", "learning_rate = 0.3\nepochs = 5", False),
)
"""(label, method, options, through the channel). A float32 vector loads the link 32 times as much as a sign vector:
2^(32 r) - 1 over the SNR leaves it in outage practically always, so those two run over an error-free link."""


def run(folder: Path, rounds: int, seed: int, snr_db: float, broker: BrokerKind | None) -> int:
    """Run the demo into `folder`; the exit code. Ends all its processes, on Ctrl-C too."""
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: give at least 1.")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise ConfigError(f"{folder} holds something else than a demo. Give another --run folder.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    every = max(1, rounds // 30)
    text = CONFIG.format(rounds=rounds, devices=DEVICES, seed=seed, snr_db=float(snr_db), every=every)
    write_atomic(folder / MARK, text.encode())
    federation = Federation.from_file(TomlFile.parse(text, str(folder / MARK)))
    console = Console(width=None if sys.stdout.isatty() else 110)
    for name in ("fadefed", "iotcore", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    console.print(
        f"[bold]FadeFed demo[/bold]: {DEVICES} edge clients in three hidden cohorts, MNIST, "
        f"MLP 784-32-10 (d = {federation.task.layout.size:,}), Rayleigh fading at {snr_db:g} dB"
    )
    started = time.monotonic()
    datasets = federation.deal()
    console.print("Exporting the gradient graph (boards run it without torch) ...")
    with contextlib.redirect_stdout(io.StringIO()):
        graphs = export_task(federation.task, folder / "task")
    with _interruptible(), Processes(folder / "processes") as processes:
        summary = _federation(console, processes, federation, folder, graphs, datasets, broker)
    if summary is None:
        return 130
    elapsed = time.monotonic() - started
    return _report(console, federation, folder, datasets, summary, elapsed)


@contextlib.contextmanager
def _interruptible() -> Any:
    """SIGTERM ends the demo as Ctrl-C does, so that its processes end with it."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _federation(
    console: Console,
    processes: Processes,
    federation: Federation,
    folder: Path,
    graphs: dict[str, Path],
    datasets: list[Dataset],
    broker: BrokerKind | None,
) -> dict[str, Any] | None:
    address, kind = processes.broker(broker)
    gateway = processes.channel(folder / MARK, address)
    for number, dataset in enumerate(datasets):
        name = device_name(number)
        save_npz(folder / "data" / f"{name}.npz", dataset)
        processes.client(name, folder / "data" / f"{name}.npz", address)
    console.print(
        f"Processes: {kind} on port {address.port}, channel emulator on port {gateway.port}, {DEVICES} clients. "
        f"Logs in {processes.folder}."
    )
    progress = Progress(federation, console)
    aggregator = Aggregator(federation, folder / "run", graphs, gateway, progress.add)
    with progress:
        return aggregator.run()


class Progress:
    """Live lines: discrepancy phase, then rounds with loss, accuracy, outage rate and bytes."""

    def __init__(self, federation: Federation, console: Console) -> None:
        self.federation = federation
        self.uplink = self.erased = self.signals = 0
        self.latest: dict[str, Any] = {}
        self.accuracy: float | None = None
        self.console = console
        self.live = Live(self.table(), console=console, refresh_per_second=4, transient=not console.is_terminal)
        self.next_print = 0

    def __enter__(self) -> None:
        if self.console.is_terminal:
            self.live.start()

    def __exit__(self, *_: Any) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def add(self, row: dict[str, Any]) -> None:
        self.latest |= row
        self.uplink += row["uplink_bytes"]
        self.erased += row["erased"]
        self.signals += row["signals"]
        self.accuracy = row.get("test_accuracy", self.accuracy)
        if self.console.is_terminal:
            self.live.update(self.table())
        elif row["phase"] == "discrepancy" and row.get("pairs_left") == 0:
            self.console.print(f"discrepancies of all pairs estimated, {self.uplink / 1e6:.1f} MB up")
        elif row["round"] >= self.next_print and row["phase"] == "signs":
            self.next_print = row["round"] + max(1, self.federation.config.rounds // 10)
            self.console.print(self.line())

    def line(self) -> str:
        row = self.latest
        accuracy = f"{self.accuracy:.3f}" if self.accuracy is not None else "-"
        return (
            f"round {row.get('round', 0):4d}   loss {row.get('train_loss', float('nan')):.3f}   test accuracy {accuracy}   "
            f"outage rate {self.erased / max(self.signals, 1):.3f}   {self.uplink / 1e6:.1f} MB up"
        )

    def table(self) -> Table:
        row = self.latest
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        if row.get("phase") == "discrepancy":
            table.add_row(
                "discrepancy phase", f"{row.get('pairs_left', '?')} pairs left", f"{self.uplink / 1e6:.1f} MB up"
            )
        elif row:
            done = int(30 * row["round"] / self.federation.config.rounds)
            table.add_row(f"{'━' * done}{'╌' * (30 - done)}", self.line())
        else:
            table.add_row("waiting for the clients to join ...")
        return table


def _report(
    console: Console,
    federation: Federation,
    folder: Path,
    datasets: list[Dataset],
    summary: dict[str, Any],
    elapsed: float,
) -> int:
    """Baselines, alpha mass, table, pictures, summary.json."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    server = unpack_state((folder / "run" / "checkpoint").read_bytes())["server"]
    alpha: Array = server["A"]
    cohorts = np.array(cohort_of(DEVICES))
    mass = float((alpha * (cohorts[:, None] == cohorts[None, :])).sum(axis=1).mean())
    rounds = federation.config.rounds
    curves = {"MtFEEL (this run, over MQTT)": _curve(rows)}
    mean = summary["mean"]
    table = Table(title="Mean over devices; each on its own test images")
    for column in ("method", "link", "test", "train", "uplink per device and round"):
        table.add_column(column, justify="left" if column in ("method", "link") else "right")
    training = [row for row in rows if row["phase"] in ("losses", "signs")]
    used = sum(row["uplink_bytes"] for row in training) / rounds / DEVICES
    link = LinkConfig.read(federation.file)
    fading = f"Rayleigh, {federation.file.tables['channel']['snr_db']:g} dB"
    table.add_row(
        "[bold]MtFEEL[/bold]", fading, f"{mean['test_accuracy']:.3f}",
        f"{mean['train_accuracy']:.3f}", f"{used / 1e3:.1f} kB",
    )  # fmt: skip
    results: dict[str, Any] = {"MtFEEL": {"link": fading, **mean, "uplink_bytes_per_device_round": used}}
    console.print("Baselines in the simulator, same data, same channel where one bit per parameter fits it ...")
    for label, method, options, through in BASELINES:
        text = federation.file.text.replace('method = "mtfeel"', f'method = "{method}"')
        other = Federation.from_file(TomlFile.parse(f"{text}\n[method]\n{options}\n", label))
        result = Simulation(other, engine="numpy", datasets=datasets, link=link if through else LinkConfig()).run()
        curves[label] = _curve(result.rows)
        name = fading if through and method != "local" else ("no uplink" if method == "local" else "error-free link")
        sent = sum(row["uplink_bytes"] for row in result.rows) / rounds / DEVICES
        test, train = float(np.nanmean(result.test_accuracy)), float(result.train_accuracy.mean())
        results[label] = {
            "link": name, "test_accuracy": test, "train_accuracy": train, "uplink_bytes_per_device_round": sent,
        }  # fmt: skip
        table.add_row(label, name, f"{test:.3f}", f"{train:.3f}", f"{sent / 1e3:.1f} kB")
    console.print(table)
    _int8_lines(console, mean)
    discrepancy = sum(row["uplink_bytes"] for row in rows if row["phase"] == "discrepancy")
    console.print(
        f"Importance that a device gives its own hidden cohort: {mass:.2f} on average. "
        f"Discrepancy phase: {discrepancy / 1e6:.1f} MB up, once. {rounds} rounds and all in {elapsed:.0f} s."
    )
    names = [device_name(i) for i in range(DEVICES)]
    lost_rounds = {name: sum(name in row.get("outages", {}) for row in rows) for name in names}
    sent_rounds = dict.fromkeys(names, sum(row["phase"] == "signs" for row in rows))
    draw_accuracy(folder / "accuracy.png", curves)
    draw_alpha(folder / "alpha.png", alpha, cohorts)
    closed_form = link.outage_probability(federation.task.layout.size)
    draw_outages(folder / "outages.png", lost_rounds, sent_rounds, closed_form)
    full = {
        "seconds": elapsed,
        "in_cohort_alpha_mass": mass,
        "discrepancy_uplink_bytes": discrepancy,
        "closed_form_outage": closed_form,
        "methods": results,
        "federation": summary,
    }
    write_atomic(folder / "summary.json", (json.dumps(full, indent=2) + "\n").encode())
    console.print(f"Configuration, metrics, summary and pictures are in {folder}.")
    sys.stdout.flush()
    return 0


def _int8_lines(console: Console, mean: dict[str, float]) -> None:
    if "int8_accuracy" in mean:
        console.print(
            f"On the boards, INT8 ({mean['int8_weight_bits']:.0f}-bit weights) beside fp32: accuracy "
            f"{mean['int8_accuracy']:.3f} / {mean['fp32_accuracy']:.3f}, parameters {mean['int8_bytes'] / 1e3:.1f} / "
            f"{mean['fp32_bytes'] / 1e3:.1f} kB, one image {mean['int8_latency_us']:.0f} / "
            f"{mean['fp32_latency_us']:.0f} us."
        )


def _curve(rows: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Rounds done, and mean test accuracy after them."""
    measured = [row for row in rows if "test_accuracy" in row and row["round"] >= 1]
    return [row["round"] - 1 for row in measured], [row["test_accuracy"] for row in measured]
