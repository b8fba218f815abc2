"""The prompts a drafter is trained on: files, raw paragraphs, and what the target makes up itself.

Encoded, cut to length, shuffled and split into training and held-out ones, all of it from the seed.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xspec.errors import ConfigError, RequestError
from xspec.progress import Progress
from xspec.text.prompts import Prompt, read_lines, read_prompts
from xspec.text.tokenizer import TextAssets
from xspec.train.journal import Journal
from xspec.train.offline import OfflineEngine
from xspec.train.selfmade import make_user_turns

log = logging.getLogger(__name__)

Encoded = tuple[str, tuple[int, ...]]  # source, token ids


@dataclass(frozen=True, slots=True)
class PromptOptions:
    files: tuple[str, ...] = ()
    chat: bool = True
    continue_text: tuple[str, ...] = ()
    continue_tokens: int = 48
    self_prompts: int = 0
    max_tokens: int = 300
    held_out: float = 0.04
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """What the prompts depend on, by flag. Files count by name and content, wherever they lie."""
        return {
            "prompts": [_named(path, "prompts") for path in self.files],
            "chat": self.chat,
            "continue_text": [_named(path, "continue_text") for path in self.continue_text],
            "continue_tokens": self.continue_tokens,
            "self_prompts": self.self_prompts,
            "max_prompt_tokens": self.max_tokens,
            "held_out": self.held_out,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class TrainPrompt:
    source: str
    ids: tuple[int, ...]
    held_out: bool


def make_prompts(
    options: PromptOptions,
    work: Path,
    text: TextAssets,
    open_engine: Callable[[], OfflineEngine],
    *,
    group: int,
    progress: Progress,
) -> list[TrainPrompt]:
    """All prompts in the order they are answered, from `work`/prompts.jsonl once they stand there."""
    journal = Journal(work / "prompts.jsonl")
    if not journal.count:
        found = list(read_encoded(options, text))
        if options.self_prompts:
            turns = make_user_turns(
                options.self_prompts,
                Journal(work / "self_prompts.jsonl"),
                text,
                open_engine,
                chat=options.chat,
                max_tokens=options.max_tokens,
                group=group,
                seed=options.seed,
                progress=progress,
            )
            log.info("%d of %d prompts of its own came out well", len(turns), options.self_prompts)
            found += [
                (source, tuple(Prompt(text=turn).ids(text, chat=options.chat))) for source, turn in turns
            ]
        chosen = arrange(found, options)
        journal.append(
            [
                {"id": index, "source": prompt.source, "held_out": prompt.held_out, "prompt_ids": prompt.ids}
                for index, prompt in enumerate(chosen)
            ]
        )
    prompts = [
        TrainPrompt(record["source"], tuple(record["prompt_ids"]), record["held_out"])
        for record in journal.read()
    ]
    held_out = sum(prompt.held_out for prompt in prompts)
    log.info("%d prompts, %d of them held out", len(prompts), held_out)
    return prompts


def read_encoded(options: PromptOptions, text: TextAssets) -> Iterator[Encoded]:
    """Every prompt of the files, whatever its length."""
    for path in options.files:
        for number, prompt in enumerate(read_prompts(path, flag="prompts", chat=options.chat), 1):
            yield Path(path).stem, encode(prompt, text, f"--prompts={path}, prompt {number}", options.chat)
    for path in options.continue_text:
        for ids in read_openings(path, text, options.continue_tokens, flag="continue_text"):
            yield Path(path).stem, ids


def encode(prompt: Prompt, text: TextAssets, where: str, chat: bool) -> tuple[int, ...]:
    try:
        return tuple(prompt.ids(text, chat=chat))
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_openings(path: str, text: TextAssets, tokens: int, *, flag: str) -> list[tuple[int, ...]]:
    """The first `tokens` tokens of every line that has more, to be continued as bare text."""
    found = []
    for number, line in enumerate(read_lines(path, flag=flag), 1):
        ids = encode(Prompt(text=line.strip()), text, f"--{flag}={path} line {number}", False)
        if len(ids) > tokens:
            found.append(ids[:tokens])
    if not found:
        raise ConfigError(f"--{flag}={path} holds no line of more than {tokens} tokens")
    return found


def arrange(found: Iterable[Encoded], options: PromptOptions) -> list[TrainPrompt]:
    """Without duplicates and what is empty or too long; shuffled; the held-out ones spread evenly."""
    kept: dict[tuple[int, ...], str] = {}
    total = long = 0
    for source, ids in found:
        total += 1
        if len(ids) > options.max_tokens:
            long += 1
        elif ids:
            kept.setdefault(ids, source)
    if long:
        log.info(
            "%d of %d prompts have more than %d tokens and are left out", long, total, options.max_tokens
        )
    if total > long + len(kept):
        log.info("%d of %d prompts occur twice or are empty", total - long - len(kept), total)
    if not kept:
        raise ConfigError(
            f"none of {total} prompts is left: all are empty or longer than "
            f"--max_prompt_tokens={options.max_tokens}"
        )
    order = list(kept.items())
    random.Random(f"{options.seed}/prompts").shuffle(order)
    prompts = [
        TrainPrompt(source, ids, is_held_out(index, options.held_out))
        for index, (ids, source) in enumerate(order)
    ]
    if all(prompt.held_out for prompt in prompts):
        raise ConfigError(f"--held_out={options.held_out} leaves none of {len(prompts)} prompts to train on")
    return prompts


def is_held_out(index: int, share: float) -> bool:
    """Evenly spread: of any first n prompts, share x n rounded down."""
    return math.floor((index + 1) * share + 1e-9) > math.floor(index * share + 1e-9)


def _named(path: str, flag: str) -> str:
    try:
        content = Path(path).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--{flag}={path} cannot be read: {error}") from error
    return f"{Path(path).name} {hashlib.sha256(content).hexdigest()[:16]}"
