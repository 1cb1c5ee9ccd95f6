"""YAML -> a frozen, validated Config. Unknown keys, wrong types and clashes are errors with their path."""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
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
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.local_server import LocalServer
from kvheadroom.setting_values import (
    CatalogueGpu,
    Duration,
    FilePattern,
    GpuNames,
    IdleTime,
    ModelPath,
    OverheadGb,
    OwnFile,
    ParallelSize,
    Pod,
    PositiveInt,
    ReplicaName,
    Shard,
    TierBytes,
    parse_duration,
    parse_size,
)
from kvheadroom.strict_yaml import YamlFaultError, parse_yaml, read_small_file


class ConfigError(OperatorError):
    """A fault of the configuration."""


_NO_REPLICA = (
    "there is nothing to watch; it needs at least `replicas: [{url: http://host:8000}]`, or `process_discovery: {}` for the "
    "servers of this machine"
)


def _given(value: object) -> object:
    """A section that stands there without anything in it is meant."""
    return {} if value is None else value


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
    enforce_eager: bool | None = None
    mamba_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    mamba_block_size: PositiveInt | None = None
    kv_offloading_size: Annotated[float, Field(gt=0, strict=False)] | None = None
    kv_offloading_backend: Literal["native", "lmcache"] | None = None
    attention_backend: Annotated[str, Field(min_length=1)] | None = None
    kv_transfer_config: dict[str, Any] | None = None
    speculative_config: dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | None = None


class ServerFacts(Strict):
    """What the operator says of a server beyond its address."""

    model: ModelPath | None = None
    weights_bytes: PositiveInt | None = None
    flags: VllmFlags = VllmFlags()
    gpu: CatalogueGpu | None = None
    gpus: GpuNames = ()
    hbm_bytes: PositiveInt | None = None
    overhead_gb: OverheadGb | None = None
    labels: Annotated[dict[str, str], BeforeValidator(checked_labels)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _cpu_has_no_hbm(self) -> Self:
        if self.gpu == CPU and (self.hbm_bytes is not None or self.gpus):
            raise ValueError("`gpu: CPU` has neither hbm_bytes nor gpus; leave one of them out")
        return self


class ReplicaConfig(ServerFacts, AccessSettings):
    """One vLLM server."""

    name: ReplicaName | None = None
    pod: Pod | None = None

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


class LocalReplica(ReplicaConfig):
    """A server that was found in this machine's process table; nothing that anybody writes."""

    server: Annotated[LocalServer, SkipValidation]


def with_server(replica: ReplicaConfig, server: LocalServer) -> LocalReplica:
    """The same replica, of which it is known now which process it is."""
    fields = {**replica.__dict__, "server": server}
    return LocalReplica.model_construct({*replica.model_fields_set, "server"}, **fields)


class LocalTemplate(ServerFacts, CommonAccess):
    """What all servers of this machine have in common: what their own command lines do not tell."""

    api_key_file: AccessFile | None = None


class ReplicaTemplate(LocalTemplate):
    """What all servers of one source have in common: the settings of a replica that are not its address or name."""

    scheme: Literal["http", "https"] = "http"


class FileSdConfig(Strict):
    """Servers listed in files, in the form of Prometheus's `file_sd_configs`."""

    files: Annotated[tuple[FilePattern, ...], Field(min_length=1, max_length=20)]
    refresh_interval: Duration = 5.0
    replica: ReplicaTemplate = ReplicaTemplate()


AnyReplica = TypeVar("AnyReplica", bound=ReplicaConfig)
_ACCESS = {*CommonAccess.model_fields, "api_key_file"}


class HttpSdConfig(PageSettings):
    """Servers listed by another program, in the form of Prometheus's `http_sd_configs`."""

    refresh_interval: Duration = 60.0
    replica: ReplicaTemplate = ReplicaTemplate()


class ProcessDiscoveryConfig(Strict):
    """Servers that run on this machine."""

    refresh_interval: Duration = 5.0
    replica: LocalTemplate = LocalTemplate()


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
    idle_times: Annotated[tuple[IdleTime, ...], Field(max_length=10)] = (300.0, 2700.0)
    tier_sizes: Annotated[tuple[TierBytes, ...], Field(max_length=10)] = (
        64 * 10**9,
        128 * 10**9,
        256 * 10**9,
    )
    overhead_gb: OverheadGb | None = None
    calibration_file: OwnFile | None = None
    replicas: tuple[ReplicaConfig, ...] = ()
    file_sd_configs: Annotated[tuple[FileSdConfig, ...], Field(max_length=20)] = ()
    http_sd_configs: Annotated[tuple[HttpSdConfig, ...], Field(max_length=20)] = ()
    process_discovery: Annotated[ProcessDiscoveryConfig | None, BeforeValidator(_given)] = None
    dcgm_exporters: Annotated[tuple[DcgmExporter, ...], Field(max_length=500)] = ()
    shard: Shard | None = None

    @property
    def discovers(self) -> bool:
        """Whether servers may come and go while it is in use."""
        return bool(self.file_sd_configs or self.http_sd_configs or self.process_discovery is not None)

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
    config = validate_config(content, str(path))
    own = config.calibration_file
    if own is not None and os.path.realpath(own) == os.path.realpath(path):
        # It would be set aside as a damaged file of samples.
        raise ConfigError(f"{path}: calibration_file: this is the config itself; name a file of its own")
    return config


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
        seconds = parse_duration(value)
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
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def validate_config(content: dict[Any, Any], where: str) -> Config:
    """A Config from parsed YAML.

    Raises:
        ConfigError: one line per fault.
    """
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(_fault(where, fault) for fault in error.errors())) from error


def replica_of(kind: type[AnyReplica], template: LocalTemplate, own: dict[str, Any]) -> AnyReplica:
    """A replica with what its source says of all, and of it alone.

    Raises:
        ConfigError: what is wrong with it, in one line.
    """
    common = template.model_dump(exclude_unset=True, exclude={"scheme"})
    labels = {**common.get("labels", {}), **own.get("labels", {})}
    try:
        return kind.model_validate({**common, **own, "labels": labels})
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
    "process_discovery": ProcessDiscoveryConfig,
    "http_sd_configs": HttpSdConfig,
    "dcgm_exporters": DcgmExporter,
    "replica": ReplicaTemplate,
    "flags": VllmFlags,
}
