"""Chunks: a message above a limit travels in pieces, each on a topic of its own, and is put together again.

A chunk is "FC", version, zero byte, message id (8 bytes), index and count (4 bytes each), length of the whole
message (8 bytes) and its CRC-32 (4 bytes), little-endian; then its piece.
"""

import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from fadefed.errors import MessageError
from fadefed.messages.wire import MAX_MESSAGE_BYTES, VERSION

CHUNK_LIMIT_BYTES = 128 << 10
MAGIC = b"FC"
PREFIX = struct.Struct("<2sBx8sIIQI")


def split(topic: str, message: bytes, limit: int = CHUNK_LIMIT_BYTES) -> Iterator[tuple[str, bytes]]:
    """(topic, payload) of each publication that carries `message`: one, or chunks of at most `limit` bytes."""
    if len(message) <= limit:
        yield topic, message
        return
    piece = limit - PREFIX.size
    count = -(-len(message) // piece)
    identity = blake2b(message, digest_size=8).digest()
    crc = zlib.crc32(message)
    for index in range(count):
        prefix = PREFIX.pack(MAGIC, VERSION, identity, index, count, len(message), crc)
        yield f"{topic}/{index}", prefix + message[index * piece : (index + 1) * piece]


@dataclass
class _Partial:
    count: int
    length: int
    crc: int
    pieces: dict[int, bytes] = field(default_factory=dict)
    size: int = 0


class Assembler:
    """Puts chunks together. Keeps at most `most` unfinished messages per source and forgets the oldest."""

    def __init__(self, most: int = 2, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._partial: dict[str, OrderedDict[bytes, _Partial]] = {}

    def feed(self, source: str, index: int | None, payload: bytes) -> bytes | None:
        """The whole message once its last chunk is in, else None; `index` None: the payload is a whole message.

        source: what the chunks have in common, (device, kind) say. Raises MessageError for a malformed chunk.
        """
        if index is None:
            return payload
        if len(payload) < PREFIX.size:
            raise MessageError(f"A chunk has at least {PREFIX.size} bytes, this one {len(payload)}.")
        magic, version, identity, own_index, count, length, crc = PREFIX.unpack_from(payload)
        if magic != MAGIC or version != VERSION:
            raise MessageError("The payload is not a chunk of this protocol version.")
        if own_index != index or index >= count or length > self._max_bytes or count > max(length, 1):
            raise MessageError(f"Chunk {index} of {count} ({length} bytes in all) is impossible.")
        waiting = self._partial.setdefault(source, OrderedDict())
        partial = waiting.setdefault(identity, _Partial(count, length, crc))
        while len(waiting) > self._most:
            waiting.popitem(last=False)
        if (partial.count, partial.length, partial.crc) != (count, length, crc):
            raise MessageError("A chunk contradicts an earlier one of the same message.")
        if index not in partial.pieces:
            partial.pieces[index] = payload[PREFIX.size :]
            partial.size += len(payload) - PREFIX.size
        if partial.size > length:
            del waiting[identity]
            raise MessageError("The chunks hold more bytes than their message.")
        if len(partial.pieces) < count:
            return None
        del waiting[identity]
        message = b"".join(partial.pieces[i] for i in range(count))
        if len(message) != length or zlib.crc32(message) != crc:
            raise MessageError("The message's checksum is wrong: a chunk was damaged.")
        return message
