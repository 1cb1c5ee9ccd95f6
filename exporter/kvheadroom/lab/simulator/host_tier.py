"""The KV cache's tier in host memory, as vLLM's own connector keeps it (0.33.0), for models with one group of KV caches.

- `distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py` of vLLM 0.33.0: the whole chunks of a prompt are stored once they are
  computed, and all of a prompt's are offered again at each admission; a lookup goes on where the engine's own cache ends.
- `v1/kv_offload/cpu/manager.py`, `policies/lru.py`: what nobody has asked for longest is evicted to make room, the last chunk of a request first;
  a request counts as the last use of its chunks when it ends; what finds no room at all is not stored.

A chunk is one block. Transfers take no time here, so none of them holds a chunk. A prompt that is longer than the tier is not stored; vLLM may push its
own beginning out for it.
"""

from kvheadroom.lab.simulator.block_pool import BlockPool, Chain, Holding


class HostTier:
    """Chunks by the sequence that they belong to.

    Attributes:
        num_chunks: 0 where there is no tier.
        num_stored, num_loaded: chunks, since the start.
        num_refused: stores that found no room.
    """

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.num_stored = self.num_loaded = self.num_refused = 0
        # The pool's first block is the null block, which a tier has not.
        self._chunks = BlockPool(num_chunks + 1)
        self._twins: dict[Chain, Chain] = {}
        """A sequence in the engine's pool and the same one here: each knows where it lies in its own."""

    def look_up(self, chain: Chain, max_chunks: int) -> int:
        """Chunks that are there, from the sequence's start on."""
        return self._chunks.look_up(self._twin(chain), max_chunks)[0]

    def store(self, chain: Chain, num_chunks: int) -> None:
        """A prompt's whole chunks are computed: those that are not there yet are copied."""
        held = self._touched(chain, num_chunks)
        missing = num_chunks - held.num_full
        if missing > self._chunks.num_free:
            self.num_refused += 1
        elif missing:
            self._chunks.allocate(held, missing)
            self._chunks.fill(held, num_chunks)
            self.num_stored += missing
        self._chunks.release(held)

    def load(self, chain: Chain, num_chunks: int, num_missing: int) -> None:
        """Of the chunks that were found, those that the engine's own cache had not are copied back."""
        self.touch(chain, num_chunks)
        self.num_loaded += num_missing

    def touch(self, chain: Chain, num_chunks: int) -> None:
        """What is there of a sequence was used last now: its request was admitted, or ends."""
        self._chunks.release(self._touched(chain, num_chunks))

    def _touched(self, chain: Chain, num_chunks: int) -> Holding:
        return self._chunks.hold(self._twin(chain), self.look_up(chain, num_chunks))

    def _twin(self, chain: Chain) -> Chain:
        twin = self._twins.get(chain)
        if twin is None:
            twin = self._twins[chain] = chain.twin(self._twin)
        return twin
