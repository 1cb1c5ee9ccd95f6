"""The command line of a vLLM server, with its config file and environment -> where it answers and what decides its cache.

Secrets go in and none comes out: keys are only told to be there, and whatever is not one of the flags that decide the
cache is dropped as it is read. No message here quotes a word.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvheadroom.capacity.command_line import FITTED_LENGTH, CommandLine
from kvheadroom.capacity.facts import AUTO_LENGTH
from kvheadroom.capacity.flag_numbers import readable_int
from kvheadroom.sources.vllm_arguments import unmodelled
from kvheadroom.sources.vllm_arguments.config_yaml import ConfigWords
from kvheadroom.sources.vllm_arguments.flag_values import LISTS, READERS, SWITCHES, BadValueError, read_value
from kvheadroom.sources.vllm_arguments.flag_words import FlagWords, model_first, read_words, with_config

DEFAULT_PORT = 8000
_GIB = 1024**3
_MOST_PORTS = 1024
_CACHE_FLAGS = frozenset({*READERS, *SWITCHES, *LISTS})
_DRAFT_FLAGS = frozenset({"spec_method", "spec_model", "spec_tokens"})
VARIABLES = unmodelled.VARIABLES | {
    "VLLM_API_KEY",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_TARGET_DEVICE",
}
"""The environment variables that are looked at; of the key only that it is there."""

HIDDEN_ENVIRONMENT = "its environment may not be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """One running server as it was started.

    Attributes:
        command_line: what decides its cache.
        model: as the server was given it, a folder or a name on the hub; None where it is not clear.
        revision: of a name on the hub; None: the default one.
        ports: one, or one for each data-parallel rank; empty where they are not clear.
        unix_socket: the path of `--uds`, in the server's own folder tree.
        has_tls: it speaks HTTPS.
        has_api_key: `/v1` wants a key.
        silent_because: why it has no `/metrics` at all; empty where it has.
    """

    command_line: CommandLine
    model: str | None = field(repr=False)
    revision: str | None = field(repr=False)
    ports: tuple[int, ...]
    unix_socket: str | None
    has_tls: bool
    has_api_key: bool
    silent_because: str


def read_command_line(
    words: Sequence[str],
    *,
    is_serve: bool,
    config: ConfigWords | str | None,
    environment: Mapping[str, str] | None,
) -> ServerSettings:
    """What a server was started with.

    Args:
        words: after `vllm serve`, or after the name of the API server's module.
        is_serve: it was `vllm serve`, which takes the model as a word of its own.
        config: the file of `--config`; a text says why it could not be read, None: it names none.
        environment: None: it may not be read.
    """
    in_order = model_first(words) if is_serve else list(words)
    doubts: list[str] = []
    unclear: dict[str, str] = {}
    if isinstance(config, ConfigWords):
        in_order = with_config(in_order, config.words)
        unclear |= dict(config.unclear)
    said = read_words(in_order)
    if environment is None:
        doubts.append(HIDDEN_ENVIRONMENT)
    # A flag of the command line wins over the file's.
    unclear = {name: why for name, why in unclear.items() if name not in said.values} | dict(said.unclear)
    known = environment or {}
    reading = _Reading(said, unclear, known)
    flags, cpu_pool_bytes = reading.flags(), reading.cpu_pool_bytes()
    command_line = CommandLine(
        flags=flags,
        unclear=reading.unclear,
        unmodelled=unmodelled.unmodelled(said.values, known),
        unweighed=unmodelled.unweighed(said.values),
        config_fault=config if isinstance(config, str) else "",
        doubts=(*said.doubts, *doubts),
        cpu_pool_bytes=cpu_pool_bytes,
        on_cpu=reading.on_cpu,
    )
    return ServerSettings(
        command_line=command_line,
        model=(said.model if is_serve else None) or reading.text("model"),
        revision=reading.text("revision"),
        ports=reading.ports(),
        unix_socket=reading.text("uds"),
        has_tls=reading.text("ssl_certfile") is not None,
        has_api_key="api_key" in said.values or bool(known.get("VLLM_API_KEY")),
        silent_because=reading.silent_because(),
    )


class _Reading:
    """Takes the values out of the words."""

    def __init__(self, said: FlagWords, unclear: dict[str, str], environment: Mapping[str, str]) -> None:
        self._values = said.values
        self._environment = environment
        wanted = {*_CACHE_FLAGS, *unmodelled.FLAGS, *_DRAFT_FLAGS, "performance_mode"}
        self._all_unclear = unclear
        self.unclear = {name: why for name, why in unclear.items() if name in wanted}

    @property
    def on_cpu(self) -> bool:
        # `--device` was a flag up to 0.9.
        return "cpu" in (self._environment.get("VLLM_TARGET_DEVICE", "").lower(), self.text("device"))

    def text(self, name: str) -> str | None:
        given = self._values.get(name)
        return given[0] if isinstance(given, tuple) and given and given[0] not in ("", "None") else None

    def flags(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in sorted(_CACHE_FLAGS & self._values.keys() - self.unclear.keys()):
            self._read(found, name, self._values[name])
        self._add_draft(found)
        self._add_backend(found)
        if found.get("max_model_len") == AUTO_LENGTH:
            del found["max_model_len"]
            self.unclear["max_model_len"] = FITTED_LENGTH
        if self.text("performance_mode") == "throughput" and "max_num_batched_tokens" not in found:
            self.unclear["max_num_batched_tokens"] = "performance_mode throughput makes the default larger"
        return {name: value for name, value in found.items() if name not in self.unclear}

    def _read(self, found: dict[str, Any], name: str, given: tuple[str, ...] | bool) -> None:  # noqa: FBT001
        try:
            found[name] = read_value(name, given)
        except BadValueError as error:
            self.unclear[name] = str(error)

    def _add_draft(self, found: dict[str, Any]) -> None:
        """`--spec-method`, `--spec-model` and `--spec-tokens` are keys of `--speculative-config`."""
        keys = {"method": self.text("spec_method"), "num_speculative_tokens": self.text("spec_tokens")}
        given: dict[str, Any] = {key: value for key, value in keys.items() if value is not None}
        if "num_speculative_tokens" in given:
            given["num_speculative_tokens"] = readable_int(given["num_speculative_tokens"])
        if given or self.text("spec_model") is not None:
            merged = {**(found.get("speculative_config") or {}), **given}
            self._read(found, "speculative_config", (json.dumps(merged),))

    def _add_backend(self, found: dict[str, Any]) -> None:
        given = self._values.get("attention_config")
        if isinstance(given, tuple):
            backend = (unmodelled.attention_section(given) or {}).get("backend")
            if isinstance(backend, str):
                self._read(found, "attention_backend", (backend,))
        elif "attention_backend" not in found and self._environment.get("VLLM_ATTENTION_BACKEND"):
            self.unclear["attention_backend"] = "VLLM_ATTENTION_BACKEND is set, which not every release reads"

    def cpu_pool_bytes(self) -> int | None:
        """What the CPU backend takes in place of any flag (`platforms/cpu.py`)."""
        space = self._environment.get("VLLM_CPU_KVCACHE_SPACE")
        if not space:
            return None
        gib = readable_int(space)
        if gib is None or gib < 1:
            self.unclear["kv_cache_memory_bytes"] = "VLLM_CPU_KVCACHE_SPACE is no number above 0"
            return None
        return gib * _GIB

    def ports(self) -> tuple[int, ...]:
        text = self.text("port")
        port = DEFAULT_PORT if text is None else readable_int(text)
        if "port" in self._all_unclear or port is None or not 0 < port < 2**16:
            return ()
        if self._values.get("data_parallel_multi_port_external_lb") is True:
            local = readable_int(self.text("data_parallel_size_local") or "")
            return tuple(range(port, port + local)) if local is not None and 0 < local <= _MOST_PORTS else ()
        return (port,)

    def silent_because(self) -> str:
        if self._values.get("headless") is True:
            return "it runs with --headless: its engines answer to a server on another machine"
        if self._values.get("grpc") is True:
            return "it runs with --grpc, which has no /metrics"
        return ""
