"""The proxy between broker and aggregator: relays MQTT 5, and puts every report through the channel.

The aggregator connects here as if this were the broker. For each such connection the proxy opens one to the broker
under its own login and relays packets both ways. Reports coming up are taken apart, impaired and passed on,
erasures announced, so that the gateway loses no time waiting for what the radio lost.

A report is acknowledged to the broker by the proxy and delivered at QoS 0 over the proxy's own reliable connection:
its chunks must be held back until the last has come, which a broker's in-flight window would not
allow end to end. What dies with a connection is asked for again: orders are idempotent.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable

import mqtt5

from channel_emu.link import Channel
from fadefed.errors import MessageError
from fadefed.messages.wire import CodedReport
from fadefed.mqtt.chunks import CHUNK_LIMIT_BYTES, Assembler, split
from fadefed.mqtt.session import BrokerAddress
from fadefed.mqtt.topics import Topics

log = logging.getLogger("fadefed.channel")
READ_BYTES = 1 << 18
CONNECT_FIELDS = (
    "clean_start",
    "will",
    "keep_alive",
    "session_expiry_interval",
    "authentication_method",
    "authentication_data",
    "request_problem_info",
    "request_response_info",
    "receive_max",
    "topic_alias_max",
    "max_packet_size",
    "user_properties",
)


class Proxy:
    """Listens for aggregators and relays each to the broker."""

    def __init__(self, channel: Channel, broker: BrokerAddress, topics: Topics) -> None:
        self.channel = channel
        self.broker = broker
        self.topics = topics
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; the port."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=1 << 22)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await Relay(self, reader, writer).run()
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


class Relay:
    """One aggregator's connection and its counterpart to the broker."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.down_reader, self.down_writer = reader, writer
        self.assembler = Assembler(most=4)

    async def run(self) -> None:
        broker = self.proxy.broker
        _no_delay(self.down_writer)
        try:
            up_reader, up_writer = await asyncio.open_connection(
                broker.host, broker.port, ssl=broker.tls_context(), limit=1 << 22
            )
        except OSError as error:
            log.warning(
                "The broker %s:%d does not answer (%s); the aggregator will try again.",
                broker.host,
                broker.port,
                error,
            )
            return
        self.up_writer = up_writer
        _no_delay(up_writer)
        try:
            pumps = [
                asyncio.create_task(self._pump(self.down_reader, self._from_aggregator)),
                asyncio.create_task(self._pump(up_reader, self._from_broker)),
            ]
            done, pending = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for task in done:
                error = task.exception()
                if isinstance(error, ValueError):
                    log.warning("Malformed MQTT on a connection (%s); it is closed.", error)
                elif error is not None and not isinstance(error, OSError):
                    raise error
        finally:
            up_writer.close()
            with contextlib.suppress(OSError):
                await up_writer.wait_closed()

    async def _pump(
        self, reader: asyncio.StreamReader, handle: Callable[[mqtt5.Packet, memoryview], Awaitable[None]]
    ) -> None:
        """Cut the stream into packets and hand each over, until it ends. Raises ValueError for malformed MQTT."""
        buffer = bytearray()
        while data := await reader.read(READ_BYTES):
            buffer += data
            consumed = 0
            with memoryview(bytes(buffer)) as view:
                while consumed < len(view):
                    try:
                        packet, size = mqtt5.read(view[consumed:])
                    except IndexError:  # mqtt5: not enough bytes for a whole packet yet
                        break
                    await handle(packet, view[consumed : consumed + size])
                    consumed += size
            del buffer[:consumed]
            await self.up_writer.drain()
            await self.down_writer.drain()

    async def _from_aggregator(self, packet: mqtt5.Packet, raw: memoryview) -> None:
        if isinstance(packet, mqtt5.ConnectPacket):
            broker = self.proxy.broker
            kept = {name: getattr(packet, name) for name in CONNECT_FIELDS}
            password = broker.password.encode() if broker.password is not None else None
            login = mqtt5.ConnectPacket(packet.client_id, username=broker.username, password=password, **kept)
            self.up_writer.write(login.write())
            return
        self.up_writer.write(bytes(raw))

    async def _from_broker(self, packet: mqtt5.Packet, raw: memoryview) -> None:
        parsed = self.proxy.topics.parse(packet.topic) if isinstance(packet, mqtt5.PublishPacket) else None
        if not isinstance(packet, mqtt5.PublishPacket) or parsed is None or parsed[0] != "up" or parsed[2] != "report":
            self.down_writer.write(bytes(raw))
            return
        if packet.qos == mqtt5.QoS.AT_LEAST_ONCE and packet.packet_id is not None:
            self.up_writer.write(mqtt5.PubAckPacket(packet.packet_id).write())
        _, device, _, index = parsed
        try:
            message = self.assembler.feed(device, index, packet.payload)
            if message is None:
                return
            (impaired,) = self.proxy.channel.impair([CodedReport.unpack(message)])
        except MessageError as error:
            log.warning("Device %s: a message on its report topic is refused: %s", device, error)
            return
        for topic, payload in split(self.proxy.topics.up(device, "report"), impaired.pack(), CHUNK_LIMIT_BYTES):
            self.down_writer.write(mqtt5.PublishPacket(topic, payload).write())


def _no_delay(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
