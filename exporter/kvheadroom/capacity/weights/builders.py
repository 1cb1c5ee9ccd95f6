"""What the writers of blueprints share: the model's sizes, and the pieces that most decoders are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvheadroom.capacity.layer_stack import LayerStack, ModelConfig
from kvheadroom.capacity.layers import AttentionLayer
from kvheadroom.capacity.weights.parts import (
    FLOAT32,
    Blueprint,
    CacheScales,
    Experts,
    Mtp,
    Part,
    Parts,
    Stage,
    Tensor,
    Vocabulary,
    gated_mlp,
    norm,
    qkv,
    row,
    whole,
)


@dataclass(frozen=True, slots=True)
class Model:
    """One model as its blueprint is written from.

    Attributes:
        text: the section of config.json that its language model takes.
        whole: all of config.json.
        stack: what each of its layers keeps.
        dtype: that it runs in.
        text_may_tie: the text section may say it as well (older files of some models do).
        ties_by_default: what a left-out `tie_word_embeddings` means for a model with sections; None without any.
    """

    text: ModelConfig
    whole: ModelConfig
    stack: LayerStack
    dtype: str
    ties_by_default: bool | None = None
    text_may_tie: bool = False

    @property
    def hidden(self) -> int:
        """`hidden_size`."""
        return self.text.count_of("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.text.count_of("num_attention_heads", "n_head", "n_heads")

    @property
    def layers(self) -> int:
        """Layers."""
        return len(self.stack.layers)

    def attention(self, layer: int) -> AttentionLayer:
        """The plain attention of one layer."""
        return next(cache for cache in self.stack.layers[layer] if isinstance(cache, AttentionLayer))

    def tied(self, *, default: bool) -> bool:
        """`tie_word_embeddings`; `default` is that of the config class.

        The outermost section decides where there are several (config/vllm.py, `with_hf_config`).
        """
        if self.ties_by_default is None:
            return self.text.flag("tie_word_embeddings", default=default)
        said = self.text.flag("tie_word_embeddings") and self.text_may_tie
        return self.whole.flag("tie_word_embeddings", default=self.ties_by_default) or said

    def count_or(self, key: str, default: int) -> int:
        """A count that may be 0 and may be left out."""
        return self.text.count(key, default, smallest=0)


Build = Callable[[Model], Blueprint]
"""Writes the blueprint of one architecture. Raises BadFieldError as readers of caches do."""


@dataclass(frozen=True, slots=True)
class Places:
    """On which pipeline stages a class builds its embedding, final norm and output layer."""

    embedding: Stage
    norm: Stage
    head: Stage


STAGED = Places(Stage.FIRST, Stage.LAST, Stage.LAST)
EVERYWHERE = Places(Stage.ALL, Stage.ALL, Stage.ALL)


def decoder(
    model: Model,
    layers: Sequence[Parts],
    *,
    tied: bool,
    own_head: bool = False,
    final_norm: Parts | None = None,
    places: Places = STAGED,
    embedding: str = "model.embed_tokens",
    head: str = "lm_head",
    head_bias: bool = False,
    extra: Parts = (),
    rows: int | None = None,
    width: int | None = None,
    mtp: Mtp | None = None,
) -> Blueprint:
    """Layers between an embedding and an output layer.

    Args:
        tied: the output layer is the embedding, which the last stage then holds as well.
        own_head: the class has an output layer of its own all the same.
        extra: what else stands where the embedding stands.
        rows, width: of the embedding, where they are not `vocab_size` and the hidden size.
    """
    rows, width = rows or model.text.count("vocab_size"), width or model.hidden
    embedding_stage = places.embedding
    if tied and embedding_stage is Stage.FIRST:
        embedding_stage = Stage.ENDS
    around: list[tuple[Stage, Parts]] = [
        (
            embedding_stage,
            (Vocabulary(term="embedding", name=embedding, rows=rows, width=width),),
        ),
        (places.norm, norm("model.norm", model.hidden) if final_norm is None else final_norm),
    ]
    if extra:
        around.append((embedding_stage, extra))
    if own_head or not tied:
        around.append(
            (
                places.head,
                (
                    Vocabulary(
                        term="lm_head",
                        name=head,
                        rows=rows,
                        width=width,
                        bias=head_bias,
                        quantized=True,
                    ),
                ),
            )
        )
    return Blueprint(layers=tuple(layers), around=tuple(around), mtp=mtp)


def attention_parts(
    model: Model,
    cache: AttentionLayer,
    *,
    heads: int | None = None,
    bias: bool = False,
    out_bias: bool = False,
    head_norms: tuple[str, str] | None = None,
    name: str = "self_attn",
    qkv_name: str = "qkv_proj",
    out: str = "o_proj",
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    scales: bool = True,
) -> Parts:
    """Plain attention: Q, K and V, the output, and norms over each head."""
    heads = heads or model.heads
    size_v = cache.head_size_v or cache.head_size
    parts: Parts = (
        qkv(
            model.hidden,
            heads,
            cache.num_kv_heads,
            cache.head_size,
            head_size_v=cache.head_size_v,
            bias=bias,
            name=f"{name}.{qkv_name}",
            names=names,
        ),
        row("attention", f"{name}.{out}", heads * size_v, model.hidden, bias=out_bias),
        CacheScales(name=f"{name}.attn", quantized=scales),
    )
    for each in head_norms or ():
        parts += norm(f"{name}.{each}", cache.head_size)
    return parts


def router(
    hidden: int,
    experts: int,
    *,
    name: str = "mlp.gate",
    dtype: str | None = None,
    correction: str | None = None,
    bias: bool = False,
    quantized: bool = False,
) -> Parts:
    """The gate that chooses experts, with its float32 correction bias where it has one."""
    parts: Parts = (whole("router", name, hidden, experts, dtype=dtype, bias=bias, quantized=quantized),)
    if correction:
        parts += (Tensor(term="router", name=correction, shape=(experts,), dtype=FLOAT32),)
    return parts


def experts(
    model: Model, count: int, intermediate: int, *, fast_routing: bool, name: str = "mlp.experts"
) -> Parts:
    """Routed experts of the usual three matrices."""
    return (
        Experts(
            name=name,
            count=count,
            hidden=model.hidden,
            intermediate=intermediate,
            fast_routing=fast_routing,
        ),
    )


def has_fast_routing(scoring: str | None, *, renormalize: bool, corrected: bool) -> bool:
    """Whether `get_routing_method_type` (fused_moe/config.py) finds one that FlashInfer's TRT-LLM kernels know.

    Args:
        corrected: a correction bias is added to the scores.
    """
    if corrected:
        return scoring == "sigmoid" and renormalize
    return scoring == "sigmoid" or (scoring == "softmax" and renormalize)


def shared_mlp(
    hidden: int, intermediate: int, name: str = "mlp.shared_experts", *, divided: bool = False
) -> Parts:
    """Shared experts, or none where `intermediate` is 0.

    Args:
        divided: the class divides them over tensor-parallel ranks in any case.
    """
    return gated_mlp(hidden, intermediate, name=name, shared_expert=not divided) if intermediate else ()


def relabelled(part: Part, prefix: str, term: str) -> Part:
    """A part of an encoder's layer, under its full name and counted as the encoder's."""
    return replace(part, name=prefix + part.name, term=term)


def shared_experts(text: ModelConfig) -> int:
    """`n_shared_experts`; null is none, and left out it is a number of the config class's own."""
    if "n_shared_experts" not in text.values:
        raise text.bad("n_shared_experts", "is left out; say null if there are none")
    return text.count("n_shared_experts", 0, smallest=0)
