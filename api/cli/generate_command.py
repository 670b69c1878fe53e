"""`run generate PROMPT`: continue a prompt and stream the text to standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ostinato.api.cli.terminal import choose_sampling, start_llm, write_stream
from ostinato.conf.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.conf.root import RunConfig

__all__ = ("generate",)


def generate(config: RunConfig, prompt: str) -> int:
    """Stream the continuation of `prompt`; `-` reads the prompt from standard input.

    Raises:
        ConfigError: the prompt is empty.
        StartupError: the engine cannot start.
        InvalidRequestError: the prompt or a parameter cannot be served.
        EngineError: the answer ended with an error, see `write_stream`.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ConfigError('the prompt is empty; write run generate "Once upon a time"')
    llm = start_llm(config)
    question = [{"role": "user", "content": text}] if config.generate.chat else text
    _, stopped = write_stream(llm.stream(question, choose_sampling(llm, config.generate)))
    sys.stdout.write("\n")
    return 130 if stopped else 0
