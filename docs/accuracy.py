"""Writes docs/accuracy.md: predictions beside what public start-up logs printed, and beside what other tools say.

`python -m docs.accuracy` in the root of the clone writes it, `--check` tells whether the committed one is current.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tests.accuracy.calibrated_pools import carried_pairs, public_pairs, worst
from tests.accuracy.overheads import LINES as LEDGERS
from tests.accuracy.overheads import judged, median_error, share_within
from tests.accuracy.startup_logs import (
    CASES,
    GIB,
    HERE,
    LEFT_OUT,
    LOGS,
    MODELS,
    Comparison,
    Figures,
    compare,
)
from tests.capacity.truth import BY_ID, layout_of

PAGE = Path(__file__).parent / "accuracy.md"

INTRODUCTION = """\
# How accurate predictions are

Made by `make golden` from `tests/accuracy/`; `tests/capacity/test_startup_logs.py` and `test_overhead.py` hold it. Three comparisons that
this project did not choose: what vLLM printed on people's own servers of its cache and of its memory, and what other tools say on the
same models. The
comparison with vLLM's own planning code is in [capacity-model.md](capacity-model.md).

## Against public start-up logs

At start vLLM prints how many GiB it has for the KV cache, and then what follows from them: tokens, how many requests of
the longest length fit, or, when it refuses to start, the GiB that one request needs and the longest length that would
fit. We predict the second from the first, the model's config.json, the flags, the GPU and the release. How many GiB
are left after weights and overhead is not part of it, but of the section after this.

The GiB are printed with two decimals, so the bytes are only known within 0.01 GiB. *Inside* means: some number of bytes
in that interval gives every figure of the line exactly as printed, all at once. The predicted figures shown are those
for the printed GiB, in the middle of the interval; the difference is the largest of the line's figures.

*Explained* means: not with what the log tells, but exactly with the addition that is named, which the log does not show.
That is a guess that fits, and no proof. *Outside* is neither.
"""

RANKS = """\
With tensor parallelism the log may show the bytes of one rank while the rank with the fewest decides. A line may be
explained by that gap, to 2% of its bytes, where every figure comes out for fewer bytes; the gap is shown. None of the
lines that must come out needs it.
"""


def accuracy_page() -> str:
    """The whole page."""
    found = [compare(line) for line in CASES]
    bar = [one for one in found if one.log["bar"]]
    others = sorted((one for one in found if not one.log["bar"]), key=lambda one: one.line)
    lines = [INTRODUCTION, _counts(bar, others), RANKS]
    lines += ["### Lines that must come out", "", *_table(bar)]
    lines += ["### Other lines whose geometry is known", "", *_table(others)]
    lines += ["### Lines left out", "", *_left_out()]
    lines += ["### Where the geometry is from", "", *_models(), *_overhead(), *_calibrated(), *_peers()]
    return "\n".join(lines).rstrip() + "\n"


def _counts(bar: Iterable[Comparison], others: Iterable[Comparison]) -> str:
    bar, others = list(bar), list(others)
    rows = [
        "| lines | count | inside | explained | outside | not predicted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, some in (
        ("must come out: model, geometry and figures are public and clear", bar),
        ("others whose geometry is known", others),
    ):
        verdicts = Counter(one.verdict for one in some)
        counts = (verdicts[word] for word in ("inside", "explained", "outside", "not predicted"))
        rows.append(f"| {name} | {len(some)} | {' | '.join(map(str, counts))} |")
    rows.append(f"| left out, with the reason | {len(LEFT_OUT)} | | | | |")
    rows.append(f"| all | {len(LOGS)} | | | | |")
    return "\n".join(rows) + "\n"


def _table(found: Iterable[Comparison]) -> list[str]:
    rows = [
        "| line | log | model | vLLM | GPU | GiB | printed | predicted | difference | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        log = one.log
        cells = (
            one.line,
            _source(log),
            _name(log),
            _release(one),
            _gpu(one),
            log["available_kv_gib"],
            _words(one.printed),
            _words(one.predicted) if one.predicted else "-",
            _difference(one),
            _verdict(one),
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return [*rows, ""]


def _source(log: Mapping[str, Any]) -> str:
    name = log["thread"].replace("|", "/")
    return f"[{name}]({log['url']})" if log["url"] else str(name)


def _release(one: Comparison) -> str:
    said, taken = one.log["vllm_version"] or "not given", one.case.get("vllm_version")
    return f"{said}; rules of {taken or '0.33'}"


def _gpu(one: Comparison) -> str:
    parallel = one.log["gpus"] or "not given"
    parallel = "" if parallel == "1" else f", {parallel}"
    stands_for = f", planned as {one.case['gpu']}" if "gpu_is" in one.case else ""
    return f"{_spoken(one.log['gpu'] or 'null')}{parallel}{stands_for}"


def _words(figures: Figures) -> str:
    forms = {
        "tokens": "{:,} tokens",
        "longest": "{:,} at most",
        "needed_gib": "{:.2f} GiB needed",
        "concurrency": "{:.2f}x",
        "block": "blocks of {:,}",
    }
    words = [forms[name].format(value) for name, value in figures.items() if name in forms]
    words += ["starts" if value else "refused" for name, value in figures.items() if name == "starts"]
    return "; ".join(words)


def _difference(one: Comparison) -> str:
    ratio = one.difference_ratio
    if ratio is None:
        return "-"
    return "0" if ratio == 0 else "below 0.01%" if abs(ratio) < 0.0001 else f"{ratio:+.2%}"


def _verdict(one: Comparison) -> str:
    rank = ""
    if one.slowest_rank_bytes is not None:
        gap = one.log["available_kv_gib"] - one.slowest_rank_bytes / GIB
        rank = f"by {gap:.2f} GiB that the slowest rank has less"
    reasons = (f"*{one.verdict}*", one.unknown, rank, one.case.get("because", ""))
    return ": ".join(reason for reason in reasons if reason)


def _left_out() -> list[str]:
    by_reason: dict[str, list[int]] = {}
    for line, reason in LEFT_OUT.items():
        by_reason.setdefault(reason, []).append(line)
    rows = [f"{len(LEFT_OUT)} of {len(LOGS)}, by reason:", ""]
    for reason, lines in by_reason.items():
        rows += [f"**{len(lines)}: {reason}.**", ""]
        rows += [f"- {line}: {_source(LOGS[line - 1])}, {_name(LOGS[line - 1])}" for line in sorted(lines)]
        rows.append("")
    return rows


def _name(log: Mapping[str, Any]) -> str:
    return _spoken(log["model"])


def _spoken(name: str) -> str:
    return name.replace("null", "not named")


def _models() -> list[str]:
    used = Counter(case["model"] for case in CASES.values())
    rows = ["| model | lines | source |", "| --- | --- | --- |"]
    rows += [f"| {name} | {used[name]} | {model['source']} |" for name, model in MODELS.items()]
    return [*rows, ""]


def _peers() -> list[str]:
    peers = yaml.safe_load((HERE / "peers.yaml").read_text(encoding="utf-8"))
    truth = peers["truth"]
    lines = [
        "## Against other tools",
        "",
        "Bytes that one more token of a long session takes on one GPU, fp8 cache, and what tools say when asked for 131,072",
        "tokens. vLLM's figure is the sum over its layers; ours is computed when this page is made (B200 or H100, 0.33).",
        "Tools were installed and run in November 2026, but where it says that their source was read. A text is what they",
        "say instead of a number, or for what the number holds.",
        "",
        f"| tool | {' | '.join(one['model'] for one in truth)} | measured |",
        f"| --- |{' --- |' * (len(truth) + 1)}",
        f"| vLLM 0.33.0 | {' | '.join(f'''{one['bytes_per_token']:,}''' for one in truth)} | its own planning code |",
    ]
    ours = [_our_bytes(one["case"]) for one in truth]
    lines.append(f"| kvheadroom | {' | '.join(map(_against, ours, truth))} | when this page was made |")
    for tool in peers["tools"]:
        figures = " | ".join(map(_against, tool["figures"], truth))
        lines.append(f"| {tool['tool']} | {figures} | {'source read' if tool.get('read') else 'run'} |")
    lines.append("")
    lines += [f"- {one['model']}: {one['how']}." for one in truth]
    return lines


def _our_bytes(case: Mapping[str, Any]) -> float:
    row = BY_ID[case["row"]]
    changed = {name: case[name] for name in ("flags", "gpu") if name in case}
    return layout_of({**row, **changed}).bytes_per_token


def _against(figure: Any, truth: Mapping[str, Any]) -> str:
    if isinstance(figure, str):
        return figure
    ratio = figure / truth["bytes_per_token"] - 1
    off = "" if ratio == 0 else f" ({ratio:+.1%})" if abs(ratio) < 1 else f" ({ratio + 1:.1f} times)"
    return f"{figure:,}{off}"


OVERHEAD = """\
## The overhead, against public memory ledgers

What a GPU needs beside weights and KV pool is estimated from the model's shapes and the scheduler's limits
(`capacity/overhead.py`). `tests/accuracy/memory_ledgers.jsonl` has what people's logs printed; measured is budget - weights - pool. Each
line is estimated with constants fitted to all the other lines. Error: |estimated - measured| in percent of the GPU's memory.
"""
SWEEP = "llm-d-incubation/llm-d-planner PR"


def _overhead() -> list[str]:
    every = judged()
    sweep = [one for one in every if str(one.start.line["source"]).startswith(SWEEP)]
    others = [one for one in every if one not in sweep]
    several = [one for one in every if one.start.facts.tensor_parallel_size.value > 1]
    groups = {
        "all": every,
        "one sweep of 40 models, vLLM 0.19.0 on H100": sweep,
        "all others": others,
        "tensor parallelism": several,
        "from 0.20 on, where CUDA graphs are taken off": [
            one for one in every if one.start.facts.rules.subtracts_graphs
        ],
    }
    lines = [
        OVERHEAD,
        "| starts | n | median error | within 2% | median error of 12 GB flat |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, group in groups.items():
        flat = median_error(lambda one: one.flat_error_ratio, group)
        ours = median_error(lambda one: one.error_ratio, group)
        lines.append(f"| {name} | {len(group)} | {ours:.2%} | {share_within(0.02, group):.0%} | {flat:.1%} |")
    left = Counter(str(line["left_out"]) for line in LEDGERS if "left_out" in line)
    lines += [
        "",
        f"Left out, of {len(LEDGERS)} lines that tell budget, weights and pool: "
        + "; ".join(f"{count} ({reason})" for reason, count in left.most_common())
        + ".",
        "",
        "The ten that are furthest off:",
        "",
        "| log | model | vLLM | GPU | measured | estimated | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in sorted(every, key=lambda one: -abs(one.error_ratio))[:10]:
        line = one.start.line
        lines.append(
            f"| {line['source']} | {line['model']}, TP {line['tp']} | {line.get('release', 'not given')} | {line.get('gpu', 'not given')} | "
            f"{one.start.measured_bytes / GIB:.2f} GiB | {one.estimate.total_bytes / GIB:.2f} GiB | {one.error_ratio:+.1%} |"
        )
    return [*lines, ""]


CALIBRATED = """\
## The pool after one start, on public deployments that were started twice

The same model, printed weights, GPU, parallel sizes, release and flags in two logs: the second start's pool by the overhead of the first
alone (docs/calibration.md), beside what was predicted before. Two ranks of one start and copies of one log are no pair.
"""


def _calibrated() -> list[str]:
    pairs = public_pairs()
    lines = [
        CALIBRATED,
        f"{len(pairs)} pairs; the largest error after one start is {worst(pairs):.2%} of the pool.",
        "",
        "| seen | predicted | model | utilization | pool | before | after one start |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pair in pairs:
        seen, then = pair.seen, pair.predicted
        lines.append(
            f"| {_short(seen['source'])} | {_short(then['source'])} | {then['model']}, TP {then['tp']} | {seen['util']}, then {then['util']} | "
            f"{then['kv_gib']:.2f} GiB | {pair.raw_error_ratio:+.2%} | {pair.error_ratio:+.2%} |"
        )
    return [*lines, "", *_carried()]


CARRIED = """\
Carried over to settings that were not measured, of public starts of one model, each from each other: estimate(new) + measured - estimate(old),
against the estimate alone, as shares of the pool. So it is carried from parallel sizes and flags to others, and not from GPU to GPU or from
release to release.
"""


def _carried() -> list[str]:
    lines = [
        CARRIED,
        "| pairs that differ in | n | median error, carried | median error of the estimate alone | measured within the interval |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, near in (("parallel sizes or flags", True), ("GPU or release too", False)):
        pairs = carried_pairs(near=near)
        carried = median(abs(one.carried_error_ratio) for one in pairs)
        raw = median(abs(one.raw_error_ratio) for one in pairs)
        share = sum(one.is_within for one in pairs) / len(pairs)
        lines.append(f"| {name} | {len(pairs)} | {carried:.2%} | {raw:.2%} | {share:.0%} |")
    return [*lines, ""]


def _short(source: str) -> str:
    """The file alone, of a source that names its folders."""
    return source.rpartition("/")[2] if source.endswith(".log") else source


def main() -> int:
    """Write or check the page."""
    text = accuracy_page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print("docs/accuracy.md: not what the code says; run `make golden`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
