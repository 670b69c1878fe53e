"""Finds out from the structure of a video file whether its end is missing."""

from __future__ import annotations

__all__ = ("is_cut_short", "lacks_seconds")

_UNKNOWN_SIZE = 0x7FFF_0000  # programs that write to a pipe state this size, a larger one, or 0
_MAX_BOXES = 100_000
# Boxes of mp4 that have the frames, or say where they are.
_NEEDED_BOXES = (b"moov", b"moof", b"mdat")
_SEGMENT = b"\x18\x53\x80\x67"  # the element of Matroska that has everything besides the header
_HEADER_BYTES = 1024  # in which this element begins
_ROUNDED_S = 0.1  # by which a length that a header states may be wrong
_ROUNDED_PART = 0.02


def is_cut_short(data: bytes, format_name: str) -> bool:
    """Whether a file is shorter than its structure says.

    A damaged GIF file mostly counts as such a file.

    Args:
        data: the file.
        format_name: FFmpeg's name of the format. For one that is not known here, the result is
            False.
    """
    if format_name.startswith("mov"):
        return _lacks_boxes(data)
    if format_name.startswith("matroska"):
        return _lacks_segment(data)
    if format_name == "avi":
        size = int.from_bytes(data[4:8], "little")
        return size < _UNKNOWN_SIZE and 8 + size > len(data)
    return format_name == "gif" and _lacks_trailer(data)


def lacks_seconds(stated: float, end: float, longest_interval: float) -> bool:
    """Whether a file ends too early.

    Args:
        stated: the length that the header states, in seconds.
        end: the end of the last packet of all streams, in seconds.
        longest_interval: from one frame to the next, in seconds. Packets often do not state how
            long the last frame is shown. It may be as long as this.
    """
    return stated - end > max(_ROUNDED_S, _ROUNDED_PART * stated, longest_interval)


def _lacks_boxes(data: bytes) -> bool:
    """Whether one of the outermost boxes of an mp4 file ends after the file."""
    begin = 0
    for _ in range(_MAX_BOXES):
        head = data[begin : begin + 16]
        if len(head) < 8:
            return False
        size, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if size == 1:  # the size stands after the name
            size = int.from_bytes(head[8:16], "big")
        if size < 8:  # 0 = up to the end of the file
            return False
        begin += size
        if begin > len(data):
            return kind in _NEEDED_BOXES
    return False


def _lacks_segment(data: bytes) -> bool:
    """Whether the main element of a Matroska file ends after the file."""
    begin = data.find(_SEGMENT, 0, _HEADER_BYTES) + len(_SEGMENT)
    if begin < len(_SEGMENT) or begin >= len(data):
        return False
    # The first byte has as many zeros in front as bytes follow it.
    length = 9 - data[begin].bit_length()
    if length > 8:
        return False
    bits = 7 * length
    size = int.from_bytes(data[begin : begin + length], "big") & ((1 << bits) - 1)
    is_known = size != (1 << bits) - 1
    return is_known and begin + length + size > len(data)


def _lacks_trailer(data: bytes) -> bool:
    """Whether the blocks of a GIF file are not followed by its last byte, a semicolon."""
    begin = 13 + _table_bytes(data[10:11])
    while True:
        kind = data[begin : begin + 1]
        if kind == b"!":  # an extension; its kind follows
            begin += 2
        elif kind == b",":  # an image: its place and size, its colours, and a byte about its codes
            begin += 10 + _table_bytes(data[begin + 9 : begin + 10]) + 1
        else:
            return kind != b";"
        while begin < len(data) and data[begin]:  # the number of bytes of the next part
            begin += 1 + data[begin]
        begin += 1


def _table_bytes(flags: bytes) -> int:
    """Bytes of the table of colours that a byte of flags announces."""
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0
