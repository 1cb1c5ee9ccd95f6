"""The header of a safetensors file: what tensors it holds, and whether it tells the truth about them.

The format: 8 bytes (little-endian) with the length of the header, the header as JSON, then the tensors without gaps.
"""

import json
import math
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvheadroom.capacity.stored_model import StoredTensor

LENGTH_BYTES = 8
LFS_POINTER = b"version "
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

# Bits of one number of each type of the format.
_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class BadHeaderError(Exception):
    """What is wrong with a header, in words."""


def header_length(start: bytes) -> int:
    """Bytes of the header, from the first eight of the file.

    Raises:
        BadHeaderError: it cannot be.
    """
    if len(start) < LENGTH_BYTES:
        raise BadHeaderError("the file is shorter than the length of a header")
    if start.startswith(LFS_POINTER):
        raise BadHeaderError("it is a pointer of Git LFS, not the file itself (`git lfs pull` brings it)")
    length: int = struct.unpack("<Q", start[:LENGTH_BYTES])[0]
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise BadHeaderError(f"its header would have {length:,} bytes, so it is no safetensors file")
    return length


def parse_header(content: bytes, file_bytes: int | None) -> tuple[StoredTensor, ...]:
    """The tensors of one header.

    Args:
        content: the JSON.
        file_bytes: size of the whole file where it is known; it must be what the header says.

    Raises:
        BadHeaderError: the header contradicts itself or the file.
    """
    try:
        parsed = json.loads(content, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError):
        raise BadHeaderError("its header is no JSON") from None
    if not isinstance(parsed, dict):
        raise BadHeaderError("its header holds no JSON object")
    placed = [_tensor(name, entry) for name, entry in parsed.items() if name != "__metadata__"]
    # Empty tensors stand where the next one begins.
    placed.sort(key=lambda one: one[:2])
    end = 0
    for begin, stop, tensor in placed:
        if begin != end:
            raise BadHeaderError(
                f"{tensor.name[:80]} begins at byte {begin:,}, and {end:,} is where it should"
            )
        end = stop
    expected = LENGTH_BYTES + len(content) + end
    if file_bytes is not None and file_bytes != expected:
        raise BadHeaderError(
            f"it has {file_bytes:,} bytes, and its header speaks of {expected:,}, so it was cut off or written over"
        )
    return tuple(tensor for _, _, tensor in placed)


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of one file, whose data is not read; blocking.

    Raises:
        BadHeaderError: it is no whole safetensors file.
        OSError: it cannot be read.
    """
    # A folder may be named by a server we do not own: no pipe or device is opened.
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise BadHeaderError("it is not a regular file")
    with path.open("rb") as file:
        length = header_length(file.read(LENGTH_BYTES))
        content = file.read(length)
        if len(content) < length:
            raise BadHeaderError("it ends within its header")
        return parse_header(content, info.st_size)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadHeaderError(f"it names {twice[:80]} twice")
    return found


def _tensor(name: str, entry: Any) -> tuple[int, int, StoredTensor]:
    """(first byte, byte after the last, the tensor)."""
    try:
        dtype, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        bits = _BITS[dtype]
    except (KeyError, TypeError, ValueError):
        raise BadHeaderError(f"{name[:80]} has no type, shape and place that are known") from None
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, stop)):
        raise BadHeaderError(f"{name[:80]} has no whole numbers for its shape and place")
    size, part = divmod(math.prod(shape) * bits, 8)
    if part or stop - begin != size:
        raise BadHeaderError(
            f"{name[:80]} takes {stop - begin:,} bytes, and its shape and type make {size:,}"
        )
    return begin, stop, StoredTensor(name, dtype, shape, size)
