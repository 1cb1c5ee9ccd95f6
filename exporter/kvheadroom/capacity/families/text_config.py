"""What transformers' config classes make of a config.json before vLLM's model classes read it.

vLLM chooses the config class by `model_type` and the model class by `architectures`, so a left-out key and the layers
of a model are looked up apart. Read in transformers 5.19 (models/*/configuration_*.py) and, for the types that vLLM
registers itself, in its transformers_utils/configs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvheadroom.capacity.layer_stack import ModelConfig

FULL = "full_attention"
SLIDING = "sliding_attention"

_LayerTypes = Callable[[ModelConfig, int, int | None], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The keys that decide about attention, defaults filled in.

    Attributes:
        head_dim: as the config has it; None where neither config.json nor the class names one.
        hidden_head_size: hidden_size / heads, which some models use whatever `head_dim` says.
        window: tokens, None where no sliding window is configured or it is switched off.
        layer_types: one per layer; None where the class has none and config.json neither.
    """

    section: ModelConfig
    layers: int
    heads: int
    kv_heads: int
    head_dim: int | None
    hidden_head_size: int
    window: int | None
    layer_types: tuple[str, ...] | None

    @property
    def head_size(self) -> int:
        """Elements of a head for the models that read `head_dim`, and for vLLM's idea of the whole model."""
        return self.head_dim or self.hidden_head_size

    @property
    def model_window(self) -> int | None:
        """The window of layers that name none: `cache_config.sliding_window` (engine/arg_utils.py).

        vLLM sets it only where no layer type but the sliding one occurs, lest it windows full layers.
        """
        if self.layer_types is None or all(kind == SLIDING for kind in self.layer_types):
            return self.window
        return None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, for models that follow `layer_types`."""
        if self.layer_types is None:
            return (self.window,) * self.layers
        return tuple(self.window if kind == SLIDING else None for kind in self.layer_types)


def _full_every(usual: int, key: str = "") -> _LayerTypes:
    """A full layer at every n-th place; published configs leave `key` out where n is the usual one."""

    def types(config: ModelConfig, layers: int, window: int | None) -> list[str]:
        del window
        every = config.count(key, usual) if key else usual
        return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]

    return types


def _full_first_of(every: int) -> _LayerTypes:
    """Blocks that begin with a full layer."""

    def types(config: ModelConfig, layers: int, window: int | None) -> list[str]:
        del config, window
        return [SLIDING if layer % every else FULL for layer in range(layers)]

    return types


def _exaone(config: ModelConfig, layers: int, window: int | None) -> list[str]:
    if window is None:
        raise config.bad(
            "layer_types", "is left out without a sliding window, which transformers cannot read"
        )
    return _full_every_fourth(config, layers, window)


_full_every_fourth = _full_every(4, "sliding_window_pattern")


def _from_max_window_layers(config: ModelConfig, layers: int, window: int | None) -> list[str]:
    """Qwen2: the first `max_window_layers` see everything, the rest a window."""
    if window is None:
        return [FULL] * layers
    first = config.count("max_window_layers", smallest=0)
    return [FULL if layer < first else SLIDING for layer in range(layers)]


def _below_max_window_layers(config: ModelConfig, layers: int, window: int | None) -> list[str]:
    """Qwen2-MoE: every second of the first `max_window_layers`."""
    if window is None:
        return [FULL] * layers
    first = config.count("max_window_layers", smallest=0)
    return [SLIDING if layer % 2 == 0 and layer < first else FULL for layer in range(layers)]


def _no_rope(config: ModelConfig, layers: int, window: int | None) -> list[str]:
    """SmolLM3: a window, where one is switched on, only in layers without position embedding."""
    rope = config.counts("no_rope_layers", layers, smallest=0)
    if rope is None:
        every = config.count("no_rope_layer_interval", 4)
        rope = [(layer + 1) % every for layer in range(layers)]
    windowed = config.flag("use_sliding_window") and window is not None
    return [SLIDING if windowed and not has_rope else FULL for has_rope in rope]


def _all_sliding(config: ModelConfig, layers: int, window: int | None) -> list[str]:
    del config
    return [FULL if window is None else SLIDING] * layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConfigClass:
    """What a config class does with keys that config.json leaves out.

    Attributes:
        heads, layers, hidden: other names of the usual keys.
        kv_heads_are_heads: no `num_key_value_heads` means as many as heads; else the class has a number of its own,
            and config.json is asked for it.
        needs_head_dim: likewise the class has a number of its own.
        needs_window: a left-out `sliding_window` is a window of the class's own size, so null must be said.
        window_switch: `use_sliding_window` has to be true for a window.
        types: `layer_types` where they are left out.
    """

    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    kv_heads_are_heads: bool = False
    needs_head_dim: bool = False
    needs_window: bool = False
    window_switch: bool = False
    types: _LayerTypes | None = None


_PLAIN = _ConfigClass()
_HEADS = _ConfigClass(kv_heads_are_heads=True)
_GPT2 = _ConfigClass(hidden="n_embd", heads="n_head", layers="n_layer", kv_heads_are_heads=True)
_QWEN2 = _ConfigClass(needs_window=True, window_switch=True, types=_from_max_window_layers)
_GEMMA3 = _ConfigClass(needs_head_dim=True, needs_window=True, types=_full_every(6, "sliding_window_pattern"))
_EXAONE = _ConfigClass(needs_window=True, types=_exaone)
_GRANITE_SWA = _ConfigClass(needs_window=True, types=_full_first_of(4))

_CONFIG_CLASSES: Mapping[str, _ConfigClass] = {
    "afmoe": _ConfigClass(
        kv_heads_are_heads=True,
        needs_head_dim=True,
        needs_window=True,
        types=_full_every(4, "global_attn_every_n_layers"),
    ),
    "apertus": _HEADS,
    "arcee": _HEADS,
    "bloom": replace(_GPT2, hidden="hidden_size"),
    "cohere": _HEADS,
    "cohere2": _ConfigClass(kv_heads_are_heads=True, needs_window=True, types=_full_every_fourth),
    "cwm": _ConfigClass(needs_head_dim=True, needs_window=True, types=_full_first_of(4)),
    "dots1": _ConfigClass(needs_window=True, types=_from_max_window_layers),
    "ernie4_5": _ConfigClass(needs_head_dim=True),
    "exaone": _ConfigClass(layers="num_layers", kv_heads_are_heads=True),
    "exaone4": _EXAONE,
    "exaone_moe": _EXAONE,
    "flex_olmo": _HEADS,
    "gemma": _ConfigClass(needs_head_dim=True),
    "gemma2": _ConfigClass(needs_head_dim=True, needs_window=True, types=_full_every(2)),
    "gemma3_text": _GEMMA3,
    "gemma3n_text": replace(_GEMMA3, types=_full_every(5)),
    "gemma4_text": replace(_GEMMA3, types=_full_every(6)),
    "glm": _ConfigClass(needs_head_dim=True),
    "glm4": _ConfigClass(needs_head_dim=True),
    "glm4_moe": _ConfigClass(needs_head_dim=True),
    "glm4v_moe_text": _ConfigClass(needs_head_dim=True),
    "glm4v_text": _PLAIN,
    "gpt2": _GPT2,
    "gpt_neox": _HEADS,
    "gpt_oss": _ConfigClass(needs_head_dim=True, needs_window=True, types=_full_every(2)),
    "gptj": _GPT2,
    "granite": _HEADS,
    "granite_swa": _GRANITE_SWA,
    "granitemoe": _HEADS,
    "granitemoe_swa": replace(_GRANITE_SWA, kv_heads_are_heads=True),
    "granitemoeshared": _HEADS,
    "hunyuan_v1_dense": _ConfigClass(kv_heads_are_heads=True, needs_head_dim=True),
    "hunyuan_v1_moe": _ConfigClass(kv_heads_are_heads=True, needs_head_dim=True),
    "jais2": _HEADS,
    "llama": _HEADS,
    "llama4_text": _ConfigClass(needs_head_dim=True),
    "mimo": _QWEN2,
    "minimax_m2": _ConfigClass(needs_head_dim=True),
    "ministral": _ConfigClass(needs_window=True, types=_all_sliding),
    "ministral3": _ConfigClass(needs_head_dim=True),
    "mistral": _ConfigClass(needs_window=True),
    "olmo": _HEADS,
    "olmo2": _HEADS,
    "olmo3": _ConfigClass(kv_heads_are_heads=True, needs_window=True, types=_full_every(4)),
    "olmoe": _HEADS,
    "opt": _HEADS,
    "phi": _HEADS,
    "phi3": _HEADS,
    "qwen2": _QWEN2,
    "qwen2_5_omni_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": replace(_QWEN2, types=_below_max_window_layers),
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen3": replace(_QWEN2, needs_head_dim=True),
    "qwen3_moe": _ConfigClass(needs_window=True, window_switch=True),
    "qwen3_vl_text": _ConfigClass(needs_head_dim=True),
    "seed_oss": _ConfigClass(needs_head_dim=True),
    "smollm3": _ConfigClass(types=_no_rope),
}
"""By `model_type`. A type that is not here comes with its repository, whose class writes every key into config.json,
or its class in transformers fills none of these keys: then what is left out is not there."""

# They refuse a hidden size that is no multiple of the heads, whatever `head_dim` says (`validate_architecture`).
_WANT_WHOLE_HEADS = frozenset({"cwm", "gemma2", "gemma3_text", "gemma3n_text"})


def read_text_config(section: ModelConfig, usual_type: str) -> TextConfig:
    """Reads a text section; `usual_type` is the `model_type` of its architecture where it names none."""
    rules = _CONFIG_CLASSES.get(section.word("model_type") or usual_type, _PLAIN)
    if not section.flag("is_causal", default=True):
        raise section.bad("is_causal", "is false: attention without a cache is not modelled")
    if section.has("dual_chunk_attention_config"):
        raise section.bad("dual_chunk_attention_config", "is not modelled")
    layers = section.layers(_name(section, "num_hidden_layers", rules.layers))
    heads = section.count(_name(section, "num_attention_heads", rules.heads))
    hidden = section.count(_name(section, "hidden_size", rules.hidden))
    if hidden < heads:
        raise section.bad(rules.heads, "is larger than the hidden size")
    own_size = rules.needs_head_dim and section.word("model_type") not in _WANT_WHOLE_HEADS
    if hidden % heads and not own_size:
        raise section.bad(
            rules.hidden, f"is {hidden}, no multiple of the {heads} attention heads; not modelled"
        )
    window = _window(section, rules)
    types = _layer_types(section, rules, layers, window)
    if SLIDING in (types or ()) and window is None and "sliding_window" not in section.values:
        raise section.bad("sliding_window", "is left out, and some layers slide; say null if there is none")
    return TextConfig(
        section=section,
        layers=layers,
        heads=heads,
        kv_heads=section.count("num_key_value_heads", heads if rules.kv_heads_are_heads else None),
        head_dim=section.count("head_dim") if rules.needs_head_dim or section.has("head_dim") else None,
        hidden_head_size=hidden // heads,
        window=window,
        layer_types=types,
    )


def _name(section: ModelConfig, usual: str, other: str) -> str:
    """Transformers' `attribute_map` takes either name; the usual one, set last, wins."""
    return usual if section.has(usual) else other


def _window(section: ModelConfig, rules: _ConfigClass) -> int | None:
    if rules.window_switch and not section.flag("use_sliding_window"):
        return None
    if (
        rules is _PLAIN
        and section.has("sliding_window")
        and not section.flag("use_sliding_window", default=True)
    ):
        raise section.bad(
            "use_sliding_window", "is false beside a window: for this model type that is not modelled"
        )
    if rules.needs_window and "sliding_window" not in section.values:
        raise section.bad("sliding_window", "is left out, which means a window; say null if there is none")
    # 0 is how some checkpoints say none (config/model.py, __post_init__)
    return section.count("sliding_window", 0, smallest=0) or None


def _layer_types(
    section: ModelConfig, rules: _ConfigClass, layers: int, window: int | None
) -> tuple[str, ...] | None:
    types = section.words("layer_types", layers)
    if types is None:
        types = rules.types(section, layers, window) if rules.types else None
    return None if types is None else tuple(types)
