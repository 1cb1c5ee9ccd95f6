"""What the tests of the GPU source share."""

from pathlib import Path

import pytest

from tests.doubles.fake_nvml import FakeDriver
from tests.sources.gpu_readings import FIRST, SECOND


@pytest.fixture
def driver(tmp_path: Path, library: Path) -> FakeDriver:
    """Two GPUs, all well."""
    driver = FakeDriver(tmp_path, gpus=[FIRST, SECOND])
    driver.install(library)
    return driver
