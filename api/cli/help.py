"""Makes the text of `run --help` and `run <command> --help` from the commands and the schema."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping

from ostinato.api.cli.command_spec import Command
from ostinato.conf.describe import KeyDescription, describe_sections

__all__ = ("command_help", "overview")

_KEY_WIDTH = 36
_FLAGS = {
    "key=value": "override the configuration; keys: run <command> --help",
    "--cfg job": "print the resulting configuration as YAML and exit",
    "--config-dir DIR": "also find options in DIR, such as DIR/model/mine.yaml for model=mine",
    "--help": "the command's keys with defaults and ranges",
}


def overview(commands: Mapping[str, Command]) -> str:
    """The text of `run --help`: the commands, and the flags that all of them have."""
    columns = _columns()
    summaries = {name: command.summary for name, command in commands.items()}
    lines = [
        *textwrap.wrap(
            "Ostinato: inference and serving of large language models around one compiled graph.",
            columns,
        ),
        "",
        "usage: run <command> [key=value ...]",
        "",
        "commands:",
        *_listed(summaries, columns),
        "",
        "every command:",
        *_listed(_FLAGS, columns),
        "",
        "run --version             prints the version",
        "run -sc install=bash      prints a completion script for bash, fish or zsh;",
        '                          eval "$(run -sc install=bash)" installs it',
    ]
    return "\n".join(lines)


def _listed(entries: Mapping[str, str], columns: int) -> list[str]:
    """A line for each entry, and more if it is too long; the texts are below each other."""
    indent = max(map(len, entries)) + 4
    return [
        line
        for name, text in entries.items()
        for line in textwrap.wrap(
            f"  {name:<{indent - 2}}{text}",
            columns,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
    ]


def _columns() -> int:
    """The width of the text: that of the terminal, at most 120."""
    return min(shutil.get_terminal_size().columns, 120)


def command_help(name: str, command: Command) -> str:
    """Usage, examples and every key of the sections that the command reads."""
    from ostinato.conf.compose import group_options

    columns = _columns()
    options = group_options()
    prompt = " PROMPT" if command.takes_prompt else ""
    if command.files:
        prompt = f" {' '.join(command.files)}"
    if command.kinds:
        prompt = " [KIND]"
    if command.takes_engine_flags:
        prompt = " [MODEL] [--flag value ...]"
    lines = [f"usage: run {name}{prompt} [key=value ...]", "", command.summary, "", "examples:"]
    lines += [f"  {example}" for example in command.examples]
    if command.kinds:
        lines[2:2] = textwrap.wrap(f"kinds: {', '.join(options[command.kinds])}", columns)
    sections = describe_sections()
    for section_name in command.sections:
        section, keys = sections[section_name]
        lines += ["", *textwrap.wrap(f"{section_name}: {section.__doc__}", columns)]
        if section_name in options:
            choice = f"an option sets the section's keys: {', '.join(options[section_name])}"
            lines += _entry(f"{section_name}=...", choice, columns)
        for entry in keys:
            lines += _entry(f"{entry.key}={entry.default}", _explanation(entry), columns)
    return "\n".join(lines)


def _explanation(entry: KeyDescription) -> str:
    return f"{entry.meaning} ({'null or ' if entry.nullable else ''}{entry.allowed})"


def _entry(key: str, text: str, columns: int) -> list[str]:
    wrapped = textwrap.wrap(text, max(columns - _KEY_WIDTH, 30), break_on_hyphens=False)
    head = f"  {key}"
    if len(head) >= _KEY_WIDTH:
        return [head, *(" " * _KEY_WIDTH + line for line in wrapped)]
    lines = [f"{head:<{_KEY_WIDTH}}{wrapped[0]}"]
    return lines + [" " * _KEY_WIDTH + line for line in wrapped[1:]]
