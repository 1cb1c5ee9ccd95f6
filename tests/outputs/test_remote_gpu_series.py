"""Whatever this machine and the DCGM-exporters of others tell: what is exported of their GPUs holds together."""

import random
import re
from collections.abc import Mapping
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.capacity.fleet import withhold_stale
from kvheadroom.capacity.gpus import GpuReading
from kvheadroom.capacity.remote_gpus import ExporterStatus
from kvheadroom.monitor.board import Board
from kvheadroom.outputs.check_report import check_report
from kvheadroom.outputs.json_report import status_report, to_json
from kvheadroom.outputs.prometheus import exposition
from kvheadroom.sources.dcgm import NoGpusError, parse_dcgm_page
from tests.dcgm_pages import gpu, page, series
from tests.outputs.pages import all_pages
from tests.outputs.test_gpu_series import some_claims, some_reading

NOW = 1000.0
CASES = 300
# Those of this machine (some_reading) and others.
UUIDS = ["GPU-00000000", "GPU-10000001", "GPU-00000002", "GPU-77777777", "GPU-88888888", "GPU-88888889"]
PODS = ["v/a-1", "v/a-2", "v/b-1"]


def some_gpu(random: random.Random) -> Mapping[str, list[str]]:
    pod = random.choice([*PODS, "/"])
    namespace, _, name = pod.partition("/")
    labels = series(
        random.choice(UUIDS),
        random.randrange(3),
        instance=random.choice(["", "", "3", "13"]),
        pod=name,
        namespace=namespace,
        **random.choice([{}, {}, {"vgpu": "1"}]),
    )
    told = {name: random.randrange(1000) for name in ("free", "used", "reserved", "total")}
    return gpu(
        labels,
        xid=random.choice([0, 79]),
        **{name: told[name] for name in random.sample(list(told), random.randrange(5))},
    )


def some_exporter(random: random.Random, index: int) -> ExporterStatus:
    source = f"dcgm_exporters[{index}]"
    text = page(*(some_gpu(random) for _ in range(random.randrange(6))))
    status = ExporterStatus(source=source, url=f"http://node-{index}:9400/metrics", interval_seconds=15.0)
    try:
        gpus, failures = parse_dcgm_page(text.encode(), source, NOW)
    except NoGpusError:
        return status
    return replace(status, taken_at=NOW - random.choice([1, 44, 46]), gpus=gpus, failures=failures)


def exported(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.name.startswith("kvheadroom_gpu_memory_"):
                key = (sample.labels["replica"], sample.labels["gpu"])
                found.setdefault(family.name.removeprefix("kvheadroom_gpu_memory_"), {})[key] = sample.value
    return found


def test_what_is_exported_of_the_gpus_of_many_machines_holds_together(seeded: random.Random) -> None:
    seen = {
        "config": 0,
        "pod": 0,
        "not_here": 0,
        "unassigned": 0,
        "silent": 0,
        "unknown": 0,
        "failed": 0,
        "both": 0,
    }
    for _ in range(CASES):
        urls = [f"http://127.0.0.1:{8000 + number}" for number in range(seeded.randrange(1, 4))]
        reading: GpuReading | None = seeded.choice([None, some_reading(seeded, urls)])
        more = ["GPU-77777777", "GPU-8888888", "MIG-GPU-77777777/3", "MIG-GPU-77777777/3/0"]
        claims = tuple(
            replace(
                claim,
                gpus=tuple({*claim.gpus, *seeded.sample(more, seeded.randrange(2))}),
                pod=seeded.choice([None, *PODS, "v/a-*", "v/b*"]),
            )
            for claim in some_claims(seeded, urls)
        )
        exporters = tuple(some_exporter(seeded, index) for index in range(seeded.randrange(4)))
        board = Board(())
        board.set_replicas((), (), seeded.choice([None, None, "0/2"]))
        board.claim_gpus(claims)
        if reading is not None:
            board.publish_gpus(replace(reading, taken_at=NOW), 5.0)
        board.publish_exporters(exporters)
        fleet = withhold_stale(board.fleet, NOW)
        remote = fleet.remote_gpus
        local = set() if reading is None else {gpu.gpu for gpu in reading.gpus} | set(reading.divided)
        told = {gpu.gpu for exporter in exporters for gpu in exporter.gpus}
        names = [gpu.gpu for gpu in remote.gpus]
        assert len(names) == len(set(names))
        assert not set(names) & local
        assert not {failure.gpu for failure in remote.failures} & set(names)
        by_replica = {claim.replica: claim for claim in claims}
        for one in remote.runs.assigned:
            seen[one.by] += 1
            assert bool(by_replica[one.replica].gpus) == (one.by == "config")
        seen["both"] += len(told & local)
        seen["not_here"] += len(remote.runs.not_here)
        seen["unassigned"] += len(remote.runs.unassigned)
        seen["silent"] += sum(str(failure.reason) == "exporter_down" for failure in remote.failures)
        seen["failed"] += len(remote.failures)
        text = exposition(fleet, NOW, "")[0].decode()
        lines = re.findall(r"^(kvheadroom_\S+?\{.*\}) ", text, re.MULTILINE)
        assert len(lines) == len(set(lines)), sorted(lines)
        numbers = exported(text)
        for gpu_ in remote.gpus:
            seen["unknown"] += bool(gpu_.unknown)
            # What is missing is told why.
            assert (None in (gpu_.total_bytes, gpu_.free_bytes, gpu_.used_bytes)) <= bool(gpu_.unknown) or (
                gpu_.total_bytes is not None
            )
            for replica in fleet.served().get(gpu_.gpu, [""]):
                key = (replica, gpu_.gpu)
                parts = [
                    numbers.get(name, {}).get(key) for name in ("reserved_bytes", "used_bytes", "free_bytes")
                ]
                total = numbers.get("total_bytes", {}).get(key)
                assert total == gpu_.total_bytes
                known = [part for part in parts if part is not None]
                if total is not None:
                    assert sum(known) <= total + 4 * 2**20
                    assert len(known) < 3 or sum(known) == total
        assert all_pages(fleet, NOW)
        assert to_json(status_report(fleet, NOW, None))
        assert list(check_report(fleet))
    assert all(seen.values()), seen
