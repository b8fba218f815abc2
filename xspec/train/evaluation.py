"""Which prompts a drafter is judged on, and evaluation.json: what a model card quotes, by one command.

The rollouts are evaluate.py's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from xspec.config import Config
from xspec.errors import ConfigError
from xspec.exec.assemble import check_abilities
from xspec.platform.select import select_platform
from xspec.progress import Progress
from xspec.text.prompts import read_prompts
from xspec.text.tokenizer import TextAssets
from xspec.train.evaluate import PromptSet, choose_evaluated, evaluate_drafter
from xspec.train.figures import Figures, FiguresFile
from xspec.train.prompts import encode, read_openings
from xspec.train.target import TargetFiles, digest_of, read_target

log = logging.getLogger(__name__)

EVALUATION = "evaluation.json"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    prompts: tuple[str, ...] = ()
    text: tuple[str, ...] = ()  # raw paragraphs, continued without the chat template
    chat: bool = True
    continue_tokens: int = 48
    limit: int = 64  # prompts of each file, evenly spread over it
    max_prompt_tokens: int = 300
    max_tokens: int = 200  # of an answer
    seed: int = 0


def evaluate_only(
    config: Config, options: EvaluationOptions, output: Path | None, progress: Progress
) -> list[Figures]:
    """Figures of the drafter that `config` means, made anew; kept in `output`/evaluation.json if given."""
    if not options.prompts and not options.text:
        raise ConfigError("--evaluate_only needs --eval_prompts=FILE or --eval_text=FILE")
    choose_evaluated(config)
    target = read_target(config.model.model)
    sets = read_sets(options, target.text)
    return evaluate_into(output, config, target, sets, options, progress, anew=True)


def evaluate_into(
    output: Path | None,
    config: Config,
    target: TargetFiles,
    sets: Sequence[PromptSet],
    options: EvaluationOptions,
    progress: Progress,
    *,
    anew: bool = False,
) -> list[Figures]:
    """Figures of all sets. Those that evaluation.json has of the same drafter under the same settings are
    taken from there unless `anew`, and each is written as soon as it is known."""
    fresh = functools.partial(
        evaluate_drafter, config, sets, max_tokens=options.max_tokens, seed=options.seed, progress=progress
    )
    if output is None:
        return list(fresh())
    output.mkdir(parents=True, exist_ok=True)
    kept = FiguresFile(output / EVALUATION, _facts(config, target, sets, options), anew=anew)
    for figures in fresh(known=[(found.prompts, found.temperature) for found in kept.figures]):
        kept.add(figures)
    return kept.figures


def _facts(
    config: Config, target: TargetFiles, sets: Sequence[PromptSet], options: EvaluationOptions
) -> dict[str, Any]:
    """All that the figures depend on."""
    choice = choose_evaluated(config)
    dtype = check_abilities(config, select_platform(config.execution.device, config.execution.cpu_kernels))
    return {
        "target": {"name": target.name, "digest": digest_of(target.path)},
        "drafter": {
            "algorithm": choice.algorithm,
            "name": choice.path.resolve().name if choice.path is not None else "the target's own layers",
            "digest": digest_of(choice.path) if choice.path is not None else None,
            "num_speculative_tokens": choice.steps,
            "target_verify_width": choice.verify,
            "enable_probabilistic_draft": config.speculation.enable_probabilistic_draft,
        },
        "settings": {
            "dtype": str(dtype).removeprefix("torch."),
            "prompts": {chosen.name: len(chosen.prompts) for chosen in sets},
            "chat": options.chat,
            "continue_tokens": options.continue_tokens,
            "max_prompt_tokens": options.max_prompt_tokens,
            "eval_tokens": options.max_tokens,
            "seed": options.seed,
        },
    }


def read_sets(options: EvaluationOptions, text: TextAssets) -> list[PromptSet]:
    """A set per file, named like it. ConfigError names the flag, file and line that is wrong."""
    if options.prompts and options.chat and text.chat is None:
        raise ConfigError("--eval_prompts with --chat: the model has no chat template; use --nochat")
    sets: dict[str, list[tuple[int, ...]]] = {}
    for flag, paths in (("eval_prompts", options.prompts), ("eval_text", options.text)):
        for path in paths:
            name = Path(path).name
            if name in sets:
                raise ConfigError(f"--{flag}={path}: another file to evaluate on is called {name} too")
            sets[name] = _read(path, flag, options, text)
    return [PromptSet(name, tuple(ids)) for name, ids in sets.items()]


def _read(path: str, flag: str, options: EvaluationOptions, text: TextAssets) -> list[tuple[int, ...]]:
    if flag == "eval_text":
        return pick(read_openings(path, text, options.continue_tokens, flag=flag), options.limit)
    prompts = read_prompts(path, flag=flag, chat=options.chat)
    encoded = [
        encode(prompt, text, f"--{flag}={path}, prompt {number}", options.chat)
        for number, prompt in enumerate(prompts, 1)
    ]
    short = [ids for ids in encoded if 0 < len(ids) <= options.max_prompt_tokens]
    if len(short) < len(encoded):
        log.info("%s: %d of %d prompts have more than %d tokens and are left out",
                 path, len(encoded) - len(short), len(encoded), options.max_prompt_tokens)  # fmt: skip
    if not short:
        raise ConfigError(
            f"--{flag}={path} holds no prompt of at most --max_prompt_tokens={options.max_prompt_tokens}"
        )
    return pick(short, options.limit)


def pick(prompts: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of them, evenly spread from the first on."""
    count = min(limit, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]
