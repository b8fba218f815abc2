"""The text of one choice: committed ids in, text that may be shown out, and where stop strings end it.

Plain synchronous code without I/O. The engine feeds every Output of a choice in order and cancels
its sequence when `stopped` turns true.
"""

from __future__ import annotations

from collections.abc import Collection

from xspec.core.request import FinishReason, Output, Request
from xspec.engine.api import TextOutput
from xspec.text.detokenize import IncrementalDetokenizer, StopMatcher
from xspec.text.tokenizer import Tokenizer


class ChoiceText:
    """One choice of a request. `eos_ids` are the model's: an end by one of them has no stop_reason.

    `stopped` is true once a stop string was found; tokens that the engine commits later belong to
    nobody, and pushing them is a mistake of the caller.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, choice: int, eos_ids: Collection[int]) -> None:
        params = request.params
        self._request = request
        self._params = params
        self.choice = choice
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.finished = False
        self.stopped = False

    def push(self, output: Output) -> TextOutput:
        """The text that this output lets out; the last one releases everything that was held back."""
        if self.finished:
            raise RuntimeError(f"choice {self.choice} of {self._request.id} has already ended")
        text, used, stop = self._consume(output)
        finish = FinishReason.STOP if stop is not None else output.finish_reason
        if finish is not None and stop is None:
            tail, stop = self._release()
            text += tail
            finish = FinishReason.STOP if stop is not None else finish
        self.finished = finish is not None
        self.stopped = stop is not None
        self._completion_tokens += used
        drafts = output.drafts
        if drafts is not None and stop is not None:
            drafts = drafts.until(used)
        # Only some outputs carry the count, but usage is read from the last one.
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        return TextOutput(
            request_id=output.request_id,
            choice=self.choice,
            text=text,
            token_ids=output.token_ids[:used],
            logprobs=output.logprobs[:used],
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=finish,
            stop_reason=stop if stop is not None else self._stop_reason(output),
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
            error=output.error if stop is None else None,
            drafts=drafts,
        )

    def _consume(self, output: Output) -> tuple[str, int, str | None]:
        """(text, tokens used, stop string): token by token where a stop string could cut the run."""
        ids = output.token_ids
        hidden = output.stop_token is not None and not self._params.include_stop_str_in_output
        shown = ids[:-1] if hidden else ids
        if not self._params.stop:
            return self._detokenizer.push(shown), len(ids), None
        pieces = []
        for count, token_id in enumerate(shown, start=1):
            # As with stop ids, min_tokens tokens come before the one that may end the answer.
            armed = self._completion_tokens + count > self._params.min_tokens
            piece, stop = self._matcher.push(self._detokenizer.push((token_id,)), armed)
            pieces.append(piece)
            if stop is not None:
                return "".join(pieces), count, stop
        return "".join(pieces), len(ids), None

    def _release(self) -> tuple[str, str | None]:
        """What the end of the choice lets out: an unfinished character, then held stop candidates."""
        text, stop = self._matcher.push(self._detokenizer.flush())
        return (text, stop) if stop is not None else (text + self._matcher.flush(), None)

    def _stop_reason(self, output: Output) -> int | None:
        return None if output.stop_token in self._eos_ids else output.stop_token
