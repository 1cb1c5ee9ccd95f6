"""Arguments of the commands that read the history of a Prometheus."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvheadroom.capacity.errors import OperatorError

if TYPE_CHECKING:
    from kvheadroom.sources.prometheus_api import PrometheusApi

YEAR_SECONDS = 365 * 86_400.0
OF_A_PROMETHEUS = ("range", "select", "state", "bearer_token_file", "ca_file")
"""Options that mean nothing without --prometheus, by their names in a namespace."""


def add_history_arguments(command: "argparse._ActionsContainer", what: str) -> None:
    """All of them.

    Args:
        what: the help of --prometheus.
    """
    command.add_argument("--prometheus", metavar="URL", help=what)
    command.add_argument("--range", metavar="TIME", help="how far back from now (default 7d)")
    command.add_argument(
        "--select",
        metavar="MATCHERS",
        help='only these servers, as in PromQL: \'namespace="llm",job=~"vllm.*"\'',
    )
    command.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="keep there what was fetched, and go on with it next time",
    )
    command.add_argument(
        "--bearer-token-file", type=Path, metavar="FILE", help="holds the token that this Prometheus asks for"
    )
    command.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="certificates (PEM) of the authority of its https:// address",
    )


def read_api(arguments: argparse.Namespace) -> "PrometheusApi":
    """The Prometheus that is named.

    Raises:
        OperatorError: naming the option.
    """
    from kvheadroom.access_settings import base_url
    from kvheadroom.sources.prometheus_api import PrometheusApi

    try:
        url = base_url(arguments.prometheus)
    except ValueError as error:
        raise OperatorError(f"--prometheus: {error}") from error
    authority, token = arguments.ca_file, arguments.bearer_token_file
    if authority is not None and "-----BEGIN CERTIFICATE-----" not in _text("--ca-file", authority):
        raise OperatorError(f"--ca-file: {authority} holds no certificate (PEM)")
    return PrometheusApi(
        url=url,
        token=None if token is None else _one_line("--bearer-token-file", token),
        ca_file=authority,
    )


def read_select(arguments: argparse.Namespace) -> str:
    """Matchers without braces around them; empty for none."""
    return (arguments.select or "").strip().removeprefix("{").removesuffix("}")


def read_range(arguments: argparse.Namespace, every_seconds: float, most_ticks: int) -> float:
    """Seconds back from now.

    Raises:
        OperatorError: naming the option.
    """
    seconds = read_seconds("--range", arguments.range or "7d", 1.0)
    if seconds / every_seconds >= most_ticks:
        raise OperatorError(f"--range: with this --every it has more than {most_ticks:,} ticks")
    return seconds


def read_every(text: str) -> float:
    """Seconds from one look to the next.

    Raises:
        OperatorError: naming the option.
    """
    # Prometheus counts in milliseconds.
    return round(read_seconds("--every", text, 0.1), 3)


def read_seconds(option: str, text: str, least: float) -> float:
    """A time with its unit, days and weeks among them.

    Raises:
        OperatorError: naming the option.
    """
    from kvheadroom.config import validate_duration

    shown = text
    days = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([dw])\s*", text)
    if days is not None:
        text = f"{float(days[1]) * {'d': 24, 'w': 168}[days[2]]:f}h"
    try:
        return validate_duration(text, least, YEAR_SECONDS)
    except OperatorError as error:
        raise OperatorError(f"{option}: {error}".replace(repr(text), repr(shown))) from error


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
