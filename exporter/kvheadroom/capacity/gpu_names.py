"""How people and drivers call GPUs, beside the names of the catalogue; and those that are known but not modelled."""

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "A100-SXM-40GB": "A100-40GB",
    "A100-SXM-80GB": "A100-80GB",
    "A100-SXM4": "A100",
    "A100-PCIe": "A100",
    "A100-PCIe-80GB": "A100-80GB",
    "A6000": "RTXA6000",
    "3090": "RTX3090",
    "4090": "RTX4090",
    "5090": "RTX5090",
    "6000 Ada": "RTX6000Ada",
    "H100-SXM": "H100",
    "H100-SXM5": "H100",
    "H100-80GB": "H100",
    "H100-SXM-80GB": "H100",
    "H100-SXM5-80GB": "H100",
    "H100-PCIe-80GB": "H100-PCIe",
    "H100-94GB": "H100-NVL",
    "H100-NVL-94GB": "H100-NVL",
    "H20-96GB": "H20",
    "H200-SXM": "H200",
    "H200-141GB": "H200",
    "H200-SXM-141GB": "H200",
    "B200-SXM": "B200",
    "B300-SXM": "B300",
    "RTX PRO 6000 Blackwell": "RTXPRO6000",
    "RTX PRO 6000 Server": "RTXPRO6000",
    "RTX PRO 6000 Workstation": "RTXPRO6000",
    "RTX PRO 6000 Max-Q": "RTXPRO6000",
    "PRO 6000": "RTXPRO6000",
}
"""What people write -> the catalogue's name. NVML's names stand with the cards; spelling is `spelt`'s business."""

_TURING = "compute capability 7.5 is not modelled"
_VOLTA = "compute capability 7.0 is not modelled"
_SHARED = "it shares memory with the CPU, which is not modelled"
_AMD = "it is an AMD GPU, and vLLM's rules for those are not modelled"

NOT_MODELLED: Mapping[str, str] = {
    "T4": _TURING,
    "RTX 2080 Ti": _TURING,
    "Quadro RTX 6000": _TURING,
    "Quadro RTX 8000": _TURING,
    "TITAN RTX": _TURING,
    "V100": _VOLTA,
    "V100-16GB": _VOLTA,
    "V100-32GB": _VOLTA,
    "V100-PCIE-16GB": _VOLTA,
    "V100-PCIE-32GB": _VOLTA,
    "V100-SXM2-16GB": _VOLTA,
    "V100-SXM2-32GB": _VOLTA,
    "GB10": _SHARED,
    "DGX Spark": _SHARED,
    "Jetson AGX Orin": _SHARED,
    "Jetson Thor": _SHARED,
    "Jetson AGX Thor": _SHARED,
    "Thor": _SHARED,
    "MI300A": _SHARED,
    "MI300X": _AMD,
    "MI325X": _AMD,
    "MI350X": _AMD,
    "MI355X": _AMD,
}
"""GPUs that vLLM knows and this catalogue leaves out -> why, as the end of a sentence."""

_MAKERS = ("nvidia", "amd", "geforce", "tesla", "instinct")


def spelt(name: str) -> str:
    """A name without what people leave out or add: case, spaces, hyphens, underscores, the maker and its brand."""
    plain = "".join(sign for sign in name.lower() if sign not in " -_\t")
    for maker in _MAKERS:
        plain = plain.removeprefix(maker)
    return plain
