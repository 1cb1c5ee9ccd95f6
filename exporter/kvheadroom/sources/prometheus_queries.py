"""What is asked of a Prometheus, and how its answers become pages as vLLM serves them: the daemon's code reads those. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvheadroom.sources.finished_requests import FINISHED_REQUESTS
from kvheadroom.sources.metric_names import NAMES
from kvheadroom.sources.prometheus_api import RangeSeries

_OF_TARGET = frozenset({"job", "instance"})
_LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
START = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose metrics a history is made of.

    Attributes:
        present: the metric that every engine has.
        server_labels: which labels tell one server from another.
        renamed: name on the page that is made -> name in Prometheus.
        kept: labels that go to the page; None for all but those of the target.
        words: for people.
        lacks: what cannot be told of such a history though the daemon told it then, a sentence; None for nothing.
    """

    present: str
    server_labels: tuple[str, ...]
    renamed: Mapping[str, str]
    kept: frozenset[str] | None
    words: str
    lacks: str | None = None

    def queries(self, select: str, rule_metrics: Iterable[str]) -> dict[str, str]:
        """Name on the page -> PromQL.

        Args:
            select: matchers that narrow it, empty for everything.
            rule_metrics: what rules are made of; of other programs only what comes from the same target.
        """
        present = f"{self.present}{{{select}}}"
        queries = {name: f"{told}{{{select}}}" for name, told in self.renamed.items()}
        if self.kept is None:
            queries[START] = f"{START} and on (job, instance) {present}"
            for name in sorted(set(rule_metrics) - queries.keys() - {"up"}):
                if name.startswith("vllm:"):
                    queries[name] = f"{name}{{{select}}}"
                elif not name.startswith("kvheadroom_"):
                    queries[name] = f"{name} and on (job, instance) {present}"
        return queries

    def server(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Which server a series is of."""
        return tuple(labels.get(name, "") for name in self.server_labels)

    def series_text(self, name: str, labels: Mapping[str, str]) -> str:
        """A series as it stands on a page: the start of the process without labels, as the daemon looks for it.

        A name that no page could have before Prometheus 3 (`k8s.pod.name`) was put there by Prometheus: vLLM has none.
        """
        if name == START:
            return name
        kept = {
            key: value
            for key, value in labels.items()
            if key != "__name__"
            and (key not in _OF_TARGET if self.kept is None else key in self.kept)
            and _LABEL.fullmatch(key)
        }
        return name + "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in kept.items()) + "}"


VLLM = Origin(
    present="vllm:num_requests_running",
    server_labels=("job", "instance"),
    renamed={f"vllm:{name}": f"vllm:{name}" for name in (*NAMES, FINISHED_REQUESTS)},
    kept=None,
    words="vLLM's own metrics",
)
OWN = Origin(
    present="kvheadroom_requests_running",
    server_labels=("replica",),
    renamed={
        "vllm:kv_cache_usage_perc": "kvheadroom_kv_usage_ratio",
        "vllm:num_requests_running": "kvheadroom_requests_running",
        "vllm:num_requests_waiting": "kvheadroom_requests_waiting",
        "vllm:num_requests_waiting_by_reason": "kvheadroom_requests_waiting_by_reason",
        "vllm:num_preemptions_total": "kvheadroom_preemptions_total",
        "vllm:prefix_cache_queries_total": "kvheadroom_prefix_cache_queries_tokens_total",
        "vllm:prefix_cache_hits_total": "kvheadroom_prefix_cache_hits_tokens_total",
        "vllm:prompt_tokens_total": "kvheadroom_prompt_tokens_total",
        "vllm:generation_tokens_total": "kvheadroom_generation_tokens_total",
    },
    kept=frozenset({"engine", "model_name", "reason"}),
    words="what kvheadroom exported of vLLM",
    lacks=(
        "only kvheadroom was scraped, so the size of the pool and what finished are not known, and no forecast can be made anew; "
        "states and limits that need them look absent. Scrape vLLM itself too to have them judged"
    ),
)
ORIGINS = (VLLM, OWN)


def pages(origin: Origin, answers: Mapping[str, Sequence[RangeSeries]], steps: int) -> "Pages":
    """Answers of one part of the history, by server."""
    series: dict[tuple[str, ...], list[tuple[str, Mapping[int, str]]]] = {}
    for name, found in answers.items():
        for one in found:
            text = origin.series_text(name, one.labels)
            series.setdefault(origin.server(one.labels), []).append((text, one.values))
    return Pages(series, steps)


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of some servers.

    Attributes:
        series: server -> (series, step -> value).
    """

    series: Mapping[tuple[str, ...], Sequence[tuple[str, Mapping[int, str]]]]
    steps: int

    def of(self, server: tuple[str, ...]) -> Iterator[str | None]:
        """A server's page at each step, None where nothing of it was there."""
        series = self.series.get(server, ())
        for step in range(self.steps):
            lines = [f"{text} {values[step]}\n" for text, values in series if step in values]
            yield "".join(lines) or None


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
