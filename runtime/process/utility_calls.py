"""Executes calls in the engine process.

They reset the prefix cache, start or stop a profile, and load adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.process.ipc import LoadAdapter, UtilityCall, UtilityName, UtilityReply

if TYPE_CHECKING:
    from ostinato.runtime.engine.engine import Engine

__all__ = ("UtilityCalls",)


class UtilityCalls:
    """Executes utility calls.

    Args:
        engine: the engine that executes the calls.
        profile_dir: where traces are written; empty = profiling is refused.
    """

    def __init__(self, engine: Engine, profile_dir: str) -> None:
        self._engine = engine
        self._profile_dir = profile_dir
        self._loads: dict[int, int] = {}  # slot -> id of the call that loads an adapter into it

    def answer(self, call: UtilityCall) -> UtilityReply:
        """Execute a call; returns its result or the reason for a refusal."""
        try:
            return UtilityReply(call.call_id, self._do(call.name))
        except InvalidRequestError as error:
            return UtilityReply(call.call_id, str(error), is_refused=True)

    def begin_adapter(self, call: LoadAdapter) -> UtilityReply | None:
        """Begin to load an adapter; returns the reply if the engine refuses."""
        try:
            self._engine.begin_adapter(call.slot, call.path, call.digest)
        except InvalidRequestError as error:
            return UtilityReply(call.call_id, str(error), is_refused=True)
        self._loads[call.slot] = call.call_id
        return None

    def take_adapters(self) -> list[UtilityReply]:
        """The replies to loads that have ended since the last call."""
        return [
            UtilityReply(self._loads.pop(slot), failure, is_refused=bool(failure))
            for slot, failure in self._engine.take_adapters()
        ]

    def _do(self, name: UtilityName) -> str:
        if name is UtilityName.reset_prefix_cache:
            if not self._engine.reset_prefix_cache():
                raise InvalidRequestError(
                    "sequences hold KV blocks: try again when no request runs"
                )
            return ""
        if not self._profile_dir:
            raise InvalidRequestError(
                "server.profile_dir is not set: start the server with a directory for traces"
            )
        if name is UtilityName.start_profile:
            self._engine.start_profile(self._profile_dir)
            return self._profile_dir
        return "\n".join(self._engine.stop_profile())
