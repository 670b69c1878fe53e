"""Engines of `image_engines` with videos in prompts, against transformers on the same frames."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from ostinato import LLM
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.images.grid_positions import grid_positions
from ostinato.runtime.images.prepare_image import prepare_image
from ostinato.runtime.types.images import PromptImage, image_digest
from tests.models.vision.image_models import MEAN, STD, hf_inputs
from tests.models.vision.video_models import VIDEO, hf_video_inputs
from tests.runtime.image_engines import LIMITS, ImageModel, banned, make_image_model

_EDGE = 4  # pixels of a patch's edge


class Clip(NamedTuple):
    """A video: frames [pairs, 2, height, width, 3] uint8, and seconds between its pairs."""

    frames: np.ndarray
    pair_seconds: float = 1.0


def clip(
    seed: int, num_pairs: int, width: int = 24, height: int = 16, *, pair_seconds: float = 1.0
) -> Clip:
    """A video with random pixels."""
    generator = np.random.default_rng(seed)
    frames = generator.integers(0, 256, (num_pairs, 2, height, width, 3), np.uint8)
    return Clip(frames, pair_seconds)


def make_video_model(name: str, directory: Path) -> ImageModel:
    """As `make_image_model`, with the file of the family's video processor."""
    model = make_image_model(name, directory)
    is_qwen3 = name.startswith("qwen3")
    fields = {
        "video_processor_type": f"Qwen{3 if is_qwen3 else 2}VLVideoProcessor",
        "patch_size": _EDGE,
        "merge_size": 2,
        "size": {"shortest_edge": 128, "longest_edge": 16384 if is_qwen3 else 1024},
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
    (directory / "video_preprocessor_config.json").write_text(json.dumps(fields))
    return model


def video_prompt(
    llm: LLM, *pieces: list[int] | bytes | Clip
) -> tuple[list[int], list[PromptImage]]:
    """Token ids and images of a prompt made of texts, PNG files and videos.

    The text of a time, which Qwen3-VL has before each pair, is one token.
    """
    spec = llm.model.images
    assert spec is not None, "the engine takes images"
    token_ids: list[int] = []
    images: list[PromptImage] = []
    for piece in pieces:
        if isinstance(piece, list):
            token_ids += piece
        elif isinstance(piece, bytes):
            (image,) = prepare_image(piece, spec, LIMITS, "image").parts
            images.append(msgspec.structs.replace(image, begin=len(token_ids)))
            token_ids += [spec.placeholder_id] * image.num_tokens
        else:
            _add_clip(piece, spec, token_ids, images)
    return token_ids, images


def _add_clip(one: Clip, spec: ImageSpec, token_ids: list[int], images: list[PromptImage]) -> None:
    video = spec.video
    assert video is not None, "the engine takes videos"
    if not video.states_times:
        token_ids.append(video.start_id)
    interval = np.float32(video.positions_per_second or 1.0)
    if video.positions_per_second:
        interval *= np.float32(one.pair_seconds)
    for number, frames in enumerate(one.frames):
        if video.states_times:
            token_ids += [10 + number, video.start_id]
        images.append(
            pair_of(
                frames,
                begin=len(token_ids),
                unit=spec.unit,
                time_offset=0 if video.states_times else math.floor(np.float32(number) * interval),
                is_continued=number > 0 and not video.states_times,
            )
        )
        token_ids += [video.placeholder_id] * images[-1].num_tokens
        if video.states_times:
            token_ids.append(video.end_id)
    if not video.states_times:
        token_ids.append(video.end_id)


def pair_of(frames: np.ndarray, *, begin: int, unit: int, **fields: Any) -> PromptImage:
    """A pair of frames [2, height, width, 3] uint8 in a prompt."""
    _, height, width, _ = frames.shape
    pixels = frames.tobytes()
    return PromptImage(
        digest=image_digest(height, width, pixels),
        begin=begin,
        num_tokens=height * width // unit**2,
        height=height,
        width=width,
        pixels=pixels,
        num_frames=2,
        **fields,
    )


@torch.no_grad()
def check_answer(
    model: ImageModel,
    spec: ImageSpec,
    token_ids: list[int],
    images: Sequence[PromptImage],
    answer: list[int],
    *,
    own_positions: bool = True,
    pair_seconds: float = 1.0,
) -> None:
    """Compare an answer with the likeliest tokens in transformers, given the same frames.

    Args:
        model: the model.
        spec: how it takes images and videos.
        token_ids: the prompt.
        images: its images and pairs, with their pixels.
        answer: what the engine answered.
        own_positions: transformers uses the positions of `grid_positions`, not its own.
        pair_seconds: of all videos; only for the positions of transformers.
    """
    whole = token_ids + answer
    given: dict[str, Any] = {"input_ids": torch.tensor([whole])}
    pictures = [one for one in images if one.num_frames == 1]
    videos: list[list[torch.Tensor]] = []
    for one in images:
        if one.num_frames == 2:
            # Pairs of Qwen3-VL stand for themselves here: transformers divides videos into them.
            videos += [] if one.is_continued else [[]]
            videos[-1].append(_tensor(one))
    if pictures:
        given |= hf_inputs(model.variant, [_tensor(one) for one in pictures])
    if videos:
        given |= hf_video_inputs([torch.stack(pairs) for pairs in videos], _EDGE)
    if own_positions:
        places, _ = grid_positions(len(whole), images, spec)
        given["position_ids"] = torch.from_numpy(places.T.copy())[:, None]
    else:
        ids = given["input_ids"]
        kinds = (ids == spec.placeholder_id).int() + 2 * (ids == VIDEO).int()
        given["mm_token_type_ids"] = kinds
        if model.variant.kind == "Qwen2_5_VL" and videos:
            given["second_per_grid_ts"] = torch.tensor([pair_seconds] * len(videos))
    model.reference.model.rope_deltas = None  # pyright: ignore[reportAttributeAccessIssue]
    logits = model.reference(**given).logits[0]
    logits[:, banned()] = -torch.inf
    assert logits[len(token_ids) - 1 : -1].argmax(-1).tolist() == answer


def _tensor(one: PromptImage) -> torch.Tensor:
    return torch.frombuffer(bytearray(one.pixels), dtype=torch.uint8).view(one.shape)
