"""How a model takes the videos in prompts.

A model sees a video as pairs of frames. The vision tower makes the embeddings of each pair from
both frames at once, and as many as of one image of that size. No patch of a pair sees another pair,
so the engine encodes and caches each pair alone, like an image. This module imports no torch.
"""

from __future__ import annotations

import msgspec

__all__ = ("EXTRA_POSITIONS", "FRAMES_OF_PAIR", "VideoSpec")

FRAMES_OF_PAIR = 2
"""Frames from which a tower makes one set of embeddings. The paper calls it temporal patch size."""

EXTRA_POSITIONS = 32_768
"""How many more positions than tokens a prompt can have, because its videos last long."""


class VideoSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes videos. Colours, patches and the filter of resizing are as for images."""

    placeholder_id: int  # the token that stands for one embedding
    placeholder: str  # its text. A chat template writes it once for each video.
    # What to write for a video if the chat template does not show videos.
    marked_placeholder: str
    start_id: int  # the token before the embeddings, and the one after them
    end_id: int
    # Limits of height * width of a resized frame, or of frames * height * width.
    min_pixels: int
    max_pixels: int
    limits_whole: bool = False  # the limits are those of frames * height * width (Qwen3-VL)
    # With `limits_whole`: the largest height * width of a resized frame; 0 = only `max_pixels`.
    max_frame_pixels: int = 0
    fps: float = 2.0  # frames of a second that are used, unless a setting or the request says more
    min_frames: int = 4
    max_frames: int = 768
    # Positions in time of one second of video (Qwen2.5-VL); 0 = pairs have consecutive positions.
    positions_per_second: float = 0.0
    # The prompt states the time of each pair as text before its `marked_placeholder`, and each pair
    # has the positions of an image of its own (Qwen3-VL).
    states_times: bool = False

    def largest(self, num_frames: int) -> int:
        """The limit of height * width, or of frames * height * width, for so many frames."""
        if not self.max_frame_pixels:
            return self.max_pixels
        # Qwen3-VL counts whole pairs, so both numbers must keep a frame within the limit.
        whole = round(num_frames / FRAMES_OF_PAIR) * FRAMES_OF_PAIR
        counted = max(min(num_frames, whole), FRAMES_OF_PAIR)
        return min(self.max_pixels, counted * self.max_frame_pixels)

    @property
    def frame_limits(self) -> tuple[int, int]:
        """The least and the largest height * width of a frame of the shortest video, 2 frames.

        A frame of a longer video is at most as large.
        """
        if not self.limits_whole:
            return self.min_pixels, self.max_pixels
        least = -(-self.min_pixels // FRAMES_OF_PAIR)
        return least, self.largest(FRAMES_OF_PAIR) // FRAMES_OF_PAIR
