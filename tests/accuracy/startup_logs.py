"""Public start-up logs, each beside what the core predicts for the same bytes.

A log prints the bytes of the pool in GiB with two decimals, so that they lie in an interval of 0.01 GiB. A line is inside
its rounding when one number of bytes in that interval gives every figure exactly as printed, all of them at once.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvheadroom.capacity.facts import EngineFacts, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.kv_cache import KvLayout, Refusal, plan_layout
from kvheadroom.capacity.prediction import logged_tokens, plan_pool
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.stored_model import ModelFiles
from tests.capacity.truth import BY_ID

HERE = Path(__file__).parent
GIB = 1024**3
HALF_OF_LAST_DIGIT = GIB / 200
# Ranks of one engine were seen to differ by more; what differs more is not taken for such a gap here.
LARGEST_RANK_GAP = 0.02

LOGS: tuple[Mapping[str, Any], ...] = tuple(
    json.loads(line) for line in (HERE / "startup_logs.jsonl").read_text(encoding="utf-8").splitlines()
)
_CASES = yaml.safe_load((HERE / "cases.yaml").read_text(encoding="utf-8"))
CASES: Mapping[int, Mapping[str, Any]] = _CASES["rows"]
MODELS: Mapping[str, Mapping[str, Any]] = _CASES["models"]
LEFT_OUT: Mapping[int, str] = {line: reason for reason, lines in _CASES["left_out"].items() for line in lines}

# A figure as the log prints it, by its name.
Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One line of the logs beside its prediction.

    Attributes:
        line: its number in startup_logs.jsonl.
        predicted: the same figures at the bytes as printed; empty when there is no prediction.
        inside: some bytes within the rounding give all the figures.
        explained: they are inside with what the case adds under `if`, or with the bytes of the slowest rank.
        slowest_rank_bytes: these bytes; None where they are not needed.
        unknown: why there is no prediction.
    """

    line: int
    printed: Figures
    predicted: Figures
    inside: bool
    explained: bool
    slowest_rank_bytes: int | None = None
    unknown: str = ""

    @property
    def log(self) -> Mapping[str, Any]:
        """The line itself."""
        return LOGS[self.line - 1]

    @property
    def case(self) -> Mapping[str, Any]:
        """How it is planned."""
        return CASES[self.line]

    @property
    def verdict(self) -> str:
        """One word."""
        if self.unknown:
            return "not predicted"
        return "inside" if self.inside else "explained" if self.explained else "outside"

    @property
    def difference_ratio(self) -> float | None:
        """(predicted - printed) / printed, the largest of all figures; None where there is no number."""
        ratios = [
            float(self.predicted[name]) / float(printed) - 1
            for name, printed in self.printed.items()
            if self.predicted and not isinstance(printed, bool)
        ]
        return max(ratios, key=abs, default=None)


@cache
def config_of(model: str) -> Mapping[str, Any]:
    """The config.json of a model of the cases; a row of the truth file, with changes, or written out."""
    case = MODELS[model]
    if "config" in case:
        return dict(case["config"])
    config = json.loads(json.dumps(BY_ID[case["row"]]["config"]))
    changes = dict(case.get("text_config", {}))
    period = changes.pop("layer_types_period", None)
    if changes:
        text = config["text_config"]
        text.update(changes)
        text["layer_types"] = text["layer_types"][:period] * (text["num_hidden_layers"] // period)
    return dict(config)


def compare(line: int) -> Comparison:
    """The line beside the prediction by its case, and, where that fails, by what the case adds."""
    case = CASES[line]
    log = {**LOGS[line - 1], **case.get("printed", {})}
    printed = _printed(log)
    outcome = _try(case, log, printed)
    if isinstance(outcome, str):
        return Comparison(
            line=line, printed=printed, predicted={}, inside=False, explained=False, unknown=outcome
        )
    explained, fewest = False, None
    if not outcome.inside and "if" in case:
        other = case["if"]
        flags = {**case.get("flags", {}), **other.get("flags", {})}
        again = _try({**case, **other, "flags": flags}, log, printed)
        explained = not isinstance(again, str) and again.inside
    elif not outcome.inside and case.get("slowest_rank"):
        fewest = outcome.fewer_bytes
        explained = fewest is not None
    return Comparison(
        line=line,
        printed=printed,
        predicted=outcome.predicted,
        inside=outcome.inside,
        explained=explained,
        slowest_rank_bytes=fewest,
    )


def _printed(log: Mapping[str, Any]) -> Figures:
    figures = {
        "tokens": log.get("kv_tokens"),
        "longest": log.get("est_max_len"),
        "needed_gib": log.get("needed_kv_gib"),
        "concurrency": log.get("max_concurrency"),
        "block": log.get("block_size"),
        "starts": log.get("starts"),
    }
    return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    predicted: Figures
    inside: bool
    fewer_bytes: int | None


def _try(case: Mapping[str, Any], log: Mapping[str, Any], printed: Figures) -> _Outcome | str:
    """The figures at the printed bytes, and which bytes give the printed ones; a string says why there are none."""
    length = log["at_len"]
    flags = {**case.get("flags", {}), **({} if length is None else {"max_model_len": length})}
    facts = resolve_facts(
        operator=OperatorFacts(flags=flags, gpu=case.get("gpu")),
        answers=ServerAnswers(version=case.get("vllm_version")),
        echoed=EchoedFlags(),
        model_files=ModelFiles(folder="", config=config_of(case["model"])),
    )
    layout = plan_layout(facts)
    if not isinstance(layout, KvLayout):
        reasons = layout.reasons if isinstance(layout, Refusal) else (*facts.obstacles, layout or "")
        return "; ".join(reason for reason in reasons if reason)
    if length is None:
        if not layout.holds_every_token:
            return "the log does not give the length that its tokens depend on"
        length = layout.block_tokens
    low, middle, high = _bytes(case, log, layout, facts)
    block = layout.bytes_per_block

    def first_that_fits(candidates: Iterable[int]) -> int | None:
        fits = (have for have in candidates if _figures(have, length, layout, facts, printed) == printed)
        return next(fits, None)

    within = (low, *(blocks * block for blocks in range(low // block + 1, high // block + 1)))
    below = range(low // block * block, round(low * (1 - LARGEST_RANK_GAP)), -block)
    return _Outcome(
        predicted=_figures(middle, length, layout, facts, printed),
        inside=first_that_fits(within) is not None,
        fewer_bytes=first_that_fits(below) if case.get("slowest_rank") else None,
    )


def _bytes(
    case: Mapping[str, Any], log: Mapping[str, Any], layout: KvLayout, facts: EngineFacts
) -> tuple[int, int, int]:
    """Fewest, printed and most bytes of the pool that the printed GiB may stand for."""
    exact = case.get("exact_bytes")
    if exact is not None:
        return exact, exact, exact
    middle = log["available_kv_gib"] * GIB
    if log.get("needed_kv_gib") is not None and facts.rules.reserves_null_block:
        # The text of a refusal names what is left beside the null block.
        middle += layout.bytes_per_block
    return round(middle - HALF_OF_LAST_DIGIT), round(middle), round(middle + HALF_OF_LAST_DIGIT)


def _figures(
    available: int, length: int, layout: KvLayout, facts: EngineFacts, wanted: Figures
) -> dict[str, Any]:
    pool = plan_pool(layout, (available,), None, length, reserves_null_block=facts.rules.reserves_null_block)
    if pool is None or isinstance(pool, str) or pool.needed_bytes is None:
        return {}
    figures = {
        "tokens": logged_tokens(pool, layout, facts),
        "longest": pool.longest_bootable,
        "needed_gib": round(pool.needed_bytes[0] / GIB, 2),
        "concurrency": None if pool.max_concurrency is None else round(pool.max_concurrency, 2),
        "block": layout.block_tokens // layout.decode_context,
        "starts": pool.boots,
    }
    return {name: figures[name] for name in wanted}
