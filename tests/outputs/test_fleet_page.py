"""`/` for many engines: order, filter, links, and names that somebody else wrote."""

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvheadroom.capacity.discovery import WatchedTarget
from kvheadroom.capacity.fleet import (
    FleetAssessment,
    ReplicaAssessment,
    ReplicaState,
    SourceStatus,
    withhold_stale,
)
from kvheadroom.capacity.fleet_verdict import Urgency, Verdict
from kvheadroom.capacity.history import LastHour
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.outputs.fleet_words import verdict_words
from kvheadroom.outputs.status_page import (
    LONGEST_FILTER,
    MOST_ROWS,
    REFRESH_SECONDS,
    SORTS,
    View,
    engine_id,
    engine_link,
    read_view,
    render_engine,
    render_fleet,
    sign,
    sign_and_words,
)
from tests.outputs.fleet import NOW, fleet, replica
from tests.outputs.pages import all_pages, ids

HOSTILE = (
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    "two\nlines\tand a tab",
    "..",
    "a/b?c#d%2Fe&f=g",
    "gpu-1:8000",
    "ünïcode 模型 \u202egnirts \U0001f600",
    "x" * 200,
    "{{ 7 * 7 }}",
)


def named(name: str, usage: float, *, waiting: float = 0.0, model: str | None = "tiny") -> ReplicaAssessment:
    told = replica(name, "gqa_light_steady")
    (engine,) = told.engines
    snapshot = replace(engine.snapshot, kv_usage_ratio=usage, requests_waiting=waiting, model_name=model)
    return replace(told, engines=(replace(engine, snapshot=snapshot),))


def three() -> FleetAssessment:
    return FleetAssessment(
        (named("b", 0.5, waiting=7.0, model="org/Llama"), named("c", 0.25), named("a", 0.75, waiting=2.0)),
        targets=(WatchedTarget("c", "config", (("team", "chat"),)),),
    )


def order(html: str) -> list[str]:
    """The names of the rows as they come."""
    return re.findall(r'rowheader" class="name"><a href="[^"]*"><bdi>([^<]*)</bdi>', html)


class _Tags(HTMLParser):
    """Every tag with its attributes, and the text of the first link in each row's header."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, View()),
        ({"sort": "usage", "filter": " Llama  7b", "refresh": "30"}, View("usage", " Llama  7b", 30)),
        ({"filter": ""}, View()),
        ({"sort": "color"}, "“color” is no order of engines; sort is worst, name, usage, headroom, waiting or difference."),
        ({"refresh": "1"}, "“1” is no time to refresh after; refresh is 5, 30 or 300, in seconds."),
        ({"still": ""}, "There is no “still” to choose here; there is sort, filter or refresh."),
        ({"filter": "x" * (LONGEST_FILTER + 1)}, "A filter has 200 characters at most."),
    ],
)  # fmt: skip
def test_a_query_is_taken_whole_or_refused_with_what_there_is(
    query: dict[str, str], expected: object
) -> None:
    assert read_view(query) == expected


def test_the_page_of_an_engine_takes_no_order_and_no_filter() -> None:
    assert read_view({"refresh": "5"}, of_engine=True) == View(refresh=5)
    assert (
        read_view({"sort": "name"}, of_engine=True) == "There is no “sort” to choose here; there is refresh."
    )


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        # None can be judged yet, so the fullest comes first.
        ("worst", ["a", "b", "c"]),
        ("name", ["a", "b", "c"]),
        ("usage", ["a", "b", "c"]),
        ("waiting", ["b", "a", "c"]),
    ],
)
def test_rows_come_in_the_order_that_is_asked_for(sort: str, expected: list[str]) -> None:
    html = render_fleet(three(), NOW, None, View(sort=sort))
    assert order(html) == expected
    assert re.findall(r'<span aria-current="true">([^<]*)</span>', html) == [
        {"worst": "worst first", "name": "by name", "usage": "fullest first"}.get(sort, "longest queue first")
    ]


def test_what_is_not_known_comes_after_what_is() -> None:
    silent = named("silent", 0.5)
    (engine,) = silent.engines
    silent = replace(
        silent, engines=(replace(engine, snapshot=replace(engine.snapshot, kv_usage_ratio=None)),)
    )
    shown = FleetAssessment(
        (silent, *three().replicas, ReplicaAssessment(replica="new", url="http://new", interval_seconds=5.0))
    )
    assert order(render_fleet(shown, NOW, None, View(sort="usage")))[:3] == ["a", "b", "c"]
    assert set(order(render_fleet(shown, NOW, None, View(sort="usage")))[3:]) == {"silent", "new"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["a", "b", "c"]),
        ("LLAMA", ["b"]),
        ("team=chat", ["c"]),
        ("not known", ["a", "b", "c"]),
        ("org tiny", []),
        ("tiny c", ["c"]),
        ("http://c:8000", ["c"]),
    ],
)
def test_a_filter_wants_all_its_words_in_names_model_state_or_labels(text: str, expected: list[str]) -> None:
    html = render_fleet(three(), NOW, None, View(filter=text))
    assert order(html) == expected
    heading = re.findall(r'<h2 id="engines">(.*)</h2>', html)
    assert heading == [f"{len(expected)} of 3 engines, worst first" if text else "3 engines, worst first"]


def test_a_filter_that_nothing_has_is_said_with_the_way_back() -> None:
    html = render_fleet(three(), NOW, None, View(sort="usage", filter="<b>"))
    assert "Nothing has “&lt;b&gt;” in its name" in html
    assert '<a href="?sort=usage">Show all</a>' in html


def test_links_keep_what_was_chosen() -> None:
    html = render_fleet(three(), NOW, None, View("usage", 'a&"', 30))
    assert '<a href="?filter=a%26%22&amp;refresh=30">worst first</a>' in html
    assert '<a href="?sort=usage&amp;filter=a%26%22">hold it still</a>' in html
    assert (
        '<input type="hidden" name="sort" value="usage"><input type="hidden" name="refresh" value="30">'
        in html
    )
    assert '<meta http-equiv="refresh" content="30">' in html


def test_the_page_stands_still_unless_asked_or_until_every_server_was_asked_once() -> None:
    assert "http-equiv" not in render_fleet(three(), NOW, None)
    new = ReplicaAssessment(replica="new", url="http://new", interval_seconds=5.0)
    assert '<meta http-equiv="refresh" content="5">' in render_fleet(FleetAssessment((new,)), NOW, None)


def test_the_verdict_is_the_first_line_and_the_title() -> None:
    html = render_fleet(three(), NOW, None)
    text = "3 of 3 engines cannot be judged yet; "
    assert f"<title>{text}" in html
    assert html.index(text, html.index("<body")) < html.index("<nav")


def test_rows_beyond_the_most_are_counted_and_found_by_the_filter() -> None:
    one = named("x", 0.5)
    shown = FleetAssessment(tuple(replace(one, replica=f"r{number}") for number in range(MOST_ROWS + 7)))
    html = render_fleet(shown, NOW, None)
    assert len(order(html)) == MOST_ROWS
    assert "1,000 of 1,007 are shown; the filter finds the others." in html
    assert order(render_fleet(shown, NOW, None, View(filter="r1006"))) == ["r1006"]


def test_the_last_hour_is_drawn_with_its_range_in_words() -> None:
    (one,) = FleetAssessment((named("x", 0.5),)).replicas
    times = [NOW - 120.0, NOW - 60.0]
    hour = LastHour(times, [0.25, 0.75], [4.0, 6.0])
    (engine,) = one.engines
    snapshot = replace(engine.snapshot, preemptions_total=6.0)
    one = replace(one, engines=(replace(engine, snapshot=snapshot, last_hour=hour),))
    html = render_fleet(FleetAssessment((one,)), NOW, None)
    assert "<title>KV pool in use over the last 2 min: 25.0 % to 75.0 %, 2 preempted</title>" in html
    assert 'points="-120,0.25 -60,0.75 -1,0.50"' in html
    page = render_engine(FleetAssessment((one,)), NOW, None, "x:0").html
    assert '<line x1="-60" x2="-60" y1="0" y2="1"/><polyline points="-120,0.25 -60,0.75 -1,0.50"/>' in page
    assert "one scrape a minute: 25.0 % to 75.0 %. 2 preemptions counted; a broken line stands where" in page
    # One scrape is no course.
    assert "<polyline" not in render_fleet(three(), NOW, None)


def test_an_id_stays_as_readable_as_the_names_allow() -> None:
    assert engine_link("gpu-1:8000", "0") == "/engines/gpu-1:8000:0"
    assert engine_link("a b/c", "0") == "/engines/a%20b%2Fc:0"


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_no_two_engines_have_the_same_id_and_a_link_leads_back_to_it(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert (engine_id(*one) == engine_id(*other)) == (one == other)
    assert unquote(engine_link(*one).removeprefix("/engines/")) == engine_id(*one)


def test_ids_that_differ_in_where_a_colon_stands_are_told_apart() -> None:
    assert engine_id("a", "b:0") != engine_id("a:b", "0")
    assert engine_id("a", "%3A") != engine_id("a", ":")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text_and_nothing_else(name: str) -> None:
    told = named(name, 0.5, model=name)
    (engine,) = told.engines
    told = replace(told, engines=(replace(engine, snapshot=replace(engine.snapshot, engine=name)),))
    shown = FleetAssessment((told,), targets=(WatchedTarget(name, name, (("label", name),)),))
    for html in (
        render_fleet(shown, NOW, None, View(filter=name)),
        render_engine(shown, NOW, None, engine_id(name, name)).html,
    ):
        parsed = _Tags(html)
        assert not {"script", "img", "iframe"} & {tag for tag, _ in parsed.tags}
        assert not any(
            attribute.startswith("on") for _, attributes in parsed.tags for attribute in attributes
        )
        assert name in parsed.text
    assert order(render_fleet(shown, NOW, None)) != []
    (link,) = {
        attributes["href"]
        for _, attributes in _Tags(render_fleet(shown, NOW, None)).tags
        if (attributes.get("href") or "").startswith("/engines/")
    }
    assert link is not None
    assert unquote(link.removeprefix("/engines/")) == engine_id(name, name)
    assert "/" not in link.removeprefix("/engines/")


def test_pages_load_nothing_and_run_nothing() -> None:
    html = all_pages(fleet(), NOW)
    tags = _Tags(html).tags
    assert not {"script", "img", "iframe", "object", "embed", "video", "base"} & {tag for tag, _ in tags}
    assert not any("style" in attributes or "src" in attributes for _, attributes in tags)
    assert not any(attribute.startswith("on") for _, attributes in tags for attribute in attributes)
    for _, attributes in tags:
        link = attributes.get("href")
        assert link is None or link[0] in "/?#" or link == "data:,", link
        assert not (link or "").startswith("//")
    assert "url(" not in html
    assert "@import" not in html


def test_every_header_of_a_table_says_what_it_is_of() -> None:
    for tag, attributes in _Tags(all_pages(fleet(), NOW)).tags:
        assert tag != "th" or attributes.get("scope") in ("col", "row")


def test_every_engine_and_every_server_without_one_has_a_page() -> None:
    shown = withhold_stale(fleet(), NOW)
    links = re.findall(r'href="/engines/([^"]+)"', render_fleet(shown, NOW, None))
    assert sorted(map(unescape, map(unquote, links))) == sorted(ids(shown))


def test_an_unknown_engine_is_answered_in_words() -> None:
    page = render_engine(three(), NOW, None, "<nobody>:0")
    assert page.status == 404
    assert "<h1>There is no such engine</h1>" in page.html
    assert "No engine is called “&lt;nobody&gt;:0” here." in page.html
    assert '<a href="/">All engines</a>' in page.html


def test_an_engine_that_its_server_tells_of_no_more_is_said_beside_the_others() -> None:
    page = render_engine(three(), NOW, None, "a:7")
    assert page.status == 404
    assert "This server tells of no engine “7” now." in page.html
    assert '<a href="/engines/a:0">engine 0</a>' in page.html
    # While the server is silent nobody knows whether there is one.
    silent = replace(three().replicas[2], engines=())
    assert render_engine(FleetAssessment((silent,)), NOW, None, "a:7").status == 200


def test_the_steps_of_the_memory_add_up_to_the_byte_as_they_are_read() -> None:
    html = render_engine(fleet(), NOW, None, "hbm:0").html
    tables = re.findall(r"<caption>(\w+), to the byte</caption>.*?</table>", html, re.DOTALL)
    assert tables == ["Predicted", "Calibrated", "Live"]
    for table in re.findall(r"<caption>\w+, to the byte</caption>.*?</table>", html, re.DOTALL):
        rows = re.findall(r"<td>([\d,]*)</td><td>([\d,]+)</td>", table)
        numbers = [[int(cell.replace(",", "") or 0) for cell in row] for row in rows]
        assert sum(taken for taken, _ in numbers) == numbers[0][1] == 85_028_896_768
        assert numbers[-1][1] == 0


def test_a_state_is_told_by_words_and_a_shape_beside_its_colour() -> None:
    signs = {urgency: sign(urgency) for urgency in Urgency}
    assert len(set(signs.values())) == len(Urgency)
    for verdict in Verdict:
        shown = _Tags(sign_and_words(verdict))
        assert "".join(shown.text) == f"{signs[verdict.urgency]} {verdict_words(verdict)}"
        assert shown.tags == [
            ("span", {"class": f"word {verdict.urgency}"}),
            ("span", {"aria-hidden": "true"}),
        ]


def test_what_a_server_tells_wrongly_or_not_at_all_stands_under_its_state() -> None:
    html = render_fleet(withhold_stale(fleet(), NOW), NOW, None)
    assert '<br><span class="soft small">metrics lost</span></td>' in html
    failure = SourceFailure("model_files", FailureReason.TIMEOUT, "no answer")
    one = named("x", 0.5)
    one = replace(one, sources=(*one.sources[:1], SourceStatus(source="model_files", failure=failure)))
    html = render_fleet(FleetAssessment((one,)), NOW, None)
    assert '<span class="soft small">model_files down</span></td>' in html


def test_a_wedged_server_is_one_row_and_said_on_the_pages_of_its_engines() -> None:
    wedged = replace(named("w", 0.5), state=ReplicaState.WEDGED)
    shown = FleetAssessment((wedged,))
    assert re.findall(r'href="(/engines/[^"]+)"', render_fleet(shown, NOW, None)) == ["/engines/w:"]
    server = render_engine(shown, NOW, None, "w:")
    assert (server.status, '<a href="/engines/w:0">engine 0</a>' in server.html) == (200, True)
    for page in (server, render_engine(shown, NOW, None, "w:0")):
        assert "wedged</span>: /health fails and its counters stand still." in page.html


def test_the_docs_tell_every_order_and_every_refresh() -> None:
    told = (Path(__file__).parents[2] / "docs" / "status-page.md").read_text(encoding="utf-8")
    (row,) = (line for line in told.splitlines() if line.startswith("| `sort=`"))
    assert re.findall(r"`(\w+)`", row) == list(SORTS)
    assert "load it again after 5, 30 or 300 s" in told
    assert REFRESH_SECONDS == (5, 30, 300)
    assert f"At most {MOST_ROWS:,} rows" in told
