"""What one family of models answers: the caches of every layer, and what the planning needs to know beside them."""

from collections.abc import Callable
from dataclasses import dataclass

from kvheadroom.capacity.layers import CacheLayer, StateLayer
from kvheadroom.capacity.model_config import BadFieldError, ModelConfig

Layers = tuple[tuple[CacheLayer, ...], ...]
"""For each layer of the model, what it keeps; an empty tuple for a layer that keeps nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """The layers of a model, and vLLM's idea of it as a whole.

    Attributes:
        layers: caches of each layer, in the order in which vLLM builds them.
        num_kv_heads, head_size: what vLLM takes for the model as a whole
            (`transformers_utils/model_arch_config_convertor.py`); 1 and the latent vector for latent attention.
            Layers may differ from them.
        latent: vLLM's `use_mla`.
        hybrid: blocks are sized so that a recurrent state fits one (`ModelConfig.is_hybrid`).
        sizing_states: states that must fit into a block though no layer may keep them; empty: those that layers keep.
        mtp: caches of each layer of multi-token prediction when it is switched on; None where that is not known.
        mtp_modules: one module per predicted token, so that windows keep as many tokens more.
        recurrent_dtype: dtype of recurrent states unless a flag says otherwise; None: that of the convolution's.
        image_prefix: attention looks both ways over images, which narrows the choice of backends.
        largest_item_tokens: tokens of the largest image or video, which must fit one batch where attention looks both
            ways over it; 0: it need not, or vLLM does not ask.
        repeats_heads: a K/V head is repeated on several GPUs where tensor parallelism is wider than they are many.
        pipeline: the model can be spread over pipeline stages (vLLM's `SupportsPP`).
        refused: why vLLM refuses this model whatever the flags, or empty.
    """

    layers: Layers
    num_kv_heads: int
    head_size: int
    latent: bool = False
    hybrid: bool = False
    sizing_states: tuple[StateLayer, ...] = ()
    mtp: Layers | None = None
    mtp_modules: bool = False
    recurrent_dtype: str | None = None
    image_prefix: bool = False
    largest_item_tokens: int = 0
    repeats_heads: bool = True
    pipeline: bool = True
    refused: str = ""


Reader = Callable[[ModelConfig], LayerStack]
"""Reads the text part of a config.json. Raises BadFieldError with one sentence where a field is missing or bad, or
where it says something whose rules are not known."""

__all__ = ["BadFieldError", "LayerStack", "Layers", "ModelConfig", "Reader"]
