"""Writes the reference pages from the code: docs/metrics.md and docs/command-line.md.

`python docs/reference.py` writes them, `--check` tells whether the committed ones are current.
"""

import argparse
import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent


def metrics_page() -> str:
    """Every exported metric, from the catalogue."""
    from kvheadroom.outputs.metric_catalogue import CATALOGUE

    lines = [
        "# Metrics",
        "",
        "Made from `outputs/metric_catalogue.py` by `make golden`. Base units; ratios are 0-1. What is not known has",
        "no sample: never 0, -1 or NaN. `replica` is the server (its name in the config, else host:port), `engine`",
        "vLLM's data-parallel rank: each engine has a KV pool of its own.",
        "",
        "Series per engine: about 36, and 4 for each length in `session_tokens`. Per replica: about 8. Per GPU: 5.",
        "",
        "| metric | type | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{metric.full_name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |"
        for metric in CATALOGUE
    ]
    return "\n".join(lines) + "\n"


def command_page() -> str:
    """`--help` of every command."""
    from kvheadroom.cli import make_parser

    # argparse wraps to the terminal's width; the page must not depend on it.
    os.environ["COLUMNS"] = "110"
    parser = make_parser()
    pages = {"kvheadroom": parser.format_help()}
    for action in parser._actions:  # noqa: SLF001  argparse offers no other way to its commands
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            pages |= {f"kvheadroom {name}": command.format_help() for name, command in action.choices.items()}
    text = "# Command line\n\nMade from `--help` by `make golden`.\n"
    for name, help_text in pages.items():
        text += f"\n## {name}\n\n```text\n{help_text.rstrip()}\n```\n"
    return text


PAGES = {"metrics.md": metrics_page, "command-line.md": command_page}


def main() -> int:
    """Write or check the pages."""
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"docs/{', docs/'.join(stale)}: not what the code says; run `make golden`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
