"""Rows of the flag table that only `xspec train` reads."""

from __future__ import annotations

from xspec.config import MAX_DRAFT_STEPS
from xspec.setting import Kind
from xspec_cli.flags_types import Flag, command

TRAIN = "Train"
PROMPTS = "Training prompts"
ANSWERS = "Training answers"
TRAINING = "Training"
MTP = "MTP drafter"
DSPARK = "DSpark drafter"
OURO = "Ouro"
EVALUATION = "Evaluation"

TRAIN_FLAGS: tuple[Flag, ...] = (
    command(
        "algorithm",
        TRAIN,
        Kind.STRING,
        "",
        "the drafter to train; Ouro: no drafter but a small looped model, from text beside the interpreter",
        choices=("", "MTP", "DSpark", "Ouro"),
        any_case=True,
    ),
    command(
        "output",
        TRAIN,
        Kind.STRING,
        "",
        "folder for the drafter (--draft_model of the other commands) or the Ouro (--model); the same "
        "command goes on with what it holds",
    ),
    command(
        "work_dir",
        TRAIN,
        Kind.STRING,
        "",
        "folder for prompts, answers and hidden states; drafters of one target may share it; empty: "
        "OUTPUT/work",
    ),
    command("seed", TRAIN, Kind.INT32, 0, "everything random follows from it", low=0),
    command(
        "evaluate_only",
        TRAIN,
        Kind.BOOL,
        False,
        "only make figures, of the drafter in --output, or the one that --draft_model or "
        "--speculative_algorithm means; with --algorithm=Ouro of --model, else of --output",
    ),
)

PROMPT_FLAGS: tuple[Flag, ...] = (
    command(
        "prompts",
        PROMPTS,
        Kind.LIST,
        (),
        "files of prompts, separated by commas: .jsonl with messages, turns, question, prompt or text, "
        "else a prompt a line",
    ),
    command(
        "chat", PROMPTS, Kind.BOOL, True, "put them into the chat template; --nochat takes the bare text"
    ),
    command(
        "continue_text",
        PROMPTS,
        Kind.LIST,
        (),
        "text files whose lines are continued as bare text from their first tokens on",
    ),
    command(
        "continue_tokens",
        PROMPTS,
        Kind.INT32,
        48,
        "so many first tokens; shorter lines are left out. Of an Ouro's held-out text 256 by default",
        low=1,
    ),
    command(
        "self_prompts",
        PROMPTS,
        Kind.INT32,
        -1,
        "prompts the model makes up itself (some come out empty and are dropped); -1: 4000 if no file is "
        "given, else none",
        low=-1,
    ),
    command("max_prompt_tokens", PROMPTS, Kind.INT32, 300, "longer prompts are left out", low=1),
    command(
        "held_out",
        PROMPTS,
        Kind.DOUBLE,
        0.04,
        "share of the prompts, or of an Ouro's code files, kept from training, for calibration and figures",
        low=0.0,
        high=0.9,
    ),
)

ANSWER_FLAGS: tuple[Flag, ...] = (
    command(
        "tokens",
        ANSWERS,
        Kind.INT64,
        500_000,
        "answer tokens to train on; after the last prompt come further samples of each",
        low=1,
    ),
    command("answer_tokens", ANSWERS, Kind.INT32, 200, "longest answer in tokens", low=1),
    command(
        "greedy_share", ANSWERS, Kind.DOUBLE, 0.5, "share of the answers at temperature 0", low=0.0, high=1.0
    ),
    command(
        "temperatures", ANSWERS, Kind.LIST, ("0.7", "1.0"), "lowest and highest temperature of the others"
    ),
    command(
        "group",
        ANSWERS,
        Kind.INT32,
        320,
        "prompts answered between two writes: what is done again after a kill",
        low=1,
    ),
    command(
        "taps",
        ANSWERS,
        Kind.LIST,
        (),
        "target layers whose output is kept, i being after i layers; empty: 5 spread over the depth for "
        "DSpark, none for MTP",
    ),
)

TRAINING_FLAGS: tuple[Flag, ...] = (
    command(
        "steps",
        TRAINING,
        Kind.INT32,
        4000,
        "optimiser steps; of an Ouro 6000 by default, and free to change until its learning rate falls",
        low=1,
    ),
    command("sequences_per_step", TRAINING, Kind.INT32, 8, "prompts with their answers a step", low=1),
    command(
        "learning_rate",
        TRAINING,
        Kind.DOUBLE,
        2e-3,
        "highest learning rate; it falls to 0 as a cosine (Ouro: 0.003 by default, falling to a tenth in the "
        "last 40 % of the steps)",
        low=1e-9,
        high=1.0,
    ),
    command("warmup_steps", TRAINING, Kind.INT32, 30, "steps until it is reached (Ouro: 50)", low=0),
    command(
        "draft_vocab_size",
        TRAINING,
        Kind.INT32,
        0,
        "most frequent tokens that drafts are made of; 0: 16384, or the whole vocabulary where it is smaller",
        low=0,
    ),
    command(
        "inner_size",
        TRAINING,
        Kind.INT32,
        0,
        "width of the MLPs; 0: 4 x hidden for MTP, the target's for DSpark, 512 for Ouro",
        low=0,
    ),
    command(
        "soft_labels",
        TRAINING,
        Kind.BOOL,
        True,
        "learn from the target's whole distribution; off: from the tokens of its answers",
    ),
    command("report_every", TRAINING, Kind.INT32, 25, "steps between two lines of progress", low=1),
    command(
        "evaluate_every", TRAINING, Kind.INT32, 500, "steps between two looks at held-out answers", low=1
    ),
    command(
        "save_every", TRAINING, Kind.INT32, 250, "steps between two checkpoints: what a kill loses", low=1
    ),
)

MTP_FLAGS: tuple[Flag, ...] = (
    command("unroll", MTP, Kind.INT32, 3, "steps trained on its own recursion", low=1, high=MAX_DRAFT_STEPS),
    command(
        "step_decay",
        MTP,
        Kind.DOUBLE,
        0.7,
        "weight of each step relative to the one before",
        low=0.01,
        high=1.0,
    ),
    command(
        "supervise",
        MTP,
        Kind.DOUBLE,
        0.5,
        "share of the answers' tokens a step learns from",
        low=0.01,
        high=1.0,
    ),
    command(
        "step_hidden",
        MTP,
        Kind.STRING,
        "residual",
        "hidden state handed from step to step",
        choices=("residual", "normed"),
    ),
)

DSPARK_FLAGS: tuple[Flag, ...] = (
    command("draft_block_size", DSPARK, Kind.INT32, 5, "tokens drafted at once", low=1, high=MAX_DRAFT_STEPS),
    command("layers", DSPARK, Kind.INT32, 2, "layers of the drafter", low=1, high=64),
    command(
        "markov_rank", DSPARK, Kind.INT32, 32, "rank of the head that ties a token to the one before", low=1
    ),
    command("markov_head", DSPARK, Kind.STRING, "vanilla", "its kind", choices=("vanilla", "gated")),
    command("anchors", DSPARK, Kind.INT32, 32, "blocks a step takes from each answer", low=1),
    command(
        "confidence_weight",
        DSPARK,
        Kind.DOUBLE,
        0.5,
        "weight of the confidence head's loss",
        low=0.0,
        high=100.0,
    ),
)

OURO_FLAGS: tuple[Flag, ...] = (
    command(
        "objective",
        OURO,
        Kind.STRING,
        "expected_loss",
        "expected_loss: every loop's loss, weighed by where the gate would stop; last_loop: only the last "
        "one's, a control whose early loops draft badly",
        choices=("expected_loss", "last_loop"),
    ),
    command(
        "corpus",
        OURO,
        Kind.LIST,
        (),
        "folders with code (.py) and prose (.txt, .rst, .md); empty: the library of this Python interpreter",
    ),
    command("vocab_size", OURO, Kind.INT32, 1024, "tokens of its byte-pair encoding", low=257, high=65536),
    command("hidden_size", OURO, Kind.INT32, 192, "width of its states", low=2, high=8192),
    command("heads", OURO, Kind.INT32, 6, "attention heads", low=1, high=256),
    command("loop_layers", OURO, Kind.INT32, 3, "layers that each loop runs", low=1, high=64),
    command("loops", OURO, Kind.INT32, 4, "loops (total_ut_steps)", low=2, high=64),
    command("tokens_per_step", OURO, Kind.INT32, 1024, "tokens of a step, at least one window", low=2),
    command(
        "windows",
        OURO,
        Kind.LIST,
        ("256:0.8", "1024:0.13", "2560:0.07"),
        "tokens:share of the steps, ascending; the last is the greatest position it can be served with",
    ),
)

EVALUATION_FLAGS: tuple[Flag, ...] = (
    command(
        "eval_prompts",
        EVALUATION,
        Kind.LIST,
        (),
        "files of prompts to make figures on; without any: the held-out prompts",
    ),
    command(
        "eval_text",
        EVALUATION,
        Kind.LIST,
        (),
        "text files to make figures on, continued like --continue_text",
    ),
    command("eval_limit", EVALUATION, Kind.INT32, 64, "prompts of each file, evenly spread over it", low=1),
    command(
        "eval_tokens", EVALUATION, Kind.INT32, 200, "longest answer in tokens (Ouro: all have 256)", low=1
    ),
)

FLAGS: tuple[Flag, ...] = (
    *TRAIN_FLAGS,
    *PROMPT_FLAGS,
    *ANSWER_FLAGS,
    *TRAINING_FLAGS,
    *MTP_FLAGS,
    *DSPARK_FLAGS,
    *OURO_FLAGS,
    *EVALUATION_FLAGS,
)
