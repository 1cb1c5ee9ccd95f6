"""What each recording is there for; a load that did not bring it about is no recording of that kind."""

import statistics
from collections.abc import Callable, Mapping

from tests.loads.measured import Measured


def steady(found: Measured) -> None:
    assert found.rise("preemptions_total") == 0
    assert found.most("requests_waiting") <= 2, "nobody is kept waiting"
    assert 0.2 < found.max_usage < 0.8
    sent = [request["t_send"] for request in found.requests]
    third = (max(sent) - min(sent)) / 3
    came = [sum(0 <= at - min(sent) - third * i < third for at in sent) for i in range(3)]
    assert max(came) < 1.4 * min(came), "as many a second at the end as at the beginning"


def ramp(found: Measured) -> None:
    fourth = len(found.instants) // 4
    quarters = [
        statistics.mean(instant.usage for instant in found.instants[i * fourth : (i + 1) * fourth])
        for i in range(3)
    ]
    assert quarters == sorted(quarters)
    assert found.max_usage > 0.95
    assert found.most("requests_waiting") > 10
    first = next(instant.offset_seconds for instant in found.instants if instant.total("requests_waiting"))
    assert found.preempting_scrapes
    assert min(found.preempting_scrapes) > 30, "a rise that a forecast could see"
    assert first > 30


def burst(found: Measured) -> None:
    assert len(_episodes(found.preempting_scrapes)) >= 3
    quiet = [instant.usage for instant in found.instants if 4 < instant.offset_seconds < 12]
    assert max(quiet) < 0.5, "nothing told of the first burst"


def spikes(found: Measured) -> None:
    assert found.max_usage > 0.9
    assert found.times_over(0.8) >= 4
    assert found.rise("preemptions_total") == 0


CLAIMS: Mapping[str, Callable[[Measured], None]] = {
    claim.__name__: claim for claim in (steady, ramp, burst, spikes)
}


def _episodes(times: list[float], *, apart_seconds: float = 20.0) -> list[list[float]]:
    """Times in groups, each less than `apart_seconds` from the one before."""
    groups: list[list[float]] = []
    for at in times:
        if groups and at - groups[-1][-1] < apart_seconds:
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups
