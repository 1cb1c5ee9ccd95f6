"""The questions that the dashboard asks Prometheus. Layout is elsewhere.

Metric names come from the exporter's catalogue, so a metric that is renamed there breaks the build here.
"""

from kvheadroom.outputs import metric_catalogue as catalogue
from kvheadroom.outputs.metric_catalogue import Metric

# Variables of the dashboard that may hold several values, in the order of the chain. `job` is Prometheus's own
# label, the others are the exporter's.
CHOICES = ("job", "replica", "model_name", "engine")


def metric(name: str) -> Metric:
    """The family of that name, without the prefix.

    Raises:
        LookupError: the exporter has no such family.
    """
    for candidate in catalogue.CATALOGUE:
        if candidate.name == name:
            return candidate
    raise LookupError(f"the exporter's catalogue has no metric {name!r}")


# --- what the panels show ---


def sessions_predicted() -> str:
    """How many sessions of the chosen length fit by the prediction."""
    return _line_per_engine(_chosen(catalogue.PREDICTED_SESSIONS))


def sessions_observed() -> str:
    """How many sessions of the chosen length fit in the pool that the engine really has."""
    return _line_per_engine(_chosen(catalogue.OBSERVED_SESSIONS))


def sessions_in_use() -> str:
    """How many sessions of the chosen length would fill what is in use now."""
    return _line_per_engine(_chosen(catalogue.SESSIONS_IN_USE))


def kv_usage() -> str:
    """Which share of the pool running requests hold."""
    return _line_per_engine(_chosen(metric("kv_usage_ratio")))


def sessions_that_still_fit() -> str:
    """How many whole sessions of the chosen length fit in what is free now."""
    return _line_per_engine(_chosen(catalogue.SESSIONS_HEADROOM))


def requests_waiting_by_reason() -> str:
    """How many requests wait, and for what."""
    return _line_per_engine(_chosen(catalogue.WAITING_BY_REASON))


def requests_waiting_for_an_unknown_reason() -> str:
    """How many requests wait at engines whose vLLM gives no reason."""
    total, by_reason = _chosen(metric("requests_waiting")), _chosen(catalogue.WAITING_BY_REASON)
    return _line_per_engine(f"{total} unless ignoring (reason) {by_reason}")


def preemptions_since_the_point_before() -> str:
    """How many times an engine took the blocks of a running request since the point before."""
    return _line_per_engine(_increase(metric("preemptions_total")))


def pool_against_prediction() -> str:
    """By which share the pool is larger (above 0) or smaller (below 0) than predicted."""
    observed, predicted = _chosen(metric("observed_pool_tokens")), _chosen(metric("predicted_pool_tokens"))
    return _line_per_engine(f"{observed} / {predicted} - 1")


def preemption_probability() -> str:
    """How likely a request is preempted, by how soon."""
    return _line_per_engine(_chosen(catalogue.FORECAST_PROBABILITY))


def seconds_until_no_room(probability: str) -> str:
    """In how many seconds the next request finds no room: with a probability of 10%, 50% or 90%."""
    name = {"10%": "_earliest", "50%": "", "90%": "_latest"}[probability]
    return _line_per_engine(_chosen(metric(f"forecast_exhaustion{name}_seconds")))


def limits_that_bind() -> str:
    """What keeps requests waiting; nothing where none waits."""
    return _line_per_engine(_chosen(catalogue.BINDING_LIMIT, but='limit!="none"'))


def states_of_engines() -> str:
    """Which states with a name the engines are in."""
    return _line_per_engine(_chosen(catalogue.ENGINE_STATE))


def without_a_forecast() -> str:
    """Which engines have no forecast, and why; one that sleeps needs none."""
    return _line_per_engine(_chosen(catalogue.FORECAST_UNAVAILABLE, but='reason!="sleeping"'))


def alerts_firing() -> str:
    """Which alerts fire for the chosen engines."""
    return f'ALERTS{{alertstate="firing",{_matchers(CHOICES)}}}'


def alerts_firing_of_servers() -> str:
    """Those about a chosen server as a whole, which is down or loses a GPU: they have no engine."""
    return f'ALERTS{{alertstate="firing",{_matchers(("job", "replica"))},engine=""}}'


def alerts_firing_of_daemons() -> str:
    """Those about kvheadroom itself, and about GPUs by their name only."""
    return f'ALERTS{{alertstate="firing",{_matchers(("job",))},replica=""}}'


# --- what the variables offer ---


def jobs_with_a_daemon() -> str:
    """Where Prometheus scrapes kvheadroom, daemons whose replicas are all down included."""
    return catalogue.BUILD_INFO.full_name


def replicas_watched() -> str:
    """Which replicas are watched. One that is down has no engines but is still listed."""
    return _chosen(catalogue.SOURCE_UP, without=("replica",))


def engines_of_replicas() -> str:
    """Which engines answer, with their models. Its age is the one number that every engine has."""
    return _chosen(catalogue.SAMPLE_AGE, without=("model_name", "engine"))


def engines_of_models() -> str:
    """Which engines serve the chosen models."""
    return _chosen(catalogue.SAMPLE_AGE, without=("engine",))


def session_lengths_counted() -> str:
    """For which session lengths there are numbers, predicted or observed."""
    names = "|".join(
        family.full_name for family in (catalogue.PREDICTED_SESSIONS, catalogue.OBSERVED_SESSIONS)
    )
    return f'{{__name__=~"{names}",{_matchers(CHOICES)}}}'


# --- parts ---


def _chosen(family: Metric, *, without: tuple[str, ...] = (), but: str = "") -> str:
    """The family's series under the dashboard's variables, as far as it has their labels.

    Args:
        but: one more matcher.
    """
    labels = [
        label for label in CHOICES if (label == "job" or label in family.labels) and label not in without
    ]
    matchers = _matchers(labels)
    if "session_tokens" in family.labels:
        matchers += ',session_tokens="$session_tokens"'
    if but:
        matchers += f",{but}"
    return f"{family.full_name}{{{matchers}}}"


def _matchers(labels: tuple[str, ...] | list[str]) -> str:
    return ",".join(f'{label}=~"${label}"' for label in labels)


def _increase(family: Metric) -> str:
    if family.kind != "counter":
        raise ValueError(f"{family.full_name} is a {family.kind}; only counters have an increase")
    return f"increase({_chosen(family)}[$__rate_interval])"


def _line_per_engine(expression: str) -> str:
    # A daemon that moves to another pod gets another `instance`, and the engine would get a second line. All other
    # labels stay: somebody's `cluster` may be all that tells two replicas of one name apart.
    return f"max without (instance, pod) ({expression})"
