"""Maps vLLM's `--speculative-config` to the settings of `speculation`."""

from __future__ import annotations

from ostinato.conf.arguments.json_values import json_object

__all__ = ("speculation_settings",)

# vLLM's method -> ours. Suffix decoding searches the request and earlier answers.
_METHODS = {
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "auto",
    "draft_model": "draft",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "glm4_moe_lite_mtp": "mtp",
}
_KEYS = {
    "model": "speculation.model",
    "num_speculative_tokens": "speculation.max_tokens",
    "prompt_lookup_min": "speculation.min_match",
}
_INSTEAD = {
    "suffix_decoding_max_cached_requests": "set speculation.history_tokens",
    "draft_tensor_parallel_size": "leave it out; a draft model runs on one rank",
}


def speculation_settings(value: object) -> dict[str, object]:
    """The settings for a speculative configuration of vLLM.

    The longest match is always preferred, so `prompt_lookup_max` has no effect beside
    `prompt_lookup_min`. If only `prompt_lookup_max` is given, it is the least length too, as in
    vLLM.

    Args:
        value: a mapping, or its JSON.

    Returns:
        key -> value.

    Raises:
        ValueError: `value` is not a JSON object, or a method or key is not supported.
    """
    given = json_object(value, 'it must be a JSON object, such as {"method": "ngram"}')
    method = given.pop("method", "draft_model" if given.get("model") else None)
    if method not in _METHODS:
        raise ValueError(
            f"the method must be one of {', '.join(_METHODS)}, got {method!r}; see "
            "speculation.method for all methods of this engine"
        )
    most = given.pop("prompt_lookup_max", None)
    if most is not None:
        given.setdefault("prompt_lookup_min", most)
    settings: dict[str, object] = {"speculation.method": _METHODS[str(method)]}
    for name, one in given.items():
        if name not in _KEYS:
            remedy = _INSTEAD.get(name, "leave it out")
            raise ValueError(f"{name} is not supported; {remedy}")
        settings[_KEYS[name]] = one
    return settings
