"""What a start-up log measured beside what was predicted: which rank binds, what stays unused, the parts of an overhead."""

from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.calibration import Calibration
from kvheadroom.capacity.calibration_key import key_of
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.logged_figures import (
    Beside,
    GraphEstimate,
    LoggedFigures,
    Part,
    Spare,
    figures_of_log,
)
from kvheadroom.capacity.logged_sample import sample_of_log
from kvheadroom.capacity.logged_start import LoggedRank, LoggedStart, Printed, StartOutcome
from kvheadroom.capacity.prediction import predict
from tests.capacity.facts_builder import facts
from tests.made_logs import LLAMA

CUT = Excluded(Exclusion.UNFINISHED_START, "cut")
UNKNOWN = Beside(None, None)


def gib(value: float) -> Printed:
    return Printed(round(value * GIB), round(GIB / 200))


def engine(gpu: str | None = "H100", **flags: object) -> EngineFacts:
    return facts(config=LLAMA, flags=flags, gpu=gpu, hbm_bytes=80 * GIB, max_model_len=8192)


def start(*ranks: LoggedRank, **said: object) -> LoggedStart:
    values: dict[str, object] = {"release": "0.33.0", "model": "llama", "outcome": StartOutcome.STARTED}
    return LoggedStart(ranks=ranks, **{**values, **said})  # type: ignore[arg-type]


def figures(known: EngineFacts | None, logged: LoggedStart) -> LoggedFigures:
    found = figures_of_log(known, logged, CUT)
    assert found is not None
    return found


def test_of_a_log_that_tells_nothing_of_what_was_left_there_are_no_figures() -> None:
    assert figures_of_log(engine(), start(LoggedRank(weights=gib(15))), CUT) is None


def test_without_facts_the_logs_own_figures_stand_alone() -> None:
    found = figures(None, start(LoggedRank(available=gib(50), total=gib(80), weights=gib(15))))
    assert (found.pool, found.total) == (Beside(gib(50), None), Beside(gib(80), None))
    assert (found.weights, found.budget, found.overhead) == (Beside(gib(15), None), UNKNOWN, UNKNOWN)
    assert found.pool.difference_ratio is None


def test_each_figure_stands_beside_its_raw_prediction() -> None:
    known = engine(gpu_memory_utilization=0.9)
    logged = start(LoggedRank(available=gib(54), total=gib(80), requested=gib(72), weights=gib(15)))
    outcome = sample_of_log(known, logged, start="a", evidence="e")
    assert isinstance(outcome, CalibrationSample)
    found = figures_of_log(known, logged, outcome)
    assert found is not None
    budget = predict(known).budget
    assert budget is not None
    assert found.pool.predicted_bytes == budget.available_bytes
    assert (found.total.predicted_bytes, found.budget.predicted_bytes) == (80 * GIB, 72 * GIB)
    # 8.03e9 parameters of 2 bytes
    assert found.weights.predicted_bytes == 16_060_522_496
    assert found.overhead.measured == Printed(72 * GIB - 16_060_522_496 - 54 * GIB, gib(1).uncertainty_bytes)
    assert found.overhead.predicted_bytes == known.overhead_bytes.value
    pool = predict(known).pool
    assert pool is not None
    assert found.predicted_pool_tokens == pool.pool_tokens
    assert found.weights.difference_ratio == pytest.approx(15 * GIB / 16_060_522_496 - 1)


@pytest.mark.parametrize("flags", [{"gpu_memory_utilization": 0.1}, {"kv_cache_memory_bytes": 10 * GIB}])
def test_weights_are_predicted_where_the_budget_leaves_nothing_or_a_flag_gives_the_pool(
    flags: dict[str, Any],
) -> None:
    found = figures(engine(**flags), start(LoggedRank(available=gib(10))))
    assert found.weights.predicted_bytes == 16_060_522_496


def test_the_rank_that_leaves_the_least_binds_and_the_rest_of_the_others_is_unused() -> None:
    ranks = [
        LoggedRank(label=f"TP{index}", available=gib(left))
        for index, left in enumerate((50, 47.5, 49, 50.25))
    ]
    found = figures(engine(tensor_parallel_size=4), start(*ranks))
    assert found.binding == "TP1"
    both = 2 * gib(1).uncertainty_bytes
    assert found.spares == (
        Spare("TP3", Printed(round(2.75 * GIB), both)),
        Spare("TP0", Printed(round(2.5 * GIB), both)),
        Spare("TP2", Printed(round(1.5 * GIB), both)),
    )


def test_of_pipeline_stages_the_one_with_the_fewest_blocks_binds() -> None:
    """A stage of twice the layers has blocks twice as wide: 40 GiB of it are as many as 20 GiB of the other."""
    config = LLAMA | {"num_hidden_layers": 3}
    known = facts(
        config=config,
        flags={"pipeline_parallel_size": 2},
        gpu="H100",
        hbm_bytes=80 * GIB,
        max_model_len=8192,
    )
    layout = predict(known).layout
    assert layout is not None
    first, second = layout.stage_bytes_per_block
    assert {first, second} == {2 * min(first, second), min(first, second)}
    wide, narrow = ("PP0_TP0", "PP1_TP0") if first > second else ("PP1_TP0", "PP0_TP0")
    found = figures(
        known, start(LoggedRank(label=wide, available=gib(40)), LoggedRank(label=narrow, available=gib(21)))
    )
    assert found.binding == wide
    assert found.spares == (Spare(narrow, Printed(GIB, 2 * gib(1).uncertainty_bytes)),)


def test_a_pool_smaller_than_the_one_rank_that_prints_left_shows_a_rank_that_does_not() -> None:
    known = engine(tensor_parallel_size=2)
    layout = predict(known).layout
    assert layout is not None
    blocks = 45 * GIB // layout.bytes_per_block
    found = figures(known, start(LoggedRank(label="TP0", available=gib(45.5)), num_gpu_blocks=blocks))
    assert found.unseen is not None
    assert found.unseen.bytes == round(45.5 * GIB) - blocks * layout.bytes_per_block
    all_of_it = round(45.5 * GIB) // layout.bytes_per_block
    found = figures(known, start(LoggedRank(label="TP0", available=gib(45.5)), num_gpu_blocks=all_of_it))
    assert found.unseen is None


def test_the_frontends_reserve_is_taken_off_what_was_left() -> None:
    found = figures(engine(), start(LoggedRank(available=gib(50), multimodal_reserve=gib(2))))
    assert found.pool.measured == Printed(48 * GIB, 2 * gib(1).uncertainty_bytes)


GRAPHS = "CUDA graphs by vLLM's estimate"


@pytest.mark.parametrize(
    ("release", "rank", "parts"),
    [
        (
            "0.26.0",
            LoggedRank(weights=gib(15), non_torch=gib(0.5), activation=gib(6), cudagraph_estimate=gib(5)),
            (Part("outside PyTorch", gib(0.5)), Part("activations", gib(6)), Part(GRAPHS, gib(5))),
        ),
        (
            "0.27.0",
            LoggedRank(weights=gib(15), consumed=gib(15.5), activation=gib(6), cudagraph_estimate=gib(5)),
            (
                Part("outside PyTorch", Printed(round(0.5 * GIB), 2 * gib(1).uncertainty_bytes)),
                Part(f"activations, {GRAPHS} in it", gib(6)),
                Part(GRAPHS, gib(5)),
            ),
        ),
        (
            "0.27.0",
            LoggedRank(consumed=gib(15), activation=gib(6), cudagraph_estimate=gib(5), graphs_counted=False),
            (Part("activations", gib(6)), Part(f"{GRAPHS}, which it did not take off", gib(5))),
        ),
        (
            "0.19.0",
            # 72 - 15 - 0.5 - 6 - 40 leave 10.5, so something was taken off.
            LoggedRank(
                requested=gib(72),
                weights=gib(15),
                non_torch=gib(0.5),
                activation=gib(6),
                cudagraph_estimate=gib(5),
            ),
            (Part("outside PyTorch", gib(0.5)), Part("activations", gib(6)), Part(GRAPHS, gib(5))),
        ),
        (
            "0.19.0",
            # 15 + 0.5 + 6 + 40 are the budget.
            LoggedRank(
                requested=gib(61.5),
                weights=gib(15),
                non_torch=gib(0.5),
                activation=gib(6),
                cudagraph_estimate=gib(5),
            ),
            (
                Part("outside PyTorch", gib(0.5)),
                Part("activations", gib(6)),
                Part(f"{GRAPHS}, which it did not take off", gib(5)),
            ),
        ),
        (
            "0.18.1",
            LoggedRank(activation=gib(6), cudagraph_estimate=gib(5), graphs_counted=True),
            (Part(f"activations, {GRAPHS} in it", gib(6)), Part(GRAPHS, gib(5))),
        ),
    ],
)
def test_the_parts_are_those_that_the_release_tells(
    release: str, rank: LoggedRank, parts: tuple[Part, ...]
) -> None:
    logged = start(replace(rank, available=gib(40)), release=release)
    assert figures(None, logged).parts == parts


def test_an_estimate_of_cuda_graphs_is_off_by_a_share_of_what_they_took() -> None:
    assert GraphEstimate(gib(4.99), gib(4.13)).off_ratio == pytest.approx(0.86 / 4.13)
    assert GraphEstimate(gib(0.5), gib(0)).off_ratio is None


# What is learned where only the key is known


def sample(known: EngineFacts, name: str, overhead: int) -> CalibrationSample:
    left = 80 * GIB * 9 // 10 - 16_060_522_496 - overhead
    logged = start(LoggedRank(available=Printed(left, 0)))
    made = sample_of_log(known, logged, start=name, evidence=name)
    assert isinstance(made, CalibrationSample)
    return made


@pytest.mark.parametrize("gpu", ["H100", None])
def test_a_key_alone_tells_what_facts_of_it_tell(gpu: str | None) -> None:
    known = engine(gpu=gpu, gpu_memory_utilization=0.9)
    key = key_of(known)
    assert not isinstance(key, str)
    one = Calibration.of([sample(known, "a", 5 * GIB)])
    by_key, by_facts = one.of_key(key), one.learned(known)
    assert by_key is not None
    assert by_facts is not None
    assert by_key.overhead_bytes == by_facts.overhead_bytes == 5 * GIB
    # The widths are shares of the card's memory, here of 80 GiB or of what the catalogue has for the name.
    total = 80 * GIB if gpu is None else 85_029_158_912
    assert by_key.high_bytes - by_key.overhead_bytes == pytest.approx(0.012 * total, rel=0.01)
    assert by_key.overhead_bytes - by_key.low_bytes == pytest.approx(0.029 * total, rel=0.01)
    many = Calibration.of(sample(known, f"{n}", n * GIB) for n in (3, 4, 6))
    assert many.of_key(key) == many.learned(known)
    assert many.of_key(key, own_start="4") != many.of_key(key)
    assert Calibration().of_key(key) is None


# Logs of another engine than the facts are of


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        (LoggedRank(label="TP2"), "rank TP2 is of an engine on more GPUs than tensor_parallel_size=2 gives"),
        (
            LoggedRank(label="PP1_TP0"),
            "rank PP1_TP0 is of an engine on more GPUs than pipeline_parallel_size=1 gives",
        ),
        (LoggedRank(label="TP0", total=gib(78.7)), "the GPU has 78.70 GiB, and 80.00 GiB are taken for it"),
        (LoggedRank(label="TP0", weights=gib(5.5)), "loading took 5.50 GiB, and 7.48 GiB are the weights"),
        (LoggedRank(label="TP0", weights=gib(10.1)), "loading took 10.10 GiB, and 7.48 GiB are the weights"),
    ],
)
def test_a_log_of_another_engine_is_impossible(rank: LoggedRank, told: str) -> None:
    known = engine(tensor_parallel_size=2, gpu_memory_utilization=0.9)
    outcome = sample_of_log(known, start(replace(rank, available=gib(60))), start="a", evidence="e")
    assert isinstance(outcome, Excluded)
    assert outcome.reason is Exclusion.IMPOSSIBLE
    assert outcome.detail.startswith(told)


@pytest.mark.parametrize(
    "rank",
    [
        LoggedRank(label="TP1", total=gib(78.9), weights=gib(5.7)),
        LoggedRank(label="TP1", weights=gib(9.9)),
        # Another process holds them.
        LoggedRank(label="TP1", weights=gib(0.1), external_weights=gib(7.5)),
    ],
)
def test_a_log_that_differs_as_drivers_and_formats_do_is_taken(rank: LoggedRank) -> None:
    known = engine(tensor_parallel_size=2, gpu_memory_utilization=0.9)
    outcome = sample_of_log(known, start(replace(rank, available=gib(60))), start="a", evidence="e")
    assert isinstance(outcome, CalibrationSample)
    assert outcome.overhead_bytes == pytest.approx((72 - 60) * GIB - 16_060_522_496 / 2, abs=GIB / 100)
