"""How many bytes of weights a model's folder holds, by the files that vLLM would load from it.

vLLM 0.33.0 `model_executor/model_loader/default_loader.py` (_prepare_weights): `consolidated*.safetensors` where there
are any, else the `*.safetensors` that the index names, else all of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvheadroom.capacity.model_config import shown
from kvheadroom.sources.safetensors_header import BadHeaderError, read_header

INDEX_NAME = "model.safetensors.index.json"
LARGEST_BYTES = 2**53
MOST_FILES = 10_000
FEW = 3
TOLERANCE = 0.02
"""Converters that count the headers of the files in are below it; a checkpoint that is not the index's is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """What a folder holds.

    Attributes:
        total_bytes: of all tensors, None where they are not known.
        unknown: why not, one sentence; empty where they are.
        faulty: that is a fault of files that are there, and not that there are none.
        doubts: what does not fit together, each one sentence.
    """

    total_bytes: int | None = None
    unknown: str = ""
    faulty: bool = False
    doubts: tuple[str, ...] = ()


def total_size(index: Mapping[str, Any]) -> int | None:
    """`metadata.total_size` of a safetensors index, None where it tells none."""
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some converters write the size as a float.
    if isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < LARGEST_BYTES:
        return int(size)
    return None


def without_total(index: Mapping[str, Any]) -> str:
    """Why an index tells no total size, one clause."""
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("total_size") is None:
        return f"{INDEX_NAME} has no metadata.total_size"
    return f"{INDEX_NAME} has a metadata.total_size that no checkpoint has ({shown(metadata['total_size'])})"


def shards(index: Mapping[str, Any]) -> tuple[str, ...]:
    """The files that an index names, each once."""
    named = index.get("weight_map")
    if not isinstance(named, dict):
        return ()
    return tuple(dict.fromkeys(file for file in named.values() if isinstance(file, str)))


def consolidated(names: Iterable[str]) -> list[str]:
    """Mistral's own copy of the weights: where it is, vLLM loads it, and none of the other files."""
    return [name for name in names if name.startswith("consolidated")]


def read_weight_files(folder: Path, index: Mapping[str, Any] | None) -> WeightFiles:
    """The weights of a folder; blocking. Headers are read only where the index does not tell.

    Args:
        index: its model.safetensors.index.json, None where it has none.
    """
    try:
        names = sorted(path.name for path in islice(folder.iterdir(), MOST_FILES))
    except OSError as error:
        return _faulty(f"{folder}: it cannot be listed ({error.strerror})")
    stored = [name for name in names if name.endswith(".safetensors")]
    copies = consolidated(stored)
    if copies:
        doubt = f"vLLM loads {copies[0]} here, and not the {len(stored) - len(copies)} other files"
        found = _by_headers(folder, copies)
        return _with(found, doubt) if len(copies) < len(stored) else found
    if index is not None:
        return _by_index(folder, index, stored)
    if stored:
        return _by_headers(folder, stored)
    return _without(folder, names)


def _by_index(folder: Path, index: Mapping[str, Any], stored: list[str]) -> WeightFiles:
    named, total = shards(index), total_size(index)
    here = [name for name in named if name in stored]
    if len(here) < len(named) or not named:
        return _incomplete(index, named, here)
    others = len(stored) - len(here)
    more = (f"{others} files that {INDEX_NAME} does not name are not counted, as vLLM does not load them",)
    doubts = more if others else more[:0]
    if total is None:
        return _with(_by_headers(folder, here), *doubts)
    try:
        size = sum((folder / name).stat().st_size for name in here)
    except OSError as error:
        return WeightFiles(total_bytes=total, doubts=(f"the files cannot be read ({error.strerror})",))
    if abs(size - total) <= TOLERANCE * total:
        return WeightFiles(total_bytes=total, doubts=doubts)
    return _with(_by_headers(folder, here), another_total(total, size), *doubts)


def another_total(told_bytes: int, found_bytes: int) -> str:
    """That an index and its files do not tell the same size."""
    return f"{INDEX_NAME} speaks of {told_bytes:,} bytes, and its files have {found_bytes:,}; the files are believed"


def _incomplete(index: Mapping[str, Any], named: tuple[str, ...], here: list[str]) -> WeightFiles:
    """An index without all of its files: copied alone, or of a folder that is not whole."""
    lost = [name for name in named if name not in here]
    few = f"{len(lost)} of {len(named)} files that {INDEX_NAME} names are not in the folder, and vLLM needs them all"
    total = total_size(index)
    unknown = f"{without_total(index)}, and the files that it names are not here"
    return WeightFiles(
        total_bytes=total,
        unknown="" if total is not None else unknown,
        faulty=total is None,
        doubts=(few,) if here else (),
    )


def _by_headers(folder: Path, names: list[str]) -> WeightFiles:
    """The sum of the tensors, one of each name."""
    sizes: dict[str, int] = {}
    times: Counter[str] = Counter()
    for name in names:
        try:
            tensors = read_header(folder / name)
        except BadHeaderError as reason:
            return _faulty(f"{folder / name}: {reason}")
        except OSError as error:
            return _faulty(f"{folder / name}: it cannot be read ({error.strerror})")
        for tensor in tensors:
            sizes[tensor.name] = tensor.size_bytes
            times[tensor.name] += 1
    twice = [name for name, count in times.items() if count > 1]
    doubts = tuple(f"{name[:80]} stands in several files and is counted once" for name in twice[:FEW])
    total = sum(sizes.values())
    if not total:
        return _with(_faulty(f"{folder}: its safetensors files hold no tensors"), *doubts)
    return WeightFiles(total_bytes=total, doubts=doubts)


def _faulty(unknown: str) -> WeightFiles:
    return WeightFiles(unknown=unknown, faulty=True)


def _with(found: WeightFiles, *doubts: str) -> WeightFiles:
    return replace(found, doubts=(*doubts, *found.doubts))


def _without(folder: Path, names: list[str]) -> WeightFiles:
    for suffix, kind in ((".gguf", "GGUF files"), (".bin", "*.bin files"), (".pt", "*.pt files")):
        if any(name.endswith(suffix) for name in names):
            return _faulty(f"{folder} holds its weights as {kind}, whose sizes are not read")
    return WeightFiles(unknown=f"{folder} holds neither weights nor {INDEX_NAME}")
