"""The session with the broker: one queue of events in, `publish` out; reconnects by itself, shows no callbacks."""

import contextlib
import queue
import random
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from fadefed.errors import ConfigError, ConnectionFailed
from fadefed.mqtt.chunks import CHUNK_LIMIT_BYTES, split

BACKOFF_FIRST_S = 0.5
BACKOFF_LAST_S = 30.0
REFUSED = (0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C)


@dataclass(frozen=True)
class BrokerAddress:
    """Where the broker is and how to log in. `ca`: the certificate file that signs the broker's; turns TLS on."""

    host: str = "127.0.0.1"
    port: int = 1883
    username: str | None = None
    password: str | None = None
    ca: str | None = None

    @classmethod
    def parse(cls, text: str, **rest: Any) -> "BrokerAddress":
        """From HOST or HOST:PORT; without a port 8883 with TLS, else 1883."""
        host, colon, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
        default = 8883 if rest.get("ca") else 1883
        if not host or (colon and not (port.isdigit() and 0 < int(port) < 65536)):
            raise ConfigError(f"'{text}' is not a broker address. Give HOST or HOST:PORT, gateway.local:1883 say.")
        return cls(host, int(port) if colon else default, **rest)

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context, or None without `ca`. Raises ConfigError for an unusable certificate file."""
        if self.ca is None:
            return None
        if not Path(self.ca).is_file():
            raise ConfigError(f"{self.ca}: no such CA certificate file. Copy ca.crt from the gateway.")
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{self.ca}: is not a CA certificate in PEM form ({error}).") from error

    def probe(self, timeout_s: float = 10.0) -> None:
        """Open and close one connection. Raises ConnectionFailed with what is wrong and what to do."""
        context = self.tls_context()
        where = f"The broker {self.host}:{self.port}"
        try:
            with socket.create_connection((self.host, self.port), timeout=timeout_s) as raw:
                if context is not None:
                    with context.wrap_socket(raw, server_hostname=self.host):
                        pass
        except ssl.SSLCertVerificationError as error:
            raise CertificateRejected(
                f"{where} shows a certificate that {self.ca} does not vouch for ({error.verify_message}). "
                "Give the CA of this broker, and the host name that its certificate carries."
            ) from error
        except socket.gaierror as error:
            raise ConnectionFailed(f"{where}: no such host name. Check the address.") from error
        except (ssl.SSLError, ConnectionResetError) as error:
            raise ConnectionFailed(
                f"{where} does not speak TLS on this port ({error}). Check port and --ca."
            ) from error
        except OSError as error:
            raise ConnectionFailed(
                f"{where} does not answer ({error.strerror or error}). Check that it runs and that the address is right."
            ) from error


class CertificateRejected(ConnectionFailed):
    """Waiting does not help: the certificate is the wrong one."""


@dataclass(frozen=True)
class Event:
    """What happened: `message` with topic and payload, `connected`, or `disconnected`."""

    kind: Literal["message", "connected", "disconnected"]
    topic: str = ""
    payload: bytes = b""


class Session:
    """An MQTT 5 session: subscriptions, a last will, QoS 1, TCP_NODELAY, exponential backoff with jitter.

    Events are read with `next_event`. The broker keeps the session `expiry_s` seconds while we are away.
    """

    def __init__(
        self,
        address: BrokerAddress,
        client_id: str,
        subscriptions: list[str],
        *,
        will: tuple[str, bytes] | None = None,
        keepalive_s: int = 30,
        expiry_s: int = 300,
        chunk_limit: int = CHUNK_LIMIT_BYTES,
    ) -> None:
        self.address = address
        self.subscriptions = subscriptions
        self.connected = False
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.bytes_sent = 0
        self._refusal: str | None = None
        self._attempt = 0
        # Mosquitto looks for silent clients every few seconds only; asking for a little less than the promised
        # keep-alive lets it notice within 1.5 times the promise.
        self._keepalive_s = max(1, int(0.85 * keepalive_s))
        self._expiry_s = expiry_s
        self._chunk_limit = chunk_limit
        client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5)
        client.connect_timeout = 30.0
        client.max_inflight_messages_set(100)
        client.max_queued_messages_set(0)
        context = address.tls_context()
        if context is not None:
            client.tls_set_context(context)
        if address.username is not None:
            client.username_pw_set(address.username, address.password)
        if will is not None:
            client.will_set(will[0], will[1], qos=1, retain=True)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_connect_fail = lambda *_: self._back_off()
        client.on_message = lambda _client, _data, m: self.events.put(Event("message", m.topic, bytes(m.payload)))
        client.on_socket_open = _no_delay
        self._client = client

    def start(self, wait_s: float | None = 30.0) -> None:
        """Connect, trying for `wait_s` seconds (None: for ever). Raises ConnectionFailed, at once when refused."""
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            try:
                self.address.probe()
                break
            except CertificateRejected:
                raise
            except ConnectionFailed:
                pause = self._next_pause()
                if deadline is not None and time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
        self._attempt = 0
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = self._expiry_s
        self._client.connect_async(
            self.address.host,
            self.address.port,
            keepalive=self._keepalive_s,
            clean_start=False,
            properties=properties,
        )
        self._client.loop_start()
        while not self.connected:
            if self._refusal is not None:
                self.stop()
                raise ConnectionFailed(self._refusal)
            if deadline is not None and time.monotonic() > deadline:
                self.stop()
                raise ConnectionFailed(
                    f"The broker {self.address.host}:{self.address.port} took the connection but never answered as MQTT. "
                    "Check that the address is a broker's."
                )
            time.sleep(0.01)

    def publish(self, topic: str, message: bytes, *, retain: bool = False) -> None:
        """Send `message` at QoS 1, in chunks if it is large; queued while the broker is away."""
        for name, payload in split(topic, message, self._chunk_limit):
            self.bytes_sent += len(payload)
            self._client.publish(name, payload, qos=1, retain=retain)

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """The next event, or None after `timeout_s` seconds without one."""
        try:
            if timeout_s is not None and timeout_s <= 0:
                return self.events.get_nowait()
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the broker has acknowledged what we published; False when it did not in time, or is gone."""
        deadline = time.monotonic() + timeout_s
        while self.connected and time.monotonic() < deadline:
            if not self._client._out_messages:  # paho offers no public count of unacknowledged messages
                return True
            time.sleep(0.005)
        return False

    def stop(self) -> None:
        """Disconnect (the broker then does not send the will) and end the network thread."""
        with contextlib.suppress(Exception):
            self._client.disconnect()
        self._client.loop_stop()
        self.connected = False

    def _on_connect(self, client: paho.Client, _data: Any, _flags: Any, reason: Any, _properties: Any = None) -> None:
        if reason.is_failure:
            if reason.value in REFUSED:
                user = f"user '{self.address.username}'" if self.address.username else "a client without user name"
                self._refusal = (
                    f"The broker {self.address.host}:{self.address.port} refuses {user}: {reason}. "
                    "Check user name and password."
                )
            self._back_off()
            return
        self._attempt = 0
        self._refusal = None
        options = SubscribeOptions(qos=1, retainHandling=SubscribeOptions.RETAIN_SEND_ON_SUBSCRIBE)
        if self.subscriptions:
            client.subscribe([(topic, options) for topic in self.subscriptions])
        self.connected = True
        self.events.put(Event("connected"))

    def _on_disconnect(self, *_: Any) -> None:
        self._back_off()
        if self.connected:
            self.connected = False
            self.events.put(Event("disconnected"))

    def _back_off(self) -> None:
        """Tell paho how long to wait before it tries again."""
        pause = self._next_pause()
        self._client.reconnect_delay_set(min_delay=pause, max_delay=max(pause, BACKOFF_LAST_S))  # type: ignore[arg-type]

    def _next_pause(self) -> float:
        """Exponential backoff with full jitter above half: 0.25 to 0.5 s first, at most 30 s."""
        ceiling = min(BACKOFF_FIRST_S * 2.0**self._attempt, BACKOFF_LAST_S)
        self._attempt = min(self._attempt + 1, 16)
        return float(ceiling * random.uniform(0.5, 1.0))


def _no_delay(_client: Any, _data: Any, sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
