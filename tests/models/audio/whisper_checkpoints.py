"""Small random Whisper checkpoints of transformers, with a tokenizer and all files of a real one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

LANGUAGES = ("en", "de", "fr", "ja")
NUM_TIMESTAMPS = 1501  # <|0.00|> to <|30.00|>
MAX_INITIAL_TIMESTAMP = 50  # 1 s
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog looks at the fox.",
    "She said that the weather would be better on Thursday than on Wednesday.",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Le renard brun et rapide saute par-dessus le chien paresseux.",
    "素早い茶色の狐はのろまな犬を飛び越える。",
)


def make_whisper(
    path: Path,
    *,
    num_bins: int = 80,
    multilingual: bool = True,
    seed: int = 0,
    d_model: int = 64,
    layers: int = 2,
    heads: int = 4,
    ffn_dim: int = 128,
    max_target_positions: int = 448,
    vocab_size: int = 420,
    no_speech_token: str = "<|nospeech|>",
    tie_word_embeddings: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random Whisper model with its tokenizer.

    Greedy outputs depend on the audio, are mostly text, and have an end after some tokens.

    Args:
        path: a directory, which is created.
        num_bins: mel bins: 80, or 128 as in large-v3.
        multilingual: False = an English model, without languages and tasks.
        seed: of the weights.
        d_model: must be a multiple of `heads`, and give heads of a multiple of 8.
        layers: of the encoder, and of the decoder.
        heads: of the encoder, and of the decoder.
        ffn_dim: width of the feed-forward layers.
        max_target_positions: the longest prompt and output together, in tokens.
        vocab_size: text tokens, at least 256; the special tokens and the timestamps come after them.
        no_speech_token: `<|nocaptions|>` in old checkpoints.
        tie_word_embeddings: False = logits have weights of their own.
        dtype: of the stored weights.

    Returns:
        `path`.
    """
    tokenizer = make_tokenizer(vocab_size, no_speech_token)
    ids = tokenizer.get_vocab()
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=num_bins,
        d_model=d_model,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=ffn_dim,
        decoder_ffn_dim=ffn_dim,
        max_source_positions=1500,
        max_target_positions=max_target_positions,
        init_std=0.15,
        tie_word_embeddings=tie_word_embeddings,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        suppress_tokens=_suppressed(ids, no_speech_token),
        begin_suppress_tokens=[ids["Ġ"], ids["<|endoftext|>"]],
    )
    model = WhisperForConditionalGeneration(config).eval()
    _set_weights(model, ids, seed)
    model.generation_config = _generation_config(ids, config, multilingual)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=num_bins).save_pretrained(path)
    return path


def load_whisper(path: Path) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    """The model in float32 and the processor of a checkpoint."""
    model = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    return model, WhisperProcessor.from_pretrained(path)


def make_tokenizer(
    vocab_size: int = 420, no_speech_token: str = "<|nospeech|>"
) -> WhisperTokenizer:
    """A byte-level BPE tokenizer with the special tokens of Whisper in their order."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(_SENTENCES, trainer)
    model = trained.get_vocab()
    tokenizer = WhisperTokenizer(vocab=model, merges=_merges(trained))
    # English checkpoints have the same special tokens, but use neither languages nor tasks.
    names = [
        "<|startoftranscript|>",
        *(f"<|{language}|>" for language in LANGUAGES),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
        *(no_speech_token, "<|notimestamps|>"),
    ]
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken(name, special=True) for name in names]}
    )
    tokenizer.add_tokens(
        [
            AddedToken(f"<|{0.02 * index:.2f}|>", special=False, normalized=False)
            for index in range(NUM_TIMESTAMPS)
        ]
    )
    tokenizer.set_prefix_tokens()
    return tokenizer


def _merges(trained: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]


def _suppressed(ids: dict[str, int], no_speech_token: str) -> list[int]:
    """Tokens of symbols that are not spoken, and special tokens."""
    names = [
        *('"', "#", "(", ")", "*", "+", "/", ":", ";", "<", "=", ">", "@", "[", "\\", "]", "^"),
        *("_", "`", "{", "|", "}", "~"),
        *("<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>"),
        *("<|startofprev|>", no_speech_token),
    ]
    return sorted(ids[name] for name in names)


def _generation_config(
    ids: dict[str, int], config: WhisperConfig, multilingual: bool
) -> GenerationConfig:
    fields = {
        "begin_suppress_tokens": config.begin_suppress_tokens,
        "suppress_tokens": config.suppress_tokens,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
        "is_multilingual": multilingual,
        "max_initial_timestamp_index": MAX_INITIAL_TIMESTAMP,
        "max_length": config.max_target_positions,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "return_timestamps": False,
    }
    if multilingual:
        fields["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        fields["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return GenerationConfig(**fields)


@torch.no_grad()
def _set_weights(model: WhisperForConditionalGeneration, ids: dict[str, int], seed: int) -> None:
    """Draw all weights, including the biases and norms that transformers sets to 0 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    for name, parameter in model.named_parameters():
        if name == "model.encoder.embed_positions.weight":  # sinusoids, which are not trained
            continue
        if "layer_norm" in name:
            draw(parameter, 0.1, 1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            draw(parameter, 0.1)
        elif "encoder_attn" in name:  # outputs depend on the audio more than on earlier tokens
            draw(parameter, 0.3)
        elif "embed_positions" in name:  # outputs repeat themselves less
            draw(parameter, 1.0)
        else:
            draw(parameter, 0.15)
    # Otherwise three of four tokens would be timestamps or unreadable, and no end would come.
    unreadable = [index for name, index in ids.items() if len(name) == 1 and not name.isascii()]
    end = ids["<|endoftext|>"]
    for weight in {model.model.decoder.embed_tokens.weight, model.proj_out.weight}:
        weight[unreadable] *= 0.5
        weight[end + 1 :] *= 0.3
        weight[end] *= 1.4
