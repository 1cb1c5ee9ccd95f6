"""A pass-through in front of a vLLM on loopback that keeps each /metrics page it handed out.

It makes "a page read at the same moment" exact: what the daemon was given is what it is compared with.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import requests

from tests.doubles.http_server import http_server, text_answer


@dataclass
class Handed:
    """Pages as they were handed out: (unix seconds when asked for, bytes)."""

    base_url: str = ""
    pages: list[tuple[float, bytes]] = field(default_factory=list)

    def page_taken_at(self, taken_at: float) -> bytes:
        """The page of the scrape that was sent at `taken_at`."""
        return next(body for asked_at, body in self.pages if asked_at >= taken_at)


def unchanged(page: bytes) -> bytes:
    return page


@contextlib.contextmanager
def page_proxy(vllm_url: str, change: Callable[[bytes], bytes] = unchanged) -> Iterator[Handed]:
    """Answers as the vLLM at `vllm_url` does, its pages passed through `change`."""
    handed = Handed()

    def metrics(request: BaseHTTPRequestHandler) -> None:
        asked_at = time.time()
        page = change(requests.get(f"{vllm_url}/metrics", timeout=10).content)
        handed.pages.append((asked_at, page))
        text_answer(page)(request)

    def passed_on(path: str) -> Callable[[BaseHTTPRequestHandler], None]:
        def answer(request: BaseHTTPRequestHandler) -> None:
            text_answer(requests.get(vllm_url + path, timeout=10).content)(request)

        return answer

    answers = {"/metrics": metrics, **{path: passed_on(path) for path in ("/version", "/v1/models")}}
    with http_server(answers) as (url, _):
        handed.base_url = url
        yield handed
