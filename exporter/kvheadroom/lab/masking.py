"""Names on a vLLM page -> stable words: who reads a masked recording learns no model, adapter, path or host.

What is kept is listed, not what is masked: a label that a later release adds is masked until it is known here.
"""

import re
from collections.abc import Mapping

MAX_NAMES = 10_000
"""Of one kind; a server that shows more is not a server whose names anybody could tell apart."""

# Labels of vLLM 0.6.6 to 0.33.0 whose values are words of vLLM's own: v1/metrics/loggers.py, v1/spec_decode/metrics.py,
# parser/metrics.py, v1/simple_kv_offload/metrics.py, v1/kv_offload/tiering, distributed/kv_transfer/kv_connector/v1, and
# the fields of CacheConfig (config/cache.py).
_KEPT_LABELS = frozenset(
    {
        "le", "reason", "finished_reason", "sleep_state", "source", "stage", "status", "operation", "transfer_type",
        "position", "mode", "outcome", "request_type", "result", "scope", "resource", "page_cache", "lazy_offload",
        "cache_dtype", "kv_cache_layout", "prefix_caching_hash_algo", "mamba_cache_dtype", "mamba_ssm_cache_dtype",
        "mamba_cache_mode", "user_specified_block_size", "kv_offloading_backend",
    }
)  # fmt: skip
_PLAIN_WORDS = frozenset({"", "None", "True", "False", "[]"})
# Names even where they look like a number. Several in one label are separated by commas (loggers.py).
_KINDS: Mapping[str, str] = {
    "model_name": "model",
    "running_lora_adapters": "adapter",
    "waiting_lora_adapters": "adapter",
}

_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*"'
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|[Ii]nf|[Nn]a[Nn])"
_NAME_AND_VALUE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{((?:{_LABEL},? *)*)\}})? +({_NUMBER})(?: +# .*)?\s*"
)
_EACH_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_TYPE = re.compile(r"# TYPE [a-zA-Z_:][a-zA-Z0-9_:]* [a-z]+")


class Masks:
    """The words for one server's names; each name keeps its word."""

    def __init__(self, known: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.names: dict[str, dict[str, str]] = {kind: dict(words) for kind, words in (known or {}).items()}
        """{kind: {name: word}}."""
        self.num_lines_left_out = 0
        """Lines that could not be read, and so not be masked."""

    def word_for(self, kind: str, name: str) -> str:
        """`model-1` for the first model, and so on."""
        words = self.names.setdefault(kind, {})
        if name not in words:
            if len(words) >= MAX_NAMES:
                return f"{kind}-other"
            words[name] = f"{kind}-{len(words) + 1}"
        return words[name]

    def mask_page(self, page: str) -> str:
        """A page without names, texts of HELP, exemplars, and lines that are no samples."""
        lines = []
        for line in page.split("\n")[:-1]:
            if line.startswith("#"):
                if line == "# EOF" or _TYPE.fullmatch(line):
                    lines.append(line)
                continue
            found = _NAME_AND_VALUE.fullmatch(line)
            if found is None:
                self.num_lines_left_out += 1
                continue
            name, labels, value = found.groups()
            masked = "" if labels is None else f"{{{self._mask_labels(labels)}}}"
            lines.append(f"{name}{masked} {value}")
        return "".join(f"{line}\n" for line in lines)

    def _mask_labels(self, labels: str) -> str:
        return ",".join(
            f'{label}="{self._mask_value(label, value)}"' for label, value in _EACH_LABEL.findall(labels)
        )

    def _mask_value(self, label: str, value: str) -> str:
        kind = _KINDS.get(label)
        if kind == "adapter":
            return ",".join(self.word_for(kind, name) if name else "" for name in value.split(","))
        if kind is None and (label in _KEPT_LABELS or value in _PLAIN_WORDS or _is_number(value)):
            return value
        return self.word_for(kind or label, value) if value else ""


def _is_number(value: str) -> bool:
    return re.fullmatch(_NUMBER, value) is not None
