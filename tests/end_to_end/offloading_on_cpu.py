"""A host tier for vLLM's OffloadingConnector on a CPU: vLLM 0.32's own but for the copying.

vLLM's CPUOffloadingSpec (`v1/kv_offload/cpu/spec.py`) refuses a platform without a GPU when its worker is made. Here the worker
copies from tensor to tensor at once. What is stored, found, evicted and counted is decided by vLLM's own scheduler and manager;
bytes are those that were copied, while **seconds of a transfer mean nothing**: no bus is crossed, and the engine waits.

vLLM imports it by `"spec_name": "CopyingSpec", "spec_module_path": "offloading_on_cpu"` in `kv_connector_extra_config`. It finds it
because the command that starts it lies beside it (`vllm_command.py`; Python follows the link), and its processes inherit the path.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks of one KV cache group to chunks of one block each, and back."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._pool = [cache.tensor for cache in kv_caches.tensors]
        self._host = [torch.empty((num_chunks, tensor.shape[1]), dtype=tensor.dtype) for tensor in self._pool]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        """From the pool to the host's memory."""
        return self._copy(job_id, zip(self._pool, self._host, strict=True), src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        """From the host's memory to the pool."""
        return self._copy(job_id, zip(self._host, self._pool, strict=True), src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the call before."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def _copy(
        self,
        job_id: int,
        tensors: Iterable[tuple[Any, Any]],
        source: BlockIDsLoadStoreSpec,
        target: BlockIDsLoadStoreSpec,
    ) -> bool:
        began = time.perf_counter()
        from_rows, to_rows = torch.from_numpy(source.block_ids), torch.from_numpy(target.block_ids)
        copied_bytes = 0
        for source_tensor, target_tensor in tensors:
            rows = source_tensor[from_rows]
            target_tensor[to_rows] = rows
            copied_bytes += rows.nbytes
        self._done.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=copied_bytes,
                transfer_time=time.perf_counter() - began,
            )
        )
        return True


class CopyingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's own, with another worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> CopyingWorker:
        """Asked for once, by the worker's process.

        Raises:
            ValueError: a chunk is more than a block, which this worker cannot copy.
        """
        if self.blocks_per_chunk != 1:
            raise ValueError(f"a chunk is {self.blocks_per_chunk} blocks; this worker copies chunks of one")
        return CopyingWorker(kv_caches, self.num_chunks)
