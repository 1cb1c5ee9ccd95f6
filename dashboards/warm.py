"""Will a session that was idle find its context again: tiers, how long they keep it, what coming back costs."""

from dashboards import frame, promql
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
    stat,
    table,
    time_series,
    timeline,
    words,
)
from kvheadroom.outputs import metric_catalogue as catalogue

UID = "kvheadroom-warm"

PAIRS = promql.MANY // 2
"""So many engines a panel shows that has two lines for each."""

ANSWERS = words({1: "no", 2: "perhaps", 3: "yes"})
COLOURS_OF_ANSWERS = judged((2, "yellow"), (3, "green"), below="red")
HBM, HOST = 'cache_tier="hbm"', 'cache_tier="host"'


def warm() -> Json:
    """The dashboard, as Grafana imports it."""
    return dashboard(
        uid=UID,
        title="kvheadroom / warm sessions",
        description="Will a session that was idle find its context again, in HBM or in host memory, and what does it cost if not: "
        "tiers, how long they keep content, hit rates of each tier, and what coming back costs.",
        variables=frame.variables(idle_times=True),
        annotations=frame.annotations(),
        panels=arranged(
            [
                Section(title=None, lines=[_tiles(), (9, [(24, _tiers())])]),
                Section(
                    title="Hit rates, tier by tier",
                    lines=[
                        (9, [(12, _found_in_hbm()), (12, _found_outside())]),
                        (9, [(12, _looked_up()), (12, _content())]),
                    ],
                ),
                Section(
                    title="What a tier of another size would find",
                    lines=[(9, [(12, _other_sizes()), (8, _found_of_all()), (4, _learned_from())])],
                ),
                Section(
                    title="How long content stays",
                    lines=[
                        (9, [(12, _retention("hbm")), (12, _retention("host"))]),
                        (9, [(12, _evicted()), (12, _findings())]),
                    ],
                ),
                Section(
                    title="What coming back costs",
                    lines=[
                        (9, [(12, _resume()), (12, _saved())]),
                        (9, [(12, _speeds()), (12, _load_speed())]),
                    ],
                ),
                Section(
                    title="Traffic of the tier in host memory",
                    lines=[(9, [(12, _traffic()), (12, _no_room())]), (9, [(24, _host_memory())])],
                ),
            ]
        ),
    )


def _tiles() -> Line:
    found, outside = catalogue.PREFIX_CACHE_HIT_RATIO, catalogue.EXTERNAL_PREFIX_CACHE_HIT_RATIO
    family, resume = catalogue.SESSION_WARM, catalogue.RESUME

    def still_warm(short: str, where: str, tier: str) -> Json:
        return stat(
            f"In {short}?",
            f"""Whether a session of the chosen length that was idle for the chosen time is still in {where}, on the engine where that is \
least likely ({family.full_name}).

perhaps: it lies between the two ends of how long content stays. no: the session is computed again{" or reloaded" if tier == HBM else ""}; \
below is what that costs.""",
            f"min({promql.numbered(family, 'warm', promql.WARM, tier)})",
            unit="short",
            mappings=ANSWERS,
            thresholds=COLOURS_OF_ANSWERS,
            when_empty="not known" if tier == HBM else "no tier known",
        )

    def seconds(title: str, by: str, word: str) -> Json:
        return stat(
            title,
            f"""Seconds until a session of the chosen length that was evicted from HBM can go on, {word}, on the slowest engine \
({resume.full_name}).

By the speed that was measured under the load that there was; a prompt much longer than those takes longer.""",
            f"max({promql.lines(resume, _by(by), drop=['by', 'session_tokens'])})",
            unit="s",
            decimals=1,
            when_empty="not measured",
        )

    def hit_ratio(title: str, ratio: catalogue.Metric, what: str, when_empty: str) -> Json:
        return stat(
            title,
            f"""{what} ({ratio.full_name}), over the last hour, or less after a start or a gap, \
on the engine with the lowest.

Of two tiers these are two numbers, never one: the second is a share of what the first had not.""",
            f"min({promql.longest(ratio)})",
            unit="percentunit",
            decimals=0,
            when_empty=when_empty,
        )

    return (
        4,
        [
            (4, still_warm("HBM", "HBM", HBM)),
            (4, still_warm("host", "host memory", HOST)),
            (4, seconds("Compute", "recompute", "if all of it is computed again")),
            (4, seconds("Reload", "reload", "if it is loaded from host memory")),
            (
                4,
                hit_ratio(
                    "HBM hits",
                    found,
                    "Of the prompt tokens looked up in the engine's own prefix cache, the share that was found",
                    "nothing looked up",
                ),
            ),
            (
                4,
                hit_ratio(
                    "Ext. hits",
                    outside,
                    "Of the prompt tokens that a KV connector was asked for, which the engine's own cache had not, the share that it supplied",
                    "none asked",
                ),
            ),
        ],
    )


def _by(what: str) -> str:
    return f'by="{what}"'


def _tiers() -> Json:
    sizes, tokens, sessions = catalogue.TIER_BYTES, catalogue.TIER_TOKENS, catalogue.TIER_SESSIONS
    low, high, family = catalogue.RETENTION_LOW, catalogue.RETENTION_HIGH, catalogue.SESSION_WARM
    saved, seconds = catalogue.SAVED_TOKENS, catalogue.SAVED_SECONDS
    used = promql.metric("tier_used_bytes")
    names = ", ".join(
        one.full_name for one in (sizes, used, tokens, sessions, low, high, family, saved, seconds)
    )
    return table(
        "Tiers",
        f"""What each tier holds, for how long, and what it saved. hbm is the pool, of one GPU; host is the offload tier of an engine, all its workers together. in use: where the tier's own metrics tell it (LMCache). sessions: of the chosen length. stays: at \
least and at most, by the last hour; empty where nothing was evicted yet. warm: a session of that length after the chosen idle time. saved: prompt \
tokens found in the tier since the server's start, and the prefill time that they would have taken. From {names}.

A tier that holds many sessions and saves nothing does not pay; one whose sessions are cold too early is too small for the idle times that users \
have.""",
        [
            now("A", promql.lines(sizes)),
            now("B", promql.lines(tokens)),
            now("C", promql.lines(sessions, drop=["session_tokens"])),
            now("D", promql.longest(low)),
            now("E", promql.longest(high)),
            now("F", promql.numbered(family, "warm", promql.WARM)),
            now("G", promql.lines(saved)),
            now("H", promql.lines(seconds)),
            now("I", promql.lines(used)),
        ],
        [
            Column(of="replica", title="replica", width=150),
            Column(of="engine", title="engine", width=75),
            Column(of="model_name", title="model", width=150),
            Column(of="cache_tier", title="tier", width=65),
            Column(of="A", title="size", unit="bytes", decimals=1, width=100),
            Column(of="I", title="in use", unit="bytes", decimals=1, width=100),
            Column(of="B", title="tokens", unit="short", decimals=2, width=100),
            Column(of="C", title="sessions", unit="short", decimals=1, width=90),
            Column(of="D", title="stays at least", unit="s", decimals=0, width=115),
            Column(of="E", title="at most", unit="s", decimals=0, width=100),
            Column(
                of="F", title="warm", width=85, mappings=ANSWERS, thresholds=COLOURS_OF_ANSWERS, coloured=True
            ),
            Column(of="G", title="saved tokens", unit="short", decimals=2, width=110),
            Column(of="H", title="saved prefill", unit="s", decimals=0, width=110),
        ],
        when_empty="No tier is known",
        sort_by=[("warm", "up"), ("replica", "up"), ("engine", "up")],
        hidden=["session_tokens", "idle_seconds"],
    )


def _found_in_hbm() -> Json:
    family = catalogue.PREFIX_CACHE_HIT_RATIO
    return time_series(
        "Found in HBM, lowest engines",
        f"""Of the prompt tokens looked up in the engine's own prefix cache, the share that was found ({family.full_name}) over the last hour, or less after a start or \
a gap (solid), and five minutes (dashed), of the {PAIRS} engines with the lowest.

Dashed far below solid: what is cached is evicted before it is asked for again. Low from the start: prompts share nothing, or are \
shorter than a block.""",
        [
            query("A", promql.ends(promql.longest(family), lowest=True, many=PAIRS), f"long: {ENGINE}"),
            query(
                "B",
                promql.ends(promql.longest(family, of=promql.SHORT_WINDOWS), lowest=True, many=PAIRS),
                f"short: {ENGINE}",
            ),
        ],
        unit="percentunit",
        highest=1,
        overrides=[look("byFrameRefID", "B", DASHED)],
        when_empty="Nothing was looked up, or watched too short a time",
    )


def _found_outside() -> Json:
    family, of_lmcache = catalogue.EXTERNAL_PREFIX_CACHE_HIT_RATIO, promql.metric("lmcache_hit_ratio")
    return time_series(
        "Found at a KV connector, lowest engines",
        f"""Of the prompt tokens that a KV connector was asked for, which the engine's own cache had not, the share that it supplied \
({family.full_name}) over the last hour, or less after a start or a gap (solid), and five minutes \
(dashed), of the {PAIRS} engines with the lowest. Dotted: what LMCache itself found, of whole prompts ({of_lmcache.full_name}).

Low with a large tier: sessions come back later than it keeps them, or do not come back. It is no share of all prompts, so it does not add up \
with the one of HBM.""",
        [
            query("A", promql.ends(promql.longest(family), lowest=True, many=PAIRS), f"long: {ENGINE}"),
            query(
                "B",
                promql.ends(promql.longest(family, of=promql.SHORT_WINDOWS), lowest=True, many=PAIRS),
                f"short: {ENGINE}",
            ),
            query(
                "C", promql.ends(promql.longest(of_lmcache), lowest=True, many=PAIRS), f"LMCache: {ENGINE}"
            ),
        ],
        unit="percentunit",
        highest=1,
        overrides=[look("byFrameRefID", "B", DASHED), look("byFrameRefID", "C", DOTTED)],
        when_empty="No connector was asked",
    )


def _looked_up() -> Json:
    asked, hits, asked_outside, hits_outside = (
        promql.metric(f"{where}prefix_cache_{what}_tokens_total")
        for where in ("", "external_")
        for what in ("queries", "hits")
    )

    def of_all(family: catalogue.Metric) -> str:
        return f"sum({promql.per_engine(promql.rate(family))})"

    return time_series(
        "Tokens looked up and found each second",
        f"""HBM: looked up (solid, {asked.full_name}) and found (filled, {hits.full_name}). Connector: asked for (dashed, \
{asked_outside.full_name}) and supplied (dotted, {hits_outside.full_name}). All chosen engines together.

What is between looked up, found and supplied was computed. It says how much the hit rates above are about.""",
        [
            query("A", of_all(hits), "found in HBM"),
            query("B", of_all(asked), "looked up in HBM"),
            query("C", of_all(asked_outside), "asked a connector for"),
            query("D", of_all(hits_outside), "supplied by it"),
        ],
        unit="short",
        overrides=[
            look("byFrameRefID", "A", {"fillOpacity": 20, "lineWidth": 1}),
            look("byFrameRefID", "C", DASHED),
            look("byFrameRefID", "D", DOTTED),
        ],
        when_empty="Prefix caching is off, or not reported",
    )


def _content() -> Json:
    family = catalogue.HBM_BLOCKS
    return time_series(
        "Blocks of HBM, by what they hold",
        f"""Blocks of all chosen pools, stacked ({family.full_name}): referenced by running requests, cached (may be found again), blank.

No blank ones left: from now on each new block evicts a cached one. Nearly all referenced: nothing idle stays warm in HBM, and preemptions are near.""",
        [query("A", f"sum by (content) ({promql.lines(family)})", "{{content}}")],
        unit="short",
        custom={"stacking": {"group": "A", "mode": "normal"}, "fillOpacity": 40, "lineWidth": 1},
        overrides=[
            look("byRegexp", "/^cached/", DASHED),
            look("byRegexp", "/^blank/", DOTTED),
        ],
        when_empty="Not known what the blocks hold",
    )


def _other_sizes() -> Json:
    middle, low, high = catalogue.EXPECTED_HITS, catalogue.EXPECTED_HITS_LOW, catalogue.EXPECTED_HITS_HIGH
    return table(
        "HBM and a tier would find",
        f"""For tiers in host memory of other sizes (0: none), by how soon the prompts of the last day came back: at least ({low.full_name}), at most \
({high.full_name}), and the middle where the two are at most 10 points apart ({middle.full_name}).

"at least" well above what is found today: a tier of that size pays. No middle: the last day says too little about it; docs/warm-sessions.md says why. \
The sizes are tier_sizes of the config.""",
        [
            now(ref, promql.in_gigabytes(promql.lines(family), "tier_bytes", "tier"))
            for ref, family in (("A", middle), ("B", low), ("C", high))
        ],
        [
            Column(of="replica", title="replica", width=120),
            Column(of="engine", title="engine", width=70),
            Column(of="model_name", title="model", width=120),
            Column(of="tier", title="tier", width=95),
            Column(of="B", title="at least", unit="percentunit", decimals=1, width=90),
            Column(of="A", title="would find", unit="percentunit", decimals=1, width=100),
            Column(of="C", title="at most", unit="percentunit", decimals=1, width=90),
        ],
        when_empty="Two hours with prompts are needed, or it cannot be told",
        sort_by=[("replica", "up"), ("engine", "up"), ("at least", "up")],
        hidden=["tier_bytes"],
    )


def _found_of_all() -> Json:
    family = catalogue.FOUND_RATIO
    return time_series(
        "Found, of all prompts",
        f"""What was found of the same prompts that the table goes by, of a day at most: in HBM (solid), by a \
KV connector (dashed), shares of all prompt tokens ({family.full_name}), of the {PAIRS} engines with the least in HBM.

Both together are what the table compares with.""",
        [
            query(
                "A",
                promql.ends(promql.lines(family, HBM, drop=["cache_tier"]), lowest=True, many=PAIRS),
                f"HBM: {ENGINE}",
            ),
            query(
                "B",
                promql.ends(promql.lines(family, HOST, drop=["cache_tier"]), lowest=True, many=PAIRS),
                f"connector: {ENGINE}",
            ),
        ],
        unit="percentunit",
        highest=1,
        overrides=[look("byFrameRefID", "B", DASHED)],
        when_empty="Two hours with prompts are needed",
    )


def _learned_from() -> Json:
    family = catalogue.REUSE_SECONDS
    return stat(
        "Seen for",
        f"""How much time with prompts the table goes by, on the engine with the least ({family.full_name}); a day at most.

Less than a working day: wait before you buy memory.""",
        f"min({promql.lines(family)})",
        unit="s",
        decimals=0,
        when_empty="nothing yet",
    )


def _retention(tier: str) -> Json:
    low, high = catalogue.RETENTION_LOW, catalogue.RETENTION_HIGH
    where = {"hbm": "HBM", "host": "host memory"}[tier]
    of_tier = f'cache_tier="{tier}"'
    shortest = promql.longest(low, of_tier, drop=["cache_tier"])
    return time_series(
        f"Stays in {where}, shortest engines",
        f"""How long what nobody asks for stays in {where}: at most (solid, {
            high.full_name
        }) and at least (dashed, {low.full_name}) by what came in over the last hour, of the {PAIRS} \
engines where it is shortest. The truth lies between.

Shorter than a lunch break: sessions that come back are computed again. {
            "Fewer or shorter sessions on the engine, or a tier in host memory, make it longer."
            if tier == "hbm"
            else "A larger --kv-offloading-size makes it longer."
        }""",
        [
            query(
                "A",
                promql.ends(promql.longest(high, of_tier, drop=["cache_tier"]), lowest=True, many=PAIRS),
                f"at most: {ENGINE}",
            ),
            query("B", promql.ends(shortest, lowest=True, many=PAIRS), f"at least: {ENGINE}"),
        ],
        unit="s",
        overrides=[look("byFrameRefID", "B", DASHED)],
        when_empty="Nothing was evicted yet, or it is not known"
        if tier == "hbm"
        else "No such tier, or nothing evicted yet",
    )


def _evicted() -> Json:
    family = catalogue.EVICTED_IDLE
    return time_series(
        "Idle before eviction, as vLLM measured",
        f"""How long sampled blocks of HBM had not been asked for when other content took their place, mean of the last hour ({family.full_name}), of \
the {promql.MANY} engines where it is shortest. It holds the time that their own request ran, so it is longer than what is above.

Nothing here: start vLLM with --kv-cache-metrics.""",
        [query("A", promql.ends(promql.longest(family), lowest=True), ENGINE)],
        unit="s",
        when_empty="vLLM runs without --kv-cache-metrics, or evicted nothing",
    )


def _findings() -> Json:
    family = catalogue.WARM_FINDING
    return timeline(
        "What keeps a tier from paying",
        f"""A bar while it is so ({family.full_name}).

tier_too_small: stores found no room; raise --kv-offloading-size. tier_not_paying: in an hour there were stores and no loads; the memory may serve \
something else better. nothing_stored: in an hour there were prompts and no stores; look at --kv-transfer-config. host_memory_above_tier, tier_above_shm, \
tier_above_host_memory: the host has not what it takes. evicted_by_churn: a larger tier would find much more. blocks_too_big, prefixes_differ, finds_less_than_before: \
it is the prompts, not the size. The status page has the sentence.""",
        [query("A", promql.lines(family), "{{finding}} {{replica}}/{{engine}}")],
        texts={1: "yes"},
        colors=[(1, "orange")],
        when_empty="No finding",
    )


def _resume() -> Json:
    family = catalogue.RESUME

    def slowest(by: str) -> str:
        return promql.ends(promql.lines(family, _by(by), drop=["by", "session_tokens"]), many=PAIRS)

    return time_series(
        "Back after $session_tokens tokens, slowest engines",
        f"""Seconds until a session of this length that was evicted from HBM can go on ({family.full_name}): by recompute of all of it (solid), by reload \
from host memory (dashed); the {PAIRS} engines where it takes longest.

Solid near dashed: reloading is not worth a tier of this size. Rising: the load does it, not the session.""",
        [
            query("A", slowest("recompute"), f"compute: {ENGINE}"),
            query("B", slowest("reload"), f"reload: {ENGINE}"),
        ],
        unit="s",
        overrides=[look("byFrameRefID", "B", DASHED)],
        when_empty="No speed was measured",
    )


def _speeds() -> Json:
    family = catalogue.PREFILL_RATE
    return time_series(
        "Prefill tokens each second, slowest engines",
        f"""Prompt tokens of requests that finished / the time from their first scheduling to their first token, over five minutes \
({family.full_name}), of the {promql.MANY} slowest engines. Under the load that there was, so it is no property of the GPU.

It is what a recompute goes by.""",
        [query("A", promql.ends(promql.longest(family, of=promql.SHORT_WINDOWS), lowest=True), ENGINE)],
        unit="short",
        when_empty="No request finished in the window",
    )


def _saved() -> Json:
    family = catalogue.SAVED_TOKENS
    return time_series(
        "Prompt tokens saved each second, by tier",
        f"""Prompt tokens that were found in a tier and not computed ({family.full_name}), all chosen engines of a model: HBM solid, host memory \
dashed.

Beside the prompt tokens computed it is what the caches are worth; in seconds of prefill it is in the table above. Nothing is said of host memory \
where other connectors supply tokens too.""",
        [
            query(
                "A",
                f"sum by (model_name, cache_tier) ({promql.per_engine(promql.rate(family))})",
                "{{cache_tier}}: {{model_name}}",
            )
        ],
        unit="short",
        overrides=[look("byRegexp", "/^host:/", DASHED)],
        when_empty="Nothing was found in a tier, or not reported",
    )


def _traffic() -> Json:
    stored, loaded = promql.metric("offload_store_bytes_total"), promql.metric("offload_load_bytes_total")
    return time_series(
        "Stored and loaded, by model",
        f"""Bytes each second to host memory (solid, {stored.full_name}) and back (dashed, {loaded.full_name}), all workers of all chosen engines of a \
model.

Stores without loads for an hour: nobody comes back in time. The size of the tier / what is stored each second is how long content stays.""",
        [
            query(
                "A",
                f"sum by (model_name) ({promql.per_engine(promql.rate(stored))})",
                "stored: {{model_name}}",
            ),
            query(
                "B",
                f"sum by (model_name) ({promql.per_engine(promql.rate(loaded))})",
                "loaded: {{model_name}}",
            ),
        ],
        unit="binBps",
        overrides=[look("byFrameRefID", "B", DASHED)],
        when_empty="No engine offloads, or its vLLM does not tell",
    )


def _load_speed() -> Json:
    family = catalogue.LOAD_RATE
    return time_series(
        "Speed of a load, slowest engines",
        f"""What one worker loads from host memory while it loads, over five minutes ({family.full_name}), of the {promql.MANY} slowest engines.

It is what a reload goes by. Far below the link to the GPU: many small chunks, or memory of another socket.""",
        [query("A", promql.ends(promql.longest(family, of=promql.SHORT_WINDOWS), lowest=True), ENGINE)],
        unit="binBps",
        when_empty="Nothing was loaded in the window",
    )


def _no_room() -> Json:
    family = promql.metric("offload_allocation_failures_total")
    return time_series(
        "Stores that found no room",
        f"""Stores for which the tier had no room, each attempt counted ({family.full_name}), of the {promql.MANY} engines with the most.

More than single ones: all that the tier holds is in use by transfers; raise --kv-offloading-size.""",
        [query("A", promql.ends(promql.per_engine(promql.increase(family))), ENGINE)],
        unit="short",
        decimals=0,
        custom={"axisSoftMax": 5},
        when_empty="Not counted (vLLM before 0.26, or no tier)",
    )


def _host_memory() -> Json:
    need, shared = promql.metric("predicted_tier_host_bytes"), promql.metric("observed_host_shared_bytes")
    return time_series(
        "Host memory of the tiers",
        f"""What the tier of an engine takes of its host's memory (solid, {need.full_name}), and the shared memory that the processes of its server have (dashed, \
{shared.full_name}; of servers on kvheadroom's own machine), of the {PAIRS} largest.

Before vLLM 0.27 solid may be twice the size that was asked for. From 0.27 the tier is one file that counts for each worker that maps it, so dashed may be several times solid.""",
        [
            query("A", promql.ends(promql.lines(need), many=PAIRS), f"takes: {ENGINE}"),
            query("B", promql.ends(promql.lines(shared), many=PAIRS), "shared memory: {{replica}}"),
        ],
        unit="bytes",
        overrides=[look("byFrameRefID", "B", DASHED)],
        when_empty="No tier whose need is known",
    )
