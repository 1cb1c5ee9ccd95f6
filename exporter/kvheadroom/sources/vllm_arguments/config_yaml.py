"""The file of `--config` -> the words that vLLM makes of it (`load_config_file`, 0.33.0 `utils/argparse_utils.py`)."""

import json
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvheadroom.sources.vllm_arguments.flag_names import OPTIONS

MAX_CONFIG_BYTES = 64 * 1024
"""It is read at every look, and anybody can start a process that names one: 64 KiB of YAML take half a second."""
_SUFFIXES = ("yaml", "yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigWords:
    """What a config file says. Words may be secrets: they are shown nowhere.

    Attributes:
        unclear: flags that it sets to false, each with why that is not clear.
    """

    words: tuple[str, ...] = field(repr=False)
    unclear: tuple[tuple[str, str], ...] = ()


def is_config_name(name: str) -> bool:
    """Whether vLLM takes a file of this name."""
    return name.rpartition(".")[2] in _SUFFIXES


def read_config_yaml(text: str) -> ConfigWords | str:
    """The words of a config file; a string says why it cannot be read, without anything of what is in it."""
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506  it is a SafeLoader
    except RecursionError:
        return "is nested too deeply"
    except Exception as error:  # noqa: BLE001  PyYAML's constructors raise anything, and its messages quote the file
        return "holds aliases (*name)" if isinstance(error, _AliasError) else "is no valid YAML"
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        return "is no mapping of flags to values"
    words: list[str] = []
    unclear: list[tuple[str, str]] = []
    for key, value in content.items():
        if value is False:
            # Before 0.28 a false is left out, from then on it is --no-KEY where there is such a flag.
            flag = OPTIONS.get(f"--no-{key}")
            if flag is not None:
                unclear.append((flag.name, "it is false in the --config file, which not every release reads"))
        elif value is True:
            words.append(f"--{key}")
        elif isinstance(value, list):
            if value:
                words += [f"--{key}", *map(str, value)]
        else:
            words += [f"--{key}", _json(value) if isinstance(value, dict) else str(value)]
    return ConfigWords(words=tuple(words), unclear=tuple(unclear))


def _json(value: dict[Any, Any]) -> str:
    # A date in it is no JSON; vLLM would not have started.
    return json.dumps(value, default=str)


class _AliasError(yaml.YAMLError):
    pass


class _Loader(yaml.SafeLoader):
    """As vLLM's, but for aliases: a small file with them can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _AliasError
        return super().compose_node(parent, index)
