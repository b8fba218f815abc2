"""llama.cpp by its C interface as llama-cpp-python wraps it, on a GGUF file as it stands, in running batches.

Every place is a sequence of one context; prompts that begin ride along with the tokens of those running, as
in its server. Greedy tokens come from the logits without a sampler. Runs in llama-cpp-python's environment.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.drivers.protocol import Job, Peer, Turn, closed_loop, main, options_of

OPTIONS: dict[str, Any] = {
    "model": "",
    "threads": 2,
    "concurrency": 1,
    "max_model_len": 2048,
    "kv_unified": False,  # one KV buffer for all sequences instead of one each
}
BATCH_TOKENS = 2048


@dataclass(slots=True)
class Running:
    """A request at work in a place: tokens to compute next, and how many are in the cache already."""

    number: int
    next_tokens: list[int]
    left: int
    cached: int = 0


class LlamaPeer:
    def __init__(self, options: dict[str, Any]) -> None:
        # numpy belongs to the peer's environment too
        self._numpy = importlib.import_module("numpy")
        self._lib = lib = importlib.import_module("llama_cpp.llama_cpp")
        logging.getLogger("llama-cpp-python").setLevel(logging.INFO)
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(options["model"].encode(), model_params)
        if not self._model:
            raise ValueError(f"model {options['model']}: llama.cpp cannot load it; its log says why")
        params = lib.llama_context_default_params()
        params.n_ctx = options["max_model_len"] * options["concurrency"]
        params.n_seq_max = options["concurrency"]
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = options["threads"]
        params.kv_unified = options["kv_unified"]
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context; its log says why")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._vocab_size = lib.llama_vocab_n_tokens(self._vocab)
        self._batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._places: list[Running | None] = [None] * options["concurrency"]
        self.about = {
            "version": importlib.metadata.version("llama_cpp_python"),
            "system": lib.llama_print_system_info().decode(),
            "threads": str(options["threads"]),
            "kv_unified": str(options["kv_unified"]),
        }

    def run(self, job: Job) -> Turn:
        return closed_loop(self, job)

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def add(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        self._places[self._places.index(None)] = Running(number, list(prompt), max_tokens)

    def drop(self, numbers: Sequence[int]) -> None:
        for place, sequence in enumerate(self._places):
            if sequence is not None and sequence.number in numbers:
                self._free(place)

    def step(self) -> Iterator[tuple[int, Sequence[int], bool]]:
        rows = self._fill_batch()
        if code := self._lib.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode answers {code}")
        if not rows:
            return
        logits = self._numpy.ctypeslib.as_array(
            self._lib.llama_get_logits(self._context), shape=(len(rows), self._vocab_size)
        )
        for place, token in zip(rows, logits.argmax(axis=1).tolist(), strict=True):
            sequence = self._places[place]
            assert sequence is not None
            sequence.left -= 1
            sequence.next_tokens = [token]
            ended = sequence.left == 0 or self._lib.llama_vocab_is_eog(self._vocab, token)
            if ended:
                self._free(place)
            yield sequence.number, [token], ended

    def _fill_batch(self) -> list[int]:
        """Put tokens to compute into the batch, decoding places first; places that get logits, in order."""
        batch, count, rows = self._batch, 0, []
        waiting = [(place, one) for place, one in enumerate(self._places) if one is not None]
        for place, sequence in sorted(waiting, key=lambda item: len(item[1].next_tokens)):
            part = sequence.next_tokens[: BATCH_TOKENS - count]
            sequence.next_tokens = sequence.next_tokens[len(part) :]
            for token in part:
                batch.token[count] = token
                batch.pos[count] = sequence.cached
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = place
                batch.logits[count] = 0
                sequence.cached += 1
                count += 1
            if part and not sequence.next_tokens:
                batch.logits[count - 1] = 1
                rows.append(place)
        batch.n_tokens = count
        return rows

    def _free(self, place: int) -> None:
        self._places[place] = None
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), place, -1, -1)


def load(options: dict[str, Any]) -> Peer:
    return LlamaPeer(options_of(options, OPTIONS))


if __name__ == "__main__":
    sys.exit(main(load))
