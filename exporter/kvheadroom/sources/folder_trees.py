"""Paths as another process sees them -> paths that lead to the same files here.

A process in a container has another `/`. The kernel shows it as `/proc/PID/root`, but an absolute link met on the way would
lead into our own tree, to other files of the same name; so each step is taken by hand.
"""

import os
from pathlib import Path

MOST_LINKS = 40


class NotFollowedError(OSError):
    """The path cannot be followed to the files that the process sees."""


def seen_from_here(root: str, path: str) -> Path:
    """Where an absolute path of a process lies here. Without anything there, the path is given all the same.

    Args:
        root: where the `/` of the process is found here; empty where it is ours.

    Raises:
        NotFollowedError: too many links.
        OSError: a folder on the way may not be read.
    """
    if not root:
        return Path(path)
    done: list[str] = []
    steps = _steps(path)
    links = 0
    while steps:
        step = steps.pop()
        if step == "..":
            del done[-1:]
            continue
        here = os.path.join(root, *done, step)  # noqa: PTH118  a root is a text
        try:
            target = os.readlink(here)  # noqa: PTH115  as above
        except FileNotFoundError:
            target = None
        except OSError as error:
            if isinstance(error, PermissionError):
                raise
            # It is no link.
            target = None
        if target is None:
            done.append(step)
            continue
        links += 1
        if links > MOST_LINKS:
            raise NotFollowedError
        if target.startswith("/"):
            done = []
        steps += _steps(target)
    return Path(root, *done)


def follow_all(root: str, folder: Path) -> None:
    """Make sure that the files of a folder, opened here, are those that the process would open.

    Raises:
        NotFollowedError: one of them is a link that leads elsewhere from here.
        OSError: the folder cannot be read.
    """
    if not root:
        return
    inside = "/" + str(folder.relative_to(root))
    links = [entry.name for entry in os.scandir(folder) if entry.is_symlink()]
    for name in ("", *links):
        if _identity(folder / name) != _identity(seen_from_here(root, f"{inside}/{name}")):
            raise NotFollowedError


def _steps(path: str) -> list[str]:
    """The parts of a path, the first one last."""
    return [step for step in reversed(path.split("/")) if step not in ("", ".")]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino
