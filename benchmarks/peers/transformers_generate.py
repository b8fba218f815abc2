"""transformers `generate` as a peer: greedy answers to the bench prompts, in fixed batches, same weights.

    OMP_NUM_THREADS=2 python benchmarks/peers/transformers_generate.py --model DIR --batch 1 8 32

Static batching: a batch ends with its longest answer, which is what `generate` offers. Prints tokens/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xspec.errors import ConfigError
from xspec_cli.benchlib.facts import machine_facts
from xspec_cli.benchlib.prompts import Prompt, load_prompts, take
from xspec_cli.benchlib.report import check_output


class Peer:
    """A loaded model and its tokenizer."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def encode(self, prompts: list[Prompt], chat: bool) -> Any:
        texts: list[Any] = [prompt.text for prompt in prompts]
        if chat:
            layout = {"tokenize": False, "add_generation_prompt": True}
            texts = [self.tokenizer.apply_chat_template(prompt.as_messages(), **layout) for prompt in prompts]
        return self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not chat)

    @torch.inference_mode()
    def answer(
        self, prompts: list[Prompt], *, chat: bool, max_tokens: int, ignore_eos: bool
    ) -> tuple[int, float]:
        """(tokens of all answers, seconds) of one batch; padding after an end of text is not counted."""
        inputs = self.encode(prompts, chat)
        least = max_tokens if ignore_eos else 0
        begin = time.perf_counter()
        output = self.model.generate(
            **inputs, do_sample=False, max_new_tokens=max_tokens, min_new_tokens=least, use_cache=True
        )
        seconds = time.perf_counter() - begin
        answers = output[:, inputs["input_ids"].shape[1] :]
        return sum(self.length(row) for row in answers.tolist()), seconds

    def length(self, row: list[int]) -> int:
        """Tokens up to and including the first end of text."""
        stops = self.model.generation_config.eos_token_id
        stop_ids = {stops} if isinstance(stops, int) else set(stops or ())
        return next((index + 1 for index, token in enumerate(row) if token in stop_ids), len(row))


def measure(peer: Peer, prompts: list[Prompt], batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """`rounds` runs of `num_prompts` prompts in batches; each round takes the next prompts of the set."""
    settings = {"chat": not args.nochat, "max_tokens": args.max_tokens, "ignore_eos": args.ignore_eos}
    peer.answer(take(prompts, 0, batch), **{**settings, "max_tokens": 4})
    speeds: list[float] = []
    for round_index in range(args.rounds):
        tokens, seconds = 0, 0.0
        for first in range(0, args.num_prompts, batch):
            count = min(batch, args.num_prompts - first)
            chosen = take(prompts, batch + round_index * args.num_prompts + first, count)
            more_tokens, more_seconds = peer.answer(chosen, **settings)
            tokens, seconds = tokens + more_tokens, seconds + more_seconds
        speeds.append(tokens / seconds)
        done = f"batch {batch}, round {round_index + 1}"
        print(f"{done}: {tokens} tokens, {speeds[-1]:.1f} tokens/s", flush=True)
    return {"batch": batch, "output_tokens_per_s": statistics.median(speeds), "rounds": speeds}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", required=True, help="folder written by export_hf.py")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", default="", help="as for xspec bench; empty: its built-in questions")
    parser.add_argument("--num_prompts", type=int, default=32)
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ignore_eos", action="store_true")
    parser.add_argument("--nochat", action="store_true")
    parser.add_argument("--output", default="", help="JSON file; must not exist")
    args = parser.parse_args()
    try:
        check_output(args.output)
        prompts = load_prompts(args.prompts, chat=not args.nochat)
    except ConfigError as error:
        parser.error(str(error))
    peer = Peer(args.model, getattr(torch, args.dtype))
    results = [measure(peer, prompts, batch, args) for batch in args.batch]
    if args.output:
        body = {"settings": vars(args), "machine": machine_facts(), "results": results}
        Path(args.output).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
