"""A Config -> samplers of the servers that it names and its sources find, kept running while both change."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvheadroom.access import names_files, open_endpoint
from kvheadroom.capacity.discovery import WatchedTarget
from kvheadroom.capacity.events import ServerMemory
from kvheadroom.capacity.fleet import ReplicaAssessment
from kvheadroom.capacity.gpu_assignment import GpuClaim
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.gpus import GpuReading, ServerPlace
from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.local_server import LocalServer
from kvheadroom.config import Config, LocalReplica, ReplicaConfig
from kvheadroom.discovery.configured import sources_of
from kvheadroom.discovery.local import join_local
from kvheadroom.discovery.processes import NAME as PROCESSES
from kvheadroom.discovery.watched import MAX_REPLICAS, Discoveries, Target, merge, tell_left_out
from kvheadroom.gpu_exporters import GpuExporters
from kvheadroom.monitor.board import Board
from kvheadroom.monitor.calibration_learner import CalibrationLearner
from kvheadroom.monitor.gpu_sampler import GpuSampler
from kvheadroom.monitor.replica_calibration import ReplicaCalibration
from kvheadroom.monitor.reuse_learner import ReuseLearner
from kvheadroom.monitor.sampler import ReplicaSampler
from kvheadroom.replica import Replica
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session
from kvheadroom.sources.local_gpus import LocalGpus
from kvheadroom.sources.model_files import ModelFilesReader
from kvheadroom.sources.nvml import NvmlSource
from kvheadroom.sources.process_tree import ProcessTree
from kvheadroom.sources.server_memory import read_server_memory
from kvheadroom.sources.slow_files import SlowFiles

CARD_SECONDS = 0.1
HOST_SECONDS = 2.0
GPU_SECONDS = 5.0
"""Without persistence mode a driver takes seconds to start; its thread waits, nobody else does."""


@dataclass(frozen=True, slots=True)
class _Running:
    """One replica being sampled, and the settings that it was started with."""

    settings: object
    sampler: ReplicaSampler
    task: asyncio.Task[None] | None


def _carried_over(before: ReplicaAssessment | None, fresh: ReplicaAssessment) -> ReplicaAssessment:
    """What is known of a replica goes on with its new settings: numbers, events, counts."""
    return fresh if before is None else replace(before, interval_seconds=fresh.interval_seconds)


def _is_shared(source: str, target: Target, config: Config) -> bool:
    """Whether it is of this daemon's share. Nobody else sees this machine's processes, and each machine has a 127.0.0.1."""
    return source == PROCESSES or config.watches(target.replica.url)


def _runs_on_a_card(replica: ReplicaConfig) -> bool:
    """Whether this machine knows on which card, and nobody has said it."""
    return isinstance(replica, LocalReplica) and replica.gpu is None and not _is_on_cpu(replica)


def _is_on_cpu(replica: ReplicaConfig) -> bool:
    if replica.gpu is None and isinstance(replica, LocalReplica):
        return replica.server.command_line.on_cpu or replica.server.is_cpu_build
    return replica.gpu == CPU


def _place_of(replica: ReplicaConfig) -> ServerPlace:
    process = None
    if isinstance(replica, LocalReplica):
        process = replica.server.pid, replica.server.started_ticks
    socket = None if replica.unix_socket is None else str(replica.unix_socket)
    return ServerPlace(replica.url, socket, process)


class Watch:
    """The samplers of one config and of what its sources find, kept running; only what changed is replaced.

    Args:
        proc: `/proc`, for the processes of servers on this machine.
    """

    def __init__(self, session: Session, files: SlowFiles, proc: Path = Path("/proc")) -> None:
        self.board = Board(())
        self._session = session
        self._files = files
        self._proc = proc
        self._config: Config | None = None
        self._static: tuple[Target, ...] = ()
        self._start = False
        self._discoveries = Discoveries(files, self._sources_were_asked)
        self._gpu_exporters = GpuExporters(session, files, self.board.publish_exporters)
        self._learner = CalibrationLearner(files.read, self.board.set_calibration)
        # One thread: a lesson takes a part of a second, and is due once an hour for each engine.
        self._lessons = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reuse")
        self._clashes: dict[str, tuple[str, ...]] = {}
        self._watched: Counter[str] = Counter()
        self._targets: dict[str, Target] = {}
        self._running: dict[str, _Running] = {}
        self._readers: dict[str, ModelFilesReader] = {}
        self._interval_seconds = 0.0
        self._claims: tuple[GpuClaim, ...] = ()
        self.gpus_read = asyncio.Event()

    def prepare(
        self, config: Config, endpoints: Mapping[str, Endpoint], *, start: bool
    ) -> list[ReplicaSampler]:
        """Take a config over: replicas that it leaves as they were go on without a gap.

        Args:
            endpoints: of every replica that it names, opened already: nothing here waits.
            start: let the samplers and the sources of replicas run; False for a single tick by hand.
        """
        self._config, self._start = config, start
        self._static = tuple(Target(replica, endpoints[replica.replica]) for replica in config.replicas)
        self._discoveries.set_sources(
            sources_of(config, self._session, self._files, self._proc), len(self._static), start=start
        )
        self._learner.use(config.calibration_file, start=start)
        self._watch(config)
        self._gpu_exporters.set_exporters(config.dcgm_exporters, start=start)
        return self.samplers

    @property
    def samplers(self) -> list[ReplicaSampler]:
        """Of every replica that is watched."""
        return [running.sampler for running in self._running.values()]

    def started_at(self) -> dict[str, float | None]:
        """When the process of each replica started, in unix seconds; None where no page has told it."""
        return {name: running.sampler.memory.started_at for name, running in self._running.items()}

    @property
    def replicas(self) -> tuple[ReplicaConfig, ...]:
        """Every replica that is watched."""
        return tuple(target.replica for target in self._targets.values())

    def sampler(self, replica: str) -> ReplicaSampler:
        """Of one replica, by its name."""
        return self._running[replica].sampler

    async def find_replicas(self) -> None:
        """Ask every source of replicas once, by hand."""
        await self._discoveries.ask_all()

    async def read_calibration(self) -> None:
        """Read the calibration file once, by hand."""
        await self._learner.work()

    async def read_remote_gpus(self) -> None:
        """Ask every DCGM-exporter once, by hand."""
        await self._gpu_exporters.ask_all()

    def _sources_were_asked(self, changed: bool) -> None:  # noqa: FBT001  a callback of one argument
        if changed and self._config is not None:
            self._watch(self._config)
        else:
            self._show_discoveries()

    def _show_discoveries(self) -> None:
        statuses = self._discoveries.statuses()
        self.board.set_discoveries(
            tuple(
                replace(
                    status,
                    targets=None if status.targets is None else self._watched[status.source],
                    left_out=(*status.left_out, *clashes),
                )
                for status in statuses
                for clashes in (self._clashes.get(status.source, ()),)
            )
        )

    def _watch(self, config: Config) -> None:
        """Watch what the config names and its sources found, and nothing else."""
        static, found = join_local(self._static, self._discoveries.targets())
        merged, clashes = merge(static, found)
        watched = [(source, target) for source, target in merged if _is_shared(source, target, config)]
        self._watched = Counter(source for source, _ in watched)
        for source, sentences in clashes.items():
            tell_left_out(source, self._clashes.get(source, ()), sentences)
        self._clashes = clashes
        self._targets = targets = {target.replica.replica: target for _, target in watched}
        settings = {
            name: (
                # Which GPUs serve it and what it is called change nothing in how it is sampled.
                target.replica.model_copy(update={"gpus": (), "pod": None, "labels": {}}),
                target.endpoint,
                config.scrape_interval,
                config.session_tokens,
                config.idle_times,
                config.tier_sizes,
                config.overhead_gb,
            )
            for name, target in targets.items()
        }
        changed = {
            name: Replica(
                config,
                target.replica,
                self._session,
                target.endpoint,
                reader=self._reader(name),
                reopen=partial(open_endpoint, target.replica, self._files)
                if names_files(target.replica)
                else None,
                find_card=partial(self._find_card, name) if _runs_on_a_card(target.replica) else None,
                read_host=partial(self._read_host, target.replica.server)
                if isinstance(target.replica, LocalReplica)
                else None,
            )
            for name, target in targets.items()
            if name not in self._running or self._running[name].settings != settings[name]
        }
        memories: dict[tuple[str, str], ServerMemory] = {}
        for name in self._running.keys() - (settings.keys() - changed.keys()):
            before = self._running.pop(name)
            memories[name, before.sampler.url] = before.sampler.memory
            if before.task is not None:
                before.task.cancel()
        known = {(replica.replica, replica.url): replica for replica in self.board.fleet.replicas}
        replicas = {
            name: _carried_over(
                known.get((name, target.replica.url)),
                ReplicaAssessment(
                    replica=name, url=target.replica.url, interval_seconds=config.scrape_interval
                ),
            )
            for name, target in targets.items()
        }
        self.board.set_replicas(
            tuple(replicas.values()),
            tuple(
                WatchedTarget(target.replica.replica, source, tuple(sorted(target.replica.labels.items())))
                for source, target in watched
            ),
            config.shard,
        )
        for name, sources in changed.items():
            sampler = ReplicaSampler(
                replicas[name],
                config.session_tokens,
                sources.as_sources(),
                self.board,
                idle_seconds=config.idle_times,
                memory=memories.get((name, replicas[name].url)),
                calibration=ReplicaCalibration(
                    replicas[name], self._learner, partial(self._foreign_bytes, name)
                ),
                new_learner=partial(ReuseLearner, config.tier_sizes, self._lessons.submit)
                if config.tier_sizes
                else None,
            )
            task = asyncio.create_task(sampler.run()) if self._start else None
            self._running[name] = _Running(settings[name], sampler, task)
        self._interval_seconds = config.scrape_interval
        self._claims = tuple(
            GpuClaim(
                replica=name,
                place=_place_of(target.replica),
                gpus=target.replica.gpus,
                pod=target.replica.pod,
                on_cpu=_is_on_cpu(target.replica),
            )
            for name, target in targets.items()
        )
        self.board.claim_gpus(self._claims)
        self._show_discoveries()

    def _reader(self, name: str) -> ModelFilesReader:
        """The one that a replica of this name had before: a reading that hangs is not started once more."""
        reader = self._readers.pop(name, None) or ModelFilesReader()
        self._readers[name] = reader
        while len(self._readers) > len(self._running) + MAX_REPLICAS:
            del self._readers[next(iter(self._readers))]
        return reader

    def publish_gpus(self, reading: GpuReading) -> None:
        """Put a reading of this machine's GPUs on the board, joined to the replicas that they serve."""
        # A reading may be as old as its deadline when it comes, and is no less current for that.
        slowest = max(self._interval_seconds, GPU_SECONDS)
        self.board.publish_gpus(reading, slowest)
        self.gpus_read.set()

    async def sample_gpus(self) -> None:
        """Read this machine's GPUs at every tick, until cancelled."""
        nvml = NvmlSource(proc=self._proc)
        gpus = LocalGpus(nvml.read, ProcessTree(self._proc).find, self._local_places)
        await GpuSampler(
            gpus.read, nvml.mend, lambda: self._interval_seconds, GPU_SECONDS, self.publish_gpus
        ).run()

    def _foreign_bytes(self, replica: str) -> int | None:
        gpus = self.board.fleet.gpus
        return None if gpus is None else gpus.foreign_bytes(replica)

    def _local_places(self) -> tuple[ServerPlace, ...]:
        # From another thread: the tuple is replaced, never changed.
        return tuple(claim.place for claim in self._claims if not claim.on_cpu)

    async def _find_card(self, replica: str) -> str | None:
        """The card that a server of this machine runs on, once the GPUs were read and, if need be, its processes found."""
        deadline = time.monotonic() + GPU_SECONDS + 2 * self._interval_seconds
        while True:
            gpus = self.board.fleet.gpus
            if gpus is not None and (gpus.tells_card_of(replica) or time.monotonic() > deadline):
                return gpus.card_of(replica)
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(CARD_SECONDS)

    async def _read_host(self, server: LocalServer) -> HostUse | None:
        """The memory of this machine and of one of its servers; None where its disks hang."""
        try:
            return await self._files.read(
                f"the memory of PID {server.pid}",
                partial(read_server_memory, server, self._proc),
                timeout_seconds=HOST_SECONDS,
            )
        except (TimeoutError, OSError):
            return None

    async def close(self) -> None:
        """End every sampler and every source of replicas."""
        await self._discoveries.close()
        await self._gpu_exporters.close()
        await self._learner.close()
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lessons.shutdown(wait=False, cancel_futures=True)
