import itertools
import json
import re
from pathlib import Path

import pytest

from dashboards import build, promql
from dashboards.overview import overview
from tests.dashboards import expressions
from tests.dashboards.expressions import EXPORTED, PROMETHEUS_LABELS, Json

DASHBOARD = overview()
PANELS: list[Json] = DASHBOARD["panels"]
VARIABLES: list[Json] = DASHBOARD["templating"]["list"]
QUERIES = expressions.all_queries(DASHBOARD)
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}

each_panel = pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
each_query = pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES.keys())


# --- the committed file ---


def test_the_committed_file_is_what_the_code_builds() -> None:
    assert build.main(["--check"]) == 0


def test_check_names_an_edited_file_and_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    build.main([])
    file = tmp_path / "kvheadroom-overview.json"
    file.write_text(file.read_text().replace("KV cache in use", "KV cache used up"))

    assert build.main(["--check"]) == 1
    assert f"{file} is out of date; run: python -m dashboards.build" in capsys.readouterr().err
    assert "KV cache used up" in file.read_text()


def test_check_names_a_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path / "json")
    assert build.main(["--check"]) == 1
    assert "kvheadroom-overview.json is out of date" in capsys.readouterr().err


def test_building_writes_what_check_then_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path / "json")
    assert build.main([]) == 0
    assert build.main(["--check"]) == 0
    assert json.loads((tmp_path / "json" / "kvheadroom-overview.json").read_text()) == DASHBOARD


def test_it_can_be_imported_anywhere_without_replacing_another_dashboard() -> None:
    assert DASHBOARD["uid"] == "kvheadroom-overview"
    assert DASHBOARD["id"] is None
    assert DASHBOARD["schemaVersion"] == 39
    assert DASHBOARD["editable"] is False
    assert DASHBOARD["tags"] == ["kvheadroom", "vllm"]
    assert DASHBOARD["timezone"] == ""


# --- panels ---


def test_there_are_nine_panels_with_ids_of_their_own() -> None:
    assert sorted(panel["id"] for panel in PANELS) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len({panel["title"] for panel in PANELS}) == 9


@each_panel
def test_a_panel_says_what_it_shows_in_which_unit_and_what_it_means_to_be_empty(panel: Json) -> None:
    assert panel["title"]
    assert len(panel["description"].split()) > 20
    assert panel["fieldConfig"]["defaults"]["unit"] in {"short", "percentunit", "s"}
    assert len(panel["fieldConfig"]["defaults"]["noValue"].split()) > 1


@each_panel
def test_a_panel_asks_the_chosen_data_source(panel: Json) -> None:
    assert panel["datasource"] == PROMETHEUS
    assert [target["datasource"] for target in panel["targets"]] == [PROMETHEUS] * len(panel["targets"])


@each_panel
def test_a_description_names_exactly_the_metrics_of_its_queries(panel: Json) -> None:
    queries = " ".join(target["expr"] for target in panel["targets"])
    assert expressions.metric_names(panel["description"]) == expressions.metric_names(queries)


@each_panel
def test_a_legend_says_which_engine_of_which_replica(panel: Json) -> None:
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert all("{{replica}}" in legend and "{{engine}}" in legend for legend in legends)
    assert len(set(legends)) == len(legends)


@each_panel
def test_a_legend_uses_only_labels_that_its_series_have(panel: Json) -> None:
    for target in panel["targets"]:
        used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for metric in expressions.metrics(target["expr"].split(" unless ")[0]):
            assert used <= set(metric.labels)


@pytest.mark.parametrize(
    ("title", "of", "told_by"),
    [
        ("Sessions of $session_tokens tokens: predicted, observed, in use", "A", "custom.fillOpacity"),
        ("Sessions of $session_tokens tokens: predicted, observed, in use", "C", "custom.lineStyle"),
        ("Requests waiting", "/^deferred:/", "custom.lineStyle"),
        ("Probability of a preemption", "/^2m:/", "custom.lineStyle"),
        ("Probability of a preemption", "/^10m:/", "custom.lineStyle"),
        ("Time until the next request finds no room", "B", "custom.lineStyle"),
        ("Time until the next request finds no room", "C", "custom.lineStyle"),
    ],
)
def test_lines_that_mean_different_things_differ_by_more_than_colour(
    title: str, of: str, told_by: str
) -> None:
    [overrides] = [panel["fieldConfig"]["overrides"] for panel in PANELS if panel["title"] == title]
    [override] = [override for override in overrides if override["matcher"]["options"] == of]
    assert told_by in [change["id"] for change in override["properties"]]


@pytest.mark.parametrize(
    "title", ["Probability of a preemption", "Time until the next request finds no room"]
)
def test_of_three_lines_no_two_are_drawn_alike(title: str) -> None:
    [overrides] = [panel["fieldConfig"]["overrides"] for panel in PANELS if panel["title"] == title]
    styles = [change["value"] for override in overrides for change in override["properties"]]
    assert len(styles) == 2
    assert styles[0] != styles[1]


def test_each_horizon_of_the_forecast_has_a_line_of_its_own() -> None:
    from kvheadroom.capacity.forecast import HORIZONS

    [panel] = [panel for panel in PANELS if panel["title"] == "Probability of a preemption"]
    dashed = [look["matcher"]["options"] for look in panel["fieldConfig"]["overrides"]]
    legends = [f"{horizon}: engine 0 of glm-a" for horizon in HORIZONS]
    drawn = [[look for look in dashed if re.search(look.strip("/"), legend)] for legend in legends]
    # The first is solid.
    assert drawn == [[], ["/^2m:/"], ["/^10m:/"]]


def test_rows_of_the_timeline_are_told_apart_by_their_names_and_not_by_colour() -> None:
    [panel] = [panel for panel in PANELS if panel["type"] == "state-timeline"]
    for target in panel["targets"]:
        [family] = expressions.metrics(target["expr"])
        [told] = set(family.labels) & {"limit", "state", "reason"}
        assert f"{{{{{told}}}}}" in target["legendFormat"]
    # Its bars are there or not; no value is a colour.
    mappings = panel["fieldConfig"]["defaults"]["mappings"]
    assert [mapping["options"] for mapping in mappings] == [{"1": {"text": "yes", "index": 0}}]


def test_panels_neither_overlap_nor_leave_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            )
        )
        assert not cells & taken
        taken |= cells


@each_panel
def test_no_panel_has_a_threshold_for_those_live_in_the_rules_only(panel: Json) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert [step["value"] for step in defaults["thresholds"]["steps"]] == [None]
    assert "thresholdsStyle" not in defaults["custom"]


def test_usage_is_drawn_on_the_whole_scale_from_empty_to_full() -> None:
    [defaults] = [panel["fieldConfig"]["defaults"] for panel in PANELS if panel["title"] == "KV cache in use"]
    assert (defaults["min"], defaults["max"]) == (0, 1)


# --- variables and annotations ---


def test_the_variables_stand_in_the_order_in_which_one_narrows_the_next() -> None:
    assert [variable["name"] for variable in VARIABLES] == [
        "datasource",
        "job",
        "replica",
        "model_name",
        "engine",
        "session_tokens",
    ]


def test_a_variable_asks_only_for_those_before_it() -> None:
    before: set[str] = set()
    for name, query in expressions.variable_queries(DASHBOARD).items():
        # Not only at most: one that leaves out an earlier choice would offer what cannot be combined with it.
        assert expressions.variables_used(query) == before
        before.add(name)


def test_several_values_or_all_can_be_chosen_of_all_but_the_session_length() -> None:
    chosen = {
        variable["name"]: (variable["multi"], variable["includeAll"], variable.get("allValue"))
        for variable in VARIABLES
        if variable["type"] == "query"
    }
    assert chosen == {
        "job": (True, True, ".+"),
        "replica": (True, True, ".+"),
        # Empty where the server has not told it.
        "model_name": (True, True, ".*"),
        "engine": (True, True, ".+"),
        "session_tokens": (False, False, None),
    }


def test_session_lengths_are_sorted_as_numbers() -> None:
    [lengths] = [variable for variable in VARIABLES if variable["name"] == "session_tokens"]
    assert lengths["sort"] == 3


@each_query
def test_every_variable_in_a_query_exists(query: str) -> None:
    existing = {variable["name"] for variable in VARIABLES} | {"__rate_interval"}
    assert expressions.variables_used(query) <= existing


def test_every_variable_in_a_title_exists() -> None:
    titles = " ".join(panel["title"] for panel in PANELS)
    assert expressions.variables_used(titles) <= {variable["name"] for variable in VARIABLES}


def test_every_variable_narrows_the_panels() -> None:
    used = set().union(*(expressions.variables_used(query) for query in QUERIES.values()))
    assert {variable["name"] for variable in VARIABLES} - {"datasource"} <= used


def test_every_firing_alert_of_what_is_chosen_is_marked_once(promtool: Path, tmp_path: Path) -> None:
    every = DASHBOARD["annotations"]["list"]
    for marks in every:
        assert marks["enable"]
        assert marks["datasource"] == PROMETHEUS
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


@each_query
def test_all_counters_and_nothing_else_are_shown_by_their_increase(query: str) -> None:
    counters = {metric.full_name for metric in expressions.metrics(query) if metric.kind == "counter"}
    assert expressions.given_to_range_functions(query) == counters


@each_query
def test_no_share_is_added_up_or_averaged_over_engines(query: str) -> None:
    # One full pool preempts however empty the others are.
    if any(metric.full_name.endswith("_ratio") for metric in expressions.metrics(query)):
        assert not re.search(r"\b(sum|avg|count|quantile)\b", query)


def test_increases_use_the_interval_that_fits_the_scrapes() -> None:
    ranges = {found for query in QUERIES.values() for found in re.findall(r"\[([^\]]+)\]", query)}
    assert ranges == {"$__rate_interval"}


# --- answers ---


def test_requests_are_not_counted_again_where_vllm_gives_reasons(promtool: Path, tmp_path: Path) -> None:
    # Only the older engine, which has the total alone, answers the second question.
    series = {
        'kvheadroom_requests_waiting{job="kv",replica="new",engine="0"}': 5,
        'kvheadroom_requests_waiting_by_reason{job="kv",replica="new",engine="0",reason="capacity"}': 3,
        'kvheadroom_requests_waiting_by_reason{job="kv",replica="new",engine="0",reason="deferred"}': 2,
        'kvheadroom_requests_waiting{job="kv",replica="old",engine="0"}': 7,
    }
    answers = {
        promql.requests_waiting_by_reason(): {
            '{job="kv",replica="new",engine="0",reason="capacity"}': 3,
            '{job="kv",replica="new",engine="0",reason="deferred"}': 2,
        },
        promql.requests_waiting_for_an_unknown_reason(): {'{job="kv",replica="old",engine="0"}': 7},
    }
    chosen = {"replica": ".+"}
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, chosen) == ""


def test_a_pool_of_three_quarters_of_the_prediction_is_a_quarter_too_small(
    promtool: Path, tmp_path: Path
) -> None:
    engine = '{job="kv",replica="glm-a",engine="0",model_name="glm"}'
    series = {
        f"kvheadroom_observed_pool_tokens{engine}": 750,
        f"kvheadroom_predicted_pool_tokens{engine}": 1000,
    }
    answers = {promql.pool_against_prediction(): {engine: -0.25}}
    assert expressions.wrong_answers(promtool, series, answers, tmp_path) == ""


def test_a_daemon_that_moves_to_another_pod_keeps_its_lines_and_other_labels_stay(
    promtool: Path, tmp_path: Path
) -> None:
    usage = "kvheadroom_kv_usage_ratio"
    engine = 'job="kv",replica="glm-a",engine="0"'
    series = {
        f'{usage}{{{engine},cluster="north",instance="10.0.0.1:9878",pod="kvheadroom-x"}}': 0.5,
        f'{usage}{{{engine},cluster="north",instance="10.0.0.2:9878",pod="kvheadroom-y"}}': 0.5,
        f'{usage}{{{engine},cluster="south",instance="10.0.0.3:9878",pod="kvheadroom-z"}}': 0.25,
    }
    answers = {
        promql.kv_usage(): {f'{{{engine},cluster="north"}}': 0.5, f'{{{engine},cluster="south"}}': 0.25}
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path) == ""


def test_only_sessions_of_the_chosen_length_and_replicas_are_shown(promtool: Path, tmp_path: Path) -> None:
    engine = 'job="kv",engine="0",model_name="glm"'
    series = {
        f'kvheadroom_sessions_headroom{{{engine},replica="glm-a",session_tokens="262144"}}': 2,
        f'kvheadroom_sessions_headroom{{{engine},replica="glm-a",session_tokens="8192"}}': 71,
        f'kvheadroom_sessions_headroom{{{engine},replica="glm-c",session_tokens="262144"}}': 4,
    }
    answers = {promql.sessions_that_still_fit(): {f'{{{engine},replica="glm-a",session_tokens="262144"}}': 2}}
    chosen = {"job": "kv", "replica": "(glm-a|glm-b)", "session_tokens": "262144"}
    assert expressions.wrong_answers(promtool, series, answers, tmp_path, chosen) == ""


def test_the_timeline_has_what_binds_and_leaves_out_that_nothing_does(promtool: Path, tmp_path: Path) -> None:
    engine = 'job="kv",replica="glm-a",engine="%s",model_name="glm"'
    waits, idle = engine % 0, engine % 1
    series = {
        f'kvheadroom_binding_limit{{{waits},limit="kv_pool"}}': 1,
        f'kvheadroom_binding_limit{{{idle},limit="none"}}': 1,
        f'kvheadroom_engine_state{{{waits},state="preempting"}}': 1,
        f'kvheadroom_forecast_unavailable{{{waits},reason="not_told"}}': 1,
        f'kvheadroom_forecast_unavailable{{{idle},reason="sleeping"}}': 1,
    }
    answers = {
        promql.limits_that_bind(): {f'{{{waits},limit="kv_pool"}}': 1.0},
        promql.states_of_engines(): {f'{{{waits},state="preempting"}}': 1.0},
        promql.without_a_forecast(): {f'{{{waits},reason="not_told"}}': 1.0},
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path) == ""


def test_the_interval_of_the_forecast_lies_around_its_middle(promtool: Path, tmp_path: Path) -> None:
    engine = '{job="kv",replica="glm-a",engine="0",model_name="glm"}'
    series = {
        f"kvheadroom_forecast_exhaustion_earliest_seconds{engine}": 20,
        f"kvheadroom_forecast_exhaustion_seconds{engine}": 95,
        f"kvheadroom_forecast_exhaustion_latest_seconds{engine}": 400,
    }
    answers: dict[str, dict[str, float]] = {
        promql.seconds_until_no_room(probability): {engine: seconds}
        for probability, seconds in (("10%", 20), ("50%", 95), ("90%", 400))
    }
    assert expressions.wrong_answers(promtool, series, answers, tmp_path) == ""


def test_a_wrong_answer_is_found(promtool: Path, tmp_path: Path) -> None:
    usage = '{job="kv",replica="glm-a",engine="0"}'
    answers = {promql.kv_usage(): {usage: 0.75}}
    problem = expressions.wrong_answers(
        promtool, {f"kvheadroom_kv_usage_ratio{usage}": 0.5}, answers, tmp_path
    )
    assert "kvheadroom_kv_usage_ratio" in problem


# --- mistakes that the build refuses ---


def test_a_name_that_the_exporter_does_not_have_breaks_the_build() -> None:
    with pytest.raises(LookupError, match="no metric 'kv_usage_percent'"):
        promql.metric("kv_usage_percent")


def test_the_increase_of_a_gauge_is_refused() -> None:
    with pytest.raises(ValueError, match="kvheadroom_kv_usage_ratio is a gauge"):
        promql._increase(promql.metric("kv_usage_ratio"))
