"""OpenVINO GenAI's continuous batching pipeline on an exported model, asked by token ids and stepped here.

`lookup` is the length of prompt-lookup drafts, 0 for none; `kv_precision` empty leaves the KV cache to
OpenVINO, whose own choice on a CPU is 8 bits. Runs in OpenVINO's environment.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.peers.drivers.protocol import Job, Peer, Turn, closed_loop, main, options_of

OPTIONS: dict[str, Any] = {
    "model": "",
    "threads": 2,
    "concurrency": 1,
    "max_model_len": 2048,
    "dtype": "bf16",
    "kv_precision": "",
    "lookup": 0,
    "ngram_max": 3,
}


class OpenVinoPeer:
    def __init__(self, options: dict[str, Any]) -> None:
        self._openvino = importlib.import_module("openvino")
        self._genai = genai = importlib.import_module("openvino_genai")
        self._numpy = importlib.import_module("numpy")
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = options["concurrency"]
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GiB
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": options["threads"],
            "INFERENCE_PRECISION_HINT": options["dtype"],
        }
        if options["kv_precision"]:
            properties["KV_CACHE_PRECISION"] = options["kv_precision"]
        if options["lookup"]:
            properties["prompt_lookup"] = True
        self._lookup, self._ngram_max = options["lookup"], options["ngram_max"]
        self._pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", properties)
        self._stops = set(self._pipeline.get_config().stop_token_ids)
        self._numbers = itertools.count()
        self._running: dict[int, Any] = {}
        self.about = {
            "version": importlib.metadata.version("openvino-genai"),
            "properties": str(properties),
            "speculation": f"prompt lookup, {self._lookup} tokens" if self._lookup else "None",
        }

    def run(self, job: Job) -> Turn:
        return closed_loop(self, job)

    def close(self) -> None:
        del self._pipeline

    def add(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.stop_token_ids = self._stops
        config.include_stop_str_in_output = True
        if self._lookup:
            config.num_assistant_tokens = self._lookup
            config.max_ngram_size = self._ngram_max
        ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
        self._running[number] = self._pipeline.add_request(next(self._numbers), ids, config)

    def step(self) -> Iterator[tuple[int, Sequence[int], bool]]:
        self._pipeline.step()
        status = self._genai.GenerationStatus
        for number, handle in list(self._running.items()):
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            ended = handle.get_status() != status.RUNNING
            if ended:
                del self._running[number]
            if tokens or ended:
                yield number, tokens, ended

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._running.pop(number).stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def load(options: dict[str, Any]) -> Peer:
    return OpenVinoPeer(options_of(options, OPTIONS))


if __name__ == "__main__":
    sys.exit(main(load))
