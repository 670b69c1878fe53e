"""Train an EAGLE-3 head for the demo model and write it in the layout of published heads.

    python -m ostinato.models.demo.training.train_eagle                 # 10 to 15 minutes
    python -m ostinato.models.demo.training.train_eagle --tokens 1e5 --out /tmp/head

The demo model is frozen. The head reads the model's hidden states at three depths, and learns the
model's distribution of the token after the next one. As in generation, the head also continues from
its own outputs: every batch is computed once with the model's hidden states, and then several times
with those of the head (the "training-time test" of EAGLE-3, arXiv:2503.01840).
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from ostinato.models.demo.training.batches import MAX_POSITIONS, Batch, batches

__all__ = ["main"]

DEMO: Final = Path(__file__).parents[1]
AUX_LAYERS: Final = (2, 3, 4)  # hidden states that enter these layers of the demo model
DRAFT_VOCAB_SIZE: Final = 2048
UNROLLED: Final = 4  # positions of a draft that are trained
HELD_OUT_SEED: Final = 2 * 10**9
ROPE_THETA: Final = 10000.0
ADAMW_SCALE: Final = 0.35  # learning rate of AdamW relative to that of Muon


class Features(NamedTuple):
    """The frozen model's outputs for a batch of R rows of T tokens."""

    hidden: Tensor  # [R, T, 3 D]
    logits: Tensor  # [R, T, V] float32


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class _Attention(nn.Module):
    """Attention of one unrolled step over its own keys and those of all earlier steps."""

    def __init__(self, size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(2 * size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[R, T, 2 D] -> [R, T, D]; adds the step's keys and values to `past`."""
        rows, length, _ = x.shape
        q, k, v = (
            part(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, positions), _rotate(k, positions)
        shared = self.num_heads // self.num_kv_heads
        past.append((k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
        step = len(past) - 1
        scores = q @ past[0][0].transpose(2, 3)
        index = torch.arange(length)
        seen = index[None, :] <= index[:, None] - step
        scores = scores.masked_fill(~seen, -1e9)
        # The token at p of step i sees step i - 1 at p - 1, step i - 2 at p - 2, and so on down to
        # the first step.
        own = [
            (q * _shifted(past[i][0], step - i)).sum(-1, keepdim=True) for i in range(1, step + 1)
        ]
        weights = torch.cat([scores, *own], -1).float().mul(self.head_dim**-0.5).softmax(-1)
        weights = weights.to(v.dtype)
        mixed = weights[..., :length] @ past[0][1]
        for i in range(1, step + 1):
            mixed = mixed + weights[..., length + i - 1, None] * _shifted(past[i][1], step - i)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _shifted(x: Tensor, places: int) -> Tensor:
    """The tensor that has `x[..., p - places, :]` at position p, or zeros."""
    return F.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * ROPE_THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class _MidLayer(nn.Module):
    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        config = model.config
        size = config.hidden_size
        self.input_layernorm, self.hidden_norm = _Norm(size), _Norm(size)
        self.post_attention_layernorm = _Norm(size)
        self.self_attn = _Attention(
            size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, config.intermediate_size, bias=False),
                "up_proj": nn.Linear(size, config.intermediate_size, bias=False),
                "down_proj": nn.Linear(config.intermediate_size, size, bias=False),
            }
        )

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, positions, past)
        normal = self.post_attention_layernorm(hidden)
        gated = F.silu(self.mlp["gate_proj"](normal)) * self.mlp["up_proj"](normal)
        return hidden + self.mlp["down_proj"](gated)


class Head(nn.Module):
    """An EAGLE-3 head whose parameters have the names of published checkpoints."""

    def __init__(self, model: Qwen3ForCausalLM, token_ids: Tensor) -> None:
        """
        Args:
            model: the frozen model.
            token_ids: [draft vocabulary] int64, ascending, its tokens in the model's vocabulary.
        """
        super().__init__()
        size = model.config.hidden_size
        self.fc = nn.Linear(len(AUX_LAYERS) * size, size, bias=False)
        self.midlayer = _MidLayer(model)
        self.norm = _Norm(size)
        self.lm_head = nn.Linear(size, len(token_ids), bias=False)
        with torch.no_grad():  # begin as the model's own last layer, as far as it fits
            last = model.model.layers[-1]
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, -size:] += torch.eye(size)
            for name, linear in self.midlayer.mlp.items():
                linear.weight.copy_(getattr(last.mlp, name).weight)
            self.midlayer.post_attention_layernorm.weight.copy_(
                last.post_attention_layernorm.weight
            )
            self.midlayer.self_attn.o_proj.weight.mul_(0.3)
            self.norm.weight.copy_(model.model.norm.weight)
            self.lm_head.weight.copy_(model.lm_head.weight[token_ids])


def _features(model: Qwen3ForCausalLM, batch: Batch) -> Features:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            attention_mask={"full_attention": None},
            use_cache=False,
            output_hidden_states=True,
        )
        hidden = torch.cat([output.hidden_states[layer] for layer in AUX_LAYERS], -1)
        return Features(hidden.float(), model.lm_head(output.last_hidden_state).float())


def _unrolled(
    head: Head, model: Qwen3ForCausalLM, batch: Batch, features: Features
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each position of a draft: the head's logits [R, T - 2, Vd], the model's [R, T - 2, V].

    At p, the head has the model's hidden state of p (or its own) and the token at p + 1. It
    predicts the token at p + 2, whose distribution the model gives at p + 1.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embedded = model.model.embed_tokens(batch.input_ids[:, 1:-1])
        hidden = head.fc(features.hidden[:, :-2]).float()
        past: list[tuple[Tensor, Tensor]] = []
        for _ in range(UNROLLED):
            hidden = head.midlayer(embedded, hidden, batch.positions[:, :-2], past)
            yield head.lm_head(head.norm(hidden)).float(), features.logits[:, 1:-1]
            hidden = _shifted(hidden, 1)


def _loss(head: Head, model: Qwen3ForCausalLM, batch: Batch, token_ids: Tensor) -> Tensor:
    total = torch.zeros(())
    features = _features(model, batch)
    for place, (logits, wanted) in enumerate(_unrolled(head, model, batch, features)):
        weights = batch.weights[:, 1:-1].clone()
        weights[:, :place] = 0.0  # these positions have no earlier drafts to continue
        target = wanted.softmax(-1)[..., token_ids]  # without the tokens that the head cannot draw
        losses = -(target * logits.log_softmax(-1)).sum(-1)
        total = total + 0.8**place * (losses * weights).sum() / weights.sum()
    return total


@torch.no_grad()
def _all_right_by_length(
    head: Head, model: Qwen3ForCausalLM, tokenizer: Tokenizer, token_ids: Tensor
) -> list[float]:
    """Probability that the first n drafts are the model's likeliest tokens, for each n from 1."""
    right = torch.zeros(UNROLLED)
    count = 0
    for batch in islice(batches(tokenizer, rows=8, length=512, seed=HELD_OUT_SEED), 4):
        weights = batch.weights[:, 1:-1] == 1.0
        weights[:, :UNROLLED] = False
        all_right = torch.ones_like(weights)
        features = _features(model, batch)
        for place, (logits, wanted) in enumerate(_unrolled(head, model, batch, features)):
            is_right = token_ids[logits.argmax(-1)] == wanted.argmax(-1)
            # The draft that ends here began `place` tokens earlier.
            all_right = is_right if place == 0 else is_right & F.pad(all_right, (1, 0))[:, :-1]
            right[place] += (all_right & weights).sum()
        count += int(weights.sum())
    return (right / count).tolist()


def _draft_vocabulary(tokenizer: Tokenizer, vocab_size: int, seed: int) -> Tensor:
    """The ids of the most frequent tokens, ascending: [DRAFT_VOCAB_SIZE] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for batch in islice(batches(tokenizer, rows=8, length=512, seed=seed), 60):
        counts += torch.bincount(batch.input_ids.flatten(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB_SIZE].sort().values


def train(*, num_tokens: int, lr: float, seed: int) -> tuple[Head, Tensor, dict[str, object]]:
    """Train a head; returns it, its draft vocabulary and the figures of the run.

    Raises:
        RuntimeError: the loss is not a finite number.
    """
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    model.requires_grad_(requires_grad=False)
    token_ids = _draft_vocabulary(tokenizer, model.config.vocab_size, seed)
    head = Head(model, token_ids)
    matrices = [p for n, p in head.named_parameters() if p.ndim == 2 and n != "lm_head.weight"]
    chosen = {id(p) for p in matrices}
    others = [p for p in head.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    seen, steps, begin = 0, 0, time.monotonic()
    stream = batches(tokenizer, rows=8, length=256, seed=seed + 1)
    while seen < num_tokens:
        done = seen / num_tokens
        rate = lr * min(1.0, done / 0.02 + 0.05, (1.0 - done) / 0.75 + 0.005)
        batch = next(stream)
        loss = _loss(head, model, batch, token_ids)
        loss.backward()
        if not math.isfinite(value := loss.item()):
            raise RuntimeError(f"loss is {value} after {seen} tokens; lower --lr")
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            scale = 1.0 if isinstance(optimizer, torch.optim.Muon) else ADAMW_SCALE
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += batch.input_ids.numel()
        steps += 1
        if steps % 50 == 0:
            print(
                f"{seen} tokens, loss {value:.3f}, {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    places = _all_right_by_length(head, model, tokenizer, token_ids)
    figures: dict[str, object] = {
        "num_parameters": sum(p.numel() for p in head.parameters()),
        "num_tokens": seen,
        "seconds": round(time.monotonic() - begin),
        "all_right_by_length": [round(share, 3) for share in places],
        "seed": seed,
    }
    return head, token_ids, figures


def _save(head: Head, token_ids: Tensor, out: Path) -> None:
    """Write the head in the layout of published EAGLE-3 heads: bfloat16, without the embedding."""
    out.mkdir(parents=True, exist_ok=True)
    demo = json.loads((DEMO / "config.json").read_text())
    kept = (
        "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
        "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
        "rope_parameters", "vocab_size",
    )  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: demo[key] for key in kept},
        "draft_vocab_size": len(token_ids),
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "max_position_embeddings": MAX_POSITIONS,
        "num_hidden_layers": 1,
        "target_hidden_size": demo["hidden_size"],
        "target_num_hidden_layers": demo["num_hidden_layers"],
        "tie_word_embeddings": False,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {name: value.detach().to(torch.bfloat16) for name, value in head.state_dict().items()}
    known = torch.zeros(demo["vocab_size"], dtype=torch.bool)
    known[token_ids] = True
    tensors |= {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": known}
    file = out / "model.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    file.chmod(0o644)


def main() -> None:
    """Command line of the training run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=1.5e6, help="how many tokens to train on")
    parser.add_argument(
        "--lr", type=float, default=6e-3, help="learning rate of Muon at its height"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and text")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=DEMO / "eagle3", help="directory for the head")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    head, token_ids, figures = train(num_tokens=int(args.tokens), lr=args.lr, seed=args.seed)
    _save(head, token_ids, args.out)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
