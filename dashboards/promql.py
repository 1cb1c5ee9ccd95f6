"""The questions that the dashboards ask Prometheus, and the parts they are made of. Layout is elsewhere.

Metric names come from the exporter's catalogue, so a metric that is renamed there breaks the build here.
"""

from collections.abc import Sequence

from dashboards import limits
from kvheadroom.outputs import metric_catalogue as catalogue
from kvheadroom.outputs.metric_catalogue import Metric

# Variables of the dashboards that choose among engines, in the order of the chain. `job` is Prometheus's own
# label, the others are the exporter's.
CHOICES = ("job", "replica", "model_name", "engine")
# Variables that choose one value of a label.
SINGLE = ("session_tokens", "idle_seconds")

WINDOWS = ("1h", "5m", "1m")
"""Of figures over a time that is past, the longest first."""
SHORT_WINDOWS = WINDOWS[1:]

MANY = 10
"""So many lines a panel has at most where a fleet could have more."""
FEW = 4
"""The same of a narrow panel, whose legend has one line for each."""

STUCK = ("scheduler_stalled", "reprefill_loop", "thrash")
TOO_SMALL = ("working_set_exceeds_pool", "pool_below_one_session")
NO_ANSWER = ("down", "wedged", "stats_disabled")


def metric(name: str) -> Metric:
    """The family of that name, without the prefix.

    Raises:
        LookupError: the exporter has no such family.
    """
    for candidate in catalogue.CATALOGUE:
        if candidate.name == name:
            return candidate
    raise LookupError(f"the exporter's catalogue has no metric {name!r}")


# --- parts ---


def chosen(family: Metric | str, but: str = "", *, without: Sequence[str] = ()) -> str:
    """The family's series under the dashboard's variables, as far as it has their labels.

    Args:
        family: or its name.
        but: one more matcher.
        without: variables that do not count.
    """
    if isinstance(family, str):
        family = metric(family)
    labels = [
        label for label in CHOICES if (label == "job" or label in family.labels) and label not in without
    ]
    matchers = _matchers(labels)
    for label in SINGLE:
        if label in family.labels and label not in without:
            matchers += f',{label}="${label}"'
    if but:
        matchers += f",{but}"
    return f"{family.full_name}{{{matchers}}}"


def _matchers(labels: Sequence[str]) -> str:
    return ",".join(f'{label}=~"${label}"' for label in labels)


def per_engine(expression: str, *drop: str) -> str:
    """One value for each engine, whichever daemon tells it.

    A daemon that moves to another pod gets another `instance`, and the engine would get a second line. All other
    labels stay: somebody's `cluster` may be all that tells two replicas of one name apart.

    Args:
        expression: with one value for each engine and each value of the labels to drop.
        drop: labels that go as well; of their values the largest counts.
    """
    return f"max without ({', '.join(('instance', 'pod', *drop))}) ({expression})"


def lines(family: Metric | str, but: str = "", *, drop: Sequence[str] = ()) -> str:
    """The family, one value for each engine."""
    return per_engine(chosen(family, but), *drop)


def longest(family: Metric, but: str = "", *, drop: Sequence[str] = (), of: Sequence[str] = WINDOWS) -> str:
    """The family over the longest window that is full: after a start none is, later the shortest is.

    Args:
        family: with a label `window`.
        but: one more matcher.
        drop: labels that go beside it.
        of: windows, the one that is wanted first.
    """
    more = f",{but}" if but else ""
    found = (lines(family, _is("window", window) + more, drop=["window", *drop]) for window in of)
    return f"({' or '.join(found)})"


def increase(family: Metric | str, over: str = "$__rate_interval", but: str = "") -> str:
    """By how much a counter rose.

    Raises:
        ValueError: it is none.
    """
    return f"increase({_counter(family, but)}[{over}])"


def rate(family: Metric | str, but: str = "") -> str:
    """By how much a counter rises each second.

    Raises:
        ValueError: it is none.
    """
    return f"rate({_counter(family, but)}[$__rate_interval])"


def _counter(family: Metric | str, but: str) -> str:
    if isinstance(family, str):
        family = metric(family)
    if family.kind != "counter":
        raise ValueError(f"{family.full_name} is a {family.kind}; only counters have an increase")
    return chosen(family, but)


def ends(expression: str, *, of: str | None = None, lowest: bool = False, many: int = MANY) -> str:
    """Those of many lines that were highest, or lowest, within the time that is shown: the same ones all along.

    Args:
        expression: the lines.
        of: what they are chosen by, if not by themselves.
        lowest: whether the lowest are meant.
        many: how many at most.
    """
    by, over = ("bottomk", "min_over_time") if lowest else ("topk", "max_over_time")
    return f"{expression} and {by}({many}, {over}(({of or expression})[$__range:$__interval] @ end()))"


def counted(expression: str, among: str) -> str:
    """How many there are: 0 where there is something to count among, and nothing where there is not."""
    return f"count({expression}) or 0 * count({among})"


def in_gigabytes(expression: str, label: str, to: str) -> str:
    """With one more label: the size that another one has in bytes as a person reads it, where it is a whole number of GB.

    Args:
        label: whose value is a number of bytes.
        to: name of the new one.
    """
    shown = f'label_replace({expression}, "{to}", "$1 B", "{label}", "(.+)")'
    shown = f'label_replace({shown}, "{to}", "$1 GB", "{label}", "(.+)000000000")'
    return f'label_replace({shown}, "{to}", "none", "{label}", "0")'


def numbered(family: Metric, label: str, values: Sequence[str], but: str = "") -> str:
    """For each engine the number of the label's value: 1 for the first. Of several at once the last counts.

    Args:
        family: whose samples are 1.
        label: what tells them apart.
        values: in their order.
        but: one more matcher.
    """
    more = f",{but}" if but else ""
    numbers = (
        f"{number} * {chosen(family, _is(label, value) + more)}"
        for number, value in enumerate(values, start=1)
    )
    return per_engine(" or ".join(numbers), label)


# --- what the panels show ---

LIMITS = ("none", "deferred", "token_budget", "max_num_seqs", "kv_pool")
"""What keeps requests waiting, the pool last."""
WAITS_FOR = dict(enumerate(("nobody waits", "deferred", "token budget", "max_num_seqs", "KV pool"), start=1))

NO_FORECAST = ("sleeping", "watched_too_short", "tokens_per_block_unknown", "not_told")
WARM = ("no", "perhaps", "yes")
RELIABILITY = ("spread", "one_sample", "good")
REPLICA_STATES = ("serving", "sleeping", "starting", "scaling", "stats_disabled", "wedged", "down")


def trouble() -> str:
    """How bad it is with each engine, and with each server that does not answer; `TROUBLE` has the words."""
    waits_or_full = f"{chosen('requests_waiting')} > 0 or {chosen('kv_usage_ratio')} > {limits.FULL:g}"
    probability = catalogue.FORECAST_PROBABILITY
    imminent = f"{chosen(probability, _is('horizon', limits.IMMINENT))} >= {limits.IMMINENT_PROBABILITY:g}"
    soon = f"{chosen(probability, _is('horizon', limits.SOON))} >= {limits.SOON_PROBABILITY:g}"
    state = catalogue.ENGINE_STATE
    of_engines = per_engine(
        f"5 * {chosen(state, _one_of('state', STUCK))} "
        f"or 4 * {chosen(state, _is('state', 'preempting'))} "
        f"or 3 + 0 * ({imminent} and ignoring (horizon) ({waits_or_full})) "
        f"or 2 + 0 * ({soon}) "
        f"or {chosen(state, _one_of('state', TOO_SMALL))} "
        f"or 0 * {chosen(catalogue.SAMPLE_AGE)}",
        "state",
        "horizon",
    )
    of_servers = lines(catalogue.REPLICA_STATE, _one_of("state", NO_ANSWER), drop=["state"])
    return f"{of_engines} or 6 * {of_servers}"


NEVER = limits.SOON_SECONDS + 1

TROUBLE = {
    0: "none",
    1: "pool too small",
    2: "preempts in 10 min",
    3: "preempts in 30 s",
    4: "preempting",
    5: "stuck",
    6: "no answer",
}


def engines_in_trouble() -> str:
    """How many engines and servers have some."""
    return counted(f"({trouble()}) > 0", trouble())


def soonest_without_room() -> str:
    """Seconds until the first engine has no room for the next request, or `NEVER` where all have room for ten minutes."""
    never = chosen(catalogue.FORECAST_PROBABILITY, f'horizon="{limits.SOON}"')
    return f"min({chosen('forecast_exhaustion_seconds')}) or 0 * max({never}) + {NEVER}"


def preemptions_in_five_minutes() -> str:
    """How often each engine took the blocks of a running request, rounded as the alert does it."""
    return per_engine(f"round({increase('preemptions_total', '5m')})")


def restarts_in_an_hour() -> str:
    """How often each server began anew, rounded as the alert does it."""
    return per_engine(f"round({increase(catalogue.REPLICA_RESTARTS, '1h')})")


def waiting_for_an_unknown_reason() -> str:
    """How many requests wait at engines whose vLLM gives no reason."""
    return per_engine(
        f"{chosen('requests_waiting')} unless ignoring (reason) {chosen(catalogue.WAITING_BY_REASON)}"
    )


def pool_against(prediction: str) -> str:
    """By which share the pool is larger (above 0) or smaller (below 0) than predicted, or calibrated."""
    observed, said = chosen("observed_pool_tokens"), chosen(f"{prediction}_pool_tokens")
    return per_engine(f"{observed} / {said} - 1")


def without_prediction() -> str:
    """Engines that answer and have no predicted pool."""
    return f"{lines(catalogue.SAMPLE_AGE)} unless {lines('predicted_pool_tokens')}"


def gpus_named(expression: str) -> str:
    """With the name and the machine of each GPU beside a value for each."""
    info = f"topk by (job, gpu) (1, max by (job, gpu, name, host) ({chosen(catalogue.GPU_INFO)}))"
    return f"{expression} * on (job, gpu) group_left (name, host) {info}"


def short_gpu(expression: str) -> str:
    """With a label `short`: the beginning of each GPU's long identifier, and the instance of a MIG device."""
    return f'label_replace({expression}, "short", "$1$2", "gpu", "((?:MIG-)?(?:GPU-)?[^-/]+)[^/]*(.*)")'


# --- annotations ---


def restarts() -> str:
    """Which servers began anew."""
    return f"{per_engine(increase(catalogue.REPLICA_RESTARTS))} > 0"


def preemption_bursts() -> str:
    """Which engines preempt."""
    return lines(catalogue.ENGINE_STATE, 'state="preempting"')


def alerts_firing() -> str:
    """Which alerts fire for the chosen engines."""
    return f'ALERTS{{alertstate="firing",{_matchers(CHOICES)}}}'


def alerts_firing_of_servers() -> str:
    """Those about a chosen server as a whole, which is down or loses a GPU: they have no engine."""
    return f'ALERTS{{alertstate="firing",{_matchers(("job", "replica"))},engine=""}}'


def alerts_firing_of_daemons() -> str:
    """Those about kvheadroom itself, and about GPUs by their name only."""
    return f'ALERTS{{alertstate="firing",{_matchers(("job",))},replica=""}}'


def alerts_firing_of_all() -> str:
    """All of them once, with the labels that tell them apart."""
    every = f"{alerts_firing()} or {alerts_firing_of_servers()} or {alerts_firing_of_daemons()}"
    return f"max by (alertname, severity, replica, engine, gpu, reason, source, instance) ({every})"


# --- what the variables offer ---


def jobs_with_a_daemon() -> str:
    """Where Prometheus scrapes kvheadroom, daemons whose replicas are all down included."""
    return catalogue.BUILD_INFO.full_name


def daemons() -> str:
    """Which daemons there are, to link to."""
    return chosen(catalogue.BUILD_INFO)


def replicas_watched() -> str:
    """Which replicas are watched. One that is down has no engines but is still listed."""
    return chosen(catalogue.SOURCE_UP, without=("replica",))


def engines_of_replicas() -> str:
    """Which engines answer, with their models. Its age is the one number that every engine has."""
    return chosen(catalogue.SAMPLE_AGE, without=("model_name", "engine"))


def engines_of_models() -> str:
    """Which engines serve the chosen models."""
    return chosen(catalogue.SAMPLE_AGE, without=("engine",))


def session_lengths_counted() -> str:
    """For which session lengths there are numbers, predicted or observed."""
    names = "|".join(
        family.full_name for family in (catalogue.PREDICTED_SESSIONS, catalogue.OBSERVED_SESSIONS)
    )
    return f'{{__name__=~"{names}",{_matchers(CHOICES)}}}'


def idle_times_asked() -> str:
    """For which idle times the daemon says whether a session is warm."""
    return chosen(catalogue.SESSION_WARM, without=("idle_seconds",))


def _is(label: str, value: str) -> str:
    return f'{label}="{value}"'


def _one_of(label: str, values: Sequence[str]) -> str:
    return f'{label}=~"{"|".join(values)}"'
