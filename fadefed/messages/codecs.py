"""Codecs: one tensor into bytes and back.

| codec          | bytes for d elements | decoded as | what it keeps |
|----------------|----------------------|------------|---------------|
| sign           | ceil(d/8)            | int8       | the sign; an exact zero becomes a tie bit |
| sign-scale     | ceil(d/8)            | float32    | sign times the mean magnitude |
| sign-feedback  | ceil(d/8)            | float32    | as sign-scale, of tensor + residual; the residual stays with the sender |
| ternary        | 2 ceil(d/8)          | int8       | -1, 0 or +1 |
| bits           | ceil(d/8)            | bool       | a mask |
| int8           | d                    | float32    | 255 levels, symmetric, one scale per row |
| float16, float32, float64, int32, int64 | 2d, 4d, 8d, 4d, 8d | themselves | the value (float16 rounds) |

Bits are packed in little-endian order, eight to a byte, zero padded. Multi-byte numbers are little-endian.
A codec's few real parameters (scales) travel in the protected header.

Sources: one-bit signs, Bernstein et al., signSGD, ICML 2018; scale and error feedback, Karimireddy et
al., Error Feedback Fixes SignSGD, ICML 2019 (eq. for EF-signSGD: p = g + e, delta = mean|p| sign(p), e = p - delta).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fadefed.errors import MessageError, NonFiniteError
from fadefed.messages.values import Array

RAW: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
}
SIGN_CODECS = ("sign", "sign-scale", "sign-feedback")
CODECS = (*SIGN_CODECS, "ternary", "bits", "int8", *RAW)

TieBits = Callable[[int], Array]
"""Gives n fresh bytes (uint8) of random tie bits."""


@dataclass(frozen=True)
class Coded:
    """A tensor in bytes. `data` is None when the channel erased it. `parameters` are the codec's scales."""

    codec: str
    shape: tuple[int, ...]
    data: bytes | None
    parameters: tuple[float, ...] = ()

    @property
    def bits(self) -> int:
        """Bits the link must carry: what the codec needs, without padding."""
        return payload_bits(self.codec, self.shape)


def payload_bits(codec: str, shape: tuple[int, ...]) -> int:
    """Bits on the air for a tensor of `shape`, without padding to whole bytes."""
    count = math.prod(shape)
    if codec in SIGN_CODECS or codec == "bits":
        return count
    if codec == "ternary":
        return 2 * count
    return count * (1 if codec == "int8" else RAW[codec].itemsize) * 8


def coded_size(codec: str, shape: tuple[int, ...]) -> int:
    """Bytes of the coded tensor."""
    count = math.prod(shape)
    packed = (count + 7) // 8
    if codec in SIGN_CODECS or codec == "bits":
        return packed
    if codec == "ternary":
        return 2 * packed
    return count * (1 if codec == "int8" else RAW[codec].itemsize)


def natural_codec(tensor: Array) -> str:
    """The codec that keeps `tensor` exactly: by dtype."""
    if tensor.dtype == np.bool_:
        return "bits"
    if tensor.dtype.name in RAW:
        return tensor.dtype.name
    raise MessageError(
        f"A tensor of dtype {tensor.dtype} has no exact codec. Convert it to one of {', '.join(RAW)}, bool."
    )


def encode(codec: str, tensor: Array, tie_bits: TieBits | None = None) -> Coded:
    """Code `tensor` (real, any shape). Sign codecs take tie bits for exact zeros; without them a zero is +1.

    Raises NonFiniteError when a real tensor holds NaN or infinity, MessageError for an unknown codec.
    """
    tensor = np.asarray(tensor)
    shape = tuple(int(n) for n in tensor.shape)
    if codec in RAW:
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise NonFiniteError("The tensor holds NaN or infinity")
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(tensor, dtype=RAW[codec])
        if codec == "float16" and not np.isfinite(values).all():
            raise NonFiniteError("The tensor does not fit float16 (above 65504); use float32")
        return Coded(codec, shape, values.tobytes())
    if codec == "bits":
        return Coded(codec, shape, _pack(tensor.astype(bool).ravel()))
    flat = tensor.ravel()
    # NaN or infinity anywhere makes the sum of squares non-finite; so may an overflow, hence the second look.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not math.isfinite(flat @ flat)
    if suspicious and not np.isfinite(flat).all():
        raise NonFiniteError("The tensor holds NaN or infinity")
    if codec == "int8":
        rows = np.asarray(tensor, dtype=np.float32).reshape(shape[0] if len(shape) > 1 else 1, -1)
        scales = np.abs(rows).max(axis=1, initial=0.0) / np.float32(127)
        scales = np.where(scales > 0, scales, np.float32(1))
        levels = np.rint(rows / scales[:, None]).astype(np.int8)
        return Coded(codec, shape, levels.tobytes(), tuple(float(s) for s in scales))
    if codec == "ternary":
        return Coded(codec, shape, _pack(flat > 0) + _pack(flat != 0))
    if codec in SIGN_CODECS:
        if codec == "sign":
            return Coded(codec, shape, _signs(flat, tie_bits))
        magnitude = float(np.abs(flat).sum(dtype=np.float64)) / max(flat.size, 1)
        scale = (float(np.float32(magnitude)),)
        return Coded(codec, shape, _signs(flat, tie_bits), scale)
    raise MessageError(f"Unknown codec '{codec}'. Known: {', '.join(CODECS)}.")


def decode(coded: Coded) -> Array:
    """The tensor that `coded` stands for. Raises MessageError when bytes and shape do not fit."""
    codec, shape, data = coded.codec, coded.shape, coded.data
    if codec not in CODECS:
        raise MessageError(f"Unknown codec '{codec}'. Known: {', '.join(CODECS)}.")
    if data is None:
        raise MessageError("An erased tensor has no value.")
    if len(data) != coded_size(codec, shape):
        raise MessageError(
            f"A '{codec}' tensor of shape {list(shape)} takes {coded_size(codec, shape)} bytes, not {len(data)}."
        )
    count = math.prod(shape)
    if codec in RAW:
        return np.asarray(np.frombuffer(data, dtype=RAW[codec]).reshape(shape))
    if codec == "bits":
        return _unpack(data, count).astype(bool).reshape(shape)
    if codec == "ternary":
        half = len(data) // 2
        signs = 2 * _unpack(data[:half], count).astype(np.int8) - 1
        return (signs * _unpack(data[half:], count).astype(np.int8)).reshape(shape)
    if codec == "int8":
        rows = shape[0] if len(shape) > 1 else 1
        if len(coded.parameters) != rows:
            raise MessageError(f"An int8 tensor of {rows} rows takes {rows} scales, not {len(coded.parameters)}.")
        scales = np.array(coded.parameters, dtype=np.float32)
        levels = np.frombuffer(data, dtype=np.int8).reshape(rows, -1) if count else np.zeros((rows, 0), np.int8)
        return (levels.astype(np.float32) * scales[:, None]).reshape(shape)
    signs = _unpack(data, count).view(np.int8)
    signs += signs
    signs -= 1
    if codec == "sign":
        return signs.reshape(shape)
    if len(coded.parameters) != 1:
        raise MessageError(f"A '{codec}' tensor takes one scale, not {len(coded.parameters)}.")
    return (signs * np.float32(coded.parameters[0])).reshape(shape)


def encode_with_feedback(tensor: Array, residual: Array | None, tie_bits: TieBits | None = None) -> tuple[Coded, Array]:
    """Code tensor + residual as `sign-feedback`; also the new residual, float32, what the code left out."""
    corrected = np.asarray(tensor, dtype=np.float32)
    if residual is not None:
        corrected = corrected + residual
    coded = encode("sign-feedback", corrected, tie_bits)
    return coded, corrected - decode(coded)


def _signs(flat: Array, tie_bits: TieBits | None) -> bytes:
    """One bit per element: 1 where positive; at exact zeros the tie bit (1 without tie bits)."""
    if tie_bits is None:
        return _pack(flat >= 0)
    bits = np.empty(flat.size, dtype=bool)  # one buffer for both comparisons: it stays in the cache
    positive = np.packbits(np.greater(flat, 0, out=bits), bitorder="little")
    zero = np.packbits(np.equal(flat, 0, out=bits), bitorder="little")
    if zero.any():
        positive |= zero & tie_bits(positive.size)
    return positive.tobytes()


def _pack(bits: Array) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


def _unpack(data: bytes, count: int) -> Array:
    return np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count, bitorder="little")
