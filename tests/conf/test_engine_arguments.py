"""vLLM's arguments: each becomes a setting, or is refused unless its value is a default."""

import json

import pytest

from ostinato.conf.arguments.engine_arguments import ARGUMENTS, argument_settings
from ostinato.conf.compose import load_config
from ostinato.conf.describe import describe_keys
from ostinato.conf.errors import ConfigError


def offloading(**extra: object) -> dict[str, object]:
    """vLLM's `kv_transfer_config` with 2.5 GiB of host memory."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 5 << 29, **extra},
    }


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_a_setting_or_says_why_not(name: str):
    argument = ARGUMENTS[name]
    assert bool(argument.setting) != bool(argument.reason)
    if argument.setting:
        assert argument.setting in describe_keys()
    else:
        with pytest.raises(ConfigError, match=f"^{name}=another: "):
            argument_settings({name: "another"}, server=True)
    for value in (None, *argument.default):
        assert argument_settings({name: value}, server=True) == {}


@pytest.mark.parametrize("name", [name for name, one in ARGUMENTS.items() if one.setting])
def test_no_default_value_is_lost_in_silence(name: str):
    """If a value of an argument changes no setting, this value is the default of the setting."""
    argument = ARGUMENTS[name]
    section, key = argument.setting.split(".")
    shipped = getattr(getattr(load_config(), section), key)
    for value in argument.default:
        if value in ("auto", "safetensors", "none", -1, "{}"):
            assert shipped in ("auto", "none", None, True, {})  # decided by the engine or the model
        else:
            assert argument.read(value) == shipped


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"max_model_len": 4096}, {"model.max_model_len": 4096}),
        ({"max_model_len": "4k"}, {"model.max_model_len": 4000}),
        ({"max_model_len": "1.5K"}, {"model.max_model_len": 1536}),
        ({"dtype": "half"}, {"model.dtype": "float16"}),
        ({"dtype": "torch.bfloat16"}, {"model.dtype": "bfloat16"}),
        ({"quantization": "int8"}, {"model.quantization": "int8"}),
        ({"kv_cache_dtype": "fp8"}, {"cache.dtype": "fp8_e4m3"}),
        ({"kv_cache_memory_bytes": 2 << 30}, {"cache.memory_gib": 2.0}),
        ({"enforce_eager": True}, {"graphs.mode": "eager"}),
        ({"enable_prefix_caching": False}, {"cache.enable_prefix_caching": False}),
        ({"disable_hybrid_kv_cache_manager": True}, {"cache.keep_all_tokens": True}),
        ({"served_model_name": ["one"]}, {"model.name": "one"}),
        ({"generation_config": "vllm"}, {"sampling.use_generation_config": False}),
        ({"load_format": "dummy"}, {"model.load_format": "dummy"}),
        ({"hf_overrides": '{"rope_theta": 1e6}'}, {"model.config": {"rope_theta": 1e6}}),
        ({"attention_backend": "TRITON_ATTN"}, {"graphs.attention": "triton"}),
        ({"moe_backend": "flashinfer_cutlass"}, {"graphs.experts": "flashinfer"}),
        ({"data_parallel_size": 2}, {"parallel.data": 2}),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'},
            {"speculation.method": "ngram", "speculation.max_tokens": 4},
        ),
        (
            {"speculative_config": {"model": "/small", "num_speculative_tokens": 3}},
            {
                "speculation.method": "draft",
                "speculation.model": "/small",
                "speculation.max_tokens": 3,
            },
        ),
        (
            {"speculative_config": {"method": "suffix", "prompt_lookup_max": 5}},
            {"speculation.method": "auto", "speculation.min_match": 5},
        ),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "prompt_lookup_min": 2,
                    "prompt_lookup_max": 5,
                }
            },
            {"speculation.method": "ngram", "speculation.min_match": 2},
        ),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            {"parallel.tensor": 2, "parallel.executor": "processes"},
        ),
        ({"pipeline_parallel_size": 2}, {"parallel.pipeline": 2}),
        ({"enable_lora": True}, {"lora.max_adapters": 1}),
        ({"enable_lora": False, "max_loras": 4, "max_lora_rank": 64, "max_cpu_loras": 8}, {}),
        (
            {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "max_cpu_loras": 8},
            {"lora.max_adapters": 8, "lora.max_rank": 64},
        ),
        ({"max_cpu_loras": 2, "max_loras": "4"}, {"lora.max_adapters": 4}),
        (
            {"lora_modules": ["sql=/a", "chat=owner/repository"]},
            {"lora.adapters": {"sql": "/a", "chat": "owner/repository"}},
        ),
        (
            {
                "lora_modules": [
                    "sql=/a=b",
                    '{"name": "x", "path": "/y", "base_model_name": "z"}',
                    {"name": "w", "path": "/v"},
                ],
                "enable_lora": "true",
                "max_loras": 2,
            },
            {
                "lora.adapters": {"sql": "/a=b", "x": "/y", "w": "/v"},
                "lora.max_adapters": 3,
            },
        ),
        (
            {"lora_modules": '[{"name": "x", "path": "/y"}]'},
            {"lora.adapters": {"x": "/y"}},
        ),
        ({"lora_dtype": "half", "dtype": "torch.float16"}, {"model.dtype": "float16"}),
        (
            {"lora_dtype": "auto", "fully_sharded_loras": False, "lora_extra_vocab_size": 256},
            {},
        ),
        ({"enable_expert_parallel": False, "swap_space": 0, "trust_remote_code": False}, {}),
        ({"kv_offloading_size": 1.5, "kv_offloading_backend": "native"}, {"cache.host_gib": 1.5}),
        ({"kv_offloading_size": 0}, {"cache.host_gib": 0}),
        ({"kv_offloading_backend": "native"}, {}),
        ({"kv_transfer_config": offloading()}, {"cache.host_gib": 2.5}),
        ({"kv_transfer_config": json.dumps(offloading())}, {"cache.host_gib": 2.5}),
        (
            {"kv_transfer_config": offloading(offload_prompt_only=False, eviction_policy="lru")},
            {"cache.host_gib": 2.5, "cache.store": "all"},
        ),
        (
            {
                "kv_transfer_config": offloading(
                    offload_prompt_only=True, blocks_per_chunk=1, store_threshold=1
                )
            },
            {"cache.host_gib": 2.5},
        ),
    ],
)
def test_arguments_become_settings(arguments: dict[str, object], settings: dict[str, object]):
    assert argument_settings(arguments) == settings
    config = load_config(values=settings)
    for key, value in settings.items():
        section, name = key.split(".")
        assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"enable_expert_parallel": True},
            "enable_expert_parallel=True: experts are divided by tensor_parallel_size like all other "
            "weights; leave it out",
        ),
        (
            {"distributed_executor_backend": "external_launcher"},
            "distributed_executor_backend=external_launcher: there is no such executor; supported: "
            "mp, uni, ray",
        ),
        (
            {"quantization": "awq"},
            "quantization=awq: weights cannot be quantised to this while they are loaded; leave it out for a checkpoint that is quantised; supported: int8, int4",
        ),
        (
            {"swap_space": 4},
            "swap_space=4: there is no separate memory for preempted sequences: they are loaded from "
            "copies of their KV blocks, or computed again; leave it out, and for copies set "
            "cache.host_gib (host memory, on GPUs) or cache.disk_dir (disk)",
        ),
        (
            {"kv_offloading_size": 4, "kv_offloading_backend": "lmcache"},
            "kv_offloading_backend=lmcache: this engine copies KV blocks itself; leave it out, and "
            "set cache.host_gib (host memory, on GPUs) or cache.disk_dir (disk)",
        ),
        (
            {"kv_offloading_size": 4, "kv_transfer_config": offloading()},
            "kv_offloading_size and kv_transfer_config both set cache.host_gib; leave one out",
        ),
        ({"kv_transfer_config": "OffloadingConnector"}, "it must be a JSON object, such as {"),
        ({"kv_transfer_config": "[]"}, "it must be a JSON object, such as {"),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
            "kv_connector=NixlConnector is not supported; set cache.host_gib (host memory, on GPUs)",
        ),
        (
            {"kv_transfer_config": {**offloading(), "kv_role": "kv_producer"}},
            "kv_role=kv_producer is not supported; caches are not sent to other servers; set",
        ),
        (
            {"kv_transfer_config": {**offloading(), "kv_port": 1}},
            "kv_port=1 is not supported; leave it out",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
            "cpu_bytes_to_use=None; it must be a number of bytes above 0",
        ),
        (
            {"kv_transfer_config": offloading(cpu_bytes_to_use="5G")},
            "cpu_bytes_to_use=5G; it must be a number of bytes above 0",
        ),
        (
            {"kv_transfer_config": offloading(offload_prompt_only="yes")},
            "offload_prompt_only=yes; it must be true or false",
        ),
        (
            {
                "kv_transfer_config": offloading(
                    spec_name="TieringOffloadingSpec",
                    secondary_tiers=[{"type": "fs", "root_dir": "/mnt/kv"}],
                )
            },
            "spec_name=TieringOffloadingSpec is not supported; for copies on disk too set "
            "cache.disk_dir and cache.disk_gib, and cache.host_gib",
        ),
        (
            {"kv_transfer_config": offloading(block_size=64)},
            "block_size=64 is not supported; each block is copied by itself; its size is "
            "cache.block_size",
        ),
        (
            {"kv_transfer_config": offloading(store_threshold=2)},
            "store_threshold=2 is not supported; set cache.store=reused",
        ),
        (
            {"max_modellen": 1},
            "LLM(..., max_modellen=...): there is no such argument; did you mean max_model_len?",
        ),
        (
            {"itl_target": 1},
            "LLM(..., itl_target=...): there is no such argument; did you mean "
            'overrides=["scheduler.itl_target_ms=..."]?',
        ),
        ({"port": 1}, "LLM(..., port=...): this argument belongs to run serve"),
        (
            {"xyzzy": 1},
            "LLM(..., xyzzy=...): there is no such argument; settings: run serve --help",
        ),
        ({"max_model_len": "manyk"}, "max_model_len=manyk: a number of tokens such as 4096 or 4k"),
        ({"served_model_name": ["a", "b"]}, "a model is served under one name"),
        ({"hf_overrides": "{"}, "hf_overrides={: it must be JSON"),
        (
            {"speculative_config": {"method": "medusa"}},
            "the method must be one of ngram, ngram_gpu, suffix, draft_model, eagle3, mtp, "
            "deepseek_mtp, glm4_moe_mtp, glm4_moe_lite_mtp, got 'medusa'",
        ),
        (
            {"speculative_config": '{"method": "ngram", "quantization": "fp8"}'},
            "quantization is not supported; leave it out",
        ),
        ({"speculative_config": "ngram"}, "it must be a JSON object"),
        ({"enable_lora": "maybe"}, "enable_lora=maybe: it must be true or false"),
        ({"max_loras": 0}, "max_loras=0: it must be a whole number of adapters, 1 or more"),
        ({"max_cpu_loras": "1.5"}, "max_cpu_loras=1.5: it must be a whole number of adapters"),
        (
            {"enable_lora": False, "lora_modules": ["a=/b"]},
            "lora_modules are given, but enable_lora is false; leave one out",
        ),
        ({"lora_modules": ["a=/b", "a=/c"]}, "the name 'a' is given twice"),
        ({"lora_modules": ["=/b"]}, 'an adapter is written name=path or {"name": ..., "path": '),
        ({"lora_modules": ['{"name": "a"}']}, "an adapter is written name=path or"),
        ({"lora_modules": ['{"name": "a"']}, "it must be JSON"),
        (
            {"lora_modules": [{"name": "a", "paht": "b"}]},
            "there is no key 'paht'; keys: name, path",
        ),
        ({"lora_modules": 5}, "an adapter is written name=path or"),
        (
            {"lora_dtype": "float16", "dtype": "bfloat16"},
            "lora_dtype=float16: adapters have the model's type; leave it out, or set dtype too",
        ),
        ({"fully_sharded_loras": True}, "adapters are divided like the weights of their layers"),
        ({"lora_extra_vocab_size": 512}, "adapters with tokens of their own are not served"),
        ({"specialize_active_lora": True}, "one set of graphs serves any number of adapters"),
        ({"enforce_eager": "maybe"}, "enforce_eager=maybe: it must be true or false"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(arguments: dict[str, object], message: str):
    with pytest.raises(ConfigError) as error:
        argument_settings(arguments)
    assert message in str(error.value)
