"""`kvheadroom rules` and `kvheadroom dashboards`: what is shipped, written where somebody wants it."""

import json
import os
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from kvheadroom.shipped_files import NotWrittenError, Written, write_files
from tests.daemon import COMMAND
from tests.dashboards.expressions import run_promtool
from tests.end_to_end.prometheus_server import Binaries

ROOT = Path(__file__).parents[1]
RULES = ROOT / "dashboards" / "rules"
DASHBOARDS = {file.name: file.read_text() for file in sorted((ROOT / "dashboards" / "json").iterdir())}


def run(command: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )


def groups(text: str) -> list[object]:
    found: list[object] = yaml.safe_load(text)["groups"]
    return found


def test_the_rules_are_one_file_with_all_groups_recording_first() -> None:
    told = run("rules")
    assert (told.returncode, told.stderr) == (0, "")
    assert groups(told.stdout) == [
        group for name in ("recording.yaml", "alerts.yaml") for group in groups((RULES / name).read_text())
    ]
    comments = [
        line for file in sorted(RULES.iterdir(), reverse=True) for line in file.read_text().splitlines() if "# " in line
    ]  # fmt: skip
    assert [line for line in told.stdout.splitlines() if "# " in line] == [
        # The heads of both stand above the groups.
        *(line for line in comments if line.startswith("#")),
        *(line for line in comments if not line.startswith("#")),
    ]


def test_prometheus_accepts_the_written_rules(each_prometheus: Binaries, tmp_path: Path) -> None:
    file = tmp_path / "kvheadroom.rules.yml"
    told = run("rules", "--out", file)
    assert (told.returncode, told.stdout, told.stderr) == (0, f"wrote {file}\n", "")
    code, output = run_promtool(
        each_prometheus.promtool, "check", "rules", "--lint=all", "--lint-fatal", file
    )
    assert code == 0, output
    number = sum(len(group["rules"]) for group in yaml.safe_load(file.read_text())["groups"])
    assert f"{number} rules found" in output


def test_rules_that_differ_are_left_alone_until_forced(tmp_path: Path) -> None:
    file = tmp_path / "rules.yml"
    file.write_text("groups: []\n")
    file.chmod(0o640)
    told = run("rules", "--out", file)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == (
        f"kvheadroom: {file} has another content, and nothing was written; --force replaces what is there\n"
    )
    assert file.read_text() == "groups: []\n"
    assert run("rules", "--out", file, "--force").returncode == 0
    assert file.read_text() == run("rules").stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o640, "who could read it still can"
    before = file.stat()
    again = run("rules", "--out", file)
    assert (again.returncode, again.stdout) == (0, f"{file} was there already, the same\n")
    assert file.stat().st_ino == before.st_ino
    assert [one.name for one in tmp_path.iterdir()] == ["rules.yml"]


def test_every_dashboard_is_written_byte_by_byte_and_nothing_else_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "grafana"
    told = run("dashboards", "--out", folder)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == "".join(f"wrote {folder / name}\n" for name in DASHBOARDS)
    assert {file.name: file.read_text() for file in folder.iterdir()} == DASHBOARDS
    assert all(json.loads(text)["uid"] for text in DASHBOARDS.values())
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o666 & ~umask}
    (folder / "mine.json").write_text("{}")
    again = run("dashboards", "--out", folder)
    assert again.stdout == "".join(f"{folder / name} was there already, the same\n" for name in DASHBOARDS)
    assert (folder / "mine.json").read_text() == "{}"


def test_one_dashboard_that_differs_keeps_all_from_being_written(tmp_path: Path) -> None:
    first = next(iter(DASHBOARDS))
    (tmp_path / first).write_text("mine")
    told = run("dashboards", "--out", tmp_path)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr.startswith(
        f"kvheadroom: {tmp_path / first} has another content, and nothing was written"
    )
    assert [file.name for file in tmp_path.iterdir()] == [first]
    assert run("dashboards", "--out", tmp_path, "--force").returncode == 0
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == DASHBOARDS


def test_of_several_files_none_is_written_where_one_differs(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    b.write_text("mine")
    c.write_text("mine too")
    with pytest.raises(NotWrittenError, match=rf"^{b}, {c} have another content, and nothing was written"):
        write_files({a: "1", b: "2", c: "3"}, force=False)
    assert not a.exists()
    assert write_files({a: "1", b: "mine"}, force=False) == [
        Written(a, was_there=False),
        Written(b, was_there=True),
    ]


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    write_files({link: "new"}, force=False)
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_what_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rules.yml"
    file.write_text("old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvheadroom.shipped_files.os.fsync", full)
    with pytest.raises(NotWrittenError, match=r"rules\.yml cannot be written: No space left on device"):
        write_files({file: "new"}, force=True)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("command", "out", "message"),
    [
        ("rules", "nowhere/rules.yml", "there is no folder"),
        ("rules", "folder", "is there and no regular file"),
        ("rules", "fifo", "is there and no regular file"),
        ("dashboards", "file", "is a file, and a folder is needed"),
        ("dashboards", "file/below", "cannot be made: Not a directory"),
    ],
)
def test_a_place_that_is_none_ends_with_2(tmp_path: Path, command: str, out: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    told = run(command, "--out", tmp_path / out)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("kvheadroom: --out: ")
    assert message in told.stderr


def test_usage_is_told() -> None:
    assert run("dashboards").returncode == 2
    told = run("rules", "--force")
    assert (told.returncode, told.stderr) == (
        2,
        "kvheadroom: --force: nothing is replaced on standard output; give --out FILE\n",
    )


def test_the_wheel_has_what_the_commands_write(tmp_path: Path) -> None:
    subprocess.run(
        [COMMAND[0], "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True, capture_output=True
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    told = subprocess.run(
        [COMMAND[0], "-P", "-m", "kvheadroom", "dashboards", "--out", tmp_path / "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert {file.name: file.read_text() for file in (tmp_path / "out").iterdir()} == DASHBOARDS
    rules = subprocess.run(
        [COMMAND[0], "-P", "-m", "kvheadroom", "rules"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert rules.stdout == run("rules").stdout
