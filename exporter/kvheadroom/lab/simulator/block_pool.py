"""The pool of KV blocks with its prefix cache, for models with one group of KV caches.

vLLM keeps one object a block; a pool of 31,310 blocks over two weeks is counted here in runs of blocks instead, so that a
request of any length costs a few steps. What a block holds is told by a chain and a position in it: a chain is a sequence
of tokens, and may be the continuation of another chain from some block on. The rules are those of vLLM 0.33.0:

- `v1/core/block_pool.py`: `get_new_blocks` takes the free block that has been free for longest; `free_blocks` puts blocks
  without content in front of all, the others at the end, the last of a request first; `touch` takes cached ones out.
- `v1/core/single_type_kv_cache_manager.py`: `FullAttentionManager.find_longest_cache_hit` (whole blocks from the start on),
  `get_num_blocks_to_allocate` (a hit that nobody holds is counted like a new block).
"""

from collections import OrderedDict
from collections.abc import Callable

_UNBOUNDED = 2**62


class FreeRun:
    """Free blocks that became free together: positions `low` to `high` of a chain, or of none.

    Attributes:
        chain: None where the content is found no more.
    """

    __slots__ = ("chain", "high", "low")

    def __init__(self, chain: "Chain | None", low: int, high: int) -> None:
        self.chain = chain
        self.low = low
        self.high = high


class Chain:
    """A sequence of tokens whose full blocks can be cached.

    Attributes:
        start: its first block; those before belong to the chains it continues.
        path: (chain, the block where the next one takes over), from the first chain to this one.
        cached_end: blocks from `start` up to here are found by a lookup.
        held_end: of these, the ones up to here are held by requests.
        holds: of the requests that hold some of it.
        runs: the free ones, from `cached_end` down to `held_end`.
    """

    __slots__ = ("cached_end", "held_end", "holds", "path", "runs", "start")

    def __init__(self, continued: "Chain | None" = None, start: int = 0) -> None:
        """A new sequence, or one that is like `continued` up to block `start`."""
        self.start: int = start
        before: list[tuple[Chain, int]] = []
        if continued is not None:
            before = [(chain, min(end, start)) for chain, end in continued.path if chain.start < start]
        self.path: tuple[tuple[Chain, int], ...] = (*before, (self, _UNBOUNDED))
        self.cached_end = self.held_end = start
        self.holds: list[Hold] = []
        self.runs: list[FreeRun] = []

    def twin(self, twin_of: "Callable[[Chain], Chain]") -> "Chain":
        """The same tokens, for another pool of blocks of the same size.

        Args:
            twin_of: gives the twins of the chains that this one continues.
        """
        twin = Chain(start=self.start)
        twin.path = (*((twin_of(part), end) for part, end in self.path[:-1]), (twin, _UNBOUNDED))
        return twin


class Hold:
    """What one request holds of one chain on its path: the cached copies up to `extent`, its own copies after that."""

    __slots__ = ("chain", "end", "extent")

    def __init__(self, chain: Chain, end: int) -> None:
        self.chain = chain
        self.end = end
        self.extent = chain.start


class Holding:
    """The blocks of one request.

    Attributes:
        num_blocks: that it holds.
        num_full: of these, the ones that are full and cached.
    """

    __slots__ = ("holds", "num_blocks", "num_full")

    def __init__(self) -> None:
        self.holds: list[Hold] = []
        self.num_blocks = 0
        self.num_full = 0


class BlockPool:
    """Blocks without content are taken first, so they need no order among themselves; cached ones go by age.

    Attributes:
        num_usable: all blocks but the null block.
        num_free: those that no request holds.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = self.num_free = num_blocks - 1
        self._num_blank = self.num_usable
        self._oldest_first: OrderedDict[FreeRun, None] = OrderedDict()

    def look_up(self, chain: Chain, max_blocks: int) -> tuple[int, int]:
        """(cached blocks from the start on, how many of these some request holds)."""
        hits = held = 0
        for part, end in chain.path:
            found = min(part.cached_end, end, max_blocks)
            if found > part.start:
                hits = found
                held += max(min(part.held_end, found) - part.start, 0)
            if found < end:
                break
        return hits, held

    def hold(self, chain: Chain, num_hits: int) -> Holding:
        """A request begins with the blocks that it found."""
        holding = Holding()
        holding.num_blocks = holding.num_full = num_hits
        for part, end in chain.path:
            hold = Hold(part, end)
            hold.extent = max(min(num_hits, end), part.start)
            if hold.extent > part.held_end:
                self._take(part, hold.extent)
            part.holds.append(hold)
            holding.holds.append(hold)
        return holding

    def allocate(self, holding: Holding, num_new: int) -> None:
        """Give a request blocks without content; `num_free` must suffice."""
        holding.num_blocks += num_new
        self.num_free -= num_new
        blank = min(num_new, self._num_blank)
        self._num_blank -= blank
        if num_new > blank:
            self._evict(num_new - blank)

    def fill(self, holding: Holding, num_full: int) -> None:
        """The first `num_full` blocks of a request are full: others find them from now on."""
        for hold in holding.holds:
            chain = hold.chain
            first, end = max(holding.num_full, chain.start), min(num_full, hold.end)
            # Where another request cached the same first, this one's copies stay its own.
            if first < end and hold.extent == chain.cached_end == first:
                hold.extent = chain.cached_end = chain.held_end = end
        holding.num_full = num_full

    def release(self, holding: Holding) -> None:
        """A request gives up all its blocks, the last one first."""
        self._num_blank += holding.num_blocks - holding.num_full
        self.num_free += holding.num_blocks - holding.num_full
        for hold in reversed(holding.holds):
            chain = hold.chain
            self._release_copies(hold, min(holding.num_full, hold.end))
            chain.holds.remove(hold)
            still_held = max((other.extent for other in chain.holds), default=chain.start)
            if hold.extent > still_held:
                chain.held_end = still_held
                chain.runs.append(self._append(chain, still_held, hold.extent))

    def _release_copies(self, hold: Hold, end: int) -> None:
        """Give up the blocks after `extent`; others find those from now on that nobody had cached before."""
        chain, known_end = hold.chain, hold.chain.cached_end
        if hold.extent <= known_end < end:
            chain.runs.insert(0, self._append(chain, known_end, end))
            chain.cached_end, end = end, known_end
        if hold.extent < end:
            self._append(None, hold.extent, end)

    def _append(self, chain: Chain | None, low: int, high: int) -> FreeRun:
        run = FreeRun(chain, low, high)
        self._oldest_first[run] = None
        self.num_free += high - low
        return run

    def _take(self, chain: Chain, end: int) -> None:
        """Free blocks of a chain, up to `end`, are held again."""
        self.num_free -= end - chain.held_end
        while chain.held_end < end:
            run = chain.runs[-1]
            if run.high <= end:
                chain.held_end = run.high
                chain.runs.pop()
                del self._oldest_first[run]
            else:
                chain.held_end = run.low = end

    def _evict(self, num_blocks: int) -> None:
        """Blocks lose their content, the longest free ones first."""
        while num_blocks:
            run = next(iter(self._oldest_first))
            taken = min(num_blocks, run.high - run.low)
            num_blocks -= taken
            run.high -= taken
            if run.chain is not None:
                self._forget_after(run)
            if run.high == run.low:
                del self._oldest_first[run]

    def _forget_after(self, run: FreeRun) -> None:
        """What followed the blocks that were just evicted is found no more."""
        chain = run.chain
        if chain is None:
            return
        while chain.runs[0] is not run:
            chain.runs.pop(0).chain = None
        chain.cached_end = run.high
        if run.high == run.low:
            chain.runs.pop(0)
