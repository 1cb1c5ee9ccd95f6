"""Headers of checkpoints as the usual programs write them, from config.json alone.

The shapes are those of the formats themselves: Hugging Face's names, compressed-tensors, ModelOpt, AWQ and GPTQ.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from kvheadroom.capacity.stored_model import StoredTensor, TensorInventory
from kvheadroom.capacity.weights.parts import Blueprint, Experts, Linear, Tensor, Vocabulary
from kvheadroom.capacity.weights.schemes import Scheme
from kvheadroom.capacity.weights.shares import bits_of
from kvheadroom.sources.safetensors import inventory

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> type and shape."""
Form = Callable[[str, int, int], Shapes]
"""Name of a module, its outputs and inputs -> its tensors."""

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

BITS = {
    "BF16": 16, "F16": 16, "F32": 32, "F8_E4M3": 8, "I8": 8, "U8": 8, "I32": 32, "I64": 64, "BOOL": 8,
}  # fmt: skip


def stored(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> TensorInventory:
    """What reading these headers gives."""
    return inventory(
        [
            StoredTensor(name, dtype, shape, math.prod(shape) * BITS[dtype] // 8)
            for name, (dtype, shape) in shapes.items()
        ]
    )


def plain(dtype: str = "BF16") -> Form:
    return lambda name, out, into: {f"{name}.weight": (dtype, (out, into))}


def fp8_channels(name: str, out: int, into: int) -> Shapes:
    """compressed-tensors: 8 bits with a scale for each output."""
    return {f"{name}.weight": ("F8_E4M3", (out, into)), f"{name}.weight_scale": ("F32", (out, 1))}


def in_8_bits(kind: str, scale: str) -> Form:
    """compressed-tensors: numbers of 8 bits with a scale for each output, which need not be of 32 bits."""
    return lambda name, out, into: {
        f"{name}.weight": (kind, (out, into)),
        f"{name}.weight_scale": (scale, (out, 1)),
    }


def in_blocks(scale: str) -> Form:
    """compressed-tensors: 8 bits with a scale for each block of 128 x 128."""
    return lambda name, out, into: {
        f"{name}.weight": ("F8_E4M3", (out, into)),
        f"{name}.weight_scale": (scale, (-(-out // 128), -(-into // 128))),
    }


def mxfp8(name: str, out: int, into: int) -> Shapes:
    """ModelOpt: 8 bits with a scale of 8 bits for 32 of them."""
    return {f"{name}.weight": ("F8_E4M3", (out, into)), f"{name}.weight_scale": ("U8", (out, into // 32))}


def fp8_tensor(name: str, out: int, into: int) -> Shapes:
    """ModelOpt: 8 bits with a scale for all, and one for what comes in."""
    scales = {f"{name}.{each}": ("F32", ()) for each in ("weight_scale", "input_scale")}
    return {f"{name}.weight": ("F8_E4M3", (out, into)), **scales}


def packed(bits: int, group: int) -> Form:
    """compressed-tensors: whole numbers packed into 32 bits along the inputs."""

    def form(name: str, out: int, into: int) -> Shapes:
        return {
            f"{name}.weight_packed": ("I32", (out, into * bits // 32)),
            f"{name}.weight_scale": ("BF16", (out, into // group)),
            f"{name}.weight_shape": ("I64", (2,)),
        }

    return form


def nvfp4(name: str, out: int, into: int) -> Shapes:
    """compressed-tensors: two numbers of 4 bits in a byte, a scale for 16 of them."""
    return {
        f"{name}.weight_packed": ("U8", (out, into // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (out, into // 16)),
        f"{name}.weight_global_scale": ("F32", (1,)),
        f"{name}.input_global_scale": ("F32", (1,)),
    }


def nvfp4_modelopt(name: str, out: int, into: int) -> Shapes:
    """ModelOpt's names for the same."""
    return {
        f"{name}.weight": ("U8", (out, into // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (out, into // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
        f"{name}.input_scale": ("F32", ()),
    }


def awq(group: int) -> Form:
    """4 bits packed along the outputs, with zero points."""

    def form(name: str, out: int, into: int) -> Shapes:
        return {
            f"{name}.qweight": ("I32", (into, out // 8)),
            f"{name}.qzeros": ("I32", (into // group, out // 8)),
            f"{name}.scales": ("F16", (into // group, out)),
        }

    return form


def gptq(group: int, bits: int = 4) -> Form:
    """Whole numbers packed along the inputs, with zero points and the order of the inputs."""

    def form(name: str, out: int, into: int) -> Shapes:
        return {
            f"{name}.qweight": ("I32", (into * bits // 32, out)),
            f"{name}.qzeros": ("I32", (into // group, out * bits // 32)),
            f"{name}.scales": ("F16", (into // group, out)),
            f"{name}.g_idx": ("I32", (into,)),
        }

    return form


def decoder(
    config: Mapping[str, Any], form_of: Callable[[str], Form], *, dtype: str = "BF16", prefix: str = "model."
) -> Shapes:
    """A Llama, Qwen2, Qwen3 or one of their mixtures of experts; `form_of` gives the form of a module by its name."""
    found: Shapes = {}
    hidden, rows = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kind = config["architectures"][0]
    # Qwen2's class knows no head_dim.
    size = (config.get("head_dim") if kind != "Qwen2ForCausalLM" else None) or hidden // heads

    def matrix(name: str, out: int, into: int) -> None:
        found.update(form_of(name)(name, out, into))

    def vector(name: str, length: int) -> None:
        found[name] = (dtype, (length,))

    found[f"{prefix}embed_tokens.weight"] = (dtype, (rows, hidden))
    for layer in _layers(config, prefix):
        for each, out in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{layer}.self_attn.{each}_proj", out * size, hidden)
            if kind == "Qwen2ForCausalLM":
                vector(f"{layer}.self_attn.{each}_proj.bias", out * size)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads * size)
        if kind in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
            vector(f"{layer}.self_attn.q_norm.weight", size)
            vector(f"{layer}.self_attn.k_norm.weight", size)
        vector(f"{layer}.input_layernorm.weight", hidden)
        vector(f"{layer}.post_attention_layernorm.weight", hidden)
        if "num_experts" in config:
            matrix(f"{layer}.mlp.gate", config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                _mlp(matrix, f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        else:
            _mlp(matrix, f"{layer}.mlp", hidden, config["intermediate_size"])
    vector(f"{prefix}norm.weight", hidden)
    if not config.get("tie_word_embeddings"):
        matrix("lm_head", rows, hidden)
    return found


def _layers(config: Mapping[str, Any], prefix: str) -> Iterator[str]:
    return (f"{prefix}layers.{number}" for number in range(config["num_hidden_layers"]))


def _mlp(matrix: Callable[[str, int, int], None], name: str, hidden: int, inner: int) -> None:
    matrix(f"{name}.gate_proj", inner, hidden)
    matrix(f"{name}.up_proj", inner, hidden)
    matrix(f"{name}.down_proj", hidden, inner)


def written_out(rows: list[list[Any]]) -> Shapes:
    """Rows of checkpoint_shapes.json: `{0-3}` and `{1,3}` in a name stand for several numbers."""
    found: Shapes = {}
    for pattern, dtype, shape in rows:
        pieces = re.split(r"\{(.*?)\}", pattern)
        choices = [_numbers(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        for name in product(*choices):
            found["".join(name)] = (dtype, tuple(shape))
    return found


def of_blueprint(blueprint: Blueprint, scheme: Scheme, *, dtype: str, fused: bool) -> Shapes:
    """Every part under vLLM's own name, in the model's dtype or as few bits as the scheme says, without scales.

    Args:
        fused: matrices that vLLM holds as one are one, else each output is a tensor.
    """
    found: Shapes = {}

    def matrix(name: str, out: int, into: int, bits: int | None) -> None:
        if bits is None or bits == 8:
            found[f"{name}.weight"] = (dtype if bits is None else "F8_E4M3", (out, into))
        else:
            found[f"{name}.weight"] = ("U8", (out, into // 2))

    placed = [("", part) for _, parts in blueprint.around for part in parts]
    placed += [
        (f"model.layers.{number}.", part) for number, parts in enumerate(blueprint.layers) for part in parts
    ]
    for prefix, part in placed:
        name = prefix + part.name
        if isinstance(part, Tensor):
            found[name] = (dtype, part.shape)
        elif isinstance(part, Vocabulary):
            matrix(name, part.rows, part.width, bits_of(part, scheme, prefix))
            if part.bias:
                found[f"{name}.bias"] = (dtype, (part.rows,))
        elif isinstance(part, Experts):
            ups = 2 if part.gated else 1
            for expert in range(part.count):
                bits = bits_of(part, scheme, prefix)
                for each in ("gate_proj", "up_proj")[-ups:]:
                    matrix(f"{name}.{expert}.{each}", part.intermediate, part.hidden, bits)
                matrix(f"{name}.{expert}.down_proj", part.hidden, part.intermediate, bits)
            if part.bias:
                found[f"{name}.gate_up_proj_bias"] = (dtype, (part.count, ups * part.intermediate))
                found[f"{name}.down_proj_bias"] = (dtype, (part.count, part.hidden))
        elif isinstance(part, Linear):
            bits = bits_of(part, scheme, prefix)
            parent = part.name.rpartition(".")[0]
            outs = (
                [(name, sum(out.size for out in part.outs))]
                if fused
                else [(f"{prefix}{parent}{'.' if parent else ''}{out.name}", out.size) for out in part.outs]
            )
            for out_name, size in outs:
                unused = next(each for each in _variants(out_name) if f"{each}.weight" not in found)
                matrix(unused, size, part.inputs, bits)
                if part.bias:
                    found[f"{unused}.bias"] = (dtype, (size,))
    return found


def _variants(name: str) -> Iterator[str]:
    """The name, and others where two parts have outputs of one name."""
    while True:
        yield name
        name += "_"


def _numbers(text: str) -> list[str]:
    ends = (part.split("-") for part in text.split(","))
    return [
        str(number) for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)
    ]
