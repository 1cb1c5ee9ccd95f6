"""The latest assessment of the fleet, swapped in by one reference assignment. Readers never lock."""

from collections import Counter
from dataclasses import replace

from kvheadroom.capacity.assessment import (
    FleetAssessment,
    GpuAssessment,
    ReloadStatus,
    ReplicaAssessment,
)
from kvheadroom.capacity.discovery import DiscoveryStatus, WatchedTarget
from kvheadroom.capacity.gpu_assignment import GpuClaim, assign_gpus
from kvheadroom.capacity.gpus import GpuFailureReason, GpuReading


class Board:
    """What the outputs read. Written from one event loop only."""

    def __init__(self, replicas: tuple[ReplicaAssessment, ...]) -> None:
        self._fleet = FleetAssessment(replicas)
        self._latest = {replica.replica: replica for replica in replicas}
        self._published = False
        """Whether a replica has published since the fleet was put together."""
        self._gpu_failures: Counter[GpuFailureReason] = Counter()

    @property
    def fleet(self) -> FleetAssessment:
        """The latest state, stale parts included; put together when somebody reads it."""
        if self._published:
            self._fleet = replace(self._fleet, replicas=tuple(self._latest.values()))
            self._published = False
        return self._fleet

    def publish(self, replica: ReplicaAssessment) -> None:
        """Replace one replica's assessment; one that is no longer on the board stays off it."""
        if replica.replica in self._latest:
            self._latest[replica.replica] = replica
            self._published = True

    def set_replicas(
        self, replicas: tuple[ReplicaAssessment, ...], targets: tuple[WatchedTarget, ...]
    ) -> None:
        """Another set of replicas, after a reload or when some came or went."""
        self._latest = {replica.replica: replica for replica in replicas}
        self._fleet = replace(self._fleet, targets=targets)
        self._published = True

    def set_discoveries(self, discoveries: tuple[DiscoveryStatus, ...]) -> None:
        """How the sources of replicas answered."""
        self._fleet = replace(self._fleet, discoveries=discoveries)

    def publish_gpus(
        self, reading: GpuReading, interval_seconds: float, claims: tuple[GpuClaim, ...]
    ) -> None:
        """The latest reading of this machine's GPUs; its failures are counted."""
        self._gpu_failures.update(failure.reason for failure in reading.failures)
        self._fleet = replace(
            self._fleet,
            gpus=GpuAssessment(
                reading=reading,
                interval_seconds=interval_seconds,
                runs=assign_gpus(claims, reading),
                failures_total=tuple(sorted(self._gpu_failures.items())),
            ),
        )

    def claim_gpus(self, claims: tuple[GpuClaim, ...]) -> None:
        """Other claims on the GPUs that were read, after a reload or when replicas came or went."""
        gpus = self._fleet.gpus
        if gpus is not None:
            runs = assign_gpus(claims, gpus.reading)
            self._fleet = replace(self._fleet, gpus=replace(gpus, runs=runs))

    def set_reload(self, reload: ReloadStatus) -> None:
        """How the config file was loaded."""
        self._fleet = replace(self._fleet, reload=reload)
