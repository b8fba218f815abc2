"""xspec bench --kernels: the arithmetic by hand, the order of sampling, refusals, and a whole run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import tiny_looped
import torch

from xspec.config import Config
from xspec.errors import ConfigError
from xspec.kernels.reference import ReferenceKernels
from xspec.nn.inputs import ForwardInputs
from xspec.platform.select import select_platform
from xspec.progress import silent
from xspec_cli import bench, bench_kernels
from xspec_cli.benchlib.kernel_model import KernelModel, load_kernel_model
from xspec_cli.benchlib.kernel_report import kernel_table, pass_table
from xspec_cli.benchlib.kernel_timing import (
    SAMPLE_MS,
    Case,
    Ceilings,
    Measured,
    Subject,
    Work,
    argmax_work,
    attention_work,
    linear_work,
    measure,
    norm_work,
    rope_store_work,
)
from xspec_cli.benchlib.kernels import FULL, LAYERS, Plan, subject_groups
from xspec_cli.flags_resolve import Launch, resolve

CASES = (Case(1, 1, 40), Case(1, 3, 40), Case(4, 1, 40))


def launch(*argv: str) -> Launch:
    found = resolve(["--kernels", *argv], bench.COMMAND)
    assert isinstance(found, Launch)
    return found


def cell(samples_ms: tuple[float, ...], tops: tuple[Ceilings, ...], work: Work, case: Case) -> Measured:
    return Measured("layers", case, 1, work, samples_ms, tops)


# -- arithmetic --------------------------------------------------------------------------------


def test_bytes_and_operations_by_hand() -> None:
    # 3 rows of 8 inputs in bf16, weight [10, 8] of 160 bytes: 48 in, 60 out, 60 of the residual
    assert linear_work(3, 10, 8, 10, 160, 2) == Work(160 + 48 + 60, 480)
    assert linear_work(3, 10, 8, 10, 160, 2, residual=True) == Work(160 + 48 + 60 + 60, 480)
    assert linear_work(3, 10, 8, 5, 160, 2) == Work(160 + 48 + 30, 480)  # gated: half comes out
    # 2 requests x 3 rows see 8, 9 and 10 keys: 27 each; 4 heads of 16 over 2 KV heads
    found = attention_work(Case(3, 2, 10), 4, 2, 16, 2)
    assert found == Work(2 * 2 * 10 * 2 * 16 * 2 + 2 * 6 * 4 * 16 * 2, 2 * 27 * 4 * 16 * 4)
    assert norm_work(5, 64, 2) == Work(5 * 64 * 2 * 2 + 128)
    # 4 query and 2 key heads there and back; keys and values (4 heads) read and stored; cosines and sines
    assert rope_store_work(1, 4, 2, 16, 2) == Work((6 * 2 + 4 + 4 + 2) * 16 * 2)
    assert argmax_work(3, 1000, 4) == Work(12_000)
    assert Work(1, 2) + Work(3, 4) == Work(4, 6) and Work(1, 2).times(3) == Work(3, 6)


def test_figures_by_hand() -> None:
    """20 MB and 4 GFLOP; in the second repeat the whole machine was half as fast."""
    tops = (Ceilings(10.0, 8.0, 400.0, "bfloat16"), Ceilings(5.0, 4.0, 200.0, "bfloat16"))
    found = cell((4.0, 8.0), tops, Work(20_000_000, 400_000_000), Case(4, 1, 512))
    assert found.ms == 6.0
    assert found.gb_s == pytest.approx(20 / 6)
    assert found.gflop_s == pytest.approx(400 / 6)
    assert found.memory_floor_ms == pytest.approx(3.0)  # 2 and 4
    assert found.arithmetic_floor_ms == pytest.approx(1.5)  # 1 and 2
    assert found.of_memory_floor == pytest.approx(2.0) and found.of_read == pytest.approx(0.5)
    assert found.of_matmul == pytest.approx(0.25)
    one = cell((3.2, 6.4), tops, Work(20_000_000, 100_000_000), Case(1, 1, 512))
    assert found.over(one) == pytest.approx(1.25)
    assert pass_table([one, found]).splitlines()[2].split() == [
        *("layers", "1", "x", "4,", "512", "keys", "6.000", "3.000", "2.00", "1.500", "1.25"),
    ]
    assert pass_table([found]).splitlines()[1].split()[-1] == "-"
    assert kernel_table([found]).splitlines()[1].split()[-6:] == ["3.3", "50", "%", "66.7", "25", "%"]
    norm = cell((4.0, 8.0), tops, Work(20_000_000), Case(4))
    assert kernel_table([norm]).splitlines()[1].split() == [
        *("layers", "1", "4", "6.000", "3.3", "50", "%", "-", "-")
    ]


def test_ceilings_and_subjects_take_turns_in_an_order_that_turns_round() -> None:
    now_s, seen = 0.0, []

    def takes(name: str, ms: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal now_s
            now_s += ms / 1e3
            seen.append(name)

        return run

    def ceilings() -> Ceilings:
        seen.append("ceilings")
        return Ceilings(1.0, 1.0, 1.0, "float32")

    subjects = [Subject(name, Case(1), 1, Work(1), takes(name, ms)) for name, ms in (("a", 4.0), ("b", 20.0))]
    found = measure(subjects, ceilings, repeats=3, wait=lambda: None, clock_s=lambda: now_s)
    assert seen[:4] == ["a", "a", "b", "b"]  # first calls, then once to see how long it takes
    a = ["a"] * 3  # 4 ms: three times fill a sample
    assert SAMPLE_MS == 10.0
    assert seen[4:] == ["ceilings", *a, "b", "ceilings", "b", *a, "ceilings", *a, "b"]
    assert [each.kernel for each in found] == ["a", "b"]
    assert found[0].samples_ms == pytest.approx((4.0, 4.0, 4.0)) and len(found[0].ceilings) == 3
    assert found[1].samples_ms == pytest.approx((20.0, 20.0, 20.0))


# -- what is measured --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama-tied")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> KernelModel:
    config = Config.from_mapping({"model": str(checkpoint), "dtype": "float32", "block_size": 16})
    return load_kernel_model(config, CASES, 5, silent)


def subjects_of(model: KernelModel) -> list[Subject]:
    plan = Plan((1, 5), CASES, 1)
    with torch.inference_mode():
        return [subject for make in subject_groups(model, plan) for subject in make()]


def test_every_kernel_of_a_pass_is_named_and_counted(model: KernelModel) -> None:
    """A tied model of 3 layers: hidden 64, 4 heads of 16 over 2 KV heads, inner 96, vocabulary 320, fp32."""
    found = {(subject.kernel, str(subject.case)): subject for subject in subjects_of(model)}
    kernels = dict.fromkeys(kernel for kernel, _ in found)
    assert list(kernels) == [
        "linear qkv [128, 64]",
        "linear output [64, 64]",
        "linear gate_up [192, 64]",
        "linear down [64, 96]",
        "linear head [320, 64]",
        "all linears in turn",
        "attention",
        "rms_norm",
        "rope, store K/V",
        "argmax of 320",
        LAYERS,
        FULL,
    ]
    calls = [next(s.calls for s in found.values() if s.kernel == kernel) for kernel in kernels]
    assert calls == [3, 3, 3, 3, 1, 13, 3, 7, 3, 1, 1, 1]
    layer = 128 * 64 + 64 * 64 + 192 * 64 + 64 * 96
    assert found["all linears in turn", "5"].work.flops == 2 * 5 * (3 * layer + 320 * 64)
    moved = 5 * 4 * (3 * (64 + 128 + 64 + 2 * 64 + 64 + 96 + 96 + 2 * 64) + 64 + 320)
    assert found["all linears in turn", "5"].work.bytes == 4 * (3 * layer + 320 * 64) + moved
    norms, kv = 7 * 64 * 4, 3 * 2 * 2 * 16 * 40 * 4
    assert found[LAYERS, "1 x 1, 40 keys"].work.bytes == 4 * 3 * layer + norms + kv
    assert found[LAYERS, "1 x 4, 40 keys"].work.bytes == 4 * 3 * layer + norms + kv
    assert found[LAYERS, "3 x 1, 40 keys"].work.bytes == 4 * 3 * layer + norms + 3 * kv
    attention = 3 * 4 * 40 * 4 * 16
    assert found[FULL, "3 x 1, 40 keys"].work.flops == 3 * (2 * (3 * layer + 320 * 64) + attention)


def test_every_subject_runs_and_leaves_numbers_behind(model: KernelModel) -> None:
    with torch.inference_mode():
        for subject in subjects_of(model):
            subject.run()
        assert all(bool(slab.isfinite().all()) for slab in model.slabs)
        assert all(bool(slab.flatten(2).any(-1).all()) for slab in model.slabs)  # no page is left unwritten


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_inputs_of_a_case(model: KernelModel, case: Case) -> None:
    """Every row sees its request's keys up to its own, on pages that no other request has."""
    inputs = model.inputs(case)
    assert isinstance(inputs, ForwardInputs)
    table = inputs.page_table
    assert table.shape == (case.requests, 3) and table.unique().numel() == table.numel()
    assert inputs.kv_lens.tolist() == list(range(41 - case.rows, 41)) * case.requests
    assert torch.equal(inputs.positions, inputs.kv_lens - 1)
    for row, (slot, position) in enumerate(
        zip(inputs.slots.tolist(), inputs.positions.tolist(), strict=True)
    ):
        request = row // case.rows
        assert slot == int(table[request, position // 16]) * 16 + position % 16
        assert int(inputs.owners()[row]) == request
    shape, slab = model.shape, model.slabs[0]
    q = model.random(case.all_rows, shape.heads, shape.head_dim)
    with torch.inference_mode():
        found = model.kernels.paged_attention(inputs, shape, slab).attend(q, slab)
        expected = ReferenceKernels().paged_attention(inputs, shape, slab).attend(q, slab)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


# -- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_whole_run(
    kernels: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ceilings and samples of next to nothing: what is measured matters here, not how long it takes."""
    for name, size in (("READ_BYTES", 4096), ("MATMUL_SIZE", 16)):
        monkeypatch.setattr(f"xspec_cli.benchlib.kernels.{name}", size)
    monkeypatch.setattr("xspec_cli.benchlib.kernel_timing.SAMPLE_MS", 0.1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of 32: all of it fits native kernels
    model, output = (
        tiny.make_checkpoint(tmp_path / "tiny", "qwen3", overrides=heads),
        tmp_path / "kernels.json",
    )
    argv = [f"--model={model}", f"--cpu_kernels={kernels}", "--dtype=bfloat16", f"--output={output}"]
    argv += ["--kernel_rows=2,1", "--kernel_requests=2", "--kernel_context=16", "--kernel_repeats=2"]
    assert bench.main(["--kernels", *argv]) == 0
    shown = capsys.readouterr().out
    body = json.loads(output.read_text())
    assert body["format"] == "xspec bench kernels" and body["settings"]["kernel_repeats"] == 2
    assert body["model"]["dtype"] == "bfloat16" and body["model"]["layers"] == 3
    assert body["model"]["kernels"] in shown and "GFLOP/s" in shown
    by_kernel: dict[str, list[str]] = {}
    for each in body["kernels"]:
        assert len(each["samples_ms"]) == len(each["ceilings"]) == 2 and min(each["samples_ms"]) > 0
        by_kernel.setdefault(each["kernel"], []).append(str(Case(**each["case"])))
        assert each["kernel"] in shown
    assert len(by_kernel) == 12
    decoding = ["1 x 1, 16 keys", "2 x 1, 16 keys", "1 x 4, 16 keys", "1 x 8, 16 keys"]
    assert by_kernel[FULL] == by_kernel[LAYERS] == by_kernel["attention"] == decoding
    assert by_kernel["rms_norm"] == ["1", "2"]


def test_the_kernels_that_were_asked_for(checkpoint: Path) -> None:
    config = Config.from_mapping({"model": str(checkpoint), "cpu_kernels": "torch", "dtype": "bfloat16"})
    found = load_kernel_model(config, CASES[:1], 1, silent)
    assert found.platform.kernels_name() == "torch" and not found.fused
    assert type(found.kernels) is type(select_platform("auto", "torch").kernels())


@pytest.mark.parametrize("family", tiny_looped.WRITERS)
def test_layers_that_run_several_times_are_not_timed(family: str, tmp_path: Path) -> None:
    model = tiny_looped.WRITERS[family](tmp_path / "m", loops=2)
    config = Config.from_mapping({"model": str(model), "cpu_kernels": "torch"})
    with pytest.raises(ConfigError, match="looped target"):
        load_kernel_model(config, CASES[:1], 1, silent)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--url=http://h:1"], "--url: without meaning beside --kernels"),
        (["--concurrency=1", "--rounds=3"], "--concurrency, --rounds: without meaning"),
        (["--max_seqs_per_batch=4"], "--max_seqs_per_batch: without meaning"),
        (["--draft_model=x", "--mix=a:1"], "--mix, --draft_model: without meaning"),
        (["--kernel_rows=0"], "--kernel_rows=0: allowed: integers from 1 to 8192"),
        (["--kernel_rows=4,two"], "--kernel_rows=two: allowed: integers from 1 to 8192"),
        (["--kernel_rows="], "--kernel_rows: allowed: integers from 1"),
        (["--kernel_requests=1025"], "--kernel_requests=1025: allowed: integers from 1 to 1024"),
        (["--kernel_context=7,512"], "--kernel_context=7: allowed: integers from 8"),
        (["--output=/nowhere/at/all.json"], "--output=/nowhere/at/all.json"),
    ],
)
def test_refusals(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bench_kernels.job_of(launch(*argv))
    assert message in str(caught.value)
    if "without meaning" in message:
        assert "allowed: --kernel_rows" in str(caught.value) and "--model" in str(caught.value)


def test_flags_of_kernels_need_kernels() -> None:
    with pytest.raises(ConfigError, match="--kernel_rows, --kernel_context: allowed: with --kernels"):
        bench.main(["--kernel_rows=1", "--kernel_context=64"])


def test_a_job_sorts_its_lists_and_always_has_one_row_of_one_request() -> None:
    job = bench_kernels.job_of(launch("--kernel_rows=8,2,8", "--kernel_requests=4", "--kernel_context=64,32"))
    assert job.rows == (2, 8)
    assert [str(case) for case in job.cases[:4]] == [
        "1 x 1, 32 keys",
        "4 x 1, 32 keys",
        "1 x 4, 32 keys",
        "1 x 8, 32 keys",
    ]
    assert [case.keys for case in job.cases] == [32] * 4 + [64] * 4


def test_too_much_kv_is_refused_before_it_is_taken(checkpoint: Path) -> None:
    config = Config.from_mapping({"model": str(checkpoint)})
    with pytest.raises(ConfigError, match="--kernel_requests and --kernel_context need [0-9]+ bytes of K/V"):
        load_kernel_model(config, [Case(1, 1024, 1_000_000_000)], 1, silent)
