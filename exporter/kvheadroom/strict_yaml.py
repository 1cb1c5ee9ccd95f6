"""YAML as an operator means it: a key given twice, an alias, and what is no YAML are faults told in words."""

import errno
import stat
from pathlib import Path
from typing import Any

import yaml

MAX_FILE_BYTES = 4 * 1024**2


class YamlFaultError(ValueError):
    """What is wrong with the text, to be put after the file's name; the text itself is not repeated."""


def read_small_file(path: Path) -> str:
    """The text of a file that an operator named; never a pipe, which could hold a reload up for ever.

    Raises:
        OSError: it cannot be read, or is none of ours.
        UnicodeDecodeError: it is no UTF-8.
    """
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if info.st_size > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_FILE_BYTES // 1024**2} MiB")
    return path.read_text(encoding="utf-8")


def parse_yaml(text: str, *, only_texts: bool = False) -> Any:
    """What the text holds.

    Args:
        only_texts: every single value is the text that stands there: `12`, `yes` and `8000:22` are no numbers.

    Raises:
        YamlFaultError: with the place.
    """
    try:
        return yaml.load(text, Loader=_TextLoader if only_texts else _ValueLoader)  # noqa: S506  neither makes objects
    except yaml.MarkedYAMLError as error:
        # Without the snippet that PyYAML adds: it may hold a secret.
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise YamlFaultError(f"is no valid YAML{place}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, LookupError) as error:
        # PyYAML's own constructors raise anything for scalars like 2024-13-45.
        raise YamlFaultError(f"is no valid YAML ({type(error).__name__})") from error
    except RecursionError as error:
        raise YamlFaultError("is nested too deeply") from error


class _ValueLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML would silently take the last) and aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are not allowed here", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  PyYAML's own signature
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "a mapping is needed", node.start_mark)
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) or key is None:
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key `{key}` is given twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


class _TextLoader(_ValueLoader):
    """Leaves every scalar the text that it is: nothing looks like a number, a date or a truth value to it."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  PyYAML's own way to say it
