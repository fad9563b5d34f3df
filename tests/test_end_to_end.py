"""Whole federations: real mosquitto, channel emulator and clients as processes, faults included."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from fadefed.demo.processes import Processes, free_port
from fadefed.federation import device_name
from fadefed.mqtt import BrokerAddress, Session, Topics
from tests.support import Lab, federation, final_models, lab, running, simulated_models, wait_until

TOPICS = Topics()


@pytest.mark.parametrize("method", ["mtfeel", "sign-sgd"])
def test_mqtt_equals_the_simulator_bit_for_bit(method: str, tmp_path: Path, graphs: Path) -> None:
    """10 devices, 20 rounds, fading included; and the boards end with INT8 models."""
    fed = federation(method, rounds=20, devices=10)
    with lab(tmp_path, fed, graphs) as parts:
        parts.start_clients()
        aggregator = parts.aggregator()
        summary = aggregator.run()
        assert summary is not None
        for child in [c for name, c in parts.processes.children.items() if name.startswith("device")]:
            assert child.wait(20) == 0
    models = final_models(aggregator)
    if method == "sign-sgd":
        models = models[:1].repeat(10, axis=0)
    np.testing.assert_array_equal(models, simulated_models(fed, graphs))
    assert parts.aggregator().run() == summary  # started again on a finished run: the same answer, broker or not
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["erased"] for row in rows) > 0  # the channel acted
    assert not any("absent" in row or "refused" in row for row in rows)
    mean = summary["mean"]
    assert mean["int8_bytes"] < 0.3 * mean["fp32_bytes"]
    assert abs(mean["int8_accuracy"] - mean["fp32_accuracy"]) < 0.05
    assert mean["int8_latency_us"] > 0
    sign_rows = [row for row in rows if row["phase"] in ("signs", "train")]
    d = fed.task.layout.size
    for row in sign_rows:
        assert row["signals"] * -(-d // 8) < row["uplink_bytes"] <= row["signals"] * (-(-d // 8) + 128)


def test_aggregator_killed_at_random_moments_ends_with_the_same_models(tmp_path: Path, graphs: Path) -> None:
    kills(tmp_path, graphs, kills=2, rounds=25)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_aggregator_killed_twenty_times(tmp_path: Path, graphs: Path) -> None:
    kills(tmp_path, graphs, kills=20, rounds=150)


def kills(folder: Path, graphs: Path, kills: int, rounds: int) -> None:
    from fadefed.messages.wire import unpack_state

    fed = federation(rounds=rounds, devices=4, more="deadline_s = 30.0")
    rng = random.Random(kills)
    with lab(folder, fed, graphs) as parts:
        parts.start_clients()
        text = fed.file.text + f'[broker]\nhost = "127.0.0.1"\nport = {parts.gateway.port}\n'
        parts.toml.write_text(text)
        (folder / "run" / "task").mkdir(parents=True)
        for graph in graphs.iterdir():
            (folder / "run" / "task" / graph.name).write_bytes(graph.read_bytes())
        progress = folder / "run" / "metrics.jsonl"

        def start(number: int) -> subprocess.Popen[bytes]:
            return parts.processes.fadefed(
                f"aggregator-{number}", "aggregator", str(parts.toml), "--run", str(folder / "run")
            )

        def exchanges() -> int:
            return len(progress.read_text().splitlines()) if progress.exists() else 0

        total = 2 * rounds + 11
        for number in range(kills):
            child = start(number)
            goal = max(exchanges() + 1, int(total * (number + rng.random()) / (kills + 1)))
            wait_until(lambda goal=goal, child=child: exchanges() >= goal or child.poll() is not None, 120)
            time.sleep(rng.random() * 0.05)
            child.kill()
            child.wait()
        last = start(kills)
        assert last.wait(180) == 0, parts.processes.log(f"aggregator-{kills}")
        found = unpack_state((folder / "run" / "checkpoint").read_bytes())
    assert found["finished"]
    np.testing.assert_array_equal(found["server"]["W"], simulated_models(fed, graphs))
    numbers = [json.loads(line)["exchange"] for line in progress.read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))  # no exchange is counted twice or lost


def test_a_killed_client_leaves_and_a_returning_one_joins(tmp_path: Path, graphs: Path) -> None:
    fed = federation("sign-sgd", rounds=4000, devices=3, channel="")
    with lab(tmp_path, fed, graphs) as parts:
        parts.start_clients()
        rows: list[dict] = []
        aggregator = parts.aggregator(rows.append)
        with running(aggregator) as result:
            wait_until(lambda: len(rows) > 5)
            victim = parts.processes.children[device_name(1)]
            victim.send_signal(signal.SIGKILL)
            wait_until(lambda: device_name(1) not in aggregator.online, 5)
            seen = len(rows)
            wait_until(lambda: len(rows) > seen + 3 and rows[-1]["asked"] == 2)  # the run goes on without it
            parts.start_client(1)
            wait_until(lambda: rows[-1]["asked"] == 3 and rows[-1]["reported"] == 3)
            assert "error" not in result
        assert aggregator.checkpoint.roster[device_name(1)][0] == 1  # its number is its own for good


@pytest.mark.parametrize("part", ["broker", "channel"])
def test_a_part_goes_and_comes_back_in_mid_run(part: str, tmp_path: Path, graphs: Path) -> None:
    """All sides reconnect and the run goes on, to the same models."""
    fed = federation(rounds=100, devices=3)
    with lab(tmp_path, fed, graphs) as parts:
        parts.start_clients()
        rows: list[dict] = []
        aggregator = parts.aggregator(rows.append)
        with running(aggregator) as result:
            wait_until(lambda: any(row["round"] >= 3 for row in rows))
            child = parts.processes.children[part]
            command = list(child.args)  # type: ignore[arg-type]
            child.kill()
            child.wait()
            time.sleep(0.5)
            assert rows[-1]["round"] < 100
            parts.processes.start(f"{part}-2", *command)
            wait_until(lambda: "summary" in result, 120)
    np.testing.assert_array_equal(final_models(aggregator), simulated_models(fed, graphs))


def test_without_any_device_the_run_waits(tmp_path: Path, graphs: Path) -> None:
    fed = federation("sign-sgd", rounds=60, devices=1, channel="")
    with lab(tmp_path, fed, graphs) as parts:
        parts.start_clients()
        rows: list[dict] = []
        aggregator = parts.aggregator(rows.append)
        with running(aggregator) as result:
            wait_until(lambda: len(rows) > 3)
            parts.processes.children[device_name(0)].kill()
            wait_until(lambda: not aggregator.online)
            time.sleep(0.5)
            seen = len(rows)
            time.sleep(1.0)
            assert len(rows) == seen < 60  # no round is spent on nobody
            parts.start_client(0)
            wait_until(lambda: "summary" in result)
    assert [row["round"] for row in rows if row["phase"] == "train"] == list(range(1, 61))


def test_the_same_order_gets_the_same_bytes_again(tmp_path: Path, graphs: Path) -> None:
    """After SIGKILL too, and with state: FedAvg with error feedback. A changed order is answered afresh, from before."""
    fed = federation("fedavg", rounds=9, devices=1, channel="", options='codec = "sign-feedback"\nbatch_size = 5')
    name = device_name(0)
    with lab(tmp_path, fed, graphs) as parts:
        parts.start_client(0)
        gateway = parts.aggregator()
        gateway.session.start(10)
        gateway._gather()

        def reported(count: int) -> list[bytes]:
            found: list[bytes] = []
            while len(found) < count:
                event = gateway.session.next_event(20)
                assert event is not None
                if event.topic == TOPICS.up(name, "report"):
                    found.append(event.payload)
            return found

        for number in (1, 2):  # the second answer carries the residual of the first
            exchange = gateway.server.next(gateway._roster())
            assert exchange is not None
            exchange.number = number
            gateway._open = exchange
            gateway._publish_shared(exchange)
            gateway._send_order(name)
            (first,) = reported(1)
        gateway._send_order(name)
        assert reported(1) == [first]
        victim = parts.processes.children[name]
        victim.kill()
        victim.wait()
        parts.start_client(0)
        gateway._reported_at = {}
        wait_until(lambda: gateway._handle(0.2) or name not in gateway.online)
        gateway._reported_at = {name: 0.0}
        wait_until(lambda: gateway._handle(0.2) or name in gateway.online)
        gateway._send_order(name)
        assert reported(1) == [first]
        exchange.orders[name].scalars["changed"] = 1
        gateway._send_order(name)
        assert reported(1) == [first]  # another order, the same state before it: the same answer, computed again
        gateway.session.stop()


def test_a_silent_network_is_noticed(tmp_path: Path, graphs: Path) -> None:
    """Nothing is closed, nothing passes any more: the broker gives up after 1.5 keep-alives and sends the will."""
    fed = federation("sign-sgd", rounds=100_000, devices=2, channel="")
    with lab(tmp_path, fed, graphs) as parts:
        port = free_port()
        relay = parts.processes.start(
            "relay", sys.executable, "-m", "tests.relay", str(port), str(parts.broker.port), "0"
        )
        parts.processes.wait_for(BrokerAddress("127.0.0.1", port))
        parts.start_client(0, "--keepalive", "4", broker=BrokerAddress("127.0.0.1", port))
        parts.start_client(1)
        rows: list[dict] = []
        aggregator = parts.aggregator(rows.append)
        with running(aggregator):
            wait_until(lambda: rows and rows[-1]["asked"] == 2)
            relay.send_signal(signal.SIGSTOP)
            wait_until(lambda: device_name(0) not in aggregator.online, 30)
            seen = len(rows)
            wait_until(lambda: len(rows) > seen + 3)
            relay.send_signal(signal.SIGCONT)
            wait_until(lambda: rows[-1]["asked"] == 2 and rows[-1]["reported"] == 2)  # and it comes back


def delayed(parts: Lab, delay_s: float) -> tuple[BrokerAddress, BrokerAddress]:
    """Relays with a one-way delay in front of the broker (for clients) and of the proxy (for the aggregator)."""
    ports = []
    for name, target in (("relay-clients", parts.broker.port), ("relay-gateway", parts.gateway.port)):
        port = free_port()
        parts.processes.start(name, sys.executable, "-m", "tests.relay", str(port), str(target), str(delay_s))
        parts.processes.wait_for(BrokerAddress("127.0.0.1", port))
        ports.append(BrokerAddress("127.0.0.1", port))
    return ports[0], ports[1]


@pytest.mark.parametrize(
    ("delay_s", "rounds"),
    [(0.3, 2), pytest.param(5.0, 3, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_a_slow_link_changes_nothing(delay_s: float, rounds: int, tmp_path: Path, graphs: Path) -> None:
    fed = federation(rounds=rounds, devices=3, options="dde_steps = 1", more="deadline_s = 120.0")
    with lab(tmp_path, fed, graphs) as parts:
        clients, gateway = delayed(parts, delay_s)
        for number in range(3):
            parts.start_client(number, "--wait", "60", broker=clients)
        aggregator = parts.aggregator(broker=gateway)
        assert aggregator.run(60) is not None
    np.testing.assert_array_equal(final_models(aggregator), simulated_models(fed, graphs))


def test_what_misses_the_deadline_is_an_outage(tmp_path: Path, graphs: Path) -> None:
    """One board's link is slower than the deadline: it counts as absent, its reports as late, and the rest learn."""
    fed = federation("sign-sgd", rounds=4, devices=3, channel="", more="deadline_s = 2.0")
    with lab(tmp_path, fed, graphs) as parts:
        slow, _ = delayed(parts, 2.5)
        parts.start_client(0, "--wait", "60", broker=slow)
        parts.start_client(1)
        parts.start_client(2)
        aggregator = parts.aggregator()
        assert aggregator.run() is not None
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    training = [row for row in rows if row["phase"] == "train"]
    assert len(training) == 4
    assert all(row["absent"] == [device_name(0)] and row["reported"] == 2 for row in training)
    assert any(row.get("late") == [device_name(0)] for row in rows)


def test_a_federation_over_tls_with_the_access_list(tmp_path: Path, graphs: Path) -> None:
    """Every part under its own login; the aggregator's broker address is all that knows of the channel."""
    from aggregator import Aggregator
    from fadefed.demo.processes import mosquitto_path
    from fadefed.mqtt.broker_config import write_broker_config
    from fadefed.tasks import save_npz

    fed = federation(rounds=3, devices=3)
    names = [device_name(i) for i in range(3)]
    files = write_broker_config(tmp_path / "b", names, port=free_port(), listen="127.0.0.1", tls_host="127.0.0.1")
    toml = tmp_path / "federation.toml"
    toml.write_text(fed.file.text)

    def login(user: str) -> list[str]:
        return [
            "--username",
            user,
            "--password-file",
            str(files.credentials / f"{user}.password"),
            "--ca",
            str(files.ca),
        ]

    with Processes(tmp_path) as processes:
        program = mosquitto_path()
        assert program is not None
        processes.start("broker", program, "-c", str(files.config))
        broker = BrokerAddress(
            "127.0.0.1", int(files.config.read_text().split("listener ")[1].split()[0]), ca=str(files.ca)
        )
        processes.wait_for(broker)
        gateway = processes.channel(toml, broker, "channel", *login("channel"))
        for name, dataset in zip(names, fed.deal(), strict=True):
            save_npz(tmp_path / f"{name}.npz", dataset)
            processes.client(name, tmp_path / f"{name}.npz", broker, *login(name))
        graph_files = {path.name: path for path in graphs.iterdir() if path.name != "vjp.onnx"}
        aggregator = Aggregator(fed, tmp_path / "run", graph_files, gateway)
        assert aggregator.run() is not None
    np.testing.assert_array_equal(final_models(aggregator), simulated_models(fed, graphs))


def test_nonsense_on_every_topic_disturbs_nobody(tmp_path: Path, graphs: Path) -> None:
    """Malformed, truncated, oversized, wrong-version and foreign messages while a federation runs."""
    from fadefed.messages.wire import CodedReport, H, Kind, Message, pack

    fed = federation(rounds=40, devices=3)
    rng = random.Random(0)
    with lab(tmp_path, fed, graphs) as parts:
        parts.start_clients()
        vandal = Session(parts.broker, "vandal", [])
        vandal.start(10)
        rows: list[dict] = []
        aggregator = parts.aggregator(rows.append)
        with running(aggregator) as result:
            wait_until(lambda: any(row["round"] >= 2 for row in rows))
            run = aggregator.run_id
            good = CodedReport(1, 1, 1, (), run=run).pack()
            bad = [
                b"", b"FF", b"FC" + bytes(40), bytes(1000), rng.randbytes(300), good[:-3], good[:2] + b"\x09" + good[3:],
                pack(Message(Kind.HELLO, {H.RUN: run})), pack(Message(Kind.HELLO, {H.RUN: run, H.SCALARS: {"samples": -1}})),
                pack(Message(Kind.STATUS, {H.SCALARS: [1]})), pack(Message(Kind.ORDER, {H.RUN: run})), rng.randbytes(300_000),
                CodedReport(10**6, 1, 1, (), run=run).pack(), CodedReport(1, 1, 10**6, (), run=run).pack(),
                CodedReport(1, 1, 10**15, (), run=run).pack(),
                CodedReport(1, 1, -1, (), run=run).pack(),
                CodedReport(1, 1, 1, (), run=b"x" * 8).pack(),
            ]  # fmt: skip
            names = (device_name(1), "stranger", "bad name")
            topics = [
                TOPICS.up(name, kind)
                for name in names
                for kind in ("status", "hello", "report", "report/0", "report/x")
            ]
            topics += [
                TOPICS.down("all", kind) for kind in ("manifest", "shared", "shared/0", "call", "file/abc", "other")
            ]
            topics += [TOPICS.down(device_name(2), "order"), "fadefed/up", "fadefed/sideways/x/y"]
            for topic in topics:
                for payload in bad:
                    vandal.publish(topic, payload) if len(payload) < 100_000 else vandal._client.publish(
                        topic, payload, 1
                    )
            vandal.flush()
            wait_until(lambda: "summary" in result or "error" in result, 120)
            assert "error" not in result
        vandal.stop()
        for name, child in parts.processes.children.items():
            if name.startswith("device"):
                assert child.wait(20) == 0, parts.processes.log(name)
            assert "Traceback" not in parts.processes.log(name)
    np.testing.assert_array_equal(final_models(aggregator), simulated_models(fed, graphs))


def test_a_device_whose_losses_are_not_finite_is_refused_by_name(tmp_path: Path, graphs: Path) -> None:
    """A real client with a model that overflows on its data; the others train on."""
    fed = federation(rounds=3, devices=3, options="dde_steps = 0", channel="")
    with lab(tmp_path, fed, graphs) as parts:
        parts.datasets[1].x[:] = 3e38
        parts.start_clients()
        rows: list[dict] = []
        aggregator = parts.aggregator(rows.append)
        assert aggregator.run() is not None
    refused = [text for row in rows for text in row.get("refused", [])]
    assert refused and all(device_name(1) in text and "exchange" in text and "NaN" in text for text in refused)
    assert np.isfinite(final_models(aggregator)).all()
    assert rows[-1]["reported"] >= 2


def test_data_that_does_not_fit_ends_the_client_with_a_sentence(tmp_path: Path, graphs: Path) -> None:
    fed = federation("sign-sgd", rounds=2, devices=1, channel="")
    with lab(tmp_path, fed, graphs) as parts:
        wrong = tmp_path / "wrong.npz"
        np.savez(wrong, x=np.zeros((3, 5), np.float32), y=np.array([0, 1, 2]))
        child = parts.processes.client("misfit", wrong, parts.broker)
        parts.start_client(0)
        aggregator = parts.aggregator()
        assert aggregator.run() is not None
        assert child.wait(20) == 2
        log = parts.processes.log("misfit")
        assert "takes inputs of shape [n, 784]" in log and "Traceback" not in log


def test_the_demo_and_its_end_on_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "fadefed.cli", "demo", "--run", str(out), "--rounds"]
    done = subprocess.run([*command, "12"], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["methods"]) >= {"MtFEEL", "Local", "sign-SGD, mean"}
    assert 0 < summary["in_cohort_alpha_mass"] <= 1
    for name in ("accuracy.png", "alpha.png", "outages.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    out = tmp_path / "long"
    command[command.index("--run") + 1] = str(out)
    child = subprocess.Popen(
        [*command, "5000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    metrics = out / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20, 60)
    family = psutil.Process(child.pid).children(recursive=True)
    assert len(family) >= 12
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    command[command.index("--run") + 1] = str(tmp_path / "killed")
    child = subprocess.Popen([*command, "5000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "killed" / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20, 60)
    family = psutil.Process(child.pid).children(recursive=True)
    child.kill()  # even then nothing is left behind
    child.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    other = subprocess.run([*command[:-2], str(tmp_path), "--rounds", "5"], capture_output=True, text=True, timeout=60)
    assert other.returncode == 2 and "something else" in other.stderr


def test_embedded_broker(tmp_path: Path, graphs: Path) -> None:
    """The same federation over iotcore, for machines without mosquitto."""
    fed = federation("sign-sgd", rounds=5, devices=3)
    with Processes(tmp_path) as processes:
        processes.broker = lambda kind=None, original=processes.broker: original("iotcore")  # type: ignore[method-assign]
        parts = Lab(processes, fed, graphs)
        parts.start_clients()
        aggregator = parts.aggregator()
        assert aggregator.run() is not None
    np.testing.assert_array_equal(final_models(aggregator), simulated_models(fed, graphs))
