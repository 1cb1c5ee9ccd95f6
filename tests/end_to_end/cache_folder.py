"""Where the end-to-end tests keep what is slow to make: outside the clone, shared by all clones."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$KVHEADROOM_CACHE`, else `$XDG_CACHE_HOME/kvheadroom`, else `~/.cache/kvheadroom`; made if absent."""
    chosen = os.environ.get("KVHEADROOM_CACHE")
    if chosen:
        folder = Path(chosen)
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvheadroom"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()
