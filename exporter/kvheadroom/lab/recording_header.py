"""The header of a recording: what is known of the server, and what was kept of its pages."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kvheadroom import __version__
from kvheadroom.capacity.facts import EngineFacts, Origin
from kvheadroom.capacity.readings import VllmPage
from kvheadroom.lab.masking import Masks
from kvheadroom.lab.recording_lines import FORMAT
from kvheadroom.sources.kept_lines import KEPT


def header(
    page: VllmPage, facts: EngineFacts | None, *, server: str, interval_seconds: float, masks: Masks | None
) -> Mapping[str, Any]:
    """What is not known is absent; so is what names somebody, if names are masked.

    Args:
        facts: of one engine of the page; None where the page has none yet.
        server: its address.
    """
    version = length = architecture = None
    if facts is not None:
        version = None if facts.version is None else facts.version.value
        # Not what a config or the model's files say: the server is the witness.
        if facts.max_model_len is not None and facts.max_model_len.origin is Origin.SERVER:
            length = facts.max_model_len.value
        architecture = None if facts.model is None else facts.model.architecture
    model = next((engine.model_name for engine in page.engines if engine.model_name), None)
    if masks is not None:
        model = None if model is None else masks.word_for("model", model)
        # A build of one's own may carry a name after the plus sign.
        version = None if version is None else version.partition("+")[0]
    said = {
        "format": FORMAT,
        "what": f"/metrics of a vLLM server, a page every {interval_seconds:g} s",
        "recorded_by": f"kvheadroom {__version__}",
        "recorded_on": datetime.now(UTC).date().isoformat(),
        "interval_seconds": interval_seconds,
        "kept": KEPT if masks is None else f"{KEPT}, names as words, without HELP",
        "masked": masks is not None,
        "server": server if masks is None else None,
        "vllm_version": version,
        "architecture": architecture,
        "model_name": model,
        "max_model_len": length,
    }
    return {key: value for key, value in said.items() if value is not None}
