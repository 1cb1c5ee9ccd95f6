"""Pages of the releases that cannot be run here, one for each thing that a release changed, and what each must yield.

Written after the source of each release (the metric's name, labels and unit as its `loggers.py` or `engine/metrics.py`
makes them), since these releases need a GPU or no longer install. Releases that run are held by recorded pages.
"""

from typing import Any

import pytest

from kvheadroom.capacity.readings import EngineSnapshot, ProblemReason, VllmPage
from kvheadroom.sources.vllm_metrics import parse_page

MODEL = 'model_name="meta-llama/Llama-3.1-8B-Instruct"'

V0 = f"""\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",cache_dtype="auto",cpu_offload_gb="0",enable_prefix_caching="False",\
gpu_memory_utilization="0.9",is_attention_free="False",num_cpu_blocks="2048",num_gpu_blocks="27000",\
num_gpu_blocks_override="None",sliding_window="None",swap_space_bytes="4294967296"}} 1.0
vllm:num_requests_running{{{MODEL}}} 3.0
vllm:num_requests_waiting{{{MODEL}}} 1.0
vllm:num_requests_swapped{{{MODEL}}} 0.0
vllm:gpu_cache_usage_perc{{{MODEL}}} 0.25
vllm:cpu_cache_usage_perc{{{MODEL}}} 0.5
vllm:gpu_prefix_cache_hit_rate{{{MODEL}}} -1.0
vllm:num_preemptions_total{{{MODEL}}} 4.0
vllm:prompt_tokens_total{{{MODEL}}} 9000.0
vllm:generation_tokens_total{{{MODEL}}} 700.0
vllm:tokens_total{{{MODEL}}} 9700.0
"""

# The front end of V1 was never told the blocks, had no engine label on the info metric, and counted look-ups in blocks.
V1_0_8 = f"""\
vllm:num_requests_running{{engine="0",{MODEL}}} 2.0
vllm:num_requests_waiting{{engine="0",{MODEL}}} 0.0
vllm:gpu_cache_usage_perc{{engine="0",{MODEL}}} 0.5
vllm:gpu_prefix_cache_queries_total{{engine="0",{MODEL}}} 100.0
vllm:gpu_prefix_cache_hits_total{{engine="0",{MODEL}}} 40.0
vllm:num_preemptions_total{{engine="0",{MODEL}}} 0.0
vllm:cache_config_info{{block_size="32",cache_dtype="auto",enable_prefix_caching="True",gpu_memory_utilization="0.9",\
num_cpu_blocks="None",num_gpu_blocks="None",num_gpu_blocks_override="None"}} 1.0
"""

V1_0_9_0 = f"""\
vllm:gpu_cache_usage_perc{{engine="0",{MODEL}}} 0.5
vllm:gpu_prefix_cache_queries_total{{engine="0",{MODEL}}} 3200.0
vllm:gpu_prefix_cache_hits_total{{engine="0",{MODEL}}} 1280.0
vllm:cache_config_info{{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="1000"}} 1.0
"""

BOTH_SPELLINGS = f"""\
vllm:gpu_cache_usage_perc{{engine="0",{MODEL}}} 0.5
vllm:kv_cache_usage_perc{{engine="0",{MODEL}}} 0.5
vllm:gpu_prefix_cache_queries_total{{engine="0",{MODEL}}} 3200.0
vllm:gpu_prefix_cache_hits_total{{engine="0",{MODEL}}} 1280.0
vllm:prefix_cache_queries_total{{engine="0",{MODEL}}} 3200.0
vllm:prefix_cache_hits_total{{engine="0",{MODEL}}} 1280.0
vllm:cache_config_info{{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="1000"}} 1.0
"""

# Several API servers: the new name lacks the multi-process mode that the old one has.
PER_PROCESS = f"""\
vllm:gpu_cache_usage_perc{{engine="0",{MODEL}}} 0.3
vllm:kv_cache_usage_perc{{engine="0",{MODEL},pid="101"}} 0.9
vllm:kv_cache_usage_perc{{engine="0",{MODEL},pid="102"}} 0.3
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="None"}} 1.0
"""

# The Rust front end has no info metric, and writes OpenMetrics.
RUST = f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",{MODEL}}} 2
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",{MODEL}}} 0.125
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{engine="0",{MODEL}}} 640
# EOF
"""

RAY = "".join(
    f"""\
ray_vllm_kv_cache_usage_perc{{engine="0",{MODEL},ReplicaId="{replica}",WorkerId="w{replica}"}} {usage}
ray_vllm_num_preemptions_total{{engine="0",{MODEL},ReplicaId="{replica}",WorkerId="w{replica}"}} 7.0
ray_vllm_cache_config_info{{engine="0",block_size="16",num_gpu_blocks="1000",ReplicaId="{replica}"}} 1.0
"""
    for replica, usage in (("abc", 0.25), ("def", 0.75))
)
# Up to 0.11.1 Ray was given the colon, and no ReplicaId.
OLD_RAY = f'ray_vllm:gpu_cache_usage_perc{{engine="0",{MODEL},WorkerId="w1"}} 0.5\n'

DATA_PARALLEL_0_15 = "".join(
    f"""\
vllm:kv_cache_usage_perc{{engine="{engine}",{MODEL}}} 0.5
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="{engine}",num_gpu_blocks="None"}} 1.0
"""
    for engine in (0, 1)
)

SEVERAL_NAMES = f"""\
vllm:kv_cache_usage_perc{{engine="0",{MODEL}}} 0.5
vllm:lora_requests_info{{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""}} 1.8e+09
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1000",kv_cache_size_tokens="15984",\
kv_cache_max_concurrency="7.8046875",effective_attention_block_size="16"}} 1.0
"""

# Tokens by their source, and the lengths of what finished; 0.16 to 0.19 also told what was computed again.
BY_SOURCE = "".join(
    f'vllm:{name}{{engine="0",{MODEL}{more}}} {value}\n'
    for name, more, value in (
        ("kv_cache_usage_perc", "", 0.5),
        ("prompt_tokens_total", "", 5000.0),
        ("prompt_tokens_cached_total", "", 1800.0),
        ("prompt_tokens_by_source_total", ',source="local_compute"', 3200.0),
        ("prompt_tokens_by_source_total", ',source="local_cache_hit"', 1500.0),
        ("prompt_tokens_by_source_total", ',source="external_kv_transfer"', 300.0),
        ("prompt_tokens_recomputed_total", "", 7.0),
        ("request_prompt_tokens_bucket", ',le="+Inf"', 20.0),
        ("request_prompt_tokens_count", "", 20.0),
        ("request_prompt_tokens_sum", "", 4800.0),
        ("request_generation_tokens_count", "", 20.0),
        ("request_generation_tokens_sum", "", 900.0),
    )
)

PAGES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "0.6.6 to 0.10 V0: no engine label, old names, a hit rate instead of counters": (
        V0,
        {
            "0": {
                "num_blocks": 27000,
                "block_size": 16,
                "kv_usage_ratio": 0.25,
                "requests_running": 3.0,
                "requests_waiting": 1.0,
                "preemptions_total": 4.0,
                "prompt_tokens_total": 9000.0,
                "generation_tokens_total": 700.0,
                "prefix_cache_queries_total": None,
                "prefix_cache_hits_total": None,
                "pool_tokens": None,
                "requests_waiting_capacity": None,
            }
        },
    ),
    "0.7.3 and 0.8 V1: look-ups in blocks become tokens, blocks are not told": (
        V1_0_8,
        {
            "0": {
                "num_blocks": None,
                "block_size": 32,
                "prefix_cache_queries_total": 3200.0,
                "prefix_cache_hits_total": 1280.0,
                "kv_usage_ratio": 0.5,
            }
        },
    ),
    "0.8 V1, rank 1 of a data-parallel server: the info metric is of the one engine that is left": (
        V1_0_8.replace('engine="0"', 'engine="1"'),
        {"1": {"block_size": 32, "prefix_cache_queries_total": 3200.0}},
    ),
    "0.8 V1 without the info metric: look-ups in blocks of unknown size": (
        V1_0_8[: V1_0_8.index("vllm:cache_config_info")],
        {"0": {"kv_usage_ratio": 0.5, "block_size": None, "prefix_cache_queries_total": None}},
    ),
    "0.9.0 and 0.9.1: the old names, look-ups in tokens": (
        V1_0_9_0,
        {"0": {"num_blocks": 1000, "prefix_cache_queries_total": 3200.0, "prefix_cache_hits_total": 1280.0}},
    ),
    "0.9.2 to 0.10.2: both spellings count once": (
        BOTH_SPELLINGS,
        {
            "0": {
                "kv_usage_ratio": 0.5,
                "prefix_cache_queries_total": 3200.0,
                "prefix_cache_hits_total": 1280.0,
            }
        },
    ),
    "0.9.2 to 0.10.2 with several API servers: the old spelling is the freshest": (
        PER_PROCESS,
        {"0": {"kv_usage_ratio": 0.3, "num_blocks": None}},
    ),
    "0.15 to 0.19 with data parallelism: API servers are not told the blocks": (
        DATA_PARALLEL_0_15,
        {"0": {"num_blocks": None, "kv_usage_ratio": 0.5}, "1": {"num_blocks": None, "kv_usage_ratio": 0.5}},
    ),
    "from 0.24: tokens and concurrency are told": (
        SEVERAL_NAMES,
        {
            "0": {
                "model_name": "meta-llama/Llama-3.1-8B-Instruct",
                "num_blocks": 1000,
                "pool_tokens": 15984,
                "max_concurrency": 7.8046875,
                "attention_block_size": 16,
            }
        },
    ),
    "from 0.16: prompt tokens by their source; the lengths of finished requests in all releases": (
        BY_SOURCE,
        {
            "0": {
                "prompt_tokens_total": 5000.0,
                "prompt_tokens_local_compute_total": 3200.0,
                "prompt_tokens_local_cache_hit_total": 1500.0,
                "prompt_tokens_external_kv_transfer_total": 300.0,
                "finished_requests_total": 20.0,
                "finished_prompt_tokens_total": 4800.0,
                "finished_generation_tokens_total": 900.0,
                "prefix_cache_queries_total": None,
            }
        },
    ),
    "Rust front end: no capacity": (
        RUST,
        {
            "0": {
                "requests_running": 2.0,
                "kv_usage_ratio": 0.125,
                "prefix_cache_queries_total": 640.0,
                "num_blocks": None,
                "block_size": None,
            }
        },
    ),
    "Ray's agent: every server of the machine is an engine of its own, its blocks its own": (
        RAY,
        {
            "abc/0": {"kv_usage_ratio": 0.25, "preemptions_total": 7.0, "num_blocks": 1000},
            "def/0": {"kv_usage_ratio": 0.75, "preemptions_total": 7.0, "num_blocks": 1000},
        },
    ),
    "Ray's agent up to 0.11.1": (OLD_RAY, {"w1/0": {"kv_usage_ratio": 0.5}}),
}


def read(page: str) -> VllmPage:
    read = parse_page(page.encode())
    assert isinstance(read, VllmPage), read
    return read


def engines(page: str) -> dict[str, EngineSnapshot]:
    return {engine.engine: engine for engine in read(page).engines}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_a_release_yields(name: str) -> None:
    page, expected = PAGES[name]
    found = engines(page)
    assert {
        engine: {field: getattr(snapshot, field) for field in expected.get(engine, {})}
        for engine, snapshot in found.items()
    } == expected


def test_look_ups_in_blocks_of_unknown_size_are_no_tokens() -> None:
    unknown = V1_0_8.replace('block_size="32"', 'block_size="None"')
    assert engines(unknown)["0"].prefix_cache_queries_total is None
    assert engines(unknown)["0"].kv_usage_ratio == 0.5


@pytest.mark.parametrize("name", [name for name in PAGES if "API servers: the old" not in name])
def test_nothing_of_a_release_is_a_problem(name: str) -> None:
    assert read(PAGES[name][0]).problems == ()


def test_a_gauge_per_process_is_told_and_not_compared_with_the_one_that_is_not() -> None:
    (problem,) = read(PER_PROCESS).problems
    assert problem.reason is ProblemReason.DUPLICATE_SERIES
    assert "kv_cache_usage_perc stands there 2 times, once for each process" in problem.detail


def test_without_the_other_spelling_the_largest_of_the_processes_counts() -> None:
    alone = PER_PROCESS[PER_PROCESS.index("\n") + 1 :]
    assert engines(alone)["0"].kv_usage_ratio == 0.9


def test_under_ray_serve_a_gauge_that_each_rank_repeats_counts_once_and_is_not_added_up() -> None:
    labels = f'engine="0",{MODEL},application="llm",deployment="LLMServer",replica="llm#LLMServer#r1"'
    page = read(
        "".join(
            f'ray_vllm_kv_cache_usage_perc{{{labels},WorkerId="w{rank}"}} 0.25\n'
            f'ray_vllm_num_requests_running{{{labels},WorkerId="w{rank}"}} 3.0\n'
            for rank in range(4)
        )
    )
    (engine,) = page.engines
    assert (engine.kv_usage_ratio, engine.requests_running) == (0.25, 3.0)
    assert [problem.reason for problem in page.problems] == [ProblemReason.DUPLICATE_SERIES] * 2
    assert "kv_cache_usage_perc stands there 4 times; the largest value is taken" in page.problems[0].detail


def test_blocks_of_a_data_parallel_server_under_ray_are_shared_among_its_own_engines() -> None:
    page = "".join(
        f'ray_vllm_cache_config_info{{engine="{engine}",num_gpu_blocks="{blocks}",ReplicaId="{replica}"}} 1.0\n'
        for replica, blocks, ranks in (("abc", 2000, 2), ("def", 900, 1))
        for engine in range(ranks)
    )
    found = {name: (engine.num_blocks, engine.blocks_are_shared) for name, engine in engines(page).items()}
    assert found == {"abc/0": (1000, True), "abc/1": (1000, True), "def/0": (900, False)}
