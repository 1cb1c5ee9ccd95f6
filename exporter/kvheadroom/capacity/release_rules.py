"""What changed between vLLM releases, as data. One line per change, with where it was read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Release = tuple[int, int, int]

# The releases whose own planning functions (0.33, 0.32) and running engine (0.32) the tests hold us to.
VERIFIED = ((0, 32), (0, 33))
OLDEST_KNOWN_RELEASE = (0, 6, 0)

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?!\d)")


@dataclass(frozen=True, slots=True)
class ReleaseRules:
    """The rules of one vLLM release that a prediction or an observation needs.

    Attributes:
        taken_from: (major, minor) of the release whose rules are taken.
        assumed_because: why these rules are an assumption, or None when the release is verified.
        default_gpu_memory_utilization: vLLM's default of `--gpu-memory-utilization`.
        usage_counts_null_block: the usage gauge divides by all blocks and counts the null block as used.
        lookups_per_attempt: a request that waits for blocks counts as looked up in the prefix cache at every step.
        saves_delta_states: states of gated delta nets are saved within a prefill, which takes a block more and makes
            blocks a multiple of what the kernel can save at. (Mamba2 and KDA did so before.)
        offloading_checks_rings: the OffloadingConnector wants circular buffers divisible as well.
        blackwell_kv_dtypes: for each architecture, what kv_cache_dtype=auto becomes on GPUs of capability 10.x.
    """

    taken_from: tuple[int, int]
    assumed_because: str | None
    default_gpu_memory_utilization: float
    usage_counts_null_block: bool
    lookups_per_attempt: bool
    saves_delta_states: bool
    blackwell_kv_dtypes: Mapping[str, str]
    offloading_checks_rings: bool


# What kv_cache_dtype=auto becomes on GPUs of capability 10.x (models/config.py), and since when.
_BLACKWELL_KV_DTYPES = (
    ((0, 32), "GlmMoeDsaForCausalLM", "fp8_e4m3"),
    ((0, 33), "Glm5NextForCausalLM", "fp8"),
    ((0, 33), "Glm5NextForConditionalGeneration", "fp8"),
)


def parse_release(version: str) -> Release | None:
    """`0.32.0`, `0.33.0rc1`, `0.11.2.dev5+gabc` -> (0, 32, 0) ...; None for anything that is no release number.

    vLLM's source builds without tags call themselves `0.1.dev...`: no release is known for them.
    """
    match = _VERSION.match(version.strip())
    if match is None:
        return None
    release = (int(match[1]), int(match[2]), int(match[3] or 0))
    return None if release < OLDEST_KNOWN_RELEASE else release


def rules_for(version: str | None) -> ReleaseRules:
    """The rules of `version`; one that is not verified takes the nearest verified rules, and says so."""
    release = None if version is None else parse_release(version)
    oldest, newest = VERIFIED[0], VERIFIED[-1]
    taken = newest if release is None or release[:2] > newest else max(release[:2], oldest)
    name = ".".join(map(str, taken))
    if version is None:
        assumed = f"the server's release is not known; rules of vLLM {name} taken"
    elif release is None:
        assumed = f"{version[:40]!r} is not a release number; rules of vLLM {name} taken"
    elif release[:2] not in VERIFIED:
        assumed = f"the rules of vLLM {version[:40]} are not verified; those of {name} taken"
    else:
        assumed = None
    known = release or (*newest, 0)
    return ReleaseRules(
        taken_from=taken,
        assumed_because=assumed,
        # vllm/config/cache.py: 0.9 up to 0.19, 0.92 from 0.20.0
        default_gpu_memory_utilization=0.92 if known >= (0, 20, 0) else 0.9,
        # vllm/v1/core/block_pool.py get_usage: divides by num_gpu_blocks up to 0.10.1, by one less from 0.10.2
        usage_counts_null_block=known < (0, 10, 2),
        # vllm/v1/core/sched/scheduler.py: counted at each attempt up to 0.26, on admission from 0.27.0
        lookups_per_attempt=known < (0, 27, 0),
        # layers/mamba/gdn/qwen_gdn_linear_attn.py get_prefill_checkpoint_alignment came with 0.33.0
        saves_delta_states=taken >= (0, 33),
        blackwell_kv_dtypes={
            architecture: dtype for since, architecture, dtype in _BLACKWELL_KV_DTYPES if taken >= since
        },
        # Not in 0.32.0's build_offloading_config; GLM-5.3-Flash's first users met it, on the release before.
        offloading_checks_rings=known < (0, 32, 0),
    )
