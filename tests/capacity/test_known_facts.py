"""Facts with who told them and when, and the lines of config for what nobody did."""

from typing import Any

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.facts import EngineFacts, MissingFact, OperatorFacts, Origin, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.gpu_catalogue import GPUS
from kvheadroom.capacity.known_facts import LineKind, config_lines, known_facts
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.readings import EchoedFlags, EngineSnapshot
from tests.capacity.facts_builder import TINY_LLAMA, facts

WEIGHED = {"vocab_size": 4096, "intermediate_size": 512}


def assessed(of: EngineFacts) -> Assessment:
    return assess(Reading(facts=of, snapshot=EngineSnapshot(engine="0"), taken_at=1000.0, facts_at=400.0), ())


def test_a_fact_of_the_page_is_as_old_as_the_page_and_one_that_was_asked_for_as_its_answer() -> None:
    of = facts(flags={"tensor_parallel_size": 2}, gpu="H100", echoed=EchoedFlags(gpu_memory_utilization=0.9))
    told = {one.name: (one.value, one.origin, one.at) for one in known_facts(assessed(of))}
    assert told["gpu_memory_utilization"] == (0.9, Origin.ECHOED, 1000.0)
    assert told["tensor_parallel_size"] == (2, Origin.CONFIG, 400.0)
    assert told["version"] == ("0.33.0", Origin.SERVER, 400.0)
    assert told["model_folder"] == ("/models/x", Origin.MODEL_FILES, 400.0)
    # Nobody told it, so it has no age.
    assert told["pipeline_parallel_size"] == (1, Origin.DEFAULT, None)
    assert told["hbm_bytes"] == (GPUS["H100"].cuda_total_bytes, Origin.ASSUMED, None)


def test_each_fact_is_told_once_and_flags_that_stand_for_no_fact_follow() -> None:
    of = facts(flags={"max_num_seqs": 7, "attention_backend": "FLASHINFER"}, gpu="H100")
    names = [one.name for one in known_facts(assessed(of))]
    assert len(names) == len(set(names))
    (backend,) = (one for one in known_facts(assessed(of)) if one.name == "attention_backend")
    assert (backend.value, backend.origin) == ("FLASHINFER", Origin.CONFIG)


def test_memory_is_no_fact_of_a_pool_whose_size_a_flag_gives() -> None:
    of = facts(gpu="H100", flags={"kv_cache_memory_bytes": 2**30})
    assert not {"hbm_bytes", "weights_bytes", "overhead_bytes"} & {
        one.name for one in known_facts(assessed(of))
    }


def test_what_is_missing_is_to_be_filled_in_with_its_reason() -> None:
    missing = MissingFact("model_files", "the server names its model 'a/b'", "set `model: /path`")
    of = resolve_facts(
        operator=OperatorFacts(flags={}),
        answers=ServerAnswers(),
        echoed=EchoedFlags(),
        model_files=None,
        model_files_missing=missing,
    )
    lines = {one.name: one for one in config_lines(of) if one.kind is LineKind.FILL_IN}
    assert list(lines) == ["model", "gpu", "weights_bytes", "max_model_len"]
    assert lines["model"].why == "the server names its model 'a/b'"
    assert (lines["max_model_len"].is_flag, lines["gpu"].is_flag) == (True, False)
    # The card says the platform too.
    assert len({one.name for one in config_lines(of)}) == len(config_lines(of))


def test_an_estimate_is_left_to_who_knows_better_and_a_default_stands_as_it_is_taken() -> None:
    kinds = {one.name: (one.kind, one.value) for one in config_lines(facts(gpu="H100", config=_config()))}
    assert kinds["overhead_gb"][0] is kinds["hbm_bytes"][0] is kinds["block_size"][0] is LineKind.IF_KNOWN
    assert kinds["tensor_parallel_size"] == (LineKind.CONFIRM, 1)
    assert kinds["kv_cache_dtype"] == (LineKind.CONFIRM, "auto")
    assert kinds["attention_backend"] == (LineKind.CONFIRM, None)


def test_what_tells_why_requests_wait_is_asked_for_where_nobody_said_it() -> None:
    lines = {one.name: one for one in config_lines(facts(config=_config()))}
    assert (lines["max_num_seqs"].kind, lines["max_num_seqs"].value) == (LineKind.IF_KNOWN, None)
    assert lines["max_num_seqs"].why == "not known; it tells what a queue waits for"
    by_default = {one.name: one for one in config_lines(facts(gpu="H100", config=_config()))}["max_num_seqs"]
    assert by_default.value == facts(gpu="H100", config=_config()).max_num_seqs.value  # type: ignore[union-attr]
    assert by_default.why.endswith("(vLLM's default on this hardware); it tells what a queue waits for")
    said = facts(gpu="H100", config=_config(), flags={"max_num_seqs": 7, "max_num_batched_tokens": 4096})
    assert not {"max_num_seqs", "max_num_batched_tokens"} & {one.name for one in config_lines(said)}


def test_what_the_lines_confirm_changes_no_prediction_and_is_assumed_no_more() -> None:
    of = facts(gpu="H100", config=_config())
    confirmed = [one for one in config_lines(of) if one.kind is LineKind.CONFIRM]
    again = facts(
        gpu="H100", config=_config(), flags={one.name: one.value for one in confirmed if one.is_flag}
    )
    assert len(confirmed) > 8
    assert predict(again).pool == predict(of).pool
    assert predict(again).layout == predict(of).layout
    assert {name for name, _ in again.assumed()} == {
        "block_size",
        "hbm_bytes",
        "weights_bytes",
        "overhead_bytes",
    }


def _config() -> dict[str, Any]:
    return TINY_LLAMA | WEIGHED
