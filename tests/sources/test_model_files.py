"""A model's folder: what is read, and what is said when it cannot be."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.sources.model_files import MAX_FOLDERS_UNDER_WAY, ModelFilesReader, read_model_files

INDEX = "model.safetensors.index.json"


def folder_with(folder: Path, config: Any = None, index: Any = None) -> str:
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if index is not None:
        (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    return str(folder)


def test_config_and_total_size_are_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"a": 1}, {"metadata": {"total_size": 16060522496}, "weight_map": {}})
    files = read_model_files(folder)
    assert files == ModelFiles(folder=folder, config={"a": 1}, weights_bytes=16060522496)


def test_how_modelopt_quantized_is_read_from_a_file_of_its_own(tmp_path: Path) -> None:
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    files = read_model_files(folder_with(tmp_path, {"a": 1}))
    assert isinstance(files, ModelFiles)
    assert files.config == {"a": 1, "quantization_config": told}
    own = {"quantization_config": {"quant_method": "fp8"}}
    files = read_model_files(folder_with(tmp_path, own))
    assert isinstance(files, ModelFiles)
    assert files.config == own


def test_a_broken_file_of_modelopt_is_named(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{")
    failure = read_model_files(folder_with(tmp_path, {"a": 1}))
    assert isinstance(failure, SourceFailure)
    assert "hf_quant_config.json" in failure.detail


@pytest.mark.parametrize("index", [{}, {"metadata": {}}, {"metadata": 5}, {"metadata": {"total_size": True}}])
def test_an_index_without_a_total_size_gives_no_weights(tmp_path: Path, index: Any) -> None:
    files = read_model_files(folder_with(tmp_path, {"a": 1}, index))
    assert isinstance(files, ModelFiles)
    assert files.weights_bytes is None


def test_a_total_size_written_as_a_float_counts(tmp_path: Path) -> None:
    files = read_model_files(folder_with(tmp_path, {}, {"metadata": {"total_size": 1e9}}))
    assert isinstance(files, ModelFiles)
    assert files.weights_bytes == 10**9


@pytest.mark.parametrize(
    ("config", "index", "reason", "place"),
    [
        (None, None, FailureReason.NOT_FOUND, "config.json"),
        ("{", None, FailureReason.BAD_ANSWER, "config.json"),
        ("[1]", None, FailureReason.BAD_ANSWER, "config.json"),
        ("[" * 100_000, None, FailureReason.BAD_ANSWER, "config.json"),
        ({}, "{", FailureReason.BAD_ANSWER, INDEX),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, config: Any, index: Any, reason: FailureReason, place: str
) -> None:
    failure = read_model_files(folder_with(tmp_path, config, index))
    assert isinstance(failure, SourceFailure)
    assert failure.source == "model_files"
    assert failure.reason is reason
    assert place in failure.detail


def test_a_pipe_in_place_of_the_config_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    failure = read_model_files(str(tmp_path))
    assert isinstance(failure, SourceFailure)
    assert failure.reason is FailureReason.BAD_ANSWER


def test_a_config_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as sparse:
        sparse.truncate(1 << 30)
    failure = read_model_files(str(tmp_path))
    assert isinstance(failure, SourceFailure)
    assert failure.reason is FailureReason.TOO_LARGE


def test_a_gguf_file_is_told_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    failure = read_model_files(str(tmp_path / "model.gguf"))
    assert isinstance(failure, SourceFailure)
    assert failure.reason is FailureReason.BAD_ANSWER
    assert "a GGUF file carries none" in failure.detail


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    failure = read_model_files(str(tmp_path))
    assert isinstance(failure, SourceFailure)
    assert "holds an adapter (adapter_config.json), not the model it is for" in failure.detail


@pytest.mark.parametrize("size", ["1e400", "-5", "0", "true", '"5"', "NaN", "9" * 400])
def test_a_size_that_cannot_be_is_none(tmp_path: Path, size: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(f'{{"metadata": {{"total_size": {size}}}}}')
    files = read_model_files(str(tmp_path))
    assert isinstance(files, ModelFiles)
    assert files.weights_bytes is None


def test_folders_on_a_dead_mount_that_servers_name_in_turn_cost_a_thread_each_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mount = threading.Event()
    started: list[str] = []

    def hang(folder: str, _: str) -> ModelFiles:
        started.append(folder)
        mount.wait(60)
        return ModelFiles(folder=folder, config={})

    monkeypatch.setattr("kvheadroom.sources.model_files.read_model_files", hang)

    async def run() -> list[ModelFiles | SourceFailure]:
        reader = ModelFilesReader()
        many = [f"/dead/{i}" for i in range(MAX_FOLDERS_UNDER_WAY + 1)]
        answers = [await reader.read(folder, "", timeout_seconds=0.01) for folder in many * 3]
        mount.set()
        return [*answers, await reader.read(many[0], "", timeout_seconds=60)]

    *answers, alive = asyncio.run(run())
    assert started == [f"/dead/{i}" for i in range(MAX_FOLDERS_UNDER_WAY)]
    failures = [answer for answer in answers if isinstance(answer, SourceFailure)]
    assert {failure.reason for failure in failures} == {FailureReason.TIMEOUT}
    assert len(failures) == len(answers)
    assert failures[0].detail == "/dead/0: not read within 0.01 s; does its disk hang?"
    assert failures[-1].detail.startswith(
        f"/dead/{MAX_FOLDERS_UNDER_WAY}: not read while others take so long"
    )
    assert alive == ModelFiles(folder="/dead/0", config={})


def test_a_fault_of_ours_in_reading_a_folder_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: str) -> ModelFiles:
        raise KeyError("x")

    monkeypatch.setattr("kvheadroom.sources.model_files.read_model_files", fault)
    failure = asyncio.run(ModelFilesReader().read("/m", "", timeout_seconds=5))
    assert isinstance(failure, SourceFailure)
    assert failure.reason is FailureReason.INTERNAL
