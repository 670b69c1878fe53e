"""Composes overrides and options with Hydra into one frozen, checked `RunConfig`.

No other module of the package imports hydra or omegaconf. A wrong override raises a `ConfigError`
of one line that names the key, the value, and what is allowed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from types import MappingProxyType
from typing import cast

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ostinato.conf.describe import describe_keys, nearest
from ostinato.conf.environment import expand_user
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig

__all__ = (
    "ConfigError",
    "complete",
    "completion_script",
    "compose_yaml",
    "expand_sweep",
    "group_options",
    "load_config",
    "unlock",
)

_CONFIG_NAME = "config"
_SCHEMA_NAME = "engine_schema"


def load_config(
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, object] | None = None,
    config_dir: str | None = None,
) -> RunConfig:
    """Compose the configuration tree with `overrides` and check every range.

    Args:
        overrides: in Hydra's grammar, as a user types them: `model=gpt2`, `cache.block_size=32`.
        values: dotted key -> Python value; wins over the overrides and needs no quoting. A string
            for a group (`model`) picks that option.
        config_dir: a directory with more options: `<config_dir>/model/mine.yaml` for `model=mine`.

    Raises:
        ConfigError: a key or an option is unknown, a value has a wrong type or is out of range, or
            `config_dir` is not a directory. The text is one line.
    """
    return cast(RunConfig, _to_object(_compose(overrides, values or {}, config_dir)))


def expand_sweep(
    overrides: Sequence[str], *, config_dir: str | None = None
) -> list[tuple[dict[str, str], list[str]]]:
    """Every combination of the values that are listed: `a=1,2`, `a=choice(1,2)`, `a=range(1,9,2)`.

    Each combination is composed and checked, so that an error shows before the sweep starts.

    Returns:
        For each point the values of the listed keys (key -> value) and all overrides. The last key
        varies fastest.

    Raises:
        ConfigError: see `load_config`; any point can cause it. Or no key lists several values, or a
            key has values that are not listed, such as an interval.
    """
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for override in _parse(overrides):
        key = override.key_or_group
        if not override.is_sweep_override():
            fixed.append(override.input_line or "")
            continue
        if not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line}: only values that are listed can be swept; "
                f"list the values, as in {key}=1,2,4 or {key}=range(1,9,2)"
            )
        swept[key] = list(override.sweep_string_iterator())
    if not swept:
        raise ConfigError(
            "--multirun needs a key with several values: cache.block_size=16,32, or range(1,9,2)"
        )
    points: list[tuple[dict[str, str], list[str]]] = []
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        words = [*fixed, *(f"{key}={value}" for key, value in chosen.items())]
        load_config(words, config_dir=config_dir)
        points.append((chosen, words))
    return points


def compose_yaml(
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, object] | None = None,
    config_dir: str | None = None,
) -> str:
    """The composed configuration as YAML, checked like `load_config`.

    Raises:
        ConfigError: see `load_config`.
    """
    config = _compose(overrides, values or {}, config_dir)
    _to_object(config)
    return OmegaConf.to_yaml(config, resolve=True)


@cache
def group_options() -> Mapping[str, Sequence[str]]:
    """config group -> the names of its options; read-only."""
    with _hydra():
        return MappingProxyType(_group_options())


def complete(shell: str, line: str) -> str:
    """Completions for a command line, as Hydra's plugin for `shell` finds them.

    Args:
        shell: bash, fish or zsh.
        line: the program's name and the overrides so far; the last word is the one to complete.

    Returns:
        The candidates, separated as that shell expects. Hydra's own settings are left out.

    Raises:
        ConfigError: no plugin for this shell.
    """
    with _hydra():
        plugin = _completion_plugin(shell)
        words = plugin.strip_python_or_app_name(line)
        # The only public method, `query`, reads the line from the environment and prints.
        candidates = plugin._query(_CONFIG_NAME, words)  # pyright: ignore[reportPrivateUsage]
    last = "" if line.endswith(" ") else line.split(" ")[-1]
    key, typed, _ = last.partition("=")
    if typed and (entry := describe_keys().get(key)) is not None and entry.choices:
        candidates = [f"{key}={choice}" for choice in entry.choices]
    own_settings = re.compile(r"hydra([./=]|$)")
    candidates = [word for word in candidates if not own_settings.match(word)]
    return ("\n" if shell == "fish" else " ").join(candidates)


def completion_script(shell: str, action: str) -> None:
    """Print Hydra's script that installs or uninstalls the completion of a shell.

    Raises:
        ConfigError: no plugin for this shell, or an action that is neither install nor uninstall.
    """
    if action not in ("install", "uninstall"):
        raise ConfigError(f"shell completion can install, uninstall or query, got {action!r}")
    with _hydra():
        getattr(_completion_plugin(shell), action)()


def _completion_plugin(shell: str) -> CompletionPlugin:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "called inside _hydra()"
    plugins: dict[str, type[CompletionPlugin]] = {
        plugin.provides(): plugin
        for plugin in Plugins.instance().discover(CompletionPlugin)
        if issubclass(plugin, CompletionPlugin)
    }
    if shell not in plugins:
        raise ConfigError(f"shell completion is for {', '.join(sorted(plugins))}, got {shell!r}")
    plugin = plugins[shell](hydra.config_loader)
    # The plugin for zsh delegates to the plugin for bash, which the query needs.
    return getattr(plugin, "delegate", plugin)


def unlock(schema: type) -> DictConfig:
    """Make a structured node of a frozen dataclass that overrides can change.

    `frozen=True` makes OmegaConf's nodes read-only. This function clears the flag of all nodes.
    Objects that `OmegaConf.to_object` builds from them are frozen again.
    """
    root = cast(DictConfig, OmegaConf.structured(schema))

    def visit(node: DictConfig) -> None:
        OmegaConf.set_readonly(node, False)
        for key in node:
            # Plain access would give values instead of nodes.
            child = node._get_node(key)  # pyright: ignore[reportPrivateUsage]
            if isinstance(child, DictConfig):
                visit(child)

    visit(root)
    return root


@cache
def _schema() -> DictConfig:
    """The unlocked schema. It takes 20 ms to build and 4 ms to copy, so callers change a copy."""
    return unlock(RunConfig)


@contextmanager
def _hydra() -> Generator[None, None, None]:
    """A context with Hydra set up for our configuration. Restores the caller's own Hydra state."""
    ConfigStore.instance().store(name=_SCHEMA_NAME, node=_schema())
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_module("ostinato.conf", job_name="run", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def _compose(
    overrides: Sequence[str], values: Mapping[str, object], config_dir: str | None
) -> DictConfig:
    search = _search_path(config_dir)
    groups = _options_of(search) if search else group_options()
    chosen = [f"{key}={value}" for key, value in values.items() if key in groups]
    trial = deepcopy(_schema())
    options: list[str] = []
    words: list[str] = []
    for override in _parse([*overrides, *chosen]):
        is_option = override.key_or_group in groups and not isinstance(override.value(), dict)
        (options if is_option else words).append(_checked(override, groups, trial))
    try:
        config = _with_options(*search, *options) if search else deepcopy(_packaged(*options))
        for entry in describe_keys().values():
            if entry.free_form:  # such a mapping accepts new keys
                OmegaConf.set_struct(OmegaConf.select(config, entry.key), False)
        # Hydra does this too, after it has composed the options.
        ConfigLoaderImpl._apply_overrides_to_config(  # pyright: ignore[reportPrivateUsage]
            OverridesParser.create().parse_overrides(words), config
        )
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error
    for key, value in values.items():
        if key not in groups:
            _lay_over(config, key, value)
    return config


def _with_options(*options: str) -> DictConfig:
    """The tree that Hydra composes for a choice of options, without other overrides."""
    with _hydra():
        return compose(_CONFIG_NAME, overrides=list(options))


_packaged = cache(_with_options)  # Hydra takes 60 ms. Callers change a copy.


def _options_of(search: Sequence[str]) -> Mapping[str, Sequence[str]]:
    with _hydra():
        return _group_options(search)


def _search_path(config_dir: str | None) -> list[str]:
    if config_dir is None:
        return []
    directory = expand_user(config_dir).resolve()
    if not directory.is_dir():
        raise ConfigError(f"--config-dir must be a directory with option files, got {config_dir!r}")
    quoted = str(directory).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{quoted}']"]


def _group_options(search: Sequence[str] = ()) -> dict[str, list[str]]:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "called inside _hydra()"
    # The public method, `get_group_options`, makes a repository at each call. That copies the
    # schema and takes 20 ms.
    loader = cast(ConfigLoaderImpl, hydra.config_loader)
    make = loader._parse_overrides_and_create_caching_repo  # pyright: ignore[reportPrivateUsage]
    _, repository = make(_CONFIG_NAME, list(search))

    def options(group: str, kind: ObjectType) -> list[str]:
        return repository.get_group_options(group, kind)

    groups = [group for group in options("", ObjectType.GROUP) if group != "hydra"]
    found = {group: options(group, ObjectType.CONFIG) for group in groups}
    return {group: names for group, names in found.items() if names}  # other folders have code only


def _parse(overrides: Sequence[str]) -> list[Override]:
    # Hydra's grammar has no "~" inside values, and shells expand it only where a word begins.
    home = str(expand_user("~"))
    parsed: list[Override] = []
    for text in overrides:
        text = re.sub(r"=~(?=/|$)", lambda _: f"={home}", text, count=1)
        try:
            parsed += OverridesParser.create().parse_overrides([text])
        except HydraException as error:
            raise ConfigError(
                f"{text!r} is not an override; write key=value, and quote a value with special "
                f"characters: \"key='a,b'\""
            ) from error
    return parsed


def _checked(override: Override, groups: Mapping[str, Sequence[str]], trial: DictConfig) -> str:
    """Check an override; returns it in the form for Hydra. Our messages are clearer than Hydra's.

    The value is set in `trial`, a copy of the schema, which refuses a wrong type. Ranges are
    checked when the sections are made.
    """
    key, text = override.key_or_group, override.input_line or ""
    keys = describe_keys()
    free_form = next(
        (entry for entry in keys.values() if entry.free_form and key.startswith(f"{entry.key}.")),
        None,
    )
    if free_form is not None:
        return text if text[0] in "+~" else f"++{text}"  # a free-form mapping accepts new keys
    if override.package is not None or key == "hydra" or key.startswith(("hydra.", "hydra/")):
        raise ConfigError(f"{text}: packages and Hydra's own settings are not used here")
    sections = {name.partition(".")[0] for name in keys}
    if key not in keys and key not in groups and key not in sections:
        close = nearest(key, [*keys, *groups])
        hint = f"did you mean {close}?" if close else "run <command> --help lists the keys"
        raise ConfigError(f"{text}: there is no key {key!r}; {hint}")
    if override.type is OverrideType.DEL:
        raise ConfigError(f"{text}: {key} cannot be deleted; set it to its default instead")
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: one value only; quote it to have commas in text, or write a list as [a,b]"
        )
    if key in groups and not isinstance(override.value(), dict):
        _check_option(override, groups[key])
        if override.type is OverrideType.ADD and key in sections:
            raise ConfigError(f"{text}: write it without +, {key} has an option already")
        return text
    _lay_over(trial, key, override.value())
    return text.lstrip("+")


def _check_option(override: Override, options: Sequence[str]) -> None:
    group, value = override.key_or_group, override.value()
    unknown = [
        name for name in (value if isinstance(value, list) else [value]) if name not in options
    ]
    if unknown:
        close = nearest(str(unknown[0]), options)
        hint = f" (did you mean {close}?)" if close else ""
        path = f"; another model is given by its path: model.path={unknown[0]}"
        raise ConfigError(
            f"{group}={unknown[0]}: {group} must be one of {', '.join(options)}{hint}"
            + path * (group == "model")
        )


def _lay_over(config: DictConfig, key: str, value: object) -> None:
    keys = describe_keys()
    entry = keys.get(key)
    if entry is None and isinstance(value, Mapping):
        for name, inner in cast(Mapping[str, object], value).items():
            _lay_over(config, f"{key}.{name}", inner)
        return
    if entry is None:
        parent = next((name for name in keys if name.startswith(f"{key}.")), None)
        if parent is not None:
            raise ConfigError(
                f"{key} is a section and must be a mapping or have its keys set one by one "
                f"({parent}=...), got {value!r}"
            )
        close = nearest(key, keys)
        raise ConfigError(
            f"there is no key {key!r}" + (f"; did you mean {close}?" if close else "")
        )
    try:
        if entry.free_form and isinstance(value, Mapping):
            _check_values(OmegaConf.select(config, key), cast(Mapping[str, object], value))
        OmegaConf.update(config, key, value, merge=entry.free_form, force_add=True)
    except OmegaConfBaseException as error:
        allowed = f"null or {entry.allowed}" if entry.nullable else entry.allowed
        raise ConfigError(f"{key} must be {allowed}, got {value!r}") from error


def _check_values(mapping: DictConfig, values: Mapping[str, object]) -> None:
    """Raise OmegaConfBaseException if a value has a wrong type. A merge takes a list for a text."""
    trial = deepcopy(mapping)
    OmegaConf.set_struct(trial, False)
    for name, value in values.items():
        trial[name] = value


def _to_object(config: DictConfig) -> object:
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    except ValueError as error:  # a section's own range check
        raise ConfigError(str(error)) from error


def _one_line(error: BaseException) -> str:
    """The message of Hydra's or OmegaConf's error and of its cause, without hints and paths."""
    lines = str(error).strip().splitlines()
    parts = lines[:2] if lines[0].endswith(":") else lines[:1]
    if key := getattr(error, "full_key", None):
        parts.insert(0, key)
    if error.__cause__ is not None:
        parts.append(str(error.__cause__).strip().splitlines()[0])
    return ": ".join(dict.fromkeys(part.rstrip(":") for part in parts))
