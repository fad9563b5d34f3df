"""The peers' workload: 4 client processes, MLP 784-128-10, 256 images each, one local epoch, mosquitto and proxy.

FedAvg whose updates travel as one bit per parameter with scale and error feedback. Beside it, in the simulator, rounds
and bytes to a target accuracy, against float32 updates: compression that needs more rounds must show it.
"""

import json
import threading

import psutil

from benchmarks.common import federation, lab_folder, median, options, show
from fadefed.demo.processes import Processes
from fadefed.simulation import Simulation
from tests.support import Lab

ROUNDS, TARGET = 40, 0.85


def text(codec: str, rate: float = 1.0) -> str:
    return (
        f'[federation]\nmethod = "fedavg"\nrounds = {ROUNDS}\ndevices = 4\nevaluate_every = 1\n'
        '[task]\nlayers = [784, 128, 10]\n[data]\nsplit = "homogeneous"\ntrain = 256\ntest = 200\n'
        f'[method]\nlearning_rate = 0.1\nepochs = 1\nbatch_size = 32\nserver_rate = {rate}\ncodec = "{codec}"\n'
    )


def first_round_at(rows: list[dict], target: float) -> int | None:
    """Rounds done when mean test accuracy first reached `target` (it is measured before the round's step)."""
    return next((row["round"] - 1 for row in rows if row.get("test_accuracy", 0) >= target), None)


def main() -> None:
    arguments = options(__doc__).parse_args()
    fed = federation(text("sign-feedback"))
    with lab_folder(fed) as (folder, graphs), Processes(folder / "lab") as processes:
        parts = Lab(processes, fed, graphs)
        parts.start_clients()
        cpu: dict[int, list[float]] = {}

        def watch(row: dict) -> None:
            cpu[row["round"]] = [
                sum(psutil.Process(child.pid).cpu_times()[:2])
                for name, child in processes.children.items()
                if name.startswith("device") and child.poll() is None
            ]

        thread = threading.Thread(target=parts.aggregator(watch).run)
        thread.start()
        thread.join(300)
        found = [json.loads(line) for line in (processes.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    training = [row for row in found if row["phase"] == "train"]
    steady = training[1:]
    first, last = min(cpu), max(r for r in cpu if len(cpu[r]) == 4 and r <= ROUNDS)
    per_round = sum(b - a for a, b in zip(cpu[first], cpu[last], strict=True)) / 4 / (last - first)
    up = max(row["uplink_bytes"] / row["reported"] for row in training)
    rows = [
        {
            "what": "s per round, median after round 1",
            "value": median([row["seconds"] for row in steady]),
            "target": "<= 1",
        },
        {"what": "CPU-s per client and round", "value": per_round, "target": "<= 0.2"},
        {"what": "uplink kB per client and round, largest", "value": up / 1e3, "target": "<= 13.2"},
    ]
    curves = {
        codec: Simulation(federation(text(codec)), engine="numpy").run().rows for codec in ("sign-feedback", "float32")
    }
    for codec, curve in curves.items():
        reached = first_round_at(curve, TARGET)
        sent = sum(row["uplink_bytes"] for row in curve if reached and row["round"] <= reached) / 4
        rows.append(
            {"what": f"{codec}: rounds to test accuracy {TARGET}", "value": reached if reached else f"> {ROUNDS}"}
        )
        rows.append({"what": f"{codec}: uplink kB per client until then", "value": sent / 1e3})
        rows.append({"what": f"{codec}: test accuracy in round {ROUNDS}", "value": curve[-1]["test_accuracy"]})
    show("Peers' workload, d = 101,770", rows, arguments.json)


if __name__ == "__main__":
    main()
