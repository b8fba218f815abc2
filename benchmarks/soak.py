"""Soak a running server: mixed load with random aborts for some minutes, memory watched, pages counted.

    xspec serve --port 8010 &
    python benchmarks/soak.py --url http://127.0.0.1:8010 --pid $! --minutes 30

Prints a line of samples every interval and a verdict: resident memory of the last quarter against the
second quarter (the first fills the caches), requests that ended in an unexpected way, and what the
server still holds once the load is gone. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

WORDS = ("the", "moon", "river", "code", "table", "green", "why", "does", "stone", "sing", "water", "seven")


def body_of(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body) of one request of the mix."""
    text = " ".join(rng.choices(WORDS, k=rng.choice([3, 10, 40, 150, 400])))
    body: dict[str, Any] = {
        "max_tokens": rng.choice([1, 8, 32, 64, 128]),
        "temperature": rng.choice([0, 0.7, 1.0]),
        "stream": rng.random() < 0.6,
        "n": rng.choice([1, 1, 1, 2]),
    }
    if rng.random() < 0.3:
        body |= {"top_p": 0.9, "top_k": rng.choice([0, 5, 50]), "min_p": rng.choice([0, 0.05])}
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    if rng.random() < 0.2:
        body |= {"stop": [" the", "\n\n"], "seed": rng.randrange(1000), "min_tokens": 1}
    if rng.random() < 0.5:
        return "/v1/completions", {**body, "prompt": text, "echo": rng.random() < 0.1}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


class Soak:
    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.rng = random.Random(seed)
        self.ended: dict[str, int] = {}

    def count(self, how: str) -> None:
        self.ended[how] = self.ended.get(how, 0) + 1

    async def client(self, session: aiohttp.ClientSession, until_s: float) -> None:
        while time.monotonic() < until_s:
            path, body = body_of(self.rng)
            patience_s = self.rng.choice([600.0, 600.0, 600.0, self.rng.random() * 2])
            try:
                async with asyncio.timeout(patience_s):
                    async with session.post(self.url + path, json=body) as response:
                        await response.read()
                        self.count(str(response.status))
            except TimeoutError:
                self.count("aborted")
            except aiohttp.ClientError as error:
                self.count(type(error).__name__)

    async def info(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        async with session.get(self.url + "/server_info") as response:
            return dict((await response.json())["engine"])


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


async def soak(args: argparse.Namespace) -> int:
    load = Soak(args.url, args.seed)
    samples: list[float] = []
    async with aiohttp.ClientSession() as session:
        end_s = time.monotonic() + args.minutes * 60
        clients = [asyncio.create_task(load.client(session, end_s)) for _ in range(args.clients)]
        while time.monotonic() < end_s:
            await asyncio.sleep(min(args.interval_s, max(0.0, end_s - time.monotonic())))
            samples.append(resident_mib(args.pid))
            info = await load.info(session)
            print(
                f"{samples[-1]:.0f} MiB, running {info['running']}, waiting {info['waiting']}, "
                f"kv {info['kv_used_fraction']:.2f}, preemptions {info['preemptions']}, {load.ended}",
                flush=True,
            )
        await asyncio.gather(*clients)
        await asyncio.sleep(1.0)
        left = await load.info(session)
    quarter = max(1, len(samples) // 4)
    early, late = statistics.median(samples[quarter : 2 * quarter]), statistics.median(samples[-quarter:])
    unexpected = {how: n for how, n in load.ended.items() if how not in ("200", "aborted")}
    held = {key: left[key] for key in ("running", "waiting", "kv_used_fraction")}
    print(f"requests {load.ended}; resident {early:.0f} -> {late:.0f} MiB; left over {held}")
    flat = late <= early * (1 + args.growth)
    return 0 if flat and not unexpected and not any(held.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8010")
    parser.add_argument("--pid", type=int, required=True, help="process whose memory is watched")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--interval_s", type=float, default=15.0)
    parser.add_argument("--growth", type=float, default=0.03, help="share of growth still called flat")
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(soak(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
