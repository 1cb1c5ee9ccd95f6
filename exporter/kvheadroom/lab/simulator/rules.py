"""What a release of vLLM's scheduler does, as data; read in the source of 0.10.2 to 0.33.0 (`v1/core/sched/scheduler.py`)."""

from dataclasses import dataclass

from kvheadroom.capacity.errors import OperatorError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRules:
    """How a waiting request is admitted, and what the page tells.

    Attributes:
        since: the first release that does so.
        whole_prompt_must_fit: all tokens known of a request must fit in the free blocks before its first chunk starts
            (`scheduler_reserve_full_isl`, on by default); else only the first chunk must.
        has_watermark: `--watermark` keeps a share of the pool free while anything runs.
        tells_waiting_by_reason: `num_requests_waiting_by_reason` is on the page.
        tells_pool_tokens: so are `kv_cache_size_tokens` and what belongs to it.
    """

    since: tuple[int, int, int]
    whole_prompt_must_fit: bool
    has_watermark: bool
    tells_waiting_by_reason: bool
    tells_pool_tokens: bool


def _rules(
    since: tuple[int, int, int], *, whole: bool = False, reasons: bool = False, watermark: bool = False
) -> ReleaseRules:
    return ReleaseRules(
        since=since,
        whole_prompt_must_fit=whole,
        has_watermark=watermark,
        tells_waiting_by_reason=reasons,
        tells_pool_tokens=watermark,
    )


RELEASES: tuple[ReleaseRules, ...] = (
    _rules((0, 10, 2)),
    _rules((0, 19, 0), whole=True),
    _rules((0, 20, 0), whole=True, reasons=True),
    _rules((0, 24, 0), whole=True, reasons=True, watermark=True),
)


def rules_of(version: str) -> ReleaseRules:
    """The rules of a release such as `0.33.0`.

    Raises:
        OperatorError: the release is older than what is simulated, or no release.
    """
    numbers = version.partition("+")[0].split(".")
    if len(numbers) < 3 or not all(number.isdecimal() for number in numbers[:3]):
        raise OperatorError(f"{version!r} is no release of vLLM; give one such as 0.33.0")
    asked = (int(numbers[0]), int(numbers[1]), int(numbers[2]))
    if asked < RELEASES[0].since:
        raise OperatorError(f"vLLM {version} is not simulated: its scheduler was read from 0.10.2 on")
    return next(rules for rules in reversed(RELEASES) if rules.since <= asked)
