"""Train the demo model from nothing and write it in Hugging Face format.

    python -m ostinato.models.demo.training.train                       # over an hour on one CPU core
    python -m ostinato.models.demo.training.train --tokens 2e6 --out /tmp/demo

The corpus is generated on the fly (`corpus.py`), so the run needs no download. Matrices inside the
layers are trained with Muon, everything else with AdamW. Only the words of the assistant and plain
text count fully in the loss, because the model should not learn to write questions.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ostinato.models.demo.training.batches import (
    END_OF_TEXT,
    IM_END,
    MAX_POSITIONS,
    VOCAB_SIZE,
    Batch,
    batches,
    build_tokenizer,
    drills,
)

__all__ = ["main"]

ROPE_THETA: Final = 10000.0
HELD_OUT_SEED: Final = 10**9
ADAMW_SCALE: Final = 0.35  # learning rate of AdamW relative to that of Muon
SAMPLES: Final = (
    "What is an ostinato?",
    "What is the capital of France?",
    "Tell me a short story about a cat.",
    "Hello! Who are you?",
    "What is paged attention?",
    "Count to ten.",
    "What is 7 times 8?",
    "Why do stars twinkle?",
)


def _model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        attention_bias=False,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    _look_back(model)
    return model


@torch.no_grad()
def _look_back(model: Qwen3ForCausalLM) -> None:
    """Start the model with one attention head that looks at the previous token.

    To repeat earlier text a model needs two heads in consecutive layers (an induction head). The
    first head copies to each token the token before it. The second head searches these copies.
    Neither head lowers the loss without the other, so a short run hardly learns them. If the first
    head is given, a run learns the second within two hundred steps of drills. To give the first
    head, all embeddings get a common part, from which the head computes a query and a key that
    depend on the position alone. The rotary embedding makes them match at distance one.
    """
    embeddings = model.model.embed_tokens.weight  # [V, D]
    common = torch.full((embeddings.shape[1],), embeddings.shape[1] ** -0.5)
    embeddings += 0.02
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= 0.3
        layer.mlp.down_proj.weight *= 0.3
    attention = model.model.layers[0].self_attn
    half = model.config.head_dim // 2
    num_fast = 6  # the pairs of dimensions that rotate fast enough to tell neighbours apart
    angles = ROPE_THETA ** (-torch.arange(num_fast) / half)
    key, query = torch.zeros(2 * half), torch.zeros(2 * half)
    key[:num_fast] = 1.0
    query[:num_fast], query[half : half + num_fast] = torch.cos(angles), -torch.sin(angles)
    for weight, direction in (
        (attention.k_proj.weight, key),
        (attention.q_proj.weight, query),
    ):
        rows = weight[: 2 * half]  # the first head
        rows.mul_(0.3).add_(0.6 * direction[:, None] * common)


def _loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The library takes a dict of masks as it is; None in it means plain causal attention. If
        # attention_mask were left out, it would look for packed sequences in position_ids.
        hidden = model.model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            attention_mask={"full_attention": None},
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden)
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), batch.targets.flatten(), reduction="none"
    )
    weights = batch.weights.flatten()
    return (losses * weights).sum() / weights.sum()


def _optimizers(model: Qwen3ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _schedule(done: float) -> float:
    """Learning rate factor at a fraction of the run: a short warm-up, then 1, then a line down.

    The warm-up ends at 2 % of the run, the line begins at about 25 % and ends almost at zero.
    """
    return min(1.0, done / 0.02, (1.0 - done) / 0.75 + 0.005)


@torch.no_grad()
def _held_out_loss(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> float:
    stream = batches(tokenizer, rows=8, length=512, seed=HELD_OUT_SEED)
    return sum(float(_loss(model, next(stream))) for _ in range(4)) / 4


def _save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> PreTrainedTokenizerFast:
    """Write the checkpoint in bfloat16 with all files that `from_pretrained` needs."""
    out.mkdir(parents=True, exist_ok=True)
    template = (Path(__file__).parents[1] / "chat_template.jinja").read_text()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )
    wrapped.save_pretrained(out)
    # The library writes to this file the name of a class that its versions before 5 do not have.
    settings_file = out / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_file.write_text(json.dumps(settings, indent=2) + "\n")
    half = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        do_sample=True,
        temperature=0.3,
        top_p=0.9,
    )
    half.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    return wrapped


@torch.no_grad()
def _show_samples(out: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = Qwen3ForCausalLM.from_pretrained(out).eval()
    for question in SAMPLES:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        answer = model.generate(
            **inputs, max_new_tokens=160, do_sample=False, temperature=None, top_p=None
        )
        text = tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"> {question}\n{text}\n")


class Stage(NamedTuple):
    """A part of the run with its own shape of batches.

    `fraction` is its share of all tokens. Every `drill_every`-th batch is a drill; 0 = no drills.
    """

    fraction: float
    rows: int
    length: int
    long: bool
    drill_every: int


STAGES: Final = (
    Stage(0.08, 20, 96, long=False, drill_every=1),
    Stage(0.72, 8, 256, long=False, drill_every=20),
    Stage(0.12, 4, 512, long=False, drill_every=0),
    Stage(0.08, 2, 1024, long=True, drill_every=0),
)


class _Run:
    """The state of a run that a checkpoint stores."""

    def __init__(self, lr: float, checkpoint: Path | None) -> None:
        self.model = _model()
        self.optimizers = _optimizers(self.model, lr)
        self.seen = 0
        self.seconds = 0.0
        self.checkpoint = checkpoint
        if checkpoint is not None and checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.seen, self.seconds = state["seen"], state["seconds"]

    def save(self) -> None:
        """Write the checkpoint. If the write fails, the previous checkpoint stays in place."""
        if self.checkpoint is None:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "seen": self.seen,
            "seconds": self.seconds,
        }
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.checkpoint)

    def step(self, batch: Batch, loss_fn: Callable[..., torch.Tensor], lr: float) -> float:
        """One optimizer step at the given learning rate; returns the loss."""
        started = time.monotonic()
        loss = loss_fn(self.model, batch)
        loss.backward()
        value = loss.item()
        if not math.isfinite(value):
            raise RuntimeError(f"loss is {value} after {self.seen} tokens; lower --lr")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            scale = 1.0 if isinstance(optimizer, torch.optim.Muon) else ADAMW_SCALE
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.seen += batch.input_ids.numel()
        self.seconds += time.monotonic() - started
        return value


def train(
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    lr: float,
    seed: int,
    use_compile: bool,
    checkpoint: Path | None = None,
) -> tuple[Qwen3ForCausalLM, dict[str, float]]:
    """Run all stages and return the model with the figures of the run.

    Raises:
        RuntimeError: the loss is not a finite number.
    """
    torch.manual_seed(seed)
    run = _Run(lr, checkpoint)
    fast_loss = torch.compile(_loss, dynamic=False) if use_compile else _loss
    num_parameters = sum(p.numel() for p in run.model.parameters())
    print(f"{num_parameters / 1e6:.2f} M parameters, {num_tokens / 1e6:.1f} M tokens", flush=True)
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    steps = 0
    with Progress(*columns, refresh_per_second=1) as progress:
        bar = progress.add_task("training", total=num_tokens)
        for index, stage in enumerate(STAGES):
            until = num_tokens * sum(s.fraction for s in STAGES[: index + 1])
            stream = batches(
                tokenizer,
                rows=stage.rows,
                length=stage.length,
                seed=seed + 1000 * index + run.seen,
                long=stage.long,
            )
            drill = drills(rows=stage.rows, length=stage.length, seed=seed + index)
            # Other stages are too short: compiling for their shapes would take longer than it
            # saves.
            loss_fn = fast_loss if stage.fraction > 0.5 else _loss
            while run.seen < until - stage.rows * stage.length / 2:
                is_drill = stage.drill_every and steps % stage.drill_every == 0
                batch = next(drill if is_drill else stream)
                loss = run.step(batch, loss_fn, lr * _schedule(run.seen / num_tokens))
                steps += 1
                text = f"loss {loss:.3f}, {run.seen / run.seconds:.0f} tok/s"
                progress.update(bar, completed=run.seen, description=text)
                if steps % 50 == 0:
                    run.save()
                    if not progress.console.is_terminal:
                        print(f"{run.seen} tokens, {text}", flush=True)
    run.save()
    figures = {
        "num_parameters": num_parameters,
        "num_tokens": run.seen,
        "seconds": round(run.seconds),
        "held_out_loss": round(_held_out_loss(run.model, tokenizer), 4),
        "seed": seed,
    }
    return run.model, figures


def main() -> None:
    """Command line of the training run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=5e6, help="how many tokens to train on")
    parser.add_argument(
        "--lr", type=float, default=8e-3, help="learning rate of Muon at its height"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and text")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--checkpoint", type=Path, help="file to save to and to resume from")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1], help="directory for the model"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    model, figures = train(
        tokenizer,
        num_tokens=int(args.tokens),
        lr=args.lr,
        seed=args.seed,
        use_compile=not args.no_compile,
        checkpoint=args.checkpoint,
    )
    wrapped = _save(model, tokenizer, args.out)
    print(json.dumps(figures))
    _show_samples(args.out, wrapped)


if __name__ == "__main__":
    main()
