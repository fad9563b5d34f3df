"""The proxy against hostile bytes, and files that must be whole or absent."""

import asyncio
from pathlib import Path

import mqtt5
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from channel_emu import Channel, LinkConfig
from channel_emu.proxy import Proxy
from edge_client.store import Commit, Store
from fadefed.errors import MessageError
from fadefed.files import write_atomic
from fadefed.mqtt import BrokerAddress, Topics


async def poke(data: bytes, from_broker: bool) -> bytes:
    """Send `data` through a proxy from one side; what the other side got before everything was closed."""
    got = bytearray()
    done = asyncio.Event()

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if from_broker:
            writer.write(data)
            await writer.drain()
            writer.write_eof()
        got.extend(await reader.read()) if not from_broker else await reader.read()
        done.set()
        writer.close()

    server = await asyncio.start_server(broker, "127.0.0.1", 0)
    proxy = Proxy(Channel(LinkConfig()), BrokerAddress("127.0.0.1", server.sockets[0].getsockname()[1]), Topics())
    port = await proxy.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if not from_broker:
            writer.write(data)
            writer.write_eof()
        received = await asyncio.wait_for(reader.read(), 10)
        if from_broker:
            got.extend(received)
        await asyncio.wait_for(done.wait(), 10)
    finally:
        writer.close()
        await proxy.stop()
        server.close()
    return bytes(got)


@settings(max_examples=40)
@given(st.binary(max_size=200), st.booleans())
def test_hostile_bytes_close_the_connection_and_nothing_else(data: bytes, from_broker: bool) -> None:
    asyncio.run(poke(data, from_broker))


def test_other_topics_pass_byte_for_byte() -> None:
    packet = mqtt5.PublishPacket(
        "plant/pump/7", b"\x00on", qos=mqtt5.QoS.AT_LEAST_ONCE, packet_id=9, retain=True
    ).write()
    assert asyncio.run(poke(packet * 3, True)) == packet * 3


def test_nonsense_on_a_report_topic_is_dropped_and_the_rest_passes() -> None:
    bad = mqtt5.PublishPacket("fadefed/up/d/report", b"junk", qos=mqtt5.QoS.AT_LEAST_ONCE, packet_id=1).write()
    good = mqtt5.PublishPacket("fadefed/up/d/status", b"x").write()
    assert asyncio.run(poke(bad + good, True)) == good


def test_the_proxy_logs_in_as_itself() -> None:
    connect = mqtt5.ConnectPacket("agg", username="gateway", password=b"secret", keep_alive=30, clean_start=False)
    packet, _ = mqtt5.read(memoryview(asyncio.run(poke(connect.write(), False))))
    assert isinstance(packet, mqtt5.ConnectPacket)
    assert (packet.client_id, packet.username, packet.password, packet.keep_alive) == ("agg", None, None, 30)


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "f"
    write_atomic(path, b"one")
    with pytest.raises(TypeError):
        write_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"one" and [p.name for p in path.parent.iterdir()] == ["f"]


def test_the_store_keeps_only_whole_files_and_its_own_run(tmp_path: Path) -> None:
    import hashlib

    store = Store(tmp_path)
    sha = hashlib.sha256(b"graph").hexdigest()
    with pytest.raises(MessageError, match="SHA-256"):
        store.put_file(sha, b"grapf")
    assert not store.has_file(sha)
    store.put_file(sha, b"graph")
    assert store.has_file(sha)
    store.file(sha).write_bytes(b"grap")  # half a file after a power cut
    assert not store.has_file(sha)
    commit = Commit(b"run", 3, b"d", b"report", {"method": {}}, {"method": {"a": 1}})
    store.commit(commit)
    assert store.last_commit(b"run") == commit and store.last_commit(b"other") is None
    (tmp_path / "commit").write_bytes(b"damaged")
    assert store.last_commit(b"run") is None


def test_retained_messages_may_come_in_any_order(tmp_path: Path) -> None:
    """The shared tensors and files of a run before the manifest that names them."""
    import numpy as np

    from edge_client import Agent, AgentConfig
    from fadefed.messages import Exchange
    from fadefed.messages.wire import H, Kind, Message, pack, pack_shared
    from fadefed.tasks import Dataset
    from tests.support import federation

    run = b"12345678"
    data = Dataset(np.zeros((2, 784), np.float32), np.array([0, 1]), np.zeros(2))
    agent = Agent(AgentConfig("b", BrokerAddress(), tmp_path), data)
    shared = pack_shared(run, Exchange(1, "train", 1, {}, {}, {("mnist", "model"): np.ones(3, np.float32)}, number=4))
    agent._on_message("fadefed/down/all/shared", shared)
    manifest = federation("sign-sgd").manifest() | {"files": {"mnist": {"gradient.onnx": "0" * 64}}}
    header = {H.RUN: run, H.DATA: manifest, H.SCALARS: {"finished": False}}
    agent._on_message("fadefed/down/all/manifest", pack(Message(Kind.MANIFEST, header)))
    assert list(agent._shared) == [4] and agent.state.value == "loading task files"
    other = {H.RUN: b"other123", H.DATA: manifest, H.SCALARS: {"finished": False}}
    agent._on_message("fadefed/down/all/manifest", pack(Message(Kind.MANIFEST, other)))
    assert not agent._shared
