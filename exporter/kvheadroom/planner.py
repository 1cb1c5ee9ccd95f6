"""Composition root of `kvheadroom plan MODEL`: options -> model files -> plans. Knows nothing of servers."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from kvheadroom.capacity.article import PAPER_OVERHEAD_BYTES
from kvheadroom.capacity.calibration import Calibration
from kvheadroom.capacity.deployment import PlanRequest, facts_of_start
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.facts import EngineFacts, OperatorFacts
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.model_plan import ModelPlan, plan_model
from kvheadroom.capacity.rank_weights import wants_headers
from kvheadroom.capacity.readings import SourceFailure
from kvheadroom.capacity.speculation import DRAFT_CONFIG, WITH_MODEL
from kvheadroom.capacity.stored_model import ModelFiles, TensorInventory
from kvheadroom.sources.hub_environment import SOURCE as HUB
from kvheadroom.sources.model_files import MAX_INDEX_BYTES, read_json
from kvheadroom.sources.model_lookup import LocatedModel, find_model, with_headers
from kvheadroom.sources.safetensors import named_tensors
from kvheadroom.sources.server_memory import read_machine_memory
from kvheadroom.sources.weight_files import total_size

MAX_ROWS = 64
REPORT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as it was asked for: its name, and what was said of its weights."""

    name: str
    weights_bytes: int | None = None
    index: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What was asked.

    Attributes:
        models: the model, and the one it is compared with.
        flags: vLLM's flags with one value each.
        swept: vLLM's flags with several values; each combination is a row.
        by_sum: the sum on paper comes first.
        calibration: a file of what was learned, to be shown beside each row.
    """

    models: tuple[ModelSource, ...]
    flags: Mapping[str, Any]
    swept: Mapping[str, tuple[Any, ...]]
    gpu: str | None
    hbm_bytes: int | None
    marketed_bytes: int | None
    overhead_bytes: int | None
    version: str | None
    session_tokens: tuple[int, ...]
    gpus: int | None
    by_sum: bool
    calibration: Path | None = None


class ModelUnavailableError(Exception):
    """A hub that would not or could not give a model: nothing that the options could have known."""


Report = Callable[[str], None]
"""Told what takes a while, one line."""


def make_plans(
    options: PlanOptions, environment: Mapping[str, str], home: Path, report: Report
) -> tuple[ModelPlan, ...]:
    """One plan for each model.

    Raises:
        OperatorError: an option, a folder or a file is wrong.
        ModelUnavailableError: the hub gave no model.
    """
    _check(options)
    calibration = None if options.calibration is None else read_calibration(options.calibration)
    return tuple(
        _plan(options, source, environment, home, report=report, calibration=calibration)
        for source in options.models
    )


def read_calibration(path: Path) -> Calibration:
    """What was learned.

    Raises:
        OperatorError: the file is missing, cannot be read, or is damaged.
    """
    from kvheadroom.monitor.calibration_store import read_samples

    stored = read_samples(path)
    if stored.problem:
        raise OperatorError(f"--calibration: {stored.problem}")
    # Whether a folder that may not be searched has it is told above.
    if not path.exists():
        raise OperatorError(
            f"--calibration: {path}: no such file; `kvheadroom calibrate` and a daemon that learns write one"
        )
    return Calibration.of(stored.samples)


def _check(options: PlanOptions) -> None:
    if options.gpu is None and options.hbm_bytes is None and not _sized(options.flags):
        raise OperatorError(
            "say the GPU: --gpu B200 (or another of the catalogue), or --hbm-bytes N, its memory as CUDA reports it"
        )
    check_options(options)


def check_options(options: PlanOptions) -> None:
    """What must be so wherever the rest is known from.

    Raises:
        OperatorError: there are too many rows, or what is said of the GPU does not go together.
    """
    if options.gpu == CPU and options.hbm_bytes is not None:
        raise OperatorError("--gpu CPU has no --hbm-bytes; say --kv-cache-memory-bytes N")
    rows = 1
    for values in options.swept.values():
        rows *= len(values)
    if rows > MAX_ROWS:
        raise OperatorError(f"{rows} combinations of flags; at most {MAX_ROWS} are planned at once")


def _sized(flags: Mapping[str, Any]) -> bool:
    return "kv_cache_memory_bytes" in flags or "num_gpu_blocks_override" in flags


def _plan(
    options: PlanOptions,
    source: ModelSource,
    environment: Mapping[str, str],
    home: Path,
    *,
    report: Report,
    calibration: Calibration | None,
) -> ModelPlan:
    located = find(source.name, environment, home)
    draft = find_draft(options.flags, environment, home)
    options = replace(options, flags=with_draft(options.flags, draft))

    def first(files: ModelFiles) -> EngineFacts:
        return facts_of_start(next(_requests(options, source, files, draft)))

    files = with_weights(located, source, first, report)
    requests = tuple(_requests(options, source, files, draft))
    return plan_model(
        _shown_name(source.name),
        located.where,
        requests,
        by_sum=options.by_sum,
        calibration=calibration,
        host=read_machine_memory(),
    )


def with_weights(
    located: LocatedModel, source: ModelSource, first: Callable[[ModelFiles], EngineFacts], report: Report
) -> ModelFiles:
    """The files with what was said of their weights, and the headers of a model on the hub where its index does not suffice.

    Args:
        first: the facts of the first row with such files.

    Raises:
        OperatorError: the index that was named cannot be used.
    """
    if source.index is not None:
        total, tensors = _read_index(source.index)
        return replace(located.files, weights_bytes=total, tensors=tensors)
    if located.hub is None or source.weights_bytes is not None or not wants_headers(first(located.files)):
        return located.files
    return with_headers(located, header_reporter(report, source.name))


def header_reporter(report: Report, name: str) -> Callable[[int, int], None]:
    """One line at once, and one every few seconds."""
    told = -math.inf

    def tell(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= REPORT_SECONDS:
            told = now
            report(f"{name}: the index does not tell the weights; reading headers, {done} of {total} files")

    return tell


def find(name: str, environment: Mapping[str, str], home: Path, what: str = "") -> LocatedModel:
    """A model's files.

    Args:
        what: put before what is wrong.

    Raises:
        OperatorError: there are none of that name.
        ModelUnavailableError: the hub gave none.
    """
    located = find_model(name, environment, home)
    if isinstance(located, LocatedModel):
        return located
    raise (ModelUnavailableError if located.source == HUB else OperatorError)(what + located.detail)


def find_draft(flags: Mapping[str, Any], environment: Mapping[str, str], home: Path) -> ModelFiles | None:
    """The files of the draft model that `--speculative-config` names; None where it names none.

    Raises:
        OperatorError, ModelUnavailableError: as `find`.
    """
    draft = flags.get("speculative_config") or {}
    name = draft.get("model")
    if not isinstance(name, str) or draft.get("method") not in WITH_MODEL or DRAFT_CONFIG in draft:
        return None
    return find(name, environment, home, "--speculative-config: the draft model: ").files


def with_draft(flags: Mapping[str, Any], files: ModelFiles | None) -> Mapping[str, Any]:
    """The flags with the config.json of the draft model."""
    if files is None:
        return flags
    return {**flags, "speculative_config": {**flags["speculative_config"], DRAFT_CONFIG: files.config}}


def _shown_name(name: str) -> str:
    """A path by its last part, which tells models apart well enough in a table; a hub name as it is."""
    path = Path(name)
    return path.resolve().name if path.exists() else name


def _read_index(path: Path) -> tuple[int, TensorInventory | None]:
    """The size of the weights, and the names of the tensors."""
    index = read_json(path, MAX_INDEX_BYTES)
    if isinstance(index, SourceFailure):
        raise OperatorError(f"--index: {index.detail}")
    total = total_size(index)
    if total is None:
        raise OperatorError(
            f"--index: {path}: it has no metadata.total_size; say --weights-bytes N, the sum of the sizes of the "
            "*.safetensors files"
        )
    return total, named_tensors(index)


def _requests(
    options: PlanOptions, source: ModelSource, files: ModelFiles, draft: ModelFiles | None
) -> Iterator[PlanRequest]:
    names = tuple(options.swept)
    for values in product(*options.swept.values()):
        yield PlanRequest(
            model_files=files,
            operator=OperatorFacts(
                flags={**options.flags, **dict(zip(names, values, strict=True))},
                gpu=options.gpu,
                hbm_bytes=options.hbm_bytes,
                weights_bytes=source.weights_bytes,
                overhead_bytes=PAPER_OVERHEAD_BYTES
                if options.by_sum and options.overhead_bytes is None
                else options.overhead_bytes,
            ),
            version=options.version,
            session_tokens=options.session_tokens,
            gpus=options.gpus,
            marketed_bytes=options.marketed_bytes,
            draft_files=draft,
        )
