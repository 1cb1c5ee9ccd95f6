"""What changed between vLLM releases, as data. One row per change, with where it was read."""

import re
from dataclasses import dataclass

NEWEST_KNOWN_RELEASE = (0, 33)
OLDEST_KNOWN_RELEASE = (0, 6)

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?!\d)")


@dataclass(frozen=True, slots=True)
class ReleaseRules:
    """The rules of one vLLM release that a prediction needs.

    Attributes:
        release: (major, minor) of the rules taken.
        assumed_because: why these rules are an assumption, or None when the release is known.
        default_gpu_memory_utilization: vLLM's default of `--gpu-memory-utilization`.
        reserves_null_block_at_start: the boot check keeps one block for the null block.
    """

    release: tuple[int, int]
    assumed_because: str | None
    default_gpu_memory_utilization: float
    reserves_null_block_at_start: bool


def parse_release(version: str) -> tuple[int, int] | None:
    """`0.32.0`, `0.33.0rc1`, `0.11.2.dev5+gabc` -> (0, 32) ...; None for anything that is no release number.

    vLLM's source builds without tags call themselves `0.1.dev...`: no release is known for them.
    """
    match = _VERSION.match(version.strip())
    if match is None:
        return None
    release = (int(match[1]), int(match[2]))
    return None if release < OLDEST_KNOWN_RELEASE else release


def rules_for(version: str | None) -> ReleaseRules:
    """The rules of `version`; an unknown or newer release takes the newest known rules, and says so."""
    release = None if version is None else parse_release(version)
    newest = ".".join(map(str, NEWEST_KNOWN_RELEASE))
    if version is None:
        assumed = f"the server's release is not known; rules of vLLM {newest} taken"
    elif release is None:
        assumed = f"{version!r} is not a release number; rules of vLLM {newest} taken"
    elif release > NEWEST_KNOWN_RELEASE:
        assumed = f"vLLM {version} is newer than the newest known release; rules of {newest} taken"
    else:
        assumed = None
    if release is None or release > NEWEST_KNOWN_RELEASE:
        release = NEWEST_KNOWN_RELEASE
    return ReleaseRules(
        release=release,
        assumed_because=assumed,
        # vllm/config/cache.py: 0.9 up to 0.19, 0.92 from 0.20.0
        default_gpu_memory_utilization=0.92 if release >= (0, 20) else 0.9,
        # vllm/v1/core/kv_cache_planning.py from 0.29.0
        reserves_null_block_at_start=release >= (0, 29),
    )
