"""Tables of a plan as text of 100 columns: what vLLM does, the sum on paper, the steps between, other ways."""

import textwrap
from collections.abc import Iterator, Sequence

from kvheadroom.capacity.alternatives import TRADES
from kvheadroom.capacity.article import SimpleSum
from kvheadroom.capacity.deployment import USUAL_SESSION_TOKENS, DeploymentPlan, Outcome
from kvheadroom.capacity.model_plan import ModelPlan
from kvheadroom.capacity.readings import one_line
from kvheadroom.outputs.numbers import GB, GIB, count, signed
from kvheadroom.outputs.plan_words import as_options

WIDTH = 100
MOST_BRIDGES = 3


def vllm_table(model: ModelPlan) -> Iterator[str]:
    """What vLLM does with each row."""
    release = model.rows[0].plan.facts.rules.taken_from
    length = shown_length(model)
    yield f"What vLLM {'.'.join(map(str, release))} does: sessions of {length:,} tokens (bytes per GPU, tokens per engine)"
    heads = (
        "",
        "weights GB",
        "KV GB",
        "KV GiB",
        "tokens",
        "sessions",
        "replicas",
        "fleet",
        "starts",
    )
    rows = []
    for row in model.rows:
        plan, pool, fleet = row.plan, row.plan.pool, row.plan.fleet
        fit = next((fit for fit in plan.fits if fit.session_tokens == length), None)
        rows.append(
            (
                row.plan.label,
                gb(plan.weights_bytes),
                gb(plan.kv_bytes),
                "–" if plan.kv_bytes is None else f"{plan.kv_bytes / GIB:,.2f}",
                count(None if pool is None else pool.pool_tokens),
                "–" if fit is None else f"{fit.sessions:.2f}",
                f"{fleet.replicas} x {fleet.gpus_per_replica}",
                _millions(fleet.tokens),
                verdict(plan),
            )
        )
    yield from columns(heads, rows)
    for row in model.rows:
        fleet = row.plan.fleet
        if fleet.replicas == 0:
            yield f"  {row.plan.label}: a replica needs {fleet.gpus_per_replica} GPUs, and there are {fleet.gpus}"
        elif fleet.idle_gpus:
            yield f"  {row.plan.label}: {fleet.idle_gpus} of {fleet.gpus} GPUs are left over"


def lengths_table(model: ModelPlan) -> Iterator[str]:
    """Sessions of each length, where several were asked for: short ones may cost more per token."""
    if all(len(row.plan.fits) < 2 for row in model.rows):
        return
    yield ""
    yield "Sessions by length, per engine; bytes per GPU"
    rows = [
        (
            row.plan.label if fit is row.plan.fits[0] else "",
            f"{fit.session_tokens:,}",
            f"{fit.blocks:,}",
            gb(fit.session_bytes),
            f"{fit.bytes_per_token / 1000:,.1f}",
            f"{fit.sessions:,.2f}",
            f"{fit.whole_sessions:,}",
        )
        for row in model.rows
        for fit in row.plan.fits
    ]
    yield from columns(("", "tokens", "blocks", "GB", "KB/token", "sessions", "whole"), rows)


def verdict(plan: DeploymentPlan) -> str:
    """Whether it starts, in a word or two, with the longest length that does."""
    if plan.pool is None or plan.pool.longest_bootable is None:
        return {Outcome.REFUSED: "refused", Outcome.NO_ROOM: "no room"}.get(plan.outcome, "unknown")
    return (
        "yes" if plan.outcome is Outcome.STARTS else f"no, {count(plan.pool.longest_bootable or None)} does"
    )


def sum_table(model: ModelPlan) -> Iterator[str]:
    """The same by the sum on paper, with its assumptions said."""
    simples = [row.simple for row in model.rows if isinstance(row.simple, SimpleSum)]
    if not simples:
        reasons = dict.fromkeys(str(row.simple) for row in model.rows)
        yield from wrapped(f"The sum on paper has no answer: {'; '.join(reasons)}.", "", "  ")
        return
    one = simples[0]
    yield from wrapped(
        f"The sum on paper: {one.hbm_bytes / GB:g} GB x {one.utilization:g} - {one.overhead_bytes / GB:g} GB - weights / TP, "
        f"over {one.bytes_per_token:,.0f} B per token, without blocks: sessions of {shown_length(model):,} tokens",
        "",
        "  ",
    )
    length = shown_length(model)
    heads = (
        "",
        "weights GB",
        "KV GB",
        "B/token",
        "tokens",
        "sessions",
        "replicas",
        "fleet",
        "starts",
    )
    rows, notes = [], []
    for row in model.rows:
        simple, fleet = row.simple, row.plan.fleet
        if isinstance(simple, str):
            notes.append(f"{row.plan.label}: {simple}")
            continue
        if row.simple_plan is not row.plan:
            notes.append(f"{row.plan.label}: as with --kv-cache-dtype fp8, for without it vLLM refuses")
        fits = simple.tokens is not None
        rows.append(
            (
                row.plan.label,
                gb(simple.weights_per_gpu_bytes),
                gb(simple.kv_bytes) if fits else "–",
                f"{simple.bytes_per_token:,.0f}",
                count(simple.tokens),
                f"{simple.sessions(length):.2f}" if fits else "–",
                f"{fleet.replicas} x {fleet.gpus_per_replica}",
                _millions(row.fleet_tokens(by_sum=True)),
                "yes" if row.starts(by_sum=True) else "no" if fits else "no room",
            )
        )
    yield from columns(heads, rows)
    yield (
        f"  one session of {length:,} tokens takes {gb(one.session_bytes(length) * one.decode_context)} GB in all"
        if one.decode_context > 1
        else f"  one session of {length:,} tokens takes {gb(one.session_bytes(length))} GB of each GPU"
    )
    for note in notes:
        yield from wrapped(note, "  ", "    ")


START_HEADS = ("", "overhead GB", "KV GB", "tokens", "sessions", "starts")


def start_cells(label: str, plan: DeploymentPlan, length: int) -> tuple[str, ...]:
    """One start under START_HEADS: bytes of one GPU, tokens and sessions of one engine."""
    fit = next((fit for fit in plan.fits if fit.session_tokens == length), None)
    return (
        label,
        gb(plan.facts.overhead_bytes.value) if plan.facts.pool_from_hbm else "–",
        gb(plan.kv_bytes),
        count(None if plan.pool is None else plan.pool.pool_tokens),
        "–" if fit is None else f"{fit.sessions:.2f}",
        verdict(plan),
    )


def shown_length(model: ModelPlan) -> int:
    """The length that sessions are shown of."""
    for row in model.rows:
        for plan in (row.plan, row.simple_plan):
            if plan.fits:
                return plan.fits[0].session_tokens
    lengths = model.rows[0].plan.request.session_tokens
    longest = length_of(model.rows[0].plan) or USUAL_SESSION_TOKENS
    return lengths[0] if lengths else min(USUAL_SESSION_TOKENS, longest)


def bridges(model: ModelPlan) -> Iterator[str]:
    """The steps from the sum to vLLM, a column for each row."""
    rows = [row for row in model.rows if row.bridge][:MOST_BRIDGES]
    if not rows:
        return
    yield ""
    yield "From the sum on paper to vLLM, in tokens of one engine"
    texts: dict[str, str] = {}
    for row in rows:
        for step in row.bridge:
            texts.setdefault(step.key, step.step)
    order = [
        key
        for key in (
            "sum",
            "memory",
            "not_loaded",
            "replicated",
            "draft",
            "files",
            "shapes",
            "blocks",
            "counting",
        )
        if key in texts
    ]
    lines = []
    for key in order:
        steps = [next((step for step in row.bridge if step.key == key), None) for row in rows]
        lines.append(
            (
                texts[key],
                *(
                    "–"
                    if step is None
                    else count(step.tokens)
                    if key == "sum"
                    else signed(step.change_tokens)
                    for step in steps
                ),
            )
        )
    lines.append(("= the pool that vLLM reports", *(count(row.bridge[-2].tokens) for row in rows)))
    lines.append((texts["null_block"], *(signed(row.bridge[-1].change_tokens) for row in rows)))
    yield from columns(("", *(row.plan.label for row in rows)), lines)


def gb(value: float | None) -> str:
    """Bytes as GB, 10^9 bytes."""
    return "–" if value is None else f"{value / GB:,.2f}"


def _millions(tokens: int | None) -> str:
    return "–" if tokens is None else f"{tokens / 1e6:,.2f}M"


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table: the first column to the left, the others to the right; a first column too wide stands above its row."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    above = sum(widths) + 2 * len(widths) > WIDTH
    for cells in ([heads] if any(heads) else []) + list(rows):
        first = cells[0]
        if above:
            if first:
                yield f"  {first}"
            first = ""
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        yield "  " + "  ".join([first.ljust(8 if above else widths[0]), *rest]).rstrip()


def wrapped(text: str, first: str, then: str) -> list[str]:
    """Text over several lines, each with its indent, in the command line's words; a server or a file may have written parts of it."""
    # Ends of lines are folded here, and a blank that keeps words together is ours.
    printable = "\xa0".join(one_line(" ".join(part.split("\n"))) for part in text.split("\xa0"))
    return textwrap.wrap(
        as_options(printable),
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_on_hyphens=False,
        break_long_words=False,
    )


def others(model: ModelPlan) -> Iterator[str]:
    """Other ways to use the GPUs of the largest replica, each with what is not modelled."""
    if not model.others:
        return
    base = model.others_than
    same = "" if base.facts.pool_from_hbm else f", {gb(base.kv_bytes)} GB for KV on each"
    gpus = base.fleet.gpus_per_replica
    yield ""
    yield from wrapped(
        f"Other ways to use the same {'GPU' if gpus == 1 else f'{gpus} GPUs'}{same}: tokens of all engines, and whether "
        f"max_model_len {count(length_of(base))} starts",
        "",
        "  ",
    )
    rows = [(base.label, count(base.fleet.replica_tokens), "", verdict(base))]
    rows += [
        (
            other.flags,
            count(other.tokens),
            "" if other.ratio is None else f"{other.ratio:.2f}x",
            verdict(other.plan),
        )
        for other in model.others
    ]
    yield from columns(("", "tokens", "", "starts"), rows)
    for other in model.others:
        if other.tokens is None:
            yield from wrapped(f"{other.flags}: {other.plan.reason}", "  ", "    ")
    for kind in dict.fromkeys(other.kind for other in model.others):
        yield from wrapped(f"{kind}: {TRADES[kind]}", "  ", "    ")


def length_of(plan: DeploymentPlan) -> int | None:
    """The max_model_len that was asked for."""
    return None if plan.facts.max_model_len is None else plan.facts.max_model_len.value
