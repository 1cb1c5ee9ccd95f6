"""The latest assessment of every replica, swapped in by one reference assignment. Readers never lock."""

from kvheadroom.capacity.assessment import FleetAssessment, ReplicaAssessment


class Board:
    """What the outputs read. Written from one event loop only."""

    def __init__(self, replicas: tuple[ReplicaAssessment, ...]) -> None:
        self._fleet = FleetAssessment(replicas)

    @property
    def fleet(self) -> FleetAssessment:
        """The latest state, stale parts included."""
        return self._fleet

    def publish(self, replica: ReplicaAssessment) -> None:
        """Replace one replica's assessment."""
        self._fleet = FleetAssessment(
            tuple(replica if old.replica == replica.replica else old for old in self._fleet.replicas)
        )
