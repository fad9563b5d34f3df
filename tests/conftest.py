"""Fixtures that several test files share."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fadefed.learning import Task
from fadefed.learning.export import export_task

# A shared machine may be slow; no test judges time.
settings.register_profile("fadefed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fadefed")

MNIST = Task("mnist", (784, 32, 10))


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ONNX graphs of the MLP 784-32-10, vjp included."""
    folder = tmp_path_factory.mktemp("graphs")
    export_task(MNIST, folder, with_vjp=True)
    return folder
