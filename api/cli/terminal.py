"""Functions of the terminal commands: start the engine in this process, and stream its text."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING, Self

from rich.console import Console

from ostinato.conf.sections.command_schema import ChatSection, GenerateSection
from ostinato.runtime.errors import EngineError
from ostinato.runtime.startup.bundles import prepare_kernels

if TYPE_CHECKING:
    from ostinato.conf.root import RunConfig
    from ostinato.runtime.llm import LLM
    from ostinato.runtime.types.outputs import RequestOutput
    from ostinato.runtime.types.params import SamplingParams

__all__ = ("Interruption", "choose_sampling", "show_phases", "start_llm", "write_stream")

_SAMPLING_KEYS = ("max_tokens", "temperature", "top_p", "top_k", "seed")


def start_llm(config: RunConfig) -> LLM:
    """Start the engine in this process. Shows the phases of the start if stderr is a terminal.

    Raises:
        StartupError: the engine cannot start.
    """
    console = Console(stderr=True)
    with console.status("starting: CPU kernels, imports") as status:
        prepare_kernels(config.engine)
        from ostinato import LLM

        return LLM(
            config=config, report=show_phases(lambda text: status.update(f"starting: {text}"))
        )


def show_phases(show: Callable[[str], None]) -> Callable[[str, float | None], None]:
    """A function for the `report` of an engine that shows the phases of its start.

    Args:
        show: called with the names of the running phases, at each beginning and end of a phase.
    """
    running: list[str] = []

    def report(name: str, seconds: float | None) -> None:
        if seconds is None:
            running.append(name)
        elif name in running:
            running.remove(name)
        show(", ".join(running) or f"{name} is done")

    return report


def choose_sampling(llm: LLM, section: GenerateSection | ChatSection) -> SamplingParams:
    """The model's default sampling parameters, overridden by the section's settings."""
    chosen: dict[str, object] = {
        key: value for key in _SAMPLING_KEYS if (value := getattr(section, key)) is not None
    }
    chosen.setdefault("max_tokens", None)
    if isinstance(section, GenerateSection):
        chosen["stop"] = tuple(section.stop)
    return llm.default_sampling(**chosen)


class Interruption:
    """While it is active, the first Ctrl-C is only recorded. The second Ctrl-C interrupts as usual.

    A KeyboardInterrupt within a step would leave registered blocks in the KV cache that were not
    computed. So an answer is stopped between two steps.
    """

    def __init__(self) -> None:
        self.is_asked = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


def write_stream(outputs: Iterator[RequestOutput]) -> tuple[str, bool]:
    """Print the text as it arrives. Ctrl-C aborts the request after the current step.

    Returns:
        The whole text, and whether Ctrl-C ended it.

    Raises:
        EngineError: the request ended with an error.
    """
    parts: list[str] = []
    with Interruption() as interruption, closing(_closable(outputs)) as stream:
        for output in stream:
            if output.error is not None:
                raise EngineError(output.error)
            parts.append(output.text_delta)
            sys.stdout.write(output.text_delta)
            sys.stdout.flush()
            if interruption.is_asked:
                break
    return "".join(parts), interruption.is_asked


def _closable(outputs: Iterable[RequestOutput]) -> Generator[RequestOutput, None, None]:
    """A generator over `outputs`. Closing it closes `outputs`, which aborts the request."""
    yield from outputs
