"""config.json, read with care: every value is checked, and a bad one is named."""

from collections.abc import Mapping
from typing import Any, TypeGuard

_LARGEST_FIELD = 2**31
MOST_LAYERS = 10_000


class BadFieldError(ValueError):
    """A field of config.json that cannot be used, one sentence."""


def shown(value: Any) -> str:
    """A value for a message: short, whatever it is."""
    if isinstance(value, int) and abs(value) > _LARGEST_FIELD:
        return "out of range"
    try:
        return repr(value)[:60]
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits inside
        return "too large to show"


def is_count(value: Any, *, smallest: int = 1) -> TypeGuard[int]:
    """Whether a value is a whole number from `smallest` on, and none that no model has."""
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= _LARGEST_FIELD


def _whole_number(smallest: int) -> str:
    return "a whole number above 0" if smallest == 1 else f"a whole number from {smallest} on"


class ModelConfig:
    """One section of a parsed config.json. A key that is null counts as left out, as vLLM reads it."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    @property
    def values(self) -> Mapping[str, Any]:
        """The section itself."""
        return self._values

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self._values.get(key) is not None

    def bad(self, key: str, problem: str) -> BadFieldError:
        """An error about `key`: `config.json: `text_config.head_dim` is 0, ...`."""
        return BadFieldError(f"config.json: `{self._where}{key}` {problem}")

    def count(self, key: str, default: int | None = None, *, smallest: int = 1) -> int:
        """A whole number from `smallest` on; `default` where the key is left out, an error without one."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not is_count(value, smallest=smallest):
            said = "is left out" if value is None else f"is {shown(value)}"
            raise self.bad(key, f"{said}, {_whole_number(smallest)} is needed")
        return value

    def count_of(self, *keys: str, default: int | None = None) -> int:
        """The first of several names that is there."""
        for key in keys:
            if self.has(key):
                return self.count(key)
        return self.count(keys[0], default)

    def draft_layers(self, key: str = "num_nextn_predict_layers", default: int = 0) -> int:
        """Layers for multi-token prediction that the checkpoint has."""
        return self.layers(key, default, smallest=0)

    def layers(self, key: str = "num_hidden_layers", default: int | None = None, *, smallest: int = 1) -> int:
        """A number of layers."""
        layers = self.count(key, default, smallest=smallest)
        if layers > MOST_LAYERS:
            raise self.bad(key, f"is {layers}, more layers than any model has")
        return layers

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, f"is {shown(value)}, true or false is needed")
        return value

    def word(self, key: str, default: str | None = None) -> str | None:
        """A string."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(key, f"is {shown(value)}, a word is needed")
        return value

    def list_of(self, key: str, length: int | None = None) -> list[Any] | None:
        """A list, of `length` entries where that is given; None where the key is left out."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or (length is None and len(value) > MOST_LAYERS):
            raise self.bad(key, f"is {shown(value)}, a list is needed")
        if length is not None and len(value) != length:
            raise self.bad(key, f"has {len(value)} entries for {length} layers")
        return value

    def words(self, key: str, length: int | None = None) -> list[str] | None:
        """A list of strings."""
        value = self.list_of(key, length)
        if value is not None and not all(isinstance(entry, str) for entry in value):
            raise self.bad(key, "is no list of words")
        return value

    def counts(self, key: str, length: int | None = None, *, smallest: int = 1) -> list[int] | None:
        """A list of whole numbers from `smallest` on."""
        value = self.list_of(key, length)
        if value is None:
            return None
        for entry in value:
            if not is_count(entry, smallest=smallest):
                raise self.bad(key, f"holds {shown(entry)}, {_whole_number(smallest)} is needed")
        return value

    def section(self, key: str) -> "ModelConfig | None":
        """A nested section; None where the key is left out."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad(key, f"is {shown(value)}, a section is needed")
        return ModelConfig(value, f"{self._where}{key}.")
