"""Small real tokenizers of the families that models use, built with the `tokenizers` library."""

from __future__ import annotations

from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "Hello world! How are you today? I am fine, thank you.",
    "naïve café — Größe, señor; 你好世界 こんにちは 👩‍👩‍👧 🎉🎉 e\u0301",
    "def f(x):\n    return x  # twice the\t tab\n",
] * 4
SPECIAL = ["<|begin|>", "<|end|>"]


@cache
def byte_level_bpe() -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen: a token may be part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("plain added é")])
    return tokenizer


def _byte_fallback_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    characters = sorted(set("".join(CORPUS[0:2])) - {" "})
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "u"), ("▁", "a"), ("e", "r")]
    tokens += ["▁", *characters, *("".join(pair) for pair in merges)]
    return {token: index for index, token in enumerate(tokens)}, merges


@cache
def byte_fallback_bpe(*, strip: bool = True) -> Tokenizer:
    """Like Llama 2, Mistral (strip) or Gemma (no strip): unknown characters fall back to bytes."""
    vocabulary, merges = _byte_fallback_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        if strip
        else [normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@cache
def metaspace_unigram() -> Tokenizer:
    """Like T5: the decoder drops the mark of the first word, so no token has fixed bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def wordpiece() -> Tokenizer:
    """Like BERT: spaces come from the decoder."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
