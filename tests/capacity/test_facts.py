"""Where facts come from, what is assumed, and what is missing with its way out."""

import pytest

from kvheadroom.capacity.facts import MissingFact, OperatorFacts, Origin, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.kv_cache import Refusal, plan_layout
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.release_rules import parse_release, rules_for
from kvheadroom.capacity.stored_model import ModelFiles
from tests.capacity.facts_builder import TINY_LLAMA, facts


def test_a_flag_echoed_by_the_engine_wins_over_the_config_and_the_config_over_the_default() -> None:
    both = facts(flags={"kv_cache_dtype": "fp8"}, echoed=EchoedFlags(kv_cache_dtype="fp8_e5m2"))
    assert (both.kv_cache_dtype.value, both.kv_cache_dtype.origin) == ("fp8_e5m2", Origin.ECHOED)
    config = facts(flags={"kv_cache_dtype": "fp8"})
    assert (config.kv_cache_dtype.value, config.kv_cache_dtype.origin) == ("fp8", Origin.CONFIG)
    default = facts()
    assert (default.kv_cache_dtype.value, default.kv_cache_dtype.origin) == ("auto", Origin.DEFAULT)


def test_max_model_len_is_the_servers_then_the_configs_then_the_models_own_as_an_assumption() -> None:
    told = facts(flags={"max_model_len": 1024}, max_model_len=2048).max_model_len
    configured = facts(flags={"max_model_len": 1024}, max_model_len=None).max_model_len
    assumed = facts(max_model_len=None)
    assert told is not None
    assert configured is not None
    assert assumed.max_model_len is not None
    assert (told.value, told.assumed) == (2048, False)
    assert (configured.value, configured.assumed) == (1024, False)
    assert (assumed.max_model_len.value, assumed.max_model_len.assumed) == (32768, True)
    assert "max_model_len" in dict(assumed.assumed())


@pytest.mark.parametrize(
    ("version", "utilization"), [("0.19.0", 0.9), ("0.20.0", 0.92), ("0.33.0", 0.92), (None, 0.92)]
)
def test_the_default_utilization_is_that_of_the_release(version: str | None, utilization: float) -> None:
    assert facts(version=version).gpu_memory_utilization.value == utilization


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", (0, 32, 0)),
        ("v0.33.1", (0, 33, 1)),
        ("0.33.0rc1", (0, 33, 0)),
        ("0.11.2.dev5+gabc123", (0, 11, 2)),
        ("0.32", (0, 32, 0)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("9" * 5000 + ".1", None),
        ("0.1.dev1+g0123", None),  # a build from source without tags
        ("unknown", None),
        ("", None),
        ("12", None),
    ],
)
def test_a_release_number_is_read_from_every_form_vllm_prints(
    version: str, release: tuple[int, int, int] | None
) -> None:
    assert parse_release(version) == release


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        (None, (0, 33)),
        ("nightly", (0, 33)),
        ("0.34.0", (0, 33)),
        ("1.0.0", (0, 33)),
        ("0.31.0", (0, 32)),
        ("0.8.5", (0, 32)),
    ],
)
def test_a_release_that_is_not_verified_takes_the_nearest_verified_rules_and_says_so(
    version: str | None, taken: tuple[int, int]
) -> None:
    rules = rules_for(version)
    assert rules.taken_from == taken
    assert rules.assumed_because is not None
    assert "release" in dict(facts(version=version).assumed())


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1"])
def test_a_verified_release_is_no_assumption(version: str) -> None:
    assert "release" not in dict(facts(version=version).assumed())


def test_what_is_said_to_be_off_is_no_longer_assumed() -> None:
    said = facts(flags={"speculative_config": None, "attention_backend": None, "pipeline_parallel_size": 1})
    assert not {"speculative_config", "attention_backend", "pipeline_parallel_size"} & set(
        dict(said.assumed())
    )
    assert said.obstacles == ()


def test_a_flag_that_is_not_modelled_is_an_obstacle() -> None:
    overridden = facts(flags={"hf_overrides": {"head_dim": 64}})
    assert overridden.obstacles == ("the flag hf_overrides={'head_dim': 64} is not modelled",)
    assert predict(overridden).layout is None
    assert predict(overridden).cannot_predict == overridden.obstacles


def test_layers_that_the_engine_says_keep_their_dtype_are_taken_and_win_over_the_config() -> None:
    echoed = EchoedFlags(kv_cache_dtype_skip_layers=("0", "3"))
    assert facts(echoed=echoed).flags.kv_cache_dtype_skip_layers == ("0", "3")
    assert "kv_cache_dtype_skip_layers" not in dict(facts(echoed=echoed).assumed())
    said = {"kv_cache_dtype_skip_layers": ["1"]}
    assert facts(flags=said).flags.kv_cache_dtype_skip_layers == ("1",)
    assert facts(flags=said, echoed=echoed).flags.kv_cache_dtype_skip_layers == ("0", "3")
    assert dict(facts().assumed())["kv_cache_dtype_skip_layers"] == "none (vLLM's default)"


@pytest.mark.parametrize(
    ("tensor_parallel_size", "kv_heads", "reason"),
    [
        (3, 2, "the 4 attention heads are not divisible by tensor_parallel_size=3"),
        (8, 2, "the 4 attention heads are not divisible by tensor_parallel_size=8"),
        (2, 3, "the 3 KV heads and tensor_parallel_size=2 do not divide one another"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused_as_vllm_refuses_them(
    tensor_parallel_size: int, kv_heads: int, reason: str
) -> None:
    refused = facts(
        config={**TINY_LLAMA, "num_key_value_heads": kv_heads},
        flags={"tensor_parallel_size": tensor_parallel_size},
    )
    assert plan_layout(refused) == Refusal((reason,))
    prediction = predict(refused)
    assert prediction.layout is None
    assert prediction.cannot_predict == (f"vLLM refuses: {reason}",)


def test_what_the_pool_needs_is_missing_only_where_no_flag_gives_it() -> None:
    assert {m.fact for m in facts().missing} == {"hbm_bytes", "weights_bytes"}
    assert {m.fact for m in facts(hbm_bytes=1, weights_bytes=1).missing} == set()
    assert {m.fact for m in facts(gpu="cpu").missing} == {"kv_cache_memory_bytes"}
    assert facts(echoed=EchoedFlags(kv_cache_memory_bytes=1 << 22)).missing == ()
    assert facts(echoed=EchoedFlags(num_gpu_blocks_override=7)).missing == ()
    for missing in facts().missing:
        assert missing.way_out.startswith("set `")


def test_a_gpu_of_the_catalogue_gives_its_cuda_total_marked_assumed() -> None:
    b200 = facts(gpu="B200", weights_bytes=1)
    assert b200.hbm_bytes is not None
    assert b200.hbm_bytes.value == 182_642 * 2**20
    assert "hbm_bytes" in dict(b200.assumed())
    said = facts(gpu="B200", hbm_bytes=5, weights_bytes=1)
    assert said.hbm_bytes is not None
    assert said.hbm_bytes.value == 5
    assert "hbm_bytes" not in dict(said.assumed())


def test_the_default_block_size_is_that_of_the_platform() -> None:
    assert facts().block_size.value == 16
    assert facts(gpu="cpu").block_size.value == 128


def test_every_flag_that_nobody_said_is_listed_as_assumed() -> None:
    assumed = dict(facts(echoed=EchoedFlags(kv_cache_memory_bytes=1)).assumed())
    assert {"platform", "tensor_parallel_size", "block_size", "kv_cache_dtype", "dtype"} <= set(assumed)
    assert {"pipeline_parallel_size", "decode_context_parallel_size", "speculative_config"} <= set(assumed)
    # The pool is given by a flag, so the terms of the memory sum are not part of this prediction.
    assert "overhead_bytes" not in assumed
    said = dict(
        facts(
            gpu="cpu",
            flags={"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "block_size": 32},
            echoed=EchoedFlags(kv_cache_memory_bytes=1),
        ).assumed()
    )
    assert not {"platform", "tensor_parallel_size", "pipeline_parallel_size", "block_size"} & set(said)


@pytest.mark.parametrize(
    ("gpu", "flags", "tokens"),
    [
        ("L40S", {}, 2048),
        ("A100-80GB", {}, 2048),  # 80 GB, but an A100
        ("H100", {}, 8192),
        ("B200", {}, 16384),
        ("cpu", {}, 2048),
        ("cpu", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 8192),
        ("H100", {"max_num_batched_tokens": 777}, 777),
        # 3 requests of at most 2,048 tokens
        ("H100", {"max_num_seqs": 3}, 6144),
        (None, {"max_num_batched_tokens": 777}, 777),
        (None, {}, None),
    ],
)
def test_how_many_tokens_are_batched_goes_by_the_gpu_unless_it_is_said(
    gpu: str | None, flags: dict[str, int], tokens: int | None
) -> None:
    batched = facts(gpu=gpu, flags=flags).max_num_batched_tokens
    assert (None if batched is None else batched.value) == tokens
    if batched is not None:
        assert batched.assumed == ("max_num_batched_tokens" not in flags)


@pytest.mark.parametrize(
    ("gpu", "flags", "seqs"),
    [
        ("L40S", {}, 256),
        ("H100", {}, 1024),
        ("cpu", {"tensor_parallel_size": 2}, 256),
        ("H100", {"max_num_seqs": 40}, 40),
        # Never more than the tokens of a step.
        ("H100", {"max_num_batched_tokens": 777}, 777),
        (None, {"max_num_seqs": 40}, 40),
        (None, {"max_num_batched_tokens": 777}, None),
    ],
)
def test_how_many_requests_run_at_once_goes_by_the_gpu_unless_it_is_said(
    gpu: str | None, flags: dict[str, int], seqs: int | None
) -> None:
    found = facts(gpu=gpu, flags=flags).max_num_seqs
    assert (None if found is None else found.value) == seqs
    if found is not None:
        assert found.assumed == ("max_num_seqs" not in flags)


def test_the_overhead_is_an_estimate_until_the_operator_says_one() -> None:
    assert "overhead_bytes" in dict(facts(hbm_bytes=10**11, weights_bytes=1).assumed())
    said = facts(hbm_bytes=10**11, weights_bytes=1, overhead_bytes=7)
    assert "overhead_bytes" not in dict(said.assumed())


def test_a_model_folder_that_may_be_another_machines_is_an_assumption() -> None:
    found = resolve_facts(
        operator=OperatorFacts(flags={}),
        answers=ServerAnswers(),
        echoed=EchoedFlags(),
        model_files=ModelFiles(folder="/m", config=TINY_LLAMA, assumed_because="the same files there"),
    )
    assert dict(found.assumed())["model_folder"] == "the same files there"


def test_without_model_files_the_reason_is_kept() -> None:
    reason = MissingFact("model_files", "because", "set `model: /path`")
    found = resolve_facts(
        operator=OperatorFacts(flags={}),
        answers=ServerAnswers(max_model_len=5),
        echoed=EchoedFlags(kv_cache_memory_bytes=1),
        model_files=None,
        model_files_missing=reason,
    )
    assert found.missing == (reason,)
    assert found.model is None
