"""GPUs as NVIDIA's DCGM-exporter on other machines tells of them, and which replicas they serve.

Every type here crosses a room: `sources` makes them, the board joins them, the outputs show them.
"""

from dataclasses import dataclass, replace

from kvheadroom.capacity.gpu_assignment import Assignment, GpuAssignments, GpuClaim, NotHere, Unassigned
from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason, GpuReading
from kvheadroom.capacity.readings import FailureReason, SourceFailure

LEAST_NAME = len("GPU-12345678")
"""So much of a UUID a name of the config has."""


@dataclass(frozen=True, slots=True, order=True)
class Pod:
    """A pod of Kubernetes that a GPU is given to."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGpu:
    """The memory of one GPU, or of one GPU instance in MIG mode, in bytes; the exporter counts in whole MiB.

    Attributes:
        gpu: the UUID; of a GPU instance `MIG-GPU-.../3`, the UUID of its GPU and its number: the exporter tells no more.
        source: which exporter tells of it.
        host: the name of its machine.
        total_bytes: reserved + used + free, as NVML's second way of counting has it.
        used_bytes: without what is reserved.
        unknown: a sentence for each number that is None though the GPU has one.
        parent, gpu_instance: of a GPU instance, the UUID of its GPU and its number there.
        pods: that it is given to.
        last_xid: the last error that the driver told of, no count of them; None where there was none.
        changed_at: unix seconds since when these numbers stand, as far as it was seen here.
    """

    gpu: str
    source: str
    name: str
    index: int | None = None
    host: str | None = None
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    unknown: tuple[str, ...] = ()
    parent: str | None = None
    gpu_instance: int | None = None
    pods: tuple[Pod, ...] = ()
    last_xid: int | None = None
    changed_at: float | None = None

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """All that can change from one reading to the next."""
        return self.total_bytes, self.reserved_bytes, self.used_bytes, self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterStatus:
    """One DCGM-exporter, and what it said last.

    Attributes:
        source: its place in the config.
        url: without its query.
        taken_at: unix seconds of the last good page; None before the first.
        gpus: of the last good page.
        failures: one for each GPU that it tells no memory of, or tells of no more.
        failure: why it gave no page when last asked.
        failures_total: count by reason since the start of this program.
    """

    source: str
    url: str
    interval_seconds: float
    taken_at: float | None = None
    gpus: tuple[RemoteGpu, ...] = ()
    failures: tuple[GpuFailure, ...] = ()
    failure: SourceFailure | None = None
    failures_total: tuple[tuple[FailureReason, int], ...] = ()

    @property
    def attempted(self) -> bool:
        """Whether it was asked at all, well or badly."""
        return self.taken_at is not None or self.failure is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGpus:
    """All exporters, and each GPU that they tell of and this machine does not.

    Attributes:
        gpus: each once: of two exporters that know it, the first in the config that answers is taken.
        failures: each of a GPU.
        runs: which replicas they serve.
        found: (replica, a name of its `gpus`) of each name that is one of them.
    """

    exporters: tuple[ExporterStatus, ...] = ()
    gpus: tuple[RemoteGpu, ...] = ()
    failures: tuple[GpuFailure, ...] = ()
    runs: GpuAssignments = GpuAssignments()
    found: frozenset[tuple[str, str]] = frozenset()

    def unassigned(self) -> tuple[RemoteGpu, ...]:
        """Those that serve nobody, as far as it is known."""
        serve = {one.gpu for one in self.runs.assigned}
        return tuple(gpu for gpu in self.gpus if gpu.gpu not in serve)

    def only_assigned(self) -> "RemoteGpus":
        """The same without what serves no replica."""
        serve = {one.gpu for one in self.runs.assigned}
        return replace(
            self,
            gpus=tuple(gpu for gpu in self.gpus if gpu.gpu in serve),
            failures=tuple(failure for failure in self.failures if failure.gpu in serve),
        )

    def without(self, silent: dict[str, str]) -> "RemoteGpus":
        """The same without the numbers of some exporters, by name, each with the reason as a sentence."""
        failures = tuple(
            GpuFailure(gpu.gpu, GpuFailureReason.EXPORTER_DOWN, f"{gpu.gpu}: {silent[gpu.source]}")
            for gpu in self.gpus
            if gpu.source in silent
        )
        gpus = tuple(gpu for gpu in self.gpus if gpu.source not in silent)
        return replace(self, gpus=gpus, failures=(*self.failures, *failures))


def join_remote(
    claims: tuple[GpuClaim, ...], exporters: tuple[ExporterStatus, ...], local: GpuReading | None
) -> RemoteGpus:
    """What the exporters tell, without the GPUs that this machine's driver knows itself, joined to the replicas."""
    gpus, failures = _told(exporters, set() if local is None else _known(local))
    no_driver = local is None or local.driver_absent
    can_tell = no_driver and all(exporter.taken_at is not None for exporter in exporters) and bool(exporters)
    names = _Names(gpus, failures)
    return RemoteGpus(
        exporters=exporters,
        gpus=tuple(gpus.values()),
        failures=tuple(failures.values()),
        runs=_assign(claims, gpus, names, can_tell=can_tell),
        found=frozenset(
            (claim.replica, str(name))
            for claim in claims
            for name in claim.gpus
            if len(names.meant_by(str(name))) == 1
        ),
    )


def _told(
    exporters: tuple[ExporterStatus, ...], here: set[str | None]
) -> tuple[dict[str, RemoteGpu], dict[str, GpuFailure]]:
    """Each GPU once, by name: those with numbers, and those of which no exporter tells any."""
    gpus: dict[str, RemoteGpu] = {}
    failures: dict[str, GpuFailure] = {}
    # One that does not answer any more is believed only where no other one knows better.
    for exporter in sorted(exporters, key=lambda one: one.failure is not None):
        for gpu in exporter.gpus:
            if not {gpu.gpu, gpu.parent} & here:
                gpus.setdefault(gpu.gpu, gpu)
        for failure in exporter.failures:
            if failure.gpu is not None and failure.gpu not in here:
                failures.setdefault(failure.gpu, failure)
    places = {exporter.source: place for place, exporter in enumerate(exporters)}
    in_order = dict(sorted(gpus.items(), key=lambda item: places[item[1].source]))
    return in_order, {gpu: failure for gpu, failure in failures.items() if gpu not in gpus}


def _assign(
    claims: tuple[GpuClaim, ...], gpus: dict[str, RemoteGpu], names: "_Names", *, can_tell: bool
) -> GpuAssignments:
    """Which replicas they serve. What the config says of a replica's GPUs is all that is said of it."""
    pods: dict[str, list[str]] = {}
    for gpu in gpus.values():
        for pod in gpu.pods:
            pods.setdefault(str(pod), []).append(gpu.gpu)
    assigned: dict[tuple[str, str], Assignment] = {}
    not_here: list[NotHere] = []
    unassigned: list[Unassigned] = []
    for claim in claims:
        for name in map(str, claim.gpus):
            found = names.meant_by(name)
            if len(found) == 1:
                assigned[found[0], claim.replica] = Assignment(found[0], claim.replica, "config")
            elif can_tell:
                not_here.append(NotHere(name, claim.replica, names.why_not(name, found)))
        if claim.pod is not None and not claim.gpus and not claim.on_cpu:
            of_pod = _of_pod(claim.pod, pods)
            if isinstance(of_pod, str):
                unassigned.append(Unassigned(claim.replica, of_pod))
            else:
                assigned |= {(gpu, claim.replica): Assignment(gpu, claim.replica, "pod") for gpu in of_pod}
    return GpuAssignments(
        assigned=tuple(assigned.values()), not_here=tuple(not_here), unassigned=tuple(unassigned)
    )


class _Names:
    """The names of all GPUs that exporters tell of, to be found by those of the config without a look at each."""

    def __init__(self, gpus: dict[str, RemoteGpu], failures: dict[str, GpuFailure]) -> None:
        self._names = {gpu.lower(): gpu for gpu in (*gpus, *failures)}
        self._by_beginning: dict[str, list[str]] = {}
        for name in self._names:
            self._by_beginning.setdefault(name[:LEAST_NAME], []).append(name)
        self._parts: dict[str, list[str]] = {}
        for gpu in gpus.values():
            if gpu.parent is not None:
                self._parts.setdefault(gpu.parent.lower(), []).append(gpu.gpu)

    def meant_by(self, name: str) -> list[str]:
        """The GPUs that a name of the config means: several where it is the beginning of several UUIDs."""
        wanted = name.lower()
        # MIG-GPU-.../3/0 is a compute instance of MIG-GPU-.../3, whose memory is that of its GPU instance.
        exact = self._names.get(wanted) or self._names.get(wanted.rpartition("/")[0])
        if exact is not None:
            return [exact]
        alike = self._by_beginning.get(wanted[:LEAST_NAME], ())
        return [self._names[known] for known in alike if known.startswith(wanted) and "/" not in known]

    def why_not(self, name: str, found: list[str]) -> str:
        """Why it means no one GPU, as the end of a sentence about it."""
        if found:
            return "is how the UUIDs of several GPUs begin; give the whole UUID"
        parts = self._parts.get(name.lower())
        if parts:
            return f"is divided into MIG devices; give one of them ({', '.join(parts)})"
        if name.isdecimal():
            return "is an index, which says nothing of other machines' GPUs; give the UUID"
        if name.startswith("MIG-") and not name.startswith("MIG-GPU-"):
            return "is told of by no exporter: there a MIG device is called MIG-<UUID of its GPU>/<its GPU instance>"
        return "is told of by no exporter of `dcgm_exporters`"


def known_elsewhere(runs: GpuAssignments, remote: RemoteGpus) -> GpuAssignments:
    """The assignments of this machine without complaints of what an exporter knows."""
    elsewhere = {one.replica for one in remote.runs.assigned} | {
        one.replica for one in remote.runs.unassigned
    }
    return GpuAssignments(
        assigned=runs.assigned,
        not_here=tuple(one for one in runs.not_here if (one.replica, one.gpu) not in remote.found),
        unassigned=tuple(one for one in runs.unassigned if one.replica not in elsewhere),
        others=runs.others,
    )


def _known(local: GpuReading) -> set[str | None]:
    known = {gpu.gpu for gpu in local.gpus} | {gpu.parent for gpu in local.gpus if gpu.parent is not None}
    failed = {failure.gpu for failure in local.failures if failure.gpu is not None}
    # A GPU that cannot even tell its UUID any more was once listed by it.
    listed = {gpu for _, gpu in local.first_listed}
    return {*known, *failed, *local.divided, *listed}


def _of_pod(pattern: str, pods: dict[str, list[str]]) -> tuple[str, ...] | str:
    """The GPUs of the one pod that a pattern means, or why there are none, as a sentence without its full stop."""
    if pattern.endswith("*"):
        found = sorted(pod for pod in pods if pod.startswith(pattern[:-1]))
    else:
        found = [pattern] if pattern in pods else []
    if len(found) > 1:
        return f"several pods are called {pattern}: {', '.join(found[:4])}"
    if not found:
        return f"no exporter tells of a GPU of the pod {pattern}"
    return tuple(pods[found[0]])
