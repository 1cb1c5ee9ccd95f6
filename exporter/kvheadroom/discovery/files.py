"""Servers listed in files, in the form of Prometheus's `file_sd_configs`."""

import errno
import glob
import hashlib
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.config import FileSdConfig, ReplicaConfig
from kvheadroom.discovery.source import Found
from kvheadroom.discovery.targets import make_replicas
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.sources.target_groups import MAX_TARGETS, BadTargetsError, parse_target_groups
from kvheadroom.strict_yaml import read_small_file

READ_SECONDS = 5.0
PARSE_SECONDS = 2.0
"""For so long files are begun to be parsed; one takes up to 3 s, which the deadline above must leave room for."""
SETTLE_SECONDS = 0.2
MOST_FILES = 200
MAX_YAML_BYTES = 400 * 1024
"""More takes longer than that."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """The last good content of one file."""

    digest: bytes
    replicas: tuple[ReplicaConfig, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong with a file; `lasts` when it is its content, which need not be parsed again."""

    reason: FailureReason
    detail: str
    lasts: bool = False


class FileDiscovery:
    """Reads the files anew at every question. One that is broken or gone keeps its last good list, and says so.

    A file that is gone is forgotten when the config is loaded anew; until then nobody knows whether it is meant.
    """

    def __init__(self, name: str, settings: FileSdConfig, files: SlowFiles) -> None:
        self.name = name
        self.settings = settings
        self.interval_seconds = settings.refresh_interval
        self._files = files
        # Changed by the reading thread, of which there is one at a time: what comes after the deadline is not lost.
        self._listed: dict[str, _Listed] = {}
        self._broken: dict[str, tuple[bytes, _Fault]] = {}

    async def find(self, *, anew: bool) -> Found:
        """What the files list now."""
        work = partial(self._read, anew=anew)
        try:
            # Under a name of this object's own: a reading that hangs may be one of the files before a reload.
            reading = f"{self.name} {id(self)}"
            listed, faults = await self._files.read(reading, work, timeout_seconds=READ_SECONDS)
        except TimeoutError as error:
            fault = _Fault(FailureReason.TIMEOUT, f"{', '.join(self.settings.files)}: {error}")
            return Found(replicas=None, failure=self._failure([fault]))
        # A list that was never read well here may be one that was in use before a reload.
        unknown = not listed and any(fault.reason is not FailureReason.NOT_FOUND for fault in faults)
        return Found(
            replicas=None if unknown else tuple(one for file in listed.values() for one in file.replicas),
            left_out=tuple(
                f"{path}: {sentence}" for path, one in listed.items() for sentence in one.left_out
            ),
            failure=self._failure(faults) if faults else None,
        )

    def _failure(self, faults: list[_Fault]) -> SourceFailure:
        more = "" if len(faults) == 1 else f"; and {len(faults) - 1} more of its files have a fault"
        return SourceFailure(self.name, faults[0].reason, faults[0].detail + more)

    def _read(self, *, anew: bool) -> tuple[dict[str, _Listed], list[_Fault]]:
        """Blocking: the list of each file, and what is wrong."""
        known = self._listed
        if anew:
            known = {path: one for path, one in known.items() if Path(path).exists()}
        paths, faults = self._paths(known)
        if len(paths) > MOST_FILES:
            detail = f"{len(paths)} files match; at most {MOST_FILES} are read"
            return known, [_Fault(FailureReason.TOO_LARGE, detail)]
        texts = {path: _text(path) for path in paths}
        seen = {path: self._seen(path, text) for path, text in texts.items()}
        if None in seen.values():
            # The half of a list may be a good list: what changes while it is looked at is not taken yet.
            time.sleep(SETTLE_SECONDS)
        listed: dict[str, _Listed] = {}
        broken: dict[str, tuple[bytes, _Fault]] = {}
        begun_until = time.monotonic() + PARSE_SECONDS
        for path, text in texts.items():
            room = MAX_TARGETS - sum(len(file.replicas) + len(file.left_out) for file in listed.values())
            one = seen[path] or self._parse(path, str(text), room, begun_until)
            if isinstance(one, _Listed):
                listed[path] = one
                continue
            if one.lasts:
                broken[path] = (_digest(str(text)), one)
            kept = ""
            if path in known:
                listed[path] = known[path]
                count = len(known[path].replicas)
                servers = "1 server" if count == 1 else f"{count} servers"
                kept = f"; its last good list ({servers}) stays in use"
            faults.append(_Fault(one.reason, one.detail + kept))
        self._listed, self._broken = listed, broken
        return listed, faults

    def _seen(self, path: str, text: str | _Fault) -> _Listed | _Fault | None:
        """What is known of a file of this content without parsing it."""
        if isinstance(text, _Fault):
            return text
        digest = _digest(text)
        if path in self._listed and self._listed[path].digest == digest:
            return self._listed[path]
        return self._broken[path][1] if path in self._broken and self._broken[path][0] == digest else None

    def _paths(self, known: dict[str, _Listed]) -> tuple[list[str], list[_Fault]]:
        """The files that there are, and those that were."""
        paths: list[str] = []
        faults = []
        for pattern in self.settings.files:
            matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207  an absolute pattern, which Path.glob does not take
            if not matches and not any(PurePath(path).match(pattern) for path in known):
                faults.append(_Fault(FailureReason.NOT_FOUND, f"no file matches {pattern}"))
            paths += matches
        return list(dict.fromkeys((*paths, *known))), faults

    def _parse(self, path: str, text: str, room: int, begun_until: float) -> _Listed | _Fault:
        if _text(path) != text:
            return _Fault(FailureReason.BAD_ANSWER, f"{path} is being written")
        if time.monotonic() > begun_until:
            # What was read is remembered, so the next question comes further.
            return _Fault(FailureReason.TIMEOUT, f"{path} is not read yet: the others took so long")
        as_json = path.endswith(".json")
        if not as_json and len(text) > MAX_YAML_BYTES:
            most = f"{MAX_YAML_BYTES // 1024} KiB"
            detail = (
                f"{path} is larger than {most}, the most for YAML, which is slow to read; write it as JSON"
            )
            return _Fault(FailureReason.TOO_LARGE, detail)
        try:
            groups = parse_target_groups(text, as_json=as_json)
        except BadTargetsError as error:
            return _Fault(FailureReason.BAD_ANSWER, f"{path} {error}", lasts=True)
        count = sum(len(group.targets) for group in groups)
        if count > room:
            detail = f"{path} holds {count} targets, with which the files list more than {MAX_TARGETS}"
            return _Fault(FailureReason.TOO_LARGE, detail)
        return _Listed(_digest(text), *make_replicas(groups, self.settings.replica))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _text(path: str) -> str | _Fault:
    try:
        return read_small_file(Path(path))
    except FileNotFoundError:
        return _Fault(FailureReason.NOT_FOUND, f"{path} is not there")
    except PermissionError:
        return _Fault(FailureReason.NO_PERMISSION, f"{path} may not be read by this user")
    except UnicodeDecodeError:
        return _Fault(FailureReason.BAD_ANSWER, f"{path} is not UTF-8 text")
    except OSError as error:
        reason = FailureReason.TOO_LARGE if error.errno == errno.EFBIG else FailureReason.UNREACHABLE
        return _Fault(reason, f"{path} cannot be read ({error.strerror})")
