"""`xspec generate`: one prompt in, its answer out, no server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from xspec.errors import ConfigError
from xspec.setting import Kind
from xspec_cli.flags_resolve import Command, Info, Launch, resolve
from xspec_cli.flags_types import Flag, command
from xspec_cli.serve import begin

if TYPE_CHECKING:
    from xspec.core.request import SamplingParams
    from xspec.engine.api import TextOutput
    from xspec.llm import LLM

GENERATE = "Generate"
SAMPLING = "Sampling"

SAMPLING_FLAGS: tuple[Flag, ...] = (
    command("max_tokens", SAMPLING, Kind.INT32, 512, "longest answer in tokens", low=1),
    command("min_tokens", SAMPLING, Kind.INT32, 0, "shortest answer in tokens", low=0),
    command(
        "temperature",
        SAMPLING,
        Kind.DOUBLE,
        1.0,
        "0 takes the likeliest token; not given: the checkpoint's recommendation",
        low=0.0,
        high=100.0,
    ),
    command(
        "top_p",
        SAMPLING,
        Kind.DOUBLE,
        1.0,
        "share of the probability kept; not given: the checkpoint's",
        low=1e-9,
        high=1.0,
    ),
    command(
        "top_k",
        SAMPLING,
        Kind.INT32,
        0,
        "likeliest tokens kept, 0 is all; not given: the checkpoint's",
        low=0,
    ),
    command(
        "min_p", SAMPLING, Kind.DOUBLE, 0.0, "least probability relative to the likeliest", low=0.0, high=1.0
    ),
    command(
        "presence_penalty", SAMPLING, Kind.DOUBLE, 0.0, "against tokens already used", low=-2.0, high=2.0
    ),
    command("frequency_penalty", SAMPLING, Kind.DOUBLE, 0.0, "the same by count", low=-2.0, high=2.0),
    command("repetition_penalty", SAMPLING, Kind.DOUBLE, 1.0, "the same as a divisor", low=0.01, high=100.0),
    command("stop", SAMPLING, Kind.STRING, "", "text that ends the answer"),
    command("ignore_eos", SAMPLING, Kind.BOOL, False, "go on to max_tokens whatever the model says"),
    command("seed", SAMPLING, Kind.INT64, 0, "the same seed gives the same text; not given: drawn"),
    command("n", SAMPLING, Kind.INT32, 1, "answers to give", low=1, high=128),
    command("speculative", SAMPLING, Kind.BOOL, True, "draft tokens; off gives the same text, one by one"),
)
"""Only flags that were given count: what is left out is up to the checkpoint and SamplingParams."""

COMMAND = Command(
    usage="xspec generate [--model=PATH] (--prompt=TEXT | --prompt_file=FILE) [--flag=value ...]",
    about="Answer one prompt and print the answer as it comes.",
    flags=(
        command("prompt", GENERATE, Kind.STRING, "", "what to answer"),
        command("prompt_file", GENERATE, Kind.STRING, "", "file that holds it; - reads standard input"),
        command("system", GENERATE, Kind.STRING, "", "system message put before it"),
        command("raw", GENERATE, Kind.BOOL, False, "continue the bare text without the chat template"),
        command(
            "json", GENERATE, Kind.BOOL, False, "print one JSON object with all answers and their counts"
        ),
        *SAMPLING_FLAGS,
    ),
)


def main(argv: Sequence[str]) -> int:
    launch = resolve(argv, COMMAND)
    if isinstance(launch, Info):
        print(launch.text)
        return 0
    prompt = read_prompt(launch, sys.stdin)
    progress = begin(launch, quiet=True)
    # imported late: its engine loads torch, which has to see the settled threads
    from xspec.llm import LLM

    with LLM(config=launch.config, progress=progress) as llm:
        run(launch, llm, prompt, sys.stdout)
    return 0


def run(launch: Launch, llm: LLM, prompt: str, out: TextIO) -> None:
    """Ask the engine and print, as text or as JSON."""
    params = read_params(launch, llm)
    with closing(ask(launch, llm, prompt, params)) as outputs:
        if launch.value("json"):
            out.write(json.dumps(document(llm.model_id, params.n, outputs), ensure_ascii=False) + "\n")
        elif params.n == 1:
            print_stream(outputs, out)
        else:
            print_choices(params.n, outputs, out)
    out.flush()


def ask(launch: Launch, llm: LLM, prompt: str, params: SamplingParams) -> Any:
    if launch.value("raw"):
        return llm.stream(prompt, params)
    messages = [{"role": "user", "content": prompt}]
    if launch.value("system"):
        messages.insert(0, {"role": "system", "content": launch.value("system")})
    return llm.stream_chat(messages, params)


def read_prompt(launch: Launch, stdin: TextIO) -> str:
    """The text of --prompt or --prompt_file; exactly one of them."""
    given = [name for name in ("prompt", "prompt_file") if name in launch.given]
    if len(given) != 1:
        raise ConfigError("give either --prompt=TEXT or --prompt_file=FILE (- is standard input)")
    if launch.value("raw") and "system" in launch.given:
        raise ConfigError("--system needs the chat template, which --raw leaves out")
    text, name = str(launch.value("prompt")), str(launch.value("prompt_file"))
    if given == ["prompt_file"]:
        try:
            text = stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"--prompt_file={name}: cannot be read: {reason}") from error
    if not text:
        raise ConfigError(f"--{given[0]}: the prompt is empty")
    return text


def read_params(launch: Launch, llm: LLM) -> SamplingParams:
    fields = {flag.name: launch.given[flag.name] for flag in SAMPLING_FLAGS if flag.name in launch.given}
    fields.setdefault("max_tokens", launch.value("max_tokens"))
    if "stop" in fields:
        fields["stop"] = (str(fields["stop"]),)
    return llm.params(**fields)


def print_stream(outputs: Iterator[TextOutput], out: TextIO) -> None:
    last = ""
    for output in outputs:
        out.write(output.text)
        out.flush()
        last = output.text or last
    if not last.endswith("\n"):
        out.write("\n")


def print_choices(n: int, outputs: Iterator[TextOutput], out: TextIO) -> None:
    """Each answer under a heading, in order: a later one waits until the ones before it are out."""
    texts: list[list[str]] = [[] for _ in range(n)]
    open_choices, current = set(range(n)), 0
    for output in outputs:
        texts[output.choice].append(output.text)
        if output.finish_reason is not None:
            open_choices.discard(output.choice)
        while current < n and current not in open_choices:
            out.write(f"--- {current + 1} of {n} ---\n{''.join(texts[current]).rstrip()}\n")
            out.flush()
            current += 1


def document(model_id: str, n: int, outputs: Iterator[TextOutput]) -> dict[str, Any]:
    """All answers with why they ended and their token counts."""
    choices: list[dict[str, Any]] = [{"text": "", "token_ids": []} for _ in range(n)]
    prompt_tokens = cached_tokens = 0
    for output in outputs:
        choice = choices[output.choice]
        choice["text"] += output.text
        choice["token_ids"] += output.token_ids
        prompt_tokens, cached_tokens = output.prompt_tokens, output.cached_tokens
        if output.finish_reason is not None:
            choice["finish_reason"] = str(output.finish_reason)
            choice["stop_reason"] = output.stop_reason
    return {
        "model": model_id,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sum(len(choice["token_ids"]) for choice in choices),
            "cached_tokens": cached_tokens,
        },
    }
