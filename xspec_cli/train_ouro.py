"""`xspec train --algorithm=Ouro`: a small looped model from text, or only the figures of one.

Turns flags into settings, and refuses those that such a run does not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xspec.errors import ConfigError
from xspec.setting import Kind
from xspec_cli.flags_resolve import Launch
from xspec_cli.flags_train import FLAGS, OURO_FLAGS, TRAIN_FLAGS
from xspec_cli.gflags import parse_value
from xspec_cli.serve import begin

if TYPE_CHECKING:
    from xspec.train.ouro_corpus import CorpusOptions
    from xspec.train.ouro_figures import OuroEvaluation
    from xspec.train.ouro_run import OuroSettings

NAME = "Ouro"
INNER = 512
DEFAULTS = {
    "steps": 6000, "learning_rate": 3e-3, "warmup_steps": 50, "continue_tokens": 256, "eval_tokens": 256,
}  # fmt: skip
"""Where a flag that drafters share has another default here. The help of each says so."""

SHARED = {
    "held_out", "steps", "learning_rate", "warmup_steps", "inner_size", "report_every", "evaluate_every",
    "save_every", "continue_tokens", "eval_limit", "eval_tokens",
}  # fmt: skip
ENGINE = {"dtype", "device", "num_compute_threads"}
EVALUATION = {
    "algorithm", "evaluate_only", "output", "corpus", "held_out", "continue_tokens", "eval_limit",
    "eval_tokens",
}  # fmt: skip


def main(launch: Launch) -> int:
    check(launch)
    progress = begin(launch)
    # imported late: they load torch, which has to see the threads that begin() settled
    from xspec.train import ouro_run
    from xspec.train.ouro_figures import table as shown

    output = str(launch.value("output"))
    if launch.value("evaluate_only"):
        folder = Path(output).expanduser() if output else None
        model = launch.config.model.model or output
        figures = ouro_run.evaluate_only(model, corpus_of(launch), evaluation_of(launch), folder, progress)
    else:
        figures = ouro_run.run(settings_of(launch), progress)
    print(shown(figures))
    return 0


def check(launch: Launch) -> None:
    """What flags say of one another; ConfigError lists every mistake."""
    only = bool(launch.value("evaluate_only"))
    own = {flag.name for flag in (*TRAIN_FLAGS, *OURO_FLAGS)} | SHARED
    read, engine = (EVALUATION, ENGINE | {"model"}) if only else (own, ENGINE)
    trained = {flag.name for flag in FLAGS}
    mistakes = [
        f"--{name} is not read by xspec train --algorithm={NAME}" + (" --evaluate_only" if only else "")
        for name in (*(set(launch.given) & trained - read), *(launch.chosen - engine))
    ]
    if only and not launch.value("output") and not launch.config.model.model:
        mistakes.append("--evaluate_only needs --model, or --output=DIR of a trained Ouro")
    if only and launch.config.model.dtype not in ("auto", "float32"):
        mistakes.append(f"--dtype={launch.config.model.dtype}: figures are made in float32")
    if not only and not launch.value("output"):
        mistakes.append("--output=DIR is needed: where the model goes")
    try:
        windows(launch)
    except ConfigError as error:
        mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(sorted(mistakes)))


def windows(launch: Launch) -> tuple[tuple[int, float], ...]:
    """--windows as (tokens, share)."""
    found: list[tuple[int, float]] = []
    texts = launch.value("windows")
    for text in texts:
        length, _, share = text.partition(":")
        tokens, part = parse_value(Kind.INT32, length), parse_value(Kind.DOUBLE, share)
        if not isinstance(tokens, int) or not isinstance(part, float):
            raise ConfigError(f"--windows={','.join(texts)}: allowed: tokens:share, as in 256:0.8,1024:0.2")
        found.append((tokens, part))
    return tuple(found)


def settings_of(launch: Launch) -> OuroSettings:
    from xspec.exec.assemble import check_abilities
    from xspec.platform.select import select_platform
    from xspec.train.ouro import OuroOptions
    from xspec.train.ouro_model import OuroSizes
    from xspec.train.ouro_run import OuroSettings

    value, config = launch.value, launch.config
    platform = select_platform(config.execution.device, config.execution.cpu_kernels)
    output = Path(value("output")).expanduser()
    return OuroSettings(
        config=config,
        output=output,
        work=Path(value("work_dir")).expanduser() if value("work_dir") else output / "work",
        corpus=corpus_of(launch),
        sizes=OuroSizes(
            vocab=value("vocab_size"),
            hidden=value("hidden_size"),
            layers=value("loop_layers"),
            heads=value("heads"),
            inner=value("inner_size") or INNER,
            loops=value("loops"),
        ),
        loop=OuroOptions(
            steps=own(launch, "steps"),
            objective=value("objective"),
            seed=value("seed"),
            learning_rate=float(own(launch, "learning_rate")),
            warmup_steps=own(launch, "warmup_steps"),
            tokens_per_step=value("tokens_per_step"),
            windows=windows(launch),
            bf16=str(check_abilities(config, platform)) == "torch.bfloat16",
            report_every=value("report_every"),
            evaluate_every=value("evaluate_every"),
            save_every=value("save_every"),
        ),
        evaluation=evaluation_of(launch),
    )


def own(launch: Launch, name: str) -> Any:
    """A flag with another default than for drafters."""
    return launch.given.get(name, DEFAULTS[name])


def corpus_of(launch: Launch) -> CorpusOptions:
    from xspec.train.ouro_corpus import CorpusOptions

    return CorpusOptions(
        folders=tuple(launch.value("corpus")),
        held_out=float(launch.value("held_out")),
        vocab_size=launch.value("vocab_size"),
    )


def evaluation_of(launch: Launch) -> OuroEvaluation:
    from xspec.train.ouro_figures import OuroEvaluation

    return OuroEvaluation(
        prompts=launch.value("eval_limit"),
        prompt_tokens=own(launch, "continue_tokens"),
        answer_tokens=own(launch, "eval_tokens"),
    )
