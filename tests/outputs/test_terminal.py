"""The board in the terminal: what a person reads there at several widths, and what a name from outside cannot do."""

import io
import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvheadroom.capacity.binding_limit import BindingLimit, Limit
from kvheadroom.capacity.board_view import BoardView
from kvheadroom.capacity.fleet import FleetAssessment, ReplicaAssessment, ReplicaState, withhold_stale
from kvheadroom.capacity.fleet_verdict import Urgency, Verdict
from kvheadroom.capacity.forecast import Forecast
from kvheadroom.outputs.json_report import status_report, to_json
from kvheadroom.outputs.live_screen import has_blocks, open_console, print_lines
from kvheadroom.outputs.terminal import Space, board_lines, printable
from kvheadroom.sources.status_api import parse_status, read_status
from tests.conftest import Golden
from tests.outputs.fleet import NOW, fleet, replica

HOSTILE = "evil\x1b[2J\x1b]0;owned\x07\r\n[red]bold[/red] :boom: \u202eabc\u200b\x9b31m"


@cache
def view_of_many(number: int) -> BoardView:
    return view(many(number))


def view(shown: FleetAssessment, notice: str | None = None) -> BoardView:
    report = to_json(status_report(withhold_stale(shown, NOW), NOW, notice))
    return parse_status(read_status(report.encode()))


def text(shown: BoardView, width: int, height: int | None = None, most: int | None = None) -> str:
    lines = board_lines(shown, "watched here every 5 s", Space(width=width, height=height, most=most))
    assert all(cell_len(line.plain) <= width for line in lines), "nothing is wider than the terminal"
    assert height is None or len(lines) <= height
    return "".join(f"{line.plain}\n" for line in lines)


BUSY = replica("busy", "gqa_light_steady")


def engine_with(likely: float, limit: Limit, name: str, of: ReplicaAssessment = BUSY) -> ReplicaAssessment:
    (engine,) = of.engines
    ahead = replace(
        Forecast(
            probabilities={"30s": likely / 4, "2m": likely, "10m": likely / 2},
            exhaustion_seconds=90.0 if likely else None,
        ),
        load=replace_load(),
    )
    told = replace(engine, forecast=ahead, binding_limit=BindingLimit(limit, "2 requests wait"))
    return replace(of, replica=name, engines=(told,))


def replace_load() -> Any:
    load = fleet().replicas[0].engines[0].forecast.load
    assert load is not None
    return load


def many(number: int) -> FleetAssessment:
    """The first two are likely to preempt, the third is down, the others are fine."""
    some = [engine_with(0.8, Limit.KV_POOL, f"vllm-{place:03}") for place in range(2)]
    down = replace(BUSY, replica="vllm-002", state=ReplicaState.DOWN)
    calm = roomy()
    fine = [
        replace(calm, replica=f"vllm-{place:03}", url=f"http://vllm-{place:03}:8000")
        for place in range(3, number)
    ]
    return FleetAssessment((*some, down, *fine))


def roomy() -> ReplicaAssessment:
    return engine_with(0.0, Limit.NONE, "calm", replica("calm", "gqa_idle_fresh"))


def test_the_board_of_a_fleet_with_everything_in_it_is_as_committed(golden: Golden) -> None:
    shown = view(fleet(), "This is a replay.")
    golden.check("top_80.txt", text(shown, 80))
    golden.check("top_200.txt", text(shown, 200))


def test_the_board_of_500_engines_is_as_committed(golden: Golden) -> None:
    shown = view_of_many(500)
    golden.check("top_500.txt", text(shown, 80, 40) + "-" * 200 + "\n" + text(shown, 200, 40))


def test_the_first_line_is_the_verdict_in_words() -> None:
    lines = text(view_of_many(14), 200).splitlines()
    assert lines[0] == (
        "1 of 14 servers is down; 2 of 13 engines are likely to preempt within 2 minutes; 11 more sessions of 2,048 tokens fit."
    )
    alone = text(view(FleetAssessment((roomy(),))), 80).splitlines()
    assert alone[0] == "The engine is fine; 1 more session of 2,048 tokens fits."
    assert text(view(FleetAssessment(())), 80).splitlines()[0] == "No vLLM server is watched."


@pytest.mark.parametrize("number", [1, 3, 14, 500])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (120, 30), (200, 24), (40, 20), (20, 5)])
def test_a_board_of_any_size_fits_the_terminal_and_says_how_many_are_not_shown(
    number: int, width: int, height: int
) -> None:
    told = text(view_of_many(number), width, height)
    rows = len(re.findall(r"^(?:DOWN|preemption|fine) ", told, re.MULTILINE))
    assert rows >= 1
    hidden = re.search(r"^\.\.\. and ([\d,]+) more", told, re.MULTILINE)
    if hidden is not None:
        assert rows + int(hidden[1].replace(",", "")) == len(view_of_many(number).rows)
    elif width > 40:
        assert rows == len(view_of_many(number).rows)


def test_as_many_are_shown_as_are_asked_for_and_the_worst_of_them() -> None:
    told = text(view_of_many(14), 200, most=3)
    assert re.findall(r"vllm-\d+", told) == ["vllm-002", "vllm-000", "vllm-001"]
    assert "... and 11 more that are not shown: 11 fine\n" in told


def test_what_is_known_of_an_engine_stands_on_its_line() -> None:
    shown = view_of_many(4)
    told = text(shown, 80)
    assert (
        f"{'preemption imminent  vllm-000 engine 0  tiny':<73}1 s old\n"
        "  ████████░░░░░░ 60.6 % room left; 1.20 of 2 sessions of 2,048 tokens in use;\n"
        "  0 more fit; predicted 2\n"
        "  preemption within 30s 20.0 %, 2m 80.0 %, 10m 40.0 %;\n"
        "  next request finds no room in 90 s (50%); 13 running, 0 waiting;\n"
        "  18 preemptions so far; how long idle sessions stay is not known\n"
        "  80% for a preemption within 2m; 17 run and grow by 4.0 blocks a second; 9 wait\n"
    ) in told
    row = next(line for line in text(shown, 200).splitlines() if "vllm-000" in line)
    assert " ".join(row.split()) == (
        "preemption imminent vllm-000 engine 0 tiny █████░░░ 60.6 % room left 2,048 1.20 of 2 2 0 20/80/40 % 13 0 18 not known 1 s"
    )


def test_one_preemption_is_one() -> None:
    shown = view_of_many(4)
    once = replace(shown.rows[1], preemptions_total=1.0)
    assert " 1 preemption so far;" in text(replace(shown, rows=(once,)), 80)


def test_ages_go_on_between_two_looks() -> None:
    lines = board_lines(view_of_many(4), "x", Space(width=80), age_seconds=3.0)
    assert any(line.plain.endswith(" 4 s old") for line in lines)


def test_where_there_are_no_block_elements_the_bar_is_of_ascii() -> None:
    lines = board_lines(view_of_many(4), "x", Space(width=80, blocks=False))
    assert any("########...... 60.6 % room left" in line.plain for line in lines)
    assert has_blocks(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8")))
    assert not has_blocks(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii")))


def test_names_from_outside_are_text_and_nothing_else() -> None:
    shown = view_of_many(4)
    first = replace(
        shown.rows[1], replica=HOSTILE, engine=HOSTILE, model_name=HOSTILE, state=HOSTILE, why=HOSTILE,
        probabilities={HOSTILE: 0.5}, assumed=(HOSTILE,), unpredicted=(HOSTILE,), no_forecast=None,
    )  # fmt: skip
    unheard = replace(first, verdict=Verdict.UNKNOWN, no_forecast=HOSTILE)
    server = replace(shown.rows[0], replica=HOSTILE, why=HOSTILE)
    hostile = replace(
        shown, rows=(first, unheard, server), sentence=HOSTILE, notice=HOSTILE, faults=(HOSTILE,), hints=(HOSTILE,)
    )  # fmt: skip
    for width in (80, 200):
        for height in (None, 30):
            told = text(hostile, width, height)
            assert "[red]bold[/red] :boom:" in told, "markup stays what it is"
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u200b]", told)
            out = io.StringIO()
            console = Console(
                file=out,
                force_terminal=True,
                color_system="truecolor",
                width=width,
                markup=False,
                emoji=False,
            )
            print_lines(console, board_lines(hostile, HOSTILE, Space(width=width, height=height)))
            sequences = set(re.findall(r"\x1b.[^m]*.?", out.getvalue()))
            assert sequences
            assert all(re.fullmatch(r"\x1b\[[\d;]*m", one) for one in sequences), sequences
            assert "\x07" not in out.getvalue()
            assert "\x9b" not in out.getvalue()


def test_text_without_end_is_cut_and_wide_letters_take_two_cells() -> None:
    assert printable("x" * 10_000) == "x" * 300 + "..."
    wide = replace(view_of_many(4).rows[0], replica="漢" * 500)
    told = text(replace(view_of_many(4), rows=(wide,)), 80)
    assert "漢" * 20 in told


def test_colours_are_only_for_terminals_and_never_the_only_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = board_lines(view_of_many(4), "x", Space(width=80))
    out = io.StringIO()
    print_lines(open_console(out), lines)
    assert out.getvalue() == "".join(f"{line.plain}\n" for line in lines)

    def coloured() -> str:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, color_system="standard", width=80)
        print_lines(console, lines)
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.search(r"\x1b\[[\d;]*3[13]m", coloured())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*\b[349][0-7]m", coloured())
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured()) == "".join(f"{line.plain}\n" for line in lines)


def test_a_board_without_an_answer_says_why() -> None:
    nothing = BoardView.of_no_answer(NOW, "GET http://m:9878/api/v1/status: nothing listens there")
    assert text(nothing, 80).splitlines()[:2] == [
        "What the fleet does is not known.",
        "GET http://m:9878/api/v1/status: nothing listens there",
    ]
    assert (nothing.urgency, nothing.is_complete) == (Urgency.UNKNOWN, False)


def test_what_is_assumed_or_not_known_is_said_once_for_all_that_share_it() -> None:
    told = " ".join(text(view(fleet()), 80).split())
    assert "6 engines, no forecast: watched without a gap for 0 s; it takes 30 s, or a queue" in told
    assert (
        "1 engine, not predicted: model_files is missing: the server names its model 'org/<b>tiny</b>'; way out:"
        in told
    )
    assert re.search(r"4 engines, assumed: tensor_parallel_size, .*kv_transfer_config", told)


def test_the_document_has_the_verdict_and_the_order() -> None:
    document = json.loads(to_json(status_report(withhold_stale(many(14), NOW), NOW, None)))
    assert document["verdict"] == {
        "sentence": "1 of 14 servers is down; 2 of 13 engines are likely to preempt within 2 minutes; "
        "11 more sessions of 2,048 tokens fit",
        "urgency": "now",
        "servers": 14,
        "engines": 13,
        "server_verdicts": {"down": 1},
        "engine_verdicts": {"preemption_imminent": 2, "fine": 11},
        "room": {
            "session_tokens": 2048,
            "sessions": 11,
            "engines": 13,
            "shorter_engines": 0,
            "unknown_engines": 0,
        },
    }
    assert document["worst_first"][0] == {
        "replica": "vllm-002",
        "engine": None,
        "verdict": "down",
        "urgency": "now",
        "why": "it does not answer",
    }
    assert [one["verdict"] for one in document["worst_first"][1:4]] == ["preemption_imminent"] * 2 + ["fine"]
    assert len(document["worst_first"]) == 14
