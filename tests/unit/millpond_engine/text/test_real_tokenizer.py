"""SmolLM2's tokenizer out of its GGUF file, against the one transformers makes of the same file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from millpond_engine.text.detokenizer import Detokenizer
from millpond_engine.text.load import load_tokenizer
from millpond_engine.text.template import ChatInput, render_chat
from millpond_engine.text.tokenizer import Tokenizer, TokenizerError, decode

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345 o'clock, don't you think?",
    "  leading\n\n\ttabs and   spaces \r\n",
    "žluťoučký kůň 🐎 日本語のテキスト 👩\u200d👩\u200d👧 a\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return x ** 2  # comment\n",
    "\u2028\u0085\x00\x7f",
    "x" * 300,
]
NUMERALS = " ¼ of ²³ ٣٤ Ⅷ"


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(str(smollm2_gguf))


@pytest.fixture(scope="module")
def directory(smollm2_gguf: Path) -> Path:
    """The tokenizer as transformers converts it, kept beside the GGUF file: the conversion takes half a minute."""
    import transformers

    target = smollm2_gguf.parent / f"smollm2-tokenizer-transformers-{transformers.__version__}"
    if not (target / "tokenizer.json").exists():
        made = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        made.save_pretrained(part)
        part.rename(target)
    return target


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Any:
    import transformers

    made = transformers.AutoTokenizer.from_pretrained(directory)
    # The conversion drops what the file's `smollm` stands for, and so joins a space with the first byte of "¼".
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), made.backend_tokenizer.pre_tokenizer]
    )
    return made


@pytest.mark.model
@pytest.mark.parametrize("text", [*TEXTS, NUMERALS])
def test_ids_and_text_equal_transformers(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == oracle.encode(text)
    assert decode(tokenizer, ids, skip_special_tokens=False) == oracle.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


@pytest.mark.model
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_any_text_equals_transformers(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False)


@pytest.mark.model
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_eng_047_any_ids_stream_to_the_full_decode_of_transformers(
    tokenizer: Tokenizer, oracle: Any, ids: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    streamed = "".join([*[detokenizer.push([i]) for i in ids], detokenizer.flush()])
    assert streamed == oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.model
def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    ids: list[int] = []
    encode = threading.Thread(
        target=lambda: ids.extend(tokenizer.encode("a b" * 200_000, add_special_tokens=True))
    )
    encode.start()
    num_turns = 0
    while encode.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert len(ids) == 200_001
    assert num_turns > 10


@pytest.mark.model
def test_the_chat_template_equals_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
    assert tokenizer.facts.chat_template is not None
    chat = ChatInput(messages=messages, variables=dict(tokenizer.facts.template_variables))
    rendered = render_chat(tokenizer.facts.chat_template, chat)
    assert rendered == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.model
def test_facts_of_the_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.facts.vocabulary_size == 49152
    assert tokenizer.facts.eos_token_ids == (2,)  # id 0 ends documents, which the chat template never writes


@pytest.mark.model
def test_a_directory_gives_the_same_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    other = load_tokenizer(str(directory))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert other.encode(text, add_special_tokens=False) == ids
        assert [other.token_bytes(i) for i in ids] == [tokenizer.token_bytes(i) for i in ids]
    assert other.facts.special_token_ids == tokenizer.facts.special_token_ids
    assert set(other.facts.eos_token_ids) <= set(tokenizer.facts.eos_token_ids)


def test_a_path_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    with pytest.raises(TokenizerError, match="broken"):
        load_tokenizer(str(broken))
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("split", ["llama-bpe", "qwen2"])
def test_split_patterns_cut_as_their_families_publish(split: str) -> None:
    from millpond_engine.text import gguf_tokenizer

    rule = gguf_tokenizer._SPLITS[split]
    alphabet = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ", "č"]
    made = gguf_tokenizer._make_tokenizer(alphabet, [], rule)
    pieces = [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str("I'LL pay 12345 now!!\r\n\n  ok")]
    numbers = ["123", "45"] if split == "llama-bpe" else ["1", "2", "3", "4", "5"]
    assert pieces == ["I", "'LL", "Ġpay", "Ġ", *numbers, "Ġnow", "!!čĊĊ", "Ġ", "Ġok"]
