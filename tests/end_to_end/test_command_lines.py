"""Command lines made at random, read by kvheadroom as by the parser of the vLLM that is installed here."""

import json
import os
import random
import subprocess
from pathlib import Path

from tests.sources.command_line_cases import make
from tests.sources.command_line_truth import differences

LINES = 400


def test_command_lines_are_read_as_vllms_own_parser_reads_them(
    vllm_python: Path, seeded: random.Random
) -> None:
    cases = [make(seeded) for _ in range(LINES)]
    answered = subprocess.run(
        [vllm_python, Path(__file__).with_name("vllm_parser.py")],
        input="".join(json.dumps(case) + "\n" for case in cases),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    # Imports may print lines of their own; the answers are the last.
    lines = answered.stdout.splitlines()[-LINES:]
    assert len(lines) == LINES, answered.stderr[-2000:]
    for case, line in zip(cases, lines, strict=True):
        case["answer"] = json.loads(line)
    taken = [case for case in cases if "values" in case["answer"]]  # type: ignore[operator]
    assert len(taken) > LINES / 2
    wrong = {json.dumps(case["words"]): found for case in taken if (found := differences(case))}
    assert wrong == {}
