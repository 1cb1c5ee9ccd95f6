"""Model folders small enough to serve on a CPU: a config and a tokenizer. vLLM makes up the weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY_SIZE = 1024
SPECIAL_TOKENS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}

MODEL_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # Grouped-query attention. A token holds
    # 4 layers x 2 (key and value) x 2 kv heads x 32 elements x 2 bytes = 1,024 bytes.
    "gqa": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": SPECIAL_TOKENS["<s>"],
        "eos_token_id": SPECIAL_TOKENS["</s>"],
        "pad_token_id": SPECIAL_TOKENS["<pad>"],
    },
    # Latent attention. A token holds 4 layers x (512 + 64) elements x 2 bytes = 4,608 bytes.
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        # All layers dense: the experts are there because the config asks for them.
        "first_k_dense_replace": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": SPECIAL_TOKENS["<s>"],
        "eos_token_id": SPECIAL_TOKENS["</s>"],
        "pad_token_id": SPECIAL_TOKENS["<pad>"],
    },
}
# Five layers that look back 256 tokens and one that looks back over everything.
_GQA = MODEL_CONFIGS["gqa"]
MODEL_CONFIGS = {
    **MODEL_CONFIGS,
    "windows": {
        **_GQA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 256,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    # Three layers with a state of fixed size (a short convolution's) and one of full attention.
    "hybrid": {
        **_GQA,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "conv_dim": 128,
        "conv_dim_out": 128,
        "conv_bias": False,
        "conv_use_xavier_init": False,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_multiple_of": 16,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
    },
}


def write_model(folder: Path, name: str = "gqa") -> Path:
    """Write the model called `name` into `folder`, which is made when absent, and return the folder."""
    files = {
        "config.json": MODEL_CONFIGS[name],
        "generation_config.json": {
            "bos_token_id": SPECIAL_TOKENS["<s>"],
            "eos_token_id": SPECIAL_TOKENS["</s>"],
            "pad_token_id": SPECIAL_TOKENS["<pad>"],
        },
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 1 << 20,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in files.items():
        (folder / file_name).write_text(json.dumps(content, indent=1) + "\n")
    return folder


def _tokenizer() -> dict[str, Any]:
    """One word per token ("w4", "w5", ...), in the form that the `tokenizers` library reads."""
    vocabulary = SPECIAL_TOKENS | {
        f"w{number}": number for number in range(len(SPECIAL_TOKENS), VOCABULARY_SIZE)
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
