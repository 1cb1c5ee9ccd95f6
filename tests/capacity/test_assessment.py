"""From one reading to everything that is said about an engine."""

import random
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.calibration import Calibration, calibrate
from kvheadroom.capacity.calibration_key import CalibrationKey, key_of
from kvheadroom.capacity.calibration_samples import CalibrationSample, SampleSource, sample_of_engine
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.fleet import FleetAssessment, ReplicaAssessment, withhold_stale
from kvheadroom.capacity.observation import observe
from kvheadroom.capacity.own_start import OwnStart
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.readings import EchoedFlags, EngineSnapshot, ProblemReason, VllmPage
from kvheadroom.sources.vllm_metrics import parse_page
from tests.capacity.facts_builder import TINY_LLAMA, facts
from tests.capacity.truth import BY_ID
from tests.conftest import capture, capture_names

# The pool of the recorded tiny server: 128 blocks of 32 tokens.
SNAPSHOT = EngineSnapshot(
    engine="0",
    model_name="tiny",
    num_blocks=128,
    block_size=32,
    attention_block_size=32,
    pool_tokens=4096,
    max_concurrency=2.0,
    kv_usage_ratio=100 / 127,
    echoed=EchoedFlags(kv_cache_dtype="auto", kv_cache_memory_bytes=4 << 20, block_size=32),
)
# Pages of before 0.32, which tell a block's tokens by the label block_size alone.
LABEL_ONLY = replace(SNAPSHOT, attention_block_size=None)
ODD_LENGTHS = (97, 1000, 262_144)


def assess_at(snapshot: EngineSnapshot, engine_facts: EngineFacts | None = None) -> Assessment:
    engine_facts = engine_facts or facts(gpu="cpu", echoed=snapshot.echoed)
    return assess(Reading(facts=engine_facts, snapshot=snapshot, taken_at=1000.0), ODD_LENGTHS)


def test_blocks_tokens_and_sessions_follow_vllms_block_arithmetic() -> None:
    result = assess_at(SNAPSHOT)
    seen = result.observation
    assert (seen.num_blocks, seen.usable_blocks, seen.used_blocks, seen.free_blocks) == (128, 127, 100, 27)
    assert (seen.used_tokens, seen.free_tokens) == (3200, 864)
    assert seen.pool_bytes == 128 * 32 * 1024
    rows = {row.session_tokens: row for row in result.sessions}
    # 97 tokens take 4 blocks, 1,000 take 32, 2,048 (max_model_len) take 64; 262,144 would be refused.
    assert {length: row.blocks_per_session for length, row in rows.items()} == {97: 4, 1000: 32, 2048: 64}
    assert {length: row.headroom for length, row in rows.items()} == {97: 6, 1000: 0, 2048: 0}
    assert {length: row.in_use for length, row in rows.items()} == {97: 25.0, 1000: 3.125, 2048: 1.5625}
    assert {length: row.whole_sessions for length, row in rows.items()} == {97: 31, 1000: 3, 2048: 1}
    assert rows[2048].observed == 2.0
    assert rows[1000].observed == rows[1000].predicted == 4.0


def test_prediction_and_observation_meet_exactly_and_the_difference_says_so() -> None:
    difference = assess_at(SNAPSHOT).difference
    assert difference is not None
    assert (difference.tokens, difference.blocks, difference.bytes, difference.ratio) == (0, 0, 0, 0.0)


def test_a_difference_is_observed_minus_predicted() -> None:
    difference = assess_at(replace(SNAPSHOT, num_blocks=120, pool_tokens=3840)).difference
    assert difference is not None
    assert (difference.tokens, difference.blocks, difference.bytes) == (-256, -8, -8 * 32 * 1024)
    assert difference.ratio == -0.0625


WRONG = EngineSnapshot(
    engine="0",
    model_name="tiny",
    num_blocks=999_983,
    block_size=7,
    attention_block_size=77,
    pool_tokens=123_456_789,
    max_concurrency=31_337.5,
    kv_cache_dtype="fp8",
    kv_usage_ratio=0.123,
    requests_running=99.0,
    requests_waiting=98.0,
    preemptions_total=97.0,
    prefix_cache_queries_total=96.0,
    prefix_cache_hits_total=95.0,
    prompt_tokens_total=94.0,
    generation_tokens_total=93.0,
    echoed=SNAPSHOT.echoed,
)


def test_a_prediction_does_not_move_when_every_result_of_the_engine_is_wrong() -> None:
    same_facts = facts(gpu="cpu", echoed=SNAPSHOT.echoed)
    true, wrong = assess_at(SNAPSHOT, same_facts), assess_at(WRONG, same_facts)
    assert wrong.prediction == true.prediction
    predicted = {row.session_tokens: row.predicted for row in true.sessions}
    assert {row.session_tokens: row.predicted for row in wrong.sessions} == predicted
    assert wrong.observation != true.observation


def test_neither_does_a_calibrated_figure(seeded: random.Random) -> None:
    known = facts(gpu="H100", hbm_bytes=10 << 30, weights_bytes=1 << 30, flags={"block_size": 32})
    key = key_of(known)
    assert isinstance(key, CalibrationKey)
    raw, overhead = predict(known), seeded.randrange(1 << 30, 4 << 30)
    told = []
    for snapshot in (SNAPSHOT, WRONG):
        seen = observe(snapshot, known, raw.layout)
        own = sample_of_engine(
            known, snapshot, seen, start="own", foreign_bytes=None, measured_at=0.0, evidence=""
        )
        other = CalibrationSample(
            key=key,
            start="other",
            source=SampleSource.FLEET,
            overhead_bytes=overhead,
            uncertainty_bytes=0,
            estimated_bytes=None,
            model="",
            evidence="",
        )
        kept = Calibration.of([other, replace(other, start="own", overhead_bytes=seen.pool_bytes or 0)])
        result = assess(
            Reading(facts=known, snapshot=snapshot, taken_at=1000.0),
            ODD_LENGTHS,
            calibrated=calibrate(known, raw, kept, own_start="own"),
            own_start=OwnStart("own", own),
        )
        assert result.calibrated is not None
        assert result.ledger is not None
        assert result.calibrated.learned.overhead_bytes == overhead
        rows = [(row.session_tokens, row.calibrated) for row in result.sessions]
        told.append((result.calibrated, rows, [term.calibrated_bytes for term in result.ledger.terms]))
    assert told[0] == told[1]


def test_a_release_that_tells_blocks_alone_has_the_tokens_that_vllm_would_report() -> None:
    old = replace(SNAPSHOT, num_blocks=130, attention_block_size=None, pool_tokens=None, max_concurrency=None)
    seen = assess_at(old).observation
    # 130 blocks / 64 blocks of a request of 2,048 tokens x 2,048
    assert (seen.pool_tokens, seen.pool_tokens_basis) == (4160, "blocks")
    told = assess_at(SNAPSHOT).observation
    assert (told.pool_tokens, told.pool_tokens_basis) == (4096, "kv_cache_size_tokens")
    untold = assess_at(replace(old, num_blocks=None)).observation
    assert (untold.pool_tokens, untold.pool_tokens_basis) == (None, None)


def test_blocks_are_no_tokens_where_layers_keep_different_ones() -> None:
    windows = {
        **TINY_LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 64,
        "num_hidden_layers": 6,
    }
    mixed = facts(gpu="H100", config=windows, flags={"block_size": 32}, version="0.20.0")
    old = replace(SNAPSHOT, attention_block_size=None, pool_tokens=None, max_concurrency=None)
    seen = assess_at(old, mixed).observation
    assert (seen.num_blocks, seen.pool_tokens, seen.pool_tokens_basis) == (128, None, None)


@pytest.mark.parametrize("version", ["0.11.2", "0.19.0"])
def test_a_hybrids_stale_block_size_makes_no_tokens_where_the_release_tells_none(version: str) -> None:
    # Before 0.20 the label kept the 16 of before the blocks were enlarged to hold a state.
    hybrid = BY_ID["granite4-h-small-tp1"]["config"]
    old = replace(SNAPSHOT, block_size=16, attention_block_size=None, pool_tokens=None, max_concurrency=None)
    result = assess_at(old, facts(gpu="H100", config=hybrid, version=version))
    seen = result.observation
    assert (seen.pool_tokens, seen.used_tokens, seen.free_tokens, seen.pool_bytes) == (None,) * 4
    assert (seen.num_blocks, seen.used_blocks) == (128, 100)
    assert result.occupancy.estimate_ratio is None


@pytest.mark.parametrize("told", [{}, {"num_blocks": None, "kv_usage_ratio": 0.5}])
def test_a_server_that_tells_no_blocks_has_an_unknown_capacity_with_its_reason_and_divides_by_nothing(
    told: dict[str, Any],
) -> None:
    result = assess_at(EngineSnapshot(engine="0", block_size=16, **told))
    seen = result.observation
    assert seen.unknown is not None
    assert seen.unknown.startswith("the server's page does not tell how many blocks the pool has")
    assert (seen.num_blocks, seen.pool_tokens, seen.used_blocks, seen.free_blocks) == (None,) * 4
    assert result.sessions == ()
    assert result.occupancy.estimate_ratio is None
    assert assess_at(SNAPSHOT).observation.unknown is None
    assert assess_at(replace(SNAPSHOT, num_blocks=None)).observation.unknown is None


def test_blocks_that_make_the_tokens_of_the_log_agree_to_the_token() -> None:
    # 15,709 blocks of 16: the log says 251,344 tokens.
    told = replace(
        LABEL_ONLY, num_blocks=15_709, block_size=16, pool_tokens=251_344, max_concurrency=15_709 / 128, kv_usage_ratio=0.5,
        echoed=EchoedFlags(num_gpu_blocks_override=15_709, block_size=16),
    )  # fmt: skip
    result = assess_at(told)
    assert result.problems == ()
    assert (result.observation.pool_tokens, result.observation.used_tokens) == (251_344, 7_854 * 16)
    assert result.difference is not None
    assert (result.difference.tokens, result.difference.blocks, result.difference.ratio) == (0, 0, 0.0)


def test_absent_gauges_stay_absent() -> None:
    result = assess_at(EngineSnapshot(engine="1", echoed=SNAPSHOT.echoed))
    seen = result.observation
    assert (seen.num_blocks, seen.used_blocks, seen.free_blocks, seen.used_tokens) == (None,) * 4
    assert all(row.observed is None and row.headroom is None for row in result.sessions)
    assert all(row.predicted is not None for row in result.sessions)
    assert result.difference is not None
    assert result.difference.tokens is None


def test_without_model_files_max_model_len_is_counted_from_vllms_own_concurrency() -> None:
    unknown = replace(facts(gpu="cpu", echoed=SNAPSHOT.echoed), model=None)
    result = assess_at(SNAPSHOT, unknown)
    assert result.difference is None
    assert [row.session_tokens for row in result.sessions] == [2048]
    row = result.sessions[0]
    assert (row.predicted, row.observed, row.headroom, row.in_use) == (None, 2.0, 0, 1.5625)
    # One KV cache group, by the engine's own figures: 128 / 2.0 = 64 blocks = 2,048 / 32.
    assert result.observation.used_tokens == 3200
    assert result.observation.pool_bytes is None


def test_a_pool_with_several_groups_has_no_used_tokens() -> None:
    # Gemma3-like capture: 768 blocks of 32, max_concurrency 6.05 at 1,024 tokens -> 127 blocks a request, not 32.
    swa = replace(
        SNAPSHOT, num_blocks=768, pool_tokens=6192, max_concurrency=6.047244094488189, kv_usage_ratio=0.5
    )
    unknown = replace(facts(gpu="cpu", max_model_len=1024), model=None)
    result = assess_at(swa, unknown)
    assert result.observation.used_blocks == 384
    assert result.observation.used_tokens is None
    assert [row.blocks_per_session for row in result.sessions] == [127]


def test_with_context_parallelism_a_block_holds_more_tokens_than_one_gpu_stores() -> None:
    # 16 tokens a block and GPU, 8 GPUs share a context: the block holds 128 tokens of it.
    seen = assess_at(replace(SNAPSHOT, block_size=16, attention_block_size=128)).observation
    assert seen.block_size == 128
    assert seen.pool_bytes == 128 * 16 * 1024
    assert seen.used_tokens == 100 * 128


@pytest.mark.parametrize(
    ("block_size", "pool_tokens", "told"),
    [
        (4, 128 * 32, "128 blocks of block_size 4 are 512 tokens, and kv_cache_size_tokens says 4,096"),
        # A hybrid's blocks were enlarged, and the label kept the size of before.
        (
            16,
            128 * 1056,
            "128 blocks of block_size 16 are 2,048 tokens, and kv_cache_size_tokens says 135,168",
        ),
        (64, 128 * 32, "128 blocks of block_size 64 are 8,192 tokens, and kv_cache_size_tokens says 4,096"),
    ],
)
def test_a_block_size_that_contradicts_the_pools_tokens_is_told_and_nothing_is_made_of_it(
    block_size: int, pool_tokens: int, told: str
) -> None:
    result = assess_at(replace(LABEL_ONLY, block_size=block_size, pool_tokens=pool_tokens))
    seen = result.observation
    assert (seen.used_tokens, seen.free_tokens, seen.pool_bytes, seen.block_size) == (None,) * 4
    assert (seen.num_blocks, seen.pool_tokens, seen.used_blocks) == (128, pool_tokens, 100)
    assert seen.pool_tokens_basis == "kv_cache_size_tokens"
    (problem,) = result.problems
    assert problem.reason is ProblemReason.CONTRADICTION
    assert problem.detail.startswith(f"engine 0: {told}: ")
    # Only max_model_len is counted, from vLLM's own concurrency: 128 blocks / 2.0.
    blocks = {row.session_tokens: row.blocks_per_session for row in result.sessions}
    assert blocks == {97: None, 1000: None, 2048: 64}


@pytest.mark.parametrize(
    ("block_size", "max_model_len", "pool_tokens"),
    [
        (32, 2048, 4096),
        # 1,000 tokens take 32 blocks of 32: int(128 / 32 * 1000); older releases said 128 * 32.
        (32, 1000, 4000),
        (32, 1000, 4096),
        # 41 tokens take 2 blocks: int(128 / 2 * 41)
        (32, 41, 2624),
        (32, None, 4000),
    ],
)
def test_a_block_size_that_agrees_with_the_pools_tokens_is_used(
    block_size: int, max_model_len: int | None, pool_tokens: int
) -> None:
    engine_facts = facts(gpu="cpu", echoed=SNAPSHOT.echoed, max_model_len=max_model_len)
    result = assess_at(replace(LABEL_ONLY, block_size=block_size, pool_tokens=pool_tokens), engine_facts)
    assert result.problems == ()
    assert (result.observation.used_tokens, result.observation.pool_bytes) == (3200, 128 * 32 * 1024)


def test_before_0_32_the_label_is_what_one_gpu_stores_of_a_block() -> None:
    shared = facts(
        gpu="H200",
        echoed=SNAPSHOT.echoed,
        flags={"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    )
    result = assess_at(replace(LABEL_ONLY, pool_tokens=2 * 4096), shared)
    assert result.problems == ()
    assert (result.observation.block_size, result.observation.used_tokens) == (64, 6400)


def test_data_parallel_engines_with_a_few_blocks_more_or_less_are_no_contradiction() -> None:
    # 64 and 66 blocks, told as 130 for both; the tokens are those of the first.
    seen = replace(LABEL_ONLY, num_blocks=65, pool_tokens=2048, max_concurrency=1.0)
    assert assess_at(replace(seen, blocks_are_shared=True)).problems == ()
    wrong = replace(seen, blocks_are_shared=True, block_size=4)
    assert len(assess_at(wrong).problems) == 1


@pytest.mark.parametrize("with_label_only", [False, True])
@pytest.mark.parametrize("name", [n for n in capture_names() if n.startswith(("gqa", "dp2", "offload"))])
def test_no_recorded_page_of_a_pool_with_one_group_contradicts_itself(
    name: str, *, with_label_only: bool
) -> None:
    page = parse_page(capture(name))
    assert isinstance(page, VllmPage)
    for engine in page.engines:
        length = round((engine.pool_tokens or 0) / (engine.max_concurrency or 1))
        known = facts(gpu="cpu", echoed=engine.echoed, max_model_len=length)
        snapshot = replace(engine, attention_block_size=None) if with_label_only else engine
        result = assess_at(snapshot, known)
        assert result.problems == ()
        assert result.observation.block_size == 32


def test_up_to_0_10_1_the_usage_counts_the_null_block() -> None:
    # 101 of 128 blocks are not free, one of them the null block.
    old = replace(SNAPSHOT, kv_usage_ratio=101 / 128)
    for version, used in (("0.10.1", 100), ("0.10.2", 100)):
        snapshot = old if version == "0.10.1" else SNAPSHOT
        seen = assess_at(snapshot, facts(gpu="cpu", echoed=SNAPSHOT.echoed, version=version)).observation
        assert (seen.used_blocks, seen.free_blocks) == (used, 27), version
    idle = replace(SNAPSHOT, kv_usage_ratio=1 / 128)
    seen = assess_at(idle, facts(gpu="cpu", echoed=SNAPSHOT.echoed, version="0.9.2")).observation
    assert (seen.used_blocks, seen.free_blocks) == (0, 127)


def test_a_concurrency_is_rounded_to_whole_blocks_and_not_cut() -> None:
    # 128 blocks / 3.0476 = 42.0003: printing the float must not lose a block.
    unknown = replace(facts(gpu="cpu", max_model_len=1000), model=None)
    result = assess_at(replace(SNAPSHOT, max_concurrency=128 / 43 + 1e-9), unknown)
    assert [row.blocks_per_session for row in result.sessions] == [43]


@pytest.mark.parametrize("num_blocks", [None, 0, 1])
def test_a_pool_without_a_usable_block_gives_no_usage(num_blocks: int | None) -> None:
    seen = assess_at(replace(SNAPSHOT, num_blocks=num_blocks)).observation
    assert (seen.usable_blocks, seen.used_blocks, seen.free_blocks) == (None, None, None)


def test_numbers_older_than_three_ticks_are_withheld_and_nothing_else() -> None:
    engine = assess_at(SNAPSHOT)
    replica = ReplicaAssessment(
        replica="a", url="http://a:1", interval_seconds=5.0, engines=(engine,), last_success_at=1000.0
    )
    other = replace(replica, replica="b", last_success_at=1014.0)
    fleet = FleetAssessment((replica, other))
    assert withhold_stale(fleet, 1015.0) == fleet
    shown = withhold_stale(fleet, 1015.1)
    assert [len(r.engines) for r in shown.replicas] == [0, 1]
    assert [r.replica for r in shown.replicas] == ["a", "b"]


def test_numbers_of_a_time_to_come_are_withheld() -> None:
    # The clock was set back: how old they are cannot be told.
    replica = ReplicaAssessment(
        replica="a",
        url="http://a:1",
        interval_seconds=5.0,
        engines=(assess_at(SNAPSHOT),),
        last_success_at=1000.0,
    )
    shown = withhold_stale(FleetAssessment((replica,)), 900.0)
    assert shown.replicas[0].engines == ()
