"""Outage by capacity on a fading link (MtFEEL section VI, with the direction and the B of its gap G8 put right)."""

import numpy as np

from fadefed.messages import Array


def load(bits: float, bandwidth_hz: float, slot_s: float) -> float:
    """Spectral load r in bit/s/Hz of `bits` sent in one slot of `slot_s` seconds over `bandwidth_hz`."""
    return bits / (bandwidth_hz * slot_s)


def in_outage(gain: Array, snr: Array | float, r: Array | float) -> Array:
    """True where log2(1 + |h|^2 SNR) < r: the link cannot carry the load. gain and linear SNR broadcast."""
    with np.errstate(over="ignore"):
        return np.asarray(np.log2(1 + np.asarray(gain) * snr) < r)


def rayleigh_outage_probability(snr: Array | float, r: Array | float) -> Array:
    """P_out = 1 - exp(-(2^r - 1) / SNR) for Rayleigh fading of unit mean power; SNR linear."""
    with np.errstate(over="ignore", divide="ignore"):
        return np.asarray(-np.expm1(-(np.exp2(r) - 1) / snr))


def snr_linear(snr_db: Array | float) -> Array:
    """10^(dB / 10)."""
    return np.asarray(10.0 ** (np.asarray(snr_db, dtype=np.float64) / 10))
