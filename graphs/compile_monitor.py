"""Recompile detector: counts compilations, and warns of those after the engine is ready.

It is an audit hook. Python calls the hook for every program that the process starts and for all
source text that it compiles. These events show Dynamo (`aot_compile` included), Inductor's
generated modules, Triton kernels, and every C++ or CUDA compiler that our native build, Inductor or
FlashInfer starts. Compilation inside a library, without Python and without a process (NVRTC, the
driver's PTX compiler), is not noticed.

This module imports neither torch nor Triton, so that a warm start on a CPU does not load Dynamo,
Inductor or Triton only to watch them.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import PurePath
from typing import Any

import msgspec

from ostinato.conf.environment import cxx

__all__ = ("IDLE", "CompileKind", "CompileMonitor", "LateCompile")

_LOG = logging.getLogger(__name__)

IDLE = "idle"
"""The `shape` of a compilation between two steps."""


class CompileKind(StrEnum):
    """What compiles."""

    dynamo = "dynamo"  # a traced graph
    inductor = "inductor"  # a module of generated code
    triton = "triton"  # a kernel, from Triton's disk cache or not
    flashinfer = "flashinfer"  # any compiler or build tool that FlashInfer starts
    cpp = "c++"
    cuda = "cuda"
    build = "build"  # a program that runs compilers


class LateCompile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compilations after the engine was ready."""

    what: str  # a CompileKind
    shape: str  # the delayed step's, as "tokens=17,seqs=3"; IDLE = between steps
    count: int  # steps of this shape, or pauses between steps, in which `what` compiled


class CompileMonitor:
    """Counts compilations of one engine; after `mark_ready` each one is late.

    It counts from its construction to `close`. If several engines share a process, work on a thread
    that runs a step belongs to the engine of that step. Other work belongs to the engines that are
    starting, or to all engines if none is starting.

    Attributes:
        compiles: signs of compilation seen before `mark_ready`, by kind; one compilation can give
            several.
    """

    def __init__(self) -> None:
        self.compiles: Counter[str] = Counter()
        self._late: Counter[tuple[str, str]] = Counter()
        self._is_ready = False
        self._step: tuple[int, int] | None = None
        self._thread = 0
        self._counted: set[str] = set()  # kinds, in this step or pause
        _PROCESS.add(self)

    @property
    def late_compiles(self) -> list[LateCompile]:
        """Compilations after `mark_ready`; empty when there were none."""
        return [LateCompile(what, shape, count) for (what, shape), count in self._late.items()]

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    def mark_ready(self) -> None:
        """Call this when the engine is ready. Every later compilation is late."""
        self._is_ready = True
        _PROCESS.listen_to_triton()  # Triton may have been imported since the construction

    def close(self) -> None:
        """Stop counting; safe to call twice."""
        _PROCESS.remove(self)

    def begin_step(self, num_tokens: int, num_seqs: int) -> None:
        """This thread runs a step of this shape until `end_step`."""
        self._step = (num_tokens, num_seqs)
        self._thread = threading.get_ident()
        if self._counted:
            self._counted.clear()

    def end_step(self) -> None:
        """The step has ended."""
        self._step = None
        if self._counted:
            self._counted.clear()

    def runs_step_on(self, thread: int) -> bool:
        return self._step is not None and self._thread == thread

    def observe(self, kind: CompileKind, detail: str) -> None:
        """Count a sign of a compilation; `detail` describes it in the log."""
        if not self._is_ready:
            self.compiles[kind.value] += 1
            return
        step = self._step
        shape = IDLE if step is None else f"tokens={step[0]},seqs={step[1]}"
        if kind in self._counted:
            return
        self._counted.add(kind)
        self._late[kind.value, shape] += 1
        if self._late[kind.value, shape] == 1:
            _LOG.warning(
                "late compile, the engine was ready: what=%s shape=%s: %.200s (further ones are "
                "counted in ostinato_late_compiles_total)",
                kind,
                shape,
                detail,
            )


class _Process:
    """The monitors of this process, behind one audit hook, which Python cannot remove.

    For an event that is not watched, the hook makes one look-up in a set. A step causes few events.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection under the lock may compile, too
        self._monitors: weakref.WeakSet[CompileMonitor] = weakref.WeakSet()
        self._is_hooked = False
        self._stop_listening: Callable[[], None] | None = None

    def add(self, monitor: CompileMonitor) -> None:
        with self._lock:
            self._monitors.add(monitor)
            if not self._is_hooked:
                sys.addaudithook(self._make_hook())
                sys.audit(_GREETING)
                if not self._is_hooked:
                    _LOG.warning("another audit hook forbids ours: late compiles are not noticed")
        self.listen_to_triton()

    def remove(self, monitor: CompileMonitor) -> None:
        with self._lock:
            self._monitors.discard(monitor)
            if not self._monitors and self._stop_listening is not None:
                self._stop_listening()
                self._stop_listening = None

    def listen_to_triton(self) -> None:
        """Also count kernels that Triton loads from its disk cache.

        On another machine they would be compiled.
        """
        knobs = sys.modules.get("triton.knobs")
        with self._lock:
            if knobs is not None and self._stop_listening is None:
                self._stop_listening = self._chain_listener(knobs.compilation)

    def observe(self, kind: CompileKind, detail: str) -> None:
        thread = threading.get_ident()
        with self._lock:
            monitors = list(self._monitors)
            stepping = [monitor for monitor in monitors if monitor.runs_step_on(thread)]
            starting = [monitor for monitor in monitors if not monitor.is_ready]
            for monitor in stepping or starting or monitors:
                monitor.observe(kind, detail)

    def _make_hook(self) -> Callable[[str, tuple[Any, ...]], None]:
        def hook(
            event: str, arguments: tuple[Any, ...], watched: frozenset[str] = _WATCHED
        ) -> None:
            if event in watched:
                self._on_event(event, arguments)

        return hook

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == _GREETING:
            self._is_hooked = True
            return
        if not self._monitors:
            return
        try:
            sighting = _classify(event, arguments)
            if sighting is not None:
                self.observe(*sighting)
        except Exception:  # an exception would end the code that caused the event
            _LOG.exception("the audit event %s could not be read", event)

    def _chain_listener(self, section: Any) -> Callable[[], None]:
        previous = section.listener

        def listener(**event: Any) -> None:
            self.observe(CompileKind.triton, f"kernel {getattr(event.get('src'), 'name', '?')}")
            if previous is not None:
                previous(**event)

        def stop() -> None:
            if section.listener is listener:
                section.listener = previous

        section.listener = listener
        return stop


_GREETING = "ostinato.compile_monitor"
_WATCHED = frozenset(
    (_GREETING, "code.__new__", "compile", "os.posix_spawn", "os.system", "subprocess.Popen")
)

# Patterns of program names, without the directory. A cross compiler's name begins with its target.
_PROGRAMS = {
    CompileKind.cuda: r"nvcc|ptxas|nvlink|fatbinary|cicc|cudafe\+\+|hipcc",
    CompileKind.cpp: r"(.*-)?([gc]\+\+|g?cc|clang(\+\+)?|cc1(plus)?|icpx|icx|cl|ld|lld)(-[\d.]+)?",
    CompileKind.build: r"ninja|cmake|g?make",
}
_SHELLS = {"sh", "bash", "dash", "zsh"}
_LAUNCHED_BY = 3  # at most this many words before a compiler's name: `nice -n 5 g++`, `ccache g++`

Sighting = tuple[CompileKind, str]


def _classify(event: str, arguments: tuple[Any, ...]) -> Sighting | None:
    """The compilation that an audit event shows; None when it shows none."""
    match event, arguments:
        case "compile", (_, str(file), *_):
            return _of_source(file)
        case "code.__new__", _:
            # Dynamo writes byte code that calls its graph, or that resumes after a graph.
            if next(_callers(), "").startswith("torch._dynamo."):
                return CompileKind.dynamo, f"a frame of {arguments[1]}"
        case "os.system", (command, *_):
            return _of_command(os.fsdecode(command).split())
        case (("subprocess.Popen" | "os.posix_spawn"), (program, words, *_)):
            return _of_command(_flat(program, words))
    return None


def _of_source(file: str) -> Sighting | None:
    """The compilation that source text with the name `file` shows."""
    if file.startswith("<eval_with_key>"):  # torch.fx writes a graph as Python
        if any(module.startswith("torch._dynamo.") for module in _callers()):
            return CompileKind.dynamo, "a traced graph"
    elif file == "<unknown>":  # `ast.parse`
        for module in _callers():
            if module.startswith("triton."):
                return CompileKind.triton, "the source of a kernel"
    elif not file.startswith("<") and next(_callers(), "").startswith("torch._inductor."):
        return CompileKind.inductor, file
    return None


def _of_command(words: Sequence[str]) -> Sighting | None:
    """The compilation that the start of this command shows."""
    ours = PurePath(cxx()).name
    for word in words[: _LAUNCHED_BY + 1]:
        name = PurePath(word).name.removesuffix(".exe")
        kind = CompileKind.cpp if name == ours else None
        for each, pattern in _PROGRAMS.items():
            if re.fullmatch(pattern, name):
                kind = each
        if kind is not None:
            if any(module.split(".")[0] == "flashinfer" for module in _callers()):
                kind = CompileKind.flashinfer
            return kind, " ".join(words)
    return None


def _flat(program: object, words: object) -> list[str]:
    """A command's words; for a shell, those of the text that it runs."""
    if isinstance(words, str | bytes):
        return os.fsdecode(words).split()
    assert isinstance(words, Sequence), f"a command is a list of words, not {words!r}"
    texts = [os.fsdecode(word) for word in words]
    if texts and PurePath(texts[0]).name in _SHELLS and "-c" in texts[:-1]:
        return texts[texts.index("-c") + 1].split()
    if program is not None and isinstance(program, str | bytes | os.PathLike):
        texts[:1] = [os.fsdecode(program)]  # the first word need not be the program's name
    return texts


def _callers() -> Iterator[str]:
    """The modules of the calls that caused an audit event, innermost first, without this one."""
    frame = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module != __name__:
            yield module
        frame = frame.f_back


_PROCESS = _Process()
