"""The forms of single values in a config, each with what is allowed."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from kvheadroom.capacity.gpu_catalogue import GPUS, catalogue_name, not_modelled_because
from kvheadroom.capacity.parallelism import MOST_GPUS

_GPU_NAME = re.compile(r"(GPU-|MIG-)([0-9a-fA-F-]{8,})|(MIG-GPU-)([0-9a-fA-F-]{8,}/\d{1,3}(?:/\d{1,3})?)")
_POD = re.compile(r"[a-z0-9][a-z0-9-]{0,62}/[a-z0-9][a-z0-9.-]{0,252}\*?")
MOST_GPUS_HERE = 256
"""Indices of one machine's GPUs are below."""
_SHARD = re.compile(r"(\d{1,4})/(\d{1,4})")
MOST_SHARDS = 1000
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
_DURATION_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(kB|MB|GB|KiB|MiB|GiB)")
_SIZE_BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def parse_duration(value: object) -> float:
    """Seconds of a duration with its unit.

    Raises:
        ValueError: with what is allowed.
    """
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no duration; write a number with its unit, e.g. 5s or 1m")
    return float(match[1]) * _DURATION_SECONDS[match[2]]


def parse_size(value: str) -> int:
    """Bytes of a size with its unit: MB is 10^6, MiB is 2^20.

    Raises:
        ValueError: with what is allowed.
    """
    match = _SIZE.fullmatch(value.strip())
    if match is None or len(value) > 40:
        raise ValueError(
            f"{value[:40]!r} is no size; write a number with its unit, e.g. 200MB ({', '.join(_SIZE_BYTES)})"
        )
    return int(float(match[1]) * _SIZE_BYTES[match[2]])


def _size(value: object) -> int:
    """As `parse_size`; a number alone could be anything."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no size; write a number with its unit, e.g. 64GB or 64GiB")  # noqa: TRY004 - pydantic's kind
    return parse_size(value)


def _gpu(value: object) -> object:
    if not isinstance(value, str):
        return value
    name = catalogue_name(value)
    if name is None:
        reason = not_modelled_because(value)
        if reason is not None:
            raise ValueError(
                f"{value!r}: {reason}; leave `gpu` out, and what vLLM reports is shown without it"
            )
        raise ValueError(
            f"{value!r} is not in the catalogue ({', '.join(GPUS)}, CPU); "
            "for another GPU leave `gpu` out and set `hbm_bytes`"
        )
    return name


def _expanded(value: str) -> str:
    """`~/models/x` is meant as in a shell."""
    return str(Path(value).expanduser())


def _file_pattern(value: str) -> str:
    path = _expanded(value)
    if not path.endswith((".json", ".yml", ".yaml")) or "**" in path or "\0" in path:
        raise ValueError(
            f"{value[:200]!r}: files end in .json, .yml or .yaml, and `*` stands for a part of one name"
        )
    return path


def _own_file(value: Path) -> Path:
    if not value.name or value.name == ".." or "\0" in str(value):
        raise ValueError(f"{str(value)[:200]!r} is no file's name")
    return value.expanduser()


def _gpu_list(value: object) -> object:
    """Also as in CUDA_VISIBLE_DEVICES: one text with commas."""
    if not isinstance(value, str):
        return value
    return [int(name) if name.isdecimal() else name for name in (part.strip() for part in value.split(","))]


def _gpu_name(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_GPUS_HERE:
        return value
    match = _GPU_NAME.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        return f"{match[1] or match[3]}{(match[2] or match[4]).lower()}"
    raise ValueError(
        f"{str(value)[:80]!r} is no UUID of a GPU or MIG device and no index; `nvidia-smi -L` lists them, "
        "e.g. GPU-1a2b3c4d-..., MIG-1a2b3c4d-... or 0"
    )


def _name(value: str) -> str:
    # It stands in logs, and lists of servers may be written by somebody else.
    if not value.isprintable():
        raise ValueError("a name is one line of characters that can be printed")
    return value


def _pod(value: str) -> str:
    if not _POD.fullmatch(value):
        raise ValueError(
            f"{value[:80]!r} is no pod; write namespace/name, with a * at its end for a name that goes on"
        )
    return value


def _shard(value: object) -> object:
    match = _SHARD.fullmatch(value) if isinstance(value, str) else None
    if match is None or not int(match[1]) < int(match[2]) <= MOST_SHARDS:
        raise ValueError(
            f"{str(value)[:40]!r} is no share of the servers; write I/N, from 0/N to (N-1)/N, e.g. 0/4 (N is at most "
            f"{MOST_SHARDS})"
        )
    return value


def _each_once(values: tuple[str | int, ...]) -> tuple[str | int, ...]:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")
    return values


GpuName = Annotated[str | int, BeforeValidator(_gpu_name)]
_Seconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    # With its unit, so that what was dumped can be read again.
    PlainSerializer(lambda seconds: f"{seconds}s"),
]
Duration = Annotated[_Seconds, Field(ge=0.1, le=3600)]
IdleTime = Annotated[_Seconds, Field(ge=1, le=30 * 86_400)]
TierBytes = Annotated[
    int,
    BeforeValidator(_size),
    Field(ge=10**6, le=10**14),
    PlainSerializer(lambda size: f"{size / 1e9:.12g}GB"),
]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
ParallelSize = Annotated[int, Field(gt=0, le=MOST_GPUS, strict=True)]
ModelPath = Annotated[str, Field(min_length=1), AfterValidator(_expanded)]
OverheadGb = Annotated[float, Field(ge=0, le=10_000, strict=False)]
OwnFile = Annotated[Path, AfterValidator(_own_file)]
CatalogueGpu = Annotated[str, BeforeValidator(_gpu)]
GpuNames = Annotated[tuple[GpuName, ...], BeforeValidator(_gpu_list), AfterValidator(_each_once)]
ReplicaName = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_name)]
Pod = Annotated[str, AfterValidator(_pod)]
FilePattern = Annotated[str, AfterValidator(_file_pattern)]
Shard = Annotated[str, BeforeValidator(_shard)]
