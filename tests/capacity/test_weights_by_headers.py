"""The weights of checkpoints whose headers tell more than config.json, or something else.

`CREATED` holds the bytes that vLLM 0.33.0's own model classes create on the first rank, under a made-up CUDA platform
(H100), from these config.json and, for AWQ and GPTQ, with files of these headers in the folder.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.facts import Draft, EngineFacts
from kvheadroom.capacity.families.multimodal import text_section
from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.model_config import ModelConfig
from kvheadroom.capacity.rank_weights import RankWeights, weights_of
from kvheadroom.capacity.settings_resolution import compute_dtype
from kvheadroom.capacity.stored_model import TensorInventory
from kvheadroom.capacity.weights import WeightPlan, plan_weights
from kvheadroom.capacity.weights.builders import Model
from kvheadroom.capacity.weights.contradiction import AnotherCheckpoint
from kvheadroom.capacity.weights.quantization import read_scheme
from kvheadroom.capacity.weights.registry import BUILDS
from tests.capacity import checkpoint_headers as headers
from tests.capacity.checkpoint_headers import LLAMA, Form, Shapes
from tests.capacity.facts_builder import facts
from tests.capacity.truth import ROWS, facts_of

Config = dict[str, Any]

EXPERTS: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def whole_numbers(bits: int, group: int) -> Config:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}


FP8_CHANNELS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
INT8_CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def groups(*pairs: tuple[str, Config], ignore: tuple[str, ...] = ()) -> Config:
    """compressed-tensors with a scheme for each group of layers."""
    inputs: dict[str, Config | None] = {
        "channel": PER_TOKEN,
        "tensor_group": {**NVFP4, "dynamic": "local"},
        "group": None,
        "block": {**PER_TOKEN, "strategy": "group", "group_size": 128},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", *ignore],
        "config_groups": {
            f"group_{number}": {
                "targets": [target],
                "weights": weights,
                "input_activations": taken and {**taken, "type": weights["type"]},
            }
            for number, (target, weights) in enumerate(pairs)
            for taken in (inputs[weights["strategy"]],)
        },
    }


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"]}


def by(*pairs: tuple[str, Form], default: Form | None = None) -> Callable[[str], Form]:
    """The first form whose word stands in a module's name."""

    def form_of(name: str) -> Form:
        return next((form for word, form in pairs if word in name), default or headers.plain())

    return form_of


F16 = headers.plain("F16")
CHECKPOINTS: dict[str, tuple[Config, Config, Callable[[str], Form]]] = {
    "two groups": (
        LLAMA,
        groups(("re:.*mlp.*", whole_numbers(4, 128)), ("re:.*self_attn.*", FP8_CHANNELS)),
        by(("mlp", headers.packed(4, 128)), ("self_attn", headers.fp8_channels)),
    ),
    "MLP in NVFP4": (
        LLAMA,
        groups(("re:.*mlp.*", NVFP4), ignore=("re:.*self_attn.*",)),
        by(("mlp", headers.nvfp4)),
    ),
    "4 and 8 bits": (
        LLAMA,
        groups(
            ("re:.*(gate|up)_proj", whole_numbers(4, 128)),
            ("re:.*down_proj", whole_numbers(8, 128)),
            ignore=("re:.*self_attn.*",),
        ),
        by(("down_proj", headers.packed(8, 128)), ("mlp", headers.packed(4, 128))),
    ),
    "scales in 16 bits": (
        LLAMA,
        groups(("re:.*mlp.*", whole_numbers(4, 128)), ("re:.*self_attn.*", FP8_CHANNELS)),
        by(("mlp", headers.packed(4, 128)), ("self_attn", headers.in_8_bits("F8_E4M3", "BF16"))),
    ),
    "scales of blocks in 16 bits": (
        LLAMA,
        groups(("re:.*mlp.*", BLOCKS), ("re:.*self_attn.*", whole_numbers(4, 128))),
        by(("mlp", headers.in_blocks("BF16")), ("self_attn", headers.packed(4, 128))),
    ),
    "ModelOpt's MXFP8": (
        LLAMA,
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["lm_head"]},
        by(("layers", headers.mxfp8)),
    ),
    "ModelOpt mixed": (
        LLAMA,
        MIXED,
        by(("mlp", headers.nvfp4_modelopt), ("self_attn", headers.fp8_tensor)),
    ),
    "AWQ but the first layer": (
        LLAMA,
        AWQ,
        by(("layers.0.", F16), ("layers", headers.awq(128)), default=F16),
    ),
    "GPTQ but an MLP": (
        LLAMA,
        GPTQ,
        by(("layers.1.mlp", F16), ("layers", headers.gptq(128)), default=F16),
    ),
    "experts in NVFP4": (
        EXPERTS,
        groups(("re:.*experts.*", NVFP4), ("re:.*self_attn.*", FP8_CHANNELS), ignore=("re:.*mlp.gate$",)),
        by(("experts", headers.nvfp4), ("self_attn", headers.fp8_channels)),
    ),
    "experts with scales in 16 bits": (
        EXPERTS,
        groups(
            ("re:.*experts.*", FP8_CHANNELS),
            ("re:.*self_attn.*", whole_numbers(4, 128)),
            ignore=("re:.*mlp.gate$",),
        ),
        by(("experts", headers.in_8_bits("F8_E4M3", "BF16")), ("self_attn", headers.packed(4, 128))),
    ),
    "experts in whole numbers of 8 bits": (
        EXPERTS,
        {**groups(("Linear", INT8_CHANNELS), ignore=("re:.*mlp.gate$",)), "format": "int-quantized"},
        lambda name: (
            headers.plain()
            if name.endswith("mlp.gate") or "layers" not in name
            else headers.in_8_bits("I8", "BF16")
        ),
    ),
    "experts packed in 8 bits": (
        EXPERTS,
        {**groups(("Linear", whole_numbers(8, 128)), ignore=("re:.*mlp.gate$",)), "format": "pack-quantized"},
        lambda name: (
            headers.plain() if name.endswith("mlp.gate") or "layers" not in name else headers.packed(8, 128)
        ),
    ),
    "experts in GPTQ of 8 bits": (
        EXPERTS,
        {**GPTQ, "bits": 8},
        lambda name: F16 if name.endswith("mlp.gate") or "layers" not in name else headers.gptq(128, 8),
    ),
    "experts in 4 bits": (
        EXPERTS,
        groups(
            ("re:.*experts.*", whole_numbers(4, 32)),
            ("re:.*self_attn.*", FP8_CHANNELS),
            ignore=("re:.*mlp.gate$",),
        ),
        by(("experts", headers.packed(4, 32)), ("self_attn", headers.fp8_channels)),
    ),
    "experts mixed": (
        EXPERTS,
        MIXED,
        by(("experts", headers.nvfp4_modelopt), ("self_attn", headers.fp8_tensor)),
    ),
    "experts in GPTQ": (
        EXPERTS,
        GPTQ,
        by(
            ("mlp.gate", F16),
            ("self_attn.o", F16),
            ("layers", headers.gptq(128)),
            default=F16,
        ),
    ),
}
TP2, TP4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}
SPREAD = {**TP2, "enable_expert_parallel": True}
CREATED: list[tuple[str, Config, int]] = [
    ("two groups", {}, 2367021156),
    ("two groups", TP2, 1183547492),
    ("two groups", TP4, 591810660),
    ("scales in 16 bits", {}, 2367021156),
    ("scales in 16 bits", TP2, 1183547492),
    ("scales of blocks in 16 bits", {}, 2497048676),
    ("scales of blocks in 16 bits", TP2, 1248544868),
    ("ModelOpt's MXFP8", {}, 2551226384),
    ("ModelOpt's MXFP8", TP2, 1275633680),
    ("experts with scales in 16 bits", {}, 1415730276),
    ("experts with scales in 16 bits", TP2, 708072548),
    ("experts with scales in 16 bits", SPREAD, 707941476),
    ("experts in whole numbers of 8 bits", {}, 1434072100),
    ("experts in whole numbers of 8 bits", TP2, 717251620),
    ("experts packed in 8 bits", {}, 1436505444),
    ("experts packed in 8 bits", TP2, 718329188),
    ("experts in GPTQ of 8 bits", {}, 1438209024),
    ("experts in GPTQ of 8 bits", TP2, 719246336),
    ("MLP in NVFP4", {}, 2467340372),
    ("MLP in NVFP4", TP2, 1233690708),
    ("4 and 8 bits", {}, 2509545572),
    ("4 and 8 bits", TP2, 1254793316),
    ("ModelOpt mixed", {}, 2383454320),
    ("ModelOpt mixed", TP2, 1191747696),
    ("AWQ but the first layer", {}, 2650906624),
    ("AWQ but the first layer", TP2, 1325473792),
    ("GPTQ but an MLP", {}, 2588811264),
    ("GPTQ but an MLP", TP2, 1294426112),
    ("experts in NVFP4", {}, 1367553828),
    ("experts in NVFP4", TP2, 683861796),
    ("experts in NVFP4", SPREAD, 683861412),
    ("experts in 4 bits", {}, 1367553316),
    ("experts in 4 bits", TP2, 683861284),
    ("experts in 4 bits", SPREAD, 683861156),
    ("experts mixed", {}, 1367496512),
    ("experts mixed", TP2, 683824960),
    ("experts mixed", SPREAD, 683824576),
    ("experts in GPTQ", {}, 1367938048),
    ("experts in GPTQ", TP2, 684110848),
    ("experts in GPTQ", SPREAD, 684045312),
]

REAL: dict[str, Any] = json.loads((Path(__file__).parent / "checkpoints.json").read_text())
# The names of the indexes of the same models, and the shapes that make their `total_size` to the byte.
SHAPES: dict[str, Any] = json.loads((Path(__file__).parent / "checkpoint_shapes.json").read_text())


def planned(
    config: Config, shapes: Shapes | None, flags: Mapping[str, Any] | None = None
) -> WeightPlan | str:
    known = facts(config=config, flags=flags, gpu="H100")
    assert known.model_files is not None
    tensors = None if shapes is None else headers.stored(shapes)
    return plan_weights(replace(known, model_files=replace(known.model_files, tensors=tensors)))


def checkpoint(name: str) -> tuple[Config, Shapes]:
    model, scheme, form_of = CHECKPOINTS[name]
    dtype = "F16" if scheme["quant_method"] in ("awq", "gptq") else "BF16"
    config = {
        **model,
        "quantization_config": scheme,
        "torch_dtype": "float16" if dtype == "F16" else "bfloat16",
    }
    return config, headers.decoder(config, form_of, dtype=dtype)


@pytest.mark.parametrize(("name", "flags", "created"), CREATED)
def test_layers_that_only_headers_tell_are_as_vllms_own_classes_create_them(
    name: str, flags: Config, created: int
) -> None:
    config, shapes = checkpoint(name)
    plan = planned(config, shapes, flags)
    assert isinstance(plan, WeightPlan), plan
    assert plan.stage_bytes == (created,)
    assert (plan.basis, plan.doubt) == ("headers", "")
    assert plan.total_bytes == headers.stored(shapes).total_bytes


@pytest.mark.parametrize("flags", [{}, TP2])
def test_outputs_that_a_checkpoint_holds_as_one_matrix_have_a_scale_each(flags: Config) -> None:
    config, shapes = checkpoint("ModelOpt mixed")
    apart = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    fused = {name: each for name, each in shapes.items() if not any(f".{out}." in name for out in apart)}
    for layer in range(2):
        fused |= headers.fp8_tensor(f"model.layers.{layer}.self_attn.qkv_proj", 4096 + 2 * 1024, 4096)
        fused |= headers.nvfp4_modelopt(f"model.layers.{layer}.mlp.gate_up_proj", 2 * 14336, 4096)
    plan, made = planned(config, fused, flags), planned(config, shapes, flags)
    assert isinstance(plan, WeightPlan), plan
    assert isinstance(made, WeightPlan)
    assert (plan.stage_bytes, plan.doubt) == (made.stage_bytes, "")


@pytest.mark.parametrize("name", ["two groups", "MLP in NVFP4", "ModelOpt mixed", "experts mixed"])
def test_without_headers_layers_that_only_they_tell_are_unknown(name: str) -> None:
    config, _ = checkpoint(name)
    assert "not modelled" in str(planned(config, None))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("flags", [{}, TP2, {**TP2, "pipeline_parallel_size": 2}])
def test_headers_of_real_checkpoints_make_what_config_json_makes(name: str, flags: Config) -> None:
    config, shapes = REAL[name]["config"], headers.written_out(SHAPES[name])
    made, plan = planned(config, None, flags), planned(config, shapes, flags)
    assert isinstance(made, WeightPlan)
    assert isinstance(plan, WeightPlan), plan
    assert plan.stage_bytes == made.stage_bytes
    assert (plan.basis, plan.doubt, plan.not_loaded_bytes) == ("headers", "", 0)
    assert plan.total_bytes == REAL[name]["total_size"]


MOST_EXPERTS = 2_000  # of a whole model, for the time that the test takes
USUAL = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")


def is_usual(config: Config) -> bool:
    """Whether `headers.decoder` writes down all of it."""
    unusual = ("attention_bias", "mlp_bias", "mlp_only_layers", "quantization_config")
    experts = config.get("num_experts", 0) * config.get("num_hidden_layers", 0)
    return (
        config["architectures"][0]
        in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
        and all(key in config for key in USUAL)
        and not any(config.get(key) for key in unusual)
        and experts <= MOST_EXPERTS
        and config.get("decoder_sparse_step", 1) == 1
    )


def test_headers_generated_for_the_planners_own_rows_make_what_config_json_makes() -> None:
    compared = set()
    for row in ROWS:
        if row["expected"].get("refused") or not is_usual(row["config"]):
            continue
        known = facts_of(row)
        made = plan_weights(known)
        if isinstance(made, str):
            continue
        assert known.model_files is not None
        files = replace(known.model_files, tensors=headers.stored(headers.decoder(row["config"], by())))
        plan = plan_weights(replace(known, model_files=files))
        assert isinstance(plan, WeightPlan), (row["id"], plan)
        assert (plan.stage_bytes, plan.basis, plan.doubt) == (made.stage_bytes, "headers", ""), row["id"]
        compared.add((row["config"]["architectures"][0], plan.stage_bytes))
    assert len(compared) > 100


# Two parts of one name there, or an output without the bias that its matrix has: in BF16, with a tensor for each output, the
# sums agree, but no more.
NOT_BY_OWN_NAMES = {"Phi3VForCausalLM", "WhisperForConditionalGeneration", "Zamba2ForCausalLM"}


def of_every_architecture() -> dict[tuple[str, str], EngineFacts]:
    """The smallest row of each architecture and quantization that is planned, by its experts and layers."""
    smallest: dict[tuple[str, str], tuple[int, EngineFacts]] = {}
    for row in ROWS:
        known = facts_of(row)
        if known.model is None or row["expected"].get("refused") or known.model.architecture not in BUILDS:
            continue
        key = (known.model.architecture, known.model.quantization or "")
        size = known.model.num_layers * (known.model.num_experts or 1)
        if size < smallest.get(key, (MOST_EXPERTS, known))[0] and isinstance(plan_weights(known), WeightPlan):
            smallest[key] = (size, known)
    return {key: known for key, (_, known) in smallest.items()}


@pytest.mark.parametrize(("fused", "dtype"), [(False, "BF16"), (True, "BF16"), (False, "F32")])
def test_tensors_under_vllms_own_names_are_found_in_every_architecture(*, fused: bool, dtype: str) -> None:
    compared = set()
    for key, known in of_every_architecture().items():
        model, files = known.model, known.model_files
        assert model is not None
        assert files is not None
        if model.architecture in NOT_BY_OWN_NAMES and (fused or dtype != "BF16"):
            continue
        text, whole = text_section(model.architecture, files.config), ModelConfig(files.config)
        blueprint = BUILDS[model.architecture](Model(text, whole, model.stack, compute_dtype(known, model)))
        shapes = headers.of_blueprint(blueprint, read_scheme(whole, text), dtype=dtype, fused=fused)
        shapes["mtp.layers.0.w"] = (dtype, (1,))
        made = plan_weights(known)
        plan = plan_weights(replace(known, model_files=replace(files, tensors=headers.stored(shapes))))
        assert isinstance(made, WeightPlan)
        assert isinstance(plan, WeightPlan), (key, plan)
        assert (plan.stage_bytes, plan.basis, plan.doubt) == (made.stage_bytes, "headers", ""), key
        compared.add(model.architecture)
    assert len(compared) > 100


def test_tensors_kept_in_32_bits_are_cast_however_much_they_are() -> None:
    shapes = headers.decoder(
        EXPERTS, by(("mlp.gate", headers.plain("F32")), ("lm_head", headers.plain("F32")))
    )
    for name, (_, shape) in shapes.items():
        if "norm" in name or "embed" in name:
            shapes[name] = ("F32", shape)
    plan, made = planned(EXPERTS, shapes), planned(EXPERTS, None)
    assert isinstance(plan, WeightPlan), plan
    assert isinstance(made, WeightPlan)
    assert (plan.stage_bytes, plan.doubt) == (made.stage_bytes, "")
    assert plan.total_bytes > made.total_bytes * 1.5


def test_a_shared_expert_as_large_as_the_others_packed_is_not_taken_for_them() -> None:
    # 16 experts of 768 in 4 bits have as many words of 32 bits as half as many numbers in 8 bits.
    shared = 6144
    config = {
        **EXPERTS,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": shared,
        "quantization_config": GPTQ,
        "torch_dtype": "float16",
    }
    del config["head_dim"]
    form = headers.gptq(128)
    shapes = headers.decoder(config, by(("mlp.gate", F16), ("layers", form), default=F16), dtype="F16")
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for each, size in (("q", 2048), ("k", 256), ("v", 256)):
            shapes[f"{prefix}.self_attn.{each}_proj.bias"] = ("F16", (size,))
        shapes |= form(f"{prefix}.mlp.shared_expert.gate_proj", shared, 2048)
        shapes |= form(f"{prefix}.mlp.shared_expert.up_proj", shared, 2048)
        shapes |= form(f"{prefix}.mlp.shared_expert.down_proj", 2048, shared)
        shapes[f"{prefix}.mlp.shared_expert_gate.weight"] = ("F16", (1, 2048))
    for flags in ({}, TP2):
        plan, made = planned(config, shapes, flags), planned(config, None, flags)
        assert isinstance(plan, WeightPlan), plan
        assert isinstance(made, WeightPlan), made
        assert (plan.stage_bytes, plan.doubt) == (made.stage_bytes, "")


PACKED = groups(("Linear", whole_numbers(4, 128)))


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        (groups(("Linear", {**whole_numbers(4, 128), "actorder": "group"})), "activation order 'group'"),
        (groups(("Linear", {**whole_numbers(4, 128), "actorder": "dynamic"})), "activation order 'dynamic'"),
        (
            {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask", "targets": ["Linear"]}},
            "with sparsity",
        ),
        ({**GPTQ, "desc_act": True}, "GPTQ with `desc_act`"),
    ],
)
def test_a_checkpoint_that_vllm_refuses_is_not_counted_by_its_headers(scheme: Config, why: str) -> None:
    config = {**LLAMA, "quantization_config": scheme}
    said = planned(config, headers.decoder(config, by(("layers", headers.packed(4, 128)))))
    assert str(said).startswith("vLLM takes no ")
    assert why in str(said)


@pytest.mark.parametrize("order", ["weight", "static"])
def test_an_order_of_activations_that_needs_no_index_changes_nothing(order: str) -> None:
    ordered = groups(("Linear", {**whole_numbers(4, 128), "actorder": order}))
    plans = [
        planned({**LLAMA, "quantization_config": {**scheme, "format": "pack-quantized"}}, None, TP2)
        for scheme in (PACKED, ordered)
    ]
    assert isinstance(plans[0], WeightPlan)
    assert plans[1] == plans[0]


def test_gptq_with_desc_act_and_one_group_is_gptq_without() -> None:
    gptq = {**LLAMA, "quantization_config": {**GPTQ, "group_size": -1}}
    ordered = {**LLAMA, "quantization_config": {**GPTQ, "group_size": -1, "desc_act": True}}
    assert isinstance(planned(gptq, None), WeightPlan)
    assert planned(ordered, None) == planned(gptq, None)


TP8 = {"tensor_parallel_size": 8}
BY_BLOCKS = {**groups(("Linear", BLOCKS)), "format": "float-quantized"}
BLOCKS_AND_PACKED = groups(("re:.*mlp.*", BLOCKS), ("re:.*self_attn.*", whole_numbers(4, 128)))


@pytest.mark.parametrize(
    ("inner", "heads", "scheme", "flags", "why"),
    [
        # 11008 / 4 = 2752 = 21.5 x 128: vLLM's "input_size_per_partition = 2752 is not divisible by ... block_k = 128".
        (11008, 8, FP8, TP4, "its inputs (2752) are no multiple of the 128 that share a scale"),
        # Outputs of several in one: only where config.json has no `weight_block_size`.
        (14336, 4, BY_BLOCKS, TP8, "its outputs (64) are no multiple of the 128 that share a scale"),
        (11008, 8, BLOCKS_AND_PACKED, TP4, "would cut a block of model.layers.0.mlp."),
    ],
)
def test_a_slice_that_cuts_a_block_of_scales_is_refused_as_by_vllm(
    inner: int, heads: int, scheme: Config, flags: Config, why: str
) -> None:
    config = {
        **LLAMA,
        "intermediate_size": inner,
        "num_key_value_heads": heads,
        "head_dim": 128 if heads == LLAMA["num_key_value_heads"] else 64,
        "quantization_config": scheme,
    }
    packed = headers.packed(4, 128) if scheme is BLOCKS_AND_PACKED else headers.in_blocks("F32")
    shapes = headers.decoder(config, by(("mlp", headers.in_blocks("F32")), ("layers", packed)))
    assert why in str(planned(config, shapes, flags))
    assert isinstance(planned(config, shapes), WeightPlan)


def test_outputs_of_several_in_one_may_cut_a_block_where_config_json_has_its_size() -> None:
    config = {**LLAMA, "num_key_value_heads": 4, "head_dim": 64, "quantization_config": FP8}
    assert isinstance(planned(config, None, TP4), WeightPlan)


def test_the_scales_of_caches_are_not_counted_with_the_matrix_that_they_stand_beside() -> None:
    config, shapes = checkpoint("two groups")
    for layer in range(2):
        for each in "kv":
            shapes[f"model.layers.{layer}.self_attn.{each}_proj.{each}_scale"] = ("F32", ())
    plan = planned(config, shapes)
    assert isinstance(plan, WeightPlan), plan
    assert (plan.stage_bytes, plan.doubt) == ((2367021156,), "")


def test_modelopts_own_file_tells_what_a_named_method_does() -> None:
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    own_file = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": said}
    plans = [
        planned({**LLAMA, "quantization_config": scheme}, None, TP2)
        for scheme in (own_file, {**own_file, "quant_method": "modelopt"})
    ]
    assert isinstance(plans[0], WeightPlan), plans[0]
    assert plans[0] == plans[1]
    known = facts(config={**LLAMA, "quantization_config": own_file}, gpu="H100")
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    assert layout.kv_dtype == "fp8_e4m3"


def with_files(config: Config, shapes: Shapes, flags: Mapping[str, Any]) -> EngineFacts:
    known = facts(config=config, flags=flags, gpu="H100", weights_bytes=headers.stored(shapes).total_bytes)
    assert known.model_files is not None
    return replace(known, model_files=replace(known.model_files, tensors=headers.stored(shapes)))


def test_no_even_share_is_made_of_what_vllm_refuses() -> None:
    config = {
        **LLAMA,
        "quantization_config": groups(("Linear", {**whole_numbers(4, 128), "actorder": "group"})),
    }
    shapes = headers.decoder(config, by(("layers", headers.packed(4, 128))))
    said = weights_of(with_files(config, shapes, TP2))
    assert said == "vLLM takes no compressed-tensors checkpoint with the activation order 'group' any more"


def test_an_even_share_of_a_checkpoint_that_config_json_contradicts_is_doubted() -> None:
    weights = weights_of(with_files(LLAMA, headers.decoder(LLAMA, by(("mlp", headers.nvfp4))), TP2))
    assert isinstance(weights, RankWeights)
    assert weights.plan is None
    assert weights.doubt.startswith("model.layers.0.mlp.gate_up_proj is stored in U8")


def test_another_vocabulary_is_told_with_what_does_not_fit() -> None:
    shapes = headers.decoder({**LLAMA, "vocab_size": 140_000}, by())
    said = planned(LLAMA, shapes)
    assert isinstance(said, AnotherCheckpoint)
    assert "no tensor of its size for 2 of its parts: embed_tokens, lm_head" in said
    assert (
        "2 tensors are of no part that config.json makes, 2.29 GB: model.embed_tokens.weight, lm_head.weight"
        in said
    )


def test_tensors_of_no_part_are_named_and_not_counted() -> None:
    shapes = headers.decoder(LLAMA, by())
    shapes["model.layers.1.extra.weight"] = ("BF16", (1000, 10))
    plan, made = planned(LLAMA, shapes), planned(LLAMA, None)
    assert isinstance(plan, WeightPlan), plan
    assert isinstance(made, WeightPlan)
    assert plan.stage_bytes == made.stage_bytes
    assert plan.not_loaded_bytes == 20_000
    assert plan.doubt == (
        "1 tensor is of no part that config.json makes, 20,000 bytes: model.layers.1.extra.weight; they are not counted"
    )


def test_buffers_that_vllm_makes_itself_are_no_strangers() -> None:
    shapes = headers.decoder(LLAMA, by())
    for layer in range(2):
        shapes[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = ("F32", (64,))
        shapes[f"model.layers.{layer}.self_attn.k_scale"] = ("F32", ())
    plan = planned(LLAMA, shapes)
    assert isinstance(plan, WeightPlan), plan
    assert plan.doubt == ""


def test_what_vllm_makes_in_8_bits_is_counted_so_and_told_where_it_is_stored_otherwise() -> None:
    config = {**LLAMA, "quantization_config": FP8}
    plan = planned(config, headers.decoder(LLAMA, by()))
    assert isinstance(plan, WeightPlan), plan
    # vLLM's own classes, with these files in the folder.
    assert plan.stage_bytes == (2_537_701_392,)
    assert "8 matrices are stored in 16 bits or more although config.json quantizes them" in plan.doubt


def test_what_vllm_makes_packed_in_8_bits_is_not_made_of_16_bits() -> None:
    scheme = {
        **groups(("Linear", whole_numbers(8, 128))),
        "format": "pack-quantized",
    }
    config = {**LLAMA, "quantization_config": scheme}
    plan = planned(config, headers.decoder(LLAMA, by(("self_attn", headers.packed(8, 128)))), TP2)
    plain, made = planned(LLAMA, None, TP2), planned(config, None, TP2)
    assert isinstance(plan, WeightPlan), plan
    assert isinstance(plain, WeightPlan)
    assert isinstance(made, WeightPlan), made
    assert (
        "4 matrices are stored in another type than config.json says, and are counted as they are"
        in plan.doubt
    )
    mlp = {
        weights: next(term for term in weights.terms if term.name == "mlp").stage_bytes
        for weights in (plan, plain)
    }
    assert mlp[plan] == mlp[plain]
    assert made.stage_bytes < plan.stage_bytes < plain.stage_bytes


def test_8_bits_that_config_json_does_not_speak_of_count_in_the_models_dtype_and_are_told() -> None:
    shapes = headers.decoder(LLAMA, by(("mlp", headers.plain("F8_E4M3"))))
    plan, made = planned(LLAMA, shapes, TP2), planned(LLAMA, None, TP2)
    assert isinstance(plan, WeightPlan), plan
    assert isinstance(made, WeightPlan)
    assert plan.stage_bytes == made.stage_bytes
    assert plan.total_bytes < made.total_bytes
    assert "4 matrices are stored in 8 bits although config.json does not quantize them" in plan.doubt


@pytest.mark.parametrize("form", [headers.nvfp4, headers.fp8_channels, headers.awq(128)])
def test_packed_or_scaled_layers_of_a_plain_config_json_are_unknown(form: Form) -> None:
    said = str(planned(LLAMA, headers.decoder(LLAMA, by(("mlp", form)))))
    assert said.startswith("model.layers.0.mlp.gate_up_proj is stored in ")
    assert said.endswith(", and by config.json vLLM makes it in the model's own dtype")


def test_a_tensor_that_is_missing_is_told_though_the_sums_agree() -> None:
    shapes = headers.decoder(LLAMA, by())
    del shapes["model.norm.weight"]
    plan, made = planned(LLAMA, shapes), planned(LLAMA, None)
    assert isinstance(plan, WeightPlan), plan
    assert isinstance(made, WeightPlan)
    assert plan.stage_bytes == made.stage_bytes
    assert plan.doubt == (
        "no tensor of its size for 1 of its parts: model.norm.weight; the sums agree within 1%"
    )


def test_multi_token_prediction_that_the_checkpoint_has_not_is_told_where_it_would_be_loaded() -> None:
    known = next(
        each
        for row in ROWS
        if (each := facts_of(row)).draft.method == "mtp"
        and not row["expected"].get("refused")
        and isinstance(plan_weights(each), WeightPlan)
    )
    assert known.model is not None
    assert known.model_files is not None

    def doubt(facts: EngineFacts, *names: str) -> str:
        assert facts.model_files is not None
        tensors = TensorInventory(sizes=dict.fromkeys(("model.embed_tokens.weight", *names)))
        plan = plan_weights(replace(facts, model_files=replace(facts.model_files, tensors=tensors)))
        assert isinstance(plan, WeightPlan)
        return plan.doubt

    beyond = f"model.layers.{known.model.num_layers}.mlp.w"
    assert doubt(known).startswith("the checkpoint has no layer of multi-token prediction")
    assert doubt(known, beyond) == ""
    assert doubt(replace(known, draft=Draft())) == ""


def test_what_does_not_fit_is_told_though_the_sums_agree() -> None:
    shapes = headers.decoder(LLAMA, by())
    shapes["model.layers.0.another.weight"] = shapes.pop("model.norm.weight")
    shapes["model.layers.0.extra.weight"] = ("BF16", (7,))
    plan, made = planned(LLAMA, shapes), planned(LLAMA, None)
    assert isinstance(plan, WeightPlan), plan
    assert isinstance(made, WeightPlan)
    assert plan.stage_bytes == made.stage_bytes
    assert plan.doubt == (
        "no tensor of its size for 1 of its parts: model.norm.weight; 2 tensors are of no part that config.json makes, "
        "8,206 bytes: model.layers.0.another.weight, model.layers.0.extra.weight; the sums agree within 1%"
    )


def test_packed_layers_that_config_json_does_not_speak_of_are_counted_as_stored_and_told() -> None:
    config = {
        **LLAMA,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    }
    form_of = by(("layers.0.mlp", headers.fp8_tensor), ("layers", headers.nvfp4_modelopt))
    plan = planned(config, headers.decoder(config, form_of), TP2)
    made = planned(config, headers.decoder(config, by(("layers", headers.nvfp4_modelopt))), TP2)
    assert isinstance(plan, WeightPlan), plan
    assert isinstance(made, WeightPlan), made
    assert made.doubt == ""
    assert plan.doubt == (
        "2 matrices are stored in another type than config.json says, and are counted as they are stored: "
        "model.layers.0.mlp.gate_up_proj, model.layers.0.mlp.down_proj"
    )
    # Half of each of three matrices in 8 bits, in place of 4 bits with 8 bits of scale for 16 numbers.
    numbers = 3 * 4096 * 14336 // 2
    assert plan.stage_bytes[0] - made.stage_bytes[0] == numbers - numbers * 9 // 16


def test_a_part_that_is_quantized_by_half_is_unknown() -> None:
    config, _ = checkpoint("AWQ but the first layer")
    form_of = by(("k_proj", F16), ("layers", headers.awq(128)), default=F16)
    said = planned(config, headers.decoder(config, form_of, dtype="F16"))
    assert said == "model.layers.0.self_attn.qkv_proj is quantized in part, which vLLM does not load"


def test_what_cannot_be_divided_is_unknown() -> None:
    config, shapes = checkpoint("two groups")
    assert "not divisible" in str(planned(config, shapes, {"tensor_parallel_size": 3}))


def test_an_output_layer_beside_a_tied_embedding_is_told_where_both_stand_on_one_stage() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    shapes = headers.decoder(LLAMA, by())
    copy = 128_256 * 4096 * 2
    plan, made = planned(tied, shapes), planned(tied, None)
    assert isinstance(plan, WeightPlan)
    assert isinstance(made, WeightPlan)
    assert (plan.stage_bytes, plan.not_loaded_bytes) == (made.stage_bytes, copy)
    assert "has an output layer (1.05 GB) although config.json ties it to the embedding" in plan.doubt
    staged = planned(tied, shapes, {"pipeline_parallel_size": 2})
    assert isinstance(staged, WeightPlan)
    assert staged.doubt == ""


def test_what_headers_have_otherwise_is_told_with_the_weights() -> None:
    known = facts(config={**LLAMA, "tie_word_embeddings": True}, gpu="H100")
    assert known.model_files is not None
    tensors: TensorInventory = headers.stored(headers.decoder(LLAMA, by()))
    weights = weights_of(replace(known, model_files=replace(known.model_files, tensors=tensors)))
    assert isinstance(weights, RankWeights)
    assert weights.doubt.startswith("the checkpoint has an output layer")
