"""Runs one command line: finds the command, parses its overrides and turns errors into exit codes.

Exit codes: 0 = done, 1 = the command failed, 2 = the command line is wrong, 130 = interrupted.
Commands load lazily, so that help and errors need not import torch.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from ostinato.api.cli.command_spec import Command
from ostinato.conf.environment import completion_line
from ostinato.conf.errors import ConfigError
from ostinato.runtime.errors import EngineError

if TYPE_CHECKING:
    from ostinato.runtime.early_start.early_engine import EarlyEngine

__all__ = ("run_command_line",)

Commands = Mapping[str, Command]

# Flag that every command has -> number of values that follow it.
_OWN_FLAGS = {
    **dict.fromkeys(("-h", "--help", "-m", "--multirun", "--"), 0),
    **dict.fromkeys(("-c", "--cfg", "--config-dir"), 1),
}
# Beginnings of flags that need no engine. With one of them, a command that otherwise starts an
# engine (`starts_engine`) prints its help or configuration, or refuses --multirun.
_PRINTING = ("-h", "--help", "-c", "--cfg", "-m", "--multirun")
_BENCH_PACKAGES = ("aiohttp", "jsonschema", "matplotlib", "optuna")  # the extra `bench`


def run_command_line(arguments: Sequence[str], commands: Commands) -> int:
    """Run one of `commands`; returns the exit code. An error is printed as one line on stderr."""
    try:
        return _dispatch_and_flush(list(arguments), commands)
    except ConfigError as error:
        return _fail(error, 2)
    except EngineError as error:
        return _fail(error, 1)
    except ModuleNotFoundError as error:
        if error.name not in _BENCH_PACKAGES:
            raise
        return _fail(
            ConfigError(
                f"run {arguments[0]} needs the package {error.name}, which is not installed: "
                'pip install "ostinato[bench]", in a checkout pip install -e ".[bench]"'
            ),
            1,
        )
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Redirect stdout, so that the last flush does
        # not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # the system refused a file or a process
        return _fail(error, 1)


def _fail(error: Exception, code: int) -> int:
    text = " ".join(str(error).split())
    print(f"run: {text}", file=sys.stderr)
    return code


def _dispatch_and_flush(arguments: list[str], commands: Commands) -> int:
    """A closed pipe is noticed here, and not when the interpreter ends."""
    code = _dispatch(arguments, commands)
    sys.stdout.flush()
    return code


def _dispatch(arguments: list[str], commands: Commands) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        from ostinato.api.cli.help import overview

        print(overview(commands))
        return 0 if arguments else 2
    name, *rest = arguments
    if name in ("-V", "--version"):
        from ostinato import __version__

        print(f"ostinato {__version__}")
        return 0
    if name in ("-sc", "--shell-completion"):
        return _shell_completion(rest, commands)
    if name not in commands:
        from ostinato.conf.describe import nearest

        close = nearest(name, commands)
        hint = f"did you mean run {close}?" if close else f"commands: {', '.join(commands)}"
        raise ConfigError(f"there is no command {name!r}; {hint}")
    return _run_command(name, commands[name], rest)


def _run_command(name: str, command: Command, arguments: list[str]) -> int:
    if not command.starts_engine or any(word.startswith(_PRINTING) for word in arguments):
        return _run_words(name, command, arguments, None)
    from ostinato.runtime.early_start.early_engine import EarlyEngine

    # The engine process imports torch while this process imports Hydra and the server.
    with EarlyEngine() as early:
        gc.disable()  # until the command has imported its modules (api/server/server.py)
        try:
            return _run_words(name, command, arguments, early)
        finally:
            gc.enable()


def _run_words(name: str, command: Command, arguments: list[str], early: EarlyEngine | None) -> int:
    settings: dict[str, object] = {}
    if command.takes_engine_flags:
        from ostinato.api.cli.engine_flags import read_flags

        flags = read_flags(arguments, _OWN_FLAGS)
        settings, arguments = flags.settings, flags.rest
        if flags.settings:
            print(f"run {name}: {flags.explain()}", file=sys.stderr)
    options, words, after_dashes = _parse(name, command, arguments)
    words = [*words, *options.flags]
    if options.help:
        from ostinato.api.cli.help import command_help

        print(command_help(name, command))
        return 0
    if command.kinds and words and "=" not in words[0]:
        words = [_kind(name, command, words[0]), *words[1:]]
    takes_words = command.takes_prompt or bool(command.files)
    prompts = [word for word in words if takes_words and not _is_override(word)]
    overrides = [word for word in words if word not in prompts]
    if command.takes_engine_flags:
        overrides = _without_model(name, overrides, settings)
    prompts += [" ".join(after_dashes)] if after_dashes else []
    from ostinato.conf.compose import compose_yaml, expand_sweep, load_config

    if options.multirun and not command.sweep_target:
        raise ConfigError(f"run {name} runs once; --multirun is for run bench")
    if options.cfg:
        points = [overrides]
        if options.multirun:
            points = [each for _, each in expand_sweep(overrides, config_dir=options.config_dir)]
        configs = (
            compose_yaml(each, values=settings, config_dir=options.config_dir) for each in points
        )
        print("---\n".join(configs), end="")
        return 0
    if options.multirun:
        points = expand_sweep(overrides, config_dir=options.config_dir)
        return _load(command.sweep_target)(points, options.config_dir)
    config = load_config(overrides, values=settings, config_dir=options.config_dir)
    if command.files and len(prompts) != len(command.files):
        raise ConfigError(
            f"run {name} takes {len(command.files)} words, got {len(prompts)}: "
            f"run {name} {' '.join(command.files)} [key=value ...]"
        )
    if command.sweep_target:
        return _load(command.target)(config, overrides, options.config_dir)
    if command.takes_prompt and len(prompts) != 1:
        raise ConfigError(
            f"run {name} takes one prompt, got {len(prompts)}: "
            f'run {name} "Once upon a time" [key=value ...]; '
            "give - to read the prompt from standard input"
        )
    if early is not None:
        return _load(command.target)(config, early)
    return _load(command.target)(config, *prompts)


def _without_model(name: str, words: list[str], settings: dict[str, object]) -> list[str]:
    """Take the model out of the words, and add its setting to `settings`.

    The model is a word without `=`: a directory, a hub id or the name of an option of `model`.
    Returns the other words.
    """
    models = [word for word in words if "=" not in word]
    if not models:
        return words
    from ostinato.conf.compose import group_options

    model, overrides = models[0], [word for word in words if "=" in word]
    clash = [word for word in overrides if word.startswith(("model=", "model.path="))]
    clash += ["--model"] * ("model.path" in settings) + models[1:]
    if clash:
        raise ConfigError(f"run {name} serves one model, got {model} and {clash[0]}")
    is_option = model in group_options()["model"] and not os.path.exists(model)
    settings["model" if is_option else "model.path"] = model
    return overrides


def _load(target: str) -> Callable[..., int]:
    """The function that "module:function" names."""
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)


def _kind(name: str, command: Command, word: str) -> str:
    """The override for a kind: `bench=serve` for the word `serve` in `run bench serve`."""
    from ostinato.conf.compose import group_options
    from ostinato.conf.describe import nearest

    options = group_options()[command.kinds]
    if word not in options:
        close = nearest(word, options)
        hint = f"did you mean run {name} {close}?" if close else f"it has {', '.join(options)}"
        raise ConfigError(f"run {name} has no {word!r}; {hint}")
    return f"{command.kinds}={word}"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parse(
    name: str, command: Command, arguments: list[str]
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """(flags, words before `--`, words after `--`)."""
    head, after = arguments, []
    if "--" in arguments:
        position = arguments.index("--")
        head, after = arguments[:position], arguments[position + 1 :]
        if not command.takes_prompt:
            raise ConfigError(f"run {name} takes no words after --, got -- {' '.join(after)}")
    parser = _Parser(prog=f"run {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--config-dir")
    parser.add_argument("-m", "--multirun", action="store_true")
    for flag, override in command.flags:
        parser.add_argument(flag, action="append_const", const=override, dest="flags")
    parser.set_defaults(flags=[])
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args(head)
    return options, options.words, after


def _is_override(word: str) -> bool:
    """Whether a word is an override and not a part of a prompt.

    An override is a key, then `=`. The key begins with a known section, has a dot, or follows `+`
    or `~`. `x = 1` and `Who wrote E=mc2?` are prompts. After `--` every word is part of the prompt.
    """
    from ostinato.conf.describe import describe_keys

    match = re.match(r"[+~]{0,2}(\w[\w-]*)[\w./@-]*(=|$)", word)
    if match is None:
        return False
    sections = {key.partition(".")[0] for key in describe_keys()}
    has_value = match[2] == "="
    return has_value and (match[1] in sections or "." in match[0] or word[0] in "+~")


def _shell_completion(arguments: list[str], commands: Commands) -> int:
    """Print a script that installs or uninstalls a shell's completion, or print completions.

    The shell asks for completions of a command line with `query=SHELL`.

    The names of commands are completed here, and overrides by Hydra.
    """
    from ostinato.conf.compose import complete, completion_script

    if len(arguments) != 1 or arguments[0].count("=") != 1:
        raise ConfigError("shell completion: run -sc install=bash, uninstall=bash (or fish, zsh)")
    action, _, shell = arguments[0].partition("=")
    if action != "query":
        completion_script(shell, action)
        return 0
    line = completion_line()
    words = line.split()
    typing_command = len(words) < 2 or (len(words) == 2 and not line[-1].isspace())
    if typing_command:
        typed = words[1] if len(words) == 2 else ""
        separator = "\n" if shell == "fish" else " "
        print(separator.join(name for name in commands if name.startswith(typed)))
        return 0
    without_command = re.sub(rf"^(\s*\S+\s+){re.escape(words[1])}\s", r"\1", line, count=1)
    print(complete(shell, without_command))
    return 0
