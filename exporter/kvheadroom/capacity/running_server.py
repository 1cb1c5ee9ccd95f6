"""A server as it runs, and another start of it: what is known of it stays, but for the change."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvheadroom.capacity.alternatives import spelt
from kvheadroom.capacity.command_line import FITTED_LENGTH
from kvheadroom.capacity.deployment import PlanRequest
from kvheadroom.capacity.facts import (
    AUTO_LENGTH,
    EngineFacts,
    MissingFact,
    OperatorFacts,
    Origin,
    ServerAnswers,
)
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.own_start import start_of
from kvheadroom.capacity.readings import EchoedFlags, EngineSnapshot
from kvheadroom.capacity.stored_model import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """One server as it runs.

    Attributes:
        operator: what the operator says of it.
        facts: of one of its engines, as they were resolved.
        model_files: None where nobody has them.
        others_bytes: what anything else uses on one of its GPUs, the most; None where nobody knows.
        started_at, taken_at: unix seconds; None where the page tells no start.
    """

    replica: str
    url: str
    operator: OperatorFacts
    facts: EngineFacts
    snapshots: tuple[EngineSnapshot, ...]
    model_files: ModelFiles | None
    model_files_missing: MissingFact | None = None
    others_bytes: int | None = None
    started_at: float | None = None
    taken_at: float

    @property
    def snapshot(self) -> EngineSnapshot:
        """The engine with the fewest blocks: it is the first that is full."""
        told = [one for one in self.snapshots if one.num_blocks is not None]
        return min(told, key=lambda one: one.num_blocks or 0) if told else self.snapshots[0]

    @property
    def start(self) -> str:
        """What tells its start from every other."""
        return start_of(self.replica, self.snapshot.engine, self.started_at, self.snapshot.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be done otherwise.

    Attributes:
        flags: by vLLM's names; None takes one away.
        draft_files: of a draft model that the flags name.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    gpu: str | None = None
    hbm_bytes: int | None = None
    version: str | None = None
    draft_files: ModelFiles | None = None

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return self != Change()

    @property
    def label(self) -> str:
        """As on a command line."""
        words = [_spelt(name, value) for name, value in self.flags.items()]
        if self.gpu is not None:
            words.append(f"on {self.gpu}")
        if self.hbm_bytes is not None:
            words.append(f"on a GPU of {self.hbm_bytes / 1e9:.2f} GB")
        if self.version is not None:
            words.append(f"vLLM {self.version}")
        return " ".join(words) or "the same start again"


def _spelt(name: str, value: Any) -> str:
    if name == "speculative_config":
        draft = value or {"method": "mtp", "num_speculative_tokens": 0}
        tokens = draft.get("num_speculative_tokens")
        return f"--mtp {tokens}" if draft.get("method") == "mtp" else f"drafting by {draft.get('method')}"
    return spelt({name: value}) if value is not None else f"--{name.replace('_', '-')} 0"


_ECHOED = frozenset(one.name for one in fields(EchoedFlags))


def start_with(
    server: RunningServer, change: Change, session_tokens: tuple[int, ...] = ()
) -> tuple[PlanRequest, EngineFacts]:
    """Another start of the same server: what is known of the one that runs stays, but for the change."""
    facts, line = server.facts, server.facts.command_line
    flags, length = change.flags, facts.max_model_len
    said = {**_engines(server), **server.operator.flags, **flags}
    echoed = replace(server.snapshot.echoed, **dict.fromkeys(_ECHOED & flags.keys()))
    told = length.value if length is not None and length.origin is Origin.SERVER else None
    fits = flags.get("max_model_len") == AUTO_LENGTH
    if "max_model_len" in flags:
        told = None
    elif change and line is not None and line.unclear.get("max_model_len") == FITTED_LENGTH:
        # What was fitted to the one that runs is fitted anew.
        told, fits = None, "max_model_len" not in server.operator.flags
    if fits:
        said["max_model_len"] = None
    operator = replace(server.operator, flags=said)
    if change.gpu is not None or change.hbm_bytes is not None:
        operator = replace(operator, gpu=change.gpu or operator.gpu, hbm_bytes=change.hbm_bytes)
    version = change.version or (None if facts.version is None else facts.version.value)
    resolved = resolve_facts(
        operator=operator,
        answers=ServerAnswers(version=version, max_model_len=told),
        echoed=echoed,
        model_files=server.model_files,
        model_files_missing=server.model_files_missing,
        draft_tensors=None if change.draft_files is None else change.draft_files.tensors,
        command_line=line,
        local_gpu=facts.gpu,
    )
    all_flags = {
        **({} if line is None else line.flags),
        **({} if told is None else {"max_model_len": told}),
        **said,
        **{name: value for name in sorted(_ECHOED) if (value := getattr(echoed, name)) is not None},
        **({"max_model_len": AUTO_LENGTH} if fits else {}),
    }
    request = PlanRequest(
        model_files=server.model_files or ModelFiles(folder="", config={}),
        operator=replace(
            operator,
            flags={name: value for name, value in all_flags.items() if value is not None},
            gpu=resolved.gpu,
        ),
        version=version,
        session_tokens=session_tokens,
        draft_files=change.draft_files,
    )
    return request, resolved


def _engines(server: RunningServer) -> dict[str, int]:
    """The engines behind the address, where no flag tells them."""
    line = server.facts.command_line
    told = line is not None and "data_parallel_size" in line.flags
    return {} if told or len(server.snapshots) < 2 else {"data_parallel_size": len(server.snapshots)}
