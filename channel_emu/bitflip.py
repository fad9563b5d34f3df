"""The bit-flip channel: a binary symmetric channel with flip probability p, independent over bits (spec 4.1)."""

import numpy as np

from fadefed.streams import stream


def flip_bits(
    data: bytes,
    bits: int,
    probability: float,
    seed: int,
    slot: int,
    signal: str,
    number: int,
    attempt: int = 0,
) -> bytes:
    """`data` with each of its first `bits` bits (little-endian order) flipped with `probability`; padding untouched.

    Bit i of device `number` uses entry i of the stream (seed, slot, signal, attempt, number), so chunking and order of
    arrival change nothing. The probability is exact to 2^-32.
    """
    if probability <= 0 or bits == 0:
        return data
    rng = stream(seed, "flips", slot, signal, attempt, counter=number)
    words = rng.bit_generator.random_raw((bits + 1) // 2).view(np.uint32)[:bits]
    threshold = np.uint64(min(round(probability * 2**32), 2**32))
    mask = np.packbits(words < threshold, bitorder="little")
    flipped = np.frombuffer(data, dtype=np.uint8).copy()
    flipped[: mask.size] ^= mask
    return flipped.tobytes()
