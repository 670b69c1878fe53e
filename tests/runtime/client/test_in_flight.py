"""Who is sent to an engine again, in which order, and who is given up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.client.in_flight import Flight, Flights, given_up_news
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request


def request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=[1, 2], sampling=SamplingParams())


def flights(*names: str) -> Flights[str]:
    made: Flights[str] = Flights()
    for name in names:
        made.add(request(name), f"reader of {name}")
    return made


def board(made: Flights[str]) -> list[tuple[str, list[int]]]:
    """Sends what may be sent, to an engine that has room for all of it."""
    boarding = [(one.request_id, one.output_token_ids) for one in made.board()]
    made.begin(request_id for request_id, _ in boarding)
    return boarding


def names(some: list[Flight[str]]) -> list[str]:
    return [one.request.request_id for one in some]


def give(made: Flights[str], name: str, *token_ids: int, end: bool = False) -> Flight[str] | None:
    reason = FinishReason.stop if end else None
    return made.take(SequenceOutput(name, list(token_ids), reason))


def test_new_requests_board_at_once_and_once() -> None:
    made = flights("a", "b")
    assert board(made) == [("a", []), ("b", [])]
    assert board(made) == []
    made.add(request("c"), "reader of c")
    assert board(made) == [("c", [])]


def test_news_are_kept_until_the_end() -> None:
    made = flights("a")
    board(made)
    give(made, "a", 5, 6)
    flight = give(made, "a", 7)
    assert flight is not None
    assert (flight.reader, flight.output_token_ids) == ("reader of a", [5, 6, 7])
    give(made, "a", 8, end=True)
    assert (len(made), give(made, "a", 9)) == (0, None)


def test_after_a_crash_suspects_board_one_by_one_with_what_they_gave() -> None:
    made = flights("a", "b", "c")
    board(made)
    give(made, "a", 5)
    give(made, "c", 6, 7)
    assert made.crashed(1) == []
    made.add(request("new"), "reader of new")
    assert board(made) == [("a", [5])]
    assert board(made) == []
    give(made, "a", 8)
    assert board(made) == [("b", [])]
    give(made, "b", 4, end=True)
    assert board(made) == [("c", [6, 7])]
    assert made.remove(["c"]) == ["c"]
    assert board(made) == [("new", [])]


def test_a_request_that_brings_its_engine_down_twice_goes_alone() -> None:
    made = flights("a", "poison", "c")
    board(made)
    give(made, "a", 5)
    assert made.crashed(1) == []
    board(made)
    give(made, "a", 6)
    assert board(made) == [("poison", [])]
    assert names(made.crashed(1)) == ["poison"]
    # One that had given tokens since the crash before begins with a clean sheet.
    assert board(made) == [("a", [5, 6])]
    give(made, "a", 7)
    assert board(made) == [("c", [])]
    assert made.ids() == ["a", "c"]


def test_crashes_with_tokens_in_between_do_not_add_up() -> None:
    made = flights("a")
    for token_id in range(10):
        board(made)
        give(made, "a", token_id)
        assert made.crashed(1) == []
    assert board(made) == [("a", list(range(10)))]


def test_who_gives_nothing_before_its_end_is_cleared_by_coming_further() -> None:
    made = flights("search", "b")
    board(made)
    made.advance({"search": 5, "unknown": 3})
    assert made.crashed(1) == []
    assert board(made) == [("search", [])]
    made.advance({"search": 5})  # the next step may be the one that brings engines down
    assert (board(made), made.num_suspects) == ([], 2)
    made.advance({"search": 6})
    assert (board(made), made.num_suspects) == ([("b", [])], 1)
    give(made, "b", 4)
    assert made.crashed(1) == []
    assert len(made) == 2


def test_who_brings_its_engine_down_at_the_same_place_is_not_cleared_before() -> None:
    made = flights("long", "b")
    board(made)
    give(made, "b", 4)
    made.advance({"long": 512})
    made.crashed(1)
    assert board(made) == [("long", [])]
    made.advance({"long": 256})
    made.advance({"long": 512})
    assert names(made.crashed(1)) == ["long"]
    # Computing again what it had given is no progress either.
    assert board(made) == [("b", [4])]
    made.advance({"b": 2})
    assert names(made.crashed(1)) == ["b"]


def test_who_waited_in_the_engine_is_no_suspect() -> None:
    made = flights("a", "b", "c")
    assert [one.request_id for one in made.board()] == ["a", "b", "c"]
    made.begin(["b"])
    assert made.crashed(1) == []
    assert board(made) == [("b", [])]
    assert board(made) == []
    give(made, "b", 5)
    assert board(made) == [("a", []), ("c", [])]


def test_who_was_not_aboard_is_no_suspect() -> None:
    made = flights("a")
    board(made)
    made.crashed(1)
    made.add(request("b"), "")
    assert board(made) == [("a", [])]
    assert names(made.crashed(1)) == ["a"]
    assert names(made.crashed(1)) == []
    assert board(made) == [("b", [])]
    assert names(made.crashed(1)) == []


def test_a_removed_request_is_told_to_the_engine_only_when_it_has_it() -> None:
    made = flights("a", "b")
    board(made)
    made.crashed(1)
    board(made)
    assert made.remove(["a", "b", "unknown"]) == ["a"]
    assert len(made) == 0


def test_the_last_news_names_the_request_as_its_client_knows_it() -> None:
    news = given_up_news(request("cmpl-7#3:1"), 2, "its process died of SIGSEGV")
    assert news.finish_reason == "error"
    assert news.error is not None
    assert "request cmpl-7 was aboard" in news.error
    assert "SIGSEGV" in news.error


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nobody_is_lost_or_doubled_whatever_happens(data: st.DataObject) -> None:
    """Any order of arrivals, news, departures and crashes, against a plain model of the engine."""
    made: Flights[str] = Flights()
    aboard: set[str] = set()
    given: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(1, 40), "steps")):
        what = data.draw(
            st.sampled_from(["add", "board", "begin", "advance", "token", "end", "leave", "crash"])
        )
        name = data.draw(st.sampled_from(sorted(aboard)), "who") if aboard else None
        if what == "add":
            made.add(request(f"r{number}"), "")
            given[f"r{number}"] = []
        elif what == "board":
            for one in made.board():
                assert one.request_id not in aboard
                assert one.output_token_ids == given[one.request_id]
                aboard.add(one.request_id)
        elif what == "crash":
            for gone in made.crashed(2):
                del given[gone.request.request_id]
            aboard.clear()
        elif name is not None:
            if what == "begin":
                made.begin([name])
                continue
            if what == "advance":
                made.advance({name: data.draw(st.integers(1, 9), "position")})
                continue
            if what == "leave":
                assert made.remove([name]) == [name]
            else:
                give(made, name, number, end=what == "end")
                given[name].append(number)
            if what != "token":
                aboard.discard(name)
                del given[name]
    # With an engine that lives, everybody gets there.
    for name in aboard:
        give(made, name, 1)
    for _ in range(2 * len(given) + 1):
        for one in made.board():
            aboard.add(one.request_id)
            give(made, one.request_id, 1)
    assert aboard == set(given) == set(made.ids())
    assert made.num_held == 0
