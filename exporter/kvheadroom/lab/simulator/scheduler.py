"""vLLM's scheduler, step by step or many decode steps at once: `v1/core/sched/scheduler.py` of vLLM 0.33.0.

`Scheduler.schedule` there: the running requests in their order, the last admitted one preempted while a block is missing, then
the waiting ones until one does not fit; `KVCacheManager.allocate_slots`: what must fit. Left out is what needs more than the
numbers of tokens: priorities, LoRA, structured output, other connectors than vLLM's own to host memory, encoders, drafts, stages.
"""

from collections import deque
from dataclasses import dataclass, field

from kvheadroom.lab.simulator.block_pool import BlockPool, Holding
from kvheadroom.lab.simulator.engine import EngineSettings, Request
from kvheadroom.lab.simulator.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class Step:
    """What was scheduled.

    Attributes:
        requests: (request, tokens of it to compute).
        num_prefill_tokens: of prompts, and of what a preempted request had before.
        num_decodes: requests that compute one token.
        num_outputs: requests that get a token.
        num_preempted: requests that gave up their blocks for it.
        num_told: preemptions that are told of at the end of this step.
    """

    requests: list[tuple[Request, int]] = field(repr=False)
    num_prefill_tokens: int
    num_decodes: int
    num_outputs: int
    num_preempted: int
    num_told: int


class Scheduler:
    """The queues and the pool.

    Attributes:
        queries, hits: tokens looked up and found in the prefix cache, each request once.
        external_queries, external_hits: tokens that it had not, looked up and found in the tier.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.num_blocks)
        self.tier = HostTier(settings.tier_chunks)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.queries = self.hits = self.external_queries = self.external_hits = 0
        self._is_blocked = False
        """The first waiting request did not fit, and nothing became free since."""

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """A request ends, in whichever queue it is."""
        if request.holding is not None:
            self.running.remove(request)
            self._release(request)
            if self.settings.tier_chunks:
                self.tier.touch(request.chain, request.num_prompt_tokens // self.settings.block_size)
        else:
            self.waiting.remove(request)
            self._is_blocked = False

    def schedule(self) -> Step:
        """Choose what the next step computes, and give it its blocks."""
        budget = self.settings.max_num_batched_tokens
        scheduled: list[tuple[Request, int]] = []
        num_preempted = num_told = index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            num_new = min(request.num_tokens - request.num_computed, budget)
            holding = request.holding
            assert holding is not None  # noqa: S101 - what runs holds blocks
            missing = self._blocks_of(request.num_computed + num_new) - holding.num_blocks
            while missing > self.pool.num_free and request.holding is not None:
                num_preempted += 1
                num_told += self._preempt()
            if request.holding is None:
                break
            self._give(request, holding, missing, num_new)
            scheduled.append((request, num_new))
            budget -= num_new
            index += 1
        if not num_preempted:
            self._admit(scheduled, budget)
        return _step(scheduled, num_preempted, num_told)

    def finish_step(self, step: Step) -> list[Request]:
        """Account for a step that is over; returns the requests that got a token."""
        outputs = []
        for request, num_new in step.requests:
            request.num_computed += num_new
            if request.num_computed == request.num_tokens:
                # The answer is stored once it is part of a prompt (`offload_prompt_only`).
                is_prefilled = num_new > 1 or not request.num_output_tokens
                if self.settings.tier_chunks and is_prefilled:
                    self.tier.store(request.chain, request.num_prompt_tokens // self.settings.block_size)
                request.num_tokens += 1
                request.num_output_tokens += 1
                outputs.append(request)
        return outputs

    def decode_steps(self, most: int) -> int:
        """How many steps in a row only decode the running requests, up to the first end of one; 0 if the next does not."""
        if not self.running or (self.waiting and not self._admits_nothing()):
            return 0
        if len(self.running) > self.settings.max_num_batched_tokens:
            return 0
        awaited = {chain for chain, _ in self.waiting[0].chain.path} if self.waiting else set()
        for request in self.running:
            # What this one computes, the first that waits can use; so it may fit before anything ends.
            if request.chain in awaited:
                return 0
            # A first token, and one that tells of a preemption, are accounted for by themselves.
            if (
                request.num_tokens - request.num_computed != 1
                or request.num_untold
                or not request.num_output_tokens
            ):
                return 0
            most = min(most, request.output_end - request.num_output_tokens)
        if self._blocks_missing(most) <= self.pool.num_free:
            return most
        fits, does_not = 0, most
        while does_not - fits > 1:
            middle = (fits + does_not) // 2
            if self._blocks_missing(middle) <= self.pool.num_free:
                fits = middle
            else:
                does_not = middle
        return fits

    def fits_at_full_length(self) -> bool:
        """Whether the pool has room for all that is here, each request at its end: then nothing is preempted before more comes."""
        missing = sum(
            self._blocks_of(request.num_prompt_tokens + request.output_end)
            - (0 if request.holding is None else request.holding.num_blocks)
            for request in (*self.running, *self.waiting)
        )
        return missing <= self.pool.num_free

    def decode(self, num_steps: int) -> None:
        """Do so many steps at once; each running request gets as many tokens."""
        for request in self.running:
            holding = request.holding
            assert holding is not None  # noqa: S101 - what runs holds blocks
            missing = self._blocks_of(request.num_computed + num_steps) - holding.num_blocks
            self._give(request, holding, missing, num_steps)
            request.num_computed += num_steps
            request.num_tokens += num_steps
            request.num_output_tokens += num_steps

    def _blocks_missing(self, num_steps: int) -> int:
        return sum(
            self._blocks_of(request.num_computed + num_steps) - request.holding.num_blocks
            for request in self.running
            if request.holding is not None
        )

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.settings.block_size)

    def _give(self, request: Request, holding: Holding, num_blocks: int, num_new: int) -> None:
        """Blocks for `num_new` tokens more; those that this step fills are found by others at once, as in vLLM."""
        if num_blocks > 0:
            self.pool.allocate(holding, num_blocks)
        num_full = (request.num_computed + num_new) // self.settings.block_size
        if self.settings.enable_prefix_caching and num_full > holding.num_full:
            self.pool.fill(holding, num_full)

    def _admit(self, scheduled: list[tuple[Request, int]], budget: int) -> None:
        settings, rules = self.settings, self.settings.rules
        self._is_blocked = False
        while budget and self.waiting and len(self.running) < settings.max_num_seqs:
            request = self.waiting[0]
            # The last token is always computed, else there would be nothing to sample from.
            most = (request.num_tokens - 1) // settings.block_size if settings.enable_prefix_caching else 0
            num_hits, num_held = self.pool.look_up(request.chain, most)
            found = (
                max(num_hits, self.tier.look_up(request.chain, most)) if settings.tier_chunks else num_hits
            )
            num_found_tokens = found * settings.block_size
            num_new = min(request.num_tokens - num_found_tokens, budget)
            end = request.num_tokens if rules.whole_prompt_must_fit else num_found_tokens + num_new
            required = self._blocks_of(end) - num_held + (settings.watermark_blocks if self.running else 0)
            if required > self.pool.num_free:
                self._is_blocked = True
                return
            self.waiting.popleft()
            self.running.append(request)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_found_tokens
                request.num_external_tokens = num_found_tokens - num_hits * settings.block_size
                self._count_look_up(request)
            if found > num_hits:
                self.tier.load(request.chain, found, found - num_hits)
            holding = request.holding = self.pool.hold(request.chain, num_hits)
            request.num_computed = num_found_tokens
            self._give(request, holding, self._blocks_of(request.num_computed + num_new) - num_hits, num_new)
            scheduled.append((request, num_new))
            budget -= num_new

    def _count_look_up(self, request: Request) -> None:
        if not self.settings.enable_prefix_caching:
            return
        hits = (request.num_cached_tokens or 0) - request.num_external_tokens
        self.queries += request.num_tokens
        self.hits += hits
        if self.settings.tier_chunks:
            self.external_queries += request.num_tokens - hits
            self.external_hits += request.num_external_tokens

    def _admits_nothing(self) -> bool:
        return self._is_blocked or len(self.running) >= self.settings.max_num_seqs

    def _preempt(self) -> int:
        """The last admitted request gives up its blocks and waits as the first; returns how many are told of at once."""
        request = self.running[-1]
        was_decoding = request.num_tokens - request.num_computed == 1 and request.num_output_tokens > 0
        self.running.pop()
        self._release(request)
        self.waiting.appendleft(request)
        request.num_computed = 0
        request.num_preemptions += 1
        # With asynchronous scheduling the step before is still on its way, and its output takes the word along.
        if self.settings.async_scheduling and was_decoding:
            told, request.num_untold = request.num_untold + 1, 0
            return told
        request.num_untold += 1
        return 0

    def _release(self, request: Request) -> None:
        if request.holding is not None:
            self.pool.release(request.holding)
            request.holding = None
        self._is_blocked = False


def _step(scheduled: list[tuple[Request, int]], num_preempted: int, num_told: int) -> Step:
    num_decodes = num_prefill_tokens = num_outputs = 0
    for request, num_new in scheduled:
        if num_new == 1:
            num_decodes += 1
        else:
            num_prefill_tokens += num_new
        num_outputs += request.num_computed + num_new == request.num_tokens
    return Step(scheduled, num_prefill_tokens, num_decodes, num_outputs, num_preempted, num_told)
