"""The looped families against dense references: logits of every depth, exits, greedy text, K/V planes.

Each mistake that is easy to make has a reference that makes it, and must then differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_looped
import torch
from looped_dense import DENSE, Dense, Place
from paged import PagedRunner
from safetensors.torch import load_file

from xspec.errors import UnsupportedError
from xspec.kernels.base import Kernels, PackedLinear
from xspec.kernels.cpu import CpuKernels
from xspec.kernels.cpu_native import NativeKernels
from xspec.kernels.native import Team, library_path, load_library
from xspec.kernels.reference import ReferenceKernels
from xspec.models import nanbeige, registry
from xspec.models.base import Hidden, LoopedTarget
from xspec.models.loader import load_target
from xspec.models.looped import LoopedDecoder, LoopedFamily
from xspec.nn.inputs import ForwardInputs, Segment

CPU, F32, F64, BF16 = torch.device("cpu"), torch.float32, torch.float64, torch.bfloat16
FAMILIES = tuple(tiny_looped.WRITERS)
LOOPS = {"ouro": 4, "huginn_raven": 3, "nanbeige": 3}
EXACT = {F32: 1e-4, F64: 1e-10}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("looped")
    return {name: write(root / name, loops=LOOPS[name]) for name, write in tiny_looped.WRITERS.items()}


def load(
    path: Path, dtype: torch.dtype = F64, kernels: Kernels | None = None, **kwargs: Any
) -> LoopedDecoder:
    target = load_target(path, kernels or CpuKernels(), dtype=dtype, device=CPU, **kwargs)
    assert isinstance(target, LoopedDecoder)
    return target


def dense(path: Path, dtype: torch.dtype = F64, trap: str = "") -> Dense:
    config = tiny_looped.read_config(path)
    return DENSE[config["model_type"]](config, load_file(path / "model.safetensors"), dtype, trap)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCAB_SIZE, (length,), generator=generator).tolist()


class AtDepth:
    """The target as if its loops ended at `depth`; all of them run first, as in a round."""

    def __init__(self, target: LoopedTarget, depth: int) -> None:
        self.target, self.depth, self.spec = target, depth, target.spec

    def forward(
        self,
        tokens: torch.Tensor,
        inputs: ForwardInputs,
        kv: tuple[torch.Tensor, ...],
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        state = self.target.run_loops(self.target.begin(tokens, inputs, kv), inputs, kv, 0, self.depth)
        return self.target.finish(state, inputs, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.logits(hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.target.embed(tokens)

    def embedding(self) -> torch.Tensor | None:
        return self.target.embedding()

    def head(self) -> PackedLinear | None:
        return self.target.head()

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.target.head_rows(ids)


TEXTS = (prompt(31, 1), prompt(12, 2), prompt(24, 3))


def in_rounds(runner: PagedRunner) -> list[torch.Tensor]:
    """TEXTS in one batch, chunk by chunk, then row by row -> the logits of each text's rows."""
    found: list[list[torch.Tensor]] = [[] for _ in TEXTS]
    at = [0] * len(TEXTS)

    def step(sizes: Sequence[int]) -> None:
        work = [(i, TEXTS[i][at[i] : at[i] + size]) for i, size in enumerate(sizes) if size]
        rows = runner.forward(work, uniform=len({len(tokens) for _, tokens in work}) == 1)
        for (index, tokens), part in zip(work, rows.split([len(t) for _, t in work]), strict=True):
            found[index].append(part)
            at[index] += len(tokens)

    step((10, 3, 0))
    step((13, 0, 9))
    step((1, 2, 8))
    while any(at[i] < len(text) for i, text in enumerate(TEXTS)):
        step([int(at[i] < len(text)) for i, text in enumerate(TEXTS)])
    return [torch.cat(parts) for parts in found]


def runner_of(target: Any, dtype: torch.dtype = F64, kernels: Kernels | None = None) -> PagedRunner:
    return PagedRunner(target, kernels or CpuKernels(), dtype, sequences=3, max_tokens=80)


# ---- logits, greedy text, gates


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_after_every_loop(family: str, dtype: torch.dtype, checkpoints: dict[str, Path]) -> None:
    target, reference = load(checkpoints[family], dtype), dense(checkpoints[family], dtype)
    expected = [reference(text).logits for text in TEXTS]
    assert expected[0].std() > 1.0  # flat logits would agree by accident
    for depth in range(1, LOOPS[family] + 1):
        found = in_rounds(runner_of(AtDepth(target, depth), dtype))
        for part, wanted in zip(found, expected, strict=True):
            assert part.dtype == dtype
            torch.testing.assert_close(part, wanted[depth - 1], rtol=0, atol=EXACT[dtype])
    for part, wanted in zip(in_rounds(runner_of(target, dtype)), expected, strict=True):
        torch.testing.assert_close(part, wanted[-1], rtol=0, atol=EXACT[dtype])


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text(family: str, dtype: torch.dtype, checkpoints: dict[str, Path]) -> None:
    """Three prompts in one batch, the longest prefilled in chunks."""
    target, reference = load(checkpoints[family], dtype), dense(checkpoints[family], dtype)
    runner = runner_of(target, dtype)
    first = runner.forward([(0, TEXTS[0][:20]), (1, TEXTS[1])])
    second = runner.forward([(0, TEXTS[0][20:]), (2, TEXTS[2])])
    rows = torch.stack((second[10], first[-1], second[-1]))
    written: list[list[int]] = [[], [], []]
    for _ in range(14):
        tokens = rows.argmax(-1).tolist()
        for text, token in zip(written, tokens, strict=True):
            text.append(token)
        rows = runner.forward([(index, [token]) for index, token in enumerate(tokens)], uniform=True)
    assert written == [reference.greedy(text, 14) for text in TEXTS]
    assert len({token for text in written for token in text}) > 6


TRAPS = [
    *(("ouro", trap) for trap in ("norm after the loops", "norm twice", "embedding again")),
    *(("ouro", trap) for trap in ("adjacent pairs", "no norm behind sublayers", "one plane")),
    *(("huginn_raven", trap) for trap in ("rotate half", "injected once", "e before s", "no bias")),
    *(("huginn_raven", trap) for trap in ("one final norm", "no embedding scale", "gate second")),
    *(("huginn_raven", trap) for trap in ("norm before the sum", "one plane")),
    *(("nanbeige", trap) for trap in ("norm after the loops", "norm twice", "embedding again")),
    *(("nanbeige", trap) for trap in ("adjacent pairs", "one plane")),
]


@pytest.mark.parametrize(("family", "trap"), TRAPS)
def test_a_reference_that_steps_into_the_trap_differs(
    family: str, trap: str, checkpoints: dict[str, Path]
) -> None:
    text = TEXTS[2]
    runner = PagedRunner(load(checkpoints[family]), CpuKernels(), F64, sequences=1, max_tokens=24)
    found = runner.forward([(0, text)])
    torch.testing.assert_close(found, dense(checkpoints[family])(text).logits[-1], rtol=0, atol=1e-10)
    wrong = dense(checkpoints[family], trap=trap)(text).logits[-1]
    assert (found - wrong).abs().max() > 1e-2
    assert (found.argmax(-1) != wrong.argmax(-1)).any()


def states_of(target: LoopedDecoder, text: Sequence[int]) -> list[torch.Tensor]:
    inputs, kv = whole(target, len(text))
    state, states = target.begin(torch.tensor(text), inputs, kv), []
    for loop in range(target.spec.loops):
        state = target.run_loops(state, inputs, kv, loop, loop + 1)
        states.append(state)
    return states


def whole(target: LoopedDecoder, rows: int) -> tuple[ForwardInputs, tuple[torch.Tensor, ...]]:
    """One text of `rows` tokens in pages 1, 2, ... of fresh slabs."""
    runner = PagedRunner(target, CpuKernels(), F64, sequences=1, max_tokens=rows)
    positions, pages = torch.arange(rows), -(-rows // 4)
    table = torch.arange(1, pages + 1)[None]
    segments = (Segment(0, 1, rows, pages, 0),)
    return ForwardInputs(positions, positions + 4, positions + 1, table, segments), runner.kv


def test_gate_probabilities(checkpoints: dict[str, Path]) -> None:
    target, text = load(checkpoints["ouro"]), TEXTS[0]
    stops = dense(checkpoints["ouro"])(text).stops
    found = target.gates(states_of(target, text))
    left = torch.ones(len(text), dtype=F64)
    for loop in range(3):
        torch.testing.assert_close(found[:, loop], left * stops[loop], rtol=0, atol=1e-12)
        left = left * (1 - stops[loop])
    torch.testing.assert_close(found[:, 3], left, rtol=0, atol=1e-12)
    assert found.std(0).min() > 0.01


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8, 0.95])
def test_early_exit(threshold: float, dtype: torch.dtype, checkpoints: dict[str, Path]) -> None:
    """Each row is read after its own loop; the cache is that of full depth, bit for bit."""
    path = checkpoints["ouro"]
    target = load(path, dtype, early_exit_threshold=threshold)
    assert target.spec.exit_threshold == threshold
    runner, full = runner_of(target, dtype), runner_of(load(path, dtype), dtype)
    found, _ = in_rounds(runner), in_rounds(full)
    exits = []
    for part, text in zip(found, TEXTS, strict=True):
        reference = dense(path, dtype)(text)
        loops = reference.exits(threshold)
        wanted = torch.stack([reference.logits[loop, row] for row, loop in enumerate(loops)])
        torch.testing.assert_close(part, wanted, rtol=0, atol=EXACT[dtype])
        exits += loops
    assert len(set(exits)) >= 2
    assert all(torch.equal(one, other) for one, other in zip(runner.kv, full.kv, strict=True))


def test_threshold_of_the_config_and_of_the_flag(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tiny_looped.write_ouro(tmp_path / "o", early_exit_threshold=0.5)
    assert load(path).spec.exit_threshold == 0.5
    assert load(path, early_exit_threshold=1.0).spec.exit_threshold == 1.0
    assert load(checkpoints["ouro"]).spec.exit_threshold == 1.0


def test_threshold_one_is_full_depth_even_behind_a_sure_gate(tmp_path: Path) -> None:
    """lambda = 1 in floating point must not end the loops at the default threshold."""
    path = tiny_looped.write_ouro(tmp_path / "o")
    weights = load_file(path / "model.safetensors")
    weights["model.early_exit_gate.bias"][:] = 100.0
    tiny.write_weights(path, weights)
    for threshold, loop in ((None, -1), (0.999, 0)):
        target = load(path, early_exit_threshold=threshold)
        found = PagedRunner(target, CpuKernels(), F64, sequences=1, max_tokens=9).forward([(0, TEXTS[1][:9])])
        expected = dense(path)(TEXTS[1][:9]).logits[loop]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# ---- states and planes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_may_stop_and_go_on(family: str, checkpoints: dict[str, Path]) -> None:
    """Bit-equal states and planes; what lies below the loop it goes on from is not touched."""
    target, text = load(checkpoints[family]), TEXTS[0]
    spec, tokens = target.spec, torch.tensor(TEXTS[0])
    inputs, plain = whole(target, len(text))
    start = target.begin(tokens, inputs, plain)
    assert start.shape == (len(text), spec.state_size)
    wanted = target.run_loops(start, inputs, plain, 0, spec.loops)
    for depth in range(1, spec.loops):
        _, kv = whole(target, len(text))
        first = target.begin(tokens, inputs, kv)
        before = first.clone()
        state = target.run_loops(first, inputs, kv, 0, depth)
        assert torch.equal(first, before)  # a state is never written to
        kept, split = state.clone(), depth * spec.num_layers
        snapshot = [slab.clone() for slab in kv]
        assert not any(slab.any() for slab in kv[split : spec.loops * spec.num_layers])
        found = target.run_loops(state, inputs, kv, depth, spec.loops)
        assert torch.equal(found, wanted) and torch.equal(state, kept)
        outside = range(spec.loops * spec.num_layers, spec.planes.count)
        assert all(torch.equal(kv[plane], snapshot[plane]) for plane in (*range(split), *outside))
        assert all(torch.equal(one, other) for one, other in zip(kv, plain, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_drafted_one_by_one_and_verified_together(family: str, checkpoints: dict[str, Path]) -> None:
    """The first d loops row by row, a head after each, then the rest for all rows at once: plain decoding."""
    target, depth, past, rows = load(checkpoints[family]), 1, 20, 5
    text = TEXTS[0][: past + rows]
    expected = dense(checkpoints[family])(text).logits[:, past:]
    plain = PagedRunner(target, CpuKernels(), F64, sequences=1, max_tokens=32)
    plain.forward([(0, text[:past])])
    drafted = PagedRunner(target, CpuKernels(), F64, sequences=1, max_tokens=32)
    drafted.forward([(0, text[:past])])
    for token in text[past:]:
        plain.forward([(0, [token])])
    states, heads = [], []
    for row in range(past, past + rows):
        inputs = rows_at(drafted, row, 1)
        state = target.begin(torch.tensor(text[row : row + 1]), inputs, drafted.kv)
        states.append(target.run_loops(state, inputs, drafted.kv, 0, depth))
        heads.append(target.logits(target.finish(states[-1], inputs, drafted.kv).last))
    if target.config.coda_layers == 0:  # else a head at depth d reads past coda keys of depth D
        torch.testing.assert_close(torch.cat(heads), expected[depth - 1], rtol=0, atol=1e-10)
    inputs = rows_at(drafted, past, rows)
    state = target.run_loops(torch.cat(states), inputs, drafted.kv, depth, target.spec.loops)
    found = target.logits(target.finish(state, inputs, drafted.kv).last)
    torch.testing.assert_close(found, expected[-1], rtol=0, atol=1e-10)
    for one, other in zip(drafted.kv, plain.kv, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def rows_at(runner: PagedRunner, first: int, count: int) -> ForwardInputs:
    positions = torch.arange(first, first + count)
    pages = runner.table[0][positions // 4]
    return ForwardInputs(
        positions,
        pages * 4 + positions % 4,
        positions + 1,
        runner.table,
        (Segment(0, 1, count, -(-(first + count) // 4), 0),),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_plane_of_loop_and_layer(family: str, checkpoints: dict[str, Path]) -> None:
    """Plane t * L + l holds what layer l wrote in loop t; then the prelude's, then the coda's."""
    target, text = load(checkpoints[family]), TEXTS[1]
    spec = target.spec
    inputs, kv = whole(target, len(text))
    target.forward(torch.tensor(text), inputs, kv)
    planes = dense(checkpoints[family])(text).planes

    def written(plane: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = kv[plane].flatten(1, 2)[:, inputs.slots].transpose(0, 1)  # [N, 2 * G, dim]
        keys, values = rows.chunk(2, 1)
        if family == "huginn_raven":  # pairs are stored apart
            keys = keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return keys, values

    places: dict[Place, int] = {
        ("core", loop, layer): loop * spec.num_layers + layer
        for loop in range(spec.loops)
        for layer in range(spec.num_layers)
    }
    looped = len(places)
    for layer in range(target.config.prelude_layers):
        places["prelude", 0, layer] = looped + layer
    for layer in range(target.config.coda_layers):
        places["coda", spec.loops, layer] = looped + target.config.prelude_layers + layer
    assert sorted(places.values()) == list(range(spec.planes.count)) == list(range(len(kv)))
    for place, plane in places.items():
        for found, expected in zip(written(plane), planes[place], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    other = written(1)[1] - planes["core", 1, 0][1]  # as if it were l * D + t
    assert spec.num_layers > 1 and other.abs().max() > 1e-2


def test_loops_out_of_range(checkpoints: dict[str, Path]) -> None:
    target = load(checkpoints["ouro"])
    inputs, kv = whole(target, 3)
    state = target.begin(torch.tensor([1, 2, 3]), inputs, kv)
    for first, last in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="of a target with 4"):
            target.run_loops(state, inputs, kv, first, last)
    assert target.run_loops(state, inputs, kv, 2, 2) is state


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_refused(family: str, checkpoints: dict[str, Path]) -> None:
    target = load(checkpoints[family])
    inputs, kv = whole(target, 3)
    with pytest.raises(UnsupportedError, match=f"(?s)looped target.*{family}.*taps=.1,"):
        target.forward(torch.tensor([1, 2, 3]), inputs, kv, taps=(1,))


def test_exit_probabilities_need_a_gate(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedError, match="nanbeige has no exit gate"):
        load(checkpoints["nanbeige"]).gates([torch.zeros(1, 64)])


# ---- variants, other kernels and types


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("ouro", {"loops": 1}),
        ("ouro", {"loops": 6, "num_hidden_layers": 1, "layer_types": ["full_attention"]}),
        ("ouro", {"num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1e6}),
        ("ouro", {"tie_word_embeddings": True}),
        ("nanbeige", {"loops": 2, "rope_theta": 7e7}),
        ("nanbeige", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("huginn_raven", {"loops": 6, "n_layers_in_coda": 1, "n_layers": 4}),
        ("huginn_raven", {"qk_bias": False, "tie_embeddings": False}),
        ("huginn_raven", {"init_values": {"embed_scale": 8.0, "std": 0.1}, "padded_vocab_size": 320}),
    ],
)
def test_variants(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_looped.WRITERS[family](tmp_path / "m", **changes)
    runner = PagedRunner(load(path), CpuKernels(), F64, sequences=1, max_tokens=24)
    found = runner.forward([(0, TEXTS[2])])
    torch.testing.assert_close(found, dense(path)(TEXTS[2]).logits[-1], rtol=0, atol=1e-10)


def test_the_scale_of_the_config(tmp_path: Path) -> None:
    """init_values.embed_scale, where there is one, is what the published class multiplies with."""
    target = load(tiny_looped.write_huginn(tmp_path / "m", init_values={"embed_scale": 2.0}))
    table = load_file(tmp_path / "m" / "model.safetensors")["transformer.wte.weight"].double()
    assert torch.equal(target.embed(torch.tensor([3, 4])), table[3:5] * 2)
    torch.testing.assert_close(target.head_rows(torch.tensor([5, 1])), table[[5, 1]], rtol=0, atol=0)


def test_the_rotary_table_is_the_checkpoint_s(tmp_path: Path) -> None:
    """Not recomputed: a stored table that differs changes the logits."""
    path = tiny_looped.write_huginn(tmp_path / "m", loops=2)
    weights = load_file(path / "model.safetensors")
    weights["freqs_cis"] = weights["freqs_cis"].roll(3, 1).contiguous()
    tiny.write_weights(path, weights)
    runner = PagedRunner(load(path), CpuKernels(), F64, sequences=1, max_tokens=24)
    found = runner.forward([(0, TEXTS[2])])
    torch.testing.assert_close(found, dense(path)(TEXTS[2]).logits[-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_kernels_and_half_precision(family: str, checkpoints: dict[str, Path]) -> None:
    path, text = checkpoints[family], TEXTS[1]
    expected = dense(path)(text).logits[-1]

    def run(dtype: torch.dtype, kernels: Kernels, **kwargs: Any) -> torch.Tensor:
        target = load(path, dtype, kernels, **kwargs)
        return PagedRunner(target, kernels, dtype, sequences=1, max_tokens=12).forward([(0, text)])

    torch.testing.assert_close(run(F64, ReferenceKernels()), expected, rtol=0, atol=1e-10)
    for dtype, kernels in ((BF16, CpuKernels()), (BF16, ReferenceKernels()), (torch.float16, CpuKernels())):
        found = run(dtype, kernels)
        assert found.dtype == dtype
        assert (found.double() - expected).abs().mean() < 0.1 * expected.std()
    eight = run(BF16, ReferenceKernels(), quantization="int8")
    assert (eight.double() - expected).abs().mean() < 0.15 * expected.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_native_kernels(family: str, tmp_path: Path) -> None:
    """In bf16 no worse than torch's; every family's layers run as native stacks."""
    library = library_path()
    if library is None:
        pytest.skip("the native library was not built")
    sizes = {"n_embd": 128} if family == "huginn_raven" else {"head_dim": 32}
    path = tiny_looped.WRITERS[family](tmp_path / "m", loops=2, dtype=BF16, **sizes)
    text = TEXTS[0]
    expected = dense(path)(text).logits[-1]

    def error(kernels: Kernels) -> float:
        target = load(path, BF16, kernels)
        parts = target._parts
        stacks = [part for part in (parts.prelude, parts.core, parts.coda) if part is not None]
        assert len(stacks) == (3 if family == "huginn_raven" else 1)
        assert all((stack._fused is not None) == isinstance(kernels, NativeKernels) for stack in stacks)
        runner = PagedRunner(target, kernels, BF16, sequences=1, max_tokens=32, block_size=16)
        return float((runner.forward([(0, text)]).double() - expected).abs().mean())

    native = error(NativeKernels(Team(load_library(library), 2)))
    assert native < 1.3 * error(CpuKernels()) + 1e-3 and native < 0.1 * expected.std()


@pytest.mark.parametrize("family", ["ouro", "huginn_raven"])
def test_a_tied_head_keeps_eight_bits(family: str, tmp_path: Path) -> None:
    """--quantization=int4 leaves the head in 8 bits, whatever the embedding is called."""
    tied = {"ouro": {"tie_word_embeddings": True}, "huginn_raven": {}}[family]
    path = tiny_looped.WRITERS[family](tmp_path / "m", **tied)
    target = load(path, BF16, ReferenceKernels(), quantization="int4")
    weights = load_file(path / "model.safetensors")
    table = weights[{"ouro": "model.embed_tokens.weight"}.get(family, "transformer.wte.weight")]
    found = target.head_rows(torch.arange(tiny.VOCAB_SIZE)).float()
    assert (found - table).abs().max() < 0.02 * table.abs().max()  # 4 bits are off by up to a fifteenth


def test_positions_past_the_rotary_table(checkpoints: dict[str, Path]) -> None:
    """The last drafts of a full text may stand there. Nobody reads them, and they disturb nobody."""
    target = load(checkpoints["huginn_raven"])
    inputs, kv = whole(target, 5)
    plain = target.forward(torch.tensor(TEXTS[0][:5]), inputs, kv).last
    far = replace(inputs, positions=torch.tensor([0, 1, 2, target.spec.max_position, 600]))
    found = target.forward(torch.tensor(TEXTS[0][:5]), far, whole(target, 5)[1]).last
    assert torch.equal(found[:3], plain[:3]) and found.isfinite().all()


# ---- another family: one file and one registry line


def test_another_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but its entry in the registry knows it."""

    def read(raw: dict[str, Any]) -> Any:
        return nanbeige.read_config({**raw, "num_loops": raw["depth"], "depth": None})

    tensors = nanbeige.tensor_shapes
    family = LoopedFamily(read, tensors, "lm_head.weight", nanbeige.build)  # type: ignore[arg-type]
    path = tiny_looped.write_nanbeige(tmp_path / "m", model_type="stranger", depth=3, num_loops=None)
    with pytest.raises(Exception, match="'stranger' is not supported"):
        load(path)
    monkeypatch.setitem(registry.LOOPED, "stranger", family)  # type: ignore[arg-type]
    target = load(path)
    assert (target.spec.model_type, target.spec.loops, target.spec.planes.count) == ("stranger", 3, 6)
