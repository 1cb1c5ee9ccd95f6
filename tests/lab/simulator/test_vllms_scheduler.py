"""The simulated scheduler does, step by step, what vLLM's own one did (`vllm_scheduler.py` ran it)."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.lab.simulator.engine import EngineSettings, Request
from kvheadroom.lab.simulator.request_log import LoggedArrivals, LoggedRequest
from kvheadroom.lab.simulator.rules import rules_of
from kvheadroom.lab.simulator.scheduler import Scheduler

with gzip.open(Path(__file__).with_name("scheduler.jsonl.gz"), "rt") as file:
    CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in map(json.loads, file)}


def simulated(case: dict[str, Any]) -> list[list[int]]:
    settings = EngineSettings(
        num_blocks=case["num_blocks"],
        block_size=case["block_size"],
        max_model_len=2048,
        max_num_batched_tokens=case["max_num_batched_tokens"],
        max_num_seqs=case["max_num_seqs"],
        rules=rules_of("0.33.0" if case["whole_prompt_must_fit"] else "0.18.0"),
        enable_prefix_caching=case["enable_prefix_caching"],
        watermark=case["watermark"],
    )
    scheduler = Scheduler(settings)
    arrivals = LoggedArrivals(
        (
            LoggedRequest(
                session=said["session"],
                turn=said["turn"],
                sent_at=said["step"],
                prompt_tokens=said["prompt_tokens"],
                output_tokens=said["output_tokens"],
                max_tokens=said["output_tokens"],
                prefix_tokens=said["prefix_tokens"],
                shared_prefix="all" if case["shared_prefix_tokens"] else "",
                shared_prefix_tokens=case["shared_prefix_tokens"],
                given_up_at=said["leaves"],
            )
            for said in case["requests"]
        ),
        case["block_size"],
    )
    live: list[Request] = []
    steps = []
    preemptions = 0
    for step in range(len(case["steps"])):
        while (at := arrivals.next_at()) is not None and at <= step:
            live.append(arrivals.take())
            scheduler.add(live[-1])
        gone = [request for request in live if request.leaves_at is not None and request.leaves_at <= step]
        before = sum(request.num_preemptions for request in live)
        for request in gone:
            scheduler.remove(request)
        planned = scheduler.schedule()
        preemptions += sum(request.num_preemptions for request in live) - before
        scheduler.finish_step(planned)
        done = [request for request in live if request.num_output_tokens == request.output_end]
        for request in done:
            scheduler.remove(request)
        live = [request for request in live if request not in (*gone, *done)]
        steps.append(
            [
                len(scheduler.running),
                len(scheduler.waiting),
                scheduler.pool.num_usable - scheduler.pool.num_free,
                preemptions,
                scheduler.queries,
                scheduler.hits,
                sum(tokens for _, tokens in planned.requests),
            ]
        )
    return steps


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_as_vllms_own_scheduler_did_it(name: str) -> None:
    case = CASES[name]
    for step, (ours, vllms) in enumerate(zip(simulated(case), case["steps"], strict=True)):
        assert ours == vllms, f"step {step}"
