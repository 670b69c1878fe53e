"""The image processors of transformers, with the configurations of models that use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers
from numpy.typing import NDArray
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from ostinato.models.vision.image_fields import read_image_spec
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.images.prepare_image import ImageLimits
from ostinato.runtime.types.images import PreparedImages, PromptImage

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20)


class Processor(NamedTuple):
    """A processor, the class that reads its file, and the config.json of a model."""

    kind: type
    make: Callable[[], Any]
    config: dict[str, Any]
    whole: dict[str, Any] = {}  # what processor_config.json has, if there is one

    def save(self, directory: Path) -> Path:
        """Write preprocessor_config.json and processor_config.json."""
        self.make().save_pretrained(directory)
        if self.whole:
            (directory / "processor_config.json").write_text(json.dumps(self.whole))
        return directory


def _llava(tower: str, image_size: int, **other: Any) -> dict[str, Any]:
    vision = {"model_type": tower, "image_size": image_size, "patch_size": 14}
    return transformers.LlavaConfig(vision_config=vision, **other).to_dict()


def _gemma(image_size: int) -> dict[str, Any]:
    vision = {"model_type": "siglip_vision_model", "image_size": image_size, "patch_size": 7}
    return transformers.Gemma3Config(vision_config=vision, mm_tokens_per_image=4).to_dict()


def _qwen(name: str, **vision: Any) -> dict[str, Any]:
    return getattr(transformers, name)(vision_config=vision).to_dict()


def _pixtral(name: str, patch_size: int, **other: Any) -> dict[str, Any]:
    vision = {"model_type": "pixtral", "patch_size": patch_size}
    made = getattr(transformers, name)(vision_config=vision, image_token_index=10, **other)
    return made.to_dict()


def _tiled(name: str, edge: int, merge_key: dict[str, Any], **vision: Any) -> dict[str, Any]:
    tower = {"image_size": edge, "patch_size": 7, **vision}
    return getattr(transformers, name)(vision_config=tower, **merge_key).to_dict()


_QWEN_SIZE = {"shortest_edge": 4 * 784, "longest_edge": 12 * 784}
_TILE = {"height": 28, "width": 28}
PROCESSORS = {
    "internvl": Processor(
        GotOcr2ImageProcessorPil,
        lambda: GotOcr2ImageProcessorPil(size=_TILE, max_patches=5, image_mean=[0.4, 0.5, 0.6]),
        _tiled("InternVLConfig", 28, {"downsample_ratio": 0.5}),
        {"image_seq_length": 4},
    ),
    "internvl-many": Processor(
        GotOcr2ImageProcessorPil,
        lambda: GotOcr2ImageProcessorPil(size=_TILE, min_patches=3, max_patches=12, resample=2),
        _tiled("InternVLConfig", 28, {"downsample_ratio": 1.0}),
        {"image_seq_length": 16},
    ),
    "idefics3": Processor(
        Idefics3ImageProcessorPil,
        lambda: Idefics3ImageProcessorPil(
            size={"longest_edge": 85}, max_image_size={"longest_edge": 28}
        ),
        _tiled("Idefics3Config", 28, {"scale_factor": 2}),
        {"image_seq_len": 4},
    ),
    "idefics3-whole": Processor(
        Idefics3ImageProcessorPil,
        lambda: Idefics3ImageProcessorPil(
            size={"longest_edge": 45}, max_image_size={"longest_edge": 30}, do_image_splitting=False
        ),
        _tiled("Idefics3Config", 30, {"scale_factor": 4}),
        {"image_seq_len": 1},
    ),
    "smolvlm": Processor(
        SmolVLMImageProcessorPil,
        lambda: SmolVLMImageProcessorPil(
            size={"longest_edge": 60}, max_image_size={"longest_edge": 23}, resample=3
        ),
        _tiled("SmolVLMConfig", 28, {"scale_factor": 3}),
        {"image_seq_len": 1},
    ),
    "clip": Processor(
        CLIPImageProcessorPil,
        lambda: CLIPImageProcessorPil(size={"shortest_edge": 42}, crop_size=28),
        _llava("clip_vision_model", 28),
    ),
    "clip-small": Processor(  # the crop is larger than the resized image
        CLIPImageProcessorPil,
        lambda: CLIPImageProcessorPil(size={"shortest_edge": 15}, crop_size=28),
        _llava("clip_vision_model", 28),
    ),
    "clip-not-resized": Processor(
        CLIPImageProcessorPil,
        lambda: CLIPImageProcessorPil(do_resize=False, crop_size=28),
        _llava("clip_vision_model", 28),
    ),
    "llava": Processor(
        LlavaImageProcessorPil,
        lambda: LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size=28, do_pad=True),
        _llava("clip_vision_model", 28),
    ),
    "siglip": Processor(
        SiglipImageProcessorPil,
        lambda: SiglipImageProcessorPil(size={"height": 30, "width": 30}),
        _llava("siglip_vision_model", 30, vision_feature_select_strategy="full"),
    ),
    "gemma3": Processor(
        Gemma3ImageProcessorPil,
        lambda: Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
        _gemma(28),
    ),
    "pixtral": Processor(
        PixtralImageProcessorPil,
        lambda: PixtralImageProcessorPil(size={"longest_edge": 80}),
        _pixtral("LlavaConfig", 16, vision_feature_select_strategy="full"),
    ),
    "mistral3": Processor(
        PixtralImageProcessorPil,
        lambda: PixtralImageProcessorPil(size={"height": 70, "width": 90}, resample=2),
        _pixtral("Mistral3Config", 7),
        {"patch_size": 7, "spatial_merge_size": 2},
    ),
    "qwen2_vl": Processor(
        Qwen2VLImageProcessorPil,
        lambda: Qwen2VLImageProcessorPil(size=_QWEN_SIZE),
        _qwen("Qwen2VLConfig"),
    ),
    "qwen2_5_vl": Processor(
        Qwen2VLImageProcessorPil,
        lambda: Qwen2VLImageProcessorPil(min_pixels=1 * 784, max_pixels=4 * 784, resample=2),
        _qwen("Qwen2_5_VLConfig"),
    ),
    "qwen3_vl": Processor(
        Qwen2VLImageProcessorPil,
        lambda: Qwen2VLImageProcessorPil(patch_size=16, size=_QWEN_SIZE, image_mean=[0.5] * 3),
        _qwen("Qwen3VLConfig"),
    ),
    "qwen3_vl_moe": Processor(
        Qwen2VLImageProcessorPil,
        lambda: Qwen2VLImageProcessorPil(patch_size=16, size=_QWEN_SIZE),
        _qwen("Qwen3VLMoeConfig"),
    ),
    "qwen3_5": Processor(
        Qwen2VLImageProcessorPil,
        lambda: Qwen2VLImageProcessorPil(patch_size=16, size=_QWEN_SIZE, image_std=[0.5] * 3),
        _qwen("Qwen3_5Config"),
    ),
}


TOKEN_IDS = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}


def token_text(token_id: int) -> str:
    return "[IMG]" if token_id == TOKEN_IDS["[IMG]"] else f"<{token_id}>"


def read_spec(directory: Path, config: dict[str, Any], **options: Any) -> ImageSpec:
    settings = {"token_text": token_text, "token_id": TOKEN_IDS.get, **options}
    return read_image_spec(directory, config, **settings)


def reference_colours(processor: Any, image: Image.Image, spec: ImageSpec) -> NDArray[Any]:
    """What transformers makes of an image: [height, width, 3], of tiles [n, height, width, 3]."""
    asks: dict[str, Any] = {}
    if hasattr(processor, "crop_to_patches"):  # the processor of InternVL always passes this
        asks = {"crop_to_patches": True}
    elif spec.sizing is ImageSizing.shrunk:  # PixtralProcessor gives the size of a merged patch
        asks = {"patch_size": spec.unit}
    result = processor(image, return_tensors="np", **asks)
    values = np.asarray(result["pixel_values"])
    if spec.sizing is ImageSizing.tiles:
        return np.moveaxis(values.reshape(-1, *values.shape[-3:]), 1, -1)
    if spec.sizing is not ImageSizing.dynamic:
        return np.moveaxis(values[0], 0, -1)
    (_, rows, columns), patch, merge = result["image_grid_thw"][0], spec.patch_size, spec.merge_size
    values = values.reshape(rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)
    assert np.array_equal(values[..., 0, :, :], values[..., 1, :, :])
    values = values[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    return values.reshape(rows * patch, columns * patch, 3)


def one_part(prepared: PreparedImages) -> PromptImage:
    """An image that is not cut into tiles."""
    (part,) = prepared.parts
    assert not prepared.text
    return part


def pixels_of(prepared: PreparedImages) -> NDArray[np.uint8]:
    """The pixels of a prepared image: [height, width, 3], of tiles [n, height, width, 3]."""
    found = np.stack(
        [np.frombuffer(part.pixels, np.uint8).reshape(part.shape) for part in prepared.parts]
    )
    return found if prepared.text else found[0]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB image with smooth areas and noise."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (3, 3, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height)))
    noise = generator.integers(0, 60, (height, width, 3))
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))
