"""Files of audio, made with PyAV."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
from numpy.typing import NDArray

from ostinato.models.audio.audio_spec import AudioSpec

RATE = 16_000  # of all specs


class Encoding(NamedTuple):
    """How a file is written, and how exactly it gives the samples back."""

    container: str
    codec: str
    tolerance: float  # root of the mean square of the error; full scale is 1
    delay_s: float = 0.0  # that the file does not state; tests round it to whole samples

    @property
    def states_length(self) -> bool:
        """Whether a file without its end is found to be cut short."""
        return self.container not in ("mp3", "mp2", "ogg", "adts")


ENCODINGS = {
    "wav-u8": Encoding("wav", "pcm_u8", 4e-3),
    "wav-s16": Encoding("wav", "pcm_s16le", 1e-4),
    "wav-s24": Encoding("wav", "pcm_s24le", 1e-4),
    "wav-s32": Encoding("wav", "pcm_s32le", 1e-4),
    "wav-f32": Encoding("wav", "pcm_f32le", 1e-4),
    "wav-f64": Encoding("wav", "pcm_f64le", 1e-4),
    "wav-alaw": Encoding("wav", "pcm_alaw", 2e-2),
    "flac": Encoding("flac", "flac", 1e-4),
    "mp3": Encoding("mp3", "libmp3lame", 2e-2),
    "mp2": Encoding("mp2", "mp2", 3e-2, delay_s=481 / 44_100),
    "opus": Encoding("ogg", "libopus", 2e-2),
    "m4a": Encoding("ipod", "aac", 1e-2),
    "m4a-alac": Encoding("ipod", "alac", 1e-4),
    "mp4": Encoding("mp4", "aac", 1e-2),
    "aac": Encoding("adts", "aac", 3e-2, delay_s=1024 / 44_100),
    "webm": Encoding("webm", "libopus", 2e-2),
    "mkv-flac": Encoding("matroska", "flac", 1e-4),
}


def audio_spec(**changes: Any) -> AudioSpec:
    """The spec of Whisper's multilingual checkpoints, without languages."""
    fields: dict[str, Any] = {
        "sampling_rate": RATE, "num_bins": 80, "fft_size": 400, "hop_size": 160, "window_s": 30,
        "start_id": 50258, "end_id": 50257, "no_timestamps_id": 50363, "first_timestamp_id": 50364,
    }  # fmt: skip
    return AudioSpec(**(fields | changes))


def tone(seconds: float, rate: int = RATE, hertz: float = 440.0) -> NDArray[np.float32]:
    """[n] float32: a tone that becomes louder and softer again twice a second."""
    time = np.arange(round(seconds * rate)) / rate
    loudness = 0.3 + 0.2 * np.sin(4 * np.pi * time)
    return (loudness * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def encode(
    samples: NDArray[np.float32],
    rate: int,
    container: str = "wav",
    codec: str = "pcm_s16le",
    *,
    options: dict[str, str] | None = None,
) -> bytes:
    """A file of samples [n] or [n, channels]. Opus is written at 48 kHz, because it has no 44.1."""
    layout = "mono" if samples.ndim == 1 else {2: "stereo", 6: "5.1"}[samples.shape[1]]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as opened:
        file_rate = 48_000 if codec == "libopus" else rate
        stream: Any = opened.add_stream(codec, rate=file_rate, layout=layout, options=options or {})
        if not len(samples):
            opened.start_encoding()
            opened.close()
            return file.getvalue()
        frame: Any = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples).reshape(1, -1), format="flt", layout=layout
        )
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        resampler = av.AudioResampler(
            format=stream.codec_context.format,
            layout=layout,
            rate=file_rate,
            frame_size=stream.codec_context.frame_size or 0,
        )
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            opened.mux(stream.encode(part))
        opened.mux(stream.encode(None))
    return file.getvalue()


def video_with_sound(samples: NDArray[np.float32] | None, rate: int = 44_100) -> bytes:
    """An mp4 file of a video and perhaps a track of sound after it."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as opened:
        video: Any = opened.add_stream("mpeg4", rate=10)
        video.width = video.height = 32
        video.pix_fmt = "yuv420p"
        sound: Any = None
        if samples is not None:
            sound = opened.add_stream("aac", rate=rate, layout="mono")
        for index in range(10):
            picture: Any = av.VideoFrame.from_ndarray(
                np.full((32, 32, 3), index * 20, np.uint8), format="rgb24"
            )
            opened.mux(video.encode(picture))
        opened.mux(video.encode(None))
        if samples is not None:
            frame: Any = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
            resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate, frame_size=1024)
            for part in [*resampler.resample(frame), *resampler.resample(None)]:
                opened.mux(sound.encode(part))
            opened.mux(sound.encode(None))
    return file.getvalue()
