"""Servers that run on this machine, found in its process table."""

from collections.abc import Callable, Iterator
from typing import Any

from kvheadroom.capacity.readings import FailureReason, SourceFailure, one_line
from kvheadroom.config import ConfigError, LocalReplica, LocalTemplate, ProcessDiscoveryConfig, replica_of
from kvheadroom.discovery.source import Found
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.sources.vllm_processes import FoundServer, ProcessScan

NAME = "process_discovery"
LOOK_SECONDS = 5.0
_SEE_MORE = "run kvheadroom as root or as the servers' user, or give it CAP_SYS_PTRACE"


class ProcessDiscovery:
    """Looks at all processes anew at every question.

    Args:
        scan: one look; it may block.
    """

    def __init__(
        self, settings: ProcessDiscoveryConfig, files: SlowFiles, scan: Callable[[], ProcessScan]
    ) -> None:
        self.name = NAME
        self.settings = settings
        self.interval_seconds = settings.refresh_interval
        self._files = files
        self._scan = scan

    async def find(self, *, anew: bool) -> Found:  # noqa: ARG002  nothing is remembered
        """The servers that run now."""
        try:
            scan = await self._files.read(self.name, self._scan, timeout_seconds=LOOK_SECONDS)
        except TimeoutError as error:
            detail = f"the processes of this machine: {error}"
            return Found(replicas=None, failure=SourceFailure(self.name, FailureReason.TIMEOUT, detail))
        except OSError as error:
            detail = f"there is no table of processes here ({error.strerror}); name servers with `url`"
            return Found(replicas=None, failure=SourceFailure(self.name, FailureReason.NOT_FOUND, detail))
        replicas, left_out = _replicas(scan.found, self.settings.replica)
        hidden = _what_is_hidden(scan)
        return Found(
            replicas=replicas,
            left_out=tuple(map(one_line, (*scan.left_out, *left_out))),
            note=" ".join((*_notes(scan), *_key_wanted(scan, self.settings.replica))) or None,
            failure=SourceFailure(self.name, FailureReason.NO_PERMISSION, hidden) if hidden else None,
        )


def _replicas(
    found: tuple[FoundServer, ...], template: LocalTemplate
) -> tuple[tuple[LocalReplica, ...], tuple[str, ...]]:
    replicas: list[LocalReplica] = []
    left_out: list[str] = []
    for one in found:
        own: dict[str, Any] = {"url": one.base_url, "server": one.server}
        unwanted = set() if one.base_url.startswith("https:") else {"tls"}
        if one.unix_socket is not None:
            # Whoever starts a server names its socket: no name of theirs forges a line of ours.
            name = one.settings.unix_socket or ""
            own |= {
                "unix_socket": one.unix_socket,
                "name": name if name.isprintable() else f"unix socket of PID {one.server.pid}",
            }
            unwanted |= {"proxy_url", "proxy_basic_auth"}
        # What servers of this machine have in common need not fit each of them.
        fitting = template.model_copy(update=dict.fromkeys(unwanted & template.model_fields_set))
        try:
            replicas.append(replica_of(LocalReplica, fitting, own))
        except ConfigError as error:
            left_out.append(f"vLLM server with PID {one.server.pid}: {error}")
    return tuple(replicas), tuple(left_out)


def _notes(scan: ProcessScan) -> Iterator[str]:
    if not scan.found and not scan.quiet:
        processes = "1 process" if scan.processes == 1 else f"{scan.processes} processes"
        yield (
            f"No vLLM server runs among the {processes} that can be seen here. Looked for: `vllm serve` and "
            "`python -m vllm.entrypoints.openai.api_server`. Servers elsewhere are named with `--target http://host:8000`, or "
            "with `replicas:` in a config file."
        )
    if scan.own_numbers and not scan.found:
        yield (
            "kvheadroom runs in a container and sees no processes but those of its container or pod; start it with `--pid=host` "
            "(Kubernetes: `hostPID: true`) to see the machine's."
        )
    for sentence in scan.quiet:
        yield f"{sentence}."
    if scan.engines_alone:
        engines = (
            "1 engine of vLLM runs"
            if scan.engines_alone == 1
            else f"{scan.engines_alone} engines of vLLM run"
        )
        yield (
            f"{engines} without a server that is found here: in a Python program of its own, or started in a way that is not "
            "known."
        )


def _key_wanted(scan: ProcessScan, template: LocalTemplate) -> Iterator[str]:
    count = sum(one.settings.has_api_key for one in scan.found)
    if count and template.api_key_file is None and template.bearer_token_file is None:
        yield (
            f"{'1 server wants' if count == 1 else f'{count} servers want'} an API key for /v1, which is never read out of a "
            "command line; give it in a file: `process_discovery: {replica: {api_key_file: FILE}}` in a config. Without it the "
            "metrics are there, and the model and the longest request are known from the command line alone."
        )


def _what_is_hidden(scan: ProcessScan) -> str:
    parts = []
    if scan.others_hidden:
        parts.append(
            "processes of other users do not show up here (/proc is mounted with hidepid, or ProtectProc is set)"
        )
    if scan.hidden:
        processes = "1 process" if scan.hidden == 1 else f"{scan.hidden} processes"
        parts.append(f"the command line of {processes} may not be read")
    if scan.partly_hidden:
        servers = "1 server" if scan.partly_hidden == 1 else f"{scan.partly_hidden} servers"
        parts.append(
            f"of {servers} nothing but the command line may be read: no environment, folders or sockets"
        )
    return f"{'; '.join(parts)}; {_SEE_MORE}" if parts else ""
