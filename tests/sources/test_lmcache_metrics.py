"""LMCache's series on a vLLM page: added up over workers where they can be true, and nothing where there are none.

Their form is that of LMCache pull request 1300 (four workers that each count every look-up), with numbers of ours.
"""

import re

import pytest

from kvheadroom.capacity.readings import EngineSnapshot, ProblemReason, VllmPage
from kvheadroom.sources.vllm_metrics import parse_page
from tests.conftest import capture

WHOLE = capture("gqa_light_steady")
PAGE = re.sub(rb"\nprocess_start_time_seconds [^\n]*", b"", WHOLE)
"""Of a server with several processes, which tells no start of theirs."""
WORKERS = (0, 1, 2, 3)


def series(name: str, *values: str, labels: str = "") -> str:
    each = (
        f'{name}{{model_name="m",worker_id="{worker}"{labels}}} {value}\n'
        for worker, value in enumerate(values)
    )
    return f"# HELP {name} of LMCache\n# TYPE {name} counter\n{''.join(each)}"


LMCACHE = (
    series("lmcache:num_requested_tokens_total", *["90.0"] * 4)
    + series("lmcache:num_hit_tokens_total", *["90.0"] * 4)
    + series("lmcache:num_lookup_requests_total", *["2.0"] * 4)
    + series("lmcache:num_lookup_tokens_total", *["30132.0"] * 4)
    + series("lmcache:num_lookup_tokens_created", *["1.75e9"] * 4)
    + series("lmcache:num_lookup_hits_total", *["15066.0"] * 4)
    + series("lmcache:local_cache_usage", "1.5e9", "1e9", "1e9", "1e9", labels=',role="worker"')
    + series("lmcache:local_storage_usage", "0.0", "0.0", "0.0", "7.0")
    + series("lmcache:retrieve_hit_rate", *["1.0"] * 4)
)


def read(text: str, page: bytes = PAGE) -> VllmPage:
    found = parse_page(page + text.encode())
    assert isinstance(found, VllmPage)
    return found


def figures(page: VllmPage) -> tuple[float | None, ...]:
    [engine] = page.engines
    return (
        engine.lmcache_lookup_tokens_total,
        engine.lmcache_lookup_hits_total,
        engine.lmcache_host_bytes,
        engine.lmcache_disk_bytes,
    )


def test_what_the_workers_tell_is_added_up_and_counters_that_are_always_equal_are_left_alone() -> None:
    page = read(LMCACHE)
    assert figures(page) == (4 * 30132.0, 4 * 15066.0, 4.5e9, 7.0)
    assert page.problems == ()


def test_everything_else_of_the_page_stays_as_it_is() -> None:
    def rest(page: VllmPage) -> list[tuple[str, object]]:
        [engine] = page.engines
        return [
            (name, getattr(engine, name))
            for name in EngineSnapshot.__slots__
            if not name.startswith("lmcache")
        ]

    with_it, without = read(LMCACHE), read("")
    assert rest(with_it) == rest(without)
    assert with_it.metrics == without.metrics


def test_a_page_without_them_tells_nothing_instead_of_0() -> None:
    assert figures(read("")) == (None, None, None, None)
    assert figures(
        read("lmcache_mp_l1_memory_usage_bytes 5\nlmcache:other 3\nlmcache:local_cache_usage_x 3\n")
    ) == (
        None,
        None,
        None,
        None,
    )


def test_a_server_that_escapes_the_colon_is_read_too() -> None:
    assert figures(read(LMCACHE.replace("lmcache:", "lmcache_"))) == (4 * 30132.0, 4 * 15066.0, 4.5e9, 7.0)


def test_0_is_a_figure() -> None:
    assert figures(read("lmcache:local_cache_usage 0\n")) == (None, None, 0.0, None)


@pytest.mark.parametrize("value", ["NaN", "-1.0", "+Inf", "1e300", "many", "1_000", ""])
def test_with_one_value_that_cannot_be_true_there_is_no_sum(value: str) -> None:
    page = read(LMCACHE.replace(" 1e9\n", f" {value}\n", 1))
    assert figures(page) == (4 * 30132.0, 4 * 15066.0, None, 7.0)
    [problem] = page.problems
    assert problem.reason is ProblemReason.BAD_VALUE
    assert "lmcache:local_cache_usage left out" in problem.detail


@pytest.mark.parametrize(
    "line", ['lmcache:local_cache_usage{worker_id="0 5', "lmcache:local_cache_usage{\xff} 5"]
)
def test_a_line_that_cannot_be_read_is_told_and_harms_nothing_else(line: str) -> None:
    page = parse_page(PAGE + LMCACHE.encode() + line.encode("latin-1") + b"\n")
    assert isinstance(page, VllmPage)
    assert figures(page) == (4 * 30132.0, 4 * 15066.0, None, 7.0)
    assert [problem.reason for problem in page.problems] == [ProblemReason.BAD_VALUE]


def test_a_server_of_one_process_shows_nothing_of_other_processes() -> None:
    assert figures(read(LMCACHE, WHOLE)) == (None, None, None, None)


def test_of_several_engines_nobody_knows_whose_workers_they_are() -> None:
    page = read(LMCACHE, re.sub(rb"\nprocess_start_time_seconds [^\n]*", b"", capture("dp2.after")))
    assert len(page.engines) == 2
    assert all(engine.lmcache_host_bytes is None for engine in page.engines)


def test_before_an_engine_is_there_nothing_is_told_of_its_workers() -> None:
    page = read(LMCACHE, b"# TYPE vllm:kv_cache_usage_perc gauge\n")
    assert page.engines == ()
