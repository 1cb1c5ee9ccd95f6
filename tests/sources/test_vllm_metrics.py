"""The page scanner against the official parser, on every recorded page and on pages gone wrong."""

import json
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvheadroom.capacity.readings import (
    FailureReason,
    PageProblem,
    ProblemReason,
    SourceFailure,
    ToldTier,
    VllmPage,
)
from kvheadroom.outputs.json_report import inspect_report, to_json
from kvheadroom.sources.vllm_metrics import parse_page
from tests.conftest import capture, capture_names

PAGE = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_preemptions_total{engine="0",model_name="m"} 1e2
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
"""


def read(body: bytes | str) -> VllmPage:
    page = parse_page(body.encode() if isinstance(body, str) else body)
    assert isinstance(page, VllmPage), page
    return page


def oracle(body: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a page, by the official parser."""
    text = body.decode()
    if text.rstrip().endswith("# EOF"):
        # prometheus_client emits `# TYPE vllm:x` before samples `vllm_x`, which its own parser refuses.
        text = text.replace(" vllm:", " vllm_")
        families = parse_openmetrics(text)  # type: ignore[no-untyped-call]
    else:
        families = parse_text(text)
    return {
        (sample.name.replace("vllm_", "vllm:", 1), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def expected_report(body: bytes) -> list[dict[str, Any]]:
    """What `inspect --json` must say, made from the official parser's samples alone."""
    samples = oracle(body)
    infos = {
        dict(labels)["engine"]: dict(labels) for name, labels in samples if name == "vllm:cache_config_info"
    }

    def number(text: str | None) -> int | float | None:
        if text in (None, "None"):
            return None
        value = float(text or "")
        return int(value) if value.is_integer() else value

    engines = []
    for engine, info in sorted(infos.items()):
        model_names = {
            dict(labels).get("model_name")
            for name, labels in samples
            if dict(labels).get("engine") == engine and name.startswith("vllm:num_preemptions")
        }
        (model_name,) = model_names

        def value(name: str, engine: str = engine, **more: str) -> int | float | None:
            found = [
                v
                for (n, labels), v in samples.items()
                if n == f"vllm:{name}"
                and dict(labels)["engine"] == engine
                and more.items() <= dict(labels).items()
            ]
            if not found:
                return None
            return int(found[0]) if found[0].is_integer() else found[0]

        blocks = number(info.get("num_gpu_blocks"))
        engines.append(
            {
                "engine": engine,
                "model_name": model_name,
                "num_blocks": None if blocks is None else blocks // len(infos),
                "block_size": number(info.get("block_size")),
                "pool_tokens": number(info.get("kv_cache_size_tokens")),
                "max_concurrency": number(info.get("kv_cache_max_concurrency")),
                "kv_cache_dtype": info.get("cache_dtype"),
                "kv_usage_ratio": value("kv_cache_usage_perc"),
                "requests_running": value("num_requests_running"),
                "requests_waiting": value("num_requests_waiting"),
                "requests_waiting_by_reason": {
                    "capacity": value("num_requests_waiting_by_reason", reason="capacity"),
                    "deferred": value("num_requests_waiting_by_reason", reason="deferred"),
                },
                "preemptions_total": value("num_preemptions_total"),
                "prefix_cache_queries_total": value("prefix_cache_queries_total"),
                "prefix_cache_hits_total": value("prefix_cache_hits_total"),
                "external_prefix_cache_queries_total": value("external_prefix_cache_queries_total"),
                "external_prefix_cache_hits_total": value("external_prefix_cache_hits_total"),
                "prompt_tokens_total": value("prompt_tokens_total"),
                "generation_tokens_total": value("generation_tokens_total"),
            }
        )
    return engines


def test_there_are_recorded_pages() -> None:
    assert len(capture_names()) == 22


@pytest.mark.parametrize("name", capture_names())
def test_every_recorded_page_reads_as_the_official_parser_reads_it(name: str) -> None:
    body = capture(name)
    report = json.loads(to_json(inspect_report("page", read(body))))
    assert report["engines"] == expected_report(body)
    assert report["problems"] == []
    assert report["format"] == ("openmetrics" if name == "gqa_openmetrics" else "text")
    assert ".0," not in to_json(report)


def test_a_data_parallel_page_that_says_128_gives_each_of_two_engines_64_blocks() -> None:
    engines = read(capture("dp2.after")).engines
    assert [(e.engine, e.num_blocks, e.pool_tokens) for e in engines] == [("0", 64, 2048), ("1", 64, 2048)]


def test_eight_engines_behind_eight_api_servers_keep_their_own_values_and_share_the_blocks_that_the_page_adds_up() -> (
    None
):
    page = read(
        "".join(
            f'vllm:cache_config_info{{engine="{engine}",num_gpu_blocks="800",block_size="16"}} 1.0\n'
            f'vllm:kv_cache_usage_perc{{engine="{engine}",model_name="m"}} 0.{engine}5\n'
            f'vllm:prompt_tokens_total{{engine="{engine}",model_name="m"}} {engine}000.0\n'
            for engine in range(8)
        )
    )
    assert [(e.engine, e.kv_usage_ratio, e.prompt_tokens_total, e.num_blocks) for e in page.engines] == [
        (str(engine), float(f"0.{engine}5"), engine * 1000.0, 100) for engine in range(8)
    ]
    assert page.problems == ()


def test_gauges_that_were_never_set_are_absent_and_not_zero() -> None:
    for engine in read(capture("dp2.idle")).engines:
        assert engine.kv_usage_ratio is None
        assert engine.requests_running is None
        assert engine.preemptions_total == 0


def test_a_block_size_is_a_flag_only_where_the_operator_chose_it() -> None:
    chosen = read(capture("gqa_idle_fresh")).engines[0]
    assert (chosen.block_size, chosen.echoed.block_size) == (32, 32)
    # vLLM raised the block size of this hybrid model to 256 on its own.
    resolved = read(PAGE).engines[0]
    assert (resolved.block_size, resolved.echoed.block_size) == (16, None)


def test_flags_that_the_engine_echoes_are_read() -> None:
    echoed = read(capture("gqa_idle_fresh")).engines[0].echoed
    assert echoed.kv_cache_dtype == "auto"
    assert echoed.gpu_memory_utilization == 0.92
    assert echoed.kv_cache_memory_bytes == 4_194_304
    assert echoed.num_gpu_blocks_override is None
    assert echoed.enable_prefix_caching is True
    assert echoed.kv_cache_dtype_skip_layers == ()


def test_the_start_time_is_read_where_the_page_has_one() -> None:
    assert read(capture("gqa_idle_fresh")).process_start_time_seconds == 1.79598932443e09
    assert read(capture("dp2.idle")).process_start_time_seconds is None


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ('vllm:num_requests_waiting{engine="0"} 7', "requests_waiting", 7.0),
        ('vllm:num_requests_waiting{ engine = "0" , model_name = "m", } 7', "requests_waiting", 7.0),
        ('vllm:num_requests_waiting{engine="0"}\t7 1700000000000', "requests_waiting", 7.0),
        ("vllm:num_requests_waiting 7", "requests_waiting", 7.0),
        ('vllm_num_requests_waiting{engine="0"} 7', "requests_waiting", 7.0),
        ('vllm:num_requests_waiting{engine="0"} 7\r', "requests_waiting", 7.0),
        ('vllm:prompt_tokens_total{engine="0"} 1.5e+06', "prompt_tokens_total", 1.5e6),
        (
            'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 2',
            "requests_waiting_deferred",
            2.0,
        ),
    ],
)
def test_every_legal_way_to_write_a_sample_is_read(line: str, field: str, value: float) -> None:
    page = read(PAGE + line + "\n")
    assert getattr(page.engines[0], field) == value
    assert page.problems == ()


def test_escapes_in_labels_are_undone() -> None:
    page = read('vllm:num_requests_running{engine="0",model_name="a\\"b\\\\c\\nd}, e"} 1\n')
    assert page.engines[0].model_name == 'a"b\\c\nd}, e'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('vllm:num_requests_waiting{engine="0"} -1', ProblemReason.BAD_VALUE),
        ('vllm:num_requests_waiting{engine="0"} NaN', ProblemReason.BAD_VALUE),
        ('vllm:num_requests_waiting{engine="0"} +Inf', ProblemReason.BAD_VALUE),
        ('vllm:num_requests_waiting{engine="0"} many', ProblemReason.BAD_LINE),
        ('vllm:num_requests_waiting{engine="0"} 1_0', ProblemReason.BAD_LINE),
        ('vllm:num_requests_waiting{engine="0"}', ProblemReason.BAD_LINE),
        ('vllm:num_requests_waiting{engine="0', ProblemReason.BAD_LINE),
        ("vllm:num_requests_waiting{engine=0} 1", ProblemReason.BAD_LINE),
    ],
)
def test_a_line_or_value_that_cannot_be_true_is_dropped_and_reported(
    line: str, reason: ProblemReason
) -> None:
    page = read(PAGE + line + "\n")
    assert page.engines[0].requests_waiting is None
    assert page.engines[0].requests_running == 3.0
    assert [problem.reason for problem in page.problems] == [reason]


@pytest.mark.parametrize("usage", ["-0.3875", "1.01", "nan"])
def test_a_usage_outside_0_to_1_is_no_usage(usage: str) -> None:
    page = read(PAGE.replace("} 0.5", f"}} {usage}"))
    assert page.engines[0].kv_usage_ratio is None
    assert page.problems[0].reason is ProblemReason.BAD_VALUE


def test_a_usage_of_exactly_1_is_a_full_pool() -> None:
    assert read(PAGE.replace("} 0.5", "} 1.0")).engines[0].kv_usage_ratio == 1.0


def test_a_gauge_once_per_process_counts_once_with_the_largest_value_and_is_told_once() -> None:
    lines = "".join(
        f'vllm:{name}{{engine="0",model_name="m",pid="{pid}"}} {value if pid == 4 else 0.0}\n'
        for pid in range(8)
        for name, value in (("kv_cache_usage_perc", 0.653), ("num_requests_waiting", 5.0))
    )
    page = read(lines)
    (engine,) = page.engines
    assert (engine.kv_usage_ratio, engine.requests_waiting) == (0.653, 5.0)
    assert page.problems == tuple(
        PageProblem(
            ProblemReason.DUPLICATE_SERIES,
            f"engine 0: {name} stands there 8 times, once for each process (a multi-process gauge); "
            "the largest value is taken",
        )
        for name in ("kv_cache_usage_perc", "num_requests_waiting")
    )


def test_the_new_name_of_the_usage_wins_over_the_old_one_in_either_order() -> None:
    old = 'vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
    assert read(old).engines[0].kv_usage_ratio == 0.25
    assert read(PAGE + old).engines[0].kv_usage_ratio == 0.5
    assert read(old + PAGE).engines[0].kv_usage_ratio == 0.5
    for page in (read(PAGE + old), read(old + PAGE)):
        (problem,) = page.problems
        assert problem.reason is ProblemReason.DIFFERING_NAMES
        assert (
            "kv_cache_usage_perc = 0.5 and gpu_cache_usage_perc = 0.25 are the same figure" in problem.detail
        )
    assert read(PAGE + old.replace("0.25", "0.5")).problems == ()


def test_two_names_are_compared_by_their_largest_values_where_each_process_repeats_them() -> None:
    lines = "".join(
        f'vllm:{name}{{engine="0",pid="{pid}"}} {value}\n'
        for pid, value in ((11, 0.0), (12, 0.653))
        for name in ("gpu_cache_usage_perc", "kv_cache_usage_perc")
    )
    page = read(lines)
    assert page.engines[0].kv_usage_ratio == 0.653
    assert {problem.reason for problem in page.problems} == {ProblemReason.DUPLICATE_SERIES}


def test_a_page_tells_which_of_the_wanted_metrics_it_has() -> None:
    assert read(PAGE).metrics == {
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_preemptions_total",
        "vllm:cache_config_info",
    }
    # An older name is the same metric; what a multi-process server declares and has not set yet is there.
    assert read('vllm:gpu_cache_usage_perc{engine="0"} 0.5\n').metrics == {"vllm:kv_cache_usage_perc"}
    everything = read(capture("gqa_openmetrics")).metrics
    assert read(capture("dp2.idle")).metrics == read(capture("dp2.after")).metrics == everything
    assert len(everything) == 19


def test_an_engine_with_two_served_names_or_a_copy_per_process_is_one_pool() -> None:
    info = 'vllm:cache_config_info{engine="0",num_gpu_blocks="100",block_size="16",%s} 1.0\n'
    lines = "".join(
        info % labels
        + f'vllm:kv_cache_usage_perc{{engine="0",{labels}}} {usage}\n'
        + f'vllm:prompt_tokens_total{{engine="0",{labels}}} {tokens}\n'
        for labels, usage, tokens in (
            ('model_name="first",pid="11"', 0.25, 700),
            ('model_name="second",pid="12"', 0.5, 40),
        )
    )
    page = read(lines)
    (engine,) = page.engines
    assert (engine.num_blocks, engine.blocks_are_shared) == (100, False)
    assert (engine.model_name, engine.kv_usage_ratio, engine.prompt_tokens_total) == ("first", 0.5, 700.0)
    assert [problem.reason for problem in page.problems] == [ProblemReason.DUPLICATE_SERIES] * 3


def test_series_that_nobody_asked_for_are_passed_over_however_many() -> None:
    adapters = "".join(
        f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="adapter-{i}",waiting_lora_adapters=""}} 1.8e+09\n'
        for i in range(5000)
    )
    assert read(adapters + PAGE) == read(PAGE)


@pytest.mark.parametrize(
    "histogram",
    [
        # Without edges, with none but infinity, as a native histogram, with an exemplar.
        'vllm:time_to_first_token_seconds_sum{engine="0"} 2.5\nvllm:time_to_first_token_seconds_count{engine="0"} 4\n',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 4\n',
        'vllm:time_to_first_token_seconds{engine="0"} {count:4,sum:2.5,schema:3,positive_spans:[0:2]}\n',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 4 # {trace_id="a"} 0.05 1.8e+09\n',
    ],
)
def test_a_histogram_of_any_kind_costs_nothing_else_on_the_page(histogram: str) -> None:
    declared = "# TYPE vllm:time_to_first_token_seconds histogram\n"
    assert read(declared + histogram + PAGE) == read(PAGE)
    # The same of histograms whose sums are read.
    lengths = histogram.replace("time_to_first_token_seconds", "request_prompt_tokens")
    page = read(declared + lengths + PAGE)
    assert page.problems == ()
    (engine,) = page.engines
    told = (4.0, 2.5) if "_count" in histogram else (None, None)
    assert (engine.finished_requests_total, engine.finished_prompt_tokens_total) == told
    assert (
        replace(engine, finished_requests_total=None, finished_prompt_tokens_total=None)
        == read(PAGE).engines[0]
    )


@pytest.mark.parametrize(
    ("body", "reason", "word"),
    [
        (b"", FailureReason.NOT_VLLM, "empty"),
        (b"<!DOCTYPE html><html></html>", FailureReason.NOT_VLLM, "HTML"),
        (
            b"# HELP python_info x\n# TYPE python_info gauge\npython_info 1\n",
            FailureReason.NO_VLLM_METRICS,
            "a metrics page without any vllm: metric, of python_info and others; another program, or vLLM with",
        ),
        (b'{"detail":"Not Found"}', FailureReason.NOT_VLLM, "no metrics page"),
        (bytes(range(256)), FailureReason.NOT_VLLM, "no metrics page"),
    ],
)
def test_what_is_no_vllm_page_is_a_failure_that_says_what_it_is(
    body: bytes, reason: FailureReason, word: str
) -> None:
    failure = parse_page(body)
    assert isinstance(failure, SourceFailure)
    assert failure.reason is reason
    assert word in failure.detail


def test_a_page_of_more_lines_than_any_server_has_is_refused_whole() -> None:
    failure = parse_page(b'vllm:num_requests_running{pid="1"} 1\n' * 32769)
    assert isinstance(failure, SourceFailure)
    assert failure.reason is FailureReason.TOO_LARGE
    assert "32769 lines" in failure.detail


def test_a_page_that_declares_vllms_metrics_without_samples_is_vllm_still_starting() -> None:
    page = read("# HELP vllm:kv_cache_usage_perc KV\n# TYPE vllm:kv_cache_usage_perc gauge\n")
    assert page.engines == ()
    assert [problem.reason for problem in page.problems] == [ProblemReason.NO_ENGINE_SERIES]


def test_a_page_cut_off_anywhere_is_read_without_a_fault_of_ours() -> None:
    body = capture("gqa_preempting")
    whole = read(body)
    for end in range(0, len(body), 997):
        page = parse_page(body[:end])
        if isinstance(page, VllmPage) and page.engines:
            for field in ("preemptions_total", "kv_usage_ratio"):
                # A cut may shorten the last number, so only a line that is whole counts.
                if (
                    body[:end]
                    .rpartition(b"\n")[0]
                    .count(
                        b"vllm:"
                        + {
                            "preemptions_total": b"num_preemptions_total{",
                            "kv_usage_ratio": b"kv_cache_usage_perc{",
                        }[field]
                    )
                ):
                    assert getattr(page.engines[0], field) == getattr(whole.engines[0], field)


def test_none_in_the_info_metric_is_absent() -> None:
    info = read(PAGE.replace('num_gpu_blocks="100"', 'num_gpu_blocks="None"')).engines[0]
    assert info.num_blocks is None
    assert info.block_size == 16


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "0"])
def test_a_start_time_that_cannot_be_is_none(value: str) -> None:
    page = read(f"process_start_time_seconds {value}\n" + PAGE)
    assert page.process_start_time_seconds is None


@pytest.mark.parametrize("order", [1, -1])
def test_an_info_metric_that_a_second_process_repeats_empty_takes_nothing_away(order: int) -> None:
    lines = [
        f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{blocks}",block_size="16",pid="{pid}"}} 1.0\n'
        for pid, blocks in ((1, "100"), (2, "None"))
    ]
    page = read("# TYPE vllm:cache_config_info gauge\n" + "".join(lines[::order]))
    assert [engine.num_blocks for engine in page.engines] == [100]
    assert [problem.reason for problem in page.problems] == [ProblemReason.DUPLICATE_SERIES]


TIER = (
    'vllm:kv_offload_config_info{cpu_blocks_per_chunk="2",cpu_kv_cache_size_bytes="8388608",cpu_kv_cache_size_tokens="8192",cpu_num_chunks="128",'
    'engine="0",model_name="tiny"} 1.0\n'
)


def test_the_tier_in_host_memory_is_read() -> None:
    (engine,) = read(PAGE + TIER).engines
    assert engine.told_tier == ToldTier(
        num_chunks=128, blocks_per_chunk=2, size_bytes=8_388_608, size_tokens=8192
    )
    (without,) = read(PAGE).engines
    assert without.told_tier is None


def test_what_cannot_be_true_of_the_tier_is_dropped_with_its_name() -> None:
    page = read(PAGE + TIER.replace('"128"', '"-1"').replace('tokens="8192"', 'tokens="None"'))
    (engine,) = page.engines
    assert engine.told_tier == ToldTier(
        num_chunks=None, blocks_per_chunk=2, size_bytes=8_388_608, size_tokens=None
    )
    assert [problem.detail for problem in page.problems] == [
        "engine 0: cpu_num_chunks='-1' of kv_offload_config_info dropped, it cannot be true"
    ]


def test_a_tier_alone_is_no_engine() -> None:
    assert read(TIER + 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n').engines == ()


def test_what_is_moved_to_host_memory_is_read_under_both_names() -> None:
    (engine,) = read(capture("offload_lab.loaded")).engines
    assert (engine.offload_store_bytes_total, engine.offload_load_bytes_total) == (4_227_072, 7_864_320)
    old = "".join(
        f'vllm:kv_offload_total_bytes_total{{engine="0",transfer_type="{way}"}} {value}\n'
        for way, value in (("CPU_to_GPU", 5), ("GPU_to_CPU", 7))
    )
    (engine,) = read(PAGE + old).engines
    assert (engine.offload_load_bytes_total, engine.offload_store_bytes_total) == (5, 7)


def test_a_metric_that_hangs_on_a_flag_is_not_missed_when_it_goes() -> None:
    assert read(PAGE + TIER).metrics == read(PAGE).metrics


def test_a_tier_without_a_chunk_is_told_as_one() -> None:
    empty = TIER.replace('"128"', '"0"').replace('"8388608"', '"0"').replace('"8192"', '"0"')
    page = read(PAGE + empty)
    (engine,) = page.engines
    assert engine.told_tier == ToldTier(num_chunks=0, blocks_per_chunk=2, size_bytes=0, size_tokens=0)
    assert page.problems == ()


@pytest.mark.parametrize(
    "name", ["kv_offload_store_bytes_total", 'kv_offload_total_bytes_total{transfer_type="GPU_to_CPU"}']
)
def test_more_bytes_than_a_float_counts_one_by_one_were_moved_all_the_same(name: str) -> None:
    page = read(f"{PAGE}vllm:{name} 9.1e15\n")
    (engine,) = page.engines
    assert engine.offload_store_bytes_total == 9.1e15
    assert page.problems == ()
