"""Plans of models as text for people: 100 columns, the answer first. GB is 10^9 bytes, GiB 2^30, and said so."""

from collections.abc import Iterator, Sequence

from kvheadroom.capacity.calibrated_plan import CalibratedPlan, calibrated_figures
from kvheadroom.capacity.deployment import DeploymentPlan, Outcome
from kvheadroom.capacity.facts import MissingFact
from kvheadroom.capacity.model_plan import ModelPlan, PlannedRow, ladder, weights_ratio
from kvheadroom.capacity.plan_figures import Figure, figures, sum_figures
from kvheadroom.capacity.planned_tier import why_no_help
from kvheadroom.outputs.numbers import GB, GIB, count, signed
from kvheadroom.outputs.plan_calibrated import calibrated_table, verdict_as_learned
from kvheadroom.outputs.plan_tables import (
    bridges,
    columns,
    gb,
    length_of,
    lengths_table,
    others,
    sum_table,
    vllm_table,
    wrapped,
)
from kvheadroom.outputs.plan_tiers import tier_lines

# Where the command line says what a config says elsewhere.
_OPTIONS = {
    "hbm_bytes": "--gpu NAME or --hbm-bytes N",
    "weights_bytes": "--weights-bytes N or --index FILE",
    "max_model_len": "--max-model-len N",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes N",
}

WITHOUT_MODEL = (
    "Room is planned, not speed: no latency, no throughput, no quality of the answers. The overhead of a GPU "
    "(context, NCCL, activations, CUDA graphs) is the number that you give, or an estimate until a running engine has been measured."
)


def is_answered(models: Sequence[ModelPlan], *, by_sum: bool) -> bool:
    """Whether every row starts, and no length was asked for that is above max_model_len."""
    return all(
        row.starts(by_sum=by_sum) and row.starts_as_learned and not row.too_long(by_sum=by_sum)
        for model in models
        for row in model.rows
    )


def plan_report(models: Sequence[ModelPlan], *, by_sum: bool, explain: bool) -> Iterator[str]:
    """One line after the other."""
    for model in models:
        yield from _answers(model, by_sum=by_sum)
        yield ""
        yield from wrapped(f"{model.name}: config from {model.where}; {_weights(model)}", "", "  ")
        for doubt in model.doubts:
            yield from wrapped(f"careful: {doubt}", "  ", "    ")
        tables = [sum_table, vllm_table] if by_sum else [vllm_table, sum_table]
        for table in tables:
            yield ""
            yield from table(model)
        yield from calibrated_table(model)
        yield from lengths_table(model)
        yield from tier_lines(model)
        yield from bridges(model)
        yield from others(model)
        if explain:
            for row in model.rows:
                yield ""
                yield from _explained(row)
        yield from _assumed(model, explain=explain)
        yield ""
    yield from _ladder(tuple(models), by_sum=by_sum)
    yield from wrapped(WITHOUT_MODEL, "Not modelled: ", "  ")


def _answers(model: ModelPlan, *, by_sum: bool) -> Iterator[str]:
    for row in model.rows:
        head = f"{row.plan.label} on {_gpus(row.plan)}: "
        said = _answer_by_sum(row) if by_sum else _answer(row)
        learned = f" {verdict_as_learned(row)}" if isinstance(row.calibrated, CalibratedPlan) else ""
        yield from wrapped(head + said + learned, "", "  ")


def _gpus(plan: DeploymentPlan) -> str:
    fleet = plan.fleet
    there = f" (there are {fleet.gpus})" if fleet.replicas == 0 else ""
    return f"{fleet.gpus_per_replica} x {plan.request.operator.gpu or 'GPU'}{there}"


def _answer(row: PlannedRow) -> str:
    plan = row.plan
    if plan.pool is None or plan.outcome in (Outcome.REFUSED, Outcome.UNKNOWN):
        return _why_not(plan)
    held = _each(plan) + ", ".join(
        f"{fit.sessions:.2f} sessions of {fit.session_tokens:,} tokens ({fit.whole_sessions} whole)"
        for fit in plan.fits
    )
    held = _with_too_long(held if plan.fits else "", row, by_sum=False)
    length = plan.pool.max_model_len
    if plan.outcome is Outcome.STARTS:
        return f"{held}; vLLM starts at max_model_len {count(length)}."
    longest = plan.pool.longest_bootable
    way = f"; the longest that starts is {longest:,} (--max-model-len {longest})" if longest else ""
    return f"{held}; vLLM does NOT start at max_model_len {count(length)}{way}{_no_help(plan)}."


def _no_help(plan: DeploymentPlan) -> str:
    why = why_no_help(plan)
    return f"; {why}" if why else ""


def _answer_by_sum(row: PlannedRow) -> str:
    simple = row.simple
    if isinstance(simple, str):
        return f"no answer by the sum on paper: {simple}."
    if simple.weights_over_budget_bytes > 0:
        over = simple.weights_over_budget_bytes
        return f"does not fit; the weights alone exceed the budget by {gb(over)} GB per GPU."
    if simple.tokens is None:
        return f"does not fit; weights and overhead exceed the budget by {gb(-simple.kv_bytes)} GB per GPU."
    lengths = [fit.session_tokens for fit in row.simple_plan.fits]
    held = _each(row.plan) + ", ".join(
        f"{simple.sessions(length):.2f} sessions of {length:,} tokens" for length in lengths
    )
    longest = length_of(row.simple_plan)
    verdict = "starts" if row.starts(by_sum=True) else "does NOT start"
    by_paper = "by the sum on paper"
    held = _with_too_long(f"{held} {by_paper}" if lengths else "", row, by_sum=True)
    held = held or f"{simple.tokens:,} tokens {by_paper}"
    return f"{held}; it {verdict} at max_model_len {count(longest)}."


def _each(plan: DeploymentPlan) -> str:
    return "" if plan.data_parallel == 1 else "each engine "


def _with_too_long(held: str, row: PlannedRow, *, by_sum: bool) -> str:
    """What is held, and the lengths that were asked for and are above max_model_len."""
    lengths = " or ".join(f"{length:,}" for length in row.too_long(by_sum=by_sum))
    if not lengths:
        return held
    return (
        f"{f'{held}, and none' if held else 'no session'} of {lengths} tokens, which is above max_model_len"
    )


def _why_not(plan: DeploymentPlan) -> str:
    if plan.outcome is Outcome.REFUSED:
        return f"vLLM refuses: {plan.reason}."
    if plan.outcome is Outcome.NO_ROOM:
        return f"does not fit: {plan.reason}{_no_help(plan)}."
    missing = () if plan.facts.obstacles else plan.facts.missing
    ways = "".join(f"; give {way}" for way in map(_way_out, missing) if way)
    return f"cannot be told: {plan.reason}{ways}."


def _way_out(missing: MissingFact) -> str:
    return _OPTIONS.get(missing.fact, "")


def _weights(model: ModelPlan) -> str:
    total = model.weights_bytes
    if total is None:
        return "the size of its weights is not known"
    return f"weights {gb(total)} GB ({total:,} bytes)"


def _explained(row: PlannedRow) -> Iterator[str]:
    yield f"Every figure of {row.plan.label} as vLLM makes it, in its order"
    for figure in figures(row.plan):
        yield from figure_lines(figure)
    if isinstance(row.calibrated, CalibratedPlan):
        yield ""
        yield f"Every figure of {row.plan.label} that is another one with what was learned"
        for figure in calibrated_figures(row.plan, row.calibrated):
            yield from figure_lines(figure)
    if isinstance(row.simple, str):
        return
    yield ""
    yield f"Every figure of {row.plan.label} by the sum on paper"
    for figure in sum_figures(row.simple, tuple(fit.session_tokens for fit in row.simple_plan.fits)):
        yield from figure_lines(figure)
    if row.bridge:
        yield ""
        yield "From one to the other, in bytes for KV of one GPU and tokens of one engine"
    for step in row.bridge:
        yield from wrapped(f"{step.step} [{step.source}]", "  ", "    ")
        changes = (
            ""
            if step.key == "sum"
            else f"{signed(step.change_bytes)} B, {signed(step.change_tokens)} tokens: "
        )
        yield f"      {changes}{step.kv_bytes:,} B, {step.tokens:,} tokens"


def figure_lines(figure: Figure) -> Iterator[str]:
    """One figure with its formula and source."""
    values = figure.value if isinstance(figure.value, tuple) else (figure.value,)
    texts = [_precise(value) if isinstance(value, int | float) else str(value) for value in values]
    if len(texts) > 1:
        staged = ", ".join(
            f"stage {stage}: {text} {figure.unit}".rstrip().replace(" ", "\xa0")
            for stage, text in enumerate(texts, 1)
        )
        # Stage, number and unit stay on one line.
        for line in wrapped(f"{figure.name:<34} {staged}", "  ", " " * 37):
            yield line.replace("\xa0", " ")
        yield from wrapped(f"{figure.how} [{figure.source}]", "      ", "      ")
        return
    line = f"  {figure.name:<34} {texts[0]} {figure.unit}".rstrip()
    if figure.unit == "B" and not isinstance(values[0], str) and abs(values[0]) >= 10**6:
        line += f" = {values[0] / GB:,.3f} GB = {values[0] / GIB:,.3f} GiB"
    yield from wrapped(line, "", "      ")
    yield from wrapped(f"{figure.how} [{figure.source}]", "      ", "      ")


def _precise(value: float) -> str:
    if isinstance(value, int) or value.is_integer():
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10**6 else f"{value:,.6g}"


def _assumed(model: ModelPlan, *, explain: bool) -> Iterator[str]:
    """What nobody said: guesses always, vLLM's own defaults where everything is explained."""
    found: dict[str, str] = {}
    for row in model.rows:
        for name, note in row.plan.facts.assumed() if explain else row.plan.facts.guessed():
            found.setdefault(name, note)
        if row.plan.weights is not None and row.plan.weights.note:
            found["weights"] = row.plan.weights.note
    if model.rows[0].plan.facts.version is None:
        release = ".".join(map(str, model.rows[0].plan.facts.rules.taken_from))
        found["release"] = f"the rules of vLLM {release}, the newest known; say --vllm-version for another"
    yield ""
    yield "Assumed, because nobody said it" + ("" if explain else "; all other flags as vLLM's defaults")
    for name, note in found.items():
        yield from wrapped(f"{name}: {note}", "  ", "    ")


def _ladder(models: tuple[ModelPlan, ...], *, by_sum: bool) -> Iterator[str]:
    rungs = ladder(models, by_sum=by_sum)
    if len(rungs) < 2 and len(models) < 2:
        return
    ratio = weights_ratio(models)
    if ratio is not None:
        more = f"{(1 - ratio) * 100:.1f}% smaller" if ratio <= 1 else f"{(ratio - 1) * 100:.1f}% larger"
        first, second = models[:2]
        text = f"{first.name}: weights {gb(first.weights_bytes)} GB, {more} than {second.name} with {gb(second.weights_bytes)} GB"
        yield from wrapped(text, "", "  ")
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
    yield from columns(("", "tokens", "", ""), lines)
    yield ""
