"""These tests run on a GPU, and are skipped without one. To try them elsewhere, set GPU_TESTS_ON=cpu."""

import os
from pathlib import Path

import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> jax.Device:
    """Return the GPU."""
    try:
        return jax.devices(os.environ.get("GPU_TESTS_ON", "gpu"))[0]
    except RuntimeError:
        pytest.skip("there is no GPU")
