"""Every plan of vLLM's own code: equal to the block, refused as vLLM refuses, or honestly unknown; never wrong.

The first rows are the table that is public; the ids that begin with `rnd` are random changes of configs and flags.
"""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from kvheadroom.capacity.cases import plan_case
from kvheadroom.capacity.families.registry import KNOWN_ARCHITECTURES
from tests.capacity.truth import BY_ID, ROWS, is_refused

FIGURES = (
    "kv_cache_dtype",
    "block_size",
    "bytes_per_block",
    "num_blocks",
    "kv_cache_size_tokens",
    "max_concurrency",
    "needed_bytes_for_max_model_len",
    "boots",
    "estimated_max_model_len",
    "at_len",
)

# What this version answers, of all rows. Raise the numbers when more is modelled.
ANSWERED = {"exact": 3219, "refused": 1467, "unknown": 437}
PUBLIC_ROWS = 150
PUBLIC_ANSWERED = {"exact": 146, "refused": 4}
SHARE_OF_RANDOM_ROWS = 0.9

# With these vLLM estimates the longest length from the overridden block count; the generator of the rows did so from
# the profiled bytes. The text of vLLM's own refusal is a witness.
OVERRIDE = "num_gpu_blocks_override"
WITNESS, WITNESSED_LENGTH = "l8-ngb500-noboot", 7984

# Claimed without a row: the release of the rows no longer has them and refuses them whatever their config says, ...
REMOVED_WITHOUT_ROW = {
    "AquilaForCausalLM",
    "AquilaModel",
    "BaiChuanForCausalLM",
    "Grok1ForCausalLM",
    "Grok1ModelForCausalLM",
    "InternLMForCausalLM",
    "JAISLMHeadModel",
    "MotifForCausalLM",
    "OuroForCausalLM",
    "QWenLMHeadModel",
    "RWForCausalLM",
    "StableLMEpochForCausalLM",
    "TeleChatForCausalLM",
}
# ... or they are read by the very rules of one that has rows (Bloom: heads of hidden_size / heads, as GPT-2).
READ_AS = {
    "BloomForCausalLM": "GPT2LMHeadModel",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "InternVLChatModel": "InternVLForConditionalGeneration",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MiMoV2ForCausalLM": "MiMoV2FlashForCausalLM",
}


@cache
def answer(row_id: str) -> dict[str, Any]:
    row = BY_ID[row_id]
    return plan_case({**row, "lengths": [int(length) for length in row["expected"].get("at_len", {})]})


def outcome(row: dict[str, Any]) -> str:
    got = answer(row["id"])
    return "unknown" if "unknown" in got else "refused" if "refused" in got else "exact"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_an_answer_is_vllms_own_or_unknown(row: dict[str, Any]) -> None:
    got, expected = answer(row["id"]), row["expected"]
    assert got["id"] == row["id"]
    if "unknown" in got:
        assert set(got) == {"id", "unknown"}
        assert got["unknown"]
        return
    assert got.get("refused", False) == expected.get("refused", False), got
    if "refused" in got:
        assert set(got) == {"id", "refused", "error"}
        assert got["error"]
        return
    assert set(got) == {"id", *FIGURES, "weight_bytes_rank0"}
    # The tool tells less of a pool without a block.
    compared = [
        name
        for name in FIGURES
        if name in expected and (name != "estimated_max_model_len" or OVERRIDE not in row["flags"])
    ]
    assert {name: got[name] for name in compared} == {name: expected[name] for name in compared}


def test_vllms_own_message_estimates_from_the_overridden_block_count() -> None:
    assert answer(WITNESS)["estimated_max_model_len"] == WITNESSED_LENGTH
    told = BY_ID[WITNESS]["expected"]["boot_error"]
    assert f"the estimated maximum model length is {WITNESSED_LENGTH}" in told


def test_as_many_rows_are_answered_as_ever() -> None:
    assert len(BY_ID) == len(ROWS)
    assert Counter(map(outcome, ROWS)) == ANSWERED


def test_every_row_of_the_public_table_is_answered() -> None:
    assert Counter(map(outcome, ROWS[:PUBLIC_ROWS])) == PUBLIC_ANSWERED


def test_most_configs_and_flags_changed_at_random_are_answered() -> None:
    outcomes = [outcome(row) for row in ROWS if row["id"].startswith("rnd")]
    assert len(outcomes) > 900
    assert 1 - outcomes.count("unknown") / len(outcomes) >= SHARE_OF_RANDOM_ROWS


def test_every_architecture_that_is_claimed_stands_in_the_rows() -> None:
    held = {row["config"]["architectures"][0] for row in ROWS if outcome(row) == "exact" or is_refused(row)}
    assert KNOWN_ARCHITECTURES - held == REMOVED_WITHOUT_ROW | set(READ_AS)
    assert set(READ_AS.values()) <= held


@pytest.mark.parametrize("architecture", sorted(REMOVED_WITHOUT_ROW))
def test_an_architecture_that_vllm_no_longer_has_is_refused(architecture: str) -> None:
    got = plan_case({**ROWS[0], "config": {"architectures": [architecture]}})
    assert got["refused"]
    assert f"{architecture} until 0." in got["error"]
