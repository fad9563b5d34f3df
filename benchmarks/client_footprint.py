"""A client process: memory, time to join, idle traffic, presence, and the size of a fresh client-only environment."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.common import federation, lab_folder, options, show
from fadefed.demo.processes import Processes
from fadefed.federation import device_name
from fadefed.mqtt import BrokerAddress
from tests.relay import Relay
from tests.support import Lab, running, wait_until

IDLE_S = 65
KEEPALIVE_S = 30


def pss_mib(pid: int) -> float:
    """Proportional set size."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel gives no PSS")


class RelayThread:
    """A relay in a thread of this process, which counts bytes and can go silent."""

    def __init__(self, target: int) -> None:
        self.relay = Relay(target)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        port = asyncio.run_coroutine_threadsafe(self.relay.start(), self.loop).result(5)
        self.address = BrokerAddress("127.0.0.1", port)


def environment_mb() -> float:
    """Size of a new virtual environment with the base install alone."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([f"{folder}/bin/pip", "install", "--quiet", "."], check=True, stderr=subprocess.DEVNULL)
        subprocess.run([f"{folder}/bin/pip", "uninstall", "--quiet", "--yes", "pip"], check=True)
        size = subprocess.run(["du", "-sm", folder], check=True, capture_output=True, text=True).stdout
    return float(size.split()[0])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--environment", action="store_true", help="also measure a fresh client-only environment")
    arguments = parser.parse_args()
    rows: list[dict] = []
    fed = federation('[federation]\nmethod = "sign-sgd"\nrounds = 100000\ndevices = 2\nevaluate_every = 100000\n')
    with lab_folder(fed) as (folder, graphs), Processes(folder / "lab") as processes:
        parts = Lab(processes, fed, graphs)
        relay = RelayThread(parts.broker.port)
        client = parts.start_client(0, "--keepalive", str(KEEPALIVE_S), broker=relay.address)
        time.sleep(5)
        before = relay.relay.bytes_up + relay.relay.bytes_down
        time.sleep(IDLE_S)
        idle = (relay.relay.bytes_up + relay.relay.bytes_down - before) / IDLE_S
        rows.append({"what": "idle, before a task: PSS MiB", "value": pss_mib(client.pid), "target": "<= 60"})
        rows.append({"what": "idle traffic, both ways: B/s of TCP payload", "value": idle, "target": "<= 5"})
        seen: list[dict] = []
        aggregator = parts.aggregator(seen.append)
        with running(aggregator):
            wait_until(lambda: device_name(0) in aggregator.online)
            start = time.perf_counter()
            second = parts.start_client(1)
            wait_until(lambda: device_name(1) in aggregator.online)
            joined = time.perf_counter() - start
            rows.append({"what": "start of the process to joined, s", "value": joined, "target": "<= 5"})
            wait_until(lambda: len(seen) > 50)
            rows.append({"what": "in training, d = 25,450: PSS MiB", "value": pss_mib(client.pid), "target": "<= 150"})
            second.send_signal(signal.SIGKILL)
            start = time.perf_counter()
            wait_until(lambda: device_name(1) not in aggregator.online)
            rows.append(
                {"what": "SIGKILL to off the roster, s", "value": time.perf_counter() - start, "target": "<= 5"}
            )
            relay.relay.silent = True
            start = time.perf_counter()
            wait_until(lambda: device_name(0) not in aggregator.online, 3 * KEEPALIVE_S)
            silent = time.perf_counter() - start
            target = f"<= {1.5 * KEEPALIVE_S:g}"
            rows.append(
                {
                    "what": f"silent network to off the roster, s (keep-alive {KEEPALIVE_S})",
                    "value": silent,
                    "target": target,
                }
            )
    if arguments.environment:
        rows.append({"what": "fresh client-only environment, MB", "value": environment_mb()})
    show("One client", rows, arguments.json)
    os._exit(0)  # the relay's loop has connections that nobody will ever answer


if __name__ == "__main__":
    main()
