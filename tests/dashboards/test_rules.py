import re
from pathlib import Path

import pytest
import yaml

from dashboards.thresholds import KV_POOL_NEARLY_EXHAUSTED_RATIO
from tests.dashboards import expressions
from tests.dashboards.expressions import EXPORTED, PROMETHEUS_LABELS, Json

REPOSITORY = Path(__file__).parents[2]
RULE_FILES = sorted((REPOSITORY / "dashboards" / "rules").glob("*.yml"))
RUNBOOKS = REPOSITORY / "dashboards" / "runbooks"
CASES = Path(__file__).parent / "rules"

ALERTS: dict[str, Json] = {
    rule["alert"]: rule
    for file in RULE_FILES
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}

each_alert = pytest.mark.parametrize("alert", ALERTS)


# --- rules ---


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


def test_there_are_no_cases_of_alerts_that_do_not_exist() -> None:
    assert {file.name.removesuffix(".test.yml") for file in CASES.iterdir()} == set(ALERTS)


@each_alert
def test_an_alert_says_how_bad_it_is_and_what_is_going_on(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"].keys() >= {"summary", "description", "runbook_url"}
    assert "$labels.replica" in rule["annotations"]["summary"]
    assert "$labels.engine" in rule["annotations"]["summary"]
    assert "$value" in rule["annotations"]["description"]


@each_alert
def test_every_metric_in_an_alert_is_exported(alert: str) -> None:
    assert not expressions.unknown_names([str(ALERTS[alert])])


@each_alert
def test_an_alert_speaks_only_of_labels_that_its_series_have(alert: str) -> None:
    rule = ALERTS[alert]
    used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    for name in expressions.metric_names(rule["expr"]):
        assert used <= set(EXPORTED[name].labels) | PROMETHEUS_LABELS


def test_the_dashboard_draws_the_limit_that_the_alert_has() -> None:
    limit = re.fullmatch(r"kvheadroom_kv_usage_ratio > ([\d.]+)", ALERTS["KvPoolNearlyExhausted"]["expr"])
    assert limit is not None
    assert float(limit[1]) == KV_POOL_NEARLY_EXHAUSTED_RATIO


def test_the_limit_in_words_is_the_limit_in_numbers() -> None:
    limit = f"{KV_POOL_NEARLY_EXHAUSTED_RATIO:.0%}"
    assert f"held over {limit} for a minute" in ALERTS["KvPoolNearlyExhausted"]["annotations"]["description"]
    meaning = (RUNBOOKS / "KvPoolNearlyExhausted.md").read_text()
    assert f"more than {limit} of the KV blocks" in meaning
    assert f"`kvheadroom_kv_usage_ratio` > {KV_POOL_NEARLY_EXHAUSTED_RATIO}" in meaning


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
def test_prometheus_understands_the_queries_of_a_runbook(promtool: Path, alert: str, tmp_path: Path) -> None:
    queries = _queries_of_runbook(alert)
    assert queries
    assert expressions.refused_by_promtool(promtool, queries, tmp_path) == ""


@each_alert
def test_every_metric_in_a_runbook_is_exported(alert: str) -> None:
    assert not expressions.unknown_names([(RUNBOOKS / f"{alert}.md").read_text()])


@each_alert
def test_a_runbook_takes_increases_of_counters_only(alert: str) -> None:
    for query in _queries_of_runbook(alert).values():
        counters = {metric.full_name for metric in expressions.metrics(query) if metric.kind == "counter"}
        assert expressions.given_to_range_functions(query) == counters


def _queries_of_runbook(alert: str) -> dict[str, str]:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    found = re.findall(r"^ *```promql\n(.+?)^ *```", text, re.MULTILINE | re.DOTALL)
    return {f"query {number}": query.strip() for number, query in enumerate(found, start=1)}
