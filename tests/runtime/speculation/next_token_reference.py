"""Checkpoints with a next-token layer (MTP), and the layer computed by transformers.

The layer's block is the last one of a transformers model that has one layer more.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from tests.models.random_checkpoints import VARIANTS, reference_model, save

_KINDS = "mlp_layer_types"


class ReferenceLayer:
    """A model with its next-token layer, computed over whole sequences in float32.

    Args:
        variant: a name of `VARIANTS`.
        directory: gets the checkpoint, in the layout of published ones.
    """

    def __init__(self, variant: str, directory: Path) -> None:
        base = VARIANTS[variant]
        self._layer = int(base.settings["num_hidden_layers"])
        settings = {**base.settings, "num_hidden_layers": self._layer + 1}
        if _KINDS in settings:
            settings[_KINDS] = [*settings[_KINDS], "sparse"]
        longer = replace(base, settings=settings).as_one_file()
        self._model = reference_model(longer)
        size, generator = int(settings["hidden_size"]), torch.Generator().manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self._own = {
            "eh_proj.weight": random(size, 2 * size) * size**-0.5,
            **{
                f"{name}.weight": 1 + 0.1 * random(size)
                for name in ("enorm", "hnorm", "shared_head.norm")
            },
        }
        self._write(save(self._model, longer, directory))

    def _write(self, directory: Path) -> None:
        """Add the layer's own tensors, and copies of the embedding and of the head."""
        file, prefix = directory / "model.safetensors", f"model.layers.{self._layer}."
        tensors = load_file(file)
        tensors |= {prefix + name: tensor for name, tensor in self._own.items()}
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, file)
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        config |= {"num_hidden_layers": self._layer, "num_nextn_predict_layers": 1}
        if _KINDS in config:
            config[_KINDS] = config[_KINDS][: self._layer]
        (directory / "config.json").write_text(json.dumps(config))
        words = {f"word{number}": number for number in range(config["vocab_size"])}
        tokenizer = Tokenizer(WordLevel(words, unk_token="word0"))
        tokenizer.save(str(directory / "tokenizer.json"))

    @torch.inference_mode()
    def draft_logits(self, token_ids: list[int], drafts: list[int]) -> list[Tensor]:
        """The logits from which each draft is drawn.

        Args:
            token_ids: the sequence, n tokens.
            drafts: the drafts. Each is the input of the next.
        """
        body = self._model.model
        states = self._model(torch.tensor([token_ids[:-1]]), output_hidden_states=True)
        features = body.norm(states.hidden_states[self._layer])[0]
        tokens, found = token_ids[1:], list[Tensor]()
        for draft in drafts:
            out = self._run(features, tokens)
            found.append(self._model.lm_head(out[-1]))
            features, tokens = torch.cat([features, out[-1:]]), [*tokens, draft]
        return found

    def _run(self, features: Tensor, tokens: list[int]) -> Tensor:
        body, count = self._model.model, len(tokens)
        embedded = body.embed_tokens(torch.tensor(tokens))
        pair = torch.cat([self._norm("enorm", embedded), self._norm("hnorm", features)], 1)
        hidden = (pair @ self._own["eh_proj.weight"].T)[None]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        out = body.layers[self._layer](
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=body.rotary_emb(hidden, positions),
        )
        return self._norm("shared_head.norm", (out[0] if isinstance(out, tuple) else out)[0])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        epsilon = self._model.config.rms_norm_eps
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
            * self._own[f"{name}.weight"]
        )
