"""Lists of targets, read by Prometheus's own program and by us."""

import json
import subprocess
from pathlib import Path

import pytest

from kvheadroom.sources.target_groups import BadTargetsError, TargetGroup, parse_target_groups
from tests.end_to_end.prometheus_server import Binaries

ONE = (TargetGroup(("h:1",)),)

ACCEPTED_BY_BOTH: list[tuple[str, str, tuple[TargetGroup, ...]]] = [
    (
        "a.yml",
        "- targets: [h:1]\n  labels: {rack: 12, answer: yes, day: 2026-01-01, ratio: 1.0}\n",
        (TargetGroup(("h:1",), {"rack": "12", "answer": "yes", "day": "2026-01-01", "ratio": "1.0"}),),
    ),
    ("a.yml", "- targets: [8000:22]\n", (TargetGroup(("8000:22",)),)),
    ("a.yml", "- targets: [h:1]\n  labels: {a: }\n", (TargetGroup(("h:1",), {"a": ""}),)),
    ("a.yml", "- targets: [h:1]\n  labels:\n", ONE),
    ("a.yml", "- targets:\n", (TargetGroup(()),)),
    ("a.yml", "[]", ()),
    ("a.json", '[{"targets": ["h:1"], "labels": {"a": "x"}}]', (TargetGroup(("h:1",), {"a": "x"}),)),
    ("a.json", '[{"targets": ["h:1"], "labels": null}]', ONE),
    ("a.json", '[{"targets": null}]', (TargetGroup(()),)),
    ("a.json", "[]", ()),
    ("a.json", "null", ()),
]
REFUSED_BY_BOTH = [
    ("a.yml", "- targets: [h:1]\n  label: {a: b}\n"),
    ("a.yml", "- targets: [h:1]\n  targets: [h:2]\n"),
    ("a.yml", "- targets: [h:1]\n  labels: {a: [1]}\n"),
    ("a.yml", "- targets: h:1\n- x\n"),
    ("a.yml", "{}"),
    ("a.yml", "- targets: [h:1"),
    ("a.json", '[{"targets": ["h:1"], "labels": {"a": 1}}]'),
    ("a.json", '[{"targets": ["h:1"], "x": 1}]'),
    ("a.json", '[{"targets": "h:1"}]'),
    ("a.json", "[null]"),
    ("a.json", "{}"),
    ("a.json", '[{"targets": ["h:1"'),
    ("a.json", ""),
]
STRICTER_HERE = [
    # Half written, or a slip of who wrote it.
    ("a.yml", ""),
    ("a.yml", "- labels: {a: b}\n"),
    ("a.yml", "- targets: &x [h:1]\n- targets: *x\n"),
    ("a.json", '[{"targets": ["h:1"], "labels": {"a": "b", "a": "c"}}]'),
]


def prometheus_accepts(binaries: Binaries, folder: Path, name: str, text: str) -> bool:
    (folder / name).write_text(text)
    scrape = {"job_name": "x", "file_sd_configs": [{"files": [str(folder / name)]}]}
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))
    run = subprocess.run(
        [binaries.promtool, "check", "config", str(folder / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if run.returncode:
        assert name in run.stderr + run.stdout
    return run.returncode == 0


def read(name: str, text: str) -> tuple[TargetGroup, ...] | None:
    try:
        return parse_target_groups(text, as_json=name.endswith(".json"))
    except BadTargetsError:
        return None


def test_what_prometheus_reads_is_read_here_and_what_it_refuses_is_refused(
    each_prometheus: Binaries, tmp_path: Path
) -> None:
    for name, text, groups in ACCEPTED_BY_BOTH:
        assert prometheus_accepts(each_prometheus, tmp_path, name, text), text
        assert read(name, text) == groups
    for name, text in REFUSED_BY_BOTH:
        assert not prometheus_accepts(each_prometheus, tmp_path, name, text), text
        assert read(name, text) is None, text


@pytest.mark.parametrize(("name", "text"), STRICTER_HERE)
def test_what_is_most_likely_a_slip_is_refused_though_prometheus_reads_it(
    name: str, text: str, each_prometheus: Binaries, tmp_path: Path
) -> None:
    assert prometheus_accepts(each_prometheus, tmp_path, name, text)
    assert read(name, text) is None
