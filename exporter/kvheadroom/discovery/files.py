"""Servers listed in files, in the form of Prometheus's `file_sd_configs`."""

import errno
import glob
import hashlib
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.config import FileSdConfig, ReplicaConfig
from kvheadroom.discovery.source import Found
from kvheadroom.discovery.targets import make_replicas
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.sources.target_groups import BadTargetsError, parse_target_groups
from kvheadroom.strict_yaml import read_small_file

READ_SECONDS = 5.0
SETTLE_SECONDS = 0.2
MOST_FILES = 200


@dataclass(frozen=True, slots=True)
class _Listed:
    """The last good content of one file."""

    digest: bytes
    replicas: tuple[ReplicaConfig, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Fault:
    reason: FailureReason
    detail: str


class FileDiscovery:
    """Reads the files anew at every question. One that is broken or gone keeps its last good list, and says so.

    A file that is gone is forgotten when the config is loaded anew; until then nobody knows whether it is meant.
    """

    def __init__(self, name: str, settings: FileSdConfig, files: SlowFiles) -> None:
        self.name = name
        self.settings = settings
        self.interval_seconds = settings.refresh_interval
        self._files = files
        self._listed: dict[str, _Listed] = {}

    async def find(self, *, anew: bool) -> Found:
        """What the files list now."""
        work = partial(self._read, self._listed, anew=anew)
        try:
            listed, faults = await self._files.read(self.name, work, timeout_seconds=READ_SECONDS)
        except TimeoutError as error:
            fault = _Fault(FailureReason.TIMEOUT, f"{', '.join(self.settings.files)}: {error}")
            return Found(replicas=None, failure=self._failure([fault]))
        self._listed = listed
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

    def _read(self, known: dict[str, _Listed], *, anew: bool) -> tuple[dict[str, _Listed], list[_Fault]]:
        """Blocking: the list of each file, and what is wrong."""
        if anew:
            known = {path: one for path, one in known.items() if Path(path).exists()}
        paths, faults = self._paths(known)
        if len(paths) > MOST_FILES:
            detail = f"{len(paths)} files match; at most {MOST_FILES} are read"
            return known, [_Fault(FailureReason.TOO_LARGE, detail)]
        texts = {path: _text(path) for path in paths}
        new = {
            path
            for path, text in texts.items()
            if isinstance(text, str) and (path not in known or known[path].digest != _digest(text))
        }
        if new:
            # The half of a list may be a good list: what changes while it is looked at is not taken yet.
            time.sleep(SETTLE_SECONDS)
        listed: dict[str, _Listed] = {}
        for path, text in texts.items():
            one: _Listed | _Fault
            if isinstance(text, _Fault):
                one = text
            elif path not in new:
                one = known[path]
            elif _text(path) != text:
                one = _Fault(FailureReason.BAD_ANSWER, f"{path} is being written")
            else:
                one = self._parse(path, text)
            if isinstance(one, _Listed):
                listed[path] = one
            elif path in known:
                listed[path] = known[path]
                count = len(known[path].replicas)
                servers = "1 server" if count == 1 else f"{count} servers"
                kept = f"; its last good list ({servers}) stays in use"
                faults.append(_Fault(one.reason, one.detail + kept))
            else:
                faults.append(one)
        return listed, faults

    def _paths(self, known: dict[str, _Listed]) -> tuple[list[str], list[_Fault]]:
        """The files that there are, and those that were."""
        paths: list[str] = []
        faults = []
        for pattern in self.settings.files:
            matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207  an absolute pattern, which Path.glob does not take
            if not matches and not known:
                faults.append(_Fault(FailureReason.NOT_FOUND, f"no file matches {pattern}"))
            paths += matches
        return list(dict.fromkeys((*paths, *known))), faults

    def _parse(self, path: str, text: str) -> _Listed | _Fault:
        try:
            groups = parse_target_groups(text, as_json=path.endswith(".json"))
        except BadTargetsError as error:
            return _Fault(FailureReason.BAD_ANSWER, f"{path} {error}")
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
