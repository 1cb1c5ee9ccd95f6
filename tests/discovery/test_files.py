"""Servers listed in files: Prometheus's form, and what becomes of a file that is broken, gone, huge or being written."""

import asyncio
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvheadroom.config import FileSdConfig
from kvheadroom.discovery import files as module
from kvheadroom.discovery.files import FileDiscovery
from kvheadroom.discovery.source import Found
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.sources.target_groups import MAX_TARGETS, parse_target_groups
from kvheadroom.strict_yaml import read_small_file


@pytest.fixture(autouse=True)
def _settles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.0)
    # On a busy machine a test's one question is to be enough.
    monkeypatch.setattr(module, "PARSE_SECONDS", 60.0)
    monkeypatch.setattr(module, "READ_SECONDS", 60.0)


def source(*files: Path | str, **settings: Any) -> FileDiscovery:
    config = FileSdConfig.model_validate({"files": [str(file) for file in files], **settings})
    return FileDiscovery("file_sd_configs[0]", config, SlowFiles())


def find(discovery: FileDiscovery, *, anew: bool = False) -> Found:
    return asyncio.run(discovery.find(anew=anew))


def names(found: Found) -> list[str] | None:
    return None if found.replicas is None else [replica.replica for replica in found.replicas]


def fault(found: Found, folder: Path) -> tuple[str, str]:
    assert found.failure is not None
    assert found.failure.source == "file_sd_configs[0]"
    return str(found.failure.reason), found.failure.detail.replace(str(folder), "")


def listed(*targets: str, **labels: str) -> str:
    return json.dumps([{"targets": targets, "labels": labels}])


@pytest.mark.parametrize("target", ["h:1?token=s3cret", "h:1#s3cret", "h h:1?s3cret", "u:s3cret@h:1"])
def test_what_may_be_a_key_in_a_target_is_not_shown(tmp_path: Path, target: str) -> None:
    (tmp_path / "a.json").write_text(listed(target))
    (sentence,) = find(source(tmp_path / "a.json")).left_out
    assert "s3cret" not in sentence


def test_json_and_yaml_of_prometheus_are_read_and_the_template_stands_under_each(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '[{"targets": ["gpu-1:8000", "10.0.0.2:8000"], "labels": {"team": "search", "__meta_x": "dropped"}},'
        ' {"targets": ["[2001:db8::1]:8000"]}]'
    )
    (tmp_path / "b.yml").write_text(
        "- targets: ['gpu-3:8443']\n"
        "  labels: {rack: 12, answer: yes, none: '', __scheme__: https, __metrics_path__: /models/a/metrics}\n"
        "- labels: {team: chat, __replica__: llama-b, __pod__: vllm/llama-b-*}\n  targets: [gpu-4:8000]\n"
    )
    found = find(
        source(
            tmp_path / "*.json",
            tmp_path / "b.yml",
            replica={
                "gpu": "H100",
                "flags": {"tensor_parallel_size": 4},
                "labels": {"site": "x", "team": "?"},
            },
        )
    )
    assert found.failure is None
    assert found.left_out == ()
    assert found.replicas is not None
    assert [(one.replica, one.url, one.labels) for one in found.replicas] == [
        ("gpu-1:8000", "http://gpu-1:8000", {"site": "x", "team": "search"}),
        ("10.0.0.2:8000", "http://10.0.0.2:8000", {"site": "x", "team": "search"}),
        ("[2001:db8::1]:8000", "http://[2001:db8::1]:8000", {"site": "x", "team": "?"}),
        (
            "gpu-3:8443/models/a",
            "https://gpu-3:8443/models/a",
            {"site": "x", "team": "?", "rack": "12", "answer": "yes"},
        ),
        ("llama-b", "http://gpu-4:8000", {"site": "x", "team": "chat"}),
    ]
    assert [one.pod for one in found.replicas] == [None, None, None, None, "vllm/llama-b-*"]
    assert {one.gpu for one in found.replicas} == {"H100"}
    assert {one.flags.tensor_parallel_size for one in found.replicas} == {4}


@pytest.mark.parametrize(
    ("target", "labels", "why"),
    [
        ("http://gpu-1:8000", {}, "a target is host:port; https is said by the label `__scheme__`"),
        ("gpu-1:8000/metrics", {}, "a target is host:port"),
        ("gpu-1:port", {}, "url: 'http://gpu-1:port' is no server's address"),
        ("", {}, "url: 'http://' is no server's address"),
        ("gpu 1:8000", {}, "is no server's address"),
        ("gpu-1:8000", {"__replica__": "a\nERROR b"}, "a name is one line of characters that can be printed"),
        ("gpu-1:8000", {"__scheme__": "ftp"}, "the label `__scheme__` is http or https"),
        ("gpu-1:8000", {"__metrics_path__": "/stats"}, "begins with / and ends with /metrics"),
        ("gpu-1:8000", {"__metrics_path__": "/x?y=/metrics"}, "an address may not have a query"),
        ("gpu-1:8000", {"__param_name": "x"}, "labels `__param_...` are not followed here"),
        ("gpu-1:8000", {"__scrape_interval__": "1s"}, "all servers are scraped at `scrape_interval`"),
        ("gpu-1:8000", {"__address__": "h:1"}, "the target itself is the address"),
        ("gpu-1:8000", {"__replica__": "x" * 201}, "name: string should have at most 200 characters"),
        ("gpu-1:8000", {"engine": "0"}, "'engine' is a label of kvheadroom's own series"),
        ("gpu-1:8000", {"a-b": "x"}, "'a-b' is no name of a label; letters, digits and _ are"),
        ("gpu-1:8000", {"a": "x\ny"}, "the label a needs one line of at most 200 characters"),
        ("gpu-1:8000", {"a": "x" * 201}, "the label a needs one line of at most 200 characters"),
        ("gpu-1:8000", {f"l{i}": "x" for i in range(31)}, "there are 31 labels; at most 30 are taken"),
    ],
)
def test_a_target_that_is_no_server_is_left_out_alone_and_with_words(
    tmp_path: Path, target: str, labels: dict[str, str], why: str
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"targets": [target], "labels": labels}, {"targets": ["good:1"]}]))
    found = find(source(file))
    assert found.failure is None
    assert names(found) == ["good:1"]
    (sentence,) = found.left_out
    assert sentence.startswith(f"{file}: {target!r}: ")
    assert why in sentence


def test_a_password_in_a_target_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(listed("monitor:s3cret@gpu-1:8000", "http://monitor:s3cret@gpu-1:8000"))
    found = find(source(tmp_path / "a.json"))
    assert names(found) == []
    assert len(found.left_out) == 2
    assert "s3cret" not in repr(found)
    assert "an address may not hold a user or password" in found.left_out[0]


def test_what_is_listed_twice_is_one_and_with_other_labels_the_second_is_told(tmp_path: Path) -> None:
    same = {"targets": ["h:1", "h:1"], "labels": {"a": "x"}}
    (tmp_path / "a.json").write_text(json.dumps([same, same, {"targets": ["h:1"], "labels": {"a": "y"}}]))
    found = find(source(tmp_path / "a.json"))
    # Two of one name: the list of all that are watched leaves the second out (test_watched.py).
    assert found.replicas is not None
    assert [one.labels for one in found.replicas] == [{"a": "x"}, {"a": "y"}]


BROKEN = [
    ("a.json", b'[{"targets": ["h:1"', "bad_answer", "is no valid JSON, line 1, column 20"),
    ("a.json", b"", "bad_answer", "is no valid JSON"),
    ("a.json", b"{}", "bad_answer", "is no list of target groups"),
    ("a.json", b"[1]", "bad_answer", "group 1 is no mapping"),
    ("a.json", b'[{"target": ["h:1"]}]', "bad_answer", "group 1 has the key 'target'; only `targets` and"),
    ("a.json", b'[{"targets": ["h:1"]}, {"labels": {}}]', "bad_answer", "group 2 needs `targets`, a list"),
    ("a.json", b'[{"targets": [8000]}]', "bad_answer", "group 1 needs `targets`, a list of texts"),
    (
        "a.json",
        b'[{"targets": [], "labels": {"a": 1}}]',
        "bad_answer",
        "`labels` that are no mapping of texts",
    ),
    ("a.json", b'[{"targets": [], "targets": []}]', "bad_answer", "the key 'targets' twice"),
    ("a.json", b"[" * 100_000, "bad_answer", "nested too deeply"),
    ("a.json", b"[NaN]", "bad_answer", "group 1 is no mapping"),
    ("a.json", b'["\xff"]', "bad_answer", "is not UTF-8 text"),
    ("a.yml", b"- targets: [h:1\n", "bad_answer", "is no valid YAML, line 2"),
    ("a.yml", b"", "bad_answer", "is no list of target groups"),
    ("a.yml", b"just words", "bad_answer", "is no list of target groups"),
    ("a.yml", b"- targets: &a [h:1]\n- targets: *a\n", "bad_answer", "aliases (*name) are not allowed here"),
    ("a.yml", b"- targets: [!!python/object/apply:os.system [x]]\n", "bad_answer", "is no valid YAML"),
    ("a.yml", b"[" * 5000, "bad_answer", "is n"),
    ("a.json", b"[" + b" " * (4 * 1024**2) + b"]", "too_large", "it is larger than 4 MiB"),
    (
        "a.json",
        listed(*(f"h:{i}" for i in range(1, MAX_TARGETS + 2))).encode(),
        "bad_answer",
        f"holds {MAX_TARGETS + 1} targets; at most {MAX_TARGETS} are taken",
    ),
]


@pytest.mark.parametrize(("name", "content", "reason", "words"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_keeps_its_last_good_list_and_says_why(
    tmp_path: Path, name: str, content: bytes, reason: str, words: str
) -> None:
    file, other = tmp_path / name, tmp_path / "other.json"
    file.write_text(listed("old:1", "old:2"))
    other.write_text(listed("other:1"))
    discovery = source(file, other)
    assert names(find(discovery)) == ["old:1", "old:2", "other:1"]
    file.write_bytes(content)
    other.write_text(listed("other:2"))
    found = find(discovery)
    assert names(found) == ["old:1", "old:2", "other:2"]
    told, detail = fault(found, tmp_path)
    assert (told, words in detail) == (reason, True), detail
    assert detail.endswith("; its last good list (2 servers) stays in use")
    file.write_text(listed("new:1"))
    found = find(discovery)
    assert (names(found), found.failure) == (["new:1", "other:2"], None)


def test_a_file_that_is_gone_keeps_its_list_until_the_config_is_loaded_anew(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(listed(f"{name}:1"))
    discovery = source(tmp_path / "*.json")
    assert names(find(discovery)) == ["a:1", "b:1"]
    (tmp_path / "b.json").unlink()
    found = find(discovery)
    assert names(found) == ["a:1", "b:1"]
    assert fault(found, tmp_path) == (
        "not_found",
        "/b.json is not there; its last good list (1 server) stays in use",
    )
    (tmp_path / "b.json").write_text("[]")
    found = find(discovery)
    assert (names(found), found.failure) == (["a:1"], None)
    (tmp_path / "b.json").unlink()
    assert find(discovery).failure is not None
    found = find(discovery, anew=True)
    assert (names(found), found.failure) == (["a:1"], None)
    (tmp_path / "a.json").unlink()
    found = find(discovery, anew=True)
    assert names(found) == []
    assert fault(found, tmp_path) == ("not_found", "no file matches /*.json")


def test_where_nothing_could_be_read_nothing_is_known_and_where_nothing_is_there_is_nobody(
    tmp_path: Path,
) -> None:
    found = find(source(tmp_path / "a.json"))
    assert (names(found), fault(found, tmp_path)) == ([], ("not_found", "/a.json is not there"))
    (tmp_path / "a.json").write_text("[")
    assert names(find(source(tmp_path / "a.json"))) is None
    (tmp_path / "b.json").write_text("[]")
    assert names(find(source(tmp_path / "a.json", tmp_path / "b.json"))) == []


def test_a_folder_a_pipe_and_a_forbidden_file_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").mkdir()
    assert (
        fault(find(source(tmp_path / "a.json")), tmp_path)[1]
        == "/a.json cannot be read (it is no regular file)"
    )
    os.mkfifo(tmp_path / "b.json")
    assert (
        fault(find(source(tmp_path / "b.json")), tmp_path)[1]
        == "/b.json cannot be read (it is no regular file)"
    )

    def forbidden(_: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "read_small_file", forbidden)
    assert fault(find(source(tmp_path / "c.json")), tmp_path) == (
        "no_permission",
        "/c.json may not be read by this user",
    )


def test_a_pattern_without_a_file_is_told_as_long_as_it_has_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(listed("a:1"))
    discovery = source(tmp_path / "a*.json", tmp_path / "b*.json")
    for _ in range(2):
        found = find(discovery)
        assert names(found) == ["a:1"]
        assert fault(found, tmp_path) == ("not_found", "no file matches /b*.json")
    (tmp_path / "b1.json").write_text(listed("b:1"))
    found = find(discovery)
    assert (names(found), found.failure) == (["a:1", "b:1"], None)


def test_what_is_written_as_nothing_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("- targets: [a:1]\n  labels:\n- targets:\n")
    (tmp_path / "b.json").write_text('[{"targets": ["b:1"], "labels": null}, {"targets": null}]')
    (tmp_path / "c.json").write_text("null")
    found = find(source(tmp_path / "a.yml", tmp_path / "b.json", tmp_path / "c.json"))
    assert (names(found), found.failure) == (["a:1", "b:1"], None)


def test_files_that_list_too_many_together_or_are_too_much_yaml_are_left_out_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TARGETS", 3)
    (tmp_path / "a.json").write_text(listed("a:1", "a:2"))
    (tmp_path / "b.json").write_text(listed("b:1", "b:2"))
    (tmp_path / "c.json").write_text(listed("c:1"))
    found = find(source(tmp_path / "*.json"))
    assert names(found) == ["a:1", "a:2", "c:1"]
    assert fault(found, tmp_path) == (
        "too_large",
        "/b.json holds 2 targets, with which the files list more than 3",
    )
    (tmp_path / "d.yml").write_text("- targets: []\n" + "#" * module.MAX_YAML_BYTES)
    found = find(source(tmp_path / "d.yml"))
    assert names(found) is None
    assert fault(found, tmp_path)[1].startswith("/d.yml is larger than 400 KiB, the most for YAML")


def test_more_than_can_be_read_at_once_is_read_over_several_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARSE_SECONDS", -1.0)
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(listed(f"{name}:1"))
    discovery = source(tmp_path / "*.json")
    found = find(discovery)
    assert names(found) is None
    assert fault(found, tmp_path)[1].startswith("/a.json is not read yet: the others took so long")
    monkeypatch.setattr(module, "PARSE_SECONDS", 2.0)
    found = find(discovery)
    assert (names(found), found.failure) == (["a:1", "b:1"], None)


def test_a_reading_that_hangs_holds_up_no_files_of_another_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = threading.Event()
    real = read_small_file

    def hangs(path: Path) -> str:
        if path.name == "dead.json":
            mount.wait(30)
        return real(path)

    monkeypatch.setattr(module, "read_small_file", hangs)
    (tmp_path / "dead.json").write_text(listed("dead:1"))
    (tmp_path / "good.json").write_text(listed("good:1"))

    async def run() -> Found:
        files = SlowFiles()
        monkeypatch.setattr(module, "READ_SECONDS", 0.1)
        before, after = (
            FileDiscovery("file_sd_configs[0]", FileSdConfig(files=(str(tmp_path / name),)), files)
            for name in ("dead.json", "good.json")
        )
        assert (await before.find(anew=True)).replicas is None
        monkeypatch.setattr(module, "READ_SECONDS", 10.0)
        found = await after.find(anew=True)
        mount.set()
        return found

    assert names(asyncio.run(run())) == ["good:1"]


def test_several_faults_are_told_by_the_first_and_their_number(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.json").write_text("[")
    _, detail = fault(find(source(tmp_path / "*.json")), tmp_path)
    assert detail.startswith("/a.json is no valid JSON")
    assert detail.endswith("; and 2 more of its files have a fault")


def test_a_file_that_changes_while_it_is_looked_at_is_not_taken_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.yml"
    file.write_text("- targets: [h:1, h:2]\n")
    discovery = source(file)
    assert names(find(discovery)) == ["h:1", "h:2"]
    # The half of a list that is a list itself.
    file.write_text("- targets: [h:3]\n")

    def writes_on(_: float) -> None:
        file.write_text("- targets: [h:3]\n- targets: [h:4]\n")

    monkeypatch.setattr("kvheadroom.discovery.files.time.sleep", writes_on)
    found = find(discovery)
    assert names(found) == ["h:1", "h:2"]
    assert fault(found, tmp_path)[1].startswith("/a.yml is being written; its last good list")
    found = find(discovery)
    assert (names(found), found.failure) == (["h:3", "h:4"], None)


def test_a_dead_mount_under_the_files_ends_the_question_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = threading.Event()
    readings: list[Path] = []

    def hangs(path: Path) -> str:
        # Threads that another test left waiting come here too.
        if path == file:
            readings.append(path)
        mount.wait(30)
        return listed("h:1")

    file = tmp_path / "a.json"
    monkeypatch.setattr(module, "read_small_file", hangs)
    monkeypatch.setattr(module, "READ_SECONDS", 0.1)

    async def run() -> None:
        discovery = source(file)
        for _ in range(3):
            found = await discovery.find(anew=False)
            assert names(found) is None
            assert fault(found, tmp_path) == (
                "timeout",
                "/a.json: not read within 0.1 s; does its disk hang?",
            )
        assert len(readings) == 1
        monkeypatch.setattr(module, "READ_SECONDS", 10.0)
        mount.set()
        assert names(await discovery.find(anew=False)) == ["h:1"]

    asyncio.run(run())


def test_more_files_than_are_read_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 2)
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(listed(f"{name}:1"))
    discovery = source(tmp_path / "*.json")
    assert names(find(discovery)) == ["a:1", "b:1"]
    (tmp_path / "c.json").write_text("[]")
    found = find(discovery)
    assert names(found) == ["a:1", "b:1"]
    assert fault(found, tmp_path) == ("too_large", "3 files match; at most 2 are read")


def test_an_unchanged_file_is_not_parsed_again_be_it_good_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []
    real = parse_target_groups

    def counted(text: str, *, as_json: bool) -> Any:
        parsed.append(text)
        return real(text, as_json=as_json)

    monkeypatch.setattr(module, "parse_target_groups", counted)
    broken = tmp_path / "b.json"
    broken.write_text("[")
    for _ in range(2):
        assert names(find(discovery := source(broken))) is None
        assert names(find(discovery)) is None
    assert parsed == ["[", "["]
    parsed.clear()
    file = tmp_path / "a.json"
    file.write_text(listed("h:1"))
    discovery = source(file)
    for text in (listed("h:1"), listed("h:1"), listed("h:2"), listed("h:1"), listed("h:1")):
        file.write_text(text)
        assert names(find(discovery)) == [json.loads(text)[0]["targets"][0]]
    assert len(parsed) == 3


def test_a_list_cut_anywhere_keeps_what_was_or_is_a_shorter_list(
    tmp_path: Path, seeded: random.Random
) -> None:
    targets = [f"h:{seeded.randrange(1, 9999)}" for _ in range(8)]
    for name in ("a.json", "a.yml"):
        file = tmp_path / name
        groups = [{"targets": targets[:4], "labels": {"a": "x"}}, {"targets": targets[4:]}]
        whole = json.dumps(groups) if name == "a.json" else yaml.safe_dump(groups)
        for cut in seeded.sample(range(len(whole)), 40):
            file.write_text(listed("old:1"))
            discovery = source(file)
            find(discovery)
            file.write_text(whole[:cut])
            found = find(discovery)
            if found.failure is not None:
                assert names(found) == ["old:1"]
            else:
                assert name == "a.yml"
                assert len(names(found) or ()) + len(found.left_out) <= 8


def test_random_bytes_never_raise(tmp_path: Path, seeded: random.Random) -> None:
    good = listed("h:1", "h:2", team="x").encode()
    for _ in range(300):
        content = bytearray(good)
        for _ in range(seeded.randrange(1, 6)):
            content[seeded.randrange(len(content))] = seeded.randrange(256)
        name = seeded.choice(("a.json", "a.yml"))
        (tmp_path / name).write_bytes(bytes(content))
        found = find(source(tmp_path / name))
        assert found.replicas is None or found.failure is None or found.replicas == ()


def test_thousands_of_targets_take_less_than_their_interval(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    targets = [f"10.0.{i // 250}.{i % 250}:8000" for i in range(MAX_TARGETS)]
    file.write_text(yaml.safe_dump([{"targets": targets, "labels": {"team": "x"}}]))
    discovery = source(file)
    started = time.monotonic()
    found = find(discovery)
    took = time.monotonic() - started
    assert len(found.replicas or ()) == MAX_TARGETS
    assert took < discovery.interval_seconds
