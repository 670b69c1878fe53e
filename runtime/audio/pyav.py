"""The optional package PyAV, which contains FFmpeg. This module imports it when it is needed."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from ostinato.runtime.errors import StartupError

__all__ = ("import_av", "require_av")


def require_av() -> None:
    """Check that PyAV is installed. It is not imported.

    Raises:
        StartupError: it is not installed. The message has the remedy.
    """
    if find_spec("av") is None:
        raise StartupError(
            'models that take audio need the package av (PyAV): pip install "ostinato[audio]"'
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
