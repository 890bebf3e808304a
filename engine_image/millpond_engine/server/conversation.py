"""From messages to prompt tokens: checks, plain data for the template, rendering, tool choice."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from millpond_common.contract.openai import ErrorCode
from millpond_engine.server.context import ServerContext
from millpond_engine.server.errors import bad_value, make_error, unsupported
from millpond_engine.server.schema import ChatBody, Message, NamedTool, TokenizeBody, Tool, ToolCall
from millpond_engine.text import toolcalls
from millpond_engine.text.template import ChatInput, TemplateFailedError, render_chat

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_RESERVED = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "raise_exception",
}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a tool choice means for prompt and answer."""

    shown: tuple[Tool, ...] = ()
    """Tools the template sees."""
    parse: bool = False
    """Look for calls in the answer."""
    forced_prefix: str = ""
    """Text of a call that the prompt begins, so that the model can only go on with it."""
    max_calls: int | None = None
    """Most calls of one choice; absent: any number."""
    callable: tuple[Tool, ...] = ()
    """Tools that a grammar lets the answer call."""


def plan_tools(body: ChatBody, context: ServerContext) -> ToolPlan:
    """Decide what `tools` and `tool_choice` ask for.

    Raises:
        RequestError: a choice that cannot be honoured.
    """
    tools = tuple(body.tools or ())
    choice = body.tool_choice
    if len(tools) > context.limits.max_tools:
        raise bad_value("tools", f"at most {context.limits.max_tools} tools")
    if any(tool.type != "function" for tool in tools):
        raise unsupported("tools", "only functions are served")
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return ToolPlan(tools, parse=False)
    if not tools:
        raise bad_value("tool_choice", "needs tools")
    taught = toolcalls.is_taught_by(_get_template(body.chat_template, context, tools))
    most = 1 if body.parallel_tool_calls is False else None
    if choice == "auto":
        return ToolPlan(tools, parse=taught, max_calls=most, callable=tools)
    if not taught:
        raise unsupported(
            "tool_choice", "this model's chat template teaches no tool-call form; use auto or none"
        )
    forced = _make_prefix(tools, choice)
    if isinstance(choice, NamedTool):
        only = tuple(tool for tool in tools if tool.function.name == choice.function.name)[:1]
        return ToolPlan(tools, parse=True, forced_prefix=forced, max_calls=1, callable=only)
    return ToolPlan(tools, parse=True, forced_prefix=forced, max_calls=most, callable=tools)


def _make_prefix(tools: tuple[Tool, ...], choice: str | NamedTool) -> str:
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise bad_value("tool_choice", "names a function that is not among the tools")
        return f'{toolcalls.OPEN}\n{{"name": {json.dumps(choice.function.name)}, "arguments": '
    if choice != "required":
        raise bad_value("tool_choice", "must be none, auto, required or name a function")
    if len(names) == 1:
        return f'{toolcalls.OPEN}\n{{"name": {json.dumps(names[0])}, "arguments": '
    return f'{toolcalls.OPEN}\n{{"name": "'


def render_conversation(body: ChatBody, context: ServerContext, plan: ToolPlan) -> str:
    """Prompt text of a chat call.

    Raises:
        RequestError: malformed messages, or the template's refusal of them.
    """
    if body.chat_template is not None and not context.allow_request_template:
        raise unsupported("chat_template", "this engine uses the model's own template")
    if body.chat_template is not None and len(body.chat_template) > context.limits.max_template_bytes:
        raise bad_value("chat_template", f"at most {context.limits.max_template_bytes} characters")
    variables = dict(context.tokenizer.facts.template_variables)
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    variables.update(_check_kwargs(body.chat_template_kwargs))
    continue_final = bool(body.continue_final_message)
    add_prompt = body.add_generation_prompt is not False and not continue_final
    if continue_final and body.add_generation_prompt:
        raise bad_value("continue_final_message", "excludes add_generation_prompt")
    chat = ChatInput(
        messages=make_messages(body.messages, context),
        tools=[msgspec.to_builtins(tool) for tool in plan.shown] or None,
        documents=body.documents,
        add_generation_prompt=add_prompt,
        continue_final_message=continue_final,
        variables=variables,
    )
    return _render(_get_template(body.chat_template, context, plan.shown), chat) + plan.forced_prefix


def render_for_tokenize(body: TokenizeBody, context: ServerContext) -> str:
    """Prompt text that `/tokenize` counts for messages."""
    chat = ChatBody(
        messages=body.messages or [],
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    return render_conversation(chat, context, ToolPlan(tuple(body.tools or ())))


def make_messages(messages: list[Message], context: ServerContext) -> list[dict[str, Any]]:
    """Messages as plain data: text content, known roles, parsed arguments.

    Raises:
        RequestError: naming the message.
    """
    if not messages:
        raise bad_value("messages", "must not be empty")
    if len(messages) > context.limits.max_messages:
        raise bad_value("messages", f"at most {context.limits.max_messages} messages")
    return [_make_message(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _make_message(message: Message, param: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise bad_value(f"{param}.role", f"must be one of {', '.join(_ROLES)}")
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise unsupported(f"{param}.{name}", "only text and tool_calls are served")
    data: dict[str, Any] = {"role": role, "content": _make_content(message, param)}
    if message.name is not None:
        data["name"] = message.name
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        data["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        data["tool_calls"] = [_make_call(call, f"{param}.tool_calls") for call in message.tool_calls]
    return data


def _make_content(message: Message, param: str) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            raise unsupported(f"{param}.content", "only text parts are served")
        if part.text is None:
            raise bad_value(f"{param}.content", "a text part needs text")
    return "\n".join(part.text or "" for part in message.content)


def _make_call(call: ToolCall, param: str) -> dict[str, Any]:
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        found = toolcalls.load_object(arguments) if arguments.strip() not in {"", "null"} else {}
        if found is None:
            raise bad_value(f"{param}.function.arguments", "must be the JSON text of an object")
        arguments = found
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _check_kwargs(variables: dict[str, Any] | None) -> dict[str, Any]:
    clash = _RESERVED.intersection(variables or {})
    if clash:
        raise bad_value("chat_template_kwargs", f"must not hold {', '.join(sorted(clash))}")
    return variables or {}


def _get_template(given: str | None, context: ServerContext, tools: tuple[Tool, ...]) -> str:
    facts = context.tokenizer.facts
    template = given or (facts.tool_template if tools else None) or facts.chat_template
    if template is None:
        message = "this model has no chat template; use /v1/completions"
        raise make_error(ErrorCode.INVALID_VALUE, message, param="messages")
    return template


def _render(template: str, chat: ChatInput) -> str:
    try:
        return render_chat(template, chat)
    except TemplateFailedError as error:
        raise make_error(ErrorCode.INVALID_VALUE, str(error), param="messages") from error
