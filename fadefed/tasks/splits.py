"""Ways to split a pool of labelled examples over devices. Each returns one Dataset per device, disjoint."""

from collections.abc import Sequence

import numpy as np

from fadefed.errors import ConfigError
from fadefed.messages import Array
from fadefed.tasks.data import TEST, TRAIN, Dataset

PAPER_COHORTS = ((12, (0, 1, 2, 3, 4, 5)), (12, (6, 7, 8, 9)), (6, (3, 4, 5, 6, 7)))
"""(share of devices out of 30, digits) of the three hidden cohorts (MtFEEL section VI)."""


def cohort_of(devices: int) -> list[int]:
    """Which of the paper's three cohorts each of `devices` devices belongs to, in the proportions 12:12:6."""
    bounds = np.cumsum([count for count, _ in PAPER_COHORTS]) * devices / 30
    return [int(np.searchsorted(bounds, d + 0.5)) for d in range(devices)]


def cohorts(x: Array, y: Array, devices: int, train: int, test: int, rng: np.random.Generator) -> list[Dataset]:
    """The MtFEEL paper's three cohorts: each device draws labels uniformly from its cohort's digits (spec 5.2)."""
    labels = [PAPER_COHORTS[c][1] for c in cohort_of(devices)]
    return draw(x, y, labels, train, test, rng)


def homogeneous(x: Array, y: Array, devices: int, train: int, test: int, rng: np.random.Generator) -> list[Dataset]:
    """Every device draws labels uniformly from all classes (spec 7.2, control E6)."""
    return draw(x, y, [tuple(int(c) for c in np.unique(y))] * devices, train, test, rng)


def draw(
    x: Array, y: Array, labels: Sequence[Sequence[int]], train: int, test: int, rng: np.random.Generator
) -> list[Dataset]:
    """Device d gets train + test examples with labels drawn uniformly from labels[d]; no example twice."""
    pools = {int(c): list(rng.permutation(np.flatnonzero(y == c))) for c in np.unique(y)}
    datasets = []
    for device, allowed in enumerate(labels):
        chosen = []
        for label in rng.choice(np.array(allowed), size=train + test):
            if not pools.get(int(label)):
                raise ConfigError(
                    f"The data has too few examples of class {label} for {len(labels)} devices with {train + test} "
                    f"examples each (stuck at device {device}). Ask for fewer devices or fewer examples."
                )
            chosen.append(pools[int(label)].pop())
        split = np.array([TRAIN] * train + [TEST] * test, dtype=np.uint8)
        datasets.append(Dataset(x[chosen], y[chosen], split))
    return datasets


SPLITS = {"cohorts": cohorts, "homogeneous": homogeneous}
