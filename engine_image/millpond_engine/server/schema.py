"""Request bodies as typed structs. Absent and null are the same; unknown fields are ignored.

Fields that change the meaning and are not supported are declared all the same, so that they can be refused
by name.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream reports beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """The schema of a response format; every one is followed exactly, `strict` or not."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's form of structured output."""

    type: str = "text"
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form of structured output: exactly one of the first five."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    """There is one library and no fallback."""
    # refused by name when given
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """Fields of both generation endpoints."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # refused by name when given
    prompt_embeds: Any = None
    suffix: str | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    logits_processors: Any = None
    lora_path: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class CompletionBody(CommonBody, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function of an assistant's tool call; `arguments` is a JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call in the history."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # refused by name when given
    function_call: Any = None
    audio: Any = None


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; functions are the only kind."""

    function: Function
    type: str = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    """The function a tool choice names."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """A tool choice that names a function."""

    function: NamedFunction
    type: str = "function"


class ChatBody(CommonBody, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[int]
    model: str | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of `/abort_requests`: ids as in responses; `abort_all` as SGLang's clients send it."""

    request_ids: list[str] | None = None
    rid: str | None = None
    abort_all: bool | None = None
