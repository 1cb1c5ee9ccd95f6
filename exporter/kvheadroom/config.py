"""YAML -> a frozen, validated Config. Unknown keys, wrong types and clashes are errors with their path."""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from kvheadroom.access_settings import (
    MAY_HOLD_SECRETS,
    PARTS,
    AccessFile,
    AccessSettings,
    CommonAccess,
    PageSettings,
    Strict,
    base_url,
    is_under,
)
from kvheadroom.capacity.discovery import checked_labels
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.gpu_catalogue import CPU, GPUS, catalogue_name, not_modelled_because
from kvheadroom.capacity.parallelism import MOST_GPUS
from kvheadroom.strict_yaml import YamlFaultError, parse_yaml, read_small_file


class ConfigError(OperatorError):
    """A fault of the configuration."""


_NO_REPLICA = "there is nothing to watch; it needs at least `replicas: [{url: http://host:8000}]`"
_GPU_NAME = re.compile(r"(GPU-|MIG-)([0-9a-fA-F-]{8,})|(MIG-GPU-)([0-9a-fA-F-]{8,}/\d{1,3}(?:/\d{1,3})?)")
_POD = re.compile(r"[a-z0-9][a-z0-9-]{0,62}/[a-z0-9][a-z0-9.-]{0,252}\*?")
MOST_GPUS_HERE = 256
"""Indices of one machine's GPUs are below."""
_SHARD = re.compile(r"(\d{1,4})/(\d{1,4})")
MOST_SHARDS = 1000
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
_DURATION_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(kB|MB|GB|KiB|MiB|GiB)")
_SIZE_BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def _duration(value: object) -> float:
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no duration; write a number with its unit, e.g. 5s or 1m")
    return float(match[1]) * _DURATION_SECONDS[match[2]]


def _gpu(value: object) -> object:
    if not isinstance(value, str):
        return value
    name = catalogue_name(value)
    if name is None:
        reason = not_modelled_because(value)
        if reason is not None:
            raise ValueError(
                f"{value!r}: {reason}; leave `gpu` out, and what vLLM reports is shown without it"
            )
        raise ValueError(
            f"{value!r} is not in the catalogue ({', '.join(GPUS)}, CPU); "
            "for another GPU leave `gpu` out and set `hbm_bytes`"
        )
    return name


def _expanded(value: str) -> str:
    """`~/models/x` is meant as in a shell."""
    return str(Path(value).expanduser())


def _file_pattern(value: str) -> str:
    path = _expanded(value)
    if not path.endswith((".json", ".yml", ".yaml")) or "**" in path or "\0" in path:
        raise ValueError(
            f"{value[:200]!r}: files end in .json, .yml or .yaml, and `*` stands for a part of one name"
        )
    return path


def _gpu_list(value: object) -> object:
    """Also as in CUDA_VISIBLE_DEVICES: one text with commas."""
    if not isinstance(value, str):
        return value
    return [int(name) if name.isdecimal() else name for name in (part.strip() for part in value.split(","))]


def _gpu_name(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_GPUS_HERE:
        return value
    match = _GPU_NAME.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        return f"{match[1] or match[3]}{(match[2] or match[4]).lower()}"
    raise ValueError(
        f"{str(value)[:80]!r} is no UUID of a GPU or MIG device and no index; `nvidia-smi -L` lists them, "
        "e.g. GPU-1a2b3c4d-..., MIG-1a2b3c4d-... or 0"
    )


def _name(value: str) -> str:
    # It stands in logs, and lists of servers may be written by somebody else.
    if not value.isprintable():
        raise ValueError("a name is one line of characters that can be printed")
    return value


def _pod(value: str) -> str:
    if not _POD.fullmatch(value):
        raise ValueError(
            f"{value[:80]!r} is no pod; write namespace/name, with a * at its end for a name that goes on"
        )
    return value


def _shard(value: object) -> object:
    match = _SHARD.fullmatch(value) if isinstance(value, str) else None
    if match is None or not int(match[1]) < int(match[2]) <= MOST_SHARDS:
        raise ValueError(
            f"{str(value)[:40]!r} is no share of the servers; write I/N, from 0/N to (N-1)/N, e.g. 0/4 (N is at most "
            f"{MOST_SHARDS})"
        )
    return value


def _each_once(values: tuple[str | int, ...]) -> tuple[str | int, ...]:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")
    return values


GpuName = Annotated[str | int, BeforeValidator(_gpu_name)]
Duration = Annotated[
    float,
    BeforeValidator(_duration),
    Field(ge=0.1, le=3600),
    # With its unit, so that what was dumped can be read again.
    PlainSerializer(lambda seconds: f"{seconds}s"),
]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
ParallelSize = Annotated[int, Field(gt=0, le=MOST_GPUS, strict=True)]


class VllmFlags(Strict):
    """vLLM's flags by vLLM's names, as far as they decide the KV cache. Unset: not known."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tensor_parallel_size: ParallelSize | None = None
    pipeline_parallel_size: ParallelSize | None = None
    data_parallel_size: ParallelSize | None = None
    decode_context_parallel_size: ParallelSize | None = None
    prefill_context_parallel_size: ParallelSize | None = None
    enable_expert_parallel: bool | None = None
    kv_cache_dtype: Annotated[str, Field(min_length=1)] | None = None
    kv_cache_dtype_skip_layers: tuple[str, ...] | None = Field(default=None, strict=False)
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = None
    block_size: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None
    kv_cache_memory_bytes: PositiveInt | None = None
    num_gpu_blocks_override: PositiveInt | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    mamba_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    mamba_block_size: PositiveInt | None = None
    kv_offloading_size: Annotated[float, Field(gt=0, strict=False)] | None = None
    attention_backend: Annotated[str, Field(min_length=1)] | None = None
    kv_transfer_config: dict[str, Any] | None = None
    speculative_config: dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | None = None


class ServerFacts(Strict):
    """What the operator says of a server beyond its address."""

    model: Annotated[str, Field(min_length=1), AfterValidator(_expanded)] | None = None
    weights_bytes: PositiveInt | None = None
    flags: VllmFlags = VllmFlags()
    gpu: Annotated[str | None, BeforeValidator(_gpu)] = None
    gpus: Annotated[tuple[GpuName, ...], BeforeValidator(_gpu_list), AfterValidator(_each_once)] = ()
    hbm_bytes: PositiveInt | None = None
    labels: Annotated[dict[str, str], BeforeValidator(checked_labels)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _cpu_has_no_hbm(self) -> Self:
        if self.gpu == CPU and (self.hbm_bytes is not None or self.gpus):
            raise ValueError("`gpu: CPU` has neither hbm_bytes nor gpus; leave one of them out")
        return self


class ReplicaConfig(ServerFacts, AccessSettings):
    """One vLLM server."""

    name: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_name)] | None = None
    pod: Annotated[str, AfterValidator(_pod)] | None = None

    @property
    def replica(self) -> str:
        """The value of the label `replica`: the name, or host and port of the URL."""
        if self.name is not None:
            return self.name
        parts = urlsplit(self.url)
        return parts.netloc + parts.path

    def access_key(self) -> str:
        """Equal for replicas that are reached in the same way at their addresses. It may hold a secret."""
        return self.model_dump_json(include=_ACCESS)


class ReplicaTemplate(ServerFacts, CommonAccess):
    """What all servers of one source have in common: the settings of a replica that are not its address or name."""

    api_key_file: AccessFile | None = None
    scheme: Literal["http", "https"] = "http"


class FileSdConfig(Strict):
    """Servers listed in files, in the form of Prometheus's `file_sd_configs`."""

    files: Annotated[
        tuple[Annotated[str, AfterValidator(_file_pattern)], ...], Field(min_length=1, max_length=20)
    ]
    refresh_interval: Duration = 5.0
    replica: ReplicaTemplate = ReplicaTemplate()


_ACCESS = {*CommonAccess.model_fields, "api_key_file"}


class HttpSdConfig(PageSettings):
    """Servers listed by another program, in the form of Prometheus's `http_sd_configs`."""

    refresh_interval: Duration = 60.0
    replica: ReplicaTemplate = ReplicaTemplate()


class DcgmExporter(PageSettings):
    """A DCGM-exporter that tells of GPUs of another machine."""

    refresh_interval: Duration = 15.0

    @property
    def path(self) -> str:
        """What is asked for there; /metrics where only the server is named."""
        path = super().path
        return "/metrics" if path == "/" else path


class Config(Strict):
    """The whole configuration."""

    scrape_interval: Duration = 5.0
    session_tokens: Annotated[tuple[PositiveInt, ...], Field(max_length=20)] = (262_144,)
    overhead_gb: Annotated[float, Field(ge=0, le=10_000, strict=False)] | None = None
    replicas: tuple[ReplicaConfig, ...] = ()
    file_sd_configs: Annotated[tuple[FileSdConfig, ...], Field(max_length=20)] = ()
    http_sd_configs: Annotated[tuple[HttpSdConfig, ...], Field(max_length=20)] = ()
    dcgm_exporters: Annotated[tuple[DcgmExporter, ...], Field(max_length=500)] = ()
    shard: Annotated[str | None, BeforeValidator(_shard)] = None

    @property
    def discovers(self) -> bool:
        """Whether servers may come and go while it is in use."""
        return bool(self.file_sd_configs or self.http_sd_configs)

    def watches(self, url: str) -> bool:
        """Whether a server is of this daemon's shard; its address decides, so other labels or names do not move it."""
        if self.shard is None:
            return True
        index, shards = map(int, self.shard.split("/"))
        return int.from_bytes(hashlib.sha256(url.encode()).digest()[:8]) % shards == index

    @model_validator(mode="after")
    def _some_and_no_two_alike(self) -> Self:
        if not self.replicas and not self.discovers:
            raise ValueError(_NO_REPLICA)
        seen: dict[str, int] = {}
        for index, replica in enumerate(self.replicas):
            first = seen.setdefault(replica.replica, index)
            if first != index:
                raise ValueError(
                    f"replicas[{first}] and replicas[{index}] are both called {replica.replica!r}; "
                    "give each its own `name`"
                )
        return self


def load_config(path: Path) -> Config:
    """Read and validate a config file.

    Raises:
        ConfigError: with the file, the place in it, and what is allowed.
    """
    try:
        text = read_small_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    try:
        content = parse_yaml(text)
    except YamlFaultError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: {_NO_REPLICA}")
    return validate_config(content, str(path))


def validate_address(value: str) -> str:
    """A server's base URL, without a trailing slash.

    Raises:
        ConfigError: with what is wrong and what is allowed.
    """
    try:
        return base_url(value)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def validate_duration(value: str, least_seconds: float, most_seconds: float) -> float:
    """Seconds of a duration with its unit.

    Raises:
        ConfigError: with what is allowed.
    """
    try:
        seconds = _duration(value)
    except ValueError as error:
        raise ConfigError(str(error)[:200]) from error
    if not least_seconds <= seconds <= most_seconds:
        raise ConfigError(f"{value[:40]!r} must be from {least_seconds:g}s to {most_seconds:g}s")
    return seconds


def validate_size(value: str) -> int:
    """Bytes of a size with its unit: MB is 10^6, MiB is 2^20.

    Raises:
        ConfigError: with what is allowed.
    """
    match = _SIZE.fullmatch(value.strip())
    if match is None or len(value) > 40:
        raise ConfigError(
            f"{value[:40]!r} is no size; write a number with its unit, e.g. 200MB ({', '.join(_SIZE_BYTES)})"
        )
    return int(float(match[1]) * _SIZE_BYTES[match[2]])


def validate_config(content: dict[Any, Any], where: str) -> Config:
    """A Config from parsed YAML.

    Raises:
        ConfigError: one line per fault.
    """
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(_fault(where, fault) for fault in error.errors())) from error


def replica_of(template: ReplicaTemplate, own: dict[str, Any]) -> ReplicaConfig:
    """A replica with what its source says of all, and of it alone.

    Raises:
        ConfigError: what is wrong with it, in one line.
    """
    common = template.model_dump(exclude_unset=True, exclude={"scheme"})
    labels = {**common.get("labels", {}), **own.get("labels", {})}
    try:
        return ReplicaConfig.model_validate({**common, **own, "labels": labels})
    except ValidationError as error:
        raise ConfigError(_fault("", error.errors()[0]).removeprefix(": ")) from error


def _fault(where: str, fault: Any) -> str:
    place = ""
    for step in fault["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else str(step)
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = "there is no such setting" + _did_you_mean(fault["loc"])
    elif fault["type"] == "missing":
        message = "it is needed"
    elif fault["type"] != "value_error":
        message = _PLAIN.get(fault["type"], f"{message[0].lower()}{message[1:]}")
        # Only a single value is repeated, where one is meant: an address in place of more may hold a secret.
        misplaced = fault["type"] in _WANTS_MORE and isinstance(fault["input"], str)
        secret = misplaced or is_under(fault["loc"], MAY_HOLD_SECRETS)
        if not secret and isinstance(fault["input"], str | int | float | bool | None):
            message += f", got {fault['input']!r}"[:120]
    return f"{where}: {place}: {message}" if place else f"{where}: {message}"


_WANTS_MORE = frozenset({"model_type", "model_attributes_type", "dict_type", "tuple_type"})
_PLAIN = {
    "model_type": "a mapping (`key: value`) is needed",
    "model_attributes_type": "a mapping (`key: value`) is needed",
    "dict_type": "a mapping (`key: value`) is needed",
    "tuple_type": "a list (`[a, b]`) is needed",
    "string_type": "a text is needed",
    "int_type": "a whole number is needed",
    "bool_type": "true or false is needed",
    "float_type": "a number is needed",
    "path_type": "the path of a file is needed",
}


def _did_you_mean(location: tuple[Any, ...]) -> str:
    import difflib

    model: type[BaseModel] = Config
    for step in location[:-1]:
        model = _PARTS.get(step, model)
    close = difflib.get_close_matches(str(location[-1]), list(model.model_fields), n=1)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; allowed here: {', '.join(model.model_fields)}"


_PARTS: dict[str, type[BaseModel]] = {
    **PARTS,
    "replicas": ReplicaConfig,
    "file_sd_configs": FileSdConfig,
    "http_sd_configs": HttpSdConfig,
    "dcgm_exporters": DcgmExporter,
    "replica": ReplicaTemplate,
    "flags": VllmFlags,
}
