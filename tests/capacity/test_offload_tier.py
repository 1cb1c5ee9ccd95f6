"""The tier in host memory, held to what vLLM's own code makes of it.

`offload_tiers.jsonl.gz` has 2,972 plans of vLLM 0.32.0 and 0.33.0: rows of `truth.jsonl.gz` with a size and settings of the connector, taken through vLLM's own
`build_offloading_config` and `CPUOffloadingSpec` on every worker; only calls to a device were replaced.
"""

import gzip
import json
import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.offload_tier import OffloadTier, plan_tier
from kvheadroom.capacity.readings import EchoedFlags
from tests.capacity.facts_builder import TINY_LLAMA, facts
from tests.capacity.truth import BY_ID, facts_of

GIB = 2**30
LINES: list[dict[str, Any]] = [
    json.loads(line)
    for line in gzip.decompress((Path(__file__).parent / "offload_tiers.jsonl.gz").read_bytes()).splitlines()
]
_PLACES = frozenset({"distributed_executor_backend", "nnodes"})
"""Flags that say on how many machines, or by whom, workers are started."""
_AUTO = frozenset({"l8-maxlen-auto-l40s", "glm53-auto-fit-maxlen"})
"""Rows whose max_model_len vLLM finds as it starts; an engine that runs tells it."""


@cache
def _planned(row: str, version: str, flags: str) -> tuple[EngineFacts, KvLayout | None]:
    case = {**BY_ID[row], "vllm_version": version, "flags": json.loads(flags)}
    known = facts_of(case)
    layout = plan_layout(known)
    return known, layout if isinstance(layout, KvLayout) else None


def tier_of(line: Mapping[str, Any]) -> OffloadTier | str | None:
    flags = {**BY_ID[line["row"]]["flags"], **line.get("flags", {})}
    if "kv_offloading_size" in line:
        flags["kv_offloading_size"] = line["kv_offloading_size"]
    if line.get("extra") or "kv_offloading_size" not in line:
        extra = line.get("extra", {})
        flags["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": extra,
        }
    known, layout = _planned(line["row"], line["vllm_version"], json.dumps(flags))
    return "the layout is not modelled" if layout is None else plan_tier(known, layout)


def is_sized(line: Mapping[str, Any]) -> bool:
    return "refused" not in line and not _PLACES & line.get("flags", {}).keys()


def test_every_size_is_that_of_vllm() -> None:
    outcomes: Counter[str] = Counter()
    for line in filter(is_sized, LINES):
        tier = tier_of(line)
        if not isinstance(tier, OffloadTier):
            outcomes[str(tier)] += 1
            continue
        said = {name: line.get(name) for name in ("num_chunks", "tier_bytes", "chunk_bytes", "copies")}
        assert said == {
            "num_chunks": tier.num_chunks,
            "tier_bytes": tier.bytes,
            "chunk_bytes": tier.chunk_bytes,
            "copies": tier.copies,
        }, line
        if "tier_tokens" in line and line["row"] not in _AUTO:
            assert tier.tokens == line["tier_tokens"], line
        outcomes["as vLLM has it"] += 1
    assert outcomes["as vLLM has it"] > 2_450
    # A draft model over pipeline stages, and one model over them, are not modelled at all.
    assert sum(outcomes.values()) - outcomes["as vLLM has it"] < 40, outcomes


def test_where_workers_run_elsewhere_the_one_copy_is_told_to_be_an_assumption() -> None:
    differing = 0
    for line in LINES:
        if "refused" in line or not _PLACES & line.get("flags", {}).keys():
            continue
        tier = tier_of(line)
        assert isinstance(tier, OffloadTier)
        if tier.copies != line["copies"]:
            differing += 1
            assert any("worker processes on one node" in note for note in tier.notes)
    assert differing > 0


_OTHERWISE_REFUSED = frozenset({"lat-v4-allswa", "whisper-large-v3"})
"""A row that no model has, whose workers fail where the scheduler does not, and a bare assertion about cross attention."""


def test_settings_that_vllm_refuses_are_refused() -> None:
    refused = [
        line
        for line in LINES
        if "refused" in line and {"block_size", "blocks_per_chunk"} & line.get("extra", {}).keys()
    ]
    assert len(refused) > 200
    for line in refused:
        assert isinstance(tier_of(line), str) or line["row"] in _OTHERWISE_REFUSED, line


def test_a_hand_made_sum() -> None:
    # 1,024 B per token, 16 tokens a block: 16 KiB; two workers hold half of the heads each.
    known = facts(flags={"kv_offloading_size": 1, "tensor_parallel_size": 2}, max_model_len=2048)
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    tier = plan_tier(known, layout)
    assert isinstance(tier, OffloadTier)
    assert (tier.chunk_bytes, tier.copies, tier.num_chunks) == (16_384, 2, 65_536)
    assert tier.tokens == 65_536 * 16
    # 63 chunks of 16 tokens each.
    assert tier.chunks_per_session(1000) == 63


def test_the_example_in_the_documentation_is_that_of_the_model() -> None:
    row = BY_ID["glm53flash-h200-tp2-fp8-mtp3-nopc"]
    flags = {**row["flags"], "enable_prefix_caching": True, "kv_offloading_size": 256e9 / GIB}
    known = facts_of({**row, "flags": flags})
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    tier = plan_tier(known, layout)
    assert isinstance(tier, OffloadTier)
    page = (Path(__file__).parents[2] / "docs" / "warm-sessions.md").read_text(encoding="utf-8")
    assert f"a chunk takes {tier.chunk_bytes:,} B" in page
    assert f"{tier.num_chunks:,} of them" in page
    for tokens in (262_144, 524_288, 1_048_576):
        chunks = tier.chunks_per_session(tokens)
        size = f"{chunks * tier.chunk_bytes / 1e9:.2f} GB"
        assert f"| {tokens:,} tokens | {chunks} | {size} | {tier.num_chunks // chunks} |" in page


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "LMCache"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "'NixlConnector' is not modelled"),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "cpu_bytes_to_use"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 1, "spec_name": "Mine"},
                }
            },
            "'Mine' is not vLLM's own",
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "MultiConnector",
                    "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}]},
                }
            },
            "none is OffloadingConnector",
        ),
    ],
)
def test_a_tier_that_is_not_vllms_own_has_no_size(flags: dict[str, Any], said: str) -> None:
    known = facts(flags=flags)
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    tier = plan_tier(known, layout)
    assert isinstance(tier, str)
    assert said in tier


@pytest.mark.parametrize(
    "extra",
    [
        5,
        {"cpu_bytes_to_use": "8G"},
        {"cpu_bytes_to_use": True},
        {"cpu_bytes_to_use": -1},
        {"cpu_bytes_to_use": math.inf},
        {"cpu_bytes_to_use": math.nan},
        {"cpu_bytes_to_use": GIB, "blocks_per_chunk": "two"},
        {"cpu_bytes_to_use": GIB, "blocks_per_chunk": 0},
        {"cpu_bytes_to_use": GIB, "blocks_per_chunk": 0.5},
        {"cpu_bytes_to_use": GIB, "block_size": [16]},
        {"cpu_bytes_to_use": GIB, "block_size": 0},
        {"cpu_bytes_to_use": GIB, "spec_name": ["\x1b[31m"]},
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_whatever_stands_in_the_connectors_settings_there_is_a_reason(extra: Any, several: bool) -> None:  # noqa: FBT001
    given = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    if several:
        given = {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [5, given]},
        }
    known = facts(flags={"kv_transfer_config": given})
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    reason = plan_tier(known, layout)
    assert isinstance(reason, str)
    assert "\x1b" not in reason


def test_of_several_connectors_vllms_own_is_taken() -> None:
    own = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": GIB, "blocks_per_chunk": 2},
    }
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [own]}}
    known = facts(flags={"kv_transfer_config": several})
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    tier = plan_tier(known, layout)
    assert isinstance(tier, OffloadTier)
    assert (tier.num_chunks, tier.blocks_per_chunk) == (32_768, 2)


def test_without_a_flag_there_is_no_tier() -> None:
    known = facts()
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    assert plan_tier(known, layout) is None


@pytest.mark.parametrize(("version", "is_there"), [("0.26.0", False), ("0.27.0", True), ("0.33.0", True)])
def test_that_dev_shm_must_have_room_for_it_is_told_where_it_lies_there(version: str, is_there: bool) -> None:  # noqa: FBT001  of a table
    known = facts(flags={"kv_offloading_size": 1}, version=version)
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    tier = plan_tier(known, layout)
    assert isinstance(tier, OffloadTier)
    assert (tier.in_shared_memory, any("must have room" in note for note in tier.notes)) == (
        is_there,
        is_there,
    )


def test_before_0_14_the_size_did_nothing() -> None:
    known = facts(flags={"kv_offloading_size": 1}, version="0.13.0")
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    assert "from 0.14.0 on" in str(plan_tier(known, layout))


HYBRID: dict[str, Any] = {
    **TINY_LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}
OWN = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": GIB}}
SIZE = {"kv_offloading_size": 1.0}


@pytest.mark.parametrize(
    ("version", "flags", "is_planned"),
    [
        ("0.20.0", SIZE, False),
        # vLLM makes a connector of the size after it has looked for one.
        ("0.21.0", SIZE, True),
        ("0.21.0", {**SIZE, "kv_transfer_config": OWN}, False),
        ("0.21.0", {"kv_transfer_config": OWN}, False),
        ("0.22.0", {"kv_transfer_config": OWN}, True),
        ("0.22.0", {**SIZE, "kv_transfer_config": OWN}, True),
        ("0.33.0", {**SIZE, "kv_offloading_backend": "lmcache"}, False),
        ("0.33.0", {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, False),
        ("0.33.0", {"kv_transfer_config": {"kv_connector": "MultiConnector"}}, False),
        # The size takes the place of any connector.
        ("0.33.0", {**SIZE, "kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, True),
    ],
)  # fmt: skip
def test_layers_of_several_kinds_are_planned_where_vllm_keeps_their_groups(
    version: str, flags: dict[str, Any], *, is_planned: bool
) -> None:
    known = facts(config=HYBRID, flags={"max_num_batched_tokens": 2048, **flags}, version=version)
    assert isinstance(plan_layout(known), KvLayout) is is_planned


def test_a_size_that_the_engine_tells_itself_counts_as_one_of_its_flags() -> None:
    flags = {"max_num_batched_tokens": 2048}
    told = EchoedFlags(kv_offloading_size=1.0, kv_offloading_backend="native")
    known = facts(config=HYBRID, flags=flags, echoed=told, version="0.20.0")
    assert (known.flags.offloading, known.flags.connector) == (True, True)
    assert "a KV connector may switch" in str(plan_layout(known))
    assert [flag.value for flag in known.told_flags if flag.name == "kv_offloading_size"] == ["1.0"]
    # Its backend alone is told by every engine.
    none = facts(
        config=HYBRID, flags=flags, echoed=EchoedFlags(kv_offloading_backend="native"), version="0.20.0"
    )
    assert isinstance(plan_layout(none), KvLayout)
