"""From a call's constraint to a compiled grammar in its requests, off the event loop and before anything is scheduled."""

from __future__ import annotations

from dataclasses import replace

from millpond_common.contract.openai import ErrorCode
from millpond_engine.grammar.spec import GrammarBusyError, GrammarError
from millpond_engine.server.context import ServerContext
from millpond_engine.server.errors import RequestError, bad_value, make_error
from millpond_engine.server.prepare import PreparedCall
from millpond_engine.server.structured import Constraint


async def bind_grammar(context: ServerContext, call: PreparedCall, *, tenant: str) -> PreparedCall:
    """Compile what the call's text must follow, waiting for it, before anything is scheduled.

    Raises:
        RequestError: it cannot be compiled (400), or too many wait (503).
    """
    constraint = call.constraint
    if constraint is None or context.grammars is None:
        return call
    try:
        grammar = await context.grammars.get(
            constraint.spec, tenant=tenant, vocabulary=context.vocabulary_size, ends=context.end_tokens
        )
    except GrammarError as error:
        raise _refuse(constraint, str(error)) from error
    except GrammarBusyError as error:
        raise make_error(ErrorCode.OVERLOADED, str(error)) from error
    requests = tuple(replace(request, grammar=grammar) for request in call.requests)
    return replace(call, requests=requests)


def _refuse(constraint: Constraint, message: str) -> RequestError:
    what = "the schema" if constraint.schema is not None else "the grammar"
    return bad_value(constraint.param, f"{what} cannot be followed: {message}; remove or rewrite this part")
