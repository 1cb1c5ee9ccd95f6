"""The `top` command's arguments, and the order that they are."""

import argparse
from dataclasses import dataclass

from kvheadroom.capacity.errors import OperatorError

DESCRIPTION = """\
The board in the terminal: who is in trouble and how many more sessions fit, then every engine, worst first: pool in
use, sessions in use of those that fit and of those predicted, how many more fit, how likely a preemption is within 30
seconds, 2 and 10 minutes, what requests wait for, preemptions, and how long an idle session stays in the cache.
Without an option the vLLM servers of this machine are found and watched, as by `serve`; no daemon is needed.
"""

EXAMPLES = """\
examples:
  kvheadroom top                                      # this machine's servers; q or Ctrl-C ends
  kvheadroom top --target http://host:8000
  kvheadroom top --from http://monitor:9878           # what a running `serve` or `demo` knows, forecasts included
  kvheadroom top --from http://monitor:9878 --once    # the board once, as text
  kvheadroom top --json | jq .verdict.sentence        # the document of /api/v1/status

Watching itself, top knows nothing of what was before it began: forecasts need half a minute, and a single look
(--once, --json, or output that is no terminal) has none, and says so. A daemon that runs anyway has them.
On a terminal as many engines are shown as there is room for, and how many are not; else all of them.
NO_COLOR turns colours off. From 190 columns on an engine has one line. A calibration_file is left to the daemon.

exit code: 0 ended, or every server gave its numbers; 1 with --once, --json or without a terminal: a server, a list of
servers or the daemon did not; 2 usage or config
"""


def add_top_arguments(top: argparse.ArgumentParser) -> None:
    """Those beside what is watched."""
    top.add_argument(
        "--from",
        dest="daemon",
        metavar="URL",
        help="show what a running kvheadroom daemon knows, e.g. http://host:9878, in place of watching servers",
    )
    top.add_argument("--once", action="store_true", help="one look, as text, and end")
    top.add_argument(
        "--json", action="store_true", help="one look, as the JSON document of /api/v1/status, and end"
    )
    top.add_argument("--most", metavar="N", help="show N engines at most")


@dataclass(frozen=True, slots=True)
class TopOptions:
    """What to show.

    Attributes:
        daemon: its address; None to watch servers.
        most: engines at most; None for as many as there is room for.
    """

    daemon: str | None
    once: bool
    json: bool
    most: int | None


def read_top_options(arguments: argparse.Namespace) -> TopOptions:
    """What was asked for.

    Raises:
        OperatorError: naming the option.
    """
    from kvheadroom.config import validate_address

    daemon = arguments.daemon
    if daemon is not None:
        if arguments.target or arguments.config is not None or arguments.shard is not None:
            raise OperatorError(
                "--from: what is watched is the daemon's matter; leave --target, --config and --shard out"
            )
        try:
            daemon = validate_address(daemon)
        except OperatorError as error:
            raise OperatorError(f"--from: {error}") from error
    if arguments.most is not None and not (
        arguments.most.isascii() and arguments.most.isdigit() and int(arguments.most[:9]) > 0
    ):
        raise OperatorError(f"--most: {arguments.most[:40]!r} is no number of engines; write e.g. 20")
    return TopOptions(
        daemon, arguments.once, arguments.json, None if arguments.most is None else int(arguments.most[:9])
    )
