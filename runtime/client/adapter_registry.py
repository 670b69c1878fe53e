"""`AdapterRegistry`: which adapters are loaded, and which slots they take.

A slot is a place for one adapter in the engine. The registry chooses the slots. It sends nothing:
its caller lets the engine load the adapter between `begin` and `finish`.

    free --begin--> loading --finish--> served --remove, or replaced--> unloaded --+
     ^                 | cancel            | (no request holds it)                 | last release
     +-----------------+-------------------+---------------------------------------+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.adapters import ServedAdapter

__all__ = ("AdapterRegistry",)

_LONGEST_NAME = 256  # characters
_NUM_NAMED = 8  # adapters that an error names


class AdapterRegistry:
    """The adapters of a server, or of an `LLM`, by name and by slot.

    A request holds its adapter. An adapter that is unloaded or replaced keeps its slot until the
    last request has released it.

    Args:
        num_slots: adapters that can be loaded at once; 0 = none.
        on_free: called with an adapter whose slot has become free.

    Attributes:
        num_slots: the argument.
        base_name: the name of the served model, which no adapter may have.
    """

    def __init__(
        self, num_slots: int, on_free: Callable[[ServedAdapter], None] = lambda adapter: None
    ) -> None:
        self.num_slots = num_slots
        self.base_name = ""
        self._on_free = on_free
        self._slots: list[ServedAdapter | None] = [None] * num_slots
        self._num_holds = [0] * num_slots
        self._free = deque(range(num_slots))  # the slot that has been free for longest is first
        self._served: dict[str, ServedAdapter] = {}
        self._loading: dict[str, ServedAdapter] = {}

    @property
    def served(self) -> tuple[ServedAdapter, ...]:
        """The adapters that requests can name, in the order of loading."""
        return tuple(self._served.values())

    @property
    def num_free(self) -> int:
        """Slots that the next loads can take."""
        return len(self._free)

    def get(self, name: str) -> ServedAdapter | None:
        """The adapter that requests can name so; None = there is none."""
        return self._served.get(name)

    def num_holds(self, adapter: ServedAdapter) -> int:
        """Requests that hold an adapter."""
        return self._num_holds[adapter.slot] if self._slots[adapter.slot] == adapter else 0

    def check(self, name: str, *, in_place: bool = False) -> None:
        """Check whether `begin` would accept a name now. Loads take time, so it is checked early.

        Raises:
            InvalidRequestError: see `begin`.
        """
        self._check_name(name)
        if not self.num_slots:
            raise InvalidRequestError(
                f"the adapter {_shown(name)} cannot be loaded: lora.max_adapters=0; start with "
                "lora.max_adapters=1 or more, or with enable_lora",
                param="lora_name",
                code="lora_disabled",
            )
        if name in self._loading:
            raise InvalidRequestError(
                f"the adapter {_shown(name)} is being loaded; try again when its load has ended",
                param="lora_name",
                code="call_refused",
                status=409,
            )
        if name in self._served and not in_place:
            raise InvalidRequestError(
                f"there is an adapter {_shown(name)} already; choose another name, or replace it "
                "with load_inplace=true",
                param="lora_name",
                code="invalid_value",
            )
        if not self._free:
            raise InvalidRequestError(
                f"no slot is free for the adapter {_shown(name)}: lora.max_adapters="
                f"{self.num_slots}, and the slots have {self._occupants()}; unload one, or start "
                "with a larger lora.max_adapters",
                param="lora_name",
                code="no_free_slot",
            )

    def begin(
        self, name: str, path: str, digest: str, *, in_place: bool = False, created: int = 0
    ) -> ServedAdapter:
        """Take a slot for an adapter that is loaded now. `finish` or `cancel` must follow.

        Args:
            name: requests will name the adapter so.
            path: the directory of its files.
            digest: from `adapter_digest`.
            in_place: an adapter of this name is replaced when the load has ended.
            created: unix time in seconds.

        Raises:
            InvalidRequestError: the name is empty, too long, not printable, that of the served
                model, or taken; an adapter of this name is being loaded; or no slot is free.
        """
        self.check(name, in_place=in_place)
        adapter = ServedAdapter(
            name=name, path=path, digest=digest, slot=self._free.popleft(), created=created
        )
        self._slots[adapter.slot] = self._loading[name] = adapter
        return adapter

    def finish(self, adapter: ServedAdapter) -> None:
        """Let requests name an adapter, which the engine has now loaded."""
        self._end_load(adapter)
        before = self._served.pop(adapter.name, None)
        self._served[adapter.name] = adapter
        if before is not None:
            self._free_unless_held(before)

    def cancel(self, adapter: ServedAdapter) -> None:
        """Give the slot of an adapter back whose load failed. A served one of its name stays."""
        self._end_load(adapter)
        self._free_unless_held(adapter)

    def remove(self, name: str) -> ServedAdapter:
        """Unload an adapter: requests can no longer name it. Requests that hold it go on.

        Raises:
            InvalidRequestError: there is none of this name, or it is being loaded.
        """
        if name in self._loading:
            raise InvalidRequestError(
                f"the adapter {_shown(name)} is being loaded; try again when its load has ended",
                param="lora_name",
                code="call_refused",
                status=409,
            )
        adapter = self._served.pop(name, None)
        if adapter is None:
            raise self._not_found(name)
        self._free_unless_held(adapter)
        return adapter

    def hold(self, adapter: ServedAdapter) -> None:
        """Keep an adapter in its slot for a request, until `release`.

        Raises:
            InvalidRequestError: it has been unloaded, and no request holds it.
        """
        is_loading = self._loading.get(adapter.name) == adapter
        is_slot = 0 <= adapter.slot < self.num_slots
        if not is_slot or is_loading or self._slots[adapter.slot] != adapter:
            raise self._not_found(adapter.name)
        self._num_holds[adapter.slot] += 1

    def release(self, adapter: ServedAdapter) -> None:
        """End one `hold`. The engine must not run the request any more."""
        assert self._num_holds[adapter.slot] > 0, "each release belongs to one hold"
        assert self._slots[adapter.slot] == adapter, "a held adapter keeps its slot"
        self._num_holds[adapter.slot] -= 1
        self._free_unless_held(adapter)

    def _check_name(self, name: str) -> None:
        problem = ""
        if not 1 <= len(name) <= _LONGEST_NAME:
            problem = f"has {len(name)} characters; it must have 1 to {_LONGEST_NAME}"
        elif not name.isprintable() or name != name.strip():
            problem = "must be printable characters, without spaces at its ends"
        elif name == self.base_name:
            problem = "is the name of the served model; choose another one"
        if problem:
            raise InvalidRequestError(
                f"the adapter's name {_shown(name)} {problem}",
                param="lora_name",
                code="invalid_value",
            )

    def _end_load(self, adapter: ServedAdapter) -> None:
        loading = self._loading.pop(adapter.name, None)
        assert loading == adapter, "each load ends once"

    def _free_unless_held(self, adapter: ServedAdapter) -> None:
        if self._num_holds[adapter.slot] or self._served.get(adapter.name) == adapter:
            return
        self._slots[adapter.slot] = None
        self._free.append(adapter.slot)
        self._on_free(adapter)

    def _not_found(self, name: str) -> InvalidRequestError:
        known = ", ".join(map(_shown, list(self._served)[:_NUM_NAMED])) or "none"
        more = len(self._served) - _NUM_NAMED
        return InvalidRequestError(
            f"there is no adapter {_shown(name)}; loaded: {known}"
            f"{f' and {more} more' if more > 0 else ''}",
            param="lora_name",
            code="model_not_found",
            status=404,
        )

    def _occupants(self) -> str:
        """The adapters that take slots, for an error."""
        texts: list[str] = []
        for adapter in self._slots[:_NUM_NAMED]:
            assert adapter is not None, "no slot is free"
            text = _shown(adapter.name)
            if self._loading.get(adapter.name) == adapter:
                text += " (being loaded)"
            elif self._served.get(adapter.name) != adapter:
                text += f" (unloaded; requests that use it: {self._num_holds[adapter.slot]})"
            texts.append(text)
        more = self.num_slots - _NUM_NAMED
        return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}...")
