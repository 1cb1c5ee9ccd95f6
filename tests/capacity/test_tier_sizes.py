"""What is asked of an engine's past: the tokens of tiers that could be."""

from dataclasses import replace

import pytest

from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.readings import EngineSnapshot, ToldTier
from kvheadroom.capacity.reuse import ReuseQuestion, TierContent, TierSize
from kvheadroom.capacity.tier_sizes import NO_TIER, ask
from tests.capacity.facts_builder import facts
from tests.end_to_end.tiny_model import MODEL_CONFIGS

GIB = 2**30
ENGINE = EngineSnapshot(
    engine="0",
    num_blocks=1001,
    block_size=16,
    attention_block_size=16,
    kv_usage_ratio=0.2,
    prefix_cache_queries_total=1.0,
)
CHUNK = 16 * 1024
"""16 tokens of 1,024 B."""


def asked(known: EngineFacts, snapshot: EngineSnapshot = ENGINE, *sizes: int) -> ReuseQuestion | str:
    warmth = assess(Reading(facts=known, snapshot=snapshot, taken_at=0.0), (1024,)).warmth
    return ask(known, warmth.tiers, sizes)


def test_without_a_tier_each_size_is_what_vllms_own_connector_would_make_of_it() -> None:
    question = asked(facts(), ENGINE, 2 * GIB, GIB)
    assert question == ReuseQuestion(
        pool_tokens=16_000.0,
        tier=TierContent(tokens=0.0, stores_answers=False),
        sizes=(NO_TIER, TierSize(bytes=GIB, tokens=2.0**20), TierSize(bytes=2 * GIB, tokens=2.0**21)),
    )


def test_the_tier_that_there_is_is_among_the_sizes_and_says_what_it_holds() -> None:
    question = asked(facts(flags={"kv_offloading_size": 1.0}), ENGINE, 2 * GIB)
    assert isinstance(question, ReuseQuestion)
    assert question.tier == TierContent(tokens=2.0**20, stores_answers=False)
    assert [size.bytes for size in question.sizes] == [0, GIB, 2 * GIB]


def test_what_vllm_tells_of_its_chunks_comes_before_the_plan() -> None:
    told = ToldTier(num_chunks=640, blocks_per_chunk=1, size_bytes=640 * CHUNK, size_tokens=10_240)
    question = asked(facts(flags={"kv_offloading_size": 1.0}), replace(ENGINE, told_tier=told))
    assert isinstance(question, ReuseQuestion)
    assert question.tier.tokens == 640 * 16


def test_up_to_0_22_answers_are_in_the_tier_as_they_are_generated() -> None:
    question = asked(facts(version="0.22.0"), ENGINE, GIB)
    assert isinstance(question, ReuseQuestion)
    assert question.tier.stores_answers


@pytest.mark.parametrize(
    ("known", "snapshot", "why"),
    [
        (facts(flags={"enable_prefix_caching": False}), ENGINE, "prefix caching is off"),
        (facts(config={}), ENGINE, "how its model keeps its cache is not known"),
        (facts(), replace(ENGINE, num_blocks=None), "the engine does not tell its blocks"),
        (facts(config=MODEL_CONFIGS["hybrid"]), ENGINE, "it keeps recurrent states"),
        (facts(flags={"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}), ENGINE, "the tier that there is: the tier of"),
        (facts(), replace(ENGINE, told_tier=ToldTier(1, 1, 1, 1)), "the tier that there is: no flag that is known asks for it"),
        (facts(version="0.12.0"), ENGINE, "vLLM takes the size of the tier in bytes from 0.14.0 on"),
        (facts(config=MODEL_CONFIGS["windows"], gpu="H100"), ENGINE, "some of its layers look back over a part"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_says_why(known: EngineFacts, snapshot: EngineSnapshot, why: str) -> None:
    question = asked(known, snapshot, GIB)
    assert isinstance(question, str)
    assert question.startswith(why)
