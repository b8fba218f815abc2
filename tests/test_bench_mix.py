"""Mixed traffic: shares, temperatures and figures by class; what responses tell of their drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fake import FakeEngine, Script, served
from virtual_time import run_virtual

from xspec.core.drafts import DraftCounts
from xspec.errors import ConfigError
from xspec.progress import silent
from xspec_cli import bench
from xspec_cli.benchlib import mix
from xspec_cli.benchlib.http import HttpTarget
from xspec_cli.benchlib.load import AskOptions, Level, Phase, run_load
from xspec_cli.benchlib.local import EngineTarget
from xspec_cli.benchlib.mix import ClassFigures, Part, class_figures, load_mix, parse_mix
from xspec_cli.benchlib.phases import PhaseFigures
from xspec_cli.benchlib.plan import PlanOptions, Run, run_plan
from xspec_cli.benchlib.prompts import Prompt
from xspec_cli.benchlib.samples import Sample, figures
from xspec_cli.benchlib.speculation import AnswerDrafts, answer_drafts, told_drafts
from xspec_cli.benchlib.tables import class_tables
from xspec_cli.flags_resolve import Launch, resolve

ASK = AskOptions(max_tokens=8, temperature=0.0, ignore_eos=False, chat=True)
LEVEL = Level(concurrency=2)


def files(tmp_path: Path, **lengths: int) -> dict[str, str]:
    """Text files of so many prompts, `<name> <number>` each."""
    paths = {}
    for name, length in lengths.items():
        path = tmp_path / f"{name}.txt"
        path.write_text("".join(f"{name} {index}\n" for index in range(length)))
        paths[name] = str(path)
    return paths


# -- the mix -----------------------------------------------------------------------------------


def test_parts_as_they_are_written() -> None:
    assert parse_mix(["data/easy.jsonl:1:0", "hard.jsonl:3:1", "a:b/c.txt:4"]) == (
        Part("easy", "data/easy.jsonl", 0.125, 0.0),
        Part("hard", "hard.jsonl", 0.375, 1.0),
        Part("c", "a:b/c.txt", 0.5),
    )
    assert [part.name for part in parse_mix(["x.txt:1:0", "d/x.txt:1:0.7", "y.txt:1"])] == [
        "x@0",
        "x@0.7",
        "y",
    ]


@pytest.mark.parametrize(
    "word",
    ["x.txt", "x.txt:", ":1", "x.txt:0", "x.txt:-1", "x.txt:nan", "x.txt:inf", "x.txt:1:", "x.txt:1:hot",
     "x.txt:1:101"],
)  # fmt: skip
def test_parts_that_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"--mix={word}: allowed: file:weight or file:weight:temperature"):
        parse_mix([word])


def test_two_parts_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: files of different names or temperatures"):
        parse_mix(["x.txt:1:1", "d/x.txt:2:1"])


def test_a_mix_by_hand(tmp_path: Path) -> None:
    """Three easy ones to one hard one: two hard prompts last for eight in all, seven easy ones for ten (9.33
    rounded up), so the mix is ten long."""
    paths = files(tmp_path, easy=7, hard=2)
    found = load_mix(parse_mix([f"{paths['easy']}:3", f"{paths['hard']}:1:0.5"]), chat=True)
    assert [prompt.text for prompt in found] == [
        "easy 0", "easy 1", "hard 0", "easy 2", "easy 3", "easy 4", "hard 1", "easy 5", "easy 6", "easy 0",
    ]  # fmt: skip
    assert {(prompt.traffic, prompt.temperature) for prompt in found} == {("easy", None), ("hard", 0.5)}


def test_a_broken_file_is_named_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--mix=.*nowhere.txt cannot be read"):
        load_mix(parse_mix([f"{tmp_path}/nowhere.txt:1"]), chat=True)


def test_a_mix_of_a_tiny_share_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "MAX_MIXED_PROMPTS", 100)
    paths = files(tmp_path, a=3, b=40)
    found = load_mix(parse_mix([f"{paths['a']}:1000", f"{paths['b']}:1"]), chat=True)
    assert len(found) == 100


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_every_prefix_keeps_the_shares(weights: list[int]) -> None:
    parts = [Part(str(place), str(place), weight / sum(weights)) for place, weight in enumerate(weights)]

    def load_prompts(path: str, *, chat: bool, flag: str) -> list[Prompt]:
        return [Prompt(text=path)] * 20

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mix, "load_prompts", load_prompts)
        found = load_mix(parts, chat=True)
    for end in range(1, len(found) + 1):
        for part in parts:
            count = sum(prompt.traffic == part.name for prompt in found[:end])
            assert abs(count - part.share * end) <= len(parts) / 2 + 1e-9


# -- asking ------------------------------------------------------------------------------------


async def test_a_prompts_own_temperature_goes_before_that_of_the_run(loop_guard: None) -> None:
    prompts = [
        Prompt(text="a"),
        Prompt(text="b", temperature=0.7, traffic="hot"),
        Prompt(text="c", temperature=0.0),
    ]
    engine = FakeEngine()
    options = replace(ASK, temperature=0.2)
    samples = await run_load(EngineTarget(engine, options), prompts, Level(concurrency=1), seed=0)
    assert [call.params.temperature for call in engine.calls] == [0.2, 0.7, 0.0]
    assert [sample.traffic for sample in samples] == ["", "hot", ""]
    engine = FakeEngine()
    async with served(engine) as server, aiohttp.ClientSession() as session:
        target = HttpTarget(server.url, session, options)
        await target.open()
        await run_load(target, prompts, Level(concurrency=1), seed=5)
    assert [call.params.temperature for call in engine.calls] == [0.2, 0.7, 0.0]
    assert [call.params.seed for call in engine.calls[:2]] == [5, 6]


async def test_answers_tell_their_drafts_in_here_and_over_http() -> None:
    """8 tokens in steps of 3, 3 and 2; the first is the prompt's, the others accepted 2 of 4 and 1 of 2."""
    prompt = Prompt(text="hi")
    engine = FakeEngine(Script(step_tokens=3), draft_width=4)
    (near,) = await run_load(EngineTarget(engine, ASK), [prompt], Level(concurrency=1), seed=0)
    assert near.drafts == AnswerDrafts(rounds=2, tokens=5, drafts=2, proposed=6, accepted=3, verified=6)
    assert (near.chunk_tokens, near.completion_tokens) == ((3, 3, 2), 8)
    async with served(engine) as server, aiohttp.ClientSession() as session:
        target = HttpTarget(server.url, session, ASK)
        await target.open()
        (far,) = await run_load(target, [prompt], Level(concurrency=1), seed=0)
    assert far.drafts is not None and far.drafts.verified is None
    assert (far.drafts.drafts, far.drafts.proposed, far.drafts.accepted) == (2, 6, 3)
    plain = FakeEngine(Script(step_tokens=3))
    (sample,) = await run_load(EngineTarget(plain, ASK), [prompt], Level(concurrency=1), seed=0)
    assert sample.drafts == AnswerDrafts(rounds=2, tokens=5, drafts=0, proposed=0, accepted=0, verified=0)
    assert sample.digest == near.digest != ""


def test_drafts_of_an_answer_by_hand() -> None:
    rounds = [(3, DraftCounts(4, 3, 2)), (1, None), (1, DraftCounts(2, 0, 0))]
    assert answer_drafts(rounds) == AnswerDrafts(3, 5, 2, 6, 2, 3)
    counts = {"num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 2}
    # 6 tokens: the prompt's own, 2 accepted and 2 of the target in rounds with drafts, 1 plain round
    assert told_drafts({"speculative_decoding": counts}, 6) == AnswerDrafts(3, 5, 2, 6, 2)


@pytest.mark.parametrize(
    "metrics",
    [None, "x", {}, {"speculative_decoding": None}, {"speculative_decoding": {"num_spec_steps": 1}},
     {"speculative_decoding": {"num_spec_steps": -1, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0}},
     {"speculative_decoding": {"num_spec_steps": "1", "num_draft_tokens": 0, "num_accepted_draft_tokens": 0}},
    ],
)  # fmt: skip
def test_metrics_of_something_else_tell_nothing(metrics: Any) -> None:
    assert told_drafts(metrics, 5) is None


# -- figures by class --------------------------------------------------------------------------


def sample(
    traffic: str, tokens: int, *drafts: int | None, error: str | None = None, end_s: float = 2.0
) -> Sample:
    found = AnswerDrafts(*drafts) if drafts else None  # type: ignore[arg-type]
    return Sample(0, 0.0, end_s, (end_s / 2, end_s), 4, tokens, error=error, traffic=traffic, drafts=found)


def run_of(*samples: Sample, target: str = "A", index: int = 0) -> Run:
    return Run(LEVEL, index, target, samples, figures(samples))


def test_figures_by_class_by_hand() -> None:
    runs = [
        run_of(sample("easy", 11, 4, 10, 4, 20, 6, 16), sample("hard", 5, 4, 4, 2, 10, 0, 4)),
        run_of(sample("hard", 5, 4, 4, 4, 20, 0, 8), sample("hard", 9, error="no", end_s=4.0)),
    ]
    easy, hard = class_figures(runs)
    assert easy == ClassFigures("easy", 1, 0, 11.0, 11 / 6, 2.5, 6 / 16, 4.0)
    assert hard == ClassFigures("hard", 2, 1, 10.0, 10 / 6, 1.0, 0.0, 1.5)


def test_what_is_not_told_is_not_shown() -> None:
    (found,) = class_figures([run_of(sample("x", 9, 4, 8, 4, 16, 4, None), sample("x", 2))])
    assert (found.acceptance, found.verified_a_round, found.tokens_a_round) == (0.25, None, 2.0)
    (found,) = class_figures([run_of(sample("x", 9))])
    assert (found.acceptance, found.verified_a_round, found.tokens_a_round) == (None, None, None)


def test_tokens_after_the_last_phase_do_not_count_for_a_class() -> None:
    phases = (PhaseFigures(1, 0.0, 2.0, 4.0, 2.0, 0),)
    late = Sample(0, 0.0, 3.0, (1.0, 1.5, 2.5), 4, 6, chunk_tokens=(2, 2, 2), traffic="x")
    run = replace(run_of(late), level=Level(phases=(Phase(1, 2.0),)), phases=phases)
    (found,) = class_figures([run])
    assert (found.tokens, found.tokens_per_s) == (4.0, 2.0)


def test_the_table_of_classes() -> None:
    """The second policy verifies 2 drafts a round where the first verifies 5, at twice the speed."""
    runs = [
        run_of(sample("hard", 12, 5, 10, 5, 25, 5, 25), target="full"),
        run_of(sample("hard", 12, 5, 10, 5, 25, 5, 10, end_s=1.0), target="adaptive"),
    ]
    plan = PlanOptions((LEVEL,), 1, 1, 0, 0)
    assert class_tables(runs, plan, ["full", "adaptive"]).splitlines() == [
        "concurrency 2, by class of traffic",
        "  class  policy    requests  tokens  tokens/row  accepted  tokens/s                     ratio"
        "    rows                     ratio",
        "  hard   full             1      12        2.00      0.20       6.0                          "
        "    6.00                          ",
        "  hard   adaptive         1      12        2.00      0.50      12.0    2.000 (2.000 to 2.000)"
        "    3.00    0.500 (0.500 to 0.500)",
    ]


def test_a_mixed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    async def build_engine(config: Any, *, progress: Any) -> FakeEngine:
        return FakeEngine(Script(step_tokens=3), draft_width=4)

    monkeypatch.setattr("xspec.engine.build.build_engine", build_engine)
    paths, output = files(tmp_path, easy=4, hard=4), tmp_path / "out.json"
    words = [f"--mix={paths['easy']}:0.5:0,{paths['hard']}:0.5:1", "--concurrency=2", "--num_prompts=6"]
    assert bench.main([*words, "--warmup=0", "--max_tokens=8", f"--output={output}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    (easy,) = (line.split() for line in shown if line.startswith("  easy "))
    assert easy[3:7] == ["3", "24", "2.50", "0.50"] and easy[-1] == "4.00"
    kept = json.loads(output.read_bytes())
    assert [s["traffic"] for s in kept["runs"][0]["samples"]] == ["easy", "hard"] * 3
    assert kept["settings"]["mix"] == words[0].removeprefix("--mix=").split(",")


def test_mix_and_prompts_exclude_each_other() -> None:
    launch = resolve(["--mix=a.txt:1", "--prompts=b.txt"], bench.COMMAND, environ={})
    assert isinstance(launch, Launch)
    with pytest.raises(ConfigError, match="--mix and --prompts exclude each other"):
        bench.job_of(launch)


def test_classes_take_part_in_phases_too() -> None:
    """Answers of 5 tokens, one a second, of two clients: the last ones end after 10.5 seconds."""
    prompts = [Prompt(text="xx", traffic="ab"[i % 2]) for i in range(4)]
    plan = PlanOptions((Level(phases=(Phase(2, 10.5),)),), 1, 1, 0, 0)

    async def work() -> list[Run]:
        engine = FakeEngine(Script(texts=["12345"], delay_s=1.0))
        return await run_plan([EngineTarget(engine, ASK)], prompts, plan, silent)

    first, second = class_figures(run_virtual(work()))
    assert (first.traffic, first.completed, first.tokens) == ("a", 3, 10.0)
    assert (second.traffic, second.completed, second.tokens) == ("b", 3, 10.0)


async def test_phases_over_http_share_the_tokens_among_the_chunks() -> None:
    engine = FakeEngine(Script(step_tokens=3, delay_s=0.001))
    async with served(engine) as server, aiohttp.ClientSession() as session:
        target = HttpTarget(server.url, session, ASK)
        await target.open()
        plan = PlanOptions((Level(phases=(Phase(1, 0.02), Phase(3, 0.02))),), 1, 1, 0, 0)
        (run,) = await run_plan([target], [Prompt(text="hi")], plan, silent)
    for sample in run.samples:
        assert sample.chunk_tokens == () and sample.tokens_within(0.0, float("inf")) == pytest.approx(8.0)
    assert run.rounds is None and [phase.concurrency for phase in run.phases] == [1, 3]
