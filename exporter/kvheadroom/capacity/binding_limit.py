"""What keeps waiting requests out of the running batch, as far as one engine's page tells it.

vLLM's scheduler (0.33.0 `v1/core/sched/scheduler.py` `schedule`) admits what waits one after the other until one of these stops it,
in this order: a victim was preempted in this step, the step's tokens are spent, max_num_seqs run, or the next one's blocks are
not free. It says nowhere which it was. What the page cannot tell apart is `None` here, with the reason.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from kvheadroom.capacity.facts import EngineFacts, Fact
from kvheadroom.capacity.history import Growth, Moment, PastFigures, Recent, growth
from kvheadroom.capacity.kv_specs import ceil_div
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.prefix_cache import mean_tokens
from kvheadroom.capacity.readings import EngineSnapshot

UNSPENT_RATIO = 0.5
"""Where steps used less of their tokens than this share on average, the tokens were not what stopped admission in most of them."""


class Limit(StrEnum):
    """What binds. A closed list."""

    KV_POOL = "kv_pool"
    MAX_NUM_SEQS = "max_num_seqs"
    TOKEN_BUDGET = "token_budget"  # noqa: S105
    DEFERRED = "deferred"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class BindingLimit:
    """What binds one engine now.

    Attributes:
        limit: None where it is not known.
        why: the numbers it goes by, or why it is not known; one sentence.
    """

    limit: Limit | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Blocks that a waiting request takes before it may run; each None where it is not known.

    Attributes:
        longest_blocks: one of max_model_len tokens, which none takes more than.
        usual_tokens: what the mean prompt of those that finished does not find in the prefix cache.
        usual_blocks: for these, or for as many of them as have to fit at once: the least that it takes.
        prompt_blocks: the same of all of that prompt. What is found in the cache takes free blocks as well, unless a running request holds
            it (`get_num_blocks_to_allocate` of v1/core/single_type_kv_cache_manager.py, 0.33.0, counts evictable blocks).
    """

    longest_blocks: int | None
    usual_tokens: float | None = None
    usual_blocks: int | None = None
    prompt_blocks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One engine between the scrape before and now.

    Attributes:
        now: the snapshot's figures.
        recent: earlier instants of the same run.
        course: every scrape of the last five minutes, at most one a second.
        need: blocks of a waiting request.
    """

    snapshot: EngineSnapshot
    now: Moment
    facts: EngineFacts
    observation: Observation
    recent: Recent
    need: Need
    course: PastFigures = field(default_factory=PastFigures)

    @property
    def queue(self) -> float | None:
        """Requests that wait for room; with those that wait for something else before 0.20, which tells no reasons."""
        told = self.snapshot.requests_waiting_capacity
        return self.snapshot.requests_waiting if told is None else told

    def since(self, moment: Moment | None) -> Growth | None:
        """What the counters grew by since then."""
        return None if moment is None else growth(moment, self.now)


def usual_tokens(lengths_of: Growth, hit_ratio: float | None) -> float | None:
    """Tokens of the mean prompt that are not found in the prefix cache.

    Args:
        lengths_of: tells the lengths of finished requests.
        hit_ratio: share of the prompts that is found.
    """
    prompt = mean_tokens(lengths_of, "finished_prompt_tokens_total")
    return None if prompt is None or hit_ratio is None else prompt * (1 - hit_ratio)


def usual_blocks(facts: EngineFacts, observation: Observation, tokens: float | None) -> int | None:
    """Blocks that so many tokens of a prompt take before it may run.

    Up to 0.18 only the first chunk has to fit, from 0.19 on the whole prompt.
    """
    # Only where blocks are tokens, as with a single group.
    if tokens is None or observation.used_tokens is None or not observation.block_size:
        return None
    if not facts.rules.scheduler.whole_prompt_must_fit:
        if facts.max_num_batched_tokens is None:
            return None
        tokens = min(tokens, facts.max_num_batched_tokens.value)
    return max(1, ceil_div(round(tokens), observation.block_size))


def find_binding_limit(now: Admission) -> BindingLimit:
    """The limit that binds, by what is certain first."""
    snapshot = now.snapshot
    waiting, queue, running = snapshot.requests_waiting, now.queue, snapshot.requests_running
    if snapshot.sleeping:
        return BindingLimit(None, "the engine sleeps")
    if waiting is None or queue is None or running is None:
        return BindingLimit(None, "the page does not tell its running and waiting requests")
    if waiting == 0:
        return BindingLimit(Limit.NONE, "no request waits")
    if queue == 0:
        return BindingLimit(
            Limit.DEFERRED,
            f"{_requests(waiting)}, none of them for room: for a LoRA slot, a grammar, or blocks that a connector loads",
        )
    return _certain(now, queue, running) or _excluded(now, queue, running)


def _certain(now: Admission, queue: float, running: float) -> BindingLimit | None:
    """What the numbers of this scrape and of the one before prove by themselves."""
    seqs, free = now.facts.max_num_seqs, now.observation.free_blocks
    if seqs is not None and running == seqs.value:
        return BindingLimit(
            Limit.MAX_NUM_SEQS,
            f"{running:,.0f} run, which is max_num_seqs{_mark(seqs)}, and {_requests(queue)}",
        )
    # Counted late, so one that ran into max_num_seqs since is looked at first.
    since = now.since(now.recent.previous)
    preempted = None if since is None else since.of("preemptions_total")
    if preempted:
        return BindingLimit(
            Limit.KV_POOL, f"{preempted:,.0f} preempted since the scrape before, and {_requests(queue)}"
        )
    if free == 0:
        return BindingLimit(Limit.KV_POOL, f"no block is free, and {_requests(queue)}")
    return None


def _excluded(now: Admission, queue: float, running: float) -> BindingLimit:
    """The one that is left where the others cannot be it."""
    seqs, free, previous = now.facts.max_num_seqs, now.observation.free_blocks, now.recent.previous
    if previous is None:
        return BindingLimit(
            None, f"{_requests(queue)} at the first scrape; the next one tells whether they stay"
        )
    if not queue_at(previous):
        return BindingLimit(
            None, f"{_requests(queue)}, and none did one scrape before: they may just have come"
        )
    ran = previous.of("requests_running") or 0.0
    if seqs is not None and max(running, ran) > seqs.value:
        return BindingLimit(
            None, f"{max(running, ran):,.0f} run, more than max_num_seqs ({seqs.value:,}{_mark(seqs)})"
        )
    if free is None:
        return BindingLimit(None, f"{_requests(queue)}, and the page does not tell how many blocks are free")
    usual, longest = now.need.usual_blocks, now.need.longest_blocks
    steps = [
        found
        for moment in (previous, now.recent.seconds_10, now.recent.seconds_30)
        if (found := steps_since(now, moment)) is not None
    ]
    seen_ratio = max((found.seen_ratio for found in steps), default=0.0)
    if usual is not None and free < usual and seen_ratio < 1:
        return BindingLimit(
            Limit.KV_POOL, f"{_blocks(free)} free, the usual prompt needs {usual:,}, and {_requests(queue)}"
        )
    if seqs is not None and ran == seqs.value:
        # A request that ended in the step of this scrape has already left the batch, and nothing has taken its place yet.
        return BindingLimit(
            Limit.MAX_NUM_SEQS,
            f"{ran:,.0f} ran one scrape before, which is max_num_seqs{_mark(seqs)}, and {_requests(queue)}",
        )
    if seqs is None or seqs.assumed:
        return BindingLimit(
            None,
            f"{_requests(queue)} and {_blocks(free)} free, but max_num_seqs is not known; say it in `flags: {{max_num_seqs: N}}`",
        )
    freest = _least_free(now, previous, free)
    if longest is not None and freest is not None and freest >= longest:
        return _not_the_pool(
            now, seqs.value, queue, f"{_blocks(free)} free, a request takes {longest:,} at most"
        )
    told = now.snapshot.requests_waiting_capacity is not None
    # The shortest time in which what cannot be seen is small beside what the steps had room for.
    telling = next((found for found in steps if found.unseen_ratio < UNSPENT_RATIO / 2), None)
    most = None if telling is None else telling.counted_ratio + telling.unseen_ratio
    if told and most is not None and max(most, seen_ratio) < UNSPENT_RATIO:
        return BindingLimit(
            Limit.KV_POOL,
            f"{_requests(queue)} and {_blocks(free)} free; {running:,.0f} of {seqs.value:,} run, and steps used at most "
            f"{most:.0%} of their tokens: what waits does not fit",
        )
    return BindingLimit(
        None,
        f"{_requests(queue)} and {_blocks(free)} free; whether the next one fits, or the tokens of the steps are spent, "
        "is not told",
    )


def _not_the_pool(now: Admission, max_num_seqs: int, queue: float, room: str) -> BindingLimit:
    ten = now.recent.seconds_10
    since = now.since(ten or now.recent.previous)
    done = (
        0.0
        if since is None
        else sum(since.of(name) or 0.0 for name in ("prompt_tokens_total", "generation_tokens_total"))
    )
    if done == 0 or now.snapshot.requests_waiting_capacity is None:
        return BindingLimit(None, f"{_requests(queue)} although {room}, and the page does not tell for what")
    if ten is not None and ten.of("requests_running") == max_num_seqs:
        return BindingLimit(
            None, f"{_requests(queue)} although {room}; 10 s ago max_num_seqs ({max_num_seqs:,}) ran"
        )
    return BindingLimit(
        Limit.TOKEN_BUDGET,
        f"{_requests(queue)}, neither for blocks ({room}) nor for max_num_seqs: the tokens of each step are spent",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the steps since an earlier scrape computed, in shares of the tokens that they had room for.

    Attributes:
        counted_ratio: prompts completed and tokens generated.
        under_way_ratio: what the pool holds more than then.
        unseen_ratio: what can have been computed besides at most.
    """

    counted_ratio: float
    under_way_ratio: float
    unseen_ratio: float

    @property
    def seen_ratio(self) -> float:
        """What the page shows of it."""
        return self.counted_ratio + self.under_way_ratio


def steps_since(now: Admission, moment: Moment | None) -> Steps | None:
    """None where it is not known.

    A step gives each running request at most one token, and those of a draft. So there were generated tokens / (running x
    (1 + draft)) steps or more, with a budget of max_num_batched_tokens each. A prompt is counted once, as it is completed;
    while steps are full only the last one admitted is under way, and what was preempted is computed again without being counted: each of
    these has at most max_model_len tokens.
    """
    budget, since, running = (
        now.facts.max_num_batched_tokens,
        now.since(moment),
        now.snapshot.requests_running,
    )
    if budget is None or budget.assumed or since is None or moment is None or running is None:
        return None
    prompts, generated = since.of("prompt_tokens_total"), since.of("generation_tokens_total")
    room, used = now.observation.usable_blocks, now.observation.used_tokens
    ran, usage = moment.of("requests_running"), moment.of("kv_usage_ratio")
    if prompts is None or not generated or ran is None or usage is None or used is None or room is None:
        return None
    num_steps = generated / (max(running, ran, 1.0) * (1 + now.facts.draft.tokens))
    room_tokens = num_steps * budget.value
    more = max(0.0, used - usage * room * (now.observation.block_size or 0))
    longest, preempted = now.facts.max_model_len, since.of("preemptions_total")
    unseen = math.inf if longest is None or preempted is None else (1 + preempted) * longest.value
    return Steps(
        counted_ratio=(prompts + generated) / room_tokens,
        under_way_ratio=more / room_tokens,
        unseen_ratio=unseen / room_tokens,
    )


def queue_at(moment: Moment) -> float | None:
    """As Admission.queue, of an earlier scrape."""
    told = moment.of("requests_waiting_capacity")
    return moment.of("requests_waiting") if told is None else told


def _least_free(now: Admission, previous: Moment, free: int) -> float | None:
    """Free blocks at the scrape with fewer of them: requests that end in the step of a scrape make the last one look roomy."""
    usable, usage = now.observation.usable_blocks, previous.of("kv_usage_ratio")
    return None if usable is None or usage is None else min(free, usable * (1 - usage))


def _requests(number: float) -> str:
    return "1 request waits" if number == 1 else f"{number:,.0f} requests wait"


def _blocks(number: float) -> str:
    return "1 block is" if number == 1 else f"{number:,.0f} blocks are"


def _mark(fact: Fact[int]) -> str:
    return " (assumed)" if fact.assumed else ""
