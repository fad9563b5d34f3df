"""The command line: what users type, and what they read when they got it wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from fadefed.cli import main
from fadefed.demo.processes import free_port
from tests.support import federation_text


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    path = tmp_path / "fed.toml"
    path.write_text(federation_text("sign-sgd", rounds=2, devices=3))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "d.npz"
    np.savez(path, x=np.zeros((3, 784), np.float32), y=np.array([0, 1, 2]))
    return path


def test_simulate_writes_metrics_and_summary(fed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(fed), "--engine", "numpy", "--run", str(tmp_path / "run")]) == 0
    printed = json.loads(capsys.readouterr().out)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["mean"] == printed and len(summary["devices"]) == 3
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]


def test_deal_writes_a_file_per_device(fed: Path, tmp_path: Path) -> None:
    assert main(["deal", str(fed), str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"device-00{i}.npz" for i in range(3)]


def test_broker_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broker-config", str(tmp_path / "b"), "--devices", "a, b"]) == 0
    assert "mosquitto -c" in capsys.readouterr().out
    acl = (tmp_path / "b" / "acl").read_text()
    assert "topic write fadefed/up/a/#" in acl and "user gateway" in acl


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "{tmp}/no.toml"], "no.toml: cannot be read"),
        (["aggregator", "{tmp}/no.toml"], "cannot be read"),
        (["client", "--broker", "127.0.0.1", "--data", "{tmp}/no.npz", "--name", "b"], "no such data file"),
        (["client", "--broker", "127.0.0.1", "--data", "{data}", "--name", "a/b"], "cannot name a device"),
        (["client", "--broker", "x:y", "--data", "{data}", "--name", "b"], "not a broker address"),
        (
            [
                "client",
                "--broker",
                "127.0.0.1:{port}",
                "--data",
                "{data}",
                "--name",
                "b",
                "--wait",
                "0.4",
                "--folder",
                "{tmp}/f",
            ],
            "does not answer",
        ),
        (
            [
                "client",
                "--broker",
                "h",
                "--data",
                "{data}",
                "--name",
                "b",
                "--ca",
                "{tmp}/no.crt",
                "--folder",
                "{tmp}/f",
            ],
            "no such CA",
        ),
        (
            ["client", "--broker", "h", "--data", "{data}", "--name", "b", "--password-file", "{tmp}/no"],
            "cannot be read",
        ),
        (["channel", "{fed}", "--broker", "127.0.0.1:1", "--listen", "192.0.2.1:1"], "Cannot listen"),
        (["broker-config", "{tmp}/b", "--devices", "a b"], "cannot name a device"),
        (["demo", "--run", "{tmp}"], "something else than a demo"),
        (["demo", "--run", "{tmp}/new", "--rounds", "0"], "at least 1"),
        (["experiment", "mtfeel", "--seeds", "x"], "FIRST-LAST"),
    ],
)
def test_mistakes_end_with_a_sentence_and_code_2(
    arguments: list[str], words: str, tmp_path: Path, data: Path, fed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"tmp": tmp_path, "data": data, "fed": fed, "port": free_port()}
    before = data.read_bytes()
    assert main([argument.format(**places) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    assert data.read_bytes() == before


def test_a_run_folder_of_another_federation_is_refused(fed: Path, tmp_path: Path) -> None:
    from aggregator import Aggregator
    from aggregator.checkpoint import Checkpoint
    from fadefed.errors import ConfigError
    from fadefed.federation import Federation
    from fadefed.mqtt import BrokerAddress

    Checkpoint(b"12345678", "other settings").save(tmp_path / "run" / "checkpoint")
    with pytest.raises(ConfigError, match="other settings"):
        Aggregator(Federation.read(fed), tmp_path / "run", {}, BrokerAddress())
    (tmp_path / "run" / "checkpoint").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        Aggregator(Federation.read(fed), tmp_path / "run", {}, BrokerAddress())
    assert (tmp_path / "run" / "checkpoint").read_bytes() == b"junk"  # nothing is lost
