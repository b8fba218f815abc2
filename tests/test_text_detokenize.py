"""Streaming detokenisation against batch decoding, and stop strings against a naive search."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_corpus import CORPUS, embedded_gguf
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from xspec.text.detokenize import IncrementalDetokenizer, StopMatcher
from xspec.text.tokenizer import Tokenizer, load_text


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    return load_text(embedded_gguf()).tokenizer


SPM_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_PIECES += ["\u2581", "a", "b", "\u2581a", "\u2581\u2581", "\u2581the", "\u00e9", "x\u2581y", "<0xZZ>"]


def sentencepiece(decoder: object) -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate(SPM_PIECES)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


STEPS = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
SPM_DECODERS = {
    "llama": decoders.Sequence([*STEPS, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(STEPS),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
}


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] = [], skip: bool = True) -> list[str]:  # noqa: B006
    """The text after each id, then the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


# Detokenizer


@pytest.mark.parametrize("text", CORPUS)
def test_every_prefix_equals_the_batch_decode(smol: Tokenizer, text: str) -> None:
    ids = smol.encode(text)
    for skip in (True, False):
        pieces = stream(smol, ids, skip=skip)
        for count in range(len(ids) + 1):
            shown, batch = "".join(pieces[:count]), smol.decode(ids[:count], skip)
            assert shown == batch or (batch.startswith(shown) and set(batch[len(shown) :]) == {"\ufffd"})
        assert "".join(pieces) == smol.decode(ids, skip)


def test_characters_are_whole_and_as_early_as_possible(smol: Tokenizer) -> None:
    ids = [next(i for i in range(17, 300) if smol.token_bytes(i) == bytes([b])) for b in "é😀!".encode()]
    assert stream(smol, ids) == ["", "é", "", "", "", "😀", "!", ""]
    assert stream(smol, ids[:1]) == ["", "\ufffd"]
    assert stream(smol, ids[:5]) == ["", "é", "", "", "", "\ufffd"]
    assert stream(smol, [ids[0], ids[6]]) == ["", "\ufffd!", ""]
    assert stream(smol, [ids[1], ids[1]]) == ["\ufffd", "\ufffd", ""]


def test_a_push_may_hold_any_number_of_ids(smol: Tokenizer) -> None:
    ids = smol.encode("naïve 😀 text")
    detokenizer = IncrementalDetokenizer(smol)
    assert detokenizer.push([]) == ""
    assert detokenizer.push(ids) == "naïve 😀 text"
    assert detokenizer.flush() == ""


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49500)), max_size=30), skip=st.booleans())
def test_hostile_ids_stream_as_the_batch_decodes(smol: Tokenizer, ids: list[int], skip: bool) -> None:
    pieces = stream(smol, ids, skip=skip)
    assert "".join(pieces) == smol.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(prompt=st.text(max_size=8), text=st.text(max_size=12))
def test_the_answer_goes_on_after_a_prompt(smol: Tokenizer, prompt: str, text: str) -> None:
    before, after = smol.encode(prompt), smol.encode(text)
    whole = smol.decode([*before, *after])
    assert "".join(stream(smol, after, before)) == whole.removeprefix(smol.decode(before))


def test_a_prompt_that_ends_inside_a_character(smol: Tokenizer) -> None:
    first, second = (
        next(i for i in range(17, 300) if smol.token_bytes(i) == bytes([b])) for b in "é".encode()
    )
    bang = smol.encode("!")[0]
    assert stream(smol, [second, bang], [bang, first]) == ["é", "!", ""]
    assert stream(smol, [bang], [first]) == ["!", ""]
    assert stream(smol, [0, second], [first]) == ["", "é", ""]
    assert stream(smol, [], [first]) == [""]


@pytest.mark.parametrize("name", SPM_DECODERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_streams_as_the_batch_decodes(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = sentencepiece(SPM_DECODERS[name])
    # Runs of byte tokens that are not UTF-8 are left out: the library then replaces their valid part too.
    runs = st.text(st.sampled_from("aé€😀"), min_size=1, max_size=2).map(
        lambda s: [3 + b for b in s.encode()]
    )
    single = st.sampled_from([0, 1, 2, *range(259, len(SPM_PIECES)), 10**6]).map(lambda i: [i])
    ids = [i for part in data.draw(st.lists(runs | single, max_size=12)) for i in part]
    cut = data.draw(st.integers(0, len(ids)))
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip)
    before = tokenizer.decode(ids[:cut], skip)
    if "\ufffd" not in before:
        assert (
            "".join(stream(tokenizer, ids[cut:], ids[:cut], skip))
            == tokenizer.decode(ids, skip)[len(before) :]
        )


def test_the_leading_space_goes_only_at_the_start_of_the_text() -> None:
    tokenizer = sentencepiece(SPM_DECODERS["llama"])
    the = SPM_PIECES.index("\u2581the")
    assert stream(tokenizer, [the, the]) == ["the", " the", ""]
    assert stream(tokenizer, [the, the], [1]) == ["the", " the", ""]
    assert stream(tokenizer, [the], [the]) == [" the", ""]
    assert stream(tokenizer, [2, the, the], [], True) == ["", "the", " the", ""]
    assert stream(tokenizer, [3 + 0x20, the]) == ["", " the", ""]


def test_bytes_of_sentencepiece_show_valid_characters_among_broken_ones() -> None:
    tokenizer = sentencepiece(SPM_DECODERS["gemma"])
    assert stream(tokenizer, [3 + 0xC3, 3 + 0xA9, 3 + 0xC3, 3 + 0x41]) == ["", "é", "", "\ufffdA", ""]


def test_joined_tokens_stream_with_their_spaces() -> None:
    tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    assert stream(tokenizer, [0, 99, 1, 0]) == ["a", "", " b", " a", ""]
    assert "".join(stream(tokenizer, [0, 99, 1, 0])) == tokenizer.decode([0, 99, 1, 0])
    assert stream(tokenizer, [1], [0]) == [" b", ""]


def test_cost_per_token_does_not_grow(smol: Tokenizer) -> None:
    lone = next(i for i in range(17, 300) if smol.token_bytes(i) == b"\x80")
    for token_id in (lone, 0, smol.encode("\ufffd")[-1]):
        detokenizer = IncrementalDetokenizer(smol)
        begin = time.process_time()
        for _ in range(50_000):
            detokenizer.push((token_id,))
        assert time.process_time() - begin < 5.0  # quadratic cost would take minutes


# Stop strings


def naive_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop that is complete first; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    shown = []
    for piece in pieces:
        text, found = matcher.push(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, matcher.flush()], None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("aab", max_size=6), max_size=12),
    stops=st.lists(st.text("ab", max_size=5), max_size=4),
    include=st.booleans(),
)
def test_stops_equal_a_naive_search(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    expected = naive_stop(text, stops)
    shown, found = feed(StopMatcher(stops, include), pieces)
    if expected is None:
        assert (found, "".join(shown)) == (None, text)
    else:
        end, stop = expected
        assert (found, "".join(shown)) == (stop, text[: end if include else end - len(stop)])


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=10),
    stops=st.lists(st.text("ab", min_size=1), max_size=3),
)
def test_exactly_the_possible_beginning_of_a_stop_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher, text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        emit, found = matcher.push(piece)
        text, shown = text + piece, shown + emit
        if found is not None:
            return
        held = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        assert shown == text[: len(text) - max(held, default=0)]


@settings(max_examples=300, deadline=None)
@given(
    quiet=st.lists(st.text("ab", max_size=4), max_size=5),
    loud=st.lists(st.text("ab", max_size=4), max_size=5),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_unarmed_text_never_ends_a_stop_but_may_begin_one(
    quiet: list[str], loud: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece, armed=False)[0] for piece in quiet)
    rest, found = feed(matcher, loud)
    text, start = "".join([*quiet, *loud]), len("".join(quiet))
    ends = (end for end in range(start + 1, len(text) + 1) if any(text[:end].endswith(s) for s in stops))
    end = next(ends, None)
    if end is None:
        assert (found, shown + "".join(rest)) == (None, text)
    else:
        stop = max((s for s in stops if text[:end].endswith(s)), key=len)
        assert (found, shown + "".join(rest)) == (stop, text[: end - len(stop)])


def test_the_first_complete_stop_wins_whatever_the_order_of_the_list() -> None:
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        assert StopMatcher(stops).push("xabcdy") == ("xa", "bc")
        assert StopMatcher(stops, include=True).push("xabcdy") == ("xabc", "bc")
    assert StopMatcher(["c", "bc", "abc"]).push("abc") == ("", "abc")
    assert StopMatcher(["\n\n", "</s>"]).push("a\nb\n\nc</s>") == ("a\nb", "\n\n")


def test_no_stops_hold_nothing() -> None:
    for stops in ([], [""]):
        assert StopMatcher(stops).push("text") == ("text", None)


def test_long_stops_and_repetitive_text_stay_linear() -> None:
    matcher = StopMatcher(["a" * 5_000 + "b", "ab" * 2_000])
    rng = random.Random(0)
    begin = time.process_time()
    shown = "".join(matcher.push("a" * rng.randint(1, 9))[0] for _ in range(20_000))
    assert time.process_time() - begin < 5.0
    assert set(shown) == {"a"} and len(matcher.flush()) == 5_000
