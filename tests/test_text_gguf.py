"""GGUF metadata and the tokenizers built from it, against gguf, transformers and naive oracles."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from text_corpus import CORPUS, embedded_gguf, embedded_reference, write_gguf
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from xspec.errors import CheckpointError
from xspec.text.gguf_file import read_gguf_metadata
from xspec.text.gguf_tokenizer import read_gguf_text
from xspec.text.tokenizer import TextAssets, load_text


@pytest.fixture(scope="module")
def smol() -> TextAssets:
    return load_text(embedded_gguf())


@pytest.fixture(scope="module")
def reference() -> Any:
    return embedded_reference()


@pytest.fixture(scope="module")
def published(reference: Any) -> Backend:
    """SmolLM2's own tokenizer.json splits digits one by one; transformers' GGUF reader leaves that out."""
    backend = Backend.from_str(reference.backend_tokenizer.to_str())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    return backend


# The embedded model


def test_metadata_equals_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(str(embedded_gguf())).fields
    expected = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert read_gguf_metadata(embedded_gguf()) == expected
    assert len(expected) == 33


def test_loading_is_fast() -> None:
    path = embedded_gguf()
    begin = time.process_time()  # CPU time: a busy neighbour does not count
    load_text(path)
    assert time.process_time() - begin < 1.0


def test_known_ids(smol: TextAssets) -> None:
    assert smol.tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert smol.tokenizer.encode("<|im_start|>user\n<|im_end|>") == [1, 4093, 198, 2]
    assert smol.tokenizer.encode("") == []
    assert (smol.tokenizer.bos_id, smol.tokenizer.eos_id, smol.eos_ids) == (1, 2, frozenset({2}))
    assert smol.tokenizer.vocab_size == 49152
    assert smol.tokenizer.special_ids == frozenset(range(17))
    assert smol.generation_defaults == {}


@pytest.mark.parametrize("text", CORPUS)
def test_tokens_equal_transformers(smol: TextAssets, reference: Any, text: str) -> None:
    ids = smol.tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert smol.tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert smol.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_unicode_digits_follow_the_published_tokenizer(
    smol: TextAssets, reference: Any, published: Backend
) -> None:
    text = "x=12345 and ٣٤ Ⅷ ½²"
    assert smol.tokenizer.encode(text) == published.encode(text).ids
    assert smol.tokenizer.encode(text) != reference.encode(text)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_follows_the_published_tokenizer(smol: TextAssets, published: Backend, text: str) -> None:
    ids = smol.tokenizer.encode(text)
    assert ids == published.encode(text).ids
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = "".join(piece for piece, _ in level.pre_tokenize_str(text))
    # The vocabulary lacks a few bytes (such as F1, which begins unassigned planes): those are lost.
    if all(published.token_to_id(char) is not None for char in spelled):
        assert smol.tokenizer.decode(ids, skip_special_tokens=False) == text


# Pre-tokenizers

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
PIECES = {
    "gpt-2": [GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [QWEN2],
    "smollm": [r"\p{N}", GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}


def byte_vocab() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def gpt2_fields(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary with three control tokens and the merges h+e, l+l, he+ll."""
    tokens = ["<|end|>", "<|bos|>", "<tool>", *byte_vocab(), "he", "ll", "hell"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    }
    fields |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in fields.items() if value is not None}


def split_naively(patterns: list[str], text: str) -> list[str]:
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in isolate(pattern, piece)]
    return pieces


def isolate(pattern: str, text: str) -> list[str]:
    parts, at = [], 0
    for match in regex.finditer(pattern, text):
        parts += [text[at : match.start()], match[0]]
        at = match.end()
    return [part for part in [*parts, text[at:]] if part]


@pytest.mark.parametrize("name", PIECES)
def test_pre_tokenizers_split_as_published(tmp_path: Path, name: str) -> None:
    backend = read_gguf_text(write_gguf(tmp_path / "m.gguf", gpt2_fields(pre=name))).backend
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in CORPUS:
        normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        got = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]
        pieces = split_naively(PIECES[name], normal)
        assert got == [level.pre_tokenize_str(piece)[0][0] for piece in pieces], text


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["ab", "Ġ1234567", ".", "5", "'t", "ĠX"]),
        ("llama-bpe", ["ab", "Ġ", "123", "456", "7", ".", "5", "'t", "ĠX"]),
        ("qwen2", ["ab", "Ġ", *"1234567", ".", "5", "'t", "ĠX"]),
        ("smollm", ["ab", "Ġ", *"1234567", ".", "5", "'t", "ĠX"]),
        ("default", ["ab", "Ġ", "123", "456", "7", ".", "5", "'", "t", "ĠX"]),
        (None, ["ab", "Ġ", "123", "456", "7", ".", "5", "'", "t", "ĠX"]),
    ],
)
def test_pre_tokenizers_by_hand(tmp_path: Path, name: str | None, pieces: list[str]) -> None:
    backend = read_gguf_text(write_gguf(tmp_path / "m.gguf", gpt2_fields(pre=name))).backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("ab 1234567.5't X")] == pieces


def test_only_qwen_normalises_and_only_llama3_takes_whole_pieces(tmp_path: Path) -> None:
    made = {}
    for name in PIECES:
        backend = read_gguf_text(
            write_gguf(tmp_path / "m.gguf", gpt2_fields(pre=name, merges=["h e"]))
        ).backend
        made[name] = (
            backend.encode("e\u0301").ids == backend.encode("\u00e9").ids,
            backend.encode("hell").tokens,
        )
    whole = {name: "hell" in tokens for name, (_, tokens) in made.items()}
    assert {name for name, (same, _) in made.items() if same} == {"qwen2"}
    assert {name for name, found in whole.items() if found} == {"llama-bpe"}
    assert made["gpt-2"][1] == ["<|bos|>", "he", "l", "l"][1:]


def test_qwen2_and_gpt2_equal_transformers_classes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fields = gpt2_fields()
    vocab = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    for name, cls in (("qwen2", transformers.Qwen2Tokenizer), ("gpt-2", transformers.GPT2Tokenizer)):
        kwargs = {
            "unk_token": "<|end|>",
            "eos_token": "<|end|>",
            "bos_token": "<|bos|>",
            "pad_token": "<|end|>",
        }
        oracle = cls(vocab=vocab, merges=merges, **kwargs)
        backend = read_gguf_text(write_gguf(tmp_path / "m.gguf", gpt2_fields(pre=name))).backend
        for text in CORPUS:
            assert backend.encode(text).ids == oracle.encode(text, add_special_tokens=False), (name, text)


# Ends, special tokens, templates


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [3]),
        ({"add_bos_token": True}, [1, 3]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 3, 0]),
        ({"add_eos_token": True, "eos_token_id": 1}, [3, 1]),
        ({"pre": "llama-bpe"}, [1, 3]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [3]),
        ({"pre": "llama-bpe", "bos_token_id": None}, [3]),
    ],
)
def test_ends_added_to_a_text(tmp_path: Path, changes: dict[str, Any], ids: list[int]) -> None:
    fields = gpt2_fields(**changes)
    offset = fields["tokenizer.ggml.tokens"].index("!") - 3
    tokenizer = load_text(write_gguf(tmp_path / "m.gguf", fields)).tokenizer
    shifted = [token_id + offset if token_id >= 3 else token_id for token_id in ids]
    assert tokenizer.encode("!") == shifted
    assert tokenizer.encode("!", add_special_tokens=False) == [3 + offset]


def test_an_end_token_that_looks_like_template_syntax(tmp_path: Path) -> None:
    fields = gpt2_fields(add_bos_token=True)
    fields["tokenizer.ggml.tokens"][1] = "$A:0 <|b:os|>"
    assert load_text(write_gguf(tmp_path / "m.gguf", fields)).tokenizer.encode("") == [1]


def test_user_defined_tokens_are_found_in_text_but_stay_visible(tmp_path: Path) -> None:
    tokenizer = load_text(write_gguf(tmp_path / "m.gguf", gpt2_fields())).tokenizer
    assert tokenizer.encode("<tool><|end|>") == [2, 0]
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode([2, 0]) == "<tool>"


def test_ends_templates_and_defaults(tmp_path: Path) -> None:
    fields = gpt2_fields(eot_token_id=2, eom_token_id=1)
    fields |= {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    fields |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    fields |= {"general.sampling.top_k": 7, "general.sampling.temp": 0.5}
    assets = load_text(write_gguf(tmp_path / "m.gguf", fields))
    message = {"role": "user", "content": "hi"}
    assert assets.eos_ids == {0, 1, 2}
    assert assets.chat is not None
    assert assets.chat.render([message]) == "<|bos|>hi<|end|>"
    assert assets.chat.render([message], tools=[{"type": "function"}]) == "tools"
    assert assets.generation_defaults == {"temperature": 0.5, "top_k": 7}


# SentencePiece

PARTS = [
    "\u2581",
    *"abcd",
    "ab",
    "bc",
    "abc",
    "\u2581a",
    "cd",
    "\u2581ab",
    "aa",
    "aaa",
    "bcd",
    "\u2581\u2581",
]


def spm_fields(order: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(order or PARTS)]
    singles = {token for token in tokens if len(token) == 1}
    scores = [-1000.0 if token in singles else -float(index) for index, token in enumerate(tokens)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return fields | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def spm_naively(fields: dict[str, Any], text: str) -> list[int]:
    """Join the best-scoring neighbours, leftmost first, until none joins; unknown characters as bytes."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(tokens)}
    rank = {token: fields["tokenizer.ggml.scores"][ids[token]] for token in tokens[259:]}
    symbols = list(("\u2581" + text if text else "").replace(" ", "\u2581"))
    while True:
        pairs = [
            (rank[a + b], -i)
            for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in rank
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [i for s in symbols for i in ([ids[s]] if s in rank else [3 + byte for byte in s.encode()])]


@settings(max_examples=150, deadline=None)
@given(
    order=st.permutations([part for part in PARTS if len(part) > 1]),
    text=st.text(st.sampled_from("abcd é😀\n"), max_size=14),
)
def test_sentencepiece_equals_greedy_merging(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], text: str
) -> None:
    fields = spm_fields(["\u2581", *"abcd", *order])
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    tokenizer = load_text(write_gguf(path, fields)).tokenizer
    ids = tokenizer.encode(text)
    assert ids == [1, *spm_naively(fields, text)]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_prefix_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_text(write_gguf(tmp_path / "m.gguf", spm_fields())).tokenizer
    pieces = [
        tokenizer.piece(token_id) for token_id in tokenizer.encode("ab</s>ab", add_special_tokens=False)
    ]
    assert pieces == ["\u2581ab", "</s>", "\u2581ab"]
    plain = load_text(write_gguf(tmp_path / "n.gguf", spm_fields(add_space_prefix=False))).tokenizer
    assert [plain.piece(token_id) for token_id in plain.encode("ab b")] == ["<s>", "ab", "\u2581", "b"]
    assert plain.decode(plain.encode(" ab")) == " ab"


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'; supported: gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; supported: default, gpt-2, smollm, llama-bpe"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is a str; allowed: list"),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens must be an array of str"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type has 2 entries for 262 tokens"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["he"]}, "tokenizer.ggml.merges holds 'he', which is not a pair"),
        ({"merges": ["he qq"]}, "the tokenizer cannot be built"),
        ({"eos_token_id": 262}, "tokenizer.ggml.eos_token_id is 262; allowed: 0 to 261"),
        ({"eos_token_id": "x"}, "tokenizer.ggml.eos_token_id is a str; allowed: int"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing, but add_bos_token is true"),
    ],
)
def test_refusals_name_file_key_and_allowed_values(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "bad.gguf", gpt2_fields(**changes))
    with pytest.raises(CheckpointError) as caught:
        load_text(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_refuses_duplicate_tokens_and_sentencepiece_gaps(tmp_path: Path) -> None:
    fields = gpt2_fields()
    fields["tokenizer.ggml.tokens"][2] = "he"
    with pytest.raises(CheckpointError, match="tokenizer.ggml.tokens lists 'he' more than once"):
        load_text(write_gguf(tmp_path / "a.gguf", fields))
    with pytest.raises(CheckpointError, match="scores has 1 entries for 274 tokens"):
        load_text(write_gguf(tmp_path / "b.gguf", spm_fields(scores=[0.5])))
    with pytest.raises(CheckpointError, match="remove_extra_whitespaces is true; supported: false"):
        load_text(write_gguf(tmp_path / "c.gguf", spm_fields(remove_extra_whitespaces=True)))


def test_every_truncation_is_a_checkpoint_error(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", gpt2_fields()).read_bytes()
    fields = read_gguf_metadata(tmp_path / "m.gguf")
    assert json.dumps(fields)  # plain values only
    cut = tmp_path / "cut.gguf"
    for size in (*range(0, 600), *range(600, len(whole) - 60, 97)):
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf_metadata(cut)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file"),
        (b"GGUF" + b"\x01\x00\x00\x00" + bytes(16), "GGUF version 1; allowed"),
        (b"GGUF" + b"\x00\x00\x00\x03" + bytes(16), "GGUF version 50331648; allowed"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\xff" * 8, "metadata entry 0 runs past the end"),
        (
            b"GGUF\x03\0\0\0"
            + bytes(8)
            + b"\x01"
            + bytes(7)
            + b"\x01"
            + bytes(7)
            + b"k\x09\0\0\0\x09\0\0\0"
            + b"\xff" * 8,
            "k is an array of arrays",
        ),
        (
            b"GGUF\x03\0\0\0"
            + bytes(8)
            + b"\x01"
            + bytes(7)
            + b"\x01"
            + bytes(7)
            + b"k\x09\0\0\0\x06\0\0\0"
            + b"\xff" * 8,
            "k runs past the end",
        ),
        (
            b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\x01" + bytes(7) + b"k\x63\0\0\0",
            "k has value type 99",
        ),
        (
            b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\x01" + bytes(7) + b"\xff\x04\0\0\0",
            "is not UTF-8",
        ),
    ],
)
def test_hostile_headers(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_gguf_metadata(path)
