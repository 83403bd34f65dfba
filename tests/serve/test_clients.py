"""The clients that people use, as they use them: whatever they send by themselves must be understood."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Literal

import pytest
from pydantic import BaseModel
from servers import running

from fake_engine import EOS, VOCAB_SIZE
from paceline.runtime.backend_fake import FakeBackend
from paceline.runtime.drafting.suffix import SuffixDrafter

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else litellm asks the internet when it is imported

CALL = b'<tool_call>\n{"name": "Flag", "arguments": {"on": true, "size": 3}}\n</tool_call>'
# A model that knows one tool and, asked for it, calls it of its own accord; that is told so by its template.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }};{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t.function.name }},{% endfor %}{% endif %}a:"
)


class Flag(BaseModel):
    """A flag that is set."""

    on: bool
    size: Literal[1, 2, 3]  # a model that draws bytes at random would write digits for ever


@pytest.fixture(scope="module")
def server():
    script = {tuple(b"u:set it;Flag,a:"): (*CALL, EOS), tuple(b"u:hi;a:"): (*b"Hello to you", EOS),
              tuple(b"u:json;a:"): (*b'{"on": false, "size": 1}', EOS)}  # fmt: skip
    backend = FakeBackend(VOCAB_SIZE, num_blocks=3000, context=1, script=script)
    with running(backend, drafter=SuffixDrafter(10_000, 2), template=TEMPLATE) as started:
        yield started
        started.idle()


class TestLiteLLM:
    @pytest.fixture
    def options(self, server):
        return {"model": "openai/bytes", "api_base": server.url + "/v1", "api_key": "none", "temperature": 0,
                "max_tokens": 200}  # fmt: skip

    def test_completion_stream_and_async(self, options):
        import litellm

        ask = {"messages": [{"role": "user", "content": "hi"}], **options}
        answer = litellm.completion(**ask)
        assert answer.choices[0].message.content == "Hello to you" and answer.choices[0].finish_reason == "stop"
        pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **ask)]
        assert "".join(pieces) == "Hello to you"
        assert asyncio.run(litellm.acompletion(**ask)).choices[0].message.content == "Hello to you"

    def test_tools_and_schemas(self, options):
        import litellm

        function = {"name": "Flag", "parameters": Flag.model_json_schema()}
        answer = litellm.completion(messages=[{"role": "user", "content": "set it"}],
                                    tools=[{"type": "function", "function": function}], **options)  # fmt: skip
        [call] = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"on": True, "size": 3}
        answer = litellm.completion(messages=[{"role": "user", "content": "x"}], response_format=Flag, **options)
        Flag.model_validate_json(answer.choices[0].message.content)

    def test_text_completion(self, options):
        import litellm

        options |= {"max_tokens": 5, "model": "text-completion-openai/bytes"}
        answer = litellm.text_completion(prompt="hi", **options)
        assert answer.usage.completion_tokens == 5


class TestLangChain:
    @pytest.fixture
    def chat(self, server):
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(base_url=server.url + "/v1", api_key="none", model="bytes", temperature=0, max_tokens=200)

    def test_invoke_and_stream(self, chat):
        answer = chat.invoke("hi")
        assert answer.content == "Hello to you" and answer.usage_metadata["output_tokens"] == 13
        assert "".join(chunk.content for chunk in chat.stream("hi")) == "Hello to you"
        assert asyncio.run(chat.ainvoke("hi")).content == "Hello to you"

    def test_tools(self, chat):
        [call] = chat.bind_tools([Flag]).invoke("set it").tool_calls
        assert call["name"] == "Flag" and call["args"] == {"on": True, "size": 3}
        streamed = None
        for chunk in chat.bind_tools([Flag]).stream("set it"):
            streamed = chunk if streamed is None else streamed + chunk
        assert [c["args"] for c in streamed.tool_calls] == [{"on": True, "size": 3}]
        forced = chat.bind_tools([Flag], tool_choice="Flag").invoke("anything")
        Flag.model_validate(forced.tool_calls[0]["args"])

    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_structured_output(self, chat, method):
        assert isinstance(chat.with_structured_output(Flag, method=method).invoke("json"), Flag)

    def test_a_conversation_with_a_tools_result(self, chat):
        from langchain_core.messages import HumanMessage, ToolMessage

        asked = chat.bind_tools([Flag]).invoke("set it")
        result = ToolMessage("done", tool_call_id=asked.tool_calls[0]["id"])
        assert chat.bind_tools([Flag]).invoke([HumanMessage("set it"), asked, result]).content is not None

    def test_the_responses_api(self, server):
        from langchain_openai import ChatOpenAI

        chat = ChatOpenAI(base_url=server.url + "/v1", api_key="none", model="bytes", temperature=0, max_tokens=200,
                          use_responses_api=True)  # fmt: skip
        assert chat.invoke("hi").text == "Hello to you"
        assert "".join(chunk.text for chunk in chat.stream("hi")) == "Hello to you"
        [call] = chat.bind_tools([Flag]).invoke("set it").tool_calls
        assert call["args"] == {"on": True, "size": 3}
        assert isinstance(chat.with_structured_output(Flag).invoke("x"), Flag)


class TestInstructor:
    @pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
    def test_a_model_is_answered(self, server, mode):
        import instructor
        import openai

        raw = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        client = instructor.from_openai(raw, mode=instructor.Mode[mode])
        ask = {"model": "bytes", "response_model": Flag, "temperature": 0, "max_tokens": 300,
               "messages": [{"role": "user", "content": "set it"}]}  # fmt: skip
        flag = client.chat.completions.create(**ask)
        assert isinstance(flag, Flag)
        pieces = list(client.chat.completions.create_partial(**ask))  # its tool has another name
        Flag.model_validate(pieces[-1].model_dump())


class TestLlamaIndex:
    @pytest.fixture
    def llm(self, server):
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(model="bytes", api_base=server.url + "/v1", api_key="none", is_chat_model=True, temperature=0,
                          is_function_calling_model=True, max_tokens=200, context_window=2000)  # fmt: skip

    def test_chat_and_stream(self, llm):
        from llama_index.core.llms import ChatMessage

        assert llm.chat([ChatMessage(role="user", content="hi")]).message.content == "Hello to you"
        streamed = list(llm.stream_chat([ChatMessage(role="user", content="hi")]))
        assert streamed[-1].message.content == "Hello to you"
        assert llm.complete("hi").text == "Hello to you"

    def test_tools(self, llm):
        from llama_index.core.tools import FunctionTool

        def Flag(on: bool, size: int) -> str:
            """Set it."""
            return ""

        answer = llm.chat_with_tools([FunctionTool.from_defaults(Flag)], user_msg="set it")
        [call] = llm.get_tool_calls_from_response(answer)
        assert call.tool_kwargs == {"on": True, "size": 3}


def test_openai_parse_helpers(server):
    import openai

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    ask = {"model": "bytes", "messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 300}
    assert isinstance(client.chat.completions.parse(response_format=Flag, **ask).choices[0].message.parsed, Flag)
    tool = openai.pydantic_function_tool(Flag)
    parsed = client.chat.completions.parse(tools=[tool], tool_choice="required", **ask).choices[0].message.tool_calls[0]
    assert isinstance(parsed.function.parsed_arguments, Flag)
    with client.chat.completions.stream(response_format=Flag, **ask) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Flag)
