"""`kvheadroom plan MODEL --calibration FILE`: what was learned beside the raw figures, and what is said where nothing was."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.calibration_key import key_of
from kvheadroom.capacity.calibration_samples import CalibrationSample, SampleSource
from kvheadroom.capacity.deployment import PlanRequest, facts_of_start
from kvheadroom.capacity.facts import OperatorFacts
from kvheadroom.capacity.overhead import estimate_overhead
from kvheadroom.capacity.overhead_parts import OverheadEstimate
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.monitor.calibration_store import add_samples
from tests.capacity.facts_builder import TINY_LLAMA
from tests.test_plan_model import document, plan, tiny

# Bytes for KV of one H100: ceil(85,028,896,768 x 0.92) = 78,226,585,027 - 1,048,576 of weights - overhead.
BUDGET = 78_226_585_027 - 1_048_576
BLOCK = 16 * 1024
QWEN: Mapping[str, Any] = {**TINY_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def estimated(**flags: Any) -> tuple[PlanRequest, OverheadEstimate]:
    request = PlanRequest(
        model_files=ModelFiles(folder="", config=TINY_LLAMA, weights_bytes=1 << 20),
        operator=OperatorFacts(flags=flags, gpu="H100"),
        version="0.33.0",
    )
    estimate = estimate_overhead(facts_of_start(request))
    assert isinstance(estimate, OverheadEstimate)
    return request, estimate


def sample(
    overhead_bytes: int,
    *,
    start: str = "a",
    config: Mapping[str, Any] = TINY_LLAMA,
    release: str = "0.33.0",
    **flags: Any,
) -> CalibrationSample:
    request, estimate = estimated(**flags)
    files = replace(request.model_files, config=dict(config))
    key = key_of(facts_of_start(replace(request, model_files=files, version=release)))
    assert not isinstance(key, str)
    return CalibrationSample(
        key=key,
        start=start,
        source=SampleSource.LOG,
        overhead_bytes=overhead_bytes,
        uncertainty_bytes=0,
        estimated_bytes=estimate.total_bytes,
        model="tiny",
        evidence="start.log, line 7",
    )


def learned(folder: Path, *samples: CalibrationSample) -> str:
    file = folder / "calibration.json"
    assert add_samples(file, samples) == ""
    return str(file)


def only_row(*arguments: str) -> dict[str, Any]:
    (row,) = document(*arguments)["models"][0]["plans"]
    assert isinstance(row, dict)
    return row


def test_the_median_of_starts_of_the_same_kind_stands_beside_the_raw_figure(tmp_path: Path) -> None:
    overheads = (3_000_000_000, 3_100_000_000, 5_000_000_000)
    file = learned(tmp_path, *(sample(size, start=str(size)) for size in overheads))
    arguments = [str(tiny(tmp_path)), "--gpu", "H100", "--session-tokens", "1600"]
    raw = only_row(*arguments, "--vllm-version", "0.33.0")
    row = only_row(*arguments, "--vllm-version", "0.33.0", "--calibration", file)
    told = row.pop("calibrated")
    assert raw.pop("calibrated") is None
    assert row == raw
    assert told["overhead_bytes"] == 3_100_000_000
    assert told["starts_measured"] == 3
    assert (told["overhead_low_bytes"], told["overhead_high_bytes"]) == (3_000_000_000, 5_000_000_000)
    assert told["kv_bytes_per_gpu"] == BUDGET - 3_100_000_000
    blocks = [(BUDGET - size) // BLOCK for size in (3_100_000_000, 5_000_000_000, 3_000_000_000)]
    assert told["num_blocks"] == blocks[0]
    # One request of 32,768 tokens takes 2,048 blocks.
    tokens = [int(number / 2048 * 32_768) for number in blocks]
    names = ("kv_cache_size_tokens", "kv_cache_size_tokens_fewest", "kv_cache_size_tokens_most")
    assert [told[name] for name in names] == tokens
    # 1,600 tokens take 100 blocks.
    (fit,) = told["sessions"]
    assert [fit[name] for name in ("sessions", "fewest", "most")] == [number / 100 for number in blocks]
    assert fit["whole_sessions"] == (blocks[0] - 1) // 100
    assert told["is_sure"] is True


def test_one_start_is_said_to_be_one_with_the_estimates_interval(tmp_path: Path) -> None:
    _, estimate = estimated()
    file = learned(tmp_path, sample(4_000_000_000))
    told = only_row(str(tiny(tmp_path)), "--gpu", "H100", "--calibration", file)["calibrated"]
    assert (told["reliability"], told["starts_measured"]) == ("one_sample", 1)
    # 2.9% of 85,028,896,768, also where the estimate's own interval is cut at zero.
    assert told["overhead_low_bytes"] == 4_000_000_000 - 2_465_838_006
    assert told["overhead_high_bytes"] == 4_000_000_000 + (estimate.high_bytes - estimate.total_bytes)
    assert "n = 1" in told["note"]


def test_what_starts_had_more_than_estimated_is_carried_to_other_settings(tmp_path: Path) -> None:
    _, of_1024 = estimated(max_num_seqs=1024)
    _, of_64 = estimated(max_num_seqs=64)
    assert of_64.total_bytes < of_1024.total_bytes
    file = learned(tmp_path, sample(4_000_000_000, max_num_seqs=1024))
    arguments = [str(tiny(tmp_path)), "--gpu", "H100", "--max-num-seqs", "64", "--calibration", file]
    told = only_row(*arguments)["calibrated"]
    assert told["overhead_bytes"] == 4_000_000_000 - of_1024.total_bytes + of_64.total_bytes
    assert told["reliability"] == "carried"
    assert told["differences"] == ["max_num_seqs=1024 in place of 64"]
    text = " ".join(plan(*arguments).stdout.split())
    assert "TP 1: carried over from 1 start with max_num_seqs=1024 in place of 64 (" in text


def test_text_holds_both_figures_of_each_row_within_100_columns(tmp_path: Path) -> None:
    file = learned(tmp_path, *(sample(size, start=str(size)) for size in (3 * 10**9, 4 * 10**9)))
    arguments = [str(tiny(tmp_path)), "--gpu", "H100", "--tp", "1,2", "--session-tokens", "1600"]
    run = plan(*arguments, "--calibration", file, "--explain")
    assert run.returncode == 0
    assert max(map(len, run.stdout.splitlines())) <= 100
    blocks = [(BUDGET - size) // BLOCK for size in (3_500_000_000, 4_000_000_000, 3_000_000_000)]
    answer = " ".join(run.stdout.split("\n\n")[0].split())
    sessions = (
        f"{blocks[0] / 100:.2f} sessions of 1,600 tokens ({blocks[1] / 100:.2f} to {blocks[2] / 100:.2f})"
    )
    assert f"With what was learned: {sessions}, and it starts, too." in answer
    lines = run.stdout.splitlines()
    first = lines.index(
        "With what was learned, beside the raw figures: sessions of 1,600 tokens (per GPU, of one engine)"
    )
    table = [line.split() for line in lines[first + 2 : first + 6]]
    assert [line[-5:] for line in table[1:]] == [
        [gb, f"{BUDGET / 1e9 - float(gb):.2f}", f"{number * 16:,}", f"{number / 100:.2f}", "yes"]
        for gb, number in zip(("3.50", "4.00", "3.00"), blocks, strict=True)
    ]
    assert [line[0] for line in table] == ["TP", "learned", "fewest", "most"]
    assert "Every figure of TP 1 that is another one with what was learned" in lines
    assert f"  num_blocks{'':<25}{blocks[0]:,} blocks" in lines


def test_where_only_the_raw_figure_starts_the_first_lines_and_the_exit_code_say_so(tmp_path: Path) -> None:
    # 77,000,000,000 B of overhead leave 1,225,536,451 B: 74,800 blocks, 1,196,800 tokens less the null block.
    config = {**TINY_LLAMA, "max_position_embeddings": 2_000_000}
    folder = tiny(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    file = learned(tmp_path, *(sample(77 * 10**9, start=name, config=config) for name in "ab"))
    run = plan(str(folder), "--gpu", "H100", "--calibration", file)
    assert run.returncode == 1
    answer = " ".join(run.stdout.split("\n\n")[0].split())
    assert "vLLM starts at max_model_len 2,000,000. With what was learned: " in answer
    assert f"it does NOT start ({(BUDGET - 77 * 10**9) // BLOCK * 16 - 16:,} does)." in answer
    assert plan(str(folder), "--gpu", "H100").returncode == 0


def test_a_release_that_nobody_said_is_the_newest_measured_one_of_the_rules(tmp_path: Path) -> None:
    starts = [sample(3 * 10**9, release="0.33.0"), sample(5 * 10**9, release="0.33.2")]
    file = learned(tmp_path, *starts, sample(9 * 10**9, release="0.32.0"))
    told = only_row(str(tiny(tmp_path)), "--gpu", "H100", "--calibration", file)["calibrated"]
    assert told["overhead_bytes"] == 5 * 10**9
    said = ["--vllm-version", "0.33.0", "--calibration", file]
    assert only_row(str(tmp_path), "--gpu", "H100", *said)["calibrated"]["overhead_bytes"] == 3 * 10**9


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({**TINY_LLAMA, "hidden_size": 256}, [], "there are starts of others: tiny (bfloat16, H100, tp1, vLLM 0.33.0, 1 start)"),
        ({**TINY_LLAMA, "torch_dtype": "float16"}, [], "nothing was learned of this model as bfloat16; there are starts of tiny (float16, "),
        (QWEN, [], "nothing was learned of this LlamaForCausalLM; there are starts of tiny"),
        (TINY_LLAMA, ["--kv-cache-memory-bytes", "1g"], "the pool is of a given size, which no overhead changes"),
        (TINY_LLAMA, ["--tp", "3"], "vLLM refuses it, whatever the overhead is"),
    ],
)  # fmt: skip
def test_where_nothing_fits_the_reason_says_what_there_is(
    tmp_path: Path, config: Mapping[str, Any], arguments: list[str], words: str
) -> None:
    file = learned(tmp_path, sample(3 * 10**9, config=config))
    row = only_row(str(tiny(tmp_path)), "--gpu", "H100", *arguments, "--calibration", file)
    told = row["calibrated"]
    assert words in told["reason"]
    assert {name for name, value in told.items() if value is not None} == {"reason"}
    text = plan(str(tmp_path), "--gpu", "H100", *arguments, "--calibration", file).stdout
    assert words in " ".join(text.split())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file; `kvheadroom calibrate` and a daemon that learns write one"),
        ("{", "this is no calibration ("),
        ('{"format": 1, "written_by": "x", "samples": [{}]}', "this is no calibration (samples.0.key"),
        ('{"format": 7}', "a newer kvheadroom wrote it"),
    ],
)
def test_a_file_that_cannot_be_used_ends_with_2_and_the_reason(
    tmp_path: Path, content: str | None, words: str
) -> None:
    file = tmp_path / "calibration.json"
    if content is not None:
        file.write_text(content)
    run = plan(str(tiny(tmp_path)), "--gpu", "H100", "--calibration", str(file))
    assert (run.returncode, run.stdout) == (2, "")
    assert f"kvheadroom: --calibration: {file}: " in run.stderr
    assert words in run.stderr


def test_a_file_that_cannot_even_be_looked_for_ends_with_2_and_the_reason(tmp_path: Path) -> None:
    file = tmp_path / ("a" * 300)
    run = plan(str(tiny(tmp_path)), "--gpu", "H100", "--calibration", str(file))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"kvheadroom: --calibration: {file}: it cannot be read (File name too long)")


def test_what_a_file_holds_reaches_no_terminal_as_it_is(tmp_path: Path) -> None:
    hostile = replace(sample(4_000_000_000), model="m\x1b[2J\x07")
    other = replace(hostile.key, geometry="LlamaForCausalLM 0", settings="max_num_seqs=\x1b[31m")
    near = replace(sample(4_000_000_000, start="b"), key=replace(hostile.key, settings=other.settings))
    for samples in ([replace(hostile, key=other)], [near]):
        folder = tmp_path / samples[0].start
        folder.mkdir()
        text = plan(str(tiny(folder)), "--gpu", "H100", "--calibration", learned(folder, *samples))
        told = text.stdout + text.stderr
        assert "\N{REPLACEMENT CHARACTER}[" in told
        assert all(c.isprintable() or c == "\n" for c in told)
