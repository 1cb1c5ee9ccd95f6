"""Retention and tiers, held to a real vLLM: what came back, what was found, and how old what was evicted was."""

from collections import Counter
from statistics import median

import pytest

from kvheadroom.capacity.offload_tier import OffloadTier
from kvheadroom.capacity.warmth import Answer, Tier
from tests.loads.warm import CHUNK_BYTES, CHUNKS, warm_recording


@pytest.mark.parametrize(("name", "tier", "least"), [("churn", Tier.HBM, 25), ("offload", Tier.HOST, 15)])
def test_what_is_said_to_be_warm_is_found_and_what_is_said_to_be_cold_is_not(
    name: str, tier: Tier, least: int
) -> None:
    said = Counter(warm_recording(name).came_back(tier))
    print(said)
    assert said[Answer.YES, True] >= least
    assert said[Answer.NO, False] >= least
    assert said[Answer.YES, False] == 0
    assert said[Answer.NO, True] == 0
    # It does not say "perhaps" to everything.
    perhaps = said[Answer.PERHAPS, True] + said[Answer.PERHAPS, False]
    assert perhaps <= 0.2 * said.total()


@pytest.mark.parametrize("name", ["churn", "offload"])
def test_retention_is_within_a_fifth_of_the_measured_ages_of_evicted_blocks(name: str) -> None:
    recording = warm_recording(name)
    errors = []
    for offset in range(65, 170, 5):
        [(_, measured)] = recording.at(offset).measured_idle_seconds
        retention = recording.retention(Tier.HBM, offset)
        assert retention.low_seconds is not None
        assert retention.high_seconds is not None
        errors.append((retention.low_seconds + retention.high_seconds) / 2 / measured - 1)
    print(
        f"middle of the two figures against the mean age: median {median(errors):+.1%}, furthest {max(errors):+.1%}"
    )
    assert abs(median(errors)) <= 0.2
    # A minute's mean itself moves by as much.
    assert max(map(abs, errors)) <= 0.25


@pytest.mark.parametrize("name", ["churn", "offload"])
def test_what_was_spared_is_what_the_answers_said_was_cached(name: str) -> None:
    recording = warm_recording(name)
    cached = sum(request["cached_tokens"] for request in recording.measured.requests)
    assert sum(one.tokens for one in recording.at(1e9).saved) == cached > 0


def test_the_planned_tier_is_the_one_that_ran() -> None:
    host = warm_recording("offload").at(1e9).host
    assert isinstance(host, OffloadTier)
    assert (host.num_chunks, host.chunk_bytes) == (CHUNKS, CHUNK_BYTES)
