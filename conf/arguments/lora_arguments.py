"""Converts vLLM's arguments of LoRA adapters to the settings of the section `lora`.

In vLLM `max_loras` limits the adapters of one batch, and `max_cpu_loras` those in memory. Here
every loaded adapter has a slot and can be in every batch. So the largest of these numbers, but at
least the number of `lora_modules`, is the number of slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ostinato.conf.arguments.json_values import json_value

__all__ = (
    "ADAPTERS",
    "MAX_ADAPTERS",
    "REFUSED",
    "lora_modules",
    "merge_settings",
    "num_slots",
    "slots_if_enabled",
    "without_lora",
)

ADAPTERS = "lora.adapters"
MAX_ADAPTERS = "lora.max_adapters"
# Arguments that say something only if adapters are enabled.
_COUNTS = ("max_loras", "max_cpu_loras", "max_lora_rank")
_NO_TOWER = "adapters do not change the vision tower, and requests name them; leave it out"
_NO_EXPERT_FORMS = "adapters of experts have one form; leave it out"
# Arguments without a setting -> the values that are accepted, and why others are refused.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "lora_dtype": (("auto",), "adapters have the model's type; leave it out, or set dtype too"),
    "fully_sharded_loras": (
        (False,),
        "adapters are divided like the weights of their layers; leave it out",
    ),
    "enable_lora_bias": ((False,), "adapters with biases are not served; leave it out"),
    "lora_extra_vocab_size": (
        (0, 256),
        "adapters with tokens of their own are not served; leave it out",
    ),
    "lora_target_modules": ((), "all modules that an adapter names are adapted; leave it out"),
    "specialize_active_lora": (
        (False,),
        "one set of graphs serves any number of adapters; leave it out",
    ),
    "default_mm_loras": (("{}",), _NO_TOWER),
    "enable_tower_connector_lora": ((False,), _NO_TOWER),
    "enable_mixed_moe_lora_format": ((False,), _NO_EXPERT_FORMS),
    "enable_moe_shared_loras": ((False,), _NO_EXPERT_FORMS),
    "max_lora_cls_labels": ((), "an adapter cannot change the classification head; leave it out"),
}
_MODULE_KEYS = ("name", "path", "base_model_name")
_MODULE_FORM = 'an adapter is written name=path or {"name": ..., "path": ...}'


def slots_if_enabled(value: object) -> Mapping[str, object]:
    """`enable_lora`: with true, at least one slot, which is vLLM's default of `max_loras`."""
    word = str(value).strip().lower()
    if word not in ("true", "false"):
        raise ValueError("it must be true or false")
    return {MAX_ADAPTERS: 1} if word == "true" else {}


def num_slots(value: object) -> Mapping[str, object]:
    """`max_loras` and `max_cpu_loras`: a number of slots."""
    text = str(value).strip()
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError("it must be a whole number of adapters, 1 or more")
    return {MAX_ADAPTERS: int(text)}


def lora_modules(value: object) -> Mapping[str, object]:
    """`lora_modules`: the adapters to load at the start. Each has a slot by default."""
    if isinstance(value, str) and value.startswith("["):
        value = json_value(value)
    items = list(cast(Sequence[object], value)) if isinstance(value, list | tuple) else [value]
    adapters: dict[str, str] = {}
    for item in items:
        name, path = _module(item)
        if name in adapters:
            raise ValueError(f"the name {name!r} is given twice; give each adapter its own name")
        adapters[name] = path
    return {ADAPTERS: adapters} if adapters else {}


def _module(item: object) -> tuple[str, str]:
    """The name and the path of one adapter."""
    if isinstance(item, str):
        name, equals, path = item.partition("=")
        if not item.lstrip().startswith("{"):
            if not (name and equals and path):
                raise ValueError(f"{_MODULE_FORM}, got {item!r}")
            return name, path
        item = json_value(item)
    fields: Mapping[str, object] = {}
    if isinstance(item, Mapping):
        fields = cast(Mapping[str, object], item)
    unknown = [str(key) for key in fields if key not in _MODULE_KEYS]
    if unknown:
        raise ValueError(f"there is no key {unknown[0]!r}; keys: {', '.join(_MODULE_KEYS)}")
    name, path = fields.get("name"), fields.get("path")
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise ValueError(f"{_MODULE_FORM}, got {item!r}")
    return name, path


def without_lora(arguments: Mapping[str, object]) -> Mapping[str, object]:
    """The arguments that count.

    As in vLLM, the limits of adapters say nothing if `enable_lora` is false. `lora_dtype` says
    nothing if it names the model's own type.

    Raises:
        ValueError: `enable_lora` is false and there are `lora_modules`.
    """
    left = dict(arguments)
    if str(arguments.get("enable_lora")).strip().lower() == "false":
        if arguments.get("lora_modules"):
            raise ValueError("lora_modules are given, but enable_lora is false; leave one out")
        for name in _COUNTS:
            left.pop(name, None)
    own, model = _dtype(arguments.get("lora_dtype")), _dtype(arguments.get("dtype"))
    if own == model:
        left.pop("lora_dtype", None)
    return left


def _dtype(value: object) -> str:
    name = str(value).strip().lower().removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


def merge_settings(found: dict[str, object], settings: Mapping[str, object]) -> None:
    """Add settings to those that were found. Of several numbers of slots the largest counts.

    If there is one, it is raised to the number of the adapters to load.
    """
    before = found.get(MAX_ADAPTERS)
    found |= settings
    counts = [cast(int, count) for count in (before, found.get(MAX_ADAPTERS)) if count is not None]
    if counts:
        adapters = cast(Mapping[str, str], found.get(ADAPTERS, {}))
        found[MAX_ADAPTERS] = max(*counts, len(adapters))
