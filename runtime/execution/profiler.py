"""Records the engine's steps with torch's profiler, as a trace for Perfetto."""

from __future__ import annotations

import os
import time

import torch
from torch.profiler import ProfilerActivity, profile

from ostinato.conf.environment import expand_user
from ostinato.conf.errors import first_line
from ostinato.runtime.errors import InvalidRequestError

__all__ = ("Profiler",)


class Profiler:
    """Records the calling thread and the device, from its construction until `stop`.

    Args:
        directory: where the trace is written; created if it does not exist.

    Raises:
        InvalidRequestError: the directory cannot be written.
    """

    def __init__(self, directory: str) -> None:
        folder = expand_user(directory).resolve()
        name = f"engine-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.json.gz"
        self._file = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError(
                f"server.profile_dir={directory} cannot be made: {error.strerror or error}; start "
                "the server with another directory"
            ) from error
        if not os.access(folder, os.W_OK):
            raise InvalidRequestError(
                f"server.profile_dir={directory} cannot be written; start the server with another "
                "directory"
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def stop(self) -> str:
        """End the recording and write it; returns the trace's path. Steps wait meanwhile.

        Raises:
            InvalidRequestError: the trace cannot be written; the recording is lost.
        """
        self._profile.stop()
        try:
            self._profile.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:  # the C++ part of torch raises RuntimeError
            raise InvalidRequestError(
                f"the profile {self._file} cannot be written: {first_line(error)}"
            ) from error
        return str(self._file)
