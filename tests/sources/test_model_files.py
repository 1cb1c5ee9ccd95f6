"""A model's folder: what is read, and what is said when it cannot be."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.facts import ModelFiles
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.sources.model_files import read_model_files

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
