"""What Grafana gets: the committed files, panels, variables, links, thresholds."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dashboards import build, grafana, limits, promql
from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.engine_states import EngineState
from kvheadroom.capacity.fleet import ReplicaState
from kvheadroom.capacity.forecast import HORIZONS
from tests.dashboards import expressions, grafana_schema
from tests.dashboards.expressions import EXPORTED, Json, panels_of
from tests.dashboards.test_rules import ALERTS

DASHBOARDS: dict[str, Json] = {document["uid"]: document for document in build.dashboards()}
PANELS: dict[str, Json] = {
    f"{uid.removeprefix('kvheadroom-')}: {panel['title']}": panel
    for uid, document in DASHBOARDS.items()
    for panel in panels_of(document)
}
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}

each_dashboard = pytest.mark.parametrize("uid", DASHBOARDS)
each_panel = pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)


# --- the committed files ---


def test_the_committed_files_are_what_the_code_builds() -> None:
    assert build.main(["--check"]) == 0


def test_check_names_an_edited_file_and_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    build.main([])
    file = tmp_path / "kvheadroom-engine.json"
    file.write_text(file.read_text().replace("KV cache in use", "KV cache used up"))

    assert build.main(["--check"]) == 1
    assert f"{file} is out of date; run: python -m dashboards.build" in capsys.readouterr().err
    assert "KV cache used up" in file.read_text()


def test_check_names_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path / "json")
    assert build.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert all(f"{uid}.json is out of date" in told for uid in DASHBOARDS)


def test_a_file_that_no_code_makes_any_more_is_named_and_then_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    build.main([])
    old = tmp_path / "kvheadroom-overview.json"
    old.write_text("{}")
    assert build.main(["--check"]) == 1
    assert "kvheadroom-overview.json is out of date" in capsys.readouterr().err
    assert old.exists()
    assert build.main([]) == 0
    assert not old.exists()


def test_building_writes_what_check_then_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path / "json")
    assert build.main([]) == 0
    assert build.main(["--check"]) == 0
    for uid, document in DASHBOARDS.items():
        assert json.loads((tmp_path / "json" / f"{uid}.json").read_text()) == document


def test_there_are_four_in_the_order_in_which_people_ask() -> None:
    assert list(DASHBOARDS) == [
        "kvheadroom-fleet",
        "kvheadroom-engine",
        "kvheadroom-prediction",
        "kvheadroom-warm",
    ]
    assert [document["title"].removeprefix("kvheadroom / ") for document in DASHBOARDS.values()] == [
        "fleet",
        "engine",
        "prediction",
        "warm sessions",
    ]


@each_dashboard
def test_it_can_be_imported_anywhere_without_replacing_another_dashboard(uid: str) -> None:
    document = DASHBOARDS[uid]
    assert document["id"] is None
    assert document["version"] == 1
    assert document["schemaVersion"] == 39
    assert document["editable"] is False
    assert document["tags"] == ["kvheadroom", "vllm"]
    assert document["timezone"] == ""
    assert document["refresh"] == "30s"
    assert len(document["description"].split()) > 10


@each_dashboard
def test_every_key_is_one_that_grafana_knows(uid: str) -> None:
    assert grafana_schema.unknown_keys(DASHBOARDS[uid]) == []


def test_a_key_that_grafana_does_not_know_is_found() -> None:
    document = json.loads(json.dumps(DASHBOARDS["kvheadroom-fleet"]))
    document["panels"][0]["fieldConfig"]["defaults"]["treshold"] = {}
    assert grafana_schema.unknown_keys(document) == ["panels[0].fieldConfig.defaults.treshold"]


# --- panels ---


@each_dashboard
def test_panels_have_ids_and_titles_of_their_own(uid: str) -> None:
    panels = panels_of(DASHBOARDS[uid])
    rows = [panel for panel in DASHBOARDS[uid]["panels"] if panel["type"] == "row"]
    ids = [panel["id"] for panel in (*panels, *rows)]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in (*panels, *rows)]
    assert len(set(titles)) == len(titles)


@each_panel
def test_a_panel_is_of_a_kind_that_grafana_has_not_left_behind(panel: Json) -> None:
    assert panel["type"] in {"stat", "table", "timeseries", "state-timeline"}


@each_dashboard
def test_it_begins_with_six_tiles(uid: str) -> None:
    tiles = DASHBOARDS[uid]["panels"][:6]
    assert [(tile["type"], tile["gridPos"]) for tile in tiles] == [
        ("stat", {"x": 4 * i, "y": 0, "w": 4, "h": 4}) for i in range(6)
    ]


@each_panel
def test_a_panel_says_what_it_shows_in_which_unit_and_what_to_do(panel: Json) -> None:
    what, do = panel["description"].split("\n\n")
    assert len(what.split()) >= 5
    assert len(do.split()) >= 5
    for unit in _units(panel):
        assert unit in grafana_schema.UNITS or unit.startswith("suffix: ")
    if panel["type"] != "table":
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["defaults"]["noValue"].strip(" -–")


def _units(panel: Json) -> list[str]:
    config = panel["fieldConfig"]
    changed = [
        change["value"]
        for override in config["overrides"]
        for change in override["properties"]
        if change["id"] == "unit"
    ]
    return [*changed, *([config["defaults"]["unit"]] if "unit" in config["defaults"] else [])]


@each_panel
def test_a_title_fits_where_the_window_is_900_pixels_wide(panel: Json) -> None:
    # Measured in a browser with Grafana's font; a length fills in for the variable.
    title = panel["title"].replace("$session_tokens", "1048576")
    assert len(title) <= {4: 10, 8: 30, 12: 44, 24: 100}[panel["gridPos"]["w"]]


@each_panel
def test_a_panel_asks_the_chosen_data_source(panel: Json) -> None:
    assert panel["datasource"] == PROMETHEUS
    assert [target["datasource"] for target in panel["targets"]] == [PROMETHEUS] * len(panel["targets"])
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)


@each_panel
def test_a_description_names_exactly_the_metrics_of_its_queries(panel: Json) -> None:
    queries = " ".join(target["expr"] for target in panel["targets"])
    assert expressions.metric_names(panel["description"]) == expressions.metric_names(queries)


def test_every_metric_that_is_exported_is_explained_by_a_panel() -> None:
    explained = set().union(*(expressions.metric_names(panel["description"]) for panel in PANELS.values()))
    assert explained == EXPORTED.keys()


@each_panel
def test_tiles_and_tables_tell_what_is_and_not_what_was(panel: Json) -> None:
    # Over a range they would go on showing the last number of an engine that is gone.
    for target in panel["targets"]:
        if panel["type"] in {"stat", "table"}:
            assert target["instant"]
            assert target["range"] is False
        else:
            assert target["range"] is True


@pytest.mark.parametrize("name", PANELS)
def test_a_legend_tells_each_line_from_the_others(name: str) -> None:
    panel = PANELS[name]
    # The dashboard of an engine is about one server.
    said = {"replica"} if name.startswith("engine: ") else set()
    if panel["type"] in {"stat", "table"}:
        return
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)
    for target in panel["targets"]:
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown | said >= expressions.labels_of_lines(target["expr"]), target["expr"]


@each_panel
def test_what_means_different_things_in_one_panel_is_drawn_differently(panel: Json) -> None:
    if panel["type"] != "timeseries":
        return
    asked = panel["targets"]
    drawn = {target["refId"]: _style(panel, target["refId"]) for target in asked}
    if "no reason given" in asked[-1]["legendFormat"]:
        # Engines give reasons or do not, never both.
        drawn.pop(asked[-1]["refId"])
    assert len(set(drawn.values())) == len(drawn)


def _style(panel: Json, ref: str) -> str:
    changes = [
        override["properties"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"] == {"id": "byFrameRefID", "options": ref}
    ]
    return json.dumps(changes)


@pytest.mark.parametrize(
    ("panel", "legends"),
    [
        ("engine: Probability of a preemption", [f"{horizon}: engine 0" for horizon in HORIZONS]),
        ("engine: Found in the prefix cache", ["1m: engine 0", "5m: engine 0", "1h: engine 0"]),
        ("engine: Requests waiting", ["capacity: engine 0", "deferred: engine 0"]),
        ("fleet: Requests waiting, by model and reason", ["capacity: glm", "deferred: glm"]),
        ("warm: Prompt tokens saved each second, by tier", ["hbm: glm", "host: glm"]),
        ("warm: Blocks of HBM, by what they hold", ["blank", "cached", "referenced"]),
    ],
)
def test_lines_of_one_query_that_mean_different_things_differ_by_more_than_colour(
    panel: str, legends: list[str]
) -> None:
    overrides = [
        override
        for override in PANELS[panel]["fieldConfig"]["overrides"]
        if override["matcher"]["id"] == "byRegexp"
    ]
    drawn = [
        json.dumps(
            [
                override["properties"]
                for override in overrides
                if re.search(override["matcher"]["options"].strip("/"), legend)
            ]
        )
        for legend in legends
    ]
    assert len(set(drawn)) == len(legends)
    assert drawn.count("[]") == 1


@each_panel
def test_a_colour_is_never_the_only_sign(panel: Json) -> None:
    # Tiles and cells are numbers or words; bars of a timeline have a word for each value.
    if panel["type"] == "state-timeline":
        assert panel["options"]["showValue"] == "auto"
        assert panel["options"]["legend"]["showLegend"]
        [mapping] = panel["fieldConfig"]["defaults"]["mappings"]
        # By thresholds Grafana's legend would have their numbers in place of the words.
        assert all(option["text"] and option["color"] for option in mapping["options"].values())
        assert panel["fieldConfig"]["defaults"]["color"]["mode"] != "thresholds"
    if panel["type"] == "stat":
        assert panel["options"]["textMode"] == "value"
        assert panel["options"]["graphMode"] == "none"


@each_dashboard
def test_panels_neither_overlap_nor_leave_the_grid(uid: str) -> None:
    rows = [panel for panel in DASHBOARDS[uid]["panels"] if panel["type"] == "row"]
    for panels in (DASHBOARDS[uid]["panels"], *(row["panels"] for row in rows)):
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = set(
                itertools.product(
                    range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
                )
            )
            assert not cells & taken
            taken |= cells


@each_dashboard
def test_lines_of_panels_fill_the_grid(uid: str) -> None:
    widths: dict[int, int] = {}
    for panel in panels_of(DASHBOARDS[uid]):
        place = panel["gridPos"]
        widths[place["y"]] = widths.get(place["y"], 0) + place["w"]
    assert set(widths.values()) == {24}


def test_only_what_is_seldom_needed_is_folded_away() -> None:
    folded = {
        uid: [panel["title"] for panel in document["panels"] if panel.get("collapsed")]
        for uid, document in DASHBOARDS.items()
    }
    assert folded == {
        "kvheadroom-fleet": ["Exporter health"],
        "kvheadroom-engine": [],
        "kvheadroom-prediction": ["Samples of the overhead, and faults of GPUs"],
        "kvheadroom-warm": [],
    }


# --- thresholds ---

LIMITS = {
    limits.IMMINENT_PROBABILITY,
    limits.SOON_PROBABILITY,
    limits.FULL,
    limits.PREDICTION_OFF,
    limits.HELD_BY_OTHERS,
    limits.PREEMPTIONS,
    limits.RESTARTS,
}


def test_the_limits_are_those_that_people_are_paged_by() -> None:
    numbers = {
        float(found) for rule in ALERTS.values() for found in re.findall(r"[<>]=? ([\d.]+)", rule["expr"])
    }
    assert numbers >= LIMITS
    assert (limits.IMMINENT_PROBABILITY, limits.SOON_PROBABILITY, limits.FULL) == (0.4, 0.7, 0.8)
    assert (limits.PREDICTION_OFF, limits.HELD_BY_OTHERS) == (0.1, 0.05)
    assert (limits.PREEMPTIONS, limits.RESTARTS) == (3, 3)


def test_a_limit_that_the_rules_do_not_have_breaks_the_build() -> None:
    with pytest.raises(LookupError, match="no alert is called 'KvHeadroomFull'"):
        limits.limit("KvHeadroomFull", "kvheadroom_kv_usage_ratio")
    with pytest.raises(
        LookupError, match="KvHeadroomPreempting compares 'kvheadroom_kv_usage_ratio' 0 times"
    ):
        limits.limit("KvHeadroomPreempting", "kvheadroom_kv_usage_ratio")


def test_the_horizons_in_seconds_are_those_of_the_alerts() -> None:
    assert HORIZONS[limits.IMMINENT] == limits.IMMINENT_SECONDS
    assert HORIZONS[limits.SOON] == limits.SOON_SECONDS


@each_panel
def test_a_threshold_of_a_share_is_the_limit_of_an_alert(panel: Json) -> None:
    for unit, mapped, values in _thresholds(panel):
        if unit == "percentunit" and not mapped:
            assert {abs(value) for value in values} <= LIMITS
        # A word stands for each of the other values, or the colour begins with the first that is none.
        if unit != "percentunit" and not mapped:
            assert set(values) <= LIMITS | {1}
        assert values == sorted(values)


def _thresholds(panel: Json) -> list[tuple[str | None, bool, list[float]]]:
    config = panel["fieldConfig"]
    found = [(config["defaults"].get("unit"), config["defaults"])]
    for override in config["overrides"]:
        properties = {change["id"]: change["value"] for change in override["properties"]}
        if "thresholds" in properties:
            found.append((properties.get("unit"), properties))
    return [
        (
            unit,
            bool(where.get("mappings")),
            # From 0 on it is a number at all.
            [step["value"] for step in where["thresholds"]["steps"][1:] if step["value"] != 0],
        )
        for unit, where in found
    ]


@each_panel
def test_what_is_absent_has_the_colour_of_neither_good_nor_bad(panel: Json) -> None:
    if panel["type"] not in {"stat", "table"}:
        return
    config = panel["fieldConfig"]
    changed = [
        change["value"]
        for one in config["overrides"]
        for change in one["properties"]
        if change["id"] == "thresholds"
    ]
    for thresholds in (config["defaults"]["thresholds"], *changed):
        assert thresholds["steps"][0] == {"color": "text", "value": None}


# --- words for values ---


def test_the_words_for_values_are_those_that_the_exporter_has() -> None:
    assert set(promql.LIMITS) == set(Limit)
    assert set(promql.REPLICA_STATES) == set(ReplicaState)
    assert {"preempting", *promql.STUCK, *promql.TOO_SMALL} == set(EngineState)
    assert set(promql.NO_ANSWER) <= set(ReplicaState)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("binding_limit", promql.LIMITS),
        ("forecast_unavailable", promql.NO_FORECAST),
        ("session_warm", promql.WARM),
        ("calibration_reliability", promql.RELIABILITY),
        ("replica_state", promql.REPLICA_STATES),
        ("calibration_clamped", ("below_zero", "nothing_left")),
    ],
)
def test_values_that_are_numbered_are_those_that_the_catalogue_tells_of(
    family: str, values: tuple[str, ...]
) -> None:
    told = promql.metric(family).help
    assert all(re.search(rf"\b{value}\b", told) for value in values)


# --- variables, links, annotations ---


@each_dashboard
def test_the_variables_stand_in_the_order_in_which_one_narrows_the_next(uid: str) -> None:
    names = [variable["name"] for variable in DASHBOARDS[uid]["templating"]["list"]]
    chain = ["datasource", "job", "daemon", "replica", "model_name", "engine", "session_tokens"]
    assert names == [*chain, *(["idle_seconds"] if uid == "kvheadroom-warm" else [])]


@each_dashboard
def test_a_variable_asks_only_for_those_before_it(uid: str) -> None:
    before: set[str] = set()
    for name, query in expressions.variable_queries(DASHBOARDS[uid]).items():
        # Not only at most: one that leaves out an earlier choice would offer what cannot be combined with it.
        assert expressions.variables_used(query) == before
        if name != "daemon":
            before.add(name)


@each_dashboard
def test_several_values_or_all_can_be_chosen_but_where_one_is_meant(uid: str) -> None:
    chosen = {
        variable["name"]: (variable["multi"], variable["includeAll"], variable.get("allValue"))
        for variable in DASHBOARDS[uid]["templating"]["list"]
        if variable["type"] == "query"
    }
    one = (False, False, None)
    expected = {
        "job": (True, True, ".+"),
        "daemon": one,
        # The dashboard of an engine is about one server.
        "replica": one if uid == "kvheadroom-engine" else (True, True, ".+"),
        # Empty where the server has not told it.
        "model_name": (True, True, ".*"),
        "engine": (True, True, ".+"),
        "session_tokens": one,
        "idle_seconds": one,
    }
    assert chosen == {name: expected[name] for name in chosen}


@each_dashboard
def test_lengths_and_times_are_sorted_as_numbers(uid: str) -> None:
    sorts = {variable["name"]: variable.get("sort") for variable in DASHBOARDS[uid]["templating"]["list"]}
    assert sorts["session_tokens"] == 3
    # The longest idle time is asked for first: it is the lunch break.
    assert sorts.get("idle_seconds", 4) == 4


@each_dashboard
def test_every_variable_that_is_used_exists_and_every_one_is_used(uid: str) -> None:
    document = DASHBOARDS[uid]
    existing = {variable["name"] for variable in document["templating"]["list"]}
    queries = expressions.all_queries(document).values()
    used = set().union(*(expressions.variables_used(query) for query in queries))
    assert used - {"__rate_interval", "__range", "__interval"} <= existing
    titles = " ".join(panel["title"] for panel in panels_of(document))
    assert expressions.variables_used(titles) <= existing
    links = set(
        re.findall(r"\$\{(\w+)[:}]", json.dumps([panel.get("links") for panel in panels_of(document)]))
    )
    assert links <= existing
    assert existing - {"datasource", "daemon"} <= used


@each_dashboard
def test_siblings_keep_what_is_chosen_and_the_time(uid: str) -> None:
    siblings, page = DASHBOARDS[uid]["links"]
    assert (siblings["type"], siblings["tags"]) == ("dashboards", ["kvheadroom"])
    assert siblings["includeVars"]
    assert siblings["keepTime"]
    assert page["url"] == "http://${daemon}/"


def _urls(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["url"]] if value.get("url") else []
        return own + [url for inner in value.values() for url in _urls(inner)]
    if isinstance(value, list):
        return [url for inner in value for url in _urls(inner)]
    return []


def test_every_link_leads_to_something_that_exists() -> None:
    runbooks = set()
    for document in DASHBOARDS.values():
        for url in _urls(document["panels"]):
            if "/runbooks/" in url:
                runbooks.add(url.rpartition("/")[2])
            elif url.startswith("/d/"):
                assert url[3:].partition("?")[0] in DASHBOARDS
            else:
                assert url == "http://${__data.fields.instance}/"
    assert runbooks - {"${__data.fields.alertname}"} <= set(ALERTS)
    assert len(runbooks) > 15


def test_each_row_of_the_fleet_leads_to_its_own_engines() -> None:
    columns = PANELS["fleet: Engines, worst first"]["fieldConfig"]["overrides"]
    [url] = _urls(columns)
    assert url.startswith("/d/kvheadroom-engine?")
    assert "var-replica=${__data.fields.replica}" in url
    # Those of the row's model and rank alone would hide the other ranks of the server.
    assert "var-engine=$__all" in url
    for kept in ("${__url_time_range}", "${datasource:queryparam}", "${job:queryparam}"):
        assert kept in url


@each_dashboard
def test_restarts_preemptions_and_alerts_are_marked(uid: str) -> None:
    marks = DASHBOARDS[uid]["annotations"]["list"]
    assert [mark["name"] for mark in marks] == [
        "Restarts",
        "Preemptions",
        "Firing alerts",
        "Firing alerts of servers",
        "Firing alerts of kvheadroom",
    ]
    assert all(mark["enable"] and mark["datasource"] == PROMETHEUS for mark in marks)


def test_the_page_about_them_names_each_and_shows_pictures_that_load_quickly() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "dashboards.md").read_text()
    linked = [(docs / target) for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page)]
    assert all(target.resolve().exists() for target in linked)
    assert {target.stem for target in linked if target.suffix == ".json"} == set(DASHBOARDS)
    pictures = [target for target in linked if target.suffix == ".png"]
    assert {picture.name for picture in pictures} == {file.name for file in (docs / "images").iterdir()}
    assert all(picture.stat().st_size < 150_000 for picture in pictures)


# --- layout ---


def test_what_is_folded_away_takes_no_room() -> None:
    line = (3, [(24, {"type": "text", "title": "x"})])
    panels = grafana.arranged(
        [
            grafana.Section(title=None, lines=[line]),
            grafana.Section(title="folded", lines=[line, line], collapsed=True),
            grafana.Section(title="open", lines=[line]),
        ]
    )
    assert [(panel["id"], panel["gridPos"]["y"]) for panel in panels] == [(1, 0), (2, 3), (5, 4), (6, 5)]
    assert [(panel["id"], panel["gridPos"]["y"]) for panel in panels[1]["panels"]] == [(3, 4), (4, 7)]
