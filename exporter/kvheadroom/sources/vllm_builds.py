"""Which build of vLLM a process runs: by the package that lies beside the libraries that it has loaded."""

import os
import re
from pathlib import Path

from kvheadroom.sources.folder_trees import seen_from_here
from kvheadroom.sources.process_list import read_file

_PACKAGES = re.compile(rb"\s(/[^\n]*?/(?:site|dist)-packages)/")
_PACKAGE = re.compile(r"vllm(?:_cpu)?-[^/]+\.dist-info")
_MOST_FOLDERS = 8


def is_cpu_build(process: Path, root: str) -> bool:
    """Whether its package says so, which is vLLM's own rule (`cpu_platform_plugin`, 0.33.0 `platforms/__init__.py`).

    Args:
        process: its folder in `/proc`.
        root: where its `/` is found here; empty where it is ours.
    """
    try:
        folders = dict.fromkeys(_PACKAGES.findall(read_file(str(process / "maps"))))
    except OSError:
        return False
    names: set[str] = set()
    for folder in list(folders)[:_MOST_FOLDERS]:
        try:
            names.update(
                name
                for name in os.listdir(seen_from_here(root, os.fsdecode(folder)))  # noqa: PTH208  names are wanted
                if _PACKAGE.fullmatch(name)
            )
        except OSError:
            continue
    return len(names) == 1 and "cpu" in names.pop()
