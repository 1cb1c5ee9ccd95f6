"""The flags of one engine by who said them: the operator's config before the server's own command line."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.facts import EngineFacts, Fact, Origin, ServerAnswers, ToldFlag
from kvheadroom.capacity.readings import EchoedFlags

T = TypeVar("T")


class SaidFlags:
    """What was said, besides by the engine itself, which comes before all of this.

    Args:
        configured: of the operator's config.
        line: None where nobody could read the server's command line.
    """

    def __init__(self, configured: Mapping[str, Any], line: CommandLine | None) -> None:
        self.configured = configured
        self._line = line
        self.values: Mapping[str, Any] = {**(line.flags if line is not None else {}), **configured}

    @property
    def is_whole(self) -> bool:
        """Whether what nobody said is surely not set."""
        return self._line is not None and self._line.is_whole

    def origin(self, name: str) -> Origin:
        """Who said it."""
        return Origin.CONFIG if name in self.configured else Origin.COMMAND_LINE

    def fact(self, name: str, echoed: T | None, default: T) -> Fact[T]:
        """A flag that always has a value."""
        if echoed is not None:
            return Fact(echoed, Origin.ECHOED)
        said: T | None = self.values.get(name)
        if said is not None:
            return Fact(said, self.origin(name))
        if self.is_whole:
            return Fact(
                default, Origin.COMMAND_LINE, f"{default} (vLLM's default; its command line leaves it out)"
            )
        return Fact(default, Origin.DEFAULT, f"{default} (vLLM's default)")

    def optional(
        self, name: str, echoed: int | None, echo_origin: Origin = Origin.ECHOED
    ) -> Fact[int] | None:
        """A flag that may have no value."""
        if echoed is not None:
            return Fact(echoed, echo_origin)
        said = self.values.get(name)
        return None if said is None else Fact(said, self.origin(name))

    def told(self, echoed: EchoedFlags, pool_bytes: Fact[int] | None) -> Iterator[ToldFlag]:
        """Each flag that somebody told, by name.

        Args:
            pool_bytes: as `pool_bytes` gave it; a variable may have told it.
        """
        of_the_engine = {name: value for name in _ECHOED if (value := getattr(echoed, name)) is not None}
        names = {*of_the_engine, *self.values} | ({_POOL} if pool_bytes is not None else set())
        for name in sorted(names):
            if name == _POOL and pool_bytes is not None:
                yield ToldFlag(name, _in_words(pool_bytes.value), pool_bytes.origin)
            elif name in of_the_engine:
                yield ToldFlag(name, _in_words(of_the_engine[name]), Origin.ECHOED)
            else:
                origin, value = self.origin(name), self.values[name]
                # An operator may have written anything into a section; of a command line only known keys are kept.
                is_hidden = origin is Origin.CONFIG and isinstance(value, Mapping)
                yield ToldFlag(name, "given" if is_hidden else _in_words(value), origin)

    def pool_bytes(self, echoed: int | None, *, on_cpu: bool) -> Fact[int] | None:
        """`--kv-cache-memory-bytes`; on a CPU a variable wins over the flag (`platforms/cpu.py`)."""
        variable = None if self._line is None else self._line.cpu_pool_bytes
        if on_cpu and variable is not None and echoed is None and _POOL not in self.configured:
            return Fact(variable, Origin.COMMAND_LINE)
        return self.optional(_POOL, echoed)


def _in_words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value)) or "none"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


_POOL = "kv_cache_memory_bytes"
_ECHOED = (
    *(_POOL, "kv_cache_dtype", "block_size", "gpu_memory_utilization", "num_gpu_blocks_override"),
    *("enable_prefix_caching", "kv_cache_dtype_skip_layers", "kv_offloading_size"),
)
_WEIGHING = frozenset({"quantization", "quantization_config"})


def unread_flags(
    facts: EngineFacts, said: SaidFlags, echoed: EchoedFlags, answers: ServerAnswers
) -> Iterator[str]:
    """What stands in the command line and is not known or not modelled: no number is made without it."""
    line = facts.command_line
    if line is None:
        return
    if line.config_fault:
        yield f"flags may stand in the file of its --config, which {line.config_fault}"
    settled = {name for name in _ECHOED if getattr(echoed, name) is not None} | said.configured.keys()
    if answers.max_model_len is not None:
        settled.add("max_model_len")
    if facts.model is not None and not facts.model.has_windows:
        # Only windows keep the tokens of a step.
        settled.add("max_num_batched_tokens")
    for name, why in line.unclear.items():
        if name not in settled:
            yield f"{name} of its command line is not clear ({why}); say it in a config file: `flags: {{{name}: ...}}`"
    for name in line.unmodelled:
        if name not in said.configured:
            # A variable stands in capitals.
            where = "environment" if name.isupper() else "command line"
            yield f"{name} of its {where} changes the cache and is not modelled"
    if facts.pool_from_hbm:
        quantized = facts.model_files is not None and "quantization_config" in facts.model_files.config
        for name in line.unweighed:
            if not (quantized and name in _WEIGHING):
                yield f"{name} of its command line changes what the weights take, and is not modelled"
