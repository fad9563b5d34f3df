"""The parts of a federation as processes of this machine: broker, channel, clients. All end with `Processes`."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from fadefed.errors import ConfigError, ConnectionFailed
from fadefed.mqtt import BrokerAddress

BrokerKind = Literal["mosquitto", "iotcore"]
START_WAIT_S = 15.0


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child: get SIGTERM when the parent dies, even of SIGKILL (prctl(2))."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def mosquitto_path() -> str | None:
    """Where mosquitto is; Debian keeps it outside an ordinary user's PATH."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


class Processes:
    """Child processes that are ended, politely first, when the context ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        for child in self.children.values():
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._stack.close()

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start `command`, its output to FOLDER/NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            # One thread each: a dozen processes share a few cores, and results must repeat.
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self.children[name] = child
        return child

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def broker(self, kind: BrokerKind | None = None) -> tuple[BrokerAddress, BrokerKind]:
        """A broker of its own on a free port: mosquitto where installed, else the embedded iotcore."""
        program = mosquitto_path()
        kind = kind or ("mosquitto" if program else "iotcore")
        port = free_port()
        if kind == "mosquitto":
            if program is None:
                raise ConfigError("mosquitto is not installed: apt-get install mosquitto, or --broker iotcore.")
            config = self.folder / "mosquitto.conf"
            config.write_text(
                f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n"
                "max_queued_messages 10000\nmax_inflight_messages 100\npersistence false\n"
                # Started as root it would change its user, and with that forget to end with its parent.
                + ("user root\n" if os.geteuid() == 0 else "")
            )
            self.start("broker", program, "-c", str(config))
        else:
            self._embedded(port)
        address = BrokerAddress("127.0.0.1", port)
        self.wait_for(address)
        return address, kind

    def _embedded(self, port: int) -> None:
        try:
            from iotcore import Broker
        except ImportError as error:
            raise ConfigError("No broker: install mosquitto, or pip install 'fadefed[gateway]' for iotcore.") from error
        config = self.folder / "iotcore.toml"
        config.write_text(IOTCORE.format(port=port))
        broker: Any = Broker(config_path=str(config))
        self._stack.enter_context(broker)

    def wait_for(self, address: BrokerAddress) -> None:
        """Wait until something listens at `address`."""
        deadline = time.monotonic() + START_WAIT_S
        while True:
            try:
                address.probe(1.0)
                return
            except ConnectionFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def channel(self, link: Path, broker: BrokerAddress, name: str = "channel", *options: str) -> BrokerAddress:
        """The channel emulator between `broker` and the aggregator; where the aggregator connects."""
        listen = BrokerAddress("127.0.0.1", free_port())
        self.fadefed(
            name, "channel", str(link), "--broker", f"{broker.host}:{broker.port}",
            "--listen", f"{listen.host}:{listen.port}", *options,
        )  # fmt: skip
        self.wait_for(listen)
        return listen

    def client(self, name: str, data: Path, broker: BrokerAddress, *options: str) -> subprocess.Popen[bytes]:
        """One edge client."""
        return self.fadefed(
            name, "client", "--broker", f"{broker.host}:{broker.port}", "--data", str(data),
            "--name", name, "--folder", str(self.folder / "boards" / name), *options,
        )  # fmt: skip

    def fadefed(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start(name, sys.executable, "-m", "fadefed.cli", *arguments)


IOTCORE = """
id = 0

[router]
id = 0
max_connections = 1010
max_outgoing_packet_count = 2000
max_segment_size = 104857600
max_segment_count = 10

[v5.1]
name = "v5"
listen = "127.0.0.1:{port}"
next_connection_delay_ms = 1

[v5.1.connections]
connection_timeout_ms = 60000
max_payload_size = 1048576
max_inflight_count = 100
"""
