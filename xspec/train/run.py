"""`xspec train` from prompts to figures: the stages in order, each going on where it was interrupted.

Owns what is checked before any work, and which folder keeps what; every stage lies in a module of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xspec.config import Config
from xspec.draft.none import NoDrafter
from xspec.errors import ConfigError
from xspec.exec.assemble import Speculation, check_abilities
from xspec.models.base import Target
from xspec.platform.select import select_platform
from xspec.policy.fixed import FixedPolicy
from xspec.progress import Progress, duration
from xspec.train.capture import SEQUENCES_AT_ONCE, CaptureDrafter, capture
from xspec.train.dataset import DatasetSpec, Reader, Writer
from xspec.train.dspark import DSparkOptions, choose_taps, train_dspark
from xspec.train.evaluate import PromptSet, calibrate_dspark
from xspec.train.evaluation import EvaluationOptions, evaluate_into, pick, read_sets
from xspec.train.figures import Figures
from xspec.train.journal import Journal, State, hold, write_atomically
from xspec.train.loop import LoopOptions
from xspec.train.loop import Progress as Step
from xspec.train.mtp import MtpOptions, train_mtp
from xspec.train.offline import OfflineEngine
from xspec.train.prompts import PromptOptions, TrainPrompt, make_prompts
from xspec.train.rollouts import AnswerOptions, count_for, make_answers
from xspec.train.target import digest_of, load_weights, read_target, spread_taps

log = logging.getLogger(__name__)

MTP, DSPARK = "MTP", "DSpark"
DRAFT_VOCAB = 16384
CALIBRATION_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """A whole run. `recipe` are further options of the algorithm's trainer, by field name."""

    config: Config  # of the engine that makes the data
    algorithm: str
    output: Path
    work: Path
    prompts: PromptOptions
    answers: AnswerOptions
    loop: LoopOptions  # `bf16` follows --dtype
    evaluation: EvaluationOptions
    recipe: Mapping[str, Any]
    taps: tuple[int, ...] | None = None  # None: spread over the depth for DSpark, none for MTP
    draft_vocab_size: int | None = None  # None: 16384, or the whole vocabulary of a smaller one

    @property
    def context(self) -> int:
        """Tokens that the longest sequence of the data has, and the one that running it again draws."""
        return self.prompts.max_tokens + self.answers.max_tokens + 1


def run(settings: TrainSettings, progress: Progress) -> list[Figures]:
    """Make the drafter in `settings.output`, or go on making it; its figures.

    ConfigError names flags that cannot be honoured, before any work where it can be known then.
    """
    job = Run(settings, progress)
    with hold(settings.output, "output"), hold(settings.work, "work_dir"):
        job.settle()
        if not job.state.done("training"):
            job.make_data()
            job.train()
        if not job.state.done("export"):
            job.complete_export()
        return job.evaluate()


class Run:
    """One command. Building it reads files and checks; nothing is written before `settle`."""

    def __init__(self, settings: TrainSettings, progress: Progress) -> None:
        self.settings, self._progress = settings, progress
        config = settings.config
        self.platform = select_platform(config.execution.device, config.execution.cpu_kernels)
        self.dtype = check_abilities(config, self.platform)
        self.target = read_target(config.model.model)
        self._check_lengths()
        if settings.prompts.chat and self.target.text.chat is None:
            raise ConfigError(f"--chat: {self.target.name} has no chat template; use --nochat")
        self.taps = self._choose_taps()
        self.options = self._options()
        self._check_output()
        self._sets = read_sets(settings.evaluation, self.target.text)
        self.state = State(settings.output / "run.json")
        self._data = State(settings.work / "data.json")

    # -- before any work -----------------------------------------------------------------------

    def _check_lengths(self) -> None:
        settings, config = self.settings, self.target.config
        asked = settings.config.model.max_model_len
        longest = min(asked or config.max_position, config.max_position)
        if settings.context > longest:
            source = f"--max_model_len={asked}" if asked == longest else "the checkpoint's"
            raise ConfigError(
                f"--max_prompt_tokens={settings.prompts.max_tokens} and --answer_tokens="
                f"{settings.answers.max_tokens} make sequences of {settings.context} tokens, more than "
                f"{source} {longest}"
            )
        block = settings.recipe.get("block_size")
        width = settings.config.speculation.num_speculative_tokens
        if width >= 0 and block is not None and width != block:
            raise ConfigError(
                f"--num_speculative_tokens={width}: a DSpark drafter of --draft_block_size={block} is always "
                "drafted whole; leave it out"
            )

    def _choose_taps(self) -> tuple[int, ...]:
        layers, taps = self.target.config.num_layers, self.settings.taps
        if taps is None:
            return spread_taps(layers) if self.settings.algorithm == DSPARK else ()
        if list(taps) != sorted(set(taps)) or not all(1 <= tap < layers for tap in taps):
            raise ConfigError(
                f"--taps={','.join(map(str, taps))}: allowed: ascending, from 1 to {layers - 1} for a target "
                f"of {layers} layers (i: after i layers; the last is never tapped)"
            )
        return taps

    def _options(self) -> MtpOptions | DSparkOptions:
        settings, vocab = self.settings, self.target.config.vocab_size
        ends = self.target.end_ids
        size = min(DRAFT_VOCAB, vocab) if settings.draft_vocab_size is None else settings.draft_vocab_size
        if not max(1, len(ends)) <= size <= vocab:
            raise ConfigError(
                f"--draft_vocab_size={size}: allowed: integers from {max(1, len(ends))} to {vocab}, the "
                "target's vocabulary"
            )
        loop = dataclasses.replace(settings.loop, bf16=self.dtype == torch.bfloat16)
        shared = {"draft_vocab_size": size, "always_ids": ends, **settings.recipe}
        if settings.algorithm == MTP:
            return MtpOptions(loop, **shared)
        options = DSparkOptions(loop, self.target.config.num_layers, taps=self.taps, **shared)
        choose_taps(options, self.taps)
        return options

    def _check_output(self) -> None:
        output = self.settings.output
        if output.resolve() == self.settings.work.resolve():
            raise ConfigError(f"--work_dir={self.settings.work}: allowed: another folder than --output")
        for flag, folder in (("output", output), ("work_dir", self.settings.work)):
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"--{flag}={folder} is a file; allowed: a folder, which is made if need be")
        if (output / "config.json").exists() and not (output / "run.json").exists():
            raise ConfigError(
                f"--output={output} holds a model that xspec train did not make: it is not overwritten"
            )

    # -- the stages ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Refuse to go on with other settings than those the folders' content was made with."""
        settings = self.settings
        self.digest = digest_of(self.target.path)
        data = {
            "model": f"{self.target.name} {self.digest[:16]}",
            "dtype": str(self.dtype).removeprefix("torch."),
            **settings.prompts.settings(),
            **settings.answers.settings(),
        }
        self._data.settle("data", data, "--work_dir")
        self._recipe = {
            **data,
            "algorithm": settings.algorithm,
            "tokens": settings.answers.tokens,
            "taps": list(self.taps),
            "draft_vocab_size": self.options.draft_vocab_size,
            **{_flag_of(name): value for name, value in settings.recipe.items()},
            **{
                name: value
                for name, value in dataclasses.asdict(settings.loop).items()
                if name not in ("bf16", "clip") and not name.endswith("_every")
            },
        }
        self.state.compare("training", self._recipe, "--output")

    def make_data(self) -> None:
        """Prompts, answers, hidden states."""
        settings = self.settings
        prompts, answers = self._prompts, self._journal()
        tokens = make_answers(prompts, settings.answers, answers, self._open_plain, self._progress)
        log.info("%d answers of %d tokens in %s", answers.count, tokens, answers.path)
        self._close_plain()
        with Writer(self._dataset, self._spec) as writer:
            capture(answers, self._count(answers), writer, self._open_capture, self._progress)
            size = sum(self._spec.row_bytes.values()) * writer.tokens
            log.info("hidden states of %d tokens in %s: %.2f GB", writer.tokens, self._dataset, size / 1e9)

    def train(self) -> None:
        """From here on the settings of the training are fixed for this output."""
        settings = self.settings
        self.state.settle("training", self._recipe, "--output")
        reader = Reader(self._dataset, self._spec, limit=self._count(self._journal()))
        weights = load_weights(self.target, self.dtype)
        log.info(
            "training on %d sequences, %d held out, %d steps",
            len(reader.training), len(reader.held_out), settings.loop.steps,
        )  # fmt: skip
        device, report = self.platform.device(), TimedReport()
        if isinstance(self.options, MtpOptions):
            train_mtp(reader, weights, self.options, settings.output, report, device)
        else:
            train_dspark(reader, weights, self.options, settings.output, report, device)
        self.state.finish("training")

    def complete_export(self) -> None:
        """What only the engine can tell goes into config.json: confidence tables, the width to draft."""
        settings = self.settings
        if isinstance(self.options, MtpOptions):
            asked = settings.config.speculation.num_speculative_tokens
            amend(settings.output, {"num_speculative_tokens": asked if asked > 0 else self.options.unroll})
        elif (prompts := self._held_out(CALIBRATION_PROMPTS)).prompts:
            self._close_plain()
            tables = calibrate_dspark(
                self._data_config,
                settings.output,
                self.options.block_size,
                prompts,
                max_tokens=settings.answers.max_tokens,
                temperature=settings.answers.temperatures[1],
                seed=settings.prompts.seed,
                progress=self._progress,
            )
            found = {regime: table.to_config() for regime, table in tables.items()}
            amend(settings.output, {"confidence_calibration": found or None})
        else:
            log.warning("--held_out=%g leaves nothing to calibrate on", settings.prompts.held_out)
        self.state.finish("export")

    def evaluate(self) -> list[Figures]:
        """On the prompt sets given, else on the run's own held-out prompts."""
        settings, evaluation = self.settings, self.settings.evaluation
        sets = self._sets
        if not sets:
            own = self._held_out(evaluation.limit)
            sets = [own] if own.prompts else []
        speculation = dataclasses.replace(
            settings.config.speculation,
            draft_model=str(settings.output),
            speculative_algorithm=settings.algorithm,
        )
        config = dataclasses.replace(settings.config, speculation=speculation)
        return evaluate_into(settings.output, config, self.target, sets, evaluation, self._progress)

    # -- parts ---------------------------------------------------------------------------------

    @functools.cached_property
    def _data_config(self) -> Config:
        """No prefix cache: what is cached would depend on where a run was interrupted."""
        config = self.settings.config
        length = config.model.max_model_len or self.settings.context
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, max_model_len=length),
            cache=dataclasses.replace(config.cache, enable_prefix_cache=False),
            execution=dataclasses.replace(config.execution, disable_graph_warmup=True),
        )

    @property
    def _dataset(self) -> Path:
        return self.settings.work / "_".join(["states", *map(str, self.taps)])

    @property
    def _spec(self) -> DatasetSpec:
        config = self.target.config
        return DatasetSpec(self.target.name, self.digest, config.hidden_size, config.vocab_size, self.taps)

    def _count(self, answers: Journal) -> int:
        """The first answers, as many as asked for: a shared folder may hold more."""
        return count_for(answers, self.settings.answers.tokens)

    def _journal(self) -> Journal:
        return Journal(self.settings.work / "answers.jsonl")

    @functools.cached_property
    def _prompts(self) -> list[TrainPrompt]:
        settings = self.settings
        group = settings.answers.group
        return make_prompts(
            settings.prompts, settings.work, self.target.text, self._open_plain,
            group=group, progress=self._progress,
        )  # fmt: skip

    def _held_out(self, limit: int) -> PromptSet:
        held_out = [prompt.ids for prompt in self._prompts if prompt.held_out]
        return PromptSet("held-out prompts", tuple(pick(held_out, limit)))

    _plain: OfflineEngine | None = None

    def _open_plain(self) -> OfflineEngine:
        if self._plain is None:
            self._plain = self._engine(self._data_config, lambda _: NoDrafter())
        return self._plain

    def _close_plain(self) -> None:
        self._plain = None

    def _open_capture(self) -> tuple[OfflineEngine, CaptureDrafter]:
        drafter = CaptureDrafter(self.taps)
        scheduler = self._data_config.scheduler
        rows = min(scheduler.max_seqs_per_batch, SEQUENCES_AT_ONCE)
        config = dataclasses.replace(
            self._data_config, scheduler=dataclasses.replace(scheduler, max_seqs_per_batch=rows)
        )
        return self._engine(config, lambda _: drafter), drafter

    def _engine(self, config: Config, make_drafter: Callable[[Target], Any]) -> OfflineEngine:
        return OfflineEngine(
            config,
            self.platform,
            self.target.path,
            make_drafter=make_drafter,
            policy=FixedPolicy(),
            speculation=Speculation(),
            stop_ids=self.target.text.eos_ids,
            progress=self._progress,
        )


class TimedReport:
    """Logs training steps and how long the rest will take. Implements `loop.Report`."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._first: tuple[int, float] | None = None

    def __call__(self, step: Step) -> None:
        now = self._clock_s()
        if self._first is None:
            self._first = (step.step, now)
        steps, since = step.step - self._first[0], now - self._first[1]
        left = f"  {duration(since / steps * (step.steps - step.step))} left" if steps else ""
        log.info("%s%s", step, left if step.step < step.steps else "")


def amend(output: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of an exported drafter's config.json."""
    path = output / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_atomically(path, json.dumps({**config, **changes}, indent=2) + "\n")


def _flag_of(field: str) -> str:
    return "draft_block_size" if field == "block_size" else field
