"""`BenchContext`: gives a measurement a progress display, overrides and engines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.conf.compose import load_config
from ostinato.conf.root import RunConfig

if TYPE_CHECKING:
    from ostinato.runtime.engine.step_observer import StepObserver
    from ostinato.runtime.llm import LLM
    from ostinato.runtime.speculation.proposer import Proposer
    from ostinato.runtime.startup.model_cache import LoadedModelCache

__all__ = ("BenchContext",)


class BenchContext:
    """One run of `run bench`.

    Args:
        overrides: the overrides that the configuration was made from.
        config_dir: a directory with further options.
        model_cache: keeps the model between points of a sweep; None = each engine loads its own.
        quiet: print no progress, because the caller shows its own.
    """

    def __init__(
        self,
        overrides: Sequence[str] = (),
        config_dir: str | None = None,
        *,
        model_cache: LoadedModelCache | None = None,
        quiet: bool = False,
    ) -> None:
        self.overrides = list(overrides)
        self._config_dir = config_dir
        self._model_cache = model_cache
        self._shows = not quiet and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Show a progress text on standard error if that is a terminal; empty = remove it."""
        if self._shows:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def config_with(self, words: Sequence[str]) -> RunConfig:
        """The configuration with further overrides.

        Raises:
            ConfigError: an override is wrong.
        """
        return load_config([*self.overrides, *words], config_dir=self._config_dir)

    def open_llm(
        self,
        config: RunConfig,
        observer: StepObserver | None = None,
        proposer: Proposer | None = None,
    ) -> LLM:
        """An engine in this process, whose steps are reported to `observer`.

        Args:
            config: its configuration.
            observer: None = no observer.
            proposer: a drafter instead of the configured one.

        Raises:
            StartupError: the engine cannot start.
        """
        from ostinato.runtime.llm import LLM

        return LLM(
            config=config, observer=observer, model_cache=self._model_cache, proposer=proposer
        )
