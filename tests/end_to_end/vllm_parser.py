"""What vLLM's own parser makes of command lines: JSON lines on standard input, JSON lines on standard output.

Run by the Python of vLLM's environment. Each line has `words` (after `serve`) and `config`, the text of the file that the
word CONFIG stands for. The answer has `values`, or `refused`.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

WANTED = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
    *("prefill_context_parallel_size", "enable_expert_parallel", "kv_cache_dtype", "dtype", "block_size"),
    *("kv_cache_dtype_skip_layers", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "enable_prefix_caching"),
    *("enable_chunked_prefill", "async_scheduling", "disable_hybrid_kv_cache_manager", "mamba_cache_dtype"),
    *("mamba_ssm_cache_dtype", "mamba_block_size", "kv_offloading_size", "attention_backend"),
    *("speculative_config", "kv_transfer_config", "port", "host", "uds", "headless", "api_key"),
)


def main() -> None:
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:
        # Up to 0.32.
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

    # As `ServeSubcommand.subparser_init` does (entrypoints/cli/serve.py), which imports the whole server.
    parser = FlexibleArgumentParser()
    make_arg_parser(parser.add_subparsers(dest="subparser").add_parser("serve"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "flags.yaml"
        sys.stdout.write(json.dumps({"vllm": vllm.__version__}) + "\n")
        for line in sys.stdin:
            case = json.loads(line)
            if case["config"] is not None:
                file.write_text(case["config"], encoding="utf-8")
            words = [str(file) if word == "CONFIG" else word for word in case["words"]]
            sys.stdout.write(json.dumps(_answer(parser, words), default=_plain) + "\n")


def _answer(parser: Any, words: list[str]) -> dict[str, Any]:
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            parsed = parser.parse_args(["serve", *words])
    except (SystemExit, Exception) as error:  # noqa: BLE001  whatever it is, vLLM would not start
        return {"refused": type(error).__name__}
    values = {name: getattr(parsed, name) for name in WANTED}
    values["api_key"] = bool(values["api_key"])
    return {"values": values, "model": parsed.model_tag or parsed.model}


def _plain(value: Any) -> Any:
    if hasattr(value, "kv_connector"):
        return {"kv_connector": value.kv_connector}
    return sorted(value) if isinstance(value, set) else getattr(value, "name", str(value))


if __name__ == "__main__":
    main()
