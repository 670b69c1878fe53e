"""Which adapters `OfflineAdapters` loads and replaces; the engine at its border is scripted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import LoRARequest
from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.models.adapters.adapter_files import adapter_digest
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.offline.offline_adapters import OfflineAdapters
from ostinato.runtime.offline.offline_steps import OfflineSteps
from tests.runtime.adapter_engine import write_adapter


class ScriptedEngine:
    """Ends each load two steps after it began."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(name="base")
        self.begun: list[tuple[int, str]] = []  # slot and name of the directory
        self.failure = ""
        self.interrupts = 0  # steps to come that end with a Ctrl-C
        self._loading: dict[int, int] = {}  # slot -> steps that are left

    def begin_adapter(self, slot: int, path: str, digest: str) -> None:
        assert slot not in self._loading
        assert digest == adapter_digest(Path(path))
        self.begun.append((slot, Path(path).name))
        self._loading[slot] = 2

    def step(self) -> list[object]:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self._loading = {slot: left - 1 for slot, left in self._loading.items()}
        return []

    def take_adapters(self) -> list[tuple[int, str]]:
        ended = [(slot, self.failure) for slot, left in self._loading.items() if left <= 0]
        self._loading = {slot: left for slot, left in self._loading.items() if left > 0}
        return ended


def offline(engine: Any, **lora: Any) -> OfflineAdapters:
    return OfflineAdapters(engine, OfflineSteps(engine), LoraConfig(**lora))


def asked(directory: Path, name: str, number: int = 1, **fields: Any) -> LoRARequest:
    return LoRARequest(name, number, str(directory / name), **fields)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in "abcd":
        write_adapter(tmp_path / name)
    return tmp_path


def test_an_adapter_is_loaded_once(files: Path) -> None:
    engine = ScriptedEngine()
    adapters = offline(engine, max_adapters=2)
    a, b = asked(files, "a"), asked(files, "b", 2)
    for _ in range(3):
        with adapters.held([a, None, b, a], 4) as [one, none, other, again]:
            assert none is None
            assert one is not None
            assert other is not None
            assert one == again
            assert (one.name, other.name, other.path) == ("a", "b", str(files / "b"))
    with adapters.held(a, 2) as both:
        assert both == [one, one]
    with adapters.held(None, 2) as neither:
        assert neither == [None, None]
    assert engine.begun == [(0, "a"), (1, "b")]


def test_the_least_recently_used_adapter_is_replaced(files: Path) -> None:
    engine = ScriptedEngine()
    adapters = offline(engine, max_adapters=2)
    for name in "abac":  # c replaces b
        with adapters.held(asked(files, name), 1):
            pass
    with adapters.held(asked(files, "a"), 1):
        pass
    assert engine.begun == [(0, "a"), (1, "b"), (1, "c")]
    with adapters.held(asked(files, "a"), 1), adapters.held(asked(files, "b"), 1):
        assert engine.begun[-1] == (1, "b"), "a is held, so c was replaced"
        with pytest.raises(InvalidRequestError, match=r"no slot is free .*'a', 'b'"):
            adapters.held(asked(files, "d"), 1).__enter__()
    with adapters.held(asked(files, "d"), 1):
        assert engine.begun[-1] == (0, "d")


def test_another_id_or_path_is_another_adapter(files: Path) -> None:
    engine = ScriptedEngine()
    adapters = offline(engine, max_adapters=3)
    first = LoRARequest("x", 1, str(files / "a"))
    with adapters.held(first, 1) as [one]:
        with adapters.held(LoRARequest("x", 1, str(files / "b")), 1) as [other]:
            assert one is not None
            assert other is not None
            assert one.slot != other.slot
        with adapters.held(LoRARequest("x", 2, str(files / "b")), 1) as [third]:
            # The files are the same, so nothing is loaded.
            assert third == other
        with adapters.held([first, LoRARequest("x", 9, str(files / "c"))], 2) as [again, last]:
            assert again is not None
            assert last is not None
            assert again.slot != last.slot
    assert [name for _, name in engine.begun] == ["a", "b", "a", "c"]


def test_in_place_means_to_read_the_files_again(files: Path) -> None:
    engine = ScriptedEngine()
    adapters = offline(engine, max_adapters=2)
    for in_place, content, num_loads in (
        (False, "1", 1),
        (True, "1", 1),
        (False, "2", 1),
        (True, "2", 2),
    ):
        write_adapter(files / "a", content)
        with adapters.held(asked(files, "a", load_inplace=in_place), 1) as [one]:
            assert one is not None
        assert len(engine.begun) == num_loads


def test_a_load_that_fails_gives_its_slot_back(files: Path) -> None:
    engine = ScriptedEngine()
    adapters = offline(engine, max_adapters=1)
    engine.failure = "rank 64 is above lora.max_rank=16"
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="'a' cannot be loaded: rank 64 is above"):
            adapters.held(asked(files, "a"), 1).__enter__()
    engine.failure = ""
    with adapters.held(asked(files, "b"), 1):
        pass


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_load_goes_on_after_a_ctrl_c(files: Path, name: str) -> None:
    engine = ScriptedEngine()
    adapters = offline(engine, max_adapters=1)
    engine.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        adapters.held(asked(files, "a"), 1).__enter__()
    with adapters.held(asked(files, name), 1) as [one]:
        assert one is not None
        assert one.name == name
    assert engine.begun == ([(0, "a")] if name == "a" else [(0, "a"), (0, "b")])


@pytest.mark.parametrize(
    ("what", "count", "slots", "message"),
    [
        ("a", 2, 1, None),
        (["a"], 2, 1, "the list lora_request has length 1, and the list of prompts has length 2"),
        (["a", "b"], 2, 1, "the call names 2 adapters, and lora.max_adapters=1"),
        ("a", 1, 0, "lora.max_adapters=0; start with lora.max_adapters=1 or more, or with enable"),
        ("base", 1, 1, "is the name of the served model"),
        ("nothing", 1, 1, "is neither a directory nor a hub id"),
        ("empty", 1, 1, "has no "),
    ],
)
def test_refusals(
    files: Path, what: str | list[str], count: int, slots: int, message: str | None
) -> None:
    (files / "empty").mkdir()
    write_adapter(files / "base")
    engine = ScriptedEngine()
    adapters = offline(engine, max_adapters=slots)
    wanted = [asked(files, name) for name in what] if isinstance(what, list) else asked(files, what)
    if message is None:
        with adapters.held(wanted, count):
            return
    with pytest.raises(InvalidRequestError) as error:
        adapters.held(wanted, count).__enter__()
    assert message in str(error.value)
    assert engine.begun == []


def test_configured_adapters_are_loaded_first(files: Path) -> None:
    engine = ScriptedEngine()
    adapters = offline(engine, adapters={"sql": str(files / "a"), "b": str(files / "b")})
    adapters.load_configured()
    assert engine.begun == [(0, "a"), (1, "b")]
    with adapters.held(LoRARequest("sql", 7, str(files / "a")), 1):
        assert len(engine.begun) == 2
    with pytest.raises(StartupError, match=r"lora\.adapters, sql=/no/such: .*neither a directory"):
        offline(engine, adapters={"sql": "/no/such"}).load_configured()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("x", 0, "/a"), "lora_int_id must be at least 1, got 0"),
        (("x", 1, ""), "lora_path of 'x' is empty"),
        (("x", 1), "lora_path of 'x' is empty"),
    ],
)
def test_a_request_for_an_adapter_is_checked(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRARequest(*values)


def test_a_request_for_an_adapter_has_the_names_of_vllm() -> None:
    one = LoRARequest(lora_name="x", lora_int_id=3, lora_path="/p", base_model_name="m")
    assert (one.name, one.adapter_id, one.path) == ("x", 3, "/p")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=4)),
    st.integers(1, 4),
)
def test_each_prompt_gets_the_adapter_that_it_names(
    tmp_path_factory: pytest.TempPathFactory, calls: list[list[str | None]], num_slots: int
) -> None:
    files = tmp_path_factory.mktemp("adapters")
    for name in "abcd":
        write_adapter(files / name)
    engine = ScriptedEngine()
    adapters = offline(engine, max_adapters=num_slots)
    for names in calls:
        wanted = [None if name is None else asked(files, name) for name in names]
        if len({name for name in names if name}) > num_slots:
            with pytest.raises(InvalidRequestError, match="the call names"):
                adapters.held(wanted, len(names)).__enter__()
            continue
        with adapters.held(wanted, len(names)) as found:
            content = dict(engine.begun)  # the last load of each slot
            for name, adapter in zip(names, found, strict=True):
                assert (adapter is None) == (name is None)
                if adapter is not None:
                    assert content[adapter.slot] == name
