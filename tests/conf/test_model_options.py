"""Every model option with a configuration of its own describes the model that it names."""

import pytest
import torch
import transformers

from ostinato.conf.compose import group_options, load_config
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import CrossSpace
from ostinato.models.registry import build_model, read_model_config
from ostinato.runtime.startup.plan.model_source import open_model
from ostinato.runtime.startup.plan.planning import plan_engine

# Option -> (number of parameters, context length), as the models' authors state them. Tied weights
# count once.
KNOWN = {
    "deepseek-v2-lite": (15_706_484_224, 163_840),
    "deepseek-v3": (671_026_419_200, 163_840),
    "falcon-40b": (41_303_293_952, 2_048),
    "falcon-7b": (6_921_720_704, 2_048),
    "falcon3-10b": (10_305_653_760, 32_768),
    "falcon3-1b": (1_669_408_768, 8_192),
    "falcon3-3b": (3_227_655_168, 32_768),
    "falcon3-7b": (7_455_550_464, 32_768),
    "gemma2-2b": (2_614_341_888, 8_192),
    "gemma2-9b": (9_241_705_984, 8_192),
    "gemma3-1b": (999_885_952, 32_768),
    "gemma3-270m": (268_098_176, 32_768),
    "gemma3-4b": (4_300_079_472, 131_072),
    "glm-4.5-air": (106_852_251_264, 131_072),
    "gpt-j-6b": (6_050_882_784, 2_048),
    "gpt-oss-20b": (20_914_757_184, 131_072),
    "gpt2": (124_439_808, 1_024),
    "granite-3b-a800m": (3_298_793_472, 131_072),
    "granite-4.0-h-tiny": (6_939_037_248, 131_072),
    "granite-8b": (8_170_864_640, 131_072),
    "internvl3-8b": (7_944_373_760, 32_768),
    "lfm2-1.2b": (1_170_340_608, 128_000),
    "llama-1b": (1_235_814_400, 131_072),
    "llama-3b": (3_212_749_824, 131_072),
    "llama-45m": (56_369_664, 4_096),
    "llama-70b": (70_553_706_496, 131_072),
    "llama-8b": (8_030_261_248, 131_072),
    "llava-1.5-7b": (7_050_828_800, 4_096),  # without `UNUSED`
    "mistral-7b": (7_248_023_552, 32_768),
    "mistral-small-24b": (23_572_403_200, 32_768),
    "mistral-small-3.1-24b": (24_011_361_280, 131_072),
    "mixtral-8x22b": (140_630_071_296, 65_536),
    "mixtral-8x7b": (46_702_792_704, 32_768),
    "nemotron-3-nano-30b-a3b": (31_577_940_288, 262_144),
    "nemotron-nano-9b-v2": (8_888_227_328, 131_072),
    "olmo2-13b": (13_716_198_400, 4_096),
    "olmo2-1b": (1_484_916_736, 4_096),
    "olmo2-32b": (32_234_279_936, 4_096),
    "olmo2-7b": (7_298_617_344, 4_096),
    "olmo3-7b": (7_298_011_136, 65_536),
    "olmoe-7b": (6_919_161_856, 4_096),
    "phi-4": (14_659_507_200, 16_384),
    "pixtral-12b": (12_682_739_712, 1_024_000),
    "pythia-1.4b": (1_414_647_808, 2_048),
    "pythia-12b": (11_846_072_320, 2_048),
    "pythia-160m": (162_322_944, 2_048),
    "pythia-410m": (405_334_016, 2_048),
    "pythia-6.9b": (6_857_302_016, 2_048),
    "qwen1.5-moe-a2.7b": (14_315_784_192, 8_192),
    "qwen2-audio-7b": (8_397_094_912, 8_192),
    "qwen2.5-0.5b": (494_032_768, 32_768),
    "qwen2.5-7b": (7_615_616_512, 32_768),
    "qwen2.5-vl-3b": (3_754_622_976, 128_000),
    "qwen2.5-vl-7b": (8_292_166_656, 128_000),
    "qwen3-0.6b": (596_049_920, 40_960),
    "qwen3-1.7b": (1_720_574_976, 40_960),
    "qwen3-14b": (14_768_307_200, 40_960),
    "qwen3-235b-a22b": (235_093_634_560, 40_960),
    "qwen3-30b-a3b": (30_532_122_624, 40_960),
    "qwen3-32b": (32_762_123_264, 40_960),
    "qwen3-4b": (4_022_468_096, 40_960),
    "qwen3-8b": (8_190_735_360, 40_960),
    "qwen3-next-80b-a3b": (79_674_391_296, 262_144),
    "qwen3.5-4b": (4_539_265_536, 262_144),
    "qwen3-vl-4b": (4_437_815_808, 262_144),
    "smolvlm-256m": (256_484_928, 8_192),
    "smollm3-3b": (3_075_098_624, 65_536),
    "whisper-base": (72_593_920, 448),
    "whisper-large-v3": (1_543_490_560, 448),
    "whisper-large-v3-turbo": (808_878_080, 448),
    "whisper-medium": (763_857_920, 448),
    "whisper-small": (241_734_912, 448),
    "whisper-tiny": (37_760_640, 448),
}


# The parameters of towers. They are not loaded if the engine takes neither images nor sounds.
TOWERS = {
    "gemma3-4b": 419_816_304,
    "internvl3-8b": 331_552_768,
    "smolvlm-256m": 93_510_912,
    "llava-1.5-7b": 311_888_896,
    "mistral-small-3.1-24b": 438_958_080,
    "pixtral-12b": 434_957_312,
    "qwen2-audio-7b": 642_215_936,
    "qwen2.5-vl-3b": 668_684_288,
    "qwen2.5-vl-7b": 676_550_144,
    "qwen3-vl-4b": 415_347_712,
    "qwen3.5-4b": 333_514_240,
}

# The last layer and the last norm of LLaVA's tower are not used.
UNUSED = {"llava-1.5-7b": 12_598_272}


def zero_biases(config: ModelConfig) -> int:
    """Parameters that checkpoints lack: the biases of keys in Whisper and its encoder are zero."""
    if config.sound is not None:
        return config.sound.encoder.hidden_size * config.sound.encoder.num_layers
    if config.audio is None:
        return 0
    return config.hidden_size * (config.audio.num_layers + 2 * config.num_layers)


def test_every_option_is_known_here():
    assert set(group_options()["model"]) == {"demo", *KNOWN}


@pytest.mark.parametrize("option", KNOWN)
def test_parameters_and_context(option: str):
    section = load_config([f"model={option}", "model.load_format=dummy"]).model
    config = read_model_config(open_checkpoint(section))
    model = build_model(
        config,
        dtype=config.dtype,
        device=torch.device("meta"),
        attention_backend="reference",
        num_media_rows=1,
        cross=None
        if config.audio is None
        else CrossSpace(num_windows=1, num_keys=1500, block_size=16, dtype=config.dtype),
    )
    count = sum(parameter.numel() for parameter in model.parameters()) - zero_biases(config)
    assert (count, config.max_model_len) == KNOWN[option]


@pytest.mark.parametrize("option", KNOWN)
def test_the_plan_holds_the_weights_and_the_cache(option: str):
    config = load_config([f"model={option}", "model.load_format=dummy"])
    source = open_model(config, torch.device("cuda"))
    plan = plan_engine(config, source, free_bytes=1 << 42)
    size = KNOWN[option][0] * source.dtype.itemsize
    # Beside the parameters there are tables of rotary positions, and norms in float32.
    tower = TOWERS.get(option, 0) * source.dtype.itemsize
    if source.cross is not None:  # the caches of cross attention count as weights
        width = 2 * source.config.num_layers * source.config.hidden_size * source.dtype.itemsize
        size += width * source.cross.num_blocks * source.cross.block_size
    assert size - tower <= plan.weights_bytes <= size + (80 << 20)
    given = source.checkpoint.hf_config
    if "num_key_value_heads" in given and "layer_types" not in given:
        heads = given["num_key_value_heads"]
        layers = len(given.get("full_attn_idxs", range(given["num_hidden_layers"])))
        layers = given.get("hybrid_override_pattern", "*" * layers).count("*")
        layers //= given.get("full_attention_interval", 1)
        head_dim = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
        values = head_dim
        if "qk_nope_head_dim" in given:
            head_dim = given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
            values = given["v_head_dim"]
        width = layers * heads * (head_dim + values) * source.cache_dtype.itemsize
        assert plan.bytes_per_token == width


@pytest.mark.slow
@pytest.mark.parametrize("option", KNOWN)
def test_transformers_counts_as_many_parameters(option: str):
    section = load_config([f"model={option}", "model.load_format=dummy"]).model
    hf_config = dict(open_checkpoint(section).hf_config)
    with torch.device("meta"):
        kind = getattr(transformers, hf_config["architectures"][0])
        model = kind(transformers.AutoConfig.for_model(**hf_config))
    tensors = [
        *model.parameters(),
        # This bias is a buffer in transformers, and a parameter in this package.
        *(buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")),
    ]
    count = sum(tensor.numel() for tensor in tensors) - UNUSED.get(option, 0)
    assert count == KNOWN[option][0]
