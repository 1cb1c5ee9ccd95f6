"""Successive pages of one server -> the lines of a recording: now and then a whole page, between them what changed."""

import json
from typing import Any

from kvheadroom.lab.recording_lines import series_of

WHOLE_EVERY = 60
"""Scrapes from one whole page to the next, at most."""


class PageChanges:
    """Remembers the last whole page that it gave out."""

    def __init__(self) -> None:
        self._layout: list[str] = []
        self._values: dict[str, str] = {}
        self._since_whole = 0

    def told(self, page: str) -> dict[str, Any]:
        """`{"text": page}`, or `{"d": changes}` where they give exactly that page back."""
        layout, values = _taken_apart(page)
        self._since_whole += 1
        # What came, went or moved, or stands there twice, cannot be told as changed values.
        if values is None or layout != self._layout or self._since_whole >= WHOLE_EVERY:
            self._layout, self._values, self._since_whole = layout, values or {}, 0
            if values is None:
                self._layout = []
            return {"text": page}
        return {"d": {series: value for series, value in values.items() if self._values[series] != value}}


def _taken_apart(page: str) -> tuple[list[str], dict[str, str] | None]:
    """(each line without its value, the value of each series); None for the values if a series stands there twice."""
    layout, values = [], {}
    twice = False
    for line in page.split("\n"):
        series = series_of(line)
        if series is None:
            layout.append(line)
            continue
        twice |= series in values
        layout.append(series)
        values[series] = line[len(series) + 1 :]
    return layout, None if twice else values


def encode(entry: dict[str, Any]) -> str:
    """One line of a recording, without its newline."""
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
