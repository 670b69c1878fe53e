"""Prompts of Gemma 3 with images have the tokens that its processor in transformers gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from ostinato.runtime.images.prepare_image import prepare_pil
from ostinato.runtime.media.placeholders import expand_placeholders
from ostinato.runtime.media.prompt_media import PreparedMedium
from tests.runtime.images.image_processors import LIMITS, PROCESSORS, picture, read_spec

_TOKENS = {"image_token": "<soft>", "boi_token": "<begin>", "eoi_token": "<end>"}
_NUM_TOKENS = 4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which two to four newlines are one token, as in that of Gemma."""
    texts = ["?", " ", *("\n" * count for count in range(1, 5)), *map(chr, range(33, 127))]
    words = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n{1,4}|."), "isolated")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _TOKENS.values()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=_TOKENS)


@pytest.mark.parametrize(
    "text",
    [
        "<begin>what",
        "user\n<begin>\nwhat\n",
        "user\n\n<begin>what<begin>\n\nand",
        "<begin><begin>",
        "no image",
    ],
)
def test_the_tokens_are_those_of_the_processor(text: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    pictures = [picture(40, 30, seed) for seed in range(text.count("<begin>"))]
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(images, tokenizer, image_seq_length=_NUM_TOKENS)
    expected = processor(images=pictures or None, text=text)["input_ids"][0]

    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _TOKENS.items()}
    config = PROCESSORS["gemma3"].config | {
        "image_token_index": ids["image_token"],
        "boi_token_index": ids["boi_token"],
        "eoi_token_index": ids["eoi_token"],
        "mm_tokens_per_image": _NUM_TOKENS,
    }
    images.save_pretrained(tmp_path)
    spec = read_spec(tmp_path, config, token_text=tokenizer.convert_ids_to_tokens)
    token_ids = tokenizer(spec.text_to_encode(text))["input_ids"]
    media = [PreparedMedium(prepare_pil(one, spec, LIMITS, "image").parts) for one in pictures]
    found, placed = expand_placeholders(token_ids, media, spec, lambda text: [], param="prompt")
    assert found == expected
    assert [one.num_tokens for one in placed] == [_NUM_TOKENS] * len(pictures)
