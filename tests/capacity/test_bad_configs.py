"""Whatever config.json and the flags hold, there is one answer in one sentence, and never an exception."""

import copy
import json
import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvheadroom.capacity.cases import plan_case
from kvheadroom.capacity.families.registry import KNOWN_ARCHITECTURES
from kvheadroom.capacity.model_geometry import UnknownGeometry, read_geometry
from tests.capacity.facts_builder import TINY_LLAMA
from tests.capacity.truth import BY_ID, ROWS, is_refused

LONGEST_SENTENCE = 500


def nested(depth: int) -> dict[str, Any]:
    bomb: dict[str, Any] = {}
    for _ in range(depth):
        bomb = {"rope_scaling": bomb}
    return bomb


def nested_list(depth: int) -> list[Any]:
    bomb: list[Any] = []
    for _ in range(depth):
        bomb = [bomb]
    return bomb


JUNK: tuple[Any, ...] = (
    None, True, False,
    0, 1, -1, 3, 2**31, 2**63, -(2**63), 10**400, 10**5000,
    0.5, -0.0, 1e308, math.nan, math.inf, -math.inf,
    "", "4", "full_attention", "x" * 100_000, "\ud800", "\x00",
    [], [None], [[]], [1], ["full_attention"], [0.5, "x", None, {}], [1] * 5000, ["full_attention"] * 5000, [2**63], [10**5000],
    {}, {"a": 1}, {"rope_type": "yarn", "factor": 1e300}, {"type": [], "factor": math.nan},
    {"quant_method": 5}, {"quant_method": "modelopt", "kv_cache_quant_algo": []}, {"kv_cache_scheme": {"type": {}}},
    {str(number): number for number in range(500)},
    nested(3000), nested_list(3000),
)  # fmt: skip


def form(case: Mapping[str, Any]) -> str:
    """Which of the three forms the answer has; it fails where that is none of them."""
    got = plan_case(case)
    forms = [name for name in ("num_blocks", "refused", "unknown") if name in got]
    assert len(forms) == 1
    if forms != ["num_blocks"]:
        sentence = got["unknown"] if forms == ["unknown"] else got["error"]
        assert set(got) == ({"id", "unknown"} if forms == ["unknown"] else {"id", "refused", "error"})
        assert 0 < len(sentence) <= LONGEST_SENTENCE
        assert "\n" not in sentence
    json.dumps(got, allow_nan=False)
    return {"num_blocks": "planned"}.get(forms[0], forms[0])


def keys(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key, as the way to it."""
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, Mapping) and len(above) < 3:
            yield from keys(value, (*above, key))


def changed(config: Mapping[str, Any], way: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with another value there; `...` takes the key out."""
    first, *rest = way
    if rest:
        return {**config, first: changed(config[first], tuple(rest), value)}
    if value is ...:
        return {key: old for key, old in config.items() if key != first}
    return {**config, first: value}


def one_row_of_each_architecture() -> list[dict[str, Any]]:
    rows = {row["config"]["architectures"][0]: row for row in reversed(ROWS) if not is_refused(row)}
    return [row for name, row in rows.items() if name in KNOWN_ARCHITECTURES]


CASE = {"id": "x", "gpu": "H100", "vllm_version": "0.33.0", "available_bytes": 2**34}
OF_EVERY_KIND = (
    "llama31-8b-tp1-h100",
    "gpt-oss-20b-tp1",
    "gemma3-27b-tp2-mnbt2048",
    "llama4-scout-mm-tp8",
    "dsv3-tp8-h200",
    "glm53-nvfp4-tp4",
    "qwen3-next-80b-tp4",
    "nemotron-h-8b-tp1",
    "kimi-linear-48b-tp4",
    "falcon-h1-7b-tp1",
    "mimo-v2-flash-tp4",
    "whisper-large-v3",
    "glm53flash-b200-tp2-kvauto-mtp3",
    "dsv4-flash-b200-tp4-kvauto",
    "qwen4-exp-text-default-tp2",
)
SOME = (
    "llama31-8b-tp1-h100",
    "dsv3-tp8-h200",
    "qwen3-next-80b-tp4",
    "glm53flash-b200-tp2-kvauto-mtp3",
    "dsv4-flash-b200-tp4-kvauto",
)


@pytest.mark.parametrize("name", OF_EVERY_KIND)
def test_a_key_that_holds_anything_else_is_answered(name: str, seeded: random.Random) -> None:
    row = BY_ID[name]
    pairs = [(way, junk) for way in keys(row["config"]) for junk in JUNK]
    forms = Counter(
        form({**row, "config": changed(row["config"], way, junk)}) for way, junk in seeded.sample(pairs, 250)
    )
    assert forms["planned"] > 0  # of keys that nothing depends on
    assert forms["unknown"] > 0


@pytest.mark.parametrize(
    "row", one_row_of_each_architecture(), ids=lambda row: row["config"]["architectures"][0]
)
def test_a_key_that_is_missing_is_answered(row: dict[str, Any]) -> None:
    for way in keys(row["config"]):
        form({**row, "config": changed(row["config"], way, ...)})
    assert form({**row, "config": {"architectures": row["config"]["architectures"]}}) == "unknown"


@pytest.mark.parametrize(
    "row", one_row_of_each_architecture(), ids=lambda row: row["config"]["architectures"][0]
)
def test_a_huge_number_takes_neither_time_nor_memory(row: dict[str, Any]) -> None:
    # As many layers as that would be 16 GiB of them.
    drafts = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    text = ("text_config",) if isinstance(row["config"].get("text_config"), Mapping) else ()
    tracemalloc.start()
    for way in (*keys(row["config"]), *((*text, key) for key in drafts)):
        form({**row, "config": changed(row["config"], way, 2**31)})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


@pytest.mark.parametrize("name", OF_EVERY_KIND)
def test_what_backends_and_blocks_go_by_is_never_refused_for_want_of_a_key(name: str) -> None:
    # transformers would fill it in, and we do not know with what.
    row = BY_ID[name]
    numbers = ("_dim", "_rank", "_topk", "_size", "_heads", "_layers")
    for way in keys(row["config"]):
        if way[-1].endswith(numbers) and "vision" not in way[0]:
            assert form({**row, "config": changed(row["config"], way, ...)}) != "refused", way


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "names no architecture"),
        ({"architectures": {"0": "LlamaForCausalLM"}}, "names no architecture"),
        ({"architectures": [None]}, "names no architecture"),
        ({"architectures": [nested(3000)]}, "names no architecture"),
        ({"architectures": ["x" * 10_000]}, "are not known to this version"),
        (
            {**TINY_LLAMA, "num_key_value_heads": "2"},
            "`num_key_value_heads` is '2', a whole number above 0 is needed",
        ),
        ({**TINY_LLAMA, "num_key_value_heads": 2.0}, "`num_key_value_heads` is 2.0"),
        ({**TINY_LLAMA, "num_key_value_heads": [2]}, "`num_key_value_heads` is [2]"),
        ({**TINY_LLAMA, "num_key_value_heads": 2**63}, "`num_key_value_heads` is out of range"),
        ({**TINY_LLAMA, "head_dim": 10**400}, "`head_dim` is out of range"),
        ({**TINY_LLAMA, "head_dim": nested(3000)}, "`head_dim` is too large to show"),
        ({**TINY_LLAMA, "num_hidden_layers": 10_001}, "more layers than any model has"),
        ({**TINY_LLAMA, "layer_types": ["full_attention"] * 3}, "`layer_types` has 3 entries for 4 layers"),
        (
            {**TINY_LLAMA, "layer_types": ["full_attention"] * 5000},
            "`layer_types` has 5000 entries for 4 layers",
        ),
        (
            {**TINY_LLAMA, "layer_types": "full_attention"},
            "`layer_types` is 'full_attention', a list is needed",
        ),
        ({**TINY_LLAMA, "layer_types": [1, 2, 3, 4]}, "`layer_types` is no list of words"),
        ({**TINY_LLAMA, "quantization_config": "fp8"}, "`quantization_config` is 'fp8', a section is needed"),
        ({**TINY_LLAMA, "rope_scaling": [1]}, "does not tell the longest context"),
        ({**TINY_LLAMA, "architectures": ["Gemma3ForConditionalGeneration"]}, "`sliding_window` is left out"),
    ],
)
def test_a_bad_config_is_unknown_with_its_reason(config: dict[str, Any], reason: str) -> None:
    got = plan_case({**CASE, "config": config, "flags": {}})
    assert reason in got["unknown"]


@pytest.mark.parametrize(
    "case",
    [
        {"config": {**TINY_LLAMA, "torch_dtype": "a\nb"}},
        {"config": {**TINY_LLAMA, "architectures": ["a\nb"]}},
        {"config": {**TINY_LLAMA, "layer_types": ["a\nb"] * 4}},
        {"config": {**BY_ID["dsv3-tp8-h200"]["config"], "model_type": "a\nb"}},
        {"flags": {"kv_cache_dtype": "a\nb"}},
        {"flags": {"attention_backend": "a\nb"}},
        {"flags": {"dtype": "a\nb"}},
        {"flags": {"a\nb": 1}},
        {"gpu": "a\nb"},
    ],
)
def test_a_reason_is_one_line_whatever_words_it_repeats(case: dict[str, Any]) -> None:
    assert form({**CASE, "config": TINY_LLAMA, "flags": {}, **case}) in ("unknown", "refused")


@pytest.mark.parametrize("config", [None, [], "config.json", 7, True])
def test_a_config_that_is_no_section_is_unknown(config: object) -> None:
    assert form({**CASE, "config": config}) == "unknown"


@pytest.mark.parametrize("name", SOME)
def test_a_bomb_of_sections_is_answered(name: str) -> None:
    row = BY_ID[name]
    for key in ("rope_scaling", "rope_parameters", "quantization_config", "compression_config", "text_config",
                "vision_config", "linear_attn_config", "layer_types", "kv_cache_scheme"):  # fmt: skip
        for bomb in (nested(100), nested(900), nested(5000), nested_list(5000)):
            form({**row, "config": {**row["config"], key: bomb}})
            dug: Any = bomb
            while dug:  # else Python itself runs out of stack when it throws the bomb away
                dug = dug.pop("rope_scaling") if isinstance(dug, dict) else dug.pop()


def test_absurd_sizes_are_answered_at_once() -> None:
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim",
             "vocab_size", "max_position_embeddings", "sliding_window")  # fmt: skip
    for key in sizes:
        for size in (9_999, 10_000, 2**20, 2**31, 2**31 + 1, 2**63, 10**400):
            form({**CASE, "config": {**TINY_LLAMA, key: size}, "lengths": [1, 2**53]})
    largest = dict.fromkeys(sizes, 2**31) | {"num_hidden_layers": 10_000}
    # not a block of it fits
    assert form({**CASE, "config": {**TINY_LLAMA, **largest}}) == "planned"
    alternating = ["full_attention", "sliding_attention"] * 5000
    many = {"num_hidden_layers": 10_000, "layer_types": alternating, "sliding_window": 512}
    assert (
        form({**CASE, "config": {**TINY_LLAMA, **many}, "flags": {"pipeline_parallel_size": 100}})
        == "planned"
    )


@pytest.mark.parametrize("name", OF_EVERY_KIND)
def test_a_model_of_very_many_layers_is_planned(name: str) -> None:
    row, layers = BY_ID[name], 3000
    text = dict(row["config"].get("text_config", row["config"]))
    usual = text.get("num_hidden_layers", 1)
    for key, value in text.items():
        if isinstance(value, list | str) and len(value) >= usual:
            text[key] = (value[:usual] * (layers // usual + 1))[:layers]
    for key in ("num_hidden_layers", "decoder_layers"):
        if key in text:
            text[key] = layers
    whole = {**row["config"], "text_config": text} if "text_config" in row["config"] else text
    form({**row, "config": whole, "flags": {**row["flags"], "max_model_len": -1}})
    form({**row, "config": {**whole, "num_nextn_predict_layers": layers}})


FLAGS = (
    "async_scheduling", "attention_backend", "block_size", "data_parallel_size", "decode_context_parallel_size",
    "disable_hybrid_kv_cache_manager", "dtype", "enable_chunked_prefill", "enable_expert_parallel",
    "enable_prefix_caching", "hf_overrides", "kv_cache_dtype", "kv_cache_dtype_skip_layers",
    "kv_cache_memory_bytes", "kv_offloading_size", "kv_transfer_config", "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "mamba_ssm_cache_dtype",
    "max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override",
    "pipeline_parallel_size", "prefill_context_parallel_size", "speculative_config", "tensor_parallel_size",
)  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_a_flag_that_holds_anything_is_answered(name: str) -> None:
    row = BY_ID[name]
    for flag in FLAGS:
        for junk in (
            *JUNK,
            16,
            24,
            100,
            10_000,
            2**53,
            "fp8",
            "float16",
            "mtp",
            {"method": "mtp", "num_speculative_tokens": 1},
        ):
            form({**row, "flags": {**row["flags"], flag: junk}})
    for junk in JUNK:
        form(
            {
                **row,
                "flags": {
                    **row["flags"],
                    "speculative_config": {"method": junk, "num_speculative_tokens": 1},
                },
            }
        )
        form(
            {
                **row,
                "flags": {
                    **row["flags"],
                    "speculative_config": {"method": "mtp", "num_speculative_tokens": junk},
                },
            }
        )
        draft = {"method": "eagle3", "num_speculative_tokens": 1, "draft_config": junk}
        form({**row, "flags": {**row["flags"], "speculative_config": draft}})


@pytest.mark.parametrize(
    "key", ["id", "config", "flags", "gpu", "vllm_version", "available_bytes", "lengths"]
)
def test_a_part_of_a_case_that_holds_anything_is_answered(key: str) -> None:
    for junk in JUNK:
        case = {**CASE, "config": TINY_LLAMA, "flags": {}, key: junk}
        got = plan_case(case)
        assert form(case) in ("planned", "refused", "unknown")
        assert got["id"] == (case["id"] if isinstance(case["id"], str) else None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tensor_parallel_size": 3}, "4 attention heads are not divisible by tensor_parallel_size=3"),
        ({"tensor_parallel_size": 65_536}, "not divisible by tensor_parallel_size"),
        ({"pipeline_parallel_size": 65_536}, "more than the 4 layers"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
            "not divisible by decode_context_parallel_size=3",
        ),
    ],
)
def test_what_does_not_divide_is_refused(flags: dict[str, int], words: str) -> None:
    got = plan_case({**CASE, "config": TINY_LLAMA, "flags": flags})
    assert got["refused"]
    assert words in got["error"]


def mutate(config: Mapping[str, Any], seeded: random.Random) -> dict[str, Any]:
    """One to three keys changed: to junk, to a number nearby, to a list of another length, or taken out."""
    for _ in range(seeded.randint(1, 3)):
        way = seeded.choice(list(keys(config)) or [("architectures",)])
        value: Any = config
        for key in way:
            value = value[key] if isinstance(value, Mapping) else None
        choice = seeded.randrange(6)
        new: Any = seeded.choice(JUNK)
        if choice == 0:
            new = ...
        elif isinstance(value, int) and choice < 4:
            new = seeded.choice([value + 1, value - 1, value * 2, value // 2, value * 1000, -value])
        elif isinstance(value, list) and value and choice < 4:
            new = copy.copy(value)
            if choice == 1:
                new[seeded.randrange(len(new))] = seeded.choice(JUNK)
            else:
                new = new[: seeded.randrange(len(new))] if choice == 2 else new * seeded.randint(2, 50)
        config = changed(config, way, new)
    return dict(config)


def fuzz(rows: list[dict[str, Any]], seeded: random.Random) -> Counter[str]:
    forms: Counter[str] = Counter()
    for row in rows:
        config, flags = mutate(row["config"], seeded), dict(row["flags"])
        if seeded.random() < 0.2:
            flags[seeded.choice(FLAGS)] = seeded.choice(JUNK)
        try:
            forms[form({**row, "config": config, "flags": flags})] += 1
            read_geometry(config)
        except Exception as error:
            error.add_note(f"row {row['id']}")
            raise
    return forms


def test_every_row_changed_at_random_is_answered(seeded: random.Random) -> None:
    forms = fuzz(ROWS * 2, seeded)
    assert min(forms["planned"], forms["refused"], forms["unknown"]) > 100


@pytest.mark.lab
def test_every_row_changed_at_random_many_times_is_answered(seeded: random.Random) -> None:
    fuzz(ROWS * 100, seeded)


@pytest.mark.parametrize("key", ["weight_block_size", "sliding_windows"])
def test_numbers_of_thousands_of_digits_in_a_list_are_answered(key: str) -> None:
    changes = [(row, way) for row in ROWS for way in keys(row["config"]) if way[-1] == key]
    assert changes
    for row, way in changes:
        for length in (2, 5000):
            form({**row, "config": changed(row["config"], way, [10**5000] * length)})


def test_what_cannot_be_read_comes_with_its_reason() -> None:
    unknown = read_geometry({**TINY_LLAMA, "num_hidden_layers": None})
    assert isinstance(unknown, UnknownGeometry)
    assert unknown.reason == "config.json: `num_hidden_layers` is left out, a whole number above 0 is needed"


@pytest.mark.parametrize("flags", [{}, {"tensor_parallel_size": 8, "decode_context_parallel_size": 4}])
def test_left_out_heads_are_asked_for_and_never_a_reason_to_refuse(flags: dict[str, Any]) -> None:
    row = BY_ID["qnext-tp8-dcp4"]
    config = {key: value for key, value in row["config"].items() if key != "num_attention_heads"}
    got = plan_case({**row, "config": config, "flags": flags})
    assert (
        got["unknown"] == "config.json: `num_attention_heads` is left out, a whole number above 0 is needed"
    )
