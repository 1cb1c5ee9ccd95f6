"""Which page a server is asked for, against servers that filter, do not, and change their mind."""

import asyncio
import time
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.capacity.readings import FailureReason, Scrape, SourceFailure, VllmPage
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import open_session
from kvheadroom.sources.vllm_metrics import parse_page
from kvheadroom.sources.vllm_pages import FILTERED_PAGE, VllmPages
from tests.conftest import capture
from tests.doubles.http_server import Answer, http_server, text_answer

WHOLE = capture("gqa_heavy").decode()
NAMES = parse_qs(urlsplit(FILTERED_PAGE).query)["name[]"]


def filtered(page: str) -> str:
    """What prometheus_client's application gives of a page for `name[]`."""
    lines = []
    for line in page.splitlines():
        name = line.split()[2] if line.startswith("# ") else line.split("{")[0].split()[0]
        if name in NAMES:
            lines.append(line)
    return "\n".join(lines) + "\n"


Answers = dict[str, Answer]


def scrapes(*steps: Callable[[Answers], None] | None) -> tuple[list[list[str]], list[Scrape | SourceFailure]]:
    """The paths that each scrape asked for, and what came; a step changes the server before its scrape."""
    answers = {"/metrics": text_answer(WHOLE), FILTERED_PAGE: text_answer(filtered(WHOLE))}
    asked: list[list[str]] = []
    got: list[Scrape | SourceFailure] = []

    async def run() -> None:
        with http_server(answers) as (url, seen):
            async with open_session() as session:
                pages = VllmPages(session)
                for step in steps:
                    if step is not None:
                        step(answers)
                    del seen[:]
                    answer = await pages.fetch(Endpoint(url), time.monotonic() + 5.0)
                    asked.append([path.partition("?")[0] for path, _ in seen])
                    got.append(answer if isinstance(answer, SourceFailure) else answer[0])

    asyncio.run(run())
    return asked, got


def answer_with(path: str, answer: Answer) -> Callable[[Answers], None]:
    return lambda answers: answers.update({path: answer})


def now_is(page: str) -> Callable[[Answers], None]:
    pages = {"/metrics": text_answer(page), FILTERED_PAGE: text_answer(filtered(page))}
    return lambda answers: answers.update(pages)


def test_the_names_asked_for_are_those_of_a_page() -> None:
    told = {family.name for family in text_string_to_metric_families(filtered(WHOLE))}
    assert {"vllm:kv_cache_usage_perc", "vllm:cache_config_info", "process_start_time_seconds"} <= told
    assert len(told) == 18
    assert len(filtered(WHOLE)) < len(WHOLE) / 8


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


def test_another_process_is_asked_for_its_whole_page_and_tried_anew() -> None:
    start = next(line for line in WHOLE.split("\n") if line.startswith("process_start_time_seconds"))
    restarted = WHOLE.replace(start, "process_start_time_seconds 1.9e+09")
    asked, _ = scrapes(None, None, now_is(restarted), None, None)
    assert asked == [["/metrics"], ["/metrics/"], ["/metrics/"], ["/metrics"], ["/metrics/"]]


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


def test_both_pages_tell_the_same() -> None:
    whole, part = parse_page(WHOLE.encode()), parse_page(filtered(WHOLE).encode())
    assert isinstance(whole, VllmPage)
    assert part == whole
