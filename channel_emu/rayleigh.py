"""Rayleigh block fading: one power gain per device and block, |h|^2 with h ~ CN(0, 1), so |h|^2 ~ Exp(1)."""

from collections.abc import Sequence

import numpy as np

from fadefed.messages import Array
from fadefed.streams import stream


def power_gains(seed: int, slot: int, block: str, numbers: Sequence[int], attempt: int = 0) -> Array:
    """Power gains |h|^2 [len(numbers)], float64, unit mean, independent over devices, slots, blocks and attempts.

    numbers: the devices' permanent numbers; entry i of the stream (seed, slot, block, attempt) is device i's, so a draw
    does not depend on who else is asked about. block: "" for one fade per device and slot, else a signal's name.
    """
    uniforms = stream(seed, "fading", slot, block, attempt).random(max(numbers, default=-1) + 1)
    return -np.log1p(-uniforms[np.asarray(numbers, dtype=np.int64)])
