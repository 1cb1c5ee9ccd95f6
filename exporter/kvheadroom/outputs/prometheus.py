"""A fleet assessment -> Prometheus exposition. Families are made afresh at every collect: what vanished, vanishes."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvheadroom import __version__
from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.fleet import FleetAssessment, ReplicaAssessment
from kvheadroom.capacity.gpu_ledger import gpu_ledgers
from kvheadroom.capacity.ledger import Term
from kvheadroom.capacity.memory_findings import memory_findings
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.warmth import Tier
from kvheadroom.outputs import metric_catalogue as m

Family = CounterMetricFamily | GaugeMetricFamily
Sample = tuple[tuple[str, ...], float]
T = TypeVar("T")


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
            if metric is m.REPLICA_INFO:
                yield from _replica_info(self._fleet)
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


def _other_sources_up(fleet: FleetAssessment) -> Iterator[Sample]:
    # Without a driver there is nothing to be up: a normal state.
    if fleet.gpus is not None and not fleet.gpus.reading.driver_absent:
        yield ("", "nvml"), float(fleet.gpus.failure is None)
    if fleet.calibration is not None and fleet.calibration.attempted:
        yield ("", "calibration"), float(fleet.calibration.failure is None)
    for exporter in fleet.remote_gpus.exporters:
        if exporter.attempted:
            yield ("", exporter.source), float(exporter.failure is None)
    for one in fleet.discoveries:
        if one.attempted:
            yield ("", one.source), float(one.up)


def _other_sources_failures(fleet: FleetAssessment) -> Iterator[Sample]:
    if fleet.gpus is not None:
        for reason, count in fleet.gpus.failures_total:
            yield ("", "nvml", reason), count
    if fleet.calibration is not None:
        for why, count in fleet.calibration.failures_total:
            yield ("", "calibration", why), count
    for exporter in fleet.remote_gpus.exporters:
        for why, count in exporter.failures_total:
            yield ("", exporter.source, why), count
    for one in fleet.discoveries:
        for why, count in one.failures_total:
            yield ("", one.source, why), count


def _discovery_targets(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in fleet.discoveries:
        if one.targets is not None:
            yield (one.source,), one.targets


def _discovery_left_out(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in fleet.discoveries:
        if one.targets is not None:
            yield (one.source,), len(one.left_out)


def _discovery_success_time(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in fleet.discoveries:
        if one.last_success_at is not None:
            yield (one.source,), one.last_success_at


def _replica_info(fleet: FleetAssessment) -> Iterator[Family]:
    """Each sample has the labels of its own replica."""
    family = GaugeMetricFamily(m.REPLICA_INFO.full_name, m.REPLICA_INFO.help)
    for target in fleet.targets:
        labels = {**dict(target.labels), "replica": target.replica, "source": target.source}
        family.add_sample(m.REPLICA_INFO.full_name, labels, 1.0)
    if fleet.targets:
        yield family


def _gpu_memory(field: str) -> Callable[[FleetAssessment], Iterator[Sample]]:
    def samples(fleet: FleetAssessment) -> Iterator[Sample]:
        withheld = fleet.gpus_asleep() if field == "free_bytes" else frozenset()
        values = ((gpu.gpu, getattr(gpu, field)) for gpu in fleet.all_gpus if gpu.gpu not in withheld)
        yield from _by_gpu(fleet, values)

    return samples


def _gpu_changed_time(fleet: FleetAssessment) -> Iterator[Sample]:
    yield from _by_gpu(fleet, ((gpu.gpu, gpu.changed_at) for gpu in fleet.remote_gpus.gpus))


def _gpu_up(fleet: FleetAssessment) -> Iterator[Sample]:
    local, remote = fleet.gpus, fleet.remote_gpus
    failures = (*(() if local is None else local.reading.failures), *remote.failures)
    up = {gpu.gpu: 1.0 for gpu in fleet.all_gpus}
    down = {failure.gpu: 0.0 for failure in failures if failure.gpu is not None}
    yield from _by_gpu(fleet, {**up, **down}.items())
    for missing in (*(() if local is None else local.runs.not_here), *remote.runs.not_here):
        yield (missing.replica, missing.gpu), 0.0


def _by_gpu(fleet: FleetAssessment, values: Iterable[tuple[str, float | None]]) -> Iterator[Sample]:
    """A sample for each replica on the GPU; for a GPU that serves none, one without."""
    served = fleet.served()
    for gpu, value in values:
        if value is not None:
            for replica in served.get(gpu, ("",)):
                yield (replica, gpu), value


def _gpu_info(fleet: FleetAssessment) -> Iterator[Sample]:
    for gpu in () if fleet.gpus is None else fleet.gpus.reading.gpus:
        instances = ("" if one is None else str(one) for one in (gpu.gpu_instance, gpu.compute_instance))
        yield (
            (gpu.gpu, gpu.name, str(gpu.index), gpu.parent or "", *instances, gpu.accounting, "nvml", ""),
            1.0,
        )
    for one in fleet.remote_gpus.gpus:
        index, instance = ("" if number is None else str(number) for number in (one.index, one.gpu_instance))
        labels = (one.gpu, one.name, index, one.parent or "", instance, "", "v2", one.source, one.host or "")
        yield labels, 1.0


def _gpu_assignments(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in fleet.assignments():
        yield (one.replica, one.gpu, one.by), 1.0


def _gpu_terms(fleet: FleetAssessment) -> Iterator[Sample]:
    for ledger in gpu_ledgers(fleet):
        for term, size in ledger.terms:
            yield (ledger.replica, ledger.gpu, term), size


def _memory_findings(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in memory_findings(fleet):
        yield (one.replica, one.engine, one.model_name, one.gpu, one.finding), one.bytes


def _gpu_others(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in () if fleet.gpus is None else fleet.gpus.runs.others:
        yield (one.replica, one.gpu), one.used_bytes


def _gpu_xids(fleet: FleetAssessment) -> Iterator[Sample]:
    for one in () if fleet.gpus is None else fleet.gpus.reading.xids:
        yield (one.gpu, str(one.xid)), one.count


def _of_each(
    rows: Callable[[Assessment], Iterable[T]], labels: Callable[[T], tuple[str, ...]]
) -> Callable[[str], Callable[[Assessment], Iterator[Sample]]]:
    """Of some rows of an engine, the samples of one field: a sample for each row that has a value there."""

    def of_field(field: str) -> Callable[[Assessment], Iterator[Sample]]:
        def samples(engine: Assessment) -> Iterator[Sample]:
            for row in rows(engine):
                value = getattr(row, field)
                if value is not None:
                    yield labels(row), value

        return samples

    return of_field


_sessions = _of_each(lambda engine: engine.sessions, lambda row: (str(row.session_tokens),))
_capacities = _of_each(lambda engine: engine.warmth.capacities, lambda row: (row.tier,))
_retentions = _of_each(lambda engine: engine.warmth.retentions, lambda row: (row.tier, row.window))
_rates = _of_each(lambda engine: engine.warmth.rates, lambda row: (row.window,))
_saved = _of_each(lambda engine: engine.warmth.saved, lambda row: (row.tier,))
_expected_hits = _of_each(
    lambda engine: reuse.expected if isinstance(reuse := engine.warmth.reuse, Reuse) else (),
    lambda row: (str(row.size.bytes),),
)


def _predicted_memory(engine: Assessment) -> Iterator[Sample]:
    for one in () if engine.ledger is None else engine.ledger.terms:
        yield (one.term,), one.predicted_bytes


def _calibrated_memory(engine: Assessment) -> Iterator[Sample]:
    for one in () if engine.ledger is None else engine.ledger.terms:
        if one.calibrated_bytes is not None:
            yield (one.term,), one.calibrated_bytes


def _reliability(engine: Assessment) -> Iterator[Sample]:
    if engine.calibrated is not None:
        yield (engine.calibrated.learned.reliability,), 1.0


def _clamped(engine: Assessment) -> Iterator[Sample]:
    if engine.calibrated is not None and engine.calibrated.learned.clamp is not None:
        yield (engine.calibrated.learned.clamp,), 1.0


def _overhead_sample(engine: Assessment) -> Iterator[Sample]:
    sample = None if engine.own_start is None else engine.own_start.sample
    if sample is not None:
        key = sample.key
        labels = (key.geometry, key.weight_format, key.gpu, key.parallelism, key.release, key.settings)
        yield (sample.start, *labels, str(engine.sample_edition)), sample.overhead_bytes


def _excluded_starts(replica: ReplicaAssessment) -> Iterator[Sample]:
    for reason, count in replica.excluded_starts_total:
        yield (replica.replica, reason), count


def _observed_memory(engine: Assessment) -> Iterator[Sample]:
    for one in () if engine.ledger is None else map(engine.ledger.of, (Term.OVERHEAD, Term.KV_POOL)):
        if one.observed_bytes is not None:
            yield (one.term,), one.observed_bytes


def _predicted_overhead(engine: Assessment) -> Iterator[Sample]:
    for part, size in () if engine.ledger is None else engine.ledger.overhead_parts:
        yield (part,), size


def _tier_sessions(engine: Assessment) -> Iterator[Sample]:
    for one in engine.warmth.capacities:
        for tokens, fit in one.sessions:
            yield (one.tier, str(tokens)), fit


def _tier_used(engine: Assessment) -> Iterator[Sample]:
    for tier in ("host", "disk"):
        value = getattr(engine.snapshot, f"lmcache_{tier}_bytes")
        if value is not None:
            yield (tier,), value


def _tier_host(engine: Assessment) -> Iterator[Sample]:
    need = engine.warmth.host_need
    if need is not None and need.bytes is not None:
        yield (), need.bytes


def _host_shared(replica: ReplicaAssessment) -> Iterator[Sample]:
    # All its engines are of the same processes.
    uses = (engine.warmth.host_use for engine in replica.engines)
    use = next((use for use in uses if use is not None), None)
    if use is not None and use.processes_shared_bytes is not None:
        yield (replica.replica,), use.processes_shared_bytes


def _hbm_blocks(engine: Assessment) -> Iterator[Sample]:
    content = engine.warmth.content
    for name in () if content is None else ("referenced", "cached", "blank"):
        value = getattr(content, f"{name}_blocks")
        if value is not None:
            yield (name,), value


def _warm_answers(engine: Assessment) -> Iterator[Sample]:
    for one in engine.warmth.answers:
        # All its digits: a label that is rounded may be that of another time too.
        idle = str(one.idle_seconds).removesuffix(".0")
        yield (one.tier, str(one.session_tokens), idle, one.answer), 1.0


def _evicted_idle(engine: Assessment) -> Iterator[Sample]:
    for window, value in engine.warmth.measured_idle_seconds:
        yield (window,), value


def _resume(engine: Assessment) -> Iterator[Sample]:
    for one in engine.warmth.costs:
        for by in ("recompute", "reload"):
            value = getattr(one, f"{by}_seconds")
            if value is not None:
                yield (str(one.session_tokens), by), value


def _found_ratio(engine: Assessment) -> Iterator[Sample]:
    reuse = engine.warmth.reuse
    if isinstance(reuse, Reuse):
        yield (Tier.HBM,), reuse.pool_ratio
        yield (Tier.HOST,), reuse.outside_ratio


def _reuse_seconds(engine: Assessment) -> Iterator[Sample]:
    if isinstance(engine.warmth.reuse, Reuse):
        yield (), engine.warmth.reuse.seconds


def _warm_findings(engine: Assessment) -> Iterator[Sample]:
    for found in dict.fromkeys(finding for finding, _ in engine.warmth.findings):
        yield (found,), 1.0


def _waiting(engine: Assessment) -> Iterator[Sample]:
    for reason in ("capacity", "deferred"):
        value = getattr(engine.snapshot, f"requests_waiting_{reason}")
        if value is not None:
            yield (reason,), value


def _binding_limit(engine: Assessment) -> Iterator[Sample]:
    if engine.binding_limit.limit is not None:
        yield (engine.binding_limit.limit,), 1.0


def _states(engine: Assessment) -> Iterator[Sample]:
    for found in engine.states:
        yield (found.state,), 1.0


def _probabilities(engine: Assessment) -> Iterator[Sample]:
    for horizon, ratio in engine.forecast.probabilities.items():
        yield (horizon,), ratio


def _no_forecast(engine: Assessment) -> Iterator[Sample]:
    if engine.forecast.unavailable is not None:
        yield (engine.forecast.unavailable,), 1.0


def _hit_ratios(field: str) -> Callable[[Assessment], Iterator[Sample]]:
    def samples(engine: Assessment) -> Iterator[Sample]:
        for window in engine.hit_windows:
            hits = getattr(window, field)
            # A number on a graph carries no doubt beside it.
            if hits is not None and not hits.doubt:
                yield (window.window,), hits.ratio

    return samples


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
    m.CALIBRATION_EXCLUDED: _excluded_starts,
    m.LOST_METRIC: _lost_metrics,
    m.OBSERVED_HOST_SHARED: _host_shared,
    m.SCRAPE_DURATION: _duration,
    m.REPLICA_STATE: _state,
    m.REPLICA_RESTARTS: _restarts,
}
_FLEET_SAMPLES: dict[m.Metric, Callable[[FleetAssessment], Iterator[Sample]]] = {
    m.RELOAD_SUCCESSFUL: _reload_successful,
    m.RELOAD_SUCCESS_TIME: _reload_success_time,
    m.SOURCE_UP: _other_sources_up,
    m.SOURCE_FAILURES: _other_sources_failures,
    m.DISCOVERY_TARGETS: _discovery_targets,
    m.DISCOVERY_LEFT_OUT: _discovery_left_out,
    m.DISCOVERY_SUCCESS_TIME: _discovery_success_time,
    m.GPU_INFO: _gpu_info,
    m.GPU_ASSIGNMENT: _gpu_assignments,
    m.GPU_TOTAL: _gpu_memory("total_bytes"),
    m.GPU_RESERVED: _gpu_memory("reserved_bytes"),
    m.GPU_USED: _gpu_memory("used_bytes"),
    m.GPU_FREE: _gpu_memory("free_bytes"),
    m.GPU_MEMORY_TERM: _gpu_terms,
    m.MEMORY_FINDING: _memory_findings,
    m.GPU_CHANGED_TIME: _gpu_changed_time,
    m.GPU_OTHERS: _gpu_others,
    m.GPU_UP: _gpu_up,
    m.GPU_XIDS: _gpu_xids,
}
_ENGINE_SAMPLES: dict[m.Metric, Callable[[Assessment], Iterator[Sample]]] = {
    m.PREDICTED_SESSIONS: _sessions("predicted"),
    m.OBSERVED_SESSIONS: _sessions("observed"),
    m.SESSIONS_IN_USE: _sessions("in_use"),
    m.SESSIONS_HEADROOM: _sessions("headroom"),
    m.PREDICTED_MEMORY: _predicted_memory,
    m.OBSERVED_MEMORY: _observed_memory,
    m.PREDICTED_OVERHEAD: _predicted_overhead,
    m.CALIBRATED_SESSIONS: _sessions("calibrated"),
    m.CALIBRATED_MEMORY: _calibrated_memory,
    m.CALIBRATION_RELIABILITY: _reliability,
    m.CALIBRATION_CLAMPED: _clamped,
    m.OVERHEAD_SAMPLE: _overhead_sample,
    m.TIER_BYTES: _capacities("bytes"),
    m.TIER_TOKENS: _capacities("tokens"),
    m.TIER_SESSIONS: _tier_sessions,
    m.TIER_USED: _tier_used,
    m.PREDICTED_TIER_HOST: _tier_host,
    m.HBM_BLOCKS: _hbm_blocks,
    m.RETENTION_LOW: _retentions("low_seconds"),
    m.RETENTION_HIGH: _retentions("high_seconds"),
    m.SESSION_WARM: _warm_answers,
    m.EVICTED_IDLE: _evicted_idle,
    m.PREFILL_RATE: _rates("prefill_tokens_per_second"),
    m.LOAD_RATE: _rates("load_bytes_per_second"),
    m.RESUME: _resume,
    m.SAVED_TOKENS: _saved("tokens"),
    m.SAVED_SECONDS: _saved("prefill_seconds"),
    m.WARM_FINDING: _warm_findings,
    m.EXPECTED_HITS: _expected_hits("ratio"),
    m.EXPECTED_HITS_LOW: _expected_hits("low_ratio"),
    m.EXPECTED_HITS_HIGH: _expected_hits("high_ratio"),
    m.FOUND_RATIO: _found_ratio,
    m.REUSE_SECONDS: _reuse_seconds,
    m.WAITING_BY_REASON: _waiting,
    m.BINDING_LIMIT: _binding_limit,
    m.ENGINE_STATE: _states,
    m.FORECAST_PROBABILITY: _probabilities,
    m.FORECAST_UNAVAILABLE: _no_forecast,
    m.PREFIX_CACHE_HIT_RATIO: _hit_ratios("local"),
    m.EXTERNAL_PREFIX_CACHE_HIT_RATIO: _hit_ratios("external"),
    m.LMCACHE_HIT_RATIO: _hit_ratios("lmcache"),
    m.OBSERVED_POOL_BASIS: _pool_basis,
    m.MISSING_FACT: _missing,
    m.ASSUMED_FACT: _assumed,
}
