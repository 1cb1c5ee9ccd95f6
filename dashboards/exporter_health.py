"""How the exporter itself is doing: the row that is folded away at the end of the fleet."""

from dashboards import promql
from dashboards.grafana import (
    DASHED,
    Column,
    Json,
    Line,
    judged,
    look,
    now,
    query,
    runbook,
    table,
    time_series,
    words,
)
from kvheadroom.outputs import metric_catalogue as catalogue


def lines() -> list[Line]:
    """Its panels."""
    return [
        (8, [(12, _daemons()), (12, _sources())]),
        (9, [(8, _ages()), (8, _durations()), (8, _failures())]),
        (8, [(8, _problems()), (8, _lost()), (8, _discovery())]),
    ]


def _daemons() -> Json:
    info, successful, at = (
        catalogue.BUILD_INFO,
        catalogue.RELOAD_SUCCESSFUL,
        catalogue.RELOAD_SUCCESS_TIME,
    )
    status_page = {
        "title": "Status page of ${__data.fields.instance}",
        "url": "http://${__data.fields.instance}/",
        "targetBlank": True,
    }
    return table(
        "Daemons",
        f"""Each kvheadroom with its version ({info.full_name}), whether its config file was fine when it was last read \
({successful.full_name}), and since when the config in use is ({at.full_name}).

refused: the config before is in use as a whole; kvheadroom check --config FILE says what is wrong. A click leads to the daemon's page.""",
        [
            now("A", f"max by (instance, version) ({promql.chosen(info)})"),
            now("B", f"max by (instance) ({promql.chosen(successful)})"),
            now("C", f"1000 * max by (instance) ({promql.chosen(at)})"),
        ],
        [
            Column(of="instance", title="daemon", width=130, links=[status_page]),
            Column(of="version", title="version", width=90),
            Column(
                of="B",
                title="config",
                width=90,
                mappings=words({0: "refused", 1: "fine"}),
                thresholds=judged((1, "green"), below="red"),
                coloured=True,
            ),
            Column(of="C", title="in use since", unit="dateTimeAsIso", width=180),
        ],
        when_empty="Prometheus has no kvheadroom under this job",
        sort_by=[("config", "up")],
        links=[runbook("KvHeadroomConfigReloadFailed")],
    )


def _sources() -> Json:
    family = catalogue.SOURCE_UP
    return table(
        "Sources that do not answer",
        f"""What the daemon could not read when it last asked ({family.full_name}): metrics, version, models, model_files of a server; \
without a replica lists of servers, drivers and DCGM-exporters.

The daemon's status page has the reason and the way out of each; kvheadroom check asks them all once.""",
        [now("A", f"{promql.lines(family)} == 0 or {_of_no_replica()} == 0")],
        [
            Column(of="replica", title="replica"),
            Column(of="source", title="source"),
            Column(of="A", title="answers", width=90, mappings=words({0: "no"})),
        ],
        when_empty="All sources answer",
        sort_by=[("replica", "up")],
        links=[runbook("KvHeadroomSourceFailing")],
    )


def _of_no_replica() -> str:
    of_none = promql.chosen(catalogue.SOURCE_UP, 'replica=""', without=("replica",))
    return promql.per_engine(of_none)


def _ages() -> Json:
    family = catalogue.SAMPLE_AGE
    return time_series(
        "Age of the numbers",
        f"""How old an engine's numbers were when Prometheus came ({family.full_name}), of the {promql.FEW} engines with the oldest. After three \
scrape intervals they are withheld, and the line has a gap.

Gaps again and again: the server answers too slowly, or not at all; see the failures.""",
        [query("A", promql.ends(promql.lines(family), many=promql.FEW), "engine {{engine}} of {{replica}}")],
        unit="s",
        when_empty="No engine answers",
        links=[runbook("KvHeadroomSampleStale")],
    )


def _durations() -> Json:
    family = catalogue.SCRAPE_DURATION
    return time_series(
        "Time of a scrape",
        f"""How long a server took for its page in the last scrape that succeeded ({family.full_name}), of the {promql.FEW} slowest servers.

As long as the scrape interval: raise scrape_interval. vLLM answers its page between two steps, so a busy one takes longer.""",
        [query("A", promql.ends(promql.lines(family), many=promql.FEW), "{{replica}}")],
        unit="s",
        when_empty="No scrape succeeded",
    )


def _failures() -> Json:
    family = catalogue.SOURCE_FAILURES
    of_none = promql.chosen(family, 'replica=""', without=("replica",))
    return time_series(
        "Failures of sources, by reason",
        f"""How often a source failed ({family.full_name}), all servers together; dashed: sources that are no server's.

docs/troubleshooting.md has what to do for each reason. One now and then is a restart.""",
        [
            query("A", f"sum by (source, reason) ({promql.increase(family)})", "{{source}}: {{reason}}"),
            query(
                "B",
                f"sum by (source, reason) (increase({of_none}[$__rate_interval]))",
                "{{source}} (no server's): {{reason}}",
            ),
        ],
        unit="short",
        overrides=[look("byFrameRefID", "B", DASHED)],
        custom={"axisSoftMax": 5},
        when_empty="No source has failed",
        links=[runbook("KvHeadroomSourceFailing")],
    )


def _problems() -> Json:
    family = catalogue.PAGE_PROBLEMS
    return time_series(
        "Problems of pages",
        f"""What was wrong with the pages of all servers ({family.full_name}); one that stays counts at every scrape.

What it concerns was dropped, or is shown with doubt. The status page has the words for each reason.""",
        [query("A", f"sum by (reason) ({promql.increase(family)})", "{{reason}}")],
        unit="short",
        custom={"axisSoftMax": 5},
        when_empty="All pages were in order",
        links=[runbook("KvHeadroomPageProblem")],
    )


def _lost() -> Json:
    family = catalogue.LOST_METRIC
    return table(
        "Metrics of vLLM that are gone",
        f"""Metrics that a server's page had earlier and has no more, as after an upgrade ({family.full_name}). What is made of them is absent.

Look in vLLM's release notes for the new name.""",
        [now("A", promql.lines(family))],
        [Column(of="replica", title="replica"), Column(of="metric", title="metric", width=220)],
        when_empty="None is gone",
        sort_by=[("replica", "up")],
        hidden=["A"],
        links=[runbook("KvHeadroomMetricsLost")],
    )


def _discovery() -> Json:
    targets, left_out, at, info = (
        catalogue.DISCOVERY_TARGETS,
        catalogue.DISCOVERY_LEFT_OUT,
        catalogue.DISCOVERY_SUCCESS_TIME,
        catalogue.REPLICA_INFO,
    )
    return table(
        "Where servers come from",
        f"""How many servers are watched because of each source (source of {info.full_name}, and {targets.full_name}), how many of a list \
are left out ({left_out.full_name}), and how long ago it was last read whole ({at.full_name}).

Left out: no server's address, one that is watched already, or access with a fault; the status page has a sentence for each.""",
        [
            now("A", f"count by (source) ({promql.chosen(info)})"),
            now("B", f"max by (source) ({promql.chosen(targets)})"),
            now("C", f"max by (source) ({promql.chosen(left_out)})"),
            now("D", f"time() - max by (source) ({promql.chosen(at)})"),
        ],
        [
            Column(of="source", title="source", width=140),
            Column(of="A", title="watched", width=80),
            Column(of="B", title="of its list", width=90),
            Column(of="C", title="left out", width=90),
            Column(of="D", title="last read", unit="s", decimals=0, width=100),
        ],
        when_empty="No server is watched",
        sort_by=[("source", "up")],
    )
