"""Tiers in host memory of planned starts, as text."""

from collections.abc import Iterator

from kvheadroom.capacity.model_plan import ModelPlan
from kvheadroom.capacity.planned_tier import PlannedTier
from kvheadroom.outputs.numbers import count, size
from kvheadroom.outputs.plan_tables import wrapped


def tier_lines(model: ModelPlan) -> Iterator[str]:
    """What each row's tier holds and takes; nothing where none is asked for."""
    asked = [row for row in model.rows if row.tier is not None]
    if not asked:
        return
    yield ""
    yield "The tier in host memory, of each engine (docs/warm-sessions.md)"
    for row in asked:
        tier = row.tier
        if not isinstance(tier, PlannedTier):
            yield from wrapped(f"{row.plan.label}: not known: {tier}", "  ", "    ")
            continue
        held = "".join(f", {fit:.2f} sessions of {tokens:,}" for tokens, fit in tier.sessions)
        yield from wrapped(
            f"{row.plan.label}: {count(tier.tier.tokens)} tokens{held}; {_need(tier)}", "  ", "    "
        )
        for note in tier.tier.notes:
            yield from wrapped(note, "    ", "      ")
        for _, why in tier.findings:
            yield from wrapped(f"careful: {why}", "    ", "      ")


def _need(tier: PlannedTier) -> str:
    need = tier.need
    if need.bytes is not None:
        return f"{size(need.bytes)} of the host's memory"
    return f"{size(need.low_bytes)} to {size(need.high_bytes)} of the host's memory"
