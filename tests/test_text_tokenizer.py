"""Tokenizer and load_text on Hugging Face directories: every place a fact may be written, every refusal."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from text_corpus import CORPUS
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from xspec.errors import CheckpointError, RequestError
from xspec.text.tokenizer import LONG_TEXT, Tokenizer, load_text

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def byte_level() -> Backend:
    """<|bos|> 0, <|end|> 1, then the 256 bytes, then "he"."""
    pieces = ["<|bos|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, [("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|end|>"])
    return backend


def write_dir(path: Path, backend: Backend | None = None, **files: Any) -> Path:
    """Files by stem; a dict is written as JSON, a string as it is (chat_template.jinja)."""
    path.mkdir(exist_ok=True)
    (backend or byte_level()).save(str(path / "tokenizer.json"))
    for stem, content in files.items():
        suffix = "jinja" if isinstance(content, str) else "json"
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return path


NAMES = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>", "lstrip": False}}


# Tokenizer


def test_encode_decode_and_pieces(tmp_path: Path) -> None:
    tokenizer = load_text(write_dir(tmp_path, tokenizer_config=NAMES)).tokenizer
    ids = tokenizer.encode("<|bos|>hé")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<|bos|>", b"h", b"\xc3", b"\xa9"]
    assert [tokenizer.token_text(i) for i in ids] == ["<|bos|>", "h", "\ufffd", "\ufffd"]
    assert tokenizer.decode(ids) == "hé"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|>hé"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 259)
    assert tokenizer.special_ids == {0, 1}


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_text(write_dir(tmp_path)).tokenizer
    he = tokenizer.encode("he")
    assert tokenizer.decode([*he, 259, 2**32 - 1]) == "he"
    assert (tokenizer.token_bytes(259), tokenizer.token_text(10**12)) == (b"", "")
    for bad in (-1, 2**32):
        with pytest.raises(RequestError, match=f"{bad} is not a token id; allowed: 0 to 258"):
            tokenizer.decode([bad])


@pytest.mark.parametrize("size", [LONG_TEXT - 2, LONG_TEXT - 1, LONG_TEXT, LONG_TEXT + 1])
def test_long_texts_are_read_like_short_ones(tmp_path: Path, size: int) -> None:
    tokenizer = load_text(write_dir(tmp_path)).tokenizer
    text = "<|bos|>" + "é" * (size - 7)
    ids = [0] + tokenizer.encode("é") * (size - 7)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == "é" * (size - 7)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("\ud800" * size)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_a_long_text_leaves_other_threads_alone(tmp_path: Path, work: str) -> None:
    tokenizer = load_text(write_dir(tmp_path)).tokenizer
    text = "hello world " * 50_000
    argument = text if work == "encode" else tokenizer.encode(text)
    spans: list[float] = []

    def timed() -> None:
        start = time.perf_counter()
        getattr(tokenizer, work)(argument)
        spans.append(time.perf_counter() - start)

    worker = threading.Thread(target=timed)
    worst, last = 0.0, time.perf_counter()
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    assert worst < spans[0] / 2


def test_a_lone_surrogate_is_the_request_s_fault(tmp_path: Path) -> None:
    tokenizer = load_text(write_dir(tmp_path)).tokenizer
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("a\ud800b")


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8, pad_id=1, pad_token="<|end|>")
    tokenizer = load_text(write_dir(tmp_path, backend)).tokenizer
    assert len(tokenizer.encode("abcdefghijklm")) == 13
    assert len(tokenizer.encode("ab")) == 2


def test_threads_share_one_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_text(write_dir(tmp_path)).tokenizer
    expected = [tokenizer.encode(text) for text in CORPUS]
    wrong: list[str] = []

    def work() -> None:
        for _ in range(5):
            for text, ids in zip(CORPUS, expected, strict=True):
                if (
                    tokenizer.encode(text) != ids
                    or b"".join(map(tokenizer.token_bytes, ids)).decode() != text
                ):
                    wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_tokenizer_without_decoder_joins_with_spaces() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a b") == [0, 1]
    assert tokenizer.decode([0, 1]) == "a b"
    assert tokenizer.token_text(1) == "b"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Strip(" ", 1, 0),
    ],
)
def test_decoders_that_cannot_stream_are_refused(tmp_path: Path, decoder: Any) -> None:
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(
        CheckpointError, match=r"the tokenizer's decoder has the step \{'type': .*supported: ByteLevel"
    ):
        load_text(write_dir(tmp_path, backend))


# Where facts are written


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {**NAMES, "chat_template": TEMPLATE}},
        {"tokenizer_config": {**NAMES, "chat_template": [{"name": "default", "template": TEMPLATE}]}},
        {"tokenizer_config": NAMES, "chat_template": TEMPLATE},
        {"tokenizer_config": NAMES, "chat_template": {"chat_template": TEMPLATE}},
        {"tokenizer_config": {**NAMES, "chat_template": "other"}, "chat_template": TEMPLATE},
        {"tokenizer_config": {"chat_template": TEMPLATE}, "special_tokens_map": NAMES},
    ],
)
def test_chat_template_in_each_of_its_places(tmp_path: Path, files: dict[str, Any]) -> None:
    chat = load_text(write_dir(tmp_path, **files)).chat
    assert chat is not None
    assert chat.render([{"role": "user", "content": "hi"}]) == "<|bos|>user: hi<|end|>"


def test_jinja_file_wins_over_config_and_json(tmp_path: Path) -> None:
    write_dir(tmp_path, tokenizer_config={"chat_template": "config"}, chat_template="jinja")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    message = [{"role": "user", "content": ""}]
    assets = load_text(tmp_path)
    assert assets.chat is not None and assets.chat.render(message) == "jinja"
    (tmp_path / "chat_template.jinja").unlink()
    assets = load_text(tmp_path)
    assert assets.chat is not None and assets.chat.render(message) == "config"


def test_no_template_no_chat_and_nothing_else_required(tmp_path: Path) -> None:
    assets = load_text(write_dir(tmp_path))
    assert assets.chat is None
    assert assets.eos_ids == frozenset()
    assert assets.generation_defaults == {}
    assert assets.tokenizer.bos_id is None


def test_end_ids_are_the_union_of_all_places(tmp_path: Path) -> None:
    files = {
        "config": {"eos_token_id": 7},
        "generation_config": {"eos_token_id": [1, 9]},
        "tokenizer_config": NAMES,
    }
    assert load_text(write_dir(tmp_path, **files)).eos_ids == {1, 7, 9}
    files["config"] = {"eos_token_id": None}
    assert load_text(write_dir(tmp_path, **files)).eos_ids == {1, 9}


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, {}),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.1, "x": 1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1},
        ),
        ({"do_sample": True, "temperature": 1}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"top_k": -1, "top_p": None}, {"top_k": 0}),
    ],
)
def test_generation_defaults(tmp_path: Path, generation: dict[str, Any], defaults: dict[str, Any]) -> None:
    found = load_text(write_dir(tmp_path, generation_config=generation)).generation_defaults
    assert found == defaults
    assert [type(found[name]) for name in defaults] == [type(value) for value in defaults.values()]


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, []),
        ({"add_bos_token": True}, [0]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 1]),
        ({"add_bos_token": False, "add_eos_token": True}, [1]),
    ],
)
def test_added_ends_where_tokenizer_json_is_silent(
    tmp_path: Path, config: dict[str, Any], ids: list[int]
) -> None:
    tokenizer = load_text(write_dir(tmp_path, tokenizer_config={**NAMES, **config})).tokenizer
    assert tokenizer.encode("") == ids
    assert tokenizer.encode("", add_special_tokens=False) == []


@pytest.mark.parametrize("stated", [True, False, None])
def test_tokenizer_json_decides_about_added_ends(tmp_path: Path, stated: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    backend = byte_level()
    template = processors.TemplateProcessing(single="<|bos|> $A", pair=None, special_tokens=[("<|bos|>", 0)])
    for post, ids in ((template, [0]), (processors.ByteLevel(), [])):
        backend.post_processor = post
        config = {
            "bos_token": "<|bos|>",
            "add_bos_token": stated,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        write_dir(tmp_path, backend, tokenizer_config=config)
        assert load_text(tmp_path).tokenizer.encode("") == ids
        assert transformers.AutoTokenizer.from_pretrained(str(tmp_path)).encode("") == ids


def test_tokens_declared_only_in_tokenizer_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    declared = {
        "260": {"content": "<think>", "special": False, "normalized": False},
        "259": {"content": "<|im_end|>", "special": True},
        "0": {"content": "<|bos|>", "special": True},
    }
    config = {**NAMES, "eos_token": "<|im_end|>", "added_tokens_decoder": declared}
    write_dir(tmp_path, tokenizer_config={**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer = load_text(tmp_path).tokenizer
    oracle = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ids = tokenizer.encode("he<think><|im_end|>")
    assert ids == [258, 260, 259] == oracle.encode("he<think><|im_end|>")
    assert tokenizer.decode(ids) == "he<think>" == oracle.decode(ids, skip_special_tokens=True)
    assert tokenizer.eos_id == 259
    declared["270"] = {"content": "<gap>"}
    write_dir(tmp_path, tokenizer_config=config)
    with pytest.raises(CheckpointError, match="added token '<gap>' should have id 270, but .* gets 261"):
        load_text(tmp_path)


def test_a_named_special_token_is_special_even_if_listed_as_plain(tmp_path: Path) -> None:
    backend = byte_level()
    config = {**NAMES, "eos_token": "he", "pad_token": "<|nowhere|>"}
    tokenizer = load_text(write_dir(tmp_path, backend, tokenizer_config=config)).tokenizer
    assert tokenizer.special_ids == {0, 1, 258}
    assert tokenizer.decode(tokenizer.encode("she")) == "s"


# Refusals


def test_a_directory_without_tokenizer_json_lists_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer.json; found: nothing"):
        load_text(tmp_path)
    for name in ("tokenizer.model", "config.json", *(f"shard{index:02}" for index in range(30))):
        (tmp_path / name).touch()
    with pytest.raises(
        CheckpointError, match=r"has no tokenizer\.json; found: config\.json, shard00, .* and 12 more$"
    ):
        load_text(tmp_path)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone does not exist"):
        load_text(tmp_path / "gone")
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model\.bin is neither a \.gguf file nor a directory"):
        load_text(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"eos_token_id": "2"}}, r"config\.json: eos_token_id is '2'; allowed: an id, a list"),
        ({"config": {"eos_token_id": [2, True]}}, r"config\.json: eos_token_id is \[2, True\]"),
        ({"generation_config": {"eos_token_id": -1}}, r"generation_config\.json: eos_token_id is -1"),
        ({"generation_config": {"temperature": -0.1}}, r"temperature is -0\.1; allowed: float from 0 to inf"),
        ({"generation_config": {"top_p": 0}}, "top_p is 0; allowed: float from 1e-300 to 1"),
        ({"generation_config": {"top_k": 1.5}}, "top_k is 1.5; allowed: int from 0"),
        ({"generation_config": {"min_p": True}}, "min_p is True"),
        ({"generation_config": {"repetition_penalty": float("nan")}}, "repetition_penalty is nan"),
        ({"tokenizer_config": {"eos_token": 3}}, "eos_token is 3; allowed: a string"),
        (
            {"tokenizer_config": {"eos_token": "<|gone|>"}},
            r"tokenizer\.json has no token '<\|gone\|>', the eos_token",
        ),
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template must be a string or a list"),
        (
            {"tokenizer_config": {"chat_template": [{"name": "x"}]}},
            "chat_template must be a string or a list",
        ),
        (
            {"tokenizer_config": {"chat_template": [{"name": "x", "template": "t"}]}},
            "named 'default'; found: x",
        ),
        ({"tokenizer_config": {"chat_template": "{% if %}"}}, "'default' does not compile"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "added_tokens_decoder is malformed"),
        ({"tokenizer_config": {"added_tokens_decoder": {"300": "t"}}}, "added_tokens_decoder is malformed"),
        ({"tokenizer_config": []}, r"tokenizer_config\.json must hold a JSON object, found list"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_text(write_dir(tmp_path, **files))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json"]
)
def test_files_that_are_not_json(tmp_path: Path, name: str) -> None:
    write_dir(tmp_path)
    (tmp_path / name).write_bytes(b'{"a": \xff')
    with pytest.raises(CheckpointError, match=rf"/{name} is not readable"):
        load_text(tmp_path)


def test_added_token_flags_survive(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<s>", rstrip=True, normalized=False)])
    tokenizer = load_text(write_dir(tmp_path, backend)).tokenizer
    assert tokenizer.encode("<s>  he") == [259, 258]
