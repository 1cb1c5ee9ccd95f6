"""Requests that vLLM has finished, counted from its page: wanted by backtests alone, so not among what the daemon reads."""

import re
from collections import Counter
from collections.abc import Mapping

from kvheadroom.sources.page_scanner import number_of

FINISHED_REQUESTS = "request_success_total"
# One series for each finished_reason (vLLM 0.33.0 v1/metrics/loggers.py); requests that a client gave up are not counted.
_LINE = re.compile(rb"^vllm[:_]" + FINISHED_REQUESTS.encode() + rb"(\{[^\n]*\})?[ \t]+(\S+)", re.MULTILINE)
_ENGINE = re.compile(rb'[{,]\s*engine="([^"\\]*)"')


def finished_requests(body: bytes) -> Mapping[str, float]:
    """Engine -> requests finished since the server's start, for whatever reason; engines that do not tell are absent.

    Pages of Ray's agents tell nothing here: which server a line of theirs belongs to takes more than its engine.
    """
    counts: Counter[str] = Counter()
    for labels, text in _LINE.findall(body):
        value = number_of(text.decode(errors="replace"))
        engine = _ENGINE.search(labels)
        if value is not None:
            counts["0" if engine is None else engine[1].decode(errors="replace")] += value  # type: ignore[assignment]
    return counts
