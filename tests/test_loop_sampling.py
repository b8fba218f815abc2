"""Acceptance of every (K, d) from match flags: by hand, and equal to what rounds of an fp64 engine count."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from calib_fake import Rig, make_looped_rig
from test_engine import prompt_of
from test_spec_costs import spec

from xspec.calib import match_flags
from xspec.calib.match_flags import FlagReader, Told
from xspec.calib.replay import Counted, match_rates, replay, replay_grid
from xspec.calib.trial import Trial, run_trial
from xspec.cost.settings import Pair
from xspec.errors import EngineError
from xspec.policy.fixed import FixedPolicy

STEPS, DEPTHS = (1, 3, 7), (1, 2, 3)
PAIRS: list[Pair] = [(steps, depth) for steps in STEPS for depth in DEPTHS]
PROMPTS = [tuple(prompt_of(index, 9 + 20 * index)) for index in range(2)]
ANSWER_TOKENS = 32


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make_looped_rig(
        tmp_path_factory.mktemp("sampling"), widths=STEPS, depths=DEPTHS, adaptation=spec()
    )


def trial(rig: Rig, policy: FixedPolicy, requests: int) -> Trial:
    service = rig.service(rig.device(lambda plan: 1.0))
    return run_trial(service, policy, PROMPTS, answer_tokens=ANSWER_TOKENS, requests=requests)


@pytest.fixture(scope="module")
def plain(rig: Rig) -> Trial:
    return trial(rig, FixedPolicy(), requests=2)


@pytest.fixture(scope="module")
def told(rig: Rig, plain: Trial) -> list[Told]:
    reader = FlagReader(rig.parts)
    return [reader.read(prompt, answer) for prompt, answer in zip(PROMPTS, plain.answers, strict=True)]


def flags(text: str) -> np.ndarray:
    return np.array([mark == "1" for mark in text])


@pytest.mark.parametrize(
    ("marks", "steps", "counted"),
    [
        # from tokens 0, 3, 4, 6 (room for one draft) and 7 (for none) on: 2, 0, 1, 0 and 0 are accepted
        ("11101001", 2, Counted(rounds=5, proposed=7, accepted=3, committed=8)),
        ("1111", 3, Counted(rounds=1, proposed=3, accepted=3, committed=4)),
        ("0000", 3, Counted(rounds=4, proposed=6, accepted=0, committed=4)),  # 3 + 2 + 1 + 0
        ("1", 4, Counted(rounds=1, proposed=0, accepted=0, committed=1)),
        ("", 4, Counted(rounds=0, proposed=0, accepted=0, committed=0)),
    ],
)
def test_rounds_by_hand(marks: str, steps: int, counted: Counted) -> None:
    assert replay([flags(marks)], steps) == counted


def test_requests_add_up_and_rates_are_over_all_tokens() -> None:
    two = [flags("1111"), flags("0000")]
    both = replay(two, 3)
    assert both == Counted(rounds=5, proposed=9, accepted=3, committed=8)
    assert both.acceptance == pytest.approx(1 / 3) and both.tokens_per_round == pytest.approx(8 / 5)
    assert match_rates([each[:, None] for each in two]) == (0.5,)
    with pytest.raises(ValueError, match="say nothing of 3"):
        replay_grid([each[:, None] for each in two], (1,), [(2, 3)])


def test_the_replay_counts_what_rounds_count(rig: Rig, plain: Trial, told: list[Told]) -> None:
    """All nine (K, d), proposed, accepted and rounds, and the same text."""
    assert all(each.own.all() for each in told), "the answers are the target's own"
    grid = replay_grid([each.flags for each in told], DEPTHS, PAIRS)
    accepted = set()
    for steps, depth in PAIRS:
        ran, counted = trial(rig, FixedPolicy(steps, depth=depth), requests=1), grid[steps, depth]
        assert ran.answers == plain.answers
        found = (ran.rounds, ran.proposed, ran.accepted)
        assert found == (counted.rounds, counted.proposed, counted.accepted), (steps, depth)
        accepted.add(counted.accepted)
    assert len(accepted) > 5 and min(accepted) > 0, "pairs differ, so that equal counts say something"


def test_pieces_of_a_pass_tell_the_same(
    rig: Rig, plain: Trial, told: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded by pieces; borders inside the prompt, the answer and a page change no flag."""
    monkeypatch.setattr(match_flags, "PIECE_ROWS", 11)
    monkeypatch.setattr(match_flags, "HEAD_ROWS", 3)
    reader = FlagReader(rig.parts)
    for prompt, answer, whole in zip(PROMPTS, plain.answers, told, strict=True):
        again = reader.read(prompt, answer)
        assert np.array_equal(again.flags, whole.flags) and again.own.all()
        assert whole.flags.shape == (ANSWER_TOKENS - 1, len(DEPTHS))


def test_an_answer_of_others_is_noticed(rig: Rig, plain: Trial) -> None:
    answer = list(plain.answers[0])
    answer[20] = (answer[20] + 1) % rig.parts.target.spec.vocab_size
    own = FlagReader(rig.parts).read(PROMPTS[0], answer).own
    assert own[:19].all() and not own[19]


def test_what_the_cache_cannot_hold_is_refused(rig: Rig) -> None:
    reader = FlagReader(dataclasses.replace(rig.parts))
    with pytest.raises(EngineError, match="a sequence of 5000 tokens"):
        reader.read([1] * 4000, [1] * 1001)
