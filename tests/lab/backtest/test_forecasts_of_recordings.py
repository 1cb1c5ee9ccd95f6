"""How often the forecasts and the alerts on them are right, on every recording of a real vLLM: the tables of docs/forecast.md."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kvheadroom.lab.backtest.alert_rules import own_rules
from kvheadroom.lab.backtest.daemon_run import run_recording
from kvheadroom.lab.backtest.events import SMALL
from kvheadroom.lab.backtest.histories import ALWAYS_WANTED
from kvheadroom.lab.backtest.probabilities import Judged, brier
from kvheadroom.lab.backtest.promtool import find_promtool, run_alerts
from kvheadroom.lab.backtest.results import BASELINE, EngineResult, SignalResult, score_history
from kvheadroom.lab.recordings import read_recording
from tests.conftest import TESTS

RECORDINGS = (
    *(TESTS / "recordings/backtest" / f"{name}.jsonl.gz" for name in ("burst", "chat", "steady")),
    *sorted((TESTS / "recordings/loads").glob("*.metrics.jsonl.gz")),
)
WITHOUT_PREEMPTIONS = {"backtest/steady", "loads/sequence_limit", "loads/spikes", "loads/steady"}
IMMINENT, SOON = "KvHeadroomExhaustionImminent", "KvHeadroomExhaustionSoon"
Scored = Callable[[float], dict[str, EngineResult]]


@pytest.fixture(scope="module")
def scored() -> Scored:
    """Every engine of every recording, by its name, at so many seconds a tick."""

    @cache
    def at(every: float) -> dict[str, EngineResult]:
        rules = own_rules()
        results: dict[str, EngineResult] = {}
        for path in RECORDINGS:
            history = run_recording(
                read_recording(path),
                f"{path.parent.name}/{path.name.split('.')[0]}",
                every_seconds=every,
                wanted=ALWAYS_WANTED | rules.metrics,
                report=lambda _: None,
            )
            alerts = run_alerts(find_promtool(None), rules, history, lambda _: None)
            results |= {result.name: result for result in score_history(history, alerts, SMALL)}
        return results

    return at


def signal(result: EngineResult, name: str) -> SignalResult:
    return next(one for one in result.signals if one.name == name)


def leads(result: EngineResult, name: str) -> dict[float, float]:
    """Seconds from the alarm to each episode that was warned of."""
    figures = signal(result, name).score
    assert figures is not None
    return {one.preempted_at: one.lead_seconds for one in figures.warned}


def baselines_of(result: EngineResult) -> list[SignalResult]:
    return [one for one in result.signals if one.kind == BASELINE]


@pytest.mark.parametrize("every", [1.0, 5.0])
def test_no_alert_on_a_forecast_is_ever_false(scored: Scored, every: float) -> None:
    results = scored(every)
    assert len(results) == len(RECORDINGS) + 1
    for result in results.values():
        for name in (IMMINENT, SOON):
            figures = signal(result, name).score
            assert figures is not None
            assert figures.false_alarms == 0, (result.name, name)
    for name in WITHOUT_PREEMPTIONS:
        assert results[name].episodes == ()
        # Not even one that could have come true after the end.
        assert signal(results[name], IMMINENT).score.alarms == ()  # type: ignore[union-attr]
        assert signal(results[name], SOON).score.alarms == ()  # type: ignore[union-attr]


@pytest.mark.parametrize("every", [1.0, 5.0])
def test_all_bursts_and_the_chat_ramp_are_paged_as_early_as_by_the_best_simple_rules_and_for_less_time(
    scored: Scored, every: float
) -> None:
    for name, rules in (
        ("backtest/burst", ("usage > 0.8", "waiting > 0")),
        ("backtest/chat", ("usage > 0.8", "waiting > 0")),
    ):
        result = scored(every)[name]
        own, figures = leads(result, IMMINENT), signal(result, IMMINENT).score
        assert result.episodes is not None
        assert figures is not None
        assert figures.missed == 0
        for rule in rules:
            peer = signal(result, rule).score
            assert peer is not None
            assert all(own[at] >= lead for at, lead in leads(result, rule).items())
            assert figures.time_firing_ratio is not None
            assert peer.time_firing_ratio is not None
            assert figures.time_firing_ratio < peer.time_firing_ratio


def test_every_episode_that_a_queue_tells_of_at_a_scrape_in_five_seconds_is_warned_of(scored: Scored) -> None:
    for result in scored(5.0).values():
        queue = leads(result, "waiting > 0")
        assert queue.keys() <= leads(result, SOON).keys() | leads(result, IMMINENT).keys()


@pytest.mark.parametrize("every", [1.0, 5.0])
def test_over_all_recordings_a_probability_scores_better_than_every_simple_rule(
    scored: Scored, every: float
) -> None:
    # Within two minutes only 50 ticks can be judged, within ten none: the recordings are too short.
    scores = {
        name: score
        for (horizon, name), judged in pooled(scored(every).values()).items()
        if horizon == 30.0 and (score := brier(judged)) is not None
    }
    own = scores.pop("probability within 30s >= 0.5")
    assert len(scores) > 10
    assert all(own < other for other in scores.values())


def pooled(results: Iterable[EngineResult]) -> dict[tuple[float, str], list[Judged]]:
    """Of all recordings as one, at the ticks at which there is a forecast."""
    together: dict[tuple[float, str], list[Judged]] = defaultdict(list)
    for result in results:
        for one in result.signals:
            for horizon, judged in one.judged.items():
                together[horizon, one.name].extend(judged)
    return together


def rows(results: dict[str, EngineResult]) -> Iterator[str]:
    for name, result in results.items():
        if not result.episodes:
            continue
        cells = []
        for one in (SOON, IMMINENT, "usage > 0.8", "waiting > 0", "predict_linear on usage"):
            figures = signal(result, one).score
            assert figures is not None
            told = ", ".join(
                "–" if (lead := leads(result, one).get(episode.preempted_at)) is None else f"{lead:.1f}"
                for episode in result.episodes
            )
            false = f" (false: {figures.false_alarms})" if figures.false_alarms else ""
            cells.append(f"{told}; {figures.time_firing_ratio:.0%}{false}")
        yield f"| `{name}` | {len(result.episodes)} | {' | '.join(cells)} |"


@pytest.mark.parametrize("every", [1.0, 5.0])
def test_the_tables_of_docs_forecast_are_what_was_measured(scored: Scored, every: float) -> None:
    table = "\n".join(rows(scored(every)))
    print(table)
    assert table in Path(TESTS.parent / "docs/forecast.md").read_text()
