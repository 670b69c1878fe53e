"""Clients of other projects against a real server. A client that is not installed is skipped.

`langchain-openai` is in the test extra. The others are not: they need some fifty packages and an
older version of `openai`. docs/tools-and-reasoning.md says how to run them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.scripted_model import scripted_server
from tests.e2e.server_process import ServerProcess

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWERS = {"weather?": CALL, "sunny": "It is sunny.", "hi": "Hello there."}
TEMPLATE = (
    "{# tools <tool_call> #}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %} {{ c.function.name }}"
    "{% endfor %} {% endfor %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "weather", "parameters": PARAMETERS},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with scripted_server(tmp_path_factory.mktemp("model"), ANSWERS, TEMPLATE) as process:
        yield process


class TestLangChain:
    @pytest.fixture
    def chat(self, server: ServerProcess) -> Any:
        langchain_openai = pytest.importorskip("langchain_openai")
        return langchain_openai.ChatOpenAI(
            base_url=f"{server.url}/v1", api_key="none", model="scripted", timeout=200
        )

    def test_text_and_stream(self, chat):
        assert chat.invoke("hi").content == "Hello there."
        assert "".join(chunk.content for chunk in chat.stream("hi")) == "Hello there."

    def test_a_call_and_its_result(self, chat):
        messages = pytest.importorskip("langchain_core.messages")
        bound = chat.bind_tools([TOOL])
        first = bound.invoke("weather?")
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
        result = messages.ToolMessage("sunny", tool_call_id=call["id"])
        answer = bound.invoke([messages.HumanMessage("weather?"), first, result])
        assert answer.content == "It is sunny."


class TestLiteLLM:
    @pytest.fixture
    def ask(self, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up in the network
        litellm = pytest.importorskip("litellm")

        def completion(text: str, **fields: Any) -> Any:
            return litellm.completion(
                model="hosted_vllm/scripted",
                api_base=f"{server.url}/v1",
                api_key="none",
                messages=[{"role": "user", "content": text}],
                timeout=200,
                **fields,
            )

        return completion

    def test_text_and_stream(self, ask):
        assert ask("hi").choices[0].message.content == "Hello there."
        pieces = [chunk.choices[0].delta.content or "" for chunk in ask("hi", stream=True)]
        assert "".join(pieces) == "Hello there."

    def test_a_call(self, ask):
        pytest.importorskip("mcp")  # litellm imports it for tools but does not depend on it
        (call,) = ask("weather?", tools=[TOOL]).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}


class TestLlamaIndex:
    @pytest.fixture
    def llm(self, server: ServerProcess) -> Any:
        openai_like = pytest.importorskip("llama_index.llms.openai_like")
        return openai_like.OpenAILike(
            api_base=f"{server.url}/v1",
            api_key="none",
            model="scripted",
            is_chat_model=True,
            is_function_calling_model=True,
            timeout=200,
        )

    def test_text_and_stream(self, llm):
        core = pytest.importorskip("llama_index.core.llms")
        messages = [core.ChatMessage(role="user", content="hi")]
        assert llm.chat(messages).message.content == "Hello there."
        assert "".join(piece.delta or "" for piece in llm.stream_chat(messages)) == "Hello there."

    def test_a_call(self, llm):
        tools = pytest.importorskip("llama_index.core.tools")

        def get_weather(city: str) -> str:
            """Weather of a city."""
            return f"sunny in {city}"

        tool = tools.FunctionTool.from_defaults(get_weather)
        answer = llm.chat_with_tools([tool], user_msg="weather?")
        (call,) = llm.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Oslo"})
