"""A log of requests, one JSON object a line: read as arrivals, and written of what was simulated."""

import gzip
import json
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.simulator.block_pool import Chain
from kvheadroom.lab.simulator.engine import Request

GIVEN_UP = -1
"""The status of a request whose client went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One line.

    Attributes:
        session, turn: whose history it continues, and how manieth request of it this is.
        sent_at: unix seconds.
        prompt_tokens: of the request.
        output_tokens: that it ends after; of one that was given up, what it asked for.
        max_tokens: what it asked for.
        prefix_tokens: of its prompt, those that its session's history has too.
        shared_prefix, shared_prefix_tokens: a beginning that sessions share, by name; "" where there is none.
        given_up_at: when its client went away, None if it stayed.
    """

    session: str
    turn: int
    sent_at: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prefix_tokens: int = 0
    shared_prefix: str = ""
    shared_prefix_tokens: int = 0
    given_up_at: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no request can be.

        Raises:
            ValueError: naming what is wrong.
        """
        if self.prompt_tokens < 1 or not 1 <= self.output_tokens <= self.max_tokens:
            raise ValueError("a request has a prompt, and from 1 to max_tokens tokens of output")
        if not 0 <= max(self.prefix_tokens, self.shared_prefix_tokens) <= self.prompt_tokens:
            raise ValueError("a prefix is longer than its prompt")


def read_request_log(path: Path) -> list[LoggedRequest]:
    """The requests in the order they were sent; those that the server refused are left out.

    Raises:
        OperatorError: naming the file and the line.
    """
    requests = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    request = _read_line(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise OperatorError(f"{path}: line {number} is no request: {error!r}") from error
                if request is not None:
                    requests.append(request)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise OperatorError(f"{path}: cannot be read: {error}") from error
    return sorted(requests, key=lambda request: request.sent_at)


def _read_line(said: Mapping[str, Any]) -> LoggedRequest | None:
    given_up = said["status"] == GIVEN_UP
    if not given_up and said["status"] != 200:
        return None
    return LoggedRequest(
        session=str(said["session"]),
        turn=int(said["turn"]),
        sent_at=float(said["t_send"]),
        prompt_tokens=int(said["prompt_tokens"]),
        output_tokens=int(said["want"] if given_up else said["got"]),
        max_tokens=int(said["want"]),
        prefix_tokens=int(said.get("prefix_tokens", 0)),
        shared_prefix=str(said.get("shared_prefix", "")),
        shared_prefix_tokens=int(said.get("shared_prefix_tokens", 0)),
        given_up_at=float(said["t_end"]) if given_up else None,
    )


def log_line(number: int, request: Request, ended_at: float, *, left: bool) -> str:
    """The line of a request that ended; instants in unix seconds."""
    return json.dumps(
        {
            "id": number,
            "session": request.session,
            "turn": request.turn,
            "t_send": request.arrived_at,
            "t_first": request.first_token_at,
            "t_end": ended_at,
            "prompt_tokens": request.num_prompt_tokens,
            "prefix_tokens": request.num_prefix_tokens,
            "want": request.max_tokens,
            "got": request.num_output_tokens,
            "preemptions": request.num_preemptions,
            "status": GIVEN_UP if left else 200,
        },
        separators=(",", ":"),
    )


class LoggedArrivals:
    """The requests of a log, at the instants they were sent.

    Attributes:
        requests: all that were handed out, in their order.
    """

    def __init__(self, log: Iterable[LoggedRequest], block_size: int) -> None:
        self.requests: list[Request] = []
        self._left = deque(log)
        self._block_size = block_size
        self._sessions: dict[str, tuple[Chain, int]] = {}
        """(sequence of tokens, how many of them are known)."""
        self._shared: dict[str, Chain] = {}

    def next_at(self) -> float | None:
        """When the next one was sent."""
        return self._left[0].sent_at if self._left else None

    def take(self) -> Request:
        """The next one."""
        logged = self._left.popleft()
        request = Request(
            session=logged.session,
            turn=logged.turn,
            chain=self._chain(logged),
            arrived_at=logged.sent_at,
            num_prompt_tokens=logged.prompt_tokens,
            num_prefix_tokens=logged.prefix_tokens,
            output_end=logged.output_tokens,
            max_tokens=logged.max_tokens,
            ends_by="length" if logged.output_tokens == logged.max_tokens else "stop",
            leaves_at=logged.given_up_at,
        )
        self.requests.append(request)
        return request

    def leaves(self, request: Request) -> bool:
        """In the log, it did."""
        return request.leaves_at is not None

    def ended(self, request: Request, at: float, *, left: bool) -> None:
        """The log knows already what comes next."""

    def _chain(self, logged: LoggedRequest) -> Chain:
        known = self._sessions.get(logged.session)
        if known is None:
            chain = Chain()
            if logged.shared_prefix:
                shared = self._shared.setdefault(logged.shared_prefix, Chain())
                chain = Chain(shared, logged.shared_prefix_tokens // self._block_size)
        elif logged.prefix_tokens < known[1]:
            chain = Chain(known[0], logged.prefix_tokens // self._block_size)
        else:
            chain = known[0]
        self._sessions[logged.session] = chain, logged.prompt_tokens + logged.output_tokens
        return chain
