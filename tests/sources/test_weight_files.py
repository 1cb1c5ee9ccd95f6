"""Folders of weights, whole and not: what vLLM would load of them, and headers that lie."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.stored_model import StoredTensor
from kvheadroom.sources.safetensors_header import BadHeaderError, read_header
from kvheadroom.sources.weight_files import INDEX_NAME, WeightFiles, read_weight_files
from tests.sources.safetensors_files import file_bytes, header_of, write_file

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def index(total: int | None, **names: str) -> dict[str, Any]:
    metadata = {} if total is None else {"total_size": total}
    return {"metadata": metadata, "weight_map": names}


def test_a_header_gives_every_tensor_with_its_type_shape_and_size(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"a": (2, 3), "b": (), "c": (0, 5), "d": (0,), "e": (1,)}, "F32")
    assert sorted(read_header(path), key=lambda tensor: tensor.name) == [
        StoredTensor("a", "F32", (2, 3), 24),
        StoredTensor("b", "F32", (), 4),
        StoredTensor("c", "F32", (0, 5), 0),
        StoredTensor("d", "F32", (0,), 0),
        StoredTensor("e", "F32", (1,), 4),
    ]


TRUE = header_of({"a": (2, 3)})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "shorter than the length"),
        (b"\xff" * 16, "no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "pointer of Git LFS"),
        (file_bytes(b"[]", 0), "no JSON object"),
        (file_bytes(b"{nothing", 0), "no JSON"),
        (file_bytes(b"{" * 5000, 0), "no JSON"),
        (file_bytes(TRUE, 12)[:20], "ends within its header"),
        (file_bytes(TRUE, 11), "was cut off or written over"),
        (file_bytes(TRUE, 13), "was cut off or written over"),
        (file_bytes({"a": {**TRUE["a"], "shape": [2, 4]}}, 12), "takes 12 bytes, and its shape and type make 16"),
        (file_bytes({"a": {**TRUE["a"], "dtype": "F31"}}, 12), "no type, shape and place"),
        (file_bytes({"a": {**TRUE["a"], "shape": [-2, -3]}}, 12), "no whole numbers"),
        (file_bytes({"a": {**TRUE["a"], "shape": 6}}, 12), "no type, shape and place"),
        (file_bytes({"a": {**TRUE["a"], "data_offsets": [4, 16]}}, 16), "begins at byte 4, and 0 is where"),
        (file_bytes({"a": TRUE["a"], "b": TRUE["a"]}, 12), "begins at byte 0, and 12 is where"),
        (file_bytes(b'{"a": 1, "a": 2}', 0), "names a twice"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_told(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadHeaderError, match=words):
        read_header(path)


def test_a_single_file_without_an_index_is_summed_up(tmp_path: Path) -> None:
    size = write_file(tmp_path / "model.safetensors", {"a": (4, 4), "b": (3,)})
    assert read_weight_files(tmp_path, None) == WeightFiles(total_bytes=size)
    assert size == 38


def test_an_index_alone_is_believed(tmp_path: Path) -> None:
    assert read_weight_files(tmp_path, index(1000, a=A, b=B)) == WeightFiles(total_bytes=1000)


def test_an_index_that_fits_its_files_is_believed_without_their_headers(tmp_path: Path) -> None:
    (tmp_path / A).write_bytes(bytes(1000))
    assert read_weight_files(tmp_path, index(990, a=A)) == WeightFiles(total_bytes=990)


def test_an_index_without_a_total_takes_the_sum_of_the_headers(tmp_path: Path) -> None:
    size = write_file(tmp_path / A, {"a": (4, 4)}) + write_file(tmp_path / B, {"b": (5,)})
    assert read_weight_files(tmp_path, index(None, a=A, b=B)) == WeightFiles(total_bytes=size)


def test_an_index_without_a_total_and_without_files_tells_why_there_is_none(tmp_path: Path) -> None:
    found = read_weight_files(tmp_path, index(None, a=A))
    assert found.total_bytes is None
    assert "no metadata.total_size, and the files that it names are not here" in found.unknown


def test_files_believe_more_than_an_index_that_contradicts_them(tmp_path: Path) -> None:
    size = write_file(tmp_path / A, {"a": (4000,)})
    found = read_weight_files(tmp_path, index(2 * size, a=A))
    assert found.total_bytes == size == 8000
    assert "the files are believed" in found.doubts[0]


def test_a_file_that_the_index_names_and_that_is_not_there_is_told(tmp_path: Path) -> None:
    write_file(tmp_path / A, {"a": (4,)})
    found = read_weight_files(tmp_path, index(1000, a=A, b=B))
    assert found.total_bytes == 1000
    assert found.doubts == (
        f"1 of 2 files that {INDEX_NAME} names are not in the folder, and vLLM needs them all",
    )


def test_a_second_set_of_shards_that_the_index_does_not_name_is_not_counted(tmp_path: Path) -> None:
    size = write_file(tmp_path / A, {"a": (4,)}) + write_file(tmp_path / B, {"b": (4,)})
    write_file(tmp_path / "model-00001-of-00001.safetensors", {"a": (4,), "b": (4,)})
    found = read_weight_files(tmp_path, index(None, a=A, b=B))
    assert found.total_bytes == size
    assert "1 files" in found.doubts[0]
    assert "vLLM does not load them" in found.doubts[0]


def test_tensors_in_several_files_without_an_index_are_counted_once(tmp_path: Path) -> None:
    size = write_file(tmp_path / A, {"a": (4,)})
    write_file(tmp_path / B, {"a": (4,)})
    found = read_weight_files(tmp_path, None)
    assert found.total_bytes == size
    assert found.doubts == ("a stands in several files and is counted once",)


def test_a_consolidated_copy_is_what_vllm_loads_and_it_is_not_counted_twice(tmp_path: Path) -> None:
    write_file(tmp_path / A, {"a": (4,)})
    size = write_file(tmp_path / "consolidated.safetensors", {"x": (7,)})
    found = read_weight_files(tmp_path, index(8, a=A))
    assert found.total_bytes == size == 14
    assert "vLLM loads consolidated.safetensors here, and not the 1 other files" in found.doubts[0]


@pytest.mark.parametrize(
    ("total", "words"),
    [(None, "has no"), (-5, "has a"), (10**39, "has a"), (True, "has a"), ("12", "has a")],
)
def test_a_total_that_is_missing_and_one_that_cannot_be_are_told_apart(
    tmp_path: Path, total: object, words: str
) -> None:
    found = read_weight_files(tmp_path, {"metadata": {"total_size": total}, "weight_map": {"a": A}})
    assert (found.total_bytes, found.faulty) == (None, True)
    assert f"{words} metadata.total_size" in found.unknown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, f"holds neither weights nor {INDEX_NAME}"),
        ("model.gguf", "GGUF files"),
        ("pytorch_model.bin", r"*.bin files"),
    ],
)
def test_a_folder_without_weights_that_are_read_says_so(tmp_path: Path, name: str | None, words: str) -> None:
    if name is not None:
        (tmp_path / name).write_bytes(b"x")
    found = read_weight_files(tmp_path, None)
    assert (found.total_bytes, found.faulty) == (None, name is not None)
    assert words in found.unknown


def test_a_pipe_in_a_folder_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "it is not a regular file" in read_weight_files(tmp_path, None).unknown


def test_a_folder_that_cannot_be_listed_says_so(tmp_path: Path) -> None:
    assert (
        "it cannot be listed (No such file or directory)"
        in read_weight_files(tmp_path / "gone", None).unknown
    )


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(json.dumps({}).encode())
    found = read_weight_files(tmp_path, None)
    assert (found.total_bytes, found.faulty) == (None, True)
    assert "model.safetensors: the file is shorter" in found.unknown
