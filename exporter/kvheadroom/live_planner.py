"""Composition root of `kvheadroom plan --from URL`: a server asked once -> what it would be with other flags."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from kvheadroom.app import OneReplica, look_at
from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.expected_hits import learn
from kvheadroom.capacity.facts import MissingFact
from kvheadroom.capacity.fleet import ReplicaAssessment
from kvheadroom.capacity.readings import SourceFailure
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.running_server import Change, RunningServer, start_with
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.capacity.tier_sizes import ask
from kvheadroom.capacity.what_if import what_if
from kvheadroom.capacity.what_if_answer import WhatIf
from kvheadroom.config import Config, load_config, validate_address, validate_config
from kvheadroom.past_replicas import instance_of
from kvheadroom.planner import (
    PlanOptions,
    Report,
    check_options,
    find,
    find_draft,
    read_calibration,
    with_draft,
    with_weights,
)
from kvheadroom.replica import operator_facts
from kvheadroom.sources.model_files import SOURCE as MODEL_FILES
from kvheadroom.sources.prometheus_api import PrometheusApi
from kvheadroom.sources.reuse_history import read_stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOptions:
    """What was asked.

    Attributes:
        place: the server's URL, or its name in the config.
        api_key_file: of a server without a config.
        runs_with: flags that it runs with and that nothing else tells, with `gpu` and `hbm_bytes`.
        changes: the flags in `flags` and `swept`, the GPU and the release are what is to be otherwise; of its model, the files and the
            weights of the one that runs, if any.
        tier_bytes: sizes of an offload tier, of which it is asked what they would find.
        prometheus: that knows the last day of the server; `select` names it there, empty for its address.
    """

    place: str
    config: Path | None
    api_key_file: Path | None
    runs_with: Mapping[str, Any]
    changes: PlanOptions
    tier_bytes: tuple[int, ...] = ()
    prometheus: PrometheusApi | None = None
    select: str = ""


class ServerUnavailableError(Exception):
    """A server that told nothing, with what came instead: nothing that the options could have known."""


def make_what_if(
    options: WhatIfOptions, environment: Mapping[str, str], home: Path, report: Report
) -> WhatIf:
    """Ask the server, and plan each change.

    Raises:
        OperatorError: an option, a file or the config is wrong.
        ServerUnavailableError: the server told nothing that anything could be planned from.
        ModelUnavailableError: the hub gave no model.
    """
    wanted = options.changes
    check_options(wanted)
    learned = None if wanted.calibration is None else read_calibration(wanted.calibration)
    config = _config(options)
    place = options.place.rstrip("/") if "://" in options.place else options.place
    server = _as_said(_running(config, asyncio.run(look_at(config, place))), options)
    draft = find_draft(wanted.flags, environment, home)
    flags = with_draft(wanted.flags, draft)
    changes = tuple(_changes(replace(wanted, flags=flags), draft))
    server = _with_model(server, wanted, environment, home, report)
    answer = what_if(server, changes, session_tokens=wanted.session_tokens, gpus=wanted.gpus, learned=learned)
    if options.prometheus is None:
        return answer
    report(f"asking {options.prometheus.url} for the last day of {server.url}")
    return replace(answer, reuse=_reuse(server, options.prometheus, options))


def _reuse(server: RunningServer, api: PrometheusApi, options: WhatIfOptions) -> Reuse | str:
    """What tiers of other sizes would find, by the last day in Prometheus."""
    reading = Reading(facts=server.facts, snapshot=server.snapshot, taken_at=server.taken_at)
    question = ask(server.facts, assess(reading, ()).warmth.tiers, options.tier_bytes)
    if isinstance(question, str):
        return question
    select = options.select or f'instance="{instance_of(server.url)}"'
    stretches = read_stretches(api, select, server.snapshot, server.taken_at)
    if isinstance(stretches, SourceFailure):
        raise ServerUnavailableError(f"Prometheus at {api.url}: {stretches.detail}")
    return learn(stretches, question)


def _config(options: WhatIfOptions) -> Config:
    """The config with the servers of this machine, whose processes tell their flags."""
    if options.config is not None:
        config = load_config(options.config)
        return config if config.process_discovery is not None else _with_processes(config)
    try:
        replica: dict[str, Any] = {"url": validate_address(options.place)}
    except OperatorError as error:
        raise OperatorError(f"--from: {error}") from error
    if options.api_key_file is not None:
        replica["api_key_file"] = str(options.api_key_file)
    return validate_config({"replicas": [replica], "process_discovery": {}}, "the command line")


def _with_processes(config: Config) -> Config:
    return validate_config({**config.model_dump(exclude_unset=True), "process_discovery": {}}, "the config")


def _running(config: Config, found: OneReplica) -> RunningServer:
    replica, gpus = found.assessment, found.fleet.gpus
    if not replica.engines or replica.last_success_at is None:
        raise ServerUnavailableError(_why_nothing(replica))
    facts = replica.engines[0].facts
    others = []
    if gpus is not None:
        others = [gpus.others_bytes(gpu.gpu, replica.replica) for gpu in gpus.gpus_of(replica.replica)]
    known = [size for size in others if size is not None]
    missing = next((fact for fact in facts.missing if fact.fact == MODEL_FILES), None)
    return RunningServer(
        replica=replica.replica,
        url=replica.url,
        operator=operator_facts(config, found.config),
        facts=facts,
        snapshots=tuple(engine.snapshot for engine in replica.engines),
        model_files=facts.model_files,
        model_files_missing=None
        if missing is None
        else MissingFact(
            MODEL_FILES,
            missing.why,
            "give MODEL, a folder with its config.json or its name on the hub: kvheadroom plan MODEL --from URL",
        ),
        others_bytes=max(known) if known and len(known) == len(others) else None,
        started_at=found.started_at,
        taken_at=replica.last_success_at,
    )


def _why_nothing(replica: ReplicaAssessment) -> str:
    failure = next((one.failure for one in replica.sources if one.source == "metrics"), None)
    if failure is not None:
        return failure.detail
    return f"{replica.url}: its page has no engine yet; ask again when it serves"


def _as_said(server: RunningServer, options: WhatIfOptions) -> RunningServer:
    """With what was said of the one that runs."""
    operator, source = server.operator, options.changes.models[0]
    flags = dict(options.runs_with)
    gpu, hbm_bytes = flags.pop("gpu", None), flags.pop("hbm_bytes", None)
    if gpu is not None or hbm_bytes is not None:
        operator = replace(operator, gpu=gpu or operator.gpu, hbm_bytes=hbm_bytes)
    if source.weights_bytes is not None:
        operator = replace(operator, weights_bytes=source.weights_bytes)
    if options.changes.overhead_bytes is not None:
        operator = replace(operator, overhead_bytes=options.changes.overhead_bytes)
    operator = replace(operator, flags={**operator.flags, **flags})
    said = replace(server, operator=operator)
    # All that follows takes what is known of it from here.
    return replace(said, facts=start_with(said, Change())[1])


def _with_model(
    server: RunningServer, wanted: PlanOptions, environment: Mapping[str, str], home: Path, report: Report
) -> RunningServer:
    """With the files of MODEL, where it was given, in place of those that the server names."""
    source = wanted.models[0]
    if not source.name:
        return server

    def with_files(files: ModelFiles) -> RunningServer:
        return replace(server, model_files=files, model_files_missing=None)

    located = find(source.name, environment, home)
    return with_files(
        with_weights(located, source, lambda files: start_with(with_files(files), Change())[1], report)
    )


def _changes(wanted: PlanOptions, draft: ModelFiles | None) -> Iterator[Change]:
    names = tuple(wanted.swept)
    for values in product(*wanted.swept.values()):
        yield Change(
            flags={**dict(zip(names, values, strict=True)), **wanted.flags},
            gpu=wanted.gpu,
            hbm_bytes=wanted.hbm_bytes,
            version=wanted.version,
            draft_files=draft,
        )
