"""Facts of byte-level tokenizers in GGUF files: what ends a turn, and what stands in front of a text."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from millpond_engine.text.load import load_tokenizer
from millpond_engine.text.tokenizer import Tokenizer

CONTROL, NORMAL = 3, 1
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|endoftext|>", "<|im_end|>"]


def load(path: Path, *, pre: str, template: str | None = None, bos: bool | None = None) -> Tokenizer:
    """A vocabulary of single characters and control tokens, whose file says that id 27 ends a text."""
    letters = [chr(ord("a") + i) for i in range(26)]
    writer = gguf.GGUFWriter(path / f"{pre}.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*letters, *SPECIAL])
    writer.add_token_types([NORMAL] * 26 + [CONTROL] * len(SPECIAL))
    writer.add_bos_token_id(26)
    writer.add_eos_token_id(27)
    if template is not None:
        writer.add_chat_template(template)
    if bos is not None:
        writer.add_add_bos_token(bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(str(path / f"{pre}.gguf"))


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (None, (27,)),
        ("{{ messages[0].content }}", (27,)),
        ("{{ messages[0].content }}<|eot_id|>", (27, 28)),
        ("{{ bos_token }}<|im_start|>x<|im_end|>", (27, 30)),
        ("<|im_end|><|endoftext|>", (27, 30, 29)),
    ],
)
def test_a_turn_ends_with_what_the_chat_template_ends_turns_with(
    tmp_path: Path, template: str | None, ends: tuple[int, ...]
) -> None:
    assert load(tmp_path, pre="llama-bpe", template=template).facts.eos_token_ids == ends


@pytest.mark.parametrize(
    ("pre", "bos", "in_front"),
    [
        ("llama-bpe", None, True),
        ("llama3", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("qwen2", None, False),
        ("deepseek-r1-qwen", None, False),
    ],
)
def test_llama_3_begins_a_text_with_its_first_token_although_most_files_do_not_say_so(
    tmp_path: Path, pre: str, bos: bool | None, in_front: bool
) -> None:
    tokenizer = load(tmp_path, pre=pre, bos=bos)
    assert tokenizer.encode("ab", add_special_tokens=True) == ([26] if in_front else []) + [0, 1]
    assert tokenizer.encode("ab", add_special_tokens=False) == [0, 1]
