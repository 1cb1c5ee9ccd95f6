"""The lines of a log file, however it was kept -> who printed what.

A line may come with the marks of Docker, Kubernetes, journald or a terminal around it; vLLM's own prefix is the level, the
time and the source file (0.33.0 `logger.py`), and from 0.8 on the process in front of it (`utils/system_utils.py`).
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MOST_CHARACTERS = 512 * 1024
"""Of one line; what follows is dropped."""
_MOST_PIECES = 4096
_WHERE_PREFIXES_STAND = 2000
_WHERE_LEVELS_STAND = 200

_ESCAPES = re.compile(
    r"(?:\x1b|#033|\^\[)\[[0-9;?]{0,24}[A-Za-z]|\[(?:[0-9]{1,3};)*[0-9]{1,3}m|\x1b\][^\x07\x1b]*\x07?|\x1b."
)
_CRI = re.compile(r"\d{4}-\d\d-\d\dT\S{1,40} (?:stdout|stderr) ([FP])(?: |$)")
_SOURCE_END = re.compile(r"\.py:\d{1,6}\]?(?:\s+|$)")
_LEVEL = re.compile(
    r"(?:^|(?<=[\s)|]))(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+(?:\d\d-\d\d \d\d:\d\d:\d\d\s+)?"
)
_PROCESS = re.compile(
    r"\(([A-Za-z][A-Za-z0-9_]{0,60}?)(?: rank=(\d{1,6}))?(?:,? pid=(\d{1,10}))?(?:, ip=([\w.:]{1,64}))?\)"
)
_AROUND = re.compile(
    r"\d{4}-\d\d-\d\d[T ][\d:.,]{5,24}(?:Z|[+-]\d\d:?\d\d)?\s+"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,120} [^\s:\[]{1,80}(?:\[\d{1,10}\])?: "
    r"|[\w.-]{1,80}\s{0,20}\| {1,4}|\[pod/[^\]\s]{1,200}\] |\[rank\d{1,6}\]:? ?|[#>|]+ +|\s+"
)
_ENGINE = re.compile(r"(DP)?EngineCore(?:Actor|Proc)?(?:_(?:DP)?(\d{1,4}))?")
_WORKER = re.compile(r"(?:Vllm)?Worker(?:Process|Proc)?((?:_[A-Z]{2,4}\d{1,5})*|_\d{1,5})")
_IN_LABEL = re.compile(r"(?:^|_)DP(\d{1,4})")
_API_SERVER = re.compile(r"api_?server_?(\d{0,4})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Speaker:
    """The process that printed a line.

    Attributes:
        engine: the data-parallel index; of an actor of Ray that tells none, its process; None where neither is told.
        label: of a worker, as in LoggedRank.
        process: what tells workers without a label apart; empty: nothing does.
        is_api_server: one of several, which all repeat what the first says.
    """

    engine: int | str | None = None
    label: str = ""
    process: str = ""
    is_api_server: bool = False


@dataclass(frozen=True, slots=True)
class LogLine:
    """One message.

    Attributes:
        number: of the line in the log, from 1.
        text: without any prefix.
        has_prefix: it begins a message of vLLM's; a line without may be the rest of the one before.
        whole: as it was printed, to be joined with the next where a terminal broke it.
    """

    number: int
    speaker: Speaker
    text: str
    has_prefix: bool
    whole: str


_NOBODY = Speaker()


def log_lines(lines: Iterable[str]) -> Iterator[LogLine]:
    """The messages of a log. A line that holds none gives none; nothing is raised, whatever stands there."""
    half = ""
    for number, raw in enumerate(lines, start=1):
        text = raw[:MOST_CHARACTERS].replace("\x00", "").rstrip("\r\n")
        found = _CRI.match(text)
        if found is not None:
            text = text[found.end() :]
        elif text.startswith("{"):
            said = _of_json(text)
            if said is not None:
                yield from _told_by_json(said, number)
                continue
        # A runtime breaks a long line, and marks all parts but the last.
        half = (half + text)[:MOST_CHARACTERS]
        if found is None or found[1] == "F":
            yield from _pieces(half, number)
            half = ""
    if half:
        yield from _pieces(half, number)


def _of_json(text: str) -> dict[str, object] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _told_by_json(content: dict[str, object], number: int) -> Iterator[LogLine]:
    """Docker's `log`, journald's `MESSAGE`, and `message` of vLLM's own JSON format (0.33.0 `logging_utils/formatter.py`)."""
    for key in ("log", "MESSAGE", "message", "msg"):
        said = content.get(key)
        if isinstance(said, str):
            name, pid = content.get("processName"), content.get("process")
            whose = f"({name} pid={pid}) " if isinstance(name, str) and isinstance(pid, int) else ""
            for text in said.splitlines()[:_MOST_PIECES]:
                yield from _pieces(whose + text, number)
            return


def _pieces(text: str, number: int) -> Iterator[LogLine]:
    """A progress bar overwrites itself with carriage returns, and the next message may follow in its line."""
    for piece in text.split("\r", _MOST_PIECES):
        if piece and not piece.isspace():
            yield read_message(_ESCAPES.sub("", piece) if "[" in piece or "\x1b" in piece else piece, number)


def read_message(text: str, number: int) -> LogLine:
    """One message, its prefix apart from the rest."""
    front = text[:_WHERE_PREFIXES_STAND]
    # Searching for the whole prefix would look at each word again and again.
    source = _SOURCE_END.search(front) if ".py:" in front else None
    if source is not None:
        return LogLine(
            number, _speaker(front[: source.start()]), text[source.end() :], has_prefix=True, whole=text
        )
    level = _LEVEL.search(front[:_WHERE_LEVELS_STAND])
    if level is not None:
        return LogLine(
            number, _speaker(front[: level.end()]), text[level.end() :], has_prefix=True, whole=text
        )
    return _without_source(text, number)


def _without_source(text: str, number: int) -> LogLine:
    """A line of a traceback, of another program, or of an excerpt."""
    at = 0
    while at < _WHERE_PREFIXES_STAND and (found := _AROUND.match(text, at)):
        at = found.end()
    told = at
    while (whose := _PROCESS.match(text, at)) and (whose[2] or whose[3]):
        at = whose.end()
        while at < len(text) and text[at] == " ":
            at += 1
    mark = _AROUND.match(text, at) if at > told else None
    said = text[mark.end() if mark else at :]
    return LogLine(number, _speaker(text[told:at]), said, has_prefix=at > told, whole=text)


def _speaker(front: str) -> Speaker:
    """Of what stands in front of a message. Ray may put a worker's name behind its engine's."""
    if "(" not in front:
        return _NOBODY
    engine: int | str | None = None
    label = process = ""
    is_api_server = False
    for name, rank, pid, address in _PROCESS.findall(front):
        if not rank and not pid:
            continue
        if core := _ENGINE.fullmatch(name):
            of_ray = f"{pid}@{address}" if core[1] else None
            engine = int(core[2]) if core[2] else of_ray
            continue
        if server := _API_SERVER.fullmatch(name):
            is_api_server = bool(server[1])
            continue
        worker = _WORKER.fullmatch(name)
        if worker is None and name != "RayWorkerWrapper":
            continue
        process = f"{pid}@{address}" if pid else f"rank{rank}"
        label = worker[1].strip("_") if worker is not None else ""
        if label.isdecimal():
            label = f"rank{label}"
        if index := _IN_LABEL.search(label):
            engine = int(index[1])
        label = label or (f"rank{rank}" if rank else f"pid={pid}")
    return Speaker(engine, label, process, is_api_server)
