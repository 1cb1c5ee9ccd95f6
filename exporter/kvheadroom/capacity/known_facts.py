"""What is known of one engine with who told it and when, and the lines of config that would say what nobody did."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.facts import PARALLEL_FLAGS, EngineFacts, Fact, Origin

Value = str | int | float | bool | None

_FACTS = (
    "version",
    "model_folder",
    "platform",
    "max_model_len",
    *PARALLEL_FLAGS,
    "data_parallel_size",
    "enable_expert_parallel",
    "kv_cache_dtype",
    "dtype",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "hbm_bytes",
    "weights_bytes",
    "overhead_bytes",
)
_OF_THE_REPLICA = ("hbm_bytes", "weights_bytes")
"""Facts that a config has beside `flags`, by the same name."""
NUMBER = "N"
"""Where a number is to be written."""


@dataclass(frozen=True, slots=True)
class KnownFact:
    """One fact.

    Attributes:
        at: unix seconds at which it was told last; None for what nobody told, and where that is not known.
    """

    name: str
    value: Value
    origin: Origin
    note: str
    at: float | None


class LineKind(StrEnum):
    """How a line is to be taken. A closed list."""

    FILL_IN = "fill_in"
    """Nobody knows the value."""
    CONFIRM = "confirm"
    """As it stands it says what is taken anyway."""
    IF_KNOWN = "if_known"
    """The value is an estimate, or would mean more than leaving it out: to be said by who knows it."""


@dataclass(frozen=True, slots=True)
class ConfigLine:
    """One setting that would say what is assumed or missing.

    Attributes:
        is_flag: it belongs under `flags`.
        value: as it is assumed; None: not set, and of a line to be said by who knows it, not known. Of what is to be filled in, a place to
            write it into.
        why: what is taken now, or why it is not known.
    """

    name: str
    value: Value
    is_flag: bool
    kind: LineKind
    why: str


def known_facts(engine: Assessment) -> tuple[KnownFact, ...]:
    """All facts that have a value, in a fixed order; then the flags that were told and stand for none of them."""
    facts = engine.facts
    found = [
        KnownFact(name, fact.value, fact.origin, fact.note, _at(engine, fact.origin))
        for name in _FACTS
        if (fact := getattr(facts, name)) is not None and _matters(facts, name)
    ]
    named = {one.name for one in found}
    found += [
        KnownFact(flag.name, flag.value, flag.origin, "", _at(engine, flag.origin))
        for _, flags in facts.flags_by_origin()
        for flag in flags
        if flag.name not in named
    ]
    return tuple(found)


def config_lines(facts: EngineFacts) -> tuple[ConfigLine, ...]:
    """What to add to a replica's settings so that nothing stays assumed or missing that they can say."""
    lines: dict[str, ConfigLine] = {}
    for line in (*_for_missing(facts), *_for_assumed(facts), *_for_limits(facts)):
        # The card says its memory and its platform: the first line of a name is enough.
        lines.setdefault(line.name, line)
    return tuple(lines.values())


def _matters(facts: EngineFacts, name: str) -> bool:
    """Whether the prediction looks at it."""
    return facts.pool_from_hbm or name not in ("hbm_bytes", "weights_bytes", "overhead_bytes")


def _at(engine: Assessment, origin: Origin) -> float | None:
    if origin is Origin.ECHOED:
        return engine.taken_at
    if origin in (Origin.SERVER, Origin.CONFIG, Origin.COMMAND_LINE, Origin.MACHINE, Origin.MODEL_FILES):
        return engine.facts_at
    return None


def _for_missing(facts: EngineFacts) -> Iterator[ConfigLine]:
    for fact in facts.missing:
        name, value, is_flag = fact.fact, NUMBER, fact.fact not in _OF_THE_REPLICA
        if name == "model_files":
            name, value, is_flag = "model", "/path/to/the/model", False
        elif name == "hbm_bytes":
            # The usual way; a card that is not in the catalogue takes hbm_bytes.
            name, value = "gpu", "NAME"
        yield ConfigLine(name, value, is_flag, LineKind.FILL_IN, fact.why)


def _for_limits(facts: EngineFacts) -> Iterator[ConfigLine]:
    """What no pool depends on, and without which nobody can say what keeps a queue waiting."""
    is_whole = facts.command_line is not None and facts.command_line.is_whole
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        fact: Fact[int] | None = getattr(facts, name)
        if fact is None or (fact.assumed and not is_whole):
            yield ConfigLine(
                name,
                None if fact is None else fact.value,
                is_flag=True,
                kind=LineKind.IF_KNOWN,
                why=f"{'not known' if fact is None else fact.note}; it tells what a queue waits for",
            )


def _for_assumed(facts: EngineFacts) -> Iterator[ConfigLine]:
    for name, why in facts.assumed():
        fact = getattr(facts, name, None)
        # A flag that stands for no fact is not set by default.
        value = fact.value if isinstance(fact, Fact) else None
        match name:
            case "release" | "cpu_amx" | "command_line":
                # No setting says these.
                continue
            case "platform":
                yield ConfigLine("gpu", "NAME", is_flag=False, kind=LineKind.FILL_IN, why=why)
            case "model_folder":
                yield ConfigLine("model", value, is_flag=False, kind=LineKind.CONFIRM, why=why)
            case "overhead_bytes":
                gigabytes = facts.overhead_bytes.value / 1e9
                yield ConfigLine("overhead_gb", gigabytes, is_flag=False, kind=LineKind.IF_KNOWN, why=why)
            case "hbm_bytes" | "weights_bytes":
                yield ConfigLine(name, value, is_flag=False, kind=LineKind.IF_KNOWN, why=why)
            case "block_size" | "max_model_len":
                yield ConfigLine(name, value, is_flag=True, kind=LineKind.IF_KNOWN, why=why)
            case _:
                yield ConfigLine(name, value, is_flag=True, kind=LineKind.CONFIRM, why=why)
