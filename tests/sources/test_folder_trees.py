"""Paths of a process in a container, followed to the files that it sees and to no others; and its model among them."""

import json
from pathlib import Path

import pytest

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.local_server import FolderTree, LocalServer
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.sources.folder_trees import NotFollowedError, follow_all, seen_from_here
from kvheadroom.sources.server_model import read_server_model


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The `/` of a container, with a model in /data/llama."""
    model(tmp_path / "root" / "data" / "llama")
    return tmp_path / "root"


def model(folder: Path, layers: int = 4) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    return folder


def link(path: Path, target: str | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_paths_of_our_own_tree_are_themselves() -> None:
    assert seen_from_here("", "/a/../b") == Path("/a/../b")


def test_absolute_links_lead_to_the_containers_own_files(root: Path) -> None:
    link(root / "models", "/data")
    link(root / "srv" / "m", "../models/./llama")
    assert seen_from_here(str(root), "/srv/m/config.json") == root / "data" / "llama" / "config.json"
    assert seen_from_here(str(root), "/../../data") == root / "data"
    assert seen_from_here(str(root), "/nothing/there") == root / "nothing" / "there"


def test_links_in_a_circle_end(root: Path) -> None:
    link(root / "a", "/b")
    link(root / "b", "/a")
    with pytest.raises(NotFollowedError):
        seen_from_here(str(root), "/a/x")


def test_a_file_behind_an_absolute_link_is_none_of_ours_of_the_same_name(root: Path, tmp_path: Path) -> None:
    folder = root / "data" / "llama"
    follow_all(str(root), folder)
    link(folder / "a.json", "config.json")
    follow_all(str(root), folder)
    # The same path leads to a file here and to another one there.
    outside = tmp_path / "weights"
    outside.write_text("ours")
    (root / str(outside).lstrip("/")).parent.mkdir(parents=True)
    (root / str(outside).lstrip("/")).write_text("theirs")
    link(folder / "model.safetensors", outside)
    with pytest.raises(NotFollowedError):
        follow_all(str(root), folder)


def read(
    told: str | None, *, model: str | None = None, revision: str | None = None, **folders: str
) -> ModelFiles | SourceFailure:
    server = LocalServer(
        pid=7,
        started_ticks=1,
        command_line=CommandLine(),
        model=model,
        revision=revision,
        folders=FolderTree(**folders),
    )
    return read_server_model(told, server)


def layers(files: ModelFiles | SourceFailure) -> object:
    assert isinstance(files, ModelFiles), files
    return files.config["num_hidden_layers"]


def test_a_model_is_found_by_the_path_that_the_server_was_given(root: Path) -> None:
    tree = str(root)
    assert layers(read("/data/llama", root=tree)) == 4
    assert layers(read(None, model="llama", root=tree, working="/data")) == 4
    assert layers(read(None, model="./llama/", root=tree, working="/data")) == 4
    assert layers(read(str(root / "data" / "llama"))) == 4
    # What the server itself says comes before its command line.
    model(root / "data" / "other", layers=8)
    assert layers(read("/data/other", model="/data/llama", root=tree)) == 8


def test_a_name_on_the_hub_is_found_in_the_cache_of_its_process(root: Path) -> None:
    entry = root / "cache" / "hub" / "models--a--b"
    model(entry / "snapshots" / ("1" * 40), layers=5)
    model(entry / "snapshots" / ("2" * 40), layers=6)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("1" * 40)
    (entry / "refs" / "v2").write_text("2" * 40)
    given = {"root": str(root), "hub_cache": "/cache/hub"}
    assert layers(read("a/b", **given)) == 5
    assert layers(read(None, model="a/b", revision="v2", **given)) == 6
    # A folder of that name is the model, for vLLM too.
    model(root / "work" / "a" / "b", layers=7)
    assert layers(read("a/b", working="/work", **given)) == 7


@pytest.mark.parametrize(
    ("told", "model", "why"),
    [
        (None, None, "neither the server nor its command line tells the model"),
        ("/data/none", None, "its model '/data/none' is no folder that its process sees"),
        (None, "/data/S3CRET", "the model of its command line is no folder that its process sees"),
        ("a/b", None, "its model 'a/b' is a name on the hub, and where the server keeps those is not known"),
        ("s3://bucket/x", None, "its model 's3://bucket/x' is neither a folder"),
        (None, "S3CRET token", "the model of its command line is neither a folder"),
        (None, "x\0y", "its model, or a folder on the way to it, has a name that cannot be shown"),
        (None, "/m\udcff", "its model, or a folder on the way to it, has a name that cannot be shown"),
    ],
)
def test_a_model_that_is_not_found_is_told_without_a_word_of_the_command_line(
    root: Path, told: str | None, model: str | None, why: str
) -> None:
    failure = read(told, model=model, root=str(root))
    assert isinstance(failure, SourceFailure)
    assert failure.detail.startswith(why)
    assert "S3CRET" not in failure.detail


def test_a_model_behind_links_that_lead_elsewhere_from_here_is_not_read(root: Path, tmp_path: Path) -> None:
    config = root / "data" / "llama" / "config.json"
    config.unlink()
    elsewhere = model(tmp_path / "elsewhere", layers=99)
    link(config, elsewhere / "config.json")
    failure = read("/data/llama", root=str(root))
    assert isinstance(failure, SourceFailure)
    assert failure.reason is FailureReason.UNREACHABLE
    assert "lead elsewhere outside its container" in failure.detail
