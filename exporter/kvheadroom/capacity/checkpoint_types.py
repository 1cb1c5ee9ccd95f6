"""config.json -> how the checkpoint is quantized: its method, and what it makes of the KV cache."""

from collections.abc import Mapping

from kvheadroom.capacity.model_config import ModelConfig, is_count

_MODELOPT_TYPES = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


def quantization_method(whole: ModelConfig, text: ModelConfig) -> str | None:
    """`_normalize_quantization_config` of transformers_utils/model_arch_config_convertor.py."""
    for config in (whole, text):
        for key in ("quantization_config", "compression_config"):
            section = config.section(key)
            if section is not None:
                if section.has("quant_algo") or section.has("quantization"):
                    # ModelOpt's classes go by the algorithm, whatever the method is called.
                    return "modelopt"
                method = section.word("quant_method")
                return (
                    None
                    if method is None
                    else method.lower().replace("compressed_tensors", "compressed-tensors")
                )
    return None


def weight_block(whole: ModelConfig) -> tuple[int, int] | None:
    """Rows and columns that share a scale, of fp8 checkpoints with blocks (`weight_block_size`)."""
    section = whole.section("quantization_config")
    sizes = None if section is None else section.values.get("weight_block_size")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(map(is_count, sizes)):
        return None
    return sizes[0], sizes[1]


def kv_dtypes(whole: ModelConfig, text: ModelConfig) -> tuple[str | None, str | None]:
    """What kv_cache_dtype=auto becomes: for every layer, and for plain attention; None: not modelled.

    ModelOpt's checkpoints: `get_kv_cache_quant_algo_string`, utils/torch_utils.py. Compressed-tensors' ones:
    `Attention.__init__`, which knows 8-bit floats only (0.33.0).
    """
    quantization = whole.section("quantization_config") or whole.section("compression_config")
    outer = quantization is not None
    quantization = quantization or text.section("quantization_config") or text.section("compression_config")
    if quantization is None:
        return "auto", "auto"
    inner = quantization.section("quantization") if _is_section(quantization, "quantization") else None
    method = (quantization.word("quant_method") or "").lower().replace("_", "-")
    producer = quantization.section("producer") if _is_section(quantization, "producer") else None
    made_by_modelopt = producer is not None and producer.word("name") == "modelopt"
    if method.startswith("modelopt") or made_by_modelopt:
        if not outer:
            return "auto", "auto"
        return (_modelopt_type(quantization, inner),) * 2
    scheme = quantization.values.get("kv_cache_scheme")
    if scheme is None:
        declared = any(quantization.values.get(key) for key in ("kv_cache_quant_algo", "kv_cache_config"))
        return ("auto", "auto") if not declared else (None, None)
    if method != "compressed-tensors" or not isinstance(scheme, Mapping):
        return None, None
    plain = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return "auto", "fp8" if plain and scheme.get("strategy") == "tensor" else None


def _is_section(config: ModelConfig, key: str) -> bool:
    return isinstance(config.values.get(key), Mapping)


def _modelopt_type(quantization: ModelConfig, inner: ModelConfig | None) -> str:
    places = [quantization] if inner is None else [inner, quantization]
    said = next(
        (
            place.values[key]
            for key in ("kv_cache_scheme", "kv_cache_quant_algo")
            for place in places
            if place.values.get(key)
        ),
        None,
    )
    if isinstance(said, Mapping):
        bits, kind = said.get("num_bits"), said.get("type")
        if said.get("dynamic") is False and (bits, kind) == (8, "float"):
            return "fp8_e4m3"
        return "nvfp4" if (bits, kind) == (4, "float") else "auto"
    # What vLLM does not know, it leaves as it is.
    return _MODELOPT_TYPES.get(said.lower(), "auto") if isinstance(said, str) else "auto"
