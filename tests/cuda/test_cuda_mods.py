"""score_mod and mask_mod in CUDA: which kernels take them, and that these compile. Not run here."""

from __future__ import annotations

import importlib
import itertools
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import turns

import pyfa
from pyfa import abi, dispatch, mods
from pyfa.backends.common import arguments
from pyfa.backends.common.calls import GENERAL, PLAIN
from pyfa.backends.common.program import Params, Program
from pyfa.backends.cuda import code, forward_sm90, plans, runtime_compiler
from pyfa.backends.cuda.launcher import Launcher
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.native import block_lists
from pyfa.blocks import Tiles
from pyfa.conformance import modifiers_more
from pyfa.conformance.build import build
from pyfa.conformance.cases import Case
from pyfa.conformance.modifiers import MASKS
from pyfa.device import DEVICES
from pyfa.mods import emit_ranges
from pyfa.plan import Plan
from pyfa.problem import problem_of

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
CASE = Case(
    lengths_q=(129,), lengths_k=(257,), backward=True, score_mod="relative", mask_mod="natten"
)


def plans_for(device: str) -> tuple[Plan, Plan]:
    """Forward and backward of the case."""
    problem = problem_of(build(CASE).spec, True, False, DEVICES[device], True)
    forward = dispatch.ask("cuda", problem, hypothetical=True).plan
    assert forward is not None
    chain = TARGET.backward_plans("cuda", problem.arch, (64, 64), 1, True, False, problem.mods)
    return forward, chain[1]


@pytest.mark.parametrize(("device", "own"), [("A100-80GB", "sm80"), ("H200", "sm90")])
def test_which_kernels_take_them(device: str, own: str) -> None:
    digest = build(CASE).spec.mods
    for plan in plans_for(device):
        assert plan.kernel.startswith(f"cuda/{own}/")
        constants = dict(plan.constants)
        assert (constants["MOD"], constants["MOD_CAPTURED"]) == (digest, 1)
    plain = replace(CASE, score_mod="", mask_mod="", softcap=3.0)
    problem = problem_of(build(plain).spec, True, False, DEVICES[device], True)
    found = dispatch.ask("cuda", problem, hypothetical=True).plan
    assert found is not None
    assert "MOD" not in dict(found.constants)


def test_a_mask_alone_leaves_hopper_s_scores_plain() -> None:
    for case, score in (
        (replace(CASE, score_mod=""), PLAIN),
        (replace(CASE, score_mod="", alibi=True), GENERAL),
        (replace(CASE, mask_mod=""), forward_sm90.SCORE_MOD),
        (CASE, forward_sm90.SCORE_MOD),
        (replace(CASE, softcap=3.0), GENERAL),
    ):
        problem = problem_of(build(case).spec, True, False, DEVICES["H200"], True)
        found = dispatch.ask("cuda", problem, hypothetical=True).plan
        assert found is not None
        assert found.kernel == forward_sm90.KERNEL
        assert dict(found.constants)["SCORE"] == score


def test_tiles_follow_what_a_mask_loads_and_the_dtype() -> None:
    for name in ("natten", "documents"):
        case = replace(CASE, score_mod="", mask_mod=name)
        problem = problem_of(build(case).spec, True, False, DEVICES["H200"], True)
        for dtype, code_of in (("float16", 0), ("bfloat16", 1)):
            chain = TARGET.backward_plans(
                "cuda", problem.arch, (64, 64), code_of, True, False, problem.mods
            )
            assert dict(chain[1].constants)["FLOAT_WEIGHTS"] == (dtype == "float16")


@pytest.mark.parametrize(
    ("mask", "rows", "dim", "groups"),
    [
        ("causal", 4096, 64, 3), ("causal", 1024, 64, 1), ("causal", 1024, 128, 2),
        ("sliding", 4096, 64, 1), ("sliding", 4096, 128, 2), ("documents", 4096, 64, 1),
        ("documents", 4096, 128, 2), ("by row", 4096, 64, 3),
    ],
)  # fmt: skip
def test_tiles_follow_how_many_keys_a_mask_shows(
    mask: str, rows: int, dim: int, groups: int
) -> None:
    """Blocks of 64 rows where rows see few keys, or a value is loaded for each key."""
    document = torch.arange(rows) // 512
    masks = {
        "causal": lambda b, h, i, j: i >= j,
        "sliding": lambda b, h, i, j: (i >= j) & (i - j < 1024),
        "documents": lambda b, h, i, j: document[i] == document[j],
        "by row": lambda b, h, i, j: document[i] >= j,
    }
    q = torch.empty(1, rows, 2, dim, dtype=torch.bfloat16, device="meta")
    call = build(replace(CASE, score_mod="", mask_mod="sliding")).spec
    digest, captured = mods.resolve(None, masks[mask], torch.device("cpu"))
    call = call._replace(
        q=q, k=q, v=q, max_seqlen_q=rows, max_seqlen_k=rows, mods=digest,
        captured0=captured[0] if captured else None,
    )  # fmt: skip
    problem = problem_of(call, True, False, DEVICES["H200"], True)
    found = dispatch.ask("cuda", problem, hypothetical=True).plan
    assert found is not None
    assert dict(found.constants)["GROUPS"] == groups
    tiles = TARGET.list_tiles(found)
    assert (tiles.rows, tiles.keys) == (64 * groups, 64 if groups == 1 else 128)


@pytest.mark.parametrize("maps", [0, 3])
def test_captured_tensors_lie_behind_tensor_maps(maps: int) -> None:
    """Of a kernel that takes maps as of one that does not, each in a struct of a whole size."""
    call = build(CASE).spec
    program = Program(("q", "k", "captured0"), call.q)
    params = Params(
        abi.forward_values(call, (0,) * 4, (0,) * 3), {name: name for name in program.inputs}
    )
    program.add(plans_for("H200")[0], 1, 128, params)
    layout = arguments.layout_of(
        program, lambda _: [arguments.TensorMap(bytes(abi.MAP_SIZE), "q")] * maps
    )
    begin = abi.MAPPED_SIZE if maps else abi.SIZE
    data = bytearray(layout.data)
    for at, number in layout.words:
        struct.pack_into("<Q", data, at * 8, (0x1111, 0x2222, 0x3333)[number])
    (table,) = call.captured
    found = struct.unpack_from("<Q4i", data, begin)
    assert found == (0x3333, *table.shape, *(1,) * (4 - table.dim()))
    at_maps = [struct.unpack_from("<Q", data, abi.MAPS_AT + i * abi.MAP_SIZE) for i in range(maps)]
    assert at_maps == [(0x1111,)] * maps
    whole = -(-(begin + abi.captured_bytes(1)) // abi.MAP_ALIGNMENT) * abi.MAP_ALIGNMENT
    assert len(data) >= whole


def test_launches_find_maps_and_captured_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forward and backward, and of calls repeated with other tensors."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    no_gpu = importlib.import_module("no_gpu")
    with no_gpu.nvidia(notes=True) as driver:
        for _ in range(3):
            q, k, v = (torch.randn(1, 200, 2, 128).bfloat16().requires_grad_() for _ in range(3))
            table = torch.randn(2, 400)
            driver.launched.clear()
            out = pyfa.attention(
                q, k, v, score_mod=lambda s, b, h, i, j, table=table: s + table[h, i - j + 200]
            )
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            mine = [x for x in driver.launched if x[0].startswith("cuda/sm90/")]
            assert [name.split(".cu")[0] for name, *_ in mine] == [
                "cuda/sm90/attn_fwd", "cuda/sm90/attn_bwd",
            ]  # fmt: skip
            for _, _, data in mine:
                for at, x in enumerate((q, k, v)):
                    place = abi.MAPS_AT + at * abi.MAP_SIZE
                    assert struct.unpack_from("<Q", data, place) == (x.data_ptr(),)
                found = struct.unpack_from("<Q8i", data, abi.MAPPED_SIZE)
                assert found == (table.data_ptr(), 2, 400, 1, 1, 400, 1, 1, 1)


@pytest.mark.skipif(runtime_compiler.why_unavailable() is not None, reason="no NVRTC")
@pytest.mark.parametrize(
    ("device", "most"), [pytest.param("A100-80GB", 0, marks=pytest.mark.night), ("H200", 40)]
)
def test_they_compile_with_hardly_a_spill(device: str, most: int) -> None:
    """What sm90's spill is a few numbers that their loops keep."""
    for plan in plans_for(device):
        source = code.source_of(plan)
        assert re.search("DEVICE bool mod_mask", source)
        arch = plans.compiled_for(DEVICES[device].arch, plan)
        _, report = runtime_compiler.compile_cuda(source, arch=arch)
        assert "C75" not in report
        assert runtime_compiler.spills(report)[0] <= most


def test_captured_tensors_follow_the_parameters() -> None:
    """Their addresses are patched into each launch; sizes and strides stay."""
    call = build(CASE).spec
    (table,) = call.captured
    program = Program(("q", "k", "captured0"), call.q)
    values = abi.forward_values(call, (0,) * 4, (0,) * 3)
    params = Params(values, {name: name for name in program.inputs})
    program.add(plans_for("H200")[0], 1, 128, params)
    layout = arguments.layout_of(program, lambda _: ())
    data = bytearray(layout.data)
    addresses = (0x1111, 0x2222, 0x3333)
    for at, number in layout.words:
        struct.pack_into("<Q", data, at * 8, addresses[number])
    assert len(data) == abi.SIZE + abi.captured_bytes(mods.MOST_CAPTURED, listed=True)
    found = abi.unpack(bytes(data))
    assert (found["q"], found["k"]) == (0x1111, 0x2222)
    # Nothing between the addresses is written over.
    assert found["seqlen_k"] == 257
    assert found["scale"] == pytest.approx(call.scale)
    filler = (1,) * (4 - table.dim())
    wanted = (0x3333, *table.shape, *filler, *table.stride(), *filler)
    assert struct.unpack_from("<Q8i", data, abi.SIZE) == wanted


@pytest.mark.skipif(runtime_compiler.why_unavailable() is not None, reason="no NVRTC")
@pytest.mark.parametrize("name", MASKS)
def test_the_kernel_that_makes_lists_compiles_without_a_spill(name: str) -> None:
    call = build(replace(CASE, score_mod="", mask_mod=name)).spec
    more = turns.all_run() and name not in modifiers_more.MASKS
    archs = ("sm_80", "sm_90") if more else ("sm_90",)
    for tiles in (Tiles(128, 128), Tiles(64, 128, "keys")):
        plans = [block_lists.plan_of(Launcher(), call, tiles)]
        if emit_ranges.most_tabled(mods.of(call.mods)):
            plans.append(block_lists.plan_of(Launcher(), call, tiles, own_bounds=True))
            plans.append(block_lists.plan_of(Launcher(), call, tiles, "tile_bounds"))
        for plan, arch in itertools.product(plans, archs):
            _, report = runtime_compiler.compile_cuda(code.source_of(plan), arch=arch)
            assert runtime_compiler.spills(report) == (0, 0)


def test_lists_are_made_for_the_kernels_that_visit_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for the forward and one for the backward, until a captured tensor changes."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    no_gpu = importlib.import_module("no_gpu")
    document = torch.arange(300, dtype=torch.int32) // 100
    launched = []
    with no_gpu.nvidia(notes=True) as driver:
        for change in (0, None, 1):
            if change is not None:
                document.add_(change)  # of 0 nobody knows that it changes nothing
            q, k, v = (torch.randn(1, 300, 2, 128).bfloat16().requires_grad_() for _ in range(3))
            driver.launched.clear()
            out = pyfa.attention(
                q, k, v, mask_mod=lambda b, h, i, j: document[i] == document[j], backend="cuda"
            )
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            launched.append([x for x in driver.launched if x[0].startswith("cuda/block_lists")])
    assert [len(each) for each in launched] == [2, 0, 2]
    for name, config, data in launched[0]:
        owned = 3  # tiles of 128 rows, or of 128 keys
        assert "('LISTS', 2)" in name
        assert config[0] == owned
        assert struct.unpack_from("<Q8i", data, abi.SIZE) == (
            document.data_ptr(), 300, 1, 1, 1, 1, 1, 1, 1,
        )  # fmt: skip
