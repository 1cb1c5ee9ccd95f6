"""A history's signals scored, and told as JSON and as a table."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.lab.backtest.daemon_run import run_recording
from kvheadroom.lab.backtest.events import (
    PRODUCTION,
    SMALL,
    EngineSample,
    Episode,
    Scale,
    date_rises,
    find_episodes,
    find_stretches,
)
from kvheadroom.lab.backtest.histories import EngineHistory, History, Series, Values
from kvheadroom.lab.backtest.recorded_samples import all_samples
from kvheadroom.lab.backtest.report import as_json, table
from kvheadroom.lab.backtest.results import AlertRun, EngineResult, SignalResult, score_history
from kvheadroom.lab.recordings import read_recording
from tests.conftest import Golden
from tests.lab.backtest.series import firing, samples

RECORDINGS = Path(__file__).parents[2] / "recordings" / "backtest"
SCALE = Scale(horizon_seconds=10.0, episode_gap_seconds=4.0, alarm_gap_seconds=2.0, hold_seconds=3.0)
PROBABILITY = "kvheadroom_forecast_preemption_probability_ratio"
EXHAUSTION = "kvheadroom_forecast_exhaustion_seconds"


def history_of(
    preemptions: Sequence[float | None], series: dict[Series, Values] | None = None, *, engine: str = "0"
) -> History:
    seen = samples(preemptions)
    counted = [sample for sample in seen if sample.preemptions_total is not None]
    return History(
        name="h",
        duration_seconds=len(seen) - 1.0,
        every_seconds=1.0,
        engines=(EngineHistory(engine=engine, stretches=find_stretches(counted, 3.0), ticks=seen),),
        series=series or {},
    )


def one(history: History, *alerts: AlertRun, scale: Scale = SCALE) -> EngineResult:
    [result] = score_history(history, alerts, scale)
    return result


def signal(result: EngineResult, name: str) -> SignalResult:
    [found] = [signal for signal in result.signals if signal.name == name]
    return found


def replayed(name: str) -> History:
    recording = read_recording(RECORDINGS / f"{name}.jsonl.gz")
    return run_recording(recording, name, every_seconds=1.0, wanted=frozenset(), report=lambda _: None)


def in_json(results: tuple[EngineResult, ...]) -> Any:
    return json.loads(json.dumps(as_json(results), allow_nan=False))


# --- signals ---


def test_an_alert_is_scored_like_any_signal() -> None:
    history = history_of([0.0] * 20 + [1.0] * 20)
    result = one(history, AlertRun("A", {"0": firing("." * 12 + "#" * 28)}))
    scored = signal(result, "A")
    assert scored.kind == "alert"
    assert scored.score is not None
    assert [(w.preempted_at, w.warned_at, w.lead_seconds) for w in scored.score.warned] == [(20.0, 12.0, 8.0)]
    assert result.is_scored


def test_an_alert_that_was_not_evaluated_says_why_and_has_no_score() -> None:
    result = one(history_of([0.0] * 9), AlertRun("A", {}, "promtool is not there"))
    assert signal(result, "A").score is None
    assert not result.is_scored
    told = in_json((result,))["recordings"][0]["signals"][0]
    assert told == {"name": "A", "kind": "alert", "evaluated": False, "reason": "promtool is not there"}
    assert "  alert A: not evaluated, promtool is not there" in list(table((result,)))


def test_a_forecast_probability_is_an_alarm_from_a_half_on_and_judged_at_its_own_horizon() -> None:
    values = [0.1] * 17 + [0.5] * 3 + [0.0] * 20
    label = (("engine", "0"), ("horizon", "5"))
    result = one(history_of([0.0] * 20 + [1.0] * 20, {Series(PROBABILITY, label): values}))
    forecast = signal(result, "probability within 5s >= 0.5")
    assert forecast.kind == "forecast"
    assert forecast.score is not None
    assert [w.lead_seconds for w in forecast.score.warned] == [3.0]
    [(horizon, judged)] = forecast.judged.items()
    assert horizon == 5.0
    # Ticks 15 to 19 have the event within 5 s; ticks 0 to 34 have their horizon in the history.
    assert [tick for tick, said in enumerate(judged) if said.came] == [15, 16, 17, 18, 19]
    assert len(judged) == 35
    [told] = in_json((result,))["recordings"]
    expected = (15 * 0.1**2 + 2 * 0.9**2 + 3 * 0.5**2 + 15 * 0.0) / 35
    assert told["brier"]["probability within 5s >= 0.5"] == {"5": pytest.approx(expected)}
    assert told["brier"]["always the base rate"]["5"] == pytest.approx(5 / 35 * 30 / 35)
    ranges = told["reliability"]["probability within 5s >= 0.5"]["5"]
    assert [(one["at_least"], one["ticks"]) for one in ranges] == [(0.0, 15), (0.1, 17), (0.5, 3)]
    assert (
        "  probability within 5s >= 0.5: said, and of how many ticks it came: "
        "0.0..0.1: 0% of 15; 0.1..0.2: 12% of 17; 0.5..0.6: 100% of 3"
    ) in list(table((result,)))


@pytest.mark.parametrize(("label", "seconds"), [("60", 60), ("90s", 90), ("15m", 900), ("1h", 3600)])
def test_a_forecasts_horizon_is_read_with_its_unit(label: str, seconds: float) -> None:
    series: dict[Series, Values] = {Series(PROBABILITY, (("engine", "0"), ("horizon", label))): [0.5] * 9}
    assert signal(one(history_of([0.0] * 9, series)), f"probability within {seconds}s >= 0.5")


def test_a_time_to_exhaustion_is_an_alarm_once_it_is_within_the_horizon() -> None:
    values: Values = [None] * 10 + [30.0] * 4 + [10.0] * 6 + [None] * 20
    result = one(history_of([0.0] * 20 + [1.0] * 20, {Series(EXHAUSTION, (("engine", "0"),)): values}))
    forecast = signal(result, "exhaustion within 10s")
    assert forecast.score is not None
    assert [(w.warned_at, w.lead_seconds) for w in forecast.score.warned] == [(14.0, 6.0)]
    assert forecast.judged == {}


def test_a_forecast_of_another_engine_is_not_this_ones() -> None:
    series: dict[Series, Values] = {Series(EXHAUSTION, (("engine", "1"),)): [1.0] * 9}
    assert {found.kind for found in one(history_of([0.0] * 9, series)).signals} == {"baseline"}


# --- what cannot be scored ---


def test_without_the_counter_of_preemptions_nothing_is_scored() -> None:
    result = one(history_of([None] * 9), AlertRun("A", {"0": firing("#########")}))
    assert result.episodes is None
    assert result.signals == ()
    assert not result.is_scored
    assert result.problems == ("h: its pages have no num_preemptions_total, so nothing is scored",)
    assert in_json((result,))["recordings"][0]["episodes"] is None


def test_a_rule_whose_figure_was_never_told_has_no_score() -> None:
    seen = tuple(EngineSample(at=float(at), preemptions_total=0.0, requests_waiting=0.0) for at in range(20))
    engine = EngineHistory(engine="0", stretches=find_stretches(seen, 3.0), ticks=seen)
    history = History(name="h", duration_seconds=19.0, every_seconds=1.0, engines=(engine,), series={})
    result = one(history)
    usage, waiting = signal(result, "usage > 0.9"), signal(result, "waiting > 0")
    assert (usage.score, usage.why_not) == (None, "the engine did not tell at any tick what it needs")
    assert waiting.score is not None
    assert not result.is_scored


def test_a_table_without_a_row_has_no_head() -> None:
    seen = tuple(EngineSample(at=float(at), preemptions_total=0.0) for at in range(20))
    engine = EngineHistory(engine="0", stretches=find_stretches(seen, 3.0), ticks=seen)
    history = History(name="h", duration_seconds=19.0, every_seconds=1.0, engines=(engine,), series={})
    lines = list(table(score_history(history, (), SCALE)))
    assert lines[1] == "  0 preemptions (0 events) in 0 episodes"
    assert lines[2].startswith("  baseline usage > 0.8: not evaluated, ")


def test_what_was_seen_at_single_instants_alone_has_no_score() -> None:
    result = one(history_of([3, None, None, None, 9]))
    assert (result.episodes, result.signals, result.is_scored) == (None, (), False)
    assert result.problems == ("h: it was seen at single instants alone, so nothing is scored",)


def test_an_event_that_is_dated_long_before_its_rise_is_told() -> None:
    def history(rises_at: int) -> History:
        seen = samples(
            [int(at >= rises_at) for at in range(20)],
            running=[9 if at < 5 else 8 for at in range(20)],
            waiting=[0 if at < 5 else 1 for at in range(20)],
        )
        engine = EngineHistory(engine="0", stretches=find_stretches(seen, 3.0), ticks=seen)
        return History(name="h", duration_seconds=19.0, every_seconds=1.0, engines=(engine,), series={})

    assert one(history(8)).problems == ()
    late = one(history(9))
    assert late.episodes == (Episode((5.0,)),)
    [doubt] = late.problems
    assert doubt == (
        "h: what was counted at 9.0 s is dated to 5.0 s, when fewer requests ran and more waited; a client that hung up "
        "looks the same"
    )


@pytest.mark.parametrize(
    ("every_seconds", "scale", "doubts"),
    [
        (4.9, SMALL, 0),
        (5.0, SMALL, 1),
        (15.0, SMALL, 1),
        (15.0, PRODUCTION, 0),
        (60.0, PRODUCTION, 0),
    ],
)
def test_scrapes_that_are_far_apart_ask_for_the_larger_scale(
    every_seconds: float, scale: Scale, doubts: int
) -> None:
    seen = samples([0] * 99, every_seconds=every_seconds)
    engine = EngineHistory(engine="0", stretches=find_stretches(seen, 60.0), ticks=seen)
    history = History(
        name="h",
        duration_seconds=98 * every_seconds,
        every_seconds=every_seconds,
        engines=(engine,),
        series={},
    )
    told = [problem for problem in one(history, scale=scale).problems if "apart" in problem]
    reason = f"h: its scrapes are {every_seconds:g} s apart, too far for the scale of a tiny model; take --scale production"
    assert told == [reason] * doubts


def test_hang_ups_of_the_recorded_load_move_no_episode() -> None:
    """docs/backtest.md tells these figures."""
    recording = read_recording(RECORDINGS.parent / "loads" / "aborts.metrics.jsonl.gz")
    [seen] = all_samples(recording)[0].values()
    fell = [
        (before, now)
        for before, now in pairwise(seen)
        if (now.requests_running or 0) < (before.requests_running or 0)
        and now.finished_total == before.finished_total
    ]
    signs = [now.at for before, now in fell if (now.requests_waiting or 0) > (before.requests_waiting or 0)]
    assert (len(fell), signs) == (12, [30.501, 31.503, 34.508, 36.504, 39.002])
    rises = list(date_rises(seen))
    early = [(rise.dated_at, rise.counted_at) for rise in rises if rise.dated_at < rise.counted_at]
    assert early == [(30.501, 31.061), (34.508, 35.01), (39.002, 40.501)]
    assert [one.preempted_at for one in find_episodes([rise.dated_at for rise in rises], 20.0)] == [25.01]


def test_what_cannot_be_scored_says_why() -> None:
    result = one(replace(history_of([0, 1, 2]), why_not="two servers"))
    assert (result.episodes, result.signals, result.is_scored) == (None, (), False)
    assert result.problems == ("h: two servers, so nothing is scored",)


def test_without_an_engine_nothing_is_scored() -> None:
    empty = History(name="h", duration_seconds=9.0, every_seconds=1.0, engines=(), series={})
    result = one(empty)
    assert not result.is_scored
    assert list(table((result,))) == [
        "h: 9 s, looked at every 1 s; horizon 10 s",
        "  careful: h: no engine of vLLM was seen, so nothing is scored",
    ]


def test_a_history_shorter_than_the_horizon_says_that_it_tells_no_false_alarms() -> None:
    result = one(history_of([0.0] * 9), AlertRun("A", {"0": firing("#########")}))
    assert result.problems == (
        "h: no stretch of it is as long as the horizon of 10 s, so no alarm can be told to be false",
    )
    scored = signal(result, "A").score
    assert scored is not None
    assert (scored.false_alarms, scored.undecided) == (0, 1)
    assert in_json((result,))["recordings"][0]["brier"] == {}


def test_several_engines_are_results_of_their_own() -> None:
    history = history_of([0.0] * 20)
    other = EngineHistory(
        engine="1",
        stretches=find_stretches(samples([0.0] * 10 + [1.0] * 10), 3.0),
        ticks=tuple(EngineSample(at=float(at)) for at in range(20)),
    )
    both = History(
        name="h", duration_seconds=19.0, every_seconds=1.0, engines=(*history.engines, other), series={}
    )
    alert = AlertRun("A", {"0": firing("." * 20), "1": firing("." * 5 + "#" * 15)})
    first, second = score_history(both, (alert,), SCALE)
    assert (first.name, second.name) == ("h engine 0", "h engine 1")
    assert (first.episodes, len(second.episodes or ())) == ((), 1)
    scored = signal(second, "A").score
    assert scored is not None
    assert [w.lead_seconds for w in scored.warned] == [5.0]


# --- real recordings ---


def test_the_preemptions_of_real_recordings_are_the_known_ones() -> None:
    def preempted(name: str) -> list[float]:
        episodes = one(replayed(name), scale=SMALL).episodes
        assert episodes is not None
        return [round(event, 1) for episode in episodes for event in episode.events]

    assert preempted("steady") == []
    # The last of these was counted at 164.0 s; at 163.0 s one request less ran, none had finished, one more waited.
    assert preempted("chat") == [121.5, 128.0, 130.5, 143.5, 163.0]
    assert len(preempted("burst")) == 23, "scrapes at which the counter of 54 preemptions rose"


def test_the_chat_is_one_episode_and_the_bursts_are_three() -> None:
    [chat] = one(replayed("chat"), scale=SMALL).episodes or ()
    assert (round(chat.preempted_at, 1), round(chat.last_at, 1)) == (121.5, 163.0)
    result = one(replayed("burst"), scale=SMALL)
    burst = result.episodes or ()
    assert result.preemptions == 54
    assert [round(one.preempted_at, 1) for one in burst] == [20.6, 66.5, 111.0]


def test_json_has_the_promised_keys_and_seconds_from_the_start() -> None:
    [told] = in_json(score_history(replayed("burst"), (), SMALL))["recordings"]
    assert told.keys() >= {
        "name", "duration_seconds", "every_seconds", "horizon_seconds", "episodes", "signals", "brier"
    }  # fmt: skip
    assert (told["name"], told["horizon_seconds"], told["every_seconds"]) == ("burst", 60.0, 1.0)
    [waiting] = [found for found in told["signals"] if found["name"] == "waiting > 0"]
    assert waiting.keys() >= {
        "name", "kind", "evaluated", "firing", "warned", "missed", "false_alarms", "time_firing_ratio"
    }  # fmt: skip
    assert [one["preempted_at"] for one in waiting["warned"]] == told["episodes"]
    assert waiting["missed"] == 0
    assert all(0 <= begin <= end <= told["duration_seconds"] for begin, end in waiting["firing"])


def test_the_table_of_the_bursts_is_as_committed(golden: Golden) -> None:
    lines = table(score_history(replayed("burst"), (AlertRun("B", {}, "there is no promtool"),), SMALL))
    golden.check("backtest_burst.txt", "\n".join(lines) + "\n")
