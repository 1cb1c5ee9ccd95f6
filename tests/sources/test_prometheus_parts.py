"""What is asked again, and after how long; the parts themselves are tested by what is made of them."""

import time
from collections.abc import Callable

import pytest

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.sources.prometheus_api import AskedToWait, PrometheusApi, RangeAnswer
from kvheadroom.sources.prometheus_parts import ask

FINE = RangeAnswer((), ())
Ask = Callable[..., tuple[RangeAnswer | SourceFailure, list[float]]]


def failure(reason: FailureReason) -> SourceFailure:
    return SourceFailure("prometheus", reason, "no")


def to_wait(seconds: float) -> AskedToWait:
    return AskedToWait("prometheus", FailureReason.UNAVAILABLE, "wait", seconds=seconds)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """What comes of these answers one after another, and the pauses between."""

    def run(
        *answers: RangeAnswer | SourceFailure,
    ) -> tuple[RangeAnswer | SourceFailure, list[float]]:
        left, slept = list(answers), list[float]()
        monkeypatch.setattr(PrometheusApi, "query_range", lambda *_, **__: left.pop(0))
        monkeypatch.setattr(time, "sleep", slept.append)
        found = ask(PrometheusApi(url="http://p"), "x", 0.0, 1, 1.0)
        assert left == []
        return found, slept

    return run


def test_what_may_answer_later_is_asked_three_times(
    asked: Ask,
) -> None:
    down, away = failure(FailureReason.UNAVAILABLE), failure(FailureReason.UNREACHABLE)
    assert asked(down, FINE) == (FINE, [1.0])
    assert asked(down, away, FINE) == (FINE, [1.0, 5.0])
    assert asked(down, away, down) == (down, [1.0, 5.0])


@pytest.mark.parametrize(
    "reason",
    [FailureReason.UNAUTHORIZED, FailureReason.TOO_LARGE, FailureReason.TIMEOUT, FailureReason.BAD_ANSWER],
)
def test_what_will_not_change_is_asked_once(reason: FailureReason, asked: Ask) -> None:
    assert asked(failure(reason)) == (failure(reason), [])


def test_a_server_that_asks_to_wait_is_waited_for_a_minute_at_most(
    asked: Ask,
) -> None:
    assert asked(to_wait(7.0), to_wait(60.0), FINE) == (FINE, [7.0, 60.0])
    assert asked(to_wait(0.0), FINE) == (FINE, [1.0])
    assert asked(to_wait(61.0)) == (to_wait(61.0), [])
