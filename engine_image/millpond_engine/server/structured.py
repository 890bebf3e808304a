"""What a request's text must follow: the fields of OpenAI and of vLLM into one grammar, every doubt refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from millpond_engine.grammar.spec import GrammarKind, GrammarSpec
from millpond_engine.server.errors import bad_value, unsupported
from millpond_engine.server.limits import ServerLimits
from millpond_engine.server.schema import CommonBody, ResponseFormat, StructuredOutputs

_FORMATS = "text, json_object or json_schema"
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_NOT_SERVED = {
    "structural_tag": "use tools, or a grammar",
    "whitespace_pattern": "white space between the tokens of JSON is free up to 40 characters; "
    "disable_any_whitespace forbids it",
    "disable_additional_properties": 'write "additionalProperties": false into the schema',
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field that asked for it."""

    param: str
    spec: GrammarSpec
    schema: dict[str, Any] | None = None
    """Where the grammar is a JSON schema."""


def read_constraint(body: CommonBody, limits: ServerLimits) -> Constraint | None:
    """What `response_format` or `structured_outputs` ask for; None for free text.

    Raises:
        RequestError: naming the field, with what to do.
    """
    by_format = _read_format(body.response_format, limits)
    own = _read_structured(body.structured_outputs, limits)
    if by_format is not None and own is not None:
        raise bad_value(
            "structured_outputs", "response_format constrains the text already; give one of the two"
        )
    found = by_format or own
    if found is not None and body.use_beam_search:
        raise bad_value("use_beam_search", f"cannot be combined with {found.param}; remove one of the two")
    if found is None or not body.ignore_eos:
        return found
    return replace(found, spec=replace(found.spec, keep_ends=False))


def _read_format(given: ResponseFormat | None, limits: ServerLimits) -> Constraint | None:
    param = "response_format"
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return make_schema_constraint(param, {"type": "object"}, limits)
    if given.type != "json_schema":
        raise unsupported(param, f"type must be {_FORMATS}; use structured_outputs for other grammars")
    if given.json_schema is None:
        raise bad_value(param, "type json_schema needs json_schema with name and schema")
    if not 1 <= len(given.json_schema.name) <= 64:
        raise bad_value(param, "json_schema.name must have 1 to 64 characters")
    if given.json_schema.schema is None:
        raise bad_value(param, 'json_schema needs schema; for any object use {"type": "json_object"}')
    return make_schema_constraint(param, given.json_schema.schema, limits)


def _read_structured(given: StructuredOutputs | None, limits: ServerLimits) -> Constraint | None:
    param = "structured_outputs"
    if given is None:
        return None
    for name, hint in _NOT_SERVED.items():
        if getattr(given, name):
            raise unsupported(param, f"{name} is not served: {hint}")
    asked = [name for name in _FORMS if getattr(given, name) not in (None, False)]
    if len(asked) != 1:
        told = ", ".join(_FORMS)
        raise bad_value(param, f"needs exactly one of {told}; it has {' and '.join(asked) or 'none of them'}")
    if given.disable_any_whitespace and asked[0] not in ("json", "json_object"):
        raise bad_value(param, "disable_any_whitespace is for json and json_object; remove it")
    compact = bool(given.disable_any_whitespace)
    if given.json is not None:
        return make_schema_constraint(param, _load_schema(param, given.json), limits, compact=compact)
    if given.regex is not None:
        _check_text(param, "regex", given.regex, limits.max_regex_characters)
        return Constraint(param, GrammarSpec(GrammarKind.REGEX, given.regex))
    if given.choice is not None:
        return Constraint(param, GrammarSpec(GrammarKind.LARK, _spell_choices(param, given.choice, limits)))
    if given.grammar is not None:
        _check_text(param, "grammar", given.grammar, limits.max_grammar_characters)
        return Constraint(param, GrammarSpec(GrammarKind.EBNF, given.grammar))
    return make_schema_constraint(param, {"type": "object"}, limits, compact=compact)


def make_schema_constraint(
    param: str, schema: dict[str, Any], limits: ServerLimits, *, compact: bool = False
) -> Constraint:
    """A JSON schema, if it is within its bounds.

    Raises:
        RequestError: naming `param`.
    """
    kind = GrammarKind.COMPACT_JSON_SCHEMA if compact else GrammarKind.JSON_SCHEMA
    return Constraint(param, GrammarSpec(kind, check_schema(param, schema, limits)), schema)


def check_schema(param: str, schema: dict[str, Any], limits: ServerLimits) -> str:
    """The schema's text, if its size, depth and number of properties are within their bounds.

    Raises:
        RequestError: naming `param`.
    """
    text = json.dumps(schema, ensure_ascii=False)
    _check_text(param, "the schema", text, limits.max_schema_characters)
    if "x-guidance" in schema:
        raise unsupported(param, "the schema must not hold x-guidance; remove it")
    num_properties = 0
    level: list[Any] = [schema]
    for depth in range(limits.max_schema_depth + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                own = value.get("properties")
                num_properties += len(own) if isinstance(own, dict) else 0
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        level = below
        if not level:
            break
        if depth == limits.max_schema_depth:
            raise bad_value(param, f"the schema is nested deeper than {depth} levels of JSON; flatten it")
    if num_properties > limits.max_schema_properties:
        most = limits.max_schema_properties
        raise bad_value(
            param, f"the schema has {num_properties} properties; at most {most} are served, split it"
        )
    return text


def _check_text(param: str, what: str, text: str, most: int) -> None:
    if not text.strip():
        raise bad_value(param, f"{what} is empty")
    if len(text) > most:
        raise bad_value(
            param, f"{what} has {len(text)} characters; at most {most} are served, make it smaller"
        )


def _load_schema(param: str, given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = msgspec.json.decode(given.encode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_value(param, "json must be a JSON schema or its text, and this text is not JSON") from error
    if not isinstance(schema, dict):
        raise bad_value(param, "json must be a JSON schema: an object")
    return schema


def _spell_choices(param: str, choices: list[str], limits: ServerLimits) -> str:
    """Alternatives in Lark."""
    if not 1 <= len(choices) <= limits.max_choices:
        raise bad_value(param, f"choice must have 1 to {limits.max_choices} texts")
    for choice in choices:
        if not choice:
            raise bad_value(param, "a choice must not be empty")
        _check_text(param, "a choice", choice + ".", limits.max_schema_characters)
    text = "start: " + " | ".join(spell_literal(choice) for choice in dict.fromkeys(choices))
    _check_text(param, "choice", text, limits.max_schema_characters)
    return text


def spell_literal(text: str) -> str:
    """A text in Lark: JSON's own form of it, and no control character as itself."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
