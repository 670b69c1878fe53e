"""`Command` declares a sub-command of `run`: its function, arguments and help."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Command",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One sub-command. `ostinato/commands.py` has the table of all sub-commands.

    `target` is "module:function". The function takes the `RunConfig`, then the prompt (if
    `takes_prompt`), the `files`, or an `EarlyEngine` (if `starts_engine`). It returns the exit
    code.
    """

    target: str
    summary: str
    sections: tuple[str, ...]  # sections of the configuration, in the order of the help text
    examples: tuple[str, ...]
    takes_prompt: bool = False
    # Names of the positional arguments, in order: files, or the address and token of `run rank`.
    files: tuple[str, ...] = ()
    # A group of the configuration. The first word can be one of its options: `run bench serve`
    # means `run bench bench=serve`.
    kinds: str = ""
    # "module:function" for `--multirun key=1,2`, which runs the command once for each
    # configuration. The function takes the result of `conf.compose.expand_sweep` and the
    # configuration directory. The `target` of such a command also takes the overrides and the
    # configuration directory.
    sweep_target: str = ""
    # One of the words can be a model, and the flags of `vllm serve` are accepted.
    takes_engine_flags: bool = False
    # An engine process is started before the configuration is read.
    starts_engine: bool = False
    # Flags that are short for an override: (flag, override).
    flags: tuple[tuple[str, str], ...] = ()
