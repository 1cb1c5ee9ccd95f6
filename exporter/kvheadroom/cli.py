"""The `kvheadroom` command. The only module that prints or exits.

Long for its help texts, which teach; what the commands do is in the rooms below.

Exit codes: 0 fine; 1 it ran, but something is missing or failed; 2 usage or configuration.
"""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvheadroom import __version__
from kvheadroom.backtest_arguments import DESCRIPTION as BACKTEST_DESCRIPTION
from kvheadroom.backtest_arguments import EXAMPLES as BACKTEST_EXAMPLES
from kvheadroom.backtest_arguments import add_backtest_arguments, read_order
from kvheadroom.calibrate_arguments import DESCRIPTION as CALIBRATE_DESCRIPTION
from kvheadroom.calibrate_arguments import EXAMPLES as CALIBRATE_EXAMPLES
from kvheadroom.calibrate_arguments import add_calibrate_arguments, read_history_order, read_log_order
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.plan_arguments import (
    DESCRIPTION,
    EXAMPLES,
    VllmFlagsParser,
    add_plan_arguments,
    read_plan_options,
    read_what_if_options,
)
from kvheadroom.top_arguments import DESCRIPTION as TOP_DESCRIPTION
from kvheadroom.top_arguments import EXAMPLES as TOP_EXAMPLES
from kvheadroom.top_arguments import add_top_arguments, read_top_options

if TYPE_CHECKING:
    from kvheadroom.app import ConfigFile
    from kvheadroom.capacity.calibration_run import Looked
    from kvheadroom.capacity.readings import Scrape, SourceFailure
    from kvheadroom.config import Config
    from kvheadroom.history_calibrator import HistoryOrder
    from kvheadroom.top_arguments import TopOptions

T = TypeVar("T")

YEAR_SECONDS = 365 * 86_400.0
DEFAULT_LISTEN = ":9878"
DEMO_LISTEN = "127.0.0.1:9878"
INSPECT_SECONDS = 30.0
MAX_CASE_BYTES = 16 * 1024**2

OK, INCOMPLETE, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; the value is the exit code.

    The commands import what they need themselves: so --help is quick, and Ctrl-C is heard from the first moment.
    It ends the process there and then: a KeyboardInterrupt in the midst of an import can be lost or turned into
    another error by the library that is being imported, as pydantic's compiled part does.
    """
    _open_closed_streams()
    _never_fail_at_a_letter()
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        arguments = make_parser().parse_args(argv)
        if arguments.run in (_serve, _demo):
            # The way to end a daemon. It listens for it itself as soon as there is something to close.
            signal.signal(signal.SIGINT, lambda *_: os._exit(OK))
        code: int = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OperatorError as error:
        print(f"kvheadroom: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        # A second Ctrl-C, while the daemon was closing.
        return OK
    except BrokenPipeError:
        # The reader has seen enough. What is still buffered must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INCOMPLETE
    except OSError as error:
        print(f"kvheadroom: cannot write: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INCOMPLETE
    return code


def _open_closed_streams() -> None:
    """A daemon may be started with its streams closed; sockets must not take their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _never_fail_at_a_letter() -> None:
    """On a terminal or a pipe that is not UTF-8, what it does not have is a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def make_parser() -> argparse.ArgumentParser:
    """The command line, whole."""
    parser = argparse.ArgumentParser(
        prog="kvheadroom",
        description="KV-cache headroom of running vLLM servers: how many sessions fit, how many more fit now, "
        "and how far the live engine is from the analytic prediction.",
        epilog="Start with `kvheadroom demo` (no vLLM needed), then `kvheadroom serve` on a machine that runs vLLM, or "
        "`kvheadroom serve --target http://host:8000`.",
    )
    parser.add_argument("--version", action="version", version=f"kvheadroom {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=VllmFlagsParser)
    _add_serve(commands)
    _add_check(commands)
    _add_demo(commands)
    _add_inspect(commands)
    _add_plan(commands)
    _add_record(commands)
    _add_backtest(commands)
    _add_calibrate(commands)
    _add_top(commands)
    _add_rules(commands)
    _add_dashboards(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="watch vLLM servers and export what they have left",
        description="The daemon: scrapes vLLM servers, compares the KV pool with the prediction, and serves\n"
        "/metrics for Prometheus, / for people, /api/v1/status as JSON, /-/healthy and /-/ready.",
        epilog="Without --target and --config the vLLM servers that run on this machine are found in the table\n"
        "of processes, with their ports, model folders and flags, and watched as they come and go.\n"
        "Those of other users need root, their user, or CAP_SYS_PTRACE; in a container --pid=host.\n\n"
        "One target needs nothing else: the release comes from /version, the model's folder and\n"
        "max_model_len from /v1/models, flags from the engine's own metrics. What cannot be known\n"
        "that way is named on the page, with the line of the config file that gives it.\n\n"
        "config file (YAML):\n"
        "  scrape_interval: 5s\n"
        "  session_tokens: [262144]       # lengths to count sessions of\n"
        "  idle_times: [5m, 45m]          # is a session that was idle for so long still warm?\n"
        "  tier_sizes: [64GB, 256GB]      # what would an offload tier of this size find?\n"
        "  overhead_gb: 4.5               # per GPU: context, activations, CUDA graphs; default: estimated\n"
        "  calibration_file: /var/lib/kvheadroom/calibration.json   # keeps what starts had (docs/calibration.md)\n"
        "  replicas:\n"
        "    - url: http://host:8000\n"
        "      name: glm-a                # default: host:port\n"
        "      model: /models/llama       # a folder with config.json, if the server's is elsewhere\n"
        "      gpu: B200                  # or hbm_bytes: N, or CPU\n"
        "      gpus: [GPU-1a2b3c4d-...]   # this machine's GPUs that serve it: GPU- or MIG- UUIDs\n"
        "                                 # (nvidia-smi -L), or indices in the driver's order (PCI);\n"
        "                                 # default: those that the server's processes are on\n"
        "      weights_bytes: 16060522496\n"
        "      overhead_gb: 3.2           # wins over the one for all\n"
        "      flags: {tensor_parallel_size: 8}\n"
        "      # api_key_file: /run/secrets/vllm-key\n"
        "      # also: basic_auth, bearer_token_file, headers, tls, proxy_url, unix_socket, labels (docs/configuration.md)\n"
        "  file_sd_configs:               # servers that come and go, in Prometheus's form\n"
        "    - files: [/etc/vllm/*.yml]\n"
        "      replica: {gpu: B200}       # what they have in common\n"
        "  http_sd_configs:\n"
        "    - url: http://inventory/vllm\n"
        "  process_discovery: {}          # and the servers of this machine\n"
        "  # shard: 0/4                   # this daemon's share of all servers; the same as --shard\n"
        "  dcgm_exporters:                # GPUs of other machines, for `gpus: [UUID]` or `pod: namespace/name`\n"
        "    - url: http://host:9400\n\n"
        "SIGHUP reads the file again; a file with a fault changes nothing. `kvheadroom check` tries one first.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what_to_watch(serve)
    _add_listen(serve, DEFAULT_LISTEN)
    serve.set_defaults(run=_serve)


def _add_check(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    check = commands.add_parser(
        "check",
        help="validate a config, reach every source once, and say what is missing",
        description="Validates the config, reaches every source of every replica once, and prints what each gives, "
        "what is assumed, and what is missing with the line to add. Without --target and --config: of the vLLM "
        "servers that run on this machine.",
        epilog="exit code: 0 all there, 1 something is missing or failed, 2 the config is wrong",
    )
    _add_what_to_watch(check)
    check.set_defaults(run=_check)


def _add_demo(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="replay a recording of a real vLLM and watch it, with nothing else installed",
        description="Replays a recording of a real vLLM from a small server on loopback and watches it through "
        "the same code as `serve`. Nothing leaves this machine.",
    )
    demo.add_argument(
        "--recording",
        type=Path,
        metavar="FILE",
        help="a recording of your own (`kvheadroom record`); default: a vLLM 0.32 that comes with kvheadroom",
    )
    _add_listen(demo, DEMO_LISTEN)
    demo.set_defaults(run=_demo)


def _add_inspect(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    inspect = commands.add_parser(
        "inspect",
        help="read one vLLM /metrics page: one record per engine",
        description="Reads one vLLM /metrics page, from a file (- for standard input), a server or a recording, "
        "and tells what it says about the KV cache, one record per engine.",
        epilog="exit code: 0 all read, 1 with problems, 2 unreadable",
    )
    inspect.add_argument(
        "page",
        metavar="PAGE.txt|URL|FILE.jsonl.gz",
        help="a saved page, http://host:8000, or a recording (`kvheadroom record`)",
    )
    inspect.add_argument(
        "--at",
        metavar="TIME",
        help="the instant of a recording, from its first page on, e.g. 81s (default: its last page)",
    )
    inspect.add_argument("--json", action="store_true", help="JSON on standard output")
    inspect.set_defaults(run=_inspect)


def _add_plan(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="plan KV pools from model configs and flags, without a server",
        usage="kvheadroom plan MODEL --gpu NAME [vLLM's flags] [options]\n"
        "       kvheadroom plan [MODEL] --from URL [vLLM's flags] [options]\n"
        "       kvheadroom plan --cases FILE",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_plan_arguments(plan)
    plan.set_defaults(run=_plan)


def _add_record(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    record = commands.add_parser(
        "record",
        help="record what a vLLM server says, for replay, backtests and bug reports",
        description="Scrapes one vLLM server's whole /metrics page at an interval into one file. Kept are vLLM's own\n"
        "series and process_start_time_seconds, with all histograms: no prompt, no key, no header, no\n"
        "other program's metrics.",
        epilog="  kvheadroom record --target http://host:8000 --out night.jsonl.gz --interval 5s --duration 8h\n"
        "  kvheadroom inspect night.jsonl.gz --at 81s\n"
        "  kvheadroom demo --recording night.jsonl.gz\n\n"
        "A file of the same server and interval is continued, another one is refused; nothing is overwritten.\n"
        "Ctrl-C ends it with the file whole; a killed recorder loses the last 10 s. A scrape that fails is kept\n"
        "as a gap with its reason. With --mask nobody learns models, adapters, paths and addresses from the file;\n"
        "FILE.jsonl.gz.names.json tells you which word is which name, and is not for others.\n"
        "The format: docs/recordings.md.\n\n"
        "exit code: 0 recorded, 1 the server did not answer or the disk is full, 2 usage, config or another file",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    record.add_argument("--target", metavar="URL", help="a vLLM server, e.g. http://host:8000")
    record.add_argument("--config", type=Path, metavar="FILE", help="YAML config, instead of --target")
    record.add_argument("--replica", metavar="NAME", help="which replica of the config")
    record.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.jsonl.gz",
        help="the recording, new or to be continued",
    )
    record.add_argument("--interval", default="1s", metavar="TIME", help="between scrapes (default 1s)")
    record.add_argument("--duration", default="10m", metavar="TIME", help="how long (default 10m)")
    record.add_argument(
        "--max-size", default="200MB", metavar="SIZE", help="end before the file is larger (default 200MB)"
    )
    record.add_argument(
        "--mask", action="store_true", help="words in place of names: model-1, adapter-1, path-1"
    )
    record.set_defaults(run=_record)


def _add_backtest(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    backtest = commands.add_parser(
        "backtest",
        help="score alerts, forecasts and simple rules on what really happened",
        description=BACKTEST_DESCRIPTION,
        epilog=BACKTEST_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_backtest_arguments(backtest)
    backtest.set_defaults(run=_backtest)


def _add_calibrate(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="learn the overhead of a GPU from starts that happened",
        description=CALIBRATE_DESCRIPTION,
        epilog=CALIBRATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_calibrate_arguments(calibrate)
    calibrate.set_defaults(run=_calibrate)


def _add_top(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    top = commands.add_parser(
        "top",
        help="the board live in the terminal: who is in trouble, how many more sessions fit",
        description=TOP_DESCRIPTION,
        epilog=TOP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what_to_watch(top)
    add_top_arguments(top)
    top.set_defaults(run=_top)


def _add_rules(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    rules = commands.add_parser(
        "rules",
        help="write the recording rules and alerts for Prometheus",
        description="Writes the recording rules and alerts that come with this release as one file of Prometheus, to FILE\n"
        "or to standard output. docs/alerts.md lists them; each alert leads to a runbook that the daemon serves.",
        epilog="  kvheadroom rules --out /etc/prometheus/kvheadroom.rules.yml\n\n"
        "prometheus.yml:\n"
        "  rule_files: [/etc/prometheus/kvheadroom.rules.yml]\n\n"
        "For Prometheus 2.42 and later, 3 included. A file with another content (changed by hand, or of another\n"
        "release) is left alone without --force; whoever reads FILE meanwhile has the old one or the new one, whole.\n"
        "A threshold of your own is tried with `kvheadroom backtest --rules FILE`.\n\n"
        "exit code: 0 written, or there already; 1 left alone, or it cannot be written; 2 usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rules.add_argument("--out", type=Path, metavar="FILE", help="where to; default: standard output")
    _add_force(rules)
    rules.set_defaults(run=_rules)


def _add_dashboards(commands: "argparse._SubParsersAction[VllmFlagsParser]") -> None:
    dashboards = commands.add_parser(
        "dashboards",
        help="write the dashboards for Grafana",
        description="Writes the Grafana dashboards that come with this release into a folder, which is made if need be.",
        epilog="  kvheadroom dashboards --out /var/lib/grafana/dashboards/kvheadroom\n\n"
        "Import them in Grafana, or let it read the folder (/etc/grafana/provisioning/dashboards/kvheadroom.yaml):\n"
        "  apiVersion: 1\n"
        "  providers:\n"
        "    - name: kvheadroom\n"
        "      options: {path: /var/lib/grafana/dashboards/kvheadroom}\n\n"
        "Files with another content (changed by hand, or of another release) are left alone without --force, and then\n"
        "none is written. Other files of the folder are never touched.\n\n"
        "exit code: 0 written, or there already; 1 left alone, or one cannot be written; 2 usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    dashboards.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder")
    _add_force(dashboards)
    dashboards.set_defaults(run=_dashboards)


def _add_force(command: argparse.ArgumentParser) -> None:
    command.add_argument("--force", action="store_true", help="replace what is there and differs")


def _add_what_to_watch(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="URL",
        help="a vLLM server, e.g. http://host:8000; may be given several times",
    )
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML config; see `kvheadroom serve --help`"
    )
    command.add_argument(
        "--shard",
        metavar="I/N",
        help="watch only the I-th of N shares of all servers, from 0/N to (N-1)/N; an address is always in the same one",
    )


def _add_listen(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--web.listen-address",
        dest="listen",
        default=default,
        metavar="HOST:PORT",
        help=f"where to serve; an empty host means every interface (default {default})",
    )


def _serve(arguments: argparse.Namespace) -> int:
    # Until the daemon listens for it, a reload means nothing; by default it would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    from kvheadroom.app import ConfigFile

    path: Path | None = arguments.config
    config = _config(path, arguments.target, arguments.shard)
    config_file = (
        None if path is None else ConfigFile(path, lambda: _config(path, arguments.target, arguments.shard))
    )
    _run_loop(lambda: _serve_until_stopped(config, arguments.listen, config_file=config_file))
    return OK


def _check(arguments: argparse.Namespace) -> int:
    import asyncio

    from kvheadroom.app import check
    from kvheadroom.outputs.check_report import check_report, is_complete

    config = _config(arguments.config, arguments.target, arguments.shard)
    fleet = asyncio.run(check(config))
    for line in check_report(fleet):
        print(line)
    return OK if is_complete(fleet) else INCOMPLETE


def _config(path: Path | None, targets: list[str], shard: str | None = None) -> "Config":
    """The config file with what the command line adds to it; without file and target, the servers of this machine."""
    from kvheadroom.config import load_config, validate_address, validate_config

    if path is None and not targets:
        found_here: dict[str, Any] = {"process_discovery": {}}
        return validate_config(found_here | ({} if shard is None else {"shard": shard}), "the command line")
    try:
        added = [{"url": validate_address(target)} for target in targets]
    except OperatorError as error:
        raise OperatorError(f"--target: {error}") from error
    config = None if path is None else load_config(path)
    if config is not None and not added and shard is None:
        return config
    content = {} if config is None else config.model_dump(exclude_unset=True)
    content["replicas"] = [*content.get("replicas", ()), *added]
    if shard is not None:
        content["shard"] = shard
    return validate_config(content, "--target" if path is None else f"{path} with the command line")


def _demo(arguments: argparse.Namespace) -> int:
    from importlib import resources

    from kvheadroom.lab.recordings import read_recording
    from kvheadroom.lab.replay_server import replay, replay_config, replay_notice
    from kvheadroom.outputs.server import parse_listen_address

    if parse_listen_address(arguments.listen).host not in ("127.0.0.1", "::1", "localhost"):
        raise OperatorError("--web.listen-address: the demo stays on this machine; use 127.0.0.1:PORT")

    async def run() -> None:
        async with replay(recording, model_folder=model_folder) as url:
            print(
                f"the replay answers at {url}; try: kvheadroom plan --from {url} --block-size 64", flush=True
            )
            config = replay_config(url, shipped=own is None)
            await _serve_until_stopped(config, arguments.listen, notice=notice, with_gpus=False)

    own: Path | None = arguments.recording
    with resources.as_file(resources.files("kvheadroom") / "recordings") as folder:
        recording = read_recording(folder / "chat.jsonl.gz" if own is None else own)
        model_folder = str(folder / "tiny-llama") if own is None else None
        notice = replay_notice(recording, shipped=own is None)
        _run_loop(run)
    return OK


def _record(arguments: argparse.Namespace) -> int:
    import asyncio

    from kvheadroom.config import validate_duration, validate_size
    from kvheadroom.lab.recorder import Order, record

    if arguments.target is not None and (arguments.config is not None or arguments.replica is not None):
        raise OperatorError("--target: give either --target URL or --config FILE with --replica NAME")
    if arguments.target is None and arguments.config is None:
        raise OperatorError("nothing to record; give --target URL, or --config FILE with --replica NAME")
    config = _config(arguments.config, [] if arguments.target is None else [arguments.target])
    names = [replica.replica for replica in config.replicas]
    if not names:
        raise OperatorError("the config names no server itself; give --target URL")
    name = arguments.replica if arguments.replica is not None or len(names) > 1 else names[0]
    if name not in names:
        raise OperatorError(f"--replica: one server is recorded; name it: {', '.join(names[:20])}")
    progress = _Progress()
    order = Order(
        config=config,
        replica=config.replicas[names.index(name)],
        out=arguments.out,
        interval_seconds=_option("--interval", validate_duration, arguments.interval, 0.1, 3600.0),
        duration_seconds=_option("--duration", validate_duration, arguments.duration, 0.1, YEAR_SECONDS),
        max_bytes=_option("--max-size", validate_size, arguments.max_size),
        mask=arguments.mask,
        progress_seconds=0.5 if progress.on_terminal else 10.0,
    )

    ending = asyncio.run(record(order, progress.report))
    progress.tell(ending.sentence)
    return OK if ending.complete else INCOMPLETE


class _Progress:
    """Sentences on standard error; on a terminal each replaces the one before it."""

    def __init__(self) -> None:
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()

    def report(self, text: str) -> None:
        """How far it is."""
        self._print(text, "\r" if self.on_terminal else "\n")

    def tell(self, text: str) -> None:
        """What is to stay."""
        self._print(text, "\n")

    def end(self) -> None:
        """Make room for what comes on standard output."""
        if self.on_terminal:
            with contextlib.suppress(OSError, ValueError):
                print(end="\x1b[K", file=sys.stderr, flush=True)

    def _print(self, text: str, end: str) -> None:
        clear = "\x1b[K" if self.on_terminal else ""
        # A terminal that has gone away ends nothing.
        with contextlib.suppress(OSError, ValueError):
            print(f"kvheadroom: {text}{clear}", end=end, file=sys.stderr, flush=True)


def _backtest(arguments: argparse.Namespace) -> int:
    import logging

    order = read_order(arguments)

    from kvheadroom.lab.backtest.report import as_json, table
    from kvheadroom.lab.backtest.run import backtest
    from kvheadroom.outputs.json_report import to_json

    # What the daemon would have logged is told with the results.
    logging.getLogger("kvheadroom").setLevel(logging.CRITICAL)
    progress = _Progress()
    # All is imported: from here on Ctrl-C, or `timeout`, ends promtool too, and removes what was kept meanwhile.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        results = backtest(order, progress.report)
    except KeyboardInterrupt:
        progress.end()
        return INTERRUPTED
    progress.end()
    if arguments.json:
        for problem in dict.fromkeys(problem for result in results for problem in result.problems):
            progress.tell(problem)
        print(to_json(as_json(results)))
    else:
        for line in table(results):
            print(line)
    return OK if all(result.is_scored for result in results) else INCOMPLETE


def _calibrate(arguments: argparse.Namespace) -> int:
    history = read_history_order(arguments)
    order = read_log_order(arguments) if history is None else None

    from kvheadroom.calibrator import calibrate, known_before
    from kvheadroom.log_calibrator import look_at_logs
    from kvheadroom.outputs.calibration_json import calibration_document
    from kvheadroom.outputs.calibration_report import calibration_report
    from kvheadroom.outputs.json_report import to_json
    from kvheadroom.planner import ModelUnavailableError

    read = (*arguments.log, arguments.config, arguments.bearer_token_file, arguments.ca_file)
    before = known_before(arguments.out, read)
    if history is not None:
        found = _look_at_history(history)
        if found is None:
            return INTERRUPTED
        looked = found
    elif order is None:
        looked = _look_at_fleet(arguments)
    else:
        stdin = None if sys.stdin is None else sys.stdin.buffer
        try:
            looked = look_at_logs(order, stdin, os.environ, Path.home(), _Progress().tell)
        except ModelUnavailableError as reason:
            print(f"kvheadroom: {reason}", file=sys.stderr)
            return INCOMPLETE
    run = calibrate(looked, arguments.out, before)
    if arguments.json:
        print(to_json(calibration_document(run)))
    else:
        for line in calibration_report(run):
            print(line)
    return OK if run.is_complete else INCOMPLETE


def _look_at_history(order: "HistoryOrder") -> "Looked | None":
    """What a Prometheus has; None where it was broken off."""
    import time

    from kvheadroom.history_calibrator import look_at_history

    progress = _Progress()
    # From here on Ctrl-C, or `timeout`, removes what was kept meanwhile.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return look_at_history(order, time.time(), progress.report)
    except KeyboardInterrupt:
        return None
    finally:
        progress.end()


def _look_at_fleet(arguments: argparse.Namespace) -> "Looked":
    import asyncio
    import logging

    from kvheadroom.calibrator import look_at_fleet

    # What the daemon would have logged is told with the results.
    logging.getLogger("kvheadroom").setLevel(logging.CRITICAL)
    return asyncio.run(look_at_fleet(_config(arguments.config, arguments.target)))


def _top(arguments: argparse.Namespace) -> int:
    import asyncio
    import logging

    options = read_top_options(arguments)
    config = None
    if options.daemon is None:
        config = _config(arguments.config, arguments.target, arguments.shard)

    import uvloop

    from kvheadroom.outputs.live_screen import open_console
    from kvheadroom.top import from_daemon, from_servers, look_at_daemon, look_at_servers, show_live

    # What the daemon would have logged is on the board.
    logging.getLogger("kvheadroom").setLevel(logging.CRITICAL)
    console = open_console(sys.stdout)
    live = sys.stdout.isatty() and not console.is_dumb_terminal and not (options.once or options.json)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.daemon is not None:
            if live:
                runner.run(show_live(from_daemon(options.daemon), console, options.most))
                return OK
            return _show_once(runner.run(look_at_daemon(options.daemon)), f"from {options.daemon}", options)
        assert config is not None  # noqa: S101  one of the two is said
        if live:
            runner.run(show_live(from_servers(config), console, options.most))
            return OK
        return _show_once(runner.run(look_at_servers(config)), "one look", options)


def _show_once(answer: "dict[str, Any] | SourceFailure", origin: str, options: "TopOptions") -> int:
    from kvheadroom.capacity.readings import SourceFailure
    from kvheadroom.outputs.json_report import to_json
    from kvheadroom.outputs.live_screen import has_blocks, open_console, print_lines
    from kvheadroom.outputs.terminal import Space, board_lines
    from kvheadroom.sources.status_api import parse_status

    if isinstance(answer, SourceFailure):
        print(f"kvheadroom: {answer.detail}", file=sys.stderr)
        return INCOMPLETE
    view = parse_status(answer)
    if options.json:
        print(to_json(answer))
    else:
        console = open_console(sys.stdout)
        width, height = console.size
        # The last line is the prompt's.
        space = Space(
            width=width,
            height=height - 1 if console.is_terminal else None,
            most=options.most,
            blocks=has_blocks(console),
        )
        print_lines(console, board_lines(view, origin, space))
    return OK if view.is_complete else INCOMPLETE


def _rules(arguments: argparse.Namespace) -> int:
    from kvheadroom.shipped_files import rules_text

    if arguments.out is None:
        if arguments.force:
            raise OperatorError("--force: nothing is replaced on standard output; give --out FILE")
        print(rules_text(), end="")
        return OK
    return _write_files({arguments.out: rules_text()}, force=arguments.force)


def _dashboards(arguments: argparse.Namespace) -> int:
    from kvheadroom.shipped_files import dashboard_texts, make_folder

    make_folder(arguments.out)
    texts = {arguments.out / name: text for name, text in dashboard_texts().items()}
    return _write_files(texts, force=arguments.force)


def _write_files(texts: dict[Path, str], *, force: bool) -> int:
    from kvheadroom.shipped_files import NotWrittenError, write_files

    try:
        written = write_files(texts, force=force)
    except NotWrittenError as reason:
        print(f"kvheadroom: {reason}", file=sys.stderr)
        return INCOMPLETE
    for one in written:
        print(f"{one.path} was there already, the same" if one.was_there else f"wrote {one.path}")
    return OK


def _option(name: str, validate: "Callable[..., T]", *values: Any) -> "T":
    """The value of an option; a fault names it."""
    try:
        return validate(*values)
    except OperatorError as error:
        raise OperatorError(f"{name}: {error}") from error


_SWITCH_SECONDS = 0.001


def _run_loop(start: "Callable[[], Coroutine[Any, Any, None]]") -> None:
    import asyncio
    import logging

    import uvloop

    from kvheadroom.outputs.server import QuietBadRequests

    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("aiohttp.server").addFilter(QuietBadRequests())
    # While another thread computes, the loop waits so long each time that it wakes: with Python's 5 ms, 500 scrapes took 3 s in place of 0.1.
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(start())


async def _serve_until_stopped(
    config: "Config",
    listen: str,
    *,
    notice: str | None = None,
    with_gpus: bool = True,
    config_file: "ConfigFile | None" = None,
) -> None:
    from kvheadroom.app import serve
    from kvheadroom.outputs.server import parse_listen_address

    def announce(url: str) -> None:
        if notice:
            print(notice)
        names = ", ".join(replica.replica for replica in config.replicas[:5])
        more = f" and {len(config.replicas) - 5} more" if len(config.replicas) > 5 else ""
        if config.file_sd_configs or config.http_sd_configs:
            more += f"{' and ' if names else ''}what the config's sources of servers find"
        if config.process_discovery is not None:
            more += f"{' and ' if names or more else ''}the vLLM servers that run on this machine"
        print(f"watching {names}{more} every {config.scrape_interval:g} s; end with Ctrl-C")
        print(f"open {url}", flush=True)

    await serve(
        config,
        parse_listen_address(listen),
        notice=notice,
        with_gpus=with_gpus,
        config_file=config_file,
        announce=announce,
    )


def _inspect(arguments: argparse.Namespace) -> int:
    from kvheadroom.capacity.prefix_cache import page_findings
    from kvheadroom.capacity.readings import SourceFailure
    from kvheadroom.lab.recordings import is_meant_as_recording
    from kvheadroom.outputs.json_report import inspect_report, to_json
    from kvheadroom.outputs.page_report import page_report
    from kvheadroom.sources.vllm_metrics import parse_page

    source: str = arguments.page
    recorded = source != "-" and is_meant_as_recording(source)
    if recorded:
        source, body = _read_instant(source, arguments.at)
    elif arguments.at is not None:
        raise OperatorError(f"--at: {source[:200]} is no recording, and has no instants")
    else:
        body = _read_page(source)
    page = parse_page(body)
    if isinstance(page, SourceFailure):
        raise OperatorError(f"{source}: {page.detail}")
    page = replace(page, problems=(*page.problems, *page_findings(page)))
    if arguments.json:
        print(to_json(inspect_report(source, page), indent=2))
    else:
        if recorded:
            print(source)
        for row in page_report(page):
            print(row)
    for problem in page.problems:
        print(f"kvheadroom: {source}: {problem.reason}: {problem.detail}", file=sys.stderr)
    return INCOMPLETE if page.problems else OK


def _read_instant(source: str, at: str | None) -> tuple[str, bytes]:
    """(the recording and the instant in words, the page as it stood then)."""
    from kvheadroom.config import validate_duration
    from kvheadroom.lab.recordings import read_recording

    offset = None if at is None else _option("--at", validate_duration, at, 0.0, YEAR_SECONDS)
    recording = read_recording(Path(source))
    entry = recording.last if offset is None else recording.entry_at(offset)
    return f"{source} at {entry.taken_at - recording.first_at:.3f} s", entry.page.encode()


def _read_page(source: str) -> bytes:
    """The bytes of one page.

    Raises:
        OperatorError: it cannot be read.
    """
    if source == "-":
        return b"" if sys.stdin is None else sys.stdin.buffer.read()
    if source.startswith(("http://", "https://")):
        return _get(source)
    try:
        return Path(source).read_bytes()
    except (OSError, ValueError) as error:
        detail = getattr(error, "strerror", None) or str(error)
        raise OperatorError(f"{source}: {detail}") from error


def _get(url: str) -> bytes:
    import asyncio

    from kvheadroom.capacity.readings import SourceFailure
    from kvheadroom.config import validate_address
    from kvheadroom.sources.endpoint import Endpoint
    from kvheadroom.sources.http import fetch, open_session

    endpoint = Endpoint(validate_address(url.rstrip("/").removesuffix("/metrics")))

    async def get() -> "Scrape | SourceFailure":
        async with open_session() as session:
            return await fetch(
                session, endpoint, "/metrics", source="metrics", timeout_seconds=INSPECT_SECONDS
            )

    answer = asyncio.run(get())
    if isinstance(answer, SourceFailure):
        raise OperatorError(answer.detail)
    return answer.body


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.place is not None:
        return _what_if(arguments)
    if any(one is not None for one in (arguments.config, arguments.api_key_file, arguments.runs_with)):
        raise OperatorError("--config, --api-key-file and --runs-with are of --from URL, which is missing")
    if (arguments.model is None) == (arguments.cases is None):
        raise OperatorError("plan: say either MODEL or --cases FILE; `kvheadroom plan --help` has examples")
    return _plan_model(arguments) if arguments.cases is None else _plan_cases(arguments)


def _plan_model(arguments: argparse.Namespace) -> int:
    from kvheadroom.outputs.plan_json import plan_json
    from kvheadroom.outputs.plan_report import is_answered, plan_report
    from kvheadroom.planner import ModelUnavailableError, make_plans

    options = read_plan_options(arguments)
    try:
        models = make_plans(options, os.environ, Path.home(), _Progress().tell)
    except ModelUnavailableError as reason:
        print(f"kvheadroom: {reason}", file=sys.stderr)
        return INCOMPLETE
    if arguments.json:
        print(plan_json(models, by_sum=options.by_sum))
    else:
        for line in plan_report(models, by_sum=options.by_sum, explain=arguments.explain):
            print(line)
    return OK if is_answered(models, by_sum=options.by_sum) else INCOMPLETE


def _what_if(arguments: argparse.Namespace) -> int:
    import logging

    options = read_what_if_options(arguments)

    from kvheadroom.live_planner import ServerUnavailableError, make_what_if
    from kvheadroom.outputs.plan_words import as_options
    from kvheadroom.outputs.what_if_json import what_if_json
    from kvheadroom.outputs.what_if_report import is_answered, what_if_report
    from kvheadroom.planner import ModelUnavailableError

    # What the daemon would have logged is told with the answer.
    logging.getLogger("kvheadroom").setLevel(logging.CRITICAL)
    try:
        answer = make_what_if(options, os.environ, Path.home(), _Progress().tell)
    except (ServerUnavailableError, ModelUnavailableError) as reason:
        print(f"kvheadroom: {as_options(str(reason))}", file=sys.stderr)
        return INCOMPLETE
    if arguments.json:
        print(what_if_json(answer))
    else:
        for line in what_if_report(answer, explain=arguments.explain):
            print(line)
    return OK if is_answered(answer) else INCOMPLETE


def _plan_cases(arguments: argparse.Namespace) -> int:
    import json

    from kvheadroom.capacity.cases import assumed_release, plan_case

    complete = True
    told: set[str] = set()
    for line in _case_lines(arguments.cases):
        case, unreadable = _read_case(line)
        answer = plan_case(case) if case is not None else {"id": None, "unknown": unreadable}
        if "unknown" in answer:
            complete = False
        elif case is not None and (assumed := assumed_release(case)) is not None and assumed not in told:
            told.add(assumed)
            print(f"kvheadroom: {assumed}", file=sys.stderr)
        print(json.dumps(answer, allow_nan=False))
    return OK if complete else INCOMPLETE


def _case_lines(name: str) -> "Iterator[bytes]":
    """The lines of a file, none longer than can be a case; of a longer one its beginning.

    Raises:
        OperatorError: it cannot be read.
    """
    if not name:
        raise OperatorError("--cases: the name of a file is needed")
    try:
        with Path(name).open("rb") as file:
            while line := file.readline(MAX_CASE_BYTES + 1):
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(MAX_CASE_BYTES)
                yield line
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OperatorError(f"--cases: {name[:200]} cannot be read: {reason}") from error


def _read_case(line: bytes) -> "tuple[dict[str, Any] | None, str]":
    """(the case, empty), or (None, why the line holds none)."""
    import json

    if len(line) > MAX_CASE_BYTES:
        return None, f"the line is longer than {MAX_CASE_BYTES // 1024**2} MiB"
    if not line.strip():
        return None, "the line is empty"
    try:
        case = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return None, "the line is no UTF-8"
    except json.JSONDecodeError as error:
        return None, f"the line is no JSON, and each line is a case ({error.msg}, character {error.pos + 1})"
    except RecursionError:
        return None, "the line is nested too deeply"
    except ValueError:
        return None, "the line is no JSON (a number has too many digits)"
    if not isinstance(case, dict):
        return None, "the line is no JSON object"
    return case, ""
