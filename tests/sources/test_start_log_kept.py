"""Start-up logs as they are kept: in containers, journals and terminals, cut, mixed up, changed at random; and files."""

import gzip
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvheadroom.capacity.logged_start import LoggedRank, LogReading
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.sources import start_log_file
from kvheadroom.sources.start_log import KEEP_THE_START, read_start_log
from kvheadroom.sources.start_log_file import read_log_file
from tests.sources.start_logs import FOLDER, gib, log, messages, only_rank, only_start, read

WHOLE = log("whole_0.33.0_data_parallel")
PLAIN = read(WHOLE)

KEPT: dict[str, Callable[[str], str]] = {
    "docker with times": lambda line: f"2026-11-20T08:00:01.123456789Z {line}",
    "kubernetes, from the node": lambda line: f"2026-11-20T08:00:01.123456789+01:00 stdout F {line}",
    "kubernetes, with the pod": lambda line: f"[pod/vllm-0/vllm] {line}",
    "docker compose": lambda line: f"vllm-1  | {line}",
    "docker's file": lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-11-20T08:00:01Z"}),
    "journald": lambda line: f"Nov 20 08:00:01 node-7 vllm[1234]: {line}",
    "journald with the time in full": lambda line: f"2026-11-20T08:00:01+0100 node-7 vllm[1234]: {line}",
    "journald as JSON": lambda line: json.dumps({"MESSAGE": line, "PRIORITY": "6"}),
    "colours": lambda line: f"\x1b[1;36m{line.replace(') ', ')' + chr(27) + '[0;0m ', 1)}\x1b[0m",
    "colours without their escapes": lambda line: f"[1;36m{line.replace(') ', ')[0;0m ', 1)}",
    "colours as syslog writes them": lambda line: f"#033[36m{line}#033[0m",
    "Windows": lambda line: f"{line}\r",
    "a torch prefix": lambda line: f"[rank0]: {line}",
    "a comment": lambda line: f"## {line}",
    "NULs": "\0".join,
    "a progress bar before it": lambda line: f"Loading:  50%|###  | 1/2\rLoading: 100%|#####| 2/2\r{line}",
    "a bar in the same line": lambda line: f"Capturing CUDA graphs: 100%|#####| 67/67 [00:02<00:00, 23.28it/s]{line}",
}  # fmt: skip


@pytest.mark.parametrize("how", KEPT)
def test_a_log_says_the_same_however_it_was_kept(how: str) -> None:
    lines = [KEPT[how](line) for line in WHOLE.splitlines()]
    reading = read_start_log(lines)
    if how == "a bar in the same line":
        # A line of the server that is no message of vLLM's has no prefix to be found by.
        lines[-1] = WHOLE.splitlines()[-1]
        reading = read_start_log(lines)
    assert reading == PLAIN


def test_vllm_s_own_json() -> None:
    lines = [
        json.dumps({"asctime": "x", "levelname": "INFO", "name": "vllm", "processName": name, "process": pid, "message": said})
        for name, pid, said in (
            ("EngineCore_DP1", 9, "Initializing a V1 LLM engine (v0.33.0) with config: model='a/b', max_seq_len=64"),
            ("Worker_DP1_TP0", 10, "Available KV cache memory: 3.5 GiB"),
            ("EngineCore_DP1", 9, "init engine (profile, create kv cache, warmup model) took 9.1 s"),
        )
    ]  # fmt: skip
    (start,) = read_start_log(lines).starts
    assert (start.engine, start.model, start.outcome.value) == (1, "a/b", "started")
    assert start.ranks == (LoggedRank(label="DP1_TP0", available=gib("3.50")),)


def test_a_line_that_the_runtime_broke_is_joined() -> None:
    lines = [
        f"2026-11-20T08:00:01Z stderr {'F' if end == len(line) else 'P'} {line[at:end]}"
        for line in WHOLE.splitlines()
        for at in range(0, max(len(line), 1), 50)
        for end in (min(at + 50, len(line)),)
    ]
    starts = read_start_log(lines).starts
    assert [(start.flags, start.ranks) for start in starts] == [
        (start.flags, start.ranks) for start in PLAIN.starts
    ]


PUBLISHED = sorted(path.stem for path in FOLDER.glob("0.*.log"))


def wrapped(line: str, width: int) -> list[str]:
    return [line[at : at + width] for at in range(0, len(line), width)]


@pytest.mark.parametrize("width", [79, 80, 100, 120, 132, 160])
@pytest.mark.parametrize("name", PUBLISHED)
def test_lines_that_a_terminal_wrapped_are_joined(name: str, width: int) -> None:
    lines = log(name).splitlines()
    parts = [part for line in lines for part in wrapped(line, width)]
    expected = [replace(start, first_line=1, last_line=1) for start in read_start_log(lines).starts]
    for kept in (parts, [part.rstrip() for part in parts]):
        assert [
            replace(start, first_line=1, last_line=1) for start in read_start_log(kept).starts
        ] == expected


@pytest.mark.parametrize("width", [60, 79, 80, 100, 132])
def test_a_line_that_is_wrapped_in_its_first_words_or_its_prefix_is_joined(width: int) -> None:
    line = log("0.31.0_one_gpu").splitlines()[2]
    assert read_start_log(wrapped(line, width)).starts[0].ranks == read_start_log([line]).starts[0].ranks


def test_an_exception_that_is_wrapped_tells_all_its_figures() -> None:
    line = (
        "ERROR 01-02 03:04:05 [core.py:700] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total "
        "capacity of 79.19 GiB of which 411.94 MiB is free."
    )
    failure = "the GPU ran out of memory: 2.50 GiB were asked for, and 411.94 MiB of 79.19 GiB were free"
    for width in range(50, len(line)):
        reading = read_start_log(["Available KV cache memory: 1.00 GiB", *wrapped(line, width)])
        assert reading.starts[0].failure == failure, width


def test_a_number_that_is_wrapped_is_not_taken_for_its_first_digits() -> None:
    for line in (
        "INFO 01-02 03:04:05 [core.py:70] # GPU blocks: 24084, # CPU blocks: 4096",
        "INFO 01-02 03:04:05 [core.py:70] Overriding num_gpu_blocks=24084 with num_gpu_blocks_override=32768",
    ):
        for width in range(36, len(line)):
            start = read_start_log(wrapped(line, width)).starts[0]
            assert start.num_gpu_blocks == 24084, width
            assert start.flags.get("num_gpu_blocks_override") in (None, 32768), width


def test_arguments_and_a_config_that_are_wrapped_keep_their_flags() -> None:
    for line in WHOLE.splitlines():
        if "non-default args" in line or "with config" in line:
            expected = read_start_log([line]).starts[0].flags
            assert read_start_log(wrapped(line, 120)).starts[0].flags == expected != {}


def test_the_last_value_of_a_config_that_is_cut_is_left_out() -> None:
    line = "Initializing a V1 LLM engine (v0.11.0) with config: model='a/b', max_seq_len=32768, tensor_parallel_size=16"
    for end in range(line.index("max_seq_len"), len(line) + 1):
        flags = only_start(line[:end]).flags
        assert flags in ({}, {"max_model_len": 32768})


def test_a_line_that_was_folded_between_words_is_joined() -> None:
    words, folded = log("0.31.0_one_gpu").splitlines()[2].split(" "), []
    while words:
        folded.append(" ".join(words[:12]))
        del words[:12]
    assert read_start_log(folded).starts[0].ranks == only_start(log("0.31.0_one_gpu").splitlines()[2]).ranks


def test_a_line_that_somebody_quoted_in_a_comment_is_joined() -> None:
    rank = only_rank(
        "# model weights take 18.83GiB; non_torch_memory takes 0.09GiB; \n"
        "# PyTorch activation peak memory takes 3.73GiB; the rest of the memory reserved for KV Cache is 12.89GiB\n"
    )
    assert rank == LoggedRank(
        weights=gib("18.83"), non_torch=gib("0.09"), activation=gib("3.73"), available=gib("12.89")
    )


def test_a_half_line_is_not_joined_with_another_message() -> None:
    reading = read(
        "Free memory on device (78.84/79.25 GiB) on startup. Desired GPU\n"
        "INFO 01-02 03:04:05 [gpu_worker.py:1] Available KV cache memory: 3.50 GiB\n"
        " memory utilization is (0.92, 72.91 GiB). Actual usage is 15.26 GiB for weight\n"
    )
    assert reading.starts[0].ranks == (LoggedRank(available=gib("3.50")),)


def test_ranks_that_print_at_the_same_time_are_kept_apart() -> None:
    prefixes = {
        "(VllmWorker rank=1 pid=11) INFO 05-05 15:24:32 [gpu_worker.py:298]": "rank1",
        "(Worker_PP1_TP3 pid=12) INFO 05-05 15:24:32 [gpu_worker.py:298]": "PP1_TP3",
        "(Worker_TP1_EP1 pid=13) INFO 05-05 15:24:32 [v1/worker/gpu_worker.py:298]": "TP1_EP1",
        "(Worker_3 pid=14) INFO 05-05 15:24:32 [gpu_worker.py:298]": "rank3",
        "(RayWorkerWrapper pid=15, ip=10.0.0.3) INFO 05-05 15:24:32 [gpu_worker.py:298]": "pid=15",
        "(EngineCore pid=9) (RayWorkerWrapper pid=15, ip=10.0.0.4) INFO 05-05 15:24:32 [gpu_worker.py:298]": "pid=15",
        "(VllmWorkerProcess pid=16) INFO 05-05 15:24:32 worker.py:241]": "pid=16",
        "INFO 05-05 15:24:32 worker.py:241]": "",
    }
    lines = [
        f"{prefix} Model loading took {number}.2500 GiB and 1.0 seconds"
        for number, prefix in enumerate(prefixes)
    ]
    lines += [
        f"{prefix} Available KV cache memory: {number}.75 GiB" for number, prefix in enumerate(prefixes)
    ]
    (start,) = read_start_log(lines).starts
    found = {(rank.label, rank.weights, rank.available) for rank in start.ranks}
    assert found == {
        (label, gib(f"{number}.2500"), gib(f"{number}.75")) for number, label in enumerate(prefixes.values())
    }


def test_text_inside_another_message_is_none_of_vllm_s() -> None:
    said = "Available KV cache memory: 1.00 GiB"
    reading = read(
        f"INFO 01-02 03:04:05 [logger.py:39] Received request cmpl-1: prompt: '{said}'\n"
        f'  logger.info("{said}")\n(EngineCore pid=1)     raise ValueError("No available memory for the cache blocks. "\n'
    )
    assert reading.starts == ()


PROBLEMS = {
    "": "no_start: it holds no line; keep the first lines from where the server starts, as with "
    "`docker logs NAME 2>&1 | head -n 2000 > start.log`",
    "hello\nworld": "not_vllm: lines 1 to 2: nothing that vLLM prints stands there; keep the first lines from where the server "
    "starts, as with `docker logs NAME 2>&1 | head -n 2000 > start.log`",
    "INFO 10-06 17:00:11 [loggers.py:248] Engine 000: Avg prompt throughput: 1.0 tokens/s, GPU KV cache usage: 3.1%\n"
    'INFO:     10.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK': "no_start: lines 1 to 2: nothing of a start stands in this log of "
    "vLLM, which may have been rotated away; keep the first lines from where the server starts, as with "
    "`docker logs NAME 2>&1 | head -n 2000 > start.log`",
    "[2026-01-02 03:04:05] server_args=ServerArgs(model_path='a/b', tp_size=1)\n[2026-01-02 03:04:09] Load weight begin. avail mem=7 GB":
        "not_vllm: lines 1 to 2: this is a log of SGLang; give the one of vLLM",
    "[TensorRT-LLM] TensorRT-LLM version: 1.2.0": "not_vllm: lines 1 to 1: this is a log of TensorRT-LLM; give the one of vLLM",
    "llama_model_loader: loaded meta data with 26 key-value pairs": "not_vllm: lines 1 to 1: this is a log of llama.cpp; give the one "
    "of vLLM",
    "2026-01-02T03:04:05.123456Z  INFO text_generation_launcher: Args {": "not_vllm: lines 1 to 1: this is a log of TGI; give the one "
    "of vLLM",
    "INFO 01-02 03:04:05 [gpu_worker.py:1] Available KV cache memory: 3.50 GiB": "cut: lines 1 to 1: neither the end of this start nor "
    "an error stands there; take the log again once the server answers or has stopped",
}  # fmt: skip


@pytest.mark.parametrize("text", PROBLEMS)
def test_what_is_no_whole_start_is_told_with_the_way_out(text: str) -> None:
    assert messages(read(text)) == [PROBLEMS[text]]


def test_a_start_that_is_cut_anywhere_keeps_what_it_has_and_makes_nothing_up() -> None:
    whole = {rank.label: rank for start in PLAIN.starts for rank in start.ranks}
    lines = WHOLE.splitlines()
    for end in range(len(lines)):
        for start in read_start_log(lines[:end]).starts:
            for rank in start.ranks:
                for name in ("weights", "available", "activation", "cudagraph", "total", "requested"):
                    value = getattr(rank, name)
                    assert value is None or any(value == getattr(other, name) for other in whole.values())


def test_many_starts_are_read_up_to_a_limit() -> None:
    reading = read("vLLM API server version 0.11.0\n" * 1200)
    assert len(reading.starts) == 1000
    assert sum(problem.kind == "cut" for problem in reading.problems) == 20
    assert reading.problems[0].message == (
        "line 1001: more than 1000 starts stand before it, and what follows was not read; give the log of one start"
    )


def _mutated(lines: list[str], choice: random.Random) -> list[str]:
    for _ in range(choice.randrange(1, 12)):
        at = choice.randrange(len(lines))
        line = lines[at]
        place = choice.randrange(len(line) + 1)
        match choice.randrange(9):
            case 0:
                lines[at] = line[:place]
            case 1:
                lines[at] = line[place:]
            case 2:
                lines[at] = (
                    line[:place]
                    + choice.choice(["\0", "\x1b[", "{", "('", "\\", "\ud800", "9" * 400, "\r", "é", "٣"])
                    + line[place:]
                )
            case 3:
                lines[at] = line + lines[choice.randrange(len(lines))]
            case 4:
                del lines[at]
                lines = lines or [""]
            case 5:
                lines.insert(at, lines[choice.randrange(len(lines))])
            case 6:
                lines[at] = "".join(
                    chr(choice.randrange(0x110000)) if choice.random() < 0.02 else c for c in line
                )
            case 7:
                lines[at] = line.replace(
                    choice.choice(["GiB", "0", "1", ".", "(", ")", " ", "="]),
                    choice.choice(["GB", "-", "1e9", "", "(", "\n"]),
                )
            case _:
                choice.shuffle(lines)
    return lines  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.log")))
def test_no_change_of_a_log_raises_anything(name: str) -> None:
    original = log(name).splitlines()
    for seed in range(150):
        try:
            reading = read_start_log(_mutated(list(original), random.Random(seed)))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        assert isinstance(reading, LogReading)
        assert "sk-never" not in repr(reading)


def test_no_file_of_any_bytes_raises_anything(tmp_path: Path) -> None:
    path = tmp_path / "start.log"
    whole = WHOLE.encode()
    for seed in range(200):
        choice = random.Random(seed)
        garbage = choice.randbytes(choice.randrange(1, 4096))
        at = choice.randrange(len(whole))
        content = choice.choice(
            [
                garbage,
                whole[at:] + garbage + whole[:at],
                gzip.compress(whole)[: choice.randrange(2, 900)] + garbage,
                b"\xff\xfe" + garbage,
            ]
        )
        path.write_bytes(content)
        try:
            found = read_log_file(str(path))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        assert isinstance(found, LogReading | SourceFailure), seed


def test_many_half_lines_cost_no_more_than_their_length() -> None:
    begun = time.process_time()
    read_start_log(
        ["(Worker pid=1) INFO 01-02 03:04:05 [gpu_worker.py:1] Free memory on device", *["x" * 200] * 70]
        * 500
    )
    # About a second; joining without a limit would take many.
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    "line",
    [
        "a" * 2**20,
        "(" * 2**20,
        "[1;" * 2**18,
        "\x1b[" * 2**18,
        "\r" * 2**20,
        "gpu_worker.py:1" * 2**16,
        "2026-11-20T08:00:01Z stdout P " + "x" * 2**20,
        "non-default args: {" + "'a': [" * 2**17,
        "non-default args: {" + "'\\" * 2**18,
        "args: Namespace(" + "a=1, " * 2**17,
        "Free memory on device (" + "1" * 2**20,
        "Initializing a V1 LLM engine (v0.11.0) with config: " + "a='b', " * 2**16,
        '{"log": ' * 2**16,
        "Worker pid=" + "(Worker_TP1 pid=1) " * 2**15 + "x",
        "a.b:" + "EngineCoreError: " * 2**16,
    ],
    ids=lambda line: f"{line[:12]!r}",
)
def test_a_line_of_a_megabyte_costs_no_more_than_its_length(line: str) -> None:
    begun = time.process_time()
    read_start_log([line] * 8)
    # A few tenths of a second; work that grows with the square of the length would take minutes.
    assert time.process_time() - begun < 20


def test_a_file_plain_or_compressed(tmp_path: Path) -> None:
    plain, compressed = tmp_path / "start.log", tmp_path / "start.log.gz"
    plain.write_text(WHOLE, "utf-8")
    compressed.write_bytes(gzip.compress(WHOLE.encode()))
    assert read_log_file(str(plain)) == read_log_file(str(compressed)) == PLAIN


def test_a_file_of_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "start.log"
    path.write_bytes(b"\xff\xfe\x80 no UTF-8\n" + WHOLE.encode())
    found = read_log_file(str(path))
    assert isinstance(found, LogReading)
    assert [start.ranks for start in found.starts] == [start.ranks for start in PLAIN.starts]


def test_what_windows_writes_by_default(tmp_path: Path) -> None:
    path = tmp_path / "start.log"
    path.write_text(log("0.31.0_one_gpu"), "utf-16")
    found = read_log_file(str(path))
    assert isinstance(found, LogReading)
    assert found.starts[0].ranks == (only_rank(log("0.31.0_one_gpu")),)


def test_a_file_that_gives_no_log(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(WHOLE.encode() * 50)[:-40])
    changed = tmp_path / "changed.gz"
    changed.write_bytes(b"\x1f\x8b" + b"x" * 100)
    expected = {
        str(tmp_path / "none.log"): (FailureReason.NOT_FOUND, "there is no such file on this machine"),
        str(tmp_path): (
            FailureReason.BAD_ANSWER,
            "it is not a regular file; give the file that holds the log",
        ),
        str(cut): (
            FailureReason.BAD_ANSWER,
            "its compression is damaged or it was cut; compress the log again",
        ),
        str(changed): (
            FailureReason.BAD_ANSWER,
            "its compression is damaged or it was cut; compress the log again",
        ),
        "a\0b": (FailureReason.BAD_ANSWER, "its path is no path"),
    }
    for path, (reason, detail) in expected.items():
        shown = path.replace("\0", "\N{REPLACEMENT CHARACTER}")
        assert read_log_file(path) == SourceFailure("start_log", reason, f"{shown}: {detail}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "start.log"
    path.write_text(WHOLE, "utf-8")
    path.chmod(0)
    found = read_log_file(str(path))
    assert isinstance(found, SourceFailure)
    assert found.reason is FailureReason.NO_PERMISSION


def test_of_a_file_that_is_too_large_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_log_file, "MOST_BYTES", 2 * 1024**2)
    path = tmp_path / "start.log.gz"
    path.write_bytes(gzip.compress(WHOLE.encode() + b"INFO:     a request\n" * 200_000))
    found = read_log_file(str(path))
    assert isinstance(found, LogReading)
    assert found.starts == PLAIN.starts
    assert messages(found) == [f"too_large: only its first 2 MiB were read; {KEEP_THE_START}"]
