"""The text of an argument -> its value, as vLLM's own parser reads it (0.33.0 `utils/argparse_utils.py`).

32k is 32,000, 32K is 32,768, 1M is 1,048,576.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from kvheadroom.capacity.facts import AUTO_LENGTH
from kvheadroom.capacity.flag_numbers import has_binary_decimals, readable_int
from kvheadroom.capacity.gpu_catalogue import GPUS, catalogue_name, not_modelled_because
from kvheadroom.capacity.parallelism import MOST_GPUS
from kvheadroom.capacity.release_rules import parse_release

_LARGEST = 2**53


def whole_number(text: str, *, least: int = 1) -> int:
    """As vLLM's `human_readable_int`: `1k` is 1,000, `1K` is 1,024, `25.6k` is 25,600; at least `least`."""
    text = text.strip()
    value = readable_int(text)
    if value is None:
        if has_binary_decimals(text):
            number, suffix = text[:-1], text[-1]
            raise argparse.ArgumentTypeError(
                f"{text!r}: {suffix} counts in powers of two and takes no decimals; {number}{suffix.lower()} "
                "counts in powers of ten"
            )
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number (32768, 32k = 32,000, 32K = 32,768)")
    if value < least:
        wanted = "a whole number above 0 is needed" if least else "a whole number is needed, 0 for none"
        raise argparse.ArgumentTypeError(f"{text!r}: {wanted}")
    if value > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: that is too large; at most {_LARGEST:,} is taken")
    return value


def count_or_none(text: str) -> int:
    """A whole number, 0 for none."""
    return whole_number(text, least=0)


def parallel_size(text: str) -> int:
    """GPUs, stages or engines side by side, as many as an engine may have."""
    value = whole_number(text)
    if value > MOST_GPUS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: no engine has so many GPUs; at most {MOST_GPUS:,} are planned"
        )
    return value


def length_or_auto(text: str) -> int:
    """`--max-model-len`: a length, or -1 or `auto` for the longest that starts."""
    return AUTO_LENGTH if text.strip().lower() in ("-1", "auto") else whole_number(text)


def several(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Values with commas, each once."""

    def read_all(text: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(read(part) for part in text.split(",")))

    return read_all


def word(text: str) -> str:
    """A name, such as that of a type or a backend."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a word is needed")
    return text.strip()


def share(text: str) -> float:
    """A number above 0, at most 1 (`--gpu-memory-utilization`, config/cache.py)."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a share above 0 and at most 1 is needed (0.92)")
    return value


def gigabytes(text: str) -> int:
    """GB (10^9 bytes) as bytes; 0 is allowed."""
    value = _number(text)
    if not 0 <= value <= _LARGEST / 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of GB (10^9 bytes) is needed")
    return round(value * 1e9)


def gigabytes_above_0(text: str) -> int:
    """GB (10^9 bytes) as bytes, at least one."""
    value = gigabytes(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of GB (10^9 bytes) above 0 is needed")
    return value


def gibibytes(text: str) -> float:
    """GiB (2^30 bytes) above 0, as vLLM takes them."""
    value = _number(text)
    if not 0 < value <= _LARGEST / 2**30:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of GiB (2^30 bytes) above 0 is needed")
    return value


def size(text: str) -> int:
    """Bytes of a size with its unit: `64GB`, `59.6GiB`."""
    from kvheadroom.setting_values import parse_size

    try:
        found = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 10**6 <= found <= 10**14:
        raise argparse.ArgumentTypeError(f"{text!r}: from 1MB to 100000GB is needed")
    return found


def release(text: str) -> str:
    """A release of vLLM."""
    if parse_release(text) is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no release of vLLM, such as 0.33.0")
    return text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def gpu_name(text: str) -> str:
    """A card of the catalogue, in any case."""
    name = catalogue_name(text)
    if name is None:
        reason = not_modelled_because(text)
        if reason is not None:
            raise argparse.ArgumentTypeError(
                f"{text[:60]!r}: {reason}; name another card; --hbm-bytes in its place does not help, for then the rules "
                "of the cards of the catalogue are taken"
            )
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is not in the catalogue ({', '.join(GPUS)}, CPU); for another card leave --gpu out and say "
            "--hbm-bytes N (torch.cuda.mem_get_info()[1]), or name a card of its generation beside --hbm-bytes"
        )
    return name


def section(text: str) -> dict[str, Any]:
    """A JSON object, as --speculative-config takes it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no JSON object")
    return value
