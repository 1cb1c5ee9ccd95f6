"""One server: what its engines hold, what is coming, what stops the next request."""

from dashboards import frame, limits, promql, tiles
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

UID = "kvheadroom-engine"

# The dashboard is about one server, so its name says nothing in a legend.
ENGINE = "engine {{engine}}"
CALCS = ("lastNotNull", "max")


def engine() -> Json:
    """The dashboard, as Grafana imports it."""
    return dashboard(
        uid=UID,
        title="kvheadroom / engine",
        description="The engines of one vLLM server: sessions, KV pool, forecast, what keeps requests waiting, preemptions, tokens.",
        variables=frame.variables(one_replica=True),
        annotations=frame.annotations(),
        panels=arranged(
            [
                Section(title=None, lines=[_tiles(), (9, [(12, _sessions()), (12, _states())])]),
                Section(
                    title="Forecast",
                    lines=[(10, [(8, _probability()), (8, _until_no_room()), (8, _demand())])],
                ),
                Section(
                    title="Pool",
                    lines=[(10, [(8, _usage()), (8, _headroom()), (8, _tokens_held())])],
                ),
                Section(
                    title="Queue and preemptions",
                    lines=[(10, [(8, _waiting()), (8, _preemptions()), (8, _running())])],
                ),
                Section(title="Tokens", lines=[(10, [(8, _token_rates()), (8, _backlog()), (8, _found())])]),
                Section(
                    title="The server",
                    lines=[(6, [(12, _state_of_server()), (4, _restarts()), (8, _labels())])],
                ),
            ]
        ),
    )


def _tiles() -> Line:
    likely = catalogue.FORECAST_PROBABILITY
    soon = promql.lines(likely, f'horizon="{limits.SOON}"', drop=["horizon"])
    return (
        4,
        [
            (4, tiles.still_fit()),
            (4, tiles.full_in()),
            (
                4,
                stat(
                    "Risk",
                    f"""How likely it is that a request is preempted within ten minutes, on the engine where it is likeliest ({likely.full_name}). \
The limit is the alert's.

Above it: send new sessions elsewhere now, while that still helps.""",
                    f"max({soon})",
                    unit="percentunit",
                    decimals=0,
                    thresholds=judged((limits.SOON_PROBABILITY, "orange")),
                    when_empty="no forecast",
                    links=[runbook("KvHeadroomExhaustionSoon")],
                ),
            ),
            (4, tiles.fullest()),
            (
                4,
                stat(
                    "Waits for",
                    f"""What keeps waiting requests from running ({catalogue.BINDING_LIMIT.full_name}); of several engines the worst, \
which is the pool.

KV pool: more KV memory or fewer sessions help. max_num_seqs, token budget, deferred: more KV memory does not.""",
                    f"max({promql.numbered(catalogue.BINDING_LIMIT, 'limit', promql.LIMITS)})",
                    unit="short",
                    mappings=words(promql.WAITS_FOR),
                    thresholds=judged((2, "yellow"), (5, "red")),
                    when_empty="not known",
                    links=[runbook("KvHeadroomSessionLimitNotKv")],
                ),
            ),
            (4, tiles.preempted()),
        ],
    )


def _sessions() -> Json:
    predicted, observed, in_use = (
        catalogue.PREDICTED_SESSIONS,
        catalogue.OBSERVED_SESSIONS,
        catalogue.SESSIONS_IN_USE,
    )
    return time_series(
        "Sessions of $session_tokens tokens",
        f"""Dashed: sessions that fit by the prediction ({predicted.full_name}). \
Solid: sessions that fit in the pool the engine really has ({observed.full_name}). \
Filled: what is in use now, counted in such sessions ({in_use.full_name}).

In use close to observed: add a replica or shorten the context before users queue. \
Dashed and solid apart: the Prediction dashboard says which term is off.""",
        # What comes last is drawn on top: a dashed line over a solid one shows both.
        [
            query("A", promql.lines(in_use), f"in use: {ENGINE}"),
            query("B", promql.lines(observed), f"observed: {ENGINE}"),
            query("C", promql.lines(predicted), f"predicted: {ENGINE}"),
        ],
        unit="short",
        calcs=CALCS,
        overrides=[
            look("byFrameRefID", "A", {"fillOpacity": 20, "lineWidth": 1}),
            look("byFrameRefID", "C", DASHED),
        ],
        when_empty="No numbers for this session length",
    )


# In one timeline the numbers of three questions must not meet.
_OF_LIMIT, _OF_FORECAST, _OF_STATE = 0, 10, 20


def _states() -> Json:
    limit, state, none = (
        catalogue.BINDING_LIMIT,
        catalogue.ENGINE_STATE,
        catalogue.FORECAST_UNAVAILABLE,
    )
    texts = {
        **promql.WAITS_FOR,
        **{_OF_FORECAST + i: reason for i, reason in enumerate(promql.NO_FORECAST, 1)},
        _OF_STATE + 1: "yes",
    }
    return timeline(
        "What requests wait for, and named states",
        f"""waits for: the limit that stops the next request ({limit.full_name}); a gap where the page cannot tell. One row for each state with a \
name that the engine was in ({state.full_name}). no forecast: why there was none ({none.full_name}).

KV pool: more KV memory or fewer sessions help. max_num_seqs, token budget, deferred: more KV memory does not. The states are defined in \
docs/forecast.md, and each has a runbook where it has an alert.""",
        [
            query("A", promql.numbered(limit, "limit", promql.LIMITS), "waits for ({{engine}})"),
            query("B", f"{_OF_STATE} + {promql.lines(state)}", "{{state}} ({{engine}})"),
            query(
                "C",
                f"{_OF_FORECAST} + {promql.numbered(none, 'reason', promql.NO_FORECAST)}",
                "no forecast ({{engine}})",
            ),
        ],
        texts=texts,
        colors=[(1, "green"), (2, "yellow"), (5, "red"), (_OF_FORECAST, "blue"), (_OF_STATE, "orange")],
        when_empty="Not known what binds, and no state with a name",
        links=[runbook("KvHeadroomNoForecast")],
    )


def _probability() -> Json:
    return time_series(
        "Probability of a preemption",
        f"""How likely it is that a request is preempted within 30 seconds (solid), 2 minutes (dashed) and 10 minutes \
(dotted), by the last five minutes of the engine ({catalogue.FORECAST_PROBABILITY.full_name}). Across: the limits of the alerts for 30 seconds \
and for 10 minutes.

A gap: no forecast; the timeline above says why. Dotted high and solid low: there are minutes to send new sessions elsewhere. \
How often it was right is in docs/forecast.md.""",
        [query("A", promql.lines(catalogue.FORECAST_PROBABILITY), f"{{{{horizon}}}}: {ENGINE}")],
        unit="percentunit",
        highest=1,
        calcs=CALCS,
        limits=[(limits.IMMINENT_PROBABILITY, "red"), (limits.SOON_PROBABILITY, "orange")],
        overrides=[look("byRegexp", "/^2m:/", DASHED), look("byRegexp", "/^10m:/", DOTTED)],
        when_empty="No forecast",
        links=[runbook("KvHeadroomExhaustionImminent"), runbook("KvHeadroomExhaustionSoon")],
    )


def _until_no_room() -> Json:
    half, earliest, latest = (
        promql.metric(f"forecast_exhaustion{name}_seconds") for name in ("", "_earliest", "_latest")
    )
    return time_series(
        "Time until no room",
        f"""Seconds until the next request would not fit in the free blocks, with a probability of 50% (solid, \
{half.full_name}). The interval around it: 10% (dashed, {earliest.full_name}) and 90% (dotted, {latest.full_name}).

0: it would not fit now. No line: not within 10 minutes, or no forecast. A request that finds no room waits; a preemption needs \
running ones that grow as well, and the panel beside has its probability.""",
        [
            query("A", promql.lines(half), f"50%: {ENGINE}"),
            query("B", promql.lines(earliest), f"10%: {ENGINE}"),
            query("C", promql.lines(latest), f"90%: {ENGINE}"),
        ],
        unit="s",
        highest=limits.SOON_SECONDS,
        calcs=("lastNotNull", "min"),
        overrides=[look("byFrameRefID", "B", DASHED), look("byFrameRefID", "C", DOTTED)],
        when_empty="Not within 10 minutes, or no forecast",
    )


def _demand() -> Json:
    used, free, blocks, peak = (
        promql.metric(name)
        for name in ("used_blocks", "free_blocks", "observed_blocks", "forecast_peak_blocks")
    )
    return time_series(
        "Blocks in use, and at once",
        f"""Filled: blocks that running requests hold ({used.full_name}). Solid: blocks of the pool, the null block included \
({blocks.full_name}). Dotted: what runs, and what waits for blocks, if all of it went on to its usual end at once ({peak.full_name}). \
Dashed: blocks that can be handed out now ({free.full_name}).

Dotted above solid: something has to end before all can go on. It is no forecast by itself, since requests do not all end at once.""",
        [
            query("A", promql.lines(used), f"in use: {ENGINE}"),
            query("B", promql.lines(blocks), f"pool: {ENGINE}"),
            query("C", promql.lines(free), f"free: {ENGINE}"),
            query("D", promql.lines(peak), f"at once: {ENGINE}"),
        ],
        unit="short",
        calcs=CALCS,
        overrides=[
            look("byFrameRefID", "A", {"fillOpacity": 20, "lineWidth": 1}),
            look("byFrameRefID", "C", DASHED),
            look("byFrameRefID", "D", DOTTED),
        ],
        when_empty="Blocks not reported",
    )


def _usage() -> Json:
    usage, estimate = promql.metric("kv_usage_ratio"), promql.metric("token_occupancy_estimate_ratio")
    return time_series(
        "KV cache in use",
        f"""Solid: share of the KV blocks that running requests hold ({usage.full_name}). Cached prefixes that nobody uses count as free. \
Dashed: an estimate of the share that tokens really fill ({estimate.full_name}). Across: from where on the alert on exhaustion may fire.

Near the top: new requests wait, and running ones that grow get preempted. A pool can fill within seconds, and each value is the low point \
of one engine step. Dashed far below solid: requests are shorter than a block; a smaller --block-size would hold more of them.""",
        [
            query("A", promql.lines(usage), f"blocks: {ENGINE}"),
            query("B", promql.lines(estimate), f"tokens: {ENGINE}"),
        ],
        unit="percentunit",
        highest=1,
        calcs=CALCS,
        limits=[(limits.FULL, "orange")],
        overrides=[look("byFrameRefID", "B", DASHED)],
        when_empty="KV usage not reported",
    )


def _headroom() -> Json:
    return time_series(
        "Sessions that still fit",
        f"""Whole sessions of the chosen length that fit in the free blocks now \
({catalogue.SESSIONS_HEADROOM.full_name}).

At 0 the next session of this length waits, or takes the blocks of another one later. \
Often at 0: send new sessions to a replica that has some left, or add one.""",
        [query("A", promql.lines(catalogue.SESSIONS_HEADROOM), ENGINE)],
        unit="short",
        decimals=0,
        calcs=("lastNotNull", "min"),
        custom={"lineInterpolation": "stepAfter"},
        when_empty="No numbers for this session length",
        links=[runbook("KvHeadroomPoolBelowOneSession")],
    )


def _tokens_held() -> Json:
    used, free = promql.metric("used_tokens"), promql.metric("free_tokens")
    return time_series(
        "Tokens in use and free",
        f"""Filled: tokens of the blocks in use ({used.full_name}). Solid: tokens of the free ones ({free.full_name}).

The most that one more context can grow to is what is free on its engine. Nothing here for models with several KV cache groups: there a block has no \
fixed number of tokens.""",
        [
            query("A", promql.lines(used), f"in use: {ENGINE}"),
            query("B", promql.lines(free), f"free: {ENGINE}"),
        ],
        unit="short",
        calcs=("lastNotNull", "min"),
        overrides=[look("byFrameRefID", "A", {"fillOpacity": 20, "lineWidth": 1})],
        when_empty="Not known in tokens (several KV cache groups, or no block size)",
    )


def _waiting() -> Json:
    total, by_reason = promql.metric("requests_waiting"), catalogue.WAITING_BY_REASON
    return time_series(
        "Requests waiting",
        f"""Requests in the queue by vLLM's reason ({by_reason.full_name}), \
without one for releases that give none ({total.full_name}). Preempted requests wait here again.

capacity (solid): no KV blocks, or the batch is full; the timeline above says which. \
deferred (dashed): waits for something else, e.g. a KV transfer or a grammar; more KV does not help.""",
        [
            query("A", promql.lines(by_reason), f"{{{{reason}}}}: {ENGINE}"),
            query("B", promql.waiting_for_an_unknown_reason(), f"no reason given: {ENGINE}"),
        ],
        unit="short",
        decimals=0,
        calcs=CALCS,
        overrides=[look("byRegexp", "/^deferred:/", DASHED)],
        custom={"lineInterpolation": "stepAfter", "axisSoftMax": 5},
        when_empty="Queue not reported",
    )


def _preemptions() -> Json:
    return time_series(
        "Preemptions",
        f"""Running requests that lost all their blocks to another one and start over \
(increase of {promql.metric("preemptions_total").full_name} over one bar, at least a minute).

Anything above 0 is work done twice and a stall that a user sees. vLLM counts a preemption only when its \
request runs again, so bars come late; the queue shows it first. \
Regular bars: lower --max-num-seqs or give the pool more memory.""",
        [query("A", promql.per_engine(promql.increase("preemptions_total")), ENGINE)],
        unit="short",
        decimals=0,
        calcs=CALCS,
        # Without an end to the axis, Grafana draws "none at all" on a scale to 100.
        custom={"drawStyle": "bars", "fillOpacity": 60, "lineWidth": 1, "axisSoftMax": 5},
        # Windows of neighbouring points overlap by one scrape. With short points nearly all of a window would be
        # counted twice.
        min_interval="1m",
        when_empty="Preemptions not reported",
        links=[runbook("KvHeadroomPreempting"), runbook("KvHeadroomPreemptionThrash")],
    )


def _running() -> Json:
    running = promql.metric("requests_running")
    return time_series(
        "Requests running",
        f"""Requests in the running batch ({running.full_name}).

A flat top with a queue beside it and KV to spare is max_num_seqs: raise it. A flat top with a full pool is the pool.""",
        [query("A", promql.lines(running), ENGINE)],
        unit="short",
        decimals=0,
        calcs=CALCS,
        custom={"axisSoftMax": 5},
        when_empty="Batch not reported",
        links=[runbook("KvHeadroomSessionLimitNotKv")],
    )


def _token_rates() -> Json:
    prompt, generated = promql.metric("prompt_tokens_total"), promql.metric("generation_tokens_total")
    return time_series(
        "Tokens each second",
        f"""Solid: tokens generated ({generated.full_name}). Dashed: prompt tokens prefilled or taken from a cache ({prompt.full_name}).

Prompts without answers for minutes: prompts that are computed again and again. Neither, with a queue: the scheduler stands.""",
        [
            query("A", promql.per_engine(promql.rate(generated)), f"generated: {ENGINE}"),
            query("B", promql.per_engine(promql.rate(prompt)), f"prompt: {ENGINE}"),
        ],
        unit="short",
        calcs=CALCS,
        overrides=[look("byFrameRefID", "B", DASHED)],
        when_empty="Tokens not reported",
        links=[runbook("KvHeadroomReprefillLoop"), runbook("KvHeadroomSchedulerStalled")],
    )


def _backlog() -> Json:
    backlog = promql.metric("prefill_backlog_tokens")
    return time_series(
        "Prompt tokens in the queue",
        f"""Prompt tokens of what waits that are not in the prefix cache, by the usual prompt ({backlog.full_name}); of deferred requests none.

Divided by the prompt tokens that the server computes each second (panel beside), it is how long the last in the queue waits at least.""",
        [query("A", promql.lines(backlog), ENGINE)],
        unit="short",
        calcs=CALCS,
        when_empty="The usual prompt is not known yet",
    )


def _found() -> Json:
    family = catalogue.PREFIX_CACHE_HIT_RATIO
    return time_series(
        "Found in the prefix cache",
        f"""Of the prompt tokens looked up in HBM, the share that was found ({family.full_name}) over the last minute (dotted), five minutes \
(dashed) and hour (solid).

Minutes below the hour while the pool is full: what is cached is evicted before it is asked for again; see Warm sessions.""",
        [query("A", promql.lines(family), f"{{{{window}}}}: {ENGINE}")],
        unit="percentunit",
        highest=1,
        calcs=("lastNotNull",),
        overrides=[look("byRegexp", "/^1m:/", DOTTED), look("byRegexp", "/^5m:/", DASHED)],
        when_empty="Nothing was looked up, or watched too short a time",
        links=[runbook("KvHeadroomWorkingSetExceedsPool")],
    )


def _state_of_server() -> Json:
    family = catalogue.REPLICA_STATE
    return timeline(
        "State of the server",
        f"""What the server did ({family.full_name}).

down: it does not answer. wedged: it answers scrapes, but its counters stand still and /health fails; restart it. stats_disabled: it runs \
with --disable-log-stats; start it without.""",
        [query("A", promql.numbered(family, "state", promql.REPLICA_STATES), "{{replica}}")],
        texts=dict(enumerate(promql.REPLICA_STATES, 1)),
        colors=frame.COLORS_OF_SERVERS,
        when_empty="The server is not watched",
        links=[runbook("KvHeadroomTargetDown"), runbook("KvHeadroomEngineWedged")],
    )


def _restarts() -> Json:
    family = catalogue.REPLICA_RESTARTS
    return stat(
        "Restarts",
        f"""How often the server began anew within the last hour ({family.full_name}). The limit is the alert's.

Each drops all sessions and the prefix cache. Look for the reason in vLLM's log, first for out of memory.""",
        f"max({promql.restarts_in_an_hour()})",
        unit="suffix: in 1 h",
        decimals=0,
        mappings=words({0: "none"}),
        thresholds=judged((1, "yellow"), (limits.RESTARTS, "red")),
        when_empty="not watched long enough",
        links=[runbook("KvHeadroomRestartLoop")],
    )


def _labels() -> Json:
    family = catalogue.REPLICA_INFO
    return table(
        "Who it is",
        f"""What found the server, and the labels that its operator gave it ({family.full_name}).

To have such a label on a number, join them as docs/metrics.md shows.""",
        [now("A", promql.lines(family))],
        [Column(of="replica", title="replica"), Column(of="source", title="found by")],
        when_empty="The server is not watched",
        sort_by=[("replica", "up")],
        hidden=["A"],
    )
