"""Tiles that more than one dashboard begins with: how much more fits, when it is full, how full it is, who was preempted."""

from dashboards import limits, promql
from dashboards.grafana import Json, judged, runbook, stat, words
from kvheadroom.outputs import metric_catalogue as catalogue


def still_fit() -> Json:
    """How many more sessions there is room for."""
    headroom = catalogue.SESSIONS_HEADROOM
    return stat(
        "Still fit",
        f"""Whole sessions of the chosen length that fit in what is free now, on all chosen engines together ({headroom.full_name}). Engines that have no \
number for this length count nothing.

none: the next session of this length waits, or takes the blocks of another one. Send new sessions to an engine that has some left, or add a \
replica.""",
        f"sum({promql.lines(headroom)})",
        unit="suffix: sessions",
        decimals=0,
        mappings=words({0: "none"}),
        thresholds=judged((1, "green"), below="red"),
        when_empty="no numbers for this length",
    )


def full_in() -> Json:
    """When the first engine has no room for the next request."""
    half, likely = promql.metric("forecast_exhaustion_seconds"), catalogue.FORECAST_PROBABILITY
    return stat(
        "Full in",
        f"""When the next request finds no room on the first of the chosen engines, with a probability of a half ({half.full_name}). Nothing within \
ten minutes is said where there is a forecast ({likely.full_name}).

Seconds: act now; the runbook says how. Minutes: send new sessions elsewhere.""",
        promql.soonest_without_room(),
        unit="s",
        decimals=0,
        mappings=words({promql.NEVER: "not in 10 min", 0: "now"}),
        thresholds=judged((limits.IMMINENT_SECONDS, "orange"), (promql.NEVER, "green"), below="red"),
        when_empty="no forecast",
        links=[runbook("KvHeadroomExhaustionImminent")],
    )


def fullest() -> Json:
    """How full the fullest pool is."""
    usage = promql.metric("kv_usage_ratio")
    return stat(
        "KV in use",
        f"""Share of the KV blocks that running requests hold, on the fullest of the chosen engines ({usage.full_name}). The limit is the alert's.

One full pool preempts however empty the others are: look whether sessions are spread. A pool can fill within seconds, so a low number is no proof of \
room.""",
        f"max({promql.lines(usage)})",
        unit="percentunit",
        decimals=0,
        thresholds=judged((limits.FULL, "orange")),
        when_empty="not reported",
    )


def preempted() -> Json:
    """How many requests were preempted lately."""
    preemptions = promql.metric("preemptions_total")
    return stat(
        "Preempted",
        f"""Requests that the chosen engine with the most of them preempted within five minutes ({preemptions.full_name}). The limit is the alert's.

Each is work done twice and a stall that a user sees.""",
        f"max({promql.preemptions_in_five_minutes()})",
        unit="suffix: in 5 min",
        decimals=0,
        mappings=words({0: "none"}),
        thresholds=judged((1, "yellow"), (limits.PREEMPTIONS, "red")),
        when_empty="not reported",
        links=[runbook("KvHeadroomPreempting")],
    )
