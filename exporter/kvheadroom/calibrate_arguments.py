"""The `calibrate` command's arguments: where starts are looked for, and what a log does not tell of them."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvheadroom.argument_readers import gpu_name, release, whole_number
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.plan_arguments import SINGLE, SWEPT, SWITCHES
from kvheadroom.prometheus_arguments import (
    OF_A_PROMETHEUS,
    add_history_arguments,
    read_api,
    read_every,
    read_range,
    read_select,
)

if TYPE_CHECKING:
    from kvheadroom.history_calibrator import HistoryOrder
    from kvheadroom.log_calibrator import LogOrder

DESCRIPTION = """\
How much of a GPU is neither weights nor KV cache, measured on starts that really happened: from what vLLM printed
while it started, from the history that a Prometheus has, or from one look at the servers that run. The next plan or
prediction of such an engine can take it in place of the estimate.
"""

EXAMPLES = """\
examples:
  docker logs NAME 2>&1 | head -n 2000 > start.log
  kvheadroom calibrate --log start.log --gpu H100
  kvheadroom calibrate --log node1.log.gz node2.log --gpu H100 --model /models/llama --out learned.json
  kubectl logs POD | kvheadroom calibrate --log - --gpu B200 --json
  kvheadroom calibrate --config kvheadroom.yaml --out learned.json
  kvheadroom calibrate --target http://host:8000
  kvheadroom calibrate --prometheus http://prometheus:9090 --range 7d --state history --out learned.json

--log: each start in a log is one measurement: budget - weights as they are predicted - what was left for the KV cache.
The log tells the release, the model, its arguments and what each GPU has; config.json is looked for under the model's
name, as a folder here or on the Hugging Face hub, or is what --model says. The card does not stand in a log: without
--gpu what is learned holds for GPUs of exactly so many bytes. Flags of vLLM given here are for logs that begin after
vLLM's arguments were printed; what a log tells itself comes first. The lines are those from vLLM's first to `Application
startup complete`; level INFO is enough.

--target, --config: each engine that runs is one measurement, by the blocks of its pool. Without any of these options:
the vLLM servers of this machine.

--prometheus: each start that kvheadroom measured in the range (kvheadroom_overhead_sample_bytes) is one measurement. With
--config FILE and --vllm-version X.Y.Z so is each start that vLLM's own metrics tell of, from before kvheadroom ran: the
config gives model, GPU and flags of the replica at the host:port that Prometheus has as `instance`; the release has to be
that of all of them, so narrow --select and --range to it. It is fetched part by part: with --state FOLDER what was answered
is kept, and the same command goes on with it after Ctrl-C or an outage. Starts that may have run while nothing was answered
are left out.

Left out and counted are starts that failed or are not to the end in the log, GPUs that others used, engines that sleep or
are starting, pools that a flag sized, and figures that cannot be. Of several starts of one kind the median is taken; the
starts of one kind have the same model, weight format, card, parallel sizes, release and flags that matter.
A start is known by its lines: the same log twice, or grown, counts once. More: docs/calibration.md.

--out FILE keeps the measurements, with those that are there already; nothing is written before all was read.

exit code: 0 every start was measured and kept; 1 something was left out or is doubtful, or nothing is learned (the report
says what and why); 2 a wrong option, or a file that cannot be read, and then nothing is learned at all
"""


_SIZE_THE_POOL = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
_HELP = {"speculative_config": "JSON; its model is not kept of a log"}
_WITH_VALUE = tuple(
    (options, name, read, _HELP.get(name, text))
    for options, name, read, text in (*SWEPT, *SINGLE)
    if name not in _SIZE_THE_POOL
)


def add_calibrate_arguments(calibrate: argparse.ArgumentParser) -> None:
    """All of them."""
    where = calibrate.add_argument_group("where starts are looked for, one of these")
    where.add_argument(
        "--log",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="start-up logs of vLLM, plain or gzip, - for standard input; may be given several times",
    )
    where.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="URL",
        help="a running vLLM server, e.g. http://host:8000; may be given several times",
    )
    where.add_argument("--config", type=Path, metavar="FILE", help="the running servers of this YAML config")
    add_prometheus_arguments(calibrate.add_argument_group("or the history of a Prometheus"))
    calibrate.add_argument(
        "--out", type=Path, metavar="FILE", help="keep the measurements there, with those of earlier runs"
    )
    calibrate.add_argument(
        "--json", action="store_true", help="everything as JSON on standard output, and nothing else there"
    )
    logs = calibrate.add_argument_group("what a log does not tell")
    logs.add_argument("--gpu", type=gpu_name, metavar="NAME", help="B200, H100, ... (docs/gpus.md)")
    logs.add_argument(
        "--hbm-bytes",
        type=whole_number,
        metavar="N",
        help="memory of one GPU as CUDA reports it, as in the config",
    )
    logs.add_argument(
        "--model",
        metavar="MODEL",
        help="folder, config.json, or name on the hub (default: the name in the log)",
    )
    logs.add_argument(
        "--vllm-version",
        type=release,
        metavar="X.Y.Z",
        help="release, where the log does not tell it; vLLM's own metrics in a Prometheus never do",
    )
    flags = calibrate.add_argument_group("vLLM's flags, where the log does not tell them")
    for options, name, read, text in _WITH_VALUE:
        flags.add_argument(*options, dest=name, type=read, metavar="VALUE", help=text)
    for options, name, text in SWITCHES:
        flags.add_argument(*options, dest=name, action=argparse.BooleanOptionalAction, help=text)


def add_prometheus_arguments(history: "argparse._ActionsContainer") -> None:
    """A history, as a source of starts."""
    add_history_arguments(
        history, "what kvheadroom measured, as this Prometheus has it; with --config vLLM's own metrics too"
    )
    history.add_argument(
        "--every",
        metavar="TIME",
        help="between two looks at the history (default 60s); what was seen once is left out",
    )


_FLAGS = (*(name for _, name, _, _ in _WITH_VALUE), *(name for _, name, _ in SWITCHES))
_FOR_LOGS = ("gpu", "hbm_bytes", "model", "vllm_version", *_FLAGS)


def read_history_order(arguments: argparse.Namespace) -> "HistoryOrder | None":
    """The order; None where no Prometheus is named.

    Raises:
        OperatorError: options that do not go together, or one that cannot be.
    """
    given = vars(arguments)
    if arguments.prometheus is None:
        for name in (*OF_A_PROMETHEUS, "every"):
            if given[name] is not None:
                raise OperatorError(f"--{name.replace('_', '-')}: is for --prometheus URL")
        return None
    if arguments.log or arguments.target:
        raise OperatorError("calibrate: give either --log, --target or --prometheus")
    for name in _FOR_LOGS:
        if given[name] is not None and name != "vllm_version":
            raise OperatorError(
                f"--{name.replace('_', '-')}: is for --log FILE; of a history it stands in the config"
            )
    if arguments.vllm_version is not None and arguments.config is None:
        raise OperatorError(
            "--vllm-version: of a history it is for --config FILE; what kvheadroom measured tells it"
        )
    from kvheadroom.config import load_config
    from kvheadroom.history_calibrator import MOST_TICKS, HistoryOrder

    every_seconds = read_every(arguments.every or "60s")
    return HistoryOrder(
        api=read_api(arguments),
        range_seconds=read_range(arguments, every_seconds, MOST_TICKS),
        every_seconds=every_seconds,
        select=read_select(arguments),
        state=arguments.state,
        config=None if arguments.config is None else load_config(arguments.config),
        version=arguments.vllm_version,
    )


def read_log_order(arguments: argparse.Namespace) -> "LogOrder | None":
    """The order; None where the running servers are meant.

    Raises:
        OperatorError: options that do not go together.
    """
    from kvheadroom.log_calibrator import STANDARD_INPUT, LogOrder

    given = vars(arguments)
    if not arguments.log:
        for name in _FOR_LOGS:
            if given[name] is not None:
                raise OperatorError(
                    f"--{name.replace('_', '-')}: is for --log FILE; of a running server it stands in the config"
                )
        return None
    if arguments.target or arguments.config is not None:
        raise OperatorError("calibrate: give either --log, or --target and --config")
    if arguments.log.count(STANDARD_INPUT) > 1:
        raise OperatorError("--log: standard input (-) can be read once")
    if arguments.gpu == CPU:
        raise OperatorError("--gpu: on a CPU nothing is measured; its pool is sized by a flag")
    return LogOrder(
        paths=tuple(arguments.log),
        model=arguments.model,
        gpu=arguments.gpu,
        hbm_bytes=arguments.hbm_bytes,
        version=arguments.vllm_version,
        flags={name: given[name] for name in _FLAGS if given[name] is not None},
    )
