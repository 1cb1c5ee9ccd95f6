"""Our own /metrics through promtool's linter, of both Prometheus generations."""

import subprocess

from kvheadroom.outputs.prometheus import exposition
from tests.end_to_end.prometheus_server import Binaries
from tests.outputs.fleet import NOW, fleet


def test_promtool_finds_nothing_to_say_about_our_metrics(each_prometheus: Binaries) -> None:
    body, _ = exposition(fleet(), NOW, "")
    run = subprocess.run(
        [each_prometheus.promtool, "check", "metrics"],
        input=body,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


def test_promtool_would_have_found_a_fault(each_prometheus: Binaries) -> None:
    run = subprocess.run(
        [each_prometheus.promtool, "check", "metrics"],
        input=b"# TYPE kvheadroom_blocks_total gauge\nkvheadroom_blocks_total 1\n",
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert run.returncode != 0
