"""What tests of every room share."""

import gzip
import os
import random
from pathlib import Path

import pytest

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
