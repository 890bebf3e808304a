"""SentencePiece tokenizers out of GGUF files: against transformers' conversion and against the rule itself."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond_engine.server.logprobs import TextOffsets
from millpond_engine.text.detokenizer import Detokenizer
from millpond_engine.text.load import load_tokenizer
from millpond_engine.text.sentencepiece import SPACE, make_sentencepiece
from millpond_engine.text.tokenizer import Tokenizer, TokenizerError, decode

SPECIALS = ["<unk>", "<s>", "</s>"]
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
USER_TOKEN = "<|tool|>"
TEXTS = [
    "",
    " ",
    "Hello, world",
    "  two spaces, and\n\n\ttabs  \r\n",
    "žluťoučký kůň 🐎 日本語のテキスト 👩\u200d👩\u200d👧 a\u0301",
    "the pool holds blocks of tokens " * 20,
    "x" * 300,
    f"call {USER_TOKEN} now",
    "before </s> after",
    "\u2581already",
]


@cache
def train() -> tuple[list[str], list[float], list[int]]:
    """A vocabulary in the layout of Llama 2, trained on this repository's own prose."""
    root = Path(__file__).resolve().parents[4]
    texts = [path.read_text(encoding="utf-8") for path in sorted(root.glob("*.md"))]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement=SPACE)
    trained.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=1500, show_progress=False))
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    spaces = [SPACE * number for number in (2, 4, 8)]
    ordered = [text for text, _ in pieces if len(text) > 1] + spaces + [t for t, _ in pieces if len(t) == 1]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(ordered), USER_TOKEN]
    num_pieces = len(tokens) - 259 - 1
    scores = [0.0] * 259 + [-float(rank) for rank in range(num_pieces)] + [0.0]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * num_pieces + [USER]
    return tokens, scores, kinds


def write(path: Path, tokens: list[str], scores: list[float], kinds: list[int], **flags: bool) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if "space" in flags:
        writer.add_add_space_prefix(flags["space"])
    if "bos" in flags:
        writer.add_add_bos_token(flags["bos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("spm") / "small.gguf", *train())


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Tokenizer:
    return load_tokenizer(str(file))


@pytest.fixture(scope="module")
def oracle(file: Path) -> Any:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, data, _ = get_gguf_tokenizer(str(file))
    backend, _ = convert_gguf_tokenizer(architecture, data)
    return backend


def join_by_score(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """The rule itself, naively: join the neighbours with the best joint score, the leftmost of equals."""
    ranks = dict(zip(tokens, scores, strict=True))
    parts = list((SPACE + text if text else "").replace(" ", SPACE))
    while True:
        joints = [(ranks[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not joints:
            return parts
        index = -max(joints)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    expected = oracle.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode(text, add_special_tokens=True) == [1, *expected]
    assert decode(tokenizer, expected, skip_special_tokens=False) == oracle.decode(
        expected, skip_special_tokens=False
    )
    assert decode(tokenizer, [1, *expected], skip_special_tokens=True) == oracle.decode(expected)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40) | st.text(alphabet="the pol ktins.", max_size=60))
def test_any_text_equals_transformers_and_comes_back(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == oracle.encode(text, add_special_tokens=False).ids
    if SPACE not in text and not text.startswith(" "):
        assert decode(tokenizer, ids, skip_special_tokens=False) == text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="the pol ktins.", max_size=60).filter(lambda text: not text.startswith(" ")))
def test_any_text_is_cut_by_the_rule_of_scores(tokenizer: Tokenizer, text: str) -> None:
    tokens, scores, kinds = train()
    normal = [(t, s) for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL]
    expected = join_by_score(text, [t for t, _ in normal], [s for _, s in normal])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokens[i] for i in ids] == expected


@given(ids=st.lists(st.integers(0, 600), max_size=30))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_eng_047_streamed_pieces_join_to_the_bytes_of_all_tokens(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    streamed = "".join([*[detokenizer.push([i]) for i in ids], detokenizer.flush()])
    kept = [i for i in ids if i not in tokenizer.facts.special_token_ids]
    assert streamed == b"".join(tokenizer.token_bytes(i) for i in kept).decode("utf-8", "replace")


def test_bytes_spell_what_no_piece_does(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🐎", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", *[bytes([b]) for b in "🐎".encode()]]


def test_facts_come_from_the_file(tokenizer: Tokenizer) -> None:
    facts = tokenizer.facts
    assert (facts.bos_token_id, facts.eos_token_ids, facts.special_token_ids) == (1, (2,), frozenset({1, 2}))
    assert facts.template_variables == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_file_may_switch_the_space_and_the_first_token_off(tmp_path: Path) -> None:
    plain = load_tokenizer(str(write(tmp_path / "plain.gguf", *train(), space=False, bos=False)))
    ids = plain.encode("the pool", add_special_tokens=True)
    assert plain.token_bytes(ids[0]).startswith(b"t")
    assert decode(plain, ids, skip_special_tokens=False) == "the pool"
    assert decode(plain, plain.encode(" the", add_special_tokens=True), skip_special_tokens=False) == " the"


def test_files_that_cannot_be_served_say_why(tmp_path: Path) -> None:
    tokens, scores, kinds = train()
    with pytest.raises(TokenizerError, match="scores"):
        load_tokenizer(str(write(tmp_path / "few.gguf", tokens, scores[:-1], kinds)))
    writer = gguf.GGUFWriter(tmp_path / "t5.gguf", "t5")
    writer.add_tokenizer_model("t5")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(TokenizerError, match="t5"):
        load_tokenizer(str(tmp_path / "t5.gguf"))


def test_a_directory_in_the_layout_of_llama_2_takes_the_space_away_that_it_put_in_front(
    tmp_path: Path,
) -> None:
    tokens, scores, _ = train()
    made = make_sentencepiece(tokens, scores, unknown="<unk>", add_space=True)
    made.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIALS]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    for kind in ("strip", "metaspace"):
        if kind == "metaspace":
            made.decoder = tokenizers.decoders.Metaspace(replacement=SPACE, prepend_scheme="first")
            made.save(str(tmp_path / "tokenizer.json"))
        loaded = load_tokenizer(str(tmp_path))
        assert loaded.facts.adds_space
        for text in ("the pool", "a", "two  spaces", ""):
            ids = loaded.encode(text, add_special_tokens=False)
            assert decode(loaded, ids, skip_special_tokens=False) == text == made.decode(ids)
    made.decoder = tokenizers.decoders.Metaspace(replacement=SPACE, prepend_scheme="never")
    made.save(str(tmp_path / "tokenizer.json"))
    assert not load_tokenizer(str(tmp_path)).facts.adds_space


def test_offsets_of_an_echoed_prompt_leave_out_what_tokenizing_put_in_front(tokenizer: Tokenizer) -> None:
    text = "the pool drains"
    ids = tokenizer.encode(text, add_special_tokens=True)
    offsets = TextOffsets(tokenizer, skip_special_tokens=True)
    places = offsets.take_prompt(ids, text)
    assert places[:2] == [0, 0]
    pieces = [text[a:b] for a, b in pairwise([*places[1:], len(text)])]
    spelled = [tokenizer.token_bytes(i).decode() for i in ids[1:]]
    assert pieces == [spelled[0][1:], *spelled[1:]]
    assert offsets.take([ids[1], 2, ids[1]]) == [len(text)] + [len(text) + len(spelled[0])] * 2
