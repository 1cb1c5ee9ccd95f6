"""The status pages: `/` with the verdict and a row for each engine, `/engines/<id>` with all of one engine."""

import base64
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvheadroom import __version__
from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.fleet import FleetAssessment, ReplicaAssessment, ReplicaState, is_stale
from kvheadroom.capacity.fleet_verdict import Ranked, Urgency, Verdict, fleet_verdict, worst_first
from kvheadroom.capacity.forecast import Forecast
from kvheadroom.capacity.gpu_ledger import gpu_ledgers, hbm_totals
from kvheadroom.capacity.known_facts import KnownFact, config_lines, known_facts
from kvheadroom.capacity.ledger import Bounds
from kvheadroom.capacity.memory_findings import MemoryFinding, memory_findings
from kvheadroom.capacity.remote_gpus import RemoteGpu
from kvheadroom.capacity.usage_course import UsageCourse, usage_course
from kvheadroom.capacity.waterfall import LedgerColumn, waterfall
from kvheadroom.outputs.config_snippet import config_snippet
from kvheadroom.outputs.fleet_words import verdict_sentence, verdict_words
from kvheadroom.outputs.numbers import (
    count,
    gigabytes,
    percent,
    seconds,
    signed,
    signed_percent,
    signed_size,
    size,
    span,
)

REFRESH_SECONDS = (5, 30, 300)
FIRST_REFRESH_SECONDS = 5
"""Until every server was asked once there is little to read, and nothing to be torn away from."""
LONGEST_FILTER = 200
MOST_ROWS = 1000


@dataclass(frozen=True, slots=True)
class View:
    """What a reader wants to see of the fleet.

    Attributes:
        sort: a name of SORTS.
        filter: words that a row must have, empty for all rows.
        refresh: seconds after which the page loads itself again; None: never.
    """

    sort: str = "worst"
    filter: str = ""
    refresh: int | None = None


WORST_FIRST = View()


@dataclass(frozen=True, slots=True)
class Page:
    """One answer: HTML and its HTTP status."""

    status: int
    html: str


def _usage(engine: Assessment) -> float | None:
    return engine.snapshot.kv_usage_ratio


def _headroom(engine: Assessment) -> float | None:
    return engine.sessions[-1].headroom if engine.sessions else None


def _waiting(engine: Assessment) -> float | None:
    return engine.snapshot.requests_waiting


def _difference(engine: Assessment) -> float | None:
    ratio = None if engine.difference is None else engine.difference.ratio
    return None if ratio is None else abs(ratio)


SORTS: Mapping[str, tuple[str, Callable[[Assessment], float | None] | None, bool]] = {
    "worst": ("worst first", None, False),
    "name": ("by name", None, False),
    "usage": ("fullest first", _usage, True),
    "headroom": ("least room first", _headroom, False),
    "waiting": ("longest queue first", _waiting, True),
    "difference": ("prediction furthest off first", _difference, True),
}
"""By the value of `sort`: words, what goes before what (None: not a figure of the engine), whether more goes first."""


def read_view(query: Mapping[str, str], *, of_engine: bool = False) -> View | str:
    """What a query asks for, or one sentence on what is wrong with it.

    Args:
        of_engine: of the page of one engine, which is neither sorted nor filtered.
    """
    known = ("refresh",) if of_engine else ("sort", "filter", "refresh")
    names = [name for name, _ in query.items()]
    for name in names:
        if name not in known:
            return f"There is no “{name[:40]}” to choose here; there is {_either(known)}."
        if names.count(name) > 1:
            return f"“{name}” is said twice."
    sort, text, refresh = query.get("sort", "worst"), query.get("filter", ""), query.get("refresh")
    if sort not in SORTS:
        return f"“{sort[:40]}” is no order of engines; sort is {_either(tuple(SORTS))}."
    if len(text) > LONGEST_FILTER:
        return f"A filter has {LONGEST_FILTER} characters at most."
    if refresh is not None and refresh not in map(str, REFRESH_SECONDS):
        return f"“{refresh[:40]}” is no time to refresh after; refresh is {_either(tuple(map(str, REFRESH_SECONDS)))}, in seconds."
    return View(sort, text, None if refresh is None else int(refresh))


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def render_fleet(fleet: FleetAssessment, now: float, notice: str | None, view: View = WORST_FIRST) -> str:
    """`/` as HTML.

    Args:
        fleet: with stale numbers already withheld.
        now: unix seconds.
    """
    ranked = worst_first(fleet, now)
    labels = {target.replica: target.labels for target in fleet.targets}
    return _FLEET.render(
        **_of_all(fleet, now, notice, view),
        ranked=ranked,
        silent=sum(one.engine is None for one in ranked),
        rows=_sorted(_filtered(ranked, labels, view.filter), view.sort),
        verdict=fleet_verdict(fleet, now),
        sorts=[(name, words) for name, (words, _, _) in SORTS.items()],
        longest_filter=LONGEST_FILTER,
        most_rows=MOST_ROWS,
    )


def render_engine(
    fleet: FleetAssessment, now: float, notice: str | None, engine_id: str, view: View = WORST_FIRST
) -> Page:
    """`/engines/<id>`: one engine; its server alone where the id names no engine, or one that is not told of now.

    Args:
        fleet: with stale numbers already withheld.
        now: unix seconds.
        engine_id: not percent-encoded.
    """
    found = _find(fleet, engine_id)
    if found is None:
        return render_words(
            404,
            "There is no such engine",
            f"No engine is called “{engine_id[:200]}” here. It may have left the list of servers, or have another name now.",
        )
    shown, engine, gone = found
    target = next((one for one in fleet.targets if one.replica == shown.replica), None)
    findings: defaultdict[tuple[str, str], list[MemoryFinding]] = defaultdict(list)
    for finding in memory_findings(fleet):
        # Those of a GPU have no engine and stand with the replica.
        findings[finding.replica, finding.engine].append(finding)
    html = _ENGINE.render(
        **_of_all(fleet, now, notice, view),
        replica=shown,
        engine=engine,
        gone=gone,
        of_replica=worst_first(replace(fleet, replicas=(shown,)), now),
        target=target,
        found=findings,
        hbm_totals=None if engine is None else hbm_totals(fleet, shown.replica, engine.facts),
        on_gpus={(one.replica, one.gpu): one for one in gpu_ledgers(fleet)},
        remote_of=_remote_of(fleet),
        remote_unassigned={one.replica: one.why for one in fleet.remote_gpus.runs.unassigned},
        known=() if engine is None else known_facts(engine),
        snippet=""
        if engine is None
        else config_snippet(shown, target.source if target else "config", config_lines(engine.facts)),
        is_stale=is_stale,
    )
    return Page(404 if gone and shown.engines else 200, html)


def render_words(status: int, title: str, sentence: str) -> Page:
    """A page that has a sentence and the way back."""
    return Page(
        status, _WORDS.render(title=title, sentence=sentence, style=STYLE, notice=None, refresh_seconds=None)
    )


def engine_id(replica: str, engine: str) -> str:
    """The id of an engine, not percent-encoded; no two engines have the same.

    The last colon stands before the engine's name, as in `gpu-1:8000:0`, so a colon in that name is written as %3A.
    """
    return f"{replica}:{engine.replace('%', '%25').replace(':', '%3A')}"


def engine_link(replica: str, engine: str) -> str:
    """The path of an engine's page."""
    return f"/engines/{quote(engine_id(replica, engine), safe=':')}"


def server_link(replica: str) -> str:
    """The path of the page of a server of which no engine is told: an id with no engine's name."""
    return engine_link(replica, "")


def _find(fleet: FleetAssessment, wanted: str) -> tuple[ReplicaAssessment, Assessment | None, str] | None:
    """(its server, the engine, the name of one that is not told of)."""
    for replica in fleet.replicas:
        for engine in replica.engines:
            if engine_id(replica.replica, engine.snapshot.engine) == wanted:
                return replica, engine, ""
    name, _, gone = wanted.rpartition(":")
    server = next((one for one in fleet.replicas if one.replica == name), None)
    return None if server is None else (server, None, gone)


def _remote_of(fleet: FleetAssessment) -> dict[str, list[RemoteGpu]]:
    served = fleet.served()
    remote_of: dict[str, list[RemoteGpu]] = {}
    for gpu in fleet.remote_gpus.gpus:
        for name in sorted(set(served.get(gpu.gpu, ()))):
            remote_of.setdefault(name, []).append(gpu)
    return remote_of


def _of_all(fleet: FleetAssessment, now: float, notice: str | None, view: View) -> dict[str, Any]:
    pending = not all(replica.attempted for replica in fleet.replicas)
    return {
        "fleet": fleet,
        "asleep": fleet.gpus_asleep(),
        "now": now,
        "notice": notice,
        "view": view,
        "refresh_seconds": view.refresh or (FIRST_REFRESH_SECONDS if pending else None),
        "version": __version__,
        "style": STYLE,
    }


def _filtered(
    ranked: tuple[Ranked, ...], labels: Mapping[str, tuple[tuple[str, str], ...]], text: str
) -> list[Ranked]:
    wanted = text.casefold().split()
    if not wanted:
        return list(ranked)
    return [one for one in ranked if all(word in _words_of(one, labels) for word in wanted)]


def _words_of(one: Ranked, labels: Mapping[str, tuple[tuple[str, str], ...]]) -> str:
    """What a filter looks at."""
    replica = one.replica
    words = [replica.replica, replica.url, verdict_words(one.verdict), replica.state or ""]
    words += [f"{name}={value}" for name, value in labels.get(replica.replica, ())]
    if one.engine is not None:
        words += [f"engine {one.engine.snapshot.engine}", one.engine.snapshot.model_name or ""]
        words += [found.state.replace("_", " ") for found in one.engine.states]
    return "\n".join(words).casefold()


def _sorted(rows: list[Ranked], sort: str) -> list[Ranked]:
    _, figure, more_first = SORTS[sort]
    if sort == "name":
        return sorted(
            rows,
            key=lambda one: (one.replica.replica, "" if one.engine is None else one.engine.snapshot.engine),
        )
    if figure is None:
        return rows
    known, unknown = [], []
    for one in rows:
        value = None if one.engine is None else figure(one.engine)
        if value is None:
            unknown.append(one)
        else:
            known.append((value, one))
    known.sort(key=lambda pair: pair[0], reverse=more_first)
    # Of both kinds the worst come first where nothing else tells them apart.
    return [*(one for _, one in known), *unknown]


def link(view: View, **changed: Any) -> str:
    """The query that shows the same but for what is changed."""
    wanted = replace(view, **changed)
    query: dict[str, Any] = {}
    if wanted.sort != "worst":
        query["sort"] = wanted.sort
    if wanted.filter:
        query["filter"] = wanted.filter
    if wanted.refresh is not None:
        query["refresh"] = wanted.refresh
    return f"?{urlencode(query)}" if query else "?"


def usage_word(ratio: float | None) -> str:
    """The usage in a word, so that the bar's colour is not the only sign. A reading aid, no alert."""
    if ratio is None:
        return "not known"
    return "nearly full" if ratio >= 0.9 else "filling" if ratio >= 0.7 else "room left"


def usage_class(ratio: float) -> str:
    """The colour of the bar."""
    return {"nearly full": "now", "filling": "soon"}.get(usage_word(ratio), "")


def bounds_words(bounds: Bounds | None) -> str:
    """How far off a predicted figure may be."""
    if bounds is None:
        return "not known"
    return "exact" if bounds.exact else f"{size(bounds.low_bytes)} to {size(bounds.high_bytes)}"


_STATE_WORDS = {
    ReplicaState.SERVING: "serving",
    ReplicaState.STARTING: "starting: its engine has no metrics yet",
    ReplicaState.SLEEPING: "sleeping",
    ReplicaState.SCALING: "scaling: it answers 503 to all but /health",
    ReplicaState.WEDGED: "wedged: /health fails and its counters stand still",
    ReplicaState.STATS_DISABLED: "running without metrics (--disable-log-stats)",
    ReplicaState.DOWN: "down",
}


def state_words(state: ReplicaState) -> str:
    """A state in words."""
    return _STATE_WORDS[state]


_LIMIT_WORDS = {
    None: "not known",
    Limit.KV_POOL: "the KV pool",
    Limit.MAX_NUM_SEQS: "max_num_seqs",
    Limit.TOKEN_BUDGET: "the tokens of a step (max_num_batched_tokens)",
    Limit.DEFERRED: "something else than room",
    Limit.NONE: "nothing",
}


def limit_words(limit: Limit | None) -> str:
    """A limit in words."""
    return _LIMIT_WORDS[limit]


_SIGNS = {Urgency.NOW: "■", Urgency.SOON: "▲", Urgency.UNKNOWN: "?", Urgency.FINE: "✓"}


def sign(urgency: Urgency) -> str:
    """A shape for how much haste there is, beside the words."""
    return _SIGNS[urgency]


_VERDICTS = {
    verdict: Markup('<span class="word {}"><span aria-hidden="true">{}</span> {}</span>').format(
        verdict.urgency, sign(verdict.urgency), verdict_words(verdict)
    )
    for verdict in Verdict
}


def sign_and_words(verdict: Verdict) -> Markup:
    """A verdict as shape, words and colour."""
    return _VERDICTS[verdict]


def doubts(replica: ReplicaAssessment) -> str:
    """What a server that answers does not tell, or tells wrongly, in a few words; its page has the sentences."""
    found = [f"{status.source} down" for status in replica.sources if status.failure is not None]
    found += sorted({problem.reason.replace("_", " ") for problem in replica.problems})
    return ", ".join(found)


def forecast_sentence(forecast: Forecast) -> str:
    """The probabilities and the numbers they are made of, or why there are none."""
    if forecast.unavailable:
        return f"No forecast: {forecast.why}."
    told = ", ".join(
        f"within {horizon}: {percent(ratio)}" for horizon, ratio in forecast.probabilities.items()
    )
    return f"Preemption {told}. {capital(forecast.why)}."


def sentence(text: str) -> str:
    """With a full stop, where it has no end of its own."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def capital(text: str) -> str:
    """With a capital letter at its beginning, and the rest as it is."""
    return text[:1].upper() + text[1:]


def points(course: UsageCourse) -> str:
    """Of a line in SVG: seconds before now to the left, the usage upwards."""
    return " ".join([f"{at:.0f},{ratio:.2f}" for at, ratio in course.points])


def share(ratio: float) -> str:
    """A ratio as a length in SVG."""
    return f"{ratio:.4%}"


def instant(at: float) -> str:
    """Unix seconds as a date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def fact_value(fact: KnownFact) -> str:
    """The value of a fact as a person reads it."""
    value = fact.value
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{count(value)} B" if fact.name.endswith("_bytes") else count(value)
    return str(value)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvheadroom.outputs", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "bounds_words": bounds_words,
        "capital": capital,
        "count": count,
        "course": usage_course,
        "doubts": doubts,
        "engine_link": engine_link,
        "fact_value": fact_value,
        "forecast_sentence": forecast_sentence,
        "gigabytes": gigabytes,
        "instant": instant,
        "limit_words": limit_words,
        "link": link,
        "percent": percent,
        "points": points,
        "seconds": seconds,
        "sentence": sentence,
        "server_link": server_link,
        "share": share,
        "sign": sign,
        "sign_and_words": sign_and_words,
        "signed": signed,
        "signed_percent": signed_percent,
        "signed_size": signed_size,
        "size": size,
        "span": span,
        "state_words": state_words,
        "steps": lambda ledger, column: waterfall(ledger, LedgerColumn(column)),
        "usage_class": usage_class,
        "usage_word": usage_word,
        "verdict_sentence": verdict_sentence,
        "whole": "{:.0f}".format,
    }
    environment.filters.update(filters)
    return environment


_ENVIRONMENT = _environment()
STYLE = Markup(_ENVIRONMENT.get_template("style.css").render())  # noqa: S704
STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
"""By it a browser takes this style sheet and no other."""
_FLEET = _ENVIRONMENT.get_template("fleet.html")
_ENGINE = _ENVIRONMENT.get_template("engine.html")
_WORDS = _ENVIRONMENT.get_template("words.html")
