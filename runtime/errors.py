"""The errors that the engine raises for its callers, and how the API answers each.

EngineError
├── InvalidRequestError   the request cannot be served as asked: a 4xx that names the parameter
├── StartupError          the engine cannot start: one clear line and a non-zero exit code
├── EngineDeadError       the engine process is gone: a 503 for everything in flight
├── RankFailedError       a rank of the engine ended or hangs: the engine process ends too
├── HelperProcessError    a helper process that checks a part of the request failed: a 503
└── DeadlineError         the request's deadline passed before its first token: a 504
"""

from __future__ import annotations

__all__ = (
    "DeadlineError",
    "EngineDeadError",
    "EngineError",
    "HelperProcessError",
    "InvalidRequestError",
    "RankFailedError",
    "StartupError",
)


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class InvalidRequestError(EngineError):
    """A request that cannot be served as asked.

    Args:
        message: names the subject, the value, the allowed range and the remedy.
        param: the request field at fault, as the client spelt it.
        code: a short machine-readable word such as `context_length_exceeded`.
        status: the HTTP status that an API answers with.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class StartupError(EngineError):
    """The engine cannot start; the message is one line for a terminal."""


class EngineDeadError(EngineError):
    """The engine process ended or stopped answering."""


class RankFailedError(EngineError):
    """A rank of the engine ended or hangs, so the engine can run no further step.

    Args:
        message: names the rank and says how it ended.
        reason: killed (by SIGKILL), crash (another signal), error, exit or hang.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class HelperProcessError(EngineError):
    """A helper process that checks a part of a request cannot be started, or it died."""


class DeadlineError(EngineError):
    """The deadline of a request passed before its first token."""
