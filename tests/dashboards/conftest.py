"""promtool of both generations: rules and queries must mean the same in Prometheus 2 and 3."""

import os
from pathlib import Path

import pytest

from tests.end_to_end.prometheus_server import GENERATIONS, PrometheusUnavailableError, find_binaries


@pytest.fixture(scope="session", params=GENERATIONS)
def promtool(request: pytest.FixtureRequest) -> Path:
    """Runs the test once with either generation; in CI a missing one is a failure."""
    try:
        return find_binaries(request.param).promtool
    except PrometheusUnavailableError as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(str(reason), pytrace=False)
        pytest.skip(str(reason))
