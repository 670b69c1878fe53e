"""Converts vLLM's arguments of slower KV tiers to the settings of the section `cache`.

vLLM's `kv_offloading_size` is in GiB, and `cpu_bytes_to_use` of its OffloadingConnector in bytes.
Both are the host memory of all ranks of an engine together, as `cache.host_gib` is.
"""

from __future__ import annotations

from collections.abc import Mapping

from ostinato.conf.arguments.json_values import json_object

__all__ = (
    "HOST_GIB",
    "MAMBA_REFUSED",
    "NO_OTHER_BACKEND",
    "NO_SWAP_SPACE",
    "check_one_size",
    "transfer_settings",
)

HOST_GIB = "cache.host_gib"
_INSTEAD = "set cache.host_gib (host memory, on GPUs) or cache.disk_dir (disk)"
NO_OTHER_BACKEND = f"this engine copies KV blocks itself; leave it out, and {_INSTEAD}"
NO_SWAP_SPACE = (
    "there is no separate memory for preempted sequences: they are loaded from copies of their KV "
    f"blocks, or computed again; leave it out, and for copies {_INSTEAD}"
)
# Name -> the values that ask for what this engine does anyway, and why others are refused.
MAMBA_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "mamba_ssm_cache_dtype": (
        ("auto", "float32"),
        "states of recurrent layers are float32; leave it out",
    ),
    "mamba_cache_dtype": (
        ("auto",),
        "states are float32, and inputs of convolutions have the dtype of the model; leave it out",
    ),
    "mamba_cache_mode": (
        ("align",),
        "states are kept at multiples of cache.block_size: at the ends of prompts' chunks and of "
        "answers, and where prompts branch; leave it out",
    ),
    "mamba_block_size": (
        (),
        "states are kept at multiples of cache.block_size; leave it out, or set cache.state_slots "
        "for more states",
    ),
}
_FORM = (
    'it must be a JSON object, such as {"kv_connector": "OffloadingConnector", "kv_role": '
    '"kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240}}'
)
_EXTRA = "kv_connector_extra_config"
# Key -> the values that ask for what this engine does anyway.
_KEYS = {"kv_role": ("kv_both",)}
_EXTRA_KEYS = {
    "spec_name": ("CPUOffloadingSpec",),
    "eviction_policy": ("lru",),
    "blocks_per_chunk": (1,),
    "store_threshold": (0, 1),
}
_REMEDIES = {
    "kv_role": f"caches are not sent to other servers; {_INSTEAD}",
    "spec_name": "for copies on disk too set cache.disk_dir and cache.disk_gib, and cache.host_gib",
    "secondary_tiers": "for copies on disk set cache.disk_dir and cache.disk_gib",
    "blocks_per_chunk": "each block is copied by itself",
    "block_size": "each block is copied by itself; its size is cache.block_size",
    "store_threshold": "set cache.store=reused for copies of blocks that a second request uses",
}


def check_one_size(arguments: Mapping[str, object]) -> None:
    """Refuse two arguments that both say how much host memory copies of KV blocks take.

    Raises:
        ValueError: `kv_offloading_size` and `kv_transfer_config` are given.
    """
    names = ("kv_offloading_size", "kv_transfer_config")
    if all(arguments.get(name) is not None for name in names):
        raise ValueError(f"{' and '.join(names)} both set {HOST_GIB}; leave one out")


def transfer_settings(value: object) -> Mapping[str, object]:
    """`kv_transfer_config`: the settings for vLLM's OffloadingConnector with host memory alone.

    Args:
        value: a mapping, or its JSON.

    Returns:
        key -> value.

    Raises:
        ValueError: `value` is not a JSON object, or a connector, a key or its value is not
            supported.
    """
    given = json_object(value, _FORM)
    connector = given.pop("kv_connector", None)
    if connector != "OffloadingConnector":
        raise ValueError(f"kv_connector={connector} is not supported; {_INSTEAD}")
    extra = json_object(given.pop(_EXTRA, {}), _FORM)
    _check(given, _KEYS)
    num_bytes = extra.pop("cpu_bytes_to_use", None)
    if not isinstance(num_bytes, int | float) or isinstance(num_bytes, bool) or num_bytes <= 0:
        raise ValueError(f"cpu_bytes_to_use={num_bytes}; it must be a number of bytes above 0")
    settings: dict[str, object] = {HOST_GIB: num_bytes / 2**30}
    match extra.pop("offload_prompt_only", True):
        case True:
            pass  # the default of cache.store
        case False:
            settings["cache.store"] = "all"
        case other:
            raise ValueError(f"offload_prompt_only={other}; it must be true or false")
    _check(extra, _EXTRA_KEYS)
    return settings


def _check(given: Mapping[str, object], accepted: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse all keys and values that are not in `accepted`."""
    for key, value in given.items():
        if value not in accepted.get(key, ()):
            remedy = _REMEDIES.get(key, "leave it out")
            raise ValueError(f"{key}={value} is not supported; {remedy}")
