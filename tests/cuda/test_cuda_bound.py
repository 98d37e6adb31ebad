"""What a repeated call gives the driver: the same launches and ``Params`` as the first one."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pyfa
from pyfa import _torch, abi, binding, dispatch, ops
from pyfa import request as requests
from pyfa.backends.common import libcuda
from pyfa.backends.cuda import backward_grid
from pyfa.problem import Call

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
LAUNCHED = ("attn_fwd", "row_sums", "attn_bwd", "dq_convert")
FRESH = {"out", "lse", "delta", "dq", "dk", "dv", "dq_accum", "counter"}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("no_gpu")


@pytest.fixture
def driver(no_gpu: ModuleType) -> Iterator[Any]:
    with no_gpu.nvidia(notes=True) as found:
        yield found


def leaf(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def inputs(
    batch: int = 1, rows: int = 128, keys: int = 128, heads: int = 2, heads_k: int = 2,
    dim: int = 64, dim_v: int = 64, dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:  # fmt: skip
    return [
        leaf((batch, rows, heads, dim), dtype),
        leaf((batch, keys, heads_k, dim), dtype),
        leaf((batch, keys, heads_k, dim_v), dtype),
    ]


Launch = tuple[str, tuple[int, ...], dict[str, Any]]


def launches(driver: Any) -> list[Launch]:
    """What was launched since the last time: kernel with constants, configuration, ``Params``."""
    found = [(name, config, abi.unpack(data)) for name, config, data in driver.launched]
    driver.launched.clear()
    return found


def mapped(data: bytes) -> list[int]:
    """The addresses in the tensor maps behind ``Params``."""
    places = range(abi.MAPS_AT, len(data), abi.MAP_SIZE)
    return [int.from_bytes(data[at : at + 8], "little") for at in places]


def step(driver: Any, tensors: list[torch.Tensor], **options: Any) -> tuple[list[Launch], Any]:
    """Launches of a forward and its backward, and the tensors that they were given."""
    return given_to(driver, pyfa.attention(*tensors, **options), tensors)


def given_to(driver: Any, out: Any, tensors: list[torch.Tensor]) -> tuple[list[Launch], Any]:
    out = out[0] if isinstance(out, tuple) else out
    dout = torch.randn(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, tensors, dout)
    names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    given = dict(zip(names, (*tensors, out, dout, *grads), strict=True))
    return launches(driver), given


def check_addresses(found: list[Launch], given: dict[str, torch.Tensor]) -> None:
    forward, *backward = (values for *_, values in found)
    for values in (forward, *backward):
        for name in ("q", "k", "v", "out"):
            assert values[name] == given[name].data_ptr()
        assert values["lse"] == forward["lse"] != 0
    for values in backward:
        assert values == backward[0]
        for name in ("dout", "dq", "dk", "dv"):
            assert values[name] == given[name].data_ptr()


SHAPES: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16},
    {"batch": 3, "rows": 100, "keys": 77},
    {"rows": 1, "keys": 300},
    {"heads": 6, "heads_k": 2},
    {"dim": 128, "dim_v": 128},
    {"dim": 80, "dim_v": 80},
    {"dim": 192, "dim_v": 128},
    {"dim": 256, "dim_v": 256, "batch": 2, "heads_k": 1},
    {"dim": 64, "dim_v": 8},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (20, 3), "scale": 0.3},
    {"softcap": 5.0},
    {"scale": -1.0},
    {"deterministic": True, "causal": True},
    {"return_lse": True},
]


def check_same(found: list[Launch], first: list[Launch], tensors: set[str]) -> None:
    """The same launches, but for the addresses of ``tensors`` and of what is made for each call."""
    for (name, config, values), (name_1, config_1, values_1) in zip(found, first, strict=True):
        assert (name, config) == (name_1, config_1)
        differing = FRESH | tensors
        assert [n for n in abi.NAMES if n not in differing and values[n] != values_1[n]] == []
        assert [n for n in FRESH if (values[n] == 0) != (values_1[n] == 0)] == []


def tiles_of_forward(driver: Any, batch: int, rows: int, heads: int, **options: Any) -> str:
    """The constants of the forward's plan."""
    q, k, v = (x.detach() for x in inputs(batch, rows, rows, heads, heads))
    driver.launched.clear()
    pyfa.attention(q, k, v, **options)
    (name,) = {name for name, *_ in driver.launched}
    return str(name)


def test_tiles_do_not_depend_on_earlier_calls(driver: Any) -> None:
    """Sizes between two powers of two, and windows, have tiles of their own, whichever came first:
    the choice that is kept is of the rounded sizes alone."""
    short, long = (tiles_of_forward(driver, 64, rows, 12) for rows in (197, 256))
    assert short != long
    assert [tiles_of_forward(driver, 64, rows, 12) for rows in (200, 250)] == [short, long]
    narrow, wide = (tiles_of_forward(driver, 1, 4096, 32, window=(edge, 0)) for edge in (128, 4000))
    assert narrow != wide
    # The same shapes in the other order.
    assert tiles_of_forward(driver, 1, 4096, 32, window=(3900, 0)) == wide
    assert tiles_of_forward(driver, 1, 4096, 32, window=(120, 0)) == narrow


def check_prepared() -> None:
    """The one call that was kept, with its backward."""
    ((entry,),) = binding.calls.known.values()
    assert [len(each) for each in entry.backwards.values()] == [1, 0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_repeated_call_launches_what_the_first_did(
    driver: Any, shapes: dict[str, Any], options: dict[str, Any]
) -> None:
    first, given = step(driver, inputs(**shapes), **options)
    assert tuple(name.split(".cu")[0].rsplit("/")[-1] for name, *_ in first) == LAUNCHED
    check_addresses(first, given)
    for _ in range(2):
        again, given = step(driver, inputs(**shapes), **options)
        check_addresses(again, given)
        check_same(again, first, {"q", "k", "v", "dout"})
    check_prepared()


def offsets_of(*ends: int) -> torch.Tensor:
    """At no multiple of 16 bytes, which only q, k and v have to be at."""
    return torch.tensor((7, 0, *ends), dtype=torch.int32)[1:]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_packed_calls_read_their_own_offsets(
    driver: Any, options: dict[str, Any], shared: bool
) -> None:
    """And a kernel clears what no sequence owns: the queries' rows, theirs and the keys'."""
    seen = []
    for ends in ((40, 100), (100, 120), (70, 128)):
        tensors = [x[0].detach().requires_grad_() for x in inputs(heads=4)]
        of_q = offsets_of(*ends)
        of_k = of_q if shared else offsets_of(*ends)
        found = pyfa.attention_varlen(*tensors, of_q, of_k, 100, 100, **options)
        launched, given = given_to(driver, found, tensors)
        names = [name.split(".cu")[0].rsplit("/")[-1] for name, *_ in launched]
        assert tuple(name for name in names if name != "gaps") == LAUNCHED
        assert names.index("gaps") < names.index("attn_fwd")
        assert names[names.index("attn_fwd") + 1 :][:2] == ["gaps", "gaps"]
        gaps = [
            values for name, (*_, values) in zip(names, launched, strict=True) if name == "gaps"
        ]
        launched = [x for name, x in zip(names, launched, strict=True) if name != "gaps"]
        check_addresses(launched, given)
        for cleared, wanted in zip(gaps, (("out", of_q), ("dq", of_q), ("dk", of_k)), strict=True):
            assert cleared["out"] == given[wanted[0]].data_ptr()
            assert cleared["cu_seqlens_q"] == wanted[1].data_ptr()
        assert gaps[0]["lse"] == launched[0][2]["lse"]
        assert gaps[2]["dv"] == given["dv"].data_ptr()
        for *_, values in launched:
            assert values["cu_seqlens_q"] == of_q.data_ptr()
            assert values["cu_seqlens_k"] == of_k.data_ptr()
        if not seen:
            seen = launched
        check_same(launched, seen, {"q", "k", "v", "dout", *OFFSETS})
    check_prepared()


def test_dense_calls_have_no_offsets(driver: Any) -> None:
    """Also where packed ones of the same kernels came before."""
    packed = [x[0].detach().requires_grad_() for x in inputs()]
    for _ in range(2):
        given_to(driver, pyfa.attention_varlen(*packed, *[offsets_of(128)] * 2, 128, 128), packed)
        launched, _ = step(driver, inputs())
        assert not any(values[name] for *_, values in launched for name in OFFSETS)


def test_hopper_s_tensor_maps_follow_the_tensors(driver: Any) -> None:
    for _ in range(3):
        tensors = inputs()
        pyfa.attention(*tensors)
        ((name, _, data),) = driver.launched
        driver.launched.clear()
        assert name.startswith("cuda/sm90/attn_fwd.cu")
        assert mapped(data) == [x.data_ptr() for x in tensors] + [0] * (abi.MAX_MAPS - 3)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dim", "rows_of_tile"), [(64, 128), (128, 64)])
def test_the_parts_of_the_workspace(
    driver: Any,
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    rows_of_tile: int,
    deterministic: bool,
    nothing_bound: Callable[[], None],
) -> None:
    """They do not overlap, are as large as by themselves, and begin as 0 where kernels add up."""
    made: list[torch.Tensor] = []
    empty = _torch.empty_cuda

    def noted(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        found = empty(shape, strides, dtype).fill_(7)
        made.append(found)
        return found

    monkeypatch.setattr(backward_grid, "tiles_for", lambda *_: None)
    shapes = {"batch": 3, "rows": 100, "keys": 77, "heads": 6, "heads_k": 6, "dim": dim}
    shapes["dim_v"] = dim
    step(driver, inputs(**shapes), deterministic=deterministic)
    monkeypatch.setattr(_torch, "empty_cuda", noted)
    nothing_bound()
    (*_, (_, _, values)), _ = step(driver, inputs(**shapes), deterministic=deterministic)
    work = made[-1]
    assert len(made) == 2 + 3 + 1
    begin, end = work.data_ptr(), work.data_ptr() + work.nbytes
    tiles = 3 * 6 * -(-100 // rows_of_tile)
    sums, delta = 4 * tiles * rows_of_tile * dim, 4 * 2 * 3 * 6 * 100
    if not deterministic:  # the first block sets a tile, which has a state
        sums += 4 * tiles
    parts = [(values["dq_accum"], sums), (values["delta"], delta)]
    if deterministic:
        parts.insert(1, (values["counter"], 4 * tiles))
    for (at, size), (after, _) in zip(parts, [*parts[1:], (end, 0)], strict=True):
        assert begin <= at
        assert at + size <= after < at + size + 512
        assert at % 16 == 0


def strided(dout: torch.Tensor) -> torch.Tensor:
    return dout.transpose(1, 2).contiguous().transpose(1, 2)


def on_8(x: torch.Tensor) -> torch.Tensor:
    found = torch.empty(x.numel() + 4, dtype=x.dtype)[4:].view(x.shape).copy_(x)
    assert found.data_ptr() % 16 == 8
    return found


@pytest.mark.parametrize(
    ("change", "copied"),
    [
        (strided, False),
        (on_8, True),
        (lambda x: torch.ones((), dtype=x.dtype).expand(x.shape), True),
    ],
    ids=["strided", "on 8 bytes", "expanded"],
)
def test_gradients_of_another_layout(
    driver: Any, calls_of: Callable[..., Any], change: Callable[..., Any], copied: bool
) -> None:
    for _ in range(2):
        step(driver, inputs())
    seen = calls_of(ops, "prepare")
    for _ in range(2):
        tensors = inputs()
        out = pyfa.attention(*tensors)
        dout = change(torch.randn(out.shape).to(out.dtype))
        driver.launched.clear()
        torch.autograd.grad(out, tensors, dout)
        for *_, values in launches(driver):
            assert (values["dout"] == dout.data_ptr()) is not copied
            assert values["dout_row"] == (128 if copied else dout.stride(1))
            assert values["dout_head"] == (64 if copied else dout.stride(2))
    # Each is bound once, also what needs a copy.
    assert len(seen) == 1


def test_an_lse_that_is_a_slice_of_a_larger_one_is_read_as_one_of_its_own(driver: Any) -> None:
    """To PyTorch it is contiguous; kernels go by the stride of a lone sequence, too."""
    q, k, v = (x.detach() for x in inputs())
    call = Call(q, k, v, max_seqlen_q=128, max_seqlen_k=128, scale=0.125)
    prepared = dispatch.prepare(call, "cuda", True, False)
    out, lse = prepared.forward(call)
    sliced = torch.empty(1, 6, 128)[:, 2:4].copy_(lse)
    assert sliced.is_contiguous()
    for given in (lse, sliced):
        driver.launched.clear()
        prepared.backward(call, out, given, out)
        found = [values for *_, values in launches(driver)]
        assert {values["lse_batch"] for values in found} == {2 * 128}
        assert {values["lse"] for values in found} == {given.data_ptr()}


def test_a_gradient_of_the_lse(driver: Any, calls_of: Callable[..., Any]) -> None:
    step(driver, inputs(), return_lse=True)
    seen = calls_of(ops, "prepare")
    for given in ((True, True), (True, False), (False, True)):
        tensors = inputs()
        outputs = pyfa.attention(*tensors, return_lse=True)
        driver.launched.clear()
        asked = [x for x, is_given in zip(outputs, given, strict=True) if is_given]
        torch.autograd.grad(asked, tensors, [torch.randn_like(x) for x in asked])
        assert {bool(values["dlse"]) for *_, values in launches(driver)} == {given[1]}
    # With a gradient of the LSE, and of it alone: a dout of zeros is like any other.
    assert len(seen) == 1


@pytest.mark.parametrize("first_on_16", [False, True])
def test_addresses_of_another_alignment(
    driver: Any, monkeypatch: pytest.MonkeyPatch, first_on_16: bool
) -> None:
    """They may need a copy. Each kind is prepared for once, whichever came first."""
    checked: list[Any] = []
    dense = requests.dense
    monkeypatch.setattr(requests, "dense", lambda *given: (checked.append(given), dense(*given))[1])
    for grad in (False, True):
        for turn in range(6):
            q, k, v = (x.detach() for x in inputs())
            if first_on_16 == bool(turn % 2):
                q = on_8(q)
            q.requires_grad_(grad)
            driver.launched.clear()
            pyfa.attention(q, k, v)
            ((_, _, values),) = launches(driver)
            assert values["q"] % 16 == 0
            assert (values["q"] == q.data_ptr()) == (q.data_ptr() % 16 == 0)
            assert values["k"] == k.data_ptr()
    assert len(checked) == 4


def test_threads_do_not_mix_arguments(
    driver: Any, monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> None:
    """Each launch has the addresses of one thread's tensors and that thread's stream."""
    streams = threading.local()
    step(driver, inputs())
    # After the first call, so that all threads share what it prepared.
    monkeypatch.setattr(_torch, "current_stream", lambda index: streams.mine)
    tensors = [inputs() for _ in range(4)]
    nothing_bound()
    streams.mine = 0
    step(driver, tensors[0])
    step(driver, tensors[0])
    # Threads of autograd would have other streams: only what runs here.
    failures: list[BaseException] = []

    def work(mine: int) -> None:
        streams.mine = mine + 1
        try:
            for _ in range(150):
                pyfa.attention(*tensors[mine])
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    found = [(config[7], values) for _, config, values in launches(driver)]
    assert len(found) == 600
    for stream, values in found:
        expected = [x.data_ptr() for x in tensors[stream - 1]]
        assert [values[name] for name in ("q", "k", "v")] == expected


@pytest.fixture
def prepared(driver: Any) -> Callable[[], Any]:
    for _ in range(2):
        step(driver, inputs())
    ((entry,),) = binding.calls.known.values()
    ((_, run),) = entry.backwards[False]
    tensors = [x.detach() for x in inputs()]
    out, lse, *_ = entry.run(*tensors)
    launches(driver)
    return lambda: run(torch.ones_like(out), out, lse, *tensors)


def test_a_launch_that_fails_leaves_the_next_one_whole(
    driver: Any, prepared: Callable[[], Any]
) -> None:
    prepared()
    good = [(name, config) for name, config, _ in launches(driver)]
    driver.errors = [0, 700]
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        prepared()
    assert [(name, config) for name, config, _ in launches(driver)] == good[:1]
    prepared()
    assert [(name, config) for name, config, _ in launches(driver)] == good


def test_a_thread_without_a_context_goes_on_where_it_was(
    driver: Any, prepared: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[int] = []

    def use(index: int) -> bool:
        contexts.append(index)
        return True

    monkeypatch.setattr(libcuda, "use_primary_context", use)
    driver.errors = [0, libcuda.NO_CONTEXT]
    prepared()
    names = [name.split(".cu")[0].rsplit("/")[-1] for name, *_ in launches(driver)]
    assert tuple(names) == LAUNCHED[1:]
    assert len(contexts) == 1


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(("rows", "heads"), [(1, 4), (20, 4), (20, 2)])
def test_chunks_are_splits_where_blocks_are_few(
    driver: Any, rows: int, heads: int, with_lse: bool
) -> None:
    q, k, v = (
        torch.randn(1, n, h, 128).bfloat16() for n, h in ((rows, heads), (5000, 2), (5000, 2))
    )
    for _ in range(3):
        found = pyfa.attention(q, k, v, causal=True, batch_invariant=True, return_lse=with_lse)
        out, *lse = found if with_lse else (found,)
        assert out.shape == q.shape
        assert [x.shape for x in lse] == [(1, heads, rows)] * with_lse
        forward, combine = launches(driver)
        for name, _, values in (forward, combine):
            assert ("CHUNK_TILES" if values is forward[2] else "CHUNKED") in name
            assert values["num_splits"] == 5
            assert values["partial_out"] == forward[2]["partial_out"] != 0


@pytest.mark.parametrize("head_dim", [64, 256])
def test_blocks_that_are_many_keep_what_chunks_came_to(driver: Any, head_dim: int) -> None:
    q, k, v = (torch.randn(70, n, 2, head_dim).bfloat16() for n in (70, 2100, 2100))
    for _ in range(3):
        out, lse = pyfa.attention(q, k, v, batch_invariant=True, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, (70, 2, 70))
        ((name, _, values),) = launches(driver)
        assert values["num_splits"] == 1
        # Above head_dim 128 shared memory has no room for it.
        assert ("CHUNK_SHARED" in name) == (head_dim == 64)
        assert (values["partial_out"] != 0) == (head_dim == 256)
    pyfa.attention(q, k[:, :2000], v[:, :2000], batch_invariant=True)
    ((_, _, values),) = launches(driver)
    assert values["partial_out"] == 0
