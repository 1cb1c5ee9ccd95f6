"""The `plan` command's arguments: vLLM's flags in vLLM's spelling, and what only a planner says."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvheadroom.argument_readers import (
    count_or_none,
    gibibytes,
    gigabytes,
    gigabytes_above_0,
    gpu_name,
    length_or_auto,
    parallel_size,
    release,
    section,
    several,
    share,
    size,
    whole_number,
    word,
)
from kvheadroom.capacity.errors import OperatorError

if TYPE_CHECKING:
    from kvheadroom.live_planner import WhatIfOptions
    from kvheadroom.planner import PlanOptions

DESCRIPTION = """\
How many sessions a model holds on so many GPUs, and whether vLLM starts, before any GPU is rented: from the
model's config.json, the size of its weights, vLLM's flags and the GPU. Nothing is measured, no GPU is touched.
"""

EXAMPLES = """\
examples:
  kvheadroom plan zai-org/GLM-5 --gpu B200 --tp 4,8 --gpus 56 --session-tokens 256K
  kvheadroom plan /models/glm --weights-bytes 464115778000 --gpu B200 --tp 8 --dcp 1,8 --explain
  kvheadroom plan /models/glm-nvfp4 --compare /models/glm-fp8 --gpu B200 --tp 4,8 --gpus 56
  kvheadroom plan ./config.json --hbm-bytes 191.5g --weights-bytes 141g --tp 4 --json
  kvheadroom plan --from http://host:8000 --runs-with='-tp 4 --gpu B200' --tp 4,8 --session-tokens 256K
  kvheadroom plan --from http://host:8000 --tier-sizes 64GB,128GB,256GB --prometheus http://prometheus:9090
  kvheadroom plan /models/glm --from glm-a --config kvheadroom.yaml --max-model-len 512K

MODEL is a folder with config.json, a config.json alone, or a name on the Hugging Face hub: its local cache is looked
at first, then the hub is asked (HF_TOKEN or the token file of `hf auth login`; HF_ENDPOINT, HF_HOME, HF_HUB_CACHE,
HF_HUB_OFFLINE). The weights are those of its files; without such files they are made from config.json, or are what
--weights-bytes or --index says.

Several values, with commas, make a row each: --tp 4,8 --dcp 1,8 is four rows. Numbers are read as vLLM
reads them: 32k is 32,000, 32K is 32,768. GB is 10^9 bytes, GiB is 2^30.

--assumptions article puts the sum on paper first: (GB on the box x utilization - overhead - total_size / TP) over
bytes per token, without blocks, with 12 GB of overhead in vLLM's figures too. The default puts first what vLLM does, with the overhead
estimated, and both show the steps between them.

--from URL asks a running server once: what it holds now, the overhead that its pool measures, and for each
change the sessions before and after, with intervals, what vLLM's checks at start-up would say, and what is not
modelled. Its flags come from the engine, --config and, on this machine, its command line; no page of vLLM tells the
parallel sizes and the GPU: --runs-with='-tp 4 --gpu B200' says them. --mtp 0 takes drafting away.

--tier-sizes 64GB,256GB --prometheus URL beside --from tells which share of prompt tokens an offload tier of each size would find, learned from how soon
the prompts of the last day came back: vLLM's own metrics in that Prometheus (docs/warm-sessions.md).

--calibration FILE puts beside each row what starts of its kind had for overhead, or, carried over, starts of the same
model with other settings: n, and the interval. Raw figures stay, and where only one of the two starts, the first
lines say so.

Each line of a FILE of --cases is a JSON object with id, config (a parsed config.json), flags (vLLM's names), gpu,
vllm_version, available_bytes (per GPU; a list for pipeline stages) and optionally lengths: [tokens].
Each answer is a JSON line on standard output: planned, refused (vLLM would not start), or unknown
with the reason.

exit code: 0 every row starts, with what was learned, too (--cases: every line answered); 1 a row does not start, is refused, or cannot be
told (--cases: some are unknown); 2 a wrong option, or a model or file that cannot be read
"""


class VllmFlagsParser(argparse.ArgumentParser):
    """Takes `--max_model_len` for `--max-model-len`, as vLLM's own parser does."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse, with underscores in options read as dashes; an unknown one is this command's error."""
        known, unknown = super().parse_known_args([_dashed(word) for word in args or ()], namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    option, equals, value = word.partition("=")
    if " " in option:
        # Several, in the word of another option.
        return word
    return option.replace("_", "-") + equals + value


# Flags of vLLM that may have several values, each a row: (options, name, reader, help).
SWEPT: tuple[tuple[tuple[str, ...], str, Callable[[str], Any], str], ...] = (
    (("--tensor-parallel-size", "-tp", "--tp"), "tensor_parallel_size", parallel_size, "GPUs that share each layer"),
    (("--pipeline-parallel-size", "-pp", "--pp"), "pipeline_parallel_size", parallel_size, "stages that share the layers"),
    (("--data-parallel-size", "-dp", "--dp"), "data_parallel_size", parallel_size, "engines of a replica, with a pool each"),
    (("--decode-context-parallel-size", "-dcp", "--dcp"), "decode_context_parallel_size", parallel_size,
     "GPUs that share the tokens of a context"),
    (("--prefill-context-parallel-size", "-pcp", "--pcp"), "prefill_context_parallel_size", parallel_size,
     "GPUs that share a prefill"),
    (("--kv-cache-dtype",), "kv_cache_dtype", word, "auto, bfloat16, fp8, fp8_e4m3, nvfp4, nvfp4_ds_mla, ..."),
)  # fmt: skip
SINGLE: tuple[tuple[tuple[str, ...], str, Callable[[str], Any], str], ...] = (
    (("--max-model-len",), "max_model_len", length_or_auto, "longest request; auto: the longest that starts"),
    (("--gpu-memory-utilization", "--device-memory-utilization"), "gpu_memory_utilization", share,
     "share of the GPU that vLLM may use"),
    (("--kv-cache-memory-bytes",), "kv_cache_memory_bytes", count_or_none,
     "bytes per GPU for KV, in place of the sum, which 0 takes"),
    (("--num-gpu-blocks-override",), "num_gpu_blocks_override", whole_number, "blocks of the pool, in place of bytes"),
    (("--block-size",), "block_size", whole_number, "tokens of a block"),
    (("--attention-backend",), "attention_backend", word, "FLASHMLA_SPARSE, FLASHINFER, ..."),
    (("--dtype",), "dtype", word, "auto, bfloat16, float16, float32"),
    (("--max-num-batched-tokens",), "max_num_batched_tokens", whole_number, "tokens of a step; windows hold them"),
    (("--max-num-seqs",), "max_num_seqs", whole_number, "requests of a step"),
    (("--mamba-cache-dtype",), "mamba_cache_dtype", word, "type of recurrent states"),
    (("--mamba-ssm-cache-dtype",), "mamba_ssm_cache_dtype", word, "type of their recurrent part"),
    (("--mamba-block-size",), "mamba_block_size", whole_number, "tokens of a block of states"),
    (("--speculative-config", "-sc"), "speculative_config", section, "JSON; --mtp N is its short form"),
    (("--kv-offloading-size",), "kv_offloading_size", gibibytes, "GiB of host memory for KV blocks, of each engine"),
)  # fmt: skip
SWITCHES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("--enable-prefix-caching",), "enable_prefix_caching", "default: vLLM's choice for the model"),
    (("--enable-chunked-prefill",), "enable_chunked_prefill", "default: on"),
    (("--async-scheduling",), "async_scheduling", "default: on"),
    (
        ("--enable-expert-parallel", "-ep"),
        "enable_expert_parallel",
        "whole experts on each GPU; default: off",
    ),
    (("--enforce-eager",), "enforce_eager", "no CUDA graphs; default: off"),
)


def add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    """All arguments of `kvheadroom plan`."""
    plan.add_argument("model", nargs="?", metavar="MODEL", help="folder, config.json, or name on the hub")
    plan.add_argument("--cases", metavar="FILE", help="JSON lines to plan in place of MODEL")
    live = plan.add_argument_group("a server that runs")
    live.add_argument(
        "--from",
        dest="place",
        metavar="URL",
        help="start from what runs there: every other option is a change; MODEL: its files, where the server's are not on this machine",
    )
    live.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the daemon's YAML config, which knows the server by URL or name: its flags, GPU, model, access",
    )
    live.add_argument(
        "--runs-with",
        metavar="FLAGS",
        help="what it runs with and neither it nor its config tells, as one word: --runs-with='-tp 4 --gpu B200'",
    )
    live.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="holds the server's API key, without --config"
    )
    reuse = plan.add_argument_group("what an offload tier would find, by the last day of the server")
    reuse.add_argument(
        "--tier-sizes",
        type=several(size),
        metavar="SIZES",
        help="sizes of one engine's tier in host memory: 64GB,256GB; with --from and --prometheus",
    )
    reuse.add_argument("--prometheus", metavar="URL", help="a Prometheus that scrapes this vLLM")
    reuse.add_argument(
        "--select",
        metavar="MATCHERS",
        help='how it knows the server, as in PromQL: \'job="vllm",instance="glm:8000"\' (default: instance, by the server\'s address)',
    )
    reuse.add_argument(
        "--bearer-token-file", type=Path, metavar="FILE", help="holds the token that this Prometheus asks for"
    )
    reuse.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="certificates (PEM) of the authority of its https:// address",
    )
    what = plan.add_argument_group("the model and the GPUs")
    weights = what.add_mutually_exclusive_group()
    weights.add_argument(
        "--weights-bytes", type=whole_number, metavar="N", help="bytes of the whole checkpoint"
    )
    weights.add_argument("--index", type=Path, metavar="FILE", help="a safetensors index that tells them")
    what.add_argument("--gpu", type=gpu_name, metavar="NAME", help="B200, H100, ... (docs/gpus.md), or CPU")
    what.add_argument(
        "--hbm-bytes",
        type=whole_number,
        metavar="N",
        help="memory of one GPU as CUDA reports it, for a card that is not in the catalogue",
    )
    what.add_argument(
        "--marketed-gb",
        type=gigabytes_above_0,
        dest="marketed_bytes",
        metavar="X",
        help="GB on the box of one GPU, for the sum on paper (default: --hbm-bytes where it is said, else the catalogue's)",
    )
    what.add_argument("--gpus", type=whole_number, metavar="N", help="GPUs of the whole fleet")
    what.add_argument(
        "--session-tokens",
        type=several(whole_number),
        default=(),
        metavar="N[,N]",
        help="lengths to count sessions of (default 262144, or max_model_len if that is less)",
    )
    what.add_argument(
        "--overhead-gb",
        type=gigabytes,
        dest="overhead_bytes",
        metavar="X",
        help="GB per GPU that are neither weights nor KV: context, NCCL, activations, CUDA graphs (default: estimated; the sum on paper takes 12)",
    )
    what.add_argument(
        "--vllm-version",
        type=release,
        metavar="X.Y.Z",
        help="release to plan for (default: the newest known)",
    )
    what.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="what was learned from starts (kvheadroom calibrate), shown beside each row",
    )
    flags = plan.add_argument_group("vLLM's flags")
    for options, name, read, text in SWEPT:
        flags.add_argument(
            *options, dest=name, type=several(read), metavar="N[,N]" if read is parallel_size else "TYPE[,TYPE]",
            help=text,
        )  # fmt: skip
    for options, name, read, text in SINGLE:
        flags.add_argument(*options, dest=name, type=read, metavar="VALUE", help=text)
    for options, name, text in SWITCHES:
        flags.add_argument(*options, dest=name, action=argparse.BooleanOptionalAction, help=text)
    flags.add_argument(
        "--disable-hybrid-kv-cache-manager",
        dest="disable_hybrid_kv_cache_manager",
        action="store_true",
        default=None,
        help="windows keep every token",
    )
    flags.add_argument(
        "--mtp", type=count_or_none, metavar="N", help="N tokens by multi-token prediction, 0 for none"
    )
    shown = plan.add_argument_group("what is shown")
    shown.add_argument("--assumptions", choices=("vllm", "article"), default="vllm", help="what comes first")
    shown.add_argument("--compare", metavar="OTHER", help="another MODEL with the same options")
    other = shown.add_mutually_exclusive_group()
    other.add_argument("--compare-weights-bytes", type=whole_number, metavar="N", help="OTHER's")
    other.add_argument("--compare-index", type=Path, metavar="FILE", help="OTHER's")
    shown.add_argument(
        "--explain", action="store_true", help="every intermediate figure, with its formula and source"
    )
    shown.add_argument(
        "--json", action="store_true", help="everything as JSON on standard output, and nothing else there"
    )


def read_what_if_options(arguments: argparse.Namespace) -> "WhatIfOptions":
    """The parsed arguments of `--from` as what was asked.

    Raises:
        OperatorError: options that do not go together.
    """
    from kvheadroom.live_planner import WhatIfOptions
    from kvheadroom.prometheus_arguments import read_api, read_select

    if bool(arguments.tier_sizes) != bool(arguments.prometheus):
        raise OperatorError("--tier-sizes and --prometheus belong together")
    for name, option in (
        ("cases", "--cases"),
        ("compare", "--compare"),
        ("marketed_bytes", "--marketed-gb"),
    ):
        if getattr(arguments, name) is not None:
            raise OperatorError(f"{option} does not go with --from; leave one of them out")
    if arguments.assumptions != "vllm":
        raise OperatorError(f"--assumptions {arguments.assumptions} does not go with --from; leave it out")
    if arguments.index is not None and arguments.model is None:
        raise OperatorError("--index is of MODEL, which is missing")
    if arguments.config is not None and arguments.api_key_file is not None:
        raise OperatorError("--api-key-file: with --config say `api_key_file` of the replica there")
    changes = read_plan_options(arguments)
    taken_away = {
        name: None
        for name, given in (
            ("speculative_config", arguments.mtp),
            ("kv_cache_memory_bytes", arguments.kv_cache_memory_bytes),
        )
        if given == 0
    }
    changes = replace(changes, flags={**changes.flags, **taken_away})
    return WhatIfOptions(
        place=arguments.place,
        config=arguments.config,
        api_key_file=arguments.api_key_file,
        runs_with=_read_running(arguments.runs_with or ""),
        changes=changes,
        tier_bytes=arguments.tier_sizes or (),
        prometheus=read_api(arguments) if arguments.prometheus else None,
        select=read_select(arguments),
    )


class _RunningParser(VllmFlagsParser):
    """Flags in a word of the command line; what is wrong is that word's fault."""

    def error(self, message: str) -> NoReturn:
        raise OperatorError(f"--runs-with: {message}")


def _read_running(text: str) -> dict[str, Any]:
    """What a server runs with: a flag has one value.

    Raises:
        OperatorError: it is no such flags.
    """
    parser = _RunningParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=gpu_name)
    parser.add_argument("--hbm-bytes", type=whole_number)
    parser.add_argument("--mtp", type=whole_number)
    for options, name, read, _ in (*SWEPT, *SINGLE):
        parser.add_argument(*options, dest=name, type=read)
    for options, name, _ in SWITCHES:
        parser.add_argument(*options, dest=name, action=argparse.BooleanOptionalAction)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise OperatorError(f"--runs-with: {text[:60]!r}: {error}") from error
    found = vars(parser.parse_args(words))
    if (drafted := found.pop("mtp", None)) is not None:
        found["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafted}
    return found


def read_plan_options(arguments: argparse.Namespace) -> "PlanOptions":
    """The parsed arguments as what was asked.

    Raises:
        OperatorError: options that do not go together.
    """
    from kvheadroom.planner import ModelSource, PlanOptions

    given = vars(arguments)
    names = [name for _, name, _, _ in SINGLE] + [name for _, name, _ in SWITCHES]
    flags = {
        name: given[name] for name in (*names, "disable_hybrid_kv_cache_manager") if given[name] is not None
    }
    if arguments.mtp is not None:
        if "speculative_config" in flags:
            raise OperatorError("--mtp and --speculative-config say the same; leave one of them out")
        if arguments.mtp:
            flags["speculative_config"] = {"method": "mtp", "num_speculative_tokens": arguments.mtp}
    if flags.get("kv_cache_memory_bytes") == 0:
        del flags["kv_cache_memory_bytes"]
    models = [ModelSource(arguments.model or "", arguments.weights_bytes, arguments.index)]
    if arguments.compare is not None:
        models.append(
            ModelSource(arguments.compare, arguments.compare_weights_bytes, arguments.compare_index)
        )
    elif arguments.compare_weights_bytes is not None or arguments.compare_index is not None:
        raise OperatorError(
            "--compare-weights-bytes and --compare-index are of --compare OTHER, which is missing"
        )
    return PlanOptions(
        models=tuple(models),
        flags=flags,
        swept={name: given[name] for _, name, _, _ in SWEPT if given[name] is not None},
        gpu=arguments.gpu,
        hbm_bytes=arguments.hbm_bytes,
        marketed_bytes=arguments.marketed_bytes,
        overhead_bytes=arguments.overhead_bytes,
        version=arguments.vllm_version,
        session_tokens=arguments.session_tokens,
        gpus=arguments.gpus,
        by_sum=arguments.assumptions == "article",
        calibration=arguments.calibration,
    )
