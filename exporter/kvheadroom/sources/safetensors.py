"""The headers of a checkpoint's safetensors files -> its tensors and their sizes. No tensor is read.

A file begins with the length of its header (8 bytes, little-endian), then the header in JSON, then the tensors one
after another without gaps. Nothing of a header is believed that the file's own size contradicts.
"""

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from kvheadroom.capacity.facts import TensorInventory

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_FILES = 5_000
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
# Mistral's own copy of the weights, which stands beside the shards and is not loaded with them.
_COPY = "consolidated"


class _BadFileError(Exception):
    pass


def read_tensors(folder: Path, index: Mapping[str, Any] | None) -> TensorInventory | None:
    """The tensors of a folder; None where there is no file of tensors.

    Args:
        index: model.safetensors.index.json, where there is one. Without the files that it names (the weights may lie
            on another machine) its names are all that is known.
    """
    listed = _listed(index)
    names = sorted(set(listed.values())) if listed else _found(folder)
    present = [name for name in names[:MAX_FILES] if (folder / name).is_file()]
    if not present:
        return TensorInventory(sizes=dict.fromkeys(listed)) if listed else None
    try:
        return TensorInventory(sizes=_sizes(folder, names, present, listed))
    except _BadFileError as problem:
        return TensorInventory(problem=str(problem))


def _sizes(
    folder: Path, names: list[str], present: list[str], listed: Mapping[str, str]
) -> dict[str, int | None]:
    if len(names) > MAX_FILES:
        raise _BadFileError(f"{folder}: {len(names)} files of tensors are more than any checkpoint has")
    if missing := sorted(set(names) - set(present)):
        raise _BadFileError(f"{folder / missing[0]}: the index names it, and there is no such file")
    sizes: dict[str, int | None] = {}
    for name in present:
        for tensor, size in _read_header(folder / name).items():
            if tensor in sizes:
                raise _BadFileError(f"{folder / name}: {tensor[:200]} is in another file as well")
            sizes[tensor] = size
    if absent := sorted(set(listed) - set(sizes)):
        raise _BadFileError(f"{folder}: the index names {absent[0][:200]}, and no file holds it")
    return sizes


def _listed(index: Mapping[str, Any] | None) -> dict[str, str]:
    """Tensor -> file, as far as the index tells it; a name that leads out of the folder does not count."""
    where = index.get("weight_map") if index else None
    if not isinstance(where, dict):
        return {}
    return {
        tensor: file
        for tensor, file in where.items()
        if isinstance(file, str)
        and "\0" not in file
        and file not in ("", "..")
        and PurePath(file).name == file
    }


def _found(folder: Path) -> list[str]:
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError:
        return []
    return [name for name in names if not name.startswith(_COPY)] or names


def _read_header(path: Path) -> dict[str, int]:
    """Bytes of each tensor of one file."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise _BadFileError(f"{path}: it is not a regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            left = info.st_size - LENGTH_BYTES - length
            if left < 0 or length > MAX_HEADER_BYTES:
                raise _BadFileError(f"{path}: its header is said to be {length} bytes long, which it is not")
            header = json.loads(file.read(length))
    except OSError as error:
        raise _BadFileError(f"{path}: it cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _BadFileError(f"{path}: its header is no JSON") from None
    if not isinstance(header, dict):
        raise _BadFileError(f"{path}: its header is no JSON object")
    tensors = {name: _span(path, name, told) for name, told in header.items() if name != "__metadata__"}
    end = 0
    for begin, behind in sorted(tensors.values()):
        if begin != end:
            raise _BadFileError(f"{path}: its tensors overlap or leave gaps")
        end = behind
    if end != left:
        raise _BadFileError(f"{path}: its tensors take {end} bytes, and {left} follow its header")
    return {name: behind - begin for name, (begin, behind) in tensors.items()}


def _span(path: Path, name: str, told: Any) -> tuple[int, int]:
    """Where a tensor begins and ends."""
    if isinstance(told, dict):
        shape: Any = told.get("shape")
        offsets: Any = told.get("data_offsets")
        bits = _BITS.get(str(told.get("dtype")))
        if bits is None:
            raise _BadFileError(f"{path}: {name[:200]} has a dtype that is not known to this version")
        if _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2:
            begin, end = offsets
            if (end - begin) * 8 == math.prod(shape) * bits:
                return begin, end
    raise _BadFileError(f"{path}: the shape of {name[:200]} does not make the bytes that it takes")


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 for value in values
    )
