"""Video files and specs that the tests of videos share."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
from numpy.typing import NDArray

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.models.vision.video_spec import VideoSpec

Frames = NDArray[np.uint8]
NAME = "messages: video 1"
FPS = 30


@dataclass(frozen=True)
class Encoding:
    """A container and a codec of FFmpeg."""

    container: str
    codec: str
    pixels: str = "yuv420p"
    options: dict[str, str] = field(default_factory=dict)
    gop: int = 10  # frames from one key frame to the next, if the codec lets choose


# Those with B frames have frames in another order than that in which they are shown. HEVC and AV1
# are in `STORED`: the threads of their encoders can wait for each other without end, and x265 writes
# beyond its buffers for small frames.
ENCODINGS = {
    "mp4-h264": Encoding("mp4", "libx264", options={"x264-params": "bframes=3:log-level=none"}),
    "mp4-mpeg4": Encoding("mp4", "mpeg4"),
    "mov-mjpeg": Encoding("mov", "mjpeg", "yuvj420p"),
    "mkv-h264": Encoding(
        "matroska", "libx264", options={"x264-params": "bframes=3:log-level=none"}
    ),
    "webm-vp8": Encoding("webm", "libvpx"),
    "webm-vp9": Encoding("webm", "libvpx-vp9"),
    "avi-mpeg4": Encoding("avi", "mpeg4", options={"bf": "2"}),
    "avi-h264": Encoding("avi", "libx264", options={"x264-params": "bframes=3:log-level=none"}),
    "gif": Encoding("gif", "gif", "rgb8"),
}
NUM_STORED = 47
STORED = {f"mkv-{name}": Path(__file__).parent / "data" / f"{name}.mkv" for name in ("hevc", "av1")}
"""`film(NUM_STORED)`, encoded by x265 and by SVT-AV1, with a key frame every 10 frames."""


def film(num_frames: int, width: int = 64, height: int = 48) -> Frames:
    """[num_frames, height, width, 3]: each frame is brighter than the one before it."""
    ramp = np.linspace(20, 230, num_frames).astype(np.uint8)
    frames = np.empty((num_frames, height, width, 3), np.uint8)
    frames[:] = ramp[:, None, None, None]
    return frames


def noise(num_frames: int, width: int, height: int, seed: int = 0) -> Frames:
    """[num_frames, height, width, 3] of smooth areas and noise."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 200, (num_frames, 1, 1, 3))
    slope = np.linspace(0, 50, width)[None, None, :, None]
    fine = generator.integers(0, 6, (num_frames, height, width, 3))
    return (coarse + slope + fine).astype(np.uint8)


def encode(
    frames: Frames,
    encoding: Encoding | str = "mp4-h264",
    *,
    fps: int | Fraction = FPS,
    times: Sequence[int] | None = None,
    rotation: float | None = None,
    flips: bool = False,
    container_options: dict[str, str] | None = None,
) -> bytes:
    """A file of frames.

    Args:
        frames: [n, height, width, 3].
        encoding: what it is encoded as.
        fps: frames of a second.
        times: of each frame, in units of 1 / `fps` second; None = 0, 1, 2, ...
        rotation: degrees to the left by which the file says to turn frames.
        flips: whether it says to exchange left and right too.
        container_options: of FFmpeg's muxer.
    """
    how = ENCODINGS[encoding] if isinstance(encoding, str) else encoding
    file = io.BytesIO()
    with av.open(file, "w", format=how.container, options=container_options or {}) as opened:
        stream: Any = opened.add_stream(how.codec, rate=fps, options=dict(how.options))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.gop_size = how.pixels, how.gop
        stream.codec_context.thread_count = 1
        if rotation is not None:
            stream.set_display_rotation(rotation, hflip=flips)
        for index, pixels in enumerate(frames):
            frame: Any = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = frame.reformat(format=how.pixels)
            frame.time_base = 1 / Fraction(fps)
            frame.pts = index if times is None else times[index]
            opened.mux(stream.encode(frame))
        opened.mux(stream.encode(None))
    return file.getvalue()


def decoded_by_pyav(data: bytes) -> list[Frames]:
    """All frames of a file, from its first one to its last, as PyAV gives them."""
    with av.open(io.BytesIO(data)) as opened:
        return [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]  # type: ignore[misc]


def video_spec(**fields: Any) -> VideoSpec:
    """The spec of Qwen2-VL, with the tokens 21 to 23."""
    values: dict[str, Any] = {
        "placeholder_id": 21,
        "placeholder": "<|video_pad|>",
        "marked_placeholder": "<|vision_start|><|video_pad|><|vision_end|>",
        "start_id": 22,
        "end_id": 23,
        "min_pixels": 128 * 28 * 28,
        "max_pixels": 768 * 28 * 28,
    }
    return VideoSpec(**{**values, **fields})


def with_times(*times: str) -> str:
    """The text of a video in the prompt of a model that states times."""
    return "".join(f"{time}<|vision_start|><|video_pad|><|vision_end|>" for time in times)


def spec_2(**fields: Any) -> ImageSpec:
    """How Qwen2-VL takes images and videos; `fields` are those of its videos."""
    return _image_spec(14, video_spec(**fields))


def spec_2_5(**fields: Any) -> ImageSpec:
    """How Qwen2.5-VL does."""
    return _image_spec(14, video_spec(**{"positions_per_second": 2.0, **fields}))


def spec_3(**fields: Any) -> ImageSpec:
    """How Qwen3-VL does."""
    values: dict[str, Any] = {
        "min_pixels": 128 * 32 * 32,
        "max_pixels": 768 * 32 * 32,
        "limits_whole": True,
        "states_times": True,
    }
    return _image_spec(16, video_spec(**{**values, **fields}))


def small_spec(spec: ImageSpec | None = None, **fields: Any) -> ImageSpec:
    """A spec with small frames: one embedding for 8 x 8 pixels. None = that of Qwen2-VL."""
    spec = spec or spec_2()
    assert spec.video is not None
    video = msgspec.structs.replace(spec.video, **{"min_pixels": 64, "max_pixels": 4096, **fields})
    return msgspec.structs.replace(spec, patch_size=4, video=video)


def _image_spec(patch_size: int, video: VideoSpec) -> ImageSpec:
    return ImageSpec(
        sizing=ImageSizing.dynamic,
        placeholder_id=20,
        placeholder="<|image_pad|>",
        marked_placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        patch_size=patch_size,
        merge_size=2,
        min_pixels=4 * (2 * patch_size) ** 2,
        max_pixels=100 * (2 * patch_size) ** 2,
        video=video,
    )
