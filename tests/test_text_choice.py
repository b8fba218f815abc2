"""ChoiceText: outputs of several tokens, stop strings inside them, stop ids, min_tokens, usage."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from xspec.core.drafts import DraftCounts
from xspec.core.request import FinishReason, Output, Request, SamplingParams, TokenLogprob
from xspec.engine.api import TextOutput
from xspec.engine.text import ChoiceText
from xspec.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = ["<eos>", "<eot>", *ALPHABET, "abc"]
EOS, EOT, ABC = 0, 1, len(PIECES) - 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(PIECES)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<eos>", "<eot>"])
    return Tokenizer(backend)


class Harness:
    """Pushes texts, one token per byte, and keeps what came out."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        self._tokenizer = tokenizer
        self.request = Request("r", tuple(tokenizer.encode("prompt")), SamplingParams(**params))
        self.text = ChoiceText(tokenizer, self.request, 0, eos_ids={EOS})
        self.outputs: list[TextOutput] = []

    def push(self, what: str | list[int], **fields: Any) -> TextOutput:
        ids = tuple(self._tokenizer.encode(what)) if isinstance(what, str) else tuple(what)
        logprobs = tuple(TokenLogprob(token_id, -float(index)) for index, token_id in enumerate(ids))
        out = self.text.push(Output("r", 0, ids, logprobs=logprobs, **fields))
        self.outputs.append(out)
        return out

    def stop(self, token_id: int, before: str = "") -> TextOutput:
        ids = [*self._tokenizer.encode(before), token_id]
        return self.push(ids, finish_reason=FinishReason.STOP, stop_token=token_id)

    @property
    def shown(self) -> str:
        return "".join(out.text for out in self.outputs)


def test_plain_text_streams_and_counts(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer)
    first = run.push("hé"[:1], cached_tokens=4)
    assert first == TextOutput(
        "r",
        0,
        "h",
        (tokenizer.encode("h")[0],),
        logprobs=(TokenLogprob(tokenizer.encode("h")[0], 0.0),),
        prompt_tokens=6,
        completion_tokens=1,
        cached_tokens=4,
    )
    last = run.push("ello", finish_reason=FinishReason.LENGTH)
    assert (last.text, last.completion_tokens, last.cached_tokens) == ("ello", 5, 4)
    assert (last.finish_reason, last.stop_reason, run.text.stopped) == (FinishReason.LENGTH, None, False)


def test_ids_arrive_while_their_text_is_held(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer, stop=("END",))
    ids = tokenizer.encode("é")
    assert [run.push([token_id]).text for token_id in ids] == ["", "é"]
    held = run.push("xEN")
    assert (held.text, len(held.token_ids)) == ("x", 3)
    assert run.push("d").text == "ENd"


def test_an_unfinished_character_and_held_text_come_out_at_the_end(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer, stop=("END",))
    half = tokenizer.encode("é")[0]
    assert run.push([*tokenizer.encode("xE"), half], finish_reason=FinishReason.LENGTH).text == "xE\ufffd"
    run = Harness(tokenizer, stop=("END",))
    run.push("xEN")
    last = run.push([], finish_reason=FinishReason.ABORT)
    assert (last.text, last.finish_reason) == ("EN", FinishReason.ABORT)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abSTOP")])
def test_a_stop_string_cuts_the_run_of_tokens(tokenizer: Tokenizer, include: bool, text: str) -> None:
    run = Harness(tokenizer, stop=("STOP",), include_stop_str_in_output=include)
    run.push("abST")
    out = run.push("OPxyz", cached_tokens=0)
    assert run.shown == text
    assert out.token_ids == tuple(tokenizer.encode("OP"))
    assert [entry.logprob for entry in out.logprobs] == [0.0, -1.0]
    assert (out.completion_tokens, out.finish_reason, out.stop_reason) == (6, FinishReason.STOP, "STOP")
    assert run.text.stopped


@pytest.mark.parametrize(
    ("text", "drafts", "left"),
    [
        ("OPxyz", DraftCounts(6, 5, 4), DraftCounts(2, 2, 2)),  # cut inside the accepted run
        ("OP", DraftCounts(6, 5, 1), DraftCounts(2, 2, 1)),  # it ends at the target's own token
        ("ab", DraftCounts(6, 5, 1), DraftCounts(6, 5, 1)),
        ("OPx", None, None),
    ],
)
def test_drafts_count_up_to_a_stop_string(
    tokenizer: Tokenizer, text: str, drafts: DraftCounts | None, left: DraftCounts | None
) -> None:
    run = Harness(tokenizer, stop=("STOP",))
    run.push("ST")
    assert run.push(text, drafts=drafts).drafts == left


def test_a_stop_string_inside_one_token(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer, stop=("b",))
    out = run.push([ABC, ABC])
    assert (out.text, out.token_ids, out.completion_tokens) == ("a", (ABC,), 1)


def test_a_stop_string_beats_what_ended_the_sequence_later(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer, stop=("B",))
    out = run.stop(EOS, before="aBc")
    assert (out.text, len(out.token_ids), out.stop_reason, out.finish_reason) == (
        "a",
        2,
        "B",
        FinishReason.STOP,
    )
    run = Harness(tokenizer, stop=("c",))
    out = run.push("abc", finish_reason=FinishReason.LENGTH)
    assert (out.text, out.stop_reason, out.finish_reason) == ("ab", "c", FinishReason.STOP)


def test_a_stop_string_completed_by_the_final_replacement_character(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer, stop=("x\ufffd",))
    out = run.push([*tokenizer.encode("ax"), tokenizer.encode("é")[0]], finish_reason=FinishReason.LENGTH)
    assert (out.text, out.stop_reason, out.finish_reason) == ("a", "x\ufffd", FinishReason.STOP)


@pytest.mark.parametrize(
    ("params", "token_id", "text", "reason"),
    [
        ({}, EOS, "hi", None),
        ({"skip_special_tokens": False}, EOS, "hi", None),
        ({"include_stop_str_in_output": True}, EOS, "hi", None),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, EOS, "hi<eos>", None),
        ({"stop_token_ids": (EOS,)}, EOS, "hi", None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, "hi", EOS),
        ({"stop_token_ids": (EOT,)}, EOT, "hi", EOT),
        ({"stop_token_ids": (ABC,)}, ABC, "hi", ABC),
        ({"stop_token_ids": (ABC,), "skip_special_tokens": False}, ABC, "hi", ABC),
        ({"stop_token_ids": (ABC,), "include_stop_str_in_output": True}, ABC, "hiabc", ABC),
    ],
)
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_stop_ids(
    tokenizer: Tokenizer,
    params: dict[str, Any],
    token_id: int,
    text: str,
    reason: int | None,
    stop: tuple[str, ...],
) -> None:
    run = Harness(tokenizer, stop=stop, **params)
    out = run.stop(token_id, before="hi")
    assert (run.shown, out.stop_reason, out.finish_reason) == (text, reason, FinishReason.STOP)
    assert (out.token_ids[-1], out.completion_tokens, len(out.logprobs)) == (token_id, 3, 3)
    assert not run.text.stopped  # the sequence ended by itself: there is nothing to cancel


def test_ignored_eos_inside_the_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), EOS, *tokenizer.encode("b")]
    assert Harness(tokenizer, ignore_eos=True).push(ids).text == "ab"
    assert Harness(tokenizer, ignore_eos=True, skip_special_tokens=False).push(ids).text == "a<eos>b"


@pytest.mark.parametrize(
    ("min_tokens", "text", "tokens"),
    [(0, "a", 2), (1, "a", 2), (2, "aBc", 4), (3, "aBc", 4), (4, "aBcBd", 6), (6, "aBcBdB", 6)],
)
def test_stop_strings_are_ignored_before_min_tokens(
    tokenizer: Tokenizer, min_tokens: int, text: str, tokens: int
) -> None:
    for cuts in ([6], [1] * 6, [3, 3]):
        run = Harness(tokenizer, stop=("B",), min_tokens=min_tokens)
        rest = "aBcBdB"
        for size in cuts:
            if not run.text.stopped:
                end = FinishReason.LENGTH if size == len(rest) else None
                out = run.push(rest[:size], finish_reason=end)
                rest = rest[size:]
        assert (run.shown, out.completion_tokens) == (text, tokens)


def test_a_stop_begun_before_min_tokens_may_end_after_them(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer, stop=("BC",), min_tokens=2)
    assert run.push("aBCd").text == "a"
    assert run.text.stopped


def test_other_fields_pass_through(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer)
    scored = (None, TokenLogprob(3, -1.0))
    assert run.push("a", prompt_logprobs=scored).prompt_logprobs == scored
    out = run.push([], finish_reason=FinishReason.ERROR, error="device lost")
    assert (out.finish_reason, out.error, out.text) == (FinishReason.ERROR, "device lost", "")


def test_output_after_the_end_is_a_mistake(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer, stop=("x",))
    run.push("x")
    with pytest.raises(RuntimeError, match="choice 0 of r has already ended"):
        run.push("y")


def test_the_prompt_does_not_begin_a_stop_string(tokenizer: Tokenizer) -> None:
    run = Harness(tokenizer, stop=("tx",))
    assert run.push("xy").text == "xy"
