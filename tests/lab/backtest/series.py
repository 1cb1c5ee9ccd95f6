"""Hand-made histories, short to write."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvheadroom.lab.backtest.events import EngineSample, Episode, Stretch, date_rises


def samples(
    preemptions: Sequence[float | None],
    *,
    running: Sequence[float | None] | None = None,
    waiting: Sequence[float | None] | None = None,
    finished: Sequence[float | None] | None = None,
    usage: Sequence[float | None] | None = None,
    every_seconds: float = 1.0,
) -> tuple[EngineSample, ...]:
    """A sample every so often; what is not said stays the same all the time."""
    same = [0.0] * len(preemptions)
    rows = zip(preemptions, running or same, waiting or same, finished or same, usage or same, strict=True)
    return tuple(
        EngineSample(
            at=number * every_seconds,
            preemptions_total=count,
            requests_running=run,
            requests_waiting=wait,
            finished_total=done,
            kv_usage_ratio=use,
        )
        for number, (count, run, wait, done, use) in enumerate(rows)
    )


def seen(starts_at: float, ends_at: float) -> Stretch:
    """A stretch of which only the ends matter."""
    return Stretch((EngineSample(at=starts_at), EngineSample(at=ends_at)))


def episode(*events: float) -> Episode:
    return Episode(events)


def find_events(samples: Iterable[EngineSample]) -> tuple[float, ...]:
    """To when each rise is dated."""
    return tuple(rise.dated_at for rise in date_rises(samples))


def firing(text: str) -> list[bool | None]:
    """`.` silent, `#` firing, `?` not known; a letter per tick."""
    return [{".": False, "#": True, "?": None}[letter] for letter in text]


def page(
    usage: float = 0.5,
    *,
    running: float = 1,
    waiting: float = 0,
    preemptions: float | None = 0,
    finished: float = 0,
    engine: str = "0",
    model: str = "m",
    more: str = "",
) -> str:
    """A page of one engine with 101 blocks of 16 tokens."""
    labels = f'engine="{engine}",model_name="{model}"'
    counter = "" if preemptions is None else f"vllm:num_preemptions_total{{{labels}}} {preemptions}\n"
    return (
        f"vllm:num_requests_running{{{labels}}} {running}\n"
        f"vllm:num_requests_waiting{{{labels}}} {waiting}\n"
        f"vllm:kv_cache_usage_perc{{{labels}}} {usage}\n"
        f"{counter}"
        f'vllm:request_success_total{{{labels},finished_reason="stop"}} {finished}\n'
        f'vllm:request_success_total{{{labels},finished_reason="length"}} 1\n'
        f'vllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="101"}} 1\n{more}'
    )


def recording(path: Path, *pages: str | None, every_seconds: float = 1.0, start: float = 1000.0) -> Path:
    """A file with a page every so often; None: nothing was recorded there."""
    entries: list[dict[str, object]] = [{"origin": {"interval_seconds": every_seconds}}]
    entries += [
        {"t": start + number * every_seconds, "text": text}
        for number, text in enumerate(pages)
        if text is not None
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)
    return path
