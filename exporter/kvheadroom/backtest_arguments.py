"""The `backtest` command's arguments, and the order that they are."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest.events import SCALES

if TYPE_CHECKING:
    from kvheadroom.lab.backtest.run import Order, PrometheusOrder

YEAR_SECONDS = 365 * 86_400.0

DESCRIPTION = """\
Would this alert have helped? Runs recordings, or the history that a Prometheus has, through the daemon's own code
and scores every signal on the preemptions that really came: how many episodes it warned of, how long before, and how
often it was wrong. Simple rules (usage > 0.9, waiting > 0, ...) are always in the table: what is no better than they
are is not worth having.
"""

EXAMPLES = """\
examples:
  kvheadroom record --target http://host:8000 --out night.jsonl.gz --interval 5s --duration 8h
  kvheadroom backtest --recording night.jsonl.gz --every 5s --scale production
  kvheadroom backtest --prometheus http://prometheus:9090 --range 7d --rules my.rules.yml
  kvheadroom backtest --recording a.jsonl.gz b.jsonl.gz --json > scores.json

columns: warned: episodes with an alarm at most the horizon before them, of all; lead: from the first such alarm to the
first preemption; false: alarms that no preemption followed within the horizon; late: alarms that began inside an
episode; open: alarms whose horizon was not recorded to its end; firing: share of the time; Brier: mean squared error of
what it said about the horizon, firing taken as certainty.
The definitions: docs/backtest.md.

exit code: 0 scored, 1 something could not be scored (it is said), 2 usage, or a file that cannot be read
"""


def add_backtest_arguments(backtest: argparse.ArgumentParser) -> None:
    """All of them."""
    backtest.add_argument(
        "--recording",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="recordings (`kvheadroom record`); may be given several times",
    )
    _add_prometheus(backtest)
    backtest.add_argument(
        "--rules",
        type=Path,
        metavar="FILE",
        help="Prometheus rules whose alerts are scored, in place of kvheadroom's own",
    )
    backtest.add_argument(
        "--promtool",
        type=Path,
        metavar="PROGRAM",
        help="Prometheus's promtool, which evaluates them (default: from the PATH)",
    )
    backtest.add_argument(
        "--every",
        metavar="TIME",
        help="between two looks at the engine (default 1s; of a Prometheus 15s)",
    )
    backtest.add_argument(
        "--scale",
        choices=tuple(SCALES),
        help="small: horizon 60s, episodes 20s apart, alarms that pause up to 5s are one (default for recordings); "
        "production: 15m, 5m, 1m (default for a Prometheus)",
    )
    backtest.add_argument(
        "--horizon",
        metavar="TIME",
        help="how long before an episode an alarm is of use, in place of the scale's",
    )
    backtest.add_argument("--json", action="store_true", help="JSON on standard output")


def _add_prometheus(backtest: argparse.ArgumentParser) -> None:
    backtest.add_argument(
        "--prometheus", metavar="URL", help="score the history of every vLLM server that this Prometheus has"
    )
    backtest.add_argument("--range", metavar="TIME", help="how far back from now (default 7d)")
    backtest.add_argument(
        "--select",
        metavar="MATCHERS",
        help='only these servers, as in PromQL: \'namespace="llm",job=~"vllm.*"\'',
    )
    backtest.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="keep there what was fetched, and go on with it next time",
    )
    backtest.add_argument(
        "--bearer-token-file", type=Path, metavar="FILE", help="holds the token that this Prometheus asks for"
    )
    backtest.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="certificates (PEM) of the authority of its https:// address",
    )


_FOR_PROMETHEUS = ("range", "select", "state", "bearer_token_file", "ca_file")


def read_order(arguments: argparse.Namespace) -> "Order":
    """The order.

    Raises:
        OperatorError: naming the option.
    """
    from kvheadroom.lab.backtest.run import Order

    if not arguments.recording and arguments.prometheus is None:
        raise OperatorError("backtest: say what to score: --recording FILE or --prometheus URL")
    if arguments.recording and arguments.prometheus is not None:
        raise OperatorError("backtest: give either --recording or --prometheus")
    of_recordings = arguments.prometheus is None
    for name in _FOR_PROMETHEUS:
        if of_recordings and getattr(arguments, name) is not None:
            raise OperatorError(f"--{name.replace('_', '-')}: is for --prometheus URL")
    scale = SCALES[arguments.scale or ("small" if of_recordings else "production")]
    if arguments.horizon is not None:
        scale = replace(scale, horizon_seconds=_seconds("--horizon", arguments.horizon, 1.0))
    every = arguments.every or ("1s" if of_recordings else "15s")
    # Prometheus counts in milliseconds.
    every_seconds = round(_seconds("--every", every, 0.1), 3)
    return Order(
        recordings=tuple(arguments.recording),
        prometheus=None if of_recordings else _read_prometheus(arguments, every_seconds),
        every_seconds=every_seconds,
        scale=scale,
        rules=arguments.rules,
        promtool=arguments.promtool,
    )


def _read_prometheus(arguments: argparse.Namespace, every_seconds: float) -> "PrometheusOrder":
    from kvheadroom.access_settings import base_url
    from kvheadroom.lab.backtest.daemon_run import MAX_TICKS
    from kvheadroom.lab.backtest.run import PrometheusOrder
    from kvheadroom.sources.prometheus_api import PrometheusApi

    try:
        url = base_url(arguments.prometheus)
    except ValueError as error:
        raise OperatorError(f"--prometheus: {error}") from error
    range_seconds = _seconds("--range", arguments.range or "7d", 1.0)
    if range_seconds / every_seconds >= MAX_TICKS:
        raise OperatorError(f"--range: with this --every it has more than {MAX_TICKS:,} ticks")
    authority, token = arguments.ca_file, arguments.bearer_token_file
    if authority is not None and "-----BEGIN CERTIFICATE-----" not in _text("--ca-file", authority):
        raise OperatorError(f"--ca-file: {authority} holds no certificate (PEM)")
    return PrometheusOrder(
        api=PrometheusApi(
            url=url,
            token=None if token is None else _one_line("--bearer-token-file", token),
            ca_file=authority,
        ),
        range_seconds=range_seconds,
        select=(arguments.select or "").strip().removeprefix("{").removesuffix("}"),
        state=arguments.state,
    )


def _one_line(option: str, path: Path) -> str:
    text = _text(option, path).strip()
    if not text or not text.isascii() or not text.isprintable():
        raise OperatorError(f"{option}: {path} must hold one line of printable ASCII")
    return text


def _text(option: str, path: Path) -> str:
    from kvheadroom.strict_yaml import read_small_file

    try:
        return read_small_file(path)
    except OSError as error:
        raise OperatorError(f"{option}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OperatorError(f"{option}: {path} is no text") from error


def _seconds(option: str, text: str, least: float) -> float:
    from kvheadroom.config import validate_duration

    shown = text
    days = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([dw])\s*", text)
    if days is not None:
        text = f"{float(days[1]) * {'d': 24, 'w': 168}[days[2]]:f}h"
    try:
        return validate_duration(text, least, YEAR_SECONDS)
    except OperatorError as error:
        raise OperatorError(f"{option}: {error}".replace(repr(text), repr(shown))) from error
