"""What starts tell of the overhead, what is left out, and the prediction with it."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from kvheadroom.capacity.calibration import (
    Calibration,
    Clamp,
    LearnedOverhead,
    Reliability,
    predict_calibrated,
    with_overhead,
)
from kvheadroom.capacity.calibration_key import CalibrationKey, key_of
from kvheadroom.capacity.calibration_samples import (
    CalibrationSample,
    Excluded,
    Exclusion,
    SampleSource,
    sample_of_engine,
)
from kvheadroom.capacity.facts import EngineFacts, Origin
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.gpu_catalogue import GPUS
from kvheadroom.capacity.logged_sample import sample_of_log
from kvheadroom.capacity.logged_start import LoggedRank, LoggedStart, Printed, StartOutcome
from kvheadroom.capacity.memory import PoolBudget, plan_budget
from kvheadroom.capacity.observation import Observation, observe
from kvheadroom.capacity.overhead import (
    EDITION,
    FITTED,
    MOST_TOO_HIGH,
    MOST_TOO_LOW,
    estimate_overhead,
)
from kvheadroom.capacity.overhead_parts import OverheadEstimate
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.rank_weights import RankWeights, weights_of
from kvheadroom.capacity.readings import EngineSnapshot
from tests.accuracy.calibrated_pools import carried_pairs, public_pairs, worst
from tests.capacity.facts_builder import TINY_LLAMA, facts

LLAMA = {
    **TINY_LLAMA,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
}
SPARSE_LENGTHS = (131_072, 262_144)


def of(
    *,
    config: dict[str, Any] | None = None,
    version: str | None = "0.33.0",
    flags: dict[str, Any] | None = None,
    **rest: Any,
) -> EngineFacts:
    given = {"gpu": "H100", "weights_bytes": None, **rest}
    return facts(config=config or LLAMA, version=version, flags=flags, **given)


def weights(of_facts: EngineFacts) -> int:
    found = weights_of(of_facts)
    assert isinstance(found, RankWeights), found
    return max(found.stage_bytes)


def total(of_facts: EngineFacts) -> int:
    assert of_facts.hbm_bytes is not None
    return of_facts.hbm_bytes.value


def requested(of_facts: EngineFacts) -> int:
    assert of_facts.hbm_bytes is not None
    return math.ceil(of_facts.hbm_bytes.value * of_facts.gpu_memory_utilization.value)


def exact(size: int) -> Printed:
    return Printed(size, 0)


def rank(of_facts: EngineFacts, overhead_bytes: int, *, foreign_bytes: int = 0, **rest: Any) -> LoggedRank:
    """A rank that printed its bytes whole, with its own weights and so much beside them."""
    assert of_facts.hbm_bytes is not None
    total = of_facts.hbm_bytes.value
    left = requested(of_facts) - weights(of_facts) - overhead_bytes
    return LoggedRank(
        **{
            "total": exact(total),
            "free_at_start": exact(total - GIB // 2 - foreign_bytes),
            "utilization": of_facts.gpu_memory_utilization.value,
            "requested": exact(requested(of_facts)),
            "weights": exact(weights(of_facts)),
            "available": exact(left),
            **rest,
        }
    )


def start(*ranks: LoggedRank, outcome: StartOutcome = StartOutcome.STARTED, **rest: Any) -> LoggedStart:
    return LoggedStart(release="0.33.0", model="llama", ranks=ranks, outcome=outcome, **rest)


def sample(of_facts: EngineFacts, *ranks: LoggedRank, name: str = "a", **rest: Any) -> CalibrationSample:
    found = sample_of_log(of_facts, start(*ranks, **rest), start=name, evidence=f"{name}.log")
    assert isinstance(found, CalibrationSample), found
    return found


def excluded(of_facts: EngineFacts, logged: LoggedStart) -> Excluded:
    found = sample_of_log(of_facts, logged, start="a", evidence="a.log")
    assert isinstance(found, Excluded), found
    return found


def learn(of_facts: EngineFacts, *overheads: int, own_start: str = "") -> LearnedOverhead:
    samples = [sample(of_facts, rank(of_facts, size), name=str(n)) for n, size in enumerate(overheads)]
    found = Calibration.of(samples).learned(of_facts, own_start=own_start)
    assert found is not None
    return found


# The bars


def test_public_deployments_that_were_started_twice_come_within_one_percent_after_one_start() -> None:
    pairs = public_pairs()
    assert len(pairs) >= 12
    assert worst(pairs) <= 0.01
    # Before anything was learned most of them do too, and some are far off.
    assert max(abs(pair.raw_error_ratio) for pair in pairs) > 0.05


def test_twenty_generated_ledgers_come_within_one_percent_after_one_good_start_among_bad_ones() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(20):
        base, true, noise = _deployment(chance)
        tp = base.tensor_parallel_size.value
        slow = chance.randrange(tp)
        # All ranks but the slow one have less beside their weights; the pool is what the slow one leaves.
        ranks = [
            _as_printed(rank(base, true if which == slow else round(true * chance.uniform(0.6, 0.95))))
            for which in range(tp)
        ]
        read = [
            sample_of_log(base, logged, start=f"{number}-{index}", evidence="generated")
            for index, logged in enumerate([start(*ranks), *_bad_starts(base, true)])
        ]
        good = [one for one in read if isinstance(one, CalibrationSample)]
        bad = Counter(one.reason for one in read if isinstance(one, Excluded))
        assert len(good) == 1, f"seed {seed}"
        assert bad == {
            Exclusion.FAILED_START: 1,
            Exclusion.UNFINISHED_START: 1,
            Exclusion.FOREIGN_MEMORY: 1,
            Exclusion.IMPOSSIBLE: 2,
            Exclusion.POOL_BY_FLAG: 1,
        }, f"seed {seed}"
        learned = Calibration.of(good).learned(base)
        assert learned is not None, f"seed {seed}"
        assert (learned.samples, learned.reliability) == (1, Reliability.ONE_SAMPLE)
        # The next start, of which the noise is another.
        next_pool = requested(base) - weights(base) - true - noise
        assert abs(_budget(with_overhead(base, learned)) / next_pool - 1) <= 0.01, f"seed {seed}"


def _deployment(chance: random.Random) -> tuple[EngineFacts, int, int]:
    """(facts, true overhead of the slowest rank, how much the next start differs)."""
    gpu = chance.choice(("H100", "H200", "B200", "A100-80GB"))
    tp = chance.choice((1, 2, 4, 8))
    flags = {"tensor_parallel_size": tp, "gpu_memory_utilization": chance.choice((0.85, 0.9, 0.95))}
    base = of(gpu=gpu, flags=flags, version=chance.choice(("0.19.0", "0.27.0", "0.33.0")))
    total = GPUS[gpu].cuda_total_bytes
    assert total is not None
    true = round(total * chance.uniform(0.01, 0.15))
    left = requested(base) - weights(base) - true
    return base, true, round(left * chance.uniform(-0.003, 0.003))


def _as_printed(one: LoggedRank) -> LoggedRank:
    """With the two decimals that a log has."""

    def rounded(figure: Printed | None) -> Printed | None:
        return None if figure is None else Printed(round(round(figure.bytes / GIB, 2) * GIB), GIB // 200)

    return replace(
        one,
        total=rounded(one.total),
        free_at_start=rounded(one.free_at_start),
        requested=rounded(one.requested),
        weights=rounded(one.weights),
        available=rounded(one.available),
    )


def _bad_starts(base: EngineFacts, true: int) -> Iterator[LoggedStart]:
    good = rank(base, true)
    yield start(good, outcome=StartOutcome.FAILED, failure="CUDA out of memory")
    yield start(good, outcome=StartOutcome.CUT)
    assert base.hbm_bytes is not None
    yield start(rank(base, true * 2, foreign_bytes=base.hbm_bytes.value // 10))
    # More left than there was, and weights larger than the card.
    yield start(rank(base, -GIB))
    yield start(replace(good, weights=exact(base.hbm_bytes.value * 2)))
    yield start(replace(good, is_pinned=True))


def _budget(of_facts: EngineFacts) -> int:
    budget = plan_budget(of_facts)
    assert isinstance(budget, PoolBudget)
    return budget.available_bytes


# What one start tells


def test_a_log_gives_the_overhead_back_to_the_byte() -> None:
    base = of()
    assert sample(base, rank(base, 5 * GIB)).overhead_bytes == 5 * GIB


def test_an_overhead_that_only_rounding_puts_below_zero_is_zero() -> None:
    base = of()
    left = requested(base) - weights(base) + 100
    found = sample(base, rank(base, 0, available=Printed(left, 100)))
    assert (found.overhead_bytes, found.uncertainty_bytes) == (0, 100)
    more = excluded(base, start(rank(base, 0, available=Printed(left, 99))))
    assert more.reason is Exclusion.IMPOSSIBLE


def test_the_rank_that_left_the_least_is_taken_and_named() -> None:
    base = of(flags={"tensor_parallel_size": 2})
    found = sample(base, rank(base, 4 * GIB, label="TP0"), rank(base, 5 * GIB, label="TP1"))
    assert found.overhead_bytes == 5 * GIB
    assert found.evidence == "a.log, TP1"


def test_of_a_rank_that_did_not_print_the_pool_tells() -> None:
    base = of(flags={"tensor_parallel_size": 2})
    layout = predict(base).layout
    assert layout is not None
    left = requested(base) - weights(base) - 6 * GIB
    blocks = left // layout.bytes_per_block
    found = sample(base, rank(base, 4 * GIB, label="TP0"), num_gpu_blocks=blocks)
    assert 6 * GIB <= found.overhead_bytes < 6 * GIB + layout.bytes_per_block
    assert found.uncertainty_bytes == layout.bytes_per_block - 1


@pytest.mark.parametrize("version", ["0.19.0", "0.33.0"])
def test_the_pool_is_known_by_its_tokens_as_well(version: str) -> None:
    base = of(version=version)
    layout = predict(base).layout
    assert layout is not None
    blocks = (requested(base) - weights(base) - 6 * GIB) // layout.bytes_per_block
    # One group of 16 tokens a block, and requests of 2,048 tokens: 128 blocks.
    tokens = blocks * 16 if version == "0.19.0" else int(blocks / 128 * 2048)
    found = sample(base, rank(base, 4 * GIB), pool_tokens=tokens)
    assert 6 * GIB <= found.overhead_bytes < 6 * GIB + layout.bytes_per_block


def test_a_pool_that_agrees_with_what_was_left_changes_nothing() -> None:
    base = of()
    layout = predict(base).layout
    assert layout is not None
    blocks = (requested(base) - weights(base) - 5 * GIB) // layout.bytes_per_block
    found = sample(base, rank(base, 5 * GIB), num_gpu_blocks=blocks)
    assert (found.overhead_bytes, found.uncertainty_bytes) == (5 * GIB, 0)


def test_what_the_front_end_takes_for_decoding_is_overhead() -> None:
    base = of()
    found = sample(base, rank(base, 5 * GIB, multimodal_reserve=exact(GIB)))
    assert found.overhead_bytes == 6 * GIB


def test_measured_weights_stand_beside_the_predicted_ones_and_change_no_sum() -> None:
    base = of()
    more = weights(base) + GIB
    left = requested(base) - more - 4 * GIB
    found = sample(base, rank(base, 4 * GIB, weights=exact(more), available=exact(left)))
    # What the prediction's weights are too small by is in the overhead, so that the next pool is right.
    assert (found.overhead_bytes, found.measured_weights_bytes) == (5 * GIB, more)


def test_each_pipeline_stage_is_taken_with_its_own_weights() -> None:
    base = of(flags={"pipeline_parallel_size": 2})
    found = weights_of(base)
    assert isinstance(found, RankWeights)
    ranks = [
        LoggedRank(label=f"PP{stage}_TP0", available=exact(requested(base) - held - overhead))
        for stage, held, overhead in zip((0, 1), found.stage_bytes, (3 * GIB, 2 * GIB), strict=True)
    ]
    assert sample(base, *ranks).overhead_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("logged", "reason", "said"),
    [
        (
            start(outcome=StartOutcome.FAILED, failure="out of memory"),
            Exclusion.FAILED_START,
            "out of memory",
        ),
        (start(outcome=StartOutcome.CUT), Exclusion.UNFINISHED_START, "the log ends"),
        (start(), Exclusion.UNKNOWN, "does not say what was left"),
        (start(rank(of(), GIB, is_pinned=True)), Exclusion.POOL_BY_FLAG, "set by a flag"),
        (start(rank(of(), GIB), rank(of(), GIB, is_pinned=True)), Exclusion.POOL_BY_FLAG, "set by a flag"),
        (start(rank(of(), GIB, foreign_bytes=8 * GIB)), Exclusion.FOREIGN_MEMORY, "8.50 GiB"),
        (start(rank(of(), -GIB)), Exclusion.IMPOSSIBLE, "1.00 GiB more than"),
        (start(rank(of(), 50 * GIB)), Exclusion.IMPOSSIBLE, "more than half of the GPU"),
        (start(rank(of(), GIB, cudagraph_estimate=exact(119 * GIB))), Exclusion.IMPOSSIBLE, "implausible"),
    ],
)
def test_a_start_that_tells_nothing_is_left_out_with_the_reason(
    logged: LoggedStart, reason: Exclusion, said: str
) -> None:
    found = excluded(of(), logged)
    assert found.reason is reason
    assert said in found.detail


@pytest.mark.parametrize(("off_ratio", "is_taken"), [(0.014, True), (-0.014, True), (0.016, False)])
def test_a_total_that_no_driver_makes_is_of_another_card(off_ratio: float, is_taken: bool) -> None:  # noqa: FBT001  a row of a table
    base = of()
    other = round(total(base) * (1 + off_ratio))
    budget = math.ceil(other * base.gpu_memory_utilization.value)
    logged = start(
        rank(base, 5 * GIB, total=exact(other), free_at_start=exact(other - GIB), requested=exact(budget))
    )
    found = sample_of_log(base, logged, start="a", evidence="a.log")
    assert isinstance(found, CalibrationSample) == is_taken
    assert is_taken or (isinstance(found, Excluded) and "it is not that card" in found.detail)


@pytest.mark.parametrize(
    ("share", "is_taken"), [(0.76, True), (1 / 0.76, True), (0.74, False), (1 / 0.74, False)]
)
def test_weights_that_are_a_quarter_off_are_of_another_format(share: float, is_taken: bool) -> None:  # noqa: FBT001  a row of a table
    base = of()
    logged = start(rank(base, 5 * GIB, weights=exact(round(weights(base) * share))))
    found = sample_of_log(base, logged, start="a", evidence="a.log")
    assert isinstance(found, CalibrationSample) == is_taken
    assert is_taken or (isinstance(found, Excluded) and "it is another model" in found.detail)


def test_memory_that_a_context_takes_is_not_foreign() -> None:
    # 3.5 of 95 GiB, the most of a public log whose GPU served nobody else.
    base = of(gpu=None, hbm_bytes=95 * GIB)
    assert sample(base, rank(base, GIB, foreign_bytes=3 * GIB)).overhead_bytes == GIB


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flags": {"num_gpu_blocks_override": 100}}, Exclusion.POOL_BY_FLAG),
        ({"flags": {"kv_cache_memory_bytes": 10**9}}, Exclusion.POOL_BY_FLAG),
        ({"version": None}, Exclusion.UNKNOWN),
        ({"gpu": None}, Exclusion.UNKNOWN),
        ({"config": {"architectures": ["NoSuchForCausalLM"]}}, Exclusion.UNKNOWN),
    ],
)
def test_an_engine_that_cannot_be_predicted_gives_no_sample(
    changes: dict[str, Any], reason: Exclusion
) -> None:
    found = excluded(of(**changes), start(rank(of(), GIB)))
    assert found.reason is reason


def test_a_cold_start_is_left_out_on_a_card_that_may_share_its_memory() -> None:
    shared = of(gpu=None, hbm_bytes=80 * GIB)
    found = excluded(shared, start(rank(shared, GIB), is_cold=True))
    assert found.reason is Exclusion.COLD_START
    assert isinstance(sample(shared, rank(shared, GIB), is_cold=False), CalibrationSample)


def test_a_cold_start_counts_while_there_is_no_warm_one() -> None:
    base = of()
    cold = sample(base, rank(base, 6 * GIB), name="cold", is_cold=True)
    warm = sample(base, rank(base, 5 * GIB), name="warm", is_cold=False)
    only, both = Calibration.of([cold]).learned(base), Calibration.of([cold, warm]).learned(base)
    assert only is not None
    assert both is not None
    assert (only.overhead_bytes, both.overhead_bytes, both.samples) == (6 * GIB, 5 * GIB, 1)


# A live engine


def engine(of_facts: EngineFacts, overhead_bytes: int, **rest: Any) -> tuple[EngineSnapshot, Observation]:
    layout = predict(of_facts).layout
    assert layout is not None
    left = requested(of_facts) - weights(of_facts) - overhead_bytes
    shot = EngineSnapshot(
        engine="0", num_blocks=left // layout.bytes_per_block, block_size=16, attention_block_size=16, **rest
    )
    return shot, observe(shot, of_facts, layout)


def of_engine(
    of_facts: EngineFacts, overhead_bytes: int, *, foreign_bytes: int | None = None, **rest: Any
) -> CalibrationSample | Excluded:
    shot, seen = engine(of_facts, overhead_bytes, **rest)
    return sample_of_engine(
        of_facts,
        shot,
        seen,
        start="r/0/1",
        foreign_bytes=foreign_bytes,
        measured_at=1.0,
        evidence="r",
    )


def test_a_live_pool_tells_the_overhead_to_less_than_a_block() -> None:
    base = of()
    found = of_engine(base, 5 * GIB)
    assert isinstance(found, CalibrationSample)
    assert 5 * GIB <= found.overhead_bytes <= 5 * GIB + found.uncertainty_bytes
    # 32 layers x 2 x 8 heads x 128 x 2 B x 16 tokens
    assert found.uncertainty_bytes == 2_097_152 - 1


@pytest.mark.parametrize(
    ("changes", "rest", "reason"),
    [
        ({}, {"sleeping": True}, Exclusion.ASLEEP),
        ({}, {"foreign_bytes": 5 * GIB}, Exclusion.FOREIGN_MEMORY),
        ({}, {"blocks_are_shared": True}, Exclusion.UNKNOWN),
        ({"flags": {"pipeline_parallel_size": 2}}, {}, Exclusion.PIPELINE_STAGES),
    ],
)
def test_a_live_engine_that_tells_nothing_is_left_out(
    changes: dict[str, Any], rest: dict[str, Any], reason: Exclusion
) -> None:
    found = of_engine(of(**changes), GIB, **rest)
    assert isinstance(found, Excluded)
    assert found.reason is reason


def test_a_live_engine_whose_pool_is_not_told_is_left_out() -> None:
    base = of()
    shot = EngineSnapshot(engine="0")
    found = sample_of_engine(
        base,
        shot,
        observe(shot, base, predict(base).layout),
        start="r/0/1",
        foreign_bytes=None,
        measured_at=1.0,
        evidence="r",
    )
    assert isinstance(found, Excluded)
    assert found.reason is Exclusion.UNKNOWN


# Which starts are taken together


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "0.33.1"},
        {"gpu": "H200"},
        {"flags": {"tensor_parallel_size": 2}},
        {"flags": {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}},
        {"flags": {"prefill_context_parallel_size": 2}},
        {"flags": {"data_parallel_size": 2}},
        {"flags": {"enable_expert_parallel": True}},
        {"flags": {"max_num_batched_tokens": 2048}},
        {"flags": {"max_num_seqs": 16}},
        {"flags": {"enforce_eager": True}},
        {"flags": {"kv_cache_dtype": "fp8"}},
        {"flags": {"attention_backend": "FLASHINFER"}},
        {"flags": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}},
        {"flags": {"dtype": "float32"}},
        {"config": {**LLAMA, "num_hidden_layers": 31}},
        {"config": {**LLAMA, "quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_what_the_overhead_depends_on_opens_a_bucket_of_its_own(changes: dict[str, Any]) -> None:
    base, other = of(), of(**changes)
    assert key_of(base) != key_of(other)
    assert Calibration.of([sample(base, rank(base, GIB))]).learned(other) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "0.33.0+cu130"},
        {"flags": {"gpu_memory_utilization": 0.8}},
        {"max_model_len": 1024},
        {"overhead_bytes": 7 * 10**9},
        {"config": {**LLAMA, "transformers_version": "5.0", "eos_token_id": 7}},
        {"config": dict(reversed(LLAMA.items()))},
        # What vLLM takes without it on this card (engine/arg_utils.py).
        {"flags": {"max_num_batched_tokens": 8192}},
    ],
)
def test_what_it_does_not_depend_on_does_not(changes: dict[str, Any]) -> None:
    assert key_of(of()) == key_of(of(**changes))


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_two_quantizations_of_one_method_are_two_formats(name: str) -> None:
    formats = [{"quant_method": "gptq", "bits": bits, "group_size": 128} for bits in (4, 8)]
    four, eight = (key_of(of(config={**LLAMA, name: one})) for one in formats)
    assert isinstance(four, CalibrationKey)
    assert isinstance(eight, CalibrationKey)
    assert four.geometry == eight.geometry
    assert four.weight_format != eight.weight_format


def test_the_length_opens_a_bucket_where_a_workspace_grows_with_it() -> None:
    sparse = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": 256,
        "index_topk": 2048,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "torch_dtype": "bfloat16",
        "vocab_size": 1000,
        "max_position_embeddings": 1_048_576,
    }
    short, long = (of(config=sparse, max_model_len=length) for length in SPARSE_LENGTHS)
    one, other = key_of(short), key_of(long)
    assert isinstance(one, CalibrationKey)
    assert isinstance(other, CalibrationKey)
    assert other.differences(one) == ("max_model_len=131072 in place of 262144",)


def test_graphs_that_an_environment_variable_keeps_out_open_a_bucket() -> None:
    base = of()
    assert base.rules.subtracts_graphs
    usual = sample(base, rank(base, 5 * GIB, graphs_counted=True))
    kept_out = sample(base, rank(base, 2 * GIB, graphs_counted=False))
    assert usual.key == key_of(base)
    assert kept_out.key.differences(usual.key) == ("cuda_graphs_counted=unset in place of false",)
    # Where the release takes none off, none were kept out.
    older = of(version="0.18.0")
    assert not older.rules.subtracts_graphs
    assert sample(older, rank(older, 2 * GIB, graphs_counted=False)).key == key_of(older)


# What is learned


def test_one_start_gives_its_figure_with_the_interval_of_the_estimate() -> None:
    base = of()
    estimate = estimate_overhead(base)
    assert isinstance(estimate, OverheadEstimate)
    learned = learn(base, 5 * GIB)
    assert (learned.samples, learned.reliability) == (1, Reliability.ONE_SAMPLE)
    assert learned.overhead_bytes == 5 * GIB
    assert learned.low_bytes == 5 * GIB - round(MOST_TOO_HIGH * total(base))
    assert learned.high_bytes == 5 * GIB + estimate.high_bytes - estimate.total_bytes
    assert learned.note.endswith("as wide as the estimate's)")


def test_the_interval_of_one_start_is_not_cut_where_the_estimates_own_is_at_zero() -> None:
    base = of(flags={"enforce_eager": True, "max_num_seqs": 16, "max_num_batched_tokens": 2048})
    estimate = estimate_overhead(base)
    assert isinstance(estimate, OverheadEstimate)
    assert estimate.low_bytes == 0
    learned = learn(base, 5 * GIB)
    assert learned.low_bytes == 5 * GIB - round(MOST_TOO_HIGH * total(base))
    # The same where only the key is known, as of an exported sample.
    measured = sample(base, rank(base, 5 * GIB))
    assert Calibration.of([measured]).of_key(measured.key) == learned


def test_one_start_on_a_gpu_of_unknown_memory_claims_no_interval() -> None:
    measured = sample(of(), rank(of(), 5 * GIB))
    unknown = replace(measured, key=replace(measured.key, gpu="A100"))
    learned = Calibration.of([unknown]).of_key(unknown.key)
    assert learned is not None
    assert learned.low_bytes == learned.high_bytes == 5 * GIB
    assert "as wide as" not in learned.note
    assert "n = 1" in learned.note


def test_several_starts_give_their_median_and_all_of_them_the_interval() -> None:
    learned = learn(of(), 5 * GIB, 5 * GIB + 3, 5 * GIB + 100)
    assert learned.overhead_bytes == 5 * GIB + 3
    assert (learned.low_bytes, learned.high_bytes) == (5 * GIB, 5 * GIB + 100)
    assert learned.reliability is Reliability.GOOD


def test_what_each_start_is_rounded_by_is_in_the_interval() -> None:
    base = of()
    samples = [
        replace(sample(base, rank(base, 5 * GIB + more), name=str(more)), uncertainty_bytes=rounding)
        for more, rounding in ((0, 7), (100, 50))
    ]
    learned = Calibration.of(samples).learned(base)
    assert learned is not None
    assert (learned.low_bytes, learned.high_bytes) == (5 * GIB - 50, 5 * GIB + 150)


def test_starts_that_differ_by_more_than_an_estimate_may_be_off_are_not_reliable() -> None:
    wide = round(MOST_TOO_HIGH * total(of())) + round(MOST_TOO_LOW * total(of()))
    assert learn(of(), 5 * GIB, 5 * GIB + wide).reliability is Reliability.GOOD
    assert learn(of(), 5 * GIB, 5 * GIB + wide + 1).reliability is Reliability.SPREAD


def test_one_odd_start_moves_nothing_but_says_so() -> None:
    learned = learn(of(), 5 * GIB, 5 * GIB, 5 * GIB, 30 * GIB)
    assert learned.overhead_bytes == 5 * GIB
    assert learned.high_bytes == 30 * GIB
    assert learned.reliability is Reliability.SPREAD
    assert "not reliable" in learned.note


def test_from_ten_starts_on_the_outermost_tenths_are_left_out_of_the_interval() -> None:
    learned = learn(of(), *(5 * GIB + number for number in range(10)))
    assert (learned.low_bytes, learned.high_bytes) == (5 * GIB + 1, 5 * GIB + 8)


def test_a_start_has_no_say_in_what_is_said_of_itself() -> None:
    base = of()
    samples = [sample(base, rank(base, size * GIB), name=name) for name, size in (("own", 9), ("other", 5))]
    learned = Calibration.of(samples).learned(base, own_start="own")
    assert learned is not None
    assert (learned.overhead_bytes, learned.samples) == (5 * GIB, 1)
    assert Calibration.of(samples[:1]).learned(base, own_start="own") is None


def test_the_same_start_counts_once() -> None:
    base = of()
    twice = [sample(base, rank(base, 5 * GIB), name="a") for _ in range(2)]
    learned = Calibration.of(twice).learned(base)
    assert learned is not None
    assert learned.samples == 1


def test_a_learned_overhead_cannot_leave_less_than_nothing() -> None:
    base = of()
    left = requested(base) - weights(base)
    learned = learn(base, 30 * GIB)
    smaller = of(flags={"gpu_memory_utilization": 0.4})
    found = Calibration.of([sample(base, rank(base, 30 * GIB))]).learned(smaller)
    assert found is not None
    assert learned.clamp is None
    assert found.clamp is Clamp.NOTHING_LEFT
    # What is left of the interval is not the estimate's.
    assert "as wide as" not in found.note
    assert found.note.endswith("; it would be more than the weights leave, and was cut to that")
    assert found.overhead_bytes == found.high_bytes == requested(smaller) - weights(smaller) < left


# Carried over to other settings


def test_settings_that_nobody_started_take_what_was_measured_above_the_estimate() -> None:
    base, wider = of(), of(flags={"tensor_parallel_size": 4})
    known, asked = estimate_overhead(base), estimate_overhead(wider)
    assert isinstance(known, OverheadEstimate)
    assert isinstance(asked, OverheadEstimate)
    found = Calibration.of([sample(base, rank(base, known.total_bytes + GIB))]).carried(wider)
    assert found is not None
    assert found.overhead_bytes == asked.total_bytes + GIB
    assert found.low_bytes <= asked.low_bytes
    assert found.high_bytes >= asked.high_bytes + GIB
    assert found.reliability is Reliability.CARRIED
    assert found.differences == ("tp1 in place of tp4",)
    less = Calibration.of([sample(base, rank(base, known.total_bytes - GIB))]).carried(wider)
    assert less is not None
    assert less.overhead_bytes == asked.total_bytes - GIB
    assert less.high_bytes == asked.high_bytes


def test_a_cold_start_is_carried_over_while_there_is_no_other() -> None:
    base, wider = of(), of(flags={"tensor_parallel_size": 4})
    asked = estimate_overhead(wider)
    known = estimate_overhead(base)
    assert isinstance(known, OverheadEstimate)
    assert isinstance(asked, OverheadEstimate)
    cold = sample(base, rank(base, known.total_bytes + 5 * GIB), name="cold", is_cold=True)
    warm = sample(base, rank(base, known.total_bytes + GIB), name="warm", is_cold=False)
    for samples, more in (([cold], 5 * GIB), ([cold, warm], GIB)):
        found = Calibration.of(samples).carried(wider)
        assert found is not None
        assert (found.samples, found.overhead_bytes) == (1, asked.total_bytes + more)


def test_the_nearest_start_is_carried_over() -> None:
    base, near, asked = of(), of(flags={"max_num_seqs": 64}), of(flags={"max_num_seqs": 32})
    farther = of(flags={"max_num_seqs": 64, "max_num_batched_tokens": 4096})
    far = of(gpu="H200", flags={"max_num_seqs": 32})
    known = (("farther", farther, 2 * GIB), ("near", near, GIB), ("far", far, 3 * GIB))
    estimates = {name: estimate_overhead(one) for name, one, _ in known}
    assert all(isinstance(one, OverheadEstimate) for one in estimates.values())
    samples = [
        sample(one, rank(one, estimates[name].total_bytes + more), name=name)  # type: ignore[union-attr]
        for name, one, more in known
    ]
    found = Calibration.of(samples).carried(asked)
    asked_estimate = estimate_overhead(asked)
    assert found is not None
    assert isinstance(asked_estimate, OverheadEstimate)
    assert found.overhead_bytes == asked_estimate.total_bytes + GIB
    assert Calibration.of(samples).learned(base) is None


@pytest.mark.parametrize(
    "changes", [{"config": {**LLAMA, "num_hidden_layers": 31}}, {"gpu": "H200"}, {"version": "0.32.0"}]
)
def test_another_model_gpu_or_release_is_not_carried_over(changes: dict[str, Any]) -> None:
    base = of()
    assert Calibration.of([sample(base, rank(base, GIB))]).carried(of(**changes)) is None


def test_on_public_starts_carrying_helps_between_settings_and_not_between_gpus_or_releases() -> None:
    near, far = carried_pairs(near=True), carried_pairs(near=False)
    assert len(near) >= 60
    assert len(far) >= 200
    assert median(abs(one.carried_error_ratio) for one in near) < median(
        abs(one.raw_error_ratio) for one in near
    )
    assert median(abs(one.carried_error_ratio) for one in far) > median(
        abs(one.raw_error_ratio) for one in far
    )
    assert sum(one.is_within for one in near) >= 0.95 * len(near)


def test_what_was_measured_against_another_estimate_is_not_carried_over() -> None:
    base = of()
    old = replace(sample(base, rank(base, GIB)), edition=EDITION - 1)
    assert Calibration.of([old]).carried(of(flags={"max_num_seqs": 32})) is None
    # The same settings need no estimate.
    assert Calibration.of([old]).learned(base) is not None


def test_a_carried_overhead_is_not_below_zero() -> None:
    base, small = of(), of(flags={"max_num_batched_tokens": 16, "max_num_seqs": 1, "enforce_eager": True})
    found = Calibration.of([sample(base, rank(base, 0))]).carried(small)
    assert found is not None
    assert (found.overhead_bytes, found.clamp) == (0, Clamp.BELOW_ZERO)


def test_the_edition_is_counted_up_with_the_constants() -> None:
    # Of edition 1; change both together, so that nothing is carried over from one estimate to another.
    assert (EDITION, FITTED.sorting_bytes, FITTED.linked_bytes / GIB) == (1, 38.6, 1.8)


# The calibrated prediction


def test_the_calibrated_prediction_has_the_learned_overhead_and_all_else_of_the_raw_one() -> None:
    base = of()
    learned = learn(base, 5 * GIB)
    found = predict_calibrated(base, learned)
    raw = predict(base)
    assert found.facts.overhead_bytes.value == 5 * GIB
    assert found.facts.overhead_bytes.origin is Origin.LEARNED
    assert found.prediction.layout == raw.layout
    assert raw.layout is not None
    assert found.prediction.pool is not None
    left = requested(base) - weights(base) - 5 * GIB
    assert found.prediction.pool.num_blocks == left // raw.layout.bytes_per_block
    assert found.fewest is not None
    assert found.most is not None
    assert found.fewest.num_blocks < found.prediction.pool.num_blocks < found.most.num_blocks


def test_a_learned_overhead_is_no_assumption() -> None:
    base = of()
    assert "overhead_bytes" in dict(base.assumed())
    assert "overhead_bytes" not in dict(with_overhead(base, learn(base, 5 * GIB)).assumed())


def test_a_sample_says_where_it_was_taken() -> None:
    base = of()
    assert sample(base, rank(base, GIB)).source is SampleSource.LOG
