"""The verdict on a fleet in words: the first line of the page and of the terminal."""

from collections.abc import Iterator

from kvheadroom.capacity.fleet_verdict import FleetRoom, FleetVerdict, Verdict
from kvheadroom.outputs.numbers import count

_VERDICT_WORDS = {
    Verdict.DOWN: "down",
    Verdict.WEDGED: "wedged",
    Verdict.STALE: "no current numbers",
    Verdict.STALLED: "stalled",
    Verdict.PREEMPTING: "preempting",
    Verdict.PREEMPTION_IMMINENT: "preemption imminent",
    Verdict.PREEMPTION_LIKELY: "preemption likely",
    Verdict.WAITING_FOR_KV: "waiting for KV",
    Verdict.NO_ROOM: "no room",
    Verdict.PREFIXES_EVICTED: "prefixes evicted",
    Verdict.STATS_DISABLED: "without metrics",
    Verdict.STARTING: "starting",
    Verdict.SCALING: "scaling",
    Verdict.NOT_SCRAPED: "not scraped yet",
    Verdict.UNKNOWN: "not known",
    Verdict.SLEEPING: "sleeping",
    Verdict.FINE: "fine",
}

_PREDICATES = {
    Verdict.DOWN: ("is down", "are down"),
    Verdict.WEDGED: ("is wedged", "are wedged"),
    Verdict.STALE: ("gives no current numbers", "give no current numbers"),
    Verdict.STALLED: ("computes no answers", "compute no answers"),
    Verdict.PREEMPTING: ("is preempting now", "are preempting now"),
    Verdict.PREEMPTION_IMMINENT: (
        "is likely to preempt within 2 minutes",
        "are likely to preempt within 2 minutes",
    ),
    Verdict.PREEMPTION_LIKELY: (
        "is likely to preempt within 10 minutes",
        "are likely to preempt within 10 minutes",
    ),
    Verdict.WAITING_FOR_KV: ("has requests waiting for KV", "have requests waiting for KV"),
    Verdict.NO_ROOM: ("has no room for one more session", "have no room for one more session"),
    Verdict.PREFIXES_EVICTED: (
        "evicts prefixes before they are asked for again",
        "evict prefixes before they are asked for again",
    ),
    Verdict.STATS_DISABLED: ("runs without metrics", "run without metrics"),
    Verdict.STARTING: ("is starting", "are starting"),
    Verdict.SCALING: ("is scaling", "are scaling"),
    Verdict.NOT_SCRAPED: ("was not scraped yet", "were not scraped yet"),
    Verdict.UNKNOWN: ("cannot be judged yet", "cannot be judged yet"),
    Verdict.SLEEPING: ("sleeps", "sleep"),
}


def verdict_words(verdict: Verdict) -> str:
    """A verdict in a word or three."""
    return _VERDICT_WORDS[verdict]


def verdict_sentence(verdict: FleetVerdict) -> str:
    """`2 of 14 engines are likely to preempt within 2 minutes; 31 more sessions of 262,144 tokens fit`, without a full stop."""
    if not verdict.servers:
        return "no vLLM server is watched"
    parts = [
        *_of_many(verdict.server_verdicts, verdict.servers, "server"),
        *_of_many(verdict.engine_verdicts, verdict.engines, "engine"),
    ]
    fine = dict(verdict.engine_verdicts).get(Verdict.FINE, 0)
    if not parts:
        parts.append("the engine is fine" if fine == 1 else f"all {count(fine)} engines are fine")
    if verdict.room is not None:
        parts.append(room_words(verdict.room))
    elif verdict.engines:
        parts.append("how many more sessions fit is not known")
    return "; ".join(parts)


def room_words(room: FleetRoom) -> str:
    """`31 more sessions of 262,144 tokens fit`, and of how many engines that is the sum where it is not of all."""
    sessions = "session fits" if room.sessions == 1 else "sessions fit"
    name, verb = sessions.split()
    told = f"{count(room.sessions) if room.sessions else 'no'} more {name} of {count(room.session_tokens)} tokens {verb}"
    of_all = room.engines + room.shorter_engines + room.unknown_engines
    return told if room.engines == of_all else f"{told} on {count(room.engines)} of {count(of_all)} engines"


def _of_many(verdicts: tuple[tuple[Verdict, int], ...], of_all: int, what: str) -> Iterator[str]:
    for verdict, number in verdicts:
        if verdict is Verdict.FINE:
            continue
        one, many = _PREDICATES[verdict]
        who = f"the {what}" if of_all == 1 else f"{count(number)} of {count(of_all)} {what}s"
        yield f"{who} {one if number == 1 else many}"
