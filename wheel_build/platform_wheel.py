"""The setuptools command for wheels with compiled kernels: it names the platforms that they run on.

The libraries are loaded with ctypes and use torch's stable ABI. So one wheel serves every Python
and is tagged `py3-none-<platform>`; setuptools would tag it for the Python that built it.
"""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel

__all__ = ("PlatformWheel", "platform_tag")

_PREBUILT_DIR = Path(__file__).resolve().parents[1] / "ops" / "native" / "prebuilt"
_OLDEST_GLIBC = 28  # torch's wheels need glibc 2.28
# N of glibc 2.N -> X and Y of the newest GLIBCXX_3.4.X and CXXABI_1.3.Y that every distribution
# with this glibc has (the policies of PEP 600, as in auditwheel's manylinux-policy.json).
_POLICIES = {28: (24, 11), 31: (28, 12), 34: (29, 13), 35: (30, 13), 39: (33, 15)}


class PlatformWheel(bdist_wheel):
    """`bdist_wheel`, which makes a wheel for one platform if compiled kernels are in the tree."""

    def finalize_options(self) -> None:
        self._libraries = sorted(_PREBUILT_DIR.glob("*.so"))
        if self._libraries:
            # Sets `Root-Is-Purelib: false`, so installers put the files where compiled packages go.
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        return (
            ("py3", "none", platform_tag(self._libraries)) if self._libraries else super().get_tag()
        )


def platform_tag(libraries: list[Path]) -> str:
    """The platforms on which these libraries load.

    Returns:
        `manylinux_2_N_<machine>` (PEP 600) with the least N that the versioned symbols allow. If
        the symbols are newer than `_POLICIES`, N is that of this machine's glibc. On other systems
        than Linux with glibc, the platform of this machine.
    """
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    this_glibc = _this_glibc()
    if not platform.startswith("linux_") or this_glibc is None:
        return platform
    glibc, glibcxx, cxxabi = (
        max(_versions(library, prefix) for library in libraries)
        for prefix in ("GLIBC_2.", "GLIBCXX_3.4.", "CXXABI_1.3.")
    )
    fitting = [
        version
        for version, (most_glibcxx, most_cxxabi) in _POLICIES.items()
        if glibcxx <= most_glibcxx and cxxabi <= most_cxxabi
    ]
    if not fitting:  # the compiler is newer than the table, so older systems are left out
        return f"manylinux_{this_glibc}_{platform.removeprefix('linux_')}"
    return (
        f"manylinux_2_{max(_OLDEST_GLIBC, glibc, min(fitting))}_{platform.removeprefix('linux_')}"
    )


def _versions(library: Path, prefix: str) -> int:
    """The greatest N of the symbol versions `<prefix>N` that a library needs; 0 = none."""
    # The version names are in the string table; no other text of a library has this form.
    found = re.findall(re.escape(prefix.encode()) + rb"(\d+)[.\d]*\0", library.read_bytes())
    return max(map(int, found), default=0)


def _this_glibc() -> str | None:
    """The version of glibc as `2_N`; None with another C library.

    musl's headers have the name of the version, but no value for it.
    """
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        return None
    return version.split()[-1].replace(".", "_") if version else None
