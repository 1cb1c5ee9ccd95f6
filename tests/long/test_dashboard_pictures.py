"""The dashboards as Grafana draws them, to look at: one, eight and forty engines, dark and light, wide and narrow. `make lab`.

What draws them is a program of yours, since Grafana comes by no package that could be installed here. It is called as
`PROGRAM DASHBOARD.json PROMETHEUS_URL PICTURE.png --now UNIX --theme dark|light --width PIXELS --var NAME=VALUE` and ends with 0 where every
panel was drawn.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards import build
from tests.dashboards.made_fleet import made_fleet
from tests.end_to_end.prometheus_server import Binaries
from tests.exported_history import ended_lately, real_prometheus_with

PICTURES = Path(__file__).parents[2] / "dist" / "pictures"
RENDERER = "KVHEADROOM_DASHBOARD_RENDERER"


@pytest.fixture(scope="module", params=[1, 8, 40])
def fleet(
    request: pytest.FixtureRequest, prometheus2: Binaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, str, float]]:
    """How many engines, the Prometheus that has them, and when their hour ends."""
    if RENDERER not in os.environ:
        pytest.skip(f"{RENDERER} names no program that draws dashboards")
    ends_at = ended_lately()
    folder = tmp_path_factory.mktemp("fleet")
    series = made_fleet(request.param, ends_at)
    with real_prometheus_with(prometheus2, folder, *series, ends_at=ends_at) as (server, _):
        yield request.param, server.base_url, ends_at


@pytest.mark.lab
@pytest.mark.parametrize("width", [1600, 900])
@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("file", build.files(), ids=lambda file: file.stem)
def test_a_dashboard_is_drawn(file: Path, theme: str, width: int, fleet: tuple[int, str, float]) -> None:
    engines, url, ends_at = fleet
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{file.stem}-{engines}-{theme}-{width}.png"
    subprocess.run(
        [
            os.environ[RENDERER], file, url, picture, "--now", f"{ends_at:.0f}",
            "--theme", theme, "--width", str(width), "--var", "session_tokens=262144",
        ],
        check=True,
        timeout=180,
    )  # fmt: skip
    print(f"\n{picture}")
    assert picture.stat().st_size > 10_000
