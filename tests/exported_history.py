"""What kvheadroom's own metrics of starts look like in a Prometheus, and a Prometheus that has them: a double, and a real one."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvheadroom.capacity.calibration_key import CalibrationKey
from kvheadroom.sources.calibration_history import SAMPLE
from tests.doubles.http_server import Answer
from tests.doubles.prometheus_api import Asked, instants, matrix
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer

NOW = 1_800_000_000.0
TARGET = {"job": "kv", "instance": "gpu-7:9878"}
KEY = CalibrationKey(
    geometry="LlamaForCausalLM 0123456789ab",
    weight_format="bfloat16",
    gpu="H200",
    parallelism="tp2",
    release="0.33.0",
    settings="kv_cache_dtype=auto max_num_batched_tokens=8192 max_num_seqs=1024",
)
STARTED = 1_799_990_000
START = f"glm-a/0/{STARTED}"
OVERHEAD, ESTIMATED, BLOCK_BYTES, BLOCKS = 5_123_456_789, 4_900_000_000, 2_097_152, 50_001

Series = tuple[dict[str, str], Callable[[float], str | None]]
"""Labels with `__name__`, and the value so many seconds before NOW (below 0), None for none."""


def always(value: object) -> Callable[[float], str | None]:
    return lambda _: str(value)


def during(first: float, last: float, value: object) -> Callable[[float], str | None]:
    """Both ends included, in seconds before NOW."""
    return lambda at: str(value) if first <= at <= last else None


def sample(
    value: Callable[[float], str | None] | None = None,
    *,
    start: str = START,
    replica: str = "glm-a",
    key: CalibrationKey = KEY,
    target: Mapping[str, str] = TARGET,
    **changed: str,
) -> Series:
    """A series of the family."""
    labels = {
        "__name__": SAMPLE,
        **target,
        "replica": replica,
        "engine": "0",
        "model_name": "glm",
        "start": start,
        **{name: getattr(key, name) for name in CalibrationKey.__slots__},
        "edition": "1",
    }
    return labels | changed, value or always(OVERHEAD)


def beside(
    *,
    replica: str = "glm-a",
    target: Mapping[str, str] = TARGET,
    estimated: Callable[[float], str | None] | None = None,
    pool: Callable[[float], str | None] | None = None,
) -> list[Series]:
    """What stands beside it of the same engine."""
    engine = {**target, "replica": replica, "engine": "0", "model_name": "glm"}
    pool = pool or always(BLOCKS * BLOCK_BYTES)
    found: list[Series] = [
        (
            engine | {"__name__": "kvheadroom_predicted_memory_bytes", "term": "overhead"},
            estimated or always(ESTIMATED),
        ),
        (engine | {"__name__": "kvheadroom_observed_pool_bytes"}, pool),
        (engine | {"__name__": "kvheadroom_observed_blocks"}, always(BLOCKS)),
    ]
    return found


def prometheus_with(*series: Series) -> Callable[[Asked], Answer]:
    """A Prometheus that has these: each of the queries that are made is about the first metric in it."""

    def answer(asked: Asked) -> Answer:
        asked_for = re.fullmatch(r"(?:group by .*last_over_time\(|(0) \* )?([\w:]+)[ {].*", asked["query"])
        assert asked_for is not None
        found = []
        for labels, value in series:
            if labels["__name__"] == asked_for[2]:
                points = [(at, text) for at in instants(asked) if (text := value(at - NOW)) is not None]
                points = [(at, "0" if asked_for[1] else text) for at, text in points]
                if points:
                    found.append((labels, points))
        return matrix(*found)

    return answer


def ended_lately() -> float:
    """A whole minute of which Prometheus takes the history in."""
    return float(int(time.time()) // 60 * 60 - 600)


@contextmanager
def real_prometheus_with(
    binaries: Binaries,
    folder: Path,
    *series: Series,
    ends_at: float | None = None,
    seconds: int = 3600,
    every: int = 15,
) -> Iterator[tuple[PrometheusServer, float]]:
    """One with a past hour of these, or as long as said; and when it ends, in unix seconds: NOW of the series."""
    ends_at = ended_lately() if ends_at is None else ends_at
    with (folder / "history").open("w") as file:
        for labels, value in series:
            shown = ",".join(f'{name}="{text}"' for name, text in labels.items() if name != "__name__")
            for at in range(-seconds, 1, every):
                text = value(at)
                if text is not None:
                    file.write(f"{labels['__name__']}{{{shown}}} {text} {ends_at + at:.3f}\n")
        file.write("# EOF\n")
    command = f"tsdb create-blocks-from openmetrics -q {folder}/history {folder}/blocks".split()
    subprocess.run([binaries.promtool, *command], check=True, capture_output=True)
    with PrometheusServer(binaries, [], blocks=folder / "blocks") as server:
        yield server, ends_at
