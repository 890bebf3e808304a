"""Grammars of tool calls in the form that `text.toolcalls` reads: a name that is a tool's, arguments by its schema."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from millpond_engine.grammar.spec import GrammarKind, GrammarSpec, embed_schema
from millpond_engine.server.conversation import ToolPlan
from millpond_engine.server.errors import bad_value
from millpond_engine.server.limits import ServerLimits
from millpond_engine.server.schema import ChatBody, Tool
from millpond_engine.server.structured import Constraint, check_schema, read_constraint, spell_literal
from millpond_engine.text import toolcalls

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def constrain_chat(
    body: ChatBody, plan: ToolPlan, limits: ServerLimits, *, has_grammars: bool
) -> Constraint | None:
    """What a chat answer must follow: a response format, a forced call, or either of both where both are possible.

    Raises:
        RequestError: naming the field.
    """
    asked = read_constraint(body, limits)
    if not has_grammars:
        return None
    if plan.forced_prefix:
        if asked is not None:
            raise bad_value(
                asked.param, "constrains the text, and tool_choice asks for a call; give one of the two"
            )
        if body.use_beam_search:
            raise bad_value("use_beam_search", "cannot be combined with a tool_choice that forces a call")
        spec = GrammarSpec(GrammarKind.LARK, _make_forced(plan, limits), keep_ends=not body.ignore_eos)
        return Constraint("tools", spec)
    if asked is None or not plan.parse:
        return asked
    if asked.schema is None:
        raise bad_value(asked.param, "only JSON can be asked for beside tools; set tool_choice to none")
    return replace(
        asked, spec=replace(asked.spec, kind=GrammarKind.LARK, text=_make_either(asked, plan, limits))
    )


def _make_forced(plan: ToolPlan, limits: ServerLimits) -> str:
    """What follows the begun call: the rest of it, and more calls where there may be more."""
    tools, rules = plan.callable, _list_rules(plan, limits)
    named = plan.forced_prefix.endswith(_ARGUMENTS)
    firsts = [
        f"arguments_{i} close"
        if named
        else f"{spell_literal(_spell_name(tool)[1:] + _ARGUMENTS)} arguments_{i} close"
        for i, tool in enumerate(tools)
    ]
    more = "" if plan.max_calls == 1 else f" ({spell_literal(chr(10))} call)*"
    return "\n".join([f"start: ({' | '.join(firsts)}){more}", *rules])


def _make_either(asked: Constraint, plan: ToolPlan, limits: ServerLimits) -> str:
    """The text that was asked for, or calls."""
    assert asked.schema is not None
    more = "" if plan.max_calls == 1 else f" ({spell_literal(chr(10))} call)*"
    return "\n".join(
        [f"start: answer | call{more}", f"answer: {embed_schema(asked.schema)}", *_list_rules(plan, limits)]
    )


_BEGIN = f'{toolcalls.OPEN}\n{{"name": '
_ARGUMENTS = ', "arguments": '
_END = f"}}\n{toolcalls.CLOSE}"


def _list_rules(plan: ToolPlan, limits: ServerLimits) -> list[str]:
    """`call`, `close` and the arguments of each tool."""
    tools = plan.callable
    calls = [
        f"{spell_literal(_BEGIN + _spell_name(tool) + _ARGUMENTS)} arguments_{i} close"
        for i, tool in enumerate(tools)
    ]
    schemas = [_get_parameters(tool, limits) for tool in tools]
    total = sum(len(check_schema("tools", schema, limits)) for schema in schemas)
    if total > limits.max_schema_characters:
        most = limits.max_schema_characters
        raise bad_value(
            "tools", f"the parameters have {total} characters together; at most {most} are served"
        )
    arguments = [f"arguments_{i}: {embed_schema(schema)}" for i, schema in enumerate(schemas)]
    return [f"call: {' | '.join(calls)}", f"close: {spell_literal(_END)}", *arguments]


def _spell_name(tool: Tool) -> str:
    return json.dumps(tool.function.name)


def _get_parameters(tool: Tool, limits: ServerLimits) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    given = tool.function.parameters
    if given is None:
        return _NO_PARAMETERS
    schema = {"type": "object", **given}
    if schema["type"] != "object":
        raise bad_value("tools", "the parameters of a function must be of type object")
    return schema
