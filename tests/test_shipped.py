"""The drafters that come with the package: found, small, of the embedded model, and at work by default."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from xspec.config import SpeculationConfig
from xspec.draft.choose import SHIPPED, SHIPPED_DEFAULT, choose_drafter, shipped_drafter
from xspec.errors import ConfigError
from xspec.llm import LLM

MOST_BYTES = 22 * 10**6


@pytest.mark.parametrize("algorithm", SHIPPED)
def test_files_are_whole_and_small(algorithm: str) -> None:
    path = shipped_drafter(algorithm)
    assert {entry.name for entry in path.iterdir()} >= {"config.json", "model.safetensors", "README.md"}
    assert 5 * 10**6 < (path / "model.safetensors").stat().st_size < MOST_BYTES


@pytest.mark.parametrize("algorithm", SHIPPED)
def test_they_were_made_for_the_embedded_model(algorithm: str, smollm2_gguf: Path) -> None:
    config = json.loads((shipped_drafter(algorithm) / "config.json").read_text())
    assert config["target"]["digest"] == hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()


def test_which_drafter_is_meant() -> None:
    choice = choose_drafter(SpeculationConfig(), embedded=True)
    assert choice is not None
    assert (choice.algorithm, choice.path) == (SHIPPED_DEFAULT, shipped_drafter(SHIPPED_DEFAULT))
    assert choice.steps == choice.verify == 2
    block = choose_drafter(SpeculationConfig(speculative_algorithm="DSpark"), embedded=True)
    assert block is not None and (block.steps, block.verify) == (5, 5)
    narrow = SpeculationConfig(speculative_algorithm="DSpark", target_verify_width=2)
    block = choose_drafter(narrow, embedded=True)
    assert block is not None and (block.steps, block.verify) == (5, 2)
    assert choose_drafter(SpeculationConfig(num_speculative_tokens=0), embedded=True) is None
    assert choose_drafter(SpeculationConfig(), embedded=False) is None
    with pytest.raises(ConfigError, match="--target_verify_width=3: 2 tokens are drafted"):
        choose_drafter(SpeculationConfig(target_verify_width=3), embedded=True)
    with pytest.raises(ConfigError, match="--draft_model=/nowhere/at/all: there is no such"):
        choose_drafter(SpeculationConfig(draft_model="/nowhere/at/all"), embedded=True)
    with pytest.raises(ConfigError, match="--num_speculative_tokens=4 .* needs --draft_model=DIR"):
        choose_drafter(SpeculationConfig(num_speculative_tokens=4), embedded=False)


@pytest.mark.parametrize("algorithm", SHIPPED)
def test_the_embedded_model_speculates_out_of_the_box(algorithm: str, smollm2_gguf: Path) -> None:
    assert smollm2_gguf.is_file()
    flags = {} if algorithm == SHIPPED_DEFAULT else {"speculative_algorithm": algorithm}
    with LLM(max_seqs_per_batch=2, max_model_len=512, disable_graph_warmup=True, **flags) as llm:
        params = llm.params(temperature=0.0, max_tokens=48)
        (answer,) = llm.chat([{"role": "user", "content": "Count from one to twenty in words."}], params)[0]
    assert answer.drafts is not None
    assert answer.drafts.drafts > 0
    assert answer.drafts.accepted_tokens > answer.drafts.drafts / 10
