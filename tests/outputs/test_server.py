"""The pages as the server gives them: status, headers, and names in a path."""

import asyncio
import base64
import gzip
import hashlib
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from aiohttp import ClientSession
from yarl import URL

from kvheadroom.capacity.fleet import FleetAssessment
from kvheadroom.outputs.server import ListenAddress, start_server
from kvheadroom.outputs.status_page import engine_link
from tests.outputs.fleet import replica
from tests.outputs.test_fleet_page import HOSTILE


@dataclass
class Source:
    fleet: FleetAssessment


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


def ask(path: str, name: str = "gqa", **headers: str) -> Answer:
    """One answer of a server that watches one replica of this name; the path goes out as it is."""

    async def answer() -> Answer:
        source = Source(FleetAssessment((replace(replica(name, "gqa_idle_fresh"), interval_seconds=1e9),)))
        async with (
            start_server(ListenAddress("127.0.0.1", 0), source, notice=None) as url,
            ClientSession(auto_decompress=False) as session,
            session.get(URL(url.rstrip("/") + path, encoded=True), headers=headers) as told,
        ):
            body = await told.read()
            if told.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            return Answer(told.status, dict(told.headers), body.decode())

    return asyncio.run(answer())


@pytest.mark.parametrize("path", ["/", "/engines/gqa:0", "/?sort=name&filter=gqa&refresh=5"])
def test_a_page_is_html_under_a_policy_that_allows_its_own_style_and_nothing_else(path: str) -> None:
    told = ask(path)
    assert (told.status, told.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    (style,) = re.findall(r"<style>(.*?)</style>", told.text, re.DOTALL)
    known = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert told.headers["Content-Security-Policy"] == (
        f"default-src 'none'; style-src 'sha256-{known}'; img-src data:; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )
    assert told.headers["X-Content-Type-Options"] == "nosniff"
    assert told.headers["Referrer-Policy"] == "no-referrer"
    assert told.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("path", ["/metrics", "/api/v1/status", "/-/healthy", "/nowhere"])
def test_what_is_no_page_may_show_nothing(path: str) -> None:
    assert ask(path).headers["Content-Security-Policy"] == (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def test_pages_are_sent_small_to_who_takes_it() -> None:
    small, plain = ask("/", **{"Accept-Encoding": "gzip"}), ask("/", **{"Accept-Encoding": "identity"})
    assert small.headers["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in plain.headers
    assert int(small.headers["Content-Length"]) < int(plain.headers["Content-Length"]) / 2


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/?sort=colour", 400, "“colour” is no order of engines"),
        ("/?sort=usage&sort=name", 400, "“sort” is said twice"),
        ("/?<script>", 400, "There is no “&lt;script&gt;” to choose here"),
        ("/engines/gqa:0?filter=x", 400, "There is no “filter” to choose here"),
        ("/engines/nobody:0", 404, "No engine is called “nobody:0” here"),
        ("/engines/%FF%00:0", 404, "No engine is called “"),
        ("/engines/gqa:1", 404, "This server tells of no engine “1” now"),
    ],
)
def test_what_cannot_be_shown_is_said_in_words_on_a_page(path: str, status: int, sentence: str) -> None:
    told = ask(path)
    assert (told.status, sentence in told.text) == (status, True)
    assert told.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "style-src 'sha256-" in told.headers["Content-Security-Policy"]
    assert 'href="/"' in told.text


@pytest.mark.parametrize("name", HOSTILE)
def test_an_engine_is_found_by_its_link_whatever_its_server_is_called(name: str) -> None:
    link = engine_link(name, "0")
    assert f'href="{link}"' in ask("/", name).text.replace("&#39;", "'")
    assert ask(link, name).status == 200
