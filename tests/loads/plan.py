"""A scenario and a seed -> the conversations of its load. The same seed gives the same ones."""

import math
import random
from dataclasses import dataclass

from tests.loads.scenarios import Scenario, Span, Stream


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        new_tokens: of the prompt, behind the shared text or the history.
        pause_seconds: before it, from the end of the answer before.
        hangs_up_after_seconds: from sending; None: waits for all of the answer.
    """

    new_tokens: int
    max_tokens: int
    pause_seconds: float
    hangs_up_after_seconds: float | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one client.

    Attributes:
        text, text_tokens: the shared text that its first prompt begins with; "" and 0 without one.
        grows: later turns come after all that was said; else each comes after the first prompt alone.
    """

    name: str
    begins_at_seconds: float
    text: str
    text_tokens: int
    turns: tuple[Turn, ...]
    grows: bool = True


def plan(scenario: Scenario, seed: int) -> tuple[Conversation, ...]:
    """Every conversation of the load, in the order in which they begin."""
    planned = [
        conversation
        for stream in scenario.streams
        for conversation in _of_stream(stream, scenario.seconds, f"{seed}/{scenario.name}/{stream.name}")
    ]
    return tuple(sorted(planned, key=lambda conversation: conversation.begins_at_seconds))


def _of_stream(stream: Stream, seconds: float, seed: str) -> list[Conversation]:
    begins = _poisson(stream, seconds, random.Random(f"{seed}/begins"))
    begins += [second for second, count in stream.bursts for _ in range(count)]
    return [
        _conversation(stream, f"{stream.name}{number}", second, random.Random(f"{seed}/{number}"))
        for number, second in enumerate(sorted(begins))
    ]


def _poisson(stream: Stream, seconds: float, chance: random.Random) -> list[float]:
    """Thinned: drawn at the higher rate, and kept with the share of it that holds at that second."""
    until = seconds if stream.until_second is None else stream.until_second
    first, last = stream.per_second
    most = max(first, last)
    begins: list[float] = []
    at = stream.from_second
    while most > 0:
        at -= math.log(1.0 - chance.random()) / most
        if at >= until:
            break
        rate = first + (last - first) * (at - stream.from_second) / (until - stream.from_second)
        if chance.random() * most < rate:
            begins.append(at)
    return begins


def _conversation(stream: Stream, name: str, begins_at: float, chance: random.Random) -> Conversation:
    text = f"text{_whole(Span(0, stream.texts - 1), chance)}" if stream.texts else ""
    turns = tuple(_turn(stream, number, chance) for number in range(_whole(stream.turns, chance)))
    return Conversation(name, begins_at, text, stream.text_tokens, turns, stream.grows)


def _turn(stream: Stream, number: int, chance: random.Random) -> Turn:
    pause = 0.0
    if number:
        human = chance.random() < stream.human_share
        pause = _drawn(stream.human_pause_seconds if human else stream.tool_pause_seconds, chance)
    hangs_up = chance.random() < stream.hang_up_share
    return Turn(
        new_tokens=_whole(stream.next_tokens if number else stream.first_tokens, chance),
        max_tokens=_whole(stream.output_tokens, chance),
        pause_seconds=pause,
        hangs_up_after_seconds=_drawn(stream.hang_up_seconds, chance) if hangs_up else None,
    )


def _drawn(span: Span, chance: random.Random) -> float:
    if span.logarithmic:
        return math.exp(math.log(span.low) + chance.random() * math.log(span.high / span.low))
    return span.low + chance.random() * (span.high - span.low)


def _whole(span: Span, chance: random.Random) -> int:
    if span.logarithmic:
        return round(_drawn(span, chance))
    return min(int(span.high), int(_drawn(Span(span.low, span.high + 1), chance)))
