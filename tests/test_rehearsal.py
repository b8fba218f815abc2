"""Text for requests that nobody waits for: calibration pays for it as serving does."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from xspec.core.request import FinishReason, Output
from xspec.engine.rehearsal import Rehearsal
from xspec.engine.text import ChoiceText
from xspec.text.tokenizer import load_text


def test_every_output_becomes_text_and_ends_with_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int]] = []
    push = ChoiceText.push

    def noted(text: ChoiceText, output: Output) -> object:
        out = push(text, output)
        shown.append((output.request_id, out.completion_tokens))
        return out

    monkeypatch.setattr(ChoiceText, "push", noted)
    rehearsal = Rehearsal(load_text(tiny.make_checkpoint(tmp_path / "llama", "llama")))
    rehearsal((Output("a", 0, (5, 6)), Output("b", 0, (7,))))
    rehearsal((Output("a", 0, (8,)), Output("b", 0, (9,), finish_reason=FinishReason.LENGTH)))
    rehearsal((Output("b", 0, (4,)),))  # another one of that name
    assert shown == [("a", 2), ("b", 1), ("a", 3), ("b", 2), ("b", 1)]
