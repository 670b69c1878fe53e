"""A model that writes given texts: a checkpoint in which each token has one successor.

The weights of attention and MLP are zero, so the hidden state is the last token's embedding, a unit
vector, and `lm_head` maps it to the next token. The last word of the prompt selects the answer.
Each character of each answer is a token of its own. The token's text ends in a number, which the
decoder drops. Grammar libraries do not support such a decoder. For tests with grammars an answer is
therefore a list of pieces, all different. Each piece is a token of a byte-level tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.e2e.server_process import ServerProcess

__all__ = ("scripted_server", "write_scripted_model")

_HEAD_DIM = 64


def write_scripted_model(
    directory: Path, answers: Mapping[str, str] | Mapping[str, Sequence[str]], template: str
) -> Path:
    """Write the model's directory.

    Args:
        answers: last word of the prompt -> answer, as a text or in pieces. The model adds the
            end token.
        template: the chat template.
    """
    in_pieces = not any(isinstance(answer, str) for answer in answers.values())
    tokens = ["<unk>", "</s>", *answers]
    successor = {0: 1, 1: 1}
    for word, answer in answers.items():
        last = tokens.index(word)
        for piece in answer:
            tokens.append(_as_bytes(piece) if in_pieces else f"{piece}⟨{len(tokens)}⟩")
            successor[last] = last = len(tokens) - 1
        successor[last] = 1
    assert len(set(tokens)) == len(tokens), "two pieces are the same"
    if in_pieces:  # add every byte, so that the model can write what a grammar needs
        bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens += [byte for byte in bytes_ if byte not in tokens]
    successor |= {token: 1 for token in range(len(tokens)) if token not in successor}
    size = -(-len(tokens) // _HEAD_DIM) * _HEAD_DIM
    directory.mkdir(parents=True)
    save_file(_weights(size, successor), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_config(size)))
    _tokenizer(tokens, in_pieces=in_pieces).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": template})
    )
    return directory


def _weights(size: int, successor: Mapping[int, int]) -> dict[str, torch.Tensor]:
    head = torch.zeros(size, size)
    for token, following in successor.items():
        head[following, token] = (
            2.0  # times the norm's sqrt(size): the probability of all other tokens is almost 0
        )
    layer = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (size, size),
        "self_attn.k_proj": (_HEAD_DIM, size),
        "self_attn.v_proj": (_HEAD_DIM, size),
        "self_attn.o_proj": (size, size),
        "mlp.gate_proj": (_HEAD_DIM, size),
        "mlp.up_proj": (_HEAD_DIM, size),
        "mlp.down_proj": (size, _HEAD_DIM),
    }
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    return {
        "model.embed_tokens.weight": torch.eye(size),
        "lm_head.weight": head,
        **{f"{layer}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()},
        **{f"{name}.weight": torch.ones(size) for name in norms},
    }


def _config(size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": _HEAD_DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": size // _HEAD_DIM,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": 1,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }


def _as_bytes(piece: str) -> str:
    """The text as a byte-level vocabulary writes it."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(piece)
    return "".join(word for word, _ in words)


def _tokenizer(tokens: list[str], *, in_pieces: bool) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if in_pieces:
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.decoder = decoders.Sequence(
            [decoders.Fuse(), decoders.Replace(Regex("⟨[0-9]+⟩"), "")]
        )
    return tokenizer


@contextmanager
def scripted_server(
    directory: Path, answers: Mapping[str, str] | Mapping[str, Sequence[str]], template: str
) -> Iterator[ServerProcess]:
    """A server of a scripted model. Writes the model into `directory`; its name is `scripted`."""
    path = write_scripted_model(directory / "scripted", answers, template)
    with ServerProcess(f"model.path={path}", "model.name=scripted") as process:
        yield process
