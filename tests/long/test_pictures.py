"""The status pages as a browser shows them, to look at: dark and light, from wide to narrow. `make lab`."""

import asyncio
import re
import time
from pathlib import Path

import pytest

from tests.browser import Theme, find_browser, open_tab
from tests.daemon import daemon

PICTURES = Path(__file__).parents[2] / "dist" / "pictures"
WATCHED_SECONDS = 150.0
"""So that there is something to draw of the last hour, and a forecast."""


@pytest.mark.lab
def test_the_status_pages_are_drawn() -> None:
    program = find_browser()
    assert program, "tests/system_packages.sh installs it"
    PICTURES.mkdir(parents=True, exist_ok=True)
    with daemon("demo") as demo:
        time.sleep(WATCHED_SECONDS)
        (link,) = re.findall(r'href="(/engines/[^"]+)"', demo.get("/").text)
        for picture in asyncio.run(draw(program, {"fleet": demo.url + "/", "engine": demo.url + link})):
            print(f"\n{picture}")
            assert picture.stat().st_size > 10_000


async def draw(program: str, pages: dict[str, str]) -> list[Path]:
    drawn = []
    themes: tuple[Theme, ...] = ("light", "dark")
    async with open_tab(program) as tab:
        for name, url in pages.items():
            for width in (400, 900, 1600):
                for theme in themes:
                    await tab.show(url, width=width, theme=theme)
                    drawn.append(PICTURES / f"{name}-{theme}-{width}.png")
                    drawn[-1].write_bytes(await tab.picture())
    return drawn
