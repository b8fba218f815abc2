"""Clients that are made up: calibration pays for text, counters and the event loop as serving does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from xspec.core.request import FinishReason, Output
from xspec.engine.rehearsal import Rehearsal
from xspec.engine.streams import Mailbox
from xspec.engine.text import ChoiceText
from xspec.exec.driver import Retirement
from xspec.metrics import Metrics
from xspec.text.tokenizer import load_text


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    text = load_text(tiny.make_checkpoint(tmp_path / "llama", "llama"))
    with contextlib.closing(Rehearsal(text, Metrics("rehearsal"))) as rehearsal:
        yield rehearsal


def test_every_output_becomes_text_and_ends_with_its_request(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int]] = []
    read: list[tuple[str, int]] = []
    push, get = ChoiceText.push, Mailbox.get

    def noted(text: ChoiceText, output: Output) -> object:
        out = push(text, output)
        shown.append((output.request_id, out.completion_tokens))
        return out

    async def got(mail: Mailbox) -> object:
        out = await get(mail)
        read.append((out.request_id, out.completion_tokens))
        return out

    monkeypatch.setattr(ChoiceText, "push", noted)
    monkeypatch.setattr(Mailbox, "get", got)
    for outputs in (
        (Output("a", 0, (5, 6)), Output("b", 0, (7,))),
        (Output("a", 0, (8,)), Output("b", 0, (9,), finish_reason=FinishReason.LENGTH)),
        (Output("b", 0, (4,)),),  # another one of that name
        (),  # clients that were woken read in the loop's next turn at the latest
    ):
        rehearsal(Retirement(outputs))
    assert shown == [("a", 2), ("b", 1), ("a", 3), ("b", 2), ("b", 1)]
    assert sorted(read) == sorted(shown)


def test_tokens_are_counted(rehearsal: Rehearsal) -> None:
    metrics = rehearsal._metrics
    rehearsal(Retirement((Output("a", 0, (5, 6)), Output("b", 0, (7,)))))
    exposition = metrics.render()[0].decode()
    assert 'xspec:generation_tokens_total{model_name="rehearsal"} 3.0' in exposition
    assert 'xspec:num_requests_running{model_name="rehearsal"} 2.0' in exposition
