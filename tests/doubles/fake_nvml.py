"""A machine with NVIDIA GPUs that is not there: a fake driver library under NVIDIA's unmodified bindings.

The bindings keep the library, and which functions it has, for as long as their process lives. So what is under
test runs in a process of its own that finds the fake by LD_LIBRARY_PATH; this process never loads it.
"""

import contextlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvheadroom.capacity.gpus import GpuReading
from kvheadroom.sources.nvml import NvmlSource

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "libnvidia-ml.so.1"
ANY = "*"
MEMORY_V1 = "nvmlDeviceGetMemoryInfo"
MEMORY_V2 = "nvmlDeviceGetMemoryInfo_v2"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"
_BESIDE = re.compile("Event|Processes")
CHILD_SECONDS = 60.0
"""More than any test needs; a child that hangs is ended then."""


def build_library(folder: Path, *defines: str) -> Path:
    """Compile the fake; `WITHOUT_MEMORY_V2` makes one of before that function."""
    compiler = shutil.which("gcc")
    if compiler is None:
        # Here, so that the child need not load pytest.
        from tests.conftest import unavailable

        unavailable("the fake NVIDIA driver needs gcc to be compiled")
    library = folder / LIBRARY
    options = ["-shared", "-pthread", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"]
    command = [compiler, *options, *(f"-D{name}" for name in defines), "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


@dataclass
class FakeMig:
    """A slice of a GPU; its name follows the whole GPU's."""

    uuid: str
    slot: int
    gpu_instance: int
    compute_instance: int
    total: int
    reserved: int
    used: int
    name: str = "NVIDIA H200 MIG 2g.35gb"
    processes: tuple[tuple[int, int | None], ...] = ()

    def records(self, parent: str) -> Iterator[str]:
        numbers = (self.total, self.reserved, self.used, self.total - self.reserved - self.used)
        place = (parent, self.slot, self.uuid, self.gpu_instance, self.compute_instance)
        yield " ".join(map(str, ("mig", *place, *numbers, self.name)))
        yield from _process_records(self.uuid, self.processes)


@dataclass
class FakeGpu:
    """Bytes as v2 counts them. `free` follows from the others unless a test makes the driver lie.

    Attributes:
        processes: (PID, bytes), None where the driver does not tell them.
    """

    uuid: str
    total: int
    reserved: int
    used: int
    free: int | None = None
    mig: int = -1
    name: str = "NVIDIA H200"
    migs: tuple[FakeMig, ...] = ()
    processes: tuple[tuple[int, int | None], ...] = ()

    def records(self) -> Iterator[str]:
        free = self.total - self.reserved - self.used if self.free is None else self.free
        yield f"gpu {self.uuid} {self.total} {self.reserved} {self.used} {free} {self.mig} {self.name}"
        for mig in self.migs:
            yield from mig.records(self.uuid)
        yield from _process_records(self.uuid, self.processes)


def _process_records(uuid: str, processes: tuple[tuple[int, int | None], ...]) -> Iterator[str]:
    for pid, used in processes:
        yield f"proc {uuid} {pid} {-1 if used is None else used}"


@dataclass
class FakeDriver:
    """The state of the fake. Change the fields, then `apply`.

    Attributes:
        faults: (function, UUID) -> nvmlReturn_t.
        delays: (function, UUID) -> milliseconds.
        xids: (UUID, code, GPU instance or -1, compute instance or -1) of every event so far.
        meminfo: what the host says of its memory; None where it says nothing.
        listed: the folders of `/proc/driver/nvidia/gpus`; None where there is no such folder.
    """

    folder: Path
    gpus: list[FakeGpu] = field(default_factory=list)
    faults: dict[tuple[str, str], int] = field(default_factory=dict)
    delays: dict[tuple[str, str], int] = field(default_factory=dict)
    xids: list[tuple[str, int, int, int]] = field(default_factory=list)
    meminfo: str | None = None
    listed: tuple[str, ...] | None = None
    init: int = 0
    _generation: int = 0

    def install(self, library: Path) -> None:
        """Put the library where the child looks first."""
        (self.folder / LIBRARY).unlink(missing_ok=True)
        (self.folder / LIBRARY).symlink_to(library)

    def uninstall(self) -> None:
        """No driver: an empty file that cannot be loaded also hides one that this machine may really have."""
        (self.folder / LIBRARY).unlink(missing_ok=True)
        (self.folder / LIBRARY).touch()

    def apply(self) -> None:
        lines = [
            "driver 580.95.05",
            f"init {self.init}",
        ]
        lines += [record for gpu in self.gpus for record in gpu.records()]
        lines += [
            f"xid {gpu} {code} {number} {gpu_instance} {compute_instance}"
            for number, (gpu, code, gpu_instance, compute_instance) in enumerate(self.xids, 1)
        ]
        for word, rules in (("fault", self.faults), ("delay", self.delays)):
            lines += [f"{word} {function} {gpu} {value}" for (function, gpu), value in rules.items()]
        new = self.folder / "state.new"
        # Surrogates stand for bytes that are no UTF-8.
        new.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
        self._apply_proc()
        # Two changes within one tick of the kernel's clock have the same time; these never do.
        self._generation += 1
        os.utime(new, (self._generation, self._generation))
        new.replace(self.folder / "state")

    @property
    def proc(self) -> Path:
        """What the source reads in place of the machine's `/proc`."""
        return self.folder / "proc"

    def _apply_proc(self) -> None:
        self.proc.mkdir(exist_ok=True)
        (self.proc / "meminfo").unlink(missing_ok=True)
        if self.meminfo is not None:
            (self.proc / "meminfo").write_text(self.meminfo, encoding="ascii")
        shutil.rmtree(self.proc / "driver", ignore_errors=True)
        for gpu in self.listed or ():
            (self.proc / "driver" / "nvidia" / "gpus" / gpu).mkdir(parents=True)

    def environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "FAKE_NVML_STATE": str(self.folder / "state"),
            "FAKE_NVML_CALLS": str(self.folder / "calls"),
            "FAKE_PROC": str(self.proc),
        }

    def new_calls(self, *, beside: bool = False) -> list[tuple[str, str]]:
        """(function, UUID) of every call since this was last asked.

        Args:
            beside: also those that are made beside the memory, for events and processes.
        """
        path = self.folder / "calls"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        calls = [(function, uuid) for function, uuid in (line.split() for line in lines)]
        return [call for call in calls if beside or not _BESIDE.search(call[0])]

    @contextlib.contextmanager
    def source(self) -> Iterator["SourceProcess"]:
        """An `NvmlSource` in a process of its own."""
        self.apply()
        command = [sys.executable, "-m", __name__]
        with subprocess.Popen(
            command, env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            watchdog = threading.Timer(CHILD_SECONDS, process.kill)
            watchdog.start()
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                yield SourceProcess(self, process.stdin, process.stdout)
            finally:
                watchdog.cancel()
                process.kill()


class SourceProcess:
    """Reads in the child, at a time that the test says."""

    def __init__(self, driver: FakeDriver, ask: IO[bytes], answer: IO[bytes]) -> None:
        self._driver = driver
        self._ask = ask
        self._answer = answer

    def read(self, now: float = 0.0) -> GpuReading:
        """One reading of the state as it is now.

        Args:
            now: seconds on the clock that paces the source.
        """
        self._driver.apply()
        return self._request(f"{now}\n")

    def close(self) -> None:
        self._request("close\n")

    def _request(self, line: str) -> GpuReading:
        self._ask.write(line.encode())
        self._ask.flush()
        reading = pickle.load(self._answer)  # noqa: S301  from our own child
        assert isinstance(reading, GpuReading)
        return reading


def _serve() -> None:
    """The child: a reading for each line, pickled."""
    now = 0.0
    source = NvmlSource(clock=lambda: now, proc=Path(os.environ["FAKE_PROC"]))
    for line in sys.stdin:
        if line == "close\n":
            source.close()
            reading = GpuReading(taken_at=0.0, duration_seconds=0.0)
        else:
            now = float(line)
            reading = source.read()
            source.mend()
        pickle.dump(reading, sys.stdout.buffer)
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
