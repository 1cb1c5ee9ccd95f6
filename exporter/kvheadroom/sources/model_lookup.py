"""MODEL of the command line -> its files: a folder, a config.json, an entry of the hub's cache, or the hub itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.sources.hub_environment import SOURCE as HUB
from kvheadroom.sources.hub_environment import (
    HubEnvironment,
    HubName,
    cached_folder,
    parse_hub_name,
    read_hub_environment,
)
from kvheadroom.sources.model_files import (
    MAX_CONFIG_BYTES,
    SOURCE,
    read_json,
    read_model_files,
    with_file_beside,
)
from kvheadroom.sources.weight_files import TOLERANCE, another_total


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A model's files and where they were found, in words; `hub` where they were fetched."""

    files: ModelFiles
    where: str
    hub: tuple[HubEnvironment, HubName] | None = None


def find_model(text: str, environment: Mapping[str, str], home: Path) -> LocatedModel | SourceFailure:
    """The files of MODEL; blocking. A path that exists is a path, whatever else it could be."""
    path = Path(text).expanduser()
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):
        is_file = is_folder = False
    if is_folder and text:
        return _in_folder(path, f"the folder {path}")
    if is_file and path.suffix == ".json":
        config = read_json(path, MAX_CONFIG_BYTES)
        if not isinstance(config, SourceFailure):
            config = with_file_beside(config, path.parent)
        if isinstance(config, SourceFailure):
            return config
        return LocatedModel(ModelFiles(folder=str(path), config=config), f"the file {path}")
    name = None if is_file or text.startswith((".", "/", "~")) else parse_hub_name(text)
    if name is None:
        detail = f"{text[:200]!r}: it is no folder here, no config.json, and no name on the hub (organisation/name)"
        return SourceFailure(SOURCE, FailureReason.NOT_FOUND, detail + _did_you_mean(text))
    found = _on_hub(name, read_hub_environment(environment, home))
    if isinstance(found, SourceFailure):
        return replace(found, detail=f"{found.detail}; nor is there a folder {text[:200]!r} here")
    return found


def _did_you_mean(text: str) -> str:
    """A name on the hub in the address of its page, or with a slash at its end."""
    _, is_address, path = text.partition("://")
    parts = path.split("/")[1:3] if is_address else text.rstrip("/").split("/")
    name = "/".join(part for part in parts if part)
    return f"; did you mean {name}?" if name != text and parse_hub_name(name) else ""


def _on_hub(name: HubName, hub: HubEnvironment) -> LocatedModel | SourceFailure:
    snapshot = cached_folder(hub.cache, name)
    cached: LocatedModel | SourceFailure | None = None
    if snapshot is not None:
        cached = _in_folder(snapshot, f"the hub's cache, commit {snapshot.name[:12]}")
        if isinstance(cached, LocatedModel) and cached.files.weights_bytes is not None:
            return cached
    if hub.offline:
        if isinstance(cached, LocatedModel):
            return cached
        detail = (
            f"{name.name}: it is not in the hub's cache ({hub.cache}), and HF_HUB_OFFLINE forbids to ask the hub; give a "
            "folder that holds config.json and model.safetensors.index.json"
        )
        return SourceFailure(HUB, FailureReason.NOT_FOUND, detail)
    # A hub name alone needs the network and its library.
    from kvheadroom.sources.model_hub import fetch_model_files

    files = fetch_model_files(hub, name)
    if isinstance(files, SourceFailure):
        return cached if isinstance(cached, LocatedModel) else files
    return LocatedModel(files, f"{hub.shown_endpoint}, revision {name.revision}", (hub, name))


def with_headers(located: LocatedModel, report: Callable[[int, int], None]) -> ModelFiles:
    """The files of a model on the hub with what the headers of its shards tell; blocking.

    Args:
        report: told how many of them have come, and of how many.
    """
    files = located.files
    if located.hub is None or not files.shards:
        return files
    from kvheadroom.sources.hub_headers import fetch_headers

    tensors = fetch_headers(*located.hub, files.shards, report)
    if isinstance(tensors, SourceFailure):
        doubt = f"{tensors.detail}; so the types and sizes of the tensors are not known"
        return replace(files, weights_doubts=(*files.weights_doubts, doubt))
    total, told = tensors.total_bytes, files.weights_bytes
    if total is None:
        return replace(files, tensors=tensors)
    doubts = files.weights_doubts
    if told is not None and abs(told - total) > TOLERANCE * total:
        doubts += (another_total(told, total),)
    return replace(
        files,
        tensors=tensors,
        weights_bytes=total,
        weights_unknown="",
        weights_faulty=False,
        weights_doubts=doubts,
    )


def _in_folder(folder: Path, where: str) -> LocatedModel | SourceFailure:
    files = read_model_files(str(folder))
    return files if isinstance(files, SourceFailure) else LocatedModel(files, where)
