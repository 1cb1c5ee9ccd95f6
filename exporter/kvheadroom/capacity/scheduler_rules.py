"""What a release of vLLM's scheduler does, as data; read in the source of 0.10.2 to 0.33.0 (`v1/core/sched/scheduler.py`)."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SchedulerRules:
    """How a waiting request is admitted, and what the page tells.

    Attributes:
        since: the first release that does so.
        whole_prompt_must_fit: all tokens known of a request must fit in the free blocks before its first chunk starts
            (`scheduler_reserve_full_isl`, on by default); else only the first chunk must.
        tells_waiting_by_reason: `num_requests_waiting_by_reason` is on the page.
        has_watermark: `--watermark` keeps a share of the pool free while anything runs.
        tells_pool_tokens: `kv_cache_size_tokens` and `kv_cache_max_concurrency` are on the page.
        tells_attention_block_size: so is `effective_attention_block_size`.
    """

    since: tuple[int, int, int]
    whole_prompt_must_fit: bool = False
    tells_waiting_by_reason: bool = False
    has_watermark: bool = False
    tells_pool_tokens: bool = False
    tells_attention_block_size: bool = False


_FIRST_CHUNK = SchedulerRules((0, 10, 2))
_WHOLE_PROMPT = replace(_FIRST_CHUNK, since=(0, 19, 0), whole_prompt_must_fit=True)
_REASONS = replace(_WHOLE_PROMPT, since=(0, 20, 0), tells_waiting_by_reason=True)
_WATERMARK = replace(_REASONS, since=(0, 24, 0), has_watermark=True, tells_pool_tokens=True)
_BLOCK_SIZE = replace(_WATERMARK, since=(0, 32, 0), tells_attention_block_size=True)

RELEASES = (_FIRST_CHUNK, _WHOLE_PROMPT, _REASONS, _WATERMARK, _BLOCK_SIZE)
"""From old to new."""


def scheduler_rules(release: tuple[int, int, int]) -> SchedulerRules:
    """The rules of a release; of one older than all that were read, those of the oldest."""
    return next((rules for rules in reversed(RELEASES) if rules.since <= release), RELEASES[0])
