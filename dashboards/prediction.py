"""Is the model's sum right, and which term is off: predicted, calibrated, observed; the ledger; the GPUs."""

from collections.abc import Sequence

from dashboards import frame, limits, promql
from dashboards.frame import ENGINE
from dashboards.grafana import (
    DASHED,
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
    words,
)
from kvheadroom.outputs import metric_catalogue as catalogue
from kvheadroom.outputs.metric_catalogue import Metric

UID = "kvheadroom-prediction"

GPU = "{{short}} of {{replica}}"

OFF = judged((limits.PREDICTION_OFF, "orange"))
OF_ENGINE = (
    Column(of="replica", title="replica", width=120),
    Column(of="engine", title="engine", width=75),
)
MODEL = Column(of="model_name", title="model", width=120)
PARTS = ("context", "activations", "workspaces", "encoder", "cuda_graphs")
GPU_TERMS = ("reserved", "others", "weights", "kv_pool", "rest", "free")


def prediction() -> Json:
    """The dashboard, as Grafana imports it."""
    return dashboard(
        uid=UID,
        title="kvheadroom / prediction",
        description="Is the model's sum right, and which term is off: the predicted, calibrated and observed pool of each engine, "
        "memory term by term, and the GPUs. Sizes are of one GPU, in KiB, MiB and GiB (2^10, 2^20, 2^30 bytes).",
        variables=frame.variables(),
        annotations=frame.annotations(),
        panels=arranged(
            [
                Section(
                    title=None,
                    lines=[
                        _tiles(),
                        (8, [(24, _pools())]),
                        (9, [(24, _ledger())]),
                        (9, [(12, _drift()), (12, _unexplained())]),
                    ],
                ),
                Section(
                    title="Overhead and calibration",
                    lines=[
                        (8, [(24, _overhead())]),
                        (8, [(12, _findings()), (12, _facts())]),
                    ],
                ),
                Section(title="What a pool is made of", lines=[(8, [(24, _geometry())])]),
                Section(title="GPUs", lines=[(9, [(24, _gpus())]), (9, [(12, _free()), (12, _others())])]),
                Section(
                    title="Samples of the overhead, and faults of GPUs",
                    lines=[(8, [(24, _samples())]), (9, [(8, _excluded()), (8, _xids()), (8, _ages())])],
                    collapsed=True,
                ),
            ]
        ),
    )


def _tiles() -> Line:
    observed, predicted, calibrated = (
        promql.metric(f"{origin}_pool_tokens") for origin in ("observed", "predicted", "calibrated")
    )
    answers = promql.lines(catalogue.SAMPLE_AGE)
    unexplained, finding = catalogue.UNEXPLAINED_OVERHEAD, catalogue.MEMORY_FINDING
    off = f"abs({promql.pool_against('predicted')}) > {limits.PREDICTION_OFF:g}"
    return (
        4,
        [
            (
                4,
                stat(
                    "Off by",
                    f"""By how much the pool of the engine that is furthest off differs from its prediction ({observed.full_name} against \
{predicted.full_name}). The limit is the alert's.

The ledger below says which term it is.""",
                    f"max(abs({promql.pool_against('predicted')}))",
                    unit="percentunit",
                    decimals=1,
                    thresholds=OFF,
                    when_empty="nothing predicted",
                    links=[runbook("KvHeadroomPredictionOff")],
                ),
            ),
            (
                4,
                stat(
                    "Calibrated",
                    f"""By how much the pool differs from the calibrated one, which has the overhead that starts like it had \
({observed.full_name} against {calibrated.full_name}), on the engine that is furthest off.

Smaller than the tile before: the learned overhead is the better one; kvheadroom calibrate writes it as config. As large: something else is \
off, most likely weights or flags.""",
                    f"max(abs({promql.pool_against('calibrated')}))",
                    unit="percentunit",
                    decimals=1,
                    thresholds=OFF,
                    when_empty="not calibrated yet",
                ),
            ),
            (
                4,
                stat(
                    "Too far",
                    f"""Engines whose pool differs from the predicted one by more than the limit of the alert ({observed.full_name} against \
{predicted.full_name}).

Several of one kind: the model is off for that kind. A single one: something is special about its machine.""",
                    promql.counted(off, promql.pool_against("predicted")),
                    unit="short",
                    decimals=0,
                    mappings=words({0: "none"}),
                    thresholds=judged((1, "orange")),
                    when_empty="nothing predicted",
                ),
            ),
            (
                4,
                stat(
                    "Unknown",
                    f"""Engines that answer ({catalogue.SAMPLE_AGE.full_name}) and have no {predicted.full_name}.

The table of facts below names what is missing; the status page has the line of config that gives it.""",
                    promql.counted(promql.without_prediction(), answers),
                    unit="short",
                    decimals=0,
                    mappings=words({0: "none"}),
                    thresholds=judged((1, "yellow")),
                    when_empty="no engine answers",
                ),
            ),
            (
                4,
                stat(
                    "Overhead",
                    f"""Overhead that the live pool tells less the predicted one, of the engine where it is most, more or less \
({unexplained.full_name}).

Calibration takes it in once a second start is known. On one GPU only: see what else runs there.""",
                    f"max(abs({promql.lines(unexplained)}))",
                    unit="bytes",
                    decimals=1,
                    when_empty="not known",
                ),
            ),
            (
                4,
                stat(
                    "Findings",
                    f"""Memory that is held for nothing or will be missed: how many findings there are ({finding.full_name}), where engines answer \
({catalogue.SAMPLE_AGE.full_name}).

The table of findings has each with its size and what to change.""",
                    promql.counted(_all_findings(), answers),
                    unit="short",
                    decimals=0,
                    mappings=words({0: "none"}),
                    thresholds=judged((1, "yellow")),
                    when_empty="no engine answers",
                    links=[runbook("KvHeadroomHbmHeldByOthers")],
                ),
            ),
        ],
    )


def _names(*families: Metric) -> str:
    return ", ".join(family.full_name for family in families)


def _pools() -> Json:
    observed, predicted, calibrated = (
        promql.metric(f"{origin}_pool_tokens") for origin in ("observed", "predicted", "calibrated")
    )
    sessions = (catalogue.PREDICTED_SESSIONS, catalogue.CALIBRATED_SESSIONS, catalogue.OBSERVED_SESSIONS)
    basis = catalogue.OBSERVED_POOL_BASIS
    return table(
        "Pools, furthest off first",
        f"""Tokens of each engine's pool as predicted from files, flags and hardware alone, as calibrated, and as the engine has it, with the \
sessions of the chosen length that each holds; off by: observed against predicted, without sign, then with the calibrated one. told by: \
what the observed figure is. From {_names(predicted, calibrated, observed, *sessions, basis)}.

Observed smaller: something else takes GPU memory, or the overhead is set too low. Larger: it is set too high. The ledger has the sum term \
by term.""",
        [
            now("A", promql.lines(predicted)),
            now("B", promql.lines(calibrated)),
            now("C", promql.lines(observed)),
            now("D", f"abs({promql.pool_against('predicted')})"),
            now("E", f"abs({promql.pool_against('calibrated')})"),
            *(
                now(ref, promql.lines(family, drop=["session_tokens"]))
                for ref, family in zip("FGH", sessions, strict=True)
            ),
            now("I", promql.lines(basis)),
        ],
        [
            *OF_ENGINE,
            MODEL,
            Column(of="A", title="predicted tokens", unit="locale", width=135),
            Column(of="B", title="calibrated", unit="locale", width=115),
            Column(of="C", title="observed", unit="locale", width=115),
            Column(
                of="D",
                title="off by",
                unit="percentunit",
                decimals=1,
                width=80,
                thresholds=OFF,
                coloured=True,
            ),
            Column(
                of="E",
                title="calibrated off by",
                unit="percentunit",
                decimals=1,
                width=135,
                thresholds=OFF,
                coloured=True,
            ),
            Column(of="F", title="sessions: predicted", decimals=2, unit="short", width=152),
            Column(of="G", title="sessions: calibrated", decimals=2, unit="short", width=152),
            Column(of="H", title="sessions: observed", decimals=2, unit="short", width=152),
            Column(of="basis", title="told by", width=170),
        ],
        when_empty="No engine has a pool that is known",
        sort_by=[("off by", "down"), ("replica", "up")],
        hidden=["I"],
    )


def _drift() -> Json:
    observed, predicted, calibrated = (
        promql.metric(f"{origin}_pool_tokens") for origin in ("observed", "predicted", "calibrated")
    )
    raw = promql.pool_against("predicted")
    many = promql.MANY // 2
    return time_series(
        "Drift: observed against predicted",
        f"""By how much the real pool is larger (above 0) or smaller (below 0) than predicted (solid, {predicted.full_name}) and calibrated \
(dashed, {calibrated.full_name}); {observed.full_name} / that - 1, of the {many} engines furthest off. Across: the limits of the alert.

A step is a restart: another release, another flag, or something else on the GPU. Dashed nearer to 0 than solid: take the learned overhead \
over with kvheadroom calibrate.""",
        [
            query("A", promql.ends(raw, of=f"abs({raw})", many=many), f"raw: {ENGINE}"),
            query(
                "B",
                promql.ends(
                    promql.pool_against("calibrated"),
                    of=f"abs({promql.pool_against('calibrated')})",
                    many=many,
                ),
                f"calibrated: {ENGINE}",
            ),
        ],
        unit="percentunit",
        lowest=None,
        # Differences of a few percent should look as small as they are.
        custom={"axisSoftMin": -0.15, "axisSoftMax": 0.15},
        limits=[(-limits.PREDICTION_OFF, "transparent"), (limits.PREDICTION_OFF, "orange")],
        below="orange",
        overrides=[look("byFrameRefID", "B", DASHED)],
        when_empty="Nothing predicted to compare with",
        links=[runbook("KvHeadroomPredictionOff")],
    )


def _ledger() -> Json:
    predicted, calibrated, observed = (
        catalogue.PREDICTED_MEMORY,
        catalogue.CALIBRATED_MEMORY,
        catalogue.OBSERVED_MEMORY,
    )
    difference = f"{promql.lines(observed)} - {promql.lines(predicted)}"
    return table(
        "Ledger: memory of one GPU, term by term; furthest off first",
        f"""Each term as predicted ({predicted.full_name}; they add up to the GPU's total as CUDA reports it), as calibrated \
({calibrated.full_name}), and as the live pool tells ({observed.full_name}: pool and overhead only), and the difference to what was predicted, with and without its sign.

The largest difference is the term to mend: overhead by calibration, weights by weights_bytes, outside_utilization by gpu or hbm_bytes. Nothing \
for pools that a flag gives.""",
        [
            now("A", promql.lines(predicted)),
            now("B", promql.lines(calibrated)),
            now("C", promql.lines(observed)),
            now("D", difference),
            now("E", f"abs({difference})"),
        ],
        [
            *OF_ENGINE,
            Column(of="term", title="term", width=150),
            Column(of="A", title="predicted", unit="bytes", decimals=2, width=105),
            Column(of="B", title="calibrated", unit="bytes", decimals=2, width=105),
            Column(of="C", title="observed", unit="bytes", decimals=2, width=105),
            Column(of="D", title="difference", unit="bytes", decimals=2, width=105),
            Column(of="E", title="off by", unit="bytes", decimals=2, width=105),
        ],
        when_empty="No pool that is what HBM leaves over, or facts are missing",
        sort_by=[("off by", "down"), ("predicted", "down"), ("replica", "up")],
        hidden=["model_name"],
    )


def _overhead() -> Json:
    memory, parts = catalogue.PREDICTED_MEMORY, catalogue.PREDICTED_OVERHEAD
    low, high, samples = (
        promql.metric(name)
        for name in ("calibrated_overhead_low_bytes", "calibrated_overhead_high_bytes", "calibration_samples")
    )
    trust, clamped = catalogue.CALIBRATION_RELIABILITY, catalogue.CALIBRATION_CLAMPED
    overhead = 'term="overhead"'
    return table(
        "Overhead of one GPU: predicted, learned, observed",
        f"""predicted: the estimate ({memory.full_name}) and its parts ({parts.full_name}). learned: with the ends of the interval in which eight of \
ten starts are expected, of how many starts it is, and how far it can be trusted; cut: where it ran into what can be. observed: what the live \
pool leaves. From {_names(catalogue.CALIBRATED_MEMORY, low, high, samples, trust, clamped, catalogue.OBSERVED_MEMORY)}.

overhead_gb of the config takes GB (10^9 bytes); these are GiB, which are 7.4% more. spread: the starts differ by more than an estimate may \
be off, so do not plan with it.""",
        [
            now("A", promql.lines(memory, overhead, drop=["term"])),
            *(
                now(ref, promql.lines(parts, f'part="{part}"', drop=["part"]))
                for ref, part in zip("BCDEF", PARTS, strict=True)
            ),
            now("G", promql.lines(low)),
            now("H", promql.lines(catalogue.CALIBRATED_MEMORY, overhead, drop=["term"])),
            now("I", promql.lines(high)),
            now("J", promql.lines(samples)),
            now("K", promql.numbered(trust, "reliability", promql.RELIABILITY)),
            now("L", promql.numbered(clamped, "bound", ("below_zero", "nothing_left"))),
            now("M", promql.lines(catalogue.OBSERVED_MEMORY, overhead, drop=["term"])),
        ],
        [
            *OF_ENGINE,
            Column(of="A", title="predicted", unit="bytes", decimals=2, width=100),
            Column(of="M", title="observed", unit="bytes", decimals=2, width=100),
            Column(of="H", title="learned", unit="bytes", decimals=2, width=100),
            Column(of="G", title="from", unit="bytes", decimals=2, width=100),
            Column(of="I", title="to", unit="bytes", decimals=2, width=100),
            Column(of="J", title="starts", width=70),
            Column(
                of="K",
                title="trust",
                width=100,
                mappings=words(dict(enumerate(("spread", "one start", "good"), 1))),
                thresholds=judged((2, "yellow"), (3, "green"), below="orange"),
                coloured=True,
            ),
            Column(of="L", title="cut", width=100, mappings=words({1: "below zero", 2: "nothing left"})),
            *(
                Column(of=ref, title=part.replace("_", " "), unit="bytes", decimals=2, width=98)
                for ref, part in zip("BCDEF", PARTS, strict=True)
            ),
        ],
        when_empty="No overhead is predicted or learned here",
        sort_by=[("replica", "up"), ("engine", "up")],
        hidden=["model_name"],
    )


def _unexplained() -> Json:
    family = catalogue.UNEXPLAINED_OVERHEAD
    return time_series(
        "Unexplained overhead",
        f"""Overhead that the live pool tells less the predicted one ({family.full_name}); below 0 where there is less than predicted; of the {promql.MANY} \
engines with the most either way.

It is fixed at a start, so it moves by steps only. All of one model on one side: correct overhead_gb for them, or calibrate.""",
        [
            query(
                "A",
                promql.ends(promql.lines(family), of=f"abs({promql.lines(family)})"),
                ENGINE,
            )
        ],
        unit="bytes",
        lowest=None,
        custom={"axisCenteredZero": True},
        when_empty="No pool that is what HBM leaves over, or facts are missing",
    )


def _all_findings() -> str:
    # Those of a GPU have no engine and no model.
    family = catalogue.MEMORY_FINDING
    of_gpus = promql.chosen(family, 'engine=""', without=("model_name", "engine"))
    return f"{promql.lines(family)} or {promql.per_engine(of_gpus)}"


def _findings() -> Json:
    return table(
        "Memory findings",
        f"""Memory that is held for nothing, or will be missed: each finding with its bytes ({catalogue.MEMORY_FINDING.full_name}); those with a GPU are about that GPU, the others about the pool.

pool_above_demand: give the memory to something else. room_outside_budget: raise gpu_memory_utilization. foreign_memory: other processes hold \
more than the budget leaves. grew_since_start: the overhead grew. slowest_rank: one GPU of several holds all back.""",
        [now("A", promql.short_gpu(_all_findings()))],
        [
            Column(of="replica", title="replica", width=80),
            Column(of="finding", title="finding", width=150),
            Column(of="A", title="memory", unit="bytes", decimals=2, width=85),
            Column(of="short", title="GPU", width=110),
            Column(of="engine", title="engine", width=65),
        ],
        when_empty="No finding",
        sort_by=[("memory", "down")],
        hidden=["model_name", "gpu"],
        links=[runbook("KvHeadroomHbmHeldByOthers")],
    )


def _geometry() -> Json:
    names = (
        "predicted_blocks",
        "calibrated_blocks",
        "observed_blocks",
        "predicted_block_size_tokens",
        "observed_block_size_tokens",
        "predicted_bytes_per_token",
        "predicted_pool_bytes",
        "calibrated_pool_bytes",
        "observed_pool_bytes",
    )
    titles = (
        "blocks predicted",
        "blocks calibrated",
        "blocks observed",
        "tokens a block",
        "observed: a block",
        "per token",
        "pool predicted",
        "pool calibrated",
        "pool observed",
    )
    refs = "ABCDEFGHI"
    of_bytes = ("per token", "pool predicted", "pool calibrated", "pool observed")
    return table(
        "Blocks, their size, and the bytes of a token",
        f"""What the pool is made of: blocks, the null block included; tokens of a block; bytes that one more token of context takes on one GPU; bytes \
of the pool on one GPU. From {_names(*(promql.metric(name) for name in names))}.

Another block size than predicted: another attention backend, or a flag that is not known. The bytes observed are blocks times the bytes of the \
model's geometry, since vLLM exports none.""",
        [now(ref, promql.lines(name)) for ref, name in zip(refs, names, strict=True)],
        [
            *OF_ENGINE,
            *(
                Column(
                    of=ref,
                    title=title,
                    unit="bytes" if title in of_bytes else "locale",
                    decimals=2 if title in of_bytes else None,
                    width=130,
                )
                for ref, title in zip(refs, titles, strict=True)
            ),
        ],
        when_empty="No engine has a pool that is known",
        sort_by=[("replica", "up"), ("engine", "up")],
        hidden=["model_name"],
    )


def _facts() -> Json:
    missing, assumed = catalogue.MISSING_FACT, catalogue.ASSUMED_FACT
    return table(
        "Facts missing or assumed",
        f"""missing: a prediction needs the fact and nobody said it ({missing.full_name}). assumed: it was taken on trust, a default of vLLM or a \
guess ({assumed.full_name}).

The status page has the line of config for each. A wrong assumption is the first suspect where a prediction is off.""",
        [
            now("A", f"{promql.lines(missing)} + 1 or {promql.lines(assumed)}"),
        ],
        [
            Column(of="replica", title="replica", width=90),
            Column(of="engine", title="engine", width=65),
            Column(of="fact", title="fact", width=130),
            Column(
                of="A",
                title="is",
                width=85,
                mappings=words({1: "assumed", 2: "missing"}),
                thresholds=judged((2, "orange"), below="text"),
                coloured=True,
            ),
        ],
        when_empty="All facts are said",
        sort_by=[("is", "down"), ("replica", "up")],
        hidden=["model_name"],
    )


def _gpus() -> Json:
    terms, up = catalogue.GPU_MEMORY_TERM, catalogue.GPU_UP
    whole: Sequence[Metric] = (
        catalogue.GPU_TOTAL,
        catalogue.GPU_USED,
        catalogue.GPU_FREE,
        catalogue.GPU_RESERVED,
    )

    def bytes_of(titles: dict[str, str]) -> list[Column]:
        return [
            Column(of=ref, title=title, unit="bytes", decimals=1, width=95) for ref, title in titles.items()
        ]

    return table(
        "GPUs: who holds what",
        f"""Each GPU with the replica that it serves and how that is known, whether it gives numbers, its memory by NVML or DCGM, and, where it serves \
one replica on the daemon's machine, term by term: reserved, others, weights (predicted), KV pool (live), rest (the overhead as it is now), free. \
They add up to reserved, used and free. From {_names(up, *whole, terms, catalogue.GPU_INFO, catalogue.GPU_ASSIGNMENT)}.

others: what does not belong to the server; at its next start vLLM may find too little. rest much above the overhead of the ledger: it grew since the \
start.""",
        [
            now("A", promql.short_gpu(promql.gpus_named(promql.lines(up)))),
            *(now(ref, promql.lines(family)) for ref, family in zip("BCDE", whole, strict=True)),
            *(
                now(ref, promql.lines(terms, f'term="{term}"', drop=["term"]))
                for ref, term in zip("FGHIJK", GPU_TERMS, strict=True)
            ),
            now("L", promql.lines(catalogue.GPU_ASSIGNMENT)),
        ],
        [
            Column(of="replica", title="replica", width=130),
            Column(of="short", title="GPU", width=110),
            Column(of="name", title="name", width=140),
            Column(of="host", title="machine", width=85),
            Column(
                of="A",
                title="answers",
                width=80,
                mappings=words({0: "no", 1: "yes"}),
                thresholds=judged((1, "green"), below="red"),
                coloured=True,
            ),
            Column(of="by", title="known by", width=85),
            *bytes_of({"B": "total", "C": "used", "D": "free", "E": "reserved"}),
            *bytes_of({"G": "others", "H": "weights", "I": "KV pool", "J": "rest"}),
        ],
        when_empty="No GPU is known here (no driver, no DCGM-exporter)",
        sort_by=[("replica", "up"), ("GPU", "up")],
        hidden=["F", "K", "gpu"],
        links=[runbook("KvHeadroomGpuLost")],
    )


def _free() -> Json:
    family = catalogue.GPU_FREE
    return time_series(
        "Free memory of GPUs, those with the least",
        f"""Free memory ({family.full_name}), of the {promql.MANY} GPUs with the least. A gap: the engine on it sleeps, or the GPU gives no numbers.

Falling while the server runs: something grows beside the pool. Much free all the time: gpu_memory_utilization could be higher.""",
        [query("A", promql.short_gpu(promql.ends(promql.lines(family), lowest=True)), GPU)],
        unit="bytes",
        when_empty="No GPU is known here",
        links=[runbook("KvHeadroomGpuLost")],
    )


def _others() -> Json:
    others, total = catalogue.GPU_OTHERS, catalogue.GPU_TOTAL
    share = promql.per_engine(f"{promql.chosen(others)} / {promql.chosen(total)}")
    return time_series(
        "Held by other processes, most of them",
        f"""Share of a GPU's memory that anything but the replica's own processes holds ({others.full_name} / {total.full_name}), of the \
{promql.MANY} with the most. Across: the limit of the alert, which is silent where several servers share a GPU.

nvidia-smi on that machine says who it is. At its next start vLLM may find too little that is free, and refuse to start.""",
        [query("A", promql.short_gpu(promql.ends(share)), GPU)],
        unit="percentunit",
        limits=[(limits.HELD_BY_OTHERS, "orange")],
        when_empty="Not told by the driver, or no GPU is known here",
        links=[runbook("KvHeadroomHbmHeldByOthers")],
    )


def _samples() -> Json:
    family = catalogue.OVERHEAD_SAMPLE
    return table(
        "Starts as samples of the overhead",
        f"""The overhead that each engine's present start had, as the next start like it takes it, with what it depends on ({family.full_name}).

Only starts that are alike in all of these columns teach each other. Without a row an engine's start was no sample; the panel below \
says why.""",
        [now("A", promql.lines(family))],
        [
            *OF_ENGINE,
            Column(of="A", title="overhead", unit="bytes", decimals=2, width=100),
            Column(of="gpu", title="GPU", width=90),
            Column(of="parallelism", title="parallelism", width=100),
            Column(of="release", title="release", width=85),
            Column(of="weight_format", title="weights", width=110),
            Column(of="geometry", title="geometry", width=200),
            Column(of="settings", title="settings", width=300),
            Column(of="edition", title="edition", width=70),
            Column(of="start", title="start", width=180),
        ],
        when_empty="No start has stood still for 30 s and was a sample",
        sort_by=[("replica", "up"), ("engine", "up")],
        hidden=["model_name"],
    )


def _excluded() -> Json:
    family = catalogue.CALIBRATION_EXCLUDED
    return table(
        "Starts that were no sample",
        f"""How many starts were no sample of the overhead since the daemon's start, and why ({family.full_name}).

unknown: a fact is missing. foreign_memory: other processes held more than 5% of its GPU. pool_by_flag, asleep and pipeline_stages are as they \
should be.""",
        [now("A", f"{promql.lines(family)} > 0")],
        [
            Column(of="replica", title="replica"),
            Column(of="reason", title="reason"),
            Column(of="A", title="starts", width=70),
        ],
        when_empty="All starts were samples",
        sort_by=[("starts", "down")],
    )


def _xids() -> Json:
    family = catalogue.GPU_XIDS
    return table(
        "Xid errors of GPUs",
        f"""Errors that the driver told of since the daemon's start, by NVIDIA's Xid number ({family.full_name}), with the GPU's name \
({catalogue.GPU_INFO.full_name}).

46, 48, 64, 74, 79, 95, 119, 120 and 140 are of the GPU, its link or its firmware, and page somebody; 13, 31, 43 and 45 come of programs.""",
        [now("A", promql.short_gpu(promql.gpus_named(promql.lines(family))))],
        [
            Column(of="short", title="GPU", width=100),
            Column(of="name", title="name", width=120),
            Column(of="xid", title="Xid", width=60),
            Column(of="A", title="errors", width=75),
        ],
        when_empty="The driver told of none",
        sort_by=[("errors", "down")],
        hidden=["host", "gpu"],
        links=[runbook("KvHeadroomGpuXid")],
    )


def _ages() -> Json:
    family = catalogue.GPU_CHANGED_TIME
    return time_series(
        "Age of DCGM's numbers",
        f"""For how long the numbers of a DCGM-exporter's GPU have stood still (time since {family.full_name}), of the {promql.FEW} GPUs with the oldest.

DCGM reads a GPU every 30 s unless it is told otherwise. Many minutes: it hangs; restart it on that machine.""",
        [query("A", promql.short_gpu(promql.ends(f"time() - {promql.lines(family)}", many=promql.FEW)), GPU)],
        unit="s",
        when_empty="No GPU is told of by a DCGM-exporter",
    )
