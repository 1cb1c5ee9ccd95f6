"""The lines that vLLM 0.6.6 to 0.33 prints while it starts, each as one pattern.

Derived from the sources of those releases; a test names the file and the releases that print each. A message of vLLM's
begins with its form: text in the middle of another message, as of a prompt that is logged, is none.
"""

import re
from dataclasses import dataclass

from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.logged_start import Printed

_FIGURE = r"(-?\d{1,9}(?:\.\d{1,9})?\s?[KMGT]i?B)"
_COUNT = r"(\d[\d,]{0,20})"
_RATIO = r"(-?\d{1,3}(?:\.\d{1,20})?)"
_BEFORE = re.compile(r"[A-Za-z_][\w.]{0,80}(?:Error|Exception): |\[[A-Za-z_]\w{0,80}\] ")
"""An exception's name, or the part of the model that is compiled (from 0.32)."""
_PRINTED = re.compile(r"(-?\d{1,9})(?:\.(\d{1,9}))?\s?([KMGT]i?B)")
_FEWEST_DECIMALS = 2
_SHORTEST_TELLING_HEAD = 10
_ONE_WORD = re.compile(r"\[?[\w./:]{1,80}\]? ?")
"""The half of a source file's name, or of an exception's."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form.

    Attributes:
        head: what it begins with, so that a line costs one look for all forms.
        gb_is_gib: releases that divide by 2^30 print it with GB.
    """

    name: str
    head: str
    pattern: re.Pattern[str]
    gb_is_gib: bool = False


def _form(name: str, head: str, rest: str, *, gb_is_gib: bool = False) -> Form:
    pattern = re.escape(head) + rest.replace("FIGURE", _FIGURE).replace("COUNT", _COUNT).replace(
        "RATIO", _RATIO
    )
    return Form(name, head, re.compile(pattern, re.DOTALL), gb_is_gib)


_ON_DEVICE = r" (?:\S{1,40} )?\((-?\d{1,9}(?:\.\d{1,9})?)/FIGURE\) on startup"
_DESIRED = r"\. Desired GPU memory utilization is \(RATIO, FIGURE\)\. Actual usage is "
_IN_USE = (
    r"(?:.{0,600}?Current kv cache memory in use is (-?\d{1,20} bytes|-?\d{1,9}(?:\.\d{1,9})?\s?[KMGT]i?B))?"
)

FORMS = (
    _form("version", "vLLM ", r"(?:API |gRPC )?server version (\S{1,80}?)(?:, serving model (.{1,1024}))?$"),
    _form("version", "vLLM batch processing API version ", r"(\S{1,80})$"),
    _form("engine", "Initializing a", r"n? (?:V[01] )?LLM engine \(v([^)\s]{1,80})\) with config: (.*)"),
    _form("arguments", "non-default args: ", r"(.*)"),
    _form("arguments", "args: ", r"(Namespace\(.*)"),
    _form("arguments", "vLLM gRPC server args: ", r"(.*)"),
    _form("loaded", "Loading model weights took ", r"FIGURE", gb_is_gib=True),
    _form("loaded", "Model loading took ", r"FIGURE", gb_is_gib=True),
    _form(
        "v0_budget",
        "the current vLLM instance can use total_gpu_memory ",
        r"\(FIGURE\) x gpu_memory_utilization \(RATIO\) = FIGURE",
    ),
    _form(
        "v0_shares",
        "model weights take ",
        r"FIGURE; non_torch_memory takes FIGURE; PyTorch activation peak memory takes FIGURE; the rest of the memory "
        r"reserved for KV Cache is FIGURE",
    ),
    _form("snapshot", "worker init memory snapshot: ", r".{0,200}?free_memory=FIGURE, total_memory=FIGURE"),
    _form("requested", "worker requested memory: ", r"FIGURE"),
    _form(
        "requested_0_9", "Initial free memory: ", r"FIGURE, free memory: FIGURE, requested GPU memory: FIGURE"
    ),
    _form("requested_util", "Initial free memory: ", r"FIGURE; Requested memory: RATIO \(util\), FIGURE"),
    _form(
        "external",
        "Weights are held outside this process: of the ",
        r"FIGURE utilization budget, FIGURE is externally held and FIGURE remains",
    ),
    _form(
        "profiled",
        "Memory profiling takes ",
        r"[\d.]{1,20} seconds\. Total non KV cache memory: FIGURE; torch peak memory increase: FIGURE; "
        r"non-torch forward increase memory: FIGURE; weights memory: FIGURE",
    ),
    _form(
        "profiled_consumed",
        "Memory profiling takes ",
        r"[\d.]{1,20} seconds\. Total non KV cache memory: FIGURE; torch peak memory increase: FIGURE; "
        r"total consumed \(from mem_get_info\): FIGURE; weights memory: FIGURE",
    ),
    _form("available", "Available KV cache memory: ", r"FIGURE"),
    _form("pinned", "Initial free memory ", r"FIGURE, reserved FIGURE memory for KV Cache as specified"),
    _form(
        "plan",
        "Applying persisted startup plan ",
        r"\(fingerprint \S{1,200}\): kv_cache_memory_bytes=(\d{1,20}) \(FIGURE\), recorded free-memory baseline FIGURE, "
        r"current FIGURE",
    ),
    _form("estimate", "Estimated ", r"(?:MRV2 )?CUDA graph memory: FIGURE total"),
    _form(
        "counted",
        "CUDA graph memory profiling is enabled ",
        r".{0,200}?The current --gpu-memory-utilization=RATIO is equivalent to --gpu-memory-utilization=RATIO without",
    ),
    _form(
        "not_counted",
        "CUDA graph memory profiling is disabled ",
        r".{0,600}?--gpu-memory-utilization from RATIO to RATIO",
    ),
    _form(
        "not_counted",
        "In v0.19, CUDA graph memory profiling will be enabled by default ",
        r".{0,600}?--gpu-memory-utilization from RATIO to RATIO",
    ),
    _form("compiled", "Compiling a graph for ", r".{1,80}? takes [\d.]{1,20} s"),
    _form("compiled", "Cache the graph ", r"(?:of|for) .{1,80}? for later use"),
    _form("compiled_before", "Directly load the ", r"(?:compiled|\d{1,6}-th) graph"),
    _form("compiled_before", "Directly load AOT compilation from path ", ""),
    _form("captured", "Graph capturing finished in ", r"\d{1,9} secs?, took FIGURE"),
    _form("graph_pool", "CUDA graph pool memory: ", r"FIGURE \(actual\), FIGURE \(estimated\)"),
    _form(
        "usage",
        "Free memory on device",
        _ON_DEVICE
        + _DESIRED
        + r"FIGURE for weight, FIGURE for peak activation, FIGURE for non-torch memory, and FIGURE for "
        r"CUDAGraph memory\." + _IN_USE,
    ),
    _form(
        "usage_consumed",
        "Free memory on device",
        _ON_DEVICE
        + _DESIRED
        + r"FIGURE for consumed memory \(weights \+ non-torch\), FIGURE for peak activation, and FIGURE "
        r"for CUDAGraph memory\." + _IN_USE,
    ),
    _form(
        "reserve",
        "Reserving ",
        r"FIGURE of GPU memory for frontend multimodal decoding .{0,400}?KV cache memory reduced to FIGURE",
    ),
    *(
        _form(
            "pool",
            f"{device} KV cache size: ",
            r"COUNT tokens(?:, Maximum concurrency for \d[\d,]{0,20} tokens per request: [\d.]{1,20}x)?",
        )
        for device in ("GPU", "CPU", "XPU", "TPU", "HPU", "NPU")
    ),
    _form("concurrency", "Maximum concurrency for ", r"\d[\d,]{0,20} tokens per request: [\d.]{1,20}x"),
    _form("blocks", "# ", r"(?!CPU\b)\w{1,20} blocks: (\d{1,15})(?![\d.])"),
    _form(
        "engine_blocks",
        "Engine ",
        r"(\d{1,4}): vllm cache_config_info with initialization after num_gpu_blocks is: (\d{1,15})(?!\d)",
    ),
    _form(
        "override", "Overriding num_gpu_blocks=", r"(\d{1,15}) with num_gpu_blocks_override=(\d{1,15})(?!\d)"
    ),
    _form("step", "Chunked prefill is enabled with max_num_batched_tokens=", r"(\d{1,15})\."),
    _form(
        "length",
        "Auto-fit max_model_len: ",
        r"(?:reduced from \d{1,15} to|full model context length) (\d{1,15}) ",
    ),
    _form("engine_up", "init engine (profile, create kv cache, warmup model) took ", ""),
    _form("server_up", "Application startup complete", ""),
    _form("server_up", "Starting vLLM ", r"(?:API )?server "),
)
"""Of one name there are several where releases word it differently and the groups are the same."""

FAILURES = (
    _form(
        "no_room_for_one",
        "To serve at least one request with the model",
        r"(?:s)?'s max seq len \((\d{1,15})\), \(FIGURE KV cache is needed, which is larger than the available KV cache memory "
        r"\(FIGURE\)(?:.{0,200}?estimated maximum model length is (\d{1,15})\b)?",
        gb_is_gib=True,
    ),
    _form(
        "v0_no_room_for_one",
        "The model's max seq len ",
        r"\((\d{1,15})\) is larger than the maximum number of tokens that can be stored in KV cache \((\d{1,15})\)",
    ),
    _form("no_blocks", "No available memory for the cache blocks", ""),
    _form("no_states", "max_num_seqs (", r"(\d{1,15})\) exceeds available Mamba cache blocks \((\d{1,15})\)"),
    _form("no_token", "Cannot auto-fit max_model_len: not enough GPU memory available", ""),
    _form(
        "short",
        "Free memory on device",
        _ON_DEVICE
        + r" is less than (?:desired GPU memory utilization|the engine's budget after excluding external process's "
        r"weights) \(RATIO, FIGURE\)",
    ),
    _form(
        "external_short",
        "Externally held weights on device",
        r" \S{1,40} \((-?\d{1,9}(?:\.\d{1,9})?)/FIGURE\) exceed the desired GPU memory utilization \(RATIO, FIGURE\)",
    ),
    _form("grew", "Error in memory profiling. Initial free memory ", r"FIGURE, current free memory FIGURE"),
    _form("grew_in_bytes", "Error in memory profiling. Initial ", r"(?:free|used) memory \d{1,20},"),
    _form(
        "out_of_memory",
        "CUDA out of memory",
        r"(?:\. Tried to allocate ([\d.]{1,20} [KMG]iB).{0,200}? has a total capacity of ([\d.]{1,20} [KMG]iB) of which "
        r"([\d.]{1,20} [KMG]iB) is free)?",
    ),
    _form("out_of_memory", "HIP out of memory", r"(?:\. Tried to allocate ([\d.]{1,20} [KMG]iB))?"),
    _form("not_started", "Engine core initialization failed", ""),
    _form("not_started", "EngineCore failed to start", ""),
    _form("not_started", "Engine process failed to start", ""),
    _form("not_started", "Engine core proc", r"(?:ess)? \S{1,80} died unexpectedly"),
)

_HEADS = tuple({form.head for form in (*FORMS, *FAILURES)})
# Others begin many a message that is no form.
_TELLING_HEADS = tuple(head for head in _HEADS if len(head) >= _SHORTEST_TELLING_HEAD)
_BEGINNINGS = frozenset(head[:end] for head in _HEADS for end in range(len(head)))
_LOGO = re.compile("[█\N{REPLACEMENT CHARACTER}] {2}(version|model) {1,3}(\\S.{0,1023})$")


def match_form(text: str) -> tuple[Form, re.Match[str]] | None:
    """The form of a message; None where it has none."""
    start = _start(text)
    if not text.startswith(_HEADS, start):
        return None
    for form in (*FORMS, *FAILURES):
        if text.startswith(form.head, start) and (found := form.pattern.match(text, start)):
            return form, found
    return None


def has_head(text: str) -> bool:
    """Whether a message begins as a form does, in words that begin no other."""
    return text.startswith(_TELLING_HEADS, _start(text))


def may_go_on(text: str) -> bool:
    """Whether a message that has a prefix and is no form may be the first part of one, or of the prefix."""
    start = _start(text)
    return (
        text.startswith(_HEADS, start) or text[start:] in _BEGINNINGS or _ONE_WORD.fullmatch(text) is not None
    )


def _start(text: str) -> int:
    found = _BEFORE.match(text) if text[:1].isalpha() or text[:1] == "[" else None
    return 0 if found is None else found.end()


def logo(text: str) -> tuple[str, str] | None:
    """What stands beside the letters that vLLM draws from 0.16 on: `version` or `model`, and which."""
    found = _LOGO.search(text[:1200])
    return None if found is None else (found[1], found[2].strip())


class BadUnitError(ValueError):
    """A figure in a unit that no release prints there; the message names both."""


def printed(text: str, *, gb_is_gib: bool = False) -> Printed:
    """A figure with its unit.

    `format_gib` drops zeros at the end (15.0 for 15.00), so fewer decimals than two say nothing.

    Raises:
        BadUnitError: it is not GiB.
    """
    found = _PRINTED.fullmatch(text)
    unit = found[3] if found is not None else ""
    if found is None or (unit != "GiB" and not (gb_is_gib and unit == "GB")):
        raise BadUnitError(f"is in {unit or 'no unit'}, where vLLM prints GiB")
    digits = found[2] or ""
    unit_bytes = GIB / 10 ** max(len(digits), _FEWEST_DECIMALS)
    return Printed(round(float(f"{found[1]}.{digits or 0}") * GIB), round(unit_bytes / 2))
