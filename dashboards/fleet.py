"""The fleet: who is in trouble, how many more sessions fit, when is it full. And how the exporter itself is doing."""

from dashboards import exporter_health, frame, limits, promql, tiles
from dashboards.frame import ENGINE
from dashboards.grafana import (
    DASHED,
    DOTTED,
    Column,
    Json,
    Line,
    Section,
    arranged,
    dashboard,
    judged,
    look,
    now,
    query,
    runbook,
    stat,
    table,
    time_series,
    timeline,
    words,
)
from kvheadroom.outputs import metric_catalogue as catalogue

UID = "kvheadroom-fleet"


def fleet() -> Json:
    """The dashboard, as Grafana imports it."""
    return dashboard(
        uid=UID,
        title="kvheadroom / fleet",
        description="Who is in trouble, how many more sessions fit, and when is it full: all vLLM engines, the worst first.",
        variables=frame.variables(),
        annotations=frame.annotations(),
        panels=arranged(
            [
                Section(title=None, lines=[_tiles(), (10, [(24, _worst_first())])]),
                Section(title="How many sessions, and when is it full", lines=_capacity()),
                Section(title="Load", lines=_load()),
                Section(title="Exporter health", lines=exporter_health.lines(), collapsed=True),
            ]
        ),
    )


def _tiles() -> Line:
    state, waiting = catalogue.ENGINE_STATE, promql.metric("requests_waiting")
    return (
        4,
        [
            (
                4,
                stat(
                    "In trouble",
                    f"""Engines that preempt, will preempt, are stuck or whose pool is too small ({state.full_name}, \
{catalogue.FORECAST_PROBABILITY.full_name} with the limits of the alerts, {waiting.full_name} and \
{promql.metric("kv_usage_ratio").full_name}), and servers that do not answer \
({catalogue.REPLICA_STATE.full_name}); nobody only where somebody is watched ({catalogue.SAMPLE_AGE.full_name}).

The table below has them first, with what is wrong in words.""",
                    promql.engines_in_trouble(),
                    unit="short",
                    decimals=0,
                    mappings=words({0: "nobody"}),
                    thresholds=judged((1, "red")),
                    when_empty="no numbers",
                ),
            ),
            (4, tiles.still_fit()),
            (4, tiles.full_in()),
            (4, tiles.fullest()),
            (
                4,
                stat(
                    "Waiting",
                    f"""Requests in all queues ({waiting.full_name}).

The table below says for each engine what they wait for; more KV memory helps only where that is the pool.""",
                    f"sum({promql.lines(waiting)})",
                    unit="suffix: requests",
                    decimals=0,
                    mappings=words({0: "nobody"}),
                    thresholds=judged((1, "orange")),
                    when_empty="not reported",
                ),
            ),
            (4, tiles.preempted()),
        ],
    )


def _worst_first() -> Json:
    to_engine = {
        "title": "Engine dashboard of ${__data.fields.replica}",
        "url": "/d/kvheadroom-engine?${__url_time_range}&${datasource:queryparam}&${job:queryparam}"
        "&${session_tokens:queryparam}&var-replica=${__data.fields.replica}&var-engine=$__all&var-model_name=$__all",
    }
    columns = [
        Column(of="replica", title="replica", width=110, links=[to_engine]),
        Column(of="engine", title="engine", width=65),
        Column(
            of="A",
            title="trouble",
            width=150,
            mappings=words(promql.TROUBLE),
            thresholds=judged((1, "yellow"), (2, "orange"), (3, "red")),
            coloured=True,
        ),
        Column(
            of="B",
            title="risk, 10 min",
            unit="percentunit",
            decimals=0,
            width=95,
            thresholds=judged((limits.SOON_PROBABILITY, "orange"), below="text"),
            coloured=True,
        ),
        Column(of="C", title="full in", unit="s", decimals=0, width=75, mappings=words({0: "now"})),
        Column(
            of="D",
            title="KV in use",
            unit="percentunit",
            decimals=0,
            width=95,
            thresholds=judged((limits.FULL, "orange"), below="text"),
            coloured=True,
        ),
        Column(of="E", title="still fit", unit="short", decimals=0, width=75, mappings=words({0: "none"})),
        Column(of="G", title="waiting", unit="short", decimals=0, width=75),
        Column(
            of="H",
            title="waits for",
            width=110,
            mappings=words(promql.WAITS_FOR),
        ),
        Column(
            of="I",
            title="preempted",
            unit="short",
            decimals=0,
            width=90,
            thresholds=judged((limits.PREEMPTIONS, "red"), below="text"),
            coloured=True,
        ),
        Column(
            of="J",
            title="pool off",
            unit="percentunit",
            decimals=1,
            width=80,
            thresholds=judged((limits.PREDICTION_OFF, "blue"), below="text"),
            coloured=True,
        ),
        Column(of="F", title="in use", unit="short", decimals=1, width=70),
        Column(of="model_name", title="model", width=120),
    ]
    names = ", ".join(
        family.full_name
        for family in (
            catalogue.ENGINE_STATE,
            catalogue.REPLICA_STATE,
            catalogue.SAMPLE_AGE,
            catalogue.FORECAST_PROBABILITY,
            promql.metric("forecast_exhaustion_seconds"),
            promql.metric("kv_usage_ratio"),
            catalogue.SESSIONS_HEADROOM,
            catalogue.SESSIONS_IN_USE,
            promql.metric("requests_waiting"),
            catalogue.BINDING_LIMIT,
            promql.metric("preemptions_total"),
            promql.metric("observed_pool_tokens"),
            promql.metric("predicted_pool_tokens"),
        )
    )
    return table(
        "Engines, worst first",
        f"""One row for each engine, and for each server that does not answer. trouble: the worst of no answer, stuck, preempting, will preempt \
(the limits of the alerts), pool too small. still fit and in use: sessions of the chosen length. waits for: what keeps requests waiting. preempted: \
within five minutes. risk: of a preemption within ten. pool off: observed against predicted. An empty cell is not known. From {names}.

A click on a replica leads to its engines, with queue, pool and forecast over time. Alerts that fire are in the table below, each \
with its runbook.""",
        [
            now("A", promql.trouble()),
            now(
                "B",
                promql.lines(catalogue.FORECAST_PROBABILITY, f'horizon="{limits.SOON}"', drop=["horizon"]),
            ),
            now("C", promql.lines("forecast_exhaustion_seconds")),
            now("D", promql.lines("kv_usage_ratio")),
            now("E", promql.lines(catalogue.SESSIONS_HEADROOM, drop=["session_tokens"])),
            now("F", promql.lines(catalogue.SESSIONS_IN_USE, drop=["session_tokens"])),
            now("G", promql.lines("requests_waiting")),
            now("H", promql.numbered(catalogue.BINDING_LIMIT, "limit", promql.LIMITS)),
            now("I", promql.preemptions_in_five_minutes()),
            now("J", f"abs({promql.pool_against('predicted')})"),
        ],
        columns,
        when_empty="No engine answers",
        sort_by=[("trouble", "down"), ("KV in use", "down")],
    )


def _capacity() -> list[Line]:
    observed, in_use, headroom = (
        catalogue.OBSERVED_SESSIONS,
        catalogue.SESSIONS_IN_USE,
        catalogue.SESSIONS_HEADROOM,
    )
    half = promql.metric("forecast_exhaustion_seconds")
    return [
        (
            9,
            [
                (
                    12,
                    time_series(
                        "Sessions of $session_tokens tokens, by model",
                        f"""Solid: what all engines of a model hold at once ({observed.full_name}). Filled: what is in use now \
({in_use.full_name}). Dotted: whole sessions that still fit ({headroom.full_name}); less than the difference, since each engine's \
rest counts for nothing.

In use close to the solid line: add a replica before users queue. A line that drops: an engine is gone.""",
                        [
                            query(
                                "A", f"sum by (model_name) ({promql.lines(in_use)})", "in use: {{model_name}}"
                            ),
                            query(
                                "B", f"sum by (model_name) ({promql.lines(observed)})", "hold: {{model_name}}"
                            ),
                            query(
                                "C",
                                f"sum by (model_name) ({promql.lines(headroom)})",
                                "still fit: {{model_name}}",
                            ),
                        ],
                        unit="short",
                        when_empty="No numbers for this session length",
                        overrides=[
                            look("byFrameRefID", "A", {"fillOpacity": 20, "lineWidth": 1}),
                            look("byFrameRefID", "C", DOTTED),
                        ],
                    ),
                ),
                (
                    12,
                    time_series(
                        "Time until no room, soonest engines",
                        f"""Seconds until the next request would not fit, with a probability of a half ({half.full_name}); the {promql.MANY} engines \
that came closest to it. 0: it would not fit now. No line: not within 10 minutes, or no forecast.

Send new sessions to engines that have no line here.""",
                        [
                            query(
                                "A",
                                promql.ends(promql.lines("forecast_exhaustion_seconds"), lowest=True),
                                ENGINE,
                            )
                        ],
                        unit="s",
                        highest=limits.SOON_SECONDS,
                        when_empty="Not within 10 minutes, or no forecast",
                        links=[runbook("KvHeadroomExhaustionImminent")],
                    ),
                ),
            ],
        )
    ]


def _load() -> list[Line]:
    usage, waiting, by_reason = (
        promql.metric("kv_usage_ratio"),
        promql.metric("requests_waiting"),
        catalogue.WAITING_BY_REASON,
    )
    return [
        (
            9,
            [
                (
                    12,
                    time_series(
                        "KV cache in use, fullest engines",
                        f"""Share of the KV blocks that running requests hold ({usage.full_name}), of the {promql.MANY} engines that were fullest. \
Cached prefixes that nobody uses count as free. Across: from where on the alert on exhaustion may fire.

A line near the top: new requests wait, and running ones that grow get preempted. All but one low: sessions are not spread.""",
                        [query("A", promql.ends(promql.lines(usage)), ENGINE)],
                        unit="percentunit",
                        highest=1,
                        limits=[(limits.FULL, "orange")],
                        when_empty="KV usage not reported",
                    ),
                ),
                (
                    12,
                    time_series(
                        "Preemption within 10 min, likeliest engines",
                        f"""How likely a request is preempted ({catalogue.FORECAST_PROBABILITY.full_name}), of the {promql.MANY} engines where it \
was likeliest. Across: the limit of the alert.

Above it there are minutes to send new sessions elsewhere. docs/forecast.md says how often it was right.""",
                        [
                            query(
                                "A",
                                promql.ends(
                                    promql.lines(
                                        catalogue.FORECAST_PROBABILITY,
                                        f'horizon="{limits.SOON}"',
                                        drop=["horizon"],
                                    )
                                ),
                                ENGINE,
                            )
                        ],
                        unit="percentunit",
                        highest=1,
                        limits=[(limits.SOON_PROBABILITY, "orange")],
                        when_empty="No forecast",
                        links=[runbook("KvHeadroomExhaustionSoon")],
                    ),
                ),
            ],
        ),
        (
            9,
            [
                (
                    12,
                    time_series(
                        "Requests waiting, by model and reason",
                        f"""Requests in the queues by vLLM's reason ({by_reason.full_name}), without one for releases that give none \
({waiting.full_name}). Preempted requests wait here again.

capacity (solid): no KV blocks, or the batch is full; the table above says which. deferred (dashed): waits for something else, e.g. a KV \
transfer or a grammar; more KV does not help.""",
                        [
                            query(
                                "A",
                                f"sum by (model_name, reason) ({promql.lines(by_reason)})",
                                "{{reason}}: {{model_name}}",
                            ),
                            query(
                                "B",
                                f"sum by (model_name) ({promql.waiting_for_an_unknown_reason()})",
                                "no reason given: {{model_name}}",
                            ),
                        ],
                        unit="short",
                        decimals=0,
                        custom={"lineInterpolation": "stepAfter", "axisSoftMax": 5},
                        overrides=[look("byRegexp", "/^deferred:/", DASHED)],
                        when_empty="Queue not reported",
                    ),
                ),
                (
                    12,
                    time_series(
                        "Preemptions within 5 min, most of them",
                        f"""Running requests that lost all their blocks to another one and start over \
({promql.metric("preemptions_total").full_name}), of the {promql.MANY} engines with the most. Across: the limit of the alert.

vLLM counts a preemption only when its request runs again, so the queue shows it first. Regular ones: lower --max-num-seqs or give the \
pool more memory.""",
                        [query("A", promql.ends(promql.preemptions_in_five_minutes()), ENGINE)],
                        unit="short",
                        decimals=0,
                        # Without an end to the axis, Grafana draws "none at all" on a scale to 100.
                        custom={"lineInterpolation": "stepAfter", "axisSoftMax": 5},
                        limits=[(limits.PREEMPTIONS, "red")],
                        when_empty="Preemptions not reported",
                        links=[runbook("KvHeadroomPreempting")],
                    ),
                ),
            ],
        ),
        (9, [(12, _alerts()), (12, _servers_that_do_not_serve())]),
    ]


def _alerts() -> Json:
    to_runbook = {
        "title": "Runbook of ${__data.fields.alertname}",
        "url": "http://${__data.fields.instance}/runbooks/${__data.fields.alertname}",
        "targetBlank": True,
    }
    return table(
        "Alerts that fire",
        """What fires now of what is chosen (ALERTS, which Prometheus makes of dashboards/rules), and of the daemons themselves.

A click on an alert leads to its runbook, which the daemon serves: meaning, impact, diagnosis, mitigation.""",
        [now("A", promql.alerts_firing_of_all())],
        [
            Column(of="alertname", title="alert", width=215, links=[to_runbook]),
            Column(of="severity", title="severity", width=80),
            Column(of="replica", title="replica", width=90),
            Column(of="engine", title="engine", width=65),
            Column(of="gpu", title="GPU", width=90),
            Column(of="reason", title="reason", width=110),
            Column(of="source", title="source", width=110),
            Column(of="instance", title="daemon", width=110),
        ],
        when_empty="No alert fires, or the rules are not loaded",
        sort_by=[("severity", "up"), ("alert", "up")],
    )


def _servers_that_do_not_serve() -> Json:
    family = catalogue.REPLICA_STATE
    return timeline(
        "Servers while they did not serve",
        f"""One row for each server that did anything but serve within the time that is shown, and what it did instead ({family.full_name}).

down: it does not answer. wedged: it answers scrapes, but its counters stand still and /health fails; restart it. stats_disabled: it runs \
with --disable-log-stats. starting, scaling and sleeping pass by themselves.""",
        [
            query(
                "A",
                f"{promql.numbered(family, 'state', promql.REPLICA_STATES)} > 1",
                "{{replica}}",
            )
        ],
        texts=dict(enumerate(promql.REPLICA_STATES, 1)),
        colors=frame.COLORS_OF_SERVERS,
        when_empty="All servers served all the time",
        links=[runbook("KvHeadroomTargetDown")],
    )
