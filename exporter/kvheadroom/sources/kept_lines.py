"""What of a vLLM page is kept in a recording: vLLM's own series, and when its process started."""

import re

KEPT = "the vllm: series and process_start_time_seconds"
"""In words, for a recording's header and for people."""

# As the names are spelt on vLLM's own pages, in OpenMetrics, and by Ray's agents (see `vllm_metrics`).
_KEPT_LINES = re.compile(
    rb"^(?:# (?:HELP|TYPE|UNIT) )?(?:(?:ray_)?vllm[:_]|process_start_time_seconds(?=[ \t{]))[^\n]*|^# EOF\r?$",
    re.MULTILINE,
)


def kept_lines(body: bytes) -> str:
    """The kept lines of a page in its order, each ended by a newline; what is no UTF-8 becomes U+FFFD."""
    return b"".join(line + b"\n" for line in _KEPT_LINES.findall(body)).decode("utf-8", errors="replace")
