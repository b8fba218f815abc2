"""Answers of the target to the prompts, half of them greedy: the text that drafters learn to foretell.

Answer i depends on the seed and i. Kept in groups, each whole or not at all, so that an interrupted run makes
the same batches again, to the last bit. Knows nothing about hidden states.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xspec.progress import Progress
from xspec.train.journal import Journal
from xspec.train.offline import Ask, OfflineEngine
from xspec.train.prompts import TrainPrompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    tokens: int = 500_000  # of all answers together
    max_tokens: int = 200  # of one
    greedy_share: float = 0.5
    temperatures: tuple[float, float] = (0.7, 1.0)  # the others', drawn evenly from low to high
    group: int = 320  # prompts answered between two writes: what a kill loses
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """What an answer depends on, by flag; that more of them are made changes none."""
        return {
            "answer_tokens": self.max_tokens,
            "greedy_share": self.greedy_share,
            "temperatures": list(self.temperatures),
        }


def make_answers(
    prompts: Sequence[TrainPrompt],
    options: AnswerOptions,
    journal: Journal,
    open_engine: Callable[[], OfflineEngine],
    progress: Progress,
) -> int:
    """Append to `journal` until it holds `options.tokens` answer tokens; returns how many it holds."""
    tokens = sum(len(record["answer_ids"]) for record in journal.read())
    engine = open_engine() if tokens < options.tokens else None
    while engine is not None and tokens < options.tokens:
        first = journal.count
        if first >= len(prompts) and options.greedy_share == 1.0:
            log.warning(
                "%d prompts gave %d answer tokens, fewer than --tokens=%d: asked greedily again they would "
                "say the same",
                len(prompts), tokens, options.tokens,
            )  # fmt: skip
            break
        numbers = range(first, first + _group_size(first, tokens, len(prompts), options))
        asks = [ask(number, prompts, options) for number in numbers]
        answers = engine.answer(asks, _teller(progress, tokens, options.tokens))
        journal.append(
            [
                _record(number, prompts[number % len(prompts)], one, answer)
                for number, one, answer in zip(numbers, asks, answers, strict=True)
            ]
        )
        tokens += sum(len(answer) for answer in answers)
        if first < len(prompts) <= journal.count and tokens < options.tokens:
            log.info("all prompts are answered once; on with further samples of each")
    progress("answers", options.tokens, options.tokens)
    return tokens


def count_for(journal: Journal, tokens: int) -> int:
    """How many of the first answers hold `tokens` tokens: all if they hold fewer."""
    total = 0
    for count, record in enumerate(journal.read(), 1):
        total += len(record["answer_ids"])
        if total >= tokens:
            return count
    return journal.count


def ask(number: int, prompts: Sequence[TrainPrompt], options: AnswerOptions) -> Ask:
    """Past the last prompt it goes on with the first, sampled only: greedy answers would come again."""
    own = random.Random(f"{options.seed}/answers/{number}")
    greedy = own.random() < options.greedy_share and number < len(prompts)
    drawn = round(own.uniform(*options.temperatures), 3)
    seed = own.getrandbits(31)
    ids = prompts[number % len(prompts)].ids
    return Ask(ids, options.max_tokens, 0.0 if greedy else drawn, seed)


def _group_size(first: int, tokens: int, prompts: int, options: AnswerOptions) -> int:
    """No group runs past the tokens asked for by more than its last answer, nor past the end of a pass."""
    needed = -(-(options.tokens - tokens) // options.max_tokens)
    return min(options.group, needed, prompts - first % prompts)


def _record(number: int, prompt: TrainPrompt, asked: Ask, answer: tuple[int, ...]) -> dict[str, Any]:
    return {
        "id": number,
        "source": prompt.source,
        "held_out": prompt.held_out,
        "temperature": asked.temperature,
        "seed": asked.seed,
        "prompt_ids": prompt.ids,
        "answer_ids": answer,
    }


def _teller(progress: Progress, before: int, total: int) -> Callable[[int, int], None]:
    return lambda _, tokens: progress("answers", min(before + tokens, total - 1), total)
