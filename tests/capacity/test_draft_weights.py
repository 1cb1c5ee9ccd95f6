"""The weights of draft models, held to the parameters that vLLM's own classes create for them.

`CREATED` was made as the rows of test_weights.py were: vLLM 0.33.0's classes on the meta device, a made-up H100, these two
config.json. Embeddings that vLLM shares with the target are left out.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.stored_model import TensorInventory
from kvheadroom.capacity.weights import WeightPlan, plan_weights
from tests.capacity import checkpoint_headers as headers
from tests.capacity.checkpoint_headers import LLAMA
from tests.capacity.facts_builder import facts

Config = dict[str, Any]

QWEN: Config = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
SMALL_QWEN: Config = {
    **QWEN,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
}
EAGLE: Config = {**LLAMA, "num_hidden_layers": 1}
EAGLE3: Config = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
    "num_hidden_layers": 1,
    "torch_dtype": "float16",
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
TP2, TP4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}
FULL = {key: value for key, value in EAGLE3.items() if key != "draft_vocab_size"}

CREATED: list[tuple[str, Config, Config, Config, int]] = [
    ("eagle3", LLAMA, EAGLE3, {}, 849635328),
    ("eagle3", LLAMA, EAGLE3, TP2, 475293696),
    ("eagle3", LLAMA, EAGLE3, TP4, 288122880),
    ("eagle3", LLAMA, FULL, TP2, 869302272),
    ("eagle3", LLAMA, {**EAGLE3, "attention_bias": True, "mlp_bias": True}, TP2, 475344896),
    ("eagle3", LLAMA, {**EAGLE3, "qkv_bias": True}, TP2, 475293696),
    ("eagle3", LLAMA, {**EAGLE3, "head_dim": 64}, TP2, 441739264),
    ("eagle3", LLAMA, {**EAGLE3, "draft_vocab_size": 32001}, TP2, 475555848),
    (
        "eagle3",
        LLAMA,
        {
            **EAGLE3,
            "num_hidden_layers": 2,
            "norm_before_fc": True,
            "fc_norm": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        },
        TP2,
        659900416,
    ),
    ("eagle3", LLAMA, {**EAGLE3, "eagle_config": {"use_aux_hidden_state": False}}, TP2, 374630400),
    ("eagle3", LLAMA, {**EAGLE3, "quantization_config": BLOCKS}, TP2, 303369224),
    ("eagle3", LLAMA, {**EAGLE3, "quantization_config": FP8}, TP2, 303327272),
    ("eagle3", {**LLAMA, "quantization_config": BLOCKS}, EAGLE3, TP2, 475293696),
    ("eagle", LLAMA, EAGLE, {}, 503324672),
    ("eagle", LLAMA, EAGLE, TP2, 285220864),
    ("eagle", LLAMA, {**EAGLE, "attention_bias": True, "num_hidden_layers": 2}, TP2, 503369728),
    ("eagle", LLAMA, {**EAGLE, "quantization_config": BLOCKS}, TP2, 142649352),
    ("draft_model", QWEN, SMALL_QWEN, {}, 405552640),
    ("draft_model", QWEN, SMALL_QWEN, TP2, 202784256),
    ("draft_model", QWEN, {**SMALL_QWEN, "tie_word_embeddings": False}, TP2, 358366720),
    ("draft_model", QWEN, {**SMALL_QWEN, "quantization_config": BLOCKS}, TP2, 179197080),
    ("draft_model", {**QWEN, "quantization_config": BLOCKS}, SMALL_QWEN, TP2, 202784256),
]


def planned(
    method: str,
    target: Config,
    draft: Config,
    flags: Config | None = None,
    tensors: TensorInventory | None = None,
    **said: Any,
) -> WeightPlan | str:
    config = {"method": method, "num_speculative_tokens": 3, "draft_config": draft, **said}
    known = facts(config=target, flags={**(flags or {}), "speculative_config": config}, gpu="H100")
    assert known.draft.model is not None, known.obstacles
    return plan_weights(
        replace(known, draft=replace(known.draft, model=replace(known.draft.model, tensors=tensors)))
    )


def names(*found: str) -> TensorInventory:
    """What an index alone tells."""
    return TensorInventory(sizes=dict.fromkeys(found))


def usual(method: str) -> TensorInventory | None:
    return {
        "eagle": names("fc.weight"),
        "eagle3": names("midlayer.mlp.up_proj.weight", "lm_head.weight", "d2t", "t2d"),
    }.get(method)


def eagle3_headers(draft: Config, *, without: Iterable[str] = ()) -> headers.Shapes:
    """As the usual trainers write them: one layer, `midlayer`, and two tables between the vocabularies."""
    hidden, rows = draft["hidden_size"], draft["draft_vocab_size"]
    found: headers.Shapes = {
        name.replace("layers.0.", "midlayer."): ("F16", shape)
        for name, (_, shape) in headers.decoder(
            {**draft, "architectures": ["LlamaForCausalLM"]}, lambda _: headers.plain("F16"), prefix=""
        ).items()
    }
    for each in "qkv":
        name = f"midlayer.self_attn.{each}_proj.weight"
        found[name] = ("F16", (found[name][1][0], 2 * hidden))
    del found["embed_tokens.weight"]
    found |= {
        "midlayer.hidden_norm.weight": ("F16", (hidden,)),
        "fc.weight": ("F16", (hidden, 3 * hidden)),
        "lm_head.weight": ("F16", (rows, hidden)),
        "d2t": ("I64", (rows,)),
        "t2d": ("BOOL", (draft["vocab_size"],)),
    }
    return {name: told for name, told in found.items() if name not in without}


def counted(plan: WeightPlan | str) -> WeightPlan:
    assert isinstance(plan, WeightPlan), plan
    assert plan.draft_unknown == ""
    return plan


@pytest.mark.parametrize(("method", "target", "draft", "flags", "created"), CREATED)
def test_a_draft_model_adds_what_vllms_own_classes_create(
    method: str, target: Config, draft: Config, flags: Config, created: int
) -> None:
    plan = counted(planned(method, target, draft, flags, usual(method)))
    alone = plan_weights(facts(config=target, flags=flags, gpu="H100"))
    assert isinstance(alone, WeightPlan)
    assert plan.draft_bytes == (created,)
    assert plan.stage_bytes == (alone.stage_bytes[0] + created,)
    assert plan.total_bytes == alone.total_bytes
    assert sum(term.stage_bytes[0] for term in plan.terms) == plan.stage_bytes[0]


def test_headers_of_a_draft_make_what_its_config_json_makes() -> None:
    by_headers = counted(planned("eagle3", LLAMA, EAGLE3, TP2, headers.stored(eagle3_headers(EAGLE3))))
    assert by_headers.draft_bytes == (475293696,)
    assert by_headers.doubt == ""


def test_a_draft_without_an_output_layer_takes_its_targets() -> None:
    tensors = headers.stored(eagle3_headers(EAGLE3, without=["lm_head.weight"]))
    plan = counted(planned("eagle3", LLAMA, EAGLE3, TP2, tensors))
    assert plan.draft_bytes == (475293696 - 32000 * 4096 * 2 // 2,)


def test_an_embedding_that_may_be_its_targets_is_told_and_not_counted() -> None:
    shapes = {**eagle3_headers(EAGLE3), "embed_tokens.weight": ("F16", (128256, 4096))}
    plan = counted(planned("eagle3", LLAMA, EAGLE3, TP2, headers.stored(shapes)))
    assert plan.draft_bytes == (475293696,)
    assert plan.doubt == (
        "the draft model: it has an embedding of its own (1.05 GB) of the shape of the target's: vLLM holds it only where "
        "the two differ, and it is counted as if they did not"
    )


def test_an_embedding_of_another_width_is_the_drafts_own() -> None:
    narrow = {
        **EAGLE3,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "head_dim": 128,
        "target_hidden_size": 4096,
        "vocab_size": 151936,
        "intermediate_size": 6144,
    }
    own = names("embed_tokens.weight", "lm_head.weight")
    # As vLLM's own classes create it, with its embedding.
    assert counted(planned("eagle3", QWEN, narrow, TP2, own)).draft_bytes == (486025216,)
    plan = planned("eagle3", QWEN, narrow, TP2, names("lm_head.weight"))
    assert isinstance(plan, WeightPlan)
    assert plan.draft_unknown == "it has no embedding of its own, and the target's has another width"


def test_an_output_layer_that_may_be_its_targets_is_told_and_counted() -> None:
    plan = counted(planned("eagle3", LLAMA, FULL, TP2, names("lm_head.weight")))
    assert plan.draft_bytes == (869302272,)
    assert "it has an output layer of its own (1.05 GB) of the shape of the target's" in plan.doubt
    assert plan.doubt.endswith("it is counted as if they did")


@pytest.mark.parametrize(
    ("method", "draft", "tensors", "said", "why"),
    [
        ("eagle3", EAGLE3, None, {}, "its own is not known (its files are not known)"),
        ("eagle3", EAGLE3, TensorInventory(problem="x: it was cut off"), {}, "(x: it was cut off)"),
        ("eagle", EAGLE, names("lm_head.weight"), {}, "which vLLM's class for it does not take"),
        (
            "eagle3",
            {**EAGLE3, "quantization_config": {**FP8, "ignored_layers": ["fc"]}},
            usual("eagle3"),
            {},
            "layers that a quantized draft leaves out are not modelled",
        ),
        (
            "eagle3",
            EAGLE3,
            usual("eagle3"),
            {"quantization": "fp8"},
            "a draft model quantized by fp8 as it is loaded is not modelled",
        ),
        (
            "draft_model",
            {key: value for key, value in SMALL_QWEN.items() if key != "intermediate_size"},
            None,
            {},
            "`draft_config.intermediate_size` is left out",
        ),
        (
            "eagle3",
            EAGLE3,
            headers.stored(eagle3_headers({**EAGLE3, "intermediate_size": 12288})),
            {},
            "no tensor of its size for 3 of its parts",
        ),
    ],
)  # fmt: skip
def test_a_draft_that_is_not_known_leaves_its_targets_weights_alone(
    method: str, draft: Config, tensors: TensorInventory | None, said: Config, why: str
) -> None:
    target = QWEN if method == "draft_model" else LLAMA
    plan = planned(method, target, draft, TP2, tensors, **said)
    alone = plan_weights(facts(config=target, flags=TP2, gpu="H100"))
    assert isinstance(plan, WeightPlan), plan
    assert isinstance(alone, WeightPlan)
    assert why in plan.draft_unknown
    assert (plan.stage_bytes, plan.draft_bytes) == (alone.stage_bytes, (0,))


def test_a_draft_beside_several_stages_is_unknown() -> None:
    said = planned("eagle3", LLAMA, EAGLE3, {"pipeline_parallel_size": 2}, usual("eagle3"))
    assert said == "the weights of a draft model beside several pipeline stages are not modelled"
