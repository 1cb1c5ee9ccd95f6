"""Sends the conversations of a plan to a vLLM and logs what became of each request: docs/recordings.md, "Request logs"."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from tests.loads.plan import Conversation

REQUEST_SECONDS = 300.0
"""Longer than any queue of these loads; then the client goes away."""
DRAIN_SECONDS = 90.0
"""What is still under way so long after the last second of a load is given up, as by a client that hangs up."""


HUNG_UP = -1
"""In place of the status of a request whose client went away."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """One request; the fields are the keys of the log."""

    id: int
    session: str
    turn: int
    t_send: float
    t_first: float | None = None
    t_end: float | None = None
    prompt_tokens: int
    prefix_tokens: int
    idle_seconds: float | None
    shared_prefix: str
    shared_prefix_tokens: int
    want: int
    got: int = 0
    cached_tokens: int | None = None
    status: int | None = None

    def line(self) -> dict[str, Any]:
        """As it stands in the log."""
        unknown = {key for key in ("idle_seconds", "cached_tokens") if getattr(self, key) is None}
        return {key: value for key, value in asdict(self).items() if key not in unknown}


class Client:
    """Sends one load."""

    def __init__(self, base_url: str, *, seed: int, seconds: float, max_model_len: int) -> None:
        self._url = f"{base_url}/v1/completions"
        self._seed = seed
        self._seconds = seconds
        self._max_model_len = max_model_len
        self._log: list[Sent] = []
        # Counted on from here, as the recorder does, so that both tell the same clock.
        self._began_at, self._began = time.time(), time.monotonic()

    async def run(self, conversations: Sequence[Conversation]) -> list[Sent]:
        """Send everything, wait for the answers, and give the log in the order of sending."""
        self._began_at, self._began = time.time(), time.monotonic()
        # A connection for each request: one that is kept may be closed by vLLM just as it is used.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            tasks = [asyncio.create_task(self._converse(session, each)) for each in conversations]
            _, late = await asyncio.wait(tasks, timeout=self._seconds + DRAIN_SECONDS)
            for task in late:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):  # a mistake in this file, not a failed request
                    raise outcome
        return self._log

    def _now(self) -> float:
        return round(self._began_at + time.monotonic() - self._began, 6)

    def _words(self, name: str, count: int) -> list[int]:
        """The first `count` tokens of a text that the seed and the name give."""
        chance = random.Random(f"{self._seed}/{name}")
        return [chance.randrange(10, 1000) for _ in range(count)]

    async def _converse(self, session: aiohttp.ClientSession, conversation: Conversation) -> None:
        await asyncio.sleep(conversation.begins_at_seconds)
        history = self._words(conversation.text, conversation.text_tokens)
        before: Sent | None = None
        for number, turn in enumerate(conversation.turns):
            if number and time.monotonic() - self._began + turn.pause_seconds >= self._seconds:
                return
            await asyncio.sleep(turn.pause_seconds)
            prompt = history + self._words(f"{conversation.name}/{number}", turn.new_tokens)
            if len(prompt) + turn.max_tokens > self._max_model_len:
                return
            sent_at = self._now()
            sent = Sent(
                id=len(self._log) + 1,
                session=conversation.name,
                turn=number,
                t_send=sent_at,
                prompt_tokens=len(prompt),
                prefix_tokens=len(history) if number else 0,
                idle_seconds=None
                if before is None or before.t_end is None
                else round(sent_at - before.t_end, 6),
                shared_prefix=conversation.text,
                shared_prefix_tokens=conversation.text_tokens,
                want=turn.max_tokens,
            )
            self._log.append(sent)
            answer = await self._send(session, prompt, turn.hangs_up_after_seconds, sent)
            if len(answer) < turn.max_tokens:
                return
            before = sent
            if conversation.grows:
                history = prompt + answer
            elif not number:
                history = prompt

    async def _send(
        self, session: aiohttp.ClientSession, prompt: list[int], hangs_up_after: float | None, sent: Sent
    ) -> list[int]:
        answer: list[int] = []
        try:
            async with asyncio.timeout(hangs_up_after):
                await self._read_answer(session, prompt, sent, answer)
        except TimeoutError:
            # The session's own limit ends here too; it is as if that client had gone away.
            sent.status = HUNG_UP
        except asyncio.CancelledError:
            sent.status = HUNG_UP
            raise
        except aiohttp.ClientError:
            sent.status = None
        finally:
            sent.t_end, sent.got = self._now(), len(answer)
        return answer

    async def _read_answer(
        self, session: aiohttp.ClientSession, prompt: list[int], sent: Sent, answer: list[int]
    ) -> None:
        # No per-request seed: under load it makes vLLM's CPU build sample one request at a time.
        request = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": sent.want,
            "min_tokens": sent.want,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        async with session.post(self._url, json=request) as response:
            sent.status = response.status
            if response.status != 200:
                return
            async for line in response.content:
                event = line.removeprefix(b"data: ")
                if event == line or event.startswith(b"[DONE]"):
                    continue
                told = json.loads(event)
                # vLLM tells it with --enable-prompt-tokens-details only.
                details = (told.get("usage") or {}).get("prompt_tokens_details") or {}
                sent.cached_tokens = details.get("cached_tokens", sent.cached_tokens)
                for choice in told.get("choices", ()):
                    tokens = choice.get("token_ids") or []
                    if tokens and sent.t_first is None:
                        sent.t_first = self._now()
                    answer += tokens
