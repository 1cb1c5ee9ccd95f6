"""Writes the dashboards that are committed and shipped: `python -m dashboards.build`, from the repository's root."""

import argparse
import json
import sys
from pathlib import Path

from dashboards.engine import engine
from dashboards.fleet import fleet
from dashboards.grafana import Json
from dashboards.prediction import prediction
from dashboards.warm import warm

FOLDER = Path(__file__).parent / "json"


def dashboards() -> list[Json]:
    """All of them, in the order in which people ask."""
    return [fleet(), engine(), prediction(), warm()]


def files() -> dict[Path, str]:
    """Each file with what belongs in it."""
    return {
        FOLDER / f"{document['uid']}.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        for document in dashboards()
    }


def outdated() -> list[Path]:
    """The files that do not hold what the code says, and those that no code makes."""
    made = files()
    changed = [
        path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    return changed + [path for path in sorted(FOLDER.glob("*.json")) if path not in made]


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
    made = files()
    for path in stale:
        if path in made:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path], encoding="utf-8")
            print(f"wrote {path}")
        else:
            path.unlink()
            print(f"removed {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
