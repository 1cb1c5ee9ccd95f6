"""All replicas and GPUs at one instant: what is known of each, and what is too old to be shown."""

from dataclasses import dataclass, replace
from enum import StrEnum

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.calibration_samples import Exclusion
from kvheadroom.capacity.discovery import DiscoveryStatus, WatchedTarget
from kvheadroom.capacity.gpu_assignment import Assignment, GpuAssignments
from kvheadroom.capacity.gpu_catalogue import catalogue_name
from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason, GpuReading, GpuSnapshot
from kvheadroom.capacity.readings import (
    FailureReason,
    PageProblem,
    ProblemReason,
    SourceFailure,
)
from kvheadroom.capacity.remote_gpus import RemoteGpu, RemoteGpus

STALE_AFTER_TICKS = 3


class ReplicaState(StrEnum):
    """What a replica is doing, as far as it can be told from outside. A closed list."""

    SERVING = "serving"
    STARTING = "starting"
    SLEEPING = "sleeping"
    SCALING = "scaling"
    WEDGED = "wedged"
    STATS_DISABLED = "stats_disabled"
    DOWN = "down"


class EventKind(StrEnum):
    """What happened to a replica between two scrapes."""

    RESTARTED = "restarted"
    RELEASE_CHANGED = "release_changed"
    MODEL_CHANGED = "model_changed"
    CAPACITY_CHANGED = "capacity_changed"
    ENGINES_CHANGED = "engines_changed"
    STATE_CHANGED = "state_changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened to a replica.

    Attributes:
        at: unix seconds of the scrape that showed it.
        detail: one line for a person.
    """

    at: float
    kind: EventKind
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """Whether a source of a replica answered when last asked.

    Attributes:
        failure: why not; None when it is up.
    """

    source: str
    failure: SourceFailure | None

    @property
    def up(self) -> bool:
        """Whether it answered usefully."""
        return self.failure is None


@dataclass(frozen=True, slots=True)
class UsageOfEngines:
    """KV usage of several engines, 0-1: one full pool preempts however empty the others are, so no mean stands alone."""

    max_ratio: float
    mean_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAssessment:
    """One vLLM server (one URL) and its engines.

    Attributes:
        interval_seconds: the time between two scrapes.
        engines: of the last scrape that succeeded; empty once withheld.
        scrape_duration_seconds: of the last scrape that succeeded.
        last_success_at: unix seconds, None before the first success.
        events: the latest, oldest first.
        restarts_total: seen since the start of this program.
        failures_total: count by (source, reason) since the start of this program.
        problems_total: count by reason since the start of this program; one that stays counts at every scrape.
        lost_metrics: vLLM's names that an earlier page had and the last one has not.
        excluded_starts_total: starts that were no sample of the overhead, by reason since the start of this program.
    """

    replica: str
    url: str
    interval_seconds: float
    state: ReplicaState | None = None
    sources: tuple[SourceStatus, ...] = ()
    problems: tuple[PageProblem, ...] = ()
    engines: tuple[Assessment, ...] = ()
    scrape_duration_seconds: float | None = None
    last_success_at: float | None = None
    events: tuple[Event, ...] = ()
    restarts_total: int = 0
    failures_total: tuple[tuple[tuple[str, FailureReason], int], ...] = ()
    problems_total: tuple[tuple[ProblemReason, int], ...] = ()
    lost_metrics: tuple[str, ...] = ()
    excluded_starts_total: tuple[tuple[Exclusion, int], ...] = ()

    @property
    def attempted(self) -> bool:
        """Whether the first scrape is over, well or badly."""
        return bool(self.sources)

    @property
    def usage(self) -> "UsageOfEngines | None":
        """How full its pools are; None with fewer than two engines that tell it."""
        told = [usage for one in self.engines if (usage := one.snapshot.kv_usage_ratio) is not None]
        return UsageOfEngines(max(told), sum(told) / len(told)) if len(told) > 1 else None

    @property
    def sleeps(self) -> bool:
        """Whether any of its engines sleeps; which of its GPUs that one has is not known."""
        return any(engine.snapshot.sleeping for engine in self.engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadStatus:
    """How the last loading of the config file went.

    Attributes:
        last_success_at: unix seconds.
        fault: what was wrong with the file if the last loading failed; the config before it is in use.
    """

    last_success_at: float
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class GpuRest:
    """What the processes of one replica hold on one GPU beside weights and pool: its overhead, as it is now."""

    gpu: str
    replica: str
    rest_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAssessment:
    """The GPUs of this machine, and which replicas they serve.

    Attributes:
        interval_seconds: the time between two readings.
        runs: which replica runs on which GPU, and how that is known; a GPU may serve several replicas.
        failures_total: count by reason since the start of this program.
        first_rests: what `gpu_ledger.gpu_rests` gave when it was first known of the server as it runs now.
    """

    reading: GpuReading
    interval_seconds: float
    runs: GpuAssignments = GpuAssignments()
    failures_total: tuple[tuple[GpuFailureReason, int], ...] = ()
    first_rests: tuple[GpuRest, ...] = ()

    def replicas_of(self, gpu: str) -> tuple[str, ...]:
        """The replicas that run on this GPU; none if that is not known."""
        return tuple(one.replica for one in self.runs.assigned if one.gpu == gpu)

    def gpus_of(self, replica: str) -> tuple[GpuSnapshot, ...]:
        """The GPUs of this machine that serve a replica, as far as they gave numbers."""
        gpus = {one.gpu for one in self.runs.assigned if one.replica == replica}
        return tuple(gpu for gpu in self.reading.gpus if gpu.gpu in gpus)

    def card_of(self, replica: str) -> str | None:
        """The card of a server of this machine, by its name in the catalogue; None where several kinds may be it."""
        gpus = self.gpus_of(replica) or self.reading.gpus
        names = {None if gpu.parent is not None else catalogue_name(gpu.name) for gpu in gpus}
        return names.pop() if len(names) == 1 else None

    def tells_card_of(self, replica: str) -> bool:
        """Whether more of the server's processes would tell no more of its card."""
        return bool(self.gpus_of(replica)) or len({gpu.name for gpu in self.reading.gpus}) < 2

    def found_by_process(self, replica: str) -> bool:
        """Whether its GPUs are known by its processes, not by the config."""
        return any(one.replica == replica and one.by == "process" for one in self.runs.assigned)

    def others_bytes(self, gpu: str, replica: str) -> int | None:
        """What anything but the replica uses on the GPU, as of the last list of processes."""
        found = (one.used_bytes for one in self.runs.others if (one.gpu, one.replica) == (gpu, replica))
        return next(found, None)

    def foreign_bytes(self, replica: str) -> int | None:
        """What anything but the replica uses on a GPU of its, the most of one; None where nobody knows."""
        return max((one.used_bytes for one in self.runs.others if one.replica == replica), default=None)

    def why_unassigned(self, replica: str) -> str | None:
        """Why nobody knows a replica's GPUs; None when somebody does, or when it has none."""
        return next((one.why for one in self.runs.unassigned if one.replica == replica), None)

    def unassigned(self) -> tuple[GpuSnapshot, ...]:
        """The GPUs that serve nobody, as far as it is known."""
        return tuple(gpu for gpu in self.reading.gpus if not self.replicas_of(gpu.gpu))

    def empty_divided(self) -> tuple[str, ...]:
        """The GPUs in MIG mode of which no MIG device can be read."""
        parents = {gpu.parent for gpu in self.reading.gpus}
        return tuple(gpu for gpu in self.reading.divided if gpu not in parents)

    def xids_of(self, gpu: str | None) -> tuple[tuple[int, int], ...] | None:
        """(Xid, count) of a GPU since the start of this program; None where the driver would not tell."""
        snapshot = next((one for one in self.reading.gpus if one.gpu == gpu), None)
        heard = gpu if snapshot is None or snapshot.parent is None else snapshot.parent
        counts = tuple((one.xid, one.count) for one in self.reading.xids if one.gpu == gpu)
        return counts if counts or heard in self.reading.xid_watched else None

    @property
    def failure(self) -> GpuFailure | None:
        """What keeps the driver as a whole from answering."""
        return next((failure for failure in self.reading.failures if failure.gpu is None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFile:
    """The file that keeps what was learned.

    Attributes:
        attempted: whether the first reading is over, well or badly.
        samples: starts of which something is known, those that are not in the file yet included.
        failure: why it cannot be read or written; None while it can. What is learned then is known until this program ends.
        note: what happened to a damaged file that stood there, one sentence; empty where nothing did.
        failures_total: count by reason since the start of this program.
    """

    path: str
    attempted: bool = False
    samples: int = 0
    failure: SourceFailure | None = None
    note: str = ""
    failures_total: tuple[tuple[FailureReason, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FleetAssessment:
    """Everything that the outputs show, as of one instant.

    Attributes:
        reload: None when there is no config file.
        gpus: of this machine; None before the first reading, or when nobody asked for one.
        remote_gpus: of other machines.
        targets: the replicas by where they come from, and the operator's labels of each.
        discoveries: the sources of replicas that come and go.
        shard: which share of all replicas these are, as `0/4`; None when they are all.
        calibration: None when there is no file for it.
    """

    replicas: tuple[ReplicaAssessment, ...]
    reload: ReloadStatus | None = None
    gpus: GpuAssessment | None = None
    remote_gpus: RemoteGpus = RemoteGpus()
    targets: tuple[WatchedTarget, ...] = ()
    discoveries: tuple[DiscoveryStatus, ...] = ()
    shard: str | None = None
    calibration: CalibrationFile | None = None

    @property
    def all_gpus(self) -> tuple[GpuSnapshot | RemoteGpu, ...]:
        """Every GPU that gave numbers, of this machine first."""
        return (*(() if self.gpus is None else self.gpus.reading.gpus), *self.remote_gpus.gpus)

    def assignments(self) -> tuple[Assignment, ...]:
        """Which replicas the GPUs serve, as far as it is known."""
        return (*(() if self.gpus is None else self.gpus.runs.assigned), *self.remote_gpus.runs.assigned)

    def served(self) -> dict[str, list[str]]:
        """The replicas on each GPU of which any is known."""
        served: dict[str, list[str]] = {}
        for one in self.assignments():
            served.setdefault(one.gpu, []).append(one.replica)
        return served

    def gpus_asleep(self) -> frozenset[str]:
        """GPUs on which an engine sleeps: what is free there, it takes back as it wakes."""
        asleep = {replica.replica for replica in self.replicas if replica.sleeps}
        return frozenset(one.gpu for one in self.assignments() if one.replica in asleep)

    def free_bytes(self, gpu: GpuSnapshot | RemoteGpu) -> int | None:
        """Memory of a GPU that is there to be used; None while an engine on it sleeps."""
        return None if gpu.gpu in self.gpus_asleep() else gpu.free_bytes


def withhold_stale(fleet: FleetAssessment, now: float) -> FleetAssessment:
    """The fleet as it may be shown at `now`: numbers older than three ticks are not shown as current."""
    silent = {
        one.source: f"{one.source} has given no numbers for {now - one.taken_at:,.0f} s"
        for one in fleet.remote_gpus.exporters
        if one.taken_at is not None and _is_old(one.taken_at, now, one.interval_seconds)
    }
    gpus = fleet.gpus
    if gpus is not None and _is_old(gpus.reading.taken_at, now, gpus.interval_seconds):
        gpus = None
    return replace(
        fleet,
        gpus=gpus,
        remote_gpus=fleet.remote_gpus.without(silent) if silent else fleet.remote_gpus,
        replicas=tuple(
            replace(replica, engines=(), problems=(), lost_metrics=(), scrape_duration_seconds=None)
            if is_stale(replica, now)
            else replica
            for replica in fleet.replicas
        ),
    )


def is_stale(replica: ReplicaAssessment, now: float) -> bool:
    """Whether the last good scrape is more than three ticks ago."""
    last = replica.last_success_at
    return last is None or _is_old(last, now, replica.interval_seconds)


def _is_old(taken_at: float, now: float, interval_seconds: float) -> bool:
    # From the future means that the clock was set back: how old it is cannot be told, so it is not shown.
    return not -1.0 <= now - taken_at <= STALE_AFTER_TICKS * interval_seconds
