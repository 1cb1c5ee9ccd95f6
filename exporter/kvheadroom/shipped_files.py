"""The rules and dashboards that the package brings along, and how they come into a folder of somebody's own."""

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvheadroom.capacity.errors import OperatorError

_RULE_FILES = ("recording.yaml", "alerts.yaml")
_GROUPS = "\ngroups:\n"


class NotWrittenError(Exception):
    """Files that were left as they are; the text says which, why, and the way out."""


@dataclass(frozen=True, slots=True)
class Written:
    """One file, as it was shipped.

    Attributes:
        was_there: with the same content already, so nothing was written.
    """

    path: Path
    was_there: bool


def shipped_folder(name: str) -> Path:
    """`rules`, `json` or `runbooks`, of an installed package or of a checkout."""
    packed = Path(str(resources.files("kvheadroom").joinpath("dashboards", name)))
    return packed if packed.is_dir() else Path(__file__).parents[2] / "dashboards" / name


def rules_text() -> str:
    """All recording rules and alerts as one file of Prometheus, with their comments."""
    heads, bodies = [], []
    for name in _RULE_FILES:
        head, _, body = (shipped_folder("rules") / name).read_text(encoding="utf-8").partition(_GROUPS)
        heads.append(head)
        bodies.append(body.strip("\n"))
    return "\n".join(heads) + _GROUPS + "\n\n".join(bodies) + "\n"


def dashboard_texts() -> dict[str, str]:
    """Grafana dashboards by the names of their files."""
    files = sorted(shipped_folder("json").glob("*.json"))
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def make_folder(path: Path) -> None:
    """The folder, where it is not there yet.

    Raises:
        OperatorError: there is something else, or it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise OperatorError(f"--out: {path} is a file, and a folder is needed") from error
    except OSError as error:
        raise OperatorError(f"--out: {path} cannot be made: {error.strerror}") from error


def write_files(texts: Mapping[Path, str], *, force: bool) -> Sequence[Written]:
    """Write each whole or not at all; none where one of them is not to be replaced.

    Args:
        force: replace files that have another content.

    Raises:
        OperatorError: a path is no place for a file.
        NotWrittenError: a file has another content, or cannot be written.
    """
    there = {path: _content(path) for path in texts}
    other = [path for path, content in there.items() if content not in (None, texts[path].encode())]
    if other and not force:
        names = ", ".join(map(str, other))
        has = "has" if len(other) == 1 else "have"
        raise NotWrittenError(
            f"{names} {has} another content, and nothing was written; --force replaces what is there"
        )
    written = []
    for path, text in texts.items():
        was_there = there[path] == text.encode()
        if not was_there:
            try:
                _replace(path, text)
            except OSError as error:
                raise NotWrittenError(f"{path} cannot be written: {error.strerror}") from error
        written.append(Written(path, was_there))
    return written


def _content(path: Path) -> bytes | None:
    """None where there is no file.

    Raises:
        OperatorError: what is there is no file, or cannot be read; or there is no folder for it.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OperatorError(f"--out: {path} is there and no regular file")
        return path.read_bytes()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise OperatorError(f"--out: there is no folder {path.parent}") from None
        return None
    except (OSError, ValueError) as error:
        raise OperatorError(f"--out: {path} cannot be read: {getattr(error, 'strerror', error)}") from error


def _replace(path: Path, text: str) -> None:
    """Whoever reads it meanwhile has the old one or the new one. A link stays one."""
    real = path.resolve()
    fresh = real.with_name(f".{real.name}.{os.getpid()}")
    # Others are to read it, as far as the umask allows, or who could read the one before.
    mode = stat.S_IMODE(real.stat().st_mode) if real.exists() else None
    try:
        number = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(number, "w", encoding="utf-8") as file:  # noqa: PTH123  it is a descriptor
            if mode is not None:
                os.fchmod(number, mode)
            file.write(text)
            file.flush()
            os.fsync(number)
        fresh.replace(real)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
