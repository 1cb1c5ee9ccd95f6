"""What the daemon says binds, on every recording of a real vLLM: known loads, known limits."""

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from kvheadroom.lab.backtest.daemon_run import run_recording
from kvheadroom.lab.backtest.events import Rise, date_rises
from kvheadroom.lab.backtest.histories import History
from kvheadroom.lab.recordings import read_recording
from tests.conftest import TESTS

LOADS = sorted(path.name.split(".")[0] for path in (TESTS / "recordings/loads").glob("*.metrics.jsonl.gz"))
PUBLIC = ("burst", "chat", "steady")
LIMITS, WAITING, STATES = "kvheadroom_binding_limit", "kvheadroom_requests_waiting", "kvheadroom_engine_state"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> "Watched":
    return Watched(tmp_path_factory.mktemp("recordings"))


class Watched:
    """Recordings through the daemon's code, a tick a second; each is run once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.history = cache(self._run)

    def _run(self, name: str) -> History:
        path = TESTS / "recordings/loads" / f"{name}.metrics.jsonl.gz"
        if name.startswith("public_"):
            path = self._with_flags(name.removeprefix("public_"))
        return run_recording(
            read_recording(path),
            name,
            every_seconds=1.0,
            wanted=frozenset({LIMITS, WAITING, STATES}),
            report=lambda _: None,
        )

    def _with_flags(self, name: str) -> Path:
        """The three older recordings do not tell the flags of their server, their README does."""
        lines = gzip.decompress(
            (TESTS / "recordings/backtest" / f"{name}.jsonl.gz").read_bytes()
        ).splitlines()
        header = json.loads(lines[0])
        header["origin"]["flags"] = {"--max-num-seqs": 64, "--max-num-batched-tokens": 512}
        path = self._folder / f"{name}.jsonl.gz"
        path.write_bytes(gzip.compress(b"\n".join([json.dumps(header).encode(), *lines[1:]]) + b"\n"))
        return path

    def told(self, name: str) -> list[set[str]]:
        """At each tick, what binds the engines that have a queue; `unknown` where that is not told."""
        history = self.history(name)
        ticks: list[set[str]] = [set() for _ in range(history.num_ticks)]
        engines = [engine.engine for engine in history.engines]
        for engine in engines:
            of = {s: v for s, v in history.series.items() if s.label("engine") == engine}
            [waiting] = [values for series, values in of.items() if series.name == WAITING]
            limits = {series.label("limit"): v for series, v in of.items() if series.name == LIMITS}
            for tick, queue in enumerate(waiting):
                if queue:
                    told = {limit for limit, values in limits.items() if values[tick]}
                    ticks[tick] |= told or {"unknown"}
        return ticks


def events(history: History) -> list[float]:
    return sorted(rise.dated_at for rise in rises(history))


def rises(history: History) -> list[Rise]:
    return [rise for engine in history.engines for s in engine.stretches for rise in date_rises(s.samples)]


def share(ticks: list[set[str]], limit: str) -> float:
    queued = [tick for tick in ticks if tick]
    return sum(limit in tick for tick in queued) / len(queued)


def test_a_queue_before_max_num_seqs_is_told_as_that_whenever_there_is_one(watched: Watched) -> None:
    ticks = watched.told("sequence_limit")
    assert sum(bool(tick) for tick in ticks) > 30
    assert set.union(*ticks) == {"max_num_seqs"}


@pytest.mark.parametrize("name", ["steady", "spikes", "prefix_reuse", "public_steady"])
def test_where_nobody_waits_nothing_binds(watched: Watched, name: str) -> None:
    assert not any(watched.told(name))
    limits = {s.label("limit"): v for s, v in watched.history(name).series.items() if s.name == LIMITS}
    assert limits.keys() == {"none"}
    assert sum(value == 1 for value in limits["none"]) >= 0.98 * watched.history(name).num_ticks


@pytest.mark.parametrize(
    ("name", "at_least"),
    [
        ("aborts", 0.7),
        ("agentic", 0.35),
        ("burst", 0.8),
        ("data_parallel", 0.8),
        ("mixed_lengths", 0.8),
        ("ramp", 0.8),
        ("public_burst", 0.8),
        # There the tokens of steps are spent at times, on prompts that are no longer found.
        ("public_chat", 0.45),
    ],
)
def test_a_queue_before_a_full_pool_is_told_as_the_pools_or_as_not_known(
    watched: Watched, name: str, at_least: float
) -> None:
    ticks = watched.told(name)
    assert share(ticks, "kv_pool") >= at_least
    assert share(ticks, "max_num_seqs") == 0
    assert share(ticks, "token_budget") <= 0.06


def test_on_the_chat_ramp_the_pool_is_told_to_bind_long_before_the_first_preemption(watched: Watched) -> None:
    first = next(at for at, told in enumerate(watched.told("public_chat")) if "kv_pool" in told)
    assert events(watched.history("public_chat"))[0] == pytest.approx(121.5, abs=0.1)
    assert first == 84


def test_in_every_burst_the_pool_is_told_to_bind_within_a_second_of_the_first_preemption(
    watched: Watched,
) -> None:
    ticks, found = watched.told("public_burst"), events(watched.history("public_burst"))
    starts = [at for at, before in zip(found, [-100.0, *found], strict=False) if at - before > 20]
    assert len(starts) == 3
    for start in starts:
        assert any("kv_pool" in told for told in ticks[int(start) - 3 : int(start) + 2])


def test_beside_preemptions_the_only_state_of_all_recordings_is_the_working_set_of_the_chat_ramp(
    watched: Watched,
) -> None:
    states = {
        (name, series.label("state")): [tick for tick, value in enumerate(values) if value]
        for name in (*(f"public_{one}" for one in PUBLIC), *LOADS)
        for series, values in watched.history(name).series.items()
        if series.name == STATES
    }
    preempting = {name: ticks for (name, state), ticks in states.items() if state == "preempting"}
    states = {key: ticks for key, ticks in states.items() if key[1] != "preempting"}
    assert preempting.keys() == {
        name for name in (*(f"public_{one}" for one in PUBLIC), *LOADS) if events(watched.history(name))
    }
    for name in ("public_burst", "public_chat"):
        counted = [rise.counted_at for rise in rises(watched.history(name))]
        past = {
            tick: [tick - at for at in counted if at <= tick]
            for tick in range(watched.history(name).num_ticks)
        }
        # From the scrape that counts them on, for 15 s; the page of a tick is up to a second old.
        assert {tick for tick, ago in past.items() if ago and min(ago) <= 15} <= set(preempting[name])
        assert set(preempting[name]) <= {tick for tick, ago in past.items() if ago and min(ago) <= 16}
    # The hit rate falls, and 18.5 s later the first request is preempted: from then on it is no more the one without the other.
    assert states == {("public_chat", "working_set_exceeds_pool"): list(range(103, 122))}
    assert events(watched.history("public_chat"))[0] == pytest.approx(121.5, abs=0.1)


def test_the_table_of_docs_forecast_is_what_was_measured(watched: Watched) -> None:
    rows = []
    for name in (*(f"public_{one}" for one in PUBLIC), *LOADS):
        queued = [tick for tick in watched.told(name) if tick]
        told = ("kv_pool", "max_num_seqs", "token_budget", "unknown")
        counts = [len(queued), *(sum(limit in tick for tick in queued) for limit in told)]
        shown = f"backtest/{name.removeprefix('public_')}" if name.startswith("public_") else f"loads/{name}"
        rows.append(f"| `{shown}` | {' | '.join(map(str, counts))} |")
    document = (TESTS.parent / "docs/forecast.md").read_text()
    assert "\n".join(rows) in document
