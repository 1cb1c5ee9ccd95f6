"""Safetensors files as small as can be, true or not."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BYTES = {"BF16": 2, "F32": 4, "U8": 1}


def header_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, Any]:
    """A true header for tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return header


def file_bytes(header: Mapping[str, Any] | bytes, data_bytes: int) -> bytes:
    """The bytes of a file with this header and so much data."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + bytes(data_bytes)


def write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> int:
    """Write a true file; the bytes of its tensors."""
    size = sum(math.prod(shape) for shape in shapes.values()) * _BYTES[dtype]
    path.write_bytes(file_bytes(header_of(shapes, dtype), size))
    return size
