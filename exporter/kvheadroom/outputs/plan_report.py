"""Plans of models as text for people: 100 columns, the answer first. GB is 10^9 bytes, GiB 2^30, and said so."""

import textwrap
from collections.abc import Iterator, Sequence

from kvheadroom.capacity.article import SimpleSum
from kvheadroom.capacity.deployment import DeploymentPlan, Outcome
from kvheadroom.capacity.facts import MissingFact
from kvheadroom.capacity.model_plan import ModelPlan, PlannedRow, ladder
from kvheadroom.capacity.plan_figures import Figure, figures
from kvheadroom.outputs.numbers import count, signed

WIDTH = 100
GB, GIB = 10**9, 2**30
MOST_BRIDGES = 3

# Where the command line says what a config says elsewhere.
_OPTIONS = {
    "hbm_bytes": "--gpu NAME or --hbm-bytes N",
    "weights_bytes": "--weights-bytes N or --index FILE",
    "max_model_len": "--max-model-len N",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes N",
}

WITHOUT_MODEL = (
    "Room is planned, not speed: no latency, no throughput, no quality of the answers. The overhead of a GPU "
    "(context, NCCL, activations, CUDA graphs) is the number that you give, until a running engine has been measured."
)


def is_answered(models: Sequence[ModelPlan], *, by_sum: bool) -> bool:
    """Whether every row starts."""
    return all(row.starts(by_sum=by_sum) for model in models for row in model.rows)


def plan_report(models: Sequence[ModelPlan], *, by_sum: bool, explain: bool) -> Iterator[str]:
    """One line after the other."""
    for model in models:
        yield from _answers(model, by_sum=by_sum)
        yield ""
        yield from _wrapped(f"{model.name}: config from {model.where}; {_weights(model)}", "", "  ")
        tables = [_sum_table, _vllm_table] if by_sum else [_vllm_table, _sum_table]
        for table in tables:
            yield ""
            yield from table(model)
        yield from _bridges(model)
        yield from _others(model)
        if explain:
            for row in model.rows:
                yield ""
                yield from _explained(row)
        yield from _assumed(model)
        yield ""
    yield from _ladder(tuple(models), by_sum=by_sum)
    yield from _wrapped(WITHOUT_MODEL, "Not modelled: ", "  ")


def _answers(model: ModelPlan, *, by_sum: bool) -> Iterator[str]:
    for row in model.rows:
        engine = "" if row.plan.data_parallel == 1 else "each engine "
        head = f"{row.label} on {_gpus(row.plan)}: {engine}"
        said = _answer_by_sum(row) if by_sum else _answer(row)
        yield from _wrapped(head + said, "", "  ")


def _gpus(plan: DeploymentPlan) -> str:
    per_replica = plan.fleet.gpus_per_replica
    return f"{per_replica} x {plan.request.operator.gpu or 'GPU'}"


def _answer(row: PlannedRow) -> str:
    plan = row.plan
    if plan.pool is None or plan.outcome in (Outcome.REFUSED, Outcome.UNKNOWN):
        return _why_not(plan)
    held = ", ".join(
        f"{fit.sessions:.2f} sessions of {fit.session_tokens:,} tokens ({fit.whole_sessions} whole)"
        for fit in plan.fits
    )
    held = held or "no session of the asked lengths, which are above max_model_len"
    length = plan.pool.max_model_len
    if plan.outcome is Outcome.STARTS:
        return f"{held}; vLLM starts at max_model_len {count(length)}."
    longest = plan.pool.longest_bootable
    way = f"; the longest that starts is {longest:,} (--max-model-len {longest})" if longest else ""
    return f"{held}; vLLM does NOT start at max_model_len {count(length)}{way}."


def _answer_by_sum(row: PlannedRow) -> str:
    simple = row.simple
    if isinstance(simple, str):
        return f"no answer by the sum on paper: {simple}."
    if simple.weights_over_budget_bytes > 0:
        over = simple.weights_over_budget_bytes
        return f"does not fit; the weights alone exceed the budget by {_gb(over)} GB per GPU."
    if simple.tokens is None:
        return f"does not fit; weights and overhead exceed the budget by {_gb(-simple.kv_bytes)} GB per GPU."
    lengths = [fit.session_tokens for fit in row.simple_plan.fits]
    held = ", ".join(f"{simple.sessions(length):.2f} sessions of {length:,} tokens" for length in lengths)
    longest = _length(row.simple_plan)
    verdict = "starts" if row.starts(by_sum=True) else "does NOT start"
    return f"{held or f'{simple.tokens:,} tokens'} by the sum on paper; it {verdict} at max_model_len {count(longest)}."


def _why_not(plan: DeploymentPlan) -> str:
    if plan.outcome is Outcome.REFUSED:
        return f"vLLM refuses: {plan.reason}."
    if plan.outcome is Outcome.NO_ROOM:
        return f"does not fit: {plan.reason}."
    ways = "".join(f"; give {way}" for way in map(_way_out, plan.facts.missing) if way)
    return f"cannot be told: {plan.reason}{ways}."


def _way_out(missing: MissingFact) -> str:
    return _OPTIONS.get(missing.fact, "")


def _weights(model: ModelPlan) -> str:
    total = model.weights_bytes
    if total is None:
        return "the size of its weights is not known"
    return f"weights {_gb(total)} GB ({total:,} bytes)"


def _vllm_table(model: ModelPlan) -> Iterator[str]:
    release = model.rows[0].plan.facts.rules.taken_from
    yield f"What vLLM {'.'.join(map(str, release))} does (weights and KV per GPU, tokens and sessions per engine)"
    length = _shown_length(model)
    heads = (
        "",
        "weights GB",
        "KV GB",
        "KV GiB",
        "tokens",
        _sessions_of(length),
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
                row.label,
                _gb(plan.weights_bytes),
                _gb(plan.kv_bytes),
                "–" if plan.kv_bytes is None else f"{plan.kv_bytes / GIB:,.2f}",
                count(None if pool is None else pool.pool_tokens),
                "–" if fit is None else f"{fit.sessions:.2f}",
                f"{fleet.replicas} x {fleet.gpus_per_replica}",
                _millions(fleet.tokens),
                _verdict(plan),
            )
        )
    yield from _columns(heads, rows)


def _verdict(plan: DeploymentPlan) -> str:
    if plan.pool is None or plan.pool.longest_bootable is None:
        return {Outcome.REFUSED: "refused", Outcome.NO_ROOM: "no room"}.get(plan.outcome, "unknown")
    return (
        "yes" if plan.outcome is Outcome.STARTS else f"no, {count(plan.pool.longest_bootable or None)} does"
    )


def _sum_table(model: ModelPlan) -> Iterator[str]:
    simples = [row.simple for row in model.rows if isinstance(row.simple, SimpleSum)]
    if not simples:
        reasons = dict.fromkeys(str(row.simple) for row in model.rows)
        yield from _wrapped(f"The sum on paper has no answer: {'; '.join(reasons)}.", "", "  ")
        return
    one = simples[0]
    yield from _wrapped(
        f"The sum on paper: {one.hbm_bytes / GB:g} GB x {one.utilization:g} - {one.overhead_bytes / GB:g} GB - weights / TP, "
        f"over {one.bytes_per_token:,.0f} B per token; no blocks, nothing else (weights and KV per GPU)",
        "",
        "  ",
    )
    length = _shown_length(model)
    heads = (
        "",
        "weights GB",
        "KV GB",
        "B/token",
        "tokens",
        _sessions_of(length),
        "replicas",
        "fleet",
        "starts",
    )
    rows, notes = [], []
    for row in model.rows:
        simple, fleet = row.simple, row.plan.fleet
        if isinstance(simple, str):
            notes.append(f"{row.label}: {simple}")
            continue
        if row.simple_plan is not row.plan:
            notes.append(f"{row.label}: as with --kv-cache-dtype fp8, for without it vLLM refuses")
        fits = simple.tokens is not None
        rows.append(
            (
                row.label,
                _gb(simple.weights_per_gpu_bytes),
                _gb(simple.kv_bytes) if fits else "–",
                f"{simple.bytes_per_token:,.0f}",
                count(simple.tokens),
                f"{simple.sessions(length):.2f}" if fits else "–",
                f"{fleet.replicas} x {fleet.gpus_per_replica}",
                _millions(row.fleet_tokens(by_sum=True)),
                "yes"
                if row.starts(by_sum=True)
                else "no"
                if fits
                else f"{_gb(max(simple.weights_over_budget_bytes, -simple.kv_bytes))} GB over",
            )
        )
    yield from _columns(heads, rows)
    yield (
        f"  one session of {length:,} tokens takes {_gb(one.session_bytes(length) * one.decode_context)} GB in all"
        if one.decode_context > 1
        else f"  one session of {length:,} tokens takes {_gb(one.session_bytes(length))} GB of each GPU"
    )
    for note in notes:
        yield from _wrapped(note, "  ", "    ")


def _shown_length(model: ModelPlan) -> int:
    for row in model.rows:
        for plan in (row.plan, row.simple_plan):
            if plan.fits:
                return plan.fits[0].session_tokens
    lengths = model.rows[0].plan.request.session_tokens
    return lengths[0] if lengths else 262_144


def _sessions_of(length: int) -> str:
    return f"of {length:,}"


def _bridges(model: ModelPlan) -> Iterator[str]:
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
        for key in ("sum", "memory", "not_loaded", "replicated", "shapes", "blocks", "counting")
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
    yield from _columns(("", *(row.label for row in rows)), lines)


def _others(model: ModelPlan) -> Iterator[str]:
    if not model.others:
        return
    base = model.others_than
    yield ""
    held = count(base.fleet.replica_tokens)
    same = "" if base.facts.pool_from_hbm else f" at {_gb(base.kv_bytes)} GB for KV of each GPU"
    sizes = base.facts.parallelism
    yield from _wrapped(
        f"Other ways to use the same {base.fleet.gpus_per_replica} GPUs{same} (TP {sizes.tensor}: {held} tokens)",
        "",
        "  ",
    )
    for other in model.others:
        ratio = "" if other.ratio is None else f"{other.ratio:.2f} x"
        yield f"  {other.flags}"
        if other.tokens is None:
            yield from _wrapped(_why_not(other.plan), "      ", "      ")
        else:
            yield f"      {other.tokens:,} tokens, {ratio}; at max_model_len {count(_length(other.plan))}: starts {_verdict(other.plan)}"
        yield from _wrapped(other.trade, "      ", "      ")


def _length(plan: DeploymentPlan) -> int | None:
    return None if plan.facts.max_model_len is None else plan.facts.max_model_len.value


def _explained(row: PlannedRow) -> Iterator[str]:
    yield f"Every figure of {row.label}, in the order in which it is made"
    for figure in figures(row.plan):
        yield from _figure(figure)


def _figure(figure: Figure) -> Iterator[str]:
    values = figure.value if isinstance(figure.value, tuple) else (figure.value,)
    shown = " / ".join(_precise(value) if isinstance(value, int | float) else str(value) for value in values)
    line = f"  {figure.name:<34} {shown} {figure.unit}".rstrip()
    if figure.unit == "B" and len(values) == 1 and isinstance(values[0], int) and abs(values[0]) >= 10**6:
        line += f" = {values[0] / GB:,.3f} GB = {values[0] / GIB:,.3f} GiB"
    yield line
    yield from _wrapped(f"{figure.how} [{figure.source}]", "      ", "      ")


def _precise(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _assumed(model: ModelPlan) -> Iterator[str]:
    found: dict[str, str] = {}
    for row in model.rows:
        for name, note in row.plan.facts.assumed():
            found.setdefault(name, note)
    if found:
        yield ""
        yield "Assumed, because nobody said it"
        for name, note in found.items():
            yield from _wrapped(f"{name}: {note}", "  ", "    ")


def _ladder(models: tuple[ModelPlan, ...], *, by_sum: bool) -> Iterator[str]:
    rungs = ladder(models, by_sum=by_sum)
    if len(rungs) < 2 and len(models) < 2:
        return
    if len(models) > 1:
        first, second = (model.weights_bytes for model in models[:2])
        if first and second:
            ratio = first / second
            more = f"{(1 - ratio) * 100:.1f}% smaller" if ratio <= 1 else f"{(ratio - 1) * 100:.1f}% larger"
            yield f"{models[0].name}: weights {_gb(first)} GB, {more} than {models[1].name} with {_gb(second)} GB"
    fleet = models[0].rows[0].plan.request.gpus
    unit = "tokens per GPU" if fleet is None else f"tokens on {fleet} GPUs"
    yield f"Least first, {'by the sum on paper' if by_sum else 'as vLLM does'}, in {unit}"
    lines = [
        (
            f"{rung.model}, {rung.label}" if len(models) > 1 else rung.label,
            count(round(rung.tokens)),
            f"{rung.replicas} replicas" if fleet is not None else "",
            "" if rung.ratio is None else f"{(rung.ratio - 1) * 100:+.1f}% on the line above",
        )
        for rung in rungs
    ]
    yield from _columns(("", "tokens", "", ""), lines)
    yield ""


def _gb(value: float | None) -> str:
    return "–" if value is None else f"{value / GB:,.2f}"


def _millions(tokens: int | None) -> str:
    return "–" if tokens is None else f"{tokens / 1e6:,.2f}M"


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for cells in ([heads] if any(heads) else []) + list(rows):
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield "  " + "  ".join([first, *rest]).rstrip()


def _wrapped(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_on_hyphens=False,
        break_long_words=False,
    )
