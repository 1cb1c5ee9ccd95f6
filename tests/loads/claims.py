"""What each recording is there for; a load that did not bring it about is no recording of that kind."""

import bisect
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

from tests.end_to_end.tiny_model import MODEL_CONFIGS
from tests.loads.client import HUNG_UP
from tests.loads.measured import Measured
from tests.loads.scenarios import SCENARIOS

FLAGS = {scenario.name: scenario.flags for scenario in SCENARIOS}


def steady(found: Measured) -> None:
    assert found.rise("preemptions_total") == 0
    assert found.most("requests_waiting") <= 2, "nobody is kept waiting"
    assert 0.2 < found.max_usage < 0.8
    sent = [request["t_send"] for request in found.requests]
    third = (max(sent) - min(sent)) / 3
    came = [sum(0 <= at - min(sent) - third * i < third for at in sent) for i in range(3)]
    assert max(came) < 1.4 * min(came), "as many a second at the end as at the beginning"


def ramp(found: Measured) -> None:
    fourth = len(found.instants) // 4
    quarters = [
        statistics.mean(instant.usage for instant in found.instants[i * fourth : (i + 1) * fourth])
        for i in range(3)
    ]
    assert quarters == sorted(quarters)
    assert found.max_usage > 0.95
    assert found.most("requests_waiting") > 10
    first = next(instant.offset_seconds for instant in found.instants if instant.total("requests_waiting"))
    assert found.preempting_scrapes
    assert min(found.preempting_scrapes) > 30, "a rise that a forecast could see"
    assert first > 30


def burst(found: Measured) -> None:
    assert len(_episodes(found.preempting_scrapes)) >= 3
    quiet = [instant.usage for instant in found.instants if 4 < instant.offset_seconds < 12]
    assert max(quiet) < 0.5, "nothing told of the first burst"


def agentic(found: Measured) -> None:
    sessions: dict[str, list[Mapping[str, float]]] = {}
    for request in found.requests:
        sessions.setdefault(str(request["session"]), []).append(request)
    assert sum(len(turns) >= 5 for turns in sessions.values()) >= 8
    pauses = [
        later["t_send"] - earlier["t_end"]
        for turns in sessions.values()
        for earlier, later in itertools.pairwise(turns)
    ]
    assert min(pauses) >= 0.3
    assert sum(pause > 8 for pause in pauses) >= 10, "people think"
    assert sum(pause < 3 for pause in pauses) >= 30, "tools answer"
    assert found.hit_ratio is not None
    assert found.hit_ratio > 0.3
    longest = max(request["prompt_tokens"] for request in found.requests)
    assert longest > 1500, "histories grow"


def long_prompts(found: Measured) -> None:
    batch = int(FLAGS["long_prompts"]["--max-num-batched-tokens"])
    assert min(request["prompt_tokens"] for request in found.requests) > 1.9 * batch
    assert max(request["prompt_tokens"] for request in found.requests) > 3 * batch
    assert found.most("requests_waiting") > 0


def prefix_reuse(found: Measured) -> None:
    assert len({request["shared_prefix"] for request in found.requests}) == 4
    assert found.hit_ratio is not None
    assert found.hit_ratio > 0.6


def mixed_lengths(found: Measured) -> None:
    for length in ("prompt_tokens", "got"):
        tenths = statistics.quantiles((request[length] for request in found.requests), n=10)
        assert tenths[-1] > 12 * tenths[0]


def data_parallel(found: Measured) -> None:
    last = found.instants[-1].engines
    assert [(engine.engine, engine.num_blocks) for engine in last] == [("0", 64), ("1", 64)]
    generated = [engine.generation_tokens_total or 0 for engine in last]
    assert min(generated) > 0.2 * max(generated)
    apart = [
        abs((instant.engines[0].kv_usage_ratio or 0) - (instant.engines[1].kv_usage_ratio or 0))
        for instant in found.instants
    ]
    assert max(apart) > 0.1, "two pools, not one told twice"


def latent(found: Measured) -> None:
    config = MODEL_CONFIGS["mla"]
    assert found.recording.origin["architecture"] == config["architectures"][0] == "DeepseekV2ForCausalLM"
    assert config["kv_lora_rank"] == 512
    (engine,) = found.instants[-1].engines
    # 8 MiB / (4 layers x (512 + 64) x 2 bytes x 16 tokens).
    assert (engine.num_blocks, engine.block_size) == (113, 16)
    assert found.rise("prefix_cache_queries_total") == 0, "vLLM has no prefix cache for it on a CPU"
    assert found.max_usage > 0.9


def sequence_limit(found: Measured) -> None:
    limit = FLAGS["sequence_limit"]["--max-num-seqs"]
    assert found.most("requests_running") == limit
    assert found.max_usage < 0.5
    queued = [instant for instant in found.instants if instant.total("requests_waiting") > 0]
    assert len(queued) > len(found.instants) / 4
    assert found.most("requests_waiting") > 10
    assert found.rise("preemptions_total") == 0


def aborts(found: Measured) -> None:
    gone = [request for request in found.requests if request["status"] == HUNG_UP]
    assert len(gone) >= 20
    # vLLM 0.32 and 0.33 forget such a request before they would count it: abort_requests of v1/engine/output_processor.py.
    assert found.ended["abort"] == 0
    assert sum(found.ended.values()) < len(found.requests) - len(gone) / 2, (
        "most of them were not done anyway"
    )
    assert any(request["t_first"] is None for request in gone), "before the first token"
    assert any(request["got"] for request in gone), "in the middle of the answer"
    assert found.instants[-1].usage == 0, "what they held is free again"


def spikes(found: Measured) -> None:
    assert found.max_usage > 0.9
    assert found.times_over(0.8) >= 4
    assert found.rise("preemptions_total") == 0


def churn(found: Measured) -> None:
    _answers_tell_what_the_pages_count(found)
    blocks = 128 - 1
    evicted = found.rise("evicted_blocks_total")
    assert evicted > 6 * blocks
    turnover = found.recording.duration_seconds * blocks / evicted
    assert 12 < turnover < 30
    # Less than that: a block that a request ends in is not full, and vLLM 0.32 takes it again first (free_blocks of
    # v1/core/block_pool.py), after a second or so.
    assert 0.5 * turnover < found.rise("evicted_block_idle_seconds_total") / evicted < turnover
    # What comes in is no even stream: for some seconds the pool turns over twice as fast.
    bounds = turnover / 3, 1.5 * turnover
    below, around, above = _returns(found, bounds, full_after_seconds=turnover)
    assert len(below) >= 20
    assert all(hit == sent for hit, sent in below)
    assert len(around) >= 15
    assert _some_found_and_some_not(around)
    assert len(above) >= 10
    assert all(hit == 0 for hit, _ in above)


def offload(found: Measured) -> None:
    _answers_tell_what_the_pages_count(found)
    seconds = found.recording.duration_seconds
    assert found.rise("offload_allocation_failures_total") == 0
    turnover = seconds * (64 - 1) / found.rise("evicted_blocks_total")
    assert turnover < 12
    # A chunk is a block: 32 tokens of 1,024 bytes.
    chunks, chunk_bytes = 256, 32 * 1024
    stored = found.rise("offload_store_bytes_total") / chunk_bytes
    loaded = found.rise("offload_load_bytes_total") / chunk_bytes
    assert stored > 3 * chunks, "filled once, and written over twice"
    assert found.rise("external_prefix_cache_hits_total") == 32 * loaded > 0
    assert found.rise("prefix_cache_hits_total") > 0
    # What is loaded counts as used; between all of it for new content and all of it for the same.
    shortest, longest = seconds * chunks / (stored + loaded), seconds * chunks / stored
    bounds = 0.75 * turnover, 1.5 * turnover, 0.75 * shortest, 1.1 * longest
    pool, both, tier, around, above = _returns(found, bounds, full_after_seconds=shortest)
    assert len(pool) >= 10
    assert all(hit == sent for hit, sent in pool)
    assert len(both) >= 10
    assert len(tier) >= 10
    assert sum(hit == sent for hit, sent in both + tier) > 0.9 * len(both + tier), (
        "what the pool lost is in the host's memory"
    )
    assert len(around) >= 10
    assert _some_found_and_some_not(around)
    assert len(above) >= 10
    assert all(hit == 0 for hit, _ in above)


CLAIMS: Mapping[str, Callable[[Measured], None]] = {
    claim.__name__: claim
    for claim in (
        steady, ramp, burst, agentic, long_prompts, prefix_reuse, mixed_lengths, data_parallel, latent, sequence_limit,
        aborts, spikes, churn, offload,
    )
}  # fmt: skip


def _episodes(times: list[float], *, apart_seconds: float = 20.0) -> list[list[float]]:
    """Times in groups, each less than `apart_seconds` from the one before."""
    groups: list[list[float]] = []
    for at in times:
        if groups and at - groups[-1][-1] < apart_seconds:
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups


def _answers_tell_what_the_pages_count(found: Measured) -> None:
    """Where nothing is preempted, for vLLM 0.32 counts the hits of a request at its first admission alone, in both places."""
    assert found.rise("preemptions_total") == 0
    cached = sum(request["cached_tokens"] for request in found.requests)
    assert cached == found.rise("prefix_cache_hits_total") + found.rise("external_prefix_cache_hits_total")
    assert not any(request["cached_tokens"] for request in found.requests if not request["turn"])


def _returns(
    found: Measured, bounds_seconds: Sequence[float], *, full_after_seconds: float
) -> list[list[tuple[int, int]]]:
    """By how long a document was idle, below, between and above the bounds: (blocks found, whole blocks sent before).

    Of those that came back when every tier had been filled. Not chats: of them the tier lacks a block that an answer filled, for vLLM
    0.32 offloads prompts alone (`offload_prompt_only`).
    """
    bands: list[list[tuple[int, int]]] = [[] for _ in (*bounds_seconds, None)]
    began = min(request["t_send"] for request in found.requests)
    for request in found.requests:
        full = request["t_send"] - began > full_after_seconds
        if request["turn"] and full and request["session"].startswith("document"):
            sent, hit = request["prefix_tokens"] // 32, request["cached_tokens"] // 32
            bands[bisect.bisect(bounds_seconds, request["idle_seconds"])].append((hit, sent))
    return bands


def _some_found_and_some_not(returns: list[tuple[int, int]]) -> bool:
    return any(hit == sent for hit, sent in returns) and any(hit == 0 for hit, _ in returns)
