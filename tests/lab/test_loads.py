"""The recordings of a real vLLM in tests/recordings/loads and warm: whole, of the kind that each is there for, and as the README says."""

import functools
import gzip
import itertools
import json
import re
import statistics
import subprocess

import pytest

from tests.daemon import COMMAND
from tests.loads.claims import CLAIMS
from tests.loads.client import HUNG_UP
from tests.loads.make import flags_of
from tests.loads.measured import (
    PAGES_SUFFIX,
    README,
    REQUESTS_SUFFIX,
    Instant,
    Measured,
    folder_of,
    measure,
    row,
)
from tests.loads.plan import plan
from tests.loads.scenarios import SCENARIOS, SEED, Scenario

NAMES = [scenario.name for scenario in SCENARIOS]
each = pytest.mark.parametrize("name", NAMES)
found = functools.cache(measure)


def scenario_of(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


def test_every_scenario_has_its_recording_its_log_and_a_claim_and_nothing_else_is_there() -> None:
    wanted = {
        folder_of(scenario) / f"{scenario.name}{suffix}"
        for scenario in SCENARIOS
        for suffix in (PAGES_SUFFIX, REQUESTS_SUFFIX)
    }
    assert {path for name in ("loads", "warm") for path in README.with_name(name).iterdir()} == wanted
    assert list(CLAIMS) == NAMES
    assert sum(path.stat().st_size for path in wanted) < 4e6


@each
def test_a_recording_is_of_the_kind_that_it_is_there_for(name: str) -> None:
    CLAIMS[name](found(name))


@each
def test_a_recording_is_whole_and_says_what_it_was_made_of(name: str) -> None:
    recording, scenario = found(name).recording, scenario_of(name)
    assert recording.num_failures == 0
    assert 60 <= recording.duration_seconds <= 180
    offsets = [instant.offset_seconds for instant in found(name).instants]
    gaps = [later - earlier for earlier, later in itertools.pairwise(offsets)]
    assert statistics.median(gaps) == pytest.approx(scenario.interval_seconds, abs=0.02)
    origin = recording.origin
    assert (origin["load"], origin["seed"], origin["flags"]) == (name, SEED, flags_of(scenario))
    assert (origin["vllm_version"], origin["max_model_len"]) == ("0.32.0", scenario.max_model_len)
    assert recording.last_origin == origin


@each
def test_the_readme_tells_what_is_in_the_file(name: str) -> None:
    lines = README.read_text().splitlines()
    assert row(found(name)) in lines


@each
def test_no_file_names_a_machine_a_path_or_an_address(name: str) -> None:
    for suffix in (PAGES_SUFFIX, REQUESTS_SUFFIX):
        packed = (folder_of(scenario_of(name)) / f"{name}{suffix}").read_bytes()
        assert packed[3] == 0, "no file name in the gzip header"
        for line in gzip.decompress(packed).decode().splitlines():
            told = json.loads(line)
            assert not {"server", "host"} & told.get("origin", {}).keys()
            values = re.findall(r'="([^"]*)"', told.get("text", ""))
            assert not [value for value in values if "/" in value or "127.0.0.1" in value]
            assert not re.search(r"/(?:root|tmp|home|work)\b", line)


@each
def test_the_daemons_reader_finds_every_engine_at_any_instant(name: str) -> None:
    last = found(name).recording.duration_seconds
    path = folder_of(scenario_of(name)) / f"{name}{PAGES_SUFFIX}"
    run = subprocess.run(
        [*COMMAND, "inspect", str(path), "--at", f"{last / 2:.1f}s", "--json"],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    told = json.loads(run.stdout)
    assert [engine["engine"] for engine in told["engines"]] == (
        ["0", "1"] if name == "data_parallel" else ["0"]
    )
    at = max(
        (instant for instant in found(name).instants if instant.offset_seconds <= last / 2),
        key=lambda instant: instant.offset_seconds,
    )
    assert sum(engine["generation_tokens_total"] for engine in told["engines"]) == at.total(
        "generation_tokens_total"
    )


@each
def test_the_log_holds_the_requests_that_the_seed_plans(name: str) -> None:
    scenario = scenario_of(name)
    planned = {conversation.name: conversation for conversation in plan(scenario, SEED)}
    history: dict[str, int] = {}
    ended: dict[str, float] = {}
    for sent in found(name).requests:
        conversation = planned[sent["session"]]
        turn = conversation.turns[sent["turn"]]
        before = history.get(sent["session"], conversation.text_tokens)
        assert sent["prompt_tokens"] == before + turn.new_tokens
        assert sent["prefix_tokens"] == (before if sent["turn"] else 0)
        assert (sent["shared_prefix"], sent["shared_prefix_tokens"]) == (
            conversation.text,
            conversation.text_tokens,
        )
        assert sent["want"] == turn.max_tokens
        assert sent["got"] == turn.max_tokens or sent["status"] == HUNG_UP
        if sent["turn"] and "idle_seconds" in sent:
            assert sent["idle_seconds"] == pytest.approx(sent["t_send"] - ended[sent["session"]], abs=1e-5)
            assert sent["idle_seconds"] >= turn.pause_seconds
        ended[sent["session"]] = sent["t_end"]
        if conversation.grows:
            history[sent["session"]] = sent["prompt_tokens"] + sent["got"]
        else:
            history.setdefault(sent["session"], sent["prompt_tokens"])
    assert history.keys() == planned.keys(), "everybody came"


@each
def test_the_pages_count_the_requests_and_tokens_that_the_log_holds(name: str) -> None:
    measured = found(name)
    finished = [sent for sent in measured.requests if sent["status"] == 200]
    gone = [sent for sent in measured.requests if sent["status"] == HUNG_UP]
    assert len(finished) + len(gone) == len(measured.requests)
    # vLLM may have been done when a client went away in the middle of the answer.
    perhaps = sum(sent["got"] > 0 for sent in gone)
    assert len(finished) <= measured.ended["length"] <= len(finished) + perhaps
    assert sum(measured.ended.values()) == measured.ended["length"]
    prompts = sum(sent["prompt_tokens"] for sent in finished)
    answers = sum(sent["got"] for sent in finished)
    most_prompts = prompts + sum(sent["prompt_tokens"] for sent in gone)
    # What vLLM had made when its client went away is known to vLLM alone.
    most_answers = answers + sum(sent["want"] for sent in gone)
    assert prompts <= measured.rise("prompt_tokens_total") <= most_prompts
    assert answers <= measured.rise("generation_tokens_total") <= most_answers
    if measured.hit_ratio is not None:
        assert prompts <= measured.rise("prefix_cache_queries_total") <= most_prompts


@each
def test_hits_are_no_more_than_the_log_says_to_be_shared(name: str) -> None:
    measured = found(name)
    (block_size,) = {engine.block_size for engine in measured.instants[-1].engines}
    assert block_size is not None
    shared = sum(
        # The last token of a prompt is computed always.
        min(max(sent["prefix_tokens"], sent["shared_prefix_tokens"]), sent["prompt_tokens"] - 1) // block_size
        for sent in measured.requests
    )
    hits = measured.rise("prefix_cache_hits_total") + measured.rise("external_prefix_cache_hits_total")
    assert hits <= shared * block_size


@each
def test_log_and_pages_tell_the_same_clock(name: str) -> None:
    measured = found(name)
    began = measured.recording.first_at

    def differences(shift_seconds: float) -> float:
        """Between the requests under way by the log, told so much later, and by the pages."""
        return statistics.mean(
            abs(_under_way(measured, began + instant.offset_seconds - shift_seconds) - _seen(instant))
            for instant in measured.instants
        )

    assert min(range(-5, 6), key=differences) == 0


def _under_way(measured: Measured, at: float) -> int:
    return sum(sent["t_send"] <= at < sent["t_end"] for sent in measured.requests)


def _seen(instant: Instant) -> float:
    return instant.total("requests_running") + instant.total("requests_waiting")
