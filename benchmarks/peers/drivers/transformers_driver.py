"""transformers `generate` on the same weights: static batches, each of which ends with its longest answer.

Option `lookup` is the length of prompt-lookup drafts, 0 for none; `generate` drafts for single requests only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.drivers.protocol import Answer, Job, Peer, Turn, main, options_of

OPTIONS: dict[str, Any] = {
    "model": "",
    "threads": 2,
    "concurrency": 1,
    "max_model_len": 2048,
    "dtype": "bfloat16",
    "lookup": 0,
}


class TransformersPeer:
    def __init__(self, options: dict[str, Any]) -> None:
        if options["lookup"] and options["concurrency"] > 1:
            raise ValueError(f"lookup: generate drafts for one request, not for {options['concurrency']}")
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options["threads"])}
        # imported late: torch reads the number of threads when it is loaded
        import torch
        import transformers

        self._torch = torch
        torch.set_num_threads(options["threads"])
        dtype = getattr(torch, options["dtype"])
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype)
        self._model.eval()
        self._lookup = options["lookup"]
        stops = self._model.generation_config.eos_token_id
        self._stops = frozenset([stops] if isinstance(stops, int) else stops)
        self.about = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "batches": "static",
            "speculation": f"prompt lookup, {self._lookup} tokens" if self._lookup else "None",
        }

    def run(self, job: Job) -> Turn:
        answers: list[Answer] = []
        begin_s = time.perf_counter()
        for first in range(0, len(job.prompts), job.concurrency):
            batch = job.prompts[first : first + job.concurrency]
            answers += [
                Answer(cut(row, self._stops), finished=True) for row in self._generate(batch, job.max_tokens)
            ]
        return Turn(time.perf_counter() - begin_s, tuple(answers))

    def close(self) -> None:
        del self._model

    def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        pad = min(self._stops)
        ids = self._torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = self._torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        more = {"prompt_lookup_num_tokens": self._lookup} if self._lookup else {}
        with self._torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=pad,
                **more,
            )
        rows: list[list[int]] = output[:, width:].tolist()
        return rows


def cut(row: list[int], stops: frozenset[int]) -> list[int]:
    """Tokens up to and including the first end of text; padding stands after it."""
    return next((row[: index + 1] for index, token in enumerate(row) if token in stops), row)


def load(options: dict[str, Any]) -> Peer:
    return TransformersPeer(options_of(options, OPTIONS))


if __name__ == "__main__":
    sys.exit(main(load))
