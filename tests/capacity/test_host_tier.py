"""What a tier takes of the host's memory, and what is said where the host has not so much."""

from typing import Any

import pytest

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.host_tier import HostNeed, HostUse, host_findings, host_need, rounded_bytes
from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.kv_groups import KvGroup
from kvheadroom.capacity.kv_specs import Kind, KvSpec, RequestShape
from kvheadroom.capacity.offload_tier import OffloadTier, plan_tier
from kvheadroom.capacity.warm_findings import WarmFinding
from tests.capacity.facts_builder import TINY_LLAMA, facts

GIB = 2**30
ABOVE_TIER, ABOVE_SHM, ABOVE_HOST = (
    WarmFinding.HOST_MEMORY_ABOVE_TIER,
    WarmFinding.TIER_ABOVE_SHM,
    WarmFinding.TIER_ABOVE_HOST_MEMORY,
)
# DeepSeek-V2-Lite's sizes in one layer: 576 x 2 B per token.
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "vocab_size": 102400,
    "intermediate_size": 10944,
    "first_k_dense_replace": 3,
    "n_routed_experts": None,
}


def planned(known: EngineFacts, layout: KvLayout | None = None) -> tuple[HostNeed, OffloadTier]:
    if layout is None:
        made = plan_layout(known)
        assert isinstance(made, KvLayout), made
        layout = made
    tier = plan_tier(known, layout)
    assert isinstance(tier, OffloadTier), tier
    return host_need(known, layout, tier), tier


def offloading(size_gib: float = 1.0, **rest: Any) -> EngineFacts:
    flags = {"kv_offloading_size": size_gib, **rest.pop("flags", {})}
    return facts(flags=flags, **rest)


def said(
    known: EngineFacts, use: HostUse | None, *, engines: int = 1, runs: bool = True
) -> dict[WarmFinding, str]:
    return dict(host_findings(*planned(known), use, engines=engines, runs=runs))


def of_issue_53042() -> tuple[EngineFacts, KvLayout]:
    """vLLM 0.26.0, TP 4, four groups of which a worker has 24 tensors with 1,089,536 B for each block."""
    page = 1_089_536
    state = KvSpec(kind=Kind.STATE, block_size=1024, unit_bytes=1_000_000, padded_bytes=page)
    full = KvSpec(kind=Kind.FULL, block_size=1064, unit_bytes=1024)
    assert full.page_bytes == page
    groups = tuple(
        KvGroup(tuple(range(first, first + 24)), (spec,) * 24)
        for first, spec in ((0, state), (24, state), (48, state), (72, full))
    )
    layout = KvLayout(
        groups=groups,
        stage_layers=(96,),
        stage_bytes_per_block=(24 * page,),
        how="",
        kv_dtype="fp8",
        block_size=1064,
        shape=RequestShape(),
    )
    return offloading(200, version="0.26.0", flags={"tensor_parallel_size": 4}), layout


def test_the_host_takes_as_much_as_was_measured_where_tensors_are_rounded_up() -> None:
    # vllm issue 53042: 24 tensors of 2053 x 1,089,536 B on each of 4 workers, 385.0 GiB of Shmem on the node for 200 GiB asked for.
    need, tier = planned(*of_issue_53042())
    assert tier.num_chunks == 2053
    assert need.bytes == 384 * GIB
    use = HostUse(processes_shared_bytes=385 * GIB, engines=1, total_bytes=900 * GIB)
    [(finding, why)] = host_findings(need, tier, use, engines=1, runs=True)
    assert finding is ABOVE_TIER
    assert "384.00 GiB (1.92 times) of the host's memory, and 200.00 GiB were asked for" in why
    assert "385.00 GiB of shared memory, 1.93 times what was asked for" in why
    # 1971 blocks are just within 2 GiB, as the issue found too.
    assert need.fitting_bytes == 1971 * 24 * 1_089_536 * 4
    assert "use vLLM 0.27 or newer, or ask for 191.99 GiB or less, which takes half" in why


def test_asking_for_the_fitting_size_takes_half() -> None:
    known, layout = of_issue_53042()
    need, _ = planned(known, layout)
    assert need.fitting_bytes is not None
    flags = {"tensor_parallel_size": 4, "kv_offloading_size": need.fitting_bytes / GIB}
    smaller, tier = planned(facts(flags=flags, version="0.26.0"), layout)
    assert (tier.num_chunks, smaller.bytes, smaller.fitting_bytes) == (
        1971,
        192 * GIB,
        (2**30 // 1_089_536) * 24 * 1_089_536 * 4,
    )
    assert not list(host_findings(smaller, tier, None, engines=1, runs=True))


def test_without_a_look_at_the_host_the_plan_alone_is_said() -> None:
    need, tier = planned(*of_issue_53042())
    [(finding, why)] = host_findings(need, tier, None, engines=1, runs=True)
    assert (finding, "its processes have" in why) == (ABOVE_TIER, False)


def test_engines_of_one_host_have_a_tier_each() -> None:
    need, tier = planned(*of_issue_53042())
    use = HostUse(processes_shared_bytes=770 * GIB, engines=2, total_bytes=700 * GIB)
    found = dict(host_findings(need, tier, use, engines=2, runs=True))
    assert (
        "the tiers of 2 engines take 768.00 GiB (1.92 times) of the host's memory, and 400.00"
        in found[ABOVE_TIER]
    )
    assert "768.00 GiB of the host's memory, and all that the machine has is 700.00 GiB" in found[ABOVE_HOST]


@pytest.mark.parametrize(
    ("blocks", "pages", "size"),
    [
        (1, (4096,), 4096),
        (1, (4097,), 8192),
        (3, (4096,), 16_384),
        (2053, (1_089_536,) * 24, 96 * GIB),
        (1971, (1_089_536,) * 24, 48 * GIB),
        (5, (100, 200), 512 + 1024),
    ],
)
def test_every_tensor_is_rounded_up_to_a_power_of_two_of_its_own(
    blocks: int, pages: tuple[int, ...], size: int
) -> None:
    assert rounded_bytes(blocks, pages) == size


def test_layers_of_plain_attention_lie_in_one_tensor() -> None:
    # vllm pull request 48436: TP 2 with 80 GiB had 64 GiB in each worker, with 64 GiB it had 32.
    tp2 = {"tensor_parallel_size": 2}
    large, _ = planned(offloading(80, version="0.24.0", flags=tp2))
    exact, _ = planned(offloading(64, version="0.24.0", flags=tp2))
    assert (large.bytes, exact.bytes) == (128 * GIB, 64 * GIB)
    # Three layers would stay as they are on their own: 3 x 1 GiB, together 4 GiB.
    config = {**TINY_LLAMA, "num_hidden_layers": 3}
    three, _ = planned(offloading(3, version="0.21.0", config=config))
    assert three.bytes == 4 * GIB
    # Llama is of the second model runner's from 0.23 on, which keeps layers apart where it does run.
    first, _ = planned(offloading(3, version="0.22.0", config=config))
    assert first.bytes == 4 * GIB
    either, _ = planned(offloading(3, version="0.23.0", config=config))
    assert (either.low_bytes, either.high_bytes, either.bytes) == (3 * GIB, 4 * GIB, None)


def test_where_a_backend_decides_how_tensors_are_cut_both_ends_are_told() -> None:
    # One tensor of 3 GiB becomes 4, three of 1 GiB stay.
    need, tier = planned(offloading(3, version="0.24.0", config=LATENT, flags={"block_size": 64}))
    assert (tier.bytes, need.low_bytes, need.high_bytes) == (need.tier_bytes, 3 * GIB, 4 * GIB)
    assert need.bytes is None
    found = said(
        offloading(3, version="0.24.0", config=LATENT, flags={"block_size": 64}),
        HostUse(processes_shared_bytes=4 * GIB, engines=1),
    )
    assert "3.00 GiB to 4.00 GiB of the host's memory, and 3.00 GiB were asked for" in found[ABOVE_TIER]
    assert "1.33 times" in found[ABOVE_TIER]


def test_beside_another_connector_layers_may_lie_apart() -> None:
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 3 * GIB},
                },
                {"kv_connector": "NixlConnector"},
            ]
        },
    }
    need, _ = planned(
        facts(
            flags={"kv_transfer_config": several},
            version="0.21.0",
            config={**TINY_LLAMA, "num_hidden_layers": 3},
        )
    )
    assert (need.low_bytes, need.high_bytes) == (3 * GIB, 4 * GIB)


def test_every_stage_has_tensors_of_its_own() -> None:
    # 3 layers on the first stage, 2 on the second; vLLM counts chunks by the blocks of the first.
    known = offloading(
        6,
        version="0.21.0",
        flags={"pipeline_parallel_size": 2},
        config={**TINY_LLAMA, "num_hidden_layers": 5},
    )
    need, tier = planned(known)
    sizes = [tier.num_chunks * layers * 4096 for layers in (3, 2)]
    assert sizes[0] == pytest.approx(3 * GIB, abs=12_288)
    assert need.bytes == 4 * GIB + 2 * GIB


@pytest.mark.parametrize("version", ["0.27.0", "0.33.0"])
def test_from_0_27_the_host_takes_exactly_the_tier(version: str) -> None:
    need, tier = planned(offloading(3, version=version))
    assert (need.bytes, need.in_shared_memory) == (tier.bytes, True)
    # Every worker maps the same file: the sum over processes is no measure of it.
    assert said(offloading(3, version=version), HostUse(processes_shared_bytes=12 * GIB, engines=1)) == {}


def test_a_tier_with_others_behind_it_was_a_file_before_0_27() -> None:
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 3 * GIB, "spec_name": "TieringOffloadingSpec"},
    }
    need, tier = planned(facts(flags={"kv_transfer_config": transfer}, version="0.24.0"))
    assert (need.bytes, need.in_shared_memory) == (tier.bytes, True)
    assert any("must have room for it" in note for note in tier.notes)


def test_a_tier_that_does_not_fit_into_dev_shm_is_told_with_the_way_out() -> None:
    use = HostUse(shm_total_bytes=64 * 2**20, shm_free_bytes=63 * 2**20, engines=1)
    running = said(offloading(1), use)[ABOVE_SHM]
    assert "takes 1.00 GiB of the host's memory, all in /dev/shm, which has 0.06 GiB;" in running
    assert "`--shm-size`" in running
    # As it runs, what is free is free beside its own tier.
    use = HostUse(shm_total_bytes=2 * GIB, shm_free_bytes=0, engines=1)
    assert said(offloading(1), use) == {}
    planned_here = said(offloading(1), use, runs=False)[ABOVE_SHM]
    assert planned_here.startswith("if it is to run on this machine: the tier takes 1.00 GiB")
    assert "has 0.00 MiB free" in planned_here
    # Of two engines, each with 1 GiB, vLLM itself checks each on its own.
    use = HostUse(shm_total_bytes=3 * GIB // 2, shm_free_bytes=3 * GIB // 2)
    assert said(offloading(1), use, runs=False) == {}
    assert "2 engines take 2.00 GiB" in said(offloading(1), use, engines=2, runs=False)[ABOVE_SHM]


def test_before_0_27_dev_shm_does_not_matter() -> None:
    use = HostUse(shm_total_bytes=64 * 2**20, shm_free_bytes=64 * 2**20)
    assert said(offloading(1, version="0.26.0"), use) == {}


def test_the_tighter_of_memory_limit_and_machine_counts() -> None:
    use = HostUse(total_bytes=GIB // 2, engines=1)
    assert "all that the machine has is 0.50 GiB" in said(offloading(1), use)[ABOVE_HOST]
    use = HostUse(total_bytes=8 * GIB, limit_bytes=GIB // 2, engines=1)
    assert "the memory limit of its control group is 0.50 GiB" in said(offloading(1), use)[ABOVE_HOST]
    assert said(offloading(1), HostUse(total_bytes=8 * GIB, limit_bytes=2 * GIB)) == {}


def test_what_its_processes_have_beside_the_tier_counts_against_the_limit() -> None:
    use = HostUse(limit_bytes=2 * GIB, processes_anonymous_bytes=3 * GIB // 2, engines=1)
    assert (
        "1.00 GiB of the host's memory, beside 1.50 GiB of its processes' own"
        in said(offloading(1), use)[ABOVE_HOST]
    )
    # Of one that is to be started nobody knows that.
    assert said(offloading(1), use, runs=False) == {}


def test_where_nothing_is_known_of_the_host_nothing_is_said() -> None:
    assert said(offloading(1), HostUse()) == {}
    assert said(offloading(1), None) == {}


def test_a_tier_without_a_chunk_takes_nothing() -> None:
    need, tier = planned(offloading(0.000001, version="0.26.0"))
    assert (tier.num_chunks, need.bytes) == (0, 0)
    assert not list(host_findings(need, tier, HostUse(total_bytes=GIB, engines=1), engines=1, runs=True))
