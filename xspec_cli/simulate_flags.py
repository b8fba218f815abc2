"""Rows of the flag table that only `xspec simulate` reads."""

from __future__ import annotations

from xspec.setting import Kind
from xspec_cli.flags_types import Flag, command

SIMULATION = "Simulation"
LOAD = "Simulated load"
REQUESTS = "Simulated requests"

SYNTHETIC = (
    "acceptance_spread",
    "burst_tokens",
    "calibration_error",
    "signal_noise",
    "prompt_tokens",
    "answer_tokens",
)
"""Flags that say nothing where a trace brings the requests."""

SIMULATE_FLAGS: tuple[Flag, ...] = (
    command(
        "cost_table",
        SIMULATION,
        Kind.STRING,
        "",
        "saved costs to simulate by, of any adaptive control; it may come from another machine",
    ),
    command(
        "policy_config",
        SIMULATION,
        Kind.STRING,
        "",
        "JSON file like --adaptive_draft_step_config; only its policy section counts; empty: the defaults",
    ),
    command("seed", SIMULATION, Kind.INT32, 0, "everything random follows from it", low=0),
    command("output", SIMULATION, Kind.STRING, "", "JSON file for settings and figures; must not exist"),
    command(
        "phases",
        LOAD,
        Kind.LIST,
        (),
        "clients:seconds, several phases separated by commas, each client with one request at a time; "
        "clients:seconds:class lets them ask for one class only, counted from 1 as --acceptance lists them, "
        "those of --match_flags as their names sort",
    ),
    command("rate", LOAD, Kind.DOUBLE, 0.0, "Poisson arrivals per second instead of phases", low=0.0),
    command("seconds", LOAD, Kind.DOUBLE, 60.0, "so long requests arrive with --rate", low=0.001, high=1e6),
    command(
        "trace",
        REQUESTS,
        Kind.STRING,
        "",
        "requests of a --round_trace file, at its arrival times unless --phases or --rate is given",
    ),
    command(
        "match_flags",
        REQUESTS,
        Kind.STRING,
        "",
        "for costs of (K, d): answers of a looped model as xspec calibrate --match_flags_output records them",
    ),
    command(
        "shadow_cost",
        REQUESTS,
        Kind.DOUBLE,
        0.1,
        "what a round that tells of all depths takes longer, as a share of it",
        low=0.0,
        high=10.0,
    ),
    command(
        "acceptance",
        REQUESTS,
        Kind.STRING,
        "",
        "how often each draft is accepted if those before it were, as 0.6,0.5,0.6; several equally frequent "
        "classes of requests are separated by /; a class may be named, as in easy:0.9,0.9/hard:0.4,0.3",
    ),
    command(
        "acceptance_spread",
        REQUESTS,
        Kind.DOUBLE,
        0.0,
        "how much these chances differ from token to token: variance over r (1 - r) around a rate r",
        low=0.0,
        high=0.99,
    ),
    command(
        "burst_tokens",
        REQUESTS,
        Kind.DOUBLE,
        0.0,
        "a request changes its class after so many tokens on average; 0: it keeps one",
        low=0.0,
    ),
    command(
        "calibration_error",
        REQUESTS,
        Kind.DOUBLE,
        0.0,
        "what the drafter's signals add to the logits of the true chances",
        low=-20.0,
        high=20.0,
    ),
    command(
        "signal_noise", REQUESTS, Kind.DOUBLE, 0.0, "deviation of their noise, in logits", low=0.0, high=20.0
    ),
    command("prompt_tokens", REQUESTS, Kind.LIST, ("16", "96"), "shortest and longest prompt"),
    command("answer_tokens", REQUESTS, Kind.LIST, ("64", "192"), "shortest and longest answer"),
)
