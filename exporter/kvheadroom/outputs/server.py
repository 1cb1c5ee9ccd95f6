"""The daemon's HTTP server: /metrics, /, /engines/<id>, /api/v1/status, /-/healthy, /-/ready, /runbooks/<alert>."""

import contextlib
import gzip
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.fleet import FleetAssessment, withhold_stale
from kvheadroom.outputs.json_report import status_report, to_json
from kvheadroom.outputs.prometheus import exposition
from kvheadroom.outputs.status_page import (
    STYLE_HASH,
    Page,
    read_view,
    render_engine,
    render_fleet,
    render_words,
)
from kvheadroom.shipped_files import shipped_folder

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


PAGE_POLICY = (
    f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; img-src data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Of the pages: no script at all, the one style sheet that stands in them, an empty icon."""


class FleetSource(Protocol):
    """Where the latest assessment of the fleet is read from."""

    @property
    def fleet(self) -> FleetAssessment:
        """The latest state, stale parts included."""


class ListenError(OperatorError):
    """The port cannot be opened, or the address is none."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Host and port; an empty host means every interface, port 0 any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen_address(text: str) -> ListenAddress:
    """`:9878`, `127.0.0.1:9878`, `[::1]:9878`, `localhost:9878`.

    Raises:
        ListenError: with what is allowed.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]\s]*)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ListenError(f"{text!r} is no listen address; write e.g. :9878, 127.0.0.1:9878 or [::1]:9878")
    return ListenAddress(match[1] or match[2] or "", int(match[3]))


@contextlib.asynccontextmanager
async def start_server(
    listen: ListenAddress, source: FleetSource, *, notice: str | None
) -> AsyncIterator[str]:
    """Serve until the context ends; gives the address of the status page.

    Raises:
        ListenError: the port cannot be opened.
    """
    runner = web.AppRunner(
        _application(source, notice), access_log=None, handle_signals=False, shutdown_timeout=0.2
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host or None, listen.port)
        try:
            await site.start()
        except OSError as error:
            raise ListenError(
                f"cannot listen on {listen} ({error.strerror}); "
                "choose another address with --web.listen-address, e.g. 127.0.0.1:9879"
            ) from error
        port = runner.addresses[0][1]
        host = listen.host if listen.host not in ("", "0.0.0.0", "::") else "localhost"
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    finally:
        await runner.cleanup()


def _application(source: FleetSource, notice: str | None) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        now = time.time()
        body, content_type = exposition(
            withhold_stale(source.fleet, now), now, request.headers.get("Accept", "")
        )
        return _answer(request, body, content_type)

    async def fleet_page(request: web.Request) -> web.Response:
        now = time.time()
        view = read_view(request.query)
        if isinstance(view, str):
            return _page(request, render_words(400, "That cannot be shown", view))
        return _page(request, Page(200, render_fleet(withhold_stale(source.fleet, now), now, notice, view)))

    async def engine_page(request: web.Request) -> web.Response:
        now = time.time()
        view = read_view(request.query, of_engine=True)
        if isinstance(view, str):
            return _page(request, render_words(400, "That cannot be shown", view))
        wanted = request.match_info["id"]
        return _page(request, render_engine(withhold_stale(source.fleet, now), now, notice, wanted, view))

    async def status(_: web.Request) -> web.Response:
        now = time.time()
        report = status_report(withhold_stale(source.fleet, now), now, notice)
        return web.Response(text=to_json(report), content_type="application/json")

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="kvheadroom is healthy\n")

    was_ready = False

    async def ready(_: web.Request) -> web.Response:
        # Once it was: a replica that comes later takes nothing away from those that are shown.
        nonlocal was_ready
        why_not = None if was_ready else _why_not_ready(source.fleet)
        if why_not is not None:
            return web.Response(status=503, text=f"not ready: {why_not}\n")
        was_ready = True
        return web.Response(text="kvheadroom is ready\n")

    async def runbook(request: web.Request) -> web.Response:
        text = read_runbook(request.match_info["alert"])
        if text is None:
            raise web.HTTPNotFound(text="there is no such runbook\n")
        return web.Response(text=text, content_type="text/plain")

    app = web.Application(middlewares=[_with_security_headers], client_max_size=1024)
    app.router.add_get("/", fleet_page)
    app.router.add_get("/engines/{id:[^/]+}", engine_page)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/api/v1/status", status)
    app.router.add_get("/-/healthy", healthy)
    app.router.add_get("/-/ready", ready)
    app.router.add_get("/runbooks/{alert:[A-Za-z]+}", runbook)
    return app


def _page(request: web.Request, page: Page) -> web.Response:
    answer = _answer(request, page.html.encode(), "text/html; charset=utf-8", status=page.status)
    answer.headers["Content-Security-Policy"] = PAGE_POLICY
    return answer


def _answer(request: web.Request, body: bytes, content_type: str, *, status: int = 200) -> web.Response:
    headers = {"Content-Type": content_type}
    if _takes_gzip(request.headers.get("Accept-Encoding", "")):
        body = gzip.compress(body, compresslevel=1)
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, headers=headers, status=status)


def _why_not_ready(fleet: FleetAssessment) -> str | None:
    unasked = [one.source for one in fleet.discoveries if not one.attempted]
    if unasked:
        return f"{unasked[0]} was not read yet"
    pending = [replica.replica for replica in fleet.replicas if not replica.attempted]
    return f"{len(pending)} replica(s) not scraped yet: {pending[0]}" if pending else None


def _takes_gzip(accept_encoding: str) -> bool:
    for choice in accept_encoding.lower().split(","):
        name, _, quality = choice.partition(";")
        if name.strip() == "gzip":
            return not re.fullmatch(r"\s*q=0(\.0*)?\s*", quality)
    return False


class QuietBadRequests(logging.Filter):
    """Drops what aiohttp says of requests that are no HTTP: a port scan must not fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is worth a line."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def read_runbook(alert: str) -> str | None:
    """The runbook of one alert as it is shipped, None when there is none."""
    if not re.fullmatch(r"[A-Za-z]+", alert):
        return None
    file = shipped_folder("runbooks") / f"{alert}.md"
    return file.read_text(encoding="utf-8") if file.is_file() else None


@web.middleware
async def _with_security_headers(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(SECURITY_HEADERS)
        raise
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    return response
