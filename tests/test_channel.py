import numpy as np
import pytest
from scipy.special import exp1
from scipy.stats import kstest

from channel_emu import Channel, LinkConfig
from channel_emu.bitflip import flip_bits
from channel_emu.outage import in_outage, load, rayleigh_outage_probability, snr_linear
from channel_emu.rayleigh import power_gains
from fadefed.errors import ConfigError
from fadefed.messages import Exchange, Order, SignalSpec
from fadefed.messages.codecs import decode, encode
from fadefed.messages.wire import Body, CodedReport

DRAWS = 1_000_000


@pytest.fixture(scope="module")
def gains() -> np.ndarray:
    return power_gains(5, 1, "", range(DRAWS))


def test_gains_are_exponential_with_unit_mean(gains: np.ndarray) -> None:  # mtfeel U15
    assert gains.mean() == pytest.approx(1, abs=0.01)
    assert kstest(gains[:100_000], "expon").pvalue > 1e-3
    # Ergodic capacity, an independent closed form: E[ln(1 + SNR g)] = e^(1/SNR) E1(1/SNR).
    assert np.log1p(10 * gains).mean() == pytest.approx(np.exp(0.1) * exp1(0.1), rel=5e-3)


@pytest.mark.parametrize("r", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("snr_db", [-10, 0, 10])
def test_empirical_outage_is_within_three_standard_errors(gains: np.ndarray, r: float, snr_db: float) -> None:
    snr = float(snr_linear(snr_db))
    expected = float(1 - np.exp(-(2**r - 1) / snr))
    assert float(rayleigh_outage_probability(snr, r)) == pytest.approx(expected, rel=1e-9)
    rate = in_outage(gains, snr, r).mean()
    assert abs(rate - expected) <= 3 * np.sqrt(expected * (1 - expected) / DRAWS) + 1e-12


def test_reference_table_of_outage_probabilities() -> None:
    """mtfeel spec 4.2, row r = 0.3."""
    snr_db = [-20, -15, -12, -10, -8, -5, -3, 0, 3, 5, 10, 15, 20]
    table = [1.0, 0.9993, 0.9744, 0.9009, 0.7674, 0.5185, 0.3695, 0.2064, 0.1094, 0.0705, 0.0228, 0.0073, 0.0023]
    np.testing.assert_allclose(rayleigh_outage_probability(snr_linear(np.array(snr_db)), 0.3), table, atol=5.1e-5)


def test_more_snr_or_bandwidth_never_raises_outage(gains: np.ndarray) -> None:
    some = gains[:2000]
    power_over_noise, bits = 5e4, 25_450
    for snr_low, snr_high in ((0.1, 0.2), (1, 30), (1, np.inf)):
        assert not (in_outage(some, snr_high, 0.3) & ~in_outage(some, snr_low, 0.3)).any()
    previous = np.ones(len(some), dtype=bool)
    for bandwidth in (1e4, 3e4, 1e5, 1e6, 1e7):
        now = in_outage(some, power_over_noise / bandwidth, load(bits, bandwidth, 1.0))
        assert not (now & ~previous).any()
        previous = now
    assert not in_outage(some, np.inf, 5.0).any()


def test_a_draw_depends_on_seed_slot_block_and_device_alone() -> None:
    whole = power_gains(1, 2, "x", range(100))
    np.testing.assert_array_equal(power_gains(1, 2, "x", [97, 3]), whole[[97, 3]])
    for other in (
        power_gains(2, 2, "x", range(100)),
        power_gains(1, 3, "x", range(100)),
        power_gains(1, 2, "y", range(100)),
    ):
        assert abs(np.corrcoef(whole, other)[0, 1]) < 0.4 and (whole != other).all()


@pytest.mark.parametrize("p", [0.001, 0.05, 0.2, 0.5])
def test_flip_rate_is_within_three_standard_errors(p: float) -> None:  # mtfeel U16
    bits = 4_000_000
    data = bytes(bits // 8)
    flips = np.unpackbits(np.frombuffer(flip_bits(data, bits, p, 3, 1, "s", 0), np.uint8))
    assert abs(flips.mean() - p) <= 3 * np.sqrt(p * (1 - p) / bits)
    lagged = np.corrcoef(flips[:-1], flips[1:])[0, 1]
    assert abs(lagged) < 4 / np.sqrt(bits)


def test_flip_extremes_and_padding() -> None:
    data = bytes([0b10110010, 0b00000101])
    assert flip_bits(data, 11, 0.0, 1, 1, "s", 0) == data
    assert flip_bits(data, 11, 1.0, 1, 1, "s", 0) == bytes([0b01001101, 0b00000010])
    flipped = [flip_bits(bytes(1000), 8000, 0.3, 1, 1, "s", number) for number in (0, 1, 0)]
    assert flipped[0] == flipped[2] != flipped[1]
    # A longer message sees the same flips in the bits that both have.
    assert flip_bits(bytes(2000), 16000, 0.3, 1, 1, "s", 0)[:1000] == flipped[0]


def reports(count: int, vectors: int = 2, bits: int = 64) -> tuple[Exchange, dict[str, CodedReport]]:
    sign = encode("sign", np.ones(bits))
    bodies = [Body(("t", f"sign/{k}"), sign, "digital") for k in range(vectors)]
    bodies.append(Body(("t", "losses"), encode("float32", np.zeros(2))))
    answers = {("t", "sign"): SignalSpec("sign", "digital"), ("t", "losses"): SignalSpec("float32")}
    exchange = Exchange(1, "signs", 1, {f"d{i}": Order() for i in range(count)}, answers)
    return exchange, {f"d{i}": CodedReport(0, 1, i, tuple(bodies)) for i in range(count)}


@pytest.mark.parametrize("granularity", ["device", "vector"])
def test_granularity(granularity: str) -> None:
    config = LinkConfig("outage", snr_db=0.0, bandwidth_hz=64, granularity=granularity)
    exchange, sent = reports(4000)
    reception = Channel(config).carry(exchange, sent)
    lost = np.array([[(f"d{i}", ("t", f"sign/{k}")) in reception.erased for k in range(2)] for i in range(4000)])
    expected = config.outage_probability(64)
    assert expected == pytest.approx(1 - np.exp(-1), rel=1e-6)
    assert abs(lost.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000)
    together = (lost[:, 0] & lost[:, 1]).mean()
    assert together == pytest.approx(lost[:, 0].mean() if granularity == "device" else expected**2, abs=0.03)
    assert all(("t", "losses") in reception.reports[f"d{i}"] for i in range(4000))  # protected


def test_a_float32_report_loads_the_link_32_times_as_much() -> None:
    config = LinkConfig("outage", bandwidth_hz=1000.0)
    sign, real = encode("sign", np.ones(100)), encode("float32", np.ones(100))
    assert real.bits == 32 * sign.bits
    assert config.outage_probability(real.bits) > config.outage_probability(sign.bits)


def test_an_error_free_link_changes_nothing() -> None:  # mtfeel U19
    exchange, sent = reports(3)
    for config in (LinkConfig(), LinkConfig("outage", snr_db=300.0), LinkConfig("flips", flip_probability=0.0)):
        assert Channel(config).impair(list(sent.values())) == list(sent.values())
        reception = Channel(config).carry(exchange, sent)
        assert not reception.erased and not reception.absent


def test_one_report_at_a_time_meets_the_same_link() -> None:
    """The proxy impairs reports as they come, the simulator all at once."""
    for config in (LinkConfig("outage", snr_db=0.0, bandwidth_hz=64), LinkConfig("flips", flip_probability=0.2)):
        channel = Channel(config)
        _, sent = reports(40)
        together = channel.impair(list(sent.values()))
        apart = [channel.impair([report])[0] for report in reversed(sent.values())]
        assert together == apart[::-1]


def test_flipped_signs_shrink_by_one_minus_two_p() -> None:
    config = LinkConfig("flips", flip_probability=0.2)
    exchange, sent = reports(200, vectors=1, bits=4096)
    reception = Channel(config).carry(exchange, sent)
    mean = np.mean([reception.reports[f"d{i}"]["t", "sign/0"].mean() for i in range(200)])
    assert mean == pytest.approx(0.6, abs=4 * 0.8 / np.sqrt(200 * 4096))
    assert decode(next(iter(sent.values())).bodies[0].coded).mean() == 1  # what was sent is untouched


def test_each_device_has_its_own_snr() -> None:
    config = LinkConfig("outage", snr_db=[30.0, -30.0], bandwidth_hz=64)
    assert config.outage_probability(64, 0) < 0.01 < 0.99 < config.outage_probability(64, 1)
    assert config.snr(7) == config.snr(1)


@pytest.mark.parametrize(
    "wrong", [{"bandwidth_hz": 0.0}, {"slot_s": -1.0}, {"flip_probability": 1.5}, {"snr_db": []}], ids=str
)
def test_impossible_links_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        LinkConfig("outage", **wrong)
