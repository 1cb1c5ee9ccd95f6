"""Assessments and pages -> JSON. Absent is null; whole numbers carry no `.0`."""

import json
from typing import Any

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.calibration import CalibratedPrediction
from kvheadroom.capacity.facts import EngineFacts, Fact
from kvheadroom.capacity.fleet import FleetAssessment, GpuAssessment, ReplicaAssessment, is_stale
from kvheadroom.capacity.fleet_verdict import FleetVerdict, fleet_verdict, worst_first
from kvheadroom.capacity.gpu_assignment import GpuAssignments
from kvheadroom.capacity.gpu_ledger import HbmTotals, gpu_ledgers, hbm_totals
from kvheadroom.capacity.gpus import GpuFailure
from kvheadroom.capacity.memory_findings import memory_findings
from kvheadroom.capacity.offload_tier import OffloadTier
from kvheadroom.capacity.own_start import OwnStart
from kvheadroom.capacity.prefix_cache import Hits
from kvheadroom.capacity.readings import EngineSnapshot, VllmPage
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.warm_sessions import Warmth
from kvheadroom.outputs.fleet_words import verdict_sentence


def inspect_report(source: str, page: VllmPage) -> dict[str, Any]:
    """`inspect --json`: one record per engine of one page."""
    return {
        "source": source,
        "format": page.format,
        "engines": [_snapshot(engine) for engine in page.engines],
        "problems": [{"reason": str(p.reason), "detail": p.detail} for p in page.problems],
    }


def status_report(fleet: FleetAssessment, now: float, notice: str | None) -> dict[str, Any]:
    """`/api/v1/status`: every replica and engine, with every intermediate number.

    Args:
        fleet: with stale numbers already withheld.
    """
    return {
        "notice": notice,
        "now": now,
        "config_fault": None if fleet.reload is None else fleet.reload.fault,
        "shard": fleet.shard,
        "verdict": _verdict(fleet_verdict(fleet, now)),
        "worst_first": [
            {
                "replica": one.replica.replica,
                "engine": None if one.engine is None else one.engine.snapshot.engine,
                "verdict": str(one.verdict),
                "urgency": str(one.verdict.urgency),
                "why": one.why,
            }
            for one in worst_first(fleet, now)
        ],
        "replicas": [_replica(fleet, replica, now) for replica in fleet.replicas],
        "targets": [
            {"replica": target.replica, "source": target.source, "labels": dict(target.labels)}
            for target in fleet.targets
        ],
        "discoveries": [
            {
                "source": one.source,
                "up": one.up if one.attempted else None,
                "targets": one.targets,
                "left_out": list(one.left_out),
                "note": one.note,
                "last_success_at": one.last_success_at,
                "reason": None if one.failure is None else str(one.failure.reason),
                "detail": None if one.failure is None else one.failure.detail,
            }
            for one in fleet.discoveries
        ],
        "memory_findings": [
            {
                "finding": str(one.finding),
                "replica": one.replica,
                "engine": one.engine or None,
                "model_name": one.model_name or None,
                "gpu": one.gpu or None,
                "bytes": one.bytes,
                "why": one.why,
                "way_out": one.way_out,
                "gpu_memory_utilization": one.gpu_memory_utilization,
            }
            for one in memory_findings(fleet)
        ],
        "calibration": (kept := fleet.calibration)
        and {
            "path": kept.path,
            "up": kept.failure is None if kept.attempted else None,
            "reason": None if kept.failure is None else str(kept.failure.reason),
            "detail": None if kept.failure is None else kept.failure.detail,
            "note": kept.note or None,
            "samples": kept.samples,
        },
        "gpus": None if fleet.gpus is None else _gpus(fleet, fleet.gpus),
        "remote_gpus": _remote_gpus(fleet),
    }


def _verdict(verdict: FleetVerdict) -> dict[str, Any]:
    return {
        "sentence": verdict_sentence(verdict),
        "urgency": str(verdict.urgency),
        "servers": verdict.servers,
        "engines": verdict.engines,
        "server_verdicts": {str(one): number for one, number in verdict.server_verdicts},
        "engine_verdicts": {str(one): number for one, number in verdict.engine_verdicts},
        "room": (room := verdict.room)
        and {
            "session_tokens": room.session_tokens,
            "sessions": room.sessions,
            "engines": room.engines,
            "shorter_engines": room.shorter_engines,
            "unknown_engines": room.unknown_engines,
        },
    }


def to_json(report: dict[str, Any], *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity are a bug and raise ValueError."""
    return json.dumps(_whole(report), indent=indent, allow_nan=False)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return value


def _snapshot(engine: EngineSnapshot) -> dict[str, Any]:
    return {
        "engine": engine.engine,
        "model_name": engine.model_name,
        "num_blocks": engine.num_blocks,
        "block_size": engine.block_size,
        "pool_tokens": engine.pool_tokens,
        "max_concurrency": engine.max_concurrency,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "kv_usage_ratio": engine.kv_usage_ratio,
        "requests_running": engine.requests_running,
        "requests_waiting": engine.requests_waiting,
        "requests_waiting_by_reason": {
            "capacity": engine.requests_waiting_capacity,
            "deferred": engine.requests_waiting_deferred,
        },
        "preemptions_total": engine.preemptions_total,
        "prefix_cache_queries_total": engine.prefix_cache_queries_total,
        "prefix_cache_hits_total": engine.prefix_cache_hits_total,
        "external_prefix_cache_queries_total": engine.external_prefix_cache_queries_total,
        "external_prefix_cache_hits_total": engine.external_prefix_cache_hits_total,
        "prompt_tokens_total": engine.prompt_tokens_total,
        "generation_tokens_total": engine.generation_tokens_total,
    }


def _replica(fleet: FleetAssessment, replica: ReplicaAssessment, now: float) -> dict[str, Any]:
    return {
        "replica": replica.replica,
        "url": replica.url,
        "state": None if replica.state is None else str(replica.state),
        "restarts_total": replica.restarts_total,
        "events": [
            {"at": event.at, "kind": str(event.kind), "detail": event.detail} for event in replica.events
        ],
        "stale": is_stale(replica, now),
        "last_success_at": replica.last_success_at,
        "scrape_duration_seconds": replica.scrape_duration_seconds,
        "sources": [
            {
                "source": status.source,
                "up": status.up,
                "reason": None if status.failure is None else str(status.failure.reason),
                "detail": None if status.failure is None else status.failure.detail,
            }
            for status in replica.sources
        ],
        "problems": [{"reason": str(p.reason), "detail": p.detail} for p in replica.problems],
        "excluded_starts": {str(reason): count for reason, count in replica.excluded_starts_total},
        "kv_usage_of_engines": replica.usage
        and {"max_ratio": replica.usage.max_ratio, "mean_ratio": replica.usage.mean_ratio},
        "engines": [
            _engine(engine, hbm_totals(fleet, replica.replica, engine.facts), now)
            for engine in replica.engines
        ],
    }


def _gpus(fleet: FleetAssessment, gpus: GpuAssessment) -> dict[str, Any]:
    return {
        "driver_absent": gpus.reading.driver_absent,
        "taken_at": gpus.reading.taken_at,
        "gpus": [
            {
                "gpu": gpu.gpu,
                "name": gpu.name,
                "index": gpu.index,
                "parent": gpu.parent,
                "gpu_instance": gpu.gpu_instance,
                "compute_instance": gpu.compute_instance,
                "replicas": list(gpus.replicas_of(gpu.gpu)),
                "total_bytes": gpu.total_bytes,
                "reserved_bytes": gpu.reserved_bytes,
                "used_bytes": gpu.used_bytes,
                "free_bytes": fleet.free_bytes(gpu),
                "accounting": gpu.accounting,
                "xid_errors": _xids(gpus, gpu.gpu),
            }
            for gpu in gpus.reading.gpus
        ],
        "ledgers": [
            {
                "gpu": ledger.gpu,
                "replica": ledger.replica,
                "total_bytes": ledger.total_bytes,
                "terms": {str(term): size for term, size in ledger.terms},
                "note": ledger.note or None,
                "unknown": ledger.unknown or None,
            }
            for ledger in gpu_ledgers(fleet)
        ],
        "divided": list(gpus.reading.divided),
        **_failures_and_runs(gpus.reading.failures, gpus.runs),
        "assigned": [
            {
                "replica": one.replica,
                "gpu": one.gpu,
                "by": one.by,
                "others_bytes": gpus.others_bytes(one.gpu, one.replica),
            }
            for one in gpus.runs.assigned
        ],
    }


def _remote_gpus(fleet: FleetAssessment) -> dict[str, Any]:
    remote, served, asleep = fleet.remote_gpus, fleet.served(), fleet.gpus_asleep()
    return {
        "exporters": [
            {
                "source": one.source,
                "url": one.url,
                "up": one.failure is None if one.attempted else None,
                "taken_at": one.taken_at,
                "reason": None if one.failure is None else str(one.failure.reason),
                "detail": None if one.failure is None else one.failure.detail,
            }
            for one in remote.exporters
        ],
        "gpus": [
            {
                "gpu": gpu.gpu,
                "source": gpu.source,
                "name": gpu.name,
                "index": gpu.index,
                "host": gpu.host,
                "parent": gpu.parent,
                "gpu_instance": gpu.gpu_instance,
                "pods": [str(pod) for pod in gpu.pods],
                "replicas": served.get(gpu.gpu, []),
                "total_bytes": gpu.total_bytes,
                "reserved_bytes": gpu.reserved_bytes,
                "used_bytes": gpu.used_bytes,
                "free_bytes": None if gpu.gpu in asleep else gpu.free_bytes,
                "unknown": list(gpu.unknown),
                "last_xid": gpu.last_xid,
                "changed_at": gpu.changed_at,
            }
            for gpu in remote.gpus
        ],
        **_failures_and_runs(remote.failures, remote.runs),
        "assigned": [{"replica": one.replica, "gpu": one.gpu, "by": one.by} for one in remote.runs.assigned],
    }


def _failures_and_runs(failures: tuple[GpuFailure, ...], runs: GpuAssignments) -> dict[str, Any]:
    return {
        "failures": [
            {"gpu": failure.gpu, "reason": str(failure.reason), "detail": failure.detail}
            for failure in failures
        ],
        "not_here": [{"replica": one.replica, "gpu": one.gpu, "why": one.why} for one in runs.not_here],
        "unassigned": [{"replica": one.replica, "why": one.why} for one in runs.unassigned],
    }


def _xids(gpus: GpuAssessment, gpu: str) -> dict[str, int] | None:
    counts = gpus.xids_of(gpu)
    return None if counts is None else {str(xid): count for xid, count in counts}


def _engine(engine: Assessment, hbm: HbmTotals | None, now: float) -> dict[str, Any]:
    prediction, observation = engine.prediction, engine.observation
    layout, pool, budget = prediction.layout, prediction.pool, prediction.budget
    return {
        "engine": engine.snapshot.engine,
        "model_name": engine.snapshot.model_name,
        "taken_at": engine.taken_at,
        "sample_age_seconds": max(0.0, now - engine.taken_at),
        "predicted": {
            "pool_tokens": pool and pool.pool_tokens,
            "blocks": pool and pool.num_blocks,
            "block_size_tokens": layout and layout.block_size,
            "pool_bytes": pool and pool.pool_bytes,
            "bytes_per_token": layout and layout.bytes_per_token,
            "bytes_per_block": layout and layout.bytes_per_block,
            "max_concurrency": pool and pool.max_concurrency,
            "unused_bytes": pool and pool.unused_bytes,
            "boots": pool and pool.boots,
            "longest_bootable": pool and pool.longest_bootable,
            "layout": layout
            and {
                "stage_layers": list(layout.stage_layers),
                "how": layout.how,
                "kv_dtype": layout.kv_dtype,
                "num_kv_groups": layout.num_kv_groups,
            },
            "budget": budget
            and {
                "available_bytes": budget.available_bytes,
                "terms": [
                    {"term": term.term, "bytes": term.bytes, "origin": str(term.origin)}
                    for term in budget.terms
                ],
            },
            "cannot_predict": list(prediction.cannot_predict),
        },
        "calibrated": None if engine.calibrated is None else _calibrated(engine.calibrated),
        "own_start": None
        if engine.own_start is None
        else _own_start(engine.own_start, alone=engine.calibrated is None),
        "observed": {
            "pool_tokens": observation.pool_tokens,
            "pool_tokens_basis": observation.pool_tokens_basis,
            "blocks": observation.num_blocks,
            "block_size_tokens": observation.block_size,
            "pool_bytes": observation.pool_bytes,
            "max_concurrency": observation.max_concurrency,
            "used_blocks": observation.used_blocks,
            "free_blocks": observation.free_blocks,
            "used_tokens": observation.used_tokens,
            "free_tokens": observation.free_tokens,
            "unknown": observation.unknown,
        },
        "memory": (ledger := engine.ledger)
        and {
            "total_bytes": ledger.total_bytes,
            "total_from": ledger.total_from,
            "hbm": hbm
            and {
                "as_sold_bytes": hbm.as_sold_bytes,
                "cuda_bytes": hbm.cuda_bytes,
                "nvml_bytes": hbm.nvml_bytes,
            },
            "problem": ledger.problem or None,
            "terms": [
                {
                    "term": str(one.term),
                    "predicted_bytes": one.predicted_bytes,
                    "predicted_from": one.predicted_from,
                    "predicted_basis": str(one.predicted_basis),
                    "predicted_low_bytes": one.bounds and one.bounds.low_bytes,
                    "predicted_high_bytes": one.bounds and one.bounds.high_bytes,
                    "calibrated_bytes": one.calibrated_bytes,
                    "observed_bytes": one.observed_bytes,
                    "observed_from": one.observed_from or None,
                    "uncertainty_bytes": one.uncertainty_bytes,
                    "difference_bytes": one.difference_bytes,
                    "calibrated_difference_bytes": one.calibrated_difference_bytes,
                }
                for one in ledger.terms
            ],
            "overhead_parts": {str(part): size for part, size in ledger.overhead_parts},
            "unexplained_overhead_bytes": ledger.unexplained_bytes,
        },
        "difference": engine.difference
        and {
            "pool_tokens": engine.difference.tokens,
            "blocks": engine.difference.blocks,
            "pool_bytes": engine.difference.bytes,
            "ratio": engine.difference.ratio,
        },
        "sessions": [
            {
                "session_tokens": row.session_tokens,
                "blocks_per_session": row.blocks_per_session,
                "predicted": row.predicted,
                "calibrated": row.calibrated,
                "calibrated_fewest": row.calibrated_fewest,
                "calibrated_most": row.calibrated_most,
                "observed": row.observed,
                "whole_sessions": row.whole_sessions,
                "in_use": row.in_use,
                "headroom": row.headroom,
            }
            for row in engine.sessions
        ],
        "binding_limit": {
            "limit": None if engine.binding_limit.limit is None else str(engine.binding_limit.limit),
            "why": engine.binding_limit.why,
        },
        "forecast": {
            "preemption_probability": dict(engine.forecast.probabilities),
            "exhaustion_seconds": engine.forecast.exhaustion_seconds,
            "earliest_seconds": engine.forecast.earliest_seconds,
            "latest_seconds": engine.forecast.latest_seconds,
            "peak_blocks": engine.forecast.peak_blocks,
            "prefill_backlog_tokens": engine.forecast.prefill_backlog_tokens,
            "growth_blocks_per_second": None if (load := engine.forecast.load) is None else load.growth,
            "need_blocks": None if load is None else load.need,
            "why": engine.forecast.why,
            "unavailable": None if engine.forecast.unavailable is None else str(engine.forecast.unavailable),
        },
        "states": [{"state": str(found.state), "why": found.why} for found in engine.states],
        "token_occupancy": {
            "estimate_ratio": engine.occupancy.estimate_ratio,
            "least_ratio": engine.occupancy.least_ratio,
            "most_ratio": engine.occupancy.most_ratio,
            "unknown": engine.occupancy.unknown or None,
        },
        "hit_windows": [
            {
                "window": window.window,
                "seconds": window.seconds,
                "prefix_cache": _hits(window.local),
                "external_prefix_cache": _hits(window.external),
                "lmcache": _hits(window.lmcache),
            }
            for window in engine.hit_windows
        ],
        "warmth": _warmth(engine.warmth, engine.snapshot),
        "snapshot": _snapshot(engine.snapshot),
        "facts": _facts(engine.facts),
        "missing_facts": [
            {"fact": fact.fact, "why": fact.why, "way_out": fact.way_out} for fact in engine.facts.missing
        ],
        "assumed_facts": [{"fact": name, "assumed": what} for name, what in engine.facts.assumed()],
    }


def _warmth(warmth: Warmth, engine: EngineSnapshot) -> dict[str, Any]:
    host, content, need, use = warmth.host, warmth.content, warmth.host_need, warmth.host_use
    return {
        "host_tier": None
        if not isinstance(host, OffloadTier)
        else {
            "given_bytes": host.given_bytes,
            "chunk_bytes": host.chunk_bytes,
            "blocks_per_chunk": host.blocks_per_chunk,
            "copies": host.copies,
            "num_chunks": host.num_chunks,
            "bytes": host.bytes,
            "tokens": host.tokens,
            "notes": list(host.notes),
        },
        "host_tier_unknown": host if isinstance(host, str) else None,
        "host_need": need
        and {
            "low_bytes": need.low_bytes,
            "high_bytes": need.high_bytes,
            "in_shared_memory": need.in_shared_memory,
        },
        "host_use": use
        and {
            "total_bytes": use.total_bytes,
            "available_bytes": use.available_bytes,
            "shared_bytes": use.shared_bytes,
            "shm_total_bytes": use.shm_total_bytes,
            "shm_free_bytes": use.shm_free_bytes,
            "limit_bytes": use.limit_bytes,
            "limit_used_bytes": use.limit_used_bytes,
            "processes": use.processes,
            "processes_shared_bytes": use.processes_shared_bytes,
            "processes_anonymous_bytes": use.processes_anonymous_bytes,
            "engines": use.engines,
        },
        "capacities": [
            {
                "tier": str(one.tier),
                "bytes": one.bytes,
                "tokens": one.tokens,
                "is_told": one.is_told,
                "sessions": {str(tokens): fit for tokens, fit in one.sessions},
            }
            for one in warmth.capacities
        ],
        "lmcache_used": None
        if engine.lmcache_host_bytes is None and engine.lmcache_disk_bytes is None
        else {"host_bytes": engine.lmcache_host_bytes, "disk_bytes": engine.lmcache_disk_bytes},
        "hbm_blocks": content
        and {
            "referenced": content.referenced_blocks,
            "cached": content.cached_blocks,
            "blank": content.blank_blocks,
        },
        "retentions": [
            {
                "tier": str(one.tier),
                "window": one.window,
                "low_seconds": one.low_seconds,
                "high_seconds": one.high_seconds,
            }
            for one in warmth.retentions
        ],
        "answers": [
            {
                "tier": str(one.tier),
                "session_tokens": one.session_tokens,
                "idle_seconds": one.idle_seconds,
                "answer": str(one.answer),
            }
            for one in warmth.answers
        ],
        "rates": [
            {
                "window": one.window,
                "prefill_tokens_per_second": one.prefill_tokens_per_second,
                "load_bytes_per_second": one.load_bytes_per_second,
            }
            for one in warmth.rates
        ],
        "resume": [
            {
                "session_tokens": one.session_tokens,
                "recompute_seconds": one.recompute_seconds,
                "reload_seconds": one.reload_seconds,
            }
            for one in warmth.costs
        ],
        "evicted_block_idle_seconds": dict(warmth.measured_idle_seconds),
        "saved": [
            {"tier": str(one.tier), "tokens": one.tokens, "prefill_seconds": one.prefill_seconds}
            for one in warmth.saved
        ],
        "findings": [{"finding": str(finding), "detail": detail} for finding, detail in warmth.findings],
        "reuse": reuse_json(warmth.reuse) if isinstance(warmth.reuse, Reuse) else None,
        "reuse_unknown": warmth.reuse if isinstance(warmth.reuse, str) else None,
    }


def reuse_json(reuse: Reuse) -> dict[str, Any]:
    """What tiers of other sizes would find."""
    return {
        "seconds": reuse.seconds,
        "prompt_tokens": reuse.prompts,
        "found_in_pool_ratio": reuse.pool_ratio,
        "found_outside_ratio": reuse.outside_ratio,
        "oldest_seconds": reuse.oldest_seconds,
        "expected": [
            {
                "tier_bytes": one.size.bytes,
                "tier_tokens": one.size.tokens,
                "low_ratio": one.low_ratio,
                "ratio": one.ratio,
                "high_ratio": one.high_ratio,
            }
            for one in reuse.expected
        ],
        "last_hour": reuse.lately
        and {"found_ratio": reuse.lately.found_ratio, "expected_ratio": reuse.lately.expected_ratio},
    }


def _calibrated(calibrated: CalibratedPrediction) -> dict[str, Any]:
    pool, learned = calibrated.prediction.pool, calibrated.learned
    return {
        "pool_tokens": pool and pool.pool_tokens,
        "blocks": pool and pool.num_blocks,
        "pool_bytes": pool and pool.pool_bytes,
        "max_concurrency": pool and pool.max_concurrency,
        "fewest_blocks": calibrated.fewest and calibrated.fewest.num_blocks,
        "most_blocks": calibrated.most and calibrated.most.num_blocks,
        "overhead_bytes": learned.overhead_bytes,
        "low_bytes": learned.low_bytes,
        "high_bytes": learned.high_bytes,
        "samples": learned.samples,
        "measured_weights_bytes": learned.measured_weights_bytes,
        "reliability": str(learned.reliability),
        "clamped": None if learned.clamp is None else str(learned.clamp),
        "note": learned.note,
        "cannot_predict": list(calibrated.prediction.cannot_predict),
    }


def _own_start(own: OwnStart, *, alone: bool) -> dict[str, Any]:
    return {
        "start": own.start,
        "overhead_bytes": None if own.sample is None else own.sample.overhead_bytes,
        "uncertainty_bytes": None if own.sample is None else own.sample.uncertainty_bytes,
        "excluded": None if own.excluded is None else str(own.excluded.reason),
        "detail": None if own.excluded is None else own.excluded.detail,
        "why_alone": own.why_alone if alone else None,
    }


def _hits(hits: Hits | None) -> dict[str, Any] | None:
    if hits is None:
        return None
    return {
        "ratio": hits.ratio,
        "hit_tokens": hits.hit_tokens,
        "lookup_tokens": hits.lookup_tokens,
        "basis": hits.basis,
        "doubt": hits.doubt or None,
    }


def _facts(facts: EngineFacts) -> dict[str, Any]:
    names = (
        "version",
        "model_folder",
        "max_model_len",
        "platform",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "kv_cache_dtype",
        "dtype",
        "block_size",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "hbm_bytes",
        "weights_bytes",
        "overhead_bytes",
    )
    report: dict[str, Any] = {}
    for name in names:
        fact: Fact[Any] | None = getattr(facts, name)
        report[name] = fact and {"value": fact.value, "origin": str(fact.origin), "assumed": fact.assumed}
    report["flags"] = {
        flag.name: {"value": flag.value, "origin": str(flag.origin)} for flag in facts.told_flags
    }
    report["architecture"] = None if facts.model is None else facts.model.architecture
    report["release_rules"] = ".".join(map(str, facts.rules.taken_from))
    return report
