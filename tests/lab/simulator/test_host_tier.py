"""The simulated tier in host memory, held to vLLM's own manager, and what a page tells of it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.readings import VllmPage
from kvheadroom.lab.simulator.block_pool import Chain
from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.host_tier import HostTier
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.request_log import LoggedArrivals, LoggedRequest
from kvheadroom.lab.simulator.rules import rules_of
from kvheadroom.lab.simulator.run import Run
from kvheadroom.lab.simulator.speeds import ConstantRates
from kvheadroom.sources.vllm_metrics import parse_page

CASES = [
    json.loads(line)
    for line in gzip.decompress((Path(__file__).parent / "host_tier.jsonl.gz").read_bytes()).splitlines()
]


@pytest.mark.parametrize("case", CASES, ids=[f"{n}: {case['num_chunks']}" for n, case in enumerate(CASES)])
def test_it_finds_stores_and_refuses_what_vllms_manager_does(case: dict[str, Any]) -> None:
    tier = HostTier(case["num_chunks"])
    sessions: dict[int, Chain] = {}
    prompts: dict[int, tuple[Chain, int]] = {}
    said, done = [], []
    for kind, request, *rest in case["events"]:
        if kind == "end":
            tier.touch(*prompts.pop(request))
            continue
        session, chunks, found, stored, refused = rest
        chain = sessions.setdefault(session, Chain())
        before = tier.num_stored, tier.num_refused
        hits = tier.look_up(chain, chunks)
        if hits:
            tier.load(chain, hits, hits)
        if hits < chunks:
            tier.store(chain, chunks)
        prompts[request] = chain, chunks
        said.append((found, stored, refused))
        done.append((hits, tier.num_stored - before[0], tier.num_refused > before[1]))
    assert len(said) > 100
    assert done == said


def test_the_cases_are_vllms_and_find_and_evict() -> None:
    assert {case["vllm"] for case in CASES} == {"0.33.0"}
    begun = [event for case in CASES for event in case["events"] if event[0] == "begin"]
    assert sum(found == chunks for *_, chunks, found, _, _ in begun) > 500
    assert sum(0 < found < chunks for *_, chunks, found, _, _ in begun) > 500
    assert sum(found == 0 and chunks > 5 for *_, chunks, found, _, _ in begun) > 100


def test_what_finds_no_room_is_not_stored() -> None:
    tier = HostTier(4)
    tier.store(Chain(), 5)
    assert (tier.num_stored, tier.num_refused) == (0, 1)


def engine(**changed: Any) -> EngineSettings:
    return EngineSettings(
        **{
            "num_blocks": 11,
            "block_size": 16,
            "max_model_len": 160,
            "max_num_batched_tokens": 160,
            "max_num_seqs": 1,
            "rules": rules_of("0.33.0"),
            "tier_chunks": 100,
            "chunk_bytes": 4096,
            **changed,
        }
    )


def page_after(settings: EngineSettings, log: list[LoggedRequest]) -> VllmPage:
    rates = ConstantRates(prefill_tokens_per_second=1024.0, decode_tokens_per_second=64.0)
    run = Run(settings, LoggedArrivals(log, settings.block_size), rates, starts_at=0.0)
    run.advance(1000.0)
    page = parse_page(Pages(settings, model_name="m", starts_at=0.0).text(run).encode())
    assert isinstance(page, VllmPage)
    assert page.problems == ()
    return page


def request(session: str, sent_at: float, prompt: int, **more: Any) -> LoggedRequest:
    return LoggedRequest(
        session=session, turn=0, sent_at=sent_at, prompt_tokens=prompt, output_tokens=2, max_tokens=2, **more
    )


def test_a_session_that_was_evicted_from_the_pool_is_loaded_from_the_tier() -> None:
    log = [
        request("a", 0.0, 128),
        # Takes all blocks.
        request("b", 10.0, 150),
        request("a", 20.0, 150, prefix_tokens=128),
    ]
    [told] = page_after(engine(), log).engines
    assert told.prompt_tokens_total == 428
    assert told.prompt_tokens_local_cache_hit_total == 0
    assert told.prompt_tokens_external_kv_transfer_total == 128
    assert (told.external_prefix_cache_queries_total, told.external_prefix_cache_hits_total) == (428, 128)
    # 8 chunks of the first, 9 of the second, and the ninth of the third.
    assert told.offload_store_bytes_total == (8 + 9 + 1) * 4096
    assert told.offload_load_bytes_total == 8 * 4096
    assert told.told_tier is not None
    assert (told.told_tier.num_chunks, told.told_tier.size_bytes, told.told_tier.size_tokens) == (
        100,
        409_600,
        1600,
    )


def test_without_a_tier_the_same_session_is_computed_again_and_the_page_says_nothing_of_one() -> None:
    log = [request("a", 0.0, 128), request("b", 10.0, 150), request("a", 20.0, 150, prefix_tokens=128)]
    [told] = page_after(engine(tier_chunks=0, chunk_bytes=0), log).engines
    assert told.prefix_cache_hits_total == 0
    assert told.external_prefix_cache_queries_total is None
    assert told.offload_store_bytes_total is None
    assert told.told_tier is None


def test_a_tier_needs_prefix_caching() -> None:
    with pytest.raises(OperatorError, match="tier_chunks"):
        engine(enable_prefix_caching=False)
