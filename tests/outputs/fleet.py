"""A fleet with everything in it, made of recorded pages: what the outputs are tested on."""

from dataclasses import replace

from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.calibration import Calibration, calibrate
from kvheadroom.capacity.calibration_key import CalibrationKey, key_of
from kvheadroom.capacity.calibration_samples import (
    CalibrationSample,
    Exclusion,
    SampleSource,
    sample_of_engine,
)
from kvheadroom.capacity.demand import Load
from kvheadroom.capacity.discovery import DiscoveryStatus, WatchedTarget
from kvheadroom.capacity.engine_states import EngineState, StateFound
from kvheadroom.capacity.facts import MissingFact, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.fleet import (
    CalibrationFile,
    Event,
    EventKind,
    FleetAssessment,
    GpuAssessment,
    ReloadStatus,
    ReplicaAssessment,
    ReplicaState,
    SourceStatus,
)
from kvheadroom.capacity.forecast import Forecast
from kvheadroom.capacity.gpu_assignment import (
    Assignment,
    GpuAssignments,
    NotHere,
    OthersMemory,
    Unassigned,
)
from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason, GpuReading, GpuSnapshot, XidCount
from kvheadroom.capacity.history import LastHour, Moment, moment_of
from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.own_start import OwnStart, start_of
from kvheadroom.capacity.readings import FailureReason, PageProblem, ProblemReason, SourceFailure, VllmPage
from kvheadroom.capacity.release_rules import rules_for
from kvheadroom.capacity.remote_gpus import ExporterStatus, Pod, RemoteGpu, RemoteGpus
from kvheadroom.capacity.reuse import ExpectedHits, Lately, Reuse, TierSize
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.sources.vllm_metrics import parse_page
from tests.capacity.facts_builder import TINY_LLAMA
from tests.conftest import capture

NOW = 1_795_990_000.0
UP = tuple(SourceStatus(source=s, failure=None) for s in ("metrics", "version", "models", "model_files"))


def read(page_name: str) -> VllmPage:
    page = parse_page(capture(page_name))
    assert isinstance(page, VllmPage)
    return page


def minute_ago(page_name: str, age: float) -> dict[str, Moment]:
    """An earlier page of the same server, as the beginning of a window."""
    (engine,) = read(page_name).engines
    return {"1m": moment_of(engine, NOW - age - 60.0)}


def replica(
    name: str,
    page_name: str,
    *,
    known_model: bool = True,
    age: float = 1.25,
    max_model_len: int = 2048,
    before: str | None = None,
) -> ReplicaAssessment:
    page = read(page_name)
    engines = tuple(
        assess(
            Reading(
                facts=resolve_facts(
                    operator=OperatorFacts(flags={}, gpu="cpu"),
                    answers=ServerAnswers(version="0.32.0", model_root="tiny", max_model_len=max_model_len),
                    echoed=engine.echoed,
                    model_files=ModelFiles(folder="/models/gqa", config=TINY_LLAMA) if known_model else None,
                    model_files_missing=MissingFact(
                        "model_files", "the server names its model 'org/<b>tiny</b>'", "set `model: /path`"
                    ),
                ),
                snapshot=engine,
                taken_at=NOW - age,
                past={} if before is None else minute_ago(before, age),
            ),
            (1024, 262_144),
        )
        for engine in page.engines
    )
    return ReplicaAssessment(
        replica=name,
        url=f"http://{name}:8000",
        interval_seconds=5.0,
        state=ReplicaState.SERVING,
        sources=UP,
        engines=engines,
        scrape_duration_seconds=0.0153,
        last_success_at=NOW - age,
    )


LEARNED = Reuse(
    seconds=30_600.0,
    prompts=9_876_543.0,
    pool_ratio=0.51,
    outside_ratio=0.125,
    oldest_seconds=4000.0,
    points=((60.0, 0.5), (4000.0, 0.75)),
    expected=(
        ExpectedHits(size=TierSize(bytes=0, tokens=0.0), low_ratio=0.5, high_ratio=0.52),
        ExpectedHits(size=TierSize(bytes=8_388_608, tokens=8192.0), low_ratio=0.6, high_ratio=0.65),
        ExpectedHits(size=TierSize(bytes=64 * 10**9, tokens=62_500_000.0), low_ratio=0.74, high_ratio=0.99),
    ),
    lately=Lately(found_ratio=0.4, expected_ratio=0.62),
)
"""What the replica's past said, had it been learned from."""


def offloading() -> ReplicaAssessment:
    """A replica with a tier of 8 MiB in host memory, 256 chunks of 32 KiB, whose evicted blocks are sampled; LMCache is beside it."""
    told = replica("offload", "offload_lab.loaded", max_model_len=1024)
    (engine,) = told.engines
    (before,) = read("offload_lab.after").engines
    extra = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 8_388_608}
    facts = resolve_facts(
        operator=OperatorFacts(
            flags={
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_extra_config": extra,
                }
            },
            gpu="cpu",
        ),
        answers=ServerAnswers(version="0.32.0", model_root="tiny", max_model_len=1024),
        echoed=engine.snapshot.echoed,
        model_files=ModelFiles(folder="/models/gqa", config=TINY_LLAMA),
    )
    before = replace(
        before,
        evicted_blocks_total=6.0,
        evicted_block_idle_seconds_total=75.0,
        offload_allocation_failures_total=1.0,
        lmcache_lookup_tokens_total=11_520.0,
        lmcache_lookup_hits_total=0.0,
    )
    now = replace(
        engine.snapshot,
        evicted_blocks_total=10.0,
        evicted_block_idle_seconds_total=125.0,
        offload_allocation_failures_total=3.0,
        lmcache_lookup_tokens_total=46_080.0,
        lmcache_lookup_hits_total=8_640.0,
        lmcache_host_bytes=3_000_000_000.0,
        lmcache_disk_bytes=5_000_000_000.0,
    )
    use = HostUse(
        total_bytes=64 * 2**30,
        available_bytes=60 * 2**30,
        shared_bytes=1_000_000_000,
        shm_total_bytes=4 * 2**20,
        shm_free_bytes=3 * 2**20,
        limit_bytes=32 * 2**30,
        limit_used_bytes=5 * 2**30,
        processes=3,
        processes_shared_bytes=17_000_000,
        processes_anonymous_bytes=3 * 2**30,
        engines=1,
    )
    reading = Reading(
        host_use=use,
        facts=facts,
        snapshot=now,
        taken_at=engine.taken_at,
        past={"1m": moment_of(before, engine.taken_at - 60.0)},
    )
    again = assess(reading, (1024, 262_144), idle_seconds=(5.0, 2700.0), reuse=LEARNED)
    return replace(told, engines=(again,), problems=again.problems)


def inflated() -> ReplicaAssessment:
    """A replica whose hits are those of preempted requests, and whose release counts them."""
    old = replica("old", "gqa_prefix_reuse", before="gqa_idle_fresh")
    (engine,) = old.engines
    reading = Reading(
        facts=replace(engine.facts, rules=rules_for("0.10.2")),
        # That release has no other counter to go by.
        snapshot=replace(engine.snapshot, prompt_tokens_local_cache_hit_total=None),
        taken_at=engine.taken_at,
        past={
            name: moment for name in ("1m", "5m") for moment in minute_ago("gqa_idle_fresh", 1.25).values()
        },
    )
    again = assess(reading, ())
    return replace(old, engines=(again,), problems=again.problems)


def on_a_gpu(num_blocks: int = 2_300_000, overhead_bytes: int | None = None) -> ReplicaAssessment:
    """A replica whose pool is what an H100 leaves over, in blocks of 32 KiB.

    Args:
        overhead_bytes: as the operator says; None where it is estimated.
    """
    told = replica("hbm", "gqa_light_steady")
    (engine,) = told.engines
    facts = resolve_facts(
        operator=OperatorFacts(flags={"max_num_seqs": 16}, gpu="H100", overhead_bytes=overhead_bytes),
        answers=ServerAnswers(version="0.32.0", model_root="tiny", max_model_len=2048),
        echoed=replace(engine.snapshot.echoed, kv_cache_memory_bytes=None),
        model_files=ModelFiles(
            folder="/models/gqa", config=TINY_LLAMA | {"vocab_size": 4096, "intermediate_size": 512}
        ),
    )
    snapshot = replace(
        engine.snapshot,
        num_blocks=num_blocks,
        pool_tokens=num_blocks * 32,
        max_concurrency=num_blocks * 32 / 2048,
        kv_usage_ratio=77 / (num_blocks - 1),
    )
    reading = Reading(facts=facts, snapshot=snapshot, taken_at=engine.taken_at)
    return replace(told, engines=(assess(reading, (1024,)),))


def calibrated(of: ReplicaAssessment, name: str, *overheads: int) -> ReplicaAssessment:
    """The replica where other starts of its kind had these overheads, and its own was measured."""
    (engine,) = of.engines
    key = key_of(engine.facts)
    assert isinstance(key, CalibrationKey)
    samples = [
        CalibrationSample(
            key=key,
            start=f"other-{number}/0/1795900000",
            source=SampleSource.FLEET,
            overhead_bytes=overhead,
            uncertainty_bytes=32_767,
            estimated_bytes=None,
            model="tiny",
            evidence="",
            # As if the later ones were of logs, which tell it.
            measured_weights_bytes=None if number == 0 else 4_065_534 + number * 2,
        )
        for number, overhead in enumerate(overheads)
    ]
    start = start_of(name, "0", NOW - 3600, engine.snapshot.num_blocks)
    own = sample_of_engine(
        engine.facts,
        engine.snapshot,
        engine.observation,
        start=start,
        foreign_bytes=None,
        measured_at=NOW,
        evidence="",
    )
    again = assess(
        Reading(facts=engine.facts, snapshot=engine.snapshot, taken_at=engine.taken_at),
        (1024,),
        engine.prediction,
        calibrated=calibrate(engine.facts, engine.prediction, Calibration.of(samples), own_start=start),
        own_start=OwnStart(start, own),
    )
    return replace(of, replica=name, url=f"http://{name}:8000", engines=(again,))


def after_an_hour(of: ReplicaAssessment) -> ReplicaAssessment:
    """The replica as if it had been watched for an hour: a figure a minute, up and down."""
    (engine,) = of.engines
    minutes = range(60)
    hour = LastHour(
        [NOW - 3600.0 + 60.0 * minute for minute in minutes],
        [0.5 + 0.0125 * abs(minute % 40 - 20) for minute in minutes],
        [float(minute // 20) for minute in minutes],
    )
    return replace(of, engines=(replace(engine, last_hour=hour, facts_at=NOW - 3605.0),))


def in_thrash(of: ReplicaAssessment) -> ReplicaAssessment:
    """The replica, its engine in a state and with a forecast that one page alone does not show."""
    why = "24 preemptions in a minute, and <26> requests are there"
    (engine,) = of.engines
    forecast = Forecast(
        probabilities={"30s": 0.625, "2m": 0.875, "10m": 0.96875},
        exhaustion_seconds=12.5,
        earliest_seconds=0.0,
        latest_seconds=45.0,
        peak_blocks=243.5,
        prefill_backlog_tokens=2016.0,
        load=Load(
            usable=127,
            used=125,
            need=7.0,
            growth=4.0,
            finished=1.5,
            queue=9.0,
            running=17.0,
            most_running=20.0,
        ),
    )
    in_it = replace(engine, states=(StateFound(EngineState.THRASH, why),), forecast=forecast)
    return replace(of, engines=(in_it,))


def fleet() -> FleetAssessment:
    refused = SourceFailure(
        "metrics",
        FailureReason.REFUSED,
        "GET http://down:8000/metrics: nothing listens there; is vLLM running?",
    )
    return FleetAssessment(
        (
            replace(
                after_an_hour(in_thrash(replica("gqa", "gqa_waiting_and_preempting"))),
                restarts_total=1,
                excluded_starts_total=((Exclusion.POOL_BY_FLAG, 2),),
                problems=(PageProblem(ProblemReason.METRICS_LOST, "vllm:prompt_tokens_total: gone"),),
                problems_total=((ProblemReason.BAD_VALUE, 7), (ProblemReason.METRICS_LOST, 3)),
                lost_metrics=("vllm:prompt_tokens_total",),
                events=(
                    Event(at=NOW - 90, kind=EventKind.RESTARTED, detail="its process started anew"),
                    Event(
                        at=NOW - 90,
                        kind=EventKind.CAPACITY_CHANGED,
                        detail="engine 0: pool 64 blocks of 32 -> 128 blocks of 32",
                    ),
                ),
            ),
            replica("dp2", "dp2.after", max_model_len=1024),
            replica("hub", "gqa_light_steady", known_model=False),
            replace(
                replica("down", "gqa_idle_fresh", age=60.0),
                state=ReplicaState.DOWN,
                sources=(SourceStatus(source="metrics", failure=refused),),
                failures_total=((("metrics", FailureReason.REFUSED), 12),),
            ),
            ReplicaAssessment(replica="new", url="http://new:8000", interval_seconds=5.0),
            offloading(),
            after_an_hour(calibrated(on_a_gpu(), "hbm", 1_050_000_007, 1_150_000_000, 1_100_000_000)),
            calibrated(on_a_gpu(num_blocks=1500), "tight", 90_000_000_000),
        ),
        gpus=GpuAssessment(
            reading=GpuReading(
                taken_at=NOW - 0.5,
                duration_seconds=0.001,
                gpus=(
                    GpuSnapshot(
                        gpu="GPU-aaaaaaaa",
                        name="NVIDIA H200",
                        index=0,
                        total_bytes=143_771 * 2**20,
                        reserved_bytes=601 * 2**20,
                        used_bytes=130_003 * 2**20,
                        free_bytes=13_167 * 2**20,
                        accounting="v2",
                    ),
                    GpuSnapshot(
                        gpu="GPU-bbbbbbbb",
                        name="NVIDIA <A100>",
                        index=1,
                        total_bytes=81_920 * 2**20,
                        reserved_bytes=None,
                        used_bytes=7 * 2**20,
                        free_bytes=81_913 * 2**20,
                        accounting="v1",
                    ),
                    GpuSnapshot(
                        gpu="MIG-dddddddd",
                        name="NVIDIA H200 MIG 2g.35gb",
                        index=3,
                        total_bytes=33_024 * 2**20,
                        reserved_bytes=24 * 2**20,
                        used_bytes=30_000 * 2**20,
                        free_bytes=3_000 * 2**20,
                        accounting="v2",
                        parent="GPU-dddddddd",
                        gpu_instance=5,
                        compute_instance=0,
                    ),
                    GpuSnapshot(
                        gpu="GPU-10101010",
                        name="NVIDIA GB10",
                        index=5,
                        total_bytes=120 * 2**30,
                        reserved_bytes=None,
                        used_bytes=20 * 2**30,
                        free_bytes=100 * 2**30,
                        accounting="host",
                    ),
                    GpuSnapshot(
                        gpu="GPU-12121212",
                        name="NVIDIA H100 80GB HBM3",
                        index=6,
                        total_bytes=81_559 * 2**20,
                        reserved_bytes=551 * 2**20,
                        used_bytes=73 * 2**30,
                        free_bytes=6_256 * 2**20,
                        accounting="v2",
                    ),
                ),
                divided=("GPU-dddddddd", "GPU-ffffffff"),
                xids=(XidCount("GPU-aaaaaaaa", 79, 2), XidCount("GPU-cccccccc", 31, 1)),
                xid_watched=("GPU-aaaaaaaa", "GPU-dddddddd"),
                failures=(GpuFailure("GPU-cccccccc", GpuFailureReason.LOST, "GPU 2 fell off the bus"),),
            ),
            interval_seconds=5.0,
            runs=GpuAssignments(
                assigned=(
                    Assignment("GPU-aaaaaaaa", "gqa", "config"),
                    Assignment("GPU-aaaaaaaa", "hub", "process"),
                    Assignment("GPU-cccccccc", "gqa", "config"),
                    Assignment("MIG-dddddddd", "dp2", "config"),
                    Assignment("GPU-12121212", "hbm", "config"),
                ),
                not_here=(NotHere("GPU-eeeeeeee", "dp2", "is not on this machine"),),
                unassigned=(Unassigned("new", "new is not known to be this machine"),),
                others=(
                    OthersMemory("GPU-aaaaaaaa", "hub", 5 * 2**30, 121 * 2**30),
                    OthersMemory("GPU-12121212", "hbm", 2**20, 73 * 2**30 - 2**20),
                ),
            ),
            failures_total=((GpuFailureReason.LOST, 3),),
        ),
        remote_gpus=RemoteGpus(
            exporters=(
                ExporterStatus(
                    source="dcgm_exporters[0]",
                    url="http://node-1:9400/metrics",
                    interval_seconds=15.0,
                    taken_at=NOW - 3,
                ),
                ExporterStatus(
                    source="dcgm_exporters[1]",
                    url="http://node-2:9400/metrics",
                    interval_seconds=15.0,
                    failure=SourceFailure(
                        "dcgm_exporters[1]",
                        FailureReason.REFUSED,
                        "GET http://node-2:9400/metrics: <nothing> listens there",
                    ),
                    failures_total=((FailureReason.REFUSED, 2),),
                ),
            ),
            gpus=(
                RemoteGpu(
                    gpu="GPU-20202020",
                    source="dcgm_exporters[0]",
                    name="NVIDIA <H100> 80GB HBM3",
                    index=0,
                    host="node-1",
                    total_bytes=81_559 * 2**20,
                    reserved_bytes=551 * 2**20,
                    used_bytes=70_000 * 2**20,
                    free_bytes=11_008 * 2**20,
                    pods=(Pod("vllm", "chat-0"),),
                    last_xid=31,
                    changed_at=NOW - 40,
                ),
                RemoteGpu(
                    gpu="MIG-GPU-30303030/3",
                    source="dcgm_exporters[0]",
                    name="NVIDIA A100",
                    host="node-1",
                    used_bytes=3 * 2**20,
                    free_bytes=9_000 * 2**20,
                    unknown=("its total is not known",),
                    parent="GPU-30303030",
                    gpu_instance=3,
                    changed_at=NOW - 3,
                ),
            ),
            failures=(GpuFailure("GPU-40404040", GpuFailureReason.LOST, "GPU-40404040: told of no more"),),
            runs=GpuAssignments(
                assigned=(
                    Assignment("GPU-20202020", "down", "pod"),
                    Assignment("GPU-40404040", "gqa", "config"),
                ),
                not_here=(NotHere("GPU-50505050", "down", "is told of by no exporter"),),
                unassigned=(Unassigned("new", "no exporter tells of a GPU of the pod vllm/new"),),
            ),
        ),
        calibration=CalibrationFile(
            path="/var/lib/kvheadroom/calibration.json",
            attempted=True,
            samples=5,
            failure=SourceFailure(
                "calibration",
                FailureReason.NO_PERMISSION,
                "/var/lib/kvheadroom/calibration.json: <Permission> denied",
            ),
            failures_total=((FailureReason.NO_PERMISSION, 3),),
        ),
        reload=ReloadStatus(last_success_at=NOW - 3600, fault="/etc/kvheadroom.yaml: replicas[0].url: no"),
        targets=(
            WatchedTarget("gqa", "config", (("team", "search <1>"),)),
            WatchedTarget("dp2", "config"),
            WatchedTarget("hub", "file_sd_configs[0]", (("rack", "r12"), ("team", "chat"))),
            WatchedTarget("down", "config"),
            WatchedTarget("new", "config"),
        ),
        discoveries=(
            DiscoveryStatus(
                source="file_sd_configs[0]",
                targets=1,
                left_out=("/etc/vllm/a.json: 'gpu-1/x': a target is <host>:port",),
                last_success_at=NOW - 60,
                failure=SourceFailure(
                    "file_sd_configs[0]",
                    FailureReason.NOT_FOUND,
                    "/etc/vllm/b.json is not there; its last good list (0 servers) stays in use",
                ),
                failures_total=((FailureReason.NOT_FOUND, 4),),
            ),
        ),
    )
