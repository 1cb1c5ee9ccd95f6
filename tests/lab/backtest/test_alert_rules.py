"""What a file of rules says, before Prometheus sees it."""

from pathlib import Path

import pytest

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest.alert_rules import AlertRule, Rules, metric_names, own_rules, read_rules


def rules_of(tmp_path: Path, text: str) -> Rules:
    path = tmp_path / "r.yml"
    path.write_text("groups:\n- name: g\n  rules:\n" + "".join(f"  - {line}\n" for line in text.splitlines()))
    return read_rules(path)


def alert(tmp_path: Path, text: str) -> AlertRule:
    [one] = rules_of(tmp_path, text).alerts
    return one


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("kvheadroom_kv_usage_ratio > 0.9", ["kvheadroom_kv_usage_ratio"]),
        ('vllm:num_requests_waiting{job="a_name", x!~"b{2}"} > bool 0', ["vllm:num_requests_waiting"]),
        ("sum by (engine) (rate(a_total[5m])) / on (engine) group_left (pod) b", ["a_total", "b"]),
        ("predict_linear(a[2m], 1e3) > Inf and b offset 5m unless a", ["a", "b"]),
        ("max_over_time(a[1h:30s]) # not c\nor b", ["a", "b"]),
        ("{__name__='a:b', engine='0'} > 0", ["a:b"]),
        ('{"a:b", engine="0"} > 0 and {`c`}', ["a:b", "c"]),
        ("vector(1)", []),
        ("0x1f + .5 + 3e5", []),
    ],
)
def test_the_metrics_of_an_expression_are_found(expression: str, names: list[str]) -> None:
    assert metric_names(expression) == names


def test_an_alert_is_made_of_what_its_recording_rules_are_made_of(tmp_path: Path) -> None:
    one = alert(
        tmp_path,
        "{record: 'a:b', expr: 'c:d * x'}\n{record: 'c:d', expr: 'sum(y)'}\n{alert: A, expr: 'a:b > z or a:b > 9'}",
    )
    assert one.metrics == {"x", "y", "z"}
    assert one.recorded == {"a:b", "c:d"}


def test_recording_rules_that_go_round_end(tmp_path: Path) -> None:
    one = alert(
        tmp_path, "{record: 'a:b', expr: 'c:d'}\n{record: 'c:d', expr: 'a:b + x'}\n{alert: A, expr: 'a:b'}"
    )
    assert one.metrics == {"x"}


def test_alerts_of_one_name_are_told_apart_by_their_labels_and_then_by_number(tmp_path: Path) -> None:
    rules = rules_of(
        tmp_path,
        "{alert: A, expr: x, labels: {severity: page}}\n{alert: A, expr: y, labels: {severity: yes}}\n"
        "{alert: B, expr: x}\n{alert: C, expr: x}\n{alert: C, expr: y}",
    )
    assert [one.name for one in rules.alerts] == [
        "A{severity=page}",
        "A{severity=yes}",
        "B",
        "C{} #1",
        "C{} #2",
    ]


@pytest.mark.parametrize("expression", ["hour() > 8", "time() - x > 5", "x @ end()", "timestamp(x) > 3"])
def test_what_asks_for_the_time_of_day_is_not_evaluated_in_1970(expression: str, tmp_path: Path) -> None:
    told = "it asks for the time of day, and promtool's clock begins in 1970"
    assert alert(tmp_path, f"{{alert: A, expr: '{expression}'}}").why_not == told
    through = alert(tmp_path, f"{{record: 'a:b', expr: '{expression}'}}\n{{alert: A, expr: 'a:b > 0'}}")
    assert through.why_not == told


def test_an_address_in_a_text_is_no_clock(tmp_path: Path) -> None:
    assert alert(tmp_path, """{alert: A, expr: 'x{who="me@hour()"} > 0'}""").why_not is None


def test_metrics_selected_by_a_pattern_are_not_known(tmp_path: Path) -> None:
    one = alert(tmp_path, """{alert: A, expr: '{__name__=~"vllm:.*"} > 0'}""")
    assert one.why_not == "r.yml selects its metrics by a pattern"


def test_for_promtool_each_alert_is_marked_and_has_no_texts_for_people(tmp_path: Path) -> None:
    rules = rules_of(
        tmp_path,
        "{record: 'a:b', expr: x}\n{alert: A, expr: x, for: 1m, labels: {s: yes}, annotations: {t: '{{ $value }}'}}\n"
        "{alert: B, expr: y}",
    )
    [group] = rules.marked_groups(frozenset({0}), frozenset())
    assert group["rules"] == [
        {"record": "a:b", "expr": "x"},
        {"alert": "A", "expr": "x", "for": "1m", "labels": {"s": "yes", "kvheadroom_backtest": "0"}},
    ]
    [group] = rules.marked_groups(frozenset({1}), frozenset({"a:b"}))
    assert group["rules"] == [{"alert": "B", "expr": "y", "labels": {"kvheadroom_backtest": "1"}}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: [", "is no YAML (line 1)"),
        (b"\xff\xfe\x00", "is no YAML"),
        (b"", "is no file of Prometheus rules; it needs `groups:` with `rules:` in each"),
        (b"[]", "is no file of Prometheus rules"),
        (b"groups: 3", "is no file of Prometheus rules"),
        (
            b"kind: PrometheusRule\nspec: {groups: []}",
            "is a PrometheusRule of Kubernetes; give what stands under",
        ),
        (b"groups: [{name: g}]", "is no file of Prometheus rules"),
        (b"groups: [{name: g, rules: [{alert: A}]}]", "is no file of Prometheus rules"),
        (b"groups: [{name: g, rules: [{alert: A, record: b, expr: x}]}]", "is no file of Prometheus rules"),
        (
            b"groups: [{name: g, rules: [{alert: A, expr: x, labels: [s]}]}]",
            "is no file of Prometheus rules",
        ),
        (b"groups: [{name: g, rules: [{record: b, expr: x}]}]", "has no alert"),
    ],
)
def test_what_is_no_file_of_alerts_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    path.write_bytes(content)
    with pytest.raises(OperatorError) as caught:
        read_rules(path)
    assert str(caught.value).startswith(f"--rules: {path}: {said}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="cannot be read: No such file"):
        read_rules(tmp_path / "none.yml")


def test_the_packages_own_alerts_are_found() -> None:
    rules = own_rules()
    assert "KvHeadroomWorkingSetExceedsPool" in [one.alert for one in rules.alerts]
    assert all(one.why_not is None for one in rules.alerts)


def test_of_the_packages_own_alerts_only_those_that_warn_of_preemptions_are_scored() -> None:
    assert {"KvHeadroomTargetDown", "KvHeadroomPreempting"}.isdisjoint(
        one.alert for one in own_rules().alerts
    )
