"""Every page of a fleet, one after the other: where it does not matter on which of them something stands."""

from kvheadroom.capacity.fleet import FleetAssessment
from kvheadroom.outputs.status_page import engine_id, render_engine, render_fleet


def ids(fleet: FleetAssessment) -> list[str]:
    """Of every engine, and of every server without one."""
    return [
        engine_id(replica.replica, name)
        for replica in fleet.replicas
        for name in [engine.snapshot.engine for engine in replica.engines] or [""]
    ]


def all_pages(fleet: FleetAssessment, now: float, notice: str | None = None) -> str:
    """`/`, then each `/engines/<id>`."""
    pages = [render_engine(fleet, now, notice, one) for one in ids(fleet)]
    assert {page.status for page in pages} <= {200}
    return "\n".join([render_fleet(fleet, now, notice), *(page.html for page in pages)])
