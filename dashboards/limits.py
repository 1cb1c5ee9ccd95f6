"""The limits of the alerts, read from the rules: a threshold that a dashboard shows is the one that somebody is paged by."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ALERTS = Path(__file__).parent / "rules" / "alerts.yaml"


@cache
def _expressions() -> dict[str, str]:
    groups: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def limit(alert: str, of: str) -> float:
    """The number that an alert compares something with.

    Args:
        alert: its name.
        of: the end of what stands before the comparison, e.g. `kvheadroom_kv_usage_ratio`.

    Raises:
        LookupError: there is no such alert, or not exactly one such comparison in it.
    """
    expression = _expressions().get(alert)
    if expression is None:
        raise LookupError(f"no alert is called {alert!r}")
    found = re.findall(rf"{re.escape(of)}\s*[<>]=?\s*(\d+(?:\.\d+)?)", expression)
    if len(found) != 1:
        raise LookupError(f"{alert} compares {of!r} {len(found)} times, not once")
    return float(found[0])


IMMINENT, SOON = "30s", "10m"
"""Horizons of the forecast that alerts go by."""
IMMINENT_SECONDS = 30
SOON_SECONDS = 600

IMMINENT_PROBABILITY = limit("KvHeadroomExhaustionImminent", f'{{horizon="{IMMINENT}"}}')
SOON_PROBABILITY = limit("KvHeadroomExhaustionSoon", f'{{horizon="{SOON}"}}')
FULL = limit("KvHeadroomExhaustionImminent", "kvheadroom_kv_usage_ratio")
PREEMPTIONS = limit("KvHeadroomPreempting", "round(increase(kvheadroom_preemptions_total[5m]))")
RESTARTS = limit("KvHeadroomRestartLoop", "round(increase(kvheadroom_replica_restarts_total[1h]))")
PREDICTION_OFF = limit(
    "KvHeadroomPredictionOff", "abs(kvheadroom_observed_pool_tokens / kvheadroom_predicted_pool_tokens - 1)"
)
HELD_BY_OTHERS = limit(
    "KvHeadroomHbmHeldByOthers", "kvheadroom_gpu_memory_others_bytes / kvheadroom_gpu_memory_total_bytes"
)
