"""How byte-level BPE splits a text into words before pairs are merged, by the names in GGUF files.

The expressions are those of the models' own tokenizer.json files. The names, and which names mean
the same, are llama.cpp's (src/llama-vocab.cpp). This module imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("PRE_TOKENIZERS", "PreTokenizer")

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_NO_ENDINGS = _QWEN2.partition("|[^")[2]
_MARKS = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CHINESE_JAPANESE = "[一-龥぀-ゟ゠-ヿ]+"
_CHINESE_KOREAN = "[一-龥ࠀ-一가-퟿]+"
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_SPACES = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LONG_SPACES = "|".join(rf"\s{{{1 << n}}}(?!\S)" for n in range(9, 1, -1))
_SENTENCE_MARKS = " ?[^(\\s|.,!?…。，、।۔،)]+"
_CASED_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}"
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}"
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}"
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}"
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}"
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}"
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}"
    r"\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}"
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}"
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}"
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}"
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}"
)


class PreTokenizer(NamedTuple):
    """How a text is split into words."""

    expressions: tuple[str, ...] = ()  # applied one after the other
    then_gpt2: bool = False  # GPT-2's own expression after them
    ignore_merges: bool = False  # a word that is a token is not taken apart
    add_bos: bool = False  # whether a text begins with the BOS token, if the file does not say it
    nfc: bool = False  # characters are composed first


_GPT2 = PreTokenizer(then_gpt2=True)
_DIGITS = PreTokenizer((r"\p{N}",), then_gpt2=True)
_LLAMA3 = PreTokenizer((_WORDS,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,))
_GPT4O = PreTokenizer((_CASED % (_ENDINGS, _ENDINGS, r"\p{N}{1,3}"),))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _CHINESE_JAPANESE, _PUNCTUATED + _SPACES))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_WORDS,))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_WORDS,), ignore_merges=True)),
    "jais-2": PreTokenizer(
        (_WORDS.replace(r"\s+(?!\S)|\s+", _LONG_SPACES + r"|\s{1,2}(?!\S)|\s"),)
    ),
    "qwen2": _QWEN._replace(nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "kormo"), _QWEN),
    **dict.fromkeys(("grok-2", "solar-open"), _QWEN),
    "qwen35": PreTokenizer((_MARKS,)),
    "seed-coder": PreTokenizer((_QWEN2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "ufakzeka": PreTokenizer(("[^" + _NO_ENDINGS,)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), ignore_merges=True
    ),
    "exaone-moe": PreTokenizer(
        (
            _QWEN2.replace(r"?\p{L}+", r"?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
            .replace(r"]+[\r\n]*", r"]+[\r\n/]?")
            .replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
        )
    ),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
                r"|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "trillion", "jais"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _DIGITS),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.expressions)),
    ),
    "tekken": PreTokenizer((_CASED % ("", "", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "youtu": PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CHINESE_JAPANESE,
            _CASED % (_ENDINGS, _ENDINGS, r"\p{N}"),
        ),
        ignore_merges=True,
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK3),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _CHINESE_JAPANESE,
            _PUNCTUATED + r"|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_KOREAN, r"\p{N}")
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _CHINESE_KOREAN,
            r"\p{N}+",
        )
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2_WORDS, "[0-9]{3}")),
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", "[0-9]{3}")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
        ),
        then_gpt2=True,
        add_bos=True,
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_SENTENCE_MARKS,))),
    "viking": PreTokenizer((_SENTENCE_MARKS, r"\p{N}")),
}
"""tokenizer.ggml.pre -> the pre-tokenizer."""
