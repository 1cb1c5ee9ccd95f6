"""GPUs by name, in whatever spelling; the cards themselves are in `gpu_figures`."""

from collections.abc import Mapping
from dataclasses import replace

from kvheadroom.capacity.gpu_cards import Gpu
from kvheadroom.capacity.gpu_figures import CARDS
from kvheadroom.capacity.gpu_names import ALIASES, NOT_MODELLED, spelt

CPU = "cpu"
"""The name under which vLLM's CPU backend is given where a GPU would be."""


def _either(*names: str) -> Gpu:
    """A name that leaves the memory open: what vLLM chooses is the same on each of these cards."""
    card = CARDS[names[0]]
    return replace(
        card,
        nvml_names=(),
        cuda_total_bytes=None,
        source=f"the name leaves the memory open; say {' or '.join(names)}",
        nvml_total_bytes=None,
        nvml_source="",
        marketed_gb=None,
    )


GPUS: Mapping[str, Gpu] = {
    "A100": _either("A100-40GB", "A100-80GB"),
    "GH200": _either("GH200-96GB", "GH200-144GB"),
    **CARDS,
}

_NAMES: Mapping[str, str] = {
    spelt(called): name
    for name, calls in (
        *((name, (name, *gpu.nvml_names)) for name, gpu in GPUS.items()),
        *((name, (alias,)) for alias, name in ALIASES.items()),
        (CPU, (CPU,)),
    )
    for called in calls
}

_NOT_MODELLED: Mapping[str, str] = {spelt(name): reason for name, reason in NOT_MODELLED.items()}


def catalogue_name(name: str) -> str | None:
    """The catalogue's own name for what somebody wrote, or for what NVML calls a card; None for a GPU that it lacks."""
    return _NAMES.get(spelt(name))


def not_modelled_because(name: str) -> str | None:
    """Why a GPU that vLLM knows is left out, as the end of a sentence; None for a name that is not known at all."""
    return _NOT_MODELLED.get(spelt(name))
