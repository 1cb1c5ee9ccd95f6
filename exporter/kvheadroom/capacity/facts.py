"""What does not change until a restart: flags, model, hardware; each with where it is known from.

Precedence of a flag: echoed by the running engine > the operator's config > vLLM's default of the
release, which is marked assumed. Facts are replaced as a whole, never patched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvheadroom.capacity.gpu_catalogue import CPU, GPUS
from kvheadroom.capacity.model_geometry import (
    LatentAttention,
    ModelGeometry,
    SparseAttention,
    UnknownGeometry,
    read_geometry,
)
from kvheadroom.capacity.parallelism import Parallelism
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.refusals import StartFlags, refusals
from kvheadroom.capacity.release_rules import ReleaseRules, rules_for

T = TypeVar("T")


class Origin(StrEnum):
    """Where a fact is known from."""

    ECHOED = "echoed by the engine"
    SERVER = "told by the server"
    CONFIG = "your config"
    MODEL_FILES = "the model's files"
    DEFAULT = "default"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A value with its origin; `note` says what a reader should know about an assumption."""

    value: T
    origin: Origin
    note: str = ""

    @property
    def assumed(self) -> bool:
        """Whether nobody said it: a default or a guess."""
        return self.origin in (Origin.DEFAULT, Origin.ASSUMED)


@dataclass(frozen=True, slots=True)
class MissingFact:
    """What a prediction needs and nobody said.

    Attributes:
        fact: its name, the value of the label `fact`.
        why: what was looked at and why it gave nothing.
        way_out: the line of config, or the step, that gives it.
    """

    fact: str
    why: str
    way_out: str


# Flags that change the KV cache or its memory in ways this version does not model: with the value that
# means "off", and what it is when nobody says. vllm/engine/arg_utils.py, 0.33.0.
UNMODELLED_FLAGS: Mapping[str, tuple[Any, str]] = {
    "kv_cache_dtype_skip_layers": ((), "none"),
    "attention_backend": (None, "chosen by vLLM"),
    "hf_overrides": (None, "none"),
}
PARALLEL_FLAGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFacts:
    """What the operator's config says about one replica.

    Attributes:
        flags: vLLM's flags by vLLM's names (underscores), values as vLLM takes them.
        gpu: a name of the GPU catalogue, or `CPU`.
        hbm_bytes: total bytes of one GPU as CUDA reports them; wins over the catalogue.
        weights_bytes: bytes of the whole model's weights.
        overhead_bytes: bytes per GPU that are neither weights nor KV pool; None: not set, default taken.
    """

    flags: Mapping[str, Any]
    gpu: str | None = None
    hbm_bytes: int | None = None
    weights_bytes: int | None = None
    overhead_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The model's files, read.

    Attributes:
        folder: where they lie.
        config: config.json, parsed.
        weights_bytes: `metadata.total_size` of the safetensors index, None without an index.
        assumed_because: why these may be the wrong files, or empty.
    """

    folder: str
    config: Mapping[str, Any]
    weights_bytes: int | None = None
    assumed_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswers:
    """What the server itself says beside its metrics; None where it did not answer.

    Attributes:
        version: `/version`.
        model_root: `root` of `/v1/models`, a folder or a hub name, as the server was given it.
        max_model_len: of `/v1/models`.
    """

    version: str | None = None
    model_root: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """All that a prediction may use, and all that is missing for it.

    Attributes:
        platform: `cuda` or `cpu`.
        capability: CUDA compute capability, None when the GPU is not known.
        model: None when the files or the architecture are not known (then `missing` says why).
        kv_cache_dtype: vLLM's word (`auto`, `fp8`, ...).
        dtype: `--dtype`.
        draft_layers: layers of multi-token prediction that are loaded, which have a KV cache too.
        attention_backend: `--attention-backend`, None when vLLM chooses.
        hbm_bytes, weights_bytes, overhead_bytes: per GPU, whole model, per GPU.
        obstacles: why no prediction can be made although the fact is known ("cannot predict: ...").
        refused: why vLLM would not start with these flags.
    """

    rules: ReleaseRules
    version: Fact[str] | None
    model_folder: Fact[str] | None
    model: ModelGeometry | None
    max_model_len: Fact[int] | None
    platform: Fact[str]
    capability: tuple[int, int] | None
    tensor_parallel_size: Fact[int]
    pipeline_parallel_size: Fact[int]
    decode_context_parallel_size: Fact[int]
    prefill_context_parallel_size: Fact[int]
    kv_cache_dtype: Fact[str]
    dtype: Fact[str]
    draft_layers: Fact[int]
    attention_backend: str | None
    block_size: Fact[int]
    gpu_memory_utilization: Fact[float]
    kv_cache_memory_bytes: Fact[int] | None
    num_gpu_blocks_override: Fact[int] | None
    hbm_bytes: Fact[int] | None
    weights_bytes: Fact[int] | None
    overhead_bytes: Fact[int]
    unmodelled_defaults: tuple[str, ...]
    missing: tuple[MissingFact, ...]
    obstacles: tuple[str, ...]
    refused: tuple[str, ...] = ()

    @property
    def parallelism(self) -> Parallelism:
        """The parallel sizes as plain numbers."""
        return Parallelism(
            tensor=self.tensor_parallel_size.value,
            pipeline=self.pipeline_parallel_size.value,
            decode_context=self.decode_context_parallel_size.value,
            prefill_context=self.prefill_context_parallel_size.value,
        )

    def assumed(self) -> tuple[tuple[str, str], ...]:
        """(fact, what was assumed) of everything the prediction takes on trust, in a fixed order."""
        found: list[tuple[str, str]] = []
        if self.rules.assumed_because:
            found.append(("release", self.rules.assumed_because))
        for name in (
            "platform",
            *PARALLEL_FLAGS,
            "block_size",
            "kv_cache_dtype",
            "dtype",
            "max_model_len",
            "model_folder",
        ):
            fact = getattr(self, name)
            if fact is not None and fact.assumed:
                found.append((name, fact.note or f"{fact.value} ({fact.origin})"))
        if self.pool_from_hbm:
            for name in ("gpu_memory_utilization", "hbm_bytes", "weights_bytes", "overhead_bytes"):
                fact = getattr(self, name)
                if fact is not None and fact.assumed:
                    found.append((name, fact.note or f"{fact.value} ({fact.origin})"))
        if self.platform.value == CPU and self.model and isinstance(self.model.attention, LatentAttention):
            found.append(
                ("cpu_amx", "the CPU has no AMX; with AMX, latent attention takes other blocks than 16")
            )
        if self.draft_layers.assumed:
            found.append(("speculative_config", self.draft_layers.note))
        found += [
            (name, f"{UNMODELLED_FLAGS[name][1]} (vLLM's default)") for name in self.unmodelled_defaults
        ]
        return tuple(found)

    @property
    def pool_from_hbm(self) -> bool:
        """Whether the pool is what HBM leaves over, rather than a size given by a flag."""
        return self.kv_cache_memory_bytes is None and self.num_gpu_blocks_override is None


DEFAULT_OVERHEAD_BYTES = 12 * 10**9


def resolve_facts(
    *,
    operator: OperatorFacts,
    answers: ServerAnswers,
    echoed: EchoedFlags,
    model_files: ModelFiles | None,
    model_files_missing: MissingFact | None = None,
) -> EngineFacts:
    """Facts of one engine from everything that was said about it.

    Args:
        model_files_missing: why `model_files` is None.
    """
    flags = operator.flags
    rules = rules_for(answers.version)
    missing: list[MissingFact] = []
    obstacles: list[str] = []

    platform, hbm_bytes = _hardware(operator)
    model: ModelGeometry | None = None
    if model_files is None:
        if model_files_missing is not None:
            missing.append(model_files_missing)
    else:
        geometry = read_geometry(model_files.config)
        if isinstance(geometry, UnknownGeometry):
            obstacles.append(geometry.reason)
        else:
            model = geometry

    obstacles += _unmodelled(flags, echoed, model)
    draft_layers = _draft_layers(flags, model)
    if isinstance(draft_layers, str):
        obstacles.append(draft_layers)
        draft_layers = Fact(0, Origin.CONFIG)
    kv_cache_memory_bytes = _optional(echoed.kv_cache_memory_bytes, flags.get("kv_cache_memory_bytes"))
    override = _optional(echoed.num_gpu_blocks_override, flags.get("num_gpu_blocks_override"))
    weights_bytes = _weights(operator, model_files)
    if kv_cache_memory_bytes is None and override is None:
        missing += _missing_for_pool(platform, hbm_bytes, weights_bytes)

    max_model_len = _optional(answers.max_model_len, flags.get("max_model_len"), Origin.SERVER)
    if max_model_len is None and model is not None and model.longest_context is not None:
        max_model_len = Fact(
            model.longest_context, Origin.ASSUMED, f"{model.longest_context} (the longest of config.json)"
        )
    if max_model_len is None:
        missing.append(
            MissingFact(
                "max_model_len",
                "the server did not tell it at /v1/models",
                "set `flags: {max_model_len: N}`, or `api_key_file` if the server asks for a key",
            )
        )

    default_block_size = 128 if platform.value == CPU else 16
    facts = EngineFacts(
        rules=rules,
        version=None if answers.version is None else Fact(answers.version, Origin.SERVER),
        model_folder=None
        if model_files is None
        else Fact(
            model_files.folder,
            Origin.ASSUMED if model_files.assumed_because else Origin.MODEL_FILES,
            model_files.assumed_because,
        ),
        model=model,
        max_model_len=max_model_len,
        platform=platform,
        capability=None if operator.gpu is None or operator.gpu == CPU else GPUS[operator.gpu].capability,
        tensor_parallel_size=_flag(None, flags.get("tensor_parallel_size"), 1),
        pipeline_parallel_size=_flag(None, flags.get("pipeline_parallel_size"), 1),
        decode_context_parallel_size=_flag(None, flags.get("decode_context_parallel_size"), 1),
        prefill_context_parallel_size=_flag(None, flags.get("prefill_context_parallel_size"), 1),
        kv_cache_dtype=_flag(echoed.kv_cache_dtype, flags.get("kv_cache_dtype"), "auto"),
        dtype=_flag(None, flags.get("dtype"), "auto"),
        draft_layers=draft_layers,
        attention_backend=flags.get("attention_backend"),
        block_size=_flag(echoed.block_size, flags.get("block_size"), default_block_size),
        gpu_memory_utilization=_flag(
            echoed.gpu_memory_utilization,
            flags.get("gpu_memory_utilization"),
            rules.default_gpu_memory_utilization,
        ),
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_gpu_blocks_override=override,
        hbm_bytes=hbm_bytes,
        weights_bytes=weights_bytes,
        overhead_bytes=Fact(operator.overhead_bytes, Origin.CONFIG)
        if operator.overhead_bytes is not None
        else Fact(
            DEFAULT_OVERHEAD_BYTES,
            Origin.ASSUMED,
            f"{DEFAULT_OVERHEAD_BYTES / 1e9:g} GB (`overhead_gb`, a guess until it is measured)",
        ),
        unmodelled_defaults=tuple(
            name
            for name in UNMODELLED_FLAGS
            if name not in flags
            and not (name == "kv_cache_dtype_skip_layers" and echoed.kv_cache_dtype_skip_layers is not None)
        ),
        missing=tuple(missing),
        obstacles=tuple(obstacles),
    )
    if model is None:
        return facts
    return replace(
        facts,
        refused=refusals(
            model,
            StartFlags(
                parallelism=facts.parallelism,
                platform=platform.value,
                capability=facts.capability,
                kv_cache_dtype=facts.kv_cache_dtype.value,
                attention_backend=facts.attention_backend,
                block_size=None if facts.block_size.assumed else facts.block_size.value,
            ),
        ),
    )


def _unmodelled(flags: Mapping[str, Any], echoed: EchoedFlags, model: ModelGeometry | None) -> Iterator[str]:
    sparse = model is not None and isinstance(model.attention, SparseAttention)
    for name, (off, _) in UNMODELLED_FLAGS.items():
        if flags.get(name, off) not in (off, None) and not (name == "attention_backend" and sparse):
            yield f"the flag {name}={flags[name]!r} is not modelled by this version"[:200]
    if echoed.kv_cache_dtype_skip_layers:
        skipped = ",".join(echoed.kv_cache_dtype_skip_layers)
        yield f"the flag kv_cache_dtype_skip_layers={skipped} is not modelled by this version"[:200]


def _draft_layers(flags: Mapping[str, Any], model: ModelGeometry | None) -> Fact[int] | str:
    """Layers that speculative decoding adds to the cache; a string says why it is not known."""
    if "speculative_config" not in flags:
        return Fact(0, Origin.DEFAULT, "none (vLLM's default)")
    speculative = flags["speculative_config"]
    if speculative is None:
        return Fact(0, Origin.CONFIG)
    method = speculative.get("method") if isinstance(speculative, Mapping) else None
    if method == "ngram":
        return Fact(0, Origin.CONFIG)
    if method == "mtp" and model is not None and model.mtp_layers == 1:
        # One layer, however many tokens are predicted with it.
        return Fact(1, Origin.CONFIG)
    return f"the flag speculative_config={speculative!r} is not modelled by this version"[:200]


def _missing_for_pool(
    platform: Fact[str], hbm_bytes: Fact[int] | None, weights_bytes: Fact[int] | None
) -> list[MissingFact]:
    """What is missing where the pool is what memory leaves over."""
    if platform.value == CPU:
        return [
            MissingFact(
                "kv_cache_memory_bytes",
                "on a CPU vLLM sizes the pool from the memory that its process happens to leave",
                "start vLLM with --kv-cache-memory-bytes N, or set "
                "`flags: {kv_cache_memory_bytes: N}` (VLLM_CPU_KVCACHE_SPACE x 1073741824)",
            )
        ]
    missing = []
    if hbm_bytes is None:
        missing.append(
            MissingFact(
                "hbm_bytes",
                "neither the size of the pool nor that of the GPU's memory is known",
                "set `gpu: B200` (or another name of the catalogue), or `hbm_bytes: N` "
                "(torch.cuda.mem_get_info()[1])",
            )
        )
    if weights_bytes is None:
        missing.append(
            MissingFact(
                "weights_bytes",
                "there is no model.safetensors.index.json with a total_size in the model's folder",
                "set `weights_bytes: N` (the sum of the sizes of the *.safetensors files)",
            )
        )
    return missing


def _flag(echoed: T | None, configured: T | None, default: T) -> Fact[T]:
    if echoed is not None:
        return Fact(echoed, Origin.ECHOED)
    if configured is not None:
        return Fact(configured, Origin.CONFIG)
    return Fact(default, Origin.DEFAULT, f"{default} (vLLM's default)")


def _optional(
    echoed: int | None, configured: int | None, echo_origin: Origin = Origin.ECHOED
) -> Fact[int] | None:
    if echoed is not None:
        return Fact(echoed, echo_origin)
    return None if configured is None else Fact(configured, Origin.CONFIG)


def _hardware(operator: OperatorFacts) -> tuple[Fact[str], Fact[int] | None]:
    hbm = None if operator.hbm_bytes is None else Fact(operator.hbm_bytes, Origin.CONFIG)
    if operator.gpu is None:
        return Fact("cuda", Origin.ASSUMED, "an NVIDIA GPU (set `gpu: CPU` for vLLM's CPU backend)"), hbm
    if operator.gpu == CPU:
        return Fact(CPU, Origin.CONFIG), hbm
    gpu = GPUS[operator.gpu]
    if hbm is None and gpu.cuda_total_bytes is not None:
        hbm = Fact(gpu.cuda_total_bytes, Origin.ASSUMED, f"{gpu.cuda_total_bytes} ({gpu.source})")
    return Fact("cuda", Origin.CONFIG), hbm


def _weights(operator: OperatorFacts, model_files: ModelFiles | None) -> Fact[int] | None:
    if operator.weights_bytes is not None:
        return Fact(operator.weights_bytes, Origin.CONFIG)
    if model_files is not None and model_files.weights_bytes is not None:
        return Fact(model_files.weights_bytes, Origin.MODEL_FILES)
    return None
