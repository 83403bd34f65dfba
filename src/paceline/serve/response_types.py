"""The body of /v1/responses, as OpenAI spells it, with our additions. Knows shapes only, as `openai_types.py` does."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.serve.openai_types import Body, Flag, Integer, Number, Prediction, Sampling

_NOT_STORED = "nothing is stored here: send the earlier turns as `input`, with the items of the earlier `output`"
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_TEXT_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class InputPart(BaseModel):
    """A piece of an item's text; `text` is what it says, whatever its type calls it."""

    model_config = ConfigDict(extra="ignore")
    text: str

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise PydanticCustomError("paceline", "a part must be an object with a `type`")
        key = _TEXT_PARTS.get(value["type"])
        if key is None:
            message = "this model reads text only, and a part of type `{kind}` is none"
            raise PydanticCustomError("paceline", message, {"kind": value["type"][:40]})
        if not isinstance(value.get(key), str):
            raise PydanticCustomError("paceline", "a part of type `{kind}` needs a `{key}`, a string",
                                      {"kind": value["type"], "key": key})  # fmt: skip
        return {"text": value[key]}


class InputItem(BaseModel):
    """One item of `input`: a message, a call of an earlier output, its result, or an earlier thought."""

    model_config = ConfigDict(extra="ignore")  # items of an output are sent back as they came, whatever is in them
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type") or "message"
        if kind == "item_reference":
            raise PydanticCustomError("paceline", f"an `item_reference` cannot be followed: {_NOT_STORED}")
        if kind not in _TEXT_ITEMS:
            known = ", ".join(f"`{name}`" for name in _TEXT_ITEMS)
            raise PydanticCustomError("paceline", "items of type `{kind}` are not known here; these are: {known}",
                                      {"kind": str(kind)[:40], "known": known})  # fmt: skip
        if kind == "reasoning":
            parts = [part for part in value.get("content") or () if isinstance(part, dict)]
            texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
            return {"type": kind, "content": "".join(texts)}
        needed = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
                  "function_call_output": ("call_id", "output")}[kind]  # fmt: skip
        for name in needed:
            if value.get(name) is None:
                raise PydanticCustomError("paceline", "an item of type `{kind}` needs `{name}`",
                                          {"kind": kind, "name": name})  # fmt: skip
        return {**value, "type": kind}


class ResponseTool(Body):
    """A function. OpenAI's own tools (search, files, code) are not here."""

    type: str
    name: str | None = Field(None, min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "function":
            message = "tools of type `{kind}` do not run here: offer it as a `function`, and run it in the client"
            raise PydanticCustomError("paceline", message, {"kind": value["type"][:40]})
        if isinstance(value, dict) and value.get("name") is None:
            raise PydanticCustomError("paceline", "a function needs a `name`")
        return value


class ResponseToolChoice(Body):
    type: Literal["function"]
    name: str


class TextOptions(Body):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = Field(None, description="Accepted; thoughts are answered whole, not summarised.")
    generate_summary: str | None = None


class ResponseRequest(Sampling):
    """What /v1/responses takes. Each answer is whole and stands alone: `store` is false, whatever a client sends."""

    input: str | list[InputItem] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = Field(None, description="`message.output_text.logprobs` gives logprobs.")
    top_logprobs: Integer | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` drops the oldest turns of an input that is too long."
    )
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    repetition_penalty: Number | None = None
    # Accepted, and without effect here.
    max_tool_calls: Integer | None = Field(None, description="Accepted; it bounds OpenAI's own tools only.")
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    background: Literal[False] | None = Field(None, description="True is refused: nothing runs after its answer.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_state(cls, value: Any) -> Any:
        for name in ("previous_response_id", "conversation", "prompt"):
            if isinstance(value, dict) and value.get(name) is not None:
                raise PydanticCustomError("paceline", "`{name}` cannot be followed: " + _NOT_STORED, {"name": name})
        return value
