"""The test plan of the RFC "Support Adaptive Speculation for Ouro", as it stands: sample, freeze, evaluate.

    python benchmarks/looped.py --model=/models/Ouro-1.4B --output=ouro \\
        --data=gsm8k_test.jsonl,humaneval.jsonl,wikitext_valid.txt

1. Prompts of --input_tokens tokens are packed from the files. Every other one of each file goes into
   `selection.jsonl`, the rest into `evaluation.jsonl`.
2. Offline sampling with the first group at B = 1, 8, 32 (`xspec calibrate`): every (K, d) is screened with
   short answers, the best confirmed with --output_tokens. Makes `candidates.json`, `costs.json`,
   `match_flags.json`, `sampling.md` and its figures.
3. Those are frozen. Online evaluation with the second group (`xspec bench`): plain rounds, every candidate as
   a fixed pair, acceptance_ema and goodput take turns on one engine, at concurrency 1, 8 and 32 and under the
   changing load 1, 8, 32, 8, 1. Printed and kept in `fixed.json` and `changing.json`: throughput, the best
   fixed pair as chosen on the other half of the prompts, and the oracle of all phases, which is put together
   from the best fixed pair of each.

Without --data: held-out text of the interpreter's library, for the models that ship with xspec. Scaled down,
for a CPU: --model=ouro-tiny --input_tokens=64 --output_tokens=256 --phase_seconds=20. What follows `--` goes
to both commands, as in `-- --dtype=float32`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from xspec.errors import ConfigError, XspecError
from xspec.models.locate import locate_model
from xspec.policy.spec_files import load_spec_config
from xspec.text.prompts import read_prompts

REQUESTS = (1, 8, 32)
CHANGING = (1, 8, 32, 8, 1)
PER_FILE = 32
"""Prompts of each file and group, if there is as much text."""

SEPARATOR = "\n\n"


def main(args: argparse.Namespace) -> int:
    folder = Path(args.output).expanduser()
    try:
        groups = packed(args)
        folder.mkdir(parents=True, exist_ok=False)
    except (XspecError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for name, prompts in groups.items():
        lines = [json.dumps({"prompt": text}) for text in prompts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run("calibrate", *engine_flags(args), *sampling_flags(args, folder))
    pairs = fixed_pairs(folder / "candidates.json")
    common = [*engine_flags(args), *frozen_flags(args, folder), policies(pairs)]
    concurrency, seconds = ",".join(map(str, REQUESTS)), args.phase_seconds
    run("bench", *common, f"--concurrency={concurrency}", f"--output={folder / 'fixed.json'}")
    phases = ",".join(f"{count}:{seconds:g}" for count in CHANGING)
    run("bench", *common, f"--phases={phases}", f"--output={folder / 'changing.json'}")
    return 0


# -- prompts --------------------------------------------------------------------------------------


def packed(args: argparse.Namespace) -> dict[str, list[str]]:
    """Prompts of both groups. ConfigError where a file holds no two prompts of that length."""
    model = locate_model(args.model)
    found: dict[str, list[str]] = {"selection": [], "evaluation": []}
    for name, texts in sources(args, model):
        # what stands in a file twice must not end up in both groups
        prompts = list(dict.fromkeys(pieces(model, texts, args.input_tokens, 2 * PER_FILE)))
        if len(prompts) < 2:
            raise ConfigError(f"{name} has no text for two prompts of {args.input_tokens} tokens")
        found["selection"] += prompts[0::2]
        found["evaluation"] += prompts[1::2]
    return found


def sources(args: argparse.Namespace, model: Path) -> Iterator[tuple[str, list[str]]]:
    """(name, texts) of every file."""
    if args.data:
        for file in args.data:
            records = read_prompts(file, flag="data", chat=False)
            yield file, [record.text for record in records if record.text]
        return
    from xspec.train.ouro_corpus import CODE, CorpusOptions, collect

    held_out = [each.text for each in collect(CorpusOptions()) if each.held_out and each.domain == CODE]
    yield "the interpreter's library", held_out


def pieces(model: Path, texts: Sequence[str], tokens: int, most: int) -> Iterator[str]:
    """Texts of `tokens` tokens: records one after another, so that every prompt is as long."""
    from xspec.text.tokenizer import load_text

    tokenizer = load_text(model).tokenizer
    held: list[int] = []
    count = 0
    for text in texts:
        held += tokenizer.encode((SEPARATOR if held else "") + text)
        while len(held) >= tokens and count < most:
            yield tokenizer.decode(held[:tokens])
            held, count = held[tokens:], count + 1
        if count == most:
            return


# -- flags ----------------------------------------------------------------------------------------


def engine_flags(args: argparse.Namespace) -> list[str]:
    most = args.input_tokens + args.output_tokens + 64  # a prompt read again may be a few tokens longer
    return [
        f"--model={args.model}",
        "--speculation_policy=goodput",
        f"--max_seqs_per_batch={REQUESTS[-1]}",
        f"--max_model_len={args.max_model_len or most}",
        *args.engine,
    ]


def sampling_flags(args: argparse.Namespace, folder: Path) -> list[str]:
    return [
        f"--prompts={folder / 'selection.jsonl'}",
        f"--prompt_tokens={args.input_tokens}",
        f"--requests={','.join(map(str, REQUESTS))}",
        f"--screen_tokens={max(8, args.output_tokens // 16)}",
        f"--confirm_tokens={args.output_tokens}",
        f"--candidates_output={folder / 'candidates.json'}",
        f"--adaptive_spec_cost_table_output={folder / 'costs.json'}",
        f"--match_flags_output={folder / 'match_flags.json'}",
        f"--report={folder / 'sampling.md'}",
    ]


def frozen_flags(args: argparse.Namespace, folder: Path) -> list[str]:
    return [
        f"--adaptive_spec_config={folder / 'candidates.json'}",
        f"--adaptive_spec_cost_table={folder / 'costs.json'}",
        f"--prompts={folder / 'evaluation.jsonl'}",
        "--nochat",
        "--ignore_eos",
        f"--max_tokens={args.output_tokens}",
        f"--num_prompts={args.num_prompts}",
        f"--rounds={args.rounds}",
        "--hindsight",
    ]


def fixed_pairs(candidates: Path) -> list[str]:
    config = load_spec_config(str(candidates))
    return sorted({f"{one.draft_steps}@{one.draft_loops}" for one in config.candidates})


def policies(pairs: Sequence[str]) -> str:
    return (
        f"--policies={','.join(['plain', *(f'fixed:{pair}' for pair in pairs), 'acceptance_ema', 'goodput'])}"
    )


def run(command: str, *flags: str) -> None:
    """`xspec COMMAND` in a process of its own; SystemExit with its exit code if it fails."""
    words = [sys.executable, "-m", "xspec_cli.main", command, *flags]
    print("$ xspec", shlex.join(words[3:]), flush=True)
    code = subprocess.run(words, check=False).returncode
    if code:
        raise SystemExit(code)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    own, _, engine = _split(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ouro-tiny", help="a looped model")
    parser.add_argument(
        "--data", type=lambda s: s.split(","), default=[], help="prompt files, as xspec bench"
    )
    parser.add_argument("--output", required=True, help="new folder for everything that is made")
    parser.add_argument("--input_tokens", type=int, default=512)
    parser.add_argument("--output_tokens", type=int, default=2048)
    parser.add_argument("--max_model_len", type=int, default=0, help="0: what prompt and answer need")
    parser.add_argument(
        "--phase_seconds", type=float, default=120.0, help="of each phase of the changing load"
    )
    parser.add_argument("--num_prompts", type=int, default=48, help="requests of each policy, load and round")
    parser.add_argument("--rounds", type=int, default=4, help="policies alternate from round to round")
    parsed = parser.parse_args(own)
    parsed.engine = list(engine)
    return parsed


def _split(argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], "--", words[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(arguments(sys.argv[1:])))
