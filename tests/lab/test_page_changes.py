"""What is written of successive pages gives exactly these pages back."""

import random
from pathlib import Path

from kvheadroom.lab.page_changes import WHOLE_EVERY, PageChanges, encode
from kvheadroom.lab.recordings import read_recording
from kvheadroom.sources.kept_lines import kept_lines
from tests.conftest import capture, capture_names
from tests.lab.test_recordings import SHIPPED, packed


def written(path: Path, pages: list[str]) -> list[str]:
    changes = PageChanges()
    path.write_bytes(
        packed(*(encode({"t": i, **changes.told(page)}).encode() for i, page in enumerate(pages)))
    )
    return [page for _, page in read_recording(path).pages()]


def test_every_page_of_the_shipped_recording_comes_back(tmp_path: Path) -> None:
    pages = [page for _, page in read_recording(SHIPPED).pages()]
    assert written(tmp_path / "r.gz", pages) == pages
    # As the people who made it wrote it, whole pages are few.
    changes = PageChanges()
    wholes = sum("text" in changes.told(page) for page in pages)
    assert wholes <= len(pages) / WHOLE_EVERY + 3


def test_pages_of_servers_that_have_nothing_in_common_come_back(
    tmp_path: Path, seeded: random.Random
) -> None:
    pages = [kept_lines(capture(seeded.choice(capture_names()))) for _ in range(40)]
    assert written(tmp_path / "r.gz", pages) == pages


def test_series_that_come_go_move_repeat_or_are_no_series_come_back(
    tmp_path: Path, seeded: random.Random
) -> None:
    lines = [
        "# HELP vllm:a A",
        'vllm:a{x="1 2"} 1',
        "vllm:b 2.0",
        "vllm:c",
        "vllm:b 3",
        "vllm:d\t4",
        "",
        "vllm:e 1 7 ",
    ]
    pages = []
    current = list(lines)
    for _ in range(400):
        what = seeded.randrange(6)
        if what == 0:
            seeded.shuffle(current)
        elif what == 1:
            current.append(seeded.choice(lines))
        elif what == 2 and len(current) > 1:
            current.pop(seeded.randrange(len(current)))
        else:
            at = seeded.randrange(len(current))
            series, space, _ = current[at].rpartition(" ")
            current[at] = f"{series}{space}{seeded.randrange(100)}"
        pages.append("".join(f"{line}\n" for line in current))
    assert written(tmp_path / "r.gz", pages) == pages


def test_what_has_not_changed_is_not_written_again() -> None:
    changes = PageChanges()
    assert changes.told("vllm:a 1\nvllm:b 1\n") == {"text": "vllm:a 1\nvllm:b 1\n"}
    assert changes.told("vllm:a 1\nvllm:b 2\n") == {"d": {"vllm:b": "2"}}
    assert changes.told("vllm:a 1\nvllm:b 1\n") == {"d": {}}
    assert "text" in changes.told("vllm:a 1\n")
