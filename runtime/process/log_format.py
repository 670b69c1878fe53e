"""The log format of all processes: text, or one JSON object a line."""

from __future__ import annotations

import logging

import msgspec

__all__ = ("FIELDS", "JsonFormatter", "configure_logging")

FIELDS = "fields_of_line"
"""The name of the attribute of a log record whose dict a JSON line gets in place of the text.

The dict has a `message` of its own, such as `request`.
"""


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, process, logger, and the record's FIELDS or message.

    Args:
        process: the name of the process, such as `api`, `engine 1` or `engine rank 1`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
        }
        fields = getattr(record, FIELDS, None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(level: str, log_format: str, process: str) -> None:
    """Send this process's log to standard error.

    Args:
        level: a value of `server.log_level`.
        log_format: a value of `server.log_format`.
        process: the name of the process, such as `api`, `engine 1` or `engine rank 1`.
    """
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        name = "" if process == "api" else f"{process}: "
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}%(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level == "info":  # the lines of uvicorn and asyncio are only for debugging
        for name in ("uvicorn", "asyncio"):
            logging.getLogger(name).setLevel(logging.WARNING)
