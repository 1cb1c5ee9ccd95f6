"""Laws that every plan keeps, whatever the model, the flags and the hardware: rows of vLLM's, changed at random."""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvheadroom.capacity.cases import plan_case
from kvheadroom.capacity.gpu_catalogue import GPUS
from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.model_geometry import ModelGeometry, read_geometry
from tests.capacity.truth import BY_ID, ROWS, facts_of, is_refused

Case = dict[str, Any]

_OWN_KINDS = {"DeepseekV4": "DeepSeek-V4", "Glm5Next": "GLM-5.3-Flash", "Qwen4Exp": "Qwen4"}


def kind_of(row: Mapping[str, Any]) -> str | None:
    """The kind of model, in the words of the reference; None where vLLM or we do not plan the row."""
    model = read_geometry(row["config"])
    if is_refused(row) or not isinstance(model, ModelGeometry):
        return None
    for start, kind in _OWN_KINDS.items():
        if model.architecture.startswith(start):
            return kind
    if model.has_states:
        return "hybrid"
    if model.stack.latent:
        return "latent" if model.is_latent else "sparse"
    return "windowed" if model.has_windows else "dense"


KINDS: dict[str, list[Case]] = {}
for _row in ROWS:
    if (_kind := kind_of(_row)) is not None:
        KINDS.setdefault(_kind, []).append(_row)
SOME_FLAGS: dict[str, st.SearchStrategy[Any]] = {
    "tensor_parallel_size": st.sampled_from([1, 2, 4, 8]),
    "decode_context_parallel_size": st.sampled_from([1, 2]),
    "pipeline_parallel_size": st.sampled_from([1, 2]),
    "kv_cache_dtype": st.sampled_from(["auto", "bfloat16", "fp8", "nvfp4"]),
    "block_size": st.sampled_from([16, 48, 64, 128, 256]),
    "enable_prefix_caching": st.booleans(),
    "async_scheduling": st.booleans(),
    "disable_hybrid_kv_cache_manager": st.booleans(),
    "max_num_batched_tokens": st.integers(1, 40_000),
    "max_num_seqs": st.integers(1, 1024),
    "num_gpu_blocks_override": st.integers(1, 100_000),
    "max_model_len": st.one_of(st.integers(1, 300_000), st.just(-1)),
}


@st.composite
def changed_rows(draw: st.DrawFn, *kinds: str, keep: frozenset[str] = frozenset()) -> Case:
    """A row of one of the kinds, with other hardware, other memory and up to three other flags."""
    row = draw(st.sampled_from(KINDS[draw(st.sampled_from(kinds or sorted(KINDS)))]))
    flags = dict(row["flags"])
    for name in draw(st.lists(st.sampled_from(sorted(set(SOME_FLAGS) - keep)), max_size=3)):
        flags[name] = draw(SOME_FLAGS[name])
    return {
        "id": row["id"],
        "flags": flags,
        "gpu": draw(st.one_of(st.just(row["gpu"]), st.sampled_from([*GPUS, "CPU"]))),
        "available_bytes": draw(st.integers(2**24, 2**38)),
    }


def whole(case: Case) -> Case:
    """The case with the model of its row, which would be long to print."""
    row = BY_ID[case["id"]]
    return {**case, "config": row["config"], "vllm_version": row["vllm_version"]}


def planned(case: Case, **change: Any) -> dict[str, Any] | None:
    """The plan; None where vLLM would refuse, or where we do not know."""
    got = plan_case({**whole(case), **change})
    return got if "num_blocks" in got else None


def layout(case: Case) -> KvLayout | None:
    planned = plan_layout(facts_of(whole(case)))
    return planned if isinstance(planned, KvLayout) else None


def flagged(case: Case, **flags: Any) -> Case:
    return {**case, "flags": {**case["flags"], **flags}}


def length_of(case: Case) -> int | None:
    """Tokens of the longest request that was asked for, as vLLM takes it; None where that is not known."""
    said = case["flags"].get("max_model_len")
    if isinstance(said, int) and said > 0:
        return said
    model = read_geometry(BY_ID[case["id"]]["config"])
    assert isinstance(model, ModelGeometry)
    return model.usual_context


def per_stage(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from numbers(entry)
    elif isinstance(value, int | float):
        yield value


def test_the_rows_hold_every_kind_of_model() -> None:
    few = {kind: len(rows) for kind, rows in KINDS.items() if len(rows) < 10}
    assert set(KINDS) == {"dense", "windowed", "latent", "sparse", "hybrid", *_OWN_KINDS.values()}
    assert few == {}


@settings(deadline=None, max_examples=150)
@given(case=changed_rows(), more=st.integers(0, 2**36))
def test_more_memory_never_holds_less(case: Case, more: int) -> None:
    if case["flags"].get("max_model_len") in (-1, "auto"):
        return  # a longer max_model_len then takes what there is more
    small, large = planned(case), planned(case, available_bytes=case["available_bytes"] + more)
    if small is None:
        return
    assert large is not None
    for figure in (
        "num_blocks",
        "kv_cache_size_tokens",
        "max_concurrency",
        "estimated_max_model_len",
        "boots",
    ):
        # A pool without a block has neither tokens nor a concurrency.
        assert (small[figure] or 0) <= (large[figure] or 0), figure
    for figure in ("bytes_per_block", "block_size", "needed_bytes_for_max_model_len"):
        assert small[figure] == large[figure], figure


@settings(deadline=None, max_examples=150)
@given(case=changed_rows(), lengths=st.lists(st.integers(1, 2_000_000), min_size=2, max_size=20, unique=True))
def test_there_are_never_more_of_longer_sessions(case: Case, lengths: list[int]) -> None:
    got = planned(case, lengths=sorted(lengths))
    if got is None:
        return
    assert list(got["at_len"]) == [str(length) for length in sorted(lengths)]
    for shorter, longer in pairwise(got["at_len"].values()):
        assert shorter["concurrency"] >= longer["concurrency"]
        assert 1 <= shorter["blocks_per_request"] <= longer["blocks_per_request"]


@settings(deadline=None, max_examples=100)
@given(
    case=changed_rows("latent", "sparse", keep=frozenset({"tensor_parallel_size", "pipeline_parallel_size"})),
    one=st.sampled_from([1, 2, 4]),
    times=st.sampled_from([2, 4, 8]),
)
def test_tensor_parallelism_leaves_the_bytes_of_a_latent_vector_as_they_are(
    case: Case, one: int, times: int
) -> None:
    case = flagged(case, decode_context_parallel_size=1, prefill_context_parallel_size=1)
    case["flags"].pop("speculative_config", None)  # a draft model may have K and V of several heads
    few = layout(flagged(case, tensor_parallel_size=one))
    many = layout(flagged(case, tensor_parallel_size=one * times))
    if few is not None and many is not None and few.kv_dtype == many.kv_dtype:
        assert few.bytes_per_token == many.bytes_per_token


@settings(deadline=None, max_examples=150)
@given(case=changed_rows(), length=st.integers(1, 400_000), shorter=st.integers(1, 400_000))
def test_what_starts_at_one_length_starts_at_every_shorter_one(case: Case, length: int, shorter: int) -> None:
    length, shorter = max(length, shorter), min(length, shorter)
    long, short = (planned(flagged(case, max_model_len=size)) for size in (length, shorter))
    if long is not None and short is not None and long["boots"]:
        assert short["boots"]


@settings(deadline=None, max_examples=100)
@given(
    case=changed_rows("latent", "sparse", keep=frozenset({"decode_context_parallel_size"})),
    spread=st.sampled_from([2, 4, 8]),
    blocks=st.integers(1, 500),
)
def test_decode_context_parallelism_multiplies_the_tokens(case: Case, spread: int, blocks: int) -> None:
    case = flagged(case, tensor_parallel_size=8, prefill_context_parallel_size=1, max_model_len=None)
    case["flags"].pop("speculative_config", None)
    together = flagged(case, decode_context_parallel_size=1)
    apart = flagged(case, decode_context_parallel_size=spread)
    first = planned(together)
    if first is None:
        return
    even = first["block_size"] * spread * blocks
    lengths = [even, even - 1, even - spread + 1, max(1, even // 3)]
    one, many = planned(together, lengths=lengths), planned(apart, lengths=lengths)
    if one is None or many is None or one["block_size"] != many["block_size"]:
        return  # another backend may be chosen for it
    assert many["num_blocks"] == one["num_blocks"]
    for length in map(str, lengths):
        assert one["at_len"][length]["concurrency"] <= many["at_len"][length]["concurrency"]
        assert many["at_len"][length]["concurrency"] <= spread * one["at_len"][length]["concurrency"]
    # Where the tokens fill whole blocks on each GPU, nothing is lost to rounding.
    assert many["at_len"][str(even)]["blocks_per_request"] == blocks
    assert one["at_len"][str(even)]["blocks_per_request"] == blocks * spread


@settings(deadline=None, max_examples=250)
@given(case=changed_rows(), stages_differ=st.integers(0, 2**30))
def test_the_figures_of_a_plan_agree_with_one_another(case: Case, stages_differ: int) -> None:
    stages = case["flags"].get("pipeline_parallel_size", 1)
    available = [case["available_bytes"] + stages_differ * stage for stage in range(stages)]
    asked = length_of(case)
    if asked is None:
        return
    got = planned(case, available_bytes=available, lengths=[asked])
    if got is None:
        return
    per_block, blocks = per_stage(got["bytes_per_block"]), got["at_len"][str(asked)]["blocks_per_request"]
    said = case["flags"].get("num_gpu_blocks_override")
    memory = case["flags"].get("kv_cache_memory_bytes")
    if said is None:
        have = [memory] * stages if memory is not None else available
        assert got["num_blocks"] == min(size // one for size, one in zip(have, per_block, strict=True))
    else:
        assert got["num_blocks"] == said
    assert per_stage(got["needed_bytes_for_max_model_len"]) == [size * blocks for size in per_block]
    # One block is the null block; the rest must hold a request of the longest length.
    longest = got["estimated_max_model_len"]
    fitted = case["flags"].get("max_model_len") in (-1, "auto") and longest > 0
    length = longest if fitted else asked
    lengths = [max(1, longest), longest + 1, length]
    detailed = planned(case, available_bytes=available, lengths=lengths)
    assert detailed is not None
    held, more, at_length = (detailed["at_len"][str(length)] for length in lengths)
    assert 0 <= longest <= asked
    assert longest == 0 or held["blocks_per_request"] <= got["num_blocks"] - 1
    assert longest == asked or more["blocks_per_request"] > got["num_blocks"] - 1
    assert got["boots"] == (longest >= length)
    if got["num_blocks"] == 0:
        return  # without a block there are neither tokens nor a concurrency
    # vLLM's own two figures
    assert got["max_concurrency"] == at_length["concurrency"]
    assert got["kv_cache_size_tokens"] == at_length["tokens"] == int(got["max_concurrency"] * length)


@settings(deadline=None, max_examples=250)
@given(case=changed_rows(), lengths=st.lists(st.integers(1, 2**53), max_size=5))
def test_every_figure_is_finite_and_above_zero_or_absent(case: Case, lengths: list[int]) -> None:
    got = plan_case({**whole(case), "lengths": lengths})
    assert ("num_blocks" in got) + ("refused" in got) + ("unknown" in got) == 1
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    zero = {"estimated_max_model_len", "boots", "kv_cache_size_tokens", "at_len"}
    if got.get("num_blocks") == 0:
        # less than a block: vLLM never gets to say tokens or a concurrency
        assert (got["boots"], got["kv_cache_size_tokens"], got["max_concurrency"]) == (False, None, None)
        zero |= {"num_blocks"}
    assert all(math.isfinite(number) and number >= 0 for number in numbers(got))
    assert all(number > 0 for name in set(got) - zero for number in numbers(got[name]))


@settings(deadline=None, max_examples=100)
@given(case=changed_rows())
def test_what_is_planned_without_a_gpu_holds_on_every_one(case: Case) -> None:
    anywhere = layout({**case, "gpu": None})
    if anywhere is None:
        return
    different = {(gpu.capability, gpu.batch): name for name, gpu in GPUS.items()}
    for gpu in different.values():
        here = layout({**case, "gpu": gpu})
        assert here is not None
        assert here.stage_bytes_per_block == anywhere.stage_bytes_per_block
        assert (here.block_size, here.kv_dtype) == (anywhere.block_size, anywhere.kv_dtype)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_most_rows_changed_at_random_are_planned(kind: str) -> None:
    # Else the laws above would hold for want of plans.
    rows = KINDS[kind]
    assert sum(planned(row) is not None for row in rows) / len(rows) > 0.8
