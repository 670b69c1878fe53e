"""Reads the keys of a `quantization_config`, and refuses keys that no caller has read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ("MADE_BY_GPTQ", "ConfigKeys", "skip_auto_round")

_MISSING = object()

# Keys that say how a checkpoint was made, or how another library should run it.
MADE_BY_GPTQ = (
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "mse",
    "pad_token_id",
    "quantizer",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
)
"""Keys of AutoGPTQ, GPTQModel and transformers, in checkpoints of GPTQ and AWQ."""

_MADE_BY_AUTO_ROUND = (
    "amp",
    "autoround_version",
    "backend",
    "batch_size",
    "dataset",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "gradient_accumulate_steps",
    "iters",
    "low_gpu_mem_usage",
    "lr",
    "minmax_lr",
    "model_free",
    "nsamples",
    "provider",
    "quant_block_list",
    "regex_config",
    "scale_dtype",
    "seqlen",
    "super_bits",
    "super_group_size",
    "supported_types",
    "to_quant_block_names",
    "train_bs",
)


class ConfigKeys:
    """The keys of one object of a checkpoint's settings.

    Args:
        stated: the parsed object.
        where: its name in messages.

    Raises:
        ValueError: it is not an object.
    """

    def __init__(self, stated: Any, where: str = "quantization_config") -> None:
        if not isinstance(stated, Mapping):
            text = f"config.json: {where} is {stated!r}; it must be an object"
            raise ValueError(text)  # noqa: TRY004 - of a file, not of a caller
        self._stated = dict(stated)
        self._left = dict(stated)
        self._where = where

    def has(self, name: str) -> bool:
        """Whether the key is there and not null."""
        return self._stated.get(name) is not None

    def value(self, *names: str, default: Any = _MISSING) -> Any:
        """The value of a key, which may have several names; null counts as missing.

        Raises:
            ValueError: it is missing and has no default, or two names have different values.
        """
        found = {name: self._left.pop(name, None) for name in names}
        values = {name: value for name, value in found.items() if value is not None}
        distinct = [value for index, value in enumerate(values.values()) if index == 0]
        if any(value != distinct[0] for value in values.values()):
            raise self.error(" and ".join(values), "differ")
        if values:
            return distinct[0]
        if default is _MISSING:
            raise self.error(names[0], "is missing")
        return default

    def integer(self, *names: str, one_of: Iterable[int], default: Any = _MISSING) -> int:
        """An integer among those allowed.

        Raises:
            ValueError: the value is missing and has no default, or is not allowed.
        """
        value = self.value(*names, default=default)
        allowed = tuple(one_of)
        if type(value) is not int or value not in allowed:
            text = ", ".join(map(str, allowed))
            raise self.error(names[0], f"is {value!r}; supported: {text}")
        return value

    def boolean(self, *names: str, default: Any = _MISSING) -> bool:
        """True or false.

        Raises:
            ValueError: the value is missing and has no default, or is neither.
        """
        value = self.value(*names, default=default)
        if type(value) is not bool:
            raise self.error(names[0], f"is {value!r}; it must be true or false")
        return value

    def text(self, *names: str, one_of: Iterable[str], default: Any = _MISSING) -> str:
        """A string among those allowed, in lower case.

        Raises:
            ValueError: the value is missing and has no default, or is not allowed.
        """
        value = self.value(*names, default=default)
        allowed = tuple(one_of)
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self.error(names[0], f"is {value!r}; supported: {', '.join(allowed)}")
        return value.lower()

    def names(self, *names: str) -> tuple[str, ...]:
        """A list of strings; empty when it is missing.

        Raises:
            ValueError: the value is not a list of strings.
        """
        value = self.value(*names, default=[])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(names[0], f"is {value!r}; it must be a list of names")
        return tuple(value)

    def entries(self, name: str, default: Any = _MISSING) -> list[tuple[str, Any]]:
        """The keys and values of an object.

        Raises:
            ValueError: it is missing and has no default, or is something else.
        """
        value = self.value(name, default=default)
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r}; it must be an object")
        return list(value.items())

    def must_be(self, name: str, *allowed: Any) -> None:
        """A key that is supported with these values only; null counts as missing.

        Raises:
            ValueError: the key has another value.
        """
        value = self.value(name, default=None)
        if value is not None and not any(
            type(value) is type(each) and value == each for each in allowed
        ):
            text = " or ".join(repr(each) for each in allowed) or "left out"
            raise self.error(name, f"is {value!r}; it must be {text}")

    def without_effect(self, *names: str) -> None:
        """Accept keys that say how the checkpoint was made, or how another library is to run it."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Check that every key was read.

        Raises:
            ValueError: a key was not read.
        """
        for name, value in self._left.items():
            if value is not None:
                raise self.error(name, f"is {value!r}; this key is not supported")

    def error(self, name: str, reason: str) -> ValueError:
        """An error that names a key."""
        return ValueError(f"config.json: {self._where}.{name} {reason}")


def skip_auto_round(keys: ConfigKeys) -> None:
    """Accept the keys that AutoRound writes into checkpoints of all of its formats.

    Raises:
        ValueError: weights are no integers, or activations are quantised.
    """
    keys.text("data_type", one_of=("int",), default="int")
    keys.must_be("act_bits", 16, 32)
    keys.must_be("act_data_type", "float", "int")
    # settings of quantised activations; `act_bits` says that these are floats
    keys.without_effect("act_dynamic", "act_group_size", "act_sym", *_MADE_BY_AUTO_ROUND)
