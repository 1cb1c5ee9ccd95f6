"""The cards and their memory: CUDA's total, NVML's total, and the GB they are sold by.

The three differ. vLLM budgets with CUDA's: `requested = ceil(total * gpu_memory_utilization)` (vllm/v1/worker/utils.py
request_memory, 0.33.0). NVML's, which nvidia-smi shows, is 0.4 to 1.1 GiB more: it counts what the driver reserves.
CUDA's moves by some MiB with the driver; where several were seen, that of the newest driver stands here, and its source
tells the others. No figure is computed from another: each was seen, and says where (`owner/repository#number` on GitHub,
or the program that printed it in a public listing).
"""

from collections.abc import Mapping

from kvheadroom.capacity.gpu_cards import GIB, MIB, Gpu, batch_defaults

_SMI = "nvidia-smi"
_UNSEEN = "no CUDA total of it was seen"


def _card(
    capability: tuple[int, int],
    *nvml_names: str,
    cuda: float | None,
    source: str,
    nvml_mib: int,
    nvml_source: str,
    gb: float | None,
) -> Gpu:
    """One card.

    Args:
        cuda: bytes.
    """
    nvml_total_bytes = nvml_mib * MIB
    return Gpu(
        capability=capability,
        nvml_names=nvml_names,
        cuda_total_bytes=None if cuda is None else round(cuda),
        source=source,
        nvml_total_bytes=nvml_total_bytes,
        nvml_source=f"{nvml_mib:,} MiB, {nvml_source}",
        marketed_gb=gb,
        batch=batch_defaults(nvml_names[0], nvml_total_bytes),
    )


CARDS: Mapping[str, Gpu] = {
    "A100-40GB": _card(
        (8, 0),
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-PCIE-40GB",
        cuda=42_405_855_232,
        source="CUDA total 39.49 GiB, deviceQuery with CUDA 13.0, in bytes; "
        "39.38 to 39.50 seen (39.39 in bottlerocket-os/bottlerocket#3873, 39.50 in TianheWu/CoSeR#10)",
        nvml_mib=40_960,
        nvml_source="modal-labs/modal-client#2797",
        gb=40,
    ),
    "A100-80GB": _card(
        (8, 0),
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100 80GB PCIe",
        cuda=85_100_068_864,
        source="CUDA total 79.26 GiB, deviceQuery with CUDA 12.5, in bytes; "
        "79.14 to 79.26 seen (79.15 in ekondis/mixbench#47)",
        nvml_mib=81_920,
        nvml_source="modal-labs/modal-client#2797",
        gb=80,
    ),
    "A800-80GB": _card(
        (8, 0),
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA A800 80GB PCIe",
        cuda=None,
        source=_UNSEEN,
        nvml_mib=81_920,
        nvml_source="Project-HAMi/HAMi#1903",
        gb=80,
    ),
    "A10": _card(
        (8, 6),
        "NVIDIA A10",
        "NVIDIA A10G",
        cuda=22_587 * MIB,
        source="CUDA total 22.06 GiB, PyTorch's device properties of an A10G with CUDA 13.0, to 1 MiB, "
        "and vllm-project/vllm#928; 21.98 to 22.18 seen; more with ECC off",
        nvml_mib=23_028,
        nvml_source="modal-labs/modal-client#2797",
        gb=24,
    ),
    "A30": _card(
        (8, 0),
        "NVIDIA A30",
        cuda=23.49 * GIB,
        source="CUDA total 23.49 GiB, PyTorch's out-of-memory texts, to 0.01 GiB; "
        "23.53 in google/RB-Modulation#5",
        nvml_mib=24_576,
        nvml_source=f"{_SMI}; 24,258 by old drivers",
        gb=24,
    ),
    "A40": _card(
        (8, 6),
        "NVIDIA A40",
        cuda=47_608_692_736,
        source="CUDA total 44.34 GiB, deviceQuery with CUDA 12.4, in bytes; 44.35 seen",
        nvml_mib=46_068,
        nvml_source="guqiong96/Lvllm#35",
        gb=48,
    ),
    "RTXA6000": _card(
        (8, 6),
        "NVIDIA RTX A6000",
        cuda=48_676 * MIB,
        source="CUDA total 47.54 GiB, PyTorch's device properties, to 1 MiB; "
        "47.53 to 47.65 seen (47.53 in allenai/open-instruct#163)",
        nvml_mib=49_140,
        nvml_source=f"{_SMI}, ECC off",
        gb=48,
    ),
    "RTX3090": _card(
        (8, 6),
        "NVIDIA GeForce RTX 3090",
        cuda=24_124 * MIB,
        source="CUDA total 23.56 GiB, llama.cpp's list of devices in 2026, to 2 MiB; "
        "23.58 in vllm-project/vllm#10517, 23.68 in vllm-project/vllm#16343",
        nvml_mib=24_576,
        nvml_source=_SMI,
        gb=24,
    ),
    "L4": _card(
        (8, 9),
        "NVIDIA L4",
        cuda=22.03 * GIB,
        source="CUDA total 22.03 GiB, ArcInstitute/evo2#190, to 0.01 GiB; 21.99 to 22.05 seen",
        nvml_mib=23_034,
        nvml_source="modal-labs/modal-client#2797",
        gb=24,
    ),
    "L40": _card(
        (8, 9),
        "NVIDIA L40",
        cuda=44.40 * GIB,
        source="CUDA total 44.40 GiB, QwenLM/Qwen3-VL#2097, to 0.01 GiB; more with ECC off",
        nvml_mib=46_068,
        nvml_source=f"{_SMI}; 49,140 with ECC off",
        gb=48,
    ),
    "L40S": _card(
        (8, 9),
        "NVIDIA L40S",
        cuda=44.39 * GIB,
        source="CUDA total 44.39 GiB, PyTorch's out-of-memory texts, to 0.01 GiB; "
        "44.31 to 44.52 seen (44.42 in stepfun-ai/Step-Video-T2V#8); more with ECC off",
        nvml_mib=46_068,
        nvml_source="modal-labs/modal-client#2797",
        gb=48,
    ),
    "RTX4090": _card(
        (8, 9),
        "NVIDIA GeForce RTX 4090",
        cuda=25_250_627_584,
        source="CUDA total 23.52 GiB, deviceQuery with CUDA 13.0, in bytes, and Soul-AILab/SoulX-FlashTalk#5; "
        "23.49 to 23.65 seen (23.64 in 3DTopia/Phidias-Diffusion#8)",
        nvml_mib=24_564,
        nvml_source="vllm-project/vllm#7553",
        gb=24,
    ),
    "RTX6000Ada": _card(
        (8, 9),
        "NVIDIA RTX 6000 Ada Generation",
        cuda=48_622 * MIB,
        source="CUDA total 47.48 GiB, PyTorch's device properties, to 1 MiB",
        nvml_mib=49_140,
        nvml_source=f"{_SMI}, ECC off",
        gb=48,
    ),
    "H100": _card(
        (9, 0),
        "NVIDIA H100 80GB HBM3",
        cuda=85_028_896_768,
        source="CUDA total 79.19 GiB, deviceQuery with CUDA 12.8, in bytes; 79.18 to 79.21 seen",
        nvml_mib=81_559,
        nvml_source="modal-labs/modal-client#2797",
        gb=80,
    ),
    "H100-PCIe": _card(
        (9, 0),
        "NVIDIA H100 PCIe",
        cuda=81_008 * MIB,
        source="CUDA total 79.11 GiB, PyTorch's device properties, to 1 MiB",
        nvml_mib=81_559,
        nvml_source=_SMI,
        gb=80,
    ),
    "H100-NVL": _card(
        (9, 0),
        "NVIDIA H100 NVL",
        cuda=93.10 * GIB,
        source="CUDA total 93.10 GiB, PyTorch's out-of-memory texts, to 0.01 GiB; 93.02 to 93.10 seen",
        nvml_mib=95_830,
        nvml_source=_SMI,
        gb=94,
    ),
    "H20": _card(
        (9, 0),
        "NVIDIA H20",
        cuda=97_285 * MIB,
        source="CUDA total 95.00 GiB, PyTorch's device properties, to 1 MiB",
        nvml_mib=97_871,
        nvml_source="NVIDIA/nvtrust#128",
        gb=96,
    ),
    "H200": _card(
        (9, 0),
        "NVIDIA H200",
        cuda=143_156 * MIB,
        source="CUDA total 139.80 GiB, PyTorch's device properties, to 1 MiB; 139.72 to 139.81 seen",
        nvml_mib=143_771,
        nvml_source=_SMI,
        gb=141,
    ),
    "H200-NVL": _card(
        (9, 0),
        "NVIDIA H200 NVL",
        cuda=None,
        source=_UNSEEN,
        nvml_mib=143_771,
        nvml_source=_SMI,
        gb=141,
    ),
    "GH200-96GB": _card(
        (9, 0),
        "NVIDIA GH200 480GB",
        "NVIDIA GH200 120GB",
        cuda=101_468_602_368,
        source="CUDA total 94.50 GiB, deviceQuery with CUDA 12.9, in bytes; 94.50 to 95.00 seen "
        "(94.88 in Lightning-AI/litgpt#1892)",
        nvml_mib=97_871,
        nvml_source="Lightning-AI/litgpt#1892",
        gb=96,
    ),
    "GH200-144GB": _card(
        (9, 0),
        "NVIDIA GH200 144G HBM3e",
        cuda=None,
        source=_UNSEEN,
        nvml_mib=146_831,
        nvml_source=f"{_SMI}, quoted in a public test",
        gb=144,
    ),
    "B200": _card(
        (10, 0),
        "NVIDIA B200",
        cuda=182_642 * MIB,
        source="CUDA total 182,642 MiB (178.36 GiB), PyTorch's device properties, to 1 MiB; 178.35 to 178.36 seen",
        nvml_mib=183_359,
        nvml_source=_SMI,
        gb=180,
    ),
    "GB200": _card(
        (10, 0),
        "NVIDIA GB200",
        cuda=184.31 * GIB,
        source="CUDA total 184.31 GiB, out-of-memory texts and start-up lines of vLLM, to 0.01 GiB",
        nvml_mib=189_471,
        nvml_source=_SMI,
        gb=None,
    ),
    "B300": _card(
        (10, 3),
        "NVIDIA B300 SXM6 AC",
        cuda=267.69 * GIB,
        source="CUDA total 267.69 GiB, start-up lines of vLLM beside the card's name, to 0.01 GiB",
        nvml_mib=275_040,
        nvml_source=_SMI,
        gb=288,
    ),
    "GB300": _card(
        (10, 3),
        "NVIDIA GB300",
        cuda=276.50 * GIB,
        source="CUDA total 276.50 GiB, PyTorch's out-of-memory texts, to 0.01 GiB; less on a DGX Station, whose GB300 has "
        "256,703 MiB by NVML: give `hbm_bytes` there",
        nvml_mib=284_208,
        nvml_source=_SMI,
        gb=288,
    ),
    "RTX5090": _card(
        (12, 0),
        "NVIDIA GeForce RTX 5090",
        cuda=33_668_857_856,
        source="CUDA total 31.36 GiB, deviceQuery with CUDA 13.0, in bytes; 31.35 seen",
        nvml_mib=32_607,
        nvml_source="noonghunna/club-3090#1107",
        gb=32,
    ),
    "RTXPRO6000": _card(
        (12, 0),
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        cuda=101_973_950_464,
        source="CUDA total 94.97 GiB, cudaMemGetInfo on a Server Edition, in bytes; 95.01 seen on Max-Q",
        nvml_mib=97_887,
        nvml_source="vllm-project/recipes#831",
        gb=96,
    ),
}
