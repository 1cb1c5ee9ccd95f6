"""Predictions against vLLM's own planning functions, and the laws that any prediction keeps."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvheadroom.capacity.prediction import Prediction, predict
from kvheadroom.capacity.readings import EchoedFlags
from tests.capacity.facts_builder import TINY_LLAMA, facts
from tests.capacity.truth import BY_ID

DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_size": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
# A head that every backend of every GPU takes
USUAL_LLAMA = {**TINY_LLAMA, "head_dim": 128}


def test_latent_attention_on_a_cpu_has_blocks_of_16_whatever_the_flag_says() -> None:
    # 4 layers x 576 x 2 B = 4,608 B per token, x 16 = 73,728 B per block; 16 MiB // 73,728 = 227 blocks
    # A real vLLM 0.32.0 said the same: 3,632 tokens, 3.55x at 1,024.
    for block_size in ({}, {"block_size": 64}):
        prediction = predict(
            facts(
                config=DEEPSEEK,
                gpu="cpu",
                max_model_len=1024,
                flags={**block_size, "tensor_parallel_size": 2},
                echoed=EchoedFlags(kv_cache_memory_bytes=16 << 20),
            )
        )
        assert prediction.layout is not None
        assert prediction.pool is not None
        # Every rank holds a full copy, so tensor parallelism changes nothing.
        assert (prediction.layout.bytes_per_token, prediction.layout.block_size) == (4608, 16)
        assert (prediction.pool.num_blocks, prediction.pool.pool_tokens) == (227, 3632)
        assert prediction.pool.max_concurrency == 3.546875


def test_latent_attention_needs_the_gpu_said_for_each_has_blocks_of_its_own() -> None:
    unsaid = predict(facts(config=DEEPSEEK, flags={"kv_cache_memory_bytes": 1 << 30}))
    assert unsaid.layout is None
    assert "say it (`gpu: H200`" in " ".join(unsaid.cannot_predict)
    for gpu, block_size in (("H200", 16), ("B200", 32), ("A100-80GB", 16)):
        layout = predict(facts(config=DEEPSEEK, gpu=gpu, weights_bytes=1)).layout
        assert layout is not None
        assert layout.block_size == block_size


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_plain_attention_needs_no_gpu_said_for_all_cut_it_alike(dtype: str) -> None:
    # 4 layers x 2 (K, V) x 2 KV heads x 128 x 2 or 1 B
    bytes_per_token = 4096 if dtype == "auto" else 2048
    layout = predict(facts(config=USUAL_LLAMA, flags={"kv_cache_dtype": dtype})).layout
    assert layout is not None
    assert (layout.bytes_per_token, layout.block_size) == (bytes_per_token, 16)


def test_windows_need_the_gpu_or_the_tokens_of_a_batch_said() -> None:
    config = {**TINY_LLAMA, "sliding_window": 64}
    unsaid = predict(facts(config=config))
    assert unsaid.layout is None
    assert "`flags: {max_num_batched_tokens: N}`" in " ".join(unsaid.cannot_predict)
    layout = predict(facts(config=config, flags={"max_num_batched_tokens": 100})).layout
    assert layout is not None
    # 63 tokens of the window and two batches of 100 in flight are 263: 17 blocks of 16, and one more
    assert [layout.blocks_per_session(tokens) for tokens in (1, 16, 17, 262, 263, 2048)] == [
        2,
        2,
        3,
        18,
        18,
        18,
    ]
    assert layout.bytes_per_token == 0


def test_a_config_that_leaves_open_what_backends_go_by_is_unknown_not_refused() -> None:
    for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"):
        config = {name: value for name, value in DEEPSEEK.items() if name != key}
        (reason,) = predict(
            facts(config=config, gpu="H200", hbm_bytes=10**11, weights_bytes=1)
        ).cannot_predict
        assert reason.startswith(f"config.json: `{key}` is left out")


def test_that_a_cpu_without_amx_is_taken_is_an_assumption() -> None:
    assert "cpu_amx" in dict(facts(config=DEEPSEEK, gpu="cpu").assumed())
    assert "cpu_amx" not in dict(facts(gpu="cpu").assumed())


def test_pool_bytes_are_what_utilization_weights_and_overhead_leave_of_hbm() -> None:
    # ceil(100e9 x 0.9) = 90e9; weights 40e9 / 2 = 20e9; overhead 5e9 -> 65e9 bytes.
    # TP 2: one KV head per GPU -> 512 B per token, 16 tokens a block -> 8,192 B; 65e9 // 8,192 = 7,934,570.
    prediction = predict(
        facts(
            hbm_bytes=100_000_000_000,
            weights_bytes=40_000_000_000,
            overhead_bytes=5_000_000_000,
            flags={"tensor_parallel_size": 2, "gpu_memory_utilization": 0.9},
        )
    )
    assert prediction.budget is not None
    assert prediction.pool is not None
    assert prediction.budget.available_bytes == 65_000_000_000
    assert [(t.term, t.bytes) for t in prediction.budget.terms] == [
        ("hbm_total", 100_000_000_000),
        ("outside_utilization", -10_000_000_000),
        ("weights", -20_000_000_000),
        ("overhead", -5_000_000_000),
    ]
    assert prediction.pool.num_blocks == 7_934_570
    assert prediction.pool.pool_bytes + (prediction.pool.unused_bytes or 0) == 65_000_000_000


def test_bytes_are_rounded_up_where_vllm_rounds_them_up() -> None:
    budget = predict(
        facts(
            hbm_bytes=1_000_000_001,
            weights_bytes=200_000_001,
            overhead_bytes=0,
            flags={"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5},
        )
    ).budget
    assert budget is not None
    # ceil(500,000,000.5) - ceil(100,000,000.5)
    assert budget.available_bytes == 500_000_001 - 100_000_001


def test_a_budget_of_exactly_nothing_is_no_budget() -> None:
    nothing = facts(
        hbm_bytes=1000, weights_bytes=500, overhead_bytes=0, flags={"gpu_memory_utilization": 0.5}
    )
    assert predict(nothing).budget is None
    assert "leave nothing" in " ".join(predict(nothing).cannot_predict)


def test_weights_over_the_budget_are_said_with_by_how_much() -> None:
    prediction = predict(facts(hbm_bytes=10**10, weights_bytes=10**11, overhead_bytes=0))
    assert prediction.pool is None
    # 100 GB against 10 GB x 0.92
    assert "(100.00 GB per GPU) exceed the 9.20 GB" in " ".join(prediction.cannot_predict)
    assert "by 90.80 GB" in " ".join(prediction.cannot_predict)


def test_a_block_count_given_by_flag_replaces_the_memory_sum() -> None:
    prediction = predict(facts(flags={"num_gpu_blocks_override": 128, "block_size": 32}))
    assert prediction.pool is not None
    assert (prediction.pool.num_blocks, prediction.pool.pool_tokens) == (128, 4096)


def test_a_pool_smaller_than_one_block_is_no_pool() -> None:
    prediction = predict(facts(flags={"kv_cache_memory_bytes": 16_383}))
    assert prediction.pool is None
    assert "less than one block of 16384 bytes" in " ".join(prediction.cannot_predict)


@pytest.mark.parametrize(
    ("change", "bytes_per_token"),
    [
        ({"torch_dtype": "float16"}, 1024),
        ({"torch_dtype": "float32"}, 1024),  # vLLM runs a float32 checkpoint in 16 bits unless told otherwise
        ({"torch_dtype": None}, 1024),
        ({"num_key_value_heads": None}, 2048),  # MHA: as many K/V heads as heads
        ({"num_key_value_heads": 1}, 512),  # MQA
        ({"head_dim": None}, 1024),  # hidden_size 128 / 4 heads = 32
        # vLLM's Qwen2 does not look at head_dim
        ({"architectures": ["Qwen2ForCausalLM"], "head_dim": 64}, 1024),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 64}, 2048),
        ({"layer_types": ["full_attention"] * 4}, 1024),
        # The layer types say where the window is; vLLM's Llama does not look at use_sliding_window
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 4}, 1024),
        ({"sliding_window": 0}, 1024),  # how some checkpoints say none
        ({"attention_chunk_size": 8192}, 1024),  # only Llama 4 has chunks
    ],
)
def test_config_json_fields_are_read_as_vllm_reads_them(change: dict[str, Any], bytes_per_token: int) -> None:
    prediction = predict(facts(config={**TINY_LLAMA, **change}, gpu="H100"))
    assert prediction.layout is not None
    assert prediction.layout.bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": ["Nobody"]}, "rules of Nobody are not known"),
        ({"architectures": "LlamaForCausalLM"}, "names no architecture"),
        ({"architectures": [["LlamaForCausalLM"]]}, "names no architecture"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "`layer_types` has 2 entries for 4 layers",
        ),
        ({"num_hidden_layers": "4"}, "`num_hidden_layers` is '4'"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` is True"),
        ({"num_attention_heads": 0}, "`num_attention_heads` is 0"),
        ({"hidden_size": None, "head_dim": None}, "`hidden_size` is left out"),
        ({"hidden_size": 3, "head_dim": None}, "`num_attention_heads` is larger than the hidden size"),
        ({"num_hidden_layers": 10**400}, "`num_hidden_layers` is out of range"),
        ({"num_hidden_layers": -1}, "`num_hidden_layers` is -1"),
        ({"max_position_embeddings": 0}, "`max_position_embeddings` is 0"),
        (
            {"dual_chunk_attention_config": {"chunk_size": 8192}},
            "`dual_chunk_attention_config` is not modelled",
        ),
        (
            {"compression_config": {"kv_cache_scheme": {"num_bits": 8}}},
            "the checkpoint's own KV-cache scheme",
        ),
        ({"torch_dtype": "float64"}, "the dtype of config.json is 'float64'"),
        # Left-out keys whose default is transformers' own and may change with it
        ({"architectures": ["MistralForCausalLM"]}, "`sliding_window` is left out"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": None}, "`head_dim` is left out"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "`sliding_window` is left out"),
        ({"architectures": ["Glm4MoeForCausalLM"], "head_dim": None}, "`head_dim` is left out"),
        (
            {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
            "the checkpoint's own KV-cache scheme",
        ),
    ],
)
def test_a_config_that_cannot_be_modelled_says_why(change: dict[str, Any], reason: str) -> None:
    prediction = predict(facts(config={**TINY_LLAMA, **change}, gpu="H100"))
    assert prediction.layout is None
    assert reason in " ".join(prediction.cannot_predict)


def test_a_declared_kv_scheme_is_no_obstacle_once_the_dtype_is_said() -> None:
    config = {**TINY_LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    prediction = predict(facts(config=config, gpu="H100", echoed=EchoedFlags(kv_cache_dtype="fp8_e4m3")))
    assert prediction.layout is not None
    assert prediction.layout.bytes_per_token == 512


@given(
    available=st.integers(2**20, 2**40),
    more=st.integers(0, 2**40),
    block_size=st.sampled_from([16, 32, 64, 128]),
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    kv_heads=st.sampled_from([1, 2, 8, 16]),
    length=st.integers(1, 200_000),
)
def test_more_memory_never_holds_fewer_tokens_and_longer_sessions_never_more(
    available: int, more: int, block_size: int, tp: int, kv_heads: int, length: int
) -> None:
    config = {**TINY_LLAMA, "num_key_value_heads": kv_heads, "num_attention_heads": 48, "hidden_size": 768}

    def plan(memory: int) -> Prediction:
        flags = {"kv_cache_memory_bytes": memory, "block_size": block_size, "tensor_parallel_size": tp}
        return predict(facts(config=config, flags=flags, max_model_len=length))

    small, large = plan(available), plan(available + more)
    assert small.layout is not None
    if small.pool is None:
        return
    assert large.pool is not None
    assert small.pool.num_blocks <= large.pool.num_blocks
    assert small.pool.pool_bytes <= available < small.pool.pool_bytes + small.layout.bytes_per_block
    assert small.pool.num_blocks / small.layout.blocks_per_session(length) >= (
        small.pool.num_blocks / small.layout.blocks_per_session(length + 1)
    )


@given(
    tp=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 4),
    dcp=st.sampled_from([1, 2, 4]),
    available=st.integers(2**24, 2**36),
    length=st.integers(1, 300_000),
    shorter=st.integers(0, 299_999),
)
def test_parallelism_keeps_its_laws(
    tp: int, pipeline: int, dcp: int, available: int, length: int, shorter: int
) -> None:
    def plan(**flags: int) -> Prediction:
        return predict(
            facts(
                config=DEEPSEEK,
                gpu="H200",
                max_model_len=length,
                flags={"kv_cache_memory_bytes": available, **flags},
            )
        )

    one = plan()
    assert one.layout is not None
    assert one.pool is not None
    # Latent attention: every tensor-parallel rank holds a full copy.
    spread = plan(tensor_parallel_size=tp)
    assert spread.layout == one.layout
    # Decode context parallelism multiplies the tokens of a block, and nothing else.
    if 4 % dcp == 0 and tp == 4:
        context = plan(tensor_parallel_size=4, decode_context_parallel_size=dcp)
        assert context.layout is not None
        assert context.pool is not None
        assert context.layout.block_tokens == one.layout.block_tokens * dcp
        assert context.pool.num_blocks == one.pool.num_blocks
        assert context.pool.longest_bootable is not None
        assert context.pool.longest_bootable >= (one.pool.longest_bootable or 0)
    # All layers stand on some stage, and the pool is that of the widest.
    staged = plan(pipeline_parallel_size=pipeline)
    assert staged.layout is not None
    assert staged.pool is not None
    assert sum(staged.layout.stage_layers) == 4
    assert staged.pool.num_blocks == available // staged.layout.bytes_per_block
    assert staged.pool.num_blocks >= one.pool.num_blocks
    # What starts at one length starts at every shorter one.
    assert one.pool.boots == (length <= (one.pool.num_blocks - 1) * one.layout.block_tokens)
    if one.pool.boots and 0 < shorter < length:
        below = predict(
            facts(
                config=DEEPSEEK, gpu="H200", max_model_len=shorter, flags={"kv_cache_memory_bytes": available}
            )
        )
        assert below.pool is not None
        assert below.pool.boots


def test_facts_never_hold_a_result_of_the_engine() -> None:
    names = set(EchoedFlags.__dataclass_fields__)
    results = {"num_blocks", "num_gpu_blocks", "pool_tokens", "max_concurrency", "attention_block_size"}
    assert not names & results
    # Where the page does not say that the operator chose the block size, it is a result and not echoed.
    assert replace(EchoedFlags(), kv_cache_dtype="auto").block_size is None


WINDOWED = {**TINY_LLAMA, "sliding_window": 64}


@pytest.mark.parametrize(
    ("gpu", "flags", "in_flight"),
    [
        ("H200", {}, 200),
        ("H200", {"async_scheduling": False}, 100),
        ("H200", {"pipeline_parallel_size": 2}, 300),
        # The CPU backend schedules nothing ahead (platforms/cpu.py), nor does a draft of the older model runner.
        ("CPU", {}, 100),
        ("CPU", {"async_scheduling": True}, 100),
        ("H200", {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}}, 100),
        ("H200", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, 200),
    ],
)
def test_a_window_keeps_the_batches_that_are_in_flight(
    gpu: str, flags: dict[str, Any], in_flight: int
) -> None:
    layout = predict(
        facts(
            config=WINDOWED,
            gpu=gpu.lower() if gpu == "CPU" else gpu,
            flags={"max_num_batched_tokens": 100, **flags},
        )
    ).layout
    assert layout is not None
    assert layout.shape.in_flight_tokens == in_flight


EAGLE = {**TINY_LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}


def drafting(**config: Any) -> dict[str, Any]:
    return {"speculative_config": {"num_speculative_tokens": 3, **config}}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            drafting(method="eagle3", draft_config=EAGLE, kv_cache_dtype="auto"),
            "kv_cache_dtype is not modelled",
        ),
        (drafting(method="mtp", attention_backend="TRITON_MLA"), "attention_backend is not modelled"),
        (
            drafting(method="eagle3", draft_config=EAGLE, draft_tensor_parallel_size=1),
            "draft_tensor_parallel_size",
        ),
        (drafting(method=["eagle3"]), "method is ['eagle3'], a word is needed"),
        (
            drafting(method="draft_model", draft_config={**TINY_LLAMA, "max_position_embeddings": 1024}),
            "say max_model_len: 1024 or less",
        ),
    ],
)
def test_a_draft_that_is_not_modelled_says_why(flags: dict[str, Any], reason: str) -> None:
    assert reason in " ".join(facts(gpu="H200", flags=flags).obstacles)


def test_an_eagle_draft_of_shorter_contexts_takes_its_targets_length() -> None:
    stretched = {**EAGLE, "max_position_embeddings": 1024}
    assert not facts(gpu="H200", flags=drafting(method="eagle3", draft_config=stretched)).obstacles
    # Yarn keeps the length that it was made for, so vLLM lowers max_model_len instead.
    kept = {**stretched, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    assert facts(gpu="H200", flags=drafting(method="eagle3", draft_config=kept)).obstacles


def test_a_kv_connector_matters_only_where_layers_differ() -> None:
    flags = {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}
    assert predict(facts(gpu="H200", flags=flags)).layout is not None
    mixed = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert "hybrid KV cache manager" in " ".join(
        predict(facts(config=mixed, gpu="H200", flags=flags)).cannot_predict
    )


def test_bytes_per_token_are_the_share_of_one_gpu() -> None:
    flags = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}
    layout = predict(facts(config=DEEPSEEK, gpu="H200", flags=flags)).layout
    assert layout is not None
    # 4 layers x 576 x 2 B, a quarter of the tokens each
    assert layout.bytes_per_token == 1152


@pytest.mark.parametrize(
    "model_type", ["smollm3", "qwen2", "qwen2_moe", "qwen3_vl_text", "glm4v_text", "seed_oss"]
)
def test_left_out_kv_heads_are_asked_for_where_the_class_has_a_number_of_its_own(model_type: str) -> None:
    config = {**TINY_LLAMA, "model_type": model_type, "sliding_window": None}
    del config["num_key_value_heads"]
    assert "`num_key_value_heads`" in " ".join(predict(facts(config=config, gpu="H200")).cannot_predict)


def test_a_length_that_was_asked_for_is_held_against_the_longest_context_and_a_running_one_is_not() -> None:
    asked = predict(facts(gpu="H100", max_model_len=None, flags={"max_model_len": 32769}))
    assert asked.cannot_predict == (
        "vLLM refuses: max_model_len (32769) is greater than the model's longest context (32768)",
    )
    # A server that runs with it has been told to take it (VLLM_ALLOW_LONG_MAX_MODEL_LEN).
    assert predict(facts(gpu="H100", max_model_len=32769)).layout is not None


def test_a_draft_may_be_called_by_the_name_of_its_model() -> None:
    flags = {"speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 1}}
    named = facts(config={**DEEPSEEK, "num_nextn_predict_layers": 1}, gpu="H200", flags=flags)
    assert (named.obstacles, named.draft.method, len(named.draft.layers)) == ((), "mtp", 1)


# Sizes of `llama31-8b-tp1-h100`, whose weights are known from its config.json.
KNOWN_LLAMA = BY_ID["llama31-8b-tp1-h100"]["config"]
KNOWN_LLAMA_BYTES = 16_060_522_496


def test_each_rank_holds_its_norms_whole_and_its_share_of_the_rest() -> None:
    budget = predict(facts(config=KNOWN_LLAMA, gpu="H100", flags={"tensor_parallel_size": 2})).budget
    assert budget is not None
    weights = next(term for term in budget.terms if term.term == "weights")
    # 65 norms of 4,096 elements of 2 bytes are whole on both.
    assert -weights.bytes == (KNOWN_LLAMA_BYTES + 65 * 4096 * 2) // 2
    assert weights.origin == "tensor by tensor, by config.json"


@pytest.mark.parametrize("said", [KNOWN_LLAMA_BYTES, KNOWN_LLAMA_BYTES + 291 * 130])
def test_an_index_that_counts_headers_as_well_does_not_change_the_weights(said: int) -> None:
    with_index = predict(facts(config=KNOWN_LLAMA, gpu="H100", weights_bytes=said))
    assert with_index.budget == predict(facts(config=KNOWN_LLAMA, gpu="H100")).budget


def test_weights_of_another_size_than_config_json_makes_are_taken_as_they_are_said() -> None:
    quantized = predict(facts(config=KNOWN_LLAMA, gpu="H100", weights_bytes=9 * 10**9))
    assert quantized.budget is not None
    assert [(term.bytes, term.origin) for term in quantized.budget.terms if term.term == "weights"] == [
        (
            -9 * 10**9,
            "your config, an even share for each GPU",
        )
    ]


def test_each_pipeline_stage_has_a_budget_of_its_own() -> None:
    flags = {"pipeline_parallel_size": 3, "gpu_memory_utilization": 0.9}
    prediction = predict(
        facts(config=KNOWN_LLAMA, hbm_bytes=40 * 10**9, overhead_bytes=0, flags=flags, gpu="H100")
    )
    assert prediction.budget is not None
    assert prediction.layout is not None
    assert prediction.pool is not None
    layer = 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096)
    vocabulary = 2 * 128256 * 4096
    # 32 layers over three stages: 11, 11 and 10.
    stages = (11 * layer + vocabulary, 11 * layer, 10 * layer + vocabulary + 2 * 4096)
    assert prediction.budget.stage_available_bytes == tuple(36 * 10**9 - held for held in stages)
    assert prediction.budget.available_bytes == sum(term.bytes for term in prediction.budget.terms)
    assert prediction.pool.num_blocks == min(
        have // size
        for have, size in zip(
            prediction.budget.stage_available_bytes, prediction.layout.stage_bytes_per_block, strict=True
        )
    )


def test_stages_of_weights_that_are_not_known_have_no_budget() -> None:
    prediction = predict(facts(hbm_bytes=10**10, weights_bytes=10**9, flags={"pipeline_parallel_size": 2}))
    assert prediction.budget is None
    assert "shared out over pipeline stages is not known" in " ".join(prediction.cannot_predict)


def test_weights_known_from_config_json_are_not_missing() -> None:
    assert "weights_bytes" not in {missing.fact for missing in facts(config=KNOWN_LLAMA, gpu="H100").missing}
    assert (
        "`intermediate_size` is left out"
        in {missing.fact: missing.why for missing in facts(gpu="H100").missing}["weights_bytes"]
    )
