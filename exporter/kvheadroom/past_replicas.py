"""Servers of a config as a Prometheus saw them -> what each of their starts tells of the overhead."""

from dataclasses import replace
from urllib.parse import urlsplit

from kvheadroom.capacity.calibration_run import LookedAt
from kvheadroom.capacity.calibration_samples import (
    CalibrationSample,
    Excluded,
    Exclusion,
    SampleSource,
    sample_of_engine,
)
from kvheadroom.capacity.exported_starts import Past
from kvheadroom.capacity.facts import EngineFacts, MissingFact, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.observation import observe
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.readings import EngineSnapshot, SourceFailure
from kvheadroom.capacity.scraped_starts import ScrapedStart
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.config import Config, ReplicaConfig
from kvheadroom.replica import operator_facts
from kvheadroom.sources.model_files import SOURCE as MODEL_FILES
from kvheadroom.sources.model_files import read_model_files

_DEFAULT_PORTS = {"http": 80, "https": 443}
_IN_KEY = "max_model_len="
"""Where the overhead of a model grows with it."""


class PastReplicas:
    """The replicas of a config, by the address that Prometheus scrapes them at.

    Args:
        version: release of vLLM that all of them ran; None where nobody says it.
    """

    def __init__(self, config: Config, version: str | None) -> None:
        self._config = config
        self._version = version
        self._by_address: dict[str, list[ReplicaConfig]] = {}
        for replica in config.replicas:
            self._by_address.setdefault(instance_of(replica.url), []).append(replica)
        self._models: dict[str, ModelFiles | SourceFailure] = {}

    def name_of(self, start: ScrapedStart) -> str | None:
        """What the daemon calls a start; None where it is of no replica of the config."""
        replica = self._replica(start.server)
        return None if isinstance(replica, str) else start.start(replica.replica)

    def look(self, start: ScrapedStart, past: Past) -> LookedAt:
        """What one start tells."""
        replica = self._replica(start.server)
        evidence = past.evidence(start.name, start.seen or start.near)
        model = "" if start.awake is None else start.awake.model_name or ""
        looked = LookedAt(
            evidence=evidence,
            model=model,
            release=self._version or "",
            outcome=Excluded(Exclusion.UNKNOWN, replica if isinstance(replica, str) else ""),
        )
        if isinstance(replica, str):
            return looked
        excluded = start.excluded(past)
        if excluded is not None or start.awake is None or start.seen is None:
            return looked if excluded is None else replace(looked, outcome=excluded)
        if self._version is None:
            why = "vLLM's metrics do not tell its release; say --vllm-version X.Y.Z"
            return replace(looked, outcome=Excluded(Exclusion.UNKNOWN, why))
        facts = self._facts(replica, start.awake, self._version)
        outcome = sample_of_engine(
            facts,
            start.awake,
            observe(start.awake, facts, predict(facts).layout),
            start=start.start(replica.replica),
            foreign_bytes=None,
            measured_at=start.seen[0],
            evidence=evidence,
        )
        return replace(looked, outcome=_checked(outcome, facts), facts=facts)

    def _replica(self, address: str) -> ReplicaConfig | str:
        """The replica at an address; a string says why there is none."""
        found = self._by_address.get(address.lower(), [])
        if len(found) == 1:
            return found[0]
        if found:
            return f"{len(found)} replicas of the config are at {address}, and which of them this is, is not told"
        return f"no replica of the config has the address {address}; add it, or leave it out with --select"

    def _facts(self, replica: ReplicaConfig, engine: EngineSnapshot, version: str) -> EngineFacts:
        files: ModelFiles | None = None
        missing = MissingFact(
            MODEL_FILES,
            "vLLM's metrics do not tell where the model is",
            "set `model: /path/to/the/model` in the config",
        )
        if replica.model is not None:
            read = self._model(replica.model)
            if isinstance(read, SourceFailure):
                missing = MissingFact(MODEL_FILES, read.detail, missing.way_out)
            else:
                files = read
        return resolve_facts(
            operator=operator_facts(self._config, replica),
            answers=ServerAnswers(version=version),
            echoed=engine.echoed,
            model_files=files,
            model_files_missing=missing,
        )

    def _model(self, folder: str) -> ModelFiles | SourceFailure:
        if folder not in self._models:
            self._models[folder] = read_model_files(folder)
        return self._models[folder]


def _checked(outcome: CalibrationSample | Excluded, facts: EngineFacts) -> CalibrationSample | Excluded:
    """An outcome with the way to what is missing; no sample of which a part of the key is a guess that the daemon need not make."""
    if isinstance(outcome, CalibrationSample):
        length = facts.max_model_len
        if _IN_KEY in outcome.key.settings and (length is None or length.assumed):
            return Excluded(
                Exclusion.UNKNOWN,
                "its overhead depends on max_model_len, which vLLM's metrics do not tell; set `flags: {max_model_len: N}`",
            )
        return replace(outcome, source=SampleSource.PROMETHEUS)
    if outcome.reason is Exclusion.UNKNOWN and not facts.obstacles:
        needed = next((one for one in facts.missing if one.fact != "max_model_len"), None)
        if needed is not None:
            return Excluded(outcome.reason, f"{needed.why}; {needed.way_out}")
    return outcome


def instance_of(url: str) -> str:
    """As Prometheus writes `instance`: host and port."""
    parts = urlsplit(url)
    return (
        parts.netloc if parts.port is not None else f"{parts.netloc}:{_DEFAULT_PORTS[parts.scheme]}"
    ).lower()
