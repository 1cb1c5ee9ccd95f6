"""Starts as they come together line by line, and what they are once the log has ended."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvheadroom.capacity.logged_start import LoggedRank, LoggedStart, Printed, StartOutcome
from kvheadroom.sources.start_log_lines import Speaker

_MOST_RANKS = 4096
_NUMBERS = re.compile(r"\d+")
# `--gpu-memory-utilization=%.4f`, twice.
_RATIO_UNCERTAINTY = 0.00005


@dataclass(slots=True)
class RankDraft:
    """One worker so far.

    Attributes:
        values: of LoggedRank, by name.
        graph_share: the graph estimate as a share of the GPU's memory.
    """

    values: dict[str, Any] = field(default_factory=dict)
    graph_share: float | None = None

    def put(self, name: str, figure: Printed) -> None:
        """What was printed again and is the same but for rounding stays as exact as it was; else the later is true."""
        before = self.values.get(name)
        if before is not None:
            is_same = abs(before.bytes - figure.bytes) <= before.uncertainty_bytes + figure.uncertainty_bytes
            if is_same and before.uncertainty_bytes <= figure.uncertainty_bytes:
                return
        self.values[name] = figure

    def put_utilization(self, utilization: float, uncertainty: float = 0.0) -> None:
        """As `put`."""
        before = self.values.get("utilization_uncertainty")
        if before is None or uncertainty <= before:
            self.values |= {"utilization": utilization, "utilization_uncertainty": uncertainty}

    def rank(self) -> LoggedRank:
        """The rank, with a graph estimate from its share where no figure was printed."""
        values = dict(self.values)
        total = values.get("total")
        if "cudagraph_estimate" not in values and total is not None and self.graph_share is not None:
            rounding = total.bytes * 2 * _RATIO_UNCERTAINTY + abs(total.uncertainty_bytes * self.graph_share)
            values["cudagraph_estimate"] = Printed(round(total.bytes * self.graph_share), round(rounding))
        return LoggedRank(**values)


@dataclass(slots=True)
class EngineDraft:
    """One engine so far.

    Attributes:
        is_named: its config line was seen, which every engine prints once.
        values: of LoggedStart, by name.
        failure_is_known: a line gave the reason; otherwise it is only known that it failed.
    """

    first_line: int
    last_line: int
    is_named: bool = False
    ranks: dict[str, RankDraft] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    outcome: StartOutcome = StartOutcome.CUT
    failure: str = ""
    failure_is_known: bool = False
    is_cold: bool | None = None

    def rank_of(self, speaker: Speaker) -> RankDraft:
        """The rank of whoever printed a line."""
        draft = self.ranks.get(speaker.process)
        if draft is None:
            if len(self.ranks) >= _MOST_RANKS:
                return RankDraft()
            draft = self.ranks[speaker.process] = RankDraft({"label": speaker.label})
        elif draft.values["label"].startswith("pid=") and not speaker.label.startswith("pid="):
            # A worker is named once the ranks are known.
            draft.values["label"] = speaker.label
        return draft

    def start(self) -> None:
        """It is up; an error on the way was overcome."""
        self.outcome, self.failure = StartOutcome.STARTED, ""

    def fail(self, failure: str, *, is_known: bool) -> None:
        """It failed; the first line that gives a reason is the cause."""
        if self.outcome is StartOutcome.STARTED or (self.failure and (self.failure_is_known or not is_known)):
            return
        self.outcome, self.failure, self.failure_is_known = StartOutcome.FAILED, failure, is_known

    def see_graphs(self, *, is_cold: bool) -> None:
        """Graphs were compiled, or loaded from a cache; one that is compiled makes the start a cold one."""
        self.is_cold = is_cold or bool(self.is_cold)

    def take_in(self, other: "EngineDraft") -> None:
        """Another's lines, which were this one's all along."""
        self.first_line = min(self.first_line, other.first_line)
        self.last_line = max(self.last_line, other.last_line)
        self.values = {**other.values, **self.values}
        for process, draft in other.ranks.items():
            self.ranks.setdefault(process, draft)
        if other.is_cold is not None:
            self.see_graphs(is_cold=other.is_cold)
        if other.outcome is StartOutcome.STARTED:
            self.start()
        elif other.outcome is StartOutcome.FAILED:
            self.fail(other.failure, is_known=other.failure_is_known)


@dataclass(slots=True)
class ServerDraft:
    """One start of a server so far, with its engines by data-parallel index."""

    first_line: int
    last_line: int
    release: str | None = None
    model: str | None = None
    said_flags: dict[str, Any] = field(default_factory=dict)
    resolved_flags: dict[str, Any] = field(default_factory=dict)
    engines: dict[int | str | None, EngineDraft] = field(default_factory=dict)

    def engine_of(self, index: int | str | None, line: int) -> EngineDraft:
        """The engine of that index."""
        draft = self.engines.get(index)
        if draft is None:
            draft = self.engines[index] = EngineDraft(line, line)
        draft.last_line = self.last_line = line
        return draft

    def start_all(self, line: int) -> None:
        """The server is up, so its engines are."""
        self.last_line = line
        for engine in self.engines.values():
            engine.last_line = line
            if engine.outcome is StartOutcome.CUT:
                engine.start()

    def starts(self) -> Iterator[LoggedStart]:
        """One for each engine."""
        self._join()
        # What was said holds; where nothing was, the config tells the default that was taken.
        flags = {**self.resolved_flags, **self.said_flags}
        for index, engine in self.engines.items():
            ranks = [draft.rank() for draft in engine.ranks.values()]
            yield LoggedStart(
                release=self.release,
                model=self.model,
                flags=flags,
                engine=index if isinstance(index, int) else None,
                ranks=tuple(sorted(ranks, key=lambda rank: [int(n) for n in _NUMBERS.findall(rank.label)])),
                outcome=engine.outcome,
                failure=engine.failure,
                is_cold=engine.is_cold,
                first_line=min(self.first_line, engine.first_line),
                last_line=engine.last_line,
                **engine.values,
            )

    def _join(self) -> None:
        """One engine: its workers name none, and in some releases it alone has an index (`EngineCore_DP0`)."""
        indexes = [index for index in self.engines if index is not None]
        unnamed = self.engines.get(None)
        if not indexes:
            self.engine_of(None, self.last_line)
        elif unnamed is not None:
            self._give_back(unnamed)
            if len(indexes) == 1:
                self.engines[indexes[0]].take_in(unnamed)
                del self.engines[None]
            elif not unnamed.ranks and not unnamed.values:
                self._share(unnamed)
                del self.engines[None]

    def _give_back(self, unnamed: EngineDraft) -> None:
        """What a worker printed before it had its name, and so its engine (from 0.33)."""
        for index, engine in self.engines.items():
            if index is None:
                continue
            for process in unnamed.ranks.keys() & engine.ranks.keys():
                draft = unnamed.ranks.pop(process)
                engine.ranks[process].values = {**draft.values, **engine.ranks[process].values}

    def _share(self, unnamed: EngineDraft) -> None:
        """What the server said of all its engines."""
        for engine in self.engines.values():
            if unnamed.outcome is StartOutcome.FAILED:
                engine.fail(unnamed.failure, is_known=unnamed.failure_is_known)
