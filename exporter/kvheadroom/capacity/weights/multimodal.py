"""Blueprints of models with images around a language model."""

from collections.abc import Mapping
from dataclasses import replace

from kvheadroom.capacity.model_config import ModelConfig
from kvheadroom.capacity.weights import (
    gemma,
    hybrid,
    hybrid_latent,
    latent,
    moe,
    older,
    plain,
    sparse,
    vision,
)
from kvheadroom.capacity.weights.builders import Build, Model
from kvheadroom.capacity.weights.parts import Blueprint, Parts, Stage, Tensor

TEXT_BUILDS: Mapping[str, Build] = {
    **plain.BUILDS,
    **older.BUILDS,
    **moe.BUILDS,
    **latent.BUILDS,
    **hybrid.BUILDS,
    **hybrid_latent.BUILDS,
    **gemma.BUILDS,
    **sparse.BUILDS,
}

# The class that vLLM builds for a text section without `architectures`.
_BY_MODEL_TYPE: Mapping[str, str] = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


# Whose outermost config class ties the two embeddings unless config.json says otherwise (transformers 5.19).
_TIED = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Lfm2VlForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
    }
)

_TIED_BY_TEXT = frozenset(
    {
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    }
)


def _with_tower(text: Build, tower: vision.Tower, *, section: str = "vision_config") -> Build:
    def build(model: Model) -> Blueprint:
        architecture = (model.whole.words("architectures") or [""])[0]
        given = model.whole.section(section)
        if given is None and section:
            raise model.whole.bad(section, "is left out, and the size of the encoder with it")
        defaults = vision.VISION_DEFAULTS.get(architecture, {})
        sizes = ModelConfig({**defaults, **(given.values if given else {})}, f"{section}.")
        if model.text is not model.whole:
            model = replace(
                model,
                ties_by_default=architecture in _TIED,
                text_may_tie=architecture in _TIED_BY_TEXT,
            )
        blueprint = text(model)
        parts = tower(model, sizes)
        return replace(blueprint, around=(*blueprint.around, (Stage.FIRST, parts)))

    return build


def _named(model: Model) -> Blueprint:
    """The language model that the text section names, or that goes with its model type."""
    names = model.text.words("architectures")
    name = names[0] if names else _BY_MODEL_TYPE.get(model.text.word("model_type") or "", "")
    if name not in TEXT_BUILDS:
        raise model.text.bad("architectures", "names no language model whose weights are modelled")
    return TEXT_BUILDS[name](model)


def _llava_next(model: Model) -> Blueprint:
    """A line break between rows of an image, on every stage."""
    blueprint = _LLAVA(model)
    newline: Parts = (Tensor(term="vision", name="image_newline", shape=(model.hidden,)),)
    return replace(blueprint, around=(*blueprint.around, (Stage.ALL, newline)))


_LLAVA = _with_tower(_named, vision.llava)


def _phi3v(model: Model) -> Blueprint:
    """It keeps an embedding of its own beside the language model's."""
    blueprint = _with_tower(TEXT_BUILDS["LlamaForCausalLM"], vision.phi3_v, section="img_processor")(model)
    return replace(blueprint, around=(*blueprint.around, (Stage.FIRST, blueprint.around[0][1])))


def _paligemma(model: Model) -> Blueprint:
    name = "GemmaForCausalLM" if model.text.word("model_type") == "gemma" else "Gemma2ForCausalLM"
    return _with_tower(TEXT_BUILDS[name], vision.paligemma)(model)


BUILDS: Mapping[str, Build] = {
    "BailingMoeV3VLForConditionalGeneration": _with_tower(hybrid_latent.bailing_3, vision.bailing_vl),
    "DeepseekOCRForCausalLM": _with_tower(latent.deepseek, vision.deepseek_ocr),
    "Gemma3ForConditionalGeneration": _with_tower(TEXT_BUILDS["Gemma3ForCausalLM"], vision.gemma3),
    "Gemma4ForConditionalGeneration": _with_tower(gemma.gemma4, vision.gemma4),
    "Glm4vForConditionalGeneration": _with_tower(TEXT_BUILDS["Glm4ForCausalLM"], vision.glm4v),
    "Glm4vMoeForConditionalGeneration": _with_tower(TEXT_BUILDS["Glm4MoeForCausalLM"], vision.glm4v),
    "Glm5NextForConditionalGeneration": _with_tower(hybrid_latent.glm5_next, vision.glm5_next),
    "Idefics3ForConditionalGeneration": _with_tower(TEXT_BUILDS["LlamaForCausalLM"], vision.idefics3),
    "InternVLForConditionalGeneration": _with_tower(_named, vision.internvl),
    "KimiK25ForConditionalGeneration": _with_tower(latent.deepseek, vision.kimi_k25),
    "KimiK3ForConditionalGeneration": _with_tower(hybrid_latent.kimi, vision.kimi_k3),
    "KimiVLForConditionalGeneration": _with_tower(latent.deepseek, vision.kimi_vl),
    "Lfm2VlForConditionalGeneration": _with_tower(hybrid.lfm2, vision.lfm2_vl),
    "Llama4ForConditionalGeneration": _with_tower(TEXT_BUILDS["Llama4ForCausalLM"], vision.llama4),
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _llava_next,
    "MiniMaxM3SparseForConditionalGeneration": _with_tower(sparse.minimax_m3, vision.minimax_m3),
    "Mistral3ForConditionalGeneration": _with_tower(_named, vision.mistral3),
    "PaliGemmaForConditionalGeneration": _paligemma,
    "Phi3VForCausalLM": _phi3v,
    "Qwen2VLForConditionalGeneration": _with_tower(TEXT_BUILDS["Qwen2ForCausalLM"], vision.qwen2_vl),
    "Qwen2_5_VLForConditionalGeneration": _with_tower(TEXT_BUILDS["Qwen2ForCausalLM"], vision.qwen2_5_vl),
    "Qwen3VLForConditionalGeneration": _with_tower(TEXT_BUILDS["Qwen3ForCausalLM"], vision.qwen3_vl),
    "Qwen3VLMoeForConditionalGeneration": _with_tower(TEXT_BUILDS["Qwen3MoeForCausalLM"], vision.qwen3_vl),
    "Qwen3_5ForConditionalGeneration": _with_tower(hybrid.qwen3_5, vision.qwen3_vl),
    "Qwen3_5MoeForConditionalGeneration": _with_tower(hybrid.qwen3_5, vision.qwen3_vl),
    "Qwen4ExpForConditionalGeneration": _with_tower(sparse.qwen4_exp, vision.qwen3_vl),
    "SmolVLMForConditionalGeneration": _with_tower(TEXT_BUILDS["LlamaForCausalLM"], vision.idefics3),
}
