"""What the dashboards have around their panels: variables that narrow each other, and marks of what happened."""

from dashboards import promql
from dashboards.grafana import Json, annotation, datasource_variable, label_variable

# What tells lines apart comes first: a narrow panel cuts the end of a legend.
ENGINE = "engine {{engine}} of {{replica}}"

COLORS_OF_SERVERS = ((1, "green"), (2, "blue"), (5, "orange"), (6, "red"))
"""From which of `promql.REPLICA_STATES` on a server is drawn in which colour."""


def variables(*, one_replica: bool = False, idle_times: bool = False) -> list[Json]:
    """Those of every dashboard.

    Args:
        one_replica: whether it is about one server at a time.
        idle_times: whether it asks how long a session was idle.
    """
    found = [
        datasource_variable(),
        label_variable("job", "Job", promql.jobs_with_a_daemon(), of_label="job", several=True),
        label_variable("daemon", "Daemon", promql.daemons(), of_label="instance", several=False, hidden=True),
        label_variable(
            "replica", "Replica", promql.replicas_watched(), of_label="replica", several=not one_replica
        ),
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
    if idle_times:
        found.append(
            label_variable(
                "idle_seconds",
                "Idle for (seconds)",
                promql.idle_times_asked(),
                of_label="idle_seconds",
                several=False,
                sort=4,
            )
        )
    return found


def annotations() -> list[Json]:
    """Restarts, preemptions, and alerts while they fire."""
    return [
        annotation(
            "Restarts",
            promql.restarts(),
            title="restart",
            text="{{replica}} began anew: all sessions and the prefix cache are gone",
            color="blue",
        ),
        annotation(
            "Preemptions",
            promql.preemption_bursts(),
            title="preempting",
            text=ENGINE,
            color="purple",
        ),
        annotation(
            "Firing alerts",
            promql.alerts_firing(),
            title="{{alertname}}",
            text=ENGINE,
            color="orange",
            tags="severity",
        ),
        annotation(
            "Firing alerts of servers",
            promql.alerts_firing_of_servers(),
            title="{{alertname}}",
            text="{{replica}}",
            color="orange",
            tags="severity",
        ),
        annotation(
            "Firing alerts of kvheadroom",
            promql.alerts_firing_of_daemons(),
            title="{{alertname}}",
            text="{{instance}}",
            color="orange",
            tags="severity",
        ),
    ]
