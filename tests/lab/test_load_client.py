"""What makes the recordings in tests/recordings/loads and warm: the plan of a load, and the client that sends it and keeps its log."""

import asyncio
import json
import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from tests.loads.client import HUNG_UP, Client, Sent
from tests.loads.plan import Conversation, Turn, plan
from tests.loads.scenarios import SCENARIOS, Scenario, Span, Stream

each = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


@each
def test_a_seed_plans_the_same_conversations_again_and_another_seed_others(scenario: Scenario) -> None:
    assert plan(scenario, 7) == plan(scenario, 7)
    assert plan(scenario, 7) != plan(scenario, 8)


@each
def test_every_request_of_a_plan_fits_its_server(scenario: Scenario) -> None:
    for conversation in plan(scenario, 7):
        first = conversation.turns[0]
        assert conversation.text_tokens + first.new_tokens + first.max_tokens <= scenario.max_model_len
        assert 0 <= conversation.begins_at_seconds < scenario.seconds


def test_arrivals_rise_along_the_line_between_their_two_rates() -> None:
    stream = Stream(
        name="s",
        per_second=(0.0, 8.0),
        from_second=100,
        until_second=1100,
        first_tokens=Span(1, 9),
        output_tokens=Span(1, 9),
    )
    scenario = Scenario(name="x", what="", flags={"--max-model-len": 99}, seconds=2000, streams=(stream,))
    begins = [conversation.begins_at_seconds for conversation in plan(scenario, 1)]
    assert min(begins) >= 100
    assert max(begins) < 1100
    # 4,000 in all, a quarter of them in the first half; five standard deviations.
    for count, expected in ((len(begins), 4000), (sum(at < 600 for at in begins), 1000)):
        assert abs(count - expected) < 5 * math.sqrt(expected)


def test_the_spikes_can_never_fill_their_pool() -> None:
    spikes = next(scenario for scenario in SCENARIOS if scenario.name == "spikes")
    blocks: dict[float, int] = {}
    for conversation in plan(spikes, 1):
        (turn,) = conversation.turns
        at = conversation.begins_at_seconds
        blocks[at] = blocks.get(at, 0) + math.ceil((turn.new_tokens + turn.max_tokens) / 32)
    assert 0.9 * 127 < max(blocks.values()) < 127


class Server:
    """Answers completions with tokens 7, 8, 9, ... at a given pace; keeps what it was asked."""

    def __init__(
        self, *, seconds_per_token: float = 0.0, status: int = 200, usage: Mapping[str, Any] | None = None
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self._last = {"choices": [], "usage": usage or {}}
        self._seconds_per_token = seconds_per_token
        self._status = status

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        if self._status != 200:
            return web.Response(status=self._status)
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(asked["max_tokens"]):
            await asyncio.sleep(self._seconds_per_token)
            event = {"choices": [{"text": "w", "token_ids": [7 + number]}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(f"data: {json.dumps(self._last)}\n\ndata: [DONE]\n\n".encode())
        return response


async def sent_to(server: Server, *conversations: Conversation, seconds: float = 60.0) -> list[Sent]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return await Client(url, seed=1, seconds=seconds, max_model_len=100).run(conversations)
    finally:
        await runner.cleanup()


def talk(name: str, *turns: Turn, text: str = "", text_tokens: int = 0, grows: bool = True) -> Conversation:
    return Conversation(name, 0.0, text, text_tokens, turns, grows)


def test_a_later_turn_sends_the_history_and_the_log_says_what_it_shares() -> None:
    server = Server()
    started = time.time()
    log = asyncio.run(sent_to(server, talk("a", Turn(5, 3, 0.0, None), Turn(4, 2, 0.3, None))))
    ended = time.time()
    first, second = server.asked
    assert len(first["prompt"]) == 5
    assert second["prompt"][:8] == [*first["prompt"], 7, 8, 9]
    assert [(sent.turn, sent.prompt_tokens, sent.prefix_tokens) for sent in log] == [(0, 5, 0), (1, 12, 8)]
    assert [(sent.want, sent.got, sent.status) for sent in log] == [(3, 3, 200), (2, 2, 200)]
    one, two = log
    assert one.t_first is not None
    assert one.t_end is not None
    assert two.t_end is not None
    assert started - 0.01 <= one.t_send <= one.t_first <= one.t_end <= ended + 0.01
    assert two.t_send >= one.t_end + 0.29, "the pause"
    assert one.idle_seconds is None
    assert two.idle_seconds == pytest.approx(two.t_send - one.t_end, abs=1e-6)


def test_questions_about_a_document_come_after_it_and_know_nothing_of_each_other() -> None:
    server = Server()
    turns = (Turn(20, 2, 0.0, None), Turn(4, 2, 0.1, None), Turn(5, 2, 0.2, None))
    log = asyncio.run(sent_to(server, talk("a", *turns, grows=False)))
    document, one, two = (asked["prompt"] for asked in server.asked)
    assert [len(prompt) for prompt in (document, one, two)] == [20, 24, 25]
    assert one[:20] == two[:20] == document
    assert one[20:] != two[20:24]
    assert [sent.prefix_tokens for sent in log] == [0, 20, 20]
    for sent, turn in zip(log[1:], turns[1:], strict=True):
        assert sent.idle_seconds is not None
        assert sent.idle_seconds >= turn.pause_seconds


def test_the_log_tells_what_the_server_found_cached_and_nothing_where_it_does_not_say_so() -> None:
    turns = (Turn(5, 2, 0.0, None), Turn(4, 2, 0.0, None))
    silent = asyncio.run(sent_to(Server(usage={"prompt_tokens": 5}), talk("a", *turns)))
    assert [sent.cached_tokens for sent in silent] == [None, None]
    assert not any("cached_tokens" in sent.line() for sent in silent)
    assert [set(sent.line()) & {"idle_seconds"} for sent in silent] == [set(), {"idle_seconds"}]
    server = Server(usage={"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}})
    log = asyncio.run(sent_to(server, talk("a", *turns)))
    assert [sent.line()["cached_tokens"] for sent in log] == [0, 0]
    assert server.asked[0]["stream_options"] == {"include_usage": True}


def test_conversations_with_the_same_text_begin_with_the_same_tokens_and_then_differ() -> None:
    server = Server()
    turn = Turn(5, 1, 0.0, None)
    log = asyncio.run(
        sent_to(
            server,
            talk("a", turn, text="t", text_tokens=20),
            talk("b", turn, text="t", text_tokens=20),
            talk("c", turn, text="other", text_tokens=20),
        )
    )
    prompts = [tuple(asked["prompt"]) for asked in server.asked]
    assert len({prompt[:20] for prompt in prompts}) == 2
    assert len({prompt[20:] for prompt in prompts}) == 3
    assert {(sent.shared_prefix, sent.shared_prefix_tokens, sent.prefix_tokens) for sent in log} == {
        ("t", 20, 0),
        ("other", 20, 0),
    }


def test_a_client_that_hangs_up_is_logged_with_what_had_arrived_and_says_no_more() -> None:
    server = Server(seconds_per_token=0.1)
    log = asyncio.run(sent_to(server, talk("a", Turn(5, 50, 0.0, 0.55), Turn(5, 5, 0.0, None))))
    (sent,) = log
    assert sent.status == HUNG_UP
    assert 1 <= sent.got <= 5
    assert sent.t_end is not None
    assert sent.t_end - sent.t_send == pytest.approx(0.55, abs=0.3)


def test_a_client_that_hangs_up_before_the_first_token_has_none() -> None:
    log = asyncio.run(sent_to(Server(seconds_per_token=5.0), talk("a", Turn(5, 5, 0.0, 0.2))))
    assert [(sent.status, sent.got, sent.t_first) for sent in log] == [(HUNG_UP, 0, None)]


def test_a_refusal_is_logged_with_its_status_and_ends_the_conversation() -> None:
    server = Server(status=503)
    log = asyncio.run(sent_to(server, talk("a", Turn(5, 5, 0.0, None), Turn(5, 5, 0.0, None))))
    assert [(sent.status, sent.got) for sent in log] == [(503, 0)]


def test_a_conversation_ends_when_its_context_is_full_or_the_load_is_over() -> None:
    many = [Turn(20, 20, 0.0, None)] * 9
    log = asyncio.run(sent_to(Server(), talk("a", *many)))
    assert [sent.prompt_tokens + sent.want for sent in log] == [40, 80], "a third would be 120 of 100 tokens"
    late = [Turn(1, 1, 0.0, None), Turn(1, 1, 0.3, None), Turn(1, 1, 0.3, None)]
    assert len(asyncio.run(sent_to(Server(), talk("a", *late), seconds=0.4))) == 2
