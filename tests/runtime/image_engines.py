"""Small models that take images, with tokenizer and processor files, and engines that run them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.images.prepare_image import ImageLimits, prepare_image
from ostinato.runtime.media.placeholders import expand_placeholders
from ostinato.runtime.media.prompt_media import PreparedMedium
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.request import Request
from tests.models.vision.image_models import MEAN, STD, hf_logits, reference_model, spec_of
from tests.models.vision.image_variants import IMAGE, VARIANTS, ImageVariant

_ADDED = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_ADDED_OF_PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[PAD]")
_AROUND = ("<img>", "</img>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>")
# transformers takes generated placeholder tokens for further images, so none are generated.
_BANNED = dict.fromkeys(range(IMAGE, IMAGE + len(_ADDED)), -100.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias=_BANNED)
LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20)
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %} {% endfor %}"
)


@dataclass(frozen=True)
class ImageModel:
    """A checkpoint on disk, and the model of transformers with its weights."""

    variant: ImageVariant
    reference: PreTrainedModel
    path: Path


def make_image_model(name: str, directory: Path) -> ImageModel:
    """Save a random model with all files that an engine reads."""
    variant = VARIANTS[name]
    reference = reference_model(variant)
    reference.save_pretrained(directory)
    # The printable characters, which grammars need, then words.
    texts = [*map(chr, range(33, 127)), *(f"w{number}" for number in range(94, IMAGE))]
    words = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()
    added, template = _ADDED, _TEMPLATE
    if variant.is_tiled:
        added = (*_ADDED, *_AROUND)
    elif variant.kind == "Gemma3":
        template = template.replace("<|image_pad|><|vision_end|>", "")
    elif variant.is_pixtral:
        added = _ADDED_OF_PIXTRAL
        template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "[IMG]")
        patches = {"patch_size": variant.patch_size, "spatial_merge_size": variant.merge_size}
        (directory / "processor_config.json").write_text(json.dumps(patches))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template})
    )
    colours = {"image_mean": list(MEAN), "image_std": list(STD)}
    processor = {**_processor_of(variant), **colours}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    if variant.is_tiled:
        spec = spec_of(variant)
        length = (variant.edge // spec.patch_size // spec.merge_size) ** 2
        lengths = {"image_seq_len": length, "image_seq_length": length}
        (directory / "processor_config.json").write_text(json.dumps(lengths))
    return ImageModel(variant, reference, directory)


def _processor_of(variant: ImageVariant) -> dict[str, Any]:
    """The preprocessor_config.json of a model, without the colours."""
    edge = variant.edge
    square = {"height": edge, "width": edge}
    if variant.kind == "Gemma3":
        return {"image_processor_type": "Gemma3ImageProcessor", "size": square}
    if variant.is_pixtral:
        return {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32}}
    if variant.kind == "InternVL":
        return {"image_processor_type": "GotOcr2ImageProcessor", "size": square, "max_patches": 3}
    if variant.is_tiled:
        return {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 2 * edge},
            "max_image_size": {"longest_edge": edge},
        }
    if variant.is_fixed:
        return {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": edge},
            "crop_size": square,
        }
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 128,
        "max_pixels": 1024,
    }


def image_llm(model: ImageModel, *overrides: str) -> LLM:
    """An engine in this process."""
    settings = ("model.dtype=float32", "cache.block_size=8", "cache.memory_gib=0.01")
    shared = ("device.name=cpu", "graphs.bundle=false", "speculation.method=none")
    steps = ("scheduler.max_num_batched_tokens=64", "scheduler.max_num_seqs=8")
    values = {"model.path": str(model.path)}
    return LLM(config=load_config([*settings, *shared, *steps, *overrides], values=values))


def picture(seed: int, width: int = 24, height: int = 16) -> bytes:
    """A PNG file with random pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    out = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(out, "PNG")
    return out.getvalue()


def prompt(llm: LLM, *pieces: list[int] | bytes) -> tuple[list[int], list[PromptImage]]:
    """Token ids and images of a prompt made of texts and PNG files."""
    spec, tokenizer = llm.model.images, llm.tokenizer
    assert spec is not None, "the engine takes images"
    assert tokenizer is not None, "the model has one"
    token_ids: list[int] = []
    media: list[PreparedMedium] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            token_ids.append(spec.placeholder_id)
            image = prepare_image(piece, spec, LIMITS, "image")
            media.append(PreparedMedium(image.parts, text=image.text))
        else:
            token_ids += piece

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return expand_placeholders(token_ids, media, spec, encode, param="prompt")


def run(
    engine: Engine,
    prompts: list[tuple[list[int], list[PromptImage]]],
    sampling: SamplingParams = GREEDY,
) -> list[list[int]]:
    """The tokens of requests that run at once."""
    for index, (token_ids, images) in enumerate(prompts):
        engine.add_request(
            Request(
                request_id=str(index), prompt_token_ids=token_ids, sampling=sampling, images=images
            )
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[int(output.request_id)] += output.new_token_ids
    engine.check_integrity()
    return tokens


def banned() -> list[int]:
    """The tokens that `GREEDY` never generates."""
    return list(_BANNED)


def check_greedy(
    model: ImageModel, token_ids: list[int], images: list[PromptImage], answer: list[int]
) -> None:
    """Compare an answer with the likeliest tokens in transformers, given the same pixels."""
    pixels = [
        torch.frombuffer(bytearray(one.pixels), dtype=torch.uint8).view(one.height, one.width, 3)
        for one in images
    ]
    logits, _ = hf_logits(model.variant, model.reference, token_ids + answer, pixels)
    logits[:, list(_BANNED)] = -torch.inf
    assert logits[len(token_ids) - 1 : -1].argmax(-1).tolist() == answer
