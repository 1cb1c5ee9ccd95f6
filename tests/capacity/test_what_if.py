"""What a running engine would be with other flags: pure, with values worked out by hand."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.calibrated_plan import CalibratedPlan
from kvheadroom.capacity.calibration import Calibration, Reliability
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion
from kvheadroom.capacity.command_line import FITTED_LENGTH, CommandLine
from kvheadroom.capacity.deployment import Outcome
from kvheadroom.capacity.facts import AUTO_LENGTH, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.planned_tier import DOES_NOT_HELP
from kvheadroom.capacity.readings import EchoedFlags, EngineSnapshot
from kvheadroom.capacity.running_server import Change, RunningServer, start_with
from kvheadroom.capacity.startup_check import FreeMemory
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.capacity.what_if import what_if
from kvheadroom.capacity.what_if_answer import WhatIf, WhatIfRow
from tests.capacity.article_models import CONFIGS, WEIGHTS_BYTES
from tests.capacity.facts_builder import TINY_LLAMA
from tests.capacity.truth import BY_ID

H100, H200 = 85_028_896_768, 150_109_945_856
WEIGHTS = 1 << 20
BLOCK = 16 * 1024
BLOCKS = 4_600_000
# ceil(85,028,896,768 x 0.92) - weights - pool
OVERHEAD = 78_226_585_027 - WEIGHTS - BLOCKS * BLOCK


def running(
    *num_blocks: int,
    config: Mapping[str, Any] = TINY_LLAMA,
    flags: Mapping[str, Any] | None = None,
    gpu: str | None = "H100",
    weights_bytes: int | None = WEIGHTS,
    max_model_len: int = 16_384,
    block_size: int = 16,
    version: str = "0.33.0",
    line: CommandLine | None = None,
    others_bytes: int | None = None,
    **echoed: Any,
) -> RunningServer:
    operator = OperatorFacts(flags=flags or {}, gpu=gpu, weights_bytes=weights_bytes)
    files = ModelFiles(folder="/models/x", config=dict(config))
    snapshots = tuple(
        EngineSnapshot(
            engine=str(engine),
            model_name="served",
            num_blocks=blocks,
            block_size=block_size,
            echoed=EchoedFlags(**{"kv_cache_dtype": "auto", "gpu_memory_utilization": 0.92, **echoed}),
        )
        for engine, blocks in enumerate(num_blocks)
    )
    facts = resolve_facts(
        operator=operator,
        answers=ServerAnswers(version=version, max_model_len=max_model_len),
        echoed=snapshots[0].echoed,
        model_files=files,
        command_line=line,
    )
    return RunningServer(
        replica="r",
        url="http://r:8000",
        operator=operator,
        facts=facts,
        snapshots=snapshots,
        model_files=files,
        others_bytes=others_bytes,
        started_at=1.7e9,
        taken_at=1.7e9 + 60,
    )


def asked(server: RunningServer, *changes: Mapping[str, Any], **options: Any) -> WhatIf:
    return what_if(server, tuple(Change(flags=flags) for flags in changes), **options)


def only(answer: WhatIf) -> WhatIfRow:
    (row,) = answer.rows
    return row


def carried(row: WhatIfRow) -> int:
    assert isinstance(row.calibrated, CalibratedPlan)
    return row.calibrated.learned.overhead_bytes


def test_the_pool_measures_its_overhead_and_the_same_start_again_has_the_same_pool() -> None:
    answer = asked(running(BLOCKS), {}, session_tokens=(1600,))
    sample = answer.now.sample
    assert isinstance(sample, CalibrationSample)
    assert sample.overhead_bytes == OVERHEAD
    assert sample.uncertainty_bytes == BLOCK - 1
    assert sample.start == "r/0/1700000000"
    row = only(answer)
    assert row.change.label == "the same start again"
    assert row.plan.pool is not None
    assert row.plan.pool.num_blocks == BLOCKS
    # 1,600 tokens take 100 blocks.
    (before,) = answer.now.sessions
    (after,) = row.sessions
    assert (before.of_engine, before.whole) == (46_000.0, 45_999)
    assert (after.of_engine, after.whole) == (46_000.0, 45_999)
    assert after.fewest < 46_000 < after.most


def test_a_start_that_a_daemon_kept_under_another_name_counts_once() -> None:
    server = running(BLOCKS)
    sample = asked(server).now.sample
    assert isinstance(sample, CalibrationSample)
    other = replace(sample, start="glm-a/0/1600000000")
    # A log's start has no such name, nor has one of a page without a start time.
    for name in ("0f/0", "a", f"r/0/{BLOCKS} blocks"):
        known = Calibration.of([replace(sample, start=name)])
        row = only(asked(server, {}, learned=known))
        assert isinstance(row.calibrated, CalibratedPlan)
        assert row.calibrated.learned.samples == 2
    for name in ("glm-a/0/1700000000", "r/0/1700000000", "a/b/0/1700000000"):
        known = Calibration.of([replace(sample, start=name), other])
        row = only(asked(server, {}, learned=known))
        assert isinstance(row.calibrated, CalibratedPlan)
        assert row.calibrated.learned.samples == 2


def test_the_prediction_of_what_runs_takes_nothing_from_its_pool() -> None:
    few, many = (asked(running(blocks), {}).now.plan.pool for blocks in (3_000_000, BLOCKS))
    assert few == many
    assert few is not None


def test_another_utilization_moves_the_pool_by_its_share_and_keeps_the_measured_overhead() -> None:
    row = only(asked(running(BLOCKS), {"gpu_memory_utilization": 0.8}))
    assert carried(row) == OVERHEAD
    assert isinstance(row.calibrated, CalibratedPlan)
    assert row.calibrated.learned.reliability is Reliability.ONE_SAMPLE
    # ceil(85,028,896,768 x 0.8) = 68,023,117,415
    assert row.plan.kv_bytes == 68_023_117_415 - WEIGHTS - OVERHEAD
    assert row.plan.pool is not None
    assert row.plan.pool.num_blocks == (68_023_117_415 - WEIGHTS - OVERHEAD) // BLOCK


def test_more_requests_at_once_take_more_overhead_by_the_difference_of_the_estimates() -> None:
    server = running(BLOCKS, flags={"max_num_seqs": 64}, config={**TINY_LLAMA, "vocab_size": 100_000})
    row = only(asked(server, {"max_num_seqs": 512}))
    # Logits of 448 more requests x 100,000 x 15.8 B; graphs of 35 sizes more (1,024 tokens: 51; 128: 18) of 4 layers x 0.36 MiB.
    sampler = 512 * 100_000 * 15.8
    assert isinstance(row.calibrated, CalibratedPlan)
    assert row.calibrated.learned.reliability is Reliability.CARRIED
    assert row.calibrated.learned.differences == ("max_num_seqs=64 in place of 512",)
    before = OVERHEAD
    activations = max(sampler, step := 16_384 * 4 * 128 * 2) - max(64 * 100_000 * 15.8, step)
    captured = {
        64: len([1, 2, 4, *range(8, 129, 8)]),
        512: len([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]),
    }
    graphs = (captured[512] - captured[64]) * 4 * 0.36 * 2**20
    assert carried(row) == pytest.approx(before + activations + graphs, abs=2)


def test_a_change_of_type_is_planned_by_its_layout() -> None:
    row = only(asked(running(BLOCKS), {"kv_cache_dtype": "fp8"}, session_tokens=(1600,)))
    assert row.plan.layout is not None
    assert row.plan.layout.bytes_per_block == BLOCK // 2
    assert row.plan.request.operator.flags["kv_cache_dtype"] == "fp8"
    assert "the cache is fp8 in place of auto" in row.notes


GLM = json.loads(CONFIGS["nvfp4"].read_text())


def glm(blocks: int = 16_000, *, max_model_len: int = 262_144, **more: Any) -> RunningServer:
    return running(
        blocks,
        config=GLM,
        gpu="B200",
        weights_bytes=WEIGHTS_BYTES["nvfp4"],
        flags={"tensor_parallel_size": 4},
        block_size=64,
        max_model_len=max_model_len,
        **more,
    )


def test_a_longer_context_with_the_sparse_indexer_takes_its_workspace_from_the_pool() -> None:
    shorter, longer = asked(glm(), {"max_model_len": 524_288}, {"max_model_len": 1_048_576}).rows
    # Keys of 40 requests of max_model_len, 128 + 4 B each, once they are more than the experts' workspace.
    grown = 40 * 524_288 * 132
    assert carried(longer) - carried(shorter) == grown
    assert shorter.plan.kv_bytes is not None
    assert longer.plan.kv_bytes == shorter.plan.kv_bytes - grown
    assert any("workspaces from 1.74 to 5.54 GB" in note for note in longer.notes)
    # 40 x 262,144 x 132 = 1.38 GB are less than what the experts take, so the measured figure holds none of it.
    assert 40 * 1_048_576 * 132 == 5_536_481_280


def test_a_pool_is_neither_always_smaller_nor_always_larger_with_a_longer_context() -> None:
    server = running(
        2_800,
        config=BY_ID["glm53flash-h200-tp2-kvauto-mtp0"]["config"],
        gpu="H200",
        flags={"tensor_parallel_size": 2},
        weights_bytes=120_000_000_000,
        block_size=2176,
        max_model_len=32_768,
    )
    lengths = (65_536, 262_144, 524_288, 1_048_576)
    answer = asked(server, *({"max_model_len": length} for length in lengths), session_tokens=(8_192,))
    assert isinstance(answer.now.sample, CalibrationSample)
    pools = [row.plan.pool for row in answer.rows]
    tokens = [0 if pool is None else pool.pool_tokens or 0 for pool in pools]
    sessions = [row.sessions[0].of_engine for row in answer.rows]
    # A request's fixed part weighs less the longer it is; the indexer's workspace takes 40 x length x 132 B.
    assert tokens[0] < tokens[1] < tokens[2] > tokens[3]
    assert sessions[0] > sessions[1] > sessions[2] > sessions[3]


def test_where_a_flag_gives_the_bytes_other_layouts_are_planned_from_them() -> None:
    server = running(128, block_size=32, kv_cache_memory_bytes=4 << 20, gpu=CPU, max_model_len=2048)
    bigger, wider = asked(server, {"block_size": 64}, {"tensor_parallel_size": 2}).rows
    sample = asked(server).now.sample
    assert isinstance(sample, Excluded)
    assert sample.reason is Exclusion.POOL_BY_FLAG
    # 4 MiB / (64 x 1,024 B); with TP 2 a rank holds half of each token, in blocks of 128.
    assert bigger.plan.pool is not None
    assert bigger.plan.pool.num_blocks == 64
    assert wider.plan.pool is not None
    assert wider.plan.pool.num_blocks == (4 << 20) // (128 * 512)
    assert bigger.fewest is bigger.plan is bigger.most
    assert bigger.calibrated == "a flag gives the pool, and nothing is left over"
    assert any("kv_cache_memory_bytes stays 4194304" in note for note in wider.notes)


def test_with_bytes_given_another_utilization_sizes_nothing_and_is_wanted_free_all_the_same() -> None:
    server = running(65_536, kv_cache_memory_bytes=1 << 30, others_bytes=6_000_000_000)
    lower, higher = asked(server, {"gpu_memory_utilization": 0.5}, {"gpu_memory_utilization": 0.95}).rows
    for row in (lower, higher):
        assert row.plan.kv_bytes == 1 << 30
        assert any("kv_cache_memory_bytes=1073741824 sizes the pool, and gpu_memory_utilization does not" in note for note in row.notes)  # fmt: skip
    assert lower.memory.requested_bytes == math.ceil(H100 * 0.5)
    assert lower.memory.verdict is FreeMemory.ENOUGH
    assert lower.starts
    # 0.95 of 85.03 GB are 80.78 GB, and 79.03 GB are free at most.
    assert higher.memory.requested_bytes == 80_777_451_930
    assert higher.memory.free_bytes == H100 - 6_000_000_000
    assert higher.memory.verdict is FreeMemory.TOO_LITTLE
    assert not higher.starts


@pytest.mark.parametrize(
    ("others", "utilization", "verdict"),
    [
        (None, 0.92, FreeMemory.AS_NOW),
        (None, 0.95, FreeMemory.UNKNOWN),
        (0, 0.9, FreeMemory.ENOUGH),
        # Its own context may take 4%.
        (0, 0.97, FreeMemory.CLOSE),
        (4_000_000_000, 0.92, FreeMemory.AS_NOW),
        (7_000_000_000, 0.92, FreeMemory.TOO_LITTLE),
    ],
)
def test_free_memory_is_judged_by_what_others_use(
    others: int | None, utilization: float, verdict: FreeMemory
) -> None:
    row = only(asked(running(BLOCKS, others_bytes=others), {"gpu_memory_utilization": utilization}))
    assert row.memory.verdict is verdict
    assert row.starts == (verdict is not FreeMemory.TOO_LITTLE)


def test_what_others_use_says_nothing_of_another_card() -> None:
    server = running(BLOCKS, others_bytes=0)
    row = only(what_if(server, (Change(gpu="H200", flags={"tensor_parallel_size": 2}),)))
    assert row.memory.verdict is FreeMemory.UNKNOWN
    assert row.memory.requested_bytes == math.ceil(H200 * 0.92)
    # Two of that card, and none of them is the one that runs.
    assert row.memory.more_gpus == 0


def test_another_card_has_not_the_memory_that_was_said_of_the_one_that_runs() -> None:
    server = running(BLOCKS)
    server = replace(server, operator=replace(server.operator, hbm_bytes=80_000_000_000))
    same, other = what_if(server, (Change(), Change(gpu="H200"))).rows
    assert same.memory.total_bytes == 80_000_000_000
    assert other.memory.total_bytes == H200


def test_a_length_that_does_not_fit_is_refused_in_vllms_words() -> None:
    config = {**TINY_LLAMA, "max_position_embeddings": 1_000_000}
    server = running(1000, config=config, kv_cache_memory_bytes=1000 * BLOCK)
    row = only(asked(server, {"max_model_len": 20_000}))
    assert row.plan.outcome is Outcome.TOO_LONG
    assert row.kv_cache is not None
    # 1,250 blocks of 16 KiB are 0.02 GiB; 999 are there beside the null block, 15,984 tokens.
    assert row.kv_cache.needed_bytes == 1250 * BLOCK
    assert row.kv_cache.available_bytes == 999 * BLOCK
    assert row.kv_cache.error == (
        "To serve at least one request with the model's max seq len (20000), (0.02 GiB KV cache is needed, which is larger than the "
        "available KV cache memory (0.02 GiB). Based on the available memory, the estimated maximum model length is 15984."
    )
    assert not row.starts


def test_of_pipeline_stages_the_one_with_the_least_to_spare_is_checked() -> None:
    # Three layers of 4 KiB a block: one stage has one, the other two.
    server = running(1000, config={**TINY_LLAMA, "num_hidden_layers": 3}, kv_cache_memory_bytes=1000 * BLOCK)
    row = only(asked(server, {"pipeline_parallel_size": 2}))
    assert row.plan.layout is not None
    assert sorted(row.plan.layout.stage_bytes_per_block) == [BLOCK // 4, BLOCK // 2]
    assert row.kv_cache is not None
    # 16,384 tokens take 1,024 blocks.
    assert row.kv_cache.needed_bytes == 1024 * (BLOCK // 2)
    assert row.kv_cache.available_bytes == 1000 * BLOCK - BLOCK // 2
    assert row.kv_cache.longest == 16_384


def test_what_vllm_refuses_is_told_with_its_reason() -> None:
    row = only(asked(running(BLOCKS), {"tensor_parallel_size": 3}))
    assert row.plan.outcome is Outcome.REFUSED
    assert "4 attention heads are not divisible by tensor_parallel_size=3" in row.plan.reason
    assert row.sessions == ()
    assert not row.starts


def test_another_card_has_its_own_memory_and_the_estimate_alone() -> None:
    server = running(BLOCKS)
    row = only(what_if(server, (Change(gpu="H200"),)))
    assert isinstance(what_if(server, ()).now.sample, CalibrationSample)
    assert "of another GPU or release, and is not carried over" in str(row.calibrated)
    raw = row.raw.facts.overhead_bytes.value
    assert row.plan.kv_bytes == math.ceil(H200 * 0.92) - WEIGHTS - raw
    assert row.fewest.kv_bytes is not None
    assert row.most.kv_bytes is not None
    assert row.fewest.kv_bytes < row.plan.kv_bytes < row.most.kv_bytes
    assert any("nothing was measured on that GPU" in note for note in row.notes)


def test_another_release_is_planned_by_its_rules_in_a_bucket_of_its_own() -> None:
    server = running(BLOCKS)
    newer, older = what_if(server, (Change(version="0.33.1"), Change(version="0.16.0"))).rows
    assert "of another GPU or release, and is not carried over" in str(newer.calibrated)
    assert older.plan.facts.rules.taken_from != newer.plan.facts.rules.taken_from
    assert not older.plan.facts.rules.subtracts_graphs
    assert (
        "the rules of vLLM 0.16.0 are not verified; those of 0.32 taken, but for the known differences"
        in older.notes
    )


def test_4_gpus_or_8_is_answered_on_the_same_gpus() -> None:
    answer = asked(glm(), {"tensor_parallel_size": 4}, {"tensor_parallel_size": 8}, session_tokens=(262_144,))
    four, eight = answer.rows
    assert answer.gpus == 8
    # 262,144 tokens take 4,096 blocks of 64.
    (now,) = answer.now.sessions
    assert now.of_engine == 16_000 / 4096
    assert (now.per_gpu, now.in_all) == (16_000 / 4096 / 4, 2 * 16_000 / 4096)
    assert four.sessions[0].in_all == 2 * four.sessions[0].of_engine
    assert four.replicas == 2
    assert eight.sessions[0].in_all == eight.sessions[0].of_engine
    assert eight.sessions[0].per_gpu == eight.sessions[0].of_engine / 8
    assert eight.memory.more_gpus == 4
    assert (four.memory.more_gpus, eight.replicas) == (0, 1)


def test_of_several_engines_the_one_with_the_fewest_blocks_counts() -> None:
    answer = asked(running(5000, 4000, 6000, kv_cache_memory_bytes=4000 * BLOCK), {}, session_tokens=(1600,))
    assert (answer.now.snapshot.engine, answer.now.engines) == ("1", 3)
    (now,) = answer.now.sessions
    assert now.of_engine == 40.0
    # Three engines of one GPU each.
    assert answer.gpus == 3
    assert (now.per_gpu, now.in_all) == (40.0, 120.0)
    assert only(answer).plan.data_parallel == 3
    assert only(answer).sessions[0].in_all == 120.0


def test_engines_that_a_flag_tells_are_not_told_twice() -> None:
    told = {"data_parallel_size": 4}
    by_config = running(5000, 5000, flags=told, kv_cache_memory_bytes=5000 * BLOCK)
    by_line = running(5000, 5000, line=CommandLine(flags=told), kv_cache_memory_bytes=5000 * BLOCK)
    for server in (by_config, by_line):
        assert asked(server).now.plan.fleet.gpus_per_replica == 4


def test_sessions_are_counted_of_the_usual_length_or_of_the_longest_that_every_row_takes() -> None:
    server = running(BLOCKS)
    longer = {"max_model_len": 32_768}
    assert asked(server, longer).session_tokens == (16_384,)
    assert asked(server, {"max_model_len": 8_192}, longer).session_tokens == (8_192,)
    assert asked(server, {"max_model_len": AUTO_LENGTH}).session_tokens == (16_384,)
    assert asked(glm(max_model_len=524_288), {}).session_tokens == (262_144,)


def test_a_fitted_length_is_fitted_anew() -> None:
    line = CommandLine(unclear={"max_model_len": FITTED_LENGTH})
    config = {**TINY_LLAMA, "max_position_embeddings": 1_000_000}
    server = running(1000, config=config, line=line, kv_cache_memory_bytes=1000 * BLOCK, max_model_len=15_984)
    answer = asked(server, {"kv_cache_memory_bytes": 2000 * BLOCK}, {"max_model_len": 8_000})
    fitted, said = answer.rows
    assert answer.now.plan.pool is not None
    assert answer.now.plan.pool.max_model_len == 15_984
    # 1,999 blocks beside the null block.
    assert fitted.plan.pool is not None
    assert fitted.plan.pool.max_model_len == 1999 * 16
    assert fitted.plan.request.operator.flags["max_model_len"] == AUTO_LENGTH
    assert said.plan.pool is not None
    assert said.plan.pool.max_model_len == 8_000
    # What the operator says of its length stays.
    by_config = replace(server, operator=replace(server.operator, flags={"max_model_len": 12_000}))
    kept = only(asked(by_config, {"kv_cache_memory_bytes": 2000 * BLOCK})).plan.pool
    assert kept is not None
    assert kept.max_model_len == 12_000


def test_without_the_bytes_that_were_given_the_pool_is_what_memory_leaves() -> None:
    server = running(65_536, kv_cache_memory_bytes=1 << 30)
    row = only(asked(server, {"kv_cache_memory_bytes": None}))
    assert row.change.label == "--kv-cache-memory-bytes 0"
    assert row.plan.kv_bytes == 78_226_585_027 - WEIGHTS - row.plan.facts.overhead_bytes.value
    assert row.calibrated == "a flag gives the pool, and nothing is left over"


@pytest.mark.parametrize(
    ("change", "label"),
    [
        (Change(flags={"tensor_parallel_size": 8, "max_model_len": 4096}), "-tp 8 --max-model-len 4096"),
        (Change(flags={"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}), "--mtp 2"),
        (Change(flags={"speculative_config": None}), "--mtp 0"),
        (Change(flags={"speculative_config": {"method": "eagle3", "draft_config": {"a": 1}}}), "drafting by eagle3"),
        (Change(gpu="H200", version="0.33.1"), "on H200 vLLM 0.33.1"),
        (Change(hbm_bytes=80_000_000_000), "on a GPU of 80.00 GB"),
        (Change(flags={"enable_expert_parallel": True}), "-ep"),
    ],
)  # fmt: skip
def test_a_change_is_called_as_on_a_command_line(change: Change, label: str) -> None:
    assert change.label == label


def test_a_draft_is_taken_away_by_none_and_added_by_its_flag() -> None:
    drafted = {"method": "mtp", "num_speculative_tokens": 1}
    server = replace(
        glm(),
        operator=OperatorFacts(
            flags={"tensor_parallel_size": 4, "speculative_config": drafted},
            gpu="B200",
            weights_bytes=WEIGHTS_BYTES["nvfp4"],
        ),
    )
    _, before = start_with(server, Change())
    _, after = start_with(server, Change(flags={"speculative_config": None}))
    assert (before.draft.method, before.draft.tokens) == ("mtp", 1)
    assert after.draft.method is None
    assert only(asked(glm(), {"speculative_config": drafted})).plan.facts.draft.tokens == 1


def test_a_length_that_the_server_took_is_not_refused_and_one_that_is_asked_for_is() -> None:
    server = running(BLOCKS, max_model_len=65_536)
    kept, longer = asked(server, {"block_size": 32}, {"max_model_len": 65_537}).rows
    assert kept.plan.outcome is Outcome.STARTS
    assert longer.plan.outcome is Outcome.REFUSED
    assert "is greater than the model's longest context (32768)" in longer.plan.reason


def test_requests_that_may_run_at_once_bound_the_sessions() -> None:
    row = only(asked(running(BLOCKS), {"max_num_seqs": 8}, session_tokens=(1600,)))
    assert "no more than 8 requests run at once (max_num_seqs), however many fit" in row.notes


def test_a_sleeping_engine_and_one_of_stages_measure_nothing_and_the_estimate_stands_in() -> None:
    whole = {**TINY_LLAMA, "intermediate_size": 256, "vocab_size": 1000}
    awake = running(BLOCKS, config=whole, weights_bytes=None, flags={"pipeline_parallel_size": 2})
    asleep = running(BLOCKS)
    asleep = replace(asleep, snapshots=(replace(asleep.snapshot, sleeping=True),))
    for server, reason in ((awake, Exclusion.PIPELINE_STAGES), (asleep, Exclusion.ASLEEP)):
        answer = asked(server, {"gpu_memory_utilization": 0.9})
        assert isinstance(answer.now.sample, Excluded)
        assert answer.now.sample.reason is reason
        row = only(answer)
        assert row.calibrated == answer.now.sample.detail
        assert row.plan is row.raw
        # The bounds of the estimate: -2.9% and +1.2% of 85.03 GB.
        assert row.plan.kv_bytes is not None
        assert row.fewest.kv_bytes == row.plan.kv_bytes - round(0.012 * H100)
        assert row.most.kv_bytes is not None
        least = max(0, row.raw.facts.overhead_bytes.value - round(0.029 * H100))
        assert row.most.kv_bytes == row.plan.kv_bytes + row.raw.facts.overhead_bytes.value - least


def test_a_pool_that_cannot_be_is_no_measurement() -> None:
    answer = asked(running(5_000_000), {})
    assert isinstance(answer.now.sample, Excluded)
    assert answer.now.sample.reason is Exclusion.IMPOSSIBLE
    assert "more than gpu_memory_utilization allows" in answer.now.sample.detail


def test_a_tier_in_host_memory_is_no_room_for_a_request_that_does_not_fit() -> None:
    server = running(1000, kv_cache_memory_bytes=1000 * BLOCK, max_model_len=15_984)
    longer = {"max_model_len": 16_000}
    with_tier, without = asked(server, {**longer, "kv_offloading_size": 100.0}, longer).rows
    assert with_tier.plan.outcome is without.plan.outcome is Outcome.TOO_LONG
    assert DOES_NOT_HELP in with_tier.notes
    assert DOES_NOT_HELP not in without.notes
    # One that runs with a tier has it in its next start as well.
    on = running(
        1000, flags={"kv_offloading_size": 100.0}, kv_cache_memory_bytes=1000 * BLOCK, max_model_len=15_984
    )
    assert DOES_NOT_HELP in only(asked(on, longer)).notes
    assert DOES_NOT_HELP not in only(asked(on, {"max_num_seqs": 8})).notes
