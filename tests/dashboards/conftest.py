"""promtool of both generations: rules and queries must mean the same in Prometheus 2 and 3."""

from pathlib import Path

import pytest

from tests.end_to_end.prometheus_server import Binaries


@pytest.fixture(scope="session")
def promtool(each_prometheus: Binaries) -> Path:
    """Runs the test once with either generation."""
    return each_prometheus.promtool
