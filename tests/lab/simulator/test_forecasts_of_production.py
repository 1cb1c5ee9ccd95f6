"""What warns of preemptions on the production workload, beside an oracle that knows every answer's length."""

import statistics
import sys
from pathlib import Path

import pytest

from kvheadroom.lab.backtest.alert_rules import own_rules
from kvheadroom.lab.backtest.baselines import baselines
from kvheadroom.lab.backtest.daemon_run import run_recording
from kvheadroom.lab.backtest.events import PRODUCTION, EngineSample, Stretch
from kvheadroom.lab.backtest.histories import ALWAYS_WANTED, EngineHistory, History, Series
from kvheadroom.lab.backtest.promtool import find_promtool, run_alerts
from kvheadroom.lab.backtest.results import BASELINE, FORECAST, score_history
from kvheadroom.lab.recordings import read_recording
from kvheadroom.lab.simulator.oracle import Oracle
from kvheadroom.lab.simulator.production import simulate
from tests.lab.simulator.scored import HINDSIGHT, ORACLE, best_baseline, blind_leads, rows, table

EVERY_SECONDS = 15.0


def report(line: str) -> None:
    print(line, file=sys.stderr)


@pytest.mark.lab
def test_what_warns_on_the_production_workload_beside_the_oracle(tmp_path: Path) -> None:
    oracle = Oracle(PRODUCTION.horizon_seconds)
    told = simulate(
        tmp_path / "production.jsonl.gz",
        tmp_path / "production.requests.jsonl.gz",
        interval_seconds=EVERY_SECONDS,
        watch=oracle.watch,
    )
    assert (told.num_pages, told.num_requests) == (80_640, 106_773), "being asked changed nothing"
    rules = own_rules()
    history = run_recording(
        read_recording(tmp_path / "production.jsonl.gz"),
        "production",
        every_seconds=EVERY_SECONDS,
        wanted=ALWAYS_WANTED | rules.metrics,
        report=report,
    )
    alerts = run_alerts(find_promtool(None), rules, history, report)
    [result] = score_history(history, alerts, PRODUCTION)
    assert result.episodes is not None
    assert (result.preemptions, len(result.episodes)) == (297, 150)
    found = rows(history, result, oracle.answers)
    print()
    for line in table(found, result.episodes):
        print(line)
    blind = blind_leads(history, result.episodes, 0.9, PRODUCTION.horizon_seconds)
    true = [lead for lead in blind if lead is not None]
    print(
        f"at random, usage above 0.9: {len(true):,} of {len(blind):,} pages were followed by an episode, "
        f"by a median of {statistics.median(true):.1f} s"
    )
    print(*(f"careful: {problem}" for problem in result.problems), sep="\n")
    assert {rule.name for rule in baselines(PRODUCTION)} <= {row.name for row in found}


def a_history() -> History:
    """Two preemptions, at 1,800 and 5,400 s; usage above 0.95 from 1,500 and 5,100 s on for ten minutes, once more at 9,000 s."""
    samples = tuple(
        EngineSample(
            at=at,
            kv_usage_ratio=0.97 if any(0 <= at - since < 600 for since in (1500, 5100, 9000)) else 0.5,
            requests_running=10,
            requests_waiting=0,
            preemptions_total=(at >= 1800) + (at >= 5400),
            finished_total=0,
        )
        for at in (tick * EVERY_SECONDS for tick in range(960))
    )
    said = [0.45 if 900 <= sample.at < 1800 else 0.15 if sample.at >= 13_000 else None for sample in samples]
    labels = (
        ("engine", "0"),
        ("horizon", "900s"),
        ("instance", "made"),
        ("job", "kvheadroom"),
        ("replica", "made"),
    )
    return History(
        name="made",
        duration_seconds=959 * EVERY_SECONDS,
        every_seconds=EVERY_SECONDS,
        engines=(EngineHistory(engine="0", stretches=(Stretch(samples),), ticks=samples),),
        series={Series("kvheadroom_forecast_preemption_probability_ratio", labels): said},
    )


def test_a_table_has_rules_forecasts_at_every_threshold_and_the_oracle_by_the_same_score() -> None:
    history = a_history()
    [result] = score_history(history, (), PRODUCTION)
    answers = [
        next(
            (
                event - tick * EVERY_SECONDS
                for event in (1790.0, 5390.0)
                if 0 < event - tick * EVERY_SECONDS <= 60
            ),
            None,
        )
        for tick in range(960)
    ]
    found = {row.name: row for row in rows(history, result, answers)}
    assert [row.kind for row in found.values()].count(ORACLE) == 1
    usage = found["usage > 0.95"]
    assert (usage.kind, usage.median_lead_seconds, len(usage.score.warned)) == (BASELINE, 300.0, 2)
    assert usage.false_per_day == pytest.approx(1 / (959 * 15 / 86_400))
    # Seen from the page at 1,740 s a preemption at 1,790 s is 50 s away; the page tells of it at 1,800 s.
    oracle = found["oracle within 900s"]
    assert (oracle.median_lead_seconds, len(oracle.score.warned), oracle.score.false_alarms) == (60.0, 2, 0)
    assert found["what came within 900s"].kind == HINDSIGHT
    assert found["what came within 900s"].median_lead_seconds == 900.0
    known = found["probability within 900s >= 0.4"]
    assert (known.kind, known.median_lead_seconds, len(known.score.warned)) == (FORECAST, 900.0, 1)
    assert (known.score.false_alarms, found["probability within 900s >= 0.1"].score.undecided) == (0, 0)
    assert found["probability within 900s >= 0.1"].score.false_alarms == 1
    assert found["probability within 900s >= 0.5"].score.warned == ()
    # Ten minutes are 40 pages: 20 before the event, its own, and 19 that none follows in time; after the third, none at all.
    blind = blind_leads(history, result.episodes or (), 0.9, 900.0)
    before = [float(lead) for lead in range(300, 0, -15)]
    assert [lead for lead in blind if lead is not None] == before * 2
    assert blind.count(None) == 19 * 2 + 40
    # Of the rules that warn of both, `usage > 0.8` and its like are as good here: the first of them is taken.
    assert len(best_baseline(list(found.values())).score.warned) == 2
    lines = list(table(list(found.values()), result.episodes or ()))
    assert any(
        " ".join(line.split()) == "oracle within 900s 2/2 60.0 s 0.00 0 0.8% 0.20 1.00" for line in lines
    )
    assert any(
        line.startswith("probability within 900s >= 0.4: 3.00 x the lead of the best rule") for line in lines
    )
