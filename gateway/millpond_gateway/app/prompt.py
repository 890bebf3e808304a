"""Keys of a request's prompt for the prefix index.

The gateway has no tokenizer: a prompt of token ids gets the engine's own block keys, any other prompt keys over
chunks of its JSON text. A conversation's next turn repeats the bytes of the turns before it, so equal prefixes
give equal leading keys.
"""

from __future__ import annotations

from typing import Final

import msgspec

from millpond_common.contract.blockkey import KeyScope
from millpond_gateway.proxy.records import ParsedBody
from millpond_gateway.routing.keys import make_text_keys, make_token_keys
from millpond_gateway.routing.records import PromptKeys

_IDS: Final = msgspec.json.Decoder(list[int])
_DIGITS: Final = b"0123456789"


def make_prompt_keys(body: ParsedBody, scope: KeyScope, root: int, bytes_per_token: float) -> PromptKeys:
    """Keys and token count of a prompt; `root` is the scope's."""
    prompt = body.prompt
    if prompt.startswith(b"[") and prompt[1:16].lstrip()[:1] in _DIGITS:
        try:
            return make_token_keys(scope, _IDS.decode(prompt))
        except (msgspec.MsgspecError, OverflowError):
            pass  # not token ids after all; the engine will say what is wrong with them
    return make_text_keys(scope, prompt, template=body.template, bytes_per_token=bytes_per_token, root=root)
