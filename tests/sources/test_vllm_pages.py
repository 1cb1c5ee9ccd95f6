"""Which page a server is asked for, against servers that filter, do not, and change their mind."""

import asyncio
import re
import time
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.capacity.readings import FailureReason, Scrape, SourceFailure, VllmPage
from kvheadroom.sources import vllm_pages
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import open_session
from kvheadroom.sources.seldom_lines import seldom_lines
from kvheadroom.sources.vllm_metrics import parse_page
from kvheadroom.sources.vllm_pages import FILTERED_PAGE, FILTERED_PAGE_WITH_SELDOM, VllmPages
from tests.conftest import capture
from tests.doubles.http_server import Answer, http_server, text_answer

WHOLE = capture("gqa_heavy").decode()
WITH_SELDOM = FILTERED_PAGE_WITH_SELDOM


def filtered(page: str, path: str = FILTERED_PAGE) -> str:
    """What prometheus_client's application gives of a page for the `name[]` of a path."""
    names = parse_qs(urlsplit(path).query)["name[]"]
    lines = []
    for line in page.splitlines():
        name = line.split()[2] if line.startswith("# ") else line.split("{")[0].split()[0]
        if name in names:
            lines.append(line)
    return "\n".join(lines) + "\n"


Answers = dict[str, Answer]


Got = tuple[Scrape, VllmPage] | SourceFailure


def scrapes(*steps: Callable[[Answers], None] | None) -> tuple[list[list[str]], list[Scrape | SourceFailure]]:
    """The paths that each scrape asked for, and what came; a step changes the server before its scrape."""
    asked, got = pages_of(*steps)
    return asked, [one if isinstance(one, SourceFailure) else one[0] for one in got]


def pages_of(*steps: Callable[[Answers], None] | None) -> tuple[list[list[str]], list[Got]]:
    """As `scrapes`, with what was read; a path ends with + where the seldom figures are asked for."""
    answers: Answers = {}
    now_is(WHOLE)(answers)
    asked: list[list[str]] = []
    got: list[Got] = []

    async def run() -> None:
        with http_server(answers) as (url, seen):
            async with open_session() as session:
                pages = VllmPages(session)
                for step in steps:
                    if step is not None:
                        step(answers)
                    del seen[:]
                    got.append(await pages.fetch(Endpoint(url), time.monotonic() + 5.0))
                    asked.append([path.partition("?")[0] + "+" * (path == WITH_SELDOM) for path, _ in seen])

    asyncio.run(run())
    return asked, got


def answer_with(path: str, answer: Answer) -> Callable[[Answers], None]:
    return lambda answers: answers.update({path: answer})


def now_is(page: str) -> Callable[[Answers], None]:
    pages = {path: text_answer(filtered(page, path)) for path in (FILTERED_PAGE, WITH_SELDOM)}
    pages["/metrics"] = text_answer(page)
    return lambda answers: answers.update(pages)


def test_the_names_asked_for_are_those_of_a_page() -> None:
    told = {family.name for family in text_string_to_metric_families(filtered(WHOLE))}
    assert {"vllm:kv_cache_usage_perc", "process_start_time_seconds"} <= told
    assert len(told) == 14
    assert len(filtered(WHOLE)) < len(WHOLE) / 8
    lengths = {
        "vllm:request_prompt_tokens_count",
        "vllm:request_prompt_tokens_sum",
        "vllm:request_generation_tokens_sum",
        "vllm:request_prefill_time_seconds_sum",
        "vllm:request_prefill_kv_computed_tokens_sum",
        "vllm:kv_block_idle_before_evict_seconds_count",
        "vllm:kv_block_idle_before_evict_seconds_sum",
    }
    seldom = {family.name for family in text_string_to_metric_families(filtered(WHOLE, WITH_SELDOM))} - told
    assert seldom == lengths | {"vllm:cache_config_info"}


def test_the_whole_page_is_asked_for_once_and_then_the_filtered_one() -> None:
    asked, got = scrapes(None, None, None)
    assert asked == [["/metrics"], ["/metrics/"], ["/metrics/"]]
    assert [isinstance(answer, Scrape) and len(answer.body) for answer in got] == [
        len(WHOLE),
        len(filtered(WHOLE)),
        len(filtered(WHOLE)),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(text_answer(""), id="several processes answer with nothing"),
        pytest.param(text_answer(WHOLE), id="the filter is ignored"),
        pytest.param(text_answer("not found", status=404), id="there is no such address"),
        pytest.param(text_answer("", status=307), id="it is sent elsewhere"),
        pytest.param(
            text_answer(
                "\n".join(line for line in filtered(WHOLE).splitlines() if "num_preemptions" not in line)
            ),
            id="a figure is missing",
        ),
    ],
)
def test_a_server_that_does_not_filter_right_is_asked_once_and_gives_whole_pages(answer: Answer) -> None:
    asked, got = scrapes(answer_with(FILTERED_PAGE, answer), None, None, None)
    assert asked == [["/metrics"], ["/metrics/", "/metrics"], ["/metrics"], ["/metrics"]]
    assert all(isinstance(one, Scrape) and len(one.body) == len(WHOLE) for one in got)


def test_a_series_that_vanishes_costs_one_whole_page() -> None:
    fewer = "\n".join(line for line in WHOLE.split("\n") if 'reason="deferred"' not in line)
    asked, _ = scrapes(None, None, now_is(fewer), None, now_is(WHOLE), None)
    assert asked == [
        ["/metrics"],
        ["/metrics/"],
        ["/metrics/", "/metrics"],
        ["/metrics/"],
        ["/metrics/"],
        ["/metrics/"],
    ]


def test_an_engine_that_joins_has_told_all_with_the_second_page() -> None:
    second = [line.replace('engine="0"', 'engine="1"') for line in WHOLE.split("\n") if 'engine="0"' in line]
    joined = WHOLE + "\n".join(second) + "\n"
    asked, got = pages_of(None, None, now_is(joined), None, None)
    assert asked == [["/metrics"], ["/metrics/"], ["/metrics/"], ["/metrics/+"], ["/metrics/"]]
    (_, first), *later = (one for one in got[2:] if isinstance(one, tuple))
    assert [(engine.engine, engine.num_blocks) for engine in first.engines] == [("0", 128), ("1", None)]
    assert [page for _, page in later] == [parse_page(joined.encode())] * 2


def test_another_process_is_asked_for_its_whole_page_and_tried_anew() -> None:
    start = next(line for line in WHOLE.split("\n") if line.startswith("process_start_time_seconds"))
    restarted = WHOLE.replace(start, "process_start_time_seconds 1.9e+09")
    asked, got = pages_of(None, None, now_is(restarted), None, None)
    assert asked == [["/metrics"], ["/metrics/"], ["/metrics/", "/metrics"], ["/metrics/"], ["/metrics/"]]
    # Nothing of the process before is on its pages.
    expected = parse_page(restarted.encode())
    assert [not isinstance(one, SourceFailure) and one[1] == expected for one in got[2:]] == [True] * 3


def test_after_an_outage_the_server_is_tried_anew() -> None:
    down = answer_with(FILTERED_PAGE, text_answer("scaling", status=503))
    asked, got = scrapes(None, None, down, now_is(WHOLE), None)
    assert asked == [["/metrics"], ["/metrics/"], ["/metrics/"], ["/metrics"], ["/metrics/"]]
    failure = got[2]
    assert isinstance(failure, SourceFailure)
    assert failure.reason is FailureReason.UNAVAILABLE
    assert "name" not in failure.detail.split(":", 2)[1]


def test_a_server_that_is_still_starting_is_not_tried() -> None:
    starting = text_answer("# TYPE vllm:kv_cache_usage_perc gauge\n")
    asked, _ = scrapes(answer_with("/metrics", starting), None, now_is(WHOLE), None)
    assert asked == [["/metrics"], ["/metrics"], ["/metrics"], ["/metrics/"]]


def test_all_pages_tell_the_same() -> None:
    whole = parse_page(WHOLE.encode())
    assert isinstance(whole, VllmPage)
    assert whole.engines[0].finished_requests_total
    assert parse_page(filtered(WHOLE, WITH_SELDOM).encode()) == whole
    assert parse_page(filtered(WHOLE).encode(), seldom_lines(WHOLE.encode(), whole)) == whole
    _, got = pages_of(None, None, None)
    assert [not isinstance(one, SourceFailure) and one[1] for one in got] == [whole] * 3


def test_what_costs_the_server_most_is_asked_for_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    more = re.sub(r"(vllm:request_prompt_tokens_count\{.*\}) .*", r"\1 9000.0", WHOLE)

    def a_minute_later(answers: Answers) -> None:
        monkeypatch.setattr(vllm_pages, "SELDOM_SECONDS", 0.0)
        now_is(more)(answers)

    def moments_later(answers: Answers) -> None:
        monkeypatch.setattr(vllm_pages, "SELDOM_SECONDS", 60.0)

    asked, got = pages_of(None, now_is(more), a_minute_later, moments_later)
    assert asked == [["/metrics"], ["/metrics/"], ["/metrics/+"], ["/metrics/"]]
    told = [isinstance(one, tuple) and one[1].engines[0].finished_requests_total for one in got]
    assert told[0] == told[1] != 9000.0
    assert told[2:] == [9000.0, 9000.0]


def test_of_a_page_that_tells_no_start_nothing_is_taken_over() -> None:
    bare = "\n".join(line for line in WHOLE.split("\n") if not line.startswith("process_start_time_seconds"))
    asked, got = pages_of(now_is(bare), None, None)
    assert asked == [["/metrics"], ["/metrics/+"], ["/metrics/+"]]
    assert [one for one in got if isinstance(one, SourceFailure)] == []
    whole = parse_page(WHOLE.encode())
    assert isinstance(whole, VllmPage)
    part = parse_page(filtered(bare).encode(), seldom_lines(WHOLE.encode(), whole))
    assert isinstance(part, VllmPage)
    assert (part.engines[0].finished_requests_total, part.engines[0].num_blocks) == (None, None)
