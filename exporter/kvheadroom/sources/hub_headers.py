"""The headers of a model's safetensors files on a hub, several at a time; nothing behind a header is read."""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.stored_model import StoredTensor, TensorInventory
from kvheadroom.sources.hub_environment import SOURCE, HubEnvironment, HubName
from kvheadroom.sources.model_hub import FILE_SECONDS, Hub
from kvheadroom.sources.safetensors import gathered
from kvheadroom.sources.safetensors_header import BadHeaderError

MAX_FILES = 1_000
MAX_HEADER_BYTES = 16 * 1024**2
MORE_TENSORS = 10_000
"""Files may hold some that the index does not name, and no more than these."""
AT_ONCE = 8
ALL_SECONDS = 180.0
# Beside its name: type, shape, place and punctuation; and what the file says of itself.
_ENTRY_BYTES, _BESIDE_BYTES = 100, 1_000

_Header = tuple[StoredTensor, ...] | str
"""The tensors of one file, or what is wrong with it."""


def fetch_headers(
    environment: HubEnvironment,
    model: HubName,
    shards: Mapping[str, str],
    report: Callable[[int, int], None],
    *,
    timeout_seconds: float = ALL_SECONDS,
) -> TensorInventory | SourceFailure:
    """The tensors of a model, or what is wrong with its files; blocking.

    Args:
        shards: the file of each tensor, by the index.
        report: told how many files have come, and of how many.
        timeout_seconds: for all of them.
    """
    guesses = Counter[str]()
    for tensor, file in shards.items():
        guesses[file] += len(tensor.encode()) + _ENTRY_BYTES
    if len(guesses) > MAX_FILES:
        detail = (
            f"{model.name}: it has {len(guesses):,} files of tensors; at most {MAX_FILES:,} are asked for"
        )
        return SourceFailure(SOURCE, FailureReason.TOO_LARGE, detail)
    end = time.monotonic() + timeout_seconds
    waiting = deque(guesses)
    answers: queue.SimpleQueue[tuple[str, _Header | SourceFailure]] = queue.SimpleQueue()

    def work() -> None:
        while waiting:
            try:
                file = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            left = max(0.001, min(FILE_SECONDS, end - time.monotonic()))
            hub = Hub(environment, model, left)
            answers.put((file, _header(hub, file, min(guesses[file] + _BESIDE_BYTES, MAX_HEADER_BYTES))))

    for _ in range(min(AT_ONCE, len(guesses))):
        threading.Thread(target=work, daemon=True).start()
    headers: dict[str, _Header] = {}
    tensors = 0
    while len(headers) < len(guesses):
        report(len(headers), len(guesses))
        try:
            file, header = answers.get(timeout=max(0.001, end - time.monotonic()))
        except queue.Empty:
            detail = f"{model.name}: {len(headers)} of the headers of {len(guesses)} files came within {timeout_seconds:g} s"
            file, header = "", SourceFailure(SOURCE, FailureReason.TIMEOUT, detail)
        if isinstance(header, SourceFailure):
            waiting.clear()
            return header
        headers[file] = header
        tensors += len(header) if isinstance(header, tuple) else 0
        if tensors > len(shards) + MORE_TENSORS:
            waiting.clear()
            return TensorInventory(
                problem=f"{model.name}: its files hold many more tensors than its index names"
            )
    named = ((f"{model.name} ({file})", headers[file]) for file in sorted(headers))
    return gathered(model.name, named, shards)


def _header(hub: Hub, file: str, guess_bytes: int) -> _Header | SourceFailure:
    try:
        return hub.fetch_header(file, guess_bytes, most_bytes=MAX_HEADER_BYTES)
    except BadHeaderError as reason:
        return str(reason)
