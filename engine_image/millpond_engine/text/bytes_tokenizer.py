"""One token per byte and three special tokens: the fake runner's tokenizer, complete and tiny."""

from __future__ import annotations

import re

from millpond_engine.text.tokenizer import TokenizerFacts

END = "<|im_end|>"
START = "<|im_start|>"
END_OF_TEXT = "<|endoftext|>"
_SPECIAL = {END: 256, START: 257, END_OF_TEXT: 258}
_BY_ID = {token_id: text.encode() for text, token_id in _SPECIAL.items()}
_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in _SPECIAL) + ")")
_BYTES = [bytes([value]) for value in range(256)]

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a message, 257 starts one, 258 ends a text."""

    def __init__(self) -> None:
        self._facts = TokenizerFacts(
            vocabulary_size=259,
            eos_token_ids=(256, 258),
            special_token_ids=frozenset(_BY_ID),
            chat_template=CHAT_TEMPLATE,
            template_variables={"eos_token": END, "bos_token": ""},
        )

    @property
    def facts(self) -> TokenizerFacts:
        """Facts fixed at load time."""
        return self._facts

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """UTF-8 bytes, with special tokens written out in the text taken as such."""
        del add_special_tokens
        ids: list[int] = []
        for piece in _SPLIT.split(text):
            if piece in _SPECIAL:
                ids.append(_SPECIAL[piece])
            else:
                ids.extend(piece.encode("utf-8", "replace"))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or the special token's text."""
        return _BYTES[token_id] if token_id < 256 else _BY_ID.get(token_id, b"")
