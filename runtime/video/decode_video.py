"""Decodes chosen frames of a video file.

The bytes come from clients. So only formats are read whose files contain all their data, only
decoders of video are started, and nothing that a header states is trusted: the frames are counted
in the file, and their order and their mean rate come from the times of the packets.

The file is read twice. The first time, nothing is decoded: this finds the number of frames, their
order, and from which frames decoding can begin. The second time, only those parts are decoded that
wanted frames need.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec
from PIL import Image

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.pyav import (
    error_text,
    has_av,
    has_conversion_threads,
    import_av,
    open_media,
)
from ostinato.runtime.video.file_ends import is_cut_short, lacks_seconds
from ostinato.runtime.video.video_sources import MAX_RATE, MAX_SECONDS

__all__ = ("VideoLimits", "VideoReader", "video_refusal")

_FORMAT_NAMES = "mp4, mov, webm, mkv, avi, gif"
# FFmpeg's demuxers. Some names stand for one demuxer. None of them opens another file.
_DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif"
_CODEC_NAMES = "h264, hevc, vp8, vp9, av1, mpeg4, mjpeg, gif"
_DECODERS = (
    *("h264", "hevc", "vp8", "libvpx", "vp9", "libvpx-vp9", "libdav1d", "av1"),
    *("mpeg4", "mjpeg", "gif"),
)
# Those of formats in which a frame says that no other refers to it. They can leave it out.
_SKIPPING_DECODERS = ("h264", "mpeg4")
_MAX_PACKETS = 1 << 20
_MAX_BAD = 0.1  # packets that cannot be decoded, as a part of all that are decoded
_SAME_RATE = 0.02  # how far a stated rate may be from the one that the times give
_TURNS = {  # the signs of the display matrix: a, b, c, d
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}


class VideoLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one video file."""

    max_bytes: int  # of the encoded file
    max_pixels: int  # height * width of a frame


class _Packets(msgspec.Struct):
    """What is known of the packets of a file, in their order."""

    times: list[int | None] = []  # of presentation, in units of the stream
    keys: list[int] = []  # indices of those from which decoding can begin
    shown: list[int] = []  # indices of those whose frames are shown
    last_duration: int = 0  # of the last one, in units of the stream; 0 = unknown


class VideoReader:
    """The frames of a video file, in the order in which they are shown.

    Args:
        data: a file of a format in the error's list, with or without sound, which is skipped.
        limits: a larger file is refused before it is opened, larger frames before they are decoded.
        name: the name of the video in errors.

    Attributes:
        num_frames: frames of the file.
        fps: frames of a second, on average.

    Raises:
        InvalidRequestError: the code is `video_too_large`, `missing_package` if PyAV is not
            installed, or `invalid_video`: the file is empty, of another format, damaged, cut short,
            has no video, or has too many or too large frames.
    """

    def __init__(self, data: bytes, limits: VideoLimits, name: str) -> None:
        self._data = data
        self._limits = limits
        self._name = name
        if not has_av():
            raise InvalidRequestError(
                f"{name}: a video cannot be decoded without the package av (PyAV): "
                'pip install "ostinato[video]"; or send its frames',
                param=name.partition(":")[0],
                code="missing_package",
            )
        if len(data) > limits.max_bytes:
            raise InvalidRequestError(
                f"{name}: the file has more than the {limits.max_bytes} bytes that are allowed "
                "(video.max_mib); send a smaller file, or a part of it",
                param=name.partition(":")[0],
                code="video_too_large",
            )
        if not data:
            raise video_refusal(name, f"the file is empty; send a video ({_FORMAT_NAMES})")
        self._packets = _Packets()
        # Indices of the packets in the order in which their frames are shown. None = it is unknown,
        # because the packets have no times. Then all are decoded, and the frames are counted.
        self._order: list[int] | None = None
        self._scan()
        self.num_frames = len(self._packets.shown)

    def pictures(self, indices: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
        """Decode frames.

        One picture at a time is in memory, besides what the decoder keeps. For a frame that cannot
        be decoded, the next one that can is used, or the last one at the end. Frames that refer to
        a damaged one can have wrong areas.

        Args:
            indices: the wanted frames, each from 0 to `num_frames` - 1.

        Yields:
            Each of these once, in any order: the index, and the frame in mode RGB, turned as the
            file says.

        Raises:
            InvalidRequestError: the code is `invalid_video`.
        """
        wanted = sorted(set(indices))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self.num_frames:
            raise ValueError(f"the frames {wanted} must be from 0 to {self.num_frames - 1}")
        if self._order is not None:
            missing = set(wanted)
            for index, picture in self._decode(wanted, fills=False):
                missing.discard(index)
                yield index, picture
            wanted = sorted(missing)
        if wanted:
            yield from self._decode(wanted, fills=True)

    def _scan(self) -> None:
        """Read all packets."""
        packets = self._packets
        with self._opened() as (container, stream):
            kind = container.format.name
            if is_cut_short(self._data, kind):
                raise self._cut_short()
            # Reading a damaged file of Matroska ends without an error. That of all its streams
            # shows whether it has ended too early.
            has_end = kind.startswith("matroska") and container.duration
            is_vp8 = stream.codec_context.codec.name in ("vp8", "libvpx")
            end = 0.0  # seconds
            for packet in container.demux() if has_end else container.demux(stream):
                if packet.pts is not None and packet.time_base:
                    end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
                if packet.stream is stream and packet.size:
                    self._add(packet, is_vp8=is_vp8)
            if not packets.shown:
                raise video_refusal(self._name, "the file has no frames; send a video")
            if has_end:
                longest = self._longest_interval() * float(stream.time_base or 0)
                if lacks_seconds(container.duration / 1e6, end, longest):
                    raise self._cut_short()
            # Files of avi have no times; FFmpeg sets some in the order of decoding.
            if kind != "avi":
                self._read_order()
            self.fps = self._rate(stream)

    def _add(self, packet: Any, *, is_vp8: bool) -> None:
        """Note a packet of the video."""
        packets = self._packets
        number = len(packets.times)
        if number == _MAX_PACKETS:
            raise video_refusal(
                self._name, f"the video has more than {_MAX_PACKETS} frames; send a part"
            )
        packets.times.append(packet.pts)
        if packet.is_keyframe:
            packets.keys.append(number)
        # A bit of VP8's header says that a frame is for reference only.
        if not packet.is_discard and (not is_vp8 or bytes(packet)[0] >> 4 & 1):
            packets.shown.append(number)
            packets.last_duration = packet.duration or 0

    def _cut_short(self) -> InvalidRequestError:
        return video_refusal(
            self._name, "the file is damaged or cut short; send the whole file again"
        )

    def _longest_interval(self) -> int:
        """The longest time from one frame to the next, in units of the stream."""
        times = sorted(
            time for at in self._packets.shown if (time := self._packets.times[at]) is not None
        )
        return max((after - before for before, after in pairwise(times)), default=0)

    def _read_order(self) -> None:
        """Find the order of the frames, if all have different times."""
        times, shown = self._packets.times, self._packets.shown
        known = {times[number] for number in shown}
        if None not in known and len(known) == len(shown):
            self._order = sorted(shown, key=lambda number: times[number] or 0)

    def _rate(self, stream: Any) -> float:
        """Frames of a second. A rate that the file states is used if the times agree with it."""
        number, order, unit = len(self._packets.shown), self._order, stream.time_base
        stated, measured = float(stream.average_rate or 0), 0.0
        if order is not None and unit:
            first, last = (self._packets.times[order[at]] or 0 for at in (0, -1))
            span = (
                last - first + (self._packets.last_duration or (last - first) / max(1, number - 1))
            )
            measured = number / (span * float(unit)) if span > 0 else 0.0
        rate = stated
        if measured and abs(stated - measured) > _SAME_RATE * measured:
            rate = measured
        if not 0 < rate <= MAX_RATE or number / rate > MAX_SECONDS:
            if number == 1:
                return 1.0
            raise video_refusal(
                self._name,
                f"the file states {number} frames at {rate:g} frames a second; the rate must be "
                f"above 0 and at most {MAX_RATE:g}, and the video at most {MAX_SECONDS:g} s long",
            )
        return rate

    def _needed(self, wanted: Sequence[int], order: Sequence[int]) -> list[bool]:
        """For each packet, whether one of the wanted frames needs it."""
        times, keys = self._packets.times, self._packets.keys
        needed = [False] * len(times)
        for index in wanted:
            last = order[index]
            at = bisect_right(keys, last) - 1
            # A frame can be shown before the key frame that stands before it in the file. Such a
            # frame needs the key frame before that one.
            while at > 0 and (times[keys[at]] or 0) > (times[last] or 0):
                at -= 1
            first = keys[at] if at >= 0 else 0
            number = last
            while number >= first and not needed[number]:
                needed[number] = True
                number -= 1
        return needed

    def _decode(self, wanted: Sequence[int], *, fills: bool) -> Iterator[tuple[int, Image.Image]]:
        """Decode packets, and yield wanted frames.

        Args:
            wanted: indices of frames, in their order.
            fills: decode all packets, and use another frame for one that the decoder does not give.
        """
        places = [index if self._order is None else self._time(index) for index in wanted]
        at, num_frames = 0, 0
        last: Any = None
        for frame in self._frames(None if fills else wanted):
            place = num_frames
            num_frames += 1  # one that is damaged has its place too
            if frame is None:
                continue
            if self._order is not None:
                place = frame.pts
            if place is None:
                continue
            last = frame
            while at < len(wanted) and places[at] <= place:
                if fills or places[at] == place:
                    yield wanted[at], self._picture(frame)
                at += 1
            if at == len(wanted):
                return
        if fills and last is None:
            raise video_refusal(self._name, "no frame can be decoded; the file may be damaged")
        if fills:
            for index in wanted[at:]:
                yield index, self._picture(last)

    def _time(self, index: int) -> int:
        assert self._order is not None, "there are times"
        return self._packets.times[self._order[index]] or 0

    def _frames(self, wanted: Sequence[int] | None) -> Iterator[Any]:
        """The decoded frames, and None for each packet that cannot be decoded.

        Args:
            wanted: packets that no frame with these indices needs are left out; None = no packet
                is left out.
        """
        av = import_av()
        needed, kept = [True] * len(self._packets.times), set[int]()
        if wanted is not None:
            assert self._order is not None, "there are times"
            needed = self._needed(wanted, self._order)
            kept = {self._order[index] for index in wanted}
        num_bad, num_packets = 0, sum(needed)
        with self._opened() as (container, stream):
            decoder = stream.codec_context
            can_skip = wanted is not None and decoder.codec.name in _SKIPPING_DECODERS
            number, has_fed = -1, False
            for packet in container.demux(stream):
                if packet.size:
                    number += 1
                    is_needed = needed[number]
                elif not has_fed:  # the last one is empty
                    continue
                else:
                    is_needed = False
                try:
                    if is_needed:
                        if can_skip:
                            decoder.skip_frame = "DEFAULT" if number in kept else "NONREF"
                        has_fed = True
                        yield from decoder.decode(packet)
                    elif has_fed:
                        # Give the frames that wait for their turn, and begin anew.
                        has_fed = False
                        yield from decoder.decode(None)
                        decoder.flush_buffers()
                except av.error.FFmpegError as error:
                    if isinstance(error, MemoryError):
                        raise
                    num_bad += 1
                    if num_bad > 1 + _MAX_BAD * num_packets:
                        raise video_refusal(
                            self._name,
                            f"at least {num_bad} of {num_packets} frames are damaged "
                            f"({error_text(error)})",
                        ) from error
                    if is_needed:
                        yield None

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The opened file and its video stream. Errors of reading become refusals."""
        av = import_av()
        most = self._limits.max_pixels
        # Decoders count whole blocks of pixels.
        options = {"max_pixels": str(most + most // 8 + (1 << 16))}
        try:
            with open_media(self._data, _DEMUXERS, _DECODERS, options) as container:
                stream = self._stream(container)
                stream.codec_context.thread_count = 1
                stream.codec_context.options = options
                yield container, stream
        except av.error.FFmpegError as error:
            if isinstance(error, MemoryError):  # a damaged file can state any size
                raise video_refusal(
                    self._name,
                    "the file needs more memory than there is; it may be damaged, or send a "
                    "smaller video",
                ) from error
            raise video_refusal(
                self._name,
                f"the file cannot be read as a video ({error_text(error)}); supported formats: "
                f"{_FORMAT_NAMES}; the file may be damaged or cut short",
            ) from error

    def _stream(self, container: Any) -> Any:
        """The first video stream that is not a cover picture."""
        for stream in container.streams.video:
            # PyAV 14.0 does not have it.
            if "attached_pic" in str(getattr(stream, "disposition", "")):
                continue
            context = stream.codec_context
            if context is None or context.codec.name not in _DECODERS:
                codec = "unknown" if context is None else context.codec.name
                raise video_refusal(
                    self._name,
                    f"the video is encoded as {codec}, which is not supported; supported: "
                    f"{_CODEC_NAMES}; convert it to mp4 with h264",
                )
            self._check_size(context.width, context.height)
            return stream
        raise video_refusal(self._name, "the file has no video stream; send a file with pictures")

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self._limits.max_pixels:
            raise video_refusal(
                self._name,
                f"the frames are {width}x{height} pixels, but at most {self._limits.max_pixels} "
                "pixels are allowed (images.max_pixels); send a smaller video",
            )

    def _picture(self, frame: Any) -> Image.Image:
        """A frame as a picture, turned."""
        self._check_size(frame.width, frame.height)
        # A process that prepares requests may start no threads, because its memory is limited.
        threads = {"threads": 1} if has_conversion_threads() else {}
        picture = Image.fromarray(frame.to_ndarray(format="rgb24", **threads))
        turn = _turn(frame)
        return picture if turn is None else picture.transpose(turn)


def video_refusal(name: str, message: str) -> InvalidRequestError:
    """The error for a video; its text is the name and the message."""
    return InvalidRequestError(
        f"{name}: {message}", param=name.partition(":")[0], code="invalid_video"
    )


def _turn(frame: Any) -> Image.Transpose | None:
    """How a frame is turned before it is shown; None = it is not, or by other angles."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return None
    cells = memoryview(bytes(matrix)).cast("i")
    return _TURNS.get((_sign(cells[0]), _sign(cells[1]), _sign(cells[3]), _sign(cells[4])))


def _sign(value: int) -> int:
    """The sign of a number in 16.16 format, 0 if it is nearer to 0 than to 1."""
    return 0 if abs(value) < 1 << 15 else 1 if value > 0 else -1
