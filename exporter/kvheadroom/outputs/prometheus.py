"""A fleet assessment -> Prometheus exposition. Families are made afresh at every collect: what vanished, vanishes."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvheadroom import __version__
from kvheadroom.capacity.assessment import Assessment, FleetAssessment, ReplicaAssessment
from kvheadroom.outputs import metric_catalogue as m

Family = CounterMetricFamily | GaugeMetricFamily
Sample = tuple[tuple[str, ...], float]


def exposition(
    fleet: FleetAssessment, now: float, accept: str, *, only: frozenset[str] | None = None
) -> tuple[bytes, str]:
    """(body, content type) of our own `/metrics`.

    Args:
        fleet: with stale numbers already withheld.
        now: unix seconds, for the samples' age.
        accept: the reader's Accept header; OpenMetrics is given to those who ask for it.
        only: names of the metrics that are wanted, None for all.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fleet(fleet, now, only))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Fleet(Collector):
    def __init__(self, fleet: FleetAssessment, now: float, only: frozenset[str] | None) -> None:
        self._fleet = fleet
        self._now = now
        self._only = only

    def describe(self) -> Iterable[Family]:
        return ()

    def collect(self) -> Iterator[Family]:
        for metric in m.CATALOGUE:
            if self._only is not None and metric.full_name not in self._only:
                continue
            samples = list(self._samples(metric))
            if samples:
                yield _family(metric, samples)

    def _samples(self, metric: m.Metric) -> Iterator[Sample]:
        if metric is m.BUILD_INFO:
            yield (__version__,), 1.0
        elif metric in _FLEET_SAMPLES or metric in _REPLICA_SAMPLES:
            if metric in _REPLICA_SAMPLES:
                for replica in self._fleet.replicas:
                    yield from _REPLICA_SAMPLES[metric](replica)
            if metric in _FLEET_SAMPLES:
                yield from _FLEET_SAMPLES[metric](self._fleet)
        else:
            for replica in self._fleet.replicas:
                for engine in replica.engines:
                    labels = (replica.replica, engine.snapshot.engine, engine.snapshot.model_name or "")
                    for more, value in self._engine_samples(metric, engine):
                        yield (*labels, *more), value

    def _engine_samples(self, metric: m.Metric, engine: Assessment) -> Iterator[Sample]:
        if metric is m.SAMPLE_AGE:
            yield (), max(0.0, self._now - engine.taken_at)
        elif metric.value is not None:
            value = metric.value(engine)
            if value is not None:
                yield (), value
        else:
            yield from _ENGINE_SAMPLES[metric](engine)


def _family(metric: m.Metric, samples: list[Sample]) -> Family:
    family: Family
    if metric.kind == "counter":
        family = CounterMetricFamily(metric.full_name, metric.help, labels=metric.labels)
    else:
        family = GaugeMetricFamily(metric.full_name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _sources(replica: ReplicaAssessment) -> Iterator[Sample]:
    for status in replica.sources:
        yield (replica.replica, status.source), float(status.up)


def _failures(replica: ReplicaAssessment) -> Iterator[Sample]:
    for (source, reason), count in replica.failures_total:
        yield (replica.replica, source, reason), count


def _problems(replica: ReplicaAssessment) -> Iterator[Sample]:
    for reason, count in replica.problems_total:
        yield (replica.replica, reason), count


def _lost_metrics(replica: ReplicaAssessment) -> Iterator[Sample]:
    for metric in replica.lost_metrics:
        yield (replica.replica, metric), 1.0


def _duration(replica: ReplicaAssessment) -> Iterator[Sample]:
    if replica.scrape_duration_seconds is not None:
        yield (replica.replica,), replica.scrape_duration_seconds


def _state(replica: ReplicaAssessment) -> Iterator[Sample]:
    if replica.state is not None:
        yield (replica.replica, replica.state), 1.0


def _restarts(replica: ReplicaAssessment) -> Iterator[Sample]:
    if replica.attempted:
        yield (replica.replica,), replica.restarts_total


def _reload_successful(fleet: FleetAssessment) -> Iterator[Sample]:
    if fleet.reload is not None:
        yield (), float(fleet.reload.fault is None)


def _reload_success_time(fleet: FleetAssessment) -> Iterator[Sample]:
    if fleet.reload is not None:
        yield (), fleet.reload.last_success_at


def _nvml_up(fleet: FleetAssessment) -> Iterator[Sample]:
    # Without a driver there is nothing to be up: a normal state.
    if fleet.gpus is not None and not fleet.gpus.reading.driver_absent:
        yield ("", "nvml"), float(fleet.gpus.failure is None)


def _nvml_failures(fleet: FleetAssessment) -> Iterator[Sample]:
    if fleet.gpus is not None:
        for reason, count in fleet.gpus.failures_total:
            yield ("", "nvml", reason), count


def _gpu_memory(field: str) -> Callable[[FleetAssessment], Iterator[Sample]]:
    def samples(fleet: FleetAssessment) -> Iterator[Sample]:
        for gpu in () if fleet.gpus is None else fleet.gpus.reading.gpus:
            value = fleet.free_bytes(gpu) if field == "free_bytes" else getattr(gpu, field)
            if value is not None:
                for labels in _gpu_labels(fleet, gpu.gpu):
                    yield labels, value

    return samples


def _gpu_up(fleet: FleetAssessment) -> Iterator[Sample]:
    if fleet.gpus is not None:
        up = {gpu.gpu: 1.0 for gpu in fleet.gpus.reading.gpus}
        down = {failure.gpu: 0.0 for failure in fleet.gpus.reading.failures if failure.gpu is not None}
        for gpu, value in {**up, **down}.items():
            for labels in _gpu_labels(fleet, gpu):
                yield labels, value
        for missing in fleet.gpus.runs.not_here:
            yield (missing.replica, missing.gpu), 0.0


def _gpu_info(fleet: FleetAssessment) -> Iterator[Sample]:
    for gpu in () if fleet.gpus is None else fleet.gpus.reading.gpus:
        instances = ("" if one is None else str(one) for one in (gpu.gpu_instance, gpu.compute_instance))
        yield (gpu.gpu, gpu.name, str(gpu.index), gpu.parent or "", *instances, gpu.accounting), 1.0


def _gpu_assignments(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in () if fleet.gpus is None else fleet.gpus.runs.assigned:
        yield (one.replica, one.gpu, one.by), 1.0


def _gpu_others(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in () if fleet.gpus is None else fleet.gpus.runs.others:
        yield (one.replica, one.gpu), one.used_bytes


def _gpu_xids(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in () if fleet.gpus is None else fleet.gpus.reading.xids:
        yield (one.gpu, str(one.xid)), one.count


def _gpu_labels(fleet: FleetAssessment, gpu: str) -> list[tuple[str, str]]:
    replicas = () if fleet.gpus is None else fleet.gpus.replicas_of(gpu)
    return [(replica, gpu) for replica in replicas or ("",)]


def _sessions(field: str) -> Callable[[Assessment], Iterator[Sample]]:
    def samples(engine: Assessment) -> Iterator[Sample]:
        for row in engine.sessions:
            value = getattr(row, field)
            if value is not None:
                yield (str(row.session_tokens),), value

    return samples


def _waiting(engine: Assessment) -> Iterator[Sample]:
    for reason in ("capacity", "deferred"):
        value = getattr(engine.snapshot, f"requests_waiting_{reason}")
        if value is not None:
            yield (reason,), value


def _pool_basis(engine: Assessment) -> Iterator[Sample]:
    if engine.observation.pool_tokens_basis is not None:
        yield (engine.observation.pool_tokens_basis,), 1.0


def _missing(engine: Assessment) -> Iterator[Sample]:
    for fact in engine.facts.missing:
        yield (fact.fact,), 1.0


def _assumed(engine: Assessment) -> Iterator[Sample]:
    for fact, _ in engine.facts.assumed():
        yield (fact,), 1.0


_REPLICA_SAMPLES: dict[m.Metric, Callable[[ReplicaAssessment], Iterator[Sample]]] = {
    m.SOURCE_UP: _sources,
    m.SOURCE_FAILURES: _failures,
    m.PAGE_PROBLEMS: _problems,
    m.LOST_METRIC: _lost_metrics,
    m.SCRAPE_DURATION: _duration,
    m.REPLICA_STATE: _state,
    m.REPLICA_RESTARTS: _restarts,
}
_FLEET_SAMPLES: dict[m.Metric, Callable[[FleetAssessment], Iterator[Sample]]] = {
    m.RELOAD_SUCCESSFUL: _reload_successful,
    m.RELOAD_SUCCESS_TIME: _reload_success_time,
    m.SOURCE_UP: _nvml_up,
    m.SOURCE_FAILURES: _nvml_failures,
    m.GPU_INFO: _gpu_info,
    m.GPU_ASSIGNMENT: _gpu_assignments,
    m.GPU_TOTAL: _gpu_memory("total_bytes"),
    m.GPU_RESERVED: _gpu_memory("reserved_bytes"),
    m.GPU_USED: _gpu_memory("used_bytes"),
    m.GPU_FREE: _gpu_memory("free_bytes"),
    m.GPU_OTHERS: _gpu_others,
    m.GPU_UP: _gpu_up,
    m.GPU_XIDS: _gpu_xids,
}
_ENGINE_SAMPLES: dict[m.Metric, Callable[[Assessment], Iterator[Sample]]] = {
    m.PREDICTED_SESSIONS: _sessions("predicted"),
    m.OBSERVED_SESSIONS: _sessions("observed"),
    m.SESSIONS_IN_USE: _sessions("in_use"),
    m.SESSIONS_HEADROOM: _sessions("headroom"),
    m.WAITING_BY_REASON: _waiting,
    m.OBSERVED_POOL_BASIS: _pool_basis,
    m.MISSING_FACT: _missing,
    m.ASSUMED_FACT: _assumed,
}
