"""Calibration from what kvheadroom exported, as a Prometheus keeps it: the double's answers and a real one's."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.capacity.calibration_key import CalibrationKey
from kvheadroom.capacity.calibration_run import Looked
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion, SampleSource
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.history_calibrator import HistoryOrder, look_at_history
from kvheadroom.outputs.metric_catalogue import CATALOGUE
from kvheadroom.sources import prometheus_parts
from kvheadroom.sources.calibration_history import SAMPLE, exported_queries
from kvheadroom.sources.prometheus_api import PrometheusApi
from tests.doubles.http_server import Answer, text_answer
from tests.doubles.prometheus_api import Asked, matrix, prometheus_api, refusal
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer
from tests.exported_history import (
    BLOCK_BYTES,
    BLOCKS,
    ESTIMATED,
    KEY,
    NOW,
    OVERHEAD,
    START,
    STARTED,
    TARGET,
    Series,
    always,
    beside,
    during,
    prometheus_with,
    real_prometheus_with,
    sample,
)

LATE = replace(KEY, settings="kv_cache_dtype=fp8")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_parts, "PAUSES_SECONDS", (0.0, 0.0))


def look(
    url: str, *, now: float = NOW, report: Callable[[str], None] = lambda _: None, **changed: Any
) -> Looked:
    order = HistoryOrder(
        api=PrometheusApi(url=url, timeout_seconds=5.0), range_seconds=3600.0, every_seconds=60.0
    )
    return look_at_history(replace(order, **changed), now, report)


def looked(*series: Series, **changed: Any) -> Looked:
    with prometheus_api(prometheus_with(*series)) as (url, _):
        found = look(url, **changed)
    return replace(
        found,
        starts=tuple(
            replace(one, evidence=one.evidence.replace(url, "http://prometheus")) for one in found.starts
        ),
    )


def samples(*series: Series, **changed: Any) -> list[CalibrationSample]:
    found = looked(*series, **changed)
    assert found.problems == ()
    assert not found.excluded()
    return list(found.samples)


def excluded(*series: Series, **changed: Any) -> tuple[Exclusion, str]:
    """The only start, left out."""
    [one] = looked(*series, **changed).starts
    assert isinstance(one.outcome, Excluded)
    return one.outcome.reason, one.outcome.detail


# --- what is learned ---


def test_a_start_is_one_sample_with_what_stands_beside_it() -> None:
    with prometheus_api(prometheus_with(sample(), *beside())) as (url, _):
        found = look(url)
    [one] = found.starts
    assert (one.model, one.release, found.problems) == ("glm", "0.33.0", ())
    evidence = f"Prometheus at {url}: glm-a engine 0, 2027-01-15 07:00:00 UTC to 2027-01-15 08:00:00 UTC"
    assert one.evidence == evidence
    assert one.outcome == CalibrationSample(
        key=KEY,
        start=START,
        source=SampleSource.PROMETHEUS,
        overhead_bytes=OVERHEAD,
        uncertainty_bytes=BLOCK_BYTES - 1,
        estimated_bytes=ESTIMATED,
        edition=1,
        measured_at=NOW - 3600,
        model="glm",
        evidence=evidence,
    )


def test_what_an_operator_said_of_the_overhead_is_no_estimate() -> None:
    """The edition is 0 then."""
    [said] = samples(sample(edition="0"), *beside())
    assert (said.estimated_bytes, said.overhead_bytes) == (None, OVERHEAD)


@pytest.mark.parametrize("estimated", ["NaN", "-1", "+Inf"])
def test_an_estimate_that_cannot_be_is_none(estimated: str) -> None:
    [one] = samples(sample(), *beside(estimated=always(estimated)))
    assert one.estimated_bytes is None


def test_each_start_of_an_engine_is_its_own_sample() -> None:
    first, second = sorted(
        samples(
            sample(during(-3600, -1860, OVERHEAD)),
            sample(during(-1800, 0, OVERHEAD + 5), start="glm-a/0/1799998200"),
            *beside(),
        ),
        key=lambda one: one.start,
    )
    assert (first.start, first.overhead_bytes, first.measured_at) == (START, OVERHEAD, NOW - 3600)
    assert (second.start, second.overhead_bytes, second.measured_at) == (
        "glm-a/0/1799998200",
        OVERHEAD + 5,
        NOW - 1800,
    )


def test_a_relabelled_target_is_the_same_start() -> None:
    moved = {"job": "kv", "instance": "gpu-8:9878", "pod": "b"}
    [one] = samples(
        sample(during(-3600, -1860, OVERHEAD)),
        *beside(),
        sample(during(-1800, 0, OVERHEAD), target=moved, replica="renamed-by-prometheus"),
        *beside(target=moved, replica="renamed-by-prometheus"),
    )
    assert (one.start, one.measured_at) == (START, NOW - 3600)
    assert (
        "renamed-by-prometheus engine 0, 2027-01-15 07:00:00 UTC to 2027-01-15 08:00:00 UTC" in one.evidence
    )


def test_two_daemons_that_say_the_same_of_a_start_are_one_sample() -> None:
    other = TARGET | {"instance": "gpu-8:9878"}
    [one] = samples(sample(), *beside(), sample(target=other), *beside(target=other))
    assert one.start == START


def test_a_replica_that_was_renamed_has_one_start_under_its_later_name() -> None:
    [one] = samples(
        sample(during(-3600, -1860, OVERHEAD)),
        *beside(),
        sample(during(-1800, 0, OVERHEAD), start=f"glm-b/0/{STARTED}", replica="glm-b"),
        *beside(replica="glm-b"),
    )
    assert one.start == f"glm-b/0/{STARTED}"


def test_a_process_of_the_same_second_with_another_overhead_is_another_start() -> None:
    first, second = samples(
        sample(during(-3600, -1860, OVERHEAD)),
        *beside(),
        sample(during(-1800, 0, OVERHEAD + 5), start=f"glm-b/0/{STARTED}", replica="glm-b"),
        *beside(replica="glm-b"),
    )
    assert (first.overhead_bytes, second.overhead_bytes) == (OVERHEAD, OVERHEAD + 5)


def test_replicas_that_started_in_the_same_second_are_two_starts() -> None:
    both = samples(
        sample(), *beside(), sample(start=f"glm-b/0/{STARTED}", replica="glm-b"), *beside(replica="glm-b")
    )
    assert [one.start for one in both] == [START, f"glm-b/0/{STARTED}"]


def test_a_start_without_a_start_time_is_named_by_its_blocks() -> None:
    """Servers of several processes tell no start time: two of them with as many blocks are two starts."""
    both = samples(
        sample(during(-3600, -1860, OVERHEAD), start="glm-a/0/50001 blocks"),
        *beside(),
        sample(during(-1800, 0, OVERHEAD), start="glm-b/0/50001 blocks", replica="glm-b"),
        *beside(replica="glm-b"),
    )
    assert [one.start for one in both] == ["glm-a/0/50001 blocks", "glm-b/0/50001 blocks"]


def test_a_corrected_config_counts_as_it_stands_in_the_end() -> None:
    [one] = samples(
        sample(during(-3600, -1860, 4_000_000_000)),
        sample(during(-1800, 0, OVERHEAD), key=LATE),
        *beside(),
    )
    assert (one.key, one.overhead_bytes, one.measured_at) == (LATE, OVERHEAD, NOW - 1800)


def test_another_edition_of_the_estimate_is_that_of_the_end() -> None:
    [one] = samples(
        sample(during(-3600, -1860, OVERHEAD)),
        sample(during(-1800, 0, OVERHEAD), edition="2"),
        *beside(estimated=lambda at: str(ESTIMATED if at < -600 else ESTIMATED + 7)),
    )
    assert (one.edition, one.estimated_bytes, one.measured_at) == (2, ESTIMATED + 7, NOW - 3600)


def test_of_two_daemons_the_one_that_was_seen_last_describes_a_start() -> None:
    other = TARGET | {"instance": "gpu-8:9878"}
    [one] = samples(
        sample(edition="2"),
        *beside(),
        sample(during(-1800, -600, OVERHEAD), target=other),
        *beside(target=other),
    )
    assert one.edition == 2


def test_labels_that_the_target_has_too_are_read_under_the_name_that_prometheus_gives_them() -> None:
    target = TARGET | {"release": "monitoring", "gpu": "yes"}
    labels, value = sample(target=target)
    ours = labels | {"exported_release": KEY.release, "exported_gpu": KEY.gpu} | target
    [one] = samples((ours, value), *beside(target=target))
    assert (one.key, one.estimated_bytes) == (KEY, ESTIMATED)


# --- what is left out ---


def test_a_start_whose_overhead_changes_is_left_out() -> None:
    assert excluded(sample(lambda at: str(OVERHEAD if at < -900 else 8_000_000_000)), *beside()) == (
        Exclusion.RESTARTING,
        "its overhead was 4.77 GiB and 7.45 GiB: one was read while another process was in its place",
    )


def test_a_start_that_was_seen_once_is_left_out() -> None:
    why = (
        "it was seen at one instant alone, and may have been read while another process took its place; a shorter --every than 60 s may "
        "show it twice"
    )
    assert excluded(sample(during(-60, -60, OVERHEAD)), *beside()) == (Exclusion.RESTARTING, why)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("NaN", "nan"),
        ("+Inf", "inf"),
        ("-1", "-1"),
        ("1.5", "1.5"),
        ("7.6e+10", "76,000,000,000"),
        ("1e300", "1e+300"),
    ],
)
def test_an_overhead_that_cannot_be_is_left_out(value: str, shown: str) -> None:
    """An H200 has 150 GB, and half of it is the most."""
    assert excluded(sample(lambda at: value if at == -900 else str(OVERHEAD)), *beside()) == (
        Exclusion.IMPOSSIBLE,
        f"an overhead of {shown} bytes cannot be on its GPU",
    )


def test_a_gpu_that_is_named_by_its_bytes_bounds_the_overhead_too() -> None:
    small = replace(KEY, gpu="8000000000 bytes")
    assert excluded(sample(always(4_000_000_001), key=small), *beside())[0] is Exclusion.IMPOSSIBLE
    [one] = samples(sample(always(4_000_000_000), key=small), *beside())
    assert one.overhead_bytes == 4_000_000_000


def test_a_start_that_is_described_in_two_ways_at_once_is_left_out() -> None:
    other = TARGET | {"instance": "gpu-8:9878"}
    both = (sample(), *beside(), sample(key=LATE, target=other), *beside(target=other))
    why = (
        "it is described in two ways at once (kv_cache_dtype=fp8 in place of auto; max_num_batched_tokens=unset in place of 8192; "
        "max_num_seqs=unset in place of 1024): do two daemons watch it with different configs?"
    )
    assert excluded(*both) == (Exclusion.UNKNOWN, why)


def test_a_start_beside_which_its_pool_does_not_stand_is_left_out() -> None:
    assert excluded(sample(), *beside(pool=always("NaN"))) == (
        Exclusion.UNKNOWN,
        "kvheadroom_observed_pool_bytes and kvheadroom_observed_blocks are not beside it: does Prometheus drop them?",
    )


def test_a_series_without_its_labels_is_told_once_with_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_parts, "_FEWEST_TICKS", 10)
    monkeypatch.setattr(prometheus_parts, "_MOST_TICKS", 10)
    labels, value = sample()
    del labels["start"], labels["gpu"]
    [one] = looked((labels, value), *beside()).starts
    assert one.outcome == Excluded(
        Exclusion.UNKNOWN, "its series has no label start, gpu: does Prometheus drop it?"
    )
    assert one.evidence == (
        "Prometheus at http://prometheus: glm-a engine 0, 2027-01-15 07:00:00 UTC to 2027-01-15 08:00:00 UTC"
    )


@pytest.mark.parametrize("edition", ["one", "-1", "1.5", "²", "1" * 10])
def test_an_edition_that_is_no_number_is_told(edition: str) -> None:
    assert excluded(sample(edition=edition), *beside()) == (
        Exclusion.UNKNOWN,
        f"its label edition is {edition!r}, and no number",
    )


@pytest.mark.parametrize("settings", ["a\nb", "\x1b[2J", "x" * 1025])
def test_labels_that_kvheadroom_never_writes_are_not_taken(settings: str) -> None:
    assert excluded(sample(settings=settings), *beside()) == (
        Exclusion.UNKNOWN,
        "one of its labels cannot be one of kvheadroom's",
    )


# --- a Prometheus that fails ---


def test_a_history_without_starts_says_what_to_look_at() -> None:
    with prometheus_api(lambda _: matrix(warnings=["a store is away"])) as (url, _):
        found = look(url, select='namespace="llm"')
    problem = (
        f'Prometheus at {url} has no kvheadroom_overhead_sample_bytes matching namespace="llm" since 2027-01-15 07:00:00 UTC; it '
        "warns: a store is away: is kvheadroom scraped by it, and has one of its engines a start that was measured (`kvheadroom "
        "check`)? With --config FILE vLLM's own metrics are looked at too"
    )
    assert found == Looked((), (problem,))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (text_answer("", status=401), "it refuses access (401); give --bearer-token-file"),
        (text_answer("", status=403), "it refuses access (403); give --bearer-token-file"),
        (text_answer("<html>sign in"), "the answer is no JSON object; is this Prometheus's address?"),
        (refusal(429, "slow down"), "it has had too many requests from here (429): slow down"),
        (refusal(400, "parse error"), "it answered with status 400: parse error"),
    ],
)
def test_one_that_refuses_is_told_and_nothing_is_learned(answer: Answer, why: str) -> None:
    with prometheus_api(lambda _: answer) as (url, _):
        assert look(url) == Looked((), (f"Prometheus at {url}: {why}",))


def test_an_answer_too_large_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvheadroom.sources.prometheus_api.MAX_BODY_BYTES", 1024**2)
    with prometheus_api(lambda _: text_answer(b" " * (1024**2 + 1))) as (url, _):
        assert look(url).problems == (
            f"Prometheus at {url}: the answer is larger than 1 MiB; narrow it with --select, or take a longer --every",
        )


def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten minutes each: 61 ticks in seven."""
    monkeypatch.setattr(prometheus_parts, "_FEWEST_TICKS", 10)
    monkeypatch.setattr(prometheus_parts, "_MOST_TICKS", 10)


def failing_at(begin: float, answer: Answer, told: Callable[[Asked], Answer]) -> Callable[[Asked], Answer]:
    """One that fails for the part that begins so many seconds before NOW."""
    return lambda asked: (
        answer
        if float(asked["start"]) == NOW + begin and not asked["query"].startswith("group")
        else told(asked)
    )


OTHERS = (
    sample(during(-3600, -2460, OVERHEAD), start="glm-a/0/1"),
    sample(during(-2340, -1260, OVERHEAD), start="glm-a/0/2"),
    sample(during(-900, 0, OVERHEAD), start="glm-a/0/3"),
    *beside(),
)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            refusal(500, "out of memory"),
            "Prometheus did not answer for 2027-01-15 07:20:00 UTC to 2027-01-15 07:29:00 UTC: it is not available (500): out of memory",
        ),
        (
            matrix(*[(sample()[0], [(NOW - 2400.0, str(OVERHEAD))])], warnings=["a store is away"]),
            "Prometheus warns of 2027-01-15 07:20:00 UTC to 2027-01-15 07:29:00 UTC, which is left out: a store is away",
        ),
    ],
)
def test_only_starts_of_which_all_was_answered_are_learned(
    answer: Answer, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch)
    with prometheus_api(failing_at(-2400, answer, prometheus_with(*OTHERS))) as (url, _):
        found = look(url)
    assert found.problems == (told,)
    assert [one.start for one in found.samples] == ["glm-a/0/3"]
    # The first ended at the last instant before the part, the second was there at the first after it.
    assert [one.outcome for one in found.starts if isinstance(one.outcome, Excluded)] == [
        Excluded(
            Exclusion.UNKNOWN,
            "nothing is known of 2027-01-15 07:20:00 UTC to 2027-01-15 07:29:00 UTC, when it may have run too",
        )
    ] * 2


def test_one_that_stays_silent_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch)
    told = prometheus_with(*OTHERS)
    with prometheus_api(
        lambda asked: told(asked) if asked["query"].startswith("group") else refusal(503, "busy")
    ) as (url, seen):
        found = look(url)
        assert len(seen) == 1 + 3 * 3
    assert found.starts == ()
    assert [problem.rsplit(": ", 1)[1] for problem in found.problems] == ["busy"] * 3 + [
        "not asked any more"
    ] * 4


def test_an_interrupted_run_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch)
    told, reports = prometheus_with(*OTHERS), list[str]()

    def interrupt(text: str) -> None:
        if "part 4" in text:
            raise KeyboardInterrupt

    with prometheus_api(told) as (url, seen):
        with pytest.raises(KeyboardInterrupt):
            look(url, state=tmp_path, report=interrupt)
        seen.clear()
        found = look(url, now=NOW + 5000, state=tmp_path, report=reports.append)
        assert len(seen) == 4 * len(exported_queries(""))
    assert [one.start for one in found.samples] == ["glm-a/0/1", "glm-a/0/2", "glm-a/0/3"]
    assert reports == [
        f"going on with what {tmp_path} has of 2027-01-15 07:00:00 UTC and after",
        "history: part 4 of 7, from 2027-01-15 07:30:00 UTC",
        "history: part 5 of 7, from 2027-01-15 07:40:00 UTC",
        "history: part 6 of 7, from 2027-01-15 07:50:00 UTC",
        "history: part 7 of 7, from 2027-01-15 08:00:00 UTC",
    ]


def test_a_folder_of_another_history_is_refused(tmp_path: Path) -> None:
    with prometheus_api(prometheus_with(*OTHERS)) as (url, _):
        look(url, state=tmp_path)
        for change in ({"range_seconds": 3660.0}, {"every_seconds": 30.0}, {"select": "a"}):
            with pytest.raises(OperatorError) as raised:
                look(url, state=tmp_path, **change)
            assert str(raised.value) == (
                f"--state: {tmp_path} holds a history of another address, --range, --every, --select or --config; give another folder"
            )
        (tmp_path / "calibration-history.json").write_text('{"wanted": 7}')
        with pytest.raises(OperatorError) as raised:
            look(url, state=tmp_path)
        assert str(raised.value) == (
            f"--state: {tmp_path / 'calibration-history.json'} is damaged; give another folder"
        )
        (tmp_path / "calibration-history.json").rename(tmp_path / "history.json")
        with pytest.raises(OperatorError) as raised:
            look(url, state=tmp_path)
        assert (
            str(raised.value)
            == f"--state: {tmp_path} holds something else; give an empty folder or a new one"
        )


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match="cannot be written: Not a directory"):
        look("http://127.0.0.1:1", state=tmp_path / "file" / "state")


def test_only_what_is_selected_is_asked_for() -> None:
    assert exported_queries('job="kv"') == {
        SAMPLE: f'{SAMPLE}{{job="kv"}}',
        "kvheadroom_predicted_memory_bytes": 'kvheadroom_predicted_memory_bytes{term="overhead", job="kv"}',
        "kvheadroom_observed_pool_bytes": 'kvheadroom_observed_pool_bytes{job="kv"}',
        "kvheadroom_observed_blocks": 'kvheadroom_observed_blocks{job="kv"}',
    }


def test_every_metric_that_is_asked_for_is_exported() -> None:
    exported = {metric.full_name for metric in CATALOGUE}
    assert exported_queries("").keys() <= exported


# --- the real one ---


@pytest.fixture(scope="module")
def prometheus(
    each_prometheus: Binaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PrometheusServer, float]]:
    """One with a past hour of two starts of one engine, a restart apart; and when it ends."""
    series = (
        sample(during(-3600, -1860, OVERHEAD)),
        sample(during(-1200, 0, OVERHEAD + 5), start="glm-a/0/1799998800"),
        *beside(estimated=lambda at: f"{ESTIMATED:e}"),
    )
    with real_prometheus_with(each_prometheus, tmp_path_factory.mktemp("prometheus"), *series) as told:
        yield told


def test_a_real_prometheus_gives_both_starts(prometheus: tuple[PrometheusServer, float]) -> None:
    server, ends_at = prometheus
    found = look(server.base_url, now=ends_at, range_seconds=7200.0)
    assert found.problems == ()
    first, second = sorted(found.samples, key=lambda one: one.start)
    assert (first.start, first.key, first.overhead_bytes) == (START, KEY, OVERHEAD)
    assert (second.start, second.overhead_bytes) == ("glm-a/0/1799998800", OVERHEAD + 5)
    assert (first.estimated_bytes, first.uncertainty_bytes) == (ESTIMATED, BLOCK_BYTES - 1)
    assert (first.measured_at, second.measured_at) == (ends_at - 3600, ends_at - 1200)
    assert server.value(f"kvheadroom_observed_pool_bytes @ {ends_at}") == BLOCKS * BLOCK_BYTES


def test_a_real_prometheus_says_what_is_wrong_with_a_selection(
    prometheus: tuple[PrometheusServer, float],
) -> None:
    server, ends_at = prometheus
    [problem] = look(server.base_url, now=ends_at, select="job=").problems
    assert re.match(rf"Prometheus at {server.base_url}: it answered with status 400: .*parse error", problem)


def test_what_the_daemon_exports_is_what_is_read() -> None:
    """Each line of a daemon's page as a series; two of its engines have a sample."""
    page = (Path(__file__).parent / "golden" / "metrics.txt").read_text()
    series: list[Series] = []
    for family in text_string_to_metric_families(page):
        series += [
            (TARGET | one.labels | {"__name__": one.name}, always(repr(one.value))) for one in family.samples
        ]
    found = samples(*series)
    [told] = [[labels for labels, _ in series if labels["__name__"] == SAMPLE]]
    assert told
    assert {one.start for one in found} == {labels["start"] for labels in told}
    for one in found:
        [labels] = [labels for labels in told if labels["start"] == one.start]
        assert {name: getattr(one.key, name) for name in CalibrationKey.__slots__}.items() <= labels.items()
        assert str(one.edition) == labels["edition"]
        assert one.uncertainty_bytes > 0
