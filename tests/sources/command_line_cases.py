"""Command lines of `vllm serve` made at random in every way that vLLM's parser takes, with secrets among them."""

import json
import random
from collections.abc import Callable

SECRET = "S3CRET"

Write = Callable[[random.Random], str]


def number(least: int, most: int) -> Write:
    def write(rng: random.Random) -> str:
        return rng.choice([str(rng.randint(least, most)), f"{rng.randint(1, 64)}{rng.choice('kKmM')}"])

    return write


def plain(least: int, most: int) -> Write:
    return lambda rng: str(rng.randint(least, most))


def choice(*words: str) -> Write:
    return lambda rng: rng.choice(words)


VALUED: dict[str, Write] = {
    "--tensor-parallel-size": plain(1, 16),
    "-tp": plain(1, 16),
    "--pipeline-parallel-size": plain(1, 4),
    "-pp": plain(1, 4),
    "--data-parallel-size": plain(1, 8),
    "-dp": plain(1, 8),
    "--decode-context-parallel-size": plain(1, 8),
    "-dcp": plain(1, 8),
    "-pcp": plain(1, 2),
    "--kv-cache-dtype": choice("auto", "fp8", "fp8_e4m3", "bfloat16"),
    "--dtype": choice("auto", "half", "bfloat16", "float32"),
    "--block-size": plain(1, 256),
    "--max-model-len": number(1, 10**6),
    "--max-num-seqs": plain(1, 2048),
    "--max-num-batched-tokens": number(1, 10**5),
    "--gpu-memory-utilization": choice("0.5", "0.92", "1", ".8"),
    "--device-memory-utilization": choice("0.5", "0.9"),
    "--kv-cache-memory-bytes": number(1, 10**12),
    "--num-gpu-blocks-override": plain(1, 10**6),
    "--mamba-cache-dtype": choice("auto", "float32"),
    "--mamba-ssm-cache-dtype": choice("auto", "float32"),
    "--mamba-block-size": plain(1, 4096),
    "--kv-offloading-size": choice("4", "256.5"),
    "--attention-backend": choice("FLASH_ATTN", "flashinfer", "TRITON_ATTN"),
    "--speculative-config": choice(
        '{"method": "ngram", "num_speculative_tokens": 3}', '{"num_speculative_tokens": 2, "method": "mtp"}'
    ),
    "-sc": choice('{"method": "ngram", "num_speculative_tokens": 1}'),
    "--kv-transfer-config": choice('{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'),
    "--port": plain(1024, 65535),
    "--host": choice("0.0.0.0", "127.0.0.1", "node-7", "::"),
    "--uds": choice("/run/vllm.sock"),
    # Of no use here, and in the way of abbreviations, values and secrets.
    "--api-key": choice(f"{SECRET}-1", f"{SECRET}-2"),
    "--hf-token": choice(f"{SECRET}-3"),
    "--seed": choice("-1", "7"),
    "--chat-template": choice(f"{{{{ '{SECRET} - x' }}}}"),
    "--root-path": choice("/a.b/c"),
    "--override-generation-config": choice('{"temperature": 0.5}'),
    "--compilation-config": choice('{"mode": 0}'),
    "--nnodes": plain(1, 2),
    "-n": plain(1, 2),
    "--max-loras": plain(1, 4),
}
DOTTED: dict[str, Write] = {
    "--speculative-config.num_speculative_tokens": plain(1, 8),
    "--speculative-config.method": choice("ngram"),
    "-sc.num_speculative_tokens": plain(1, 8),
    "--kv-transfer-config.kv_connector": choice("OffloadingConnector"),
    "--kv-transfer-config.kv_connector_extra_config.a.b": choice("1", "2k", "text"),
    "--compilation-config.cudagraph_capture_sizes+": choice("1,2"),
}
SWITCHES = (
    *("--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill"),
    *("--no-enable-chunked-prefill", "--enable-expert-parallel", "-ep", "--async-scheduling"),
    *("--no-async-scheduling", "--disable-hybrid-kv-cache-manager", "--no-disable-hybrid-kv-cache-manager"),
    *("--enforce-eager", "--no-enforce-eager", "--headless", "--trust-remote-code", "--disable-log-stats"),
    *("-O3", "-O=1", "--enable-lora", "--kv-sharing-fast-prefill"),
)
SEVERAL: dict[str, tuple[str, ...]] = {
    "--served-model-name": ("a", "b-1", "c.d"),
    "--api-key": (f"{SECRET}-4", f"{SECRET}-5"),
    "--kv-cache-dtype-skip-layers": ("0", "1", "sliding_window"),
}
MODELS = ("/models/llama", "organisation/name", "./relative", "name")


def make(rng: random.Random) -> dict[str, object]:
    """One: `words` after `serve`, and the text of its config file or None. vLLM may refuse it."""
    flags = [_flag(rng) for _ in range(rng.randint(0, 7))]
    if rng.random() < 0.2:
        several = rng.choice(list(SEVERAL))
        flags.append([several, *rng.sample(SEVERAL[several], rng.randint(1, len(SEVERAL[several])))])
    rng.shuffle(flags)
    model = rng.choice(MODELS)
    words = [word for flag in flags for word in flag]
    where = rng.random()
    config = None
    if where < 0.6:
        words = [model, *words]
    elif where < 0.8:
        words = [*words, *rng.choice([["--model", model], [f"--model={model}"]])]
    if rng.random() < 0.3:
        config = _config(rng, model if where >= 0.8 else None)
        at = rng.choice([index for index in range(len(words) + 1) if _between_flags(words, index)])
        words = [*words[:at], "--config", "CONFIG", *words[at:]]
    return {"words": words, "config": config}


def _between_flags(words: list[str], index: int) -> bool:
    return index == len(words) or words[index].startswith("--")


def _flag(rng: random.Random) -> list[str]:
    kind = rng.random()
    if kind < 0.2:
        return [_spelled(rng, rng.choice(SWITCHES))]
    table = DOTTED if kind < 0.3 else VALUED
    name = rng.choice(list(table))
    value = table[name](rng)
    spelled = _spelled(rng, name)
    return [f"{spelled}={value}"] if rng.random() < 0.4 else [spelled, value]


def _spelled(rng: random.Random, name: str) -> str:
    """With underscores, or as much of it as may still be clear."""
    if not name.startswith("--"):
        return name
    before, dot, keys = name.partition(".")
    if rng.random() < 0.3 and len(before) > 6:
        before = before[: rng.randint(max(4, len(before) - 12), len(before))]
    if rng.random() < 0.3:
        before = "--" + before[2:].replace("-", "_")
    return before + dot + keys


def _config(rng: random.Random, model: str | None) -> str:
    """YAML is also JSON, written by hand where it looks more like what people write."""
    lines = [] if model is None else [f"model: {model}"]
    names = rng.sample([name for name in VALUED if name.startswith("--")], rng.randint(0, 4))
    for name in names:
        key = name[2:].replace("-", rng.choice("-_"))
        lines.append(f"{key}: {json.dumps(VALUED[name](rng))}")
    switches = [name for name in SWITCHES if name.startswith("--") and not name.startswith("--no-")]
    lines += [f"{name[2:]}: true" for name in rng.sample(switches, rng.randint(0, 2))]
    if rng.random() < 0.3:
        lines.append("speculative-config:\n  method: ngram\n  num_speculative_tokens: 4")
    if rng.random() < 0.3:
        lines.append("served-model-name: [x, y]")
    return "\n".join(lines) + "\n" if lines else "{}\n"
