"""The key of a start: model, GPU, parallel sizes, release and flags, as far as the overhead depends on them."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_catalogue import GPUS
from kvheadroom.capacity.layers import IndexerLayer
from kvheadroom.capacity.overhead import scheduled


@dataclass(frozen=True, slots=True, order=True)
class CalibrationKey:
    """What the overhead of a GPU depends on; starts of different keys are never mixed.

    Attributes:
        geometry: architecture, and a digest of config.json without its quantization and what no layer reads.
        weight_format: quantization with a digest of its settings, or the type.
        gpu: a name of the catalogue, else the bytes of the GPU.
        parallelism: as `tp8 dp2 ep`.
        release: of vLLM, without the build.
        settings: the flags that matter, as `name=value`, by name.
    """

    geometry: str
    weight_format: str
    gpu: str
    parallelism: str
    release: str
    settings: str

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of its GPU, by the catalogue or as the name says it; None where that leaves it open."""
        if self.gpu in GPUS:
            return GPUS[self.gpu].cuda_total_bytes
        size, _, unit = self.gpu.partition(" ")
        return (
            int(size) if unit == "bytes" and size.isascii() and size.isdecimal() and len(size) < 20 else None
        )

    def is_near(self, other: "CalibrationKey") -> bool:
        """Whether it differs in parallel sizes and settings at most."""
        return (self.geometry, self.weight_format, self.gpu, self.release) == (
            other.geometry,
            other.weight_format,
            other.gpu,
            other.release,
        )

    def differences(self, other: "CalibrationKey") -> tuple[str, ...]:
        """What `other` has differently, for people: `tp4 in place of tp8`; nothing for the same key."""
        changed = []
        for name in ("geometry", "weight_format", "gpu", "parallelism", "release"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                changed.append(f"{'vLLM ' if name == 'release' else ''}{its} in place of {mine}")
        mine, its = _settings(self.settings), _settings(other.settings)
        changed += [
            f"{name}={its.get(name, 'unset')} in place of {mine.get(name, 'unset')}"
            for name in sorted(mine.keys() | its.keys())
            if mine.get(name) != its.get(name)
        ]
        return tuple(changed)


def _settings(text: str) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in text.split())


def key_of(facts: EngineFacts) -> CalibrationKey | str:
    """The key of an engine; a string says what is missing for it."""
    if facts.model is None or facts.model_files is None:
        return "the model's config.json is not known"
    if facts.version is None:
        return "the release of vLLM is not known"
    if facts.gpu is None and facts.hbm_bytes is None:
        return "the GPU is not known"
    config = facts.model_files.config
    shape = {name: value for name, value in config.items() if name not in _NO_SHAPE}
    quantization = facts.model.quantization
    if quantization is None:
        weight_format = str(facts.model.dtype if facts.dtype.value == "auto" else facts.dtype.value)
    else:
        weight_format = f"{quantization} {_digest(_quantization(config))}"
    return CalibrationKey(
        geometry=f"{facts.model.architecture} {_digest(shape)}",
        weight_format=weight_format,
        gpu=facts.gpu or ("" if facts.hbm_bytes is None else f"{facts.hbm_bytes.value} bytes"),
        parallelism=" ".join(_parallelism(facts)),
        release=facts.version.value.partition("+")[0],
        settings=" ".join(f"{name}={value}" for name, value in sorted(_flags(facts).items())),
    )


_NO_SHAPE = (
    "_name_or_path",
    "transformers_version",
    "quantization_config",
    "compression_config",
    "torch_dtype",
    "dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "auto_map",
)
"""Keys of config.json that change neither a shape nor what runs."""


def _quantization(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:12]


def _canonical(value: Any) -> str:
    """The same text for the same content, in whatever order its keys stand."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name!r}:{_canonical(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return repr(value)


def _parallelism(facts: EngineFacts) -> Iterator[str]:
    sizes = facts.parallelism
    yield f"tp{sizes.tensor}"
    others = (
        ("pp", sizes.pipeline),
        ("dp", facts.data_parallel_size.value),
        ("dcp", sizes.decode_context),
        ("pcp", sizes.prefill_context),
    )
    yield from (f"{name}{size}" for name, size in others if size > 1)
    if facts.enable_expert_parallel.value:
        yield "ep"


def _flags(facts: EngineFacts) -> dict[str, str]:
    """Effective values, so that a default and the same value said are one key."""
    tokens, seqs = scheduled(facts)
    found = {
        "max_num_batched_tokens": str(tokens),
        "max_num_seqs": str(seqs),
        "kv_cache_dtype": facts.kv_cache_dtype.value,
    }
    if facts.flags.enforce_eager:
        found["enforce_eager"] = "true"
    if facts.flags.attention_backend is not None:
        found["attention_backend"] = facts.flags.attention_backend
    if facts.draft.method is not None:
        found["speculative"] = f"{facts.draft.method}:{facts.draft.tokens}"
    if facts.max_model_len is not None and _grows_with_length(facts):
        found["max_model_len"] = str(facts.max_model_len.value)
    return found


def _grows_with_length(facts: EngineFacts) -> bool:
    """Whether the overhead itself depends on max_model_len: the sparse indexer's workspace does."""
    return facts.model is not None and any(isinstance(cache, IndexerLayer) for cache in facts.model.caches())
