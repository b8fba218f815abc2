"""A target in this process: the engine itself, asked without HTTP.

The load generator shares the engine's event loop, as a server's request handlers would.
"""

from __future__ import annotations

import contextlib
import itertools

from xspec.core.drafts import DraftTotals
from xspec.core.request import FinishReason, SamplingParams
from xspec.engine.api import Engine
from xspec.errors import ConfigError, XspecError
from xspec_cli.benchlib.load import Answer, AskOptions, Clock, TargetError
from xspec_cli.benchlib.prompts import Prompt


class EngineTarget:
    """Prompts are tokenised and templated as the server does it; times are those of the engine's outputs."""

    def __init__(self, engine: Engine, options: AskOptions) -> None:
        self.name = f"in-process {engine.model_id}"
        self._engine = engine
        self._options = options
        self._numbers = itertools.count()
        if options.chat and engine.text.chat is None:
            raise ConfigError(f"--chat: {engine.model_id} has no chat template; use --nochat")

    async def draft_totals(self) -> DraftTotals | None:
        return self._engine.metrics.draft_totals()

    async def ask(self, prompt: Prompt, seed: int, clock: Clock) -> Answer:
        params = SamplingParams(
            max_tokens=self._options.max_tokens,
            temperature=self._options.temperature,
            ignore_eos=self._options.ignore_eos,
            seed=seed,
        )
        try:
            return await self._read(prompt.ids(self._engine.text, chat=self._options.chat), params, clock)
        except XspecError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error

    async def _read(self, prompt_ids: list[int], params: SamplingParams, clock: Clock) -> Answer:
        chunk_s: list[float] = []
        stream = self._engine.generate(prompt_ids, params, request_id=f"bench-{next(self._numbers)}")
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                if output.token_ids:
                    chunk_s.append(clock())
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise TargetError(output.error or f"the engine ended the request: {output.finish_reason}")
                if output.finish_reason is not None:
                    return Answer(
                        chunk_s=tuple(chunk_s),
                        prompt_tokens=output.prompt_tokens,
                        completion_tokens=output.completion_tokens,
                        finish_reason=str(output.finish_reason),
                    )
        raise TargetError("the engine's stream ended without a finish reason")
