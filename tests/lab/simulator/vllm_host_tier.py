"""Runs vLLM's own manager of the tier in host memory over made-up sessions, and writes what it did: `host_tier.jsonl.gz` beside this file.

For vLLM's own environment, which the tests do not have:

    python vllm_host_tier.py

A line for each case: the chunks of the tier, and its events: ["begin", request, session, chunks of the prompt, found, stored, refused] and
["end", request]. A prompt is loaded as far as it is found, and the rest is stored in the same event; nothing is in the engine's own cache.
A session's prompts are the beginning of one another, and no longer than the tier.
"""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

FILE = Path(__file__).with_name("host_tier.jsonl.gz")


def run(seed: int, num_chunks: int, longest: int) -> dict[str, Any]:
    """One case."""
    rng = random.Random(f"{seed}/{num_chunks}")
    manager = CPUOffloadingManager(num_chunks)
    length = [0] * 12
    running: dict[int, tuple[ReqContext, int]] = {}
    events: list[list[Any]] = []
    for request in range(400):
        while running and (len(running) > 4 or rng.random() < 0.4):
            ended = rng.choice(sorted(running))
            manager.on_request_finished(running.pop(ended)[0])
            events.append(["end", ended])
        session = rng.randrange(len(length))
        length[session] = (
            length[session] + rng.randint(0, 6) if length[session] < longest else rng.randint(1, 5)
        )
        # One that is longer than the tier pushes its own beginning out, which is not simulated.
        chunks = max(1, min(length[session], num_chunks))
        if any(held == session for _, held in running.values()):
            continue
        context = ReqContext(req_id=str(request))
        keys = [make_offload_key(f"{session}/{place}".encode(), 0) for place in range(chunks)]
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, place + 1)
        manager.on_new_request(context)
        found = 0
        while found < chunks and manager.lookup(keys[found], context) is LookupResult.HIT:
            found += 1
        if found:
            manager.prepare_load(keys[:found], context)
            manager.complete_load(keys[:found], context)
        stored, refused = 0, False
        if found < chunks:
            output = manager.prepare_store(keys[found:], context)
            refused = output is None
            if output is not None:
                stored = len(output.keys_to_store)
                manager.complete_store(output.keys_to_store, context)
        running[request] = context, session
        events.append(["begin", request, session, chunks, found, stored, refused])
    return {"vllm": vllm.__version__, "num_chunks": num_chunks, "events": events}


def main() -> None:
    """Write the file anew."""
    cases = [
        run(seed, num_chunks, longest)
        for seed in range(4)
        for num_chunks in (20, 60, 200)
        for longest in (15, 40)
    ]
    lines = "".join(json.dumps(case, separators=(",", ":")) + "\n" for case in cases)
    FILE.write_bytes(gzip.compress(lines.encode(), mtime=0))


if __name__ == "__main__":
    main()
