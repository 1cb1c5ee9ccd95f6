"""Where Hugging Face's own tools keep models, tokens and settings: the environment variables that they read.

A name that is in the cache needs no network; the snapshot that `refs/main` names is the one that vLLM would load.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = "model_hub"
DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_TOKEN_BYTES = 4096

# organisation/name or name, as the hub allows them.
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w][\w./-]{0,199}", re.ASCII)
_SCHEME = re.compile(r"https?://", re.IGNORECASE)
_YES = frozenset({"1", "on", "yes", "true"})


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub: `organisation/name`, and a branch, tag or commit of it."""

    name: str
    revision: str = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubEnvironment:
    """The settings of one user on one machine.

    Attributes:
        endpoint: it may hold a password; what is shown is `shown_endpoint`.
        token: never shown, and sent to the endpoint only.
    """

    endpoint: str = field(repr=False)
    cache: Path
    offline: bool
    token: str | None = field(default=None, repr=False)

    @property
    def shown_endpoint(self) -> str:
        """The endpoint without user and password, however it is spelt."""
        scheme = _SCHEME.match(self.endpoint)
        before, _, rest = self.endpoint.rpartition("@")
        return (scheme[0] if scheme and before else "") + rest


def parse_hub_name(text: str) -> HubName | None:
    """`organisation/name` or `organisation/name@revision`; None for what cannot be one."""
    name, _, revision = text.partition("@")
    if not _NAME.fullmatch(name) or ".." in name or "--" in name:
        return None
    if "@" not in text:
        return HubName(name)
    return HubName(name, revision) if _REVISION.fullmatch(revision) and ".." not in revision else None


def read_hub_environment(environment: Mapping[str, str], home: Path) -> HubEnvironment:
    """From HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN and HF_TOKEN_PATH."""
    token = _path(environment, home, "HF_TOKEN_PATH") or _base(environment, home) / "token"
    return HubEnvironment(
        endpoint=(environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"),
        cache=hub_cache(environment, home),
        offline=any(
            environment.get(name, "").lower() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        ),
        token=_token(environment, token),
    )


CACHE_VARIABLES = frozenset({"HF_HOME", "XDG_CACHE_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
"""The variables that say where the cache is; none of them is a secret."""


def hub_cache(environment: Mapping[str, str], home: Path) -> Path:
    """Where the models lie."""
    named = _path(environment, home, "HF_HUB_CACHE") or _path(environment, home, "HUGGINGFACE_HUB_CACHE")
    return named or _base(environment, home) / "hub"


def _base(environment: Mapping[str, str], home: Path) -> Path:
    caches = _path(environment, home, "XDG_CACHE_HOME") or home / ".cache"
    return _path(environment, home, "HF_HOME") or caches / "huggingface"


def _path(environment: Mapping[str, str], home: Path, name: str) -> Path | None:
    value = environment.get(name)
    return None if not value else Path(value.replace("~", str(home), 1) if value[0] == "~" else value)


def _token(environment: Mapping[str, str], file: Path) -> str | None:
    said = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN")
    if said is None:
        try:
            with file.open("rb") as opened:
                said = opened.read(MAX_TOKEN_BYTES).decode("ascii")
        except (OSError, ValueError):
            return None
    said = said.strip()
    # A header line of its own, or none: what has spaces or line ends in it is no token.
    return said if said.isascii() and said.isprintable() and said and " " not in said else None


def cached_folder(cache: Path, model: HubName) -> Path | None:
    """The snapshot of the model in the cache, None where there is none."""
    folder = cache / f"models--{model.name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / model.revision).read_text("ascii").strip()
    except (OSError, ValueError):
        # A commit names its snapshot itself.
        commit = model.revision
    if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
