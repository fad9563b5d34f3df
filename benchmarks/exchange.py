"""Overhead of one exchange over mosquitto and the proxy, beside an empty paho round trip in the same run.

10 client processes with one training image each, so that computing takes a negligible part; it is left in, which
makes the figures upper bounds.
"""

import json
import sys
import threading
import time

from benchmarks.common import federation, lab_folder, median, options, show
from fadefed.demo.processes import Processes
from fadefed.experiments import mtfeel as experiment
from fadefed.messages.codecs import coded_size
from fadefed.mqtt import BrokerAddress, Session
from fadefed.simulation import Simulation
from tests.support import Lab

ECHO = """
import sys, time
from fadefed.mqtt import BrokerAddress, Session
from fadefed.simulation import Simulation
s = Session(BrokerAddress("127.0.0.1", int(sys.argv[1])), "echo", ["ping"])
s.start(10)
while True:
    e = s.next_event(60)
    if e is None: break
    if e.kind == "message": s.publish("pong", e.payload)
"""


def round_trips(broker: BrokerAddress, count: int = 200) -> list[float]:
    """Seconds of QoS 1 publications that another process sends back."""
    session = Session(broker, "ping", ["pong"])
    session.start(10)
    times = []
    while len(times) < count:
        start = time.perf_counter()
        session.publish("ping", b"")
        while (event := session.next_event(1.0)) is not None and event.kind != "message":
            pass
        if event is not None:
            times.append(time.perf_counter() - start)
    session.stop()
    return times[10:]


def main() -> None:
    arguments = options(__doc__).parse_args()
    rows = []
    for method in ("sign-sgd", "mtfeel"):
        fed = federation(
            f'[federation]\nmethod = "{method}"\nrounds = 150\ndevices = 10\nevaluate_every = 1000\n'
            '[data]\ntrain = 1\ntest = 1\n[channel]\nmodel = "outage"\nsnr_db = 10\nbandwidth_hz = 84833.3\n'
        )
        with lab_folder(fed) as (folder, graphs), Processes(folder / "lab") as processes:
            parts = Lab(processes, fed, graphs)
            if not rows:
                processes.start("echo", sys.executable, "-c", ECHO, str(parts.broker.port))
                rows.append(
                    {"what": "empty paho round trip, ms, median", "value": 1e3 * median(round_trips(parts.broker))}
                )
            parts.start_clients()
            thread = threading.Thread(target=parts.aggregator().run)
            thread.start()
            thread.join(300)
            found = [json.loads(line) for line in (processes.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        d = fed.task.layout.size
        for phase in dict.fromkeys(row["phase"] for row in found if row["phase"] != "final"):
            chosen = [row for row in found if row["phase"] == phase]
            steady = chosen[len(chosen) // 5 :]
            seconds = median([row["seconds"] for row in steady])
            target = "<= 50" if phase == "train" else ""
            rows.append({"what": f"{method}, {phase}: ms, median", "value": 1e3 * seconds, "target": target})
            up = [row["uplink_bytes"] / row["reported"] for row in steady if row["reported"]]
            rows.append({"what": f"{method}, {phase}: uplink B per device, mean", "value": sum(up) / len(up)})
            vectors = [row["uplink_bytes"] / row["signals"] for row in steady if row["signals"]]
            if phase in ("train", "signs"):
                limit = d // 8 + 128
                rows.append(
                    {
                        "what": f"{method}, {phase}: B per sign vector, largest",
                        "value": max(vectors),
                        "target": f"<= {limit}",
                    }
                )
    show("One exchange over mosquitto and proxy, 10 devices, d = 25,450", rows, arguments.json)
    uplink = [{"what": "FedAvg, float32", "value": float(coded_size("float32", (25_450,)))}]
    for exchange in ("two-phase", "full"):
        rounds = 300
        paper = experiment.federation("mtfeel", 0, f'exchange = "{exchange}"', rounds=rounds)
        found = Simulation(paper, engine="numpy").run().rows
        sent = sum(row["uplink_bytes"] for row in found if row["phase"] != "discrepancy")
        uplink.append({"what": f"MtFEEL, {exchange} exchange", "value": sent / rounds / experiment.DEVICES})
    sent = sum(row["uplink_bytes"] for row in found if row["phase"] == "discrepancy")
    uplink.append({"what": "MtFEEL, discrepancy phase, once", "value": sent / experiment.DEVICES})
    show("Uplink bytes per device and round, 30 devices, 300 rounds (tensors, without framing)", uplink)


if __name__ == "__main__":
    main()
