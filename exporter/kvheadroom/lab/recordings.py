"""Recorded `/metrics` pages of a real vLLM, one JSON object a line, gzip-compressed.

A line holds `t` (unix seconds) and either `text`, a whole page, or `d`, the series that changed against
the last whole page: {series as it stands on the page: value}. An optional first line `{"origin": {...}}`
says where the recording comes from.
"""

import gzip
import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class RecordingError(Exception):
    """The file is no recording; the message says what is wrong with it."""


@dataclass(frozen=True)
class Recording:
    """A recording in memory.

    Attributes:
        origin: where it comes from, as its first line says; empty if it does not say.
        offsets: seconds since the first page, rising.
        full_page_index: for each instant the index of the whole page that it builds on.
    """

    origin: dict[str, Any]
    offsets: tuple[float, ...]
    pages: tuple[str, ...]
    full_page_index: tuple[int, ...]
    changes: tuple[dict[str, str], ...]

    @property
    def duration_seconds(self) -> float:
        """From the first page to the last."""
        return self.offsets[-1]

    def page_at(self, offset_seconds: float) -> str:
        """The page as it stood `offset_seconds` after the first one."""
        index = max(0, bisect_right(self.offsets, offset_seconds) - 1)
        page, changed = self.pages[self.full_page_index[index]], self.changes[index]
        if not changed:
            return page
        left = dict(changed)
        lines = []
        for line in page.split("\n"):
            series = line.rpartition(" ")[0]
            value = None if line.startswith("#") else left.pop(series, None)
            lines.append(line if value is None else f"{series} {value}")
        new = [f"{series} {value}" for series, value in left.items()]
        # New series go before the final newline, so that the page stays well formed.
        return "\n".join(lines[:-1] + new + lines[-1:])


def read_recording(path: Path) -> Recording:
    """Read a whole recording.

    Raises:
        RecordingError: naming the file and the line.
    """
    origin: dict[str, Any] = {}
    offsets: list[float] = []
    pages: list[str] = []
    full: list[int] = []
    changes: list[dict[str, str]] = []
    first: float | None = None
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                entry = json.loads(line)
                if "origin" in entry:
                    origin = entry["origin"]
                elif "text" in entry or "d" in entry:
                    first = entry["t"] if first is None else first
                    if "text" in entry:
                        pages.append(entry["text"])
                    offsets.append(entry["t"] - first)
                    full.append(len(pages) - 1)
                    changes.append(entry.get("d", {}))
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise RecordingError(f"{path}: line {number} is no entry of a recording ({error!r})") from error
    if not pages or full[0] < 0 or offsets != sorted(offsets):
        raise RecordingError(f"{path}: holds no page, or its times do not rise")
    return Recording(origin, tuple(offsets), tuple(pages), tuple(full), tuple(changes))
