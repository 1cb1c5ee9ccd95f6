"""Writes the reference pages from the code: docs/metrics.md, docs/alerts.md, docs/command-line.md and docs/gpus.md.

`python docs/reference.py` writes them, `--check` tells whether the committed ones are current.
"""

import argparse
import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent


def metrics_page() -> str:
    """Every exported metric, from the catalogue."""
    from kvheadroom.outputs.metric_catalogue import CATALOGUE

    lines = [
        "# Metrics",
        "",
        "Made from `outputs/metric_catalogue.py` by `make golden`. Base units; ratios are 0-1. What is not known has",
        "no sample: never 0, -1 or NaN. `replica` is the server (its name in the config, else host:port), `engine`",
        "vLLM's data-parallel rank: each engine has a KV pool of its own.",
        "",
        "Series per engine: about 48, and 4 for each length in `session_tokens`. Per replica: about 9. Per GPU: about 8.",
        "Memory term by term adds 13 to an engine whose pool is what HBM leaves over, and 6 to a GPU that serves one replica.",
        "Warm sessions ([warm-sessions.md](warm-sessions.md)) add 16 to an engine and 4 for each length, a tier in host memory as much again.",
        "What was learned ([calibration.md](calibration.md)) adds 13 to an engine, and one for each length.",
        "",
        "| metric | type | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{metric.full_name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |"
        for metric in CATALOGUE
    ]
    return "\n".join(lines) + "\n"


def alerts_page() -> str:
    """Every alert and recording rule, from the rules; when an alert fires, from the first lines of its runbook."""
    import yaml

    rules, runbooks = DOCS.parent / "dashboards" / "rules", DOCS.parent / "dashboards" / "runbooks"
    alerts = yaml.safe_load((rules / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    recording = yaml.safe_load((rules / "recording.yaml").read_text(encoding="utf-8"))["groups"]
    lines = [
        "# Alerts and recording rules",
        "",
        "Made from `dashboards/rules` and `dashboards/runbooks` by `make golden`. All thresholds are in the rules.",
        "",
        "critical pages somebody now, warning is for today, info is for dashboards. Each alert leads to its runbook, which the daemon",
        "serves: `http://DAEMON/runbooks/NAME`. How to load the rules: [quickstarts.md](quickstarts.md#a-fleet-with-prometheus-alertmanager-and-grafana); why they are as they are:",
        "[decisions/0017-alerts.md](decisions/0017-alerts.md).",
    ]
    for group in alerts:
        lines += ["", f"## {group['name']}", "", "| alert | severity | when |", "| --- | --- | --- |"]
        for rule in group["rules"]:
            name = rule["alert"]
            runbook = (runbooks / f"{name}.md").read_text(encoding="utf-8")
            when = " ".join(runbook.partition("## Meaning\n\n")[2].partition("\n\n")[0].split())
            lines.append(
                f"| [{name}](../dashboards/runbooks/{name}.md) | {rule['labels']['severity']} | {when} |"
            )
    lines += [
        "",
        "## Recording rules",
        "",
        "For dashboards and service levels; no alert needs them. Two daemons on one engine count once.",
        "",
        "| metric | expression |",
        "| --- | --- |",
    ]
    lines += [
        f"| `{rule['record']}` | `{' '.join(rule['expr'].split())}` |"
        for group in recording
        for rule in group["rules"]
    ]
    return "\n".join(lines) + "\n"


def command_page() -> str:
    """`--help` of every command."""
    from kvheadroom.cli import make_parser

    # argparse wraps to the terminal's width; the page must not depend on it.
    os.environ["COLUMNS"] = "110"
    parser = make_parser()
    pages = {"kvheadroom": parser.format_help()}
    for action in parser._actions:  # noqa: SLF001  argparse offers no other way to its commands
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            pages |= {f"kvheadroom {name}": command.format_help() for name, command in action.choices.items()}
    text = "# Command line\n\nMade from `--help` by `make golden`.\n"
    for name, help_text in pages.items():
        text += f"\n## {name}\n\n```text\n{help_text.rstrip()}\n```\n"
    return text


def gpus_page() -> str:
    """Every GPU of the catalogue with its figures, and where each was seen."""
    from kvheadroom.capacity.gpu_catalogue import GPUS
    from kvheadroom.capacity.gpu_figures import CARDS
    from kvheadroom.capacity.gpu_names import ALIASES, NOT_MODELLED

    lines = [
        "# GPUs",
        "",
        "Made from `capacity/gpu_figures.py` by `make golden`. Write a name in the config as `gpu: H100`, or what",
        "`nvidia-smi -L` calls the card; case, spaces, hyphens and a leading NVIDIA or GeForce do not matter. For a card",
        "that is not here leave `gpu` out and set `hbm_bytes` to `torch.cuda.mem_get_info()[1]`.",
        "",
        "Three totals, and they differ. vLLM budgets with CUDA's. NVML's is what nvidia-smi shows: it counts what the",
        "driver reserves, and it decides the default batch. GB on the box are 10^9 bytes, more or less. GiB is 2^30 bytes,",
        "MiB 2^20. The CUDA total moves by some MiB with the driver, so a budget made of it is off by up to about 0.1 GiB,",
        "on a GH200 by up to 0.5. Switching ECC changes the totals of cards with GDDR by several per cent. `hbm_bytes` of",
        "your own is exact. Under Windows and WSL CUDA's total is NVML's (seen on RTX 3090, RTX 4090 and RTX PRO 6000): set",
        "`hbm_bytes` there.",
        "",
        "| name | compute capability | CUDA total as taken, bytes | in GiB | NVML total, MiB | GB on the box | tokens, requests at once |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, gpu in CARDS.items():
        major, minor = gpu.capability
        cuda, nvml, batch = gpu.cuda_total_bytes, gpu.nvml_total_bytes, gpu.batch
        cells = (
            name,
            f"{major}.{minor}",
            "not known" if cuda is None else f"{cuda:,}",
            "not known" if cuda is None else f"{cuda / 2**30:.2f}",
            "not known" if nvml is None else f"{nvml // 2**20:,}",
            "sellers differ" if gpu.marketed_gb is None else f"{gpu.marketed_gb:g}",
            f"{batch.max_num_batched_tokens:,}, {batch.max_num_seqs:,}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Where the figures were seen", ""]
    lines += ["`owner/repository#number` is a thread on GitHub. nvidia-smi shows whole MiB.", ""]
    lines += [f"- **{name}**: {gpu.source}. NVML: {gpu.nvml_source}." for name, gpu in CARDS.items()]
    lines += ["", "## Names", ""]
    for name, gpu in GPUS.items():
        called = [*gpu.nvml_names, *(alias for alias, target in ALIASES.items() if target == name)]
        also = f"also {', '.join(called)}" if called else ""
        lines.append(f"- **{name}**: {'; '.join(filter(None, ('' if name in CARDS else gpu.source, also)))}.")
    lines += ["", "## Known, but not modelled", ""]
    for reason in dict.fromkeys(NOT_MODELLED.values()):
        lines.append(f"- {', '.join(name for name, why in NOT_MODELLED.items() if why == reason)}: {reason}.")
    return "\n".join(lines) + "\n"


PAGES = {
    "metrics.md": metrics_page,
    "alerts.md": alerts_page,
    "command-line.md": command_page,
    "gpus.md": gpus_page,
}


def main() -> int:
    """Write or check the pages."""
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"docs/{', docs/'.join(stale)}: not what the code says; run `make golden`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
