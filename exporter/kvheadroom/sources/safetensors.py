"""The headers of a checkpoint's safetensors files -> its tensors and their sizes. No tensor is read.

Nothing of a header is believed that the file's own size contradicts.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from kvheadroom.capacity.stored_model import StoredTensor, TensorInventory
from kvheadroom.capacity.weights.stored import together
from kvheadroom.sources.safetensors_header import BadHeaderError, read_header
from kvheadroom.sources.weight_files import consolidated

MAX_FILES = 5_000


def read_tensors(folder: Path, index: Mapping[str, Any] | None) -> TensorInventory | None:
    """The tensors of a folder; None where there is no file of tensors.

    Args:
        index: model.safetensors.index.json, where there is one. Without the files that it names (the weights may lie
            on another machine) its names are all that is known.
    """
    found, listed = _found(folder), shards_of(index)
    copies = consolidated(found)
    if copies:
        listed = {}
    names = copies or (sorted(set(listed.values())) if listed else found)
    present = [name for name in names[:MAX_FILES] if (folder / name).is_file()]
    if not present:
        return named_tensors(index)
    if len(names) > MAX_FILES:
        return TensorInventory(
            problem=f"{folder}: {len(names)} files of tensors are more than any checkpoint has"
        )
    if missing := sorted(set(names) - set(present)):
        return TensorInventory(
            problem=f"{folder / missing[0]}: the index names it, and there is no such file"
        )
    return gathered(
        str(folder), ((str(folder / name), _read_header(folder / name)) for name in present), listed
    )


def named_tensors(index: Mapping[str, Any] | None) -> TensorInventory | None:
    """The tensors that an index names, without their sizes; None where it names none."""
    listed = shards_of(index)
    return TensorInventory(sizes=dict.fromkeys(listed)) if listed else None


def inventory(tensors: Collection[StoredTensor]) -> TensorInventory:
    """The tensors that headers tell."""
    return TensorInventory(
        sizes={tensor.name: tensor.size_bytes for tensor in tensors}, stored=together(tensors)
    )


def gathered(
    where: str, files: Iterable[tuple[str, tuple[StoredTensor, ...] | str]], listed: Collection[str]
) -> TensorInventory:
    """The tensors of all files of a checkpoint.

    Args:
        where: the checkpoint, for people.
        files: the name of each, for people, with the tensors of its header or what is wrong with it.
        listed: the tensors that the index names.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensors in files:
        if isinstance(tensors, str):
            return TensorInventory(problem=f"{name}: {tensors}")
        for tensor in tensors:
            if tensor.name in found:
                return TensorInventory(problem=f"{name}: {tensor.name[:200]} is in another file as well")
            found[tensor.name] = tensor
    if absent := sorted(set(listed) - set(found)):
        return TensorInventory(problem=f"{where}: the index names {absent[0][:200]}, and no file holds it")
    return inventory(found.values())


def shards_of(index: Mapping[str, Any] | None) -> dict[str, str]:
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
        return sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError:
        return []


def _read_header(path: Path) -> tuple[StoredTensor, ...] | str:
    """The tensors of one file; a string says what is wrong with it."""
    try:
        return read_header(path)
    except BadHeaderError as reason:
        return str(reason)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
