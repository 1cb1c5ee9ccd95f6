"""The documentation: nothing that a user may meet is missing from it, and nothing that it points at."""

import argparse
import ast
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from kvheadroom import access_settings, cli, config
from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.calibration_samples import Exclusion
from kvheadroom.capacity.engine_states import EngineState
from kvheadroom.capacity.fleet import EventKind, ReplicaState
from kvheadroom.capacity.fleet_verdict import Verdict
from kvheadroom.capacity.forecast import NoForecast
from kvheadroom.capacity.gpus import GpuFailureReason
from kvheadroom.capacity.logged_start import LogProblemKind
from kvheadroom.capacity.memory_findings import Finding
from kvheadroom.capacity.readings import FailureReason, ProblemReason
from kvheadroom.capacity.startup_check import FreeMemory
from kvheadroom.capacity.warm_findings import WarmFinding
from kvheadroom.outputs.fleet_words import verdict_sentence, verdict_words
from kvheadroom.outputs.metric_catalogue import CATALOGUE
from kvheadroom.shipped_files import rules_text
from tests.dashboards.expressions import run_promtool
from tests.end_to_end.prometheus_server import Binaries

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "exporter" / "kvheadroom"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "dashboards" / "runbooks").glob("*.md"),
        *(ROOT / "tests" / "recordings").rglob("*.md"),
    ]
)


def section(page: str, heading: str) -> str:
    """What stands below a heading, up to the next of its level or above."""
    text = (DOCS / page).read_text()
    level = len(heading) - len(heading.lstrip("#"))
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no {heading!r}"
    return found[1]


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    first = re.search(r"^(?:\|.*\n)+", section(page, heading), re.MULTILINE)
    assert first is not None, f"{page}: no table below {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in first[0].splitlines()[2:]]


# --- troubleshooting by message ---

CLOSED_LISTS: dict[str, type[StrEnum]] = {
    "Sources that fail": FailureReason,
    "States of a server": ReplicaState,
    "The verdict": Verdict,
    "Problems of a page": ProblemReason,
    "Events": EventKind,
    "No forecast": NoForecast,
    "The limit that binds": Limit,
    "States of an engine": EngineState,
    "GPUs that fail": GpuFailureReason,
    "Memory findings": Finding,
    "Findings on tiers": WarmFinding,
    "Starts left out": Exclusion,
    "Start-up logs": LogProblemKind,
    "Free memory of a plan": FreeMemory,
}


def told(heading: str) -> list[str]:
    """What the rows below a heading are about; each of them has a cause and a way out."""
    found = rows("troubleshooting.md", f"## {heading}")
    for row in found:
        assert len(row) == 3, row
        assert all(len(cell) > 3 for cell in row), row
    return [row[0].strip("`") for row in found]


@pytest.mark.parametrize(("heading", "closed_list"), CLOSED_LISTS.items())
def test_each_member_of_a_closed_list_has_its_cause_and_way_out(
    heading: str, closed_list: type[StrEnum]
) -> None:
    assert sorted(told(heading)) == sorted(closed_list)


def test_each_fact_that_may_be_missing_has_its_cause_and_way_out() -> None:
    facts = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "MissingFact":
                name = node.args[0]
                # Every other name of it in the code is this constant.
                facts.add(name.value if isinstance(name, ast.Constant) else f"={ast.unparse(name)}")
    facts = {{"=MODEL_FILES": "model_files"}.get(str(fact), fact) for fact in facts}
    assert set(told("Missing facts")) == facts
    assert len(facts) == 5


def test_each_reason_why_the_gpus_of_a_server_are_not_known_is_told_in_its_own_words() -> None:
    text = section("troubleshooting.md", "## GPUs that fail").partition("| it says |")[2]
    told_words = re.findall(r"^\| (\w.+?) \|", text, re.MULTILINE)
    code = (PACKAGE / "capacity" / "gpu_assignment.py").read_text()
    said = re.findall(r'f?"((?:is|none) .+?)[;(,"]', code)
    assert {words.strip() for words in said} == set(told_words)


def test_each_exit_code_is_told() -> None:
    found = rows("troubleshooting.md", "## Exit codes")
    assert [int(row[0].strip("`")) for row in found] == [cli.OK, cli.INCOMPLETE, cli.USAGE, cli.INTERRUPTED]


def test_a_verdict_is_told_in_the_words_of_the_first_line() -> None:
    from kvheadroom.capacity.fleet_verdict import FleetVerdict

    for name, cause, _ in rows("troubleshooting.md", "## The verdict"):
        verdict = Verdict(name.strip("`"))
        if verdict is Verdict.FINE:
            continue
        one = FleetVerdict(
            urgency=verdict.urgency,
            servers=1,
            engines=1,
            server_verdicts=(),
            engine_verdicts=((verdict, 1),),
            room=None,
        )
        sentence = verdict_sentence(one).partition(";")[0].removeprefix("the engine ")
        assert f'"{sentence}"' in cause, (sentence, verdict_words(verdict))


URL = "url: 'http://a:1'"
FAULTS = {
    "cannot be read": None,
    "is not UTF-8 text": b"\xff\xfe",
    "is no valid YAML, line": "replicas: [",
    "there is nothing to watch": "scrape_interval: 5s",
    "there is no such setting": f"replicas: [{{{URL}, gppu: H100}}]",
    "it is needed": "replicas: [{name: a}]",
    "a mapping (...) is needed": "replicas: ['http://a:1']",
    "a list (...) is needed": "session_tokens: 5\nprocess_discovery: {}",
    "a text is needed": f"replicas: [{{{URL}, model: 5}}]",
    "a whole number is needed": f"replicas: [{{{URL}, flags: {{max_num_seqs: many}}}}]",
    "a number is needed": f"replicas: [{{{URL}, overhead_gb: [1]}}]",
    "true or false is needed": f"replicas: [{{{URL}, flags: {{enforce_eager: perhaps}}}}]",
    "is no duration": "scrape_interval: 5\nprocess_discovery: {}",
    "is no size": "tier_sizes: [64]\nprocess_discovery: {}",
    "is not in the catalogue": f"replicas: [{{{URL}, gpu: H1000}}]",
    "are both called": f"replicas: [{{{URL}}}, {{{URL}}}]",
    "is no server's address": "replicas: [{url: 'a:1'}]",
    "without /metrics": "replicas: [{url: 'http://a:1/metrics'}]",
    "may not hold a user or password": "replicas: [{url: 'http://me:x@a:1'}]",
    "go together; give both": "replicas: [{url: 'https://a:1', tls: {cert_file: /c}}]",
    "both fill the header Authorization": f"replicas: [{{{URL}, bearer_token_file: /t, basic_auth: {{username: u, password_file: /p}}}}]",
    "is for servers at https://": f"replicas: [{{{URL}, tls: {{ca_file: /c}}}}]",
    "is no share of the servers": "shard: 4/4\nprocess_discovery: {}",
    "this is the config itself": "calibration_file: kvheadroom.yaml\nprocess_discovery: {}",
}


def test_each_fault_of_the_config_that_is_told_has_a_config_that_has_it() -> None:
    assert told("Faults of the config") == list(FAULTS)


@pytest.mark.parametrize(("message", "content"), FAULTS.items())
def test_a_fault_of_the_config_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, content: str | bytes | None
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("kvheadroom.yaml")
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(config.ConfigError) as fault:
        config.load_config(file)
    assert re.search(re.escape(message).replace(r"\.\.\.", ".*"), str(fault.value))


def test_each_plain_word_for_a_wrong_type_is_told() -> None:
    known = "\n".join(FAULTS)
    # A path is a text in YAML; pydantic's own word for it is never reached by one.
    for words in set(config._PLAIN.values()) - {"the path of a file is needed"}:
        assert re.sub(r"\(.*\)", "(...)", words) in known


# --- quickstarts ---


def test_prometheus_takes_the_config_of_the_quickstart_with_the_rules_that_are_written(
    each_prometheus: Binaries, tmp_path: Path
) -> None:
    text = (DOCS / "quickstarts.md").read_text()
    [block] = re.findall(r"^```yaml\n(# prometheus.yml\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    [written] = re.findall(r"kvheadroom rules --out (\S+)", text)
    assert f"rule_files: [{written}]" in block
    (tmp_path / "kvheadroom.rules.yml").write_text(rules_text())
    (tmp_path / "prometheus.yml").write_text(block.replace(written, str(tmp_path / "kvheadroom.rules.yml")))
    code, output = run_promtool(each_prometheus.promtool, "check", "config", tmp_path / "prometheus.yml")
    assert code == 0, output
    assert "1 rule files found" in output


# --- what there is ---


def test_every_metric_has_its_row_and_its_sentence() -> None:
    page = rows("metrics.md", "# Metrics")
    assert [row[0].strip("`") for row in page] == [metric.full_name for metric in CATALOGUE]
    assert all(len(row[3].split()) >= 3 for row in page)


def test_every_alert_and_recording_rule_has_its_row() -> None:
    alerts, recorded = (
        [rule for group in yaml.safe_load((ROOT / "dashboards/rules" / name).read_text())["groups"] for rule in group["rules"]]
        for name in ("alerts.yaml", "recording.yaml")
    )  # fmt: skip
    text = (DOCS / "alerts.md").read_text()
    found = re.findall(r"^\| \[(\w+)\]\(\S+\) \| \w+ \| (.+) \|$", text, re.MULTILINE)
    assert [name for name, _ in found] == [rule["alert"] for rule in alerts]
    assert all(len(when.split()) >= 5 for _, when in found)
    assert re.findall(r"^\| `(\w+:\S+)`", text, re.MULTILINE) == [rule["record"] for rule in recorded]


def test_the_first_page_leads_to_every_page_and_every_runbook_that_the_verdict_may_need() -> None:
    text = (ROOT / "README.md").read_text()
    assert {page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in text} == set()


def commands() -> dict[str, argparse.ArgumentParser]:
    for action in cli.make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("no commands")


@pytest.mark.parametrize("name", commands())
def test_every_command_and_option_is_explained(name: str) -> None:
    text = section("command-line.md", f"## kvheadroom {name}")
    for action in commands()[name]._actions:
        assert action.help, action.option_strings
        for option in action.option_strings:
            assert re.search(rf"^  .*(?<![\w-]){re.escape(option)}(?![\w-])", text, re.MULTILINE), option
    # Its own paragraph too, in words for people.
    elsewhere = [page for page in (ROOT / "README.md", *DOCS.glob("*.md")) if page.name != "command-line.md"]
    assert any(f"kvheadroom {name}" in page.read_text() for page in elsewhere)


def keys(heading: str, column: int = 0) -> list[str]:
    """The keys that a table of the config is about."""
    return [
        key
        for row in rows("configuration.md", f"### {heading}")
        for key in re.findall(r"`(\w+)`", row[column])
    ]


def fields(*models: type[BaseModel]) -> set[str]:
    return {name for model in models for name in model.model_fields}


def test_every_key_of_the_config_has_its_row() -> None:
    ways_in = fields(access_settings.AccessSettings) - {"url"}
    assert sorted(keys("At the top")) == sorted(fields(config.Config))
    assert sorted(keys("Of a replica")) == sorted(
        fields(config.ReplicaConfig, config.ReplicaTemplate) - ways_in
    )
    assert sorted(keys("Ways in")) == sorted(ways_in)
    lists = fields(
        config.FileSdConfig, config.HttpSdConfig, config.ProcessDiscoveryConfig, config.DcgmExporter
    )
    assert sorted(keys("Of lists")) == sorted(lists - ways_in)
    assert sorted(keys("Flags")) == sorted(config.VllmFlags.model_fields)
    text = section("configuration.md", "### Ways in")
    for parts in access_settings.PARTS.values():
        assert all(f"`{name}`" in text or f"{{{name}: " in text for name in parts.model_fields)


def test_the_models_of_the_config_are_those_that_the_page_is_held_to() -> None:
    reached: set[type[BaseModel]] = {
        config.Config,
        config.VllmFlags,
        config.ReplicaTemplate,
        *config._PARTS.values(),
    }
    assert {model.__name__ for model in reached} == {
        *("Config", "VllmFlags", "ReplicaConfig", "ReplicaTemplate", "FileSdConfig", "HttpSdConfig"),
        *("ProcessDiscoveryConfig", "DcgmExporter", "BasicAuth", "TlsSettings", "FileValue"),
    }


def test_the_defaults_that_the_page_tells_are_the_configs() -> None:
    at_the_top = {row[0]: row[1] for row in rows("configuration.md", "### At the top")}
    told_config = {
        key: yaml.safe_load(at_the_top[f"`{key}`"])
        for key in ("scrape_interval", "session_tokens", "idle_times", "tier_sizes")
    }
    default = config.validate_config({"process_discovery": {}}, "default")
    assert config.validate_config({"process_discovery": {}, **told_config}, "page") == default
    intervals = next(row[2] for row in rows("configuration.md", "### Of lists") if "refresh" in row[0])
    assert intervals == "5s files and processes, 60s http, 15s DCGM"
    models = (config.FileSdConfig, config.ProcessDiscoveryConfig, config.HttpSdConfig, config.DcgmExporter)
    assert [model.model_fields["refresh_interval"].default for model in models] == [5, 5, 60, 15]


# --- links ---

LINK = re.compile(r"(?<!\\)!?\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))  # fmt: skip


@cache
def anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them of headings."""
    found: dict[str, int] = {}
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    names = []
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = found[slug] = found.get(slug, -1) + 1
        names.append(f"{slug}-{number}" if number else slug)
    return frozenset(names)


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in LINK.findall(without_code(page.read_text())):
            if not re.match(r"https?://", target):
                yield page, target


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page, target in links():
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
    assert len(list(links())) > 200


def test_pages_and_pictures_that_nothing_leads_to_are_none() -> None:
    led_to = {(page.parent / target.partition("#")[0]).resolve() for page, target in links()}
    alone = [
        str(file.relative_to(ROOT))
        for file in (*DOCS.glob("*.md"), *(DOCS / "images").iterdir(), *(DOCS / "decisions").iterdir())
        if file not in led_to
    ]
    assert alone == []
