"""What each server held on each GPU beside weights and pool when that was first known, until it restarts."""

from kvheadroom.capacity.fleet import FleetAssessment, GpuRest
from kvheadroom.capacity.gpu_ledger import gpu_rests

_Run = tuple[str, int]
"""The address of a server, and how often it was seen to restart."""


class FirstRests:
    """One number for each replica on each GPU of this machine."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[_Run, GpuRest]] = {}

    @property
    def rests(self) -> tuple[GpuRest, ...]:
        """Of the servers as they run now."""
        return tuple(rest for _, rest in self._kept.values())

    def look(self, fleet: FleetAssessment) -> None:
        """Remember what is known for the first time, and forget what another run of the server held."""
        runs: dict[str, _Run] = {one.replica: (one.url, one.restarts_total) for one in fleet.replicas}
        self._kept = {key: kept for key, kept in self._kept.items() if runs.get(key[1]) == kept[0]}
        for rest in gpu_rests(fleet):
            self._kept.setdefault((rest.gpu, rest.replica), (runs[rest.replica], rest))
