"""What the end-to-end tests share.

A vLLM start takes about a minute, so every server here lives for the whole session.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import unavailable
from tests.end_to_end.alertmanager_server import AlertmanagerUnavailableError, find_alertmanager
from tests.end_to_end.tiny_model import write_model
from tests.end_to_end.vllm_environment import VllmUnavailableError, ensure_vllm
from tests.end_to_end.vllm_server import VllmServer

# 4 MiB are 128 blocks of 32 tokens at 1,024 bytes per token: small enough for a few clients to fill.
TINY_GQA_FLAGS: dict[str, str | int | float | bool] = {
    "--load-format": "dummy",
    "--dtype": "bfloat16",
    "--enforce-eager": True,
    "--seed": 0,
    "--max-model-len": 2048,
    "--block-size": 32,
    "--kv-cache-memory-bytes": 4 * 1024 * 1024,
    "--max-num-seqs": 64,
    "--max-num-batched-tokens": 512,
}

# 16 MiB are 227 blocks of 16 tokens at 4,608 bytes per token.
TINY_MLA_FLAGS: dict[str, str | int | float | bool] = {
    "--load-format": "dummy",
    "--dtype": "bfloat16",
    "--enforce-eager": True,
    "--seed": 0,
    "--max-model-len": 1024,
    "--kv-cache-memory-bytes": 16 * 1024 * 1024,
    "--max-num-seqs": 16,
    "--max-num-batched-tokens": 1024,
}

# 2 MiB are 64 blocks of 32 tokens for each of two engines.
TINY_DP2_FLAGS: dict[str, str | int | float | bool] = {
    **TINY_GQA_FLAGS,
    "--max-model-len": 1024,
    "--kv-cache-memory-bytes": 2 * 1024 * 1024,
    "--max-num-seqs": 16,
    "--data-parallel-size": 2,
}

Progress = Callable[[str], None]


@pytest.fixture(scope="session")
def progress(pytestconfig: pytest.Config) -> Progress:
    """Prints a line past pytest's capture: a silent minute looks like a hang."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  {line}", end="", flush=True)

    return show


@pytest.fixture(scope="session")
def vllm_python(progress: Progress) -> Path:
    try:
        return ensure_vllm(progress)
    except VllmUnavailableError as reason:
        unavailable(str(reason))


@pytest.fixture(scope="session")
def alertmanager() -> Path:
    try:
        return find_alertmanager()
    except AlertmanagerUnavailableError as reason:
        unavailable(str(reason))


@pytest.fixture(scope="session")
def tiny_gqa_server(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, progress: Progress
) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("tiny-gqa")
    model_folder = write_model(folder / "gqa", "gqa")
    server = VllmServer(vllm_python, model_folder, TINY_GQA_FLAGS, folder / "vllm.log", progress=progress)
    with server:
        yield server


@pytest.fixture(scope="session")
def tiny_dp2_server(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, progress: Progress
) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("tiny-dp2")
    model_folder = write_model(folder / "gqa", "gqa")
    with VllmServer(
        vllm_python, model_folder, TINY_DP2_FLAGS, folder / "vllm.log", progress=progress
    ) as server:
        yield server
