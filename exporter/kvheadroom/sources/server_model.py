"""The model of a server that runs on this machine -> its folder, read from here."""

import errno
from pathlib import Path

from kvheadroom.capacity.local_server import LocalServer
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.sources.folder_trees import NotFollowedError, follow_all, seen_from_here
from kvheadroom.sources.hub_environment import HubName, cached_folder, parse_hub_name
from kvheadroom.sources.model_files import SOURCE, read_model_files


def read_server_model(told: str | None, server: LocalServer) -> ModelFiles | SourceFailure:
    """The files of its model, as its own process would open them; blocking.

    Args:
        told: the model as the server itself names it; None where it did not, and its command line counts.
    """
    text = told or server.model
    if text is None:
        detail = "neither the server nor its command line tells the model"
        return SourceFailure(SOURCE, FailureReason.NOT_FOUND, detail)
    # What stands alone in a command line may be anything; it is shown once it is a model's name for sure.
    folders = server.folders
    if not f"{text}{folders.working}{folders.hub_cache}".isprintable():
        detail = "its model, or a folder on the way to it, has a name that cannot be shown"
        return SourceFailure(SOURCE, FailureReason.BAD_ANSWER, detail)
    shown = "the model of its command line" if told is None else f"its model {told[:200]!r}"
    try:
        folder = _folder(text, server, shown)
        if isinstance(folder, SourceFailure):
            return folder
        follow_all(folders.root, folder)
    except NotFollowedError:
        detail = f"{shown} lies behind links that lead elsewhere outside its container"
        return SourceFailure(SOURCE, FailureReason.UNREACHABLE, detail)
    except (OSError, ValueError) as error:
        hidden = isinstance(error, PermissionError)
        reason = FailureReason.NO_PERMISSION if hidden else FailureReason.UNREACHABLE
        why = getattr(error, "strerror", None) or errno.errorcode[errno.EINVAL]
        return SourceFailure(SOURCE, reason, f"{shown} cannot be read ({why})")
    return read_model_files(str(folder))


def _folder(text: str, server: LocalServer, shown: str) -> Path | SourceFailure:
    """As vLLM takes a name: a path that exists, else a name on the hub (`transformers_utils/config.py`)."""
    folders = server.folders
    absolute = text if text.startswith("/") else f"{folders.working}/{text}"
    path = seen_from_here(folders.root, absolute)
    if path.exists() or text.startswith("/"):
        if path.exists():
            return path
        return SourceFailure(SOURCE, FailureReason.NOT_FOUND, f"{shown} is no folder that its process sees")
    name = parse_hub_name(text)
    if name is None:
        return SourceFailure(
            SOURCE,
            FailureReason.NOT_FOUND,
            f"{shown} is neither a folder that its process sees nor a name on the hub",
        )
    if folders.hub_cache is None:
        return SourceFailure(
            SOURCE,
            FailureReason.NOT_FOUND,
            f"{shown} is a name on the hub, and where the server keeps those is not known",
        )
    cache = seen_from_here(folders.root, folders.hub_cache)
    snapshot = cached_folder(cache, HubName(name.name, server.revision or "main"))
    if snapshot is None:
        return SourceFailure(
            SOURCE, FailureReason.NOT_FOUND, f"{shown} is not in the hub's cache of its process ({cache})"
        )
    return snapshot
