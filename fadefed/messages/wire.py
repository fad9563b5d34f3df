"""Messages as bytes: a frame of fixed prefix, CBOR header and tensor bodies.

    offset  size  content
    0       2     magic "FF"
    2       1     protocol version (1)
    3       1     kind of message
    4       4     length of the header, little-endian
    8       4     CRC-32 of the header
    12      h     header: a CBOR map with small integer keys
    12+h    ...   bodies, one after another, in the header's order

Header keys: see the constants below and `docs/messages.md`, which carries the CDDL and byte-exact
test vectors. The header's CRC covers everything that is protected: scalars, codec parameters and, through
the CRC of the protected bodies kept in it, those bodies. Digital bodies have no checksum of their own, since the
channel may flip their bits; their length is checked.
"""

import struct
import zlib
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import cbor2
import numpy as np

from fadefed.errors import MessageError
from fadefed.messages.codecs import CODECS, Coded, coded_size, decode, encode, natural_codec
from fadefed.messages.values import Access, Array, Exchange, Key, Order, Reception, Scalar, SignalSpec

MAGIC = b"FF"
VERSION = 1
PREFIX = struct.Struct("<2sBBII")
MAX_HEADER_BYTES = 16 << 20
MAX_MESSAGE_BYTES = 1 << 30
MAX_DIMENSIONS = 8
MAX_DEVICES = 1 << 20  # bounds what the channel draws for a number that a report claims

ACCESS: tuple[Access, ...] = ("protected", "digital", "superposed")


class Kind(IntEnum):
    """What a message is; its byte on the wire."""

    MANIFEST = 1
    FILE = 2
    SHARED = 3
    ORDER = 4
    REPORT = 5
    HELLO = 6
    STATUS = 7
    CALL = 8
    STATE = 9


class H(IntEnum):
    """Header keys."""

    RUN = 0
    EXCHANGE = 1
    ROUND = 2
    PHASE = 3
    SLOT = 4
    NUMBER = 5
    SCALARS = 6
    BODIES = 7
    BODY_CRC = 8
    SHARED_NUMBER = 9
    ANSWERS = 10
    DATA = 11
    ERROR = 12


@dataclass(frozen=True)
class Body:
    """One tensor of a message: its name, its bytes, and its access to the air."""

    key: Key
    coded: Coded
    access: Access = "protected"


@dataclass(frozen=True)
class Message:
    """A frame: kind, header fields (without the bodies) and bodies."""

    kind: Kind
    header: dict[int, Any] = field(default_factory=dict)
    bodies: tuple[Body, ...] = ()


def pack(message: Message) -> bytes:
    """The bytes of `message`."""
    header = dict(message.header)
    chunks: list[bytes] = []
    if message.bodies:
        entries, crc = [], 0
        for body in message.bodies:
            data = body.coded.data
            entry: list[Any] = [
                body.key[0],
                body.key[1],
                CODECS.index(body.coded.codec),
                ACCESS.index(body.access),
                list(body.coded.shape),
                len(data) if data is not None else None,
            ]
            if body.coded.parameters:
                entry.append(list(body.coded.parameters))
            entries.append(entry)
            if data is not None:
                chunks.append(data)
                if body.access == "protected":
                    crc = zlib.crc32(data, crc)
        header[H.BODIES] = entries
        header[H.BODY_CRC] = crc
    encoded = cbor2.dumps({int(key): value for key, value in header.items()})
    prefix = PREFIX.pack(MAGIC, VERSION, message.kind, len(encoded), zlib.crc32(encoded))
    return b"".join([prefix, encoded, *chunks])


def unpack(data: bytes | bytearray | memoryview, *kinds: Kind) -> Message:
    """The message in `data`, fully checked; one of `kinds` when given. Raises MessageError, never anything else."""
    view = memoryview(data)
    if len(view) < PREFIX.size:
        raise MessageError(f"The message has {len(view)} bytes; a FadeFed message has at least {PREFIX.size}.")
    if len(view) > MAX_MESSAGE_BYTES:
        raise MessageError(f"The message has {len(view)} bytes; the limit is {MAX_MESSAGE_BYTES}.")
    magic, version, kind, length, crc = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise MessageError("The message does not start with 'FF': it is not a FadeFed message.")
    if version != VERSION:
        raise MessageError(
            f"The message has protocol version {version}; this program speaks {VERSION}. "
            "Install the same FadeFed release on gateway and boards."
        )
    if kind not in Kind._value2member_map_ or (kinds and kind not in kinds):
        raise MessageError(f"A message of kind {kind} does not belong on this topic.")
    if length > min(MAX_HEADER_BYTES, len(view) - PREFIX.size):
        raise MessageError(f"The header's length {length} is larger than the message: it was cut off.")
    encoded = view[PREFIX.size : PREFIX.size + length]
    if zlib.crc32(encoded) != crc:
        raise MessageError("The header's checksum is wrong: the message was damaged.")
    try:
        header = cbor2.loads(bytes(encoded))
    except Exception as error:  # cbor2 raises many kinds, RecursionError among them
        raise MessageError(f"The header is not CBOR: {type(error).__name__}.") from error
    if not isinstance(header, dict) or not all(type(key) is int for key in header):
        raise MessageError("The header is not a CBOR map with integer keys.")
    bodies = _bodies(header, view[PREFIX.size + length :])
    return Message(Kind(kind), header, bodies)


def _bodies(header: dict[int, Any], rest: memoryview) -> tuple[Body, ...]:
    entries = header.pop(H.BODIES, [])
    expected = header.pop(H.BODY_CRC, 0)
    if not isinstance(entries, list):
        raise MessageError("The header's list of bodies is not a list.")
    bodies: list[Body] = []
    names: set[Key] = set()
    offset, crc = 0, 0
    for entry in entries:
        match entry:
            case [
                str() as task,
                str() as name,
                int() as codec,
                int() as access,
                list() as shape,
                size,
                *parameters,
            ]:
                pass
            case _:
                raise MessageError("A body's description in the header is malformed.")
        if not 0 <= codec < len(CODECS) or not 0 <= access < len(ACCESS):
            raise MessageError(f"Body {name!r}: unknown codec {codec} or access {access}.")
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n <= MAX_MESSAGE_BYTES * 8 for n in shape):
            raise MessageError(f"Body {name!r}: impossible shape {shape!r:.80}.")
        scales = parameters[0] if parameters else []
        if len(parameters) > 1 or not isinstance(scales, list) or not all(type(p) is float for p in scales):
            raise MessageError(f"Body {name!r}: its codec parameters are malformed.")
        if (task, name) in names:
            raise MessageError(f"Body {name!r} occurs twice.")
        names.add((task, name))
        blob: bytes | None = None
        if size is not None:
            if size != coded_size(CODECS[codec], tuple(shape)) or offset + size > len(rest):
                raise MessageError(f"Body {name!r}: its length does not fit its shape, or the message was cut off.")
            blob = bytes(rest[offset : offset + size])
            offset += size
            if ACCESS[access] == "protected":
                crc = zlib.crc32(blob, crc)
        elif ACCESS[access] == "protected":
            raise MessageError(f"Body {name!r} is protected and cannot be erased.")
        bodies.append(Body((task, name), Coded(CODECS[codec], tuple(shape), blob, tuple(scales)), ACCESS[access]))
    if offset != len(rest):
        raise MessageError(f"The message has {len(rest) - offset} bytes more than its header describes.")
    if crc != expected:
        raise MessageError("The checksum of the protected bodies is wrong: the message was damaged.")
    return tuple(bodies)


def field_of(message: Message, key: H, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Header field `key`, checked to be of type `kind`. Raises MessageError when missing or of another type."""
    value = message.header.get(key, default)
    if value is ...:
        raise MessageError(f"The message lacks the header field {key.name}.")
    if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is int)):
        raise MessageError(f"The header field {key.name} is a {type(value).__name__}.")
    return value


def exact_bodies(tensors: dict[Key, Array]) -> tuple[Body, ...]:
    """Tensors as protected bodies that keep every bit."""
    return tuple(Body(key, encode(natural_codec(tensor), tensor)) for key, tensor in tensors.items())


def tensors_of(message: Message) -> dict[Key, Array]:
    return {body.key: decode(body.coded) for body in message.bodies}


def scalars_of(message: Message) -> dict[str, Scalar]:
    scalars = field_of(message, H.SCALARS, dict, {})
    for name, value in scalars.items():
        if not isinstance(name, str) or not isinstance(value, int | float | str | bool):
            raise MessageError(f"The scalar {name!r:.40} is malformed.")
    return dict(scalars)


# --- the four values ------------------------------------------------------------------------------------


def pack_shared(run: bytes, exchange: Exchange) -> bytes:
    """The tensors that `exchange` shares with all its devices, under the number of the exchange that owns them."""
    number = exchange.shared_number or exchange.number
    return pack(Message(Kind.SHARED, {H.RUN: run, H.EXCHANGE: number}, exact_bodies(exchange.shared)))


def unpack_shared(data: bytes) -> tuple[bytes, int, dict[Key, Array]]:
    """(run, number, tensors) of a SHARED message."""
    message = unpack(data, Kind.SHARED)
    return field_of(message, H.RUN, bytes), field_of(message, H.EXCHANGE, int), tensors_of(message)


def pack_order(run: bytes, exchange: Exchange, device: str, number: int) -> bytes:
    """The order to `device`, whose permanent number is `number`, with all it needs to know of the exchange."""
    order = exchange.orders[device]
    header: dict[int, Any] = {
        H.RUN: run,
        H.EXCHANGE: exchange.number,
        H.ROUND: exchange.round,
        H.PHASE: exchange.phase,
        H.SLOT: exchange.slot,
        H.NUMBER: number,
        H.ANSWERS: [[*key, spec.codec, spec.access, spec.ties] for key, spec in exchange.answers.items()],
        H.SCALARS: order.scalars,
    }
    if exchange.shared:
        header[H.SHARED_NUMBER] = exchange.shared_number or exchange.number
    return pack(Message(Kind.ORDER, header, exact_bodies(order.tensors)))


def unpack_order(data: bytes) -> tuple[bytes, int, Exchange, Order]:
    """(run, the device's number, the exchange as this device sees it, its order)."""
    message = unpack(data, Kind.ORDER)
    answers = {}
    for item in field_of(message, H.ANSWERS, list):
        match item:
            case [
                str(),
                str(),
                str() as codec,
                ("protected" | "digital" | "superposed") as access,
                ("random" | "plus") as ties,
            ]:
                answers[(item[0], item[1])] = SignalSpec(codec, access, ties)
            case _:
                raise MessageError("The order's list of answers is malformed.")
        if codec not in CODECS:
            raise MessageError(f"The order asks for the unknown codec {codec!r:.40}.")
    exchange = Exchange(
        round=field_of(message, H.ROUND, int),
        phase=field_of(message, H.PHASE, str),
        slot=field_of(message, H.SLOT, int),
        orders={},
        answers=answers,
        shared_number=field_of(message, H.SHARED_NUMBER, int, None),
        number=field_of(message, H.EXCHANGE, int),
    )
    order = Order(tensors_of(message), scalars_of(message))
    return field_of(message, H.RUN, bytes), field_of(message, H.NUMBER, int), exchange, order


@dataclass(frozen=True)
class CodedReport:
    """A report on its way: coded, so that the channel can treat its signals by access.

    number: the device's permanent number, which indexes the channel's draws.
    error: set when the device could not answer; then there are no signals.
    """

    exchange: int
    slot: int
    number: int
    bodies: tuple[Body, ...]
    scalars: dict[str, Scalar] = field(default_factory=dict)
    error: str | None = None
    run: bytes = b""

    def pack(self) -> bytes:
        header: dict[int, Any] = {
            H.RUN: self.run,
            H.EXCHANGE: self.exchange,
            H.SLOT: self.slot,
            H.NUMBER: self.number,
        }
        if self.scalars:
            header[H.SCALARS] = self.scalars
        if self.error is not None:
            header[H.ERROR] = self.error
        return pack(Message(Kind.REPORT, header, self.bodies))

    @classmethod
    def unpack(cls, data: bytes) -> "CodedReport":
        message = unpack(data, Kind.REPORT)
        number = field_of(message, H.NUMBER, int)
        if not 0 <= number < MAX_DEVICES:
            raise MessageError(f"The device number {number} is impossible; numbers run from 0 to {MAX_DEVICES - 1}.")
        return cls(
            exchange=field_of(message, H.EXCHANGE, int),
            slot=field_of(message, H.SLOT, int),
            number=number,
            bodies=message.bodies,
            scalars=scalars_of(message),
            error=field_of(message, H.ERROR, str, None),
            run=field_of(message, H.RUN, bytes),
        )

    def with_bodies(self, bodies: tuple[Body, ...]) -> "CodedReport":
        return replace(self, bodies=bodies)


def receive(exchange: Exchange, device: str, report: CodedReport, reception: Reception) -> None:
    """Decode `report` into `reception`, or raise MessageError and leave `reception` as it was.

    Refused: signals the exchange did not ask for, in another codec or access than asked, or with values
    that are not finite.
    """
    if report.error is not None:
        raise MessageError(f"Device {device}, exchange {exchange.number}: could not answer: {report.error:.300}")
    signals: dict[Key, Array] = {}
    erased: set[tuple[str, Key]] = set()
    for body in report.bodies:
        spec = exchange.spec(body.key)
        where = f"Device {device}, exchange {exchange.number}: signal {'/'.join(body.key)}"
        if spec is None or spec.codec != body.coded.codec or spec.access != body.access:
            raise MessageError(f"{where} is not what was asked for; the report is refused.")
        if body.coded.data is None:
            erased.add((device, body.key))
            continue
        tensor = decode(body.coded)
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise MessageError(f"{where} holds NaN or infinity; the report is refused.")
        signals[body.key] = tensor
    for name, value in report.scalars.items():
        if isinstance(value, float) and not np.isfinite(value):
            raise MessageError(
                f"Device {device}, exchange {exchange.number}: scalar '{name}' is {value}; the report is refused."
            )
    reception.reports[device] = signals
    reception.scalars[device] = report.scalars
    reception.erased |= erased
    reception.absent.discard(device)


# --- state: nested dicts of tensors and plain values ------------------------------------------------------

_TENSOR_TAG = 27  # CBOR "serialised object with type name": ["ndarray", dtype, shape, bytes]


def pack_state(state: dict[str, Any]) -> bytes:
    """Any nesting of dict, list, numbers, text, bytes and arrays, to the bit. `unpack_state` gives it back."""
    return pack(Message(Kind.STATE, {H.DATA: cbor2.dumps(_to_cbor(state))}))


def unpack_state(data: bytes) -> dict[str, Any]:
    """The state that `pack_state` packed. Raises MessageError when the bytes are damaged."""
    payload = field_of(unpack(data, Kind.STATE), H.DATA, bytes)
    try:
        state = _from_cbor(cbor2.loads(payload))
    except Exception as error:
        raise MessageError(f"The stored state is damaged: {error}.") from error
    if not isinstance(state, dict):
        raise MessageError("The stored state is not a map.")
    return state


def _to_cbor(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_cbor(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_cbor(item) for item in value]
    if isinstance(value, np.ndarray):
        return cbor2.CBORTag(_TENSOR_TAG, ["ndarray", value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, np.generic):
        return value.item()
    return value


def _from_cbor(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_cbor(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_cbor(item) for item in value]
    if isinstance(value, cbor2.CBORTag):
        match value.value:
            case ["ndarray", str() as dtype, [*shape], bytes() as raw] if value.tag == _TENSOR_TAG:
                return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
        raise ValueError(f"unknown CBOR tag {value.tag}")
    return value
