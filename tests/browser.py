"""A headless Chromium, steered by its debugging protocol: pages as a reader sees them."""

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any, Literal

from aiohttp import ClientSession, ClientWebSocketResponse

PROGRAMS = ("chromium-headless-shell", "chromium")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--remote-debugging-port=0",
)  # fmt: skip
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0
AXE = "axe_core_python"
Theme = Literal["light", "dark"]


def find_browser() -> str | None:
    """The first program of PROGRAMS that is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Tab:
    """One page, and what its console said."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())
        self._session: str | None = None
        self.console: list[str] = []

    async def open(self) -> None:
        """Attach to a new page."""
        target = await self._ask("Target.createTarget", url="about:blank")
        attached = await self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self._ask(f"{domain}.enable")

    async def show(self, url: str, *, width: int, height: int = 900, theme: Theme = "light") -> None:
        """Load a page in a window of that many CSS pixels."""
        await self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": theme}
        await self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self.console.clear()
        self._loaded.clear()
        await self._ask("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), ANSWER_SECONDS)

    async def value(self, script: str) -> Any:
        """What an expression of JavaScript gives in the page; promises are waited for."""
        told = await self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def accessibility_faults(self) -> list[str]:
        """Violations of axe-core's rules: the rule, and the elements."""
        script = resources.files(AXE).joinpath("axe.min.js").read_text(encoding="utf-8")
        await self.value(script + "; true")
        found = await self.value(
            "axe.run(document, {preload: false, resultTypes: ['violations']}).then(told => told.violations.map("
            "one => one.id + ': ' + one.nodes.slice(0, 3).map(node => node.html).join(' | ')))"
        )
        return list(found)

    async def press_tab(self) -> None:
        """The key."""
        for kind in ("rawKeyDown", "keyUp"):
            await self._ask(
                "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
            )

    async def picture(self) -> bytes:
        """The whole page as PNG."""
        size = await self.value(
            "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], 8000), "scale": 1}
        told = await self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(told["data"])

    async def close(self) -> None:
        """Stop listening."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send_json({"id": number, "method": method, "params": parameters, **session})
        told = await asyncio.wait_for(answer, ANSWER_SECONDS)
        assert "error" not in told, (method, told["error"])
        result: dict[str, Any] = told["result"]
        return result

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
                continue
            match told["method"]:
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Log.entryAdded":
                    self.console.append(told["params"]["entry"]["text"])
                case "Runtime.consoleAPICalled":
                    self.console.append(str(told["params"]["args"]))
                case "Runtime.exceptionThrown":
                    self.console.append(str(told["params"]["exceptionDetails"]))


@contextlib.asynccontextmanager
async def open_tab(program: str) -> AsyncIterator[Tab]:
    """A tab in a browser of its own, ended at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *ARGUMENTS,
            f"--user-data-dir={profile}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            address = await asyncio.wait_for(_debugging_address(process), START_SECONDS)
            async with (
                ClientSession() as session,
                session.ws_connect(address, max_msg_size=0, heartbeat=None) as socket,
            ):
                tab = Tab(socket)
                try:
                    await tab.open()
                    yield tab
                finally:
                    await tab.close()
        finally:
            # Its helpers too, which hold its standard error open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()


async def _debugging_address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = []
    async for line in process.stderr:
        said.append(line.decode(errors="replace"))
        match = re.search(r"DevTools listening on (ws://\S+)", said[-1])
        if match:
            return match[1]
    raise AssertionError(f"the browser ended:\n{''.join(said)}")
