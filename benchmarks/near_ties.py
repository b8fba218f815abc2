"""Where bf16 (or fp32) texts with and without speculation part, and how close the two tokens were.

    python benchmarks/near_ties.py --prompts gsm8k.jsonl --num_prompts 16

Rounding of a row varies with the number of rows beside it, so near ties may fall either way; in float64 the
texts are equal (tests/test_lossless.py). For each greedy answer that parts from plain decoding's it prints
the position and the gap of the two tokens' log-probabilities under plain decoding. Logits of 16 to 32 are
0.125 apart in bf16; a gap of more than --allowed (two of those) ends with exit code 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from xspec.llm import LLM, Completion
from xspec_cli.benchlib.prompts import load_prompts, take

TOP = 5


def answers(args: argparse.Namespace, **flags: Any) -> list[Completion]:
    with LLM(dtype=args.dtype, enable_prefix_cache=False, max_seqs_per_batch=args.clients, **flags) as llm:
        params = llm.params(temperature=0.0, max_tokens=args.max_tokens, logprobs=TOP)
        prompts = take(load_prompts(args.prompts, chat=True), 0, args.num_prompts)
        found: list[Completion] = []
        for first in range(0, len(prompts), args.clients):
            chats = [prompt.as_messages() for prompt in prompts[first : first + args.clients]]
            found += [choices[0] for choices in llm.chat(chats, params)]
        return found


def main(args: argparse.Namespace) -> int:
    plain = answers(args, num_speculative_tokens=0)
    drafted = answers(args, num_speculative_tokens=args.steps, draft_model=args.draft_model)
    worst = 0.0
    equal = 0
    for index, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
        at = next((place for place, (a, b) in pairs if a != b), None)
        if at is None:
            equal += 1
            continue
        ranked = dict(one.logprobs[at].top)
        theirs = ranked.get(other.token_ids[at], -math.inf)
        gap = one.logprobs[at].logprob - theirs
        worst = max(worst, gap)
        print(f"answer {index}: parts at token {at}, gap {gap:.4f}")
    print(f"{equal} of {len(plain)} answers are equal; the widest gap is {worst:.4f}")
    return int(worst > args.allowed)


if __name__ == "__main__":
    plain_text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain_text)
    parser.add_argument("--prompts", default="")
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--max_tokens", type=int, default=96)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft_model", default="")
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--allowed", type=float, default=0.25, help="two spacings of bf16 logits of 16 to 32")
    sys.exit(main(parser.parse_args()))
