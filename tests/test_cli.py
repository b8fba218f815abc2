"""The command line end to end over a scripted engine, the blocking LLM, and progress on screen."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_fake import MODEL, FakeEngine, Script

import xspec.llm
import xspec.server.serve
from xspec.config import Config
from xspec.core.drafts import DraftTotals
from xspec.core.request import FinishReason, SamplingParams
from xspec.engine.api import Engine
from xspec.errors import ConfigError, EngineDeadError, EngineError, PromptTooLongError, RequestError
from xspec.llm import LLM
from xspec.progress import Progress
from xspec_cli import generate, progress
from xspec_cli.flags_resolve import Launch, resolve
from xspec_cli.main import main

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _restore_process_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands set up logging and thread switching for a process of their own."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    root, interval = logging.getLogger(), sys.getswitchinterval()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    sys.setswitchinterval(interval)


def llm_over(engine: FakeEngine, **flags: object) -> LLM:
    async def build(config: Config, progress: Progress) -> Engine:
        progress("loading", 1, 1)
        return engine

    return LLM(engine_factory=build, **flags)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(Script(step_tokens=3))


@pytest.fixture
def llm(engine: FakeEngine) -> Iterator[LLM]:
    with llm_over(engine) as llm:
        yield llm


# -- the group ----------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("Usage: xspec") and "serve      serve a model over HTTP" in out


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server"]) == 1
    captured = capsys.readouterr()
    assert "unknown command server (did you mean serve?)" in captured.err and not captured.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and main(["serve", "--version"]) == 0
    assert capsys.readouterr().out == "xspec 0.1.0\nxspec 0.1.0\n"


def test_mistakes_go_to_stderr_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--nnodes=2", "--prot=3"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines() == [
        "xspec serve: --prot: unknown flag (did you mean --port?)",
        "xspec serve: --nnodes=2: allowed: 1 (more than one process is not in this version yet)",
        "Try: xspec serve --help",
    ]


@pytest.mark.parametrize(
    "argv", [["--help"], ["serve", "--help"], ["generate", "--help"], ["serve", "--nnodes=2"]]
)
def test_help_and_mistakes_load_nothing_heavy(argv: list[str]) -> None:
    heavy = ("torch", "numpy", "aiohttp", "asyncio", "tokenizers")
    code = (
        "import sys\n"
        "from xspec_cli.main import main\n"
        f"main({argv!r})\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# -- serve --------------------------------------------------------------------------------------


def test_serve_hands_over_config_and_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[Config, Progress]] = []

    async def fake_serve(config: Config, progress: Progress) -> int:
        served.append((config, progress))
        return 7

    monkeypatch.setattr(xspec.server.serve, "serve", fake_serve)
    dump = tmp_path / "dump.json"
    argv = [
        "serve",
        "--port=0",
        "--api_key=sesame",
        "--num_threads=4",
        "--num_compute_threads=1",
        "--model=m.gguf",
    ]
    assert main([*argv, "--enable_dump_config_json", f"--dump_config_json_file={dump}"]) == 7
    [(config, shown)] = served
    assert (config.service.port, config.service.api_key, config.model.model) == (0, "sesame", "m.gguf")
    assert isinstance(shown, progress.LogProgress)
    assert json.loads(dump.read_text()) == {"num_compute_threads": 1, "port": 0}
    err = capsys.readouterr().err
    assert "WARNING xspec_cli.serve: --num_threads=4: accepted, has no effect here because" in err
    assert "INFO xspec_cli.serve: 1 compute threads on" in err and "sesame" not in err


# -- generate -----------------------------------------------------------------------------------


def launch(*argv: str) -> Launch:
    result = resolve(argv, generate.COMMAND, environ={})
    assert isinstance(result, Launch)
    return result


def printed(llm: LLM, *argv: str) -> str:
    out, line = io.StringIO(), launch(*argv)
    generate.run(line, llm, generate.read_prompt(line, io.StringIO("from stdin")), out)
    return out.getvalue()


def test_generate_prints_text(llm: LLM, engine: FakeEngine) -> None:
    assert printed(llm, "--prompt=häi") == "0:[user]häi[assistant]\n"
    assert printed(llm, "--prompt=hi", "--system=be brief") == "0:[system]be brief[user]hi[assistant]\n"
    assert printed(llm, "--prompt=hi", "--raw") == "0:hi\n"
    assert printed(llm, "--prompt_file=-", "--raw") == "0:from stdin\n"
    assert printed(llm, "--prompt=a\n", "--raw") == "0:a\n"
    assert engine.calls[0].params.max_tokens == 512


def test_generate_prints_several_answers_in_order(llm: LLM) -> None:
    assert printed(llm, "--prompt=x", "--raw", "--n=2") == "--- 1 of 2 ---\n0:x\n--- 2 of 2 ---\n1:x\n"


def test_generate_prints_json(llm: LLM) -> None:
    answer = json.loads(printed(llm, "--prompt=hé", "--raw", "--json", "--n=2", "--max_tokens=4"))
    first, second = (list(llm._encode(f"{choice}:hé")[:4]) for choice in (0, 1))
    # max_tokens cuts the last character in two
    assert answer == {
        "model": MODEL,
        "choices": [
            {"text": "0:h\ufffd", "token_ids": first, "finish_reason": "length", "stop_reason": None},
            {"text": "1:h\ufffd", "token_ids": second, "finish_reason": "length", "stop_reason": None},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 8, "cached_tokens": 1},
    }


def test_only_given_sampling_flags_override_the_checkpoint(llm: LLM, engine: FakeEngine) -> None:
    engine.defaults.update(temperature=0.25, top_p=0.5)
    printed(llm, "--prompt=x", "--top_p=1", "--seed=0", "--stop=END", "--ignore_eos")
    assert engine.calls[0].params == SamplingParams(
        max_tokens=512, temperature=0.25, top_p=1.0, seed=0, stop=("END",), ignore_eos=True
    )


def test_generate_without_speculation(llm: LLM, engine: FakeEngine) -> None:
    for words in ((), ("--nospeculative",), ("--speculative=false",), ("--speculative",)):
        printed(llm, "--prompt=x", *words)
    assert [call.params.speculative for call in engine.calls] == [True, False, False, True]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give either --prompt=TEXT or --prompt_file=FILE (- is standard input)"),
        (
            ["--prompt=a", "--prompt_file=b"],
            "give either --prompt=TEXT or --prompt_file=FILE (- is standard input)",
        ),
        (["--prompt="], "--prompt: the prompt is empty"),
        (
            ["--prompt_file=/nonexistent"],
            "--prompt_file=/nonexistent: cannot be read: No such file or directory",
        ),
        (["--prompt=a", "--raw", "--system=s"], "--system needs the chat template, which --raw leaves out"),
    ],
)
def test_prompts_that_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate.read_prompt(launch(*argv), io.StringIO())
    assert str(caught.value) == message


def test_generate_from_the_command_line(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def build(config: Config, progress: Progress) -> Engine:
        assert config.cache.block_size == 16
        return engine

    monkeypatch.setattr(xspec.llm, "_real_engine", build)
    assert main(["generate", "--prompt=hi", "--block_size=16", "--raw"]) == 0
    assert capsys.readouterr().out == "0:hi\n" and engine.was_closed
    engine.script.fail_after = 0
    assert main(["generate", "--prompt=hi", "--block_size=16", "--raw"]) == 1
    assert capsys.readouterr().err.endswith("xspec generate: boom\nTry: xspec generate --help\n")


# -- LLM ----------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_prompts_and_choices(llm: LLM) -> None:
    answers = llm.generate(["one", "two", "three"], llm.params(n=2))
    assert [[choice.text for choice in choices] for choices in answers] == [
        ["0:one", "1:one"], ["0:two", "1:two"], ["0:three", "1:three"]
    ]  # fmt: skip
    [[answer]] = llm.generate("déjà")
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens) == ("0:déjà", 6, 3)
    assert (answer.finish_reason, answer.stop_reason, answer.choice) == (FinishReason.STOP, None, 0)
    assert answer.token_ids == llm._encode("0:déjà")
    assert llm.generate([llm._encode("ids"), [*llm._encode("more")]])[1][0].text == "0:more"
    assert llm.generate([]) == []


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    hello, bye = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]
    assert llm.chat(hello)[0][0].text == "0:[user]hello[assistant]"
    assert [answer[0].text for answer in llm.chat([hello, bye])] == [
        "0:[user]hello[assistant]", "0:[user]bye[assistant]"
    ]  # fmt: skip


def test_logprobs_are_gathered(llm: LLM) -> None:
    [[answer]] = llm.generate("ab", llm.params(logprobs=2, prompt_logprobs=1))
    assert [item.token_id for item in answer.logprobs] == list(answer.token_ids)
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate("x", SamplingParams(temperature=-1)),
            "temperature is -1; allowed: numbers from 0 to 100",
        ),
        (
            lambda llm: llm.generate("x", SamplingParams(temperature=float("nan"))),
            "temperature is nan; allowed: numbers from 0 to 100",
        ),
        (lambda llm: llm.generate("x", SamplingParams(top_p=0)), "top_p is 0; allowed: numbers above 0 to 1"),
        (
            lambda llm: llm.generate("x", SamplingParams(max_tokens=0)),
            "max_tokens is 0; allowed: None or integers from 1",
        ),
        (
            lambda llm: llm.generate("x", SamplingParams(min_tokens=3, max_tokens=2)),
            "min_tokens is 3; allowed: 0 to max_tokens",
        ),
        (
            lambda llm: llm.generate("x", SamplingParams(stop="a")),
            "stop is 'a'; allowed: a tuple of non-empty strings",
        ),
        (lambda llm: llm.generate([1, 2]), "a prompt is text or a list of token ids"),
        (lambda llm: llm.generate([["a"]]), "a prompt is text or a list of token ids"),
        (lambda llm: llm.generate([[True]]), "a prompt is text or a list of token ids"),
        (lambda llm: llm.chat([]), "a conversation needs at least one message"),
        (lambda llm: llm.stream("x", SamplingParams(n=0)), "n is 0; allowed: integers from 1 to 1024"),
    ],
)
def test_wrong_calls_are_refused(
    llm: LLM, engine: FakeEngine, call: Callable[[LLM], object], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert str(caught.value) == message and engine.calls == []


def test_completions_of_a_script_tell_what_became_of_drafts(llm: LLM) -> None:
    assert llm.generate("abcdefgh")[0][0].drafts is None
    with llm_over(FakeEngine(Script(step_tokens=3), draft_width=4)) as drafting:
        (first, second), (plain,) = (
            drafting.generate("abcdefgh", drafting.params(n=2))[0],
            drafting.generate("abcdefgh", drafting.params(speculative=False))[0],
        )
    assert first.drafts == second.drafts == DraftTotals(3, 9, 4, (2, 2, 0, 0))
    assert plain.drafts == DraftTotals(0, 0, 0, (0, 0, 0, 0))
    assert first.text == plain.text == "0:abcdefgh"


def test_unknown_names_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="^topk is no sampling parameter; allowed: frequency_penalty, "):
        llm.params(topk=3)
    with pytest.raises(ConfigError, match=r"^--block_sise: unknown flag \(did you mean --block_size\?\)$"):
        LLM(block_sise=3)
    with pytest.raises(ConfigError, match="^LLM takes a config or flags, not both$"):
        LLM("model", config=Config())


def test_one_bad_prompt_ends_the_call_and_its_other_requests() -> None:
    engine = FakeEngine(Script(delay_s=0.01))
    with llm_over(engine) as llm:
        with pytest.raises(PromptTooLongError):
            llm.generate(["fine" * 10, "x" * 300])
        assert engine.live == set()
        engine.script.fail_after = 2
        with pytest.raises(EngineError, match="^boom$"):
            llm.generate(["a", "b"])
        engine.script.fail_after, engine.aborting = None, True
        with pytest.raises(EngineError, match="^the engine ended the request$"):
            llm.generate("a")
        engine.aborting = False
        assert llm.generate("still here")[0][0].text == "0:still here"


def test_a_cap_makes_prompts_wait_instead_of_failing() -> None:
    engine = FakeEngine(Script(delay_s=0.001), capacity=2)
    with llm_over(engine, max_concurrent_requests=2) as llm:
        assert [answer[0].text for answer in llm.generate(list("abcdef"))] == [
            f"0:{name}" for name in "abcdef"
        ]
    with llm_over(FakeEngine()) as llm:
        assert llm.config.service.max_concurrent_requests == 0


def test_streams_yield_as_they_come_and_abort_when_closed() -> None:
    engine = FakeEngine(Script(delay_s=0.002))
    with llm_over(engine) as llm:
        assert "".join(output.text for output in llm.stream("abc")) == "0:abc"
        outputs = llm.stream_chat([{"role": "user", "content": "a long question"}])
        assert next(outputs).text == "0"
        outputs.close()
        _until(lambda: not engine.live)
        assert not engine.calls[1].completed
        engine.script.fail_after = 1
        with pytest.raises(EngineError, match="^boom$"):
            list(llm.stream("abc"))


def test_ctrl_c_aborts_the_call_and_leaves_the_engine_usable() -> None:
    engine = FakeEngine(Script(delay_s=0.05))
    with llm_over(engine) as llm:
        for call in (lambda: llm.generate(["a" * 50, "b" * 50]), lambda: list(llm.stream("c" * 50))):
            timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                call()
            _until(lambda: not engine.live)
        engine.script.delay_s = 0.0
        assert llm.generate("again")[0][0].text == "0:again"
    assert not any(call.completed for call in engine.calls[:3])


def test_closing_ends_engine_and_thread_and_may_be_repeated() -> None:
    engine = FakeEngine()
    llm = llm_over(engine)
    llm.close()
    llm.close()
    assert engine.was_closed and not _loop_threads()
    with pytest.raises(EngineDeadError, match="^this LLM was closed$"):
        llm.generate("x")
    with pytest.raises(EngineDeadError, match="^this LLM was closed$"):
        list(llm.stream("x"))


def test_closing_fails_calls_that_still_run() -> None:
    llm = llm_over(FakeEngine(Script(delay_s=30.0)))
    failures: list[BaseException] = []

    def call() -> None:
        try:
            llm.generate("x")
        except BaseException as error:
            failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.1)
    llm.close()
    caller.join(5)
    assert [type(failure) for failure in failures] == [EngineDeadError] and not _loop_threads()


def test_a_dropped_llm_closes_its_engine() -> None:
    engine = FakeEngine()
    llm = llm_over(engine)
    del llm
    _until(lambda: engine.was_closed and not _loop_threads())


def test_an_llm_collected_on_its_own_loop_thread_does_not_block_it() -> None:
    engine = FakeEngine()
    llm = llm_over(engine)
    finalizer, loop = llm._finalizer, llm._thread
    loop.run(_on_the_loop(finalizer))
    _until(lambda: engine.was_closed and not _loop_threads())


async def _on_the_loop(call: Callable[[], object]) -> None:
    call()


def test_a_failed_or_interrupted_build_leaves_nothing_behind() -> None:
    async def fail(config: Config, progress: Progress) -> Engine:
        raise ConfigError("no model")

    async def hang(config: Config, progress: Progress) -> Engine:
        await asyncio.sleep(60)
        raise AssertionError("unreachable")

    with pytest.raises(ConfigError, match="^no model$"):
        LLM(engine_factory=fail)
    threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        LLM(engine_factory=hang)
    assert not _loop_threads()


def _loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "xspec-llm"]


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


# -- progress -----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_bar_text() -> None:
    full, half = "#" * 24, "#" * 12 + "." * 12
    assert progress.render_bar("warming", 0, 8, 0.0) == f"warming [{'.' * 24}]   0% 0/8"
    assert progress.render_bar("warming", 4, 8, 70.0) == f"warming [{half}]  50% 4/8 1 min 10 s left"
    assert progress.render_bar("warming", 9, 8, 4.0) == f"warming [{full}] 100% 8/8 done in 4.0 s"
    assert (
        progress.render_bar("loading", 10**8, 2 * 10**8, 2.0)
        == f"loading [{half}]  50% 100.0M/200.0M 2.0 s left"
    )
    assert progress.render_bar("reading", 3, 0, 1.0) == "reading: 3"
    assert [progress.duration(s) for s in (0.04, 9.96, 59.6, 3599.6, 7380)] == [
        "0.0 s", "10 s", "1 min 0 s", "1 h 0 min", "2 h 3 min"
    ]  # fmt: skip


def test_the_bar_redraws_at_a_bounded_rate_and_ends_its_line() -> None:
    out, clock = io.StringIO(), Clock()
    bar = progress.TerminalProgress(out, clock)
    for done in range(101):
        bar("loading", done, 100)
        clock.now += 0.01
    bar("warming", 0, 2)
    drawn = out.getvalue()
    assert drawn.count("\r") == 12  # 0, every tenth, the end, and the next stage
    assert drawn.count("\n") == 1 and "100% 100/100 done in 1.0 s\x1b[K\n\rwarming [" in drawn


def test_log_lines_and_the_bar_share_a_terminal() -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    bar = progress.set_up_output("info", out)
    assert isinstance(bar, progress.TerminalProgress)
    bar("loading", 1, 4)
    logging.getLogger("t").warning("hello")
    logging.getLogger("t").debug("hidden")
    bar.clear()
    before, after = out.getvalue().split("\r\x1b[K")
    assert (
        before.startswith("\rloading [") and after.endswith(" WARNING t: hello\n") and after.count("\n") == 1
    )


def test_what_was_done_before_counts_for_no_pace() -> None:
    """A stage that goes on with what an interrupted run left."""
    assert progress.render_bar("answers", 60, 100, 5.0, began_at=50).endswith(" 60% 60/100 20 s left")
    out, clock = io.StringIO(), Clock()
    progress.set_up_output("info", out)
    lines = progress.LogProgress(clock)
    for done in (50, 60):
        lines("answers", done, 100)
        clock.now += 5.0
    assert [line.split(": ", 1)[1] for line in out.getvalue().splitlines()] == [
        "answers: 50%, 50/100", "answers: 60%, 60/100, 20 s left",
    ]  # fmt: skip


def test_without_a_terminal_progress_is_a_few_log_lines() -> None:
    out, clock = io.StringIO(), Clock()
    progress.set_up_output("info", out)
    lines = progress.LogProgress(clock)
    for done in range(13):
        lines("loading", done, 12)
        clock.now += 1.0
    lines("warming", 1, 1)
    lines("waiting", 0, 0)
    texts = [line.split(": ", 1)[1] for line in out.getvalue().splitlines()]
    assert texts == [
        "loading: 0%, 0/12", "loading: 41%, 5/12, 7.0 s left", "loading: 83%, 10/12, 2.0 s left",
        "loading: done, 12/12 in 12 s", "warming: done, 1/1 in 0.0 s", "waiting",
    ]  # fmt: skip
