"""Reads the flags of `vllm serve` from a command line of `run serve`.

    run serve MODEL --max-model-len 4096 --dtype=bfloat16 --no-enable-prefix-caching

`conf/arguments/engine_arguments.py` lists the flags. An unknown flag is an error. Flags that every
command has, and all other words, are left to the command line's parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.conf.arguments.engine_arguments import (
    ARGUMENTS,
    Argument,
    argument_settings,
    settings_of_each,
    unknown_argument,
)
from ostinato.conf.compose import group_options
from ostinato.conf.describe import describe_keys
from ostinato.conf.errors import ConfigError

__all__ = ("EngineFlags", "read_flags")

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-O": "--compilation-config",
}
_SECRET = ("server.api_keys",)


@dataclass(slots=True)
class EngineFlags:
    """The settings from the flags of `vllm serve` in a command line, and all other words."""

    settings: dict[str, object] = field(default_factory=dict)  # key -> value
    written: dict[str, str] = field(default_factory=dict)  # key -> the flag that set it
    # All other words and the flags that every command has, in order.
    rest: list[str] = field(default_factory=list)

    def explain(self) -> str:
        """One line that names the override for each flag; "" = no flags. API keys are hidden."""
        pairs = [
            f"{self.written[key]} is {key}={'...' if key in _SECRET else _shown(value)}"
            for key, value in self.settings.items()
        ]
        return ", ".join(pairs)


def read_flags(words: Sequence[str], own: Mapping[str, int]) -> EngineFlags:
    """Separate the flags of `vllm serve` from the other words.

    Args:
        words: the words after the command.
        own: {flag: number of its values} for the flags that every command has. They and their
            values go to `rest`.

    Raises:
        ConfigError: a flag is unknown or not supported, lacks a value, has a value and takes none,
            or sets the same key as an override.
    """
    flags = EngineFlags()
    arguments: dict[str, object] = {}
    texts: dict[str, tuple[str, object]] = {}  # argument -> the flag as it is written, its value
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.startswith("-O") and len(word) > 2:  # -O3 sets vLLM's compilation level
            word = f"{_SHORT['-O']}={word[2:]}"
        name, equals, text = word.partition("=")
        if name in own:
            taken = 0 if equals else own[name]
            flags.rest += [word, *words[index : index + taken]]
            index += taken
            continue
        if not word.startswith("-") or word == "-":
            flags.rest.append(word)
            continue
        name, value = _flag_value(name)
        argument = ARGUMENTS.get(name)
        if argument is None:
            raise unknown_argument(name, word, server=True)
        if value is None:
            values = [text] if equals else _values(words[index:], argument)
            if not values:
                raise ConfigError(f"{word} needs a value, as in {word} VALUE")
            index += 0 if equals else len(values)
            value = values if argument.is_list else values[0]
        elif equals:
            raise ConfigError(f"{word}: this flag takes no value; write --no-... to switch it off")
        arguments[name], texts[name] = value, (word, value)
    flags.settings = argument_settings(arguments, server=True)
    for name, settings in settings_of_each(arguments, server=True).items():
        for key in settings:
            text = _written(*texts[name], secret=key in _SECRET)
            before = flags.written.get(key)  # several flags can set the number of adapters
            flags.written[key] = text if before is None else f"{before} {text}"
    _check_overrides(flags)
    return flags


def _flag_value(flag: str) -> tuple[str, bool | None]:
    """(name of the argument, its value if the flag implies it: True, or False for `--no-...`)."""
    flag = _SHORT.get(flag, flag)
    name = flag.lstrip("-").partition(".")[0].replace("-", "_")
    if name in ARGUMENTS:
        return name, True if ARGUMENTS[name].is_flag else None
    positive = name.removeprefix("no_")
    if positive != name and positive in ARGUMENTS and ARGUMENTS[positive].is_flag:
        return positive, False
    return name, None


def _values(words: Sequence[str], argument: Argument) -> list[str]:
    """The values of a flag: the next word, or for a list all words up to a flag or an override."""
    if not argument.is_list:
        return list(words[:1])
    found: list[str] = []
    for word in words:
        if word.startswith("-") or (_is_override(word) if argument.has_pairs else "=" in word):
            break
        found.append(word)
    return found


def _is_override(word: str) -> bool:
    """Whether a word NAME=VALUE selects an option of a group, or sets a key of a section."""
    name, equals, _ = word.partition("=")
    name = name.lstrip("+~")
    sections = {key.partition(".")[0] for key in describe_keys()}
    section, dot, _ = name.partition(".")
    return bool(equals) and (name in group_options() or bool(dot and section in sections))


def _written(word: str, value: object, *, secret: bool) -> str:
    name, equals, _ = word.partition("=")
    if secret:
        return f"{name} ..."
    if equals or isinstance(value, bool):
        return word
    return f"{word} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _check_overrides(flags: EngineFlags) -> None:
    overridden = {word.partition("=")[0].lstrip("+~"): word for word in flags.rest if "=" in word}
    for key, written in flags.written.items():
        if key in overridden:
            raise ConfigError(f"{written} and {overridden[key]} set the same key; leave one out")
