"""Reads PEFT's adapter_config.json: the rank, the scale and the modules of an adapter.

A key that would change the result is either honoured, or refused with an error that names it. The
rules for the names of modules are those of PEFT 0.21 (`check_target_module_exists` and
`get_pattern_key`). The names are those of the base model in transformers.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ostinato.conf.errors import first_line
from ostinato.models.adapters.adapter_files import AdapterError

__all__ = ("HONOURED", "IGNORED", "REFUSED", "AdapterConfig", "read_adapter_config")

T = TypeVar("T")

_MERGE = "merge the adapter into the model with PEFT's merge_and_unload, and serve the result"
_CONVERT = (
    "save it with save_pretrained(..., path_initial_model_for_weight_conversion=...), which writes "
    "a plain adapter"
)
_RETRAIN = "train a plain LoRA adapter"

HONOURED = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
"""Keys that are read."""

IGNORED = frozenset(
    {
        # about the file
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
        # of the training
        "lora_dropout",
        "merge_weights",  # of PEFT before 0.3
        # Settings of a method. The key that chooses the method is checked.
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        # The base weight's orientation. A and B have the same orientation with both values.
        "fan_in_fan_out",
        # About embeddings and heads, whose adapters are refused.
        "ensure_weight_tying",
    }
)
"""Keys that do not change what an adapter computes."""

REFUSED: Mapping[str, tuple[str, str]] = {
    "alora_invocation_tokens": ("activated LoRA", _RETRAIN),
    "arrow_config": ("routing among adapters", _RETRAIN),
    "kasa_config": ("a diagonal between A and B", _MERGE),
    "layer_replication": ("another number of layers", _MERGE),
    "lora_bias": ("a bias of B", _MERGE),
    "megatron_config": ("layers of Megatron", _RETRAIN),
    "modules_to_save": ("whole modules besides the matrices of low rank", _MERGE),
    "monteclora_config": ("sampled adapters", _RETRAIN),
    "target_parameters": ("adapters of parameters, such as experts", _MERGE),
    "trainable_token_indices": ("rows of the embedding", _MERGE),
    "use_bdlora": ("block-diagonal matrices", _MERGE),
    "use_dora": ("DoRA", _MERGE),
    "use_qalora": ("pooled inputs", _RETRAIN),
    "velora_config": ("VeLoRA", _MERGE),
}
"""Keys that must be null, false or empty -> (what another value means, the remedy)."""

# Initialisations that leave the base model as it is. Others, such as PiSSA, subtract the first
# A and B from it, so their adapters belong to another base model.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
_MAX_FLOAT32 = 3.4028234e38  # the kernels read scales in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What adapter_config.json says about the modules.

    Names of modules are those in transformers, such as `model.layers.0.self_attn.q_proj`.
    """

    file: Path
    rank: int
    alpha: float
    uses_rslora: bool  # the scale is alpha / sqrt(rank), arXiv:2312.03732
    rank_pattern: Mapping[str, int]  # regular expression for the end of a name -> rank
    alpha_pattern: Mapping[str, float]
    # Modules that have an adapter: names or their ends, a regular expression for the whole name, or
    # None = all.
    targets: frozenset[str] | str | None
    excluded: frozenset[str] | str  # modules without adapter, in the same form
    layers: frozenset[int]  # only these layers have adapters; empty = all
    layers_patterns: tuple[str, ...]  # names of the list of layers; empty = any

    def rank_of(self, name: str) -> int:
        """The rank of a module's adapter."""
        return _first_match(self.rank_pattern, name, self.rank)

    def scale_of(self, name: str) -> float:
        """The factor of a module's product B A."""
        rank = self.rank_of(name)
        alpha = _first_match(self.alpha_pattern, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)

    def has_target(self, name: str) -> bool:
        """Whether the module has an adapter."""
        if self.excluded and _is_listed(self.excluded, name):
            return False
        if isinstance(self.targets, frozenset) and name in self.targets:
            return True  # a whole name, so its layer is not checked
        if self.targets is not None and not _is_listed(self.targets, name):
            return False
        if not self.layers:
            return True
        for expression in map(_layer_of, self.layers_patterns or (None,)):
            if found := re.match(expression, name):
                return int(found["layer"]) in self.layers
        return False


def read_adapter_config(content: bytes, file: Path) -> AdapterConfig:
    """Parse and check adapter_config.json.

    Args:
        content: the file's bytes.
        file: its path, for messages.

    Raises:
        AdapterError: the file is not a JSON object, a value has a wrong type or range, or a key is
            not supported.
    """
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(
            f"{file} is not readable as JSON: {first_line(error)}; copy the file again"
        ) from error
    if not isinstance(config, dict):
        raise AdapterError(
            f"{file} must hold a JSON object, got {reprlib.repr(config)}; copy the file again"
        )
    reader = _Reader(config, file)
    reader.refuse_unsupported()
    targets = reader.names("target_modules")
    if isinstance(targets, str) and targets.lower() == "all-linear":
        targets = None
    layers, layers_patterns = reader.layers(), reader.layers_patterns()
    if isinstance(config.get("target_modules"), str) and layers:
        reader.refuse(
            "layers_to_transform",
            "null, because target_modules is a string",
            config["layers_to_transform"],
        )
    if layers_patterns and not layers:
        reader.refuse(
            "layers_pattern",
            "null, because layers_to_transform is null or empty",
            config["layers_pattern"],
        )
    return AdapterConfig(
        file=file,
        rank=reader.rank("r", config.get("r", 8)),
        alpha=reader.alpha("lora_alpha", config.get("lora_alpha", 8)),
        uses_rslora=reader.boolean("use_rslora"),
        rank_pattern=reader.pattern("rank_pattern", reader.rank),
        alpha_pattern=reader.pattern("alpha_pattern", reader.alpha),
        targets=targets,
        excluded=reader.names("exclude_modules") or frozenset(),
        layers=layers,
        layers_patterns=layers_patterns,
    )


def _first_match(pattern: Mapping[str, T], name: str, default: T) -> T:
    for expression, value in pattern.items():
        if re.match(rf"(.*\.)?({expression})$", name):
            return value
    return default


def _layer_of(pattern: str | None) -> str:
    """A regular expression for the number of a module's layer.

    Args:
        pattern: a regular expression for the name of the list of layers; None = any name.
    """
    number = r"\.(?P<layer>\d{1,9})\."
    return rf".*?\.[^.]*{number}" if pattern is None else rf"(?:^|.*?\.){pattern}{number}"


def _is_listed(names: frozenset[str] | str, name: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return name in names or any(name.endswith(f".{end}") for end in names)


def _is_neutral(value: object) -> bool:
    """Whether a value switches a key off: null, false, or an empty list, object or string."""
    return value is None or value is False or (isinstance(value, list | dict | str) and not value)


class _Reader:
    """Reads single keys; every error names the file, the key and the value."""

    def __init__(self, config: Mapping[str, Any], file: Path) -> None:
        self._config = config
        self._file = file

    def refuse(
        self, key: str, allowed: str, value: object, *, remedy: str = "correct the file"
    ) -> NoReturn:
        """Raise an error for the value of a key."""
        got = reprlib.repr(value)
        raise AdapterError(f"{self._file}: {key} must be {allowed}, got {got}; {remedy}")

    def refuse_unsupported(self) -> None:
        """Refuse other methods than plain LoRA, and keys that are not known."""
        config = self._config
        if config.get("peft_type") != "LORA":
            self.refuse("peft_type", "'LORA'", config.get("peft_type"), remedy=_RETRAIN)
        for key, (meaning, remedy) in REFUSED.items():
            if not _is_neutral(value := config.get(key)):
                allowed = f"null, false or empty ({meaning} is not supported)"
                self.refuse(key, allowed, value, remedy=remedy)
        if (bias := config.get("bias", "none")) != "none":
            self.refuse("bias", "'none' (trained biases are not supported)", bias, remedy=_MERGE)
        init = config.get("init_lora_weights", True)
        if not (init is None or isinstance(init, bool) or init in _PLAIN_INITS):
            allowed = f"true, false, {', '.join(_PLAIN_INITS)} (others change the base model)"
            self.refuse("init_lora_weights", allowed, init, remedy=_CONVERT)
        for key in config.keys() - HONOURED - IGNORED - REFUSED.keys():
            if not _is_neutral(config[key]):
                self.refuse(
                    reprlib.repr(key),
                    "null, false or empty, because the key is not known",
                    config[key],
                    remedy="remove the key if the adapter does not need it",
                )

    def rank(self, key: str, value: object) -> int:
        """A rank: a positive integer."""
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(key, "a positive integer", value)
        return value

    def alpha(self, key: str, value: object) -> float:
        """A numerator of scales: a finite number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "a finite number", value)
        if not abs(value) <= _MAX_FLOAT32:  # also for NaN
            self.refuse(key, "a finite number", value)
        return float(value)

    def boolean(self, key: str) -> bool:
        """true or false; null = false."""
        value = self._config.get(key)
        if not isinstance(value, bool | None):
            self.refuse(key, "true or false", value)
        return bool(value)

    def pattern(self, key: str, read: Callable[[str, object], T]) -> dict[str, T]:
        """Regular expressions, each with a value that `read` checks; null = none."""
        value = self._config.get(key)
        if not isinstance(value, dict | None):
            self.refuse(key, "an object: regular expression -> number", value)
        found: dict[str, T] = {}
        for expression, number in (value or {}).items():
            self._check_expression(key, f"(.*\\.)?({expression})$", expression)
            found[expression] = read(f"{key}[{reprlib.repr(expression)}]", number)
        return found

    def names(self, key: str) -> frozenset[str] | str | None:
        """A list of names, a regular expression, or None = the key is null."""
        value = self._config.get(key)
        if isinstance(value, str):
            self._check_expression(key, value, value)
            return value
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.refuse(key, "a list of names or a regular expression", value)
        return frozenset(value)

    def layers(self) -> frozenset[int]:
        """Numbers of layers; empty = all."""
        key = "layers_to_transform"
        value = self._config.get(key)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            self.refuse(key, "an integer or a list of integers", value)
        return frozenset(numbers)

    def layers_patterns(self) -> tuple[str, ...]:
        """Regular expressions for the name of the list of layers; empty = any name."""
        key = "layers_pattern"
        value = self._config.get(key) or []
        patterns = value if isinstance(value, list) else [value]
        if not all(isinstance(pattern, str) for pattern in patterns):
            self.refuse(key, "a string or a list of strings", value)
        for pattern in patterns:
            self._check_expression(key, _layer_of(pattern), pattern)
        return tuple(patterns)

    def _check_expression(self, key: str, expression: str, stated: str) -> None:
        """Refuse an `expression` that does not compile, made from the `stated` one."""
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            self.refuse(key, f"a regular expression ({first_line(error)})", stated)
