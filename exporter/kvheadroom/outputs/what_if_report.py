"""A running engine and other ways to start it, as text of 100 columns: the answers first."""

from collections.abc import Iterator

from kvheadroom.capacity.calibrated_plan import CalibratedPlan
from kvheadroom.capacity.calibration_samples import CalibrationSample
from kvheadroom.capacity.deployment import DeploymentPlan, Outcome
from kvheadroom.capacity.facts import PARALLEL_FLAGS, Origin
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.plan_figures import figures
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.startup_check import FreeMemory
from kvheadroom.capacity.what_if_answer import NOT_MODELLED, Now, Sessions, WhatIf, WhatIfRow
from kvheadroom.outputs.numbers import GIB, count, gigabytes, percent, signed_percent, size, span
from kvheadroom.outputs.plan_report import figure_lines
from kvheadroom.outputs.plan_tables import START_HEADS, columns, gb, start_cells, wrapped


def is_answered(answer: WhatIf) -> bool:
    """Whether every row starts, and no length was asked for that is above max_model_len."""
    return all(row.starts and not row.too_long for row in answer.rows)


def what_if_report(answer: WhatIf, *, explain: bool) -> Iterator[str]:
    """One line after the other."""
    yield from wrapped(_now(answer.now), "", "  ")
    for row in answer.rows:
        yield from wrapped(_answer(row, answer), "", "  ")
    yield ""
    yield from _server(answer)
    yield ""
    yield from _table(answer)
    yield from _same_gpus(answer)
    yield ""
    yield "What vLLM's checks at start-up would say, and what else the change does"
    for row in answer.rows:
        yield from _checks(row)
    yield from _reuse(answer.reuse)
    if explain:
        for row in answer.rows:
            yield ""
            yield f"Every figure of {row.change.label} as vLLM makes it, in its order"
            for figure in figures(row.plan):
                yield from figure_lines(figure)
    yield from _assumed(answer.now)
    yield ""
    yield "Not modelled"
    for sentence in NOT_MODELLED:
        yield from wrapped(sentence, "  ", "    ")


def _reuse(reuse: Reuse | str | None) -> Iterator[str]:
    if reuse is None:
        return
    yield ""
    yield "What an offload tier in host memory would find"
    if isinstance(reuse, str):
        yield from wrapped(f"Not known: {reuse}.", "  ", "    ")
        return
    found = (
        f"Of {count(reuse.prompts)} prompt tokens of {span(reuse.seconds)}, {percent(reuse.pool_ratio)} were found in HBM and "
        f"{percent(reuse.outside_ratio)} by a KV connector. By how soon they came back, HBM and a tier would find together:"
    )
    yield from wrapped(found, "  ", "  ")
    rows = [
        (
            gigabytes(one.size.bytes) if one.size.bytes else "no tier",
            count(round(one.size.tokens)),
            "?" if one.ratio is None else percent(one.ratio),
            percent(one.low_ratio),
            percent(one.high_ratio),
        )
        for one in reuse.expected
    ]
    yield from columns(("tier", "tokens", "would find", "at least", "at most"), rows)


def _now(now: Now) -> str:
    observation = now.observation
    held = ", ".join(
        f"{one.of_engine:.2f} sessions of {one.session_tokens:,} tokens ({one.whole} whole)"
        for one in now.sessions
    )
    tokens = f"{observation.pool_tokens:,} tokens" if observation.pool_tokens is not None else ""
    blocks = f"{observation.num_blocks:,} blocks" if observation.num_blocks is not None else ""
    where = f", {_label(now.plan)}" if now.knows_gpus else ""
    if observation.unknown is not None:
        return f"Now{where}: {observation.unknown}."
    parts = ", ".join(filter(None, (held, " in ".join(filter(None, (tokens, blocks))))))
    each = "" if now.engines == 1 else f", of the engine with the fewest of {now.engines}"
    return f"Now{where}: {parts}, as the engine says{each}."


def _gpus(plan: DeploymentPlan) -> str:
    return f"{plan.fleet.gpus_per_replica} x {plan.request.operator.gpu or 'GPU'}"


def _answer(row: WhatIfRow, answer: WhatIf) -> str:
    plan = row.plan
    head = f"{row.change.label} ({_label(plan)}): "
    if plan.outcome is Outcome.REFUSED:
        return f"{head}vLLM refuses: {plan.reason}."
    if plan.outcome is Outcome.NO_ROOM:
        return f"{head}does not fit: {plan.reason}{_end(row)}."
    if plan.outcome is Outcome.UNKNOWN or plan.pool is None:
        missing = () if plan.facts.obstacles else plan.facts.missing
        ways = "".join(f"; {fact.why}: {fact.way_out}" for fact in missing)
        return f"{head}cannot be told{': ' if plan.reason else ''}{plan.reason}{ways}."
    each = "" if plan.data_parallel == 1 else "each engine "
    held = each + ", ".join(_sessions(one, answer) for one in row.sessions)
    for above in row.too_long:
        held += f"{'; ' if held else ''}none of {above:,} tokens, which is above max_model_len"
    length = plan.pool.max_model_len
    if plan.outcome is Outcome.TOO_LONG:
        longest = plan.pool.longest_bootable
        way = f"; the longest that starts is {longest:,} (--max-model-len {longest})" if longest else ""
        return f"{head}{held}; vLLM does NOT start at max_model_len {count(length)}{way}{_end(row)}."
    if row.replicas == 0:
        return f"{head}{held}; but a replica needs {plan.fleet.gpus_per_replica} GPUs, and there are {answer.gpus}."
    if not row.starts:
        return f"{head}{held}; vLLM does NOT start: too little memory of the GPU is free."
    return f"{head}{held}; vLLM starts at max_model_len {count(length)}{_end(row)}."


def _end(row: WhatIfRow) -> str:
    """What one end of the interval says otherwise."""
    if row.is_sure:
        return ""
    if row.plan.outcome is Outcome.STARTS:
        return "; with the highest overhead of the interval it does not"
    return "; with the lowest overhead of the interval it does"


def _sessions(one: Sessions, answer: WhatIf) -> str:
    before = next((now for now in answer.now.sessions if now.session_tokens == one.session_tokens), None)
    interval = "" if one.fewest == one.most else f"{one.fewest:.2f} to {one.most:.2f}; "
    instead = "" if before is None else f" in place of {before.of_engine:.2f}"
    return f"{one.of_engine:.2f} sessions of {one.session_tokens:,} tokens ({interval}{one.whole} whole){instead}"


def _server(answer: WhatIf) -> Iterator[str]:
    server, now = answer.server, answer.now
    facts = now.plan.facts
    release = "a release that nobody told" if facts.version is None else f"vLLM {facts.version.value}"
    model = now.snapshot.model_name or "a model that is not named"
    where = "" if facts.model_folder is None else f", its files from {facts.model_folder.value}"
    yield from wrapped(f"{server.replica}  {server.url}: {model} on {release}{where}", "", "  ")
    if not now.knows_gpus or (facts.gpu is None and facts.hbm_bytes is None):
        yield from wrapped(
            f"careful: nothing told {' and '.join(_untold(now))} of what runs, and a page of vLLM does not; say it: --runs-with="
            "'-tp 4 --gpu B200', or the flags and the GPU of the replica in a --config",
            "  ",
            "    ",
        )
    for origin, flags in facts.flags_by_origin():
        told = ", ".join(f"{flag.name} {flag.value}" for flag in flags)
        yield from wrapped(f"{_TOLD_BY.get(origin, origin)}: {told}", "  ", "    ")
    if now.off_ratio is not None:
        yield from wrapped(
            f"observed against predicted: {signed_percent(now.off_ratio)} of the pool's tokens", "  ", "    "
        )
    sample = now.sample
    if isinstance(sample, CalibrationSample):
        estimated = "" if sample.estimated_bytes is None else f", estimated {gb(sample.estimated_bytes)} GB"
        yield from wrapped(
            f"overhead measured by its pool: {gb(sample.overhead_bytes)} GB of each GPU, at most {sample.uncertainty_bytes:,} B less "
            f"(less than a block is rounded off){estimated}; it is used for other starts only",
            "  ",
            "    ",
        )
    else:
        yield from wrapped(f"its overhead is not measured: {sample.detail}", "  ", "    ")


_TOLD_BY = {Origin.CONFIG: "your config, --runs-with, or the engines on its page"}


def _untold(now: Now) -> list[str]:
    facts = now.plan.facts
    found = [] if now.knows_gpus else ["the parallel sizes"]
    return found + (["the GPU"] if facts.gpu is None and facts.hbm_bytes is None else [])


def _table(answer: WhatIf) -> Iterator[str]:
    now, length = answer.now, answer.session_tokens[0]
    yield f"Sessions of {length:,} tokens of one engine; bytes of one GPU"
    observed = next((one for one in now.sessions if one.session_tokens == length), None)
    observation = now.observation
    measured = now.sample.overhead_bytes if isinstance(now.sample, CalibrationSample) else None
    lines = [
        (
            "now, observed",
            gb(measured),
            gb(observation.pool_bytes),
            count(observation.pool_tokens),
            "–" if observed is None else f"{observed.of_engine:.2f}",
            "it runs",
        ),
        start_cells("now, predicted", now.plan, length),
    ]
    for row in answer.rows:
        lines.append(start_cells(row.change.label, row.plan, length))
        if row.fewest is not row.plan:
            lines += [start_cells("  fewest", row.fewest, length), start_cells("  most", row.most, length)]
    yield from columns(START_HEADS, lines)


def _same_gpus(answer: WhatIf) -> Iterator[str]:
    """Sessions of each GPU, and on the same GPUs, where replicas are not of one size."""
    sizes = {row.plan.fleet.gpus_per_replica for row in answer.rows} | {
        answer.now.plan.fleet.gpus_per_replica
    }
    if len(sizes) == 1 and answer.gpus in sizes:
        return
    length = answer.session_tokens[0]
    yield ""
    yield f"On the same {answer.gpus} GPUs: sessions of {length:,} tokens of all engines"
    lines = []
    for label, plan, replicas, sessions in (
        ("now", answer.now.plan, answer.now.replicas, answer.now.sessions),
        *((row.change.label, row.plan, row.replicas, row.sessions) for row in answer.rows),
    ):
        one = next((one for one in sessions if one.session_tokens == length), None)
        if label == "now" and not answer.now.knows_gpus:
            continue
        lines.append(
            (
                label,
                f"{replicas} x {plan.fleet.gpus_per_replica}",
                "–" if one is None else f"{one.per_gpu:.3f}",
                "–" if one is None else f"{one.in_all:.2f}",
            )
        )
    yield from columns(("", "replicas", "per GPU", "in all"), lines)


def _checks(row: WhatIfRow) -> Iterator[str]:
    yield f"  {row.change.label}"
    if row.plan.outcome in (Outcome.REFUSED, Outcome.UNKNOWN):
        yield from wrapped(row.plan.reason or "cannot be told", "    ", "      ")
        return
    yield from wrapped(f"free memory: {_memory(row)}{_more(row)}", "    ", "      ")
    check = row.kv_cache
    if check is not None and check.passes:
        one = f"one request of {check.max_model_len:,} tokens takes {size(check.needed_bytes)} of {size(check.available_bytes)}"
        yield from wrapped(f"KV cache: {one}", "    ", "      ")
    elif check is not None:
        yield from wrapped(f'KV cache: "{check.error}"', "    ", "      ")
    elif row.plan.outcome is Outcome.NO_ROOM:
        yield from wrapped(
            f'KV cache: "No available memory for the cache blocks." ({row.plan.reason})', "    ", "      "
        )
    yield from wrapped(f"overhead: {_basis(row)}", "    ", "      ")
    for note in row.notes:
        yield from wrapped(note, "    ", "      ")


def _memory(row: WhatIfRow) -> str:
    check = row.memory
    if check.requested_bytes is None or check.total_bytes is None:
        on_cpu = row.plan.facts.platform.value == CPU
        return "on a CPU its node must have the pool's memory free" if on_cpu else "the GPU is not known"
    share = row.plan.facts.gpu_memory_utilization.value
    wants = f"it wants {check.requested_bytes / GIB:.2f} GiB of each GPU free as it starts ({share:g} of {check.total_bytes / GIB:.2f})"
    free = (
        ""
        if check.free_bytes is None
        else f"; at most {check.free_bytes / GIB:.2f} will be, once the one that runs has ended"
    )
    return {
        FreeMemory.ENOUGH: f"{wants}{free}: enough",
        FreeMemory.CLOSE: f"{wants}{free}: close, for its own context and NCCL take up to 4% before it looks",
        FreeMemory.TOO_LITTLE: f'{wants}{free}: vLLM ends with "Free memory on device ... is less than desired GPU memory utilization"',
        FreeMemory.AS_NOW: f"{wants}, as the one that runs found; what others use now is not known here"
        if check.free_bytes is None
        else f"{wants}{free}: as the one that runs found",
        FreeMemory.UNKNOWN: f"{wants}; what others use there is not known here",
    }[check.verdict]


def _more(row: WhatIfRow) -> str:
    more = row.memory.more_gpus
    if not more:
        return ""
    return f"; it needs {'1 GPU' if more == 1 else f'{more} GPUs'} more, and of those nothing is known here"


def _label(plan: DeploymentPlan) -> str:
    """That the type of the cache is vLLM's choice needs no word here."""
    return f"{plan.label.removesuffix(', auto')} on {_gpus(plan)}"


def _basis(row: WhatIfRow) -> str:
    if isinstance(row.calibrated, CalibratedPlan):
        return row.calibrated.learned.note
    if not row.plan.facts.pool_from_hbm:
        return "none is in it, for a flag gives the pool"
    reason = row.calibrated or "nothing was measured"
    fact = row.plan.facts.overhead_bytes
    return f"{fact.note or f'{gb(fact.value)} GB, {fact.origin}'}; nothing measured is used: {reason}"


def _assumed(now: Now) -> Iterator[str]:
    facts = now.plan.facts
    found = dict(facts.guessed())
    if isinstance(now.sample, CalibrationSample):
        found.pop("overhead_bytes", None)
    if facts.command_line is None:
        found |= {name: note for name, note in facts.assumed() if name in PARALLEL_FLAGS}
    if not found:
        return
    yield ""
    yield "Assumed of what runs, because nobody told it; say it of the replica in a --config"
    for name, note in found.items():
        yield from wrapped(f"{name}: {note}", "  ", "    ")
