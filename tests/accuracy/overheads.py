"""Public memory ledgers, each beside the overhead that the core estimates, and the constants of that estimate fitted to them.

The measured overhead of a line is what vLLM's budget and pool leave beside the weights: budget - weights - pool, as the log prints them.
Each constant is a median of what the lines imply for it, from the parts that a log prints; a line that is judged has no part in its own
constants (left out one at a time).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from kvheadroom.capacity import overhead
from kvheadroom.capacity.facts import EngineFacts, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.model_geometry import ModelGeometry
from kvheadroom.capacity.overhead import FITTED, Fitted, estimate_overhead
from kvheadroom.capacity.overhead_parts import OverheadEstimate, OverheadPart
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.stored_model import ModelFiles
from tests.capacity.truth import BY_ID

HERE = Path(__file__).parent
FLAT_BYTES = 12 * 10**9
"""The guess that the estimate replaces."""
_CLEAR = 1.5
"""By so much one of two maxima must exceed the other for a log to tell its constant."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """One line that can be judged."""

    line: Line
    facts: EngineFacts
    measured_bytes: float

    @property
    def total_bytes(self) -> int:
        """Of one GPU."""
        assert self.facts.hbm_bytes is not None
        return self.facts.hbm_bytes.value

    @property
    def model(self) -> ModelGeometry:
        """Known for every line that is judged."""
        assert self.facts.model is not None
        return self.facts.model

    def printed(self, name: str) -> float | None:
        """A figure of the log in bytes."""
        value = self.line.get(name)
        return None if value is None else value * GIB

    def estimate(self, fitted: Fitted = FITTED) -> OverheadEstimate:
        """As the core has it."""
        estimate = estimate_overhead(self.facts, fitted)
        assert isinstance(estimate, OverheadEstimate), estimate
        return estimate


LINES: tuple[Line, ...] = tuple(
    json.loads(line) for line in (HERE / "memory_ledgers.jsonl").read_text(encoding="utf-8").splitlines()
)
_MODELS = yaml.safe_load((HERE / "ledger_models.yaml").read_text(encoding="utf-8"))


def _config(name: str) -> dict[str, Any]:
    model = _MODELS[name]
    if "config" in model:
        return dict(model["config"])
    return {**json.loads(json.dumps(BY_ID[model["row"]]["config"])), **model.get("changes", {})}


_FLAGS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "ep": "enable_expert_parallel",
}
_SAME = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "enforce_eager")


def facts_of(line: Line) -> EngineFacts:
    """What is known of the start before it is made."""
    flags = {flag: line[key] for key, flag in _FLAGS.items() if key in line}
    flags |= {flag: line[flag] for flag in _SAME if flag in line}
    total = line["total_gib"] if "total_gib" in line else line["budget_gib"] / line["util"]
    return resolve_facts(
        operator=OperatorFacts(
            flags=flags, gpu=line.get("gpu"), hbm_bytes=round(total * GIB), weights_bytes=1
        ),
        answers=ServerAnswers(version=line.get("release")),
        echoed=EchoedFlags(),
        model_files=ModelFiles(folder="/models/x", config=_config(line["model"])),
        sizes_weights=False,
    )


@cache
def starts() -> tuple[Start, ...]:
    """The lines that can be judged."""
    return tuple(
        Start(line, facts_of(line), (line["budget_gib"] - line["weights_gib"] - line["kv_gib"]) * GIB)
        for line in LINES
        if "left_out" not in line
    )


def fit(lines: Iterable[Start]) -> Fitted:
    """The constants, each the median of what these lines imply for it."""
    lines = tuple(lines)
    fitted = replace(FITTED, context_bytes=_middle(_context(lines, shared=False), FITTED.context_bytes))
    more = [(start, size - fitted.context_bytes) for start, size in _parts(lines, shared=True)]
    linked = [size for start, size in more if overhead.is_linked(start.facts)]
    unlinked = [size for start, size in more if not overhead.is_linked(start.facts)]
    samplers: dict[str, list[float]] = {"sorting_bytes": [], "sampling_bytes": [], "lean_sampling_bytes": []}
    for name, size in _samplers(lines):
        samplers[name].append(size)
    return replace(
        fitted,
        linked_bytes=_middle(linked, FITTED.linked_bytes),
        unlinked_bytes=_middle(unlinked, FITTED.unlinked_bytes),
        **{name: _middle(sizes, getattr(FITTED, name)) for name, sizes in samplers.items()},
        mlp_values=_middle(_mlp(lines), FITTED.mlp_values),
        graph_layer_bytes=_middle(_graph_slopes(lines), FITTED.graph_layer_bytes),
        encoder_bytes=_middle(_encoders(lines), FITTED.encoder_bytes),
    )


def _middle(implied: Iterable[float], otherwise: float) -> float:
    values = list(implied)
    return median(values) if values else otherwise


def _context(lines: Iterable[Start], *, shared: bool) -> Iterator[float]:
    return (size for _, size in _parts(lines, shared=shared))


def _parts(lines: Iterable[Start], *, shared: bool) -> Iterator[tuple[Start, float]]:
    """What is neither weights nor a peak: printed, or what is consumed beside the weights."""
    for start in lines:
        size = start.printed("non_torch_gib")
        if size is None and "consumed_gib" in start.line:
            size = (start.line["consumed_gib"] - start.line["weights_gib"]) * GIB
        if size is not None and (start.facts.tensor_parallel_size.value > 1) is shared:
            yield start, size


def _activation(start: Start) -> float | None:
    """The peak as printed, less the graphs that later releases print in it."""
    size = start.printed("activation_gib")
    if size is None or "consumed_gib" not in start.line:
        return size
    return size - (start.printed("cudagraph_estimate_gib") or start.estimate().of(OverheadPart.CUDA_GRAPHS))


def _samplers(lines: Iterable[Start]) -> Iterator[tuple[str, float]]:
    for start in lines:
        size, step = _activation(start), overhead.step_parts(start.facts, FITTED)
        if size is None or step is None or step.sampler < _CLEAR * step.forward or start.model.takes_videos:
            continue
        _, seqs = overhead.scheduled(start.facts)
        kept = start.estimate().of(OverheadPart.WORKSPACES)
        yield step.sampler_constant, (size - kept) / (seqs * (start.model.vocab_size or 1))


def _mlp(lines: Iterable[Start]) -> Iterator[float]:
    for start in lines:
        size, step = _activation(start), overhead.step_parts(start.facts, FITTED)
        inner = start.model.mlp_size
        if (
            size is None
            or step is None
            or step.forward < _CLEAR * step.sampler
            or start.model.num_experts
            or not inner
        ):
            continue
        if start.model.has_states:
            continue
        tokens, _ = overhead.scheduled(start.facts)
        values = size / tokens / 2 - 4 * (start.model.hidden_size or 0)
        yield values * start.facts.tensor_parallel_size.value / inner


def _graph_slopes(lines: Iterable[Start]) -> Iterator[float]:
    for start in lines:
        size = start.printed("cudagraph_gib")
        if size is None or size <= FITTED.graph_bytes or start.facts.flags.enforce_eager:
            continue
        _, seqs = overhead.scheduled(start.facts)
        sizes = overhead.captured_sizes(seqs)
        yield (size - FITTED.graph_bytes) / (start.model.num_layers * sizes)


def _encoders(lines: Iterable[Start]) -> Iterator[float]:
    for start in lines:
        if start.model.takes_videos:
            yield start.measured_bytes - start.estimate().total_bytes + FITTED.encoder_bytes


@dataclass(frozen=True, slots=True)
class Judged:
    """One start, estimated without it."""

    start: Start
    estimate: OverheadEstimate

    @property
    def error_ratio(self) -> float:
        """(estimated - measured) / memory of the GPU."""
        return (self.estimate.total_bytes - self.start.measured_bytes) / self.start.total_bytes

    @property
    def flat_error_ratio(self) -> float:
        """The same of 12 GB for every GPU."""
        return (FLAT_BYTES - self.start.measured_bytes) / self.start.total_bytes


@cache
def judged() -> tuple[Judged, ...]:
    """Every start with the constants of all the others."""
    every = starts()
    return tuple(
        Judged(start, start.estimate(fit(other for other in every if other is not start))) for start in every
    )


def median_error(ratio: Callable[[Judged], float], lines: Iterable[Judged]) -> float:
    """Of the absolute values."""
    return median(abs(ratio(line)) for line in lines)


def share_within(limit: float, lines: Iterable[Judged]) -> float:
    """Share of the starts whose error is at most so much of the GPU's memory."""
    lines = tuple(lines)
    return math.fsum(abs(line.error_ratio) <= limit for line in lines) / len(lines)
