"""A config -> its sources of servers that come and go."""

from pathlib import Path

from kvheadroom.config import Config
from kvheadroom.discovery.files import FileDiscovery
from kvheadroom.discovery.http import HttpDiscovery
from kvheadroom.discovery.processes import ProcessDiscovery
from kvheadroom.discovery.source import Discovery
from kvheadroom.sources.http import Session
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.sources.vllm_processes import VllmProcesses


def sources_of(config: Config, session: Session, files: SlowFiles, proc: Path) -> list[Discovery]:
    """Each source that the config names, in its order."""
    sources: list[Discovery] = []
    for index, settings in enumerate(config.file_sd_configs):
        sources.append(FileDiscovery(f"file_sd_configs[{index}]", settings, files))
    for index, page in enumerate(config.http_sd_configs):
        sources.append(HttpDiscovery(f"http_sd_configs[{index}]", page, session, files))
    if config.process_discovery is not None:
        processes = VllmProcesses(proc)
        sources.append(ProcessDiscovery(config.process_discovery, files, processes.scan))
    return sources
