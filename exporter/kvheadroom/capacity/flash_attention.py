"""FlashAttention: four versions, and which of them takes a layer on a GPU.

Source: vLLM 0.33.0 `v1/attention/backends/fa_utils.py`, `flash_attn.py`.
"""

from dataclasses import replace

from kvheadroom.capacity.backend_query import KernelBlocks, Query, is_quantized


def flash_version(query: Query, head_size: int | None, *, hd256: bool = False, sized: bool = False) -> int:
    """FlashAttention's version for a head size (v1/attention/backends/fa_utils.py get_flash_attn_version).

    Args:
        head_size: None asks for the version whatever the head.
        hd256: the caller has a use for the kernel of Blackwell for heads of 256.
        sized: the operator's block size counts.
    """
    major = query.capability[0]
    version = query.model.flash_version or {9: 3, 10: 4}.get(major, 2)
    if major >= 10 and version == 3:
        version = 4 if major in (10, 11) else 2
    if version == 3 and head_size is not None and head_size > 256:
        version = 4
    if version == 4 and head_size == 256 and major in (10, 11):
        odd_block = sized and query.block_size is not None and query.block_size % 128 != 0
        without = (
            query.has_sink
            or query.model.softcap
            or is_quantized(query.model.cache_dtype)
            or odd_block
            or query.model.image_prefix
            or query.decode_context > 1
        )
        if not hd256 or without:
            version = 2
    if version == 4 and major >= 10 and head_size is not None and head_size > 128 and head_size != 256:
        version = 2
    return version


def _takes_fp8(query: Query, head_size: int | None, *, hd256: bool = False) -> bool:
    version = flash_version(query, head_size, hd256=hd256, sized=True)
    if query.capability[0] == 9:
        return version == 3 or (version == 4 and head_size in (None, 512))
    return version == 4 and query.capability[0] == 10


def flash_takes(query: Query) -> bool:
    """Whether it takes the layer, beyond what the table of backends tells (`supports_combination`)."""
    head, major = query.head_size, query.capability[0]
    if head % 8 or head > (512 if major in (9, 10, 11) else 256):
        return False
    if is_quantized(query.kv_dtype) and not (_takes_fp8(query, None) and _takes_fp8(query, head, hd256=True)):
        return False
    if query.model.image_prefix:
        if is_quantized(query.kv_dtype) and query.capability == (9, 0):
            return False
        return flash_version(query, head, hd256=True, sized=True) == 4
    return True


def flash_takes_causal(query: Query) -> bool:
    """Whether it takes everything but the images."""
    causal = replace(query, model=replace(query.model, image_prefix=False))
    # The version is chosen knowing that the model has images.
    version = flash_version(query, query.head_size, hd256=True, sized=True)
    return version in (3, 4) and flash_takes(causal)


def flash_blocks(query: Query) -> KernelBlocks:
    """Block sizes of its kernels (`get_supported_kernel_block_sizes`)."""
    major, head = query.capability[0], query.head_size
    fp8 = query.kv_dtype in ("fp8", "fp8_e4m3")
    if major == 9 and fp8 and head == 512 and flash_version(query, 512) == 4:
        return KernelBlocks(exact=(64,))
    same_heads = query.head_size_v in (None, head)
    if major in (10, 11) and head == 256 and same_heads and flash_version(query, 256, hd256=True) == 4:
        return KernelBlocks(exact=(128,))
    return KernelBlocks(multiples_of=16)
