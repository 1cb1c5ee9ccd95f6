"""What `kvheadroom calibrate` prints: what each start measured, what was left out and why, what is learned, and lines for a config."""

import textwrap
from collections.abc import Iterator

from kvheadroom.capacity.calibration_run import CalibrationRun, Learned, LookedAt
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded
from kvheadroom.capacity.logged_figures import Beside, LoggedFigures
from kvheadroom.capacity.logged_start import Printed
from kvheadroom.capacity.readings import one_line
from kvheadroom.outputs.numbers import GIB, count, signed_percent
from kvheadroom.outputs.plan_tables import WIDTH, columns, gb

MOST_SPARES = 4
MOST_EVIDENCE = 20
_MEASURED = 3
"""Columns of a table of figures beside which nothing is predicted."""
_KEEP = "Nothing was written. --out FILE keeps these samples for later runs."


def calibration_report(run: CalibrationRun) -> Iterator[str]:
    """One line after the other."""
    for one in run.looked.starts:
        yield from _start(one)
        yield ""
    for problem in run.looked.problems:
        yield from _wrapped(f"careful: {problem}", "", "  ")
    starts = len(run.looked.starts)
    excluded = run.looked.excluded()
    if excluded:
        reasons = ", ".join(f"{reason} {number}" for reason, number in excluded)
        yield f"Left out: {sum(number for _, number in excluded)} of {starts} starts ({reasons})"
    if run.looked.problems or excluded:
        yield ""
    if not run.learned:
        yield "Nothing is learned."
        return
    yield "Learned: the overhead of one GPU, which is neither weights nor KV cache"
    for learned in run.learned:
        yield from _learned(learned)
    yield ""
    yield "For a config file, of the replicas that are such engines (GB is 10^9 bytes):"
    for learned in run.learned:
        yield ""
        yield from overhead_yaml(learned)
    yield ""
    yield from _kept(run)


def _kept(run: CalibrationRun) -> Iterator[str]:
    if run.told:
        yield from _wrapped(f"careful: {run.told}", "", "  ")
    if not run.out:
        yield _KEEP
    elif run.not_kept:
        yield from _wrapped(f"Nothing was written: {run.not_kept}", "", "  ")
    else:
        yield f"Kept in {run.out}: {_starts(run.kept)} of this run"


def _starts(number: int) -> str:
    return "1 start" if number == 1 else f"{number:,} starts"


def _start(one: LookedAt) -> Iterator[str]:
    gpu = "" if isinstance(one.outcome, Excluded) else f"{one.outcome.key.gpu}, {one.outcome.key.parallelism}"
    what = ", ".join(
        filter(None, (one.model or "model not told", one.release and f"vLLM {one.release}", gpu))
    )
    yield from _wrapped(f"{one.evidence}: {what}", "", "  ")
    if one.figures is not None:
        yield from _figures(one.figures)
    elif isinstance(one.outcome, CalibrationSample):
        yield from _sample(one.outcome)
    if isinstance(one.outcome, Excluded):
        yield from _wrapped(f"left out, {one.outcome.reason}: {one.outcome.detail}", "  ", "    ")
    elif one.outcome.is_cold:
        yield "  It compiled its model anew; it counts while there is no start that did not."
    for note in one.notes:
        yield from _wrapped(f"careful: {note}", "  ", "    ")


def _sample(sample: CalibrationSample) -> Iterator[str]:
    """Of a running engine, whose parts nobody prints."""
    heads = ("", "measured GiB", "GB", "estimated GiB", "GB")
    before = sample.estimated_bytes
    yield from columns(
        heads,
        [
            (
                "overhead",
                _gib(sample.overhead_bytes),
                gb(sample.overhead_bytes),
                _gib(before),
                gb(before),
            )
        ],
    )


def _figures(figures: LoggedFigures) -> Iterator[str]:
    utilization = "" if figures.utilization is None else f" ({figures.utilization:g} of it)"
    rows = (
        ("GPU memory", figures.total),
        (f"budget{utilization}", figures.budget),
        ("weights", figures.weights),
        ("overhead", figures.overhead),
        ("KV cache", figures.pool),
    )
    heads, cells = (
        ("", "measured GiB", "GB", "predicted GiB", "GB", "difference"),
        [_row(*row) for row in rows],
    )
    is_predicted = any(figure.predicted_bytes is not None for _, figure in rows)
    shown = len(heads) if is_predicted else _MEASURED
    yield from columns(heads[:shown], [row[:shown] for row in cells if row[1] != "–" or is_predicted])
    if figures.pool_tokens is not None:
        predicted = figures.predicted_pool_tokens
        beside = "" if predicted is None else f", predicted {count(predicted)}"
        yield f"  KV cache: {count(figures.pool_tokens)} tokens{beside}"
    if figures.parts:
        parts = "; ".join(f"{part.name} {part.size}" for part in figures.parts)
        yield from _wrapped(f"The log tells of the overhead: {parts}", "  ", "    ")
    graphs = figures.graphs
    if graphs is not None:
        off = "" if graphs.off_ratio is None else f": {_off(graphs.off_ratio)}"
        yield f"  CUDA graphs: estimated {graphs.estimated}, took {graphs.took}{off}"
    yield from _ranks(figures)


def _off(ratio: float) -> str:
    # Two decimals of a few GiB tell no part of a percent.
    return "as estimated" if ratio == 0 else f"{abs(ratio) * 100:,.0f} % too {'high' if ratio > 0 else 'low'}"


def _row(name: str, figure: Beside) -> tuple[str, ...]:
    measured = None if figure.measured is None else figure.measured.bytes
    return (
        name,
        _gib(measured),
        gb(measured),
        _gib(figure.predicted_bytes),
        gb(figure.predicted_bytes),
        signed_percent(figure.difference_ratio),
    )


def _gib(value: int | None) -> str:
    return "–" if value is None else f"{value / GIB:,.2f}"


def _ranks(figures: LoggedFigures) -> Iterator[str]:
    """Which rank binds, and what the others cannot use because of it."""
    name = figures.binding or "the unnamed rank"
    if figures.unseen is not None:
        yield from _wrapped(
            f"A rank that does not print it left {figures.unseen} less than {name}, and all ranks get that.",
            "  ",
            "    ",
        )
    spares = [spare for spare in figures.spares if _is_more_than_rounding(spare.size)]
    if spares:
        unused = sum(spare.size.bytes for spare in spares)
        told = ", ".join(f"{spare.label or 'a rank'} {spare.size}" for spare in spares[:MOST_SPARES])
        more = f", and {len(spares) - MOST_SPARES} more" if len(spares) > MOST_SPARES else ""
        yield from _wrapped(
            f"{name} leaves the least, {figures.pool.measured}, and all ranks get that: {_gib(unused)} GiB of the others stay unused "
            f"({told}{more})",
            "  ",
            "    ",
        )


def _is_more_than_rounding(figure: Printed) -> bool:
    return figure.bytes > figure.uncertainty_bytes


def _learned(learned: Learned) -> Iterator[str]:
    key, overhead = learned.key, learned.overhead
    yield from _wrapped(
        f"{learned.model or 'model not told'}, {key.gpu}, {key.parallelism}, vLLM {key.release}", "  ", "    "
    )
    yield from _wrapped(
        f"{gb(overhead.overhead_bytes)} GB ({_gib(overhead.overhead_bytes)} GiB), {overhead.note}",
        "    ",
        "      ",
    )
    yield from _wrapped(f"holds for {key.geometry}, {key.weight_format}, {key.settings}", "    ", "      ")


def overhead_yaml(learned: Learned) -> Iterator[str]:
    """The line for a config, under its evidence as comments."""
    for comment in _evidence(learned):
        # A server or a log may have written anything; it must not end the comment.
        yield one_line(f"# {comment}")
    yield f"overhead_gb: {learned.overhead.overhead_bytes / 1e9:.3f}"


def _evidence(learned: Learned) -> Iterator[str]:
    key, overhead = learned.key, learned.overhead
    yield f"{learned.model or 'model not told'} on {key.gpu}, {key.parallelism}, vLLM {key.release}"
    yield key.settings
    interval = f"{overhead.low_bytes / 1e9:.2f} to {overhead.high_bytes / 1e9:.2f} GB"
    yield f"n = {overhead.samples}, {interval} ({overhead.reliability})"
    if overhead.measured_weights_bytes is not None:
        yield f"loading took {gb(overhead.measured_weights_bytes)} GB of weights per GPU (median)"
    for one in learned.starts[:MOST_EVIDENCE]:
        if isinstance(one.outcome, CalibrationSample):
            yield f"{one.outcome.evidence}: {gb(one.outcome.overhead_bytes)} GB"
        if one.figures is not None and one.figures.parts:
            yield f"  {'; '.join(f'{part.name} {part.size}' for part in one.figures.parts)}"
    if len(learned.starts) > MOST_EVIDENCE:
        yield f"and {len(learned.starts) - MOST_EVIDENCE} more"


def _wrapped(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        one_line(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_on_hyphens=False,
        break_long_words=False,
    )
