"""Which GPUs serve which replica: what the config says, else whose processes the driver lists, else nobody knows."""

from dataclasses import dataclass
from typing import Literal

from kvheadroom.capacity.gpus import GpuProcesses, GpuReading, ServerPlace, ServerProcesses


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClaim:
    """What the config says of one replica's GPUs.

    Attributes:
        gpus: as written: a UUID, the first part of one, a MIG device's old name (`MIG-GPU-.../3/0`), or the index in
            the driver's order, which is that of PCI addresses. Empty: the config says nothing.
        pod: `namespace/name` of its pod, where the config says it; with a `*` at the end, the beginning of its name.
        on_cpu: the config says that it runs on none.
    """

    replica: str
    place: ServerPlace
    gpus: tuple[str | int, ...] = ()
    pod: str | None = None
    on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """One GPU, or MIG device, that serves one replica.

    Attributes:
        by: `config` when the operator says so, `process` when the driver lists a process of the server on it, `pod` when
            a DCGM-exporter says that it is given to the pod that the operator names.
    """

    gpu: str
    replica: str
    by: Literal["config", "process", "pod"]


@dataclass(frozen=True, slots=True)
class NotHere:
    """A GPU of the config that has no numbers on this machine.

    Attributes:
        gpu: as written.
        why: as the end of a sentence about it.
    """

    gpu: str
    replica: str
    why: str


@dataclass(frozen=True, slots=True)
class Unassigned:
    """A replica whose GPUs nobody knows.

    Attributes:
        why: a sentence without its full stop.
    """

    replica: str
    why: str


@dataclass(frozen=True, slots=True)
class OthersMemory:
    """What is used on a GPU by anything but one replica: other processes, and what the driver gives to none.

    Attributes:
        own_bytes: what the replica's own processes use there, at the same instant.
    """

    gpu: str
    replica: str
    used_bytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAssignments:
    """Who runs where, as far as it is known."""

    assigned: tuple[Assignment, ...] = ()
    not_here: tuple[NotHere, ...] = ()
    unassigned: tuple[Unassigned, ...] = ()
    others: tuple[OthersMemory, ...] = ()


def assign_gpus(claims: tuple[GpuClaim, ...], reading: GpuReading) -> GpuAssignments:
    """Who runs where by one reading. What the config says of a replica is all that is said of it."""
    servers = {server.place: server for server in reading.servers}
    can_tell = not reading.driver_absent and all(failure.gpu is not None for failure in reading.failures)
    # By GPU and replica: the config may name one GPU in two ways.
    assigned: dict[tuple[str, str], Assignment] = {}
    not_here: list[NotHere] = []
    unassigned: list[Unassigned] = []
    for claim in claims:
        for name in claim.gpus:
            found = _resolve(name, reading)
            if isinstance(found, _Found):
                assigned[found.gpu, claim.replica] = Assignment(found.gpu, claim.replica, "config")
            elif can_tell:
                not_here.append(NotHere(str(name), claim.replica, found))
        if not claim.gpus and not claim.on_cpu and not reading.driver_absent:
            gpus = _by_process(servers.get(claim.place), reading.processes)
            if isinstance(gpus, str):
                unassigned.append(Unassigned(claim.replica, gpus))
            else:
                assigned |= {(gpu, claim.replica): Assignment(gpu, claim.replica, "process") for gpu in gpus}
    places = {claim.replica: claim.place for claim in claims}
    lists = {one.gpu: one for one in reading.processes}
    others = (
        _others(one, servers.get(places[one.replica]), lists[one.gpu])
        for one in assigned.values()
        if one.gpu in lists
    )
    return GpuAssignments(
        assigned=tuple(assigned.values()),
        not_here=tuple(not_here),
        unassigned=tuple(unassigned),
        others=tuple(one for one in others if one is not None),
    )


@dataclass(frozen=True, slots=True)
class _Found:
    gpu: str


def _resolve(name: str | int, reading: GpuReading) -> _Found | str:
    """The GPU that the config means, or why there is none, as the end of a sentence about it."""
    if isinstance(name, int):
        named = {gpu for index, gpu in reading.first_listed if index == name}
        if len(named) > 1:
            return "is the index of several GPUs, since some came or went while kvheadroom ran; give the UUID"
    else:
        known = {gpu.gpu for gpu in reading.gpus} | {failure.gpu for failure in reading.failures}
        known |= set(reading.divided)
        old_names = {
            f"MIG-{gpu.parent}/{gpu.gpu_instance}/{gpu.compute_instance}".lower(): gpu.gpu
            for gpu in reading.gpus
            if gpu.parent is not None
        }
        wanted = name.lower()
        exact = {gpu for gpu in known if gpu is not None and gpu.lower() == wanted} or {
            gpu for old, gpu in old_names.items() if old == wanted
        }
        named = exact or {gpu for gpu in known if gpu is not None and gpu.lower().startswith(wanted)}
        if len(named) > 1:
            return "is how the UUIDs of several GPUs begin; give the whole UUID"
    if not named:
        return "is not on this machine; `nvidia-smi -L` lists those that are"
    (gpu,) = named
    if gpu in reading.divided:
        parts = ", ".join(part.gpu for part in reading.gpus if part.parent == gpu)
        return f"is divided into MIG devices; give the UUID of one of them ({parts or 'none can be read'})"
    return _Found(gpu)


def _by_process(server: ServerProcesses | None, lists: tuple[GpuProcesses, ...]) -> tuple[str, ...] | str:
    """The GPUs that processes of a server are on, or why they are not known."""
    if server is None:
        return "its processes were not looked for yet"
    unknown = [one.unknown for one in lists if one.unknown is not None]
    if unknown and len(unknown) == len(lists):
        return unknown[0]
    gpus = tuple(one.gpu for one in lists if any(process.pid in server.pids for process in one.processes))
    return gpus or server.unknown or "none of its processes is on a GPU of this machine"


def _others(one: Assignment, server: ServerProcesses | None, listed: GpuProcesses) -> OthersMemory | None:
    """Where it is known what the replica itself uses."""
    if server is None or listed.used_bytes is None:
        return None
    own = [process.used_bytes for process in listed.processes if process.pid in server.pids]
    known = [used for used in own if used is not None]
    others = listed.used_bytes - sum(known)
    if not own or len(known) < len(own) or others < 0:
        return None
    return OthersMemory(one.gpu, one.replica, others, sum(known))
