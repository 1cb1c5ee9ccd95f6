"""What tests of every room share."""

import gzip
import os
import random
from pathlib import Path
from typing import NoReturn

import pytest

from tests.doubles.fake_nvml import build_library
from tests.end_to_end.prometheus_server import (
    GENERATIONS,
    Binaries,
    Generation,
    PrometheusUnavailableError,
    find_binaries,
)

TESTS = Path(__file__).parent
CAPTURES = TESTS / "recordings" / "captures"


def capture(name: str) -> bytes:
    """One recorded /metrics page of a real vLLM."""
    return gzip.decompress((CAPTURES / f"{name}.metrics.gz").read_bytes())


def capture_names() -> list[str]:
    return sorted(path.name.removesuffix(".metrics.gz") for path in CAPTURES.glob("*.metrics.gz"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A vLLM start costs half a minute, so tests share servers; what ends one comes last.
    items.sort(key=lambda item: item.get_closest_marker("ends_vllm") is not None)


@pytest.fixture
def seeded(request: pytest.FixtureRequest) -> random.Random:
    """Randomness that can be repeated: the seed is printed, and KVHEADROOM_SEED sets it."""
    seed = int(os.environ.get("KVHEADROOM_SEED", random.SystemRandom().randrange(2**32)))
    print(f"{request.node.name}: KVHEADROOM_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def golden() -> "Golden":
    return Golden(update=bool(os.environ.get("KVHEADROOM_UPDATE_GOLDEN")))


class Golden:
    """Compares text with a committed file; `make golden` writes the file anew."""

    def __init__(self, *, update: bool) -> None:
        self._update = update

    def check(self, name: str, text: str) -> None:
        path = TESTS / "golden" / name
        if self._update:
            path.write_text(text, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        assert text == expected, f"tests/golden/{name} differs; if the change is meant, run `make golden`"


def unavailable(reason: str) -> NoReturn:
    """Without its environment a test is skipped on a developer's machine; in CI that is a failure."""
    if os.environ.get("CI") == "true":
        raise pytest.fail.Exception(reason, pytrace=False) from None
    raise pytest.skip.Exception(reason) from None


def _prometheus(generation: Generation) -> Binaries:
    try:
        return find_binaries(generation)
    except PrometheusUnavailableError as reason:
        unavailable(str(reason))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake NVIDIA driver, compiled."""
    return build_library(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def prometheus2() -> Binaries:
    return _prometheus("2.x")


@pytest.fixture(scope="session")
def prometheus3() -> Binaries:
    return _prometheus("3.x")


@pytest.fixture(scope="session", params=GENERATIONS)
def each_prometheus(request: pytest.FixtureRequest) -> Binaries:
    """Runs the test once with either generation."""
    return _prometheus(request.param)
