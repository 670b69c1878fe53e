"""`process_age_s`: how long ago this process was started, for the times of a start."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ("process_age_s",)


def process_age_s() -> float:
    """Seconds since the system started this process; 0 if the system does not report it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, counted from the boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
