"""The pages in a real browser: layout, console, keyboard, and axe-core's rules for who cannot see or point."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvheadroom.capacity.fleet import FleetAssessment
from kvheadroom.outputs import server
from tests.browser import Tab, Theme, find_browser, open_tab
from tests.conftest import unavailable
from tests.outputs.fleet import NOW, fleet
from tests.outputs.test_fleet_page import HOSTILE, named
from tests.outputs.test_server import Source

WIDTHS = (400, 900, 1600)
THEMES: tuple[Theme, ...] = ("light", "dark")
# By what there is to see; without the server that was not asked yet, for whose sake the page loads itself again.
EVERYTHING = replace(fleet(), replicas=tuple(one for one in fleet().replicas if one.replica != "new"))
MANY = FleetAssessment(
    tuple(
        replace(named(f"gpu-{number}.example.org:8000", 0.25), interval_seconds=5.0) for number in range(500)
    )
)
STRANGE = FleetAssessment(tuple(named(name, 0.5, model=name) for name in HOSTILE))
SHOWN = {
    "/": EVERYTHING,
    "/?sort=usage&filter=gqa": EVERYTHING,
    "/engines/gqa:0": EVERYTHING,
    "/engines/hbm:0": EVERYTHING,
    "/engines/hub:0": EVERYTHING,
    "/engines/offload:0": EVERYTHING,
    "/engines/down:": EVERYTHING,
    "/?filter=nothing+has+this": EVERYTHING,
}


@dataclass
class Seen:
    """What the browser told, by path and width or theme."""

    over: dict[tuple[str, int], float] = field(default_factory=dict)
    console: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    faults: dict[tuple[str, Theme], list[str]] = field(default_factory=dict)
    papers: dict[str, str] = field(default_factory=dict)
    focus: list[dict[str, Any]] = field(default_factory=list)
    charts: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """One browser for all, as it is slow to start."""
    program = find_browser()
    if program is None:
        unavailable("no Chromium on the PATH; tests/system_packages.sh installs Debian's")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "time", SimpleNamespace(time=lambda: NOW))
        yield asyncio.run(look(program))


async def look(program: str) -> Seen:
    seen, source = Seen(), Source(EVERYTHING)
    listen = server.ListenAddress("127.0.0.1", 0)
    async with server.start_server(listen, source, notice="A replay") as url, open_tab(program) as tab:
        root = url.rstrip("/")
        for path, shown in SHOWN.items():
            source.fleet = shown
            for width in WIDTHS:
                await see(seen, tab, root, path, width)
            for theme in THEMES:
                await tab.show(root + path, width=900, theme=theme)
                seen.faults[path, theme] = await tab.accessibility_faults()
                seen.papers[theme] = await tab.value("getComputedStyle(document.body).backgroundColor")
        for name, shown in (("many", MANY), ("strange", STRANGE)):
            source.fleet = shown
            for width in (400, 1600):
                await see(seen, tab, root, "/", width, name)
        source.fleet = EVERYTHING
        await tab.show(root + "/", width=900, theme="light")
        for _ in range(3):
            await tab.press_tab()
            seen.focus.append(
                await tab.value(
                    "(({text, className, href, left, outline}) => ({text, className, href, left, outline}))((one => ({"
                    "text: one.textContent, className: one.className, href: one.getAttribute('href'), "
                    "left: one.getBoundingClientRect().left, outline: getComputedStyle(one).outlineStyle}))(document.activeElement))"
                )
            )
        seen.charts = await tab.value(
            "[...document.querySelectorAll('.course polyline')].map(one => one.getBoundingClientRect().height)"
        )
    return seen


async def see(seen: Seen, tab: Tab, root: str, path: str, width: int, name: str | None = None) -> None:
    await tab.show(root + path, width=width)
    key = name or path, width
    seen.over[key] = await tab.value("document.documentElement.scrollWidth - innerWidth")
    seen.console[key] = list(tab.console)


def test_no_page_is_wider_than_its_window(seen: Seen) -> None:
    assert len(seen.over) == len(SHOWN) * 3 + 4
    assert {key: over for key, over in seen.over.items() if over > 0} == {}


def test_the_browser_has_nothing_to_complain_about(seen: Seen) -> None:
    assert {key: said for key, said in seen.console.items() if said} == {}


def test_the_pages_keep_to_the_rules_of_axe(seen: Seen) -> None:
    assert len(seen.faults) == len(SHOWN) * 2
    assert {key: faults for key, faults in seen.faults.items() if faults} == {}


def test_dark_is_dark(seen: Seen) -> None:
    assert seen.papers == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}


def test_the_keyboard_leads_to_the_numbers_first_and_shows_where_it_is(seen: Seen) -> None:
    first, second, _ = seen.focus
    assert (first["text"], first["href"]) == ("To the numbers", "#main")
    assert first["left"] >= 0
    assert second["href"] == "?refresh=5"
    assert [one["outline"] for one in seen.focus] == ["solid"] * 3


def test_the_last_hour_is_drawn_as_high_as_it_was(seen: Seen) -> None:
    # Two engines were watched for an hour, and their usage went up and down by a quarter of the chart and more.
    assert len(seen.charts) == 2
    assert all(8.0 < height <= 40.0 for height in seen.charts)
