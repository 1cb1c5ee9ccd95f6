"""What kvheadroom says of warm sessions at each instant of a recording, beside what came back when."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.facts import EngineFacts, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.history import moment_of
from kvheadroom.capacity.readings import EngineSnapshot
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.capacity.warm_sessions import Warmth
from kvheadroom.capacity.warmth import Answer, Retention, Tier
from tests.end_to_end.tiny_model import MODEL_CONFIGS
from tests.loads.measured import Measured, measure

WINDOW_SECONDS = 60.0
CHUNKS = 256
CHUNK_BYTES = 32 * 1024
_TIER: Mapping[str, Any] = {
    "kv_transfer_config": {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": CHUNKS * CHUNK_BYTES},
    }
}
"""As the recorded server had it, but for the spec that stands for vLLM's own."""


@dataclass(frozen=True, slots=True)
class WarmRecording:
    """One recording, read once."""

    measured: Measured
    facts: EngineFacts
    engines: tuple[tuple[float, EngineSnapshot], ...]

    def at(self, offset_seconds: float) -> Warmth:
        """At the last scrape by then, over the minute before it."""
        until = [one for one in self.engines if one[0] <= offset_seconds]
        taken_at, now = until[-1]
        began_at, before = [one for one in until if one[0] <= taken_at - WINDOW_SECONDS][-1]
        past = {"1m": moment_of(before, began_at)}
        return assess(Reading(facts=self.facts, snapshot=now, taken_at=taken_at, past=past), (1024,)).warmth

    def retention(self, tier: Tier, offset_seconds: float) -> Retention:
        """Of one tier, where both figures are told."""
        [found] = [one for one in self.at(offset_seconds).retentions if one.tier is tier]
        return found

    def came_back(self, tier: Tier) -> Iterator[tuple[Answer, bool]]:
        """(what was said of it, whether anything of it was found) of each session that came back after the first minute."""
        for request in self.measured.requests:
            idle, found = request.get("idle_seconds"), request.get("cached_tokens")
            offset = request["t_send"] - self.measured.recording.first_at
            if idle is not None and found is not None and offset > WINDOW_SECONDS:
                yield self.retention(tier, offset).answer(idle), found > 0


@cache
def warm_recording(name: str) -> WarmRecording:
    """`churn` or `offload`."""
    measured = measure(name)
    engines = tuple((one.offset_seconds, one.engines[0]) for one in measured.instants if one.engines)
    facts = resolve_facts(
        operator=OperatorFacts(flags=_TIER if name == "offload" else {}, gpu="cpu"),
        answers=ServerAnswers(version="0.32.0", max_model_len=1024),
        echoed=engines[0][1].echoed,
        model_files=ModelFiles(folder="gqa", config=MODEL_CONFIGS["gqa"]),
    )
    return WarmRecording(measured, facts, engines)
