"""A target in this process: the engine itself, asked without HTTP.

The load generator shares the engine's event loop, as a server's request handlers would.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools

from xspec.core.drafts import DraftCounts, DraftTotals
from xspec.core.request import FinishReason, SamplingParams
from xspec.engine.api import Engine, TextOutput
from xspec.errors import ConfigError, XspecError
from xspec_cli.benchlib.load import Answer, AskOptions, Clock, TargetError
from xspec_cli.benchlib.prompts import Prompt
from xspec_cli.benchlib.rounds import RoundFigures, RoundLog
from xspec_cli.benchlib.speculation import answer_drafts


class EngineTarget:
    """Prompts are tokenised and templated as the server does it; times are those of the engine's outputs."""

    def __init__(self, engine: Engine, options: AskOptions) -> None:
        self.name = f"in-process {engine.model_id}"
        self._engine = engine
        self._options = options
        self._numbers = itertools.count()
        self._rounds = RoundLog()
        if options.chat and engine.text.chat is None:
            raise ConfigError(f"--chat: {engine.model_id} has no chat template; use --nochat")
        engine.metrics.observers.append(self._rounds.observe)

    async def begin_turn(self) -> None:
        """Forgets the rounds of earlier turns."""
        self._rounds.clear()

    async def draft_totals(self) -> DraftTotals | None:
        return self._engine.metrics.draft_totals()

    def round_figures(self, begin_s: float, end_s: float) -> RoundFigures | None:
        return self._rounds.figures(begin_s, end_s)

    async def ask(self, prompt: Prompt, seed: int, clock: Clock) -> Answer:
        temperature = self._options.temperature if prompt.temperature is None else prompt.temperature
        params = SamplingParams(
            max_tokens=self._options.max_tokens,
            temperature=temperature,
            ignore_eos=self._options.ignore_eos,
            seed=seed,
        )
        try:
            return await self._read(prompt.ids(self._engine.text, chat=self._options.chat), params, clock)
        except XspecError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error

    async def _read(self, prompt_ids: list[int], params: SamplingParams, clock: Clock) -> Answer:
        reader = _OutputReader(clock)
        stream = self._engine.generate(prompt_ids, params, request_id=f"bench-{next(self._numbers)}")
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                reader.take(output)
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise TargetError(output.error or f"the engine ended the request: {output.finish_reason}")
                if output.finish_reason is not None:
                    return reader.answer(output)
        raise TargetError("the engine's stream ended without a finish reason")


class _OutputReader:
    """Collects one answer from its outputs, one a round."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._chunk_s: list[float] = []
        self._rounds: list[tuple[int, DraftCounts | None]] = []  # tokens and drafts of each
        self._ids = hashlib.sha256()

    def take(self, output: TextOutput) -> None:
        if output.token_ids:
            self._chunk_s.append(self._clock())
            self._rounds.append((len(output.token_ids), output.drafts))
            self._ids.update(b"".join(token.to_bytes(8, "little") for token in output.token_ids))

    def answer(self, last: TextOutput) -> Answer:
        return Answer(
            chunk_s=tuple(self._chunk_s),
            prompt_tokens=last.prompt_tokens,
            completion_tokens=last.completion_tokens,
            finish_reason=str(last.finish_reason),
            chunk_tokens=tuple(tokens for tokens, _ in self._rounds),
            digest=self._ids.hexdigest()[:16],
            drafts=answer_drafts(self._rounds[1:]),
        )
