"""How a policy follows the acceptance when it shifts: code, licences, code, nothing right at all, code.

    python benchmarks/looped.py --model=ouro-tiny --input_tokens=64 --output_tokens=256 --output=ouro
    python benchmarks/shift.py --model=ouro-tiny --candidates=ouro/candidates.json --costs=ouro/costs.json \\
        --policy=goodput --output=shift

Texts are those that the models which ship with xspec were not trained on. Where nothing is to be right,
answers are drawn at temperature 100, which makes them tokens at random. Each spell runs `--batches` times
`--requests` answers of `--output_tokens` tokens, one after the other on one engine.

Written into the folder `--output`: `trace.jsonl`, the engine's --round_trace; `shift.md`, by spell what ran
and why it changed; and with matplotlib `shift.png`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.looped import pieces
from xspec.errors import XspecError
from xspec.llm import LLM
from xspec.models.locate import locate_model
from xspec.threads import settle_threads
from xspec.trace import Trace, TracedRound, read_trace

CODE, LICENCES, NOTHING = "code", "licences", "nothing right"
SPELLS = (CODE, LICENCES, CODE, NOTHING, CODE)
HOTTEST = 100.0
SMOOTHED = 16
"""Rounds that the picture's acceptance is a mean of."""


@dataclass(slots=True)
class Spell:
    """A stretch of the trace: rounds [first, first + len(rounds)) that decoded."""

    name: str
    first: int
    rounds: list[TracedRound] = field(default_factory=list)


def main(args: argparse.Namespace) -> int:
    folder = Path(args.output).expanduser()
    settle_threads(0)  # before torch is imported, for the prompts
    try:
        prompts = prompts_of(args)
        folder.mkdir(parents=True, exist_ok=False)
        first_ids = run(args, prompts, folder / "trace.jsonl")
        trace = read_trace(folder / "trace.jsonl")
    except (XspecError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    spells = spells_of(trace, first_ids)
    text = markdown(args, spells)
    (folder / "shift.md").write_text(text, encoding="utf-8")
    print(text)
    if not draw(spells, folder / "shift.png"):
        print("no picture: matplotlib is not installed (pip install 'xspec[plots]')")
    return 0


# -- the run --------------------------------------------------------------------------------------


def prompts_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Prompts of each kind of text."""
    from xspec.train.ouro_corpus import CODE as CODE_DOMAIN
    from xspec.train.ouro_corpus import PROSE, CorpusOptions, collect

    held_out = [each for each in collect(CorpusOptions()) if each.held_out]
    licences = [each.text for each in held_out if each.domain == PROSE and "licen" in each.text.lower()]
    texts = {CODE: [each.text for each in held_out if each.domain == CODE_DOMAIN], LICENCES: licences}
    model = locate_model(args.model)
    most = args.requests * args.batches * sum(spell != LICENCES for spell in SPELLS)
    return {name: list(pieces(model, each, args.input_tokens, most)) for name, each in texts.items()}


def run(args: argparse.Namespace, prompts: dict[str, list[str]], trace: Path) -> list[int]:
    """Returns how many requests came before each spell."""
    before, asked = [], 0
    with LLM(
        model=args.model,
        speculation_policy=args.policy,
        adaptive_spec_config=args.candidates,
        adaptive_spec_cost_table=args.costs,
        max_seqs_per_batch=args.max_seqs,
        max_model_len=args.max_model_len,
        enable_prefix_cache=False,
        round_trace=str(trace),
    ) as llm:
        for number, spell in enumerate(SPELLS):
            before.append(asked)
            kind = CODE if spell == NOTHING else spell
            params = llm.params(
                temperature=HOTTEST if spell == NOTHING else 0.0,
                max_tokens=args.output_tokens,
                ignore_eos=True,
                seed=number,
            )
            for batch in range(args.batches):
                start = (number * args.batches + batch) * args.requests
                chosen = [prompts[kind][(start + i) % len(prompts[kind])] for i in range(args.requests)]
                llm.generate(chosen, params)
                asked += args.requests
    return before


def spells_of(trace: Trace, before: Sequence[int]) -> list[Spell]:
    """The decode rounds of each spell. Sequences are numbered as they come."""
    spells: list[Spell] = []
    at = 0
    lowest = min(min(each.view.sequence_ids) for each in trace.rounds if each.view.sequence_ids)
    for entry in trace.rounds:
        if not entry.view.sequence_ids or entry.feedback is None:
            continue
        newest = max(entry.view.sequence_ids) - lowest
        while len(spells) < len(before) and newest >= before[len(spells)]:
            spells.append(Spell(SPELLS[len(spells)], at))
        spells[-1].rounds.append(entry)
        at += 1
    return spells


# -- what became of it ----------------------------------------------------------------------------


def named(entry: TracedRound) -> str:
    plan = entry.plan
    return f"{plan.draft_steps}@{plan.depth}" if plan.draft_steps else "plain"


def acceptance(entry: TracedRound) -> float | None:
    """Accepted share of the drafts that were verified; None in a plain round."""
    assert entry.feedback is not None
    verified = sum(row.verified for row in entry.feedback.rows)
    return sum(row.accepted for row in entry.feedback.rows) / verified if verified else None


def moves(spell: Spell) -> Iterator[tuple[int, str, str]]:
    """(round of the spell, to what, reason) wherever something else runs than the round before."""
    last = ""
    for index, entry in enumerate(spell.rounds):
        if (now := named(entry)) != last:
            yield index, now, entry.plan.reason
        last = now


def markdown(args: argparse.Namespace, spells: Sequence[Spell]) -> str:
    lines = [
        f"{args.policy} on {args.model}, {args.requests} requests, "
        f"{args.batches} x {args.output_tokens} tokens each spell",
        "",
        "| spell | rounds | tokens a request and round | accepted | ran | reasons | first moves |",
        "| --- | ---: | ---: | ---: | --- | --- | --- |",
    ]
    for spell in spells:
        rates = [rate for entry in spell.rounds if (rate := acceptance(entry)) is not None]
        rows = sum(len(entry.feedback.rows) for entry in spell.rounds if entry.feedback)
        tokens = sum(row.committed for e in spell.rounds if e.feedback for row in e.feedback.rows)
        ran = Counter(named(entry) for entry in spell.rounds)
        reasons = Counter(entry.plan.reason for entry in spell.rounds)
        shown = list(moves(spell))[:6]
        lines.append(
            f"| {spell.name} | {len(spell.rounds)} | {tokens / max(rows, 1):.2f} "
            f"| {sum(rates) / len(rates) if rates else 0.0:.2f} | {_counts(ran)} | {_counts(reasons)} "
            f"| {'; '.join(f'{at}: {to} ({why})' for at, to, why in shown)} |"
        )
    return "\n".join(lines) + "\n"


def _counts(counts: Counter[str]) -> str:
    total = counts.total()
    return ", ".join(f"{name} {count / total:.0%}" for name, count in counts.most_common())


def draw(spells: Sequence[Spell], path: Path) -> bool:
    """What ran in every round, and how much of it was accepted. False without matplotlib."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    rounds = [entry for spell in spells for entry in spell.rounds]
    names = sorted({named(entry) for entry in rounds}, key=lambda name: (name != "plain", name))
    figure = figures.Figure(figsize=(11, 5), layout="constrained")
    choice, accepted = figure.subplots(2, 1, sharex=True, height_ratios=(len(names) + 1, 4))
    for reason in sorted({entry.plan.reason for entry in rounds}):
        at = [index for index, entry in enumerate(rounds) if entry.plan.reason == reason]
        choice.scatter(at, [names.index(named(rounds[index])) for index in at], s=9, label=reason)
    choice.set_yticks(range(len(names)), names)
    choice.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    rates = [(index, rate) for index, entry in enumerate(rounds) if (rate := acceptance(entry)) is not None]
    means = [
        sum(rate for _, rate in rates[max(0, end - SMOOTHED) : end]) / min(end, SMOOTHED)
        for end in range(1, len(rates) + 1)
    ]
    accepted.plot([index for index, _ in rates], means, ".", markersize=2)
    accepted.set(xlabel="decode round", ylabel=f"accepted, mean of {SMOOTHED}", ylim=(-0.05, 1.05))
    for spell in spells:
        for axes in (choice, accepted):
            axes.axvline(spell.first, color="grey", linewidth=0.8)
        accepted.annotate(
            spell.name, (spell.first, 1.0), xytext=(3, -3), textcoords="offset points", va="top"
        )
    figure.savefig(path, format="png", dpi=120)
    return True


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ouro-tiny", help="a looped model")
    parser.add_argument("--policy", choices=("goodput", "acceptance_ema"), default="goodput")
    parser.add_argument("--candidates", required=True, help="--adaptive_spec_config")
    parser.add_argument("--costs", required=True, help="--adaptive_spec_cost_table")
    parser.add_argument("--output", required=True, help="new folder for everything that is made")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--input_tokens", type=int, default=64)
    parser.add_argument("--output_tokens", type=int, default=256)
    parser.add_argument("--max_seqs", type=int, default=32, help="as the costs were measured with")
    parser.add_argument("--max_model_len", type=int, default=384, help="as the costs were measured with")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(arguments(sys.argv[1:])))
