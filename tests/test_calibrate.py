"""`kvheadroom calibrate`: from start-up logs and running servers to learned overheads, as somebody types it."""

import asyncio
import contextlib
import gzip
import io
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvheadroom import calibrator
from kvheadroom.calibrator import look_at_fleet
from kvheadroom.capacity.calibration import Reliability
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion
from kvheadroom.capacity.fleet import FleetAssessment, GpuAssessment, ReplicaAssessment, ReplicaState
from kvheadroom.capacity.gpu_assignment import Assignment, GpuAssignments, OthersMemory
from kvheadroom.capacity.gpus import GpuReading, GpuSnapshot
from kvheadroom.cli import main
from kvheadroom.config import Config, load_config, validate_config
from kvheadroom.monitor.calibration_store import MOST_SAMPLES, read_samples
from tests.conftest import Golden, capture
from tests.daemon import COMMAND
from tests.doubles.http_server import http_server, text_answer
from tests.made_logs import NAME, UP, beginning, model_folder, rank_lines, recorded, whole_log
from tests.outputs.fleet import on_a_gpu
from tests.test_daemon import vllm_answers
from tests.test_plan_model import READS_HEADERS, TINY_BYTES, on_a_hub

GIB = 2**30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command runs, so that names in a report stay short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    model_folder(tmp_path / "llama")
    log = logging.getLogger("kvheadroom")
    level, interrupted = log.level, signal.getsignal(signal.SIGINT)
    yield tmp_path
    log.setLevel(level)
    signal.signal(signal.SIGINT, interrupted)


def calibrate(*arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[str]":
    """The command, in this process: there are many of them here."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["calibrate", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdin = before
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def of_log(text: str, *arguments: str, name: str = "start.log") -> "subprocess.CompletedProcess[str]":
    Path(name).write_text(text)
    return calibrate("--log", name, "--model", "llama", *arguments)


def document(run: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    answer = json.loads(run.stdout)
    assert isinstance(answer, dict)
    return answer


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_real_start_is_measured_against_what_was_predicted_of_it(folder: Path) -> None:
    run = of_log(beginning("0.31.0") + recorded("0.31.0_one_gpu") + UP, "--gpu", "A100-80GB", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    answer = document(run)
    (start,), (learned,) = answer["starts"], answer["learned"]
    figures = start["figures"]
    assert start["evidence"] == "start.log, lines 1 to 7"
    assert (start["model"], start["release"], start["excluded"]) == (NAME, "0.31.0", None)
    assert figures["kv_cache"]["measured_bytes"] == round(56.21 * GIB)
    assert figures["kv_cache_tokens"] == 460_496
    # 8 billion parameters of 2 bytes
    assert figures["weights"]["predicted_bytes"] == 16_060_522_496
    # The catalogue's total: what a later prediction takes, so the overhead is what it lacks.
    requested = -(-figures["gpu_total"]["predicted_bytes"] * 92 // 100)
    overhead = start["sample"]["overhead_bytes"]
    assert overhead == requested - 16_060_522_496 - round(56.21 * GIB)
    assert (learned["overhead_bytes"], learned["samples"], learned["reliability"]) == (
        overhead,
        1,
        "one_sample",
    )
    assert start["sample"]["key"]["gpu"] == "A100-80GB"


def test_the_report_is_as_committed(folder: Path, golden: Golden) -> None:
    logs = {
        "a100.log": beginning("0.31.0") + recorded("0.31.0_one_gpu") + UP,
        "again.log": whole_log(rank_lines(activation=1.57), release="0.31.0", at="10-07 08:01:02"),
        "cut.log": recorded("0.26.0_expert_parallel"),
        "failed.log": recorded("0.7.2_length_too_large"),
        "two.log": whole_log(
            rank_lines(label="TP0", weights=7.51, activation=1.1, graphs=(0.9, 0.6)),
            rank_lines(label="TP1", weights=7.51, activation=1.5, graphs=(0.9, 0.6)),
            tensor_parallel_size=2,
        ),
        "other.log": "llama_model_load: loaded\n",
    }
    for name, text in logs.items():
        (folder / name).write_text(text)
    run = calibrate("--log", *logs, "--model", "llama", "--gpu", "A100-80GB", "--out", "learned.json")
    assert run.returncode == 1
    golden.check("calibrate.txt", run.stdout)
    assert run.stderr.splitlines()[0] == "kvheadroom: reading a100.log, 1 of 6 logs"
    assert len(run.stderr.splitlines()) == 6


def test_the_rank_that_leaves_the_least_is_named_with_what_stays_unused_on_the_others(folder: Path) -> None:
    ranks = [
        rank_lines(label=f"TP{index}", weights=3.76, activation=activation)
        for index, activation in enumerate((1.0, 1.25, 2.5, 1.0))
    ]
    run = of_log(whole_log(*ranks, tensor_parallel_size=4), "--gpu", "A100-80GB")
    assert run.returncode == 0, run.stdout
    # 2.5 - 1.0, 2.5 - 1.25 and 2.5 - 1.0
    assert (
        "TP2 leaves the least, 66.39 GiB, and all ranks get that: 4.25 GiB of the others stay unused "
        "(TP0 1.50 GiB, TP3 1.50 GiB, TP1 1.25 GiB)" in flat(run.stdout)
    )
    answer = document(of_log(whole_log(*ranks, tensor_parallel_size=4), "--gpu", "A100-80GB", "--json"))
    (start,) = answer["starts"]
    assert start["figures"]["binding_rank"] == "TP2"
    assert start["figures"]["kv_cache"]["measured_bytes"] == round(66.39 * GIB)


def test_what_rounding_alone_may_make_is_told_of_no_rank(folder: Path) -> None:
    ranks = [
        rank_lines(label=f"TP{index}", weights=7.51, activation=activation)
        for index, activation in enumerate((1.0, 1.01))
    ]
    run = of_log(whole_log(*ranks, tensor_parallel_size=2), "--gpu", "A100-80GB")
    assert run.returncode == 0, run.stdout
    assert "stay unused" not in run.stdout


def test_what_cuda_graphs_took_stands_beside_their_estimate_even_of_a_log_that_is_cut(folder: Path) -> None:
    run = of_log(recorded("0.26.0_expert_parallel"))
    assert run.returncode == 1
    # 4.99 / 4.13 - 1
    assert "CUDA graphs: estimated 4.99 GiB, took 4.13 GiB: 21 % too high" in run.stdout
    assert "left out, unfinished_start" in run.stdout


def test_the_lines_for_a_config_are_read_by_our_own_loader(folder: Path) -> None:
    run = of_log(whole_log(), "--gpu", "A100-80GB", "--json")
    (learned,) = document(run)["learned"]
    config = folder / "kvheadroom.yaml"
    config.write_text("\n".join([*learned["config"], "replicas: [{url: 'http://h:8000'}]"]))
    overhead_gb = load_config(config).overhead_gb
    assert overhead_gb == round(learned["overhead_bytes"] / 1e9, 3)
    text = of_log(whole_log(), "--gpu", "A100-80GB").stdout
    assert "\n".join(learned["config"]) in text
    assert "# start.log, lines 1 to 6: " in text
    assert "#   outside PyTorch 0.26 GiB; activations 1.44 GiB" in text


def test_a_log_cannot_put_lines_of_its_own_into_the_config(folder: Path) -> None:
    name = "x\x85overhead_gb: 99\u2028overhead_gb: 98"
    run = of_log(whole_log(model=name), "--gpu", "A100-80GB", "--json")
    (learned,) = document(run)["learned"]
    config = folder / "kvheadroom.yaml"
    config.write_text("\n".join([*learned["config"], "replicas: [{url: 'http://h:8000'}]"]))
    assert load_config(config).overhead_gb == round(learned["overhead_bytes"] / 1e9, 3)


# What is left out


PINNED = (
    "(EngineCore pid=326) INFO 10-08 17:00:33 [gpu_worker.py:500] Initial free memory 78.84 GiB, reserved 40.0 GiB memory for KV "
    "Cache as specified by kv_cache_memory_bytes config and skipped memory profiling.\n"
)
LEFT_OUT = {
    "foreign_memory": whole_log(rank_lines(free=60.0)),
    "failed_start": recorded("0.7.2_length_too_large"),
    "unfinished_start": whole_log(end=""),
    "impossible": whole_log(rank_lines(weights=7.6)),
    # Behind a start that is measured.
    "pool_by_flag": whole_log() + whole_log(PINNED, at="10-08 10:00:00"),
    "unknown": whole_log(quantization="fp8"),
}


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_a_start_that_tells_nothing_is_left_out_with_its_reason_and_counted(
    reason: str, folder: Path
) -> None:
    run = of_log(LEFT_OUT[reason], "--gpu", "A100-80GB", "--json", "--out", "learned.json")
    assert run.returncode == 1
    answer = document(run)
    assert answer["excluded"] == {reason: 1}
    (excluded,) = [start["excluded"] for start in answer["starts"] if start["excluded"]]
    assert excluded["reason"] == Exclusion(reason)
    assert excluded["detail"]
    # A good start in the same log counts for itself.
    assert len(read_samples(Path("learned.json")).samples) == len(answer["learned"])
    text = of_log(LEFT_OUT[reason], "--gpu", "A100-80GB").stdout
    assert f"left out, {reason}: {excluded['detail']}" in flat(text)
    assert f"({reason} 1)" in text


def test_a_cold_start_on_an_unknown_card_is_left_out_and_one_on_a_known_card_is_told(folder: Path) -> None:
    cold = (
        "(EngineCore pid=326) INFO 10-06 17:00:20 [backends.py:300] Compiling a graph for compile range (1, 8192) takes "
        "10.57 s\n"
    )
    log = whole_log(cold, rank_lines())
    answer = document(of_log(log, "--json"))
    assert answer["excluded"] == {"cold_start": 1}
    run = of_log(log, "--gpu", "A100-80GB")
    assert run.returncode == 0, run.stdout
    assert "It compiled its model anew; it counts while there is no start that did not." in run.stdout


def test_weights_of_another_format_are_no_measurement(folder: Path) -> None:
    run = of_log(whole_log(rank_lines(weights=8.49)), "--gpu", "A100-80GB")
    assert run.returncode == 1
    assert (
        "left out, impossible: loading took 8.49 GiB, and 14.96 GiB are the weights of this model for one GPU: it is "
        "another model, another format of the weights or another parallel size" in flat(run.stdout)
    )


def test_figures_that_contradict_each_other_are_no_measurement(folder: Path) -> None:
    run = of_log(whole_log(rank_lines().replace("72.91 GiB)", "60.00 GiB)")), "--gpu", "A100-80GB")
    assert run.returncode == 1
    assert (
        "left out, impossible: the budget (60.00 GiB) is not 0.92 of the GPU's memory (79.25 GiB), which is 72.91 GiB"
        in flat(run.stdout)
    )


def test_a_card_that_is_not_the_logs_is_refused_with_the_way_out(folder: Path) -> None:
    run = of_log(whole_log(), "--gpu", "H200")
    assert run.returncode == 1
    assert (
        "the GPU has 79.25 GiB, and 139.80 GiB are taken for it: it is not that card, or set --hbm-bytes N "
        "beside it" in flat(run.stdout)
    )


def test_a_rank_that_the_parallel_sizes_do_not_have_is_refused(folder: Path) -> None:
    log = whole_log(rank_lines(label="TP0"), rank_lines(label="TP1"))
    run = of_log(log, "--gpu", "A100-80GB")
    assert "rank TP1 is of an engine on more GPUs than tensor_parallel_size=1 gives" in flat(run.stdout)


def test_on_a_cpu_nothing_is_left_over(folder: Path) -> None:
    run = of_log(whole_log(release="0.33.0+cpu"))
    assert "left out, pool_by_flag: on a CPU a flag sizes the pool, and nothing is left over" in run.stdout


def test_without_a_card_it_holds_for_so_many_bytes_and_says_how_it_holds_for_a_card(folder: Path) -> None:
    run = of_log(whole_log())
    assert run.returncode == 0, run.stdout
    assert (
        "the card is not told, so this holds for GPUs of 85,094,039,552 bytes alone, as the log rounds them; --gpu NAME "
        "makes it hold for a card (A100-80GB, H100, H100-PCIe have so much)" in flat(run.stdout)
    )


def test_a_log_without_the_gpus_memory_asks_for_the_card(folder: Path) -> None:
    lines = [line for line in rank_lines().splitlines(keepends=True) if "on startup" not in line]
    log = whole_log("".join(lines))
    run = of_log(log)
    assert (run.returncode, "the log does not tell the GPU's memory; say --gpu NAME" in flat(run.stdout)) == (
        1,
        True,
    )
    assert of_log(log, "--gpu", "A100-80GB").returncode == 0


def test_a_model_that_is_not_found_says_how_to_name_it(folder: Path) -> None:
    (folder / "start.log").write_text(whole_log(model="/models/of-another-machine"))
    run = calibrate("--log", "start.log", "--gpu", "A100-80GB")
    assert run.returncode == 1
    assert "left out, unknown: its model's config.json was not found: '/models/of-another-machine'" in flat(
        run.stdout
    )
    assert "say --model PATH, a folder that holds it" in flat(run.stdout)


def test_a_model_in_the_folder_that_the_log_names_is_found(folder: Path) -> None:
    (folder / "start.log").write_text(whole_log(model="llama"))
    assert calibrate("--log", "start.log", "--gpu", "A100-80GB").returncode == 0


def test_a_model_on_the_hub_whose_index_does_not_tell_its_weights_is_read_once_by_its_headers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = rank_lines(weights=0.00159)
    starts = [whole_log(tiny, model="org/tiny", max_seq_len=2048, at=f"10-0{day} 10:00:00") for day in (6, 7)]
    (folder / "start.log").write_text("".join(starts))
    with http_server(on_a_hub("F32", None)) as (endpoint, seen):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        run = calibrate("--log", "start.log", "--gpu", "A100-80GB", "--json")
    assert (run.returncode, run.stderr) == (0, READS_HEADERS)
    shards = sorted(path.rpartition("/")[2] for path, _ in seen if path.endswith(".safetensors"))
    assert shards == ["1.safetensors", "2.safetensors"]
    # vLLM casts them to 16 bits, and pads the vocabulary from 1,000 to 1,024 rows twice.
    assert [one["figures"]["weights"]["predicted_bytes"] for one in document(run)["starts"]] == [
        TINY_BYTES + 2 * 24 * 128 * 2
    ] * 2


def test_a_hub_that_gives_no_model_of_the_name_that_was_said_ends_with_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "start.log").write_text(whole_log())
    with http_server({}) as (endpoint, _):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        run = calibrate("--log", "start.log", "--gpu", "A100-80GB", "--model", "org/gone")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("kvheadroom: --model: org/gone")
    assert "no such model" in run.stderr


def test_an_engine_that_drafts_with_a_model_asks_for_its_name(folder: Path) -> None:
    (folder / "log").write_text(recorded("whole_0.33.0_data_parallel"))
    run = calibrate("--log", "log", "--model", "llama", "--gpu", "H100")
    assert (
        "a model of its own drafts (eagle3), and its name is not kept of a log; say --speculative-config"
        in flat(run.stdout)
    )


# The same start again


def test_the_same_log_twice_plain_packed_or_grown_counts_once(folder: Path) -> None:
    log = whole_log()
    (folder / "a.log").write_text(log)
    (folder / "b.log.gz").write_bytes(gzip.compress(log.encode()))
    grown = "(APIServer pid=1) INFO 10-06 18:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s\n"
    (folder / "c.log").write_text(log + grown)
    options = ("--model", "llama", "--gpu", "A100-80GB", "--out", "learned.json", "--json")
    run = calibrate("--log", "a.log", "b.log.gz", *options)
    assert (run.returncode, document(run)["learned"][0]["samples"], document(run)["kept"]) == (0, 1, 1)
    again = calibrate("--log", "c.log", *options)
    assert (again.returncode, document(again)["learned"][0]["samples"]) == (0, 1)
    assert len(read_samples(folder / "learned.json").samples) == 1


def test_a_start_that_stands_in_two_places_says_where_the_first_is(folder: Path) -> None:
    (folder / "a.log").write_text(whole_log() * 2)
    run = calibrate("--log", "a.log", "--model", "llama", "--gpu", "A100-80GB")
    assert run.returncode == 0
    assert run.stdout.count("careful: ") == 1
    assert "careful: these are the lines of a.log, lines 1 to 6, and count once" in flat(run.stdout)
    assert "learned from 1 start like it" in flat(run.stdout)


def test_one_model_that_is_said_of_logs_of_several_is_told(folder: Path) -> None:
    (folder / "a.log").write_text(whole_log())
    (folder / "alike.log").write_text(whole_log(model="/models/llama-3.1-8b-instruct/", at="10-07 09:00:00"))
    (folder / "other.log").write_text(whole_log(model="Qwen/Qwen3-8B", at="10-08 09:00:00"))
    options = ("--model", "llama", "--gpu", "A100-80GB")
    run = calibrate("--log", "a.log", "alike.log", *options)
    assert (run.returncode, "careful" in run.stdout) == (0, False)
    run = calibrate("--log", "a.log", "other.log", *options)
    assert run.returncode == 1
    assert (
        "careful: --model llama was taken for starts of Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B-Instruct: if these are not the same "
        "model, give the logs of each a run of its own"
    ) in flat(run.stdout)


def test_it_says_how_many_starts_the_file_holds_where_it_keeps_fewer(folder: Path) -> None:
    starts = (
        whole_log(at=f"10-07 09:{minute:02}:{second:02}") for minute in range(3) for second in range(50)
    )
    (folder / "a.log").write_text("".join(starts))
    options = ("--model", "llama", "--gpu", "A100-80GB", "--out", "learned.json", "--json")
    assert document(calibrate("--log", "a.log", *options))["kept"] == MOST_SAMPLES
    assert len(read_samples(folder / "learned.json").samples) == MOST_SAMPLES


def test_what_is_read_is_not_written_over(folder: Path) -> None:
    log = whole_log()
    (folder / "a.log").write_text(log)
    (folder / "link").symlink_to("a.log")
    run = calibrate("--log", "a.log", "--model", "llama", "--gpu", "A100-80GB", "--out", "link")
    assert run.returncode == 2
    assert run.stderr == "kvheadroom: --out: link: this is a file to read; name another one for the samples\n"
    (folder / "c.yaml").write_text("replicas: []\n")
    assert calibrate("--config", "c.yaml", "--out", "c.yaml").returncode == 2
    assert (folder / "a.log").read_text() == log
    assert sorted(one.name for one in folder.iterdir() if "damaged" in one.name) == []


def test_two_starts_of_the_same_figures_count_as_two_and_add_up_over_runs(folder: Path) -> None:
    options = ("--model", "llama", "--gpu", "A100-80GB", "--out", "learned.json", "--json")
    (folder / "a.log").write_text(whole_log())
    (folder / "b.log").write_text(whole_log(at="10-07 09:00:00"))
    assert document(calibrate("--log", "a.log", *options))["learned"][0]["samples"] == 1
    assert document(calibrate("--log", "b.log", *options))["learned"][0]["samples"] == 2
    assert len(read_samples(folder / "learned.json").samples) == 2


def test_starts_of_other_releases_and_settings_are_learned_apart(folder: Path) -> None:
    logs = {
        "a": whole_log(),
        "b": whole_log(release="0.32.0"),
        "c": whole_log(kv_cache_dtype="fp8"),
        "d": whole_log(enforce_eager=True),
    }
    for name, text in logs.items():
        (folder / name).write_text(text)
    run = calibrate("--log", *logs, "--model", "llama", "--gpu", "A100-80GB", "--json")
    assert run.returncode == 0, run.stdout
    assert [learned["samples"] for learned in document(run)["learned"]] == [1, 1, 1, 1]


def test_without_out_nothing_is_written_and_it_says_how(folder: Path) -> None:
    before = sorted(folder.iterdir())
    run = of_log(whole_log(), "--gpu", "A100-80GB")
    assert "Nothing was written. --out FILE keeps these samples for later runs." in run.stdout
    assert sorted(set(folder.iterdir()) - {folder / "start.log"}) == before


def test_each_engine_and_each_start_of_one_log_counts_for_itself(folder: Path) -> None:
    """A server of two data-parallel engines that failed once and came up twice."""

    def engine(index: int) -> str:
        who = f"(EngineCore_DP{index} pid=32{index})"
        lines = whole_log(rank_lines(), data_parallel_size=2).splitlines(keepends=True)[1:]
        return "".join(line.replace("(EngineCore pid=326)", who) for line in lines)

    failed = beginning(at="10-06 10:00:00") + "ValueError: No available memory for the cache blocks.\n"
    up = beginning(at="10-06 11:00:00").splitlines(keepends=True)[0] + engine(0) + engine(1)
    again = up.replace("10-06", "10-07")
    answer = document(of_log(failed + up + again, "--gpu", "A100-80GB", "--json"))
    assert answer["excluded"] == {"failed_start": 1}
    samples = [start["sample"] for start in answer["starts"] if start["sample"]]
    assert [sample["start"][-2:] for sample in samples] == ["/0", "/1", "/0", "/1"]
    assert len({sample["start"] for sample in samples}) == 4
    assert answer["learned"][0]["samples"] == 4


# Bad input


OTHERS = {
    "of another engine": ("llama_model_load: loaded meta data\n", "this is a log of llama.cpp"),
    "empty": ("", "it holds no line"),
    "no start": (
        "(APIServer pid=1) INFO 10-06 18:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s\n",
        "nothing of a start stands in this log of vLLM",
    ),
    "prose": ("It was a dark and stormy night.\n", "nothing that vLLM prints stands there"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_log_that_holds_no_start_is_told_and_keeps_nothing_of_others_back(what: str, folder: Path) -> None:
    text, told = OTHERS[what]
    (folder / "other.log").write_text(text)
    (folder / "good.log").write_text(whole_log())
    run = calibrate("--log", "other.log", "good.log", "--model", "llama", "--gpu", "A100-80GB")
    assert run.returncode == 1
    assert f"careful: other.log: {'' if not text else 'lines 1 to 1: '}{told}" in flat(run.stdout)
    assert "learned from 1 start like it" in flat(run.stdout)
    alone = calibrate("--log", "other.log", "--out", "learned.json")
    assert (alone.returncode, alone.stdout.splitlines()[-1]) == (1, "Nothing is learned.")
    assert not (folder / "learned.json").exists()


def test_noise_of_bytes_is_no_log(folder: Path) -> None:
    (folder / "noise").write_bytes(bytes(range(256)) * 400)
    run = calibrate("--log", "noise")
    assert (run.returncode, "nothing that vLLM prints stands there" in flat(run.stdout)) == (1, True)


def test_figures_in_other_units_than_vllms_leave_the_whole_log_out(folder: Path) -> None:
    run = of_log(whole_log(rank_lines(unit="GB")), "--gpu", "A100-80GB", "--out", "learned.json")
    assert run.returncode == 1
    assert "line 4: a figure of `Available KV cache memory:` is in GB, where vLLM prints GiB" in flat(
        run.stdout
    )
    assert "left out, impossible: figures of this log are in units that vLLM does not print there" in flat(
        run.stdout
    )
    assert not (folder / "learned.json").exists()


def test_a_file_that_cannot_be_read_ends_with_2_and_nothing_is_learned_of_the_others(folder: Path) -> None:
    (folder / "good.log").write_text(whole_log())
    whole = gzip.compress(whole_log().encode())
    (folder / "half.log.gz").write_bytes(whole[: len(whole) // 2])
    options = ("--model", "llama", "--gpu", "A100-80GB", "--out", "learned.json")
    run = calibrate("--log", "good.log", "missing.log", ".", "half.log.gz", *options)
    assert (run.returncode, run.stdout) == (2, "")
    faults = [line for line in run.stderr.splitlines() if "reading" not in line]
    assert faults == [
        "kvheadroom: --log: missing.log: there is no such file on this machine",
        "--log: .: it is not a regular file; give the file that holds the log",
        "--log: half.log.gz: its compression is damaged or it was cut; compress the log again",
    ]
    assert not (folder / "learned.json").exists()


def test_a_log_comes_by_standard_input(folder: Path) -> None:
    run = calibrate("--log", "-", "--model", "llama", "--gpu", "A100-80GB", stdin=whole_log().encode())
    assert run.returncode == 0, run.stdout
    assert run.stdout.startswith(f"standard input, lines 1 to 6: {NAME}, vLLM 0.33.0, A100-80GB, tp1\n")
    packed = gzip.compress(whole_log().encode())
    assert (
        calibrate("--log", "-", "--model", "llama", "--gpu", "A100-80GB", stdin=packed).stdout == run.stdout
    )


def test_a_damaged_file_of_samples_is_set_aside_and_told(folder: Path) -> None:
    (folder / "learned.json").write_text('{"format": 1, "samples": [')
    run = of_log(whole_log(), "--gpu", "A100-80GB", "--out", "learned.json")
    assert run.returncode == 1
    assert "it was set aside as learned.json.damaged-1, and learning begins anew" in flat(run.stdout)
    assert len(read_samples(folder / "learned.json").samples) == 1


def test_a_file_of_a_newer_kvheadroom_is_refused_before_any_work(folder: Path) -> None:
    (folder / "learned.json").write_text('{"format": 2}')
    run = of_log(whole_log(), "--out", "learned.json")
    assert (run.returncode, run.stdout) == (2, "")
    assert "--out: learned.json: a newer kvheadroom wrote it" in run.stderr
    assert (folder / "learned.json").read_text() == '{"format": 2}'


def test_what_cannot_be_kept_is_still_told(folder: Path) -> None:
    run = of_log(whole_log(), "--gpu", "A100-80GB", "--out", "/proc/no-such-folder/learned.json")
    assert run.returncode == 1
    assert "learned from 1 start like it" in flat(run.stdout)
    assert "Nothing was written: /proc/no-such-folder/learned.json: it cannot be written (" in flat(
        run.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--log", "a", "--target", "http://h:8000"), "give either --log, or --target and --config"),
        (("--gpu", "H100"), "--gpu: is for --log FILE; of a running server it stands in the config"),
        (("--log", "-", "-"), "--log: standard input (-) can be read once"),
        (("--log", "a", "--gpu", "CPU"), "--gpu: on a CPU nothing is measured"),
        (("--log", "a", "--gpu", "H1000"), "'H1000' is not in the catalogue"),
        (("--log", "llama/config.json", "--model", "nowhere/at/all"), ""),
    ],
)
def test_options_that_do_not_go_together_end_with_2(
    arguments: tuple[str, ...], told: str, folder: Path
) -> None:
    if not told:
        (folder / "good.log").write_text(whole_log())
        arguments, told = ("--log", "good.log", "--model", "nowhere/at/all"), "--model: 'nowhere/at/all'"
    run = calibrate(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert told in run.stderr


def test_flags_fill_in_what_a_log_without_its_beginning_does_not_tell(folder: Path) -> None:
    ranks = [rank_lines(label=f"TP{index}", weights=7.51) for index in range(2)]
    (folder / "tail.log").write_text("".join(ranks) + UP)
    options: tuple[str, ...] = ("--log", "tail.log", "--model", "llama", "--gpu", "A100-80GB")
    assert "the log does not tell vLLM's release; say --vllm-version X.Y.Z" in flat(
        calibrate(*options).stdout
    )
    options = (*options, "--vllm-version", "0.33.0")
    assert (
        "several GPUs share its layers, and neither vLLM's arguments nor its config stand in the log"
        in flat(calibrate(*options).stdout)
    )
    run = calibrate(*options, "--tp", "2", "--json")
    assert run.returncode == 0, run.stdout
    assert document(run)["starts"][0]["sample"]["key"]["parallelism"] == "tp2"
    # What the log says itself comes first.
    run = of_log(whole_log(), "--gpu", "A100-80GB", "--tp", "4", "--json")
    assert document(run)["starts"][0]["sample"]["key"]["parallelism"] == "tp1"


# Running servers


def page(*changes: tuple[bytes, bytes]) -> bytes:
    """A page of a vLLM whose pool is what memory left over: 128 blocks of 32 tokens of 1,024 bytes."""
    text = capture("gqa_light_steady")
    for old, new in ((b'kv_cache_memory_bytes="4194304"', b'kv_cache_memory_bytes="None"'), *changes):
        assert old in text
        text = text.replace(old, new)
    return text


def of_servers(folder: Path, body: bytes, *arguments: str, settings: str = "hbm_bytes: 10000000") -> Any:
    answers = {**vllm_answers(), "/metrics": text_answer(body)}
    with http_server(answers) as (url, _):
        (folder / "kvheadroom.yaml").write_text(f"replicas: [{{url: '{url}', name: r, {settings}}}]")
        return calibrate("--config", "kvheadroom.yaml", *arguments)


def test_a_running_engine_is_measured_by_its_blocks(folder: Path) -> None:
    run = of_servers(folder, page(), "--json", "--out", "learned.json")
    assert run.returncode == 0, run.stdout + run.stderr
    (start,) = document(run)["starts"]
    sample = start["sample"]
    # 10,000,000 x 0.92, the shipped model's 853,120 parameters of 2 bytes, 128 blocks x 32 tokens x 1,024 bytes
    assert sample["overhead_bytes"] == 9_200_000 - 1_706_240 - 4_194_304
    assert (sample["start"], sample["source"]) == ("r/0/1795989324", "fleet")
    (kept,) = read_samples(folder / "learned.json").samples
    assert kept.measured_at is not None
    # The same start once more is the same sample.
    again = of_servers(folder, page(), "--json", "--out", "learned.json")
    assert document(again)["learned"][0]["samples"] == 1


def test_a_page_without_a_start_time_tells_a_start_by_its_blocks(folder: Path) -> None:
    body = page((b"\nprocess_start_time_seconds 1.79598932443e+09", b""))
    (start,) = document(of_servers(folder, body, "--json"))["starts"]
    assert start["sample"]["start"] == "r/0/128 blocks"


SERVERS = {
    "asleep": (page((b'sleep_state="awake"} 1.0', b'sleep_state="awake"} 0.0')), "hbm_bytes: 10000000"),
    "pool_by_flag": (capture("gqa_light_steady"), "hbm_bytes: 10000000"),
    "impossible": (page(), "hbm_bytes: 1000000000"),
    "unknown": (page(), "labels: {a: b}"),
    "pipeline_stages": (page(), "hbm_bytes: 10000000, flags: {pipeline_parallel_size: 2}"),
}


@pytest.mark.parametrize("reason", SERVERS)
def test_an_engine_that_tells_nothing_is_left_out_with_its_reason(reason: str, folder: Path) -> None:
    body, settings = SERVERS[reason]
    run = of_servers(folder, body, "--json", settings=settings)
    assert run.returncode == 1
    assert document(run)["excluded"] == {reason: 1}, run.stdout


def test_what_is_missing_of_a_running_engine_comes_with_the_line_to_add(folder: Path) -> None:
    run = of_servers(folder, page(), settings="labels: {a: b}")
    assert "set `gpu: B200` (or another name of the catalogue), or `hbm_bytes: N`" in flat(run.stdout)


def test_a_server_cannot_put_lines_of_its_own_into_the_config(folder: Path) -> None:
    answers = {
        **vllm_answers(),
        "/metrics": text_answer(page()),
        "/version": text_answer(json.dumps({"version": "0.32.0\noverhead_gb: 99"})),
    }
    with http_server(answers) as (url, _):
        config = folder / "kvheadroom.yaml"
        config.write_text(f"replicas: [{{url: '{url}', name: r, hbm_bytes: 10000000}}]")
        run = calibrate("--config", "kvheadroom.yaml", "--json")
    for learned in document(run)["learned"]:
        config.write_text("\n".join([*learned["config"], "replicas: [{url: 'http://h:8000'}]"]))
        assert load_config(config).overhead_gb == round(learned["overhead_bytes"] / 1e9, 3)
    assert "\noverhead_gb: 99" not in calibrate("--config", "kvheadroom.yaml").stdout


def test_a_server_that_does_not_answer_is_told(folder: Path) -> None:
    run = calibrate("--target", "http://127.0.0.1:1")
    assert run.returncode == 1
    assert "careful: 127.0.0.1:1: GET http://127.0.0.1:1/metrics: nothing listens there" in flat(run.stdout)
    assert "Nothing is learned." in run.stdout


def looked_at(fleet: FleetAssessment, monkeypatch: pytest.MonkeyPatch) -> CalibrationSample | Excluded:
    async def look_once(config: Config) -> tuple[FleetAssessment, dict[str, float | None]]:
        return fleet, {"hbm": 1795989324.43}

    monkeypatch.setattr(calibrator, "look_once", look_once)
    config = validate_config({"replicas": [{"url": "http://hbm:8000"}]}, "a test")
    (start,) = asyncio.run(look_at_fleet(config)).starts
    return start.outcome


def with_others(replica: ReplicaAssessment, others_bytes: int) -> FleetAssessment:
    gpu = GpuSnapshot(
        gpu="GPU-1", name="NVIDIA H100", index=0, total_bytes=80 * GIB, reserved_bytes=0, used_bytes=79 * GIB,
        free_bytes=GIB, accounting="v2",
    )  # fmt: skip
    runs = GpuAssignments(
        assigned=(Assignment("GPU-1", "hbm", "process"),),
        others=(OthersMemory("GPU-1", "hbm", others_bytes, own_bytes=GIB),),
    )
    reading = GpuReading(taken_at=1.0, duration_seconds=0.1, gpus=(gpu,))
    return FleetAssessment((replica,), gpus=GpuAssessment(reading=reading, interval_seconds=5.0, runs=runs))


def test_a_gpu_that_others_use_tells_nothing_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    told = on_a_gpu()
    # A twentieth of an H100's 85,028,896,768 bytes is not too much.
    little = looked_at(with_others(told, 4_251_444_838), monkeypatch)
    assert isinstance(little, CalibrationSample)
    assert little.start == "hbm/0/1795989324"
    much = looked_at(with_others(told, 4_251_444_839), monkeypatch)
    assert much == Excluded(Exclusion.FOREIGN_MEMORY, "other processes hold 3.96 GiB of its GPU")


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.SCALING])
def test_an_engine_that_is_not_settled_tells_nothing(
    state: ReplicaState, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = looked_at(FleetAssessment((replace(on_a_gpu(), state=state),)), monkeypatch)
    assert outcome == Excluded(Exclusion.RESTARTING, f"it is {state}, and its pool may still change")


def test_the_installed_command_teaches_with_examples_and_exit_codes() -> None:
    run = subprocess.run([*COMMAND, "calibrate", "--help"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "kvheadroom calibrate --log start.log --gpu H100" in run.stdout
    assert "exit code: 0 every start was measured and kept; 1 something was left out" in run.stdout
    assert "docs/calibration.md" in run.stdout


def test_a_release_that_is_newer_than_any_known_is_a_key_of_its_own(folder: Path) -> None:
    run = of_log(whole_log(release="0.99.0"), "--gpu", "A100-80GB", "--json")
    assert document(run)["starts"][0]["sample"]["key"]["release"] == "0.99.0"


def test_the_document_names_every_reason_and_every_reliability_and_no_other() -> None:
    document = (Path(__file__).parents[1] / "docs" / "calibration.md").read_text()
    left_out = document.partition("## What is left out")[2].partition("## Start-up logs")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", left_out, re.MULTILINE)) == {str(reason) for reason in Exclusion}
    apart = document.partition("## What is kept apart")[2].partition("## What is left out")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", apart, re.MULTILINE)) == {str(one) for one in Reliability}


def test_the_documents_example_is_what_the_command_prints() -> None:
    document = (Path(__file__).parents[1] / "docs" / "calibration.md").read_text()
    example = document.partition("## The report")[2].partition("```text\n")[2].partition("```")[0]
    printed = (Path(__file__).parent / "golden" / "calibrate.txt").read_text()
    for line in example.replace("start.log", "two.log").splitlines():
        assert line in printed.splitlines()
