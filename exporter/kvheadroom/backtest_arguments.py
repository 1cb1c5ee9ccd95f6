"""The `backtest` command's arguments, and the order that they are."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest.events import SCALES
from kvheadroom.prometheus_arguments import (
    OF_A_PROMETHEUS,
    add_history_arguments,
    read_api,
    read_every,
    read_range,
    read_seconds,
    read_select,
)

if TYPE_CHECKING:
    from kvheadroom.lab.backtest.run import Order, PrometheusOrder

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
    add_history_arguments(backtest, "score the history of every vLLM server that this Prometheus has")
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
    for name in OF_A_PROMETHEUS:
        if of_recordings and getattr(arguments, name) is not None:
            raise OperatorError(f"--{name.replace('_', '-')}: is for --prometheus URL")
    scale = SCALES[arguments.scale or ("small" if of_recordings else "production")]
    if arguments.horizon is not None:
        scale = replace(scale, horizon_seconds=read_seconds("--horizon", arguments.horizon, 1.0))
    every = arguments.every or ("1s" if of_recordings else "15s")
    every_seconds = read_every(every)
    return Order(
        recordings=tuple(arguments.recording),
        prometheus=None if of_recordings else _read_prometheus(arguments, every_seconds),
        every_seconds=every_seconds,
        scale=scale,
        rules=arguments.rules,
        promtool=arguments.promtool,
    )


def _read_prometheus(arguments: argparse.Namespace, every_seconds: float) -> "PrometheusOrder":
    from kvheadroom.lab.backtest.daemon_run import MAX_TICKS
    from kvheadroom.lab.backtest.run import PrometheusOrder

    return PrometheusOrder(
        api=read_api(arguments),
        range_seconds=read_range(arguments, every_seconds, MAX_TICKS),
        select=read_select(arguments),
        state=arguments.state,
    )
