"""What the dashboards ask Prometheus: that it is understood, and what it answers to made-up series."""

import re
from pathlib import Path

import pytest

from dashboards import promql
from kvheadroom.outputs import metric_catalogue as catalogue
from tests.dashboards import expressions
from tests.dashboards.expressions import EXPORTED, PROMETHEUS_LABELS
from tests.dashboards.test_dashboards import DASHBOARDS, PANELS

QUERIES = {
    f"{uid.removeprefix('kvheadroom-')}: {where}": query
    for uid, document in DASHBOARDS.items()
    for where, query in expressions.all_queries(document).items()
}
# Tables that tell what was counted since a start, in words.
SINCE_A_START = {
    "prediction: Starts that were no sample, A",
    "prediction: Xid errors of GPUs, A",
    "warm: Tiers, G",
}

each_query = pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)


# --- PromQL ---


def test_prometheus_understands_every_query(promtool: Path, tmp_path: Path) -> None:
    filled = {where: expressions.filled_in(query) for where, query in QUERIES.items()}
    assert expressions.refused_by_promtool(promtool, filled, tmp_path) == ""


def test_a_query_that_does_not_parse_is_found(promtool: Path, tmp_path: Path) -> None:
    queries = {"good": "up", "bad": "max by (engine (up)"}
    assert "parse error" in expressions.refused_by_promtool(promtool, queries, tmp_path)


@each_query
def test_every_metric_in_a_query_is_exported(query: str) -> None:
    assert not expressions.unknown_names([query])


@each_query
def test_a_query_selects_by_labels_that_the_metric_has(query: str) -> None:
    for name, labels in expressions.selectors(query):
        assert labels <= set(EXPORTED[name].labels) | PROMETHEUS_LABELS


@pytest.mark.parametrize("where", QUERIES)
def test_all_counters_and_nothing_else_are_shown_by_their_increase(where: str) -> None:
    query = QUERIES[where]
    counters = {metric.full_name for metric in expressions.metrics(query) if metric.kind == "counter"}
    if where in SINCE_A_START:
        assert counters
        assert "since" in PANELS[where.rpartition(",")[0]]["description"]
    else:
        assert expressions.given_to_range_functions(query) == counters


@each_query
def test_no_share_is_added_up_or_averaged_over_engines(query: str) -> None:
    # One full pool preempts however empty the others are.
    if any(metric.full_name.endswith("_ratio") for metric in expressions.metrics(query)):
        assert not re.search(r"\b(sum|avg|quantile)\b", query)


def test_increases_use_the_interval_that_fits_the_scrapes_or_that_of_an_alert() -> None:
    ranges = {found for query in QUERIES.values() for found in re.findall(r"\[([\w$:]+)\]", query)}
    assert ranges == {"$__rate_interval", "$__range:$__interval", "5m", "1h"}
    fixed = {
        found
        for query in QUERIES.values()
        for found in re.findall(r"round\(increase\((\w+)\{[^}]*\}\[(5m|1h)\]\)\)", query)
    }
    # As the alerts that have the limits round them.
    assert fixed == {("kvheadroom_preemptions_total", "5m"), ("kvheadroom_replica_restarts_total", "1h")}


# --- answers ---

ENGINE = 'job="kv",replica="%s",engine="0",model_name="glm"'
GLM_A, GLM_B = ENGINE % "glm-a", ENGINE % "glm-b"
ALL = {"replica": ".+", "job": "kv"}


def of(name: str, labels: str, more: str = "") -> str:
    return f"kvheadroom_{name}{{{labels}{',' if more else ''}{more}}}"


def test_requests_are_not_counted_again_where_vllm_gives_reasons(promtool: Path, tmp_path: Path) -> None:
    # Only the older engine, which has the total alone, answers the second question.
    new, old = 'job="kv",replica="new",engine="0"', 'job="kv",replica="old",engine="0"'
    series = {
        of("requests_waiting", new): 5,
        of("requests_waiting_by_reason", new, 'reason="capacity"'): 3,
        of("requests_waiting_by_reason", new, 'reason="deferred"'): 2,
        of("requests_waiting", old): 7,
    }
    answers = {
        promql.lines(catalogue.WAITING_BY_REASON): {
            f'{{{new},reason="capacity"}}': 3,
            f'{{{new},reason="deferred"}}': 2,
        },
        promql.waiting_for_an_unknown_reason(): {f"{{{old}}}": 7},
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, ALL) == ""


def test_a_pool_of_three_quarters_of_the_prediction_is_a_quarter_too_small(
    promtool: Path, tmp_path: Path
) -> None:
    series = {
        of("observed_pool_tokens", GLM_A): 750,
        of("predicted_pool_tokens", GLM_A): 1000,
        of("calibrated_pool_tokens", GLM_A): 600,
    }
    answers = {
        promql.pool_against("predicted"): {f"{{{GLM_A}}}": -0.25},
        promql.pool_against("calibrated"): {f"{{{GLM_A}}}": 0.25},
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path) == ""


def test_a_daemon_that_moves_to_another_pod_keeps_its_lines_and_other_labels_stay(
    promtool: Path, tmp_path: Path
) -> None:
    engine = 'job="kv",replica="glm-a",engine="0"'
    series = {
        of("kv_usage_ratio", engine, f'cluster="{cluster}",instance="{pod}:9878",pod="{pod}"'): usage
        for cluster, pod, usage in (("north", "x", 0.5), ("north", "y", 0.5), ("south", "z", 0.25))
    }
    answers = {
        promql.lines("kv_usage_ratio"): {
            f'{{{engine},cluster="north"}}': 0.5,
            f'{{{engine},cluster="south"}}': 0.25,
        }
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path) == ""


def test_only_sessions_of_the_chosen_length_and_replicas_are_shown(promtool: Path, tmp_path: Path) -> None:
    elsewhere = ENGINE % "glm-c"
    series = {
        of("sessions_headroom", GLM_A, 'session_tokens="262144"'): 2,
        of("sessions_headroom", GLM_A, 'session_tokens="8192"'): 71,
        of("sessions_headroom", elsewhere, 'session_tokens="262144"'): 4,
    }
    answers = {
        promql.lines(catalogue.SESSIONS_HEADROOM): {f'{{{GLM_A},session_tokens="262144"}}': 2.0},
        f"sum({promql.lines(catalogue.SESSIONS_HEADROOM)})": {"{}": 2.0},
    }
    chosen = {"job": "kv", "replica": "(glm-a|glm-b)", "session_tokens": "262144"}
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, chosen) == ""


PROBABILITY = "forecast_preemption_probability_ratio"


@pytest.mark.parametrize(
    ("situation", "level"),
    [
        ({}, 0),
        ({of("engine_state", GLM_A, 'state="working_set_exceeds_pool"'): 1}, 1),
        ({of(PROBABILITY, GLM_A, 'horizon="10m"'): 0.7}, 2),
        ({of(PROBABILITY, GLM_A, 'horizon="10m"'): 0.69}, 0),
        # Likely within seconds, but nothing is to be seen yet: the alert is silent too.
        (
            {
                of(PROBABILITY, GLM_A, 'horizon="30s"'): 0.5,
                of("requests_waiting", GLM_A): 0,
                of("kv_usage_ratio", GLM_A): 0.4,
            },
            0,
        ),
        ({of(PROBABILITY, GLM_A, 'horizon="30s"'): 0.5, of("requests_waiting", GLM_A): 2}, 3),
        ({of(PROBABILITY, GLM_A, 'horizon="30s"'): 0.5, of("kv_usage_ratio", GLM_A): 0.81}, 3),
        (
            {
                of(PROBABILITY, GLM_A, 'horizon="10m"'): 0.9,
                of("engine_state", GLM_A, 'state="preempting"'): 1,
            },
            4,
        ),
        (
            {
                of("engine_state", GLM_A, 'state="preempting"'): 1,
                of("engine_state", GLM_A, 'state="thrash"'): 1,
            },
            5,
        ),
    ],
    ids=[
        "nothing",
        "outgrown",
        "soon",
        "not quite",
        "likely but empty",
        "likely with a queue",
        "likely and full",
        "preempting",
        "thrashing",
    ],
)
def test_trouble_is_the_worst_that_there_is(
    promtool: Path, tmp_path: Path, situation: dict[str, float], level: int
) -> None:
    series = {of("sample_age_seconds", GLM_A): 1.0, of("sample_age_seconds", GLM_B): 1.0, **situation}
    answers = {
        promql.trouble(): {f"{{{GLM_A}}}": float(level), f"{{{GLM_B}}}": 0.0},
        promql.engines_in_trouble(): {"{}": float(level > 0)},
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, ALL) == ""
    assert set(promql.TROUBLE) == set(range(7))


def test_a_server_that_does_not_answer_is_in_trouble_although_it_has_no_engine(
    promtool: Path, tmp_path: Path
) -> None:
    series = {
        of("sample_age_seconds", GLM_A): 1.0,
        of("replica_state", 'job="kv",replica="glm-a"', 'state="serving"'): 1.0,
        of("replica_state", 'job="kv",replica="glm-b"', 'state="down"'): 1.0,
        of("replica_state", 'job="kv",replica="glm-c"', 'state="sleeping"'): 1.0,
    }
    answers = {
        promql.trouble(): {f"{{{GLM_A}}}": 0.0, '{job="kv",replica="glm-b"}': 6.0},
        promql.engines_in_trouble(): {"{}": 1.0},
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, ALL) == ""


def test_nobody_is_in_trouble_only_where_somebody_is_watched(promtool: Path, tmp_path: Path) -> None:
    answers: dict[str, dict[str, float]] = {
        promql.engines_in_trouble(): {},
        promql.soonest_without_room(): {},
    }
    assert expressions.wrong_answers(promtool, {"up": 1}, answers, tmp_path, ALL) == ""


def test_not_within_ten_minutes_is_said_only_where_there_is_a_forecast(
    promtool: Path, tmp_path: Path
) -> None:
    forecast = {of(PROBABILITY, GLM_A, 'horizon="10m"'): 0.1, of(PROBABILITY, GLM_B, 'horizon="10m"'): 0.8}
    never: dict[str, dict[str, float]] = {promql.soonest_without_room(): {"{}": 601.0}}
    assert expressions.wrong_answers(promtool, forecast, never, tmp_path, ALL) == ""
    soon = forecast | {
        of("forecast_exhaustion_seconds", GLM_B): 95.0,
        of("forecast_exhaustion_seconds", GLM_A): 400.0,
    }
    first: dict[str, dict[str, float]] = {promql.soonest_without_room(): {"{}": 95.0}}
    assert expressions.wrong_answers(promtool, soon, first, tmp_path, ALL) == ""


def test_what_binds_is_a_number_for_each_engine(promtool: Path, tmp_path: Path) -> None:
    series = {
        of("binding_limit", GLM_A, 'limit="kv_pool"'): 1.0,
        of("binding_limit", GLM_B, 'limit="none"'): 1.0,
    }
    answers = {
        promql.numbered(catalogue.BINDING_LIMIT, "limit", promql.LIMITS): {
            f"{{{GLM_A}}}": 5.0,
            f"{{{GLM_B}}}": 1.0,
        }
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, ALL) == ""


def test_a_session_is_as_warm_as_on_the_engine_where_it_is_least(promtool: Path, tmp_path: Path) -> None:
    asked = 'cache_tier="hbm",session_tokens="262144",idle_seconds="2700"'
    series = {
        of("session_warm", GLM_A, f'{asked},warm="yes"'): 1.0,
        of("session_warm", GLM_B, f'{asked},warm="perhaps"'): 1.0,
        # Another idle time.
        of("session_warm", GLM_B, f'{asked.replace("2700", "300")},warm="yes"'): 1.0,
    }
    query = promql.numbered(catalogue.SESSION_WARM, "warm", promql.WARM, 'cache_tier="hbm"')
    assert PANELS["warm: In HBM?"]["targets"][0]["expr"] == f"min({query})"
    answers = {
        query: {f"{{{GLM_A},{asked}}}": 3.0, f"{{{GLM_B},{asked}}}": 2.0},
        f"min({query})": {"{}": 2.0},
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, ALL) == ""


def test_of_many_lines_the_highest_are_kept_all_along(promtool: Path, tmp_path: Path) -> None:
    lines = {of("kv_usage_ratio", ENGINE % f"glm-{i}"): i / 20 for i in range(12)}
    usage = promql.lines("kv_usage_ratio")
    highest: dict[str, float] = {f"{{{ENGINE % f'glm-{i}'}}}": i / 20 for i in (10, 11)}
    lowest: dict[str, float] = {f"{{{ENGINE % f'glm-{i}'}}}": i / 20 for i in (0, 1, 2)}
    answers = {promql.ends(usage, many=2): highest, promql.ends(usage, lowest=True, many=3): lowest}
    assert expressions.wrong_answers(promtool, lines, answers, tmp_path, ALL | {"__range": "2m"}) == ""


def test_a_line_is_chosen_by_all_of_the_time_that_is_shown_and_not_by_its_end(
    promtool: Path, tmp_path: Path
) -> None:
    dipped, peaked, between = (ENGINE % name for name in ("glm-dipped", "glm-peaked", "glm-between"))
    series = {
        of("kv_usage_ratio", dipped): "0x10 0.9x30",
        of("kv_usage_ratio", peaked): "1x10 0.1x30",
        of("kv_usage_ratio", between): "0.5x40",
    }
    usage = promql.lines("kv_usage_ratio")
    answers = {
        promql.ends(usage, lowest=True, many=1): {f"{{{dipped}}}": 0.9},
        promql.ends(usage, many=1): {f"{{{peaked}}}": 0.1},
        # By another expression: how far from a half.
        promql.ends(usage, of=f"-abs({usage} - 0.5)", many=1): {f"{{{between}}}": 0.5},
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, ALL) == ""


def test_a_gpu_that_two_sources_tell_of_has_one_row_and_a_short_name(promtool: Path, tmp_path: Path) -> None:
    gpu = 'gpu="GPU-1a2b3c4d-0001-0002-0003-000000000000"'
    mig = 'gpu="MIG-GPU-30303030/3"'
    info = 'job="kv",name="NVIDIA H200",memory="v2",host="%s",source="%s"'
    series = {
        of("gpu_up", f'job="kv",replica="glm-a",{gpu}'): 1.0,
        of("gpu_up", f'job="kv",replica="glm-b",{mig}'): 1.0,
        of("gpu_info", f"{gpu},{info % ('', 'nvml')}"): 1.0,
        of("gpu_info", f"{gpu},{info % ('', 'dcgm_exporters[0]')}"): 1.0,
        of("gpu_info", f"{mig},{info % ('node-1', 'dcgm_exporters[0]')}"): 1.0,
    }
    query = promql.short_gpu(promql.gpus_named(promql.lines(catalogue.GPU_UP)))
    answers = {
        query: {
            f'{{job="kv",replica="glm-a",{gpu},name="NVIDIA H200",short="GPU-1a2b3c4d"}}': 1.0,
            f'{{job="kv",replica="glm-b",{mig},name="NVIDIA H200",host="node-1",short="MIG-GPU-30303030/3"}}': 1.0,
        }
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, ALL) == ""


def test_findings_of_engines_and_of_gpus_are_counted_once_each(promtool: Path, tmp_path: Path) -> None:
    series = {
        of("sample_age_seconds", GLM_A): 1.0,
        of("memory_finding_bytes", GLM_A, 'finding="room_outside_budget"'): 7e9,
        of("memory_finding_bytes", 'job="kv",replica="glm-a",gpu="GPU-1",finding="foreign_memory"'): 2e9,
    }
    [target] = PANELS["prediction: Findings"]["targets"]
    assert expressions.wrong_answers(promtool, series, {target["expr"]: {"{}": 2.0}}, tmp_path, ALL) == ""
    one_model = ALL | {"model_name": "glm", "engine": "0"}
    assert (
        expressions.wrong_answers(promtool, series, {target["expr"]: {"{}": 2.0}}, tmp_path, one_model) == ""
    )


def test_every_firing_alert_of_what_is_chosen_is_marked_once(promtool: Path, tmp_path: Path) -> None:
    every = DASHBOARDS["kvheadroom-fleet"]["annotations"]["list"][2:]
    common = 'alertstate="firing",job="kv",instance="gpu-7:9878"'
    preempting = f'ALERTS{{{common},alertname="A",replica="glm-a",engine="0",model_name="glm"}}'
    down = f'ALERTS{{{common},alertname="B",replica="glm-a"}}'
    reload_failed = f'ALERTS{{{common},alertname="C"}}'
    elsewhere = 'ALERTS{alertstate="firing",job="node",instance="gpu-7:9100",alertname="D"}'
    other = f'ALERTS{{{common},alertname="E",replica="glm-b"}}'
    series = dict.fromkeys((preempting, down, reload_failed, elsewhere, other), 1.0)
    everything = {"job": "kv", "replica": ".+", "model_name": ".*", "engine": ".+"}
    one = everything | {"replica": "glm-a", "model_name": "glm", "engine": "0"}
    for chosen, expected in (
        (everything, ([preempting], [down, other], [reload_failed])),
        (one, ([preempting], [down], [reload_failed])),
    ):
        answers = {
            expressions.filled_in(marks["expr"], chosen): dict.fromkeys(told, 1.0)
            for marks, told in zip(every, expected, strict=True)
        }
        assert expressions.wrong_answers(promtool, series, answers, tmp_path) == ""


def test_the_interval_of_the_forecast_lies_around_its_middle(promtool: Path, tmp_path: Path) -> None:
    seconds = {"forecast_exhaustion_earliest_seconds": 20.0, "forecast_exhaustion_seconds": 95.0}
    seconds["forecast_exhaustion_latest_seconds"] = 400.0
    series = {of(name, GLM_A): value for name, value in seconds.items()}
    drawn = {
        target["legendFormat"][:3]: target["expr"]
        for target in PANELS["engine: Time until no room"]["targets"]
    }
    answers: dict[str, dict[str, float]] = {
        drawn[probability]: {f"{{{GLM_A}}}": value}
        for probability, value in (("10%", 20.0), ("50%", 95.0), ("90%", 400.0))
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path) == ""


def test_a_wrong_answer_is_found(promtool: Path, tmp_path: Path) -> None:
    answers = {promql.lines("kv_usage_ratio"): {f"{{{GLM_A}}}": 0.75}}
    problem = expressions.wrong_answers(promtool, {of("kv_usage_ratio", GLM_A): 0.5}, answers, tmp_path)
    assert "kvheadroom_kv_usage_ratio" in problem


# --- mistakes that the build refuses ---


def test_a_name_that_the_exporter_does_not_have_breaks_the_build() -> None:
    with pytest.raises(LookupError, match="no metric 'kv_usage_percent'"):
        promql.metric("kv_usage_percent")


def test_the_increase_of_a_gauge_is_refused() -> None:
    with pytest.raises(ValueError, match="kvheadroom_kv_usage_ratio is a gauge"):
        promql.increase("kv_usage_ratio")
