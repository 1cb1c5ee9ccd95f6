"""The file in which samples of the overhead are kept: JSON, small, replaced as a whole.

It is written beside itself, flushed to the disk and then renamed, under a lock that every writer takes, so whoever reads it finds the samples of
before or of after. A file that cannot be understood is set aside and reported; nothing of it is used.
"""

import contextlib
import fcntl
import glob
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvheadroom import __version__
from kvheadroom.capacity.calibration import Calibration
from kvheadroom.capacity.calibration_key import CalibrationKey
from kvheadroom.capacity.calibration_samples import CalibrationSample, SampleSource
from kvheadroom.capacity.readings import one_line

FORMAT: Final = 1
MOST_BYTES = 16 * 2**20
MOST_SAMPLES = 100
"""Of one key; the latest are kept."""

_Text = Annotated[str, Field(max_length=4096)]
_Bytes = Annotated[int, Field(ge=0, le=2**50)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Key(_Strict):
    geometry: _Text
    weight_format: _Text
    gpu: _Text
    parallelism: _Text
    release: _Text
    settings: _Text


class _Sample(_Strict):
    key: _Key
    start: _Text
    source: Annotated[SampleSource, Field(strict=False)]
    overhead_bytes: _Bytes
    uncertainty_bytes: _Bytes
    estimated_bytes: _Bytes | None
    edition: int
    measured_weights_bytes: _Bytes | None
    is_cold: bool
    measured_at: Annotated[float, Field(allow_inf_nan=False)] | None
    model: _Text
    evidence: _Text


class _File(_Strict):
    format: Literal[1]
    written_by: _Text
    samples: tuple[_Sample, ...] = Field(strict=False)


_READ = TypeAdapter(_File)


@dataclass(frozen=True, slots=True)
class StoredSamples:
    """What a file holds.

    Attributes:
        problem: why nothing of it can be used, one sentence with the way out; empty where it can, or where there is none.
        damaged: its content is at fault, so that setting it aside helps.
        error: what kept it from being read; None where that is not it.
    """

    samples: tuple[CalibrationSample, ...] = ()
    problem: str = ""
    damaged: bool = False
    error: OSError | None = None


def read_samples(path: Path) -> StoredSamples:
    """The samples of a file; none where there is no file."""
    try:
        if not path.is_file() and path.exists():
            return StoredSamples(problem=f"{path}: this is no file; name one")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return StoredSamples()
    except OSError as error:
        return StoredSamples(
            problem=f"{path}: it cannot be read ({error.strerror}); what was learned before is not used",
            error=error,
        )
    if len(content) > MOST_BYTES:
        return _damaged(path, f"it is larger than {MOST_BYTES // 2**20} MiB")
    try:
        stored = _READ.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if _format_of(content) > FORMAT:
            return StoredSamples(
                problem=f"{path}: a newer kvheadroom wrote it; give it to that one, or name another file"
            )
        where = ".".join(str(part) for part in first["loc"]) or "its JSON"
        return _damaged(path, f"{where}: {first['msg']}")
    return StoredSamples(tuple(_sample(one) for one in stored.samples))


def add_samples(path: Path, samples: Iterable[CalibrationSample]) -> str:
    """Put samples to those of a file; a start that stands there already is replaced.

    Returns:
        What happened to a damaged file that stood there, one sentence; empty where all was well.

    Raises:
        OSError: it cannot be written, or belongs to a newer kvheadroom; what stood there stays.
    """
    # The file itself, by whatever name: a link to it stays, and all who write it wait for one another.
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        _sweep(path)
        stored = read_samples(path)
        told = ""
        if stored.damaged:
            aside = _aside(path)
            path.rename(aside)
            told = f"{stored.problem}; it was set aside as {aside.name}, and learning begins anew"
        elif stored.problem:
            raise OSError(stored.problem)
        together = Calibration.of((*stored.samples, *samples))
        _replace(path, [one for these in together.samples.values() for one in _latest(these)])
    return told


def _latest(samples: tuple[CalibrationSample, ...]) -> tuple[CalibrationSample, ...]:
    """In the order in which they came; a log tells no year."""
    return samples[-MOST_SAMPLES:]


def _damaged(path: Path, why: str) -> StoredSamples:
    # A name in it may be anything.
    return StoredSamples(problem=f"{path}: this is no calibration ({one_line(why)})", damaged=True)


def _format_of(content: bytes) -> int:
    class _Any(BaseModel):
        format: int = 0

    try:
        return _Any.model_validate_json(content).format
    except ValidationError:
        return 0


def _aside(path: Path) -> Path:
    """A name beside it that nothing has yet."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time; the lock goes with the process that holds it."""
    lock = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _sweep(path: Path) -> None:
    """Remove what writers left that were killed: whoever holds the lock is the only one that writes."""
    for left in path.parent.glob(f".{glob.escape(path.name)}{_BESIDE}*"):
        with contextlib.suppress(OSError):
            left.unlink()


_BESIDE = ".new-"


def _replace(path: Path, samples: list[CalibrationSample]) -> None:
    stored = _File(
        format=FORMAT, written_by=f"kvheadroom {__version__}", samples=tuple(_stored(one) for one in samples)
    )
    content = _READ.dump_json(stored, indent=1) + b"\n"
    if len(content) > MOST_BYTES:
        raise OSError(
            f"{path}: with these samples it would be larger than {MOST_BYTES // 2**20} MiB; name another file"
        )
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}{_BESIDE}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


_FIELDS = tuple(name for name in _Sample.model_fields if name != "key")


def _stored(sample: CalibrationSample) -> _Sample:
    key = _Key(**{name: getattr(sample.key, name) for name in _Key.model_fields})
    return _Sample(key=key, **{name: getattr(sample, name) for name in _FIELDS})


def _sample(stored: _Sample) -> CalibrationSample:
    return CalibrationSample(
        key=CalibrationKey(**{name: getattr(stored.key, name) for name in _Key.model_fields}),
        **{name: getattr(stored, name) for name in _FIELDS},
    )
