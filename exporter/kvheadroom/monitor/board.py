"""The latest assessment of the fleet, swapped in by one reference assignment. Readers never lock."""

from collections import Counter
from dataclasses import replace

from kvheadroom.capacity.discovery import DiscoveryStatus, WatchedTarget
from kvheadroom.capacity.fleet import (
    CalibrationFile,
    FleetAssessment,
    GpuAssessment,
    ReloadStatus,
    ReplicaAssessment,
)
from kvheadroom.capacity.gpu_assignment import GpuClaim, assign_gpus
from kvheadroom.capacity.gpus import GpuFailureReason, GpuReading
from kvheadroom.capacity.remote_gpus import ExporterStatus, join_remote, known_elsewhere
from kvheadroom.monitor.first_rests import FirstRests


class Board:
    """What the outputs read. Written from one event loop only."""

    def __init__(self, replicas: tuple[ReplicaAssessment, ...]) -> None:
        self._fleet = FleetAssessment(replicas)
        self._latest = {replica.replica: replica for replica in replicas}
        self._published = False
        """Whether a replica has published since the fleet was put together."""
        self._gpu_failures: Counter[GpuFailureReason] = Counter()
        self._gpus: GpuAssessment | None = None
        self._first_rests = FirstRests()
        self._processes_taken_at: float | None = None
        self._exporters: tuple[ExporterStatus, ...] = ()
        self._claims: tuple[GpuClaim, ...] = ()
        self._joined = True
        """Whether the fleet knows the latest of the GPUs."""

    @property
    def fleet(self) -> FleetAssessment:
        """The latest state, stale parts included; put together when somebody reads it."""
        if self._published:
            self._fleet = replace(self._fleet, replicas=tuple(self._latest.values()))
            self._published = False
        if not self._joined:
            self._join_gpus()
            self._joined = True
        return self._fleet

    def publish(self, replica: ReplicaAssessment) -> None:
        """Replace one replica's assessment; one that is no longer on the board stays off it."""
        if replica.replica in self._latest:
            self._latest[replica.replica] = replica
            self._published = True

    def set_replicas(
        self,
        replicas: tuple[ReplicaAssessment, ...],
        targets: tuple[WatchedTarget, ...],
        shard: str | None = None,
    ) -> None:
        """Another set of replicas, after a reload or when some came or went.

        Args:
            shard: which share of all they are; None when they are all.
        """
        self._latest = {replica.replica: replica for replica in replicas}
        self._fleet = replace(self._fleet, targets=targets, shard=shard)
        self._published = True

    def set_discoveries(self, discoveries: tuple[DiscoveryStatus, ...]) -> None:
        """How the sources of replicas answered."""
        self._fleet = replace(self._fleet, discoveries=discoveries)

    def publish_gpus(self, reading: GpuReading, interval_seconds: float) -> None:
        """The latest reading of this machine's GPUs; its failures are counted."""
        self._gpu_failures.update(failure.reason for failure in reading.failures)
        self._gpus = GpuAssessment(
            reading=reading,
            interval_seconds=interval_seconds,
            failures_total=tuple(sorted(self._gpu_failures.items())),
        )
        self._joined = False
        if reading.processes_taken_at not in (None, self._processes_taken_at):
            self._processes_taken_at = reading.processes_taken_at
            self._first_rests.look(self.fleet)
            self._joined = False

    def publish_exporters(self, exporters: tuple[ExporterStatus, ...]) -> None:
        """What the DCGM-exporters of other machines said last."""
        self._exporters = exporters
        self._joined = False

    def claim_gpus(self, claims: tuple[GpuClaim, ...]) -> None:
        """Other claims on GPUs, after a reload or when replicas came or went."""
        self._claims = claims
        self._joined = False

    def _join_gpus(self) -> None:
        """Join what is known of all GPUs to the replicas that they serve."""
        gpus = self._gpus
        remote = join_remote(self._claims, self._exporters, None if gpus is None else gpus.reading)
        if self._fleet.shard is not None:
            # Who they serve is another share's to tell.
            remote = remote.only_assigned()
        if gpus is not None:
            runs = assign_gpus(self._claims, gpus.reading)
            gpus = replace(gpus, runs=known_elsewhere(runs, remote), first_rests=self._first_rests.rests)
        self._fleet = replace(self._fleet, gpus=gpus, remote_gpus=remote)

    def set_calibration(self, calibration: CalibrationFile | None) -> None:
        """How the file fares that keeps what was learned."""
        self._fleet = replace(self._fleet, calibration=calibration)

    def set_reload(self, reload: ReloadStatus) -> None:
        """How the config file was loaded."""
        self._fleet = replace(self._fleet, reload=reload)
