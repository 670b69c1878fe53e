"""Counts the files that a new sampling parameter and a new endpoint touch."""

import re
from collections import Counter

import pytest

from ostinato.api.base.unsupported_endpoints import INSTEAD, hint_for
from ostinato.api.schemas.generation_fields import GenerationFields
from ostinato.api.server.app import create_app
from ostinato.api.service.service import Service
from ostinato.conf.schema import SamplingSection
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.types.params import SamplingParams
from tests.api.fake_client import FakeClient
from tests.arch.tree import name_of, source_files

MAX_FILES = 5
# Parameters that the API passes to the sampler and does not use itself. Names such as `n`, `seed`
# and `stop` have other meanings in other files, so their files cannot be counted.
PARAMETERS = (
    "frequency_penalty",
    "logit_bias",
    "presence_penalty",
    "repetition_detection",
    "repetition_penalty",
)
# Folders that translate other fields into those of chat: two dialects, and the command line.
DIALECTS = ("api/anthropic/", "api/responses/", "api/cli/")


@pytest.fixture(scope="module")
def paths() -> list[str]:
    app = create_app(Service(FakeClient([]), ServerConfig(), SamplingSection()))
    return [route.path for route in app.routes]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_sampling_parameter_is_one_file_of_the_api_and_five_in_all(name: str):
    assert name in GenerationFields.__struct_fields__
    assert name in SamplingParams.__struct_fields__
    word = re.compile(rf"\b{name}\b")
    layers = ("api/", "runtime/", "graphs/", "ops/")
    named = [
        name_of(file)
        for file in source_files()
        if name_of(file).startswith(layers)
        and not name_of(file).startswith(DIALECTS)
        and word.search(file.read_text(encoding="utf-8"))
    ]
    of_the_api = [file for file in named if file.startswith("api/")]
    assert of_the_api == ["api/schemas/generation_fields.py"]
    assert len(named) <= MAX_FILES, named


def test_an_endpoint_is_declared_once_and_in_a_routes_module(paths: list[str]):
    declared = Counter(
        path
        for file in source_files()
        if name_of(file).startswith("api/")
        for call in re.findall(
            r"@(?:get|post|delete|(?:get|post|delete)_endpoint)\((.*?)\)\nasync def",
            file.read_text(encoding="utf-8"),
            re.DOTALL,
        )
        for path in re.findall(r'"(/[^"]*)"', call)
    )
    # GET and DELETE of a stored response are two handlers, and so are GET and POST of a probe.
    assert {path: count for path, count in declared.items() if count > 1} == {
        "/ping": 2,
        "/v1/responses/{response_id:str}": 2,
    }
    served = {path for path in paths if not path.startswith("/schema")}
    assert {re.sub(r"\{(\w+):\w+\}", r"{\1}", path) for path in declared} == {
        re.sub(r"\{(\w+):\w+\}", r"{\1}", path) for path in served
    }


def test_hints_name_endpoints_that_are_served(paths: list[str]):
    assert [path for path in paths if hint_for(path)] == []
    named = {path for text in INSTEAD.values() for path in re.findall(r"/[\w/]+", text)}
    assert [path for path in named if path not in paths] == []
