"""The rotary embedding against transformers' frequencies, tables and rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ostinato.models.config_json.rope_fields import read_rope
from ostinato.ops.rope import LinearScaling, Rope, apply_rope, inverse_frequencies, rope_tables

HEAD_DIM = 32
MAX_POSITIONS = 512

PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn-all-keys": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.5,
    },
}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.01 * pair for pair in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + 0.5 * pair for pair in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 128,
}


def transformers_rope(parameters: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(config)


def our_rope(parameters: dict[str, Any]) -> Rope:
    return read_rope({"rope_parameters": parameters}, HEAD_DIM, MAX_POSITIONS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_tables_equal_transformers(name: str) -> None:
    reference = transformers_rope(PARAMETERS[name])
    rope = our_rope(PARAMETERS[name])
    torch.testing.assert_close(
        inverse_frequencies(rope, MAX_POSITIONS), reference.inv_freq, atol=0, rtol=1e-6
    )
    positions = torch.arange(MAX_POSITIONS)[None]
    cos, sin = reference(torch.zeros(1), positions)
    ours = rope_tables(rope, MAX_POSITIONS)
    # Angles of up to 512 radians carry the frequencies' rounding.
    torch.testing.assert_close(ours[0], cos[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours[1], sin[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("stated", [{}, {"attention_factor": 1.5}, {"factor": 8.0}], ids=str)
@pytest.mark.parametrize("num_positions", [100, 128, 129, MAX_POSITIONS])
def test_longrope_divides_by_the_factors_of_the_longest_context(
    num_positions: int, stated: dict[str, float]
) -> None:
    reference, rope = transformers_rope(LONGROPE | stated), our_rope(LONGROPE | stated)
    cos, sin = reference(torch.zeros(1), torch.arange(num_positions)[None])
    ours = rope_tables(rope, num_positions)
    torch.testing.assert_close(ours[0], cos[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours[1], sin[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_positions", [100, 128, 129])
def test_extra_positions_do_not_make_the_context_longer(num_positions: int) -> None:
    rope = our_rope(LONGROPE)
    angles = torch.arange(num_positions + 50)[:, None] * inverse_frequencies(rope, num_positions)
    for device in (None, torch.device("meta")):
        cos, sin = rope_tables(rope, num_positions, device, num_extra=50)
        assert cos.shape == sin.shape == angles.shape
        if device is None:
            scale = float(cos[0, 0])
            torch.testing.assert_close(cos, angles.cos() * scale, atol=1e-6, rtol=0)
            torch.testing.assert_close(sin, angles.sin() * scale, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "relative"),
    [(torch.float32, 0.0), (torch.bfloat16, 2**-7)],  # one rounding to bfloat16
)
def test_rotation_equals_transformers(dtype: torch.dtype, relative: float) -> None:
    reference, rope = transformers_rope(PARAMETERS["default"]), our_rope(PARAMETERS["default"])
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 1, 2, 77, 511])
    q = torch.randn(5, 4, HEAD_DIM, generator=generator).to(dtype)
    k = torch.randn(5, 2, HEAD_DIM, generator=generator).to(dtype)
    cos, sin = reference(torch.zeros(1), positions[None])
    want_q, want_k = apply_rotary_pos_emb(  # takes [batch, heads, tokens, head_dim]
        q.float().transpose(0, 1)[None], k.float().transpose(0, 1)[None], cos, sin
    )
    ours = [table[positions] for table in rope_tables(rope, MAX_POSITIONS)]
    for x, want in ((q, want_q), (k, want_k)):
        result = apply_rope(x, *ours)
        assert result.dtype == dtype
        want = want[0].transpose(0, 1).to(dtype)
        torch.testing.assert_close(result, want, atol=1e-6, rtol=relative)


def test_position_zero_is_the_identity() -> None:
    x = torch.randn(1, 2, 8)
    cos, sin = rope_tables(Rope(rotary_dim=8, theta=10000.0), 1)
    assert torch.equal(apply_rope(x, cos, sin), x)


def test_only_the_rotary_part_of_a_head_turns() -> None:
    x = torch.randn(3, 2, 12)
    cos, sin = rope_tables(Rope(rotary_dim=8, theta=100.0), 3)
    result = apply_rope(x, cos, sin)
    assert torch.equal(result[..., 8:], x[..., 8:])
    assert torch.equal(result[..., :8], apply_rope(x[..., :8], cos, sin))
    assert not torch.equal(result[1:, :, :8], x[1:, :, :8])


def test_scores_depend_on_distance_alone() -> None:
    rope = Rope(rotary_dim=16, theta=1000.0, scaling=LinearScaling(factor=2.0))
    cos, sin = rope_tables(rope, 64)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 16, generator=generator).expand(64, 1, 16)
    k = torch.randn(1, 1, 16, generator=generator).expand(64, 1, 16)
    scores = apply_rope(q, cos, sin)[:, 0] @ apply_rope(k, cos, sin)[:, 0].T
    torch.testing.assert_close(scores.diagonal(-5), scores[5, 0].expand(59), atol=1e-4, rtol=0)


def test_meta_device_gives_shapes() -> None:
    cos, _ = rope_tables(Rope(rotary_dim=8, theta=1e4), 1 << 17, torch.device("meta"))
    assert cos.shape == (1 << 17, 4)
    assert cos.device.type == "meta"


def test_shapes_without_memory_are_those_of_the_tables() -> None:
    rope = Rope(rotary_dim=8, theta=1e4)
    for real, meta in zip(
        rope_tables(rope, 12), rope_tables(rope, 12, torch.device("meta")), strict=True
    ):
        assert meta.device.type == "meta"
        assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())
