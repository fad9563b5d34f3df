import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fadefed.errors import MessageError
from fadefed.messages import Exchange, Order, Reception, SignalSpec
from fadefed.messages.codecs import Coded, encode
from fadefed.messages.wire import (
    Body,
    CodedReport,
    H,
    Kind,
    Message,
    pack,
    pack_order,
    pack_shared,
    pack_state,
    receive,
    unpack,
    unpack_order,
    unpack_shared,
    unpack_state,
)
from fadefed.mqtt.chunks import Assembler, split

RUN = bytes(range(8))
DOCS = Path(__file__).parent.parent / "docs" / "messages.md"


def an_exchange() -> Exchange:
    order = Order({("mnist", "support"): np.array([True, False, True])}, {"row": 2, "evaluate": True})
    answers = {("mnist", "sign"): SignalSpec("sign", "digital"), ("mnist", "losses"): SignalSpec("float32")}
    shared = {("mnist", "models"): np.arange(6, dtype=np.float32).reshape(3, 2)}
    return Exchange(7, "signs", 7, {"board-1": order}, answers, shared, shared_number=13, number=14)


def a_report() -> CodedReport:
    sign = encode("sign", np.array([1.0, -1, 1, 1, -1, 1, 1, -1, 1, 1]))
    losses = encode("float32", np.array([0.5, 1.25], dtype=np.float32))
    bodies = (Body(("mnist", "sign/0"), sign, "digital"), Body(("mnist", "losses"), losses))
    return CodedReport(14, 7, 3, bodies, {"train_loss": 0.5}, run=RUN)


def test_report_round_trip() -> None:
    assert CodedReport.unpack(a_report().pack()) == a_report()
    failed = CodedReport(1, 1, 0, (), error="no", run=RUN)
    assert CodedReport.unpack(failed.pack()) == failed


def test_order_and_shared_round_trip() -> None:
    exchange = an_exchange()
    run, number, back, order = unpack_order(pack_order(RUN, exchange, "board-1", 3))
    assert (run, number) == (RUN, 3)
    assert (back.round, back.phase, back.slot, back.number, back.shared_number) == (7, "signs", 7, 14, 13)
    assert back.answers == exchange.answers
    assert order.scalars == exchange.orders["board-1"].scalars
    np.testing.assert_array_equal(order.tensors["mnist", "support"], [True, False, True])
    run, owner, shared = unpack_shared(pack_shared(RUN, exchange))
    assert (run, owner) == (RUN, 13)
    np.testing.assert_array_equal(shared["mnist", "models"], exchange.shared["mnist", "models"])


def test_state_round_trip_keeps_every_bit() -> None:
    state = {
        "w": np.array([[1.5, np.nan], [np.inf, -0.0]]),
        "n": [1, None, True, "x", b"y"],
        "deep": {"i": np.int64(3)},
    }
    back = unpack_state(pack_state(state))
    assert back["w"].tobytes() == state["w"].tobytes() and back["w"].dtype == np.float64
    assert back["n"] == state["n"] and back["deep"] == {"i": 3}
    back["w"][0, 0] = 2  # a restored state can be worked on


def test_flipped_digital_bits_pass_and_protected_ones_do_not() -> None:
    packed = bytearray(a_report().pack())
    digital, protected = len(packed) - 8 - 2, len(packed) - 1
    packed[digital] ^= 1
    signs = CodedReport.unpack(bytes(packed)).bodies[0].coded.data
    assert signs != a_report().bodies[0].coded.data
    packed[protected] ^= 1
    with pytest.raises(MessageError, match="checksum of the protected"):
        CodedReport.unpack(bytes(packed))


def test_an_erased_signal_keeps_its_description() -> None:
    body = a_report().bodies[0]
    erased = Body(body.key, Coded("sign", (10,), None), "digital")
    report = CodedReport.unpack(a_report().with_bodies((erased, a_report().bodies[1])).pack())
    reception = Reception(absent={"board-1"})
    receive(an_exchange(), "board-1", report, reception)
    assert reception.erased == {("board-1", ("mnist", "sign/0"))}
    assert set(reception.reports["board-1"]) == {("mnist", "losses")}
    assert not reception.absent


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bodies": (Body(("mnist", "sign/0"), encode("float32", np.ones(3)), "digital"),)}, "not what was asked"),
        ({"bodies": (Body(("mnist", "spy"), encode("float32", np.ones(3))),)}, "not what was asked"),
        ({"bodies": (Body(("mnist", "sign/0"), encode("sign", np.ones(3))),)}, "not what was asked"),
        (
            {"bodies": (Body(("mnist", "losses"), Coded("float32", (1,), np.float32("nan").tobytes())),)},
            "NaN or infinity",
        ),
        ({"scalars": {"train_loss": float("inf")}}, "train_loss"),
        ({"error": "it burns"}, "it burns"),
    ],
)
def test_unusable_reports_are_refused_with_device_and_exchange(change: dict, words: str) -> None:
    report = CodedReport(**{**a_report().__dict__, **change})
    reception = Reception(absent={"board-1"})
    with pytest.raises(MessageError, match=words) as caught:
        receive(an_exchange(), "board-1", report, reception)
    assert "board-1" in str(caught.value) and "exchange 14" in str(caught.value)
    assert reception.absent == {"board-1"} and not reception.reports


@given(st.binary(max_size=300))
@example(b"FF\x01\x05" + b"\xff" * 8)
@example(pack(Message(Kind.REPORT, {H.RUN: 5})))
def test_any_bytes_give_a_message_or_a_message_error(data: bytes) -> None:
    for parse in (unpack, CodedReport.unpack, unpack_order, unpack_shared, unpack_state):
        try:
            parse(data)
        except MessageError as error:
            assert str(error)


@given(st.data())
def test_damaged_messages_never_raise_anything_else(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from([a_report().pack(), pack_order(RUN, an_exchange(), "board-1", 3)]))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        CodedReport.unpack(bytes(damaged))
        unpack_order(bytes(damaged))
    except MessageError:
        pass


headers = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.integers(0, 14), inner, max_size=6),
    max_leaves=25,
)


@given(st.dictionaries(st.integers(0, 14), headers, max_size=10), st.sampled_from(Kind), st.binary(max_size=40))
def test_well_framed_nonsense_is_refused(header: dict, kind: Kind, rest: bytes) -> None:
    header.pop(H.BODY_CRC, None)
    data = pack(Message(kind, header)) + rest
    for parse in (CodedReport.unpack, unpack_order, unpack_shared, unpack_state):
        try:
            parse(data)
        except MessageError:
            pass


def test_other_versions_and_kinds_are_named() -> None:
    packed = bytearray(a_report().pack())
    packed[2] = 9
    with pytest.raises(MessageError, match="version 9"):
        unpack(packed)
    with pytest.raises(MessageError, match="kind 5"):
        unpack(a_report().pack(), Kind.ORDER)
    with pytest.raises(MessageError, match="more than its header"):
        unpack(a_report().pack() + b"x")


@given(st.binary(min_size=1, max_size=4000), st.integers(60, 900), st.randoms())
def test_chunks_come_together_in_any_order(message: bytes, limit: int, random: object) -> None:
    pieces = list(split("t", message, limit))
    assert all(len(payload) <= limit for _, payload in pieces)
    random.shuffle(pieces)  # type: ignore[attr-defined]
    assembler = Assembler()
    results = []
    for topic, payload in [*pieces[:-1], *pieces]:  # all but one arrive twice
        index = int(topic.split("/")[1]) if "/" in topic else None
        results.append(assembler.feed("t", index, payload))
    assert [result for result in results if result is not None][-1] == message


@given(st.binary(max_size=200), st.integers(0, 9))
def test_any_chunk_gives_a_message_error_or_nothing(payload: bytes, index: int) -> None:
    try:
        Assembler().feed("t", index, payload)
    except MessageError:
        pass


def test_documented_vectors() -> None:
    """docs/messages.md carries byte-exact messages; what they decode to stands beside them."""
    blocks = re.findall(r"```json vector\n(.*?)```", DOCS.read_text(), re.S)
    vectors = [json.loads(block) for block in blocks]
    assert {vector["name"] for vector in vectors} >= {"sign report", "erased report", "order", "shared", "codecs"}
    for vector in vectors:
        if vector["name"] == "codecs":
            for case in vector["cases"]:
                coded = encode(case["codec"], np.array(case["values"], dtype=np.float32))
                assert coded.data is not None
                assert coded.data.hex() == case["hex"], case
                np.testing.assert_allclose(list(coded.parameters), case["parameters"], rtol=1e-6)
        elif vector["name"] in ("sign report", "erased report"):
            report = CodedReport.unpack(bytes.fromhex(vector["hex"]))
            assert report.pack().hex() == vector["hex"]
            assert (report.exchange, report.slot, report.number) == (14, 7, 3)
            erased = report.bodies[0].coded.data is None
            assert erased == (vector["name"] == "erased report")
        elif vector["name"] == "order":
            assert pack_order(RUN, an_exchange(), "board-1", 3).hex() == vector["hex"]
        elif vector["name"] == "shared":
            assert pack_shared(RUN, an_exchange()).hex() == vector["hex"]
