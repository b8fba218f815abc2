"""What serving does with the tokens of a round, for requests that nobody waits for.

A calibration runs rounds without clients. Their text is part of what a round costs all the same: it is made
while the next round is computed, on the same cores and under the same interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from xspec.core.request import Output, Request, SamplingParams
from xspec.engine.streams import Mailbox
from xspec.engine.text import ChoiceText
from xspec.text.tokenizer import TextAssets


class Rehearsal:
    """Called with the outputs of each round, once the next was submitted."""

    def __init__(self, assets: TextAssets) -> None:
        self._tokenizer = assets.tokenizer
        self._prompt = tuple(assets.tokenizer.encode("."))
        self._texts: dict[str, ChoiceText] = {}

    def __call__(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            text = self._texts.get(output.request_id)
            if text is None:
                request = Request(output.request_id, self._prompt, SamplingParams(ignore_eos=True))
                text = self._texts[output.request_id] = ChoiceText(self._tokenizer, request, 0, ())
            Mailbox().put(text.push(output))
            if output.finish_reason is not None:
                del self._texts[output.request_id]
