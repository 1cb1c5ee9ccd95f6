"""The catalogue of GPUs: its figures agree with one another and with what they were read from, and names find their card."""

import math
import re

import pytest

from kvheadroom.capacity.cases import plan_case
from kvheadroom.capacity.gpu_cards import GIB, LARGE, LARGEST, MIB, SMALL, BatchDefaults, Gpu, batch_defaults
from kvheadroom.capacity.gpu_catalogue import CPU, GPUS, catalogue_name, not_modelled_because
from kvheadroom.capacity.gpu_figures import CARDS
from kvheadroom.capacity.gpu_names import ALIASES, NOT_MODELLED, spelt
from kvheadroom.capacity.kv_cache import plan_layout
from kvheadroom.capacity.memory import PoolBudget, plan_budget
from tests.capacity.facts_builder import TINY_LLAMA, facts
from tests.capacity.truth import ROWS, facts_of

each_card = pytest.mark.parametrize("gpu", CARDS.values(), ids=CARDS)
OPEN_NAMES = sorted(GPUS.keys() - CARDS.keys())


@each_card
def test_the_cuda_total_is_the_one_that_its_source_tells(gpu: Gpu) -> None:
    if gpu.cuda_total_bytes is None:
        assert gpu.source == "no CUDA total of it was seen"
        return
    told = re.match(r"CUDA total (?:([\d,]+) MiB \()?([\d.]+) GiB\)?, ", gpu.source)
    assert told is not None, gpu.source
    assert f"{gpu.cuda_total_bytes / GIB:.2f}" == told[2]
    if told[1] is not None:
        assert gpu.cuda_total_bytes == int(told[1].replace(",", "")) * MIB


@each_card
def test_every_cuda_total_says_how_exact_it_is(gpu: Gpu) -> None:
    if gpu.cuda_total_bytes is None:
        return
    exactness = re.search(r"in bytes|to [12] MiB|to 0\.01 GiB", gpu.source)
    assert exactness is not None, gpu.source
    if exactness[0].endswith("MiB"):
        assert gpu.cuda_total_bytes % MIB == 0


@each_card
def test_the_total_of_nvml_is_the_one_that_its_source_tells_and_that_source_is_named(gpu: Gpu) -> None:
    assert gpu.nvml_total_bytes is not None
    told = re.match(r"([\d,]+) MiB, (nvidia-smi|[\w.-]+/[\w.-]+#\d+)", gpu.nvml_source)
    assert told is not None, gpu.nvml_source
    assert gpu.nvml_total_bytes == int(told[1].replace(",", "")) * MIB


@each_card
def test_nvml_counts_what_the_driver_reserves_and_cuda_does_not(gpu: Gpu) -> None:
    assert gpu.nvml_total_bytes is not None
    if gpu.cuda_total_bytes is not None:
        assert 0.4 * GIB < gpu.nvml_total_bytes - gpu.cuda_total_bytes < 1.1 * GIB


@each_card
def test_the_gb_on_the_box_lie_between_the_gib_and_the_gb_of_nvml(gpu: Gpu) -> None:
    assert gpu.nvml_total_bytes is not None
    if gpu.marketed_gb is not None:
        assert gpu.nvml_total_bytes / GIB - 0.6 < gpu.marketed_gb <= gpu.nvml_total_bytes / 1e9


@each_card
def test_the_source_of_a_range_holds_the_figure(gpu: Gpu) -> None:
    for low, high in re.findall(r"([\d.]+) to ([\d.]+) seen", gpu.source):
        assert gpu.cuda_total_bytes is not None
        assert float(low) <= round(gpu.cuda_total_bytes / GIB, 2) <= float(high)


@pytest.mark.parametrize(
    ("nvml_name", "nvml_total_bytes", "batch"),
    [
        ("NVIDIA B200", 160 * GIB, LARGEST),
        ("NVIDIA B200", 160 * GIB - 1, LARGE),
        ("NVIDIA H100 80GB HBM3", 70 * GIB, LARGE),
        ("NVIDIA H100 80GB HBM3", 70 * GIB - 1, SMALL),
        ("NVIDIA A100-SXM4-80GB", 80 * GIB, SMALL),
        ("NVIDIA A100-SXM4-80GB", 160 * GIB, LARGEST),
        # The name has no a100 in it, though it is the same chip.
        ("NVIDIA A800-SXM4-80GB", 80 * GIB, LARGE),
    ],
)
def test_the_default_batch_goes_by_nvmls_total_and_name_as_in_vllm(
    nvml_name: str, nvml_total_bytes: int, batch: BatchDefaults
) -> None:
    assert batch_defaults(nvml_name, nvml_total_bytes) == batch


def test_the_default_batch_of_the_cards_people_serve_on() -> None:
    # `vllm serve` 0.33.0: tokens and requests at once (engine/arg_utils.py get_batch_defaults)
    by_batch: dict[BatchDefaults, set[str]] = {}
    for name, gpu in CARDS.items():
        by_batch.setdefault(gpu.batch, set()).add(name)
    assert by_batch[BatchDefaults(16384, 1024)] == {"B200", "GB200", "B300", "GB300"}
    assert by_batch[BatchDefaults(2048, 256)] == {
        *("A100-40GB", "A100-80GB", "A10", "A30", "A40", "RTXA6000", "RTX3090"),
        *("L4", "L40", "L40S", "RTX4090", "RTX6000Ada", "RTX5090"),
    }
    assert by_batch[BatchDefaults(8192, 1024)] == {
        *("A800-80GB", "H100", "H100-PCIe", "H100-NVL", "H20", "H200", "H200-NVL"),
        *("GH200-96GB", "GH200-144GB", "RTXPRO6000"),
    }


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-SXM", "H100"),
        ("h100", "H100"),
        ("H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("RTX5090", "RTX5090"),
        ("GeForce RTX 5090", "RTX5090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("rtx-pro-6000", "RTXPRO6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTXPRO6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("nvidia rtx a6000", "RTXA6000"),
        ("A100 80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("a100-sxm4-40gb", "A100-40GB"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),  # 480 GB are the CPU's
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("b300_sxm6_ac", "B300"),
        ("GB300", "GB300"),
        ("CPU", CPU),
        ("B999", None),
        ("", None),
        ("NVIDIA", None),
        ("H100 80GB HBM3 MIG 1g.10gb", None),
        ("T4", None),
    ],
)
def test_a_card_is_found_by_what_people_and_nvml_call_it(written: str, name: str | None) -> None:
    assert catalogue_name(written) == name


def test_no_two_cards_share_a_name() -> None:
    meant: dict[str, set[str]] = {spelt(name): {reason} for name, reason in NOT_MODELLED.items()}
    for written, name in (
        *((name, name) for name in (*GPUS, CPU)),
        *((written, name) for name, gpu in GPUS.items() for written in gpu.nvml_names),
        *ALIASES.items(),
    ):
        meant.setdefault(spelt(written), set()).add(name)
    assert {spelling: names for spelling, names in meant.items() if len(names) > 1} == {}
    assert set(ALIASES.values()) <= GPUS.keys()
    assert all(catalogue_name(name) == name for name in GPUS)
    assert all(catalogue_name(n) == name for name, gpu in GPUS.items() for n in gpu.nvml_names)


@pytest.mark.parametrize("name", OPEN_NAMES)
def test_a_name_that_leaves_the_memory_open_has_no_total_and_says_which_names_have(name: str) -> None:
    gpu = GPUS[name]
    variants = [(other, card) for other, card in CARDS.items() if other.startswith(f"{name}-")]
    assert len(variants) == 2
    assert (gpu.cuda_total_bytes, gpu.nvml_total_bytes, gpu.marketed_gb) == (None, None, None)
    assert {(card.capability, card.batch) for _, card in variants} == {(gpu.capability, gpu.batch)}
    missing = {fact.fact: fact.why for fact in facts(gpu=name, weights_bytes=1).missing}
    assert f"`gpu: {name}`" in missing["hbm_bytes"]
    assert all(other in missing["hbm_bytes"] for other, _ in variants)


def test_a_b200_is_budgeted_on_its_cuda_total_and_not_on_the_gb_of_its_box() -> None:
    budget = plan_budget(facts(gpu="B200", weights_bytes=1, flags={"gpu_memory_utilization": 0.92}))
    assert isinstance(budget, PoolBudget)
    requested = sum(term.bytes for term in budget.terms if term.term in {"hbm_total", "outside_utilization"})
    # 182,642 MiB x 0.92 = 176,192,896,368.64 bytes, rounded up
    assert requested == 176_192_896_369
    assert requested - math.ceil(180e9 * 0.92) > 10e9


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("T4", "compute capability 7.5 is not modelled"),
        ("Tesla V100-SXM2-32GB", "compute capability 7.0 is not modelled"),
        ("NVIDIA GB10", "it shares memory with the CPU, which is not modelled"),
        ("dgx-spark", "it shares memory with the CPU, which is not modelled"),
        ("AMD Instinct MI300X", "it is an AMD GPU, and vLLM's rules for those are not modelled"),
    ],
)
def test_a_gpu_that_is_known_but_not_modelled_says_why(written: str, reason: str) -> None:
    assert catalogue_name(written) is None
    assert not_modelled_because(written) == reason
    answer = plan_case({"id": "x", "config": TINY_LLAMA, "gpu": written, "available_bytes": 2**34})
    assert answer["unknown"] == f"`gpu` is {written!r}: {reason}"


def test_a_name_that_nobody_knows_has_no_reason() -> None:
    assert not_modelled_because("B999") is None
    assert not_modelled_because("H100") is None


def test_an_ampere_card_of_8_6_is_cut_as_an_a100_is() -> None:
    rows = [row for row in ROWS if row["gpu"] == "A100"]
    assert len(rows) > 400
    for row in rows:
        assert plan_layout(facts_of({**row, "gpu": "RTXA6000"})) == plan_layout(facts_of(row)), row["id"]
