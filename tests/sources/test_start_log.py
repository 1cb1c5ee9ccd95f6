"""What is read of start-up logs: excerpts that people published, and whole starts of each family of releases."""

import csv
import itertools
import re
from dataclasses import replace

import pytest

from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.logged_start import LoggedRank, Printed, StartOutcome, contradictions
from kvheadroom.sources.start_log_figures import OF_A_RANK
from kvheadroom.sources.start_log_forms import FAILURES, FORMS, match_form
from tests.sources.start_logs import FOLDER, gib, log, messages, only_rank, only_start, read

with (FOLDER / "forms.tsv").open(encoding="utf-8", newline="") as file:
    LINES_OF_RELEASES = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("row", LINES_OF_RELEASES, ids=lambda row: f"{row['form']}-{row['first']}")
def test_each_line_that_a_release_prints_has_its_form(row: dict[str, str]) -> None:
    found = match_form(row["line"])
    assert found is not None
    assert found[0].name == row["form"]


def test_each_form_that_tells_a_rank_s_figures_is_held_to_them() -> None:
    assert OF_A_RANK.keys() - FIGURES.keys() == {"counted", "not_counted"}


def test_each_form_is_printed_by_some_release() -> None:
    assert {row["form"] for row in LINES_OF_RELEASES} == {form.name for form in (*FORMS, *FAILURES)}


FIGURES: dict[str, tuple[str, ...]] = {
    "loaded": ("weights",),
    "v0_budget": ("total", "requested"),
    "v0_shares": ("weights", "non_torch", "activation", "available"),
    "snapshot": ("free_at_start", "total"),
    "requested": ("requested",),
    "requested_0_9": ("free_at_start", "", "requested"),
    "requested_util": ("free_at_start", "requested"),
    "external": ("", "external_weights", "requested"),
    "profiled": ("", "", "activation", "non_torch", "weights"),
    "profiled_consumed": ("", "", "", "consumed", "weights"),
    "available": ("available",),
    "pinned": ("free_at_start", "available"),
    "plan": ("", "", "free_at_start"),
    "estimate": ("cudagraph_estimate",),
    "captured": ("cudagraph",),
    "graph_pool": ("cudagraph", "cudagraph_estimate"),
    "usage": ("free_at_start", "total", "requested", "weights", "activation", "non_torch", "cudagraph", "", "", "available"),
    "usage_consumed": ("free_at_start", "total", "requested", "consumed", "activation", "cudagraph", "", "", "available"),
    "reserve": ("multimodal_reserve",),
    "short": ("free_at_start", "total", "requested"),
}  # fmt: skip
"""What the numbers of a line are in their order; empty for what is none of the rank's."""


@pytest.mark.parametrize(
    "row",
    [row for row in LINES_OF_RELEASES if row["form"] in FIGURES],
    ids=lambda row: f"{row['form']}-{row['first']}",
)
def test_each_figure_of_a_line_is_read_for_what_it_is(row: dict[str, str]) -> None:
    numbers = itertools.count(1)
    line = re.sub(r"1\.25", lambda _: f"{next(numbers)}.25", row["line"])
    expected = {
        name: gib(f"{number}.25")
        for number, name in enumerate(FIGURES[row["form"]], start=1)
        if name and f"{number}.25" in line
    }
    if in_bytes := re.search(r"(?<=bytes=)\d+|\d+(?= bytes)", line):
        expected["available"] = Printed(int(in_bytes[0]), 0)
    rank = only_rank(line)
    told = {name: getattr(rank, name) for name in LoggedRank.__dataclass_fields__}
    assert {name: value for name, value in told.items() if isinstance(value, Printed)} == expected


EXCERPTS = {
    "0.6.6_one_gpu": LoggedRank(
        total=gib("23.67"),
        utilization=0.90,
        utilization_uncertainty=0.005,
        requested=gib("21.30"),
        weights=gib("15.5083"),
        non_torch=gib("0.28"),
        activation=gib("1.16"),
        cudagraph=gib("1.92"),
        available=gib("4.36"),
    ),
    "0.8.3_ray": LoggedRank(
        label="pid=661",
        total=gib("39.49"),
        utilization=0.90,
        utilization_uncertainty=0.005,
        requested=gib("35.55"),
        weights=gib("27.63"),
        non_torch=gib("1.07"),
        activation=gib("1.27"),
        available=gib("5.57"),
    ),
    "0.8_prints_gb": LoggedRank(
        total=gib("14.74"),
        utilization=0.89,
        utilization_uncertainty=0.005,
        requested=gib("13.18"),
        weights=gib("6.0160"),
        non_torch=gib("0.05"),
        activation=gib("0.90"),
        available=gib("6.22"),
    ),
    "0.9.2_one_gpu": LoggedRank(weights=gib("15.2683"), available=gib("18.69"), cudagraph=gib("2.24")),
    "0.10.1_ray": LoggedRank(label="pid=132250", weights=gib("7.3272"), available=gib("76.15")),
    "0.13.0_first_rank": LoggedRank(
        label="TP0", weights=gib("22.5313"), available=gib("17.58"), cudagraph=gib("0.79")
    ),
    "0.16.0_one_gpu": LoggedRank(weights=gib("18.55"), available=gib("20.16"), cudagraph=gib("1.22")),
    "0.19.0_debug_one_gpu": LoggedRank(
        total=gib("79.19"),
        free_at_start=gib("78.68"),
        utilization=0.95,
        requested=gib("75.23"),
        weights=gib("12.56"),
        non_torch=gib("0.25"),
        activation=gib("0.77"),
        cudagraph_estimate=gib("0.84"),
        cudagraph=gib("0.89"),
        available=gib("61.66"),
    ),
    "0.26.0_expert_parallel": LoggedRank(
        label="TP0_EP0",
        total=gib("184.31"),
        free_at_start=gib("181.84"),
        utilization=0.92,
        requested=gib("169.56"),
        weights=gib("106.69"),
        non_torch=gib("0.95"),
        activation=gib("6.31"),
        cudagraph_estimate=gib("4.99"),
        graphs_counted=True,
        cudagraph=gib("4.13"),
        available=gib("50.62"),
    ),
    "0.27_data_parallel": LoggedRank(
        label="DP0_EP0",
        total=gib("276.62"),
        free_at_start=gib("274.27"),
        utilization=0.92,
        requested=gib("254.49"),
        weights=gib("168.89"),
        consumed=gib("171.25"),
        activation=gib("36.74"),
        cudagraph_estimate=gib("33.06"),
        cudagraph=gib("8.57"),
        available=gib("46.50"),
    ),
    "0.31.0_one_gpu": LoggedRank(
        total=gib("79.25"),
        free_at_start=gib("78.84"),
        utilization=0.92,
        requested=gib("72.91"),
        weights=gib("15.00"),
        consumed=gib("15.26"),
        activation=gib("1.44"),
        cudagraph=gib("0.23"),
        available=gib("56.21"),
    ),
}


@pytest.mark.parametrize("name", EXCERPTS)
def test_one_rank_of_a_published_log(name: str) -> None:
    assert only_rank(log(name)) == EXCERPTS[name]


def test_a_published_log_contradicts_itself_nowhere_and_is_told_to_be_cut() -> None:
    for name in (*EXCERPTS, "0.10.2_two_ranks", "0.19.0_debug_two_ranks", "0.20.2_graphs_not_counted"):
        assert [message.partition(":")[0] for message in messages(read(log(name)))] == ["cut"], name


def test_of_two_ranks_one_prints_what_all_share_and_bytes_beat_gib() -> None:
    first, second = only_start(log("0.10.2_two_ranks")).ranks
    assert (first.label, second.label) == ("TP0", "TP1")
    assert first.available == Printed(47_878_721_024, 0)
    assert first.weights == gib("74.28")
    assert second == LoggedRank(label="TP1", weights=gib("74.2812"), cudagraph=gib("2.37"))


def test_each_engine_tells_its_pool() -> None:
    found = {
        name: (start.pool_tokens, start.num_gpu_blocks, start.engine)
        for name in (
            "0.6.6_one_gpu",
            "0.10.2_two_ranks",
            "0.19.0_debug_two_ranks",
            "0.27_data_parallel",
            "0.31.0_one_gpu",
        )
        for start in (only_start(log(name)),)
    }
    assert found == {
        "0.6.6_one_gpu": (None, 5102, None),
        "0.10.2_two_ranks": (973_760, None, 0),
        "0.19.0_debug_two_ranks": (244_304, 15_269, None),
        "0.27_data_parallel": (394_633, None, 0),
        "0.31.0_one_gpu": (460_496, None, None),
    }


def test_of_several_sizes_of_the_pool_all_workers_take_the_least() -> None:
    *others, more, fewer = log("0.10.1_ray").splitlines()
    for order in ((more, fewer), (fewer, more)):
        assert only_start("\n".join((*others, *order))).pool_tokens == 6_167_568
    more, fewer = (
        f"INFO 01-02 03:04:05 [executor_base.py:1] # cuda blocks: {blocks}, # CPU blocks: 4096"
        for blocks in (24_990, 24_084)
    )
    for order in ((more, fewer), (fewer, more)):
        assert only_start("\n".join(order)).num_gpu_blocks == 24_084


def test_graphs_that_were_estimated_and_not_counted() -> None:
    ranks = {rank.label: rank for rank in only_start(log("0.20.2_graphs_not_counted")).ranks}
    assert list(ranks) == ["TP0_DCP0", "TP5_DCP1", "TP6_DCP0"]
    assert ranks["TP6_DCP0"] == LoggedRank(
        label="TP6_DCP0", cudagraph_estimate=gib("4.94"), graphs_counted=False
    )


def test_a_whole_start_of_v0() -> None:
    start = only_start(log("whole_0.6.6_v0"))
    assert (start.release, start.model, start.outcome) == (
        "0.6.6",
        "meta-llama/Llama-3.1-8B-Instruct",
        StartOutcome.STARTED,
    )
    assert start.flags == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_model_len": 16384,
        "max_num_seqs": 128,
        "gpu_memory_utilization": 0.85,
        "kv_cache_dtype": "auto",
        "dtype": "auto",
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
    }
    assert (start.num_gpu_blocks, start.first_line, start.last_line) == (24084, 1, 20)
    driver, other = start.ranks
    assert (driver.label, driver.available, driver.cudagraph) == ("", gib("23.52"), gib("0.31"))
    assert (other.label, other.available, other.cudagraph) == ("pid=411", gib("24.41"), gib("0.33"))
    assert driver.weights == other.weights == gib("7.5122")
    assert read(log("whole_0.6.6_v0")).problems == ()


def test_a_whole_start_of_two_engines_of_which_one_fails() -> None:
    reading = read(log("whole_0.33.0_data_parallel"))
    first, second = reading.starts
    assert reading.problems == ()
    assert (first.engine, first.outcome, first.failure) == (0, StartOutcome.STARTED, "")
    assert (second.engine, second.outcome) == (1, StartOutcome.FAILED)
    assert (
        second.failure
        == "the GPU ran out of memory: 896.00 MiB were asked for, and 411.94 MiB of 79.19 GiB were free"
    )
    assert first.flags == second.flags
    assert first.flags == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 2,
        "decode_context_parallel_size": 1,
        "enable_expert_parallel": True,
        "max_model_len": 32768,
        "max_num_seqs": 96,
        "max_num_batched_tokens": 8192,
        "kv_cache_dtype": "auto",
        "dtype": "bfloat16",
        "enforce_eager": False,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3},
    }
    assert [rank.label for rank in (*first.ranks, *second.ranks)] == [
        "DP0_TP0_EP0",
        "DP0_TP1_EP1",
        "DP1_TP0_EP2",
    ]
    # What a worker printed before it had its name is its own.
    assert first.ranks[0] == LoggedRank(
        label="DP0_TP0_EP0",
        total=gib("79.19"),
        free_at_start=gib("78.61"),
        requested=gib("72.85"),
        weights=gib("15.37"),
        cudagraph_estimate=gib("0.64"),
        graphs_counted=True,
        available=gib("54.17"),
    )
    assert second.pool_tokens == 1_182_048


def test_no_secret_and_no_text_of_the_arguments_is_kept() -> None:
    for name in ("whole_0.6.6_v0", "whole_0.33.0_data_parallel"):
        told = repr(read(log(name)))
        for word in ("sk-", "***", "secret", "some/drafter", "0.0.0.0", "it's", "KVTransfer"):
            assert word not in told, word


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ("{'max_model_len': 'auto', 'block_size': 32}", {"block_size": 32}),
        ("{'max_model_len': -1}", {}),
        ("{'kv_cache_memory_bytes': 8589934592}", {"kv_cache_memory_bytes": 8_589_934_592}),
        ("{'dtype': 'torch.float16', 'quantization': 'fp8'}", {"dtype": "float16", "quantization": "fp8"}),
        ("{'quantization': 'a b', 'kv_cache_dtype': 'a/b'}", {}),
        ("{'tensor_parallel_size': True, 'enforce_eager': 1}", {}),
        ("{'tensor_parallel_size': 2", {}),
        ("{'chat_template': \"x', 'tensor_parallel_size': 8, \", 'max_num_seqs': 3}", {"max_num_seqs": 3}),
        ("{'api_key': ['max_num_seqs=4'], 'x': <E.A: 'max_num_seqs=5'>, 'max_num_seqs': 6}", {"max_num_seqs": 6}),
        ("{'speculative_config': '{\"method\": \"ngram\", \"num_speculative_tokens\": 5}'}",
         {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}),
        ("{'speculative_config': {'method': 'a b', 'num_speculative_tokens': True, 'token': 'x'}}", {}),
        ("{'kv_transfer_config': '{\"kv_connector\": \"NixlConnector\", \"engine_id\": \"x\"}'}",
         {"kv_transfer_config": {"kv_connector": "NixlConnector"}}),
        ("{'kv_cache_dtype_skip_layers': ['0', 'sliding_window']}",
         {"kv_cache_dtype_skip_layers": ("0", "sliding_window")}),
        ("not a dict at all", {}),
        ("{" * 3000, {}),
        ("'" * 3001, {}),
    ],
)  # fmt: skip
def test_of_the_arguments_only_what_looks_like_a_flag_s_value_is_kept(
    arguments: str, flags: dict[str, object]
) -> None:
    start = only_start(f"INFO 01-02 03:04:05 [utils.py:233] non-default args: {arguments}")
    assert start.flags == flags


def test_the_length_that_vllm_chose_and_the_blocks_that_somebody_set() -> None:
    start = only_start(
        "[kv_cache_utils.py:1] Auto-fit max_model_len: reduced from 131072 to 40960 to fit in available GPU memory "
        "(3.50 GiB available for KV cache)\n"
        "[kv_cache_utils.py:1] Overriding num_gpu_blocks=0 with num_gpu_blocks_override=512\n"
        "[kv_cache_utils.py:1] Overriding num_gpu_blocks=7000 with num_gpu_blocks_override=600\n"
    )
    assert start.flags == {"max_model_len": 40960, "num_gpu_blocks_override": 600}
    assert start.num_gpu_blocks == 7000


def test_a_pool_that_is_set_is_no_measurement() -> None:
    rank = only_rank(
        "Initial free memory 78.84 GiB, reserved 8.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes config and "
        "skipped memory profiling."
    )
    assert rank == LoggedRank(free_at_start=gib("78.84"), available=gib("8.00"), is_pinned=True)


def test_a_stored_plan_tells_its_bytes() -> None:
    rank = only_rank(
        "Applying persisted startup plan (fingerprint 1f3a): kv_cache_memory_bytes=58333988249 (54.33 GiB), recorded free-memory "
        "baseline 78.10 GiB, current 78.84 GiB. Memory profiling will be skipped."
    )
    assert rank == LoggedRank(
        free_at_start=gib("78.84"), available=Printed(58_333_988_249, 0), is_pinned=True
    )


COUNTED = (
    "CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.8200 is equivalent to "
    "--gpu-memory-utilization=0.8048 without CUDA graph memory profiling. To maintain the same effective KV cache size as before"
)
SHORT = (
    "Free memory on device cuda:0 (12.5/79.25 GiB) on startup is less than desired GPU memory utilization (0.82, 64.98 GiB). "
    "Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


def test_the_graph_estimate_follows_from_two_utilizations_where_nothing_better_is_printed() -> None:
    rank = only_rank(f"{COUNTED}\n{SHORT}")
    assert rank.graphs_counted is True
    assert rank.cudagraph_estimate == Printed(
        round((0.8200 - 0.8048) * round(79.25 * GIB)), round(round(79.25 * GIB) * 0.0001 + GIB / 200 * 0.0152)
    )
    assert only_rank(
        f"{COUNTED}\n{SHORT}\nEstimated CUDA graph memory: 1.2 GiB total"
    ).cudagraph_estimate == gib("1.20")
    assert only_rank(COUNTED).cudagraph_estimate is None


def test_of_two_utilizations_the_one_that_is_printed_whole_counts() -> None:
    rounded = "Initial free memory: 78.84 GiB; Requested memory: 0.92 (util), 73.10 GiB"
    whole = SHORT.replace("(0.82, 64.98 GiB)", "(0.9224, 73.10 GiB)")
    assert only_rank(rounded) == LoggedRank(
        free_at_start=gib("78.84"), utilization=0.92, utilization_uncertainty=0.005, requested=gib("73.10")
    )
    for lines in ((rounded, whole), (whole, rounded)):
        rank = only_rank("\n".join(lines))
        assert (rank.utilization, rank.utilization_uncertainty) == (0.9224, 0.0)


def test_an_estimate_that_was_not_counted_follows_from_what_vllm_would_have_to_be_given() -> None:
    line = (
        "CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Consider re-enabling it (the default "
        "as of v0.21.0) and increasing --gpu-memory-utilization from 0.8200 to 0.8352."
    )
    rank = only_rank(f"{line}\n{SHORT}")
    assert rank.graphs_counted is False
    assert rank.cudagraph_estimate is not None
    assert rank.cudagraph_estimate.bytes == round((0.8352 - 0.8200) * round(79.25 * GIB))
    # It would have to be more than all.
    assert only_rank(f"{line.replace('0.8352', '1.0000')}\n{SHORT}").cudagraph_estimate is None


FAILED = {
    "ValueError: To serve at least one request with the models's max seq len (131072), (4.54 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (1.71 GiB). Based on the available memory, the estimated maximum model length is 49152. Try": (
        "the KV cache of one request of 131,072 tokens needs 4.54 GiB, and 1.71 GiB are available; vLLM estimates that 49,152 "
        "tokens fit"
    ),
    "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GB KV cache is needed, which is larger than "
    "the available KV cache memory (3.12 GB). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`": (
        "the KV cache of one request of 32,768 tokens needs 4.00 GiB, and 3.12 GiB are available"
    ),
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.": (
        "no memory is left for the KV cache: weights and overhead take the whole budget"
    ),
    f"ValueError: {SHORT}": "12.50 GiB of the GPU's 79.25 GiB are free, and gpu_memory_utilization=0.82 asks for 64.98 GiB",
    "ValueError: Free memory on device cuda:1 (3.5/79.25 GiB) on startup is less than the engine's budget after excluding external "
    "process's weights (0.9, 11.32 GiB). Decrease": (
        "3.50 GiB of the GPU's 79.25 GiB are free, and gpu_memory_utilization=0.9 asks for 11.32 GiB"
    ),
    "ValueError: Externally held weights on device cuda:0 (75.5/79.25 GiB) exceed the desired GPU memory utilization (0.9, 71.33 GiB). "
    "Increase": "another process holds 75.50 GiB of weights, and gpu_memory_utilization=0.9 allows 71.33 GiB",
    "AssertionError: Error in memory profiling. Initial free memory 70.5 GiB, current free memory 71.25 GiB. This happens": (
        "another process gave memory of the GPU back while vLLM measured (from 70.50 GiB to 71.25 GiB)"
    ),
    "AssertionError: Error in memory profiling. Initial used memory 1234, currently used memory 1230. This happens": (
        "another process gave memory of the GPU back while vLLM measured"
    ),
    "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (184). Each decode sequence requires one": (
        "max_num_seqs is 256, and the KV cache holds the Mamba states of 184 requests"
    ),
    "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token.": (
        "not even one token fits what is left for the KV cache"
    ),
    "Available KV cache memory: 1.00 GiB\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.": (
        "the GPU ran out of memory"
    ),
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}": (
        "the engine ended before it was up; no line of the log that is known gives the reason"
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", FAILED)
def test_a_start_that_failed_says_why_in_one_sentence(line: str) -> None:
    start = only_start(line)
    assert (start.outcome, start.failure) == (StartOutcome.FAILED, FAILED[line])


def test_a_figure_that_failed_a_start_is_kept() -> None:
    assert only_rank(f"ValueError: {SHORT}") == LoggedRank(
        total=gib("79.25"), free_at_start=gib("12.50"), utilization=0.82, requested=gib("64.98")
    )


def test_the_reason_is_told_whatever_is_printed_around_it() -> None:
    for lines in (
        [
            "EngineCore failed to start.",
            f"ValueError: {SHORT}",
            "RuntimeError: Engine core initialization failed. See",
        ],
        [
            f"ERROR 01-02 03:04:05 [core.py:700] ValueError: {SHORT}",
            "Engine core proc EngineCore_DP0 died unexpectedly, x",
        ],
    ):
        assert only_start("\n".join(lines)).failure.startswith("12.50 GiB of the GPU's")


CONFIG = "INFO 01-02 03:04:05 [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: model='a/b', "
UP = "init engine (profile, create kv cache, warmup model) took 9 s"


def test_how_the_one_engine_ended_is_told_by_a_line_that_names_none() -> None:
    named = f"(EngineCore_DP0 pid=1) {CONFIG}\n"
    start = only_start(f"{named}{UP}")
    assert (start.engine, start.outcome) == (0, StartOutcome.STARTED)
    start = only_start(f"{named}ValueError: {SHORT}")
    assert (start.engine, start.outcome) == (0, StartOutcome.FAILED)
    assert start.failure.startswith("12.50 GiB of the GPU's")


def test_an_engine_that_failed_has_not_started_with_its_server() -> None:
    first, second = read(
        f"(EngineCore_DP0 pid=1) {CONFIG}\n(EngineCore_DP1 pid=2) {CONFIG}\n"
        f"(EngineCore_DP1 pid=2) ERROR 01-02 03:04:05 [core.py:700] ValueError: {SHORT}\n"
        "(APIServer pid=9) INFO:     Application startup complete.\n"
    ).starts
    assert (first.outcome, second.outcome) == (StartOutcome.STARTED, StartOutcome.FAILED)


def test_an_error_after_the_start_is_none_of_it() -> None:
    up = "INFO 01-02 03:04:05 [core.py:210] init engine (profile, create kv cache, warmup model) took 21.09 seconds"
    start = only_start(f"{up}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert (start.outcome, start.failure) == (StartOutcome.STARTED, "")


def test_restarts_are_starts_of_their_own() -> None:
    failed = (
        "vLLM API server version 0.11.0\nnon-default args: {'max_model_len': 32768}\n"
        f"Initializing a V1 LLM engine (v0.11.0) with config: model='a/b', max_seq_len=32768\nValueError: {SHORT}\n"
    )
    well = failed.replace("0.11.0", "0.12.0").replace("32768", "8192").partition("ValueError")[0] + (
        "Model loading took 3.5 GiB memory and 2.000000 seconds\ninit engine (profile, create kv cache, warmup model) took 9 s\n"
    )
    reading = read(failed + failed + well)
    found = [
        (s.release, s.flags["max_model_len"], s.outcome.value, s.first_line, s.last_line)
        for s in reading.starts
    ]
    assert found == [
        ("0.11.0", 32768, "failed", 1, 4),
        ("0.11.0", 32768, "failed", 5, 8),
        ("0.12.0", 8192, "started", 9, 13),
    ]
    assert reading.problems == ()


def test_a_restart_without_a_server_is_told_by_its_engine_or_its_loading() -> None:
    once = "Initializing a V1 LLM engine (v0.11.0) with config: model='a/b'\nAvailable KV cache memory: 3.50 GiB\n"
    assert [start.first_line for start in read(once + once).starts] == [1, 3]
    loaded = "Model loading took 3.5000 GiB and 2.000000 seconds\nAvailable KV cache memory: 3.50 GiB\n"
    assert [start.first_line for start in read(loaded + loaded).starts] == [1, 3]


def test_engines_of_ray_are_told_apart_by_their_processes() -> None:
    config = (
        "INFO 01-12 06:15:17 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='a/b'"
    )
    starts = read(
        f"(APIServer pid=1) (DPEngineCoreActor pid=5, ip=10.0.0.2) {config}\n(APIServer pid=1) (DPEngineCoreActor pid=6) {config}\n"
        "(APIServer pid=1) (DPEngineCoreActor pid=5, ip=10.0.0.2) INFO 01-12 06:15:59 [gpu_worker.py:298] Available KV cache "
        "memory: 10.74 GiB\n(APIServer pid=1) INFO:     Application startup complete.\n"
    ).starts
    assert [(start.engine, start.outcome, len(start.ranks)) for start in starts] == [
        (None, StartOutcome.STARTED, 1),
        (None, StartOutcome.STARTED, 0),
    ]


SOUND = EXCERPTS["0.31.0_one_gpu"]


def test_the_identity_of_the_budget_holds_within_rounding() -> None:
    # 72.91 = 15.26 + 1.44 + 56.21
    assert list(contradictions(SOUND, "0.31.0")) == []
    counted_beside = EXCERPTS["0.26.0_expert_parallel"]
    # 169.56 = 106.69 + 0.95 + 6.31 + 50.62 + 4.99, which is the estimate
    assert list(contradictions(counted_beside, "0.26.0")) == []


WRONG = {
    "the weights (80.00 GiB) are more than the GPU's memory (79.25 GiB)": replace(
        SOUND, weights=gib("80.00")
    ),
    "more was free at the start (81.00 GiB) than the GPU has (79.25 GiB)": replace(
        SOUND, free_at_start=gib("81.00")
    ),
    "the estimate of the CUDA graphs is below zero (-0.81 GiB)": replace(
        SOUND, cudagraph_estimate=gib("-0.81")
    ),
    "the estimate of the CUDA graphs (118.65 GiB) is implausible: with the weights it is more than the GPU's memory (79.25 GiB)": (
        replace(SOUND, cudagraph_estimate=gib("118.65"))
    ),
    "what the CUDA graphs took is below zero (-0.42 GiB)": replace(SOUND, cudagraph=gib("-0.42")),
    "the budget (75.00 GiB) is not 0.92 of the GPU's memory (79.25 GiB), which is 72.91 GiB": (
        replace(SOUND, requested=gib("75.00"), available=None)
    ),
    "what it holds and leaves (15.26 + 1.44 + 57.21 GiB) does not add up to the budget (72.91 GiB): 1.00 GiB too much": (
        replace(SOUND, available=gib("57.21"))
    ),
    "what it holds and leaves (15.26 + 1.44 + 55.21 GiB) does not add up to the budget (72.91 GiB): 1.00 GiB missing": (
        replace(SOUND, available=gib("55.21"), cudagraph_estimate=gib("0.25"))
    ),
}


@pytest.mark.parametrize("said", WRONG)
def test_figures_that_cannot_all_be_true_are_told(said: str) -> None:
    assert list(contradictions(WRONG[said], "0.31.0")) == [said]


def test_an_estimate_that_is_not_told_may_be_what_is_missing_where_the_release_makes_one() -> None:
    missing = replace(SOUND, available=gib("55.21"))
    assert list(contradictions(missing, "0.31.0")) == []
    assert list(contradictions(missing, None)) == []
    assert len(list(contradictions(missing, "0.17.1"))) == 1
    assert len(list(contradictions(replace(missing, graphs_counted=False), "0.31.0"))) == 1


def test_weights_that_another_process_holds_lower_the_budget() -> None:
    rank = only_rank(
        "Weights are held outside this process: of the 71.33 GiB utilization budget, 60.0 GiB is externally held and 11.33 GiB remains "
        "for the engine's own allocations.\n"
        "Free memory on device (18.5/79.25 GiB) on startup. Desired GPU memory utilization is (0.9, 11.33 GiB). Actual usage is 1.5 GiB "
        "for consumed memory (weights + non-torch), 0.83 GiB for peak activation, and 0.0 GiB for CUDAGraph memory. Replace x. Current "
        "kv cache memory in use is 9.0 GiB."
    )
    assert rank.external_weights == gib("60.00")
    assert list(contradictions(rank, "0.32.0")) == []


def test_a_contradiction_names_lines_and_rank_and_the_way_out() -> None:
    text = log("0.31.0_one_gpu").replace("56.21", "58.21")
    assert messages(read(text))[0] == (
        "contradiction: lines 1 to 4: of the rank, what it holds and leaves (15.26 + 1.44 + 58.21 GiB) does not add up to the budget "
        "(72.91 GiB): 2.00 GiB too much; take these figures for no measurement, and look at the log of another start"
    )


COMPILED = "INFO 01-02 03:04:05 [backends.py:390] Compiling a graph for compile range (1, 8192) takes 7.34 s"
LOADED = "INFO 01-02 03:04:05 [backends.py:291] Directly load the compiled graph(s) for compile range (1, 8192) from the cache, took 1.205 s"
LOADED_WHOLE = "INFO 01-02 03:04:05 [decorators.py:296] Directly load AOT compilation from path /root/.cache/vllm/torch_aot_compile/model"
# A warm start prints these too: Dynamo runs unless the compilation was saved whole, and loading is timed with it.
ANYWAY = (
    "INFO 01-02 03:04:05 [backends.py:1049] Dynamo bytecode transform time: 5.21 s\n"
    "INFO 01-02 03:04:05 [monitor.py:35] torch.compile takes 12.49 s in total"
)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((ANYWAY,), None),
        ((ANYWAY, COMPILED), True),
        ((ANYWAY, LOADED), False),
        ((LOADED_WHOLE,), False),
        ((LOADED_WHOLE, LOADED), False),
        ((LOADED, COMPILED), True),
        ((COMPILED, LOADED), True),
        ((COMPILED.replace("Compiling", "[eagle_head] Compiling"),), True),
        ((LOADED.replace("Directly", "[backbone] Directly"),), False),
        ((COMPILED.replace("] ", "] Received request 1: prompt: '"),), None),
    ],
)
def test_a_start_is_cold_where_any_graph_was_compiled_anew(lines: tuple[str, ...], told: object) -> None:
    text = "\n".join(("vLLM API server version 0.18.0", *lines))
    assert only_start(text).is_cold is told


@pytest.mark.parametrize(
    "row",
    [row for row in LINES_OF_RELEASES if row["form"] in ("compiled", "compiled_before")],
    ids=lambda row: row["line"],
)
def test_each_release_tells_whether_it_compiled(row: dict[str, str]) -> None:
    line = f"(EngineCore pid=9) INFO 01-02 03:04:05 [backends.py:1] {row['line']}"
    assert only_start(line).is_cold is (row["form"] == "compiled")


def test_each_engine_tells_whether_it_compiled() -> None:
    first, second = read(
        "(EngineCore_DP0 pid=1) INFO 01-02 03:04:05 [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: model='a/b', \n"
        "(EngineCore_DP1 pid=2) INFO 01-02 03:04:05 [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: model='a/b', \n"
        f"(Worker_DP0_TP0 pid=3) {COMPILED}\n(Worker_DP1_TP0 pid=4) {LOADED}\n"
    ).starts
    assert (first.engine, first.is_cold, second.engine, second.is_cold) == (0, True, 1, False)


def test_what_a_worker_without_an_index_compiled_is_its_engine_s() -> None:
    config = (
        "INFO 01-02 03:04:05 [core.py:1] Initializing a V1 LLM engine (v0.10.2) with config: model='a/b', "
    )
    start = only_start(
        f"(EngineCore_DP0 pid=1) {config}\n(Worker_TP0 pid=3) {COMPILED}\n(Worker_TP1 pid=4) {LOADED}"
    )
    assert (start.engine, start.is_cold) == (0, True)


def test_a_unit_that_no_release_prints_there_leaves_the_figure_out() -> None:
    reading = read("Available KV cache memory: 55.15 GB\nModel loading took 14.0800 GiB and 2.000000 seconds")
    assert reading.starts[0].ranks == (LoggedRank(weights=gib("14.0800")),)
    assert messages(reading)[0] == (
        "unit: line 1: a figure of `Available KV cache memory:` is in GB, where vLLM prints GiB; the line is left out: give the log as "
        "vLLM printed it"
    )


def test_gb_of_the_weights_up_to_0_8_is_2_to_the_30() -> None:
    for line in (
        "Loading model weights took 14.9888 GB",
        "Model loading took 14.9888 GB and 3.000000 seconds",
    ):
        assert only_rank(line).weights == Printed(round(14.9888 * 2**30), round(2**30 / 20000))
