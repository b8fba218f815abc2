"""Figures of an Ouro by domain of held-out text, a table of them, and the prompts to repeat them with.

Owns which text is asked and what is counted; `ouro_eval.py` has how.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from xspec.errors import ConfigError
from xspec.progress import Progress
from xspec.train.journal import write_atomically
from xspec.train.ouro_corpus import DOMAINS, Corpus
from xspec.train.ouro_eval import (
    Cell,
    Exits,
    Reading,
    distinct,
    greedy,
    match_flags,
    read_exits,
    read_windows,
    replay,
)
from xspec.train.ouro_model import OuroModel

EVALUATION = "evaluation.json"
DRAFT_STEPS = (1, 2, 4, 8)
THRESHOLDS = (0.5, 0.7, 0.9)
PROMPTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class OuroEvaluation:
    prompts: int = 64  # of each domain
    prompt_tokens: int = 256
    answer_tokens: int = 256


@dataclass(frozen=True, slots=True)
class OuroFigures:
    """`matches` of answers: how often depth d drafts the answer's next token, d = 1 to D - 1."""

    domain: str
    prompts: int
    text: Reading
    exits: tuple[Exits, ...]
    matches: tuple[float, ...]
    distinct: float  # share of 4-grams of an answer that occur in it for the first time
    grid: tuple[Cell, ...]


def evaluate(
    model: OuroModel, corpus: Corpus, options: OuroEvaluation, max_position: int, progress: Progress
) -> list[OuroFigures]:
    """Of all domains, in fp32 on the model's device. ConfigError if prompts and answers do not fit."""
    length = options.prompt_tokens + options.answer_tokens
    if length > max_position:
        raise ConfigError(
            f"--continue_tokens={options.prompt_tokens} and --eval_tokens={options.answer_tokens} make "
            f"sequences of {length} tokens, more than the model's {max_position}"
        )
    if options.answer_tokens < 2:
        raise ConfigError(f"--eval_tokens={options.answer_tokens}: allowed: integers from 2")
    model.eval()
    with torch.no_grad():
        return [_evaluate(model, corpus, options, domain, progress) for domain in DOMAINS]


def write_figures(
    folder: Path, figures: Sequence[OuroFigures], corpus: Corpus, options: OuroEvaluation
) -> None:
    """evaluation.json, and held_out_DOMAIN.jsonl: the prompts as text, for xspec bench and calibrate."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": "xspec ouro evaluation",
        "version": 1,
        "corpus": corpus.digest,
        "settings": dataclasses.asdict(options),
        "results": [dataclasses.asdict(found) for found in figures],
    }
    for found in figures:
        prompts = _prompts(corpus, options, found.domain).tolist()
        lines = [json.dumps({"prompt": corpus.tokenizer.decode(ids)}) + "\n" for ids in prompts]
        write_atomically(folder / f"held_out_{found.domain}.jsonl", "".join(lines))
    write_atomically(folder / EVALUATION, json.dumps(content, indent=1) + "\n")


def table(figures: Sequence[OuroFigures]) -> str:
    lines: list[str] = []
    for found in figures:
        loops = len(found.text.bits_per_byte)
        lines += [
            f"{found.domain}: {found.prompts} prompts",
            f"  bits per byte after loop 1 to {loops}: {_row(found.text.bits_per_byte)}",
            f"  picks the last loop's token, given text: {_row(found.text.matches[:-1])}",
            f"  picks the last loop's token, answers:    {_row(found.matches)}"
            f"  (new 4-grams: {found.distinct:.0%})",
            "  early exit at threshold: "
            + ", ".join(
                f"{exits.threshold:g}: {exits.loops:.2f} loops, {exits.bits_per_byte:.3f} bits"
                for exits in found.exits
            ),
            "  acceptance / tokens a round / ideal speed-up"
            + "".join(f"{f'K = {steps}':>20}" for steps in DRAFT_STEPS),
        ]
        for depth in range(1, loops):
            cells = [cell for cell in found.grid if cell.depth == depth]
            shown = (f"{c.acceptance:.2f} / {c.tokens_per_round:.2f} / {c.speedup(loops):.2f}" for c in cells)
            lines.append(f"  {f'd = {depth}':<44}" + "".join(f"{text:>20}" for text in shown))
    return "\n".join(lines)


def _evaluate(
    model: OuroModel, corpus: Corpus, options: OuroEvaluation, domain: str, progress: Progress
) -> OuroFigures:
    device, byte_counts = model.lm_head.weight.device, corpus.byte_counts()
    windows = _windows(corpus, options, domain).to(device)
    prompts = windows[:, : options.prompt_tokens]
    stage, answers, flags = f"answers to {domain}", [], []
    for first in range(0, len(prompts), PROMPTS_AT_ONCE):
        progress(stage, first, len(prompts))
        some = prompts[first : first + PROMPTS_AT_ONCE]
        answers.append(greedy(model, some, options.answer_tokens))
        flags.append(match_flags(model, some, answers[-1]))
    progress(stage, len(prompts), len(prompts))
    matched = torch.cat(flags)
    return OuroFigures(
        domain=domain,
        prompts=len(prompts),
        text=read_windows(model, windows, byte_counts),
        exits=tuple(read_exits(model, windows, byte_counts, THRESHOLDS)),
        matches=tuple(matched.float().mean((0, 2)).tolist()),
        distinct=distinct(torch.cat(answers)),
        grid=tuple(
            replay(matched, steps, depth) for depth in range(1, model.sizes.loops) for steps in DRAFT_STEPS
        ),
    )


def _windows(corpus: Corpus, options: OuroEvaluation, domain: str) -> torch.Tensor:
    return corpus.windows(domain, options.prompts, options.prompt_tokens + options.answer_tokens)


def _prompts(corpus: Corpus, options: OuroEvaluation, domain: str) -> torch.Tensor:
    return _windows(corpus, options, domain)[:, : options.prompt_tokens]


def _row(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)
