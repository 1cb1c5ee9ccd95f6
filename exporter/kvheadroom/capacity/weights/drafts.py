"""The weights of draft models that EAGLE trains: a few decoder layers that read the target's hidden states.

Read in vllm/model_executor/models/ of 0.33.0: llama_eagle.py and llama_eagle3.py. What their checkpoint lacks of embedding
and output layer they take from the target (`process_eagle_weight`, models/utils.py; `load_eagle_model`,
v1/worker/gpu/spec_decode/eagle/utils.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.stored_model import TensorInventory
from kvheadroom.capacity.weights.builders import Model
from kvheadroom.capacity.weights.parts import (
    Blueprint,
    CacheScales,
    Parts,
    Stage,
    Tensor,
    Vocabulary,
    gated_mlp,
    norm,
    norms,
    qkv,
    row,
    whole,
)
from kvheadroom.capacity.weights.plain import llama_bias, llama_qkv_bias

_USUAL_HIDDEN_STATES = 3
# The masks and the table between two vocabularies, and the older name of the only layer, as vLLM reads them.
_MASK, _TABLE, _ONLY_LAYER = "t2d", "d2t", "midlayer."
EMBEDDING = "embed_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What the draft's own checkpoint has beside its layers.

    Attributes:
        target_rows: entries of the target's vocabulary.
    """

    embedding: bool
    head: bool
    target_rows: int


BuildDraft = Callable[[Model, Owned], Blueprint]
"""Writes the blueprint of a draft. Raises BadFieldError as readers of caches do, and NotModelledError."""


def owned(tensors: TensorInventory, target_rows: int) -> Owned:
    """By the names of its tensors, as vLLM goes by them."""
    names = [name for name in tensors.sizes if _MASK not in name]
    return Owned(
        embedding=any(EMBEDDING in name for name in names),
        head=any("lm_head" in name for name in names),
        target_rows=target_rows,
    )


def as_loaded(tensors: TensorInventory) -> TensorInventory:
    """The tensors that vLLM reads, under the names that it gives them."""

    def named(name: str) -> str:
        return name.replace(_ONLY_LAYER, "layers.0.")

    read = without(tensors, _MASK)
    return replace(
        read,
        sizes={named(name): size for name, size in read.sizes.items()},
        stored=tuple(replace(tensor, name=named(tensor.name)) for tensor in read.stored),
    )


def without(tensors: TensorInventory, word: str) -> TensorInventory:
    """All but those with the word in their name."""
    return replace(
        tensors,
        sizes={name: size for name, size in tensors.sizes.items() if word not in name},
        stored=tuple(tensor for tensor in tensors.stored if word not in tensor.name),
    )


def head_rows(model: Model) -> int:
    """Entries of the draft's vocabulary."""
    return model.text.count("draft_vocab_size", model.text.count("vocab_size"))


def _eagle(model: Model, own: Owned) -> Blueprint:
    """llama_eagle.py: without a norm before the first layer and after the last, and without an output layer."""
    hidden = model.hidden
    if own.head:
        raise NotModelledError("its checkpoint has an output layer, which vLLM's class for it does not take")
    layers = [
        _layer(model, number, hidden, bias=llama_qkv_bias(model.text), extra=())[1 if number == 0 else 0 :]
        for number in range(model.layers)
    ]
    around = (*_embedding(model, own), whole("projection", "fc", 2 * hidden, hidden))
    return Blueprint(layers=tuple(layers), around=((Stage.LAST, around),))


def _eagle3(model: Model, own: Owned) -> Blueprint:
    """llama_eagle3.py: the first layer reads an embedding and hidden states side by side."""
    text, hidden, rows = model.text, model.hidden, head_rows(model)
    layers = [
        _layer(
            model,
            number,
            hidden if number else 2 * hidden,
            bias=text.flag("attention_bias"),
            extra=("hidden_norm",),
        )
        for number in range(model.layers)
    ]
    around = (*_embedding(model, own), *_projection(model), *norm("norm", hidden))
    if own.head:
        around += (Vocabulary(term="lm_head", name="lm_head", rows=rows, width=hidden, quantized=True),)
    if rows != own.target_rows:
        around += (Tensor(term="lm_head", name=_TABLE, shape=(rows,), dtype="int64"),)
    return Blueprint(layers=tuple(layers), around=((Stage.LAST, around),))


def _layer(model: Model, number: int, inputs: int, *, bias: bool, extra: tuple[str, ...]) -> Parts:
    """A layer of llama.py, its first norm first."""
    text, cache, hidden = model.text, model.attention(number), model.hidden
    return (
        *norm("input_layernorm", hidden),
        qkv(inputs, model.heads, cache.num_kv_heads, cache.head_size, bias=bias),
        row(
            "attention",
            "self_attn.o_proj",
            model.heads * cache.head_size,
            hidden,
            bias=llama_bias(model.text),
        ),
        CacheScales(name="self_attn.attn"),
        *gated_mlp(hidden, text.count("intermediate_size"), bias=text.flag("mlp_bias")),
        *norms(("post_attention_layernorm", *extra), hidden),
    )


def _embedding(model: Model, own: Owned) -> Parts:
    if not own.embedding:
        return ()
    rows = model.text.count("vocab_size")
    return (Vocabulary(term="embedding", name="embed_tokens", rows=rows, width=model.hidden),)


def _projection(model: Model) -> Parts:
    """What brings the target's hidden states together, and the norms before it."""
    text = model.text
    section = text.section("eagle_config")
    if section is not None and not section.flag("use_aux_hidden_state", default=True):
        return ()
    taken = section.counts("eagle_aux_hidden_state_layer_ids", smallest=0) if section is not None else None
    states = text.count("num_aux_hidden_states", len(taken) if taken else _USUAL_HIDDEN_STATES)
    width = text.count("target_hidden_size", model.hidden)
    before = text.flag("norm_before_fc")
    if section is not None:
        before = section.flag("norm_before_fc", default=before)
    parts: Parts = (whole("projection", "fc", width * states, model.hidden),)
    if before:
        parts += norm("input_norm", width * states)
    if text.flag("fc_norm"):
        parts += tuple(part for number in range(states) for part in norm(f"fc_norm.{number}", width))
    return parts


DRAFT_BUILDS: Mapping[str, BuildDraft] = {
    "EagleLlamaForCausalLM": _eagle,
    **dict.fromkeys(
        (
            "Eagle3LlamaForCausalLM",
            "Eagle3MiniMaxM2ForCausalLM",
            "Eagle3Qwen2_5vlForCausalLM",
            "Eagle3Qwen3vlForCausalLM",
            "LlamaForCausalLMEagle3",
        ),
        _eagle3,
    ),
}
