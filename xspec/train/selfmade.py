"""Prompts that the target makes up itself: user turns sampled from an empty chat turn and a few openings.

Owns the openings and how a sampled turn becomes a prompt; knows nothing about what prompts are for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xspec.errors import ConfigError
from xspec.progress import Progress
from xspec.text.tokenizer import TextAssets
from xspec.train.journal import Journal
from xspec.train.offline import Ask, OfflineEngine

STAGE = "prompts of its own"
TEMPERATURE, TOP_P = 1.0, 0.98
SHORTEST_CHARACTERS = 12
_PROBE = "xspecprobe"
_TASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
_FUNCTION = re.compile(r"(?s).*?def ([A-Za-z_]\w*)\([^)\n]*\)[^:\n]*:")
_DOCSTRING = '"""'


@dataclass(frozen=True, slots=True)
class Opening:
    """What a user turn begins with. `share`: of all turns, relative to the other openings."""

    source: str
    text: str
    share: int
    max_tokens: int
    wrapper: str = ""  # stands before `text`; the rest is then a function to be closed after its docstring


OPENINGS: tuple[Opening, ...] = (
    Opening("chat", "", 7, 80),
    Opening("chat", "Explain", 1, 50),
    Opening("chat", "How", 1, 40),
    Opening("chat", "What", 1, 40),
    Opening("code", "Write a Python function", 2, 60),
    Opening("code", "def", 3, 110, wrapper=_TASK),
    Opening("code", "from typing import List\n\n\ndef", 2, 110, wrapper=_TASK),
    Opening("maths", "A", 2, 70),
    Opening("maths", "If", 1, 70),
    Opening("prose", "Write a short story about", 1, 40),
    Opening("prose", "Write an essay", 1, 40),
)
_CYCLE = tuple(  # each opening spread evenly, so that any number of turns has the mix
    opening
    for _, opening in sorted(
        (
            ((number + 0.5) / opening.share, opening)
            for opening in OPENINGS
            for number in range(opening.share)
        ),
        key=lambda pair: pair[0],
    )
)


def make_user_turns(
    count: int,
    journal: Journal,
    text: TextAssets,
    open_engine: Callable[[], OfflineEngine],
    *,
    chat: bool,
    max_tokens: int,
    group: int,
    seed: int,
    progress: Progress,
) -> list[tuple[str, str]]:
    """(source, text) of the turns out of `count` that came out well. What `journal` has is not made again.

    Turn i depends on the seed and i; the target is asked for `group` at a time, and each group is kept whole.
    """
    head = user_turn_head(text, chat=chat)
    stops = text.eos_ids | text.tokenizer.special_ids
    engine = open_engine() if journal.count < count else None
    while engine is not None and journal.count < count:
        numbers = range(journal.count, min(count, journal.count + group))
        asks = [_ask(number, head, text, chat, max_tokens, seed) for number in numbers]
        answers = engine.answer(asks, _teller(progress, journal.count, count))
        records = []
        for number, answer in zip(numbers, answers, strict=True):
            opening = _CYCLE[number % len(_CYCLE)]
            turn = finish(opening, text.tokenizer.decode(until(answer, stops)))
            records.append({"id": number, "source": opening.source, "text": turn})
        journal.append(records)
    progress(STAGE, count, count)
    return [(record["source"], record["text"]) for record in journal.read() if record["text"] is not None]


def _teller(progress: Progress, before: int, total: int) -> Callable[[int, int], None]:
    return lambda complete, _: progress(STAGE, min(before + complete, total - 1), total)


def user_turn_head(text: TextAssets, *, chat: bool) -> str:
    """All that stands before the words of a first user turn."""
    if not chat:
        return ""
    assert text.chat is not None
    shown = text.chat.render([{"role": "user", "content": _PROBE}])
    if shown.count(_PROBE) != 1:
        raise ConfigError(
            f"--self_prompts: the model's chat template prints a user turn {shown.count(_PROBE)} times, "
            "so where it begins is unknown; allowed: templates that print it once"
        )
    return shown[: shown.index(_PROBE)]


def _ask(number: int, head: str, text: TextAssets, chat: bool, max_tokens: int, seed: int) -> Ask:
    opening = _CYCLE[number % len(_CYCLE)]
    start = f"{head}{opening.wrapper}{opening.text}"
    ids = text.tokenizer.encode(start, add_special_tokens=not chat)
    if not ids:
        first = text.tokenizer.bos_id if text.tokenizer.bos_id is not None else text.tokenizer.eos_id
        if first is None:
            raise ConfigError("--self_prompts with --nochat needs a tokenizer with a first or last token")
        ids = [first]
    own = random.Random(f"{seed}/turns/{number}").getrandbits(31)
    return Ask(tuple(ids), min(opening.max_tokens, max_tokens), TEMPERATURE, own, TOP_P)


def until(answer: Sequence[int], stops: frozenset[int]) -> list[int]:
    """The tokens before the first that ends a turn or marks its bounds."""
    end = next((index for index, token in enumerate(answer) if token in stops), len(answer))
    return list(answer[:end])


def finish(opening: Opening, sampled: str) -> str | None:
    """The whole user turn; None if it is too short, or no function where one was begun."""
    if opening.wrapper:
        body = _function_head(opening.text + sampled)
        return None if body is None else f"{opening.wrapper}{body}\n    {_DOCSTRING}\n\n```"
    turn = (opening.text + sampled).strip()
    return turn if len(turn) >= SHORTEST_CHARACTERS else None


def _function_head(code: str) -> str | None:
    """Up to the end of the first function's docstring, which is made up from its name where it is missing."""
    code = code.split("```")[0]
    header = _FUNCTION.match(code)
    if header is None:
        return None
    before, _, rest = code[header.end() :].partition(_DOCSTRING)
    said = rest.split(_DOCSTRING)[0].strip()
    if before.strip() or len(said) <= SHORTEST_CHARACTERS:
        name = header[1].strip("_").replace("_", " ").capitalize() or "The result"
        said = f"{name} of the given input."
    return f"{header[0]}\n    {_DOCSTRING} {said}"
