"""A page of NVIDIA's DCGM-exporter -> the memory of each GPU that it tells of.

Its forms are those of its template (internal/pkg/rendermetrics/render_metrics.go) and of its labels for pods
(internal/pkg/transformation/const.go), old and new; a page of Prometheus's `/federate` with the same series is read too.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason
from kvheadroom.capacity.readings import one_line
from kvheadroom.capacity.remote_gpus import Pod, RemoteGpu
from kvheadroom.sources.page_scanner import BadLineError, number_of, read_labels

MIB = 2**20
MAX_GPUS = 2048
"""That are read of one page."""

OLD_SECONDS = 120.0
"""A value whose timestamp is older is no value of now. DCGM itself reads every 30 s."""

_BLANK_MIB = 2**30
"""DCGM's blanks of every type are above (dcgm_structs.h: 0x7ffffff0, 2^47, 0x7ffffffffffffff0), and no GPU is."""

_BLANK_XID = 2**16

_ROUNDING_BYTES = 4 * MIB
_NAMES = {
    "DCGM_FI_DEV_FB_FREE": "free",
    "DCGM_FI_DEV_FB_USED": "used",
    "DCGM_FI_DEV_FB_RESERVED": "reserved",
    "DCGM_FI_DEV_FB_TOTAL": "total",
    "DCGM_FI_DEV_XID_ERRORS": "xid",
    # Tells that a GPU is there, also where nothing is told of its memory.
    "DCGM_FI_DEV_GPU_TEMP": "temperature",
    # As exporters of the first generation call them, and later ones that are told to.
    "dcgm_fb_free": "free",
    "dcgm_fb_used": "used",
    "dcgm_xid_errors": "xid",
    "dcgm_gpu_temp": "temperature",
}
_LINE = re.compile(rb"^(" + "|".join(_NAMES).encode() + rb")(?![a-zA-Z0-9_:])([^\n]*)$", re.MULTILINE)
MAX_TEXT = 200
"""Characters of a name that the page tells; it becomes a label of our own series."""
MAX_PODS = 512
"""That one GPU is taken to be shared by."""
_INSTANCE = re.compile(r"[0-9]{0,5}")
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{1,60}")


class NoGpusError(ValueError):
    """The page is none of DCGM-exporter, or tells of no GPU."""


@dataclass(slots=True)
class _Samples:
    """What a page says of one GPU, line by line."""

    labels: Mapping[str, str]
    values: dict[str, set[float]] = field(default_factory=dict)
    pods: set[Pod] = field(default_factory=set)
    exported_pods: set[Pod] = field(default_factory=set)
    used_by_pod: bool = False
    oldest_at: float = math.inf


def parse_dcgm_page(
    body: bytes, source: str, now: float
) -> tuple[tuple[RemoteGpu, ...], tuple[GpuFailure, ...]]:
    """(GPUs with numbers, a failure for each other).

    Raises:
        NoGpusError: with the reason, for a person.
    """
    found: dict[tuple[str, str], _Samples] = {}
    for name, labels, value, at in _lines(body):
        key = (labels.get("UUID") or labels.get("uuid", ""), labels.get("GPU_I_ID", ""))
        if not _UUID.fullmatch(key[0]) or not _INSTANCE.fullmatch(key[1]):
            continue
        samples = found.setdefault(key, _Samples(labels))
        if len(found) > MAX_GPUS:
            raise NoGpusError(
                f"the page tells of more than {MAX_GPUS} GPUs, which are the most that are read"
            )
        _add(samples, name, labels, value, at)
    if not found:
        raise NoGpusError("the page tells of no GPU; is it that of a DCGM-exporter?")
    divided = {uuid for uuid, instance in found if instance}
    gpus: list[RemoteGpu] = []
    failures: list[GpuFailure] = []
    # Behind a Prometheus the exporter's labels may be `exported_`; those without are of the exporter's own pod then.
    relabelled = any(samples.exported_pods for samples in found.values())
    for (uuid, instance), samples in found.items():
        if relabelled:
            samples.pods = samples.exported_pods
        # Of a GPU in MIG mode, only its instances are somebody's.
        if instance or uuid not in divided:
            one = _gpu(uuid, instance, samples, source, now)
            (gpus if isinstance(one, RemoteGpu) else failures).append(one)  # type: ignore[arg-type]
    return tuple(gpus), tuple(failures)


def _lines(body: bytes) -> Iterator[tuple[str, dict[str, str], float, float | None]]:
    """(our name, labels, value, unix seconds of its timestamp) of each line that can be read."""
    for name, rest in _LINE.findall(body):
        try:
            labels, values = read_labels(rest.decode("utf-8").rstrip("\r"))
        except (BadLineError, UnicodeDecodeError):
            continue
        numbers = [number_of(part) for part in values.split()[:2]]
        if numbers and numbers[0] is not None and math.isfinite(numbers[0]):
            at = numbers[1] / 1000 if len(numbers) > 1 and numbers[1] is not None else None
            yield _NAMES[name.decode()], labels, numbers[0], at


def _add(samples: _Samples, name: str, labels: Mapping[str, str], value: float, at: float | None) -> None:
    for pods, namespace, pod in (
        (samples.exported_pods, "exported_namespace", "exported_pod"),
        (samples.pods, "namespace", "pod"),
        (samples.pods, "pod_namespace", "pod_name"),
    ):
        if labels.get(pod) and len(pods) < MAX_PODS:
            pods.add(Pod(_text(labels.get(namespace, "")), _text(labels[pod])))
    if at is not None:
        samples.oldest_at = min(samples.oldest_at, at)
    if name == "used" and "vgpu" in labels:
        # With KUBERNETES_VIRTUAL_GPUS it may be what one pod uses, and none tells of the whole GPU.
        samples.used_by_pod = True
    elif 0 <= value < (_BLANK_XID if name == "xid" else _BLANK_MIB):
        samples.values.setdefault(name, set()).add(value)


def _gpu(uuid: str, instance: str, samples: _Samples, source: str, now: float) -> RemoteGpu | GpuFailure:
    gpu = f"MIG-{uuid}/{instance}" if instance else uuid
    if samples.oldest_at < now - OLD_SECONDS:
        detail = f"{gpu}: its numbers are {now - samples.oldest_at:,.0f} s old by their timestamp"
        return GpuFailure(gpu, GpuFailureReason.TIMEOUT, detail)
    values = samples.values
    unknown = [
        f"DCGM_FI_DEV_FB_{name.upper()} is told several times with different values"
        for name in ("free", "used", "reserved", "total")
        if len(values.get(name, ())) > 1
    ]
    numbers = {name: round(min(found) * MIB) for name, found in values.items() if len(found) == 1}
    free, used = numbers.get("free"), numbers.get("used")
    if free is None and used is None and not unknown and not samples.used_by_pod:
        detail = (
            f"{gpu}: the exporter tells neither DCGM_FI_DEV_FB_USED nor DCGM_FI_DEV_FB_FREE of it. Are they among its "
            "counters? DCGM tells neither of a GPU without memory of its own, nor, in some releases, of MIG devices"
        )
        return GpuFailure(gpu, GpuFailureReason.NOT_SUPPORTED, detail)
    if free == 0 and used == 0:
        detail = f"{gpu}: the exporter says that nothing of its memory is used and nothing is free"
        return GpuFailure(gpu, GpuFailureReason.BAD_ANSWER, detail)
    if used is None and samples.used_by_pod:
        unknown.append("DCGM_FI_DEV_FB_USED is told for each pod that shares the GPU, and not for the whole")
    total, why_no_total = _total(numbers)
    if why_no_total is not None and not unknown:
        unknown.append(why_no_total)
    index = samples.labels.get("gpu", "")
    xids = values.get("xid", set()) - {0.0}
    return RemoteGpu(
        gpu=gpu,
        source=source,
        name=_text(samples.labels.get("modelName", "")) or "NVIDIA GPU",
        index=int(index) if index.isdecimal() and len(index) < 6 else None,
        host=_text(samples.labels.get("Hostname") or samples.labels.get("hostname") or "") or None,
        total_bytes=total,
        reserved_bytes=numbers.get("reserved"),
        used_bytes=used,
        free_bytes=free,
        unknown=tuple(unknown),
        parent=uuid if instance else None,
        gpu_instance=int(instance) if instance else None,
        pods=tuple(sorted(samples.pods)),
        last_xid=int(xids.pop()) if len(xids) == 1 else None,
    )


def _text(told: str) -> str:
    """A name of somebody else's as it may stand in labels and on a terminal."""
    return one_line(told[:MAX_TEXT])


def _total(numbers: Mapping[str, int]) -> tuple[int | None, str | None]:
    """(bytes, why there are none)."""
    known = sum(numbers.get(name, 0) for name in ("reserved", "used", "free"))
    missing = [name for name in ("reserved", "used", "free") if name not in numbers]
    told = numbers.get("total")
    if told is not None and known > told + _ROUNDING_BYTES:
        return None, "DCGM_FI_DEV_FB_TOTAL is less than its parts"
    if not missing:
        return known, None
    if told is not None:
        return told, None
    names = " and ".join(f"DCGM_FI_DEV_FB_{name.upper()}" for name in missing)
    return None, (
        f"its total is not known, since the exporter tells no {names} (nor DCGM_FI_DEV_FB_TOTAL); add it to its counters"
    )
