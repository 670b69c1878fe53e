"""The optional package PyAV, which contains FFmpeg. This module imports it when it is needed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ostinato.runtime.errors import StartupError

__all__ = (
    "error_text",
    "has_av",
    "has_conversion_threads",
    "import_av",
    "open_media",
    "require_av",
)

_MAX_TEXT = 200  # characters of a text of FFmpeg
_FIRST_WITH_THREADS = 17  # version of PyAV


def has_av() -> bool:
    """Whether PyAV is installed. It is not imported."""
    return find_spec("av") is not None


def require_av() -> None:
    """Check that PyAV is installed. It is not imported.

    Raises:
        StartupError: it is not installed. The message has the remedy.
    """
    if not has_av():
        raise StartupError(
            "audio and videos are decoded with the package av (PyAV), which is not installed: "
            'pip install "ostinato[audio]" or "ostinato[video]"'
        )


def import_av() -> ModuleType:
    """PyAV, with the modules that decoding needs.

    Raises:
        StartupError: see `require_av`.
    """
    require_av()
    import av
    import av.audio.resampler
    import av.error

    return av


def has_conversion_threads() -> bool:
    """Whether this version of PyAV converts the colours of frames with several threads.

    Such a version takes the argument `threads`, which sets their number.
    """
    return int(import_av().__version__.partition(".")[0]) >= _FIRST_WITH_THREADS


def open_media(
    data: bytes,
    demuxers: str,
    decoders: Sequence[str],
    codec_options: Mapping[str, str] | None = None,
) -> Any:
    """Open a file for reading; use the result in a `with` block.

    The bytes come from clients, so nothing besides them is opened: a playlist names other files and
    URLs, which FFmpeg would open.

    Args:
        data: the file.
        demuxers: FFmpeg's names of the formats that are read. Their files must contain all their
            data.
        decoders: FFmpeg's names of the decoders that are started.
        codec_options: FFmpeg's options for those decoders.

    Raises:
        FFmpegError: of PyAV; the file cannot be read. A `MemoryError` is one of these too.
        StartupError: PyAV is not installed.
    """
    return import_av().open(
        io.BytesIO(data),
        "r",
        options=dict(codec_options or {}),
        container_options={
            "format_whitelist": demuxers,
            "codec_whitelist": ",".join(decoders),
            "protocol_whitelist": "none",  # no protocol has this name
        },
        io_open=_refuse_to_open,
        metadata_errors="replace",
    )


def error_text(error: Exception) -> str:
    """What FFmpeg says about a file, as one line."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split())[:_MAX_TEXT] or type(error).__name__


def _refuse_to_open(url: str, *_: Any) -> None:
    """Called by PyAV for each further file that a format wants to open."""
    raise PermissionError(f"files of audio and video must not name other files, got {url!r}")
