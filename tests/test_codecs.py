import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fadefed.errors import MessageError, NonFiniteError
from fadefed.messages.codecs import CODECS, Coded, coded_size, decode, encode, encode_with_feedback, payload_bits

finite = hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=40), elements=st.floats(-1e3, 1e3, width=32))


def fixed_ties(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("remainder", range(8))
def test_signs_are_packed_and_round_trip(remainder: int) -> None:  # mtfeel U7
    values = np.random.default_rng(remainder).normal(size=16 + remainder)
    coded = encode("sign", values)
    assert coded.data is not None and len(coded.data) == math.ceil(values.size / 8)
    assert coded.bits == values.size
    np.testing.assert_array_equal(decode(coded), np.sign(values))


def test_bits_are_little_endian_and_zero_padded() -> None:
    assert encode("sign", np.array([1.0, -1, -1, 1, -1, -1, -1, -1, 1])).data == bytes([0b00001001, 0b1])


def test_ties_come_from_the_given_bits_and_repeat() -> None:
    values = np.zeros(4000)
    values[::7] = 3.0
    first, again = encode("sign", values, fixed_ties), encode("sign", values, fixed_ties)
    assert first == again
    decoded = decode(first)
    assert (decoded[::7] == 1).all()
    assert set(np.unique(decoded)) == {-1, 1}
    ties = np.delete(decoded, np.arange(0, 4000, 7))
    assert abs(ties.mean()) < 4 / math.sqrt(ties.size)
    np.testing.assert_array_equal(decode(encode("sign", np.zeros(5))), np.ones(5))


@given(finite)
def test_exact_codecs_keep_every_bit(values: np.ndarray) -> None:
    for codec in ("float32", "float64"):
        decoded = decode(encode(codec, values))
        np.testing.assert_array_equal(decoded, values)
        assert decoded.dtype.name == codec


@given(finite)
def test_sizes_are_as_announced(values: np.ndarray) -> None:
    for codec in CODECS:
        coded = encode(codec, values.astype(np.int32) if codec.startswith("int") and codec != "int8" else values)
        assert coded.data is not None
        assert len(coded.data) == coded_size(codec, coded.shape)
        assert payload_bits(codec, coded.shape) <= 8 * len(coded.data)
        assert decode(coded).shape == values.shape


@given(finite)
def test_int8_is_within_half_a_level(values: np.ndarray) -> None:
    rows = values.reshape(values.shape[0] if values.ndim > 1 else 1, -1)
    step = np.abs(rows).max(axis=1, initial=0) / 127
    error = np.abs(decode(encode("int8", values)).reshape(rows.shape) - rows)
    assert (error <= step[:, None] * 0.501 + 1e-6).all()


def test_ternary_keeps_zeros() -> None:
    values = np.array([0.0, -2, 3, 0, 0, -1, 1, 0, 0, 5])
    np.testing.assert_array_equal(decode(encode("ternary", values)), np.sign(values))


def test_scale_is_the_mean_magnitude() -> None:
    values = np.array([1.0, -3.0, 2.0], dtype=np.float32)
    np.testing.assert_allclose(decode(encode("sign-scale", values)), [2, -2, 2])


def test_error_feedback_sends_everything_in_the_end() -> None:
    """What EF-signSGD sends plus its residual equals what it was given, so nothing is lost for good."""
    rng = np.random.default_rng(0)
    residual, sent, given_in = None, np.zeros(200), np.zeros(200)
    for _ in range(30):
        gradient = rng.normal(size=200).astype(np.float32)
        coded, residual = encode_with_feedback(gradient, residual)
        sent += decode(coded)
        given_in += gradient
    np.testing.assert_allclose(sent + residual, given_in, atol=1e-3)
    assert np.abs(residual).max() < 20  # the residual stays bounded (Karimireddy et al., Lemma 3)


@pytest.mark.parametrize("codec", ["sign", "sign-scale", "int8", "float32", "float16", "ternary"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused(codec: str, bad: float) -> None:
    with pytest.raises(NonFiniteError):
        encode(codec, np.array([1.0, bad]))


def test_float16_overflow_is_refused() -> None:
    with pytest.raises(NonFiniteError, match="float32"):
        encode("float16", np.array([1e6]))


@pytest.mark.parametrize(
    ("coded", "words"),
    [
        (Coded("sign", (9,), b"\0"), "takes 2 bytes"),
        (Coded("zip", (1,), b"\0"), "Unknown codec"),
        (Coded("int8", (2, 2), b"\0" * 4, (1.0,)), "2 scales"),
        (Coded("sign-scale", (8,), b"\0"), "one scale"),
        (Coded("sign", (8,), None), "erased"),
    ],
)
def test_wrong_bytes_are_named(coded: Coded, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        decode(coded)
