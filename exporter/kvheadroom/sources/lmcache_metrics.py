"""LMCache's own series on a vLLM page: there only where PROMETHEUS_MULTIPROC_DIR is set for the server.

LMCache makes them in each worker, and numbers the workers instead of the engines (lmcache 0.3.3 to 0.5.7 `lmcache/observability.py`
PrometheusLogger). `num_hit_tokens` and `num_requested_tokens` are of what a look-up has found already, so their ratio is 1 whatever is found
(LMCache issue 1260); the look-ups are counted from 0.3.9 on. LMCache's server of its own (`lmcache_mp_*`) has a page of its own.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from kvheadroom.capacity.readings import EngineSnapshot, PageProblem, ProblemReason
from kvheadroom.sources.page_scanner import BadLineError, number_of, read_labels

_FIELDS = {
    b"num_lookup_tokens_total": "lmcache_lookup_tokens_total",
    b"num_lookup_hits_total": "lmcache_lookup_hits_total",
    b"local_cache_usage": "lmcache_host_bytes",
    b"local_storage_usage": "lmcache_disk_bytes",
}
_BEGINNING = b"\nlmcache"
_LINES = re.compile(rb"\nlmcache[:_](%b)([ {][^\n]*)" % b"|".join(_FIELDS))
_MOST_LINES = 4 * 1024
_MOST = 2.0**63


def with_lmcache(engine: EngineSnapshot, body: bytes, problems: list[PageProblem]) -> EngineSnapshot:
    """The only engine of a page with what LMCache tells there, added up over its workers.

    Args:
        problems: takes what cannot be read, or cannot be true; a figure of which any worker's is wrong is left out.
    """
    # From the end on, where it is searched for faster.
    if body.rfind(_BEGINNING) < 0:
        return engine
    figures = _figures(_LINES.findall(body)[:_MOST_LINES], problems)
    return replace(
        engine,
        lmcache_lookup_tokens_total=figures.get("lmcache_lookup_tokens_total"),
        lmcache_lookup_hits_total=figures.get("lmcache_lookup_hits_total"),
        lmcache_host_bytes=figures.get("lmcache_host_bytes"),
        lmcache_disk_bytes=figures.get("lmcache_disk_bytes"),
    )


def _figures(lines: Sequence[tuple[bytes, bytes]], problems: list[PageProblem]) -> dict[str, float]:
    figures: dict[str, float] = {}
    wrong: set[str] = set()
    for name, rest in lines:
        field = _FIELDS[name]
        value = _value(rest)
        if value is None or not 0.0 <= value <= _MOST:
            wrong.add(field)
            shown = rest[:60].decode(errors="replace").strip()
            detail = f"lmcache:{name.decode()} left out, one of its values cannot be true: {shown}"
            problems.append(PageProblem(ProblemReason.BAD_VALUE, detail))
        else:
            figures[field] = figures.get(field, 0.0) + value
    return {field: value for field, value in figures.items() if field not in wrong}


def _value(rest: bytes) -> float | None:
    try:
        _, end = read_labels(rest.decode("utf-8").rstrip("\r"))
    except (UnicodeDecodeError, BadLineError):
        return None
    words = end.split()
    return number_of(words[0]) if words else None
