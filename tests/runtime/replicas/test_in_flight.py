"""Which requests are submitted to an engine again, in which order, and which are given up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.replicas.in_flight import (
    InFlightRequest,
    InFlightRequests,
    given_up_output,
)
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

MANY = 100


def request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=[1, 2], sampling=SamplingParams())


def in_flight(*names: str) -> InFlightRequests[str]:
    made: InFlightRequests[str] = InFlightRequests()
    for name in names:
        made.add(request(name), f"reader of {name}")
    return made


def submit(made: InFlightRequests[str]) -> list[tuple[str, list[int]]]:
    """Submits the requests that may be submitted, to an engine that has room for all of them."""
    submitted = [(one.request_id, one.output_token_ids) for one in made.submit(MANY)]
    made.mark_running(request_id for request_id, _ in submitted)
    return submitted


def num_quarantined(made: InFlightRequests[str]) -> int:
    kept = [made.get(name) for name in made.ids()]
    return sum(1 for one in kept if one is not None and one.num_crashes)


def names(some: list[InFlightRequest[str]]) -> list[str]:
    return [one.request.request_id for one in some]


def give(
    made: InFlightRequests[str], name: str, *token_ids: int, end: bool = False
) -> InFlightRequest[str] | None:
    output = SequenceOutput(name, list(token_ids), FinishReason.stop if end else None)
    return None if made.take_old(output) else made.take(output)


def test_new_requests_are_submitted_at_once_and_once() -> None:
    made = in_flight("a", "b")
    assert submit(made) == [("a", []), ("b", [])]
    assert submit(made) == []
    made.add(request("c"), "reader of c")
    assert submit(made) == [("c", [])]


def test_a_request_waits_until_a_token_is_computed_after_its_prompt() -> None:
    """Also a beam search, which returns no token before its end."""
    made = in_flight("stream", "beams")
    submit(made)
    assert (made.num_queued, made.num_queued_tokens) == (2, 4)
    give(made, "stream", 7)
    made.advance({"beams": 2})  # the prompt
    assert (made.num_queued, made.num_queued_tokens) == (1, 2)
    made.advance({"beams": 3})
    assert (made.num_queued, made.num_queued_tokens) == (0, 0)


def test_outputs_are_kept_until_the_end() -> None:
    made = in_flight("a")
    submit(made)
    give(made, "a", 5, 6)
    one = give(made, "a", 7)
    assert one is not None
    assert (one.reader, one.output_token_ids) == ("reader of a", [5, 6, 7])
    give(made, "a", 8, end=True)
    assert (len(made), give(made, "a", 9)) == (0, None)


def test_after_a_death_quarantined_requests_are_submitted_one_by_one_with_their_tokens() -> None:
    made = in_flight("a", "b", "c")
    submit(made)
    give(made, "a", 5)
    give(made, "c", 6, 7)
    assert made.on_engine_death(1) == []
    made.add(request("new"), "reader of new")
    assert submit(made) == [("a", [5])]
    assert submit(made) == []
    give(made, "a", 8)
    assert submit(made) == [("b", [])]
    give(made, "b", 4, end=True)
    assert submit(made) == [("c", [6, 7])]
    assert made.remove(["c"]) == ["c"]
    assert submit(made) == [("new", [])]


def test_a_request_that_kills_its_engine_twice_does_so_alone() -> None:
    made = in_flight("a", "poison", "c")
    submit(made)
    give(made, "a", 5)
    assert made.on_engine_death(1) == []
    submit(made)
    give(made, "a", 6)
    assert submit(made) == [("poison", [])]
    assert names(made.on_engine_death(1)) == ["poison"]
    # `a` returned tokens between the two deaths, so it is not given up for the second one.
    assert submit(made) == [("a", [5, 6])]
    give(made, "a", 7)
    assert submit(made) == [("c", [])]
    assert made.ids() == ["a", "c"]


def test_crashes_with_tokens_in_between_do_not_add_up() -> None:
    made = in_flight("a")
    for token_id in range(10):
        submit(made)
        give(made, "a", token_id)
        assert made.on_engine_death(1) == []
    assert submit(made) == [("a", list(range(10)))]


def test_a_request_without_outputs_is_cleared_by_coming_further() -> None:
    made = in_flight("search", "b")
    submit(made)
    made.advance({"search": 5, "unknown": 3})
    assert made.on_engine_death(1) == []
    assert submit(made) == [("search", [])]
    made.advance({"search": 5})  # the next step may be the one that kills engines
    assert (submit(made), num_quarantined(made)) == ([], 2)
    made.advance({"search": 6})
    assert (submit(made), num_quarantined(made)) == ([("b", [])], 1)
    give(made, "b", 4)
    assert made.on_engine_death(1) == []
    assert len(made) == 2


def test_a_request_that_kills_its_engine_at_one_place_is_not_cleared_before_it() -> None:
    made = in_flight("long", "b")
    submit(made)
    give(made, "b", 4)
    made.advance({"long": 512})
    made.on_engine_death(1)
    assert submit(made) == [("long", [])]
    made.advance({"long": 256})
    made.advance({"long": 512})
    assert names(made.on_engine_death(1)) == ["long"]
    # Tokens that are computed again do not count as progress.
    assert submit(made) == [("b", [4])]
    made.advance({"b": 2})
    assert names(made.on_engine_death(1)) == ["b"]


def test_a_request_that_waited_in_the_engine_is_not_quarantined() -> None:
    made = in_flight("a", "b", "c")
    assert [one.request_id for one in made.submit(MANY)] == ["a", "b", "c"]
    made.mark_running(["b"])
    assert made.on_engine_death(1) == []
    assert submit(made) == [("b", [])]
    assert submit(made) == []
    give(made, "b", 5)
    assert submit(made) == [("a", []), ("c", [])]


def test_a_request_that_was_not_submitted_is_not_quarantined() -> None:
    made = in_flight("a")
    submit(made)
    made.on_engine_death(1)
    made.add(request("b"), "")
    assert submit(made) == [("a", [])]
    assert names(made.on_engine_death(1)) == ["a"]
    assert names(made.on_engine_death(1)) == []
    assert submit(made) == [("b", [])]
    assert names(made.on_engine_death(1)) == []


def test_the_first_kill_from_outside_makes_no_suspect() -> None:
    made = in_flight("a", "b")
    submit(made)
    assert made.on_engine_death(2, 1) == []
    assert submit(made) == [("a", []), ("b", [])]
    assert made.on_engine_death(2, 1) == []
    assert submit(made) == [("a", [])]
    assert submit(made) == []
    assert names(made.on_engine_death(2, 1)) == ["a"]
    assert submit(made) == [("b", [])]


def test_all_but_suspects_go_on_elsewhere_with_their_tokens() -> None:
    made, other = in_flight("a", "b", "c"), in_flight("d")
    submit(other)
    made.submit(MANY)
    made.mark_running(["a", "b"])
    give(made, "a", 5)
    made.on_engine_death(1)
    made.add(request("new"), "")
    released = made.release()
    assert (names(released), made.ids()) == (["c", "new"], ["a", "b"])
    for one in released:
        other.adopt(one)
    assert submit(other) == [("c", []), ("new", [])]
    assert submit(made) == [("a", [5])]
    give(made, "a", 6)
    assert names(made.release()) == ["a"]
    assert submit(made) == [("b", [])]


def test_a_request_that_comes_back_is_held_until_the_engine_has_ended_it() -> None:
    made = in_flight("a", "b")
    submit(made)
    give(made, "a", 5)
    for one in made.release():
        one.output_token_ids.append(6)  # from the other replica
        made.adopt(one)
    assert made.num_held == 2
    assert submit(made) == []
    assert give(made, "a", 7) is None
    assert give(made, "a", end=True) is None
    assert submit(made) == [("a", [5, 6])]
    give(made, "a", 8)
    assert made.on_engine_death(1) == []  # a new process has never had `b`
    assert submit(made) == [("a", [5, 6, 8])]
    give(made, "a", 9, end=True)
    assert submit(made) == [("b", [6])]


def test_an_engine_that_was_asked_to_end_makes_no_suspects() -> None:
    made = in_flight("a", "b")
    submit(made)
    give(made, "a", 5)
    made.on_engine_end()
    assert made.submitted_ids() == []
    assert submit(made) == [("a", [5]), ("b", [])]
    assert made.submitted_ids() == ["a", "b"]


def test_a_removed_request_is_aborted_only_when_it_was_submitted() -> None:
    made = in_flight("a", "b")
    submit(made)
    made.on_engine_death(1)
    submit(made)
    assert made.remove(["a", "b", "unknown"]) == ["a"]
    assert len(made) == 0


def test_the_last_output_names_the_request_as_its_client_knows_it() -> None:
    output = given_up_output(request("cmpl-7#3:1"), 2, "its process died of SIGSEGV")
    assert output.finish_reason == "error"
    assert output.error is not None
    assert "request cmpl-7 was running" in output.error
    assert "SIGSEGV" in output.error


def give_old(made: InFlightRequests[str], name: str, *, end: bool) -> None:
    """What the engine sends for a request that it had before a release."""
    made.mark_running([name])
    made.advance({name: 9})
    assert give(made, name, -1, end=end) is None


def finish(made: InFlightRequests[str], submitted: set[str], num_requests: int) -> set[str]:
    """Once an engine stays alive, every request is submitted. Returns the submitted ones."""
    for name in submitted:
        give(made, name, 1)
    found = set(submitted)
    for _ in range(2 * num_requests + 1):
        for one in made.submit(2):
            found.add(one.request_id)
            give(made, one.request_id, 1)
    return found


@settings(max_examples=60)
@given(st.data())
def test_no_request_is_lost_or_submitted_twice(data: st.DataObject) -> None:
    """Any order of arrivals, outputs, aborts and deaths, compared with a plain model.

    A request that is moved away and back is still in the engine until the engine has answered its
    abort, or has ended it for another reason.
    """
    made: InFlightRequests[str] = InFlightRequests()
    submitted: set[str] = set()
    aborted: set[str] = set()
    given: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(1, 40), "steps")):
        what = data.draw(
            st.sampled_from(
                ["add", "submit", "run", "advance", "token", "end", "remove", "die", "move", "old"]
            )
        )
        name = data.draw(st.sampled_from(sorted(submitted)), "who") if submitted else None
        if what == "add":
            made.add(request(f"r{number}"), "")
            given[f"r{number}"] = []
        elif what == "submit":
            for one in made.submit(data.draw(st.integers(1, 3), "most")):
                assert one.request_id not in submitted | aborted
                assert one.output_token_ids == given[one.request_id]
                submitted.add(one.request_id)
        elif what == "die":
            for gone in made.on_engine_death(2, data.draw(st.integers(0, 1), "free")):
                del given[gone.request.request_id]
            submitted.clear()
            aborted.clear()
        elif what == "move":  # to another replica and back
            released = made.release()
            moved = submitted & set(names(released))
            submitted -= moved
            aborted |= moved
            list(map(made.adopt, released))
        elif what == "old":
            for name in sorted(aborted):
                end = data.draw(st.booleans(), "answers the abort")
                give_old(made, name, end=end)
                aborted -= {name} if end else set()
        elif name is not None:
            if what in ("run", "advance"):
                made.mark_running([name])
                made.advance({name: data.draw(st.integers(0, 9), "position")})
                continue
            if what == "remove":
                assert made.remove([name]) == [name]
            else:
                give(made, name, number, end=what == "end")
                given[name].append(number)
            if what != "token":
                submitted.discard(name)
                del given[name]
    for name in aborted:
        give_old(made, name, end=True)
    assert finish(made, submitted, len(given)) == set(given) == set(made.ids())
    assert made.num_held == 0
