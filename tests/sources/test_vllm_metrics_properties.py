"""The page scanner equals the official parser on real pages changed at random."""

import json
import math
import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.capacity.readings import SourceFailure, VllmPage
from kvheadroom.outputs.json_report import inspect_report, to_json
from kvheadroom.sources import vllm_metrics
from kvheadroom.sources.vllm_metrics import parse_page
from tests.conftest import capture
from tests.sources.page_mutations import crlf, mutate

PAGES = ("gqa_waiting_and_preempting", "dp2.after", "swa.after", "mla.idle", "offload_lab.loaded")

FIELDS = {
    "kv_usage_ratio": ("kv_cache_usage_perc", {}),
    "requests_running": ("num_requests_running", {}),
    "requests_waiting": ("num_requests_waiting", {}),
    "requests_waiting_capacity": ("num_requests_waiting_by_reason", {"reason": "capacity"}),
    "requests_waiting_deferred": ("num_requests_waiting_by_reason", {"reason": "deferred"}),
    "preemptions_total": ("num_preemptions_total", {}),
    "prefix_cache_queries_total": ("prefix_cache_queries_total", {}),
    "prefix_cache_hits_total": ("prefix_cache_hits_total", {}),
    "external_prefix_cache_queries_total": ("external_prefix_cache_queries_total", {}),
    "external_prefix_cache_hits_total": ("external_prefix_cache_hits_total", {}),
    "prompt_tokens_total": ("prompt_tokens_total", {}),
    "generation_tokens_total": ("generation_tokens_total", {}),
    "prefill_seconds_total": ("request_prefill_time_seconds_sum", {}),
    "prefill_computed_tokens_total": ("request_prefill_kv_computed_tokens_sum", {}),
    "evicted_blocks_total": ("kv_block_idle_before_evict_seconds_count", {}),
    "evicted_block_idle_seconds_total": ("kv_block_idle_before_evict_seconds_sum", {}),
    "offload_allocation_failures_total": ("kv_offload_allocation_failure_total", {}),
}


def possible(field: str, value: float) -> bool:
    most = 1.0 if field == "kv_usage_ratio" else math.inf
    return not math.isnan(value) and 0 <= value <= most and value != math.inf


def expected(page: str) -> dict[tuple[str, str], float]:
    """(engine, field) -> value by the official parser; the largest where a series stands there twice."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            for field, (name, labels) in FIELDS.items():
                if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items():
                    key = sample.labels["engine"], field
                    if possible(field, sample.value):
                        found[key] = max(found.get(key, sample.value), sample.value)
    return found


def check_equal(page: str) -> None:
    read = parse_page(page.encode())
    assert isinstance(read, VllmPage)
    ours = {
        (engine.engine, field): value
        for engine in read.engines
        for field in FIELDS
        if (value := getattr(engine, field)) is not None
    }
    assert ours == expected(page)
    # Whatever the page says, the report is strict JSON.
    json.loads(to_json(inspect_report("page", read)))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_changed_at_random_reads_as_the_official_parser_reads_it(
    name: str, seeded: random.Random
) -> None:
    original = capture(name).decode()
    for _ in range(40):
        check_equal(mutate(original, seeded))


def test_pages_read_in_a_row_read_as_each_of_them_alone(seeded: random.Random) -> None:
    """What stands before the values is remembered between pages; series appear, vanish and move."""
    page = capture("dp2.after").decode()
    for _ in range(60):
        page = mutate(page, seeded) if seeded.random() < 0.7 else capture(seeded.choice(PAGES)).decode()
        first, again = parse_page(page.encode()), parse_page(page.encode())
        vllm_metrics._known_layout.cache_clear()
        assert parse_page(page.encode()) == first == again


def test_windows_line_ends_change_nothing(seeded: random.Random) -> None:
    original = capture("gqa_heavy").decode()
    lines = original.split("\n")
    crlf(lines, seeded)
    assert parse_page("\n".join(lines).encode()) == parse_page(original.encode())


def test_bytes_changed_at_random_never_end_in_a_fault_of_ours(seeded: random.Random) -> None:
    original = bytearray(capture("gqa_heavy"))
    for _ in range(150):
        page = bytearray(original)
        for _ in range(seeded.randint(1, 60)):
            at = seeded.randrange(len(page))
            kind = seeded.randrange(3)
            if kind == 0:
                page[at] = seeded.randrange(256)
            elif kind == 1:
                del page[at : at + seeded.randrange(200)]
            else:
                page[at:at] = bytes(seeded.randrange(256) for _ in range(seeded.randrange(9)))
        read = parse_page(bytes(page))
        assert isinstance(read, VllmPage | SourceFailure)
        if isinstance(read, VllmPage):
            json.loads(to_json(inspect_report("page", read)))


@pytest.mark.lab
def test_many_more_pages_changed_at_random_read_the_same(seeded: random.Random) -> None:
    originals = [capture(name).decode() for name in PAGES]
    for _ in range(4000):
        check_equal(mutate(seeded.choice(originals), seeded))
