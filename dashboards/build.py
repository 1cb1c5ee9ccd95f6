"""Writes the dashboard that is committed and shipped: `python -m dashboards.build`, from the repository's root."""

import argparse
import json
import sys
from pathlib import Path

from dashboards.overview import UID, overview

FOLDER = Path(__file__).parent / "json"


def files() -> dict[Path, str]:
    """Each file with what belongs in it."""
    return {FOLDER / f"{UID}.json": json.dumps(overview(), indent=2, ensure_ascii=False) + "\n"}


def outdated() -> list[Path]:
    """The files that do not hold what the code says."""
    return [
        path
        for path, text in files().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main(argv: list[str] | None = None) -> int:
    """Write the files, or with --check only compare; the value is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    arguments = parser.parse_args(argv)
    stale = outdated()
    if arguments.check:
        for path in stale:
            print(f"{path} is out of date; run: python -m dashboards.build", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(files()[path], encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
