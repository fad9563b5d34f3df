"""Random streams: every draw in FadeFed comes from a stream that is named by what it is for.

A stream is a counter-based generator (Philox, Salmon et al., SC 2011) whose key is a hash of a seed
and a tuple of labels. Two processes that name the same stream see the same numbers, whatever else
they drew before. Nothing uses NumPy's global generator.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Label = int | str
Array = NDArray[np.uint8]


def stream(seed: int, *labels: Label, counter: int = 0) -> np.random.Generator:
    """The generator named (seed, *labels); `counter` picks one of 2^64 disjoint parts of it.

    >>> stream(1, "ties", 7).integers(100) == stream(1, "ties", 7).integers(100)
    True
    """
    return np.random.Generator(np.random.Philox(key=_key(seed, *labels), counter=[0, 0, counter, 0]))


def random_bytes(seed: int, *labels: Label, counter: int = 0, count: int) -> Array:
    """The first `count` bytes of the stream (seed, *labels), uint8."""
    raw = np.random.Philox(key=_key(seed, *labels), counter=[0, 0, counter, 0]).random_raw(-(-count // 8))
    return np.asarray(raw).view(np.uint8)[:count]


@lru_cache(maxsize=1024, typed=True)
def _key(seed: int, *labels: Label) -> int:
    text = "\x1f".join([str(seed), *(f"{type(label).__name__}:{label}" for label in labels)])
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
