"""What was learned of a plan's rows, beside the raw figures, as text of 100 columns."""

from collections.abc import Iterator

from kvheadroom.capacity.calibrated_plan import CalibratedPlan
from kvheadroom.capacity.deployment import Outcome
from kvheadroom.capacity.model_plan import ModelPlan, PlannedRow
from kvheadroom.outputs.plan_tables import START_HEADS, columns, shown_length, start_cells, wrapped


def verdict_as_learned(row: PlannedRow) -> str:
    """Sessions and start with what was learned; empty where nothing was."""
    calibrated = row.calibrated
    if not isinstance(calibrated, CalibratedPlan):
        return ""
    held = ""
    if calibrated.fits:
        fit = calibrated.fits[0]
        held = f"{fit.sessions:.2f} sessions of {fit.session_tokens:,} tokens ({fit.fewest:.2f} to {fit.most:.2f}), and "
    raw_starts = row.plan.outcome is Outcome.STARTS
    if calibrated.starts:
        said = f"it {'starts, too' if raw_starts else 'starts'}"
    elif raw_starts:
        said = f"it does NOT start{_longest(calibrated)}"
    else:
        said = f"it does not start either{_longest(calibrated)}"
    if not calibrated.is_sure:
        end = "highest" if calibrated.starts else "lowest"
        said += f"; with the {end} overhead of the interval it {'does not' if calibrated.starts else 'does'}"
    return f"With what was learned: {held}{said}."


def _longest(calibrated: CalibratedPlan) -> str:
    pool = calibrated.plan.pool
    if pool is None:
        return f" ({calibrated.plan.reason})"
    return f" ({pool.longest_bootable:,} does)" if pool.longest_bootable else ""


def calibrated_table(model: ModelPlan) -> Iterator[str]:
    """Each row raw, as learned, and at both ends of the interval, and where what was learned is from."""
    if all(row.calibrated is None for row in model.rows):
        return
    length = shown_length(model)
    yield ""
    yield f"With what was learned, beside the raw figures: sessions of {length:,} tokens (per GPU, of one engine)"
    lines: list[tuple[str, ...]] = []
    notes = []
    for row in model.rows:
        label, calibrated = row.plan.label, row.calibrated
        if not isinstance(calibrated, CalibratedPlan):
            notes.append(f"{label}: {calibrated}")
            continue
        lines.append(start_cells(f"{label}, raw", row.plan, length))
        lines += [
            start_cells(f"{name:>{len(label) + 2 + len(name)}}", plan, length)
            for name, plan in (
                ("learned", calibrated.plan),
                ("fewest", calibrated.fewest),
                ("most", calibrated.most),
            )
        ]
        notes.append(f"{label}: {calibrated.learned.note}")
    if lines:
        yield from columns(START_HEADS, lines)
    for note in notes:
        yield from wrapped(note, "  ", "    ")
