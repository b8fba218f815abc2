"""Rows of the flag table that only `xspec bench` reads."""

from __future__ import annotations

from xspec.setting import Kind
from xspec_cli.flags_types import Flag, command

BENCH = "Bench"

BENCH_FLAGS: tuple[Flag, ...] = (
    command(
        "url",
        BENCH,
        Kind.LIST,
        (),
        "server to measure, as http://host:port; two take turns and are compared; "
        "empty: an engine in this process",
    ),
    command(
        "concurrency",
        BENCH,
        Kind.LIST,
        (),
        "requests always in flight, several levels separated by commas; empty: 1,8,32",
    ),
    command(
        "request_rate",
        BENCH,
        Kind.LIST,
        (),
        "Poisson arrivals per second instead of a concurrency, several levels separated by commas",
    ),
    command(
        "phases",
        BENCH,
        Kind.LIST,
        (),
        "a load that changes while it runs, as concurrency:seconds,...; prompts are asked over and over, "
        "--num_prompts has no meaning",
    ),
    command(
        "policies",
        BENCH,
        Kind.LIST,
        (),
        "policies of the engine in this process that take turns and are compared with the first: adaptive "
        "(what the engine's flags enable), plain, fixed:K, fixed:K:V, fixed:K@d, acceptance_ema, goodput; "
        "the prefix cache is off",
    ),
    command(
        "hindsight",
        BENCH,
        Kind.BOOL,
        False,
        "also compare with the fixed policy that was best on other prompts: odd and even rounds use "
        "different halves of the prompts",
    ),
    command(
        "prompts",
        BENCH,
        Kind.STRING,
        "",
        "text file (a prompt a line) or .jsonl file with messages, turns, "
        "question, prompt or text; empty: a built-in set of short questions",
    ),
    command(
        "mix",
        BENCH,
        Kind.LIST,
        (),
        "mixed traffic instead of --prompts: file:weight or file:weight:temperature, several separated by "
        "commas; figures are also given by file",
    ),
    command("num_prompts", BENCH, Kind.INT32, 32, "requests of each measured run", low=1, high=1_000_000),
    command("max_tokens", BENCH, Kind.INT32, 128, "longest answer in tokens", low=1),
    command("ignore_eos", BENCH, Kind.BOOL, False, "go on to max_tokens whatever the model says"),
    command("temperature", BENCH, Kind.DOUBLE, 0.0, "sampling temperature; 0 is greedy", low=0.0, high=100.0),
    command("seed", BENCH, Kind.INT32, 0, "seed of arrivals, sampled answers and intervals", low=0),
    command("chat", BENCH, Kind.BOOL, True, "send chat messages; --nochat sends the bare text"),
    command(
        "warmup",
        BENCH,
        Kind.INT32,
        -1,
        "requests before a target's first run at a level, not measured; "
        "-1: as many as the concurrency, 8 with a rate",
        low=-1,
        high=1_000_000,
    ),
    command(
        "rounds",
        BENCH,
        Kind.INT32,
        1,
        "runs of every target at every level; targets alternate",
        low=1,
        high=10_000,
    ),
    command(
        "settle_s",
        BENCH,
        Kind.DOUBLE,
        2.0,
        "pause before the other server's turn: the last one's idle threads may spin on for a while",
        low=0.0,
    ),
    command(
        "request_timeout_s", BENCH, Kind.DOUBLE, 600.0, "longest wait for one answer of a server", low=0.001
    ),
    command(
        "output",
        BENCH,
        Kind.STRING,
        "",
        "JSON file for settings, machine facts and raw samples; must not exist",
    ),
    command(
        "kernels",
        BENCH,
        Kind.BOOL,
        False,
        "measure the kernels of the model instead of traffic: GB/s and GFLOP/s beside what the machine "
        "reads, copies and multiplies in the same run, and whole passes beside their memory floor",
    ),
    command(
        "kernel_rows",
        BENCH,
        Kind.LIST,
        ("1", "2", "4", "8", "16", "32", "64", "192", "512"),
        "row counts of linears, norms, rotation and argmax, with --kernels",
    ),
    command(
        "kernel_requests",
        BENCH,
        Kind.LIST,
        ("1", "4", "8", "32"),
        "requests that decode a row each in attention and whole passes, with --kernels",
    ),
    command("kernel_context", BENCH, Kind.LIST, ("512",), "tokens of each of those requests, with --kernels"),
    command(
        "kernel_repeats",
        BENCH,
        Kind.INT32,
        7,
        "samples of every kernel, with --kernels; ceilings and kernels take turns",
        low=1,
        high=10_000,
    ),
)
