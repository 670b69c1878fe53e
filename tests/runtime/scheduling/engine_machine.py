"""A state machine of hypothesis that drives a simulated engine, and what it draws."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ostinato.conf.schema import SchedulingPolicy
from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup
from ostinato.runtime.types.request import Request
from tests.runtime.scheduling.drawn_requests import requests
from tests.runtime.simulated_engine import SimulatedEngine

MAX_MODEL_LEN = 32
POLICIES = list(SchedulingPolicy)


@st.composite
def kv_groups(draw: st.DrawFn) -> tuple[KVGroup, ...]:
    """Groups of layers; windows are small, so that blocks lie outside of them."""
    window, units = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return draw(
        st.sampled_from(
            [
                WHOLE_CACHE,
                WHOLE_CACHE,
                (KVGroup(window),),
                (KVGroup(0, units, 1), KVGroup(window, 1, units)),
                (KVGroup(0, 1, units), KVGroup(window, units, 1)),
            ]
        )
    )


def rename(request: Request, request_id: str) -> Request:
    """The same request with another id."""
    return msgspec.structs.replace(request, request_id=request_id)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, end and are aborted at any moment, with up to the most steps in flight."""

    engine: SimulatedEngine  # a rule of the subclass makes it

    @rule(request=requests(), copies=st.sampled_from([1, 1, 1, 3]))
    def add(self, request: Request, copies: int) -> None:
        for _ in range(copies):
            request_id = f"r{len(self.engine.requests)}"
            self.engine.add(rename(request, request_id))

    @rule(request=requests(), places=st.permutations(range(5)))
    def add_group(self, request: Request, places: list[int]) -> None:
        """An HTTP request of several sequences, some of which may have moved here later."""
        group = len(self.engine.requests) + 1
        for place in places:
            member = msgspec.structs.replace(
                request, place=place, group=group, group_size=len(places)
            )
            self.engine.add(rename(member, f"r{len(self.engine.requests)}"))

    @precondition(lambda self: self.engine.num_in_flight < self.engine.max_in_flight)
    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.num_in_flight > 0)
    @rule()
    def land(self) -> None:
        self.engine.land()

    @rule()
    def finish_loads(self) -> None:
        self.engine.finish_loads()

    @rule()
    def abandon_loads(self) -> None:
        self.engine.abandon_loads()

    @rule(num_steps=st.integers(1, 8), lookahead=st.booleans())
    def steps(self, num_steps: int, lookahead: bool) -> None:
        for _ in range(num_steps):
            while self.engine.num_in_flight > lookahead * (self.engine.max_in_flight - 1):
                self.engine.land()
            self.engine.launch()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.requests))))

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            while self.engine.num_in_flight == self.engine.max_in_flight:
                self.engine.land()
            self.engine.run(lookahead=True)
            self.engine.check_drained()
