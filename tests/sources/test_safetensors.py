"""Headers of safetensors files: what they tell, and the lies that are told of them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.stored_model import ModelFiles, StoredTensor, TensorInventory
from kvheadroom.sources.model_files import read_model_files
from kvheadroom.sources.safetensors import read_tensors
from kvheadroom.sources.safetensors_header import MAX_HEADER_BYTES

WIDTHS = {"BF16": 2, "F32": 4, "U8": 1}


def tensors(**shapes: tuple[str, list[int]]) -> dict[str, Any]:
    """A true header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        size = WIDTHS[dtype]
        for each in shape:
            size *= each
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header


def write(path: Path, header: dict[str, Any], *, data_bytes: int | None = None) -> None:
    """The file; its tensors are a hole."""
    told = json.dumps(header).encode()
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    with path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        file.truncate(8 + len(told) + (max(ends, default=0) if data_bytes is None else data_bytes))


def sizes(found: TensorInventory | None) -> Mapping[str, int | None]:
    assert found is not None
    assert not found.problem
    return found.sizes


ONE = tensors(norm=("BF16", [8]), scale=("F32", []))
TWO = tensors(gate=("U8", [4, 4]))


def test_each_tensor_of_one_file_has_its_bytes(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", ONE)
    found = read_tensors(tmp_path, None)
    assert found is not None
    assert found.sizes == {"norm": 16, "scale": 4}
    assert found.stored == (StoredTensor("norm", "BF16", (8,), 16), StoredTensor("scale", "F32", (), 4))
    assert found.total_bytes == 20


def test_only_headers_of_large_files_are_read(tmp_path: Path) -> None:
    large = tensors(weight=("BF16", [2**18, 2**18]))
    write(tmp_path / "model.safetensors", large)
    assert read_tensors(tmp_path, None) == TensorInventory(
        sizes={"weight": 2**37}, stored=(StoredTensor("weight", "BF16", (2**18, 2**18), 2**37),)
    )


def test_shards_are_those_that_the_index_names(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", ONE)
    write(tmp_path / "b.safetensors", TWO)
    write(tmp_path / "consolidated.safetensors", ONE)
    where = {"norm": "a.safetensors", "scale": "a.safetensors", "gate": "b.safetensors"}
    found = read_tensors(tmp_path, {"weight_map": where})
    assert sizes(found) == {"norm": 16, "scale": 4}
    (tmp_path / "consolidated.safetensors").unlink()
    found = read_tensors(tmp_path, {"weight_map": where})
    assert sizes(found) == {"norm": 16, "scale": 4, "gate": 16}


def test_a_consolidated_copy_beside_other_files_is_not_counted_twice(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", ONE)
    write(tmp_path / "consolidated.safetensors", ONE)
    assert sizes(read_tensors(tmp_path, None)) == {"norm": 16, "scale": 4}
    (tmp_path / "model.safetensors").unlink()
    assert sizes(read_tensors(tmp_path, None)) == {"norm": 16, "scale": 4}


def test_with_an_index_alone_the_names_are_known(tmp_path: Path) -> None:
    found = read_tensors(tmp_path, {"weight_map": {"norm": "a.safetensors"}})
    assert found == TensorInventory(sizes={"norm": None})
    assert found is not None
    assert found.total_bytes is None


def test_a_folder_without_tensors_has_none(tmp_path: Path) -> None:
    assert read_tensors(tmp_path, None) is None
    assert read_tensors(tmp_path / "nowhere", None) is None


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "..", "", "b/a.safetensors", 5, "\0"])
def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path, file: Any) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "a.safetensors", ONE)
    assert read_tensors(tmp_path / "model", {"weight_map": {"norm": file}}) is None


def changed(**change: Any) -> dict[str, Any]:
    return {"norm": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16], **change}}


@pytest.mark.parametrize(
    ("header", "data_bytes", "problem"),
    [
        (changed(shape=[9]), 16, "norm takes 16 bytes, and its shape and type make 18"),
        (changed(dtype="F32"), 16, "norm takes 16 bytes, and its shape and type make 32"),
        (changed(dtype="Q3"), 16, "norm has no type, shape and place that are known"),
        (changed(shape=None), 16, "norm has no type, shape and place that are known"),
        (changed(shape=[True]), 2, "norm has no whole numbers"),
        (changed(shape=[-8]), 16, "norm has no whole numbers"),
        (changed(data_offsets=[0]), 16, "norm has no type, shape and place that are known"),
        (changed(data_offsets=[16, 32]), 32, "norm begins at byte 16, and 0 is where it should"),
        (changed(), 15, "was cut off or written over"),
        (changed(), 17, "was cut off or written over"),
        (changed() | {"other": changed()["norm"]}, 16, "other begins at byte 0, and 16 is where it should"),
        ({"norm": 5}, 0, "norm has no type, shape and place that are known"),
    ],
)
def test_a_header_that_lies_is_told(
    tmp_path: Path, header: dict[str, Any], data_bytes: int, problem: str
) -> None:
    told = json.dumps(header).encode()
    content = len(told).to_bytes(8, "little") + told + bytes(data_bytes)
    (tmp_path / "model.safetensors").write_bytes(content)
    found = read_tensors(tmp_path, None)
    assert found is not None
    assert problem in found.problem
    assert str(tmp_path / "model.safetensors") in found.problem
    assert found.total_bytes is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "shorter than the length of a header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
        ((2**40).to_bytes(8, "little"), "so it is no safetensors file"),
        ((2).to_bytes(8, "little") + b"{]", "its header is no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "its header holds no JSON object"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "its header is no JSON"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_told(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    found = read_tensors(tmp_path, None)
    assert found is not None
    assert problem in found.problem


def test_a_header_of_absurd_length_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as sparse:
        sparse.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        sparse.truncate(2**31)
    found = read_tensors(tmp_path, None)
    assert found is not None
    assert "so it is no safetensors file" in found.problem


def test_a_tensor_in_two_shards_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", ONE)
    write(tmp_path / "b.safetensors", ONE)
    found = read_tensors(tmp_path, None)
    assert found is not None
    assert "b.safetensors: norm is in another file as well" in found.problem


def test_a_shard_that_is_missing_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", ONE)
    where = {"norm": "a.safetensors", "scale": "a.safetensors", "gate": "b.safetensors"}
    found = read_tensors(tmp_path, {"weight_map": where})
    assert found is not None
    assert "b.safetensors: the index names it, and there is no such file" in found.problem


def test_a_tensor_that_no_shard_holds_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", ONE)
    found = read_tensors(tmp_path, {"weight_map": {"norm": "a.safetensors", "gone": "a.safetensors"}})
    assert found is not None
    assert "the index names gone, and no file holds it" in found.problem


def test_a_pipe_in_place_of_a_shard_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert read_tensors(tmp_path, None) is None


def test_headers_give_the_size_of_the_weights_where_there_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "model.safetensors", ONE)
    files = read_model_files(str(tmp_path))
    assert isinstance(files, ModelFiles)
    assert files.weights_bytes == 20


def test_headers_count_more_than_the_index(tmp_path: Path) -> None:
    # Some converters put the sizes of the files into total_size.
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "a.safetensors", ONE)
    index = {"metadata": {"total_size": 300}, "weight_map": {"norm": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = read_model_files(str(tmp_path))
    assert isinstance(files, ModelFiles)
    assert files.weights_bytes == 20
