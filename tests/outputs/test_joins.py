"""The joins that the documentation names, by PromQL itself, over everything that is exported."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.outputs.prometheus import exposition
from tests.end_to_end.prometheus_server import Binaries
from tests.outputs.fleet import NOW, fleet

Labels = dict[str, str]

JOINS = {
    "kvheadroom_sessions_headroom * on (replica) group_left (team) kvheadroom_replica_info": (
        "kvheadroom_sessions_headroom",
        "kvheadroom_replica_info",
        "replica",
        ("team",),
    ),
    "kvheadroom_gpu_memory_used_bytes * on (gpu) group_left (source, host) kvheadroom_gpu_info": (
        "kvheadroom_gpu_memory_used_bytes",
        "kvheadroom_gpu_info",
        "gpu",
        ("source", "host"),
    ),
}


def exported() -> dict[str, list[tuple[Labels, float]]]:
    body, _ = exposition(fleet(), NOW, "")
    found: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def written(name: str, labels: Labels) -> str:
    return name + "{" + ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items()) + "}"


def joined(many: str, one: str, on: str, copied: tuple[str, ...]) -> list[tuple[Labels, float]]:
    """What the join is to give: each series once, with the labels copied; an empty label is none to PromQL."""
    samples = exported()
    infos = {labels[on]: labels for labels, _ in samples[one]}
    both = (
        ({**labels, **{name: infos[labels[on]].get(name, "") for name in copied}}, value)
        for labels, value in samples[many]
        if labels[on] in infos
    )
    return [({name: text for name, text in labels.items() if text}, value) for labels, value in both]


@pytest.mark.parametrize("join", JOINS)
def test_the_labels_of_info_metrics_join_to_every_series_by_one_label(
    join: str, each_prometheus: Binaries, tmp_path: Path
) -> None:
    expected = joined(*JOINS[join])
    assert len(expected) >= 4
    assert any(set(JOINS[join][3]) <= labels.keys() for labels, _ in expected)
    test = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": written(name, labels), "values": repr(value)}
                    for name, samples in exported().items()
                    for labels, value in samples
                ],
                "promql_expr_test": [
                    {
                        "expr": join,
                        "eval_time": "0m",
                        "exp_samples": [
                            {"labels": written("", labels), "value": value} for labels, value in expected
                        ],
                    }
                ],
            }
        ],
    }
    file = tmp_path / "test.json"
    file.write_text(json.dumps(test))
    run = subprocess.run(
        [each_prometheus.promtool, "test", "rules", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("join", JOINS)
def test_each_join_is_one_that_the_documentation_names(join: str) -> None:
    root = Path(__file__).parents[2]
    texts = [(root / name).read_text() for name in ("docs/configuration.md", "docs/metrics.md")]
    assert any(join in re.sub(r"\s+", " ", text) for text in texts)
