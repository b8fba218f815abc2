"""--speculation_policy through the whole engine, on a tiny looped model in fp64: the text is that of plain
decoding, and what was planned is what the candidates say.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from test_engine import engine_of, prompt_of, run, tokens
from tiny_looped import write_ouro

from xspec.config import Config
from xspec.engine.build import choose
from xspec.errors import ConfigError, UnsupportedError
from xspec.policy.spec_config import (
    AdaptiveSpecConfig,
    BatchRange,
    Candidate,
    ModelFacts,
    Provenance,
    spec_config_json,
)
from xspec.trace import read_trace

PROMPTS = [prompt_of(i, 5 + 4 * i) for i in range(4)]
SAMPLED = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9}
SETTINGS = {"warmup_steps": 1, "window_steps": 1, "windows_per_point": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ouro(tmp_path_factory.mktemp("ouro") / "ouro")


@pytest.fixture(scope="module")
def plain(path: Path) -> list[tuple[int, ...]]:
    async def texts() -> list[tuple[int, ...]]:
        async with engine_of(path) as engine:
            return [tokens(await run(engine, prompt, **SAMPLED)) for prompt in PROMPTS]

    return asyncio.run(texts())


def candidates(tmp_path: Path) -> Path:
    config = AdaptiveSpecConfig(
        ModelFacts("tiny", 4),
        Provenance("prior", "made up"),
        (
            BatchRange(
                1,
                2,
                (Candidate(1, 1, up=0.5, off=0.2), Candidate(3, 2, down=0.3, off=0.3)),
            ),
            BatchRange(3, 64, (Candidate(1, 3, off=0.5),)),
        ),
    )
    file = tmp_path / "candidates.json"
    file.write_text(json.dumps(spec_config_json(config)))
    return file


async def test_acceptance_ema_moves_along_its_candidates(
    path: Path, plain: list[tuple[int, ...]], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = {"speculation_policy": "acceptance_ema", "adaptive_spec_config": str(candidates(tmp_path))}
    async with engine_of(path, max_seqs_per_batch=4, round_trace=str(trace), **flags) as engine:
        info = engine.server_info()
        assert info["speculation"]["algorithm"] == "Looped"
        assert info["speculation"]["draft_loops"] == [1, 2, 3]
        assert info["adaptation"]["policy"] == "acceptance_ema"
        for number in (1, 4):
            found = await asyncio.gather(*(run(engine, prompt, **SAMPLED) for prompt in PROMPTS[:number]))
            assert [tokens(outputs) for outputs in found] == plain[:number]
    rounds = [entry for entry in read_trace(trace).rounds if entry.view.sequence_ids]
    ran = {(len(entry.view.sequence_ids), entry.plan.draft_steps, entry.plan.depth) for entry in rounds}
    assert {(steps, depth) for rows, steps, depth in ran if rows <= 2} <= {(1, 1), (3, 2), (0, None)}
    assert (4, 1, 3) in ran


async def test_goodput_measures_what_it_chooses_among(
    path: Path, plain: list[tuple[int, ...]], tmp_path: Path
) -> None:
    trace, table = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    flags = {
        "speculation_policy": "goodput",
        "num_speculative_tokens": 2,
        "max_model_len": 128,
        "max_seqs_per_batch": 4,
    }
    async with engine_of(path, **flags, adaptive_spec_cost_table_output=str(table)) as engine:
        facts = engine.server_info()["calibration"]
        assert facts["points"] > 0
    async with engine_of(
        path, **flags, adaptive_spec_cost_table=str(table), round_trace=str(trace)
    ) as engine:
        for number in (1, 4):
            found = await asyncio.gather(*(run(engine, prompt, **SAMPLED) for prompt in PROMPTS[:number]))
            assert [tokens(outputs) for outputs in found] == plain[:number]
        assert engine.server_info()["adaptive"]["shadow_rounds"] > 0
    feedback = [entry.feedback for entry in read_trace(trace).rounds if entry.feedback is not None]
    shadows = [told for told in feedback if told.matches is not None]
    assert shadows and all(told.plan.shadow for told in shadows)
    assert {told.plan.draft_steps for told in feedback} <= {0, 1, 2}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_speculative_tokens": 2}, "(3@2): draft_steps 3 is not prepared; allowed: 1, 2"),
        ({"adaptive_spec_config": "nanbeige4.2_3b"}, "are for 2 loops, the target of this launch has 4"),
    ],
)
def test_candidates_that_do_not_fit_are_refused_before_anything_is_loaded(
    path: Path, tmp_path: Path, flags: dict[str, Any], said: str
) -> None:
    asked = {
        "model": str(path),
        "speculation_policy": "acceptance_ema",
        "adaptive_spec_config": str(candidates(tmp_path)),
        **flags,
    }
    with pytest.raises(UnsupportedError) as caught:
        choose(Config.from_mapping(asked))
    assert any(said in reason for reason in caught.value.reasons)


def test_all_reasons_against_a_policy_come_at_once(path: Path) -> None:
    asked = {"model": str(path), "speculation_policy": "goodput", "draft_loops": 2, "target_verify_width": 1}
    with pytest.raises(UnsupportedError) as caught:
        choose(Config.from_mapping({**asked, "enable_graph": False}))
    assert [reason.split("=")[0] for reason in caught.value.reasons] == [
        "--target_verify_width",
        "--draft_loops",
        "--enable_graph",
    ]


async def test_candidates_are_asked_for_where_none_come_along(path: Path) -> None:
    with pytest.raises(ConfigError, match="none come with ouro: give --adaptive_spec_config=FILE"):
        async with engine_of(path, speculation_policy="acceptance_ema"):
            pass
