"""`xspec train --algorithm=Ouro` from text to figures: the stages in order, each going on where it stopped.

Owns what is checked before any work, and which folder keeps what.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from xspec.config import Config
from xspec.errors import CheckpointError, ConfigError
from xspec.exec.assemble import check_abilities
from xspec.models.locate import locate_model
from xspec.platform.select import select_platform
from xspec.progress import Progress
from xspec.train.journal import State, hold
from xspec.train.ouro import OuroOptions, train_ouro
from xspec.train.ouro_corpus import TOKENIZER, CorpusOptions, held_out_corpus, prepare
from xspec.train.ouro_export import export, load
from xspec.train.ouro_figures import OuroEvaluation, OuroFigures, evaluate, write_figures
from xspec.train.ouro_model import OuroSizes
from xspec.train.run import TimedReport

log = logging.getLogger(__name__)

CHECKPOINT = "training.pt"


@dataclass(frozen=True, slots=True)
class OuroSettings:
    """A whole run. `sizes.vocab` is the corpus's; `loop.bf16` follows --dtype."""

    config: Config
    output: Path
    work: Path
    corpus: CorpusOptions
    sizes: OuroSizes
    loop: OuroOptions
    evaluation: OuroEvaluation

    def recipe(self) -> dict[str, Any]:
        """What the weights depend on besides the steps, by flag."""
        loop, sizes = self.loop, self.sizes
        return {
            "algorithm": "Ouro",
            "corpus": list(self.corpus.folders),
            "held_out": self.corpus.held_out,
            "vocab_size": self.corpus.vocab_size,
            "hidden_size": sizes.hidden,
            "loop_layers": sizes.layers,
            "heads": sizes.heads,
            "inner_size": sizes.inner,
            "loops": sizes.loops,
            "objective": loop.objective,
            "seed": loop.seed,
            "learning_rate": loop.learning_rate,
            "warmup_steps": loop.warmup_steps,
            "tokens_per_step": loop.tokens_per_step,
            "windows": [list(window) for window in loop.windows],
            "dtype": "bfloat16" if loop.bf16 else "float32",
        }


def run(settings: OuroSettings, progress: Progress) -> list[OuroFigures]:
    """Make the model in `settings.output`, or go on making it; its figures.

    ConfigError names flags that cannot be honoured; what was made with others is not touched.
    """
    platform = select_platform(settings.config.execution.device, settings.config.execution.cpu_kernels)
    check_abilities(settings.config, platform)
    _check_folders(settings)
    output, loop = settings.output, settings.loop
    with hold(output, "output"), hold(settings.work, "work_dir"):
        state = State(output / "run.json")
        state.settle("training", settings.recipe(), "--output")
        corpus = prepare(settings.corpus, settings.work)
        finished = {"steps": loop.steps}
        if not state.done("training"):
            sizes = dataclasses.replace(settings.sizes, vocab=corpus.vocab_size)
            log.info(
                "training on %d tokens, %d + %d held out, %d steps",
                len(corpus.training), *map(len, corpus.held_out.values()), loop.all_steps,
            )  # fmt: skip
            device = platform.device()
            model, tokens = train_ouro(corpus, sizes, loop, output / CHECKPOINT, TimedReport(), device)
            facts = {**loop.lasting(), "tokens": tokens, "parameters": _count(model), "corpus": corpus.facts}
            export(output, model, corpus, loop.windows[-1][0], facts)
            state.settle("finished", finished, "--output")
            state.finish("training")
        state.compare("finished", finished, "--output")
        exported, max_position = load(output)
        exported.to(platform.device())
        figures = evaluate(exported, corpus, settings.evaluation, max_position, progress)
        write_figures(output, figures, corpus, settings.evaluation)
    return figures


def evaluate_only(
    model: str, corpus: CorpusOptions, evaluation: OuroEvaluation, output: Path | None, progress: Progress
) -> list[OuroFigures]:
    """Figures of the Ouro that `model` (as --model has it) means; kept in `output` if given."""
    path = locate_model(model)
    if not path.is_dir():
        raise ConfigError(f"--model={model}: allowed here: the directory of an Ouro that xspec train made")
    exported, max_position = load(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path / TOKENIZER))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path / TOKENIZER} is not readable as a tokenizer: {error}") from error
    held_out = held_out_corpus(corpus, tokenizer)
    figures = evaluate(exported, held_out, evaluation, max_position, progress)
    if output is not None:
        write_figures(output, figures, held_out, evaluation)
    return figures


def _check_folders(settings: OuroSettings) -> None:
    output = settings.output
    if output.resolve() == settings.work.resolve():
        raise ConfigError(f"--work_dir={settings.work}: allowed: another folder than --output")
    for flag, folder in (("output", output), ("work_dir", settings.work)):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--{flag}={folder} is a file; allowed: a folder, which is made if need be")
    if (output / "config.json").exists() and not (output / "run.json").exists():
        raise ConfigError(
            f"--output={output} holds a model that xspec train did not make: it is not overwritten"
        )


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
