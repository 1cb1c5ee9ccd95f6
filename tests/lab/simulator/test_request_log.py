"""Request logs: what requests share follows from the log alone, and what is no log is refused by name."""

import gzip
import json
from pathlib import Path

import pytest

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.recordings import read_recording
from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.request_log import LoggedArrivals, LoggedRequest, log_line, read_request_log
from kvheadroom.lab.simulator.rules import rules_of
from kvheadroom.lab.simulator.run import Run
from kvheadroom.lab.simulator.speeds import ConstantRates, recorded_rates

LINE = {
    "session": "a",
    "turn": 0,
    "t_send": 5.0,
    "t_end": 9.0,
    "prompt_tokens": 100,
    "want": 30,
    "got": 20,
    "status": 200,
}


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def test_a_log_is_read_in_the_order_sent_without_what_the_server_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.gz",
        {**LINE, "session": "late", "t_send": 7},
        {**LINE, "session": "refused", "status": 400, "prompt_tokens": None},
        {**LINE, "session": "gone", "t_send": 6, "status": -1},
        LINE,
    )
    usual = {"turn": 0, "prompt_tokens": 100, "max_tokens": 30}
    assert read_request_log(path) == [
        LoggedRequest(session="a", sent_at=5.0, output_tokens=20, **usual),  # type: ignore[arg-type]
        # How long its answer would have been is not known; it runs until its client goes.
        LoggedRequest(session="gone", sent_at=6.0, output_tokens=30, given_up_at=9.0, **usual),  # type: ignore[arg-type]
        LoggedRequest(session="late", sent_at=7.0, output_tokens=20, **usual),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({**LINE, "prompt_tokens": 0}, "line 2 is no request: .*a request has a prompt"),
        ({**LINE, "got": 31}, "from 1 to max_tokens tokens of output"),
        ({**LINE, "got": 0}, "from 1 to max_tokens tokens of output"),
        ({**LINE, "prefix_tokens": 101}, "a prefix is longer than its prompt"),
        ({**LINE, "shared_prefix": "x", "shared_prefix_tokens": 101}, "a prefix is longer than its prompt"),
        ({**LINE, "prompt_tokens": "many"}, "line 2 is no request"),
        ({"session": "a"}, "line 2 is no request: KeyError"),
        ([], "line 2 is no request"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path: Path, line: object, why: str) -> None:
    path = write(tmp_path / "log.gz", LINE, line)
    with pytest.raises(OperatorError, match=why) as refused:
        read_request_log(path)
    assert str(refused.value).startswith(str(path))


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    cut, damaged = tmp_path / "cut.gz", tmp_path / "damaged.gz"
    whole = write(tmp_path / "whole.gz", LINE, LINE).read_bytes()
    cut.write_bytes(whole[:-9])
    damaged.write_bytes(whole[:10] + bytes(20) + whole[30:])
    (tmp_path / "plain").write_text(json.dumps(LINE))
    (tmp_path / "binary.gz").write_bytes(gzip.compress(b"\xff\xfe"))
    for path in (cut, damaged, *(tmp_path / name for name in ("plain", "binary.gz", "missing"))):
        with pytest.raises(OperatorError, match="cannot be read") as refused:
            read_request_log(path)
        assert str(path) in str(refused.value)


def hits_of(*log: LoggedRequest) -> int:
    settings = EngineSettings(
        num_blocks=100,
        block_size=10,
        max_model_len=900,
        max_num_batched_tokens=900,
        max_num_seqs=9,
        rules=rules_of("0.33.0"),
    )
    speed = ConstantRates(prefill_tokens_per_second=1000.0, decode_tokens_per_second=100.0)
    run = Run(settings, LoggedArrivals(log, 10), speed, starts_at=0.0)
    run.advance(100.0)
    return run.told.hits


def turn(
    session: str, at: float, prompt: int, output: int, prefix: int = 0, shared: int = 0
) -> LoggedRequest:
    return LoggedRequest(
        session=session,
        turn=0,
        sent_at=at,
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output,
        prefix_tokens=prefix,
        shared_prefix="system" if shared else "",
        shared_prefix_tokens=shared,
    )


def test_hits_are_the_whole_blocks_of_what_the_log_says_is_shared() -> None:
    first = turn("a", 0, 95, 10)
    assert hits_of(first, turn("b", 9, 95, 10)) == 0, "sessions share nothing by themselves"
    # 95 + 10 tokens, the last of which was never computed: 10 whole blocks.
    assert hits_of(first, turn("a", 9, 200, 10, prefix=105)) == 100
    assert hits_of(first, turn("a", 9, 200, 10, prefix=47)) == 40, "a history that was cut"
    assert hits_of(first, turn("a", 9, 50, 10, prefix=50)) == 40, "a prompt's last token is always computed"
    assert hits_of(turn("a", 0, 95, 10, shared=55), turn("b", 9, 95, 10, shared=55)) == 50
    both = turn("a", 0, 95, 10, shared=55), turn("b", 9, 95, 10, shared=55)
    assert hits_of(*both, turn("b", 18, 150, 10, prefix=105, shared=55)) == 50 + 100


def test_a_request_is_written_as_it_is_read(tmp_path: Path) -> None:
    logged = turn("a", 5.25, 95, 10)
    arrivals = LoggedArrivals([logged], 10)
    request = arrivals.take()
    request.num_output_tokens = 10
    (tmp_path / "log.gz").write_bytes(gzip.compress(log_line(1, request, 9.5, left=False).encode()))
    assert read_request_log(tmp_path / "log.gz") == [logged]


PAGE = 'vllm:generation_tokens_total{{engine="0",model_name="m"}} {}\nvllm:num_requests_running{{engine="0",model_name="m"}} 1\n'


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ((PAGE.format(5), PAGE.format(4)), "generation_tokens_total is absent or falls"),
        ((PAGE.format(5).split("\n", 1)[1],), "generation_tokens_total is absent or falls"),
        ((PAGE.format(5) + PAGE.format(5).replace('engine="0"', 'engine="1"'),), "pages of one engine only"),
        (("up 1\n",), "pages of one engine only"),
    ],
)
def test_a_recording_that_tells_no_rates_is_refused(tmp_path: Path, pages: tuple[str, ...], why: str) -> None:
    path = write(tmp_path / "r.gz", *({"t": at, "text": page} for at, page in enumerate(pages)))
    with pytest.raises(OperatorError, match=why):
        recorded_rates(read_recording(path))
