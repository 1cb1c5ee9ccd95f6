"""A loopback server that speaks Prometheus's API as far as range queries go, and may lie."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.doubles.http_server import Answer, http_server, text_answer

Asked = dict[str, str]
Told = Callable[[Asked], Answer]


class _Answers(dict[str, Answer]):
    """Whatever the query is."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self._told = told

    def get(self, path: str, default: Any = None) -> Any:
        parts = urlsplit(path)
        if parts.path != "/api/v1/query_range":
            return default
        return self._told({name: values[0] for name, values in parse_qs(parts.query).items()})


@contextlib.contextmanager
def prometheus_api(told: Told) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """The base URL, and (path, headers) of what was asked."""
    with http_server(_Answers(told)) as found:
        yield found


def matrix(*series: tuple[dict[str, str], list[tuple[float, str]]], **more: Any) -> Answer:
    result = [{"metric": labels, "values": [list(value) for value in values]} for labels, values in series]
    document = {"status": "success", "data": {"resultType": "matrix", "result": result}, **more}
    return text_answer(json.dumps(document), content_type="application/json")


def refusal(status: int, why: str) -> Answer:
    return text_answer(json.dumps({"status": "error", "errorType": "e", "error": why}), status=status)


def instants(asked: Asked) -> list[float]:
    """The steps that a query is about."""
    start, end, step = (float(asked[name]) for name in ("start", "end", "step"))
    return [round(start + number * step, 3) for number in range(round((end - start) / step) + 1)]
