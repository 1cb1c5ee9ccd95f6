"""Composition root of `kvheadroom calibrate --log`: start-up logs and the models that they name -> every start of every engine in them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from kvheadroom.capacity.calibration_run import Looked, LookedAt
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion
from kvheadroom.capacity.deployment import PlanRequest, facts_of_start
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.facts import EngineFacts, OperatorFacts
from kvheadroom.capacity.gpu_catalogue import GPUS
from kvheadroom.capacity.logged_figures import figures_of_log
from kvheadroom.capacity.logged_sample import excluded_by_outcome, sample_of_log
from kvheadroom.capacity.logged_start import LoggedStart, LogProblemKind, LogReading
from kvheadroom.capacity.rank_weights import wants_headers
from kvheadroom.capacity.readings import SourceFailure, one_line
from kvheadroom.capacity.speculation import DRAFT_CONFIG, WITH_MODEL
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.outputs.plan_words import as_options
from kvheadroom.planner import Report, find, header_reporter
from kvheadroom.sources.model_lookup import LocatedModel, find_model, with_headers
from kvheadroom.sources.start_log_file import fingerprints, kept_as_file, read_log_file

STANDARD_INPUT = "-"
LARGE_BYTES = 16 * 2**20
_MOST_NAME_CHARACTERS = 500
_SAME_CARD_RATIO = 0.002
"""Share by which a total that a log rounds, or another driver moves, may differ from the catalogue's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOrder:
    """Which logs, and what they do not tell.

    Attributes:
        paths: `-` is standard input.
        model: where config.json stands; None: by the name that a log prints.
        gpu, hbm_bytes: as in a config.
        version: of vLLM, for logs that do not tell it.
        flags: of vLLM, for logs that do not tell them.
    """

    paths: tuple[str, ...]
    model: str | None
    gpu: str | None
    hbm_bytes: int | None
    version: str | None
    flags: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Log:
    """One log, read. `names` tell its starts from all others."""

    name: str
    reading: LogReading
    names: tuple[str, ...]


def look_at_logs(
    order: LogOrder, stdin: BinaryIO | None, environment: Mapping[str, str], home: Path, report: Report
) -> Looked:
    """Every start of every log.

    Raises:
        OperatorError: a log cannot be read, or there is no model of the name that was said, and then nothing is learned from the others.
        ModelUnavailableError: the hub gave none of that name.
    """
    logs = tuple(_read_logs(order.paths, stdin, report))
    models = _Models(order.model, environment, home, report)
    starts, problems = [], []
    for log in logs:
        # What is wrong with one start is told with it.
        of_starts = (LogProblemKind.CUT, LogProblemKind.CONTRADICTION)
        problems += [
            f"{log.name}: {one.message}" for one in log.reading.problems if one.kind not in of_starts
        ]
        changed = any(one.kind is LogProblemKind.UNIT for one in log.reading.problems)
        for start, name in zip(log.reading.starts, log.names, strict=True):
            starts.append(_look_at_start(order, log.name, start, name, models, units_changed=changed))
    if order.model is not None:
        problems += _of_several_models(order.model, starts)
    return Looked(tuple(_found_again(starts)), tuple(problems))


def _of_several_models(said: str, starts: Iterable[LookedAt]) -> Iterator[str]:
    """That one model was said of logs that name several. A folder and the hub may give one model two names with the same end."""
    names = {one.model.rstrip("/") for one in starts if isinstance(one.outcome, CalibrationSample)}
    if len({name.rpartition("/")[2].lower() for name in names}) > 1:
        yield (
            f"--model {said} was taken for starts of {', '.join(sorted(names))}: if these are not the same model, give the logs of each a "
            "run of its own"
        )


def _found_again(starts: Iterable[LookedAt]) -> Iterator[LookedAt]:
    """Each start, with a note where it stands somewhere else too."""
    first: dict[str, str] = {}
    for one in starts:
        if not isinstance(one.outcome, CalibrationSample):
            yield one
            continue
        before = first.setdefault(one.outcome.start, one.evidence)
        again = () if before == one.evidence else (f"these are the lines of {before}, and count once",)
        yield replace(one, notes=(*one.notes, *again))


def _read_logs(paths: tuple[str, ...], stdin: BinaryIO | None, report: Report) -> Iterator[_Log]:
    faults = []
    for number, path in enumerate(paths, start=1):
        if len(paths) > 1:
            report(f"reading {_shown(path)}, {number} of {len(paths)} logs")
        elif _is_large(path):
            report(f"reading {_shown(path)}")
        with _as_file(path, stdin) as file:
            log = _read_log(file, _shown(path))
        if isinstance(log, str):
            faults.append(log)
        else:
            yield log
    if faults:
        raise OperatorError("\n".join(f"--log: {fault}" for fault in faults))


def _read_log(file: str, name: str) -> _Log | str:
    reading = read_log_file(file)
    if isinstance(reading, SourceFailure):
        return reading.detail.replace(file, name)
    names = fingerprints(file, reading.starts)
    if isinstance(names, SourceFailure):
        return names.detail.replace(file, name)
    return _Log(name, reading, names)


def _shown(path: str) -> str:
    return "standard input" if path == STANDARD_INPUT else one_line(path)[-_MOST_NAME_CHARACTERS:]


def _is_large(path: str) -> bool:
    try:
        return Path(path).stat().st_size > LARGE_BYTES
    except (OSError, ValueError):
        return False


@contextmanager
def _as_file(path: str, stdin: BinaryIO | None) -> Iterator[str]:
    if path != STANDARD_INPUT:
        yield path
    elif stdin is None:
        raise OperatorError("--log -: standard input is closed")
    else:
        with kept_as_file(stdin) as file:
            yield file


class _Models:
    """Each model is looked for once."""

    def __init__(self, said: str | None, environment: Mapping[str, str], home: Path, report: Report) -> None:
        self._said, self._environment, self._home, self._report = said, environment, home, report
        self._found: dict[str, LocatedModel | SourceFailure] = {}
        self._with_headers: set[str] = set()

    def find(self, printed: str | None) -> LocatedModel | str:
        """The files, or why there are none and what to do."""
        name = self._said or printed
        if name is None:
            return "the log does not name its model; say --model PATH, a folder that holds its config.json"
        if self._said is not None and name not in self._found:
            self._found[name] = find(name, self._environment, self._home, "--model: ")
        found = self._look_for(name)
        if isinstance(found, LocatedModel):
            return found
        return (
            f"its model's config.json was not found: {found.detail}; say --model PATH, a folder that holds it"
        )

    def find_draft(self, name: str) -> ModelFiles | str:
        """The files of a draft model, or why there are none."""
        found = self._look_for(name)
        return found.files if isinstance(found, LocatedModel) else f"the draft model: {found.detail}"

    def _look_for(self, name: str) -> LocatedModel | SourceFailure:
        if name not in self._found:
            self._found[name] = find_model(name, self._environment, self._home)
        return self._found[name]

    def told_by_headers(self, printed: str | None) -> ModelFiles | None:
        """The files with what the headers of their shards tell; None where there are none, or it is known already."""
        name = self._said or printed or ""
        found = self._found[name]
        if not isinstance(found, LocatedModel) or found.hub is None or name in self._with_headers:
            return None
        files = with_headers(found, header_reporter(self._report, name))
        self._with_headers.add(name)
        self._found[name] = replace(found, files=files)
        return files


def _look_at_start(
    order: LogOrder, log: str, start: LoggedStart, name: str, models: _Models, *, units_changed: bool
) -> LookedAt:
    looked = LookedAt(
        evidence=f"{log}, lines {start.first_line} to {start.last_line}",
        model=start.model or order.model or "",
        release=start.release or order.version or "",
        outcome=Excluded(Exclusion.UNKNOWN, ""),
    )
    notes: list[str] = []
    facts: EngineFacts | Excluded | None = excluded_by_outcome(start)
    if facts is None and units_changed:
        facts = Excluded(
            Exclusion.IMPOSSIBLE,
            "figures of this log are in units that vLLM does not print there, so none of them is taken",
        )
    if facts is None:
        facts = _facts_of_log(order, start, models, notes)
    if isinstance(facts, Excluded):
        return replace(looked, outcome=_in_options(facts), figures=figures_of_log(None, start, facts))
    outcome = sample_of_log(facts, start, start=name, evidence=looked.evidence)
    return replace(
        looked,
        outcome=_in_options(outcome) if isinstance(outcome, Excluded) else outcome,
        facts=facts,
        figures=figures_of_log(facts, start, outcome),
        notes=tuple(notes),
    )


def _in_options(excluded: Excluded) -> Excluded:
    return replace(excluded, detail=as_options(excluded.detail))


def _facts_of_log(
    order: LogOrder, start: LoggedStart, models: _Models, notes: list[str]
) -> EngineFacts | Excluded:
    """What is known of the engine that a log is of."""
    found = models.find(start.model)
    if isinstance(found, str):
        return Excluded(Exclusion.UNKNOWN, found)
    version = start.release or order.version
    if version is None:
        return Excluded(Exclusion.UNKNOWN, "the log does not tell vLLM's release; say --vllm-version X.Y.Z")
    if "cpu" in version:
        return Excluded(Exclusion.POOL_BY_FLAG, "on a CPU a flag sizes the pool, and nothing is left over")
    flags = {**order.flags, **start.flags}
    draft = _draft(flags, order, models)
    unsaid = _unsaid(start, flags) or (draft if isinstance(draft, str) else "")
    if unsaid:
        return Excluded(Exclusion.UNKNOWN, unsaid)
    quantization = flags.pop("quantization", None)
    if quantization and not _is_quantized(found.files):
        return Excluded(
            Exclusion.UNKNOWN,
            f"quantization={quantization} as it is loaded changes what the weights take, and is not modelled",
        )
    if "gpu_memory_utilization" not in flags:
        flags["gpu_memory_utilization"] = next(
            (rank.utilization for rank in start.ranks if rank.utilization is not None), None
        )
    hbm_bytes = _hbm_bytes(order, start, notes)
    if isinstance(hbm_bytes, str):
        return Excluded(Exclusion.UNKNOWN, hbm_bytes)
    request = PlanRequest(
        model_files=found.files,
        operator=OperatorFacts(flags=flags, gpu=order.gpu, hbm_bytes=hbm_bytes),
        version=version,
        draft_files=draft if isinstance(draft, ModelFiles) else None,
    )
    facts = facts_of_start(request)
    if found.hub is not None and wants_headers(facts):
        files = models.told_by_headers(start.model)
        if files is not None:
            facts = facts_of_start(replace(request, model_files=files))
    return facts


def _draft(flags: dict[str, Any], order: LogOrder, models: _Models) -> ModelFiles | str | None:
    """The files of a draft model of its own, whose config.json is put to the flags; a string says why there are none.

    Of what a log says of it only the method and the number of tokens are kept.
    """
    draft = flags.get("speculative_config") or {}
    if draft.get("method") not in WITH_MODEL:
        return None
    name = (order.flags.get("speculative_config") or {}).get("model")
    if not isinstance(name, str):
        return (
            f"a model of its own drafts ({draft['method']}), and its name is not kept of a log; say "
            '--speculative-config \'{"model": "PATH"}\''
        )
    files = models.find_draft(name)
    if isinstance(files, ModelFiles):
        flags["speculative_config"] = {**draft, "model": name, DRAFT_CONFIG: files.config}
    return files


def _unsaid(start: LoggedStart, flags: Mapping[str, Any]) -> str:
    """What nobody told, and a default would be a guess; empty where all is told."""
    if "tensor_parallel_size" not in flags and any("TP" in rank.label for rank in start.ranks):
        return (
            "several GPUs share its layers, and neither vLLM's arguments nor its config stand in the log; "
            "keep the whole start, or say --tensor-parallel-size N and the other flags"
        )
    return ""


def _is_quantized(files: ModelFiles) -> bool:
    return bool(files.config.get("quantization_config") or files.config.get("compression_config"))


def _hbm_bytes(order: LogOrder, start: LoggedStart, notes: list[str]) -> int | str | None:
    """The memory of one GPU where the catalogue does not give it; a string says what is missing."""
    if order.hbm_bytes is not None:
        return order.hbm_bytes
    if order.gpu is not None and GPUS[order.gpu].cuda_total_bytes is not None:
        return None
    printed = next((rank.total for rank in start.ranks if rank.total is not None), None)
    if printed is None:
        way_out = "--gpu NAME (docs/gpus.md)" if order.gpu is None else "--hbm-bytes N beside --gpu"
        return f"the log does not tell the GPU's memory; say {way_out}"
    if order.gpu is None:
        alike = [
            name
            for name, gpu in GPUS.items()
            if gpu.cuda_total_bytes is not None
            and abs(gpu.cuda_total_bytes - printed.bytes) <= _SAME_CARD_RATIO * printed.bytes
        ]
        cards = f" ({', '.join(alike)} have so much)" if alike else ""
        notes.append(
            f"the card is not told, so this holds for GPUs of {printed.bytes:,} bytes alone, as the log rounds them; "
            f"--gpu NAME makes it hold for a card{cards}"
        )
    return printed.bytes
