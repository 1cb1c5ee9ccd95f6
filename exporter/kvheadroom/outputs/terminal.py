"""The board in a terminal: lines of text for a width, the same in colour and without.

What comes from outside (names, models, messages) is shown by its printable letters alone and never read as markup.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.board_view import BoardRow, BoardView, StaysWarm, count_verdicts, notes
from kvheadroom.capacity.fleet_verdict import Urgency, Verdict
from kvheadroom.outputs.fleet_words import verdict_words
from kvheadroom.outputs.numbers import count, percent, span
from kvheadroom.outputs.status_page import limit_words, usage_word

TABLE_WIDTH = 190
"""From here on an engine has one line, else a few."""
MOST_NOTES = 8
_MOST_LETTERS = 300
_BAR = 14
_TABLE_BAR = 8
_INDENT = "  "
_STYLES = {
    Urgency.NOW: Style(color="red", bold=True),
    Urgency.SOON: Style(color="yellow", bold=True),
    Urgency.UNKNOWN: Style(color="magenta", bold=True),
    Urgency.FINE: Style(color="green"),
}
_SOFT = Style(dim=True)
_SHORT_LIMITS = {
    None: "not known",
    Limit.KV_POOL: "KV pool",
    Limit.MAX_NUM_SEQS: "max_num_seqs",
    Limit.TOKEN_BUDGET: "step tokens",
    Limit.DEFERRED: "other things",
    Limit.NONE: "nothing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Where the board goes.

    Attributes:
        height: lines; None where there is no end of them.
        most: engines at most; None for as many as there is room for.
        blocks: the bars may be of block elements, else of ASCII.
    """

    width: int
    height: int | None = None
    most: int | None = None
    blocks: bool = True


def board_lines(view: BoardView, origin: str, space: Space, *, age_seconds: float = 0.0) -> list[Text]:
    """The board, top to bottom; no line is wider than the space, and no more are than it has.

    Args:
        origin: where the numbers come from, a few words.
        age_seconds: passed since `view.at`.
    """
    width = max(20, space.width)
    head = _head(view, origin, width)
    tail = _notes(view, width)
    at = view.at + age_seconds
    titles = [_titles(width)] if width >= TABLE_WIDTH and view.rows else []
    room = None
    if space.height is not None:
        head = head[: max(1, space.height // 2)]
        # A quarter of it is left to what is assumed or not known.
        room = space.height - len(head) - len(titles) - min(len(tail), space.height // 4)
    shown: list[list[Text]] = []
    used = 0
    for row in view.rows if space.most is None else view.rows[: space.most]:
        lines = _row(row, at, width, blocks=space.blocks)
        if room is not None and used + len(lines) + 1 > room and shown:
            break
        shown.append(lines)
        used += len(lines)
    more = _not_shown(view.rows[len(shown) :], width)
    body = [*head, *titles, *(line for lines in shown for line in lines), *more]
    if space.height is None:
        return [*body, *tail]
    return [*body, *tail[: max(0, space.height - len(body))]][: space.height]


def printable(text: str) -> str:
    """Text of the outside as one line that a terminal takes for nothing but text; cut where it has no end."""
    cut = text if len(text) <= _MOST_LETTERS else text[:_MOST_LETTERS] + "..."
    return "".join(
        " " if letter in "\t\n\r" else "\N{REPLACEMENT CHARACTER}" if _is_control(letter) else letter
        for letter in cut
    )


def _is_control(letter: str) -> bool:
    """Escape sequences begin with one of these, and others reorder or hide what stands beside them."""
    return unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _head(view: BoardView, origin: str, width: int) -> list[Text]:
    sentence = printable(view.sentence)
    lines = _wrapped([sentence[:1].upper() + sentence[1:] + "."], width, "", _STYLES[view.urgency])
    if view.notice is not None:
        lines += _wrapped([printable(view.notice)], width, "", Style(bold=True))
    for fault in view.faults:
        lines += _wrapped([printable(fault)], width, "", _STYLES[Urgency.NOW])
    for hint in view.hints:
        lines += _wrapped([printable(hint)], width, "", _SOFT)
    return [*lines, *_wrapped([printable(origin)], width, "", _SOFT), Text()]


def _row(row: BoardRow, at: float, width: int, *, blocks: bool) -> list[Text]:
    word = verdict_words(row.verdict)
    if row.verdict.urgency is Urgency.NOW:
        word = word.upper()
    if width >= TABLE_WIDTH:
        lines = [_columns(row, word, at, width, blocks=blocks)]
    else:
        old = f"{_age(row, at)} old" if row.taken_at is not None else "never seen"
        left = _cut(f"{word}  {_name(row)}", width - len(old) - 1)
        lines = [Text(left + " " * (width - cell_len(left) - len(old)) + old)]
        if row.engine is not None:
            usage = f"{_bar(row, _BAR, blocks=blocks)} {_usage(row)}"
            lines += _wrapped([usage, *_sessions(row)], width, _INDENT, Style())
            lines += _wrapped(list(_ahead(row)), width, _INDENT, Style())
    lines[0].stylize(_STYLES[row.verdict.urgency], 0, len(word))
    # Why there is no forecast stands with the notes, once for all.
    if row.verdict.urgency is not Urgency.FINE and not (row.verdict is Verdict.UNKNOWN and row.no_forecast):
        lines += _wrapped([printable(row.why)], width, _INDENT, Style())
    return lines


def _name(row: BoardRow) -> str:
    name = printable(row.replica)
    if row.engine is not None:
        name += f" engine {printable(row.engine)}"
    if row.model_name is not None:
        name += f"  {printable(row.model_name)}"
    # Of a server without numbers the verdict is the state.
    return (
        name
        if row.engine is None or row.state in (None, "serving")
        else f"{name} ({printable(row.state or '')})"
    )


def _age(row: BoardRow, at: float) -> str:
    if row.taken_at is None:
        return "never"
    age = max(0.0, at - row.taken_at)
    return f"{age:.0f} s" if age < 120 else span(age)


def _bar(row: BoardRow, cells: int, *, blocks: bool) -> str:
    full, empty = ("█", "░") if blocks else ("#", ".")
    filled = round(min(1.0, max(0.0, row.usage_ratio or 0.0)) * cells)
    return full * filled + empty * (cells - filled)


def _usage(row: BoardRow) -> str:
    return f"{percent(row.usage_ratio)} {usage_word(row.usage_ratio)}"


def _sessions(row: BoardRow) -> Iterator[str]:
    if row.session_tokens is None:
        yield "sessions not known"
        return
    yield f"{count(row.sessions_in_use)} of {count(row.sessions_observed)} sessions of {count(row.session_tokens)} tokens in use"
    yield f"{count(row.sessions_headroom)} more fit"
    yield f"predicted {count(row.sessions_predicted)}"


def _ahead(row: BoardRow) -> Iterator[str]:
    if row.no_forecast is None:
        told = ", ".join(
            f"{printable(horizon)} {percent(ratio)}" for horizon, ratio in row.probabilities.items()
        )
        yield f"preemption within {told}"
        if row.exhaustion_seconds is not None:
            yield f"next request {_no_room(row.exhaustion_seconds)}"
    else:
        yield "no forecast"
    yield _requests(row)
    yield f"{count(row.preemptions_total)} {'preemption' if row.preemptions_total == 1 else 'preemptions'} so far"
    if row.stays_warm:
        yield f"idle sessions stay: {_warm(row.stays_warm)}"
    else:
        yield "how long idle sessions stay is not known"


def _no_room(exhaustion_seconds: float) -> str:
    if exhaustion_seconds == 0:
        return "finds no room now"
    return f"finds no room in {span(exhaustion_seconds)} (50%)"


def _requests(row: BoardRow) -> str:
    told = f"{count(row.running)} running, {count(row.waiting)} waiting"
    if not row.waiting:
        return told
    return f"{told}, for what is not known" if row.limit is None else f"{told} for {limit_words(row.limit)}"


def _warm(stays: Sequence[StaysWarm]) -> str:
    return ", ".join(f"{_stay(one)} in {'HBM' if one.tier == 'hbm' else 'host memory'}" for one in stays)


def _stay(one: StaysWarm) -> str:
    if one.high_seconds is None:
        return "none evicted yet"
    if one.low_seconds is None:
        return f"up to {span(one.high_seconds)}"
    low, high = span(one.low_seconds), span(one.high_seconds)
    return high if low == high else f"{low} to {high}"


# -- one line for an engine

_COLUMNS = (
    ("verdict", 19, False),
    ("engine", 0, False),
    ("KV pool in use", 28, False),
    ("tokens", 9, True),
    ("sessions in use", 15, True),
    ("predicted", 9, True),
    ("fit", 6, True),
    ("30s/2m/10m", 11, True),
    ("run", 5, True),
    ("wait for", 15, True),
    ("preempted", 9, True),
    ("idle stay", 16, True),
    ("age", 8, True),
)
"""Title, cells (0: what is left), to the right."""


def _titles(width: int) -> Text:
    return Text(_line([title for title, _, _ in _COLUMNS], width), style=_SOFT)


def _columns(row: BoardRow, word: str, at: float, width: int, *, blocks: bool) -> Text:
    old = _age(row, at)
    if row.engine is None:
        return Text(_line([word, _name(row), *[""] * (len(_COLUMNS) - 3), old], width))
    ahead = "no forecast"
    if row.no_forecast is None:
        ahead = "/".join(f"{ratio * 100:.0f}" for ratio in row.probabilities.values()) + " %"
    cells = [
        word,
        _name(row),
        f"{_bar(row, _TABLE_BAR, blocks=blocks)} {_usage(row)}",
        count(row.session_tokens),
        f"{count(row.sessions_in_use)} of {count(row.sessions_observed)}",
        count(row.sessions_predicted),
        count(row.sessions_headroom),
        ahead,
        count(row.running),
        f"{count(row.waiting)} {_SHORT_LIMITS[row.limit]}" if row.waiting else count(row.waiting),
        count(row.preemptions_total),
        _stay(row.stays_warm[0]) if row.stays_warm else "not known",
        old,
    ]
    return Text(_line(cells, width))


def _line(cells: Iterable[str], width: int) -> str:
    fixed = sum(cells for _, cells, _ in _COLUMNS) + 2 * (len(_COLUMNS) - 1)
    told = []
    for text, (_, own, right) in zip(cells, _COLUMNS, strict=True):
        size = own or width - fixed
        cut = _cut(text, size)
        told.append(" " * (size - cell_len(cut)) + cut if right else set_cell_size(cut, size))
    return "  ".join(told).rstrip()


# -- lines


def _not_shown(rows: Sequence[BoardRow], width: int) -> list[Text]:
    if not rows:
        return []
    of_them = ", ".join(
        f"{count(number)} {verdict_words(verdict)}" for verdict, number in count_verdicts(rows)
    )
    lines = _wrapped([f"... and {count(len(rows))} more that are not shown: {of_them}"], width, "", _SOFT)
    return lines[:1]


def _notes(view: BoardView, width: int) -> list[Text]:
    found = notes(view)
    lines = [Text()] if found else []
    for note in found[:MOST_NOTES]:
        on = "1 engine" if note.engines == 1 else f"{count(note.engines)} engines"
        lines += _wrapped([f"{on}, {printable(note.text)}"], width, "", _SOFT)
    if len(found) > MOST_NOTES:
        lines += _wrapped([f"... and {count(len(found) - MOST_NOTES)} more such notes"], width, "", _SOFT)
    return lines


def _wrapped(parts: Sequence[str], width: int, indent: str, style: Style) -> list[Text]:
    """The parts with semicolons between; a line ends between two of them, or between words of one that is longer."""
    room = width - len(indent)
    lines = [""]
    for place, part in enumerate(parts):
        piece = part if place == len(parts) - 1 else f"{part};"
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(piece) > room:
            lines.append("")
        for word in piece.split(" "):
            if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) > room:
                lines.append("")
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
            while cell_len(lines[-1]) > room:
                head = set_cell_size(lines[-1], room)
                lines[-1:] = [head, lines[-1][len(head) :]]
    return [Text(indent + line, style=style) for line in lines]


def _cut(text: str, cells: int) -> str:
    """The text in so many cells at most; that something is missing shows."""
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, max(0, cells - 2)).rstrip() + ".."
