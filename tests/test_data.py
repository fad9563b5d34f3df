from pathlib import Path

import numpy as np
import pytest

from fadefed.errors import ConfigError, DataError
from fadefed.learning import Task
from fadefed.tasks import Dataset, Fleet, load_npz, open_source, save_npz
from fadefed.tasks.sources import mnist
from fadefed.tasks.splits import PAPER_COHORTS, cohort_of, cohorts, homogeneous

TASK = Task("t", (4, 3))


def test_npz_round_trip(tmp_path: Path) -> None:
    data = Dataset(np.arange(12, dtype=np.float32).reshape(3, 4), np.array([0, 2, 1]), np.array([0, 0, 1]))
    save_npz(tmp_path / "d.npz", data)
    back = open_source(str(tmp_path / "d.npz"))
    np.testing.assert_array_equal(back.x, data.x)
    assert back.train_count == 2


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((2, 4))}, "lacks the array y"),
        ({"x": np.zeros(4), "y": np.zeros(4)}, "x needs shape"),
        ({"x": np.array([["a", "b"]]), "y": np.zeros(1)}, "dtype"),
        ({"x": np.array([[object()]]), "y": np.zeros(1)}, "not a readable"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, arrays: dict, words: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=rf"d\.npz.*{words}"):
        load_npz(tmp_path / "d.npz")


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such data file"):
        open_source(str(tmp_path / "no.npz"))
    with pytest.raises(DataError, match="unknown kind of data source"):
        open_source("camera://0")
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(DataError, match="not a readable"):
        load_npz(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("x", "y", "split", "words"),
    [
        (np.zeros((2, 5)), [0, 1], [0, 0], r"takes inputs of shape \[n, 4\]"),
        (np.zeros((2, 4)), [0, 3], [0, 0], "labels run from 0 to 3"),
        (np.zeros((2, 4)), [0.0, 1.0], [0, 0], "integers"),
        (np.full((2, 4), np.nan), [0, 1], [0, 0], "NaN"),
        (np.zeros((2, 4)), [0, 1], [1, 1], "marked for training"),
        (np.zeros((2, 4)), [0, 1], [0, 7], "0 \\(train\\) or 1"),
        (np.zeros((2, 4)), [0], [0], "2 inputs but 1 labels"),
        (np.zeros((0, 4)), np.zeros(0, int), [], "no examples"),
    ],
)
def test_data_that_does_not_fit_is_refused(x: np.ndarray, y: list, split: list, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Dataset(x, np.array(y), np.array(split)).check(TASK, "here")


def test_images_fit_a_flat_input() -> None:
    Dataset(np.zeros((2, 2, 2)), np.array([0, 1]), np.zeros(2)).check(TASK, "here")


def test_a_fleet_pads_and_a_device_does_not() -> None:
    sets = [Dataset(np.ones((n, 4)), np.zeros(n, int), np.zeros(n)) for n in (2, 5)]
    fleet = Fleet(sets, TASK)
    assert fleet.train.x.shape == (2, 5, 4) and fleet.train.weight.sum() == 7
    assert fleet.device(0).train.x.shape == (1, 2, 4)
    one = Fleet(sets[:1], TASK)
    np.testing.assert_array_equal(one.train.x, fleet.device(0).train.x)
    assert one.train.x.dtype == fleet.device(0).train.x.dtype


def test_cohorts_are_disjoint_and_hidden_by_digits() -> None:
    x, y = mnist()
    assert x.shape == (5000, 784) and x.min() == 0 and x.max() == 1
    dealt = cohorts(x, y, 30, 20, 80, np.random.default_rng(0))
    assert [cohort_of(30).count(c) for c in range(3)] == [12, 12, 6]
    assert [cohort_of(10).count(c) for c in range(3)] == [4, 4, 2]
    for data, cohort in zip(dealt, cohort_of(30), strict=True):
        assert set(data.y) <= set(PAPER_COHORTS[cohort][1])
        assert data.train_count == 20 and len(data.y) == 100
    rows = np.concatenate([data.x for data in dealt])
    pool = {image.tobytes() for image in x}
    used = [image.tobytes() for image in rows]
    assert set(used) <= pool
    assert len(used) - len(set(used)) <= 5000 - len(pool)  # no image twice, but for duplicates within MNIST itself
    assert len({int(v) for d in homogeneous(x, y, 3, 20, 80, np.random.default_rng(0)) for v in d.y}) == 10


def test_asking_for_too_much_is_named() -> None:
    with pytest.raises(ConfigError, match="too few examples of class"):
        homogeneous(np.zeros((20, 4)), np.arange(20) % 2, 5, 10, 0, np.random.default_rng(0))
