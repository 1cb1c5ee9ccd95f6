import re
from pathlib import Path

import pytest
import yaml

from tests.dashboards import expressions
from tests.dashboards.expressions import EXPORTED, PROMETHEUS_LABELS, Json

REPOSITORY = Path(__file__).parents[2]
RULES = REPOSITORY / "dashboards" / "rules"
RULE_FILES = sorted(RULES.iterdir())
RUNBOOKS = REPOSITORY / "dashboards" / "runbooks"
CASES = Path(__file__).parent / "rules"

GROUPS: list[Json] = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
ALERTS: dict[str, Json] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
RECORDED: dict[str, Json] = {
    rule["record"]: rule
    for group in yaml.safe_load((RULES / "recording.yaml").read_text())["groups"]
    for rule in group["rules"]
}

each_alert = pytest.mark.parametrize("alert", ALERTS)


# --- rules ---


def test_there_are_alerts_in_one_file_and_recording_rules_in_another() -> None:
    assert [file.name for file in RULE_FILES] == ["alerts.yaml", "recording.yaml"]
    assert ALERTS
    assert RECORDED
    assert len(ALERTS) == sum(len(group["rules"]) for group in GROUPS)


@pytest.mark.parametrize("file", RULE_FILES, ids=lambda file: file.name)
def test_prometheus_accepts_the_rules(promtool: Path, file: Path) -> None:
    code, output = expressions.run_promtool(promtool, "check", "rules", "--lint=all", "--lint-fatal", file)
    assert code == 0, output


@each_alert
def test_an_alert_fires_and_stays_silent_as_its_cases_say(promtool: Path, alert: str) -> None:
    code, output = expressions.run_promtool(promtool, "test", "rules", CASES / f"{alert}.test.yml")
    assert code == 0, output


@each_alert
def test_an_alert_has_firing_and_silent_cases_that_say_their_situation(alert: str) -> None:
    text = (CASES / f"{alert}.test.yml").read_text()
    names = [case["name"] for case in yaml.safe_load(text)["tests"]]
    assert {name.split(": ")[0] for name in names} == {"firing", "silent"}
    assert len(set(names)) == len(names)
    # A comment directly below each name.
    assert len(re.findall(r'^ {2}- name: ".+"\n {4}# ', text, re.MULTILINE)) == len(names)


@each_alert
def test_the_cases_of_an_alert_hold_its_texts_and_fix_the_order_of_groups(alert: str) -> None:
    cases = yaml.safe_load((CASES / f"{alert}.test.yml").read_text())
    # Otherwise promtool takes the groups in an order of chance.
    assert cases["group_eval_order"] == [group["name"] for group in GROUPS]
    told = [
        fires["exp_annotations"]
        for case in cases["tests"]
        for instant in case.get("alert_rule_test", [])
        for fires in instant["exp_alerts"]
    ]
    assert told
    # What Prometheus writes where a template fails.
    assert "error expanding" not in str(told)


@pytest.mark.parametrize("situation", ["restart", "sleep", "scal", "absent|is gone|no engine|nobody"])
@each_alert
def test_an_alert_is_shown_to_be_silent_where_nothing_is_wrong(alert: str, situation: str) -> None:
    text = (CASES / f"{alert}.test.yml").read_text().lower()
    silent = [case for case in text.split("  - name: ") if case.startswith('"silent: ')]
    assert any(re.search(situation, case.split("interval:")[0]) for case in silent), situation


def test_there_are_no_cases_of_alerts_that_do_not_exist() -> None:
    assert {file.name.removesuffix(".test.yml") for file in CASES.iterdir()} == set(ALERTS)


@each_alert
def test_an_alert_says_how_bad_it_is_and_what_is_going_on(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    labels = _labels(rule["expr"])
    for label in ("replica", "engine", "gpu", "xid"):
        assert (label in labels) == (f"$labels.{label}" in rule["annotations"]["summary"]), label
    if not labels & {"replica", "gpu"}:
        assert "$labels.instance" in rule["annotations"]["summary"]


@each_alert
def test_every_name_begins_with_the_product(alert: str) -> None:
    assert re.fullmatch(r"KvHeadroom([A-Z][a-z]+)+", alert)


@each_alert
def test_every_metric_in_an_alert_is_exported(alert: str) -> None:
    assert not expressions.unknown_names([str(ALERTS[alert])])


@each_alert
def test_an_alert_speaks_only_of_labels_that_its_series_have(alert: str) -> None:
    rule = ALERTS[alert]
    used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert used <= _labels(rule["expr"]) | PROMETHEUS_LABELS


@each_alert
def test_an_alert_asks_for_numbers_of_the_same_daemon_replica_and_engine_only(alert: str) -> None:
    description = ALERTS[alert]["annotations"]["description"]
    labels = [label for label in ("job", "instance", "replica", "engine") if label in _chosen(alert)]
    for matchers, given in re.findall(r'printf "[^{]*\{([^}]*)\}[^"]*" ((?:\$labels\.\w+ ?)+)', description):
        asked = re.findall(r"(\w+)=%q", matchers)
        assert asked == re.findall(r"\$labels\.(\w+)", given)
        assert asked[: len(labels)] == labels


def test_alerts_that_tell_how_an_engine_is_doing_tell_it_in_the_same_words() -> None:
    ends = {
        description[description.index("{{- $of") :]
        for rule in ALERTS.values()
        if "kvheadroom_binding_limit%s" in (description := rule["annotations"]["description"])
    }
    assert len(ends) == 1


def test_an_alert_that_needs_an_engine_in_some_state_asks_for_one_that_exists() -> None:
    from kvheadroom.capacity.binding_limit import Limit
    from kvheadroom.capacity.engine_states import EngineState
    from kvheadroom.capacity.fleet import ReplicaState
    from kvheadroom.capacity.readings import ProblemReason

    closed: dict[str, set[str]] = {
        "engine_state": set(EngineState),
        "binding_limit": set(Limit),
        "replica_state": set(ReplicaState),
        "page_problems_total": set(ProblemReason),
    }
    asked = set()
    for rule in (*ALERTS.values(), *RECORDED.values()):
        for metric, label, values in re.findall(r'kvheadroom_(\w+)\{(\w+)=~?"([^"]+)"\}', rule["expr"]):
            if metric in closed and label in {"state", "limit", "reason"}:
                asked.add(metric)
                assert set(values.split("|")) <= closed[metric]
    assert asked == set(closed)


# --- numbers and words ---

WORDS = {"1m": "minute", "1h": "hour", "1d": "day"}


@each_alert
def test_the_limits_in_words_are_the_limits_in_numbers(alert: str) -> None:
    rule, meaning = ALERTS[alert], " ".join(_section(alert, "Meaning").split())
    description = rule["annotations"]["description"]
    held = [rule["for"]] if "for" in rule else []
    for duration in held:
        assert _in_words(duration) in description
    spans = re.findall(r"(?:\[|offset )(\d+[smhd])", rule["expr"])
    for duration in (*held, *spans, *([rule["keep_firing_for"]] if "keep_firing_for" in rule else [])):
        assert _in_words(duration) in meaning, duration
    # What is only there or not there has no limit.
    for number in set(re.findall(r"[<>]=? (\d[\d.]*)", rule["expr"])) - {"0", "1"}:
        words = f"{float(number):.0%}" if float(number) < 1 else number
        for text in (description, meaning):
            assert re.search(rf"(?<![\d.]){re.escape(words)}(?![.\d]*\d)", text), (words, text)


def _in_words(duration: str) -> str:
    return WORDS.get(duration) or duration.removesuffix("m") + " minutes"


@each_alert
def test_a_runbook_says_how_bad_the_alert_is(alert: str) -> None:
    words = {"critical": "Pages somebody now", "warning": "For today", "info": "For dashboards"}
    assert words[ALERTS[alert]["labels"]["severity"]] in (RUNBOOKS / f"{alert}.md").read_text()


# --- recording rules ---


@pytest.mark.parametrize("record", RECORDED)
def test_a_recording_rule_is_named_by_its_level_its_metric_and_its_operations(record: str) -> None:
    level, metric, operations = record.split(":")
    assert level in {"engine", "model"}
    names = expressions.metric_names(RECORDED[record]["expr"])
    assert any(name.startswith(metric) for name in names) or metric in {
        "kvheadroom_pool_tokens",
        "kvheadroom_binding_limit_kv_pool",
    }
    assert operations
    assert not expressions.unknown_names([RECORDED[record]["expr"]])


def test_recording_rules_answer_what_their_names_say(promtool: Path, tmp_path: Path) -> None:
    two = {
        ("gpu-7:9878", "glm-a", "0"): (0.9, 3, 1, 2, 5),
        ("gpu-7:9878", "glm-a", "1"): (0.4, 0, 2, 1, 8),
    }
    # A second daemon that watches the same engine changes no sum.
    twice = {**two, ("gpu-8:9878", "glm-a", "0"): two["gpu-7:9878", "glm-a", "0"]}
    series: dict[str, float] = {}
    for (instance, replica, engine), (usage, waiting, in_use, headroom, observed) in twice.items():
        labels = f'job="kv",instance="{instance}",replica="{replica}",engine="{engine}",model_name="glm"'
        series |= {
            f"kvheadroom_kv_usage_ratio{{{labels}}}": usage,
            f"kvheadroom_requests_waiting{{{labels}}}": waiting,
            f'kvheadroom_sessions_in_use{{{labels},session_tokens="8192"}}': in_use,
            f'kvheadroom_sessions_headroom{{{labels},session_tokens="8192"}}': headroom,
            f'kvheadroom_observed_sessions{{{labels},session_tokens="8192"}}': observed,
            f"kvheadroom_sample_age_seconds{{{labels}}}": 2,
            f"kvheadroom_preemptions_total{{{labels}}}": 7,
            f"kvheadroom_observed_pool_tokens{{{labels}}}": 900,
            f"kvheadroom_predicted_pool_tokens{{{labels}}}": 1000,
        }
    waits = 'job="kv",instance="gpu-7:9878",replica="glm-a",engine="0",model_name="glm"'
    series[f'kvheadroom_binding_limit{{{waits},limit="kv_pool"}}'] = 1
    model = '{job="kv",model_name="glm"}'
    length = '{job="kv",model_name="glm",session_tokens="8192"}'
    first, second = (f'{{job="kv",replica="glm-a",engine="{engine}",model_name="glm"}}' for engine in "01")
    expected: dict[str, dict[str, float]] = {
        "engine:kvheadroom_preemptions:rate5m": {first: 0, second: 0},
        "engine:kvheadroom_pool_tokens:prediction_error_ratio": {first: -0.1, second: -0.1},
        "engine:kvheadroom_binding_limit_kv_pool:ratio1h": {first: 1, second: 0},
        "model:kvheadroom_kv_usage_ratio:max": {model: 0.9},
        "model:kvheadroom_requests_waiting:sum": {model: 3},
        "model:kvheadroom_observed_sessions:sum": {length: 13},
        "model:kvheadroom_sessions_in_use:sum": {length: 3},
        "model:kvheadroom_sessions_headroom:sum": {length: 3},
    }
    assert expected.keys() == RECORDED.keys()
    answers = {f"round({RECORDED[name]['expr']}, 0.001)": samples for name, samples in expected.items()}
    assert expressions.wrong_answers(promtool, series, answers, tmp_path) == ""


# --- runbooks ---


@each_alert
def test_the_link_of_an_alert_leads_to_its_runbook_at_the_daemon(alert: str) -> None:
    link = ALERTS[alert]["annotations"]["runbook_url"]
    assert link == f"http://{{{{ $labels.instance }}}}/runbooks/{alert}"
    assert (RUNBOOKS / f"{alert}.md").is_file()


def test_there_are_no_runbooks_of_alerts_that_do_not_exist() -> None:
    assert {file.stem for file in RUNBOOKS.iterdir()} == set(ALERTS)


@each_alert
def test_a_runbook_has_its_four_headings(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    assert re.findall(r"^# (.+)$", text, re.MULTILINE) == [alert]
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Meaning", "Impact", "Diagnosis", "Mitigation"]


@each_alert
def test_a_runbook_leads_only_to_runbooks_that_exist(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    assert set(re.findall(r"\bKvHeadroom[A-Z]\w+", text)) <= set(ALERTS)


def test_prometheus_understands_the_queries_of_every_runbook(promtool: Path, tmp_path: Path) -> None:
    queries = {alert: _queries_of_runbook(alert) for alert in ALERTS}
    assert all(queries.values())
    named = {f"{alert}, {where}": query for alert, found in queries.items() for where, query in found.items()}
    assert expressions.refused_by_promtool(promtool, named, tmp_path) == ""


@each_alert
def test_every_metric_in_a_runbook_is_exported(alert: str) -> None:
    assert not expressions.unknown_names([(RUNBOOKS / f"{alert}.md").read_text()])


@each_alert
def test_a_runbook_takes_increases_of_counters_only(alert: str) -> None:
    for query in _queries_of_runbook(alert).values():
        counters = {metric.full_name for metric in expressions.metrics(query) if metric.kind == "counter"}
        assert expressions.given_to_range_functions(query) == counters


def test_what_a_runbook_gives_alertmanager_silences_the_forecast_of_the_same_engine_only() -> None:
    text = _section("KvHeadroomExhaustionImminent", "Meaning")
    [block] = re.findall(r"^```yaml\n(.+?)^```", text, re.MULTILINE | re.DOTALL)
    config = yaml.safe_load(block)
    preempting, imminent = config["inhibit_rules"]
    told, silenced = (
        _alerts_matched(preempting["source_matchers"]),
        _alerts_matched(preempting["target_matchers"]),
    )
    # Those that go by preemptions that were counted, and those that are silent while they are.
    assert told == {"KvHeadroomPreempting", "KvHeadroomPreemptionThrash"}
    assert silenced == {alert for alert, rule in ALERTS.items() if '"preempting"' in rule["expr"]}
    assert _alerts_matched(imminent["source_matchers"]) == {"KvHeadroomExhaustionImminent"}
    assert _alerts_matched(imminent["target_matchers"]) == {"KvHeadroomExhaustionSoon"}
    for rule in config["inhibit_rules"]:
        assert rule["equal"] == ["instance", "replica", "engine"]
    # A label that an alert has not would be equal to nothing everywhere.
    assert all({"replica", "engine"} <= _labels(ALERTS[alert]["expr"]) for alert in told | silenced)
    assert config["route"]["group_wait"] == "0s"
    assert config["inhibit_rules"] == inhibit_rules_of(REPOSITORY / "docs" / "quickstarts.md")[1:]


def inhibit_rules_of(file: Path) -> list[Json]:
    """Those of the first block that has some."""
    blocks = re.findall(r"^```yaml\n(.+?)^```", file.read_text(), re.MULTILINE | re.DOTALL)
    rules: list[Json] = next(
        config["inhibit_rules"] for block in blocks if "inhibit_rules" in (config := yaml.safe_load(block))
    )
    return rules


def _alerts_matched(matchers: list[str]) -> set[str]:
    [pattern] = re.findall(r'^alertname =~? "(.+)"$', "\n".join(matchers), re.MULTILINE)
    return {alert for alert in ALERTS if re.fullmatch(pattern, alert)}


@each_alert
def test_every_change_that_a_runbook_proposes_has_its_price(alert: str) -> None:
    mitigation = _section(alert, "Mitigation")
    rows = re.findall(r"^\|(.+)\|$", mitigation, re.MULTILINE)
    if rows:
        assert [cell.strip() for cell in rows[0].split("|")] == ["change", "what it does", "what it costs"]
    assert all(len(row.split("|")) == 3 and all(cell.strip() for cell in row.split("|")) for row in rows)


def _section(alert: str, heading: str) -> str:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def _queries_of_runbook(alert: str) -> dict[str, str]:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    found = re.findall(r"^ *```promql\n(.+?)^ *```", text, re.MULTILINE | re.DOTALL)
    return {f"query {number}": query.strip() for number, query in enumerate(found, start=1)}


def _labels(expression: str) -> set[str]:
    """The labels of what an expression gives: those of its first metric, without those that it takes away."""
    names = [name for name in re.findall(r"\bkvheadroom_\w+", expression) if name in EXPORTED]
    # `and` and `unless` take nothing away, nor does a side of many.
    taken = ",".join(
        re.findall(r"(?:(?<!and )(?<!unless )ignoring|without) \(([^)]*)\)(?! group_left)", expression)
    )
    if re.match(r"up\b", expression):
        return set()
    if 'source!~"metrics|' in expression:
        # Of the sources that are no server's, and so have no replica.
        taken += ",replica"
    return set(EXPORTED[names[0]].labels) - {label.strip() for label in taken.split(",")}


def _chosen(alert: str) -> set[str]:
    return _labels(ALERTS[alert]["expr"]) | PROMETHEUS_LABELS
