"""The session, the broker's access list and TLS, against a real mosquitto."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fadefed.demo.processes import Processes, free_port, mosquitto_path
from fadefed.errors import ConfigError, ConnectionFailed
from fadefed.mqtt import BrokerAddress, Session, Topics
from fadefed.mqtt.broker_config import write_broker_config
from fadefed.mqtt.session import BACKOFF_LAST_S
from fadefed.mqtt.topics import check_device_name
from tests.support import wait_until

TOPICS = Topics()


class Tls:
    """A mosquitto with TLS, passwords and the access list that `fadefed broker-config` writes."""

    def __init__(self, folder: Path) -> None:
        self.files = write_broker_config(
            folder / "broker", ["board-1", "board-2"], port=free_port(), listen="127.0.0.1", tls_host="127.0.0.1"
        )
        self.port = int(self.files.config.read_text().split("listener ")[1].split()[0])

    def address(self, user: str, **changes: object) -> BrokerAddress:
        password = (self.files.credentials / f"{user}.password").read_text().strip()
        fields = {
            "host": "127.0.0.1",
            "port": self.port,
            "username": user,
            "password": password,
            "ca": str(self.files.ca),
        }
        return BrokerAddress(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    folder = tmp_path_factory.mktemp("tls")
    tls = Tls(folder)
    with Processes(folder) as processes:
        program = mosquitto_path()
        assert program is not None, "these tests need mosquitto: apt-get install mosquitto"
        processes.start("broker", program, "-c", str(tls.files.config))
        processes.wait_for(tls.address("channel"))
        yield tls


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as processes:
        yield processes


def drain(session: Session, seconds: float = 0.6) -> list[tuple[str, bytes]]:
    """Messages that arrive until `seconds` pass without one."""
    found = []
    while (event := session.next_event(seconds)) is not None:
        if event.kind == "message":
            found.append((event.topic, event.payload))
    return found


def test_a_device_writes_only_its_uplink_and_the_gateway_reads_none_of_it(tls: Tls) -> None:
    everything = ["fadefed/#"]
    users = ("channel", "gateway", "board-1", "board-2")
    sessions = {user: Session(tls.address(user), f"test-{user}", everything) for user in users}
    for session in sessions.values():
        session.start(10)
        drain(session, 0.2)
    attempts = [
        ("board-1", TOPICS.up("board-1", "report"), {"channel"}),
        ("board-1", TOPICS.up("board-1", "report") + "/0", {"channel"}),
        ("board-1", TOPICS.up("board-2", "report"), set()),
        ("board-1", TOPICS.down("all", "manifest"), set()),
        ("board-1", TOPICS.down("board-2", "order"), set()),
        ("board-1", "elsewhere", set()),
        ("gateway", TOPICS.up("board-1", "report"), set()),
        ("gateway", TOPICS.down("board-1", "order"), {"board-1"}),
        ("channel", TOPICS.down("board-1", "order"), {"board-1"}),
        ("channel", TOPICS.down("all", "manifest"), {"board-1", "board-2"}),
        ("channel", TOPICS.up("board-1", "report"), set()),
    ]
    try:
        for number, (user, topic, _) in enumerate(attempts):
            sessions[user].publish(topic, f"{number}".encode())
        seen = {user: {int(payload) for _, payload in drain(session)} for user, session in sessions.items()}
    finally:
        for session in sessions.values():
            session.stop()
    for number, (user, topic, readers) in enumerate(attempts):
        assert {reader for reader in users if number in seen[reader]} == readers, (user, topic)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"password": "wrong"}, "refuses user 'board-1'.*password"),
        ({"username": None, "password": None}, "without user name"),
        ({"ca": None}, "never answered as MQTT|does not answer|refuses"),
        ({"host": "localhost"}, "certificate"),
    ],
)
def test_wrong_credentials_are_named(tls: Tls, changes: dict, words: str) -> None:
    session = Session(tls.address("board-1", **changes), "test-wrong", [])
    with pytest.raises(ConnectionFailed, match=words):
        session.start(4)


def test_a_foreign_ca_is_refused_at_once(tls: Tls, tmp_path: Path) -> None:
    other = write_broker_config(tmp_path, ["x"], tls_host="127.0.0.1")
    with pytest.raises(ConnectionFailed, match="does not vouch"):
        Session(tls.address("board-1", ca=str(other.ca)), "test-ca", []).start(None)
    (tmp_path / "not.crt").write_text("hello")
    for path, words in ((tmp_path / "no.crt", "no such CA"), (tmp_path / "not.crt", "not a CA certificate")):
        with pytest.raises(ConfigError, match=words):
            Session(tls.address("board-1", ca=str(path)), "test-ca", [])


def test_tls_against_a_plain_port_is_named(processes: Processes, tls: Tls) -> None:
    broker, _ = processes.broker()
    with pytest.raises(ConnectionFailed, match="does not speak TLS|does not answer"):
        BrokerAddress("127.0.0.1", broker.port, ca=str(tls.files.ca)).probe(3)


def test_nobody_there_is_named() -> None:
    with pytest.raises(ConnectionFailed, match="does not answer.*Check that it runs"):
        Session(BrokerAddress("127.0.0.1", free_port()), "test", []).start(0.5)
    with pytest.raises(ConnectionFailed, match="no such host name"):
        BrokerAddress("no-such-host.invalid", 1883).probe(3)


def test_a_mute_server_is_named() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(ConnectionFailed, match="never answered as MQTT"):
            Session(BrokerAddress("127.0.0.1", server.getsockname()[1]), "test", []).start(1)


def test_a_session_outlives_its_broker(tmp_path: Path) -> None:
    """The broker goes and comes back: both sides reconnect, what was published meanwhile arrives."""
    port = free_port()
    config = tmp_path / "m.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n")
    address = BrokerAddress("127.0.0.1", port)
    program = mosquitto_path()
    assert program is not None
    receiver, sender = Session(address, "receiver", ["t"]), Session(address, "sender", [])
    try:
        with Processes(tmp_path / "a") as first:
            first.start("broker", program, "-c", str(config))
            first.wait_for(address)
            receiver.start(10)
            sender.start(10)
            sender.publish("t", b"before")
            assert wait_until(lambda: drain(receiver, 0.2), 10) == [("t", b"before")]
        wait_until(lambda: not sender.connected and not receiver.connected, 20)
        sender.publish("t", b"meanwhile")
        with Processes(tmp_path / "b") as second:
            second.start("broker", program, "-c", str(config))
            second.wait_for(address)
            wait_until(lambda: sender.connected and receiver.connected, 60)
            sender.publish("t", b"after")
            payloads: list[bytes] = []
            wait_until(lambda: payloads.extend(p for _, p in drain(receiver, 0.2)) or b"after" in payloads, 20)
    finally:
        receiver.stop()
        sender.stop()


def test_a_killed_client_leaves_its_will(processes: Processes) -> None:
    import signal
    import sys

    broker, _ = processes.broker()
    watcher = Session(broker, "watcher", ["w"])
    watcher.start(10)
    code = (
        "import time; from fadefed.mqtt import *\n"
        f"s = Session(BrokerAddress('127.0.0.1', {broker.port}), 'dying', [], will=('w', b'gone'))\n"
        "s.start(10); s.publish('w', b'here'); time.sleep(60)"
    )
    child = processes.start("dying", sys.executable, "-c", code)
    try:
        assert wait_until(lambda: drain(watcher, 0.2), 20) == [("w", b"here")]
        child.send_signal(signal.SIGKILL)
        assert wait_until(lambda: drain(watcher, 0.2), 5) == [("w", b"gone")]
    finally:
        watcher.stop()


def test_backoff_grows_with_jitter_and_stops_growing() -> None:
    session = Session(BrokerAddress(), "x", [])
    pauses = [session._next_pause() for _ in range(20)]
    for attempt, pause in enumerate(pauses):
        ceiling = min(0.5 * 2**attempt, BACKOFF_LAST_S)
        assert ceiling / 2 <= pause <= ceiling
    assert len({round(p, 9) for p in pauses}) == 20


@pytest.mark.parametrize("name", ["", "a/b", "+", "a b", "all", "gateway", "channel", "x" * 65, "-a", "ü"])
def test_bad_device_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a device"):
        check_device_name(name)


@pytest.mark.parametrize("text", ["", ":1883", "host:0", "host:99999", "host:x"])
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a broker address"):
        BrokerAddress.parse(text)


def test_addresses_and_topics() -> None:
    assert BrokerAddress.parse("h").port == 1883
    assert BrokerAddress.parse("h", ca="x").port == 8883
    assert BrokerAddress.parse("h:7").port == 7
    with pytest.raises(ConfigError):
        Topics("a/#")
    topics = Topics("site/a")
    assert topics.parse("site/a/up/d/report/3") == ("up", "d", "report", 3)
    assert topics.parse("site/a/down/all/file/ab12") == ("down", "all", "file/ab12", None)
    for foreign in ("site/b/up/d/report", "site/a/up", "site/a/side/d/report", "x"):
        assert topics.parse(foreign) is None


def test_passwords_are_kept_when_a_device_is_added(tmp_path: Path) -> None:
    write_broker_config(tmp_path, ["a"])
    before = (tmp_path / "credentials" / "a.password").read_text()
    files = write_broker_config(tmp_path, ["a", "b"])
    assert (tmp_path / "credentials" / "a.password").read_text() == before
    assert (tmp_path / "credentials" / "a.password").stat().st_mode & 0o077 == 0
    assert before.strip() not in (tmp_path / "passwd").read_text()
    assert files.ca is None
    with pytest.raises(ConfigError, match="No device"):
        write_broker_config(tmp_path, [])
