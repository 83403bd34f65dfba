"""The request bodies of the API, as OpenAI and vLLM spell them. A field that is not here is refused by name.

Knows shapes only: bounds of sampling parameters are those of runtime/sampling.py, which names the field it refuses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True, ge=-(1 << 63), lt=1 << 63)]
Flag = Annotated[bool, Field(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(Body):
    include_usage: Flag = False


class Speculation(Body):
    """Speculation of this request; what is not given is the engine's own. It never changes the text."""

    enabled: Flag = True
    num_draft_tokens: Annotated[int, Field(strict=True, ge=1, lt=1 << 31)] | None = None
    method: Literal["draft", "suffix", "hybrid"] | None = None


class Generation(Body):
    """What both completion endpoints take."""

    model: str | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    n: Integer | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Integer = Field(0, description="Lower runs first.")
    speculation: Speculation | None = None
    return_token_details: Flag = Field(False, description="With each chunk: origin, logprob and round of every token.")
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None


class FunctionDefinition(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class ContentPart(BaseModel):
    """Text only: there is no model here that sees or hears."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class ChatCompletionRequest(Generation):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Generation):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    suffix: str | None = None
    echo: Flag | None = None
    logprobs: Integer | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: Flag = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]
