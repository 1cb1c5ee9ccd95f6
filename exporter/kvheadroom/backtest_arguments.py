"""The `backtest` command's arguments, and the order that they are."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest.events import SCALES

if TYPE_CHECKING:
    from kvheadroom.lab.backtest.run import Order

YEAR_SECONDS = 365 * 86_400.0

DESCRIPTION = """\
Would this alert have helped? Runs recordings through the daemon's own code and scores every signal on the preemptions
that really came: how many episodes it warned of, how long before, and how often it was wrong. Simple rules
(usage > 0.9, waiting > 0, ...) are always in the table: what is no better than they are is not worth having.
"""

EXAMPLES = """\
examples:
  kvheadroom backtest --recording night.jsonl.gz --every 5s --scale production
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
        "--every", default="1s", metavar="TIME", help="between two looks at the engine (default 1s)"
    )
    backtest.add_argument(
        "--scale",
        choices=tuple(SCALES),
        default="small",
        help="small: horizon 60s, episodes 20s apart, alarms that pause up to 5s are one (default); "
        "production: 15m, 5m, 1m",
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

    if not arguments.recording:
        raise OperatorError("backtest: say what to score: --recording FILE")
    scale = SCALES[arguments.scale]
    if arguments.horizon is not None:
        scale = replace(scale, horizon_seconds=_seconds("--horizon", arguments.horizon, 1.0))
    return Order(
        recordings=tuple(arguments.recording),
        # Prometheus counts in milliseconds.
        every_seconds=round(_seconds("--every", arguments.every, 0.1), 3),
        scale=scale,
        rules=arguments.rules,
        promtool=arguments.promtool,
    )


def _seconds(option: str, text: str, least: float) -> float:
    from kvheadroom.config import validate_duration

    try:
        return validate_duration(text, least, YEAR_SECONDS)
    except OperatorError as error:
        raise OperatorError(f"{option}: {error}") from error
