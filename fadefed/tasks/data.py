"""Data: one device's examples, the .npz file format, and fleets of devices as padded batches."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fadefed.errors import DataError
from fadefed.learning import Batch, Task
from fadefed.messages import Array

TRAIN, TEST = 0, 1


@dataclass(frozen=True)
class Dataset:
    """One device's examples: x [n, ...], labels y [n], split [n] (0 train, 1 test)."""

    x: Array
    y: Array
    split: Array

    def part(self, split: int) -> tuple[Array, Array]:
        """(x, y) of one split."""
        chosen = self.split == split
        return self.x[chosen], self.y[chosen]

    @property
    def train_count(self) -> int:
        return int((self.split == TRAIN).sum())

    def check(self, task: Task, where: str) -> None:
        """Raises DataError when the examples do not fit `task` or none is for training."""
        task.check(self.x, self.y, where)
        if self.split.shape != self.y.shape or not np.isin(self.split, (TRAIN, TEST)).all():
            raise DataError(f"{where}: 'split' must give 0 (train) or 1 (test) for each of the {len(self.y)} examples.")
        if self.train_count == 0:
            raise DataError(f"{where}: no example is marked for training. Set split to 0 for some.")


def save_npz(path: Path, data: Dataset) -> None:
    """Write the documented file format: arrays x, y, split."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, x=data.x, y=data.y, split=data.split)


def load_npz(path: Path) -> Dataset:
    """Read arrays x, y and, optionally, split (default: all train). Raises DataError with what is wrong."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in ("x", "y") if name not in archive]
            if missing:
                raise DataError(f"{path}: lacks the array {' and '.join(missing)}. docs/data.md shows the format.")
            x, y = archive["x"], archive["y"]
            split = archive["split"] if "split" in archive else np.zeros(len(y), np.uint8)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such data file. Check the path given to --data.") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: is not a readable .npz file ({error}). docs/data.md shows the format.") from error
    if x.ndim < 2 or y.ndim != 1 or split.ndim != 1:
        raise DataError(
            f"{path}: x needs shape [n, ...], y and split [n]; they have {x.shape}, {y.shape}, {split.shape}."
        )
    if x.dtype.kind not in "fiu":
        raise DataError(f"{path}: x has dtype {x.dtype}; give floating point numbers or integers.")
    return Dataset(x if x.dtype.kind == "f" else x.astype(np.float32), y, split)


def open_source(source: str) -> Dataset:
    """The data source named on the command line: a path to an .npz file (`docs/data.md`)."""
    if not source.endswith(".npz"):
        raise DataError(f"{source}: unknown kind of data source. Give the path of an .npz file (docs/data.md).")
    return load_npz(Path(source))


class Fleet:
    """The examples of B devices, padded to the longest, as batches over the fleet axis."""

    def __init__(self, datasets: Sequence[Dataset], task: Task) -> None:
        self.train = _pad([data.part(TRAIN) for data in datasets], task)
        self.test = _pad([data.part(TEST) for data in datasets], task)
        self.train_counts = np.array([data.train_count for data in datasets])

    def __len__(self) -> int:
        return len(self.train_counts)

    def device(self, b: int) -> "Fleet":
        """The fleet of one that holds device b, without padding."""
        one = object.__new__(Fleet)
        one.train, one.test = _trim(self.train.device(b)), _trim(self.test.device(b))
        one.train_counts = self.train_counts[b : b + 1]
        return one


def _pad(parts: list[tuple[Array, Array]], task: Task) -> Batch:
    longest = max(len(y) for _, y in parts)
    x = np.zeros((len(parts), longest, *task.input_shape), dtype=task.dtype)
    y = np.zeros((len(parts), longest), dtype=np.int64)
    weight = np.zeros((len(parts), longest), dtype=task.dtype)
    for b, (inputs, labels) in enumerate(parts):
        x[b, : len(labels)] = inputs.reshape(len(labels), *task.input_shape)
        y[b, : len(labels)] = labels
        weight[b, : len(labels)] = 1
    return Batch(x, y, weight)


def _trim(batch: Batch) -> Batch:
    count = int((batch.weight[0] > 0).sum())
    return Batch(batch.x[:, :count], batch.y[:, :count], batch.weight[:, :count])
