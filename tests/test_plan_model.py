"""`kvheadroom plan MODEL`: the command as a planner types it, its text, its JSON, its exit codes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.argument_readers import whole_number
from tests.capacity.article_models import CONFIGS, WEIGHTS_BYTES
from tests.capacity.checkpoint_headers import decoder, plain
from tests.capacity.facts_builder import TINY_LLAMA
from tests.daemon import COMMAND
from tests.doubles.http_server import Answer, http_server, ranged, text_answer
from tests.sources.safetensors_files import file_bytes, header_of, write_file
from tests.test_plan import imported_by

NVFP4 = [str(CONFIGS["nvfp4"]), "--weights-bytes", str(WEIGHTS_BYTES["nvfp4"]), "--gpu", "B200"]
FP8 = [str(CONFIGS["fp8"]), "--weights-bytes", str(WEIGHTS_BYTES["fp8"]), "--gpu", "B200"]
ARTICLE = ["--assumptions", "article", "--gpus", "56", "--session-tokens", "256K"]


def plan(*arguments: str, environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, "plan", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", **(environment or {})},
    )


def document(*arguments: str) -> dict[str, Any]:
    run = plan(*arguments, "--json")
    assert run.stderr == ""
    answer = json.loads(run.stdout)
    assert isinstance(answer, dict)
    return answer


def tiny(folder: Path, total: int | None = 1 << 20) -> Path:
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    if total is not None:
        index = {"metadata": {"total_size": total}, "weight_map": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_the_first_lines_answer_how_many_sessions_fit_and_whether_it_starts() -> None:
    run = plan(*NVFP4, "--tp", "4,8", *ARTICLE)
    assert (run.returncode, run.stderr) == (1, "")
    answers = " ".join(run.stdout.split("\n\n")[0].split())
    assert answers == (
        "TP 4 on 4 x B200: 3.00 sessions of 262,144 tokens by the sum on paper; it does NOT start at max_model_len "
        "1,048,576. TP 8 on 8 x B200: 7.64 sessions of 262,144 tokens by the sum on paper; it starts at max_model_len "
        "1,048,576."
    )


def test_the_articles_table_is_printed_digit_for_digit() -> None:
    rows = plan(*NVFP4, "--tp", "4,8", *ARTICLE).stdout.splitlines()
    assert "  TP 4      116.03  37.57   47,700    787,653      3.00    14 x 4  11.03M      no" in rows
    assert "  TP 8       58.01  95.59   47,700  2,003,889      7.64     7 x 8  14.03M     yes" in rows
    assert "  one session of 262,144 tokens takes 12.50 GB of each GPU" in rows
    rows = plan(*FP8, "--tp", "4,8", *ARTICLE).stdout.splitlines()
    assert any("TP 4      188.90" in row and row.endswith("no room") for row in rows)
    assert (
        rows[0] == "TP 4 on 4 x B200: does not fit; the weights alone exceed the budget by 23.30 GB per GPU."
    )
    assert "  TP 8       94.45  59.15   47,700  1,239,997      4.73     7 x 8  8.68M      yes" in rows


def test_no_line_is_longer_than_100_columns() -> None:
    for arguments in (
        [*NVFP4, "--tp", "4,8", "--explain", "--gpus", "56"],
        [*NVFP4, "--tp", "8", "--pp", "1,2", "--dcp", "1,8", *ARTICLE],
        [*NVFP4, "--tp", "4,8", *ARTICLE, "--compare", FP8[0], "--compare-weights-bytes", FP8[2]],
    ):
        assert max(map(len, plan(*arguments).stdout.splitlines())) <= 100


def test_json_holds_the_article_beside_vllm_with_every_step_between() -> None:
    answer = document(*NVFP4, "-tp", "8", *ARTICLE)
    (row,) = answer["models"][0]["plans"]
    assert answer["assumptions"] == "article"
    assert row["article"]["tokens"] == 2_003_889
    assert row["article"]["bytes_per_token"] == 47_700
    assert row["article"]["fleet_tokens"] == 14_027_223
    assert row["article"]["boots"] is True
    assert row["bridge"][0]["tokens"] == 2_003_889
    assert row["bridge"][-2]["tokens"] == row["kv_cache_size_tokens"]
    assert sum(step["change_tokens"] for step in row["bridge"]) == row["bridge"][-1]["tokens"] - 2_003_889
    assert row["boots"] is True
    assert row["outcome"] == "starts"
    assert {figure["name"] for figure in row["figures"]} >= {
        "num_blocks",
        "bytes_per_block",
        "kv_cache_memory",
    }
    others = {other["changes"]: other["tokens"] for other in answer["models"][0]["alternatives"]}
    assert others["-tp 4 -pp 2"] == 3_974_720
    assert answer["models"][0]["alternatives_to"]["kv_cache_size_tokens"] == 2_003_840


def test_json_stands_alone_on_standard_output_and_absent_is_null() -> None:
    run = plan(*NVFP4, "-tp", "3", "--json")
    assert (run.returncode, run.stderr) == (1, "")
    (row,) = json.loads(run.stdout)["models"][0]["plans"]
    assert row["outcome"] == "refused"
    assert "64 attention heads are not divisible by tensor_parallel_size=3" in row["reason"]
    assert row["num_blocks"] is None
    assert row["article"]["reason"] == row["reason"]
    assert row["article"]["tokens"] is None


def test_the_keys_of_the_sum_on_paper_are_there_with_and_without_an_answer() -> None:
    (told,) = document(*NVFP4, "--tp", "4")["models"][0]["plans"]
    (none,) = document(*NVFP4, "--tp", "4", "--dcp", "8")["models"][0]["plans"]
    assert list(none["article"]) == list(told["article"])
    assert {key for key, value in none["article"].items() if value is not None} == {"reason"}


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_an_output_that_is_not_utf_8_gets_the_same_lines(environment: dict[str, str]) -> None:
    arguments = [*NVFP4, "--tp", "8", "--kv-cache-memory-bytes", "50G", "--explain"]
    run = plan(*arguments, environment=environment)
    assert (run.returncode, run.stderr) == (0, "")
    whole = plan(*arguments, environment={"PYTHONIOENCODING": "utf-8"}).stdout
    assert not whole.isascii()
    assert run.stdout == whole.encode("ascii", "replace").decode()


def test_figures_of_pipeline_stages_are_each_of_their_own_stage() -> None:
    (row,) = document(*NVFP4, "--tp", "4", "--pp", "2")["models"][0]["plans"]
    figures = {figure["name"]: figure["value"] for figure in row["figures"]}
    blocks, sizes = figures["num_blocks"], figures["bytes_per_block"]
    assert sizes == row["bytes_per_block"] == [1_539_072, 1_513_728]
    assert figures["bytes_per_token"] == row["bytes_per_token"] == [size // 64 for size in sizes]
    assert figures["unused"] == [
        have - blocks * size for have, size in zip(figures["kv_cache_memory"], sizes, strict=True)
    ]
    # The stage that binds has less than a block left.
    assert figures["unused"][1] < sizes[1] < figures["unused"][0]
    text = " ".join(plan(*NVFP4, "--tp", "4", "--pp", "2", "--explain").stdout.split())
    assert "bytes_per_token stage 1: 24,048 B, stage 2: 23,652 B" in text
    assert f"unused stage 1: {figures['unused'][0]:,} B, stage 2: {figures['unused'][1]:,} B" in text


def test_explain_names_every_figure_with_its_source() -> None:
    text = plan(*NVFP4, "--tp", "8", "--explain").stdout
    for name in ("gpu_memory_total", "kv_cache_memory", "bytes_per_block", "num_blocks", "max_concurrency"):
        assert f"\n  {name} " in text
    assert "v1/worker/gpu_worker.py" in text
    assert "191,514,017,792 B = 191.514 GB = 178.361 GiB" in text


def test_comparing_two_checkpoints_tells_both_of_the_articles_figures() -> None:
    run = plan(*NVFP4, "--tp", "4,8", *ARTICLE, "--compare", FP8[0], "--compare-weights-bytes", FP8[2])
    assert "weights 464.12 GB, 38.6% smaller than" in run.stdout
    assert "11,027,142  14 replicas  +27.0% on the line above" in run.stdout
    assert "14,027,223   7 replicas  +27.2% on the line above" in run.stdout


def test_flags_may_be_spelt_in_every_way_that_vllm_takes() -> None:
    (plain,) = document(*NVFP4, "--tensor-parallel-size", "8", "--max-model-len", "262144")["models"][0][
        "plans"
    ]
    for spelling in (
        ["-tp", "8", "--max-model-len", "256K"],
        ["--tp=8", "--max_model_len=256K"],
        ["-tp=8", "--max-model", "262.144k"],
        ["--tensor_parallel_size", "8", "--max-model-len", "262144"],
    ):
        (row,) = document(*NVFP4, *spelling)["models"][0]["plans"]
        assert row == plain


@pytest.mark.parametrize(
    ("text", "value"),
    [("32768", 32_768), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1M", 1 << 20), ("1m", 10**6), ("2g", 2 * 10**9), ("1T", 1 << 40), (" 5 ", 5)],
)  # fmt: skip
def test_numbers_are_read_as_vllm_reads_them(text: str, value: int) -> None:
    assert whole_number(text) == value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say either MODEL or --cases FILE"),
        ([*NVFP4, "--cases", "x"], "say either MODEL or --cases FILE"),
        (["/no/such/model", "--gpu", "B200"], "no folder here"),
        ([NVFP4[0]], "say the GPU"),
        ([NVFP4[0], "--gpu", "B2000"], "--hbm-bytes N"),
        ([NVFP4[0], "--gpu", "CPU", "--hbm-bytes", "1G"], "--gpu CPU has no --hbm-bytes"),
        ([*NVFP4, "--max-model-len", "1.5K"], "takes no decimals; 1.5k"),
        ([*NVFP4, "--tp", "0"], "above 0"),
        ([*NVFP4, "--tp", "4,x"], "no whole number"),
        ([*NVFP4, "--pp", "65537"], "no engine has so many GPUs; at most 65,536"),
        ([*NVFP4, "--dp", "1000000000"], "no engine has so many GPUs"),
        ([*NVFP4, "--kv-cache-dtype", "fp8,"], "a word is needed"),
        ([*NVFP4, "--gpu-memory-utilization", "92"], "above 0 and at most 1"),
        ([*NVFP4, "--gpu-memory-utilization", "nan"], "above 0 and at most 1"),
        ([*NVFP4, "--overhead-gb", "-1"], "number of GB"),
        ([*NVFP4, "--mtp", "1", "--speculative-config", "{}"], "leave one of them out"),
        ([*NVFP4, "--speculative-config", "mtp"], "no JSON object"),
        ([*NVFP4, "--index", "x"], "not allowed with"),
        ([*NVFP4, "--compare-weights-bytes", "5"], "--compare OTHER, which is missing"),
        ([*NVFP4, "--vllm-version", "abc"], "no release of vLLM, such as 0.33.0"),
        ([*NVFP4, "--max-model-len", "9" * 20], "that is too large"),
        ([*NVFP4, "--marketed-gb", "0"], "above 0 is needed"),
        ([*NVFP4, "--foo"], "usage: kvheadroom plan MODEL --gpu NAME"),
        ([*NVFP4, "--foo"], "kvheadroom plan: error: unrecognized arguments: --foo"),
        ([NVFP4[0], "--gpu", "T4"], "name another card; --hbm-bytes in its place does not help"),
        ([NVFP4[0], "--gpu", "MI300X"], "name another card"),
        (["https://hub.example/zai-org/GLM-5/tree/main", "--gpu", "B200"], "did you mean zai-org/GLM-5?"),
        (["zai-org/GLM-5/", "--gpu", "B200"], "did you mean zai-org/GLM-5?"),
        ([*NVFP4, "--tp", ",".join(map(str, range(1, 70)))], "at most 64"),
    ],
)
def test_a_wrong_option_ends_with_2_and_the_way_out(arguments: list[str], words: str) -> None:
    run = plan(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert words in " ".join(run.stderr.split()), run.stderr
    assert "Traceback" not in run.stderr


def test_an_index_file_gives_the_size_of_the_weights(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"metadata": {"total_size": WEIGHTS_BYTES["nvfp4"]}}))
    (row,) = document(NVFP4[0], "--index", str(index), "--gpu", "B200", "--tp", "8", *ARTICLE)["models"][0][
        "plans"
    ]
    assert row["article"]["tokens"] == 2_003_889


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "no metadata.total_size; say --weights-bytes"),
        ("[]", "no JSON object"),
        ("nothing", "no JSON"),
        (None, "no such file"),
    ],
)
def test_an_index_that_tells_nothing_ends_with_2(tmp_path: Path, content: str | None, words: str) -> None:
    index = tmp_path / "index.json"
    if content is not None:
        index.write_text(content)
    run = plan(NVFP4[0], "--index", str(index), "--gpu", "B200")
    assert (run.returncode, run.stdout) == (2, "")
    assert words in run.stderr


def test_a_folder_of_a_small_model_is_planned_with_its_own_index(tmp_path: Path) -> None:
    answer = document(str(tiny(tmp_path)), "--gpu", "H100", "--session-tokens", "1k,2k")
    (row,) = answer["models"][0]["plans"]
    assert answer["models"][0]["weights_bytes"] == 1 << 20
    # Blocks of 16 tokens: 1,000 tokens take 63 and 2,000 take 125.
    assert [fit["blocks"] for fit in row["sessions"]] == [63, 125]
    # 1,024 B per token: 63 x 16 x 1,024 B for 1,000 tokens.
    text = plan(str(tmp_path), "--gpu", "H100", "--session-tokens", "1k,2k").stdout
    assert "TP 1   1,000      63  0.00       1.0" in text


def test_a_folder_without_weights_says_what_to_give_and_ends_with_1(tmp_path: Path) -> None:
    run = plan(str(tiny(tmp_path, None)), "--gpu", "H100")
    assert run.returncode == 1
    told = " ".join(run.stdout.split())
    assert "cannot be told:" in told
    assert "config.json does not tell the weights (" in told
    assert "), and " in told
    assert "holds neither weights nor model.safetensors.index.json; give" in told
    assert "; give --weights-bytes N or --index FILE." in told


WHOLE_LLAMA = {**TINY_LLAMA, "intermediate_size": 256, "vocab_size": 1000}
"""A configuration that tells all of its weights."""


def whole_llama(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(WHOLE_LLAMA))
    return folder


def careful(text: str) -> str:
    """All lines that say what to look at, as one."""
    lines = " ".join(text.split())
    return lines[lines.index("careful:") : lines.index("What vLLM")] if "careful:" in lines else ""


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 405504\n"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("model.safetensors", LFS_POINTER, "model.safetensors: it is a pointer of Git LFS"),
        ("model.safetensors", b"", "model.safetensors: the file is shorter than the length of a header"),
        ("model.safetensors", file_bytes(header_of({"a": (9,)}), 3), "so it was cut off or written over"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}', "has no metadata.total_size"),
        ("model.gguf", b"GGUF", "holds its weights as GGUF files"),
    ],
)  # fmt: skip
def test_a_fault_of_the_weights_files_is_told_with_what_is_taken_instead(
    tmp_path: Path, file: str, content: bytes, words: str
) -> None:
    (whole_llama(tmp_path) / file).write_bytes(content)
    run = plan(str(tmp_path), "--gpu", "H100")
    assert run.returncode == 0
    assert words in careful(run.stdout)
    assert "; the weights that config.json makes, 0.00 GB, are taken instead" in careful(run.stdout)
    (doubt,) = document(str(tmp_path), "--gpu", "H100")["models"][0]["doubts"]
    assert words in doubt
    said = plan(str(tmp_path), "--gpu", "H100", "--weights-bytes", "1600000")
    assert said.returncode == 0
    assert "; the 1,600,000 bytes of weights that you said are taken instead" in careful(said.stdout)


def test_a_lying_header_beside_an_index_that_tells_the_size_is_told(tmp_path: Path) -> None:
    file = whole_llama(tmp_path) / "a.safetensors"
    file.write_bytes(bytes(1_600_000))
    index = {"metadata": {"total_size": 1_600_000}, "weight_map": {"a": file.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    said = careful(plan(str(tmp_path), "--gpu", "H100").stdout)
    assert "a.safetensors: its header would have 0 bytes" in said
    assert "the 1,600,000 bytes of weights that the index speaks of are taken instead" in said


def test_a_checkpoint_of_another_model_is_told_with_both_sizes(tmp_path: Path) -> None:
    size = write_file(whole_llama(tmp_path) / "model.safetensors", {"a": (1000,)})
    run = plan(str(tmp_path), "--gpu", "H100")
    assert run.returncode == 0
    made = 1000 * 128 * 2 * 2 + 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256 + 2 * 128) * 2 + 128 * 2
    said = careful(run.stdout)
    assert f"would make {made:,} bytes of weights to load, and the checkpoint has {size:,} bytes (" in said
    assert (
        "no tensor of its size for 39 of its parts: embed_tokens, model.norm.weight, lm_head and 36 more"
        in said
    )
    assert (
        "1 tensor is of no part that config.json makes, 2,000 bytes: a): one of them is not this model's"
        in said
    )
    by_index = plan(str(tmp_path), "--gpu", "H100", "--weights-bytes", "5g", "--tp", "1,2").stdout
    assert by_index.count("careful:") == 1


EAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "max_position_embeddings": 32768,
}


def drafted_by(model: str) -> list[str]:
    draft = {"method": "eagle3", "model": model, "num_speculative_tokens": 3}
    return ["--gpu", "H100", "--weights-bytes", "1600000", "--speculative-config", json.dumps(draft)]


def test_the_weights_of_a_draft_model_are_said_not_to_be_counted(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    draft.mkdir()
    whole_llama(target)
    (draft / "config.json").write_text(json.dumps(EAGLE))
    said = careful(plan(str(target), *drafted_by(str(draft))).stdout)
    assert "the draft model's own weights are not counted (their size is not known; " in said
    index = {"metadata": {"total_size": 2_350_000_000}, "weight_map": {}}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    *_, said = document(str(target), *drafted_by(str(draft)))["models"][0]["doubts"]
    assert "the draft model's own weights are not counted (its checkpoint has 2.35 GB; " in said


HEADS_AND_MLP = {
    "midlayer.self_attn.q_proj.weight": (128, 256),
    "midlayer.self_attn.k_proj.weight": (64, 256),
    "midlayer.self_attn.v_proj.weight": (64, 256),
    "midlayer.self_attn.o_proj.weight": (128, 128),
    "midlayer.mlp.gate_proj.weight": (256, 128),
    "midlayer.mlp.up_proj.weight": (256, 128),
    "midlayer.mlp.down_proj.weight": (128, 256),
    "fc.weight": (128, 3 * 128),
}
NORMS = {
    f"{name}.weight": (128,)
    for name in (
        "midlayer.input_layernorm",
        "midlayer.post_attention_layernorm",
        "midlayer.hidden_norm",
        "norm",
    )
}


def test_the_weights_of_a_draft_model_with_files_are_counted_on_each_gpu(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    draft.mkdir()
    whole_llama(target)
    config = {
        **EAGLE,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": 1000,
        "torch_dtype": "bfloat16",
    }
    (draft / "config.json").write_text(json.dumps(config))
    size = write_file(draft / "model.safetensors", {**HEADS_AND_MLP, **NORMS})
    said = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    drafted = ["--gpu", "H100", "--speculative-config", json.dumps(said)]
    (alone,) = document(str(target), "--gpu", "H100")["models"][0]["plans"]
    model = document(str(target), *drafted)["models"][0]
    assert model["doubts"] == []
    (plan_,) = model["plans"]
    assert plan_["weights_bytes_per_gpu"] == alone["weights_bytes_per_gpu"] + size
    assert "0.00 GB of the draft model on each GPU" in plan(str(target), *drafted).stdout


def test_a_draft_model_that_the_hub_does_not_give_ends_with_1_and_one_that_is_no_path_with_2(
    tmp_path: Path,
) -> None:
    with http_server({}) as (endpoint, _):
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": "/nowhere"}
        run = plan(str(whole_llama(tmp_path)), *drafted_by("org/gone"), environment=environment)
    assert (run.returncode, run.stdout) == (1, "")
    assert "the draft model: org/gone (config.json): there is no such model" in run.stderr
    run = plan(str(tmp_path), *drafted_by("/no/such/draft"))
    assert (run.returncode, run.stdout) == (2, "")
    assert "the draft model: '/no/such/draft': it is no folder here" in run.stderr


def test_a_fault_where_nothing_else_tells_the_weights_ends_with_1(tmp_path: Path) -> None:
    (tiny(tmp_path, None) / "model.safetensors").write_bytes(LFS_POINTER)
    run = plan(str(tmp_path), "--gpu", "H100")
    assert run.returncode == 1
    assert "; nothing else tells the weights" in careful(run.stdout)


def test_a_folder_that_has_only_a_config_is_a_note_and_no_doubt(tmp_path: Path) -> None:
    run = plan(str(whole_llama(tmp_path)), "--gpu", "H100")
    assert (run.returncode, careful(run.stdout)) == (0, "")
    told = " ".join(run.stdout.split())
    assert "as config.json makes them (" in told
    assert "holds neither weights nor model.safetensors.index.json)" in told


def test_a_folder_with_safetensors_files_needs_no_index(tmp_path: Path) -> None:
    size = write_file(tiny(tmp_path, None) / "model.safetensors", {"a": (1000,)})
    answer = document(str(tmp_path), "--gpu", "H100")
    assert answer["models"][0]["weights_bytes"] == size


def test_what_does_not_fit_together_in_a_folder_is_told(tmp_path: Path) -> None:
    write_file(tiny(tmp_path) / "model.safetensors", {"a": (1000,)})
    write_file(tmp_path / "consolidated.safetensors", {"a": (1000,)})
    run = plan(str(tmp_path), "--gpu", "H100")
    assert "careful: vLLM loads consolidated.safetensors here" in run.stdout


def test_a_card_that_is_not_in_the_catalogue_is_planned_by_its_bytes(tmp_path: Path) -> None:
    run = plan(str(tiny(tmp_path)), "--hbm-bytes", "48G", "--json")
    assert run.returncode == 0
    (row,) = json.loads(run.stdout)["models"][0]["plans"]
    assert row["figures"][0] == {
        "name": "gpu_memory_total",
        "value": 48 << 30,
        "unit": "B",
        "how": "of one GPU, as CUDA reports it",
        "source": "your config",
    }


def test_the_gb_on_the_box_can_be_said() -> None:
    arguments = [NVFP4[0], *NVFP4[1:3], "--gpu", "GB200", "--tp", "8"]
    (row,) = document(*arguments)["models"][0]["plans"]
    assert "--marketed-gb" in row["article"]["reason"]
    (row,) = document(*arguments, "--marketed-gb", "180")["models"][0]["plans"]
    assert row["article"]["tokens"] == 2_003_889


def test_a_replica_that_is_larger_than_the_fleet_is_told_and_ends_with_1() -> None:
    run = plan(*NVFP4, "--tp", "8", "--gpus", "4")
    assert run.returncode == 1
    assert "TP 8 on 8 x B200 (there are 4)" in run.stdout
    assert "a replica needs 8 GPUs, and there are 4" in run.stdout


def test_a_pool_of_a_given_size_needs_neither_gpu_nor_weights(tmp_path: Path) -> None:
    run = plan(str(tiny(tmp_path, None)), "--kv-cache-memory-bytes", "1G", "--max-model-len", "2k")
    assert run.returncode == 0, run.stdout
    assert "vLLM starts at max_model_len 2,000" in run.stdout
    run = plan(str(tmp_path), "--gpu", "CPU", "--kv-cache-memory-bytes", "1G", "--max-model-len", "2k")
    assert run.returncode == 0, run.stdout


def test_a_name_is_fetched_from_the_hub() -> None:
    base = "/org/tiny/resolve/main/"
    answers = {
        base + "config.json": text_answer(json.dumps(TINY_LLAMA)),
        base + "model.safetensors.index.json": text_answer('{"metadata": {"total_size": 1048576}}'),
    }
    with http_server(answers) as (endpoint, _):
        run = plan("org/tiny", "--gpu", "H100", environment={"HF_ENDPOINT": endpoint, "HF_HOME": "/nowhere"})
    assert run.returncode == 0, run.stderr
    assert f"config from {endpoint}, revision main" in run.stdout


def on_a_hub(dtype: str, total: int | None) -> dict[str, Answer]:
    """The tiny Llama in two shards, of one type, beside an index with this total."""
    shapes = {name: shape for name, (_, shape) in decoder(WHOLE_LLAMA, lambda _: plain()).items()}
    names = sorted(shapes)
    shards = {"1.safetensors": names[:20], "2.safetensors": names[20:]}
    base = "/org/tiny/resolve/main/"
    index: dict[str, Any] = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    if total is not None:
        index["metadata"] = {"total_size": total}
    answers = {
        base + "config.json": text_answer(json.dumps(WHOLE_LLAMA)),
        base + "model.safetensors.index.json": text_answer(json.dumps(index)),
    }
    for file, held in shards.items():
        header = header_of({name: shapes[name] for name in held}, dtype)
        size = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        answers[base + file] = ranged(file_bytes(header, size))
    return answers


TINY_BYTES = 1_693_952
READS_HEADERS = "kvheadroom: org/tiny: the index does not tell the weights; reading headers, 0 of 2 files\n"


def planned_from(
    answers: dict[str, Answer], *arguments: str
) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any], list[str]]:
    """The run, its model in JSON, and the files of tensors that were asked for."""
    with http_server(answers) as (endpoint, seen):
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": "/nowhere"}
        run = plan("org/tiny", "--gpu", "H100", "--json", *arguments, environment=environment)
    model = json.loads(run.stdout)["models"][0]
    return run, model, sorted(path.rpartition("/")[2] for path, _ in seen if path.endswith(".safetensors"))


@pytest.mark.parametrize("total", [2 * TINY_BYTES, None])
def test_where_an_index_does_not_tell_the_weights_the_headers_of_its_files_do(total: int | None) -> None:
    run, model, asked = planned_from(on_a_hub("F32", total))
    assert (run.returncode, run.stderr) == (0, READS_HEADERS)
    assert asked == ["1.safetensors", "2.safetensors"]
    assert (model["weights_bytes"], model["doubts"]) == (2 * TINY_BYTES, [])
    (found,) = model["plans"]
    # vLLM casts them to 16 bits, and pads the vocabulary from 1,000 to 1,024 rows twice.
    assert found["weights_bytes_per_gpu"] == TINY_BYTES + 2 * 24 * 128 * 2
    assert found["weights_by"] == "tensor by tensor, by the files' headers"


def test_headers_and_an_index_that_do_not_tell_the_same_size_are_told() -> None:
    _, model, asked = planned_from(on_a_hub("BF16", 5_000_000_000))
    assert len(asked) == 2
    (doubt,) = model["doubts"]
    assert "speaks of 5,000,000,000 bytes, and its files have 1,693,952; the files are believed" in doubt


@pytest.mark.parametrize(
    ("total", "arguments"), [(TINY_BYTES, []), (5_000_000_000, ["--weights-bytes", "1693952"])]
)
def test_headers_are_not_asked_for_where_the_weights_are_known(total: int, arguments: list[str]) -> None:
    run, _, asked = planned_from(on_a_hub("BF16", total), *arguments)
    assert (run.returncode, run.stderr, asked) == (0, "", [])


def test_a_file_that_the_hub_does_not_give_leaves_the_index_and_is_told() -> None:
    answers = on_a_hub("F32", 2 * TINY_BYTES)
    del answers["/org/tiny/resolve/main/2.safetensors"]
    run, model, _ = planned_from(answers)
    assert run.returncode == 0
    first, second = model["doubts"]
    assert first.startswith("org/tiny (2.safetensors): there is no such model or file")
    assert first.endswith("; so the types and sizes of the tensors are not known")
    assert "each GPU is given an even share of the checkpoint" in second
    assert model["plans"][0]["weights_bytes_per_gpu"] == 2 * TINY_BYTES


def test_a_hub_that_gives_no_model_ends_with_1_and_never_shows_the_token() -> None:
    with http_server({}) as (endpoint, seen):
        run = plan(
            "org/gone",
            "--gpu",
            "H100",
            environment={"HF_ENDPOINT": endpoint, "HF_HOME": "/nowhere", "HF_TOKEN": "hf_secret_word"},
        )
    assert (run.returncode, run.stdout) == (1, "")
    assert "no such model" in run.stderr
    assert "hf_secret_word" not in run.stderr
    assert seen[0][1]["Authorization"] == "Bearer hf_secret_word"


def test_a_password_in_the_address_of_the_hub_is_never_shown() -> None:
    base = "/org/tiny/resolve/main/"
    answers = {
        base + "config.json": text_answer(json.dumps(TINY_LLAMA)),
        base + "model.safetensors.index.json": text_answer('{"metadata": {"total_size": 1048576}}'),
    }
    with http_server(answers) as (endpoint, _):
        address = endpoint.removeprefix("http://")
        for user in ("user:S3CRET@", "S3CRET@", "user:S3C://S3CRET@"):
            environment = {"HF_ENDPOINT": f"http://{user}{address}", "HF_HOME": "/nowhere"}
            for arguments in (["org/tiny"], ["org/tiny", "--json"], ["org/gone"]):
                run = plan(*arguments, "--gpu", "H100", environment=environment)
                assert "S3C" not in run.stdout + run.stderr
                assert run.stdout + run.stderr
        run = plan(
            "org/tiny",
            "--gpu",
            "H100",
            environment=environment | {"HF_ENDPOINT": f"http://u:S3CRET@{address}"},
        )
    assert f"config from http://{address}, revision main" in run.stdout
    run = plan(
        "org/tiny", "--gpu", "H100", environment={"HF_ENDPOINT": "u:S3CRET@host", "HF_HOME": "/nowhere"}
    )
    assert "S3CRET" not in run.stderr
    assert "'host' is no address" in run.stderr


def test_a_folder_that_is_not_there_is_told_beside_what_the_hub_says() -> None:
    run = plan("models/glm", "--gpu", "H100", environment={"HF_HOME": "/nowhere"})
    assert (run.returncode, run.stdout) == (1, "")
    assert "cannot be reached" in run.stderr
    assert "nor is there a folder 'models/glm' here" in run.stderr
    run = plan("models/glm", "--gpu", "H100", environment={"HF_HOME": "/nowhere", "HF_HUB_OFFLINE": "1"})
    assert "nor is there a folder 'models/glm' here" in run.stderr


def test_ways_out_are_options_not_lines_of_a_config_file(tmp_path: Path) -> None:
    unsaid = [*NVFP4[:3], "--hbm-bytes", "191.5g", "--tp", "8"]
    run = plan(*unsaid)
    assert "say it (--gpu H200, or what" in " ".join(run.stdout.split())
    (row,) = document(*unsaid)["models"][0]["plans"]
    assert "say it (--gpu H200, or what" in row["reason"]
    text = " ".join(plan(str(tiny(tmp_path)), "--hbm-bytes", "48G").stdout.split())
    assert "GB (--overhead-gb; estimated, " in text


def test_no_token_drafted_is_no_draft() -> None:
    (none,) = document(*NVFP4, "--tp", "8", "--mtp", "0")["models"][0]["plans"]
    (plain,) = document(*NVFP4, "--tp", "8")["models"][0]["plans"]
    assert none["kv_cache_size_tokens"] == plain["kv_cache_size_tokens"] is not None


def test_a_session_longer_than_max_model_len_is_told_and_ends_with_1(tmp_path: Path) -> None:
    arguments = [str(tiny(tmp_path)), "--gpu", "H100", "--max-model-len", "2k"]
    run = plan(*arguments, "--session-tokens", "4M")
    assert run.returncode == 1
    assert "no session of 4,194,304 tokens, which is above max_model_len; vLLM starts" in " ".join(
        run.stdout.split()
    )
    run = plan(*arguments, "--session-tokens", "1k,4M")
    assert run.returncode == 1
    assert "whole), and none of 4,194,304 tokens, which is above max_model_len" in " ".join(
        run.stdout.split()
    )
    assert plan(*arguments, "--session-tokens", "1k,2k").returncode == 0
    first = " ".join(
        plan(*NVFP4, "--tp", "8", *ARTICLE[:2], "--session-tokens", "256K,4M").stdout.split("\n\n")[0].split()
    )
    assert (
        "sessions of 262,144 tokens by the sum on paper, and none of 4,194,304 tokens, which is above"
        in first
    )


def test_the_same_gpus_are_those_that_are_there() -> None:
    assert "Other ways" not in plan(*NVFP4, "--tp", "4", "--gpus", "3").stdout
    assert "Other ways to use the same 4 GPUs" in plan(*NVFP4, "--tp", "4,8", "--gpus", "7").stdout


def test_one_gpu_is_told_as_one(tmp_path: Path) -> None:
    assert "Other ways to use the same GPU:" in plan(str(tiny(tmp_path)), "--gpu", "H100").stdout.replace(
        "GPU,", "GPU:"
    )


def test_engines_without_an_answer_are_not_told_as_each() -> None:
    first = plan(*NVFP4, "--tp", "8", "--dp", "2", *ARTICLE).stdout.split("\n\n", maxsplit=1)[0]
    assert "each engine" not in first
    assert "no answer by the sum on paper: the sum on paper knows no data parallelism" in " ".join(
        first.split()
    )
    assert ": each engine 10.50 sessions" in plan(*NVFP4, "--tp", "8", "--dp", "2").stdout


def test_sessions_are_no_longer_than_max_model_len_where_no_row_fits() -> None:
    text = plan(*NVFP4, "--tp", "1", "--max-model-len", "65536").stdout
    assert "does: sessions of 65,536 tokens" in text


def test_a_model_of_this_machine_needs_none_of_the_daemons_libraries(tmp_path: Path) -> None:
    code = "import sys; from kvheadroom.cli import main; main(sys.argv[1:])"
    folder = tmp_path / "model"
    folder.mkdir()
    arguments = ["plan", str(tiny(folder)), "--gpu", "H100", "--json"]
    assert imported_by(tmp_path, code, *arguments) == set()


def test_an_architecture_that_is_not_known_is_told_and_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    run = plan(str(tmp_path), "--gpu", "H100", "--weights-bytes", "1g")
    assert run.returncode == 1
    answer = " ".join(run.stdout.split("\n\n")[0].split())
    assert answer.startswith(
        "TP 1 on 1 x H100: cannot be told: the KV-cache rules of FooForCausalLM are not known"
    )
    assert "give --" not in answer


def test_every_example_of_the_help_can_be_parsed() -> None:
    import shlex

    from kvheadroom.cli import make_parser
    from kvheadroom.plan_arguments import EXAMPLES

    examples = [line.strip() for line in EXAMPLES.splitlines() if line.strip().startswith("kvheadroom ")]
    assert len(examples) >= 4
    for example in examples:
        arguments = make_parser().parse_args(shlex.split(example)[1:])
        assert arguments.model or arguments.place


def test_a_tier_in_host_memory_is_planned_and_helps_no_start(tmp_path: Path) -> None:
    model = str(tiny(tmp_path))
    starts = plan(model, "--gpu", "H200", "--max-model-len", "2048", "--kv-offloading-size", "0.001")
    assert starts.returncode == 0
    # 65 chunks of 16 KiB, as 1,073,741 B hold; 2,048 tokens are 128 of them.
    assert "TP 1: 1,040 tokens, 0.51 sessions of 2,048; 1.02 MiB of the host's memory" in starts.stdout
    assert "careful" not in starts.stdout
    small = ["--gpu", "H200", "--kv-cache-memory-bytes", "2M", "--max-model-len", "2048"]
    run = plan(model, *small, "--kv-offloading-size", "1000000")
    assert run.returncode == 1
    answer = " ".join(run.stdout.split("\n\n")[0].split())
    assert answer.endswith(
        "vLLM does NOT start at max_model_len 2,048; the longest that starts is 2,032 (--max-model-len 2032); the tier in host memory does "
        "not help it to start: one request of max_model_len must fit in the GPU's pool."
    )
    assert "careful: if it is to run on this machine: the tier takes 1,000,000.00 GiB" in run.stdout
    [told] = document(model, *small, "--kv-offloading-size", "1000000")["models"][0]["plans"]
    assert (told["boots"], told["host_tier"]["bytes"]) == (False, 1_000_000 * 2**30)
    findings = [one["finding"] for one in told["host_tier"]["findings"]]
    assert findings == ["tier_above_shm", "tier_above_host_memory"]
    [without] = document(model, *small)["models"][0]["plans"]
    assert (without["boots"], without["host_tier"]) == (False, None)


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "1e300", "much", ""])
def test_a_size_of_a_tier_that_is_none_ends_with_2(tmp_path: Path, size: str) -> None:
    run = plan(str(tiny(tmp_path)), "--gpu", "H200", f"--kv-offloading-size={size}")
    assert (run.returncode, run.stdout) == (2, "")
    assert "--kv-offloading-size" in run.stderr
