"""The loads of the recordings in tests/recordings/loads and warm, as data: which server, who comes when, and with what.

A stream is a kind of conversations. A conversation sends a request, waits for all of its answer, pauses, and sends the
whole history again with something new behind it, until its turns are over or its context is full.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

SEED = 1
INTERVAL_SECONDS = 0.5
"""Between two scrapes, where a scenario does not say otherwise."""


@dataclass(frozen=True, slots=True)
class Span:
    """Somewhere from `low` to `high`, both included; `logarithmic`: as often under as over their geometric mean."""

    low: float
    high: float
    logarithmic: bool = False


ONE = Span(1, 1)
NONE = Span(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Conversations of one kind.

    Attributes:
        per_second: conversations that begin, Poisson, at the stream's first and at its last second; linear between.
        from_second, until_second: of the load, for `per_second`; None: to its end.
        bursts: (second of the load, conversations that begin at once).
        texts, text_tokens: a first prompt begins with one of so many shared texts (a system prompt, a document).
        first_tokens: of the first prompt behind the shared text.
        next_tokens: what each later turn puts behind the history.
        grows: the history is all that was said; else it stays the first prompt, a document that is asked about again and again.
        turns: of one conversation.
        tool_pause_seconds, human_pause_seconds: before a later turn.
        human_share: of the pauses, 0 to 1.
        hang_up_share, hang_up_seconds: of the requests, those whose client goes away so long after sending.
    """

    name: str
    per_second: tuple[float, float] = (0.0, 0.0)
    from_second: float = 0.0
    until_second: float | None = None
    bursts: tuple[tuple[float, int], ...] = ()
    texts: int = 0
    text_tokens: int = 0
    first_tokens: Span
    next_tokens: Span = NONE
    grows: bool = True
    output_tokens: Span
    turns: Span = ONE
    tool_pause_seconds: Span = NONE
    human_pause_seconds: Span = NONE
    human_share: float = 0.0
    hang_up_share: float = 0.0
    hang_up_seconds: Span = NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One recording.

    Attributes:
        model: of tests/end_to_end/tiny_model.py.
        flags: of `vllm serve`, beside `COMMON_FLAGS`.
        seconds: in which requests are sent; what is under way then is waited for.
        interval_seconds: between two scrapes.
        folder: of tests/recordings. Forecasts are scored on all that is in `loads`; `warm` is about what is found again.
    """

    name: str
    what: str
    model: str = "gqa"
    flags: Mapping[str, str | int | bool]
    seconds: float
    streams: tuple[Stream, ...]
    interval_seconds: float = INTERVAL_SECONDS
    folder: str = "loads"

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest context."""
        return int(self.flags["--max-model-len"])


COMMON_FLAGS: Mapping[str, str | int | bool] = {
    "--load-format": "dummy",
    "--dtype": "bfloat16",
    "--enforce-eager": True,
    "--seed": 0,
}

_MIB = 1024**2
# Llama-like, 1,024 bytes per token: 4 MiB are 128 blocks of 32 tokens.
_GQA_128: Mapping[str, str | int | bool] = {
    "--max-model-len": 2048,
    "--block-size": 32,
    "--kv-cache-memory-bytes": 4 * _MIB,
    "--max-num-seqs": 64,
    "--max-num-batched-tokens": 512,
}
_GQA_384 = {**_GQA_128, "--max-model-len": 4096, "--kv-cache-memory-bytes": 12 * _MIB}
# Latent attention, 4,608 bytes per token: 8 MiB are 113 blocks of 16 tokens.
_MLA_113 = {
    "--max-model-len": 1024,
    "--kv-cache-memory-bytes": 8 * _MIB,
    "--max-num-seqs": 32,
    "--max-num-batched-tokens": 1024,
}
# 2 MiB are 64 blocks of 32 tokens for each of two engines.
_DP2_64 = {
    **_GQA_128,
    "--max-model-len": 1024,
    "--kv-cache-memory-bytes": 2 * _MIB,
    "--max-num-seqs": 32,
    "--data-parallel-size": 2,
}
# Every block is sampled, and every answer tells how much of its prompt was found.
_TELLING = {
    "--kv-cache-metrics": True,
    "--kv-cache-metrics-sample": 1,
    "--enable-prompt-tokens-details": True,
}
# 256 chunks of a block each in host memory.
_HOST_256 = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CopyingSpec",
        "spec_module_path": "offloading_on_cpu",
        "cpu_bytes_to_use": 8 * _MIB,
    },
}

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        name="steady",
        what="single requests, always as many a second",
        flags=_GQA_128,
        seconds=90,
        streams=(
            Stream(name="s", per_second=(4.0, 4.0), first_tokens=Span(60, 160), output_tokens=Span(60, 140)),
        ),
    ),
    Scenario(
        name="ramp",
        what="ever more single requests, until the pool is full and a queue stands before it",
        flags=_GQA_128,
        seconds=110,
        streams=(
            Stream(name="r", per_second=(0.5, 9.0), first_tokens=Span(60, 200), output_tokens=Span(100, 200)),
        ),
    ),
    Scenario(
        name="burst",
        what="short requests, and every 35 s 24 long requests at once",
        flags=_GQA_128,
        seconds=100,
        streams=(
            Stream(
                name="base",
                per_second=(3.0, 3.0),
                first_tokens=Span(60, 100),
                output_tokens=Span(40, 80),
            ),
            Stream(
                name="burst",
                bursts=((10, 24), (45, 24), (80, 24)),
                first_tokens=Span(100, 200),
                output_tokens=Span(200, 300),
            ),
        ),
    ),
    Scenario(
        name="agentic",
        what="agents: growing histories, tool calls of a second, people who think for some",
        flags=_GQA_384,
        seconds=110,
        streams=(
            Stream(
                name="a",
                per_second=(0.25, 0.25),
                until_second=60,
                texts=1,
                text_tokens=320,
                first_tokens=Span(40, 120),
                next_tokens=Span(40, 160),
                output_tokens=Span(30, 90),
                turns=Span(12, 30),
                tool_pause_seconds=Span(0.3, 2.0),
                human_pause_seconds=Span(8, 15),
                human_share=0.2,
            ),
        ),
    ),
    Scenario(
        name="long_prompts",
        what="prompts of two to four batches with short answers",
        flags=_GQA_128,
        seconds=90,
        streams=(
            Stream(
                name="l", per_second=(0.8, 2.0), first_tokens=Span(1000, 1900), output_tokens=Span(40, 140)
            ),
        ),
    ),
    Scenario(
        name="prefix_reuse",
        what="questions about one of four documents of 896 tokens",
        flags=_GQA_128,
        seconds=90,
        streams=(
            Stream(
                name="p",
                per_second=(3.0, 3.0),
                texts=4,
                text_tokens=896,
                first_tokens=Span(20, 60),
                output_tokens=Span(20, 80),
            ),
        ),
    ),
    Scenario(
        name="mixed_lengths",
        what="prompts of 8 to 1,500 tokens, answers of 4 to 400",
        flags=_GQA_128,
        seconds=110,
        streams=(
            Stream(
                name="m",
                per_second=(2.5, 2.5),
                first_tokens=Span(8, 1500, logarithmic=True),
                output_tokens=Span(4, 400, logarithmic=True),
            ),
        ),
    ),
    Scenario(
        name="data_parallel",
        what="two engines, two front ends; single requests, and two bursts",
        flags=_DP2_64,
        seconds=80,
        streams=(
            Stream(
                name="base", per_second=(2.0, 2.0), first_tokens=Span(60, 160), output_tokens=Span(60, 120)
            ),
            Stream(
                name="burst",
                bursts=((15, 24), (50, 24)),
                first_tokens=Span(100, 200),
                output_tokens=Span(150, 250),
            ),
        ),
    ),
    Scenario(
        name="latent",
        what="latent attention, no prefix cache; single requests, and two bursts",
        model="mla",
        flags=_MLA_113,
        seconds=80,
        streams=(
            Stream(
                name="base", per_second=(1.0, 1.0), first_tokens=Span(40, 120), output_tokens=Span(40, 100)
            ),
            Stream(
                name="burst",
                bursts=((15, 14), (50, 14)),
                first_tokens=Span(60, 140),
                output_tokens=Span(80, 160),
            ),
        ),
    ),
    Scenario(
        name="sequence_limit",
        what="max_num_seqs 4 binds: a queue before a pool that is mostly empty",
        flags={**_GQA_128, "--max-num-seqs": 4},
        seconds=80,
        streams=(
            Stream(name="q", per_second=(1.0, 6.0), first_tokens=Span(60, 160), output_tokens=Span(60, 120)),
        ),
    ),
    Scenario(
        name="aborts",
        what="two of five clients hang up before the end, some before the first token",
        flags=_GQA_128,
        seconds=90,
        streams=(
            Stream(
                name="h",
                per_second=(2.0, 2.0),
                first_tokens=Span(100, 300),
                output_tokens=Span(150, 400),
                hang_up_share=0.4,
                hang_up_seconds=Span(0.3, 4.0),
            ),
        ),
    ),
    Scenario(
        name="spikes",
        what="every 12 s nine requests that fill the pool to nine tenths, and never more",
        flags=_GQA_128,
        seconds=90,
        streams=(
            # At most 13 blocks each, 117 of 127 at once: what grows is done before the pool is full.
            Stream(
                name="spike",
                bursts=tuple((6 + 12 * number, 9) for number in range(7)),
                first_tokens=Span(340, 350),
                output_tokens=Span(50, 66),
            ),
        ),
    ),
    Scenario(
        name="churn",
        what="documents and chats that come back after 2 to 60 s, among new prompts that write the pool over three times a minute",
        flags={**_GQA_128, **_TELLING},
        seconds=165,
        folder="warm",
        streams=(
            Stream(name="new", per_second=(0.3, 0.3), first_tokens=Span(180, 320), output_tokens=Span(8, 24)),
            Stream(
                name="document",
                bursts=tuple((2 * number, 1) for number in range(9)),
                first_tokens=Span(256, 480),
                next_tokens=Span(16, 48),
                grows=False,
                output_tokens=Span(8, 16),
                turns=Span(60, 60),
                tool_pause_seconds=Span(2, 30, logarithmic=True),
                human_pause_seconds=Span(25, 60),
                human_share=0.3,
            ),
            Stream(
                name="chat",
                bursts=((1, 1), (5, 1), (9, 1)),
                first_tokens=Span(128, 256),
                next_tokens=Span(24, 64),
                output_tokens=Span(16, 32),
                turns=Span(60, 60),
                tool_pause_seconds=Span(2, 30, logarithmic=True),
                human_pause_seconds=Span(25, 60),
                human_share=0.3,
            ),
        ),
    ),
    Scenario(
        name="offload",
        what="as churn, with 256 chunks in host memory behind a pool of 64 blocks; pauses of 2 to 80 s",
        flags={
            **_GQA_128,
            **_TELLING,
            "--kv-cache-memory-bytes": 2 * _MIB,
            "--max-model-len": 1024,
            "--kv-transfer-config": json.dumps(_HOST_256, separators=(",", ":")),
        },
        seconds=165,
        # With the tier's own histograms, what differs from scrape to scrape is more than gzip looks back.
        interval_seconds=1.0,
        folder="warm",
        streams=(
            Stream(name="new", per_second=(0.6, 0.6), first_tokens=Span(180, 320), output_tokens=Span(8, 24)),
            Stream(
                name="document",
                bursts=tuple((number, 1) for number in range(14)),
                first_tokens=Span(160, 320),
                next_tokens=Span(16, 48),
                grows=False,
                output_tokens=Span(8, 16),
                turns=Span(60, 60),
                tool_pause_seconds=Span(2, 45, logarithmic=True),
                human_pause_seconds=Span(45, 80),
                human_share=0.2,
            ),
            Stream(
                name="chat",
                bursts=((1, 1), (5, 1), (9, 1)),
                first_tokens=Span(128, 256),
                next_tokens=Span(24, 64),
                output_tokens=Span(16, 32),
                turns=Span(60, 60),
                tool_pause_seconds=Span(2, 45, logarithmic=True),
                human_pause_seconds=Span(45, 80),
                human_share=0.2,
            ),
        ),
    ),
)
