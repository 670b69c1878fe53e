"""`read_video_spec`: each key of a file has an effect, is refused by name, or is known to have none.

The video processors of transformers need torchvision, so their defaults are read from their source.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import image_utils

from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import VideoSpec
from tests.models.config_json.test_every_key import mutations
from tests.runtime.images.image_processors import PROCESSORS, read_spec

QWEN2, QWEN2_5, QWEN3 = (PROCESSORS[name] for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"))
FILE = "video_preprocessor_config.json"
CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
GREY_COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# What transformers 5.24 writes for Qwen2-VL, and the authors' file of Qwen3-VL with all its keys.
SAVED: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "crop_size": None, "data_format": "channels_first", "default_to_square": True,
        "device": None, "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True,
        "do_pad": None, "do_rescale": True, "do_resize": True, "do_sample_frames": False,
        "fps": 2, "max_frames": 768, "max_pixels": 602112, "max_video_tokens": 128000,
        "merge_size": 2, "min_frames": 4, "min_pixels": 100352, "num_frames": None,
        "patch_size": 14, "processor_class": "Qwen2VLProcessor", "resample": 3,
        "rescale_factor": 0.00392156862745098, "return_metadata": False,
        "size": {"longest_edge": 602112, "shortest_edge": 100352}, "size_divisor": None,
        "temporal_patch_size": 2, "video_metadata": None,
        "video_processor_type": "Qwen2VLVideoProcessor", **CLIP_COLOURS,
    },
    "qwen3_vl": {
        "data_format": "channels_first", "default_to_square": True, "do_convert_rgb": True,
        "do_normalize": True, "do_rescale": True, "do_resize": True, "do_sample_frames": True,
        "fps": 2, "max_frames": 768, "max_video_tokens": 768, "merge_size": 2, "min_frames": 4,
        "patch_size": 16, "processor_class": "Qwen3VLProcessor", "resample": 3,
        "rescale_factor": 0.00392156862745098, "return_metadata": False,
        "size": {"longest_edge": 25165824, "shortest_edge": 4096}, "temporal_patch_size": 2,
        "video_processor_type": "Qwen3VLVideoProcessor", **GREY_COLOURS,
    },
}  # fmt: skip
# Keys that change no frame of a video in transformers either, and those of sampling (docs/video.md).
NEUTRAL = {
    "crop_size", "data_format", "default_to_square", "device", "do_center_crop", "do_convert_rgb",
    "do_pad", "do_sample_frames", "max_video_tokens", "processor_class", "return_metadata",
    "video_metadata",
}  # fmt: skip


NO_LIMIT = 10**9  # of `video.max_resized_pixels`


def image_file(directory: Path, name: str) -> None:
    """The image processor's file of a model, with the colours of its video processor."""
    colours = GREY_COLOURS if name == "qwen3_vl" else CLIP_COLOURS
    fields = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16 if name == "qwen3_vl" else 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 3136, "longest_edge": 1 << 20},
        **colours,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))


def read(
    directory: Path, name: str, fields: dict[str, Any] | None = None, **options: Any
) -> VideoSpec:
    """The spec of a model with this file for videos; without `fields`, it has none."""
    image_file(directory, name)
    path = directory / FILE
    path.unlink(missing_ok=True)
    if fields is not None:
        path.write_text(json.dumps(fields))
    found = read_spec(directory, PROCESSORS[name].config, **options).video
    assert found is not None
    return found


def class_attributes(name: str) -> dict[str, Any]:
    """The attributes of a video processor's class that its source states as plain values."""
    folder = Path(transformers.__file__).parent / "models" / name
    module = ast.parse((folder / f"video_processing_{name}.py").read_text())
    (body,) = (
        node.body
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("VideoProcessor")
    )
    found: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                value = eval(ast.unparse(node.value), {"__builtins__": {}})
            except NameError:  # a constant of another module, checked by name
                value = ast.unparse(node.value)
            found[node.targets[0].id] = value
    return found


@pytest.mark.parametrize("name", SAVED)
def test_missing_keys_have_the_defaults_of_the_class(name: str, tmp_path: Path):
    stated = class_attributes(name)
    image_file(tmp_path, name)
    (tmp_path / FILE).write_text("{}")
    spec = read_spec(tmp_path, PROCESSORS[name].config)
    video = spec.video
    assert video is not None
    for found, key in ((spec.mean, "image_mean"), (spec.std, "image_std")):
        assert list(found) == list(getattr(image_utils, stated[key]))
    assert (video.min_pixels, video.max_pixels) == tuple(stated["size"].values())
    assert (video.min_frames, video.max_frames) == (stated["min_frames"], stated["max_frames"])
    assert video.fps == stated.get("fps", 2)
    assert (stated["patch_size"], stated["merge_size"]) == (spec.patch_size, spec.merge_size)
    assert stated["temporal_patch_size"] == 2
    assert stated["resample"] == "PILImageResampling.BICUBIC"
    assert spec.resample == 3


@pytest.mark.parametrize("name", SAVED)
def test_no_key_is_ignored(name: str, tmp_path: Path):
    whole = read(tmp_path, name, SAVED[name], max_frame_pixels=NO_LIMIT)
    ignored = set[str]()
    for key, changed in mutations(SAVED[name]):
        outer, _, inner = key.partition(".")
        try:
            if read(tmp_path, name, changed, max_frame_pixels=NO_LIMIT) == whole:
                ignored.add(outer)
        except ValueError as error:
            text = str(error)
            if not (outer in text or inner in text) or "video.max_per_request=0" not in text:
                raise
    assert ignored - NEUTRAL == ({"size"} if name == "qwen2_vl" else set())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fps", 0), ("fps", "2"), ("min_frames", None), ("max_frames", 0), ("num_frames", 16),
        ("cap_pixels_per_frame", True), ("cap_pixels_per_frame", 1), ("do_resize", False),
        ("temporal_patch_size", 1), ("merge_size", 1), ("patch_size", 8), ("resample", 2),
        ("do_rescale", False), ("do_normalize", False), ("image_std", [1, 0, 1]),
        ("image_mean", [0.1, 0.2, 0.3]), ("size", {"height": 28, "width": 28}), ("tiles", 4),
        ("size", {"shortest_edge": 7840, "longest_edge": 784}),
        ("video_processor_type", "LlavaNextVideoProcessor"),
        ("video_processor_type", "Qwen2VLVideoProcessorFast"),
    ],
)  # fmt: skip
def test_unsupported_values_are_refused(key: str, value: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"{FILE}: .*{key}.*; or set video.max_per_request=0"):
        read(tmp_path, "qwen3_vl", {**SAVED["qwen3_vl"], key: value})


def test_code_of_the_checkpoint_is_refused_unless_the_class_is_known(tmp_path: Path):
    code = {"auto_map": {"AutoVideoProcessor": "code.Processor"}}
    assert read(tmp_path, "qwen3_vl", SAVED["qwen3_vl"] | code).limits_whole
    with pytest.raises(ValueError, match="auto_map"):
        read(tmp_path, "qwen3_vl", GREY_COLOURS | code)


def test_the_areas_of_qwen2_vl(tmp_path: Path):
    """`min_pixels` and `max_pixels` replace `size` there, and have no effect for Qwen3-VL."""
    areas = {"min_pixels": 4000, "max_pixels": 50_000}
    spec = read(tmp_path, "qwen2_vl", areas)
    assert (spec.min_pixels, spec.max_pixels, spec.limits_whole) == (4000, 50_000, False)
    spec = read(tmp_path, "qwen3_vl", areas)
    assert (spec.min_pixels, spec.max_pixels) == (128 * 32 * 32, 768 * 32 * 32)
    assert spec.limits_whole


def test_where_the_fields_stand(tmp_path: Path):
    """The key in the combined file, then the file for videos, then that for images."""
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    alone = read(tmp_path, "qwen3_vl")
    assert (alone.min_pixels, alone.max_pixels) == (3136, 1 << 20)
    assert read(tmp_path, "qwen3_vl", {"fps": 3}).fps == 3.0
    combined = {
        "image_processor": {"patch_size": 16, **GREY_COLOURS},
        "video_processor": {"fps": 4},
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(combined))
    assert read(tmp_path, "qwen3_vl", {"fps": 3}).fps == 4.0
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / FILE).unlink()
    combined["video_processor"] = [1]
    (tmp_path / "processor_config.json").write_text(json.dumps(combined))
    with pytest.raises(ValueError, match=r"processor_config.json: video_processor must be"):
        read_spec(tmp_path, QWEN3.config)
    del combined["video_processor"]
    (tmp_path / "processor_config.json").write_text(json.dumps(combined))
    spec = read_spec(tmp_path, QWEN3.config)
    assert spec.video is not None
    assert (spec.video.max_pixels, spec.video.limits_whole) == (768 * 32 * 32, True)


def test_the_class_follows_from_the_image_processors_class(tmp_path: Path):
    """transformers replaces a part of its name, and takes the model's class if there is none."""
    for name, is_whole in (("Qwen2VLImageProcessor", False), ("Qwen2VLImageProcessorFast", True)):
        image_file(tmp_path, "qwen3_vl")
        path = tmp_path / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"image_processor_type": name}))
        spec = read_spec(tmp_path, QWEN3.config).video
        assert spec is not None
        assert spec.limits_whole == is_whole


def test_the_tokens_of_videos(tmp_path: Path):
    spec = read(tmp_path, "qwen2_vl")
    assert (spec.placeholder_id, spec.start_id, spec.end_id) == (151656, 151652, 151653)
    assert (spec.placeholder, spec.marked_placeholder) == ("<151656>", "<151652><151656><151653>")
    config = QWEN2.config | {"video_token_id": 5, "vision_start_token_id": 6}
    other = read_spec(tmp_path, config).video
    assert other is not None
    assert other.marked_placeholder == "<6><5><151653>"
    for value, message in (
        (-1, "video_token_id=-1"),
        (151655, "video_token_id=151655 must differ"),
    ):
        with pytest.raises(ValueError, match=message):
            read_spec(tmp_path, QWEN2.config | {"video_token_id": value})


def test_positions_in_time(tmp_path: Path):
    def spec_of(name: str, **vision: Any) -> VideoSpec:
        image_file(tmp_path, name)
        config = PROCESSORS[name].config
        spec = read_spec(
            tmp_path, config | {"vision_config": config["vision_config"] | vision}
        ).video
        assert spec is not None
        return spec

    default = QWEN2_5.config["vision_config"]["tokens_per_second"]  # as transformers writes it
    found = {name: spec_of(name) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}
    assert {name: one.positions_per_second for name, one in found.items()} == {
        "qwen2_vl": 0.0,
        "qwen2_5_vl": default,
        "qwen3_vl": 0.0,
    }
    assert [name for name, one in found.items() if one.states_times] == ["qwen3_vl"]
    assert spec_of("qwen2_5_vl", tokens_per_second=25).positions_per_second == 25
    for value in (0, "4", True):
        with pytest.raises(ValueError, match=r"vision_config\.tokens_per_second="):
            spec_of("qwen2_5_vl", tokens_per_second=value)
    without = {k: v for k, v in QWEN2_5.config["vision_config"].items() if "per_second" not in k}
    image_file(tmp_path, "qwen2_5_vl")
    spec = read_spec(tmp_path, QWEN2_5.config | {"vision_config": without}).video
    assert spec is not None
    assert spec.positions_per_second == default


def test_models_with_one_image_size_take_no_videos(tmp_path: Path):
    clip = PROCESSORS["clip"]
    (tmp_path / FILE).write_text("not JSON")
    assert read_spec(clip.save(tmp_path), clip.config).video is None


def test_without_videos_their_file_is_not_read(tmp_path: Path):
    image_file(tmp_path, "qwen2_vl")
    (tmp_path / FILE).write_text("not JSON")
    assert read_spec(tmp_path, QWEN2.config, takes_videos=False).video is None
    with pytest.raises(ValueError, match=rf"{FILE} is not valid JSON.*video.max_per_request=0"):
        read_spec(tmp_path, QWEN2.config)


def spec_with(directory: Path, name: str, **options: Any) -> ImageSpec:
    read(directory, name, SAVED[name])
    return read_spec(directory, PROCESSORS[name].config, **options)


def test_resized_pixels_are_lowered_only(tmp_path: Path):
    as_stated = spec_with(tmp_path, "qwen2_vl")
    assert as_stated.max_pair_tokens == 768
    assert spec_with(tmp_path, "qwen2_vl", max_frame_pixels=10**9) == as_stated
    lowered = spec_with(tmp_path, "qwen2_vl", max_frame_pixels=200_704)
    assert lowered.video is not None
    assert (lowered.video.min_pixels, lowered.video.largest(9)) == (100_352, 200_704)
    assert lowered.max_pixels == as_stated.max_pixels
    assert lowered.max_pair_tokens < as_stated.max_pair_tokens
    with pytest.raises(ValueError, match=r"video.max_resized_pixels=9 must be at least 100352"):
        spec_with(tmp_path, "qwen2_vl", max_frame_pixels=9)


@pytest.mark.parametrize("name", SAVED)
def test_without_a_setting_a_pair_has_at_most_768_embeddings(name: str, tmp_path: Path):
    """Old checkpoints have the limits of images only, up to 16,384 embeddings."""
    image_file(tmp_path, name)
    path = tmp_path / "preprocessor_config.json"
    fields = json.loads(path.read_text())
    for shortest in (3136, 4000 * 28**2):
        edges = {"shortest_edge": shortest, "longest_edge": 16384 * 28**2}
        path.write_text(json.dumps(fields | {"size": edges}))
        spec = read_spec(tmp_path, PROCESSORS[name].config)
        assert spec.video is not None
        least, most = spec.video.frame_limits
        assert least == (shortest // 2 if spec.video.limits_whole else shortest)
        assert most == max(least, 768 * spec.unit**2)


def test_resized_pixels_of_whole_videos(tmp_path: Path):
    as_stated = spec_with(tmp_path, "qwen3_vl", max_frame_pixels=NO_LIMIT)
    assert as_stated.video is not None
    assert as_stated.max_pair_tokens == 25165824 // 2 // 32**2
    assert as_stated.video.largest(100) == 25165824
    lowered = spec_with(tmp_path, "qwen3_vl", max_frame_pixels=65_536)
    assert lowered.video is not None
    assert [lowered.video.largest(n) // 65_536 for n in (1, 2, 3, 4, 5, 6)] == [2, 2, 3, 4, 4, 6]
    assert lowered.video.largest(10**6) == 25165824
    # A narrow frame has at least one embedding in its shorter edge.
    assert 65_536 // 32**2 <= lowered.max_pair_tokens <= 120
    with pytest.raises(ValueError, match=r"video.max_resized_pixels=2047 must be at least 2048"):
        spec_with(tmp_path, "qwen3_vl", max_frame_pixels=2047)
