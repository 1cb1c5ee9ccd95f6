"""A vLLM server that runs on this machine, as its own process shows it."""

from dataclasses import dataclass, field

from kvheadroom.capacity.command_line import CommandLine


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTree:
    """The folders as the server's process sees them.

    Attributes:
        root: the path under which its `/` is found here; empty where it is ours.
        working: its working folder, as it sees it.
        hub_cache: where it keeps models of the hub, as it sees it; None where that is not known.
        hidden_because: why nothing is known of all this; empty where it is.
    """

    root: str = ""
    working: str = "/"
    hub_cache: str | None = None
    hidden_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """A running server.

    Attributes:
        pid: in kvheadroom's numbers.
        started_ticks: when its process began; with the pid it tells one process from every other.
        command_line: what decides its cache.
        model: as the server was given it, a folder or a name on the hub; None where it is not clear.
        revision: of a name on the hub.
        is_cpu_build: its vLLM was built for CPUs.
        urls: every address at which it answers here; they may change while the server is the same.
    """

    pid: int
    started_ticks: int
    command_line: CommandLine
    model: str | None = field(default=None, repr=False)
    revision: str | None = field(default=None, repr=False)
    folders: FolderTree = FolderTree()
    is_cpu_build: bool = False
    urls: frozenset[str] = field(default=frozenset(), compare=False)
