"""A server on loopback that answers as a recorded vLLM did: /metrics, /version, /v1/models, /health."""

import contextlib
import time
from collections.abc import AsyncIterator

from aiohttp import web

from kvheadroom.lab.recordings import Recording


@contextlib.asynccontextmanager
async def replay(recording: Recording, *, model_folder: str, speed: float = 1.0) -> AsyncIterator[str]:
    """Serve a recording over and over; gives the base URL.

    Args:
        model_folder: what `/v1/models` names as the model's root.
        speed: seconds of the recording per second.
    """
    started = time.monotonic()
    # A breath between two rounds, so that the last page is seen.
    round_seconds = recording.duration_seconds + 1.0

    async def metrics(_: web.Request) -> web.Response:
        offset = ((time.monotonic() - started) * speed) % round_seconds
        return web.Response(text=recording.page_at(offset), content_type="text/plain")

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": recording.origin.get("vllm_version", "unknown")})

    async def models(_: web.Request) -> web.Response:
        return web.json_response(
            {
                "object": "list",
                "data": [
                    {
                        "id": recording.origin.get("model_name", "model"),
                        "object": "model",
                        "owned_by": "vllm",
                        "root": model_folder,
                        "parent": None,
                        "max_model_len": recording.origin.get("max_model_len"),
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
