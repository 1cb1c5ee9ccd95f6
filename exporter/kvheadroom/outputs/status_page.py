"""The status page at `/`: predicted, observed, difference, usage, headroom, and what is assumed or missing."""

from collections import defaultdict
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvheadroom import __version__
from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.fleet import FleetAssessment, ReplicaState, is_stale
from kvheadroom.capacity.gpu_ledger import gpu_ledgers, hbm_totals
from kvheadroom.capacity.ledger import Bounds
from kvheadroom.capacity.memory_findings import MemoryFinding, memory_findings
from kvheadroom.capacity.remote_gpus import RemoteGpu
from kvheadroom.outputs.numbers import (
    count,
    gigabytes,
    percent,
    seconds,
    signed,
    signed_percent,
    signed_size,
    size,
    span,
)


def render_page(fleet: FleetAssessment, now: float, notice: str | None, *, still: bool = False) -> str:
    """The page as HTML.

    Args:
        fleet: with stale numbers already withheld.
        still: do not load itself again: what is unfolded stays so.
    """
    targets = {replica.replica: None for replica in fleet.replicas} | {
        target.replica: target for target in fleet.targets
    }
    remote = fleet.remote_gpus
    runs = {gpu: set(replicas) for gpu, replicas in fleet.served().items()}
    remote_of: dict[str, list[RemoteGpu]] = {}
    for gpu in remote.gpus:
        for replica in runs.get(gpu.gpu, ()):
            remote_of.setdefault(replica, []).append(gpu)
    found: defaultdict[tuple[str, str], list[MemoryFinding]] = defaultdict(list)
    for finding in memory_findings(fleet):
        # Those of a GPU have no engine and stand with the replica.
        found[finding.replica, finding.engine].append(finding)
    return _TEMPLATE.render(
        fleet=fleet,
        found=found,
        hbm_of=lambda replica, facts: hbm_totals(fleet, replica, facts),
        on_gpus={(one.replica, one.gpu): one for one in gpu_ledgers(fleet)},
        remote_of=remote_of,
        remote_unassigned={one.replica: one.why for one in remote.runs.unassigned},
        asleep=fleet.gpus_asleep(),
        targets=targets,
        now=now,
        notice=notice,
        still=still,
        version=__version__,
        is_stale=is_stale,
    )


def usage_word(ratio: float | None) -> str:
    """The usage in a word, so that the bar's colour is not the only sign. A reading aid, no alert."""
    if ratio is None:
        return "not known"
    return "nearly full" if ratio >= 0.9 else "filling" if ratio >= 0.7 else "room left"


def bounds_words(bounds: Bounds | None) -> str:
    """How far off a predicted figure may be."""
    if bounds is None:
        return "not known"
    return "exact" if bounds.exact else f"{size(bounds.low_bytes)} to {size(bounds.high_bytes)}"


_STATE_WORDS = {
    ReplicaState.SERVING: "serving",
    ReplicaState.STARTING: "starting: its engine has no metrics yet",
    ReplicaState.SLEEPING: "sleeping",
    ReplicaState.SCALING: "scaling: it answers 503 to all but /health",
    ReplicaState.WEDGED: "wedged: /health fails and its counters stand still",
    ReplicaState.STATS_DISABLED: "running without metrics (--disable-log-stats)",
    ReplicaState.DOWN: "down",
}


def state_words(state: ReplicaState) -> str:
    """A state in words."""
    return _STATE_WORDS[state]


_LIMIT_WORDS = {
    None: "not known",
    Limit.KV_POOL: "the KV pool",
    Limit.MAX_NUM_SEQS: "max_num_seqs",
    Limit.TOKEN_BUDGET: "the tokens of a step (max_num_batched_tokens)",
    Limit.DEFERRED: "something else than room",
    Limit.NONE: "nothing",
}


def limit_words(limit: Limit | None) -> str:
    """A limit in words."""
    return _LIMIT_WORDS[limit]


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvheadroom.outputs", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "count": count,
        "signed": signed,
        "percent": percent,
        "signed_percent": signed_percent,
        "size": size,
        "signed_size": signed_size,
        "gigabytes": gigabytes,
        "bounds_words": bounds_words,
        "seconds": seconds,
        "span": span,
        "usage_word": usage_word,
        "state_words": state_words,
        "limit_words": limit_words,
    }
    environment.filters.update(filters)
    return environment


_TEMPLATE = _environment().get_template("status.html")
