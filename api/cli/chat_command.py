"""`run chat`: a conversation in the terminal, or with lines from a pipe. Answers are streamed.

Ctrl-C stops the answer that is being written. At the prompt, Ctrl-C starts a new line.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from ostinato.api.cli.terminal import choose_sampling, start_llm, write_stream
from ostinato.conf.environment import cache_dir
from ostinato.runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostinato.conf.root import RunConfig
    from ostinato.runtime.llm import LLM

__all__ = ("Conversation", "chat")

_HELP = """\
/help           this text
/reset          forget the conversation
/system TEXT    set the system message and start anew; without TEXT: none
/exit           leave (so does the end of input, Ctrl-D)
Ctrl-C          stop the answer"""
_HISTORY_LINES = 1000


class Conversation:
    """The messages so far, with the system message first."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages for the chat template."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self._turns

    @property
    def is_at_first_question(self) -> bool:
        """Whether its last message is its first question."""
        return len(self._turns) == 1

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Remove the last question. Called if it got no answer."""
        del self._turns[-1]

    def reset(self) -> None:
        self._turns.clear()


def chat(config: RunConfig) -> int:
    """Answer lines until the end of input or /exit.

    Raises:
        StartupError: the engine cannot start.
        InvalidRequestError: the first question of a conversation cannot be served. An example is a
            model without a chat template.
        EngineError: an answer ended with an error, see `write_stream`.
    """
    llm = start_llm(config)
    console = Console(highlight=False)
    conversation = Conversation(config.chat.system)
    interactive = sys.stdin.isatty()
    if interactive:
        console.print(f"[bold]{llm.model.name}[/bold]  /help lists the commands")
    with _history(interactive):
        for line in _lines(interactive):
            if line.startswith("/"):
                if line.split()[0] == "/exit":
                    break
                console.print(_command(line, conversation), markup=False)
            else:
                _answer(llm, config, conversation, line, console)
    return 0


def _answer(
    llm: LLM, config: RunConfig, conversation: Conversation, line: str, console: Console
) -> None:
    conversation.ask(line)
    try:
        stream = llm.stream(conversation.messages, choose_sampling(llm, config.chat))
        text, stopped = write_stream(stream)
    except InvalidRequestError as error:
        if conversation.is_at_first_question:
            raise  # a reset does not help if the first question cannot be served
        conversation.take_back()
        console.print(f"{error}\n/reset forgets the conversation", markup=False)
        return
    conversation.answer(text)
    console.print(" (stopped)" if stopped else "")


def _command(line: str, conversation: Conversation) -> str:
    """Execute a /command; returns the text to print."""
    name, _, rest = line.partition(" ")
    if name == "/help":
        return _HELP
    if name == "/reset":
        conversation.reset()
        return "(the conversation is forgotten)"
    if name == "/system":
        conversation.system = rest.strip()
        conversation.reset()
        return f"(system message: {conversation.system or 'none'})"
    return f"there is no command {name}\n{_HELP}"


def _lines(interactive: bool) -> Iterator[str]:
    """Lines that are not blank, until the end of input."""
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            sys.stdout.write("\n" * interactive)
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            sys.stdout.write("\n")
            continue
        if line.strip():
            yield line.strip()


@contextlib.contextmanager
def _history(interactive: bool) -> Iterator[None]:
    """Line editing, and a history that is kept between conversations, if Python has readline."""
    if not interactive:
        yield
        return
    try:
        import readline
    except ImportError:  # a Python without readline has no line editing
        yield
        return
    file = cache_dir() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
