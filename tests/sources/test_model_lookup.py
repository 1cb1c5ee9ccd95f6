"""MODEL -> files: which of folder, file, cache and hub is taken."""

import json
from pathlib import Path

import pytest

from kvheadroom.capacity.readings import SourceFailure
from kvheadroom.sources.hub_environment import HubName, cached_folder, parse_hub_name, read_hub_environment
from kvheadroom.sources.model_lookup import LocatedModel, find_model
from tests.doubles.http_server import http_server, text_answer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_model(folder: Path, total: int | None = 1000, name: str = "X") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [name]}))
    if total is not None:
        index = {"metadata": {"total_size": total}, "weight_map": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_cache(cache: Path, total: int | None = 1000) -> Path:
    entry = cache / "models--org--name"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(COMMIT)
    return write_model(entry / "snapshots" / COMMIT, total)


def found(text: str, environment: dict[str, str], home: Path) -> LocatedModel:
    located = find_model(text, environment, home)
    assert isinstance(located, LocatedModel), located
    return located


def test_a_folder_is_a_folder_even_where_its_name_could_be_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "org" / "name", 5)
    monkeypatch.chdir(tmp_path)
    assert found("org/name", {}, tmp_path).files.weights_bytes == 5


def test_a_config_file_alone_is_enough_for_the_config(tmp_path: Path) -> None:
    path = tmp_path / "glm.config.json"
    path.write_text('{"architectures": ["X"]}')
    located = found(str(path), {}, tmp_path)
    assert (located.files.config, located.files.weights_bytes) == ({"architectures": ["X"]}, None)


def test_what_modelopt_says_beside_a_config_file_is_taken_with_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["X"]}')
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    located = found(str(path), {}, tmp_path)
    assert located.files.config["quantization_config"] == {"quantization": {"quant_algo": "FP8"}}


@pytest.mark.parametrize(
    "variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", None]
)
def test_a_name_in_the_cache_needs_no_hub(tmp_path: Path, variable: str | None) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    cache, environment = {
        "HF_HOME": (elsewhere / "hub", {"HF_HOME": str(elsewhere)}),
        "XDG_CACHE_HOME": (elsewhere / "huggingface" / "hub", {"XDG_CACHE_HOME": str(elsewhere)}),
        None: (home / ".cache" / "huggingface" / "hub", {}),
    }.get(variable, (elsewhere, {str(variable): str(elsewhere)}))
    write_cache(cache, 7)
    located = found("org/name", {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}, home)
    assert located.files.weights_bytes == 7
    assert located.where == "the hub's cache, commit 0123456789ab"


def test_what_the_cache_lacks_is_asked_of_the_hub(tmp_path: Path) -> None:
    write_cache(tmp_path, None)
    base = "/org/name/resolve/main/"
    answers = {
        base + "config.json": text_answer('{"architectures": ["X"]}'),
        base + "model.safetensors.index.json": text_answer('{"metadata": {"total_size": 9}}'),
    }
    with http_server(answers) as (endpoint, _):
        located = found("org/name", {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": endpoint}, tmp_path)
    assert located.files.weights_bytes == 9
    assert located.where == f"{endpoint}, revision main"


def test_a_cache_without_weights_still_serves_where_the_hub_does_not_answer(tmp_path: Path) -> None:
    write_cache(tmp_path, None)
    located = found(
        "org/name", {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}, tmp_path
    )
    assert located.files.weights_bytes is None


def test_offline_the_hub_is_not_asked_and_the_way_out_is_told(tmp_path: Path) -> None:
    with http_server({}) as (endpoint, seen):
        environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": endpoint}
        got = find_model("org/name", environment, tmp_path)
    assert isinstance(got, SourceFailure)
    assert seen == []
    assert "HF_HUB_OFFLINE forbids" in got.detail
    assert "give a folder" in got.detail


@pytest.mark.parametrize(
    "text", ["/no/such/folder", "./missing", "~/missing", "a b", "a/b/c", "", "x\0y", "-x/y"]
)
def test_what_can_be_nothing_is_told(text: str, tmp_path: Path) -> None:
    got = find_model(text, {"HF_ENDPOINT": "http://127.0.0.1:9"}, tmp_path)
    assert isinstance(got, SourceFailure)
    assert "no folder here, no config.json, and no name on the hub" in got.detail


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("zai-org/GLM-5.3", HubName("zai-org/GLM-5.3")),
        ("gpt2", HubName("gpt2")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/../../etc", None),
        ("org/na--me", None),
        ("org/name@", None),
        ("org/name@../../x", None),
        ("http://host/model", None),
    ],
)
def test_names_of_the_hub_are_told_from_other_text(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name


def test_a_ref_that_names_no_commit_leads_nowhere(tmp_path: Path) -> None:
    write_cache(tmp_path)
    (tmp_path / "models--org--name" / "refs" / "main").write_text("../../../../etc")
    assert cached_folder(tmp_path, HubName("org/name")) is None
    assert cached_folder(tmp_path, HubName("org/name", COMMIT)) is not None


def test_the_token_comes_from_the_environment_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "huggingface" / "token"
    file.parent.mkdir()
    file.write_text("hf_from_file\n")
    environment = {"HF_HOME": str(file.parent)}
    assert read_hub_environment(environment, tmp_path).token == "hf_from_file"
    assert read_hub_environment({**environment, "HF_TOKEN": " hf_said "}, tmp_path).token == "hf_said"
    other = tmp_path / "other"
    other.write_text("hf_other")
    assert read_hub_environment({**environment, "HF_TOKEN_PATH": str(other)}, tmp_path).token == "hf_other"


@pytest.mark.parametrize("text", ["", "\n", "two words", "line\nline", "\xff\xfe"])
def test_a_token_file_that_holds_none_is_no_token(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(text.encode("latin-1"))
    assert read_hub_environment({"HF_TOKEN_PATH": str(path)}, tmp_path).token is None
