"""What every use of `requests` here needs: a deadline over all of it, and what really went wrong."""

import threading
from collections.abc import Callable
from typing import TypeVar

import requests

T = TypeVar("T")


def unchanged(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """As `auth=`: else a .netrc would put a password of its own in the token's place."""
    return request


def innermost(error: BaseException) -> str:
    """What really happened, without the addresses of objects around it."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return getattr(error, "strerror", None) or type(error).__name__


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """The work's value, None when it takes longer: names that never resolve and trickling bytes have no deadline."""
    answers: list[T] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as fault:  # noqa: BLE001  it is raised again below
            faults.append(fault)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if faults:
        raise faults[0]
    return answers[0] if answers else None
