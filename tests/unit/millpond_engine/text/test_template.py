from __future__ import annotations

import time

import pytest

from millpond_engine.text.template import ChatInput, TemplateFailedError, render_chat

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, **names: object) -> str:
    return render_chat(source, ChatInput(messages=MESSAGES, **names), max_seconds=0.5)  # type: ignore[arg-type]


def test_a_template_sees_messages_tools_and_variables() -> None:
    source = "{{ messages[0].content }}|{{ tools | tojson }}|{{ bos_token }}|{{ add_generation_prompt }}"
    tools = [{"type": "function", "function": {"name": "é"}}]
    assert render(source, tools=tools, variables={"bos_token": "<s>"}) == (
        'hi|[{"type": "function", "function": {"name": "é"}}]|<s>|True'
    )


def test_generation_marks_are_plain_text() -> None:
    assert render("{% generation %}a{% endgeneration %}b") == "ab"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system role') }}",
        "{% for x in %}",
        "{{ undefined_name.field }}",
        "{{ 'a' * 100000000 }}",
        "{{ 2 ** 100000000 }}",
        "{{ '%1000000000s' % 'a' }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_that_fails_or_breaks_out_is_refused(source: str) -> None:
    with pytest.raises(TemplateFailedError):
        render(source)


def test_a_template_that_never_ends_is_stopped() -> None:
    source = "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
    started = time.monotonic()
    with pytest.raises(TemplateFailedError, match="did not finish"):
        render(source)
    assert time.monotonic() - started < 5


def test_a_template_that_writes_too_much_is_stopped() -> None:
    with pytest.raises(TemplateFailedError, match=r"characters|did not finish"):
        render(
            "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endfor %}"
        )


def test_the_message_of_a_failure_holds_no_prompt_text() -> None:
    with pytest.raises(TemplateFailedError) as caught:
        render_chat("{{ 1 / 0 ~ messages }}", ChatInput(messages=[{"role": "user", "content": "secret"}]))
    assert "secret" not in str(caught.value)


def test_the_last_message_can_be_continued() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Once upon"}]
    chat = ChatInput(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert render_chat(source, chat) == "[user]q<end>[assistant]Once upon"


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize(
    "content", ["d", "end", "<end>", "", " ", "\n", "a ", "a\n\n", " a", "Once upon <end> a", "q"]
)
def test_a_continued_message_is_cut_at_its_own_end_whatever_it_says(content: str, trims: bool) -> None:
    said = "(m.content | trim)" if trims else "m.content"
    source = "{% for m in messages %}[{{ m.role }}]\n{{ " + said + " }}<end>\n{% endfor %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    chat = ChatInput(messages=messages, add_generation_prompt=False, continue_final_message=True)
    shown = content.strip() if trims else content
    assert render_chat(source, chat) == f"[user]\nq<end>\n[assistant]\n{shown}"


def test_a_template_that_hides_the_message_to_continue_is_refused() -> None:
    chat = ChatInput(messages=MESSAGES, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(TemplateFailedError, match="continue_final_message"):
        render_chat("nothing", chat)
