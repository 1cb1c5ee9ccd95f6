"""A running engine and other ways to start it, as text and as JSON."""

import json
from dataclasses import replace
from pathlib import Path

from kvheadroom.capacity.running_server import Change
from kvheadroom.capacity.what_if import what_if
from kvheadroom.capacity.what_if_answer import WhatIf
from kvheadroom.outputs.what_if_json import what_if_json
from kvheadroom.outputs.what_if_report import is_answered, what_if_report
from tests.capacity.test_what_if import BLOCKS, asked, glm, running
from tests.conftest import Golden

PLANNING = Path(__file__).parents[2] / "docs" / "planning.md"


def four_or_eight() -> WhatIf:
    changes = tuple(Change(flags={"tensor_parallel_size": size}) for size in (4, 8))
    return what_if(glm(), changes, session_tokens=(262_144,))


def test_4_gpus_or_8_reads_as_it_is_meant_to(golden: Golden) -> None:
    longer = Change(flags={"max_model_len": 1_048_576, "gpu_memory_utilization": 0.95})
    answer = what_if(
        glm(), (Change(flags={"tensor_parallel_size": 8}), longer), session_tokens=(262_144, 8192)
    )
    golden.check("what_if.txt", "\n".join(what_if_report(answer, explain=False)) + "\n")
    assert is_answered(answer)
    assert not answer.rows[1].is_sure


def test_the_documentation_shows_what_the_command_prints() -> None:
    shown = PLANNING.read_text()
    lines = list(what_if_report(four_or_eight(), explain=False))
    first = "\n".join(lines[: lines.index("")])
    table = lines.index("On the same 8 GPUs: sessions of 262,144 tokens of all engines")
    for text in (first, "\n".join(lines[table : table + 5])):
        assert text in shown


def test_every_figure_is_explained_within_100_columns() -> None:
    for answer in (
        four_or_eight(),
        asked(running(BLOCKS), {"tensor_parallel_size": 3}, {"kv_cache_dtype": "fp8", "max_num_seqs": 4}),
        asked(running(100, 90, gpu=None, weights_bytes=None), {"tensor_parallel_size": 2}),
    ):
        lines = list(what_if_report(answer, explain=True))
        assert max(map(len, lines)) <= 100
        assert "Not modelled" in lines


def test_an_engine_that_tells_no_blocks_is_not_said_to_tell_them() -> None:
    server = running(BLOCKS, flags={"tensor_parallel_size": 1})
    silent = replace(server, snapshots=(replace(server.snapshot, num_blocks=None),))
    report = " ".join(what_if_report(asked(silent, {"tensor_parallel_size": 2}), explain=False))
    assert report.startswith(
        "Now, TP 1 on 1 x H100: the server's page does not tell how many blocks the pool has; "
    )
    assert "as the engine says" not in report


def test_json_has_the_same_keys_whatever_is_known() -> None:
    known = json.loads(what_if_json(four_or_eight()))
    unknown = json.loads(what_if_json(asked(running(BLOCKS), {"tensor_parallel_size": 3})))
    assert list(known) == list(unknown)
    assert list(known["from"]) == list(unknown["from"])
    assert list(known["rows"][0]) == list(unknown["rows"][0])
    (refused,) = unknown["rows"]
    assert refused["plan"]["outcome"] == "refused"
    assert (refused["starts"], refused["kv_cache_check"], refused["sessions"]) == (False, None, [])
    assert refused["calibrated"]["reason"] == "vLLM refuses it, whatever the overhead is"
    assert known["not_modelled"][0].startswith("Room is planned, not speed")


def test_what_is_not_known_is_told_with_the_way_out() -> None:
    answer = asked(running(100, gpu=None, weights_bytes=None), {"tensor_parallel_size": 2})
    text = " ".join(" ".join(what_if_report(answer, explain=False)).split())
    assert "-tp 2 (TP 2 on 2 x GPU): cannot be told: " in text
    assert "set --gpu B200 (or another name of the catalogue)" in text
    assert not is_answered(answer)


def test_a_replica_that_is_larger_than_the_fleet_is_told() -> None:
    answer = what_if(glm(), (Change(flags={"tensor_parallel_size": 8}),), session_tokens=(262_144,), gpus=4)
    text = " ".join(" ".join(what_if_report(answer, explain=False)).split())
    assert "; but a replica needs 8 GPUs, and there are 4." in text
    assert not is_answered(answer)
    assert (answer.rows[0].replicas, answer.rows[0].sessions[0].in_all) == (0, 0.0)
