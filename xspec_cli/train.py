"""`xspec train`: a drafter for the model at hand, from its own answers; or only the figures of one.

Turns flags into settings; the stages are in `xspec.train`. `--algorithm=Ouro` is `train_ouro.py`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xspec.config import Config, settings
from xspec.errors import ConfigError
from xspec.setting import Kind
from xspec_cli import train_ouro
from xspec_cli.flags_resolve import Command, Info, Launch, resolve
from xspec_cli.flags_train import DSPARK_FLAGS, FLAGS, MTP_FLAGS, OURO_FLAGS
from xspec_cli.flags_types import Flag
from xspec_cli.gflags import parse_value
from xspec_cli.serve import begin

if TYPE_CHECKING:
    from xspec.train.evaluation import EvaluationOptions
    from xspec.train.figures import Figures
    from xspec.train.run import TrainSettings

OWN_PROMPTS = 4000
OWN_FLAGS = {"MTP": MTP_FLAGS, "DSpark": DSPARK_FLAGS, "Ouro": OURO_FLAGS}

COMMAND = Command(
    usage="xspec train --algorithm=MTP|DSpark|Ouro --output=DIR [--model=PATH] [--flag=value ...]",
    about="Train a drafter for a model on its own answers, and make figures of it in real rollouts. Prompts "
    "come from --prompts and --continue_text files or are made up by the model (--self_prompts). Killed, the "
    "same command goes on where it was. Of the engine's flags --max_seqs_per_batch and --max_cache_size "
    "decide how fast answers are made. With --evaluate_only nothing is trained. --algorithm=Ouro trains a "
    "small looped model instead, on text beside the interpreter, with the flags of its section and of "
    "training.",
    flags=FLAGS,
)


def main(argv: Sequence[str]) -> int:
    launch = resolve(argv, COMMAND)
    if isinstance(launch, Info):
        print(launch.text)
        return 0
    if launch.value("algorithm") == train_ouro.NAME:
        return train_ouro.main(launch)
    check(launch)
    progress = begin(launch)
    # imported late: they load torch, which has to see the threads that begin() settled
    from xspec.train import evaluation, run

    output = str(launch.value("output"))
    if launch.value("evaluate_only"):
        folder = Path(output).expanduser() if output else None
        figures = evaluation.evaluate_only(evaluated(launch), evaluation_options(launch), folder, progress)
    else:
        figures = run.run(settings_of(launch), progress)
    show(figures)
    return 0


def check(launch: Launch) -> None:
    """What flags say of one another; ConfigError lists every mistake."""
    mistakes = _only_served(launch.config)
    if launch.value("evaluate_only"):
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return
    algorithm = str(launch.value("algorithm"))
    if not algorithm:
        mistakes.append("--algorithm is needed: MTP, DSpark or Ouro")
    if not launch.value("output"):
        mistakes.append("--output=DIR is needed: where the drafter goes")
    for other, flags in OWN_FLAGS.items():
        if algorithm and other != algorithm:
            mistakes += [
                f"--{flag.name} is for --algorithm={other}" for flag in flags if flag.name in launch.given
            ]
    speculation = launch.config.speculation
    if speculation.draft_model:
        mistakes.append(f"--draft_model={speculation.draft_model} is only read with --evaluate_only")
    if speculation.speculative_algorithm not in ("auto", algorithm):
        mistakes.append(
            f"--speculative_algorithm={speculation.speculative_algorithm}: allowed: --algorithm ({algorithm})"
        )
    if speculation.num_speculative_tokens == 0:
        mistakes.append(
            "--num_speculative_tokens=0: nothing would be drafted; allowed: -1 or integers from 1"
        )
    if (
        launch.value("self_prompts") == 0
        and not launch.value("prompts")
        and not launch.value("continue_text")
    ):
        mistakes.append("--self_prompts=0 leaves no prompts: give --prompts or --continue_text")
    mistakes += [text for text in (_mistake(read, launch) for read in (temperatures, taps)) if text]
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _only_served(config: Config) -> list[str]:
    """What a drafter is measured at is a fixed width: nothing adapts here."""
    return [
        f"{settings()[flag][1].shown(flag, value)}: not read by xspec train"
        for flag, value in config.to_flat(non_default_only=True).items()
        if flag.startswith(("adaptive_", "enable_adaptive_")) or flag == "round_trace"
    ]


def _mistake(read: Callable[[Launch], object], launch: Launch) -> str:
    try:
        read(launch)
    except ConfigError as error:
        return str(error)
    return ""


def temperatures(launch: Launch) -> tuple[float, float]:
    """--temperatures as (lowest, highest)."""
    texts = launch.value("temperatures")
    values = [parse_value(Kind.DOUBLE, text) for text in texts]
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) != len(texts) or len(numbers) != 2 or not 0.0 <= numbers[0] <= numbers[1] <= 100.0:
        raise ConfigError(
            f"--temperatures={','.join(texts)}: allowed: two numbers from 0 to 100, the lower one first"
        )
    return numbers[0], numbers[1]


def taps(launch: Launch) -> tuple[int, ...] | None:
    """--taps as numbers; None: not given."""
    texts = launch.value("taps")
    values = [parse_value(Kind.INT32, text) for text in texts]
    numbers = tuple(value for value in values if isinstance(value, int) and value > 0)
    if len(numbers) != len(texts) or list(numbers) != sorted(set(numbers)):
        raise ConfigError(f"--taps={','.join(texts)}: allowed: ascending integers from 1")
    return numbers or None


def settings_of(launch: Launch) -> TrainSettings:
    from xspec.train.loop import LoopOptions
    from xspec.train.prompts import PromptOptions
    from xspec.train.rollouts import AnswerOptions
    from xspec.train.run import TrainSettings

    value = launch.value
    algorithm, output = str(value("algorithm")), Path(value("output")).expanduser()
    files, text = tuple(value("prompts")), tuple(value("continue_text"))
    own = value("self_prompts")
    return TrainSettings(
        config=launch.config,
        algorithm=algorithm,
        output=output,
        work=Path(value("work_dir")).expanduser() if value("work_dir") else output / "work",
        prompts=PromptOptions(
            files=files,
            chat=value("chat"),
            continue_text=text,
            continue_tokens=value("continue_tokens"),
            self_prompts=own if own >= 0 else 0 if files or text else OWN_PROMPTS,
            max_tokens=value("max_prompt_tokens"),
            held_out=float(value("held_out")),
            seed=value("seed"),
        ),
        answers=AnswerOptions(
            tokens=value("tokens"),
            max_tokens=value("answer_tokens"),
            greedy_share=float(value("greedy_share")),
            temperatures=temperatures(launch),
            group=value("group"),
            seed=value("seed"),
        ),
        loop=LoopOptions(
            steps=value("steps"),
            seed=value("seed"),
            sequences_per_step=value("sequences_per_step"),
            learning_rate=float(value("learning_rate")),
            warmup_steps=value("warmup_steps"),
            report_every=value("report_every"),
            evaluate_every=value("evaluate_every"),
            save_every=value("save_every"),
        ),
        evaluation=evaluation_options(launch),
        recipe=recipe(launch, OWN_FLAGS[algorithm]),
        taps=taps(launch),
        draft_vocab_size=value("draft_vocab_size") or None,
    )


def recipe(launch: Launch, flags: Sequence[Flag]) -> dict[str, Any]:
    """Options of the algorithm's trainer by the names it has for them."""
    own = {flag.name: launch.value(flag.name) for flag in flags}
    if "draft_block_size" in own:  # --block_size is the KV cache's
        own["block_size"] = own.pop("draft_block_size")
    shared = {"inner_size": launch.value("inner_size") or None, "soft_labels": launch.value("soft_labels")}
    return {**own, **shared}


def evaluation_options(launch: Launch) -> EvaluationOptions:
    from xspec.train.evaluation import EvaluationOptions

    value = launch.value
    return EvaluationOptions(
        prompts=tuple(value("eval_prompts")),
        text=tuple(value("eval_text")),
        chat=value("chat"),
        continue_tokens=value("continue_tokens"),
        limit=value("eval_limit"),
        max_prompt_tokens=value("max_prompt_tokens"),
        max_tokens=value("eval_tokens"),
        seed=value("seed"),
    )


def evaluated(launch: Launch) -> Config:
    """The config whose drafter --evaluate_only means: --draft_model's, --output's, or one that shipped."""
    config, output = launch.config, str(launch.value("output"))
    speculation = config.speculation
    if not output:
        return config
    folder, given = Path(output).expanduser(), Path(speculation.draft_model).expanduser()
    holds_drafter = (folder / "config.json").is_file()
    if speculation.draft_model:
        if holds_drafter and folder.resolve() != given.resolve():
            raise ConfigError(f"--output={output} holds a drafter; figures of another do not belong there")
        return config
    if holds_drafter:
        speculation = dataclasses.replace(speculation, draft_model=output)
        return dataclasses.replace(config, speculation=speculation)
    if speculation.speculative_algorithm == "auto":
        raise ConfigError(
            f"--output={output} holds no drafter: give --draft_model, or --speculative_algorithm for one "
            "that shipped with the embedded model"
        )
    return config


def show(figures: Sequence[Figures]) -> None:
    from xspec.train.figures import table

    print(table(figures) if figures else "no prompts to make figures on: see --eval_prompts and --held_out")
