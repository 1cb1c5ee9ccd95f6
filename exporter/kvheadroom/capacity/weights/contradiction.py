"""config.json and a checkpoint that are not of one model."""

_SMALLEST_IN_GB = 10**8


class AnotherCheckpoint(str):
    """A reason that is such a contradiction, with both sizes."""

    __slots__ = ()


def another_checkpoint(what: str, made_bytes: int, stored_bytes: int) -> AnotherCheckpoint:
    """That config.json makes so many bytes of something, and the checkpoint has another number."""
    made, stored = _size(made_bytes), _size(stored_bytes)
    return AnotherCheckpoint(f"config.json would make {made} of {what}, and the checkpoint has {stored}")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= _SMALLEST_IN_GB else f"{size_bytes:,} bytes"
