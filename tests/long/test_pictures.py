"""The status page as a browser shows it, to look at: dark and light, wide and narrow. `make lab`."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.daemon import daemon

PICTURES = Path(__file__).parents[2] / "dist" / "pictures"


@pytest.mark.lab
@pytest.mark.parametrize("width", [1200, 420])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_status_page_is_drawn(width: int, theme: str, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    assert chromium, "tests/system_packages.sh --lab installs chromium"
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"status-{theme}-{width}.png"
    with daemon("demo") as demo:
        time.sleep(2)
        subprocess.run(
            [
                chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                f"--user-data-dir={tmp_path}", "--hide-scrollbars", f"--window-size={width},1400",
                f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}",
                f"--screenshot={picture}", demo.url + "/",
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )  # fmt: skip
    print(f"\n{picture}")
    assert picture.stat().st_size > 10_000
