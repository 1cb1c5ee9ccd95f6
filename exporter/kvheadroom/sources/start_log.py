"""A start-up log of vLLM -> what it says of each start.

Takes the text that operators have (`docker logs`, `kubectl logs`, journald, a redirected terminal), of releases 0.6.6 to
0.33. It is the outside's text: nothing in it is an error of ours, nothing half-read is taken for whole, and of the arguments
it prints only the flags that decide the cache are kept.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from kvheadroom.capacity.logged_start import (
    LoggedStart,
    LogProblem,
    LogProblemKind,
    LogReading,
    StartOutcome,
    contradictions,
)
from kvheadroom.capacity.readings import one_line
from kvheadroom.sources.start_log_drafts import EngineDraft, ServerDraft
from kvheadroom.sources.start_log_figures import (
    FAILURE_SENTENCES,
    OF_A_RANK,
    OF_AN_ENGINE,
    Groups,
    figures_of,
    put_budget,
)
from kvheadroom.sources.start_log_flags import read_arguments
from kvheadroom.sources.start_log_forms import BadUnitError, Form, has_head, logo, match_form, may_go_on
from kvheadroom.sources.start_log_lines import LogLine, log_lines, read_message

_MOST_STARTS = 1000
_MOST_PROBLEMS = 20
"""Of one kind."""
_MOST_PARTS = 64
_MOST_OF_ALL_PARTS = 16 * 1024
KEEP_THE_START = "keep the first lines from where the server starts, as with `docker logs NAME 2>&1 | head -n 2000 > start.log`"
_RELEASE = re.compile(r"v?(\d{1,4}\.\d{1,4}\S{0,60})", re.ASCII)
_OF_VLLM = ("vllm", "vLLM", "(EngineCore", "(APIServer", "Avg prompt throughput")
_OF_OTHERS: Mapping[str, tuple[str, ...]] = {
    "SGLang": (
        "server_args=ServerArgs(",
        "Load weight begin. avail mem",
        "KV Cache is allocated. #tokens",
        "sglang.launch_server",
    ),
    "TensorRT-LLM": ("[TensorRT-LLM]", "[TRT-LLM]"),
    "llama.cpp": ("llama_model_load", "llama_kv_cache", "llama_context:", "ggml_cuda_init", "load_tensors:"),
    "TGI": ("text_generation_launcher", "text_generation_router", "text-generation-launcher"),
}


def read_start_log(lines: Iterable[str]) -> LogReading:
    """All starts of a log; whatever stands in the lines, nothing is raised."""
    reader = _Reader()
    reader.read(log_lines(lines))
    return reader.reading()


class _Reader:
    """Goes through the messages once."""

    def __init__(self) -> None:
        self._servers: list[ServerDraft] = []
        self._problems: list[LogProblem] = []
        self._told: Counter[LogProblemKind] = Counter()
        self._is_vllm = False
        self._others: Counter[str] = Counter()
        self._parts: list[LogLine] = []
        self._found: tuple[LogLine, Form, re.Match[str]] | None = None
        self._last_line = 0
        self._too_many = False
        self._of_the_server: Mapping[str, Callable[[LogLine, Groups], None]] = {
            "version": self._version,
            "arguments": self._arguments,
            "engine": self._engine,
            "step": self._step,
            "length": self._length,
            "override": self._override,
            "engine_blocks": self._engine_blocks,
            "server_up": self._server_up,
        }

    def read(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self._last_line = line.number
            self._read_line(line)
            if self._too_many:
                return
        self._settle()

    def reading(self) -> LogReading:
        starts = [start for server in self._servers for start in server.starts()]
        for start in starts:
            self._check(start)
        if not starts:
            self._tell_of_no_start()
        return LogReading(starts=tuple(starts), problems=tuple(self._problems))

    def _read_line(self, line: LogLine) -> None:
        found = match_form(line.text)
        if found is None and self._goes_on(line):
            return
        if found is not None:
            self._begin(line, found)
        elif ("version" in line.text or "model" in line.text) and (beside := logo(line.text)) is not None:
            self._begin(line, None)
            self._logo(line, *beside)
        elif has_head(line.text) or (line.has_prefix and may_go_on(line.text)):
            self._begin(line, None)
        if found is None:
            self._look_at(line.text)

    def _begin(self, line: LogLine, found: tuple[Form, re.Match[str]] | None) -> None:
        """A message, which the lines that follow may complete."""
        self._settle()
        self._parts = [line]
        self._found = None if found is None else (line, *found)

    def _settle(self) -> None:
        """The message is whole."""
        found, self._parts, self._found = self._found, [], None
        if found is not None:
            self._take(*found)

    def _goes_on(self, line: LogLine) -> bool:
        """Whether a line completes the message before it.

        A terminal breaks a line at its width, and may drop a blank there; a pager breaks it between words.
        """
        if not self._parts:
            return False
        parts = [*(part.whole for part in self._parts), line.whole]
        if (
            line.has_prefix
            or has_head(line.text)
            or len(parts) > _MOST_PARTS
            or sum(map(len, parts)) > _MOST_OF_ALL_PARTS
        ):
            self._settle()
            return False
        self._parts.append(line)
        width = max(map(len, parts))
        # As in a comment, each line may have its mark.
        unmarked = " ".join(text.rstrip() for text in (parts[0], *(part.text for part in self._parts[1:])))
        for text in ("".join(parts), "".join(part.ljust(width) for part in parts), " ".join(parts), unmarked):
            joined = read_message(text, line.number)
            found = match_form(joined.text)
            # What is whole already grows no more.
            if found is not None and (self._found is None or found[1].end() > self._found[2].end()):
                self._found = (joined, *found)
                return True
        return False

    def _look_at(self, text: str) -> None:
        """Whose log it is, as long as it is not clear."""
        if self._servers:
            return
        front = text[:2000]
        if not self._is_vllm:
            self._is_vllm = any(word in front for word in _OF_VLLM)
        for name, words in _OF_OTHERS.items():
            if any(word in front for word in words):
                self._others[name] += 1

    def _take(self, line: LogLine, form: Form, found: re.Match[str]) -> None:
        groups = found.groups()
        if form.name in self._of_the_server:
            self._of_the_server[form.name](line, groups)
        elif form.name in OF_AN_ENGINE:
            engine = self._server(line).engine_of(line.speaker.engine, line.number)
            OF_AN_ENGINE[form.name](engine, groups)
        elif form.name in FAILURE_SENTENCES:
            self._fail(line, form, groups)
        else:
            self._take_figures(line, form, groups)

    # Of the server

    def _server(self, line: LogLine) -> ServerDraft:
        """The present start; a log may begin in the middle of one."""
        return self._servers[-1] if self._servers else self._new_server(line)

    def _new_server(self, line: LogLine) -> ServerDraft:
        if len(self._servers) >= _MOST_STARTS:
            self._too_many = True
            self._tell(
                LogProblemKind.TOO_LARGE,
                f"line {line.number}: more than {_MOST_STARTS} starts stand before it, and what follows was not read; give "
                "the log of one start",
            )
            return self._servers[-1]
        self._servers.append(ServerDraft(line.number, line.number))
        return self._servers[-1]

    def _logo(self, line: LogLine, what: str, said: str) -> None:
        if what == "version":
            self._version(line, (said,))
        else:
            self._server(line).model = one_line(said)

    def _version(self, line: LogLine, groups: Groups) -> None:
        release, model = groups[0], groups[1] if len(groups) > 1 else None
        # Each of several API servers says it.
        server = self._server(line) if line.speaker.is_api_server else self._new_server(line)
        server.last_line = max(server.last_line, line.number)
        self._release(server, release)
        if model:
            server.model = one_line(model)

    def _release(self, server: ServerDraft, said: str | None) -> None:
        found = _RELEASE.fullmatch(said or "")
        if found is not None and server.release is None:
            server.release = one_line(found[1])

    def _arguments(self, line: LogLine, groups: Groups) -> None:
        server = self._server(line)
        if any(engine.outcome is not StartOutcome.CUT for engine in server.engines.values()):
            server = self._new_server(line)
        server.last_line = max(server.last_line, line.number)
        flags, model = read_arguments(groups[0] or "")
        server.said_flags |= flags
        server.model = model or server.model

    def _engine(self, line: LogLine, groups: Groups) -> None:
        server = self._server(line)
        before = server.engines.get(line.speaker.engine)
        if before is not None and (before.is_named or before.outcome is not StartOutcome.CUT):
            server = self._new_server(line)
        self._release(server, groups[0])
        server.engine_of(line.speaker.engine, line.number).is_named = True
        flags, model = read_arguments(groups[1] or "")
        server.resolved_flags = {**flags, **server.resolved_flags}
        server.model = server.model or model

    def _step(self, line: LogLine, groups: Groups) -> None:
        self._resolved(line, "max_num_batched_tokens", groups[0])

    def _length(self, line: LogLine, groups: Groups) -> None:
        self._resolved(line, "max_model_len", groups[0])

    def _override(self, line: LogLine, groups: Groups) -> None:
        """A pool that is made for a moment to measure CUDA graphs is told so as well, from 0 blocks (from 0.18)."""
        if int(groups[0] or 0) > 0:
            self._resolved(line, "num_gpu_blocks_override", groups[1])
            engine = self._server(line).engine_of(line.speaker.engine, line.number)
            engine.values.setdefault("num_gpu_blocks", int(groups[0] or 0))

    def _resolved(self, line: LogLine, name: str, value: str | None) -> None:
        server = self._server(line)
        server.last_line = max(server.last_line, line.number)
        if value is not None and int(value) > 0:
            server.resolved_flags[name] = int(value)

    def _engine_blocks(self, line: LogLine, groups: Groups) -> None:
        """Printed by the API server of each engine; index 0 is also that of an engine without one."""
        server = self._server(line)
        index = int(groups[0] or 0)
        engine = server.engines.get(index) or server.engines.get(None if index == 0 else index)
        if engine is not None:
            engine.values.setdefault("num_gpu_blocks", int(groups[1] or 0))
            engine.last_line = server.last_line = line.number

    def _server_up(self, line: LogLine, _: Groups) -> None:
        if self._servers:
            self._servers[-1].start_all(line.number)

    # Of one rank

    def _take_figures(self, line: LogLine, form: Form, groups: Groups) -> None:
        server = self._server(line)
        engine = server.engines.get(line.speaker.engine)
        if form.name == "loaded" and engine is not None and _has_gone_past_loading(engine, line):
            server = self._new_server(line)
        rank = server.engine_of(line.speaker.engine, line.number).rank_of(line.speaker)
        try:
            OF_A_RANK[form.name](rank, figures_of(form, groups), groups)
        except BadUnitError as error:
            self._tell(
                LogProblemKind.UNIT,
                f"line {line.number}: a figure of `{form.head.strip()}` {error}; the line is left out: give the log as vLLM "
                "printed it",
            )

    def _fail(self, line: LogLine, form: Form, groups: Groups) -> None:
        if not self._servers and form.name in ("out_of_memory", "v0_no_room_for_one"):
            # A log that begins with serving may hold such a line too.
            return
        server = self._server(line)
        engines = server.engines.values()
        if engines and all(engine.outcome is StartOutcome.STARTED for engine in engines):
            return
        engine = server.engine_of(line.speaker.engine, line.number)
        try:
            figures = figures_of(form, groups)
        except BadUnitError:
            figures = []
        if form.name == "short" and figures:
            put_budget(engine.rank_of(line.speaker), figures, groups)
        engine.fail(FAILURE_SENTENCES[form.name](figures, groups), is_known=form.name != "not_started")

    # What is wrong

    def _tell(self, kind: LogProblemKind, message: str) -> None:
        self._told[kind] += 1
        if self._told[kind] <= _MOST_PROBLEMS:
            self._problems.append(LogProblem(kind, message))

    def _check(self, start: LoggedStart) -> None:
        lines = f"lines {start.first_line} to {start.last_line}"
        for rank in start.ranks:
            name = f"rank {rank.label}" if rank.label else "the rank"
            for said in contradictions(rank, start.release):
                self._tell(
                    LogProblemKind.CONTRADICTION,
                    f"{lines}: of {name}, {said}; take these figures for no measurement, and look at the log of another start",
                )
        if start.outcome is StartOutcome.CUT:
            self._tell(
                LogProblemKind.CUT,
                f"{lines}: neither the end of this start nor an error stands there; take the log again once the server answers "
                "or has stopped",
            )

    def _tell_of_no_start(self) -> None:
        seen = f"lines 1 to {self._last_line}" if self._last_line else "it holds no line"
        if self._others:
            name = self._others.most_common(1)[0][0]
            self._tell(LogProblemKind.NOT_VLLM, f"{seen}: this is a log of {name}; give the one of vLLM")
        elif self._is_vllm:
            self._tell(
                LogProblemKind.NO_START,
                f"{seen}: nothing of a start stands in this log of vLLM, which may have been rotated away; {KEEP_THE_START}",
            )
        elif self._last_line:
            self._tell(
                LogProblemKind.NOT_VLLM, f"{seen}: nothing that vLLM prints stands there; {KEEP_THE_START}"
            )
        else:
            self._tell(LogProblemKind.NO_START, f"{seen}; {KEEP_THE_START}")


def _has_gone_past_loading(engine: EngineDraft, line: LogLine) -> bool:
    """Whether this loads a model once more: a start that the log does not announce."""
    rank = engine.ranks.get(line.speaker.process)
    return engine.outcome is not StartOutcome.CUT or (rank is not None and "available" in rank.values)
