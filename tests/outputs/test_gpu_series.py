"""Whatever a machine's GPUs, servers and config may be: what is exported of them holds together."""

import random
import re

from kvheadroom.capacity.fleet import FleetAssessment, GpuAssessment
from kvheadroom.capacity.gpu_assignment import GpuClaim, assign_gpus
from kvheadroom.capacity.gpus import (
    GpuFailure,
    GpuFailureReason,
    GpuProcess,
    GpuProcesses,
    GpuReading,
    GpuSnapshot,
    ServerPlace,
    ServerProcesses,
    XidCount,
)
from kvheadroom.outputs.check_report import check_report
from kvheadroom.outputs.json_report import status_report, to_json
from kvheadroom.outputs.prometheus import exposition
from tests.outputs.pages import all_pages

NOW = 1000.0
CASES = 300
PIDS = range(1, 9)


def some_snapshot(random: random.Random, gpu: str, index: int, parent: str | None = None) -> GpuSnapshot:
    reserved = random.choice([None, random.randrange(100)])
    used, free = random.randrange(1000), random.randrange(1000)
    return GpuSnapshot(
        gpu=gpu,
        name="NVIDIA <H200>",
        index=index,
        total_bytes=(reserved or 0) + used + free or 1,
        reserved_bytes=reserved,
        used_bytes=used,
        free_bytes=free,
        accounting="v1" if reserved is None else "v2",
        parent=parent,
        gpu_instance=None if parent is None else index,
        compute_instance=None if parent is None else 0,
    )


def some_reading(random: random.Random, urls: list[str]) -> GpuReading:
    snapshots: list[GpuSnapshot] = []
    failures: list[GpuFailure] = []
    divided: list[str] = []
    listed: list[tuple[int, str]] = []
    for index in range(random.randrange(5)):
        gpu = f"GPU-{index % 2}000000{index}"
        listed.append((random.choice([index, index, 0]), gpu))
        kind = random.choice(["whole", "whole", "divided", "failed", "nameless"])
        if kind == "whole":
            snapshots.append(some_snapshot(random, gpu, index))
        elif kind == "divided":
            divided.append(gpu)
            snapshots += [
                some_snapshot(random, f"MIG-{index}000000{part}", index, gpu)
                for part in range(random.randrange(3))
            ]
        else:
            failures.append(
                GpuFailure(gpu if kind == "failed" else None, GpuFailureReason.LOST, "it is gone")
            )
    processes = tuple(
        GpuProcesses(
            gpu=gpu.gpu,
            used_bytes=gpu.used_bytes if gpu.accounting == "v2" else None,
            processes=tuple(
                GpuProcess(pid, random.choice([None, random.randrange(400)]))
                for pid in random.sample(PIDS, random.randrange(4))
            ),
        )
        for gpu in snapshots
    )
    servers = tuple(
        ServerProcesses(place=ServerPlace(url), unknown="nobody knows")
        if random.random() < 0.3
        else ServerProcesses(place=ServerPlace(url), pids=frozenset(random.sample(PIDS, 3)))
        for url in urls
    )
    return GpuReading(
        taken_at=NOW,
        duration_seconds=0.0,
        gpus=tuple(snapshots),
        failures=tuple(failures),
        driver_absent=not (snapshots or failures or divided) and random.random() < 0.5,
        divided=tuple(divided),
        first_listed=tuple(sorted(listed)),
        processes=processes,
        processes_taken_at=NOW,
        xids=tuple(XidCount(gpu.gpu, 79, 1) for gpu in snapshots if random.random() < 0.3),
        servers=servers,
    )


def some_claims(random: random.Random, urls: list[str]) -> tuple[GpuClaim, ...]:
    names: list[str | int] = [0, 1, 2, "GPU-0000000", "GPU-10000001", "MIG-00000000", "MIG-GPU-10000001/1/0"]
    return tuple(
        GpuClaim(
            replica=f"r{number}",
            place=ServerPlace(url),
            gpus=tuple(random.sample(names, random.randrange(3))),
            on_cpu=random.random() < 0.1,
        )
        for number, url in enumerate(urls)
    )


def test_what_is_exported_of_any_gpus_holds_together(seeded: random.Random) -> None:
    seen = {"config": 0, "process": 0, "others": 0, "not_here": 0, "unassigned": 0}
    for _ in range(CASES):
        urls = [f"http://127.0.0.1:{8000 + number}" for number in range(seeded.randrange(1, 4))]
        reading, claims = some_reading(seeded, urls), some_claims(seeded, urls)
        runs = assign_gpus(claims, reading)
        gpus = {gpu.gpu: gpu for gpu in reading.gpus}
        said = {claim.replica: claim for claim in claims}
        failing = {failure.gpu for failure in reading.failures}
        listed = {gpu for _, gpu in reading.first_listed}
        for one in runs.assigned:
            seen[one.by] += 1
            assert one.gpu in gpus or one.gpu in failing or one.gpu in listed
            assert one.gpu not in reading.divided
            assert (one.by == "config") == bool(said[one.replica].gpus)
        pairs = [(one.gpu, one.replica) for one in runs.assigned]
        assert len(pairs) == len(set(pairs))
        for used in runs.others:
            seen["others"] += 1
            assert (used.gpu, used.replica) in pairs
            assert 0 <= used.used_bytes <= gpus[used.gpu].used_bytes
        seen["not_here"] += len(runs.not_here)
        for silent in runs.unassigned:
            seen["unassigned"] += 1
            assert silent.replica not in {replica for _, replica in pairs}
        # None is assigned and given up at once, and none is forgotten where a driver is.
        if not reading.driver_absent:
            told = {replica for _, replica in pairs} | {one.replica for one in runs.unassigned}
            assert told >= {claim.replica for claim in claims if not claim.gpus and not claim.on_cpu}
        fleet = FleetAssessment((), gpus=GpuAssessment(reading=reading, interval_seconds=5.0, runs=runs))
        text = exposition(fleet, NOW, "")[0].decode()
        series = re.findall(r"^(kvheadroom_\S+?\{.*\}) ", text, re.MULTILINE)
        assert len(series) == len(set(series)), series
        memory = re.findall(r'^kvheadroom_gpu_memory_total_bytes\{gpu="([^"]+)"', text, re.MULTILINE)
        assert set(memory) == set(gpus)
        assert all_pages(fleet, NOW)
        assert to_json(status_report(fleet, NOW, None))
        assert list(check_report(fleet))
    assert all(seen.values()), seen
