from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond_engine.text.bytes_tokenizer import ByteTokenizer
from millpond_engine.text.template import ChatInput, render_chat
from millpond_engine.text.tokenizer import decode


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert decode(tokenizer, ids, skip_special_tokens=False) == text
    assert all(0 <= i < tokenizer.facts.vocabulary_size for i in ids)


def test_the_chat_template_shows_tools_and_calls() -> None:
    template = ByteTokenizer().facts.chat_template
    assert template is not None
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = render_chat(template, ChatInput(messages=messages, tools=[{"function": {"name": "f"}}]))
    assert 'Tools: [{"function": {"name": "f"}}]' in text
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in text
    assert text.endswith("<|im_start|>assistant\n")
