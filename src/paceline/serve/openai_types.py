"""The request bodies of the API, as OpenAI and vLLM spell them. A field that is not here is refused by name.

Knows shapes only: bounds of sampling parameters are those of runtime/sampling.py, which names the field it refuses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True, ge=-(1 << 63), lt=1 << 63)]
Flag = Annotated[bool, Field(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
_ONE_WORD = r"^[\x21-\x7e]+$"

# What would change the answer and cannot be honoured: why, for those who ask.
UNSUPPORTED = {
    "audio": "this model writes text only",
    "chat_template": "a template is code, and this server runs nobody's but the model's",
    "kv_transfer_params": "prompts are computed where they are answered here",
    "logits_processors": "code of clients is not run here; `logit_bias`, `bad_words` and grammars are there instead",
    "logprob_token_ids": "`top_logprobs` gives the likeliest, `allowed_token_ids` chooses between some",
    "mm_processor_kwargs": "this model reads text only",
    "repetition_detection": "use the penalties, or `stop`",
    "thinking_token_budget": "use `max_tokens`, or `chat_template_kwargs` such as `enable_thinking`",
    "vllm_xargs": "it is for custom extensions of vLLM",
    "web_search_options": "this server searches nothing: do it in the client, and pass the results as messages",
}


class Body(BaseModel):
    """A body, or a part of one. What is null counts as left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class StreamOptions(Body):
    include_usage: Flag = False
    continuous_usage_stats: Flag = Field(False, description="Usage so far with every chunk, as in vLLM.")
    include_obfuscation: Flag = Field(False, description="Accepted; nothing is padded here.")


class Speculation(Body):
    """Speculation of this request; what is not given is the engine's own. It never changes the text."""

    enabled: Flag = True
    num_draft_tokens: Annotated[int, Field(strict=True, ge=1, lt=1 << 31)] | None = None
    method: Literal["draft", "suffix", "hybrid"] | None = None


class Sampling(Body):
    """What every generating endpoint takes, whatever its form."""

    model: str | None = None
    min_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    bad_words: list[str] | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=_ONE_WORD)
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024,
        description="Requests of different salts share neither cached prefixes nor what drafts are made from.",
    )  # fmt: skip
    priority: Integer = Field(0, description="Lower runs first.")
    speculation: Speculation | None = None
    # Accepted, because every client may send them, and without effect here: nothing is stored or billed.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    store: Flag | None = None
    service_tier: str | None = None


class Generation(Sampling):
    """What both completion endpoints take."""

    max_tokens: Integer | None = None
    n: Integer | None = None
    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Annotated[int, Field(strict=True, ge=-1, lt=1 << 31)] | None = Field(
        None, description="Keep this many tokens of the prompt, its last ones; -1: as many as the model takes."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Which end of a long prompt goes.")
    add_special_tokens: Flag | None = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = Field(False, description="In logprobs, `token_id:N` for a token's text.")
    return_token_details: Flag = Field(False, description="With each chunk: origin, logprob and round of every token.")
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    # Accepted, and without effect here.
    session_id: str | None = None
    spaces_between_special_tokens: Flag | None = None
    # Their defaults alone can be honoured.
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None


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
    """A piece of a message's text. There is no model here that sees or hears."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str = ""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            return value
        kind = value["type"]
        if kind not in ("text", "refusal"):
            message = "this model reads text only, and a part of type `{kind}` is none"
            raise PydanticCustomError("paceline", message, {"kind": kind[:40]})
        if not isinstance(value.get(kind), str):
            raise PydanticCustomError("paceline", "a part of type `{kind}` needs a `{kind}`, a string", {"kind": kind})
        return {"type": "text", "text": value[kind]}


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


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # of an earlier answer, sent back


class Prediction(Body):
    """What the output may look like: drafts are taken from it. It never changes the text."""

    type: Literal["content"]
    content: str | list[ContentPart]


class ChatCompletionRequest(Generation):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    functions: list[FunctionDefinition] | None = Field(None, description="The older form of `tools`.")
    function_call: Literal["auto", "none"] | FunctionName | None = Field(None, description="Of `tool_choice`.")
    prediction: Prediction | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: Flag = True
    echo: Flag = Field(False, description="Begin the answer with the message that it continues.")
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = Field(False, description="Go on with the last message rather than answer it.")
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Generation):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    suffix: str | None = None
    echo: Flag | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: Flag = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]
