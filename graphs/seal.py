"""Once the engine is ready nothing compiles: the monitor that counts when something does.

Hooks Dynamo (and with it Inductor) and Triton. A late compile is counted and logged with what was
compiled; the test suite fails on any.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

__all__ = ("CompileMonitor",)

_LOG = logging.getLogger(__name__)


class CompileMonitor:
    """Counts compilations; after `seal` each one is late.

    `compiles` and `late_compiles` grow from zero. `close` removes the hooks.
    """

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self.compiles = 0
        self.late_compiles = 0
        self._sealed = False
        self._dynamo = callback_handler
        self._dynamo.register_start_callback(self._on_dynamo)
        self._remove_triton = self._hook_triton()

    def seal(self) -> None:
        """From now on every compilation is late."""
        self._sealed = True

    def close(self) -> None:
        """Remove the hooks."""
        self._dynamo.remove_start_callback(self._on_dynamo)
        self._remove_triton()

    def _count(self, what: str) -> None:
        self.compiles += 1
        if self._sealed:
            self.late_compiles += 1
            _LOG.warning("late compile of %s: the engine is sealed, this step was slow", what)

    def _on_dynamo(self, arguments: Any) -> None:
        self._count(f"a traced graph ({getattr(arguments, 'callback_trigger', 'dynamo')})")

    def _hook_triton(self) -> Any:
        if not torch.cuda.is_available():
            return lambda: None
        from triton import knobs

        previous = knobs.runtime.jit_post_compile_hook

        def hook(*args: Any, **kwargs: Any) -> Any:
            self._count(f"a Triton kernel ({kwargs.get('repr', '?')})")
            return previous(*args, **kwargs) if previous else None

        knobs.runtime.jit_post_compile_hook = hook

        def remove() -> None:
            knobs.runtime.jit_post_compile_hook = previous

        return remove
