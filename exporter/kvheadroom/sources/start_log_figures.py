"""What each form of a line tells of a rank or an engine, and in what words a start that failed is told."""

from collections.abc import Callable, Mapping, Sequence

from kvheadroom.capacity.logged_start import V0_UTILIZATION_UNCERTAINTY, Printed
from kvheadroom.sources.start_log_drafts import EngineDraft, RankDraft
from kvheadroom.sources.start_log_forms import Form, printed

Groups = tuple[str | None, ...]
_OfRank = Callable[[RankDraft, list[Printed], Groups], None]


def figures_of(form: Form, groups: Groups) -> list[Printed]:
    """The groups that are figures, in their order; the free memory of a device shares the unit behind the total."""
    texts = [group for group in groups if group is not None and group[-1:] == "B"]
    if form.head.startswith(("Free memory on device", "Externally held")) and texts:
        texts.insert(0, f"{groups[0]} {texts[0].lstrip('-0123456789. ')}")
    return [printed(text, gb_is_gib=form.gb_is_gib) for text in texts]


def _into(*names: str) -> _OfRank:
    """Each figure into the value of that name; an empty name drops one."""

    def put(rank: RankDraft, figures: list[Printed], _: Groups) -> None:
        for name, figure in zip(names, figures, strict=True):
            if name:
                rank.put(name, figure)

    return put


def _v0_budget(rank: RankDraft, figures: list[Printed], groups: Groups) -> None:
    total, requested = figures
    rank.put("total", total)
    rank.put("requested", requested)
    # `%.2f` up to 0.10.
    rank.put_utilization(float(groups[1] or 0), V0_UTILIZATION_UNCERTAINTY)


def _requested_util(rank: RankDraft, figures: list[Printed], groups: Groups) -> None:
    free, requested = figures
    rank.put("free_at_start", free)
    rank.put("requested", requested)
    said = groups[1] or ""
    rank.put_utilization(float(said), 0.5 / 10 ** len(said.partition(".")[2]))


def put_budget(rank: RankDraft, figures: list[Printed], groups: Groups) -> None:
    """What is free of the whole GPU, and the budget."""
    free, total, requested = figures
    rank.put("free_at_start", free)
    rank.put("total", total)
    rank.put("requested", requested)
    rank.put_utilization(float(groups[2] or 0))


def _usage(rank: RankDraft, figures: list[Printed], groups: Groups) -> None:
    put_budget(rank, figures[:3], groups)
    names = ("weights", "activation", "non_torch", "cudagraph")
    _of_usage(rank, names, figures[3:], groups[-1])


def _usage_consumed(rank: RankDraft, figures: list[Printed], groups: Groups) -> None:
    put_budget(rank, figures[:3], groups)
    _of_usage(rank, ("consumed", "activation", "cudagraph"), figures[3:], groups[-1])


def _of_usage(rank: RankDraft, names: tuple[str, ...], figures: list[Printed], in_use: str | None) -> None:
    for name, figure in zip(names, figures, strict=False):
        rank.put(name, figure)
    if in_use is not None and in_use.endswith(" bytes"):
        rank.put("available", Printed(int(in_use.removesuffix(" bytes")), 0))
    elif len(figures) > len(names):
        rank.put("available", figures[-1])


def _pinned(rank: RankDraft, figures: list[Printed], _: Groups) -> None:
    free, reserved = figures
    rank.put("free_at_start", free)
    rank.put("available", reserved)
    rank.values["is_pinned"] = True


def _plan(rank: RankDraft, figures: list[Printed], groups: Groups) -> None:
    rank.put("available", Printed(int(groups[0] or 0), 0))
    rank.put("free_at_start", figures[-1])
    rank.values["is_pinned"] = True


def _counted(rank: RankDraft, _: list[Printed], groups: Groups) -> None:
    rank.values["graphs_counted"] = True
    rank.graph_share = float(groups[0] or 0) - float(groups[1] or 0)


def _not_counted(rank: RankDraft, _: list[Printed], groups: Groups) -> None:
    rank.values["graphs_counted"] = False
    now, then = float(groups[0] or 0), float(groups[1] or 0)
    # It is told as 1 where it is more.
    if then < 1:
        rank.graph_share = then - now


OF_A_RANK: Mapping[str, _OfRank] = {
    "loaded": _into("weights"),
    "v0_budget": _v0_budget,
    "v0_shares": _into("weights", "non_torch", "activation", "available"),
    "snapshot": _into("free_at_start", "total"),
    "requested": _into("requested"),
    "requested_0_9": _into("free_at_start", "", "requested"),
    "requested_util": _requested_util,
    "external": _into("", "external_weights", "requested"),
    "profiled": _into("", "activation", "non_torch", "weights"),
    "profiled_consumed": _into("", "", "consumed", "weights"),
    "available": _into("available"),
    "pinned": _pinned,
    "plan": _plan,
    "estimate": _into("cudagraph_estimate"),
    "counted": _counted,
    "not_counted": _not_counted,
    "captured": _into("cudagraph"),
    "graph_pool": _into("cudagraph", "cudagraph_estimate"),
    "usage": _usage,
    "usage_consumed": _usage_consumed,
    "reserve": _into("multimodal_reserve", ""),
}


def _count(text: str | None) -> int:
    return int((text or "0").replace(",", ""))


def _pool(engine: EngineDraft, groups: Groups) -> None:
    """Up to 0.10 each worker prints what its own memory holds, and all take the least (`get_kv_cache_configs`)."""
    tokens = _count(groups[0])
    engine.values["pool_tokens"] = min(tokens, engine.values.get("pool_tokens", tokens))


def _blocks(engine: EngineDraft, groups: Groups) -> None:
    blocks = int(groups[0] or 0)
    engine.values["num_gpu_blocks"] = min(blocks, engine.values.get("num_gpu_blocks", blocks))


OF_AN_ENGINE: Mapping[str, Callable[[EngineDraft, Groups], None]] = {
    "pool": _pool,
    # What follows from the pool; a line of the start all the same.
    "concurrency": lambda *_: None,
    "blocks": _blocks,
    "compiled": lambda engine, _: engine.see_graphs(is_cold=True),
    "compiled_before": lambda engine, _: engine.see_graphs(is_cold=False),
    "engine_up": lambda engine, _: engine.start(),
}


def _no_room_for_one(figures: Sequence[Printed], groups: Groups) -> str:
    if not figures:
        return f"the KV cache of one request of {_count(groups[0]):,} tokens does not fit"
    needed, available = figures
    fitting = f"; vLLM estimates that {_count(groups[3]):,} tokens fit" if groups[3] else ""
    return f"the KV cache of one request of {_count(groups[0]):,} tokens needs {needed}, and {available} are available{fitting}"


def _v0_no_room_for_one(_: Sequence[Printed], groups: Groups) -> str:
    return (
        f"one request may have {_count(groups[0]):,} tokens, and the KV cache holds {_count(groups[1]):,} (max_model_len is too "
        "large for it)"
    )


def _short(figures: Sequence[Printed], groups: Groups) -> str:
    if not figures:
        return "less memory of the GPU is free than the budget"
    free, total, requested = figures
    return (
        f"{free} of the GPU's {total} are free, and gpu_memory_utilization={groups[2]} asks for {requested}"
    )


def _external_short(figures: Sequence[Printed], groups: Groups) -> str:
    if not figures:
        return "the weights that another process holds are more than the budget"
    held, _, requested = figures
    return (
        f"another process holds {held} of weights, and gpu_memory_utilization={groups[2]} allows {requested}"
    )


def _grew(figures: Sequence[Printed], _: Groups) -> str:
    told = f" (from {figures[0]} to {figures[1]})" if figures else ""
    return f"another process gave memory of the GPU back while vLLM measured{told}"


def _out_of_memory(_: Sequence[Printed], groups: Groups) -> str:
    if groups[0] is None:
        return "the GPU ran out of memory"
    free = f", and {groups[2]} of {groups[1]} were free" if len(groups) > 1 and groups[2] is not None else ""
    return f"the GPU ran out of memory: {groups[0]} were asked for{free}"


FAILURE_SENTENCES: Mapping[str, Callable[[Sequence[Printed], Groups], str]] = {
    "no_room_for_one": _no_room_for_one,
    "v0_no_room_for_one": _v0_no_room_for_one,
    "no_blocks": lambda *_: "no memory is left for the KV cache: weights and overhead take the whole budget",
    "no_states": lambda _, groups: (
        f"max_num_seqs is {_count(groups[0]):,}, and the KV cache holds the Mamba states of {_count(groups[1]):,} requests"
    ),
    "no_token": lambda *_: "not even one token fits what is left for the KV cache",
    "short": _short,
    "external_short": _external_short,
    "grew": _grew,
    "grew_in_bytes": _grew,
    "out_of_memory": _out_of_memory,
    "not_started": lambda *_: (
        "the engine ended before it was up; no line of the log that is known gives the reason"
    ),
}
