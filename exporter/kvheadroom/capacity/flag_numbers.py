"""Numbers as vLLM's command line takes them: 32k is 32,000, 32K is 32,768 (0.33.0 `utils/argparse_utils.py`)."""

import re

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])", re.ASCII)
_MOST_DIGITS = 40


def readable_int(text: str) -> int | None:
    """As vLLM's `human_readable_int`; None where it takes no such number."""
    text = text.strip()
    if len(text) > _MOST_DIGITS:
        return None
    suffixed = _SUFFIXED.fullmatch(text)
    if suffixed is None:
        try:
            return int(text)
        except ValueError:
            return None
    number, suffix = suffixed.groups()
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    return None if "." in number else int(number) * _BINARY[suffix]


def has_binary_decimals(text: str) -> bool:
    """Whether the one fault of a number is decimals before a suffix that counts in powers of two (`1.5K`)."""
    suffixed = _SUFFIXED.fullmatch(text.strip())
    return suffixed is not None and "." in suffixed[1] and suffixed[2] in _BINARY
