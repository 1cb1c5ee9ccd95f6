"""What the tests need to know about PromQL: which variables, metrics and labels an expression has."""

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvheadroom.outputs.metric_catalogue import CATALOGUE, PREFIX, Metric

EXPORTED = {metric.full_name: metric for metric in CATALOGUE}

# One legal value each, as Grafana would fill it in.
VALUES = {
    "__rate_interval": "1m15s",
    "__range": "1h",
    "__interval": "15s",
    "job": "(kv|kvheadroom)",
    "replica": "(glm-a|glm-b)",
    "model_name": ".*",
    "engine": ".+",
    "session_tokens": "262144",
    "idle_seconds": "2700",
}
PROMETHEUS_LABELS = {"job", "instance"}

Json = dict[str, Any]


def panels_of(dashboard: Json) -> list[Json]:
    """All that show something, those in rows that are folded away too."""
    found: list[Json] = []
    for panel in dashboard["panels"]:
        found += panel["panels"] if panel["type"] == "row" else [panel]
    return found


def panel_queries(dashboard: Json) -> dict[str, str]:
    """`title, ref` -> PromQL, of all panels."""
    return {
        f"{panel['title']}, {target['refId']}": target["expr"]
        for panel in panels_of(dashboard)
        for target in panel["targets"]
    }


def variable_queries(dashboard: Json) -> dict[str, str]:
    """Name -> what `label_values` is asked about, in the dashboard's order."""
    return {
        variable["name"]: re.fullmatch(r"label_values\((.+), \w+\)", variable["query"]["query"])[1]  # type: ignore[index]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    }


def all_queries(dashboard: Json) -> dict[str, str]:
    """Every PromQL of a dashboard, by where it stands."""
    variables = {f"variable {name}": query for name, query in variable_queries(dashboard).items()}
    annotations = {f"annotation {a['name']}": a["expr"] for a in dashboard["annotations"]["list"]}
    return panel_queries(dashboard) | variables | annotations


def variables_used(text: str) -> set[str]:
    return set(re.findall(r"\$\{?([a-z_]\w*)", text))


def filled_in(query: str, chosen: Mapping[str, str] | None = None) -> str:
    """The query as Grafana sends it. Raises KeyError for a variable that does not exist."""
    values = VALUES | dict(chosen or {})
    return re.sub(r"\$\{?([a-z_]\w*)\}?", lambda found: values[found[1]], query)


def metric_names(text: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", text))


def metrics(text: str) -> list[Metric]:
    """The families that a text names. Raises KeyError for one that the exporter has not."""
    return [EXPORTED[name] for name in sorted(metric_names(text))]


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """(metric, labels of its matchers) of each selector with a name in front."""
    return [
        (name, set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers)))
        for name, matchers in re.findall(rf"\b({PREFIX}\w+)\{{([^}}]*)\}}", query)
    ]


def given_to_range_functions(query: str) -> set[str]:
    """Metrics inside rate, irate or increase."""
    return set(re.findall(rf"\b(?:rate|irate|increase)\(\s*({PREFIX}\w+)", query))


def labels_of_lines(query: str) -> set[str]:
    """The labels that tell the lines of a query apart, `job` and `model_name` not counted: other labels of an engine name it."""
    summed = re.match(r"(?:sum|max|min|count)(?: by \(([^)]*)\))? \(|(?:sum|max|min)\(", query)
    if summed:
        return {label.strip() for label in (summed[1] or "").split(",") if label.strip()}
    [first, *_] = selectors(query)
    dropped = {label.strip() for label in re.findall(r"max without \(([^)]*)\)", query)[0].split(",")}
    chosen = {label for label, value in re.findall(r'(\w+)="([^"]*)"', query) if value}
    told = set(EXPORTED[first[0]].labels) - dropped - chosen - {"model_name"}
    return told - {"gpu"} | {"short"} if "label_replace(" in query else told


def refused_by_promtool(promtool: Path, queries: Mapping[str, str], folder: Path) -> str:
    """What promtool says against the queries, written as recording rules; empty when all parse."""
    rules = [
        {"record": "test:query", "expr": query, "labels": {"query": where}}
        for where, query in queries.items()
    ]
    file = folder / "queries.rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))  # JSON is YAML as well
    code, output = run_promtool(promtool, "check", "rules", file)
    return "" if code == 0 and f"{len(queries)} rules found" in output else output


def wrong_answers(
    promtool: Path,
    series: Mapping[str, float | str],
    answers: Mapping[str, Mapping[str, float]],
    folder: Path,
    chosen: Mapping[str, str] | None = None,
) -> str:
    """What promtool says where a query, over these series, does not answer that after five minutes; empty when all do.

    A series is a value that stays, or promtool's text of one every 15 s.
    """
    case = {
        "interval": "15s",
        "input_series": [
            {"series": name, "values": value if isinstance(value, str) else f"{value}x40"}
            for name, value in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": filled_in(query, chosen),
                "eval_time": "5m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
            }
            for query, samples in answers.items()
        ],
    }
    file = folder / "answers.test.yml"
    file.write_text(json.dumps({"rule_files": [], "tests": [case]}))
    code, output = run_promtool(promtool, "test", "rules", file)
    return "" if code == 0 else output


def run_promtool(promtool: Path, *arguments: str | Path) -> tuple[int, str]:
    answer = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False, timeout=60)
    return answer.returncode, answer.stdout + answer.stderr


def unknown_names(texts: Iterable[str]) -> set[str]:
    return {name for text in texts for name in metric_names(text)} - EXPORTED.keys()
