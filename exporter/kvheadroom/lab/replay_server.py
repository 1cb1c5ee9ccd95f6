"""A server on loopback that answers as a recorded vLLM did: /metrics, /version, /v1/models, /health."""

import contextlib
import time
from collections.abc import AsyncIterator

from aiohttp import web

from kvheadroom.config import Config, validate_config
from kvheadroom.lab.recording_lines import Entry
from kvheadroom.lab.recordings import Playback, Recording


def replay_config(url: str, *, shipped: bool) -> Config:
    """What a replay is watched with; of the shipped recording it is known what it ran on."""
    known = {"session_tokens": [1024]} if shipped else {}
    replica = {"url": url, "name": "replay"} | ({"gpu": "CPU"} if shipped else {})
    return validate_config({"scrape_interval": "1s", "replicas": [replica], **known}, "demo")


def replay_notice(recording: Recording, *, shipped: bool) -> str:
    """The sentence that tells a replay from a live server."""

    def told(key: str) -> str | None:
        value = recording.origin.get(key)
        # A header may hold anything, and this goes to a terminal.
        return value if isinstance(value, str) and value.isprintable() and len(value) < 100 else None

    version, recorded_on = told("vllm_version"), told("recorded_on")
    what = f"vLLM {version}" if version else "a vLLM of a release that is not told"
    when = f", recorded on {recorded_on}" if recorded_on else ""
    return (
        f"This is a replay of a recording, not a live server: {what}{' on a CPU' if shipped else ''}{when}, "
        f"{recording.duration_seconds:.0f} s over and over."
    )


@contextlib.asynccontextmanager
async def replay(
    recording: Recording, *, model_folder: str | None = None, speed: float = 1.0
) -> AsyncIterator[str]:
    """Serve a recording over and over; gives the base URL. What it does not tell, it does not answer.

    Args:
        model_folder: what `/v1/models` names as the model's root; None: only the model's name is known.
        speed: seconds of the recording per second.
    """
    started = time.monotonic()
    # A breath between two rounds, so that the last page is seen.
    round_seconds = recording.duration_seconds + 1.0
    playback = Playback(recording)

    def now() -> tuple[Entry, str | None]:
        """The entry in force, and why it tells nothing, if so."""
        offset = min(((time.monotonic() - started) * speed) % round_seconds, recording.duration_seconds)
        entry = playback.entry_at(offset)
        return entry, recording.gap_at(entry, offset)

    async def metrics(_: web.Request) -> web.Response:
        entry, gap = now()
        if gap is not None:
            return web.Response(status=504, text=f"no page was recorded at this instant: {gap}\n")
        return web.Response(text=entry.page, content_type="text/plain")

    async def version(_: web.Request) -> web.Response:
        release = now()[0].origin.get("vllm_version")
        if release is None:
            raise web.HTTPNotFound(text="the recording does not tell the release\n")
        return web.json_response({"version": release})

    async def models(_: web.Request) -> web.Response:
        origin = now()[0].origin
        name, length = origin.get("model_name"), origin.get("max_model_len")
        if name is None and length is None:
            raise web.HTTPNotFound(text="the recording does not tell the model\n")
        return web.json_response(
            {
                "object": "list",
                "data": [
                    {
                        "id": name or "model",
                        "object": "model",
                        "owned_by": "vllm",
                        "root": model_folder or name,
                        "parent": None,
                        "max_model_len": length,
                    }
                ],
            }
        )

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/version", version)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
