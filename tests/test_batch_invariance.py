"""``batch_invariant``: who asks for it, what it says, and that bits do not depend on company.

The torch backend here; Triton's interpreter and the emulator beside the other tests of theirs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pyfa
from pyfa import context
from pyfa.backends.torch import tiled
from pyfa.compat import fa3, fa4
from pyfa.integrations import torch_sdpa

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products do not gain by more, and tests run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compared(invariance_cases: ModuleType, invariant: bool = True) -> Any:
    models = [
        invariance_cases.Model(longest=260),
        invariance_cases.Model(3, 1, 40, 64, torch.float32, window=37, sinks=True, longest=200),
    ]
    sizes = invariance_cases.Sizes((2, 5), (16, 1000), (16, 48), (2,), (3,))
    return invariance_cases.run(
        models, rows=4, device="cpu", backend="torch", sizes=sizes, at_once=2,
        invariant=invariant, with_gradients=1,
    )  # fmt: skip


def test_bits_of_a_row_do_not_depend_on_its_company(invariance_cases: ModuleType) -> None:
    found = compared(invariance_cases)
    assert found.rows == 4
    assert sum(found.compared.values()) > 150
    assert found.failures == []


def test_without_it_they_do(invariance_cases: ModuleType) -> None:
    found = compared(invariance_cases, invariant=False)
    assert len(found.failures) > 30


def test_a_planted_dependence_on_the_batch_is_found(
    invariance_cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiled._Grid.__init__

    def planted(grid: Any, call: Any) -> None:
        original(grid, call)
        if call.batch > 2:
            grid.step_k = 64

    monkeypatch.setattr(tiled._Grid, "__init__", planted)
    found = compared(invariance_cases)
    companies = {failure.company for failure in found.failures}
    assert companies
    # Who is not in a batch of more than 2 is as before.
    assert all("batch of 2" not in each and "chunks" not in each for each in companies)


def qkv(batch: int = 2, rows: int = 33, heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(batch, rows, n, 64, generator=generator) for n in (heads, 2, 2))


def is_invariant(**options: Any) -> bool:
    """By what the plan of a call says."""
    return "batch_invariant" in pyfa.explain(*qkv(), **options).problem.features


class TestAsking:
    def test_an_argument_a_context_and_their_order(self) -> None:
        assert not is_invariant()
        assert is_invariant(batch_invariant=True)
        with pyfa.use_batch_invariant():
            assert is_invariant()
            with pyfa.use_batch_invariant(False):
                assert not is_invariant()
                assert is_invariant(batch_invariant=True)
            assert is_invariant()
        assert not is_invariant()

    def test_a_context_is_a_threads_own(self) -> None:
        found: list[bool] = []
        with pyfa.use_batch_invariant():
            thread = threading.Thread(target=lambda: found.append(is_invariant()))
            thread.start()
            thread.join()
        assert found == [False]

    def test_a_context_ends_with_an_exception(self) -> None:
        with pytest.raises(ZeroDivisionError), pyfa.use_batch_invariant():
            1 / 0  # noqa: B018
        assert not is_invariant()

    def test_the_variable_ranks_below_the_context(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(context, "_batch_invariant_everywhere", True)
        assert is_invariant()
        with pyfa.use_batch_invariant(False):
            assert not is_invariant()

    def test_the_variable_is_read(self) -> None:
        code = "from pyfa import context; print(context.is_batch_invariant())"
        environment = os.environ | {"PYFA_BATCH_INVARIANT": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        assert done.stdout.strip() == "True"

    def test_what_is_neither_true_nor_false(self) -> None:
        with pytest.raises(TypeError, match=r"^batch_invariant: expected True or False"):
            pyfa.attention(*qkv(), batch_invariant="yes")
        with pytest.raises(TypeError, match=r"^enabled: expected True or False"):
            pyfa.use_batch_invariant(1).__enter__()

    @pytest.mark.parametrize("by_context", [False, True])
    def test_calls_that_were_bound_before_are_not_taken_for_these(self, by_context: bool) -> None:
        q, k, v = qkv(rows=300, heads=2)
        usual = [pyfa.attention(q, k, v, softcap=9.0) for _ in range(3)]
        asked: Callable[..., Any] = pyfa.use_batch_invariant if by_context else nullcontext
        options = {} if by_context else {"batch_invariant": True}
        with asked():
            ours = [pyfa.attention(q, k, v, softcap=9.0, **options) for _ in range(3)]
            alone = pyfa.attention(q[:1], k[:1], v[:1], softcap=9.0, **options)
        again = pyfa.attention(q, k, v, softcap=9.0)
        assert all(torch.equal(x, usual[0]) for x in (*usual, again))
        assert all(torch.equal(x, ours[0]) for x in ours)
        assert torch.equal(alone, ours[0][:1])
        assert not torch.equal(ours[0], usual[0])

    def test_a_backward_follows_its_forward(self) -> None:
        x = [each.requires_grad_() for each in qkv(rows=300)]
        lone = [each[:1].detach().requires_grad_() for each in x]
        with pyfa.use_batch_invariant():
            out, alone = pyfa.attention(*x, causal=True), pyfa.attention(*lone, causal=True)
        grads = torch.autograd.grad(out, x, torch.ones_like(out))
        of_lone = torch.autograd.grad(alone, lone, torch.ones_like(alone))
        for both, one in zip(grads, of_lone, strict=True):
            assert torch.equal(both[:1], one)

    def test_under_torch_compile(self) -> None:
        q, k, v = qkv(rows=300)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return pyfa.attention(q, k, v, softcap=3.0)

        with pyfa.use_batch_invariant():
            eager = pyfa.attention(q, k, v, softcap=3.0)
            assert torch.equal(compiled(q, k, v), eager)
        assert torch.equal(compiled(q, k, v), pyfa.attention(q, k, v, softcap=3.0))


# Constants of plans that do not change a row's arithmetic.
_PLACES = ("SHARED_BYTES", "BLOCKS", "STAGES", "PACKED", "CHUNK_SHARED", "plain")


class TestSaying:
    @pytest.mark.parametrize("device", ["H200", "MI300X", "RTX4090"])
    def test_explain_says_what_it_costs(self, device: str) -> None:
        meta = [x.to(torch.bfloat16).to("meta") for x in qkv(rows=1)]
        told = pyfa.explain(*meta, device=device, batch_invariant=True)
        answers = {answer.backend: answer for answer in told.answers}
        backend = "hip" if device == "MI300X" else "cuda"
        assert told.chosen == backend
        for name in (backend, "triton"):
            plan = answers[name].plan
            assert plan is not None
            assert any(note.startswith("batch_invariant: ") for note in plan.notes)
            assert re.search("keys (are not|are) split", str(told))
        reason = "on a GPU, PyTorch chooses its matrix products by the size of the batch"
        assert reason in answers["torch"].reasons

    @pytest.mark.parametrize("device", ["H200", "MI300X"])
    def test_plans_depend_on_neither_sizes_nor_layout(self, device: str) -> None:
        """One kernel and one tile, but for what reads pages."""
        found: dict[str, set[tuple[Any, ...]]] = {}
        for batch, rows, keys in ((1, 1, 8), (64, 1, 9000), (2, 500, 500), (1, 9000, 9000)):
            for page_size in (0, 16, 256):
                tensors = [
                    torch.empty(1, dtype=torch.bfloat16, device="meta").expand(shape)
                    for shape in ((batch, rows, 8, 96), (batch, keys, 2, 96), (batch, keys, 2, 96))
                ]
                where: dict[str, Any] = {}
                if page_size:
                    pages = torch.empty(1, dtype=torch.bfloat16, device="meta")
                    tensors[1:] = [pages.expand(999, page_size, 2, 96)] * 2
                    table = torch.empty(batch, -(-keys // page_size), device="meta")
                    where["page_table"] = table.int()
                told = pyfa.explain(
                    *tensors, device=device, causal=True, batch_invariant=True, **where
                )
                for answer in told.answers:
                    if answer.plan is None:
                        continue
                    values = dict(answer.plan.constants)
                    # Of few rows blocks of one warpgroup, whose arithmetic is that of more; where
                    # a block keeps what its chunks came to does not change it either.
                    values["GROUPS"] = values.pop("OF_GROUPS", values.get("GROUPS"))
                    constants = tuple(
                        (name, value)
                        for name, value in sorted(values.items())
                        if "page" not in name.lower() and name not in _PLACES
                    )
                    found.setdefault(answer.backend, set()).add((answer.plan.kernel, constants))
        assert {"triton", "hip" if device == "MI300X" else "cuda"} <= found.keys()
        assert {name: len(plans) for name, plans in found.items()} == dict.fromkeys(found, 1)

    def test_what_has_no_such_kernel_is_declined(self) -> None:
        def reasons(device: str, page_size: int, **options: Any) -> str:
            q = torch.empty(2, 8, 4, 64, dtype=torch.bfloat16, device="meta")
            pages = torch.empty(9, page_size, 2, 64, dtype=torch.bfloat16, device="meta")
            table = torch.empty(2, 4, dtype=torch.int32, device="meta")
            told = pyfa.explain(
                q, pages, pages, page_table=table, device=device, batch_invariant=True, **options
            )
            (cuda,) = (answer for answer in told.answers if answer.backend == "cuda")
            return " ".join(cuda.reasons)

        left = torch.empty(2, dtype=torch.int32, device="meta")
        assert reasons("H200", 16) == ""
        assert reasons("H200", 1) == ""
        assert "cache_leftpad" in reasons("H200", 16, cache_leftpad=left)
        assert reasons("RTX4090", 12, cache_leftpad=left) == ""


def watch_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """``num_splits`` of the calls that reach the torch backend's tiles, as they come."""
    seen: list[int] = []
    original = tiled._Grid.__init__

    def watched(grid: Any, call: Any) -> None:
        seen.append(call.num_splits)
        original(grid, call)

    monkeypatch.setattr(tiled._Grid, "__init__", watched)
    return seen


class TestParts:
    """``num_splits`` means what it says."""

    def test_more_than_one_is_refused(self) -> None:
        q, k, v = qkv(rows=1)
        for function in (pyfa.attention, pyfa.attention_kvcache):
            with pytest.raises(ValueError, match=r"^num_splits: expected 0 or 1 with batch_inv"):
                function(q, k, v, num_splits=2, batch_invariant=True)
            function(q, k, v, num_splits=1, batch_invariant=True)

    def test_compat_passes_it_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = watch_parts(monkeypatch)
        q, k, v = qkv()
        offsets = torch.tensor([0, 33, 66], dtype=torch.int32)
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        for parts in (0, 1, 3):
            for module in (fa3, fa4):
                module.flash_attn_func(q, k, v, softcap=9.0, num_splits=parts)
                module.flash_attn_varlen_func(
                    *packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=33,
                    max_seqlen_k=33, softcap=9.0, num_splits=parts,
                )  # fmt: skip
        assert seen == [0] * 4 + [1] * 4 + [3] * 4

    def test_pytorchs_operators_pass_it_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = watch_parts(monkeypatch)
        q, k, v = qkv()
        options = {"window_size_left": 5, "window_size_right": 0}
        for parts in (None, 1, 3):
            torch_sdpa.flash_forward(
                q, k, v, None, None, 33, 33, 0.0, False, False, num_splits=parts, **options
            )
        assert seen == [0, 1, 3]
