"""What does not change until a restart: flags, model, hardware; each with where it is known from."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.layer_stack import Layers, LayerStack
from kvheadroom.capacity.model_geometry import ModelGeometry
from kvheadroom.capacity.overhead_parts import OverheadEstimate
from kvheadroom.capacity.parallelism import Parallelism
from kvheadroom.capacity.release_rules import ReleaseRules
from kvheadroom.capacity.stored_model import ModelFiles, TensorInventory

T = TypeVar("T")


class Origin(StrEnum):
    """Where a fact is known from."""

    ECHOED = "echoed by the engine"
    SERVER = "told by the server"
    CONFIG = "your config"
    COMMAND_LINE = "its command line"
    MACHINE = "this machine"
    MODEL_FILES = "the model's files"
    LEARNED = "learned from starts like it"
    ESTIMATED = "estimated"
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
        return self.origin in (Origin.ESTIMATED, Origin.DEFAULT, Origin.ASSUMED)


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


# Flags that may change the KV cache, and what they are when nobody says (vllm/engine/arg_utils.py, 0.33.0).
SILENT_FLAGS: Mapping[str, str] = {
    "kv_cache_dtype_skip_layers": "none",
    "attention_backend": "chosen by vLLM",
    "hf_overrides": "none",
    "kv_transfer_config": "none",
}
# The same, where layers look back over a window, or keep a recurrent state.
WINDOW_FLAGS: Mapping[str, str] = {
    "disable_hybrid_kv_cache_manager": "off",
    "async_scheduling": "on",
}
STATE_FLAGS: Mapping[str, str] = {
    "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
}
AUTO_LENGTH = -1
"""`--max-model-len auto`, as vLLM writes it down: the longest length that starts."""
NO_LENGTH_TO_FIT = "max_model_len=-1 needs a longest context in config.json, and there is none"
"""Why vLLM refuses that of a model that takes any length."""
PARALLEL_FLAGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


@dataclass(frozen=True, slots=True)
class ToldFlag:
    """A flag that somebody told, its value in words, and who; who is believed where several did."""

    name: str
    value: str
    origin: Origin


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
class CacheFlags:
    """Flags that decide the cache, by vLLM's names; None: not said, and vLLM's default depends on the model.

    Attributes:
        max_num_seqs: requests per step, None: not said, and then never more than the tokens per step.
        async_wanted: `--async-scheduling` is said.
        expert_parallel: `--enable-expert-parallel`.
        hybrid_manager_wanted: `--no-disable-hybrid-kv-cache-manager` is said.
        offloading: blocks go to host memory by vLLM's own connector.
        connector: there is a KV connector, that one or another.
        enforce_eager: no CUDA graphs.
    """

    attention_backend: str | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    disable_hybrid_kv_cache_manager: bool = False
    async_scheduling: bool = True
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    mamba_block_size: int | None = None
    max_num_seqs: int | None = None
    hybrid_manager_wanted: bool = False
    async_wanted: bool = False
    expert_parallel: bool = False
    offloading: bool = False
    connector: bool = False
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadFlags:
    """What is said of a tier of the KV cache in host memory.

    Attributes:
        size_gib: `--kv-offloading-size`: of one engine, all its workers together.
        backend: `--kv-offloading-backend`.
        connector: `--kv-transfer-config`, as far as it is known.
    """

    size_gib: float | None = None
    backend: str | None = None
    connector: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A draft model of its own.

    Attributes:
        architecture: the class that vLLM takes for it.
        config: its config.json.
        stack: its layers.
        quantization: what `--speculative-config` says of it, None where it says nothing.
        tensors: those of its checkpoint, None where they are not known.
    """

    architecture: str
    config: Mapping[str, Any]
    stack: LayerStack
    quantization: str | None = None
    tensors: TensorInventory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Speculative decoding: what drafts, and the layers that it adds to the cache.

    Attributes:
        tokens: tokens drafted per step.
        longest_context: the longest context that the draft takes, None: that of its target.
        num_heads, num_kv_heads, vocab_size: of a draft with a config.json of its own, None without one.
        model: a draft with a model of its own, None without one.
        note: how it is known, where nobody said it.
    """

    method: str | None = None
    tokens: int = 0
    layers: Layers = ()
    longest_context: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    vocab_size: int | None = None
    model: DraftModel | None = None
    note: str = ""

    @property
    def lookahead_tokens(self) -> int:
        """Tokens ahead of the model's own that the draft keeps (`num_lookahead_tokens`, config/vllm.py)."""
        return self.tokens if self.layers else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """All that a prediction may use, and all that is missing for it.

    Attributes:
        platform: `cuda` or `cpu`.
        gpu: a name of the GPU catalogue, or `CPU`; None when the GPU is not known.
        capability: its CUDA compute capability, None when it is not known.
        model_files: the files that `model` was read from.
        model: None when the files or the architecture are not known (then `missing` says why).
        kv_cache_dtype: vLLM's word (`auto`, `fp8`, ...).
        dtype: `--dtype`.
        flags: the flags that nothing else here stands for.
        offload: a tier in host memory.
        draft: speculative decoding.
        data_parallel_size, enable_expert_parallel: over how many GPUs routed experts are spread, and how.
        max_num_batched_tokens: tokens scheduled per step, which windows keep; None when only a GPU's name would tell.
        max_num_seqs: requests that run at once, at most; None when only a GPU's name would tell.
        hbm_bytes, weights_bytes, overhead_bytes: per GPU, whole model, per GPU.
        marketed_bytes: what one GPU is sold by; None where its card is not known, or sellers differ.
        overhead_estimate: what `overhead_bytes` is made of; None where it was said, or is the guess for a model of unknown sizes.
        command_line: of a server on this machine; None where nobody could read it.
        told_flags: each flag of vLLM that somebody told, by name.
        silent_flags: flags that may matter and that nobody said, with vLLM's default.
        obstacles: why no prediction can be made although the fact is known ("cannot predict: ...").
    """

    rules: ReleaseRules
    version: Fact[str] | None
    model_folder: Fact[str] | None
    model_files: ModelFiles | None
    model: ModelGeometry | None
    max_model_len: Fact[int] | None
    platform: Fact[str]
    gpu: str | None
    capability: tuple[int, int] | None
    tensor_parallel_size: Fact[int]
    pipeline_parallel_size: Fact[int]
    decode_context_parallel_size: Fact[int]
    prefill_context_parallel_size: Fact[int]
    data_parallel_size: Fact[int]
    enable_expert_parallel: Fact[bool]
    kv_cache_dtype: Fact[str]
    dtype: Fact[str]
    flags: CacheFlags
    offload: OffloadFlags
    draft: Draft
    max_num_batched_tokens: Fact[int] | None
    max_num_seqs: Fact[int] | None
    block_size: Fact[int]
    gpu_memory_utilization: Fact[float]
    kv_cache_memory_bytes: Fact[int] | None
    num_gpu_blocks_override: Fact[int] | None
    hbm_bytes: Fact[int] | None
    weights_bytes: Fact[int] | None
    overhead_bytes: Fact[int]
    silent_flags: tuple[tuple[str, str], ...]
    missing: tuple[MissingFact, ...]
    obstacles: tuple[str, ...]
    marketed_bytes: int | None = None
    overhead_estimate: OverheadEstimate | None = None
    command_line: CommandLine | None = None
    told_flags: tuple[ToldFlag, ...] = ()

    @property
    def batched_tokens(self) -> int:
        """Tokens scheduled per step; 0 when that is not known."""
        return 0 if self.max_num_batched_tokens is None else self.max_num_batched_tokens.value

    @property
    def in_flight_tokens(self) -> int:
        """Tokens scheduled but not yet settled (`max_in_flight_tokens`, config/vllm.py)."""
        # The CPU backend switches asynchronous scheduling off (platforms/cpu.py), and so does a draft that only the
        # older model runner has.
        if not self.rules.windows_hold_batches_in_flight:
            return self.batched_tokens
        ahead = self.flags.async_scheduling and self.platform.value != CPU and self.draft.method != "suffix"
        return (self.pipeline_parallel_size.value + ahead) * self.batched_tokens

    @property
    def has_empty_stages(self) -> bool:
        """Whether there are more pipeline stages than layers: vLLM refuses that, and there is nothing to share out."""
        return self.model is not None and self.pipeline_parallel_size.value > self.model.num_layers

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
        if self.platform.value == CPU and self.model and self.model.is_latent:
            found.append(
                ("cpu_amx", "the CPU has no AMX; with AMX, latent attention takes other blocks than 16")
            )
        if self.draft.note:
            found.append(("speculative_config", self.draft.note))
        windows = self.model is not None and self.model.has_windows
        if windows and self.max_num_batched_tokens is not None and self.max_num_batched_tokens.assumed:
            found.append(("max_num_batched_tokens", self.max_num_batched_tokens.note))
        found += [(name, f"{value} (vLLM's default)") for name, value in self.silent_flags]
        if self.command_line is not None:
            found += [
                ("command_line", f"nothing more than was read, but {doubt}")
                for doubt in self.command_line.doubts
            ]
        return tuple(found)

    def flags_by_origin(self) -> tuple[tuple[Origin, tuple[ToldFlag, ...]], ...]:
        """The flags that somebody told, by who told them."""
        origins = [origin for origin in Origin if any(flag.origin is origin for flag in self.told_flags)]
        return tuple(
            (origin, tuple(flag for flag in self.told_flags if flag.origin is origin)) for origin in origins
        )

    def guessed(self) -> tuple[tuple[str, str], ...]:
        """Of what is assumed, all that is not simply vLLM's own default for a flag that was left out."""
        return tuple((name, note) for name, note in self.assumed() if not self._is_default(name))

    def _is_default(self, name: str) -> bool:
        fact = getattr(self, name, None)
        if isinstance(fact, Fact):
            return fact.origin is Origin.DEFAULT
        return name == "speculative_config" or name in dict(self.silent_flags)

    @property
    def pool_from_hbm(self) -> bool:
        """Whether the pool is what HBM leaves over, rather than a size given by a flag."""
        return self.kv_cache_memory_bytes is None and self.num_gpu_blocks_override is None
