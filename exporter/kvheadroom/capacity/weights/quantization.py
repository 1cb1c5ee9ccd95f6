"""`quantization_config` of config.json -> the scheme that the weights are held in.

Sources, vLLM 0.33.0: `model_executor/layers/quantization/` (fp8.py, modelopt.py, compressed_tensors/, auto_awq.py,
auto_gptq.py, mxfp4.py) and `utils/quant_utils.py` (`is_layer_skipped`).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.checkpoint_types import kv_dtypes, quantization_method
from kvheadroom.capacity.model_config import ModelConfig, shown
from kvheadroom.capacity.weights.contradiction import NotTakenError
from kvheadroom.capacity.weights.schemes import UNQUANTIZED, Format, Scheme

_Skips = Callable[[str, tuple[str, ...]], bool]
_FP8_TENSOR = Format(bits=8, per_output_bytes=4)
_FP8_STATIC = Format(bits=8, per_output_bytes=8, expert_output_bytes=4, expert_bytes=4)
_GROUP_OF_NVFP4 = 16
_MXFP4 = Format(bits=4, rows=1, columns=32, scale_bytes=1, padded=True, packed=True)
# The caches' scales: q, k, v and of probabilities in the model's dtype (kv_cache.py), or three float32 ones with
# zero points in the model's dtype (`CompressedTensorsKVCacheMethod`).
_OWN_SCALES = 4
_COMPRESSED_SCALES = 3


def read_scheme(whole: ModelConfig, text: ModelConfig) -> Scheme:
    """The scheme of a checkpoint.

    Raises:
        NotTakenError: vLLM does not start with it.
        NotModelledError: its weights' sizes are not modelled.
    """
    section = _section(whole, text)
    if section is None:
        return UNQUANTIZED
    method = (section.word("quant_method") or "").lower().replace("_", "-")
    if whole.word("model_type") == "deepseek_v4":
        if method != "fp8":
            raise NotModelledError(
                f"DeepSeek-V4 quantized by {method or 'an unnamed method'} is not modelled"
            )
        return _deepseek_v4(whole, section)
    if method == "fp8":
        return _fp8(section)
    # hf_quant_config.json names no method.
    if method in ("modelopt", "modelopt-fp4") or (
        not method and quantization_method(whole, text) == "modelopt"
    ):
        return _modelopt(section)
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    if method == "awq":
        return _awq(section)
    if method == "gptq":
        return _gptq(section)
    if method == "mxfp4" and text.word("model_type") == "gpt_oss":
        # Everything but the experts is left as it is (mxfp4.py).
        return Scheme(experts=_MXFP4)
    raise NotModelledError(
        f"the weights of a checkpoint quantized by {method or 'an unnamed method'} are not modelled"
    )


def _section(whole: ModelConfig, text: ModelConfig) -> ModelConfig | None:
    return (
        whole.section("quantization_config")
        or whole.section("compression_config")
        or text.section("quantization_config")
        or text.section("compression_config")
    )


def scheme_by_headers(whole: ModelConfig, text: ModelConfig) -> Scheme | None:
    """The scheme of a checkpoint whose layers the headers tell, where config.json's own words are not modelled.

    Of compressed-tensors and ModelOpt: their classes create for each layer the tensors that the checkpoint has
    (`create_weights` in compressed_tensors/schemes/, compressed_tensors_moe/ and modelopt.py). None for others.
    """
    method = quantization_method(whole, text)
    if method == "compressed-tensors":
        return Scheme(by_headers=True, float32_scales=_COMPRESSED_SCALES, own_scales=_COMPRESSED_SCALES)
    section = _section(whole, text)
    if method == "modelopt" and section is not None:
        # With a scheme for each layer, attention has scales only where the cache has a scheme too, and latent attention none
        # (`get_quant_method` in modelopt.py).
        mixed = _modelopt_algorithm(_modelopt_source(section)) == "MIXED_PRECISION"
        no_scales = mixed and kv_dtypes(whole, text) == ("auto", "auto")
        return Scheme(by_headers=True, own_scales=0 if no_scales else _OWN_SCALES, latent_scales=not mixed)
    return None


def _names_in(section: ModelConfig, *keys: str) -> list[str]:
    for key in keys:
        if section.has(key):
            return section.words(key) or []
    return []


# The names of a module, as vLLM, transformers and older checkpoints have it.
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")


def _candidates(name: str, outs: tuple[str, ...]) -> list[list[str]]:
    """For the module and for each of its outputs, every name that it may go by."""
    core = name
    for prefix in ("language_model.model.", "model.language_model.", "language_model.", "model."):
        if core.startswith(prefix):
            core = core[len(prefix) :]
            break
    parent, _, _ = core.rpartition(".")
    modules = [core, *(f"{parent}.{out}" if parent else out for out in outs)]
    return [[prefix + module for prefix in _PREFIXES] for module in modules]


def _skips_exactly(listed: Sequence[str]) -> _Skips:
    """`is_layer_skipped`: the fused name, or all of its parts."""
    exact = frozenset(listed)
    experts = [entry for entry in listed if "experts" in entry]

    def skips(name: str, outs: tuple[str, ...]) -> bool:
        whole, *parts = _candidates(name, outs)
        if any(each in exact for each in whole):
            return True
        if name.endswith(".experts") or name == "experts":
            return any(f"{each}." in f"{entry}." for each in whole for entry in experts)
        return bool(parts) and all(any(each in exact for each in part) for part in parts)

    return skips


def _fp8(section: ModelConfig) -> Scheme:
    """fp8.py; the names that a checkpoint leaves out are matched in full, unless it says how else."""
    listed = _names_in(section, "ignored_layers", "modules_to_not_convert")
    block = section.counts("weight_block_size")
    static = section.word("activation_scheme", "dynamic") == "static"
    if block is None:
        form = _FP8_STATIC if static else _FP8_TENSOR
    elif len(block) == 2:
        form = Format(bits=8, rows=block[0], columns=block[1], refines=True)
    else:
        raise section.bad("weight_block_size", "is no pair of sizes")
    return Scheme(linear=form, experts=form, skips=_skips_exactly(listed), own_scales=_OWN_SCALES)


def _deepseek_v4(whole: ModelConfig, section: ModelConfig) -> Scheme:
    """models/deepseek_v4/nvidia/: scales of one byte, experts in 4 bits with a scale for 32 of them."""
    block = section.counts("weight_block_size")
    if block is None or len(block) != 2 or _names_in(section, "ignored_layers", "modules_to_not_convert"):
        raise NotModelledError("a DeepSeek-V4 that is quantized in another way than the published one")
    scale_bytes = 1 if section.word("scale_fmt") == "ue8m0" else 4
    form = Format(bits=8, rows=block[0], columns=block[1], scale_bytes=scale_bytes)
    fp4 = whole.word("expert_dtype") == "fp4"
    return Scheme(
        linear=form, experts=Format(bits=4, rows=1, columns=32, scale_bytes=1, packed=True) if fp4 else form
    )


def _modelopt(section: ModelConfig) -> Scheme:
    source = _modelopt_source(section)
    listed = _names_in(source, *(("ignore",) if source is section else ()), "exclude_modules")
    algorithm = _modelopt_algorithm(source)
    if algorithm == "FP8":
        form = _FP8_STATIC
    elif algorithm == "NVFP4":
        group = source.count("group_size", _GROUP_OF_NVFP4)
        form = Format(bits=4, rows=1, columns=group, scale_bytes=1, per_output_bytes=8, packed=True)
    else:
        raise NotModelledError(f"the weights of ModelOpt's {shown(algorithm)} are not modelled")
    return Scheme(
        linear=form,
        experts=form,
        head=form,
        skips=_modelopt_skips(listed),
        own_scales=_OWN_SCALES,
        latent_scales=True,
    )


def _modelopt_source(section: ModelConfig) -> ModelConfig:
    """What hf_quant_config.json has in a section of its own, or the flat form."""
    inner = section.section("quantization") if isinstance(section.values.get("quantization"), dict) else None
    return inner or section


def _modelopt_algorithm(source: ModelConfig) -> str:
    return (source.word("quant_algo") or "").upper()


def _modelopt_skips(listed: Sequence[str]) -> _Skips:
    """`is_layer_excluded`: in full, as a part of the name, or as a wildcard."""
    exactly = _skips_exactly(listed)
    patterns = [
        each
        for entry in listed
        for each in (
            (entry[:-1], f"{entry[:-1]}.*")
            if len(entry) > 1 and entry[-1] == "*" and entry[-2] != "."
            else (entry,)
        )
    ]

    def skips(name: str, outs: tuple[str, ...]) -> bool:
        if any(part in name for part in ("vision_tower", "vision_model", "vit_large_projector")):
            return True
        if exactly(name, outs):
            return True
        names = _candidates(name, ())[0]
        return any(
            pattern in each or fnmatchcase(each, pattern) for pattern in patterns if pattern for each in names
        )

    return skips


# Patterns that repeat a group could take a time that grows with a power of the name's length.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_LONGEST_PATTERN = 300


def _matcher(listed: Iterable[str]) -> Callable[[str], bool]:
    """compressed_tensors/utils.py: a name in full, or, after `re:`, an expression that its beginning matches."""
    exact, expressions = set(), []
    for entry in listed:
        if not entry.startswith("re:"):
            exact.add(entry)
            continue
        pattern = entry[3:]
        if len(pattern) > _LONGEST_PATTERN or _REPEATED_GROUP.search(pattern):
            raise NotModelledError(
                f"the expression {shown(pattern)} of the checkpoint's scheme is not modelled"
            )
        try:
            expressions.append(re.compile(pattern))
        except re.error as error:
            raise NotModelledError(
                f"the expression {shown(pattern)} of the checkpoint's scheme: {error}"
            ) from None
    return lambda name: name in exact or any(each.match(name) for each in expressions)


def _compressed_tensors(section: ModelConfig) -> Scheme:
    groups = section.section("config_groups")
    _hold_taken(section, groups)
    if groups is None or section.values.get("transform_config"):
        raise NotModelledError(
            "compressed-tensors without `config_groups`, or with transforms, is not modelled"
        )
    listed = section.words("ignore") or []
    usual = [
        group
        for key in groups.values
        if (group := groups.section(key)) is not None and not _is_of_attention(group)
    ]
    if not usual:
        return Scheme(float32_scales=_COMPRESSED_SCALES, own_scales=_COMPRESSED_SCALES)
    if len(usual) > 1:
        raise NotModelledError("compressed-tensors with several groups of layers is not modelled")
    group = usual[0]
    targets = group.words("targets") or []
    if targets != ["Linear"]:
        raise NotModelledError(f"compressed-tensors' targets {shown(targets)} are not modelled")
    form, experts = _compressed_format(group, group.word("format") or section.word("format") or "")
    matches = _matcher(listed)

    def skips(name: str, outs: tuple[str, ...]) -> bool:
        whole, *parts = _candidates(name, outs)
        if name.endswith("experts"):
            parts = [[f"{each}.0.{out}" for each in whole] for out in outs]
        if any(matches(each) for each in whole):
            return True
        return bool(parts) and all(any(matches(each) for each in part) for part in parts)

    return Scheme(
        linear=form,
        experts=experts,
        skips=skips,
        float32_scales=_COMPRESSED_SCALES,
        own_scales=_COMPRESSED_SCALES,
    )


def _hold_taken(section: ModelConfig, groups: ModelConfig | None) -> None:
    """What `CompressedTensorsConfig.from_config` refuses (compressed_tensors.py)."""
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.values.get("targets"):
        raise NotTakenError("vLLM takes no compressed-tensors checkpoint with sparsity any more")
    for key in groups.values if groups is not None else ():
        group = groups.section(key) if groups is not None else None
        weights = group.section("weights") if group is not None and not _is_of_attention(group) else None
        order = weights.values.get("actorder") if weights is not None else None
        if order in ("group", "dynamic"):
            raise NotTakenError(
                f"vLLM takes no compressed-tensors checkpoint with the activation order {shown(order)} any more"
            )


def _is_of_attention(group: ModelConfig) -> bool:
    targets = group.words("targets") or []
    return len(targets) == 1 and targets[0].endswith("Attention")


def _compressed_format(group: ModelConfig, layout: str) -> tuple[Format, Format]:
    """The format of linear layers and that of experts."""
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None or group.has("output_activations"):
        raise NotModelledError("compressed-tensors' scheme without weights, or with outputs, is not modelled")
    bits, kind, strategy = weights.count("num_bits"), weights.word("type"), weights.word("strategy")
    static = inputs is not None and inputs.values.get("dynamic") is False
    size = weights.count("group_size", 0, smallest=0) if (weights.values.get("group_size") or 0) != -1 else 0
    symmetric = weights.flag("symmetric", default=True)
    if (bits, kind, strategy) == (4, "float", "tensor_group") and size == _GROUP_OF_NVFP4:
        form = Format(
            bits=4,
            rows=1,
            columns=size,
            scale_bytes=1,
            per_output_bytes=4 if inputs is None else 8,
            packed=True,
        )
        experts = replace(form, per_output_bytes=8)
        return form, experts
    if layout == "pack-quantized" and kind == "int" and inputs is None and bits in (4, 8):
        if strategy not in ("group", "channel"):
            raise NotModelledError(
                f"compressed-tensors' strategy {shown(strategy)} for packed weights is not modelled"
            )
        form = Format(
            bits=bits,
            rows=1,
            columns=size or None,
            scale_bytes=0,
            zero_bits=0 if symmetric else bits,
            fixed_bytes=16,
            expert_bytes=4,
            packed=True,
        )
        return form, form
    if layout in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8 and symmetric:
        activation = 4 if static else 0
        if strategy == "tensor":
            form = Format(bits=8, per_output_bytes=4 + activation)
        elif strategy == "channel":
            form = Format(bits=8, rows=1, per_output_bytes=activation)
        elif strategy == "block" and kind == "float":
            block = weights.counts("block_structure")
            if block is None or len(block) != 2:
                raise NotModelledError("compressed-tensors' blocks are not modelled")
            form = Format(bits=8, rows=block[0], columns=block[1], strict_outputs=True)
        else:
            raise NotModelledError(f"compressed-tensors' strategy {shown(strategy)} is not modelled")
        return form, form
    raise NotModelledError(f"compressed-tensors' {bits}-bit {shown(kind)} in {shown(layout)} is not modelled")


def _awq(section: ModelConfig) -> Scheme:
    bits, group = section.count_of("bits", "w_bit"), section.count_of("group_size", "q_group_size")
    if bits != 4:
        raise NotModelledError(f"AWQ with {bits} bits is not modelled")
    listed = _names_in(section, "modules_to_not_convert")
    form = Format(bits=bits, rows=1, columns=group, scale_bytes=0, zero_bits=bits, packed=True)

    def skips(name: str, outs: tuple[str, ...]) -> bool:
        return any(part in each for part in listed for each in (name, *outs))

    return Scheme(linear=form, experts=form, skips=skips if listed else None, asks_headers=not listed)


def _gptq(section: ModelConfig) -> Scheme:
    bits = section.count("bits")
    if section.flag("desc_act") and section.values.get("group_size") != -1:
        raise NotTakenError("vLLM takes no GPTQ with `desc_act` any more")
    if bits not in (4, 8) or section.values.get("dynamic") or section.flag("lm_head"):
        raise NotModelledError(f"GPTQ with {bits} bits, `dynamic` or `lm_head` is not modelled")
    size = section.values.get("group_size")
    group = None if size == -1 else section.count("group_size")
    form = Format(
        bits=bits, rows=1, columns=group, scale_bytes=0, zero_bits=bits, expert_dtype_numbers=1, packed=True
    )
    return Scheme(linear=form, experts=form, asks_headers=True)
