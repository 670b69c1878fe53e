"""`AdapterRegistry` against a simple model: names, slots and the requests that hold them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato.runtime.client.adapter_registry import AdapterRegistry
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.adapters import ServedAdapter

NAMES = ("a", "b", "c", "d")
SLOTS = 3


class Registry(RuleBasedStateMachine):
    """The model keeps the sets of adapters by state, and a list of the holds."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[ServedAdapter] = []
        self.registry = AdapterRegistry(SLOTS, self.freed.append)
        self.loading: dict[str, ServedAdapter] = {}
        self.served: dict[str, ServedAdapter] = {}
        self.unloaded: list[ServedAdapter] = []  # some requests hold them
        self.holds: list[ServedAdapter] = []
        self.count = 0

    def occupants(self) -> list[ServedAdapter]:
        return [*self.loading.values(), *self.served.values(), *self.unloaded]

    def leave(self, adapter: ServedAdapter) -> None:
        """An adapter is no longer loading or served."""
        if adapter in self.holds:
            self.unloaded.append(adapter)
            assert adapter not in self.freed
        else:
            assert self.freed[-1] == adapter

    @rule(name=st.sampled_from(NAMES), in_place=st.booleans())
    def begin(self, name: str, in_place: bool) -> None:
        taken = {adapter.slot for adapter in self.occupants()}
        self.count += 1
        status = None
        if name in self.loading:
            status = 409
        elif (name in self.served and not in_place) or len(taken) == SLOTS:
            status = 400
        if status is not None:
            with pytest.raises(InvalidRequestError) as error:
                self.registry.begin(name, "/p", f"{self.count}", in_place=in_place)
            assert error.value.status == status
            return
        adapter = self.registry.begin(name, "/p", f"{self.count}", in_place=in_place)
        assert adapter.slot not in taken, "the slot serves another adapter"
        assert 0 <= adapter.slot < SLOTS
        self.loading[name] = adapter

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), is_good=st.booleans())
    def end_load(self, data: st.DataObject, is_good: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading)))
        adapter = self.loading.pop(name)
        if not is_good:
            self.registry.cancel(adapter)
            self.leave(adapter)
            return
        before = self.served.pop(name, None)
        self.registry.finish(adapter)
        self.served[name] = adapter
        if before is not None:
            self.leave(before)

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if name in self.loading or name not in self.served:
            with pytest.raises(InvalidRequestError) as error:
                self.registry.remove(name)
            assert error.value.status == (409 if name in self.loading else 404)
            return
        adapter = self.registry.remove(name)
        assert self.served.pop(name) == adapter
        self.leave(adapter)

    @precondition(lambda self: self.served or self.unloaded)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from([*self.served.values(), *self.unloaded]))
        self.registry.hold(adapter)
        self.holds.append(adapter)

    @precondition(lambda self: self.freed or self.loading)
    @rule(data=st.data())
    def hold_in_vain(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from([*self.freed, *self.loading.values()]))
        with pytest.raises(InvalidRequestError) as error:
            self.registry.hold(adapter)
        assert error.value.status == 404

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        adapter = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.registry.release(adapter)
        if adapter in self.unloaded and adapter not in self.holds:
            self.unloaded.remove(adapter)
            assert self.freed[-1] == adapter

    @invariant()
    def they_agree(self) -> None:
        assert self.registry.served == tuple(self.served.values())
        for name in NAMES:
            assert self.registry.get(name) == self.served.get(name)
        slots = [adapter.slot for adapter in self.occupants()]
        assert len(slots) == len(set(slots)), "a slot has two adapters"
        assert self.registry.num_free == SLOTS - len(slots)
        assert len(self.freed) == len(set(self.freed)), "a slot was freed twice"
        for adapter in self.occupants():
            assert self.registry.num_holds(adapter) == self.holds.count(adapter)

    def teardown(self) -> None:
        """Every slot comes back."""
        for adapter in self.loading.values():
            self.registry.cancel(adapter)
        for name in list(self.served):
            self.registry.remove(name)
        for adapter in self.holds:
            self.registry.release(adapter)
        assert self.registry.num_free == SLOTS
        assert self.registry.served == ()


TestRegistry = Registry.TestCase
TestRegistry.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def loaded(*names: str, num_slots: int = 8) -> AdapterRegistry:
    registry = AdapterRegistry(num_slots)
    registry.base_name = "base"
    for name in names:
        registry.finish(registry.begin(name, f"/{name}", name))
    return registry


@pytest.mark.parametrize(
    ("name", "names", "num_slots", "status", "message"),
    [
        ("", "", 8, 400, "the adapter's name '' has 0 characters; it must have 1 to 256"),
        ("x" * 257, "", 8, 400, "has 257 characters; it must have 1 to 256"),
        ("a\nb", "", 8, 400, "must be printable characters"),
        ("\ud800", "", 8, 400, "must be printable characters"),
        (" a", "", 8, 400, "without spaces at its ends"),
        ("base", "", 8, 400, "is the name of the served model; choose another one"),
        ("a", "ab", 8, 400, "there is an adapter 'a' already; choose another name, or replace it "),
        ("a", "", 0, 400, "lora.max_adapters=0; start with lora.max_adapters=1 or more, or with "),
        (
            "c",
            "ab",
            2,
            400,
            "no slot is free for the adapter 'c': lora.max_adapters=2, and the slots have 'a', 'b'; "
            "unload one, or start with a larger lora.max_adapters",
        ),
        ("z", "abcdefghij", 10, 400, "'g', 'h' and 2 more; unload one"),
    ],
)
def test_refusals_say_what_to_do(
    name: str, names: str, num_slots: int, status: int, message: str
) -> None:
    registry = loaded(*names, num_slots=num_slots)
    with pytest.raises(InvalidRequestError) as error:
        registry.begin(name, "/p", "digest")
    assert message in str(error.value)
    assert (error.value.status, error.value.param) == (status, "lora_name")
    assert registry.num_free == num_slots - len(names)


def test_a_name_that_is_not_known_is_answered_with_those_that_are() -> None:
    for names, text in (("", "loaded: none"), ("ab", "loaded: 'a', 'b'")):
        with pytest.raises(InvalidRequestError) as error:
            loaded(*names).remove("x")
        assert str(error.value) == f"there is no adapter 'x'; {text}"
        assert (error.value.status, error.value.code) == (404, "model_not_found")


def test_the_slots_that_are_named_have_their_state() -> None:
    registry = loaded("a", "b", num_slots=3)
    held = registry.get("a")
    assert held is not None
    registry.hold(held)
    registry.hold(held)
    registry.remove("a")
    registry.begin("c", "/c", "c")
    with pytest.raises(InvalidRequestError) as error:
        registry.begin("d", "/d", "d")
    assert "'a' (unloaded; requests that use it: 2), 'b', 'c' (being loaded)" in str(error.value)


def test_a_freed_slot_rests_while_others_are_free() -> None:
    """A step that is under way may still read the slot of a request that has just ended."""
    registry = loaded("a", num_slots=3)
    registry.remove("a")
    assert [registry.begin(name, "/", name).slot for name in "bcd"] == [1, 2, 0]
