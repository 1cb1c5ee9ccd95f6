"""A model's folder -> config.json, and the names and sizes of its tensors. No tensor in it is read."""

import json
import stat
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.sources.safetensors import read_tensors
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.sources.weight_files import INDEX_NAME, read_weight_files

SOURCE = "model_files"
CONFIG_NAME = "config.json"
QUANTIZATION_NAME = "hf_quant_config.json"
ADAPTER_NAME = "adapter_config.json"
MAX_FOLDERS_UNDER_WAY = 4
MAX_CONFIG_BYTES = 16 * 1024**2
MAX_INDEX_BYTES = 256 * 1024**2


def read_model_files(folder: str, assumed_because: str = "") -> ModelFiles | SourceFailure:
    """Read a model's folder; blocking."""
    config = read_json(Path(folder) / CONFIG_NAME, MAX_CONFIG_BYTES)
    if isinstance(config, SourceFailure):
        return _explained(Path(folder), config)
    config = with_file_beside(config, Path(folder))
    if isinstance(config, SourceFailure):
        return config
    index = read_json(Path(folder) / INDEX_NAME, MAX_INDEX_BYTES)
    if isinstance(index, SourceFailure) and index.reason is not FailureReason.NOT_FOUND:
        return index
    folder_index = None if isinstance(index, SourceFailure) else index
    weights = read_weight_files(Path(folder), folder_index)
    return ModelFiles(
        folder=folder,
        config=config,
        weights_bytes=weights.total_bytes,
        weights_unknown=weights.unknown,
        weights_faulty=weights.faulty,
        weights_doubts=weights.doubts,
        tensors=read_tensors(Path(folder), folder_index),
        assumed_because=assumed_because,
    )


def with_file_beside(config: dict[str, Any], folder: Path) -> dict[str, Any] | SourceFailure:
    """config.json with what hf_quant_config.json in its folder says, where vLLM reads that; blocking."""
    if not asks_quantization(config):
        return config
    quantization = read_json(folder / QUANTIZATION_NAME, MAX_CONFIG_BYTES)
    if isinstance(quantization, SourceFailure):
        return config if quantization.reason is FailureReason.NOT_FOUND else quantization
    return with_quantization(config, quantization)


def asks_quantization(config: Mapping[str, Any]) -> bool:
    """Whether vLLM looks into hf_quant_config.json, where older releases of ModelOpt say how they quantized.

    `get_config`, transformers_utils/config.py.
    """
    return config.get("quantization_config") is None


def with_quantization(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as vLLM takes it where hf_quant_config.json stands beside it."""
    return {**config, "quantization_config": quantization}


class ModelFilesReader:
    """Reads one replica's model folder in a daemon thread; a folder on a dead mount holds nobody up."""

    def __init__(self) -> None:
        # Several servers at one address may name a folder each.
        self._folders = SlowFiles(most=MAX_FOLDERS_UNDER_WAY)

    async def read(
        self, folder: str, assumed_because: str, *, timeout_seconds: float
    ) -> ModelFiles | SourceFailure:
        """As `read_model_files`; a timeout is a failure."""
        return await self.read_with(
            folder, partial(read_model_files, folder, assumed_because), timeout_seconds=timeout_seconds
        )

    async def read_with(
        self, name: str, read: Callable[[], ModelFiles | SourceFailure], *, timeout_seconds: float
    ) -> ModelFiles | SourceFailure:
        """What `read` gives; it may block.

        Args:
            name: of the folder, for people; readings under one name share their answer.
        """
        try:
            return await self._folders.read(name, read, timeout_seconds=timeout_seconds)
        except TimeoutError as error:
            return SourceFailure(SOURCE, FailureReason.TIMEOUT, f"{name}: {error}")
        except Exception as error:  # noqa: BLE001  whatever it is, it is told as a failure of this source
            detail = f"{name}: a fault of kvheadroom: {error!r}"
            return SourceFailure(SOURCE, FailureReason.INTERNAL, detail)


def _explained(folder: Path, failure: SourceFailure) -> SourceFailure:
    """A missing config.json, told apart by what is there in its place."""
    try:
        if folder.suffix == ".gguf" or folder.is_file():
            detail = f"{folder}: is a file, not a folder with a {CONFIG_NAME}; a GGUF file carries none"
        elif (folder / ADAPTER_NAME).is_file():
            detail = f"{folder}: holds an adapter ({ADAPTER_NAME}), not the model it is for"
        else:
            return failure
    except OSError:
        return failure
    return SourceFailure(SOURCE, FailureReason.BAD_ANSWER, detail)


def read_json(path: Path, max_bytes: int) -> dict[str, Any] | SourceFailure:
    """One file that holds a JSON object; blocking."""

    def failed(reason: FailureReason, detail: str) -> SourceFailure:
        return SourceFailure(SOURCE, reason, f"{path}: {detail}")

    try:
        # A folder may be named by a server we do not own: no pipe or device is opened.
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            return failed(FailureReason.BAD_ANSWER, "it is not a regular file")
        if info.st_size > max_bytes:
            return failed(FailureReason.TOO_LARGE, f"it is larger than {max_bytes // 1024**2} MiB")
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return failed(FailureReason.NOT_FOUND, "there is no such file on this machine")
    except OSError as error:
        return failed(FailureReason.UNREACHABLE, f"it cannot be read ({error.strerror})")
    except json.JSONDecodeError as error:
        return failed(FailureReason.BAD_ANSWER, f"it is no JSON ({error})")
    except (ValueError, RecursionError):
        return failed(FailureReason.BAD_ANSWER, "it is no JSON, or its path is no path")
    if not isinstance(content, dict):
        return failed(FailureReason.BAD_ANSWER, "it holds no JSON object")
    return content
