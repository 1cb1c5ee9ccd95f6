"""Target groups in Prometheus's form -> replicas, each with what its source says of all."""

from typing import Any

from kvheadroom.access_settings import without_parameters
from kvheadroom.capacity.discovery import checked_labels
from kvheadroom.config import ConfigError, ReplicaConfig, ReplicaTemplate, replica_of
from kvheadroom.sources.target_groups import TargetGroup

MAX_SHOWN = 100
_NOT_FOLLOWED = {
    "__address__": "the target itself is the address",
    "__scrape_interval__": "all servers are scraped at `scrape_interval`",
    "__scrape_timeout__": "a scrape may take one `scrape_interval`",
}


def make_replicas(
    groups: tuple[TargetGroup, ...], template: ReplicaTemplate
) -> tuple[tuple[ReplicaConfig, ...], tuple[str, ...]]:
    """(replicas, a sentence for each target that is none). What is listed twice in the same words is one."""
    replicas: list[ReplicaConfig] = []
    first: dict[str, ReplicaConfig] = {}
    left_out: list[str] = []
    for group in groups:
        for target in group.targets:
            try:
                replica = replica_of(ReplicaConfig, template, _own(target, group.labels, template))
            except (ConfigError, ValueError) as error:
                left_out.append(f"{_shown(target)}: {error}")
                continue
            if first.setdefault(replica.replica, replica) != replica or first[replica.replica] is replica:
                replicas.append(replica)
    return tuple(replicas), tuple(left_out)


def _own(target: str, labels: dict[str, str], template: ReplicaTemplate) -> dict[str, Any]:
    """What a target and its labels say, as settings of a replica.

    Raises:
        ValueError: with what is wrong and what is allowed.
    """
    if "/" in target:
        raise ValueError(
            "a target is host:port; https is said by the label `__scheme__` or by `scheme`, a path by the label "
            "`__metrics_path__`"
        )
    for name in labels:
        if name in _NOT_FOLLOWED:
            raise ValueError(f"the label {name} is not followed here: {_NOT_FOLLOWED[name]}; leave it out")
        if name.startswith("__param_"):
            raise ValueError(
                "labels `__param_...` are not followed here: pages are asked for without parameters"
            )
    scheme = labels.get("__scheme__", template.scheme)
    if scheme not in ("http", "https"):
        raise ValueError("the label `__scheme__` is http or https")
    path = labels.get("__metrics_path__", "/metrics")
    if not path.startswith("/") or not path.endswith("/metrics"):
        raise ValueError(
            "the label `__metrics_path__` begins with / and ends with /metrics, as vLLM's path does"
        )
    own: dict[str, Any] = {
        "url": f"{scheme}://{target}{path.removesuffix('/metrics')}",
        # As Prometheus does it: an empty label is none, and what is left with two underscores is dropped.
        "labels": checked_labels(
            {name: text for name, text in labels.items() if text and not name.startswith("__")}
        ),
    }
    if "__replica__" in labels:
        own["name"] = labels["__replica__"]
    if "__pod__" in labels:
        own["pod"] = labels["__pod__"]
    return own


def _shown(target: str) -> str:
    """A target as it may be shown: without what could be a password or a key."""
    plain = without_parameters(target.rpartition("@")[2])
    return repr(plain[:MAX_SHOWN])
