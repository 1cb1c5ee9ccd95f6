"""Runs vLLM's own scheduler, without a model, and writes what it did: `scheduler.jsonl.gz` beside this file.

For vLLM's own environment, which the tests do not have; `MODEL` is a folder with a config.json:

    python vllm_scheduler.py MODEL

A line for each case: its settings; its requests with the step before which they came or went; and for each step
[running, waiting, used blocks, preemptions so far, tokens looked up, tokens found, tokens scheduled]. Tokens are made up; a session
sends its whole history again each time.
"""

import gzip
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048


def cases() -> list[dict[str, Any]]:
    """Each binds something else."""
    usual = {
        "num_blocks": 200,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 64,
        "watermark": 0.0,
        "whole_prompt_must_fit": True,
        "enable_prefix_caching": True,
        "sessions": 40,
        "every_steps": 25,
        "turns": 5,
        "shared_prefix_tokens": 0,
        "leave_share": 0.0,
        "longest_output": 60,
        "cut_share": 0.0,
    }
    return [
        {**usual, "name": "pool"},
        {**usual, "name": "roomy", "num_blocks": 2000},
        {**usual, "name": "crowded", "every_steps": 5},
        {**usual, "name": "requests", "num_blocks": 2000, "max_num_seqs": 3},
        {**usual, "name": "small steps", "max_num_batched_tokens": 32, "max_num_seqs": 32},
        {**usual, "name": "watermark", "watermark": 0.1, "every_steps": 8},
        {**usual, "name": "first chunk", "whole_prompt_must_fit": False, "every_steps": 8},
        {**usual, "name": "no caching", "enable_prefix_caching": False, "every_steps": 8},
        {**usual, "name": "clients go", "leave_share": 0.3, "every_steps": 8},
        {**usual, "name": "shared beginning", "shared_prefix_tokens": 150, "every_steps": 12},
        {**usual, "name": "long histories", "turns": 14, "sessions": 25},
        {**usual, "name": "cut histories", "cut_share": 0.4, "turns": 12, "every_steps": 12},
        {
            **usual,
            "name": "cut beginnings",
            "cut_share": 0.4,
            "turns": 8,
            "shared_prefix_tokens": 400,
            "every_steps": 3,
        },
        {**usual, "name": "long answers", "longest_output": 400, "every_steps": 20, "sessions": 14},
        {
            **usual,
            "name": "long answers, first chunk",
            "longest_output": 400,
            "whole_prompt_must_fit": False,
            "sessions": 14,
        },
        {
            **usual,
            "name": "same beginnings at once",
            "shared_prefix_tokens": 400,
            "every_steps": 1,
            "longest_output": 200,
        },
    ]


def make_scheduler(case: dict[str, Any], model: str) -> Scheduler:
    model_config = ModelConfig(
        model=model, dtype="bfloat16", seed=0, max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True
    )
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=case["max_num_seqs"],
            max_num_batched_tokens=case["max_num_batched_tokens"],
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            scheduler_reserve_full_isl=case["whole_prompt_must_fit"],
            watermark=case["watermark"],
        ),
        model_config=model_config,
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=case["enable_prefix_caching"]),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    # The CPU's platform changes some of these; this is about the scheduler.
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = case["num_blocks"]
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=case["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


class Client:
    """One session."""

    def __init__(self, case: dict[str, Any], number: int) -> None:
        self.case, self.number = case, number
        self.rng = random.Random(f"{case['name']}/{number}")
        self.history = list(range(1, 1 + case["shared_prefix_tokens"]))
        self.due = number * case["every_steps"] + self.rng.randrange(case["every_steps"])
        self.turn = 0
        self.request: dict[str, Any] = {}
        self.known = 0

    def send(self, step: int, hasher: Any) -> Request:
        if self.case["cut_share"] and self.turn and self.rng.random() < self.case["cut_share"]:
            self.known = self.rng.randint(self.case["shared_prefix_tokens"], self.known)
            self.history = self.history[: self.known]
        self.history += [
            self.rng.randrange(1000, 30000) for _ in range(self.rng.randint(1, 90 if self.turn else 250))
        ]
        output = self.rng.randint(1, self.case["longest_output"])
        leaves = step + self.rng.randint(1, 60) if self.rng.random() < self.case["leave_share"] else None
        self.request = {
            "session": str(self.number),
            "turn": self.turn,
            "step": step,
            "prompt_tokens": len(self.history),
            "prefix_tokens": self.known,
            "output_tokens": output,
            "leaves": leaves,
        }
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=2)
        self.turn += 1
        return Request(
            request_id=f"{self.number}.{self.turn}",
            prompt_token_ids=list(self.history),
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )

    def ended(self, step: int, output: list[int]) -> None:
        self.history += output
        self.known = len(self.history)
        self.due = step + self.rng.choice((1, 3, 10, 60))


def run(case: dict[str, Any], model: str) -> dict[str, Any]:
    scheduler = make_scheduler(case, model)
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK_SIZE, hash_function) if case["enable_prefix_caching"] else None
    clients = [Client(case, number) for number in range(case["sessions"])]
    live: dict[str, tuple[Client, Request]] = {}
    requests, steps = [], []
    preemptions = queries = hits = 0
    tokens = itertools.count(40000)
    for step in range(20000):
        for client in clients:
            busy = any(one is client for one, _ in live.values())
            if not busy and client.turn < case["turns"] and client.due <= step and len(client.history) < 1500:
                request = client.send(step, hasher)
                requests.append(client.request)
                live[request.request_id] = client, request
                scheduler.add_request(request)
        for name, (client, request) in list(live.items()):
            if client.request["leaves"] is not None and client.request["leaves"] <= step:
                scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
                client.ended(step, list(request.output_token_ids))
                client.request["got"] = len(request.output_token_ids)
                del live[name]
        if not live and all(
            client.turn >= case["turns"] or len(client.history) >= 1500 for client in clients
        ):
            break
        before = sum(request.num_preemptions for _, request in live.values())
        scheduled = scheduler.schedule()
        preemptions += sum(request.num_preemptions for _, request in live.values()) - before
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = live[name][1]
            sampled.append([next(tokens)] if request.num_computed_tokens >= request.num_tokens else [])
        outputs = scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        for name, (client, request) in list(live.items()):
            if request.is_finished():
                client.ended(step + 1, list(request.output_token_ids))
                client.request["got"] = len(request.output_token_ids)
                del live[name]
        stats = next(one.scheduler_stats for one in outputs.values() if one.scheduler_stats is not None)
        queries += stats.prefix_cache_stats.queries
        hits += stats.prefix_cache_stats.hits
        steps.append(
            [
                stats.num_running_reqs,
                stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
                round(stats.kv_cache_usage * (case["num_blocks"] - 1)),
                preemptions,
                queries,
                hits,
                scheduled.total_num_scheduled_tokens,
            ]
        )
    return {**case, "block_size": BLOCK_SIZE, "vllm": vllm.__version__, "requests": requests, "steps": steps}


if __name__ == "__main__":
    told = "".join(json.dumps(run(case, sys.argv[1]), separators=(",", ":")) + "\n" for case in cases())
    Path(__file__).with_name("scheduler.jsonl.gz").write_bytes(gzip.compress(told.encode(), mtime=0))
