"""Memory that is held for nothing or will be missed: each finding fires at its threshold, and is silent below and where it cannot be known."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.fleet import FleetAssessment, GpuAssessment, GpuRest, ReplicaAssessment, ReplicaState
from kvheadroom.capacity.gpu_assignment import Assignment, GpuAssignments, OthersMemory
from kvheadroom.capacity.gpu_ledger import gpu_rests
from kvheadroom.capacity.gpus import GpuReading, GpuSnapshot
from kvheadroom.capacity.memory_findings import Finding, MemoryFinding, memory_findings
from kvheadroom.capacity.readings import EchoedFlags, EngineSnapshot
from tests.capacity.test_ledger import GIB, on_gpu

# 4 layers x 2 (K, V) x 2 heads x 32 x 2 B x 16 tokens.
BLOCK = 16_384
TOTAL = 79 * GIB
# The sampler of 1,024 requests (vLLM's default on an H100) over 4,096 words, 15.8 B each: more than a layer of 8,192 tokens takes.
STEP = 66_270_003
MIB = 2**20


def engine(num_blocks: int = 65 * GIB // BLOCK, **said: Any) -> Assessment:
    snapshot = EngineSnapshot(
        engine="0",
        model_name="m",
        num_blocks=num_blocks,
        block_size=16,
        attention_block_size=16,
        sleeping=said.pop("sleeping", None),
        echoed=said.get("echoed", EchoedFlags()),
    )
    flags = {"gpu_memory_utilization": 0.9, **said.pop("flags", {})}
    facts = on_gpu(**{"hbm_bytes": TOTAL, "overhead_bytes": None, "flags": flags, **said})
    return assess(Reading(facts=facts, snapshot=snapshot, taken_at=0.0), ())


def held(one: Assessment) -> int:
    """Weights and pool of one GPU; of a pool that a flag gives the pool alone, whose weights nobody asks for."""
    assert one.prediction.budget is not None
    assert one.observation.pool_bytes is not None
    weights = one.prediction.budget.weights
    return one.observation.pool_bytes + (0 if weights is None else weights.stage_bytes[0])


def machine(
    *engines: Assessment,
    free: tuple[int, ...] = (6 * GIB,),
    others: int | None = 0,
    rests: tuple[int, ...] = (GIB,),
    first: tuple[int, ...] = (),
    state: ReplicaState = ReplicaState.SERVING,
    **gpu: Any,
) -> FleetAssessment:
    """A replica on one GPU of 80 GiB for each of `free`."""
    gpus = tuple(
        replace(
            GpuSnapshot(
                gpu=f"GPU-{i}",
                name="NVIDIA H100 80GB HBM3",
                index=i,
                total_bytes=80 * GIB,
                reserved_bytes=GIB,
                used_bytes=79 * GIB - size,
                free_bytes=size,
                accounting="v2",
            ),
            **gpu,
        )
        for i, size in enumerate(free)
    )
    own = [held(engines[0]) + rest for rest in rests] if engines and others is not None else []
    return FleetAssessment(
        (ReplicaAssessment(replica="r", url="", interval_seconds=5.0, state=state, engines=engines),),
        gpus=GpuAssessment(
            reading=GpuReading(taken_at=0.0, duration_seconds=0.0, gpus=gpus),
            interval_seconds=5.0,
            runs=GpuAssignments(
                assigned=tuple(Assignment(gpu.gpu, "r", "config") for gpu in gpus),
                others=tuple(OthersMemory(f"GPU-{i}", "r", others or 0, size) for i, size in enumerate(own)),
            ),
            first_rests=tuple(GpuRest(f"GPU-{i}", "r", size) for i, size in enumerate(first)),
        ),
    )


def only(fleet: FleetAssessment) -> MemoryFinding:
    [found] = memory_findings(fleet)
    return found


NO_GPUS = FleetAssessment(())


def alone(one: Assessment) -> FleetAssessment:
    """A replica whose GPUs nobody knows."""
    replica = ReplicaAssessment(replica="r", url="", interval_seconds=5.0, engines=(one,))
    return replace(NO_GPUS, replicas=(replica,))


def test_a_pool_that_all_requests_at_once_cannot_half_fill_is_told_with_the_bytes_that_a_pin_gives_back() -> (
    None
):
    # 32 requests of 2,048 tokens: 128 blocks each, 4,096 together; 10,001 blocks are 10,000 usable ones.
    found = only(alone(engine(10_001, flags={"max_num_seqs": 32})))
    assert (found.finding, found.engine, found.model_name, found.gpu) == (
        Finding.POOL_ABOVE_DEMAND,
        "0",
        "m",
        "",
    )
    assert found.bytes == (10_000 - 4_096) * BLOCK
    assert found.why == (
        "32 requests (max_num_seqs) of max_model_len tokens fill 4,096 of 10,000 blocks; the other 0.09 GiB of each GPU hold "
        "nothing but cached prefixes"
    )
    assert found.way_out.startswith(f"--kv-cache-memory-bytes {4_097 * BLOCK} (vLLM 0.11 and later)")
    assert "cached prefixes may be worth them" in found.way_out
    # Without prefix caching nothing is ever in them.
    off = engine(10_001, flags={"max_num_seqs": 32}, echoed=EchoedFlags(enable_prefix_caching=False))
    assert only(alone(off)).why.endswith("of each GPU are never used")
    assert "prefixes" not in only(alone(off)).way_out
    given = only(alone(engine(10_001, flags={"max_num_seqs": 32, "num_gpu_blocks_override": 10_001})))
    assert given.way_out.startswith("--num-gpu-blocks-override 4097 gives")


@pytest.mark.parametrize(
    "one",
    [
        # 8,192 usable blocks are just filled by half.
        engine(8_193, flags={"max_num_seqs": 32}),
        # Nobody said max_num_seqs, and the command line was not read.
        engine(10_001_000),
        engine(10_001, flags={"max_num_seqs": 32}, max_model_len=None),
        engine(10_001, flags={"max_num_seqs": 32}, sleeping=True),
        engine(1, flags={"max_num_seqs": 32}),
    ],
)
def test_no_pool_is_called_too_large_where_requests_may_fill_half_of_it_or_nobody_knows(
    one: Assessment,
) -> None:
    assert memory_findings(alone(one)) == ()


def test_a_default_of_max_num_seqs_counts_where_the_command_line_was_read_whole() -> None:
    line = CommandLine(flags={"gpu_memory_utilization": 0.9})
    # 1,024 requests of 128 blocks: 131,072 of 300,000.
    assert only(alone(engine(300_001, command_line=line))).bytes == (300_000 - 131_072) * BLOCK
    doubtful = replace(line, doubts=("it was cut short",))
    assert memory_findings(alone(engine(300_001, command_line=doubtful))) == ()


def test_what_is_free_outside_the_budget_is_proposed_to_the_pool_less_a_step_and_a_margin() -> None:
    # Free 6 GiB - step - 2% of 79 GiB = 4.36 GiB, less than the 7.9 GiB outside; (71.1 + 4.36) / 79 = 0.955.
    found = only(machine(engine()))
    assert found.finding is Finding.ROOM_OUTSIDE_BUDGET
    assert found.gpu_memory_utilization == 0.95
    assert found.bytes == math.ceil(TOTAL * 0.95) - math.ceil(TOTAL * 0.9)
    assert found.bytes // BLOCK == 258_867
    assert found.way_out == (
        "--gpu-memory-utilization 0.95 in place of 0.9 would add 3.95 GiB to each GPU's pool: 258,867 blocks, or 2,022.4 requests of "
        "max_model_len tokens"
    )
    assert found.why == (
        "6.00 GiB are free on its fullest GPU; 0.06 GiB of them a step may take, and 1.58 GiB should stay free"
    )


def test_no_more_is_proposed_than_is_outside_the_budget_however_much_is_free() -> None:
    # What is free above 7.9 GiB is inside the budget, not yet taken: (71.1 + 7.9 - 1.58) / 79 = 0.98.
    assert only(machine(engine(), free=(20 * GIB,))).gpu_memory_utilization == 0.98


def test_the_fullest_gpu_decides() -> None:
    two = engine(flags={"tensor_parallel_size": 2})
    # On it (71.1 + 4 - 0.06 - 1.58) / 79 = 0.929.
    found = only(machine(two, free=(6 * GIB, 4 * GIB), rests=(GIB, GIB)))
    assert found.gpu_memory_utilization == 0.92


def test_where_the_overhead_was_said_a_step_may_take_all_that_vllm_found() -> None:
    one = engine(overhead_bytes=GIB)
    assert one.ledger is not None
    taken = one.ledger.unexplained_bytes
    assert taken is not None
    # Budget 71.1 GiB - pool 65 GiB - weights: 6.09 GiB, of which 1 GiB was said.
    assert taken + GIB == math.ceil(TOTAL * 0.9) - held(one)
    # Of 10 GiB free 2.33 GiB are left.
    assert only(machine(one, free=(10 * GIB,))).gpu_memory_utilization == 0.92
    assert memory_findings(machine(one, free=(8 * GIB,))) == ()


@pytest.mark.parametrize(
    "fleet",
    [
        # (71.1 + 2.4 - 0.06 - 1.58) / 79 = 0.909, not 0.91.
        machine(engine(), free=(int(2.4 * GIB),)),
        # Another process, and a driver that does not tell.
        machine(engine(), others=129 * MIB),
        machine(engine(), others=None),
        machine(engine(), accounting="host"),
        # The memory that was said is not of this card.
        machine(engine(50 * GIB // BLOCK, hbm_bytes=60 * GIB)),
        machine(engine(hbm_bytes=81 * GIB)),
        # One of its GPUs is not of this machine.
        machine(engine(flags={"tensor_parallel_size": 2})),
        # The pool is given by a flag.
        machine(engine(flags={"kv_cache_memory_bytes": 65 * GIB})),
        machine(engine(sleeping=True)),
        # More than the budget leaves: the weights are not what is assumed.
        machine(engine(72 * GIB // BLOCK)),
        replace(machine(engine()), gpus=None),
        NO_GPUS,
    ],
)
def test_no_room_is_told_where_there_is_none_or_it_is_not_known(fleet: FleetAssessment) -> None:
    assert memory_findings(fleet) == ()


def test_a_pool_above_the_demand_is_not_told_to_grow() -> None:
    found = only(machine(engine(flags={"max_num_seqs": 16})))
    assert found.finding is Finding.POOL_ABOVE_DEMAND


def test_a_small_rest_that_belongs_to_no_process_is_no_other_process() -> None:
    assert only(machine(engine(), others=128 * MIB)).finding is Finding.ROOM_OUTSIDE_BUDGET


def test_two_replicas_on_a_gpu_have_no_room_to_share() -> None:
    fleet = machine(engine())
    assert fleet.gpus is not None
    runs = fleet.gpus.runs
    shared = replace(runs, assigned=(*runs.assigned, Assignment("GPU-0", "s", "config")))
    assert memory_findings(replace(fleet, gpus=replace(fleet.gpus, runs=shared))) == ()


def test_memory_of_others_beyond_what_the_utilization_leaves_them_would_stop_the_next_start() -> None:
    # 0.9 of 79 GiB leaves 7.9 GiB to others; (79 - 8 - 1.58) / 79 = 0.878.
    found = only(machine(engine(), others=8 * GIB, free=(GIB,)))
    assert (found.finding, found.gpu, found.engine) == (Finding.FOREIGN_MEMORY, "GPU-0", "")
    assert (found.bytes, found.gpu_memory_utilization) == (8 * GIB, 0.87)
    assert found.why.startswith(
        "other processes hold 8.00 GiB, and gpu_memory_utilization=0.9 leaves them 7.90 GiB: once stopped, vLLM would not start"
    )
    assert found.way_out == "stop them, or start vLLM with --gpu-memory-utilization 0.87 or less"
    # Also where a flag gives the pool: vLLM asks all the same.
    pinned = engine(flags={"kv_cache_memory_bytes": 65 * GIB})
    assert only(machine(pinned, others=8 * GIB)).finding is Finding.FOREIGN_MEMORY
    # Where they leave no room at all there is nothing to be lowered to.
    full = only(machine(engine(), others=78 * GIB, rests=(0,)))
    assert (full.way_out, full.gpu_memory_utilization) == ("stop them", None)


@pytest.mark.parametrize(
    "fleet",
    [
        machine(engine(), others=TOTAL - math.ceil(TOTAL * 0.9), free=(GIB,)),
        machine(engine(hbm_bytes=60 * GIB), others=70 * GIB),
        # vLLM's own default, which the engine does not repeat.
        machine(engine(flags={"gpu_memory_utilization": None}), others=70 * GIB),
        machine(others=70 * GIB),
    ],
)
def test_memory_of_others_that_vllm_leaves_to_them_or_that_cannot_be_judged_is_no_finding(
    fleet: FleetAssessment,
) -> None:
    assert memory_findings(fleet) == ()


def test_an_overhead_that_grew_by_more_than_a_step_and_a_margin_is_told() -> None:
    # From 1 GiB by 2 GiB; a step 0.06 GiB, a margin of 2% of 80 GiB: 1.66 GiB are usual.
    found = only(machine(engine(), free=(GIB,), first=(GIB,), rests=(3 * GIB,)))
    assert (found.finding, found.gpu, found.bytes) == (Finding.GREW_SINCE_START, "GPU-0", 2 * GIB)
    assert found.why == (
        "what its processes hold beside weights and pool grew by 2.00 GiB since it was first seen, to 3.00 GiB; a step may take "
        "0.06 GiB of that"
    )
    usual = GIB + STEP + round(0.02 * 80 * GIB)
    assert memory_findings(machine(engine(), free=(GIB,), first=(GIB,), rests=(usual,))) == ()
    assert only(machine(engine(), free=(GIB,), first=(GIB,), rests=(usual + 1,))).bytes == usual + 1 - GIB


@pytest.mark.parametrize(
    "fleet",
    [
        machine(engine(), free=(GIB,), rests=(30 * GIB,)),
        machine(engine(), free=(GIB,), first=(GIB,), rests=(30 * GIB,), others=None),
        machine(engine(), free=(GIB,), first=(GIB,), rests=(30 * GIB,), state=ReplicaState.DOWN),
        machine(engine(sleeping=True), free=(GIB,), first=(GIB,), rests=(30 * GIB,)),
        # What a step takes is not known.
        machine(
            engine(flags={"kv_cache_memory_bytes": 65 * GIB}), free=(GIB,), first=(GIB,), rests=(30 * GIB,)
        ),
    ],
)
def test_no_growth_is_told_without_a_beginning_or_without_the_bytes_of_its_processes(
    fleet: FleetAssessment,
) -> None:
    assert memory_findings(fleet) == ()


def test_a_gpu_that_holds_more_than_the_others_is_told_with_what_those_leave_unused() -> None:
    four = engine(flags={"tensor_parallel_size": 4})
    rests = (GIB, GIB * 5 // 4, GIB * 3 // 2, GIB)
    found = only(machine(four, free=(GIB,) * 4, rests=rests))
    assert (found.finding, found.gpu) == (Finding.SLOWEST_RANK, "GPU-2")
    # 0.5 + 0.25 + 0 + 0.5 GiB.
    assert found.bytes == GIB * 5 // 4
    assert found.why.startswith(
        "its processes hold 1.50 GiB beside weights and pool, on another GPU 1.00 GiB"
    )


@pytest.mark.parametrize(
    "fleet",
    [
        machine(engine(flags={"tensor_parallel_size": 2}), free=(GIB,) * 2, rests=(GIB, GIB + 128 * MIB)),
        # The bytes of one are not known; one is elsewhere; two engines, and nobody knows which runs where.
        machine(engine(flags={"tensor_parallel_size": 2}), free=(GIB,) * 2, rests=(2 * GIB,)),
        machine(engine(flags={"tensor_parallel_size": 4}), free=(GIB,) * 2, rests=(GIB, 2 * GIB)),
        machine(engine(), engine(), free=(GIB,) * 2, rests=(GIB, 2 * GIB)),
    ],
)
def test_no_rank_is_called_the_slowest_where_they_hold_as_much_or_not_all_are_known(
    fleet: FleetAssessment,
) -> None:
    assert memory_findings(fleet) == ()


def test_the_rest_of_a_gpu_is_what_the_replicas_own_processes_hold_beside_weights_and_pool() -> None:
    assert gpu_rests(machine(engine(), rests=(3 * GIB,))) == (GpuRest("GPU-0", "r", 3 * GIB),)
    # Less than weights and pool: it is starting, or the weights are others.
    assert gpu_rests(machine(engine(), rests=(-1,))) == ()
    assert gpu_rests(NO_GPUS) == ()
