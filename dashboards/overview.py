"""The overview: how many sessions fit, how many more, who waits, and was the prediction right."""

from dashboards import promql
from dashboards.grafana import (
    DASHED,
    DOTTED,
    GRID_COLUMNS,
    Json,
    annotation,
    dashboard,
    datasource_variable,
    label_variable,
    look,
    query,
    time_series,
    timeline,
)
from kvheadroom.outputs import metric_catalogue as catalogue

UID = "kvheadroom-overview"

# What tells lines apart comes first: a narrow panel cuts the end of a legend.
ENGINE = "engine {{engine}} of {{replica}}"
PANEL_HEIGHT = 10


def overview() -> Json:
    """The dashboard, as Grafana imports it."""
    return dashboard(
        uid=UID,
        title="kvheadroom / overview",
        description="How many sessions fit in the KV cache of each vLLM engine, how many more fit now, and how far "
        "the running engine is from the prediction; how likely preemptions are, and what keeps requests waiting.",
        tags=["kvheadroom", "vllm"],
        variables=_variables(),
        annotations=[
            annotation(
                "Firing alerts",
                promql.alerts_firing(),
                title="{{alertname}}",
                text=ENGINE,
                color="orange",
            ),
            annotation(
                "Firing alerts of servers",
                promql.alerts_firing_of_servers(),
                title="{{alertname}}",
                text="{{replica}}",
                color="orange",
            ),
            annotation(
                "Firing alerts of kvheadroom",
                promql.alerts_firing_of_daemons(),
                title="{{alertname}}",
                text="{{instance}}",
                color="orange",
            ),
        ],
        panels=[
            _sessions(1),
            _kv_usage(2),
            _headroom(3),
            _waiting(4),
            _preemptions(5),
            _difference(6),
            _probability(7),
            _until_no_room(8),
            _states(9),
        ],
    )


def _variables() -> list[Json]:
    return [
        datasource_variable(),
        label_variable("job", "Job", promql.jobs_with_a_daemon(), of_label="job", several=True),
        label_variable("replica", "Replica", promql.replicas_watched(), of_label="replica", several=True),
        label_variable(
            "model_name",
            "Model",
            promql.engines_of_replicas(),
            of_label="model_name",
            several=True,
            # Unlike the other labels it is empty where the server has not told the name yet.
            all_value=".*",
        ),
        label_variable("engine", "Engine", promql.engines_of_models(), of_label="engine", several=True),
        label_variable(
            "session_tokens",
            "Tokens per session",
            promql.session_lengths_counted(),
            of_label="session_tokens",
            several=False,
            sort=3,
        ),
    ]


def _sessions(panel_id: int) -> Json:
    predicted, observed, in_use = (
        catalogue.PREDICTED_SESSIONS,
        catalogue.OBSERVED_SESSIONS,
        catalogue.SESSIONS_IN_USE,
    )
    return time_series(
        panel_id,
        title="Sessions of $session_tokens tokens: predicted, observed, in use",
        description=f"""Dashed: sessions that fit by the prediction ({predicted.full_name}). \
Solid: sessions that fit in the pool the engine really has ({observed.full_name}). \
Filled: what is in use now, counted in such sessions ({in_use.full_name}).

In use close to observed: add a replica or shorten the context before users queue. \
Dashed and solid apart: see the panel of the pool, observed against predicted.""",
        # What comes last is drawn on top: a dashed line over a solid one shows both.
        queries=[
            query("A", promql.sessions_in_use(), f"in use: {ENGINE}"),
            query("B", promql.sessions_observed(), f"observed: {ENGINE}"),
            query("C", promql.sessions_predicted(), f"predicted: {ENGINE}"),
        ],
        overrides=[
            look("byFrameRefID", "A", {"fillOpacity": 20, "lineWidth": 1}),
            look("byFrameRefID", "C", DASHED),
        ],
        unit="short",
        first="as asked",
        when_empty="No numbers for this session length",
        place=_place(panel_id),
    )


def _kv_usage(panel_id: int) -> Json:
    usage = promql.metric("kv_usage_ratio")
    return time_series(
        panel_id,
        title="KV cache in use",
        description=f"""Share of the KV blocks that running requests hold ({usage.full_name}). \
Cached prefixes that nobody uses count as free.

A line near the top: new requests wait, and running ones that grow get preempted. A low line is no proof of room: a pool can \
fill within seconds, and each value is the low point of one engine step. The alerts go by more than this; \
docs/alerts.md lists them.""",
        queries=[query("A", promql.kv_usage(), ENGINE)],
        unit="percentunit",
        highest=1,
        when_empty="KV usage not reported",
        place=_place(panel_id),
    )


def _headroom(panel_id: int) -> Json:
    return time_series(
        panel_id,
        title="Sessions of $session_tokens tokens that still fit",
        description=f"""Whole sessions of this length that fit in the free blocks now \
({catalogue.SESSIONS_HEADROOM.full_name}).

At 0 the next session of this length waits, or takes the blocks of another one later. \
Often at 0: send new sessions to a replica that has some left, or add one.""",
        queries=[query("A", promql.sessions_that_still_fit(), ENGINE)],
        unit="short",
        decimals=0,
        calcs=("lastNotNull", "min"),
        first="lowest",
        custom={"lineInterpolation": "stepAfter"},
        when_empty="No numbers for this session length",
        place=_place(panel_id),
    )


def _waiting(panel_id: int) -> Json:
    total = promql.metric("requests_waiting")
    return time_series(
        panel_id,
        title="Requests waiting",
        description=f"""Requests in the queue by vLLM's reason ({catalogue.WAITING_BY_REASON.full_name}), \
without one for releases that give none ({total.full_name}). Preempted requests wait here again.

capacity (solid): no KV blocks, or the batch is full; with KV usage high it is the blocks. \
deferred (dashed): waits for something else, e.g. a KV transfer or a grammar; more KV does not help.""",
        queries=[
            query("A", promql.requests_waiting_by_reason(), f"{{{{reason}}}}: {ENGINE}"),
            query("B", promql.requests_waiting_for_an_unknown_reason(), f"no reason given: {ENGINE}"),
        ],
        overrides=[look("byRegexp", "/^deferred:/", DASHED)],
        unit="short",
        decimals=0,
        custom={"lineInterpolation": "stepAfter"},
        when_empty="Queue not reported",
        place=_place(panel_id),
    )


def _preemptions(panel_id: int) -> Json:
    return time_series(
        panel_id,
        title="Preemptions",
        description=f"""Running requests that lost all their blocks to another one and start over \
(increase of {promql.metric("preemptions_total").full_name} over one bar, at least a minute).

Anything above 0 is work done twice and a stall that a user sees. vLLM counts a preemption only when its \
request runs again, so bars come late; the queue shows it first. \
Regular bars: lower --max-num-seqs or give the pool more memory.""",
        queries=[query("A", promql.preemptions_since_the_point_before(), ENGINE)],
        unit="short",
        decimals=0,
        # Without an end to the axis, Grafana draws "none at all" on a scale to 100.
        custom={"drawStyle": "bars", "fillOpacity": 60, "lineWidth": 1, "axisSoftMax": 5},
        # Windows of neighbouring points overlap by one scrape. With short points nearly all of a window would be
        # counted twice.
        min_interval="1m",
        when_empty="Preemptions not reported",
        place=_place(panel_id),
    )


def _difference(panel_id: int) -> Json:
    observed, predicted = promql.metric("observed_pool_tokens"), promql.metric("predicted_pool_tokens")
    return time_series(
        panel_id,
        title="KV pool: observed against predicted",
        description=f"""By how much the real pool is larger (above 0) or smaller (below 0) than predicted: \
{observed.full_name} / {predicted.full_name} - 1.

Smaller: something else takes GPU memory, or the overhead is set too low in kvheadroom's config. \
Larger: the overhead is set too high. The daemon's status page shows the sum term by term.""",
        queries=[query("A", promql.pool_against_prediction(), ENGINE)],
        unit="percentunit",
        lowest=None,
        # Differences of a few percent should look as small as they are.
        custom={"axisSoftMin": -0.1, "axisSoftMax": 0.1},
        when_empty="Nothing predicted to compare with",
        place=_place(panel_id),
    )


def _probability(panel_id: int) -> Json:
    return time_series(
        panel_id,
        title="Probability of a preemption",
        description=f"""How likely it is that a request is preempted within 30 seconds (solid), 2 minutes (dashed) and 10 minutes \
(dotted), by the last five minutes of the engine ({catalogue.FORECAST_PROBABILITY.full_name}).

A gap: no forecast; the last panel says why. Dotted high and solid low: there are minutes to send new sessions elsewhere. \
How often it was right is in docs/forecast.md.""",
        queries=[query("A", promql.preemption_probability(), f"{{{{horizon}}}}: {ENGINE}")],
        overrides=[look("byRegexp", "/^2m:/", DASHED), look("byRegexp", "/^10m:/", DOTTED)],
        unit="percentunit",
        highest=1,
        when_empty="No forecast",
        place=_place(panel_id),
    )


def _until_no_room(panel_id: int) -> Json:
    half, earliest, latest = (
        promql.metric(f"forecast_exhaustion{name}_seconds") for name in ("", "_earliest", "_latest")
    )
    return time_series(
        panel_id,
        title="Time until the next request finds no room",
        description=f"""Seconds until the next request would not fit in the free blocks, with a probability of 50% (solid, \
{half.full_name}). The interval around it: 10% (dashed, {earliest.full_name}) and 90% (dotted, {latest.full_name}).

0: it would not fit now. No line: not within 10 minutes, or no forecast. A request that finds no room waits; a preemption needs \
running ones that grow as well, and the panel beside has its probability.""",
        queries=[
            query("A", promql.seconds_until_no_room("50%"), f"50%: {ENGINE}"),
            query("B", promql.seconds_until_no_room("10%"), f"10%: {ENGINE}"),
            query("C", promql.seconds_until_no_room("90%"), f"90%: {ENGINE}"),
        ],
        overrides=[look("byFrameRefID", "B", DASHED), look("byFrameRefID", "C", DOTTED)],
        unit="s",
        highest=600,
        calcs=("lastNotNull", "min"),
        first="lowest",
        when_empty="Not within 10 minutes, or no forecast",
        place=_place(panel_id),
    )


def _states(panel_id: int) -> Json:
    limit, state, none = (
        catalogue.BINDING_LIMIT,
        catalogue.ENGINE_STATE,
        catalogue.FORECAST_UNAVAILABLE,
    )
    return timeline(
        panel_id,
        title="What keeps requests waiting, states with a name, and times without a forecast",
        description=f"""A bar while it is so; what was never so has no row. "waits for": the limit that stops the next request \
({limit.full_name}). "state": a state with a name ({state.full_name}). "no forecast": why there is none ({none.full_name}).

kv_pool: more KV memory or fewer sessions help. max_num_seqs, token_budget, deferred: more KV does not. \
The states are defined in docs/forecast.md, and each has a runbook where it has an alert.""",
        queries=[
            query("A", promql.limits_that_bind(), f"waits for {{{{limit}}}}: {ENGINE}"),
            query("B", promql.states_of_engines(), f"state {{{{state}}}}: {ENGINE}"),
            query("C", promql.without_a_forecast(), f"no forecast, {{{{reason}}}}: {ENGINE}"),
        ],
        when_empty="Nobody waits, and no state with a name",
        place=_place(panel_id, columns=GRID_COLUMNS),
    )


def _place(panel_id: int, columns: int = GRID_COLUMNS // 2) -> Json:
    row, second = divmod(panel_id - 1, 2)
    return {"x": second * GRID_COLUMNS // 2, "y": row * PANEL_HEIGHT, "w": columns, "h": PANEL_HEIGHT}
