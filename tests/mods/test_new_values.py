"""Lists that are written again into the memory of older ones are never stale.

The kernels run in the emulator; every result is compared with that of a bias.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pyfa
from pyfa import binding, blocks, bound, request
from pyfa.blocks import kept

ROWS, DIM = 448, 16
Maker = Callable[[Any, Any], Any]


def forget() -> None:
    kept.clear()
    binding.calls.clear()
    bound.calls.clear()


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """No list, and no bound call, so that each test binds its own."""
    forget()
    yield
    forget()


def document(number: int) -> torch.Tensor:
    """Documents of pieces of 64 places. Which pieces see each other depends on ``number``."""
    draw = torch.Generator().manual_seed(number)
    return torch.randint(4, (ROWS // 64,), generator=draw, dtype=torch.int32).repeat_interleave(64)


def inputs(grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, ROWS, 1, DIM).half().requires_grad_(grad) for _ in range(3)]


def attend(tensors: list[torch.Tensor], at: torch.Tensor) -> Any:
    return pyfa.attention(*tensors, mask_mod=lambda b, h, i, j: at[i] == at[j], backend="emulator")


def expected(tensors: list[torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    seen = (at[:, None] == at).float().log()[None, None]
    return pyfa.attention(*(x.float() for x in tensors), bias=seen, backend="torch")


def agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.float(), wanted.float(), atol=4e-3)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each time that lists are made: whether into the memory of older ones."""
    from pyfa.backends.native import block_lists

    found: list[bool] = []
    make = block_lists._run_of

    def noting(*given: Any) -> Maker:
        run = make(*given)

        def noted(first: int, end: int, tensors: Any, lists: Any) -> Any:
            found.append(lists is not None)
            return run(first, end, tensors, lists)

        return noted

    monkeypatch.setattr(block_lists, "_run_of", noting)
    return found


# ---- what a new tensor finds ---------------------------------------------------------------------


def of_freed_tensors(steps: int = 6) -> bool:
    """All at one address."""
    tensors, right, memory = inputs(), True, document(0).numpy()
    for step in range(steps):
        memory[:] = document(7 + 5 * step).numpy()
        at = torch.from_numpy(memory)
        assert (at.data_ptr(), at._version) == (memory.ctypes.data, 0)
        right &= agree(attend(tensors, at), expected(tensors, at))
        del at
    return right


def of_values_changed_in_place() -> bool:
    tensors, at, right = inputs(), document(9), True
    for step in range(4):
        right &= agree(attend(tensors, at), expected(tensors, at))
        at.copy_(document(10 + step))
    return right


def of_tensors_that_take_turns() -> bool:
    """What is alive keeps its lists, and each is asked for again."""
    tensors, right = inputs(), True
    maps = [document(n) for n in (5, 11, 31)]
    for _ in range(2):
        for at in maps:
            right &= agree(attend(tensors, at), expected(tensors, at))
        # One that is gone at once, whose memory the next one has.
        attend(tensors, document(17))
        attend(tensors, document(23))
    return right


def of_another_tensor_at_the_same_address() -> bool:
    """One tensor object whose memory is exchanged, and then one with older versions."""
    tensors, at, right = inputs(), document(9), True
    for length in (9, 13, 40):
        at.data = document(length)
        gc.collect()
        right &= agree(attend(tensors, at), expected(tensors, at))
    return right


def of_a_backward_after_other_forwards() -> bool:
    """The first forward's gradients, with maps of others in between, of which some are gone."""
    tensors, right = inputs(grad=True), True
    maps = [document(n) for n in (6, 14, 33)]
    dout = torch.randn(1, ROWS, 1, DIM)
    wanted = [torch.autograd.grad(expected(tensors, at), tensors, dout) for at in maps]
    for _ in range(2):
        outs = []
        for at in maps:
            outs.append(attend(tensors, at.clone()))  # which the graph alone keeps alive
            gc.collect()
        attend(tensors, document(21))
        # Twice, as layers that share a map would.
        for out, want in (*zip(outs, wanted, strict=True), *zip(outs, wanted, strict=True)):
            grads = torch.autograd.grad(out, tensors, dout.half(), retain_graph=True)
            right &= all(
                torch.allclose(x.float(), y.float(), atol=2e-2, rtol=2e-2)
                for x, y in zip(grads, want, strict=True)
            )
            attend(tensors, document(25))
    return right


def of_a_buffer_of_compiled_code() -> bool:
    """The operators, as compiled code calls them: with a buffer that holds one map after another,
    and whose changes PyTorch does not count."""
    tensors, at, right = inputs(grad=True), document(9), True
    dout = torch.randn(1, ROWS, 1, DIM)
    shared = request.Shared(mask_mod=lambda b, h, i, j: at[i] == at[j], backend="emulator")
    for number in (9, 13, 40):
        at.data.copy_(document(number))
        assert at._version == 0
        asked = request.dense(*tensors, shared)
        out, _ = torch.ops.pyfa.forward(*asked.call, *asked.who)
        want = expected(tensors, at)
        right &= agree(out, want)
        grads = torch.autograd.grad(out, tensors, dout.half())
        for x, y in zip(grads, torch.autograd.grad(want, tensors, dout), strict=True):
            right &= torch.allclose(x.float(), y.float(), atol=2e-2, rtol=2e-2)
    return right


WAYS: dict[str, Callable[[], bool]] = {
    "freed": of_freed_tensors,
    "changed in place": of_values_changed_in_place,
    "in turn": of_tensors_that_take_turns,
    "memory exchanged": of_another_tensor_at_the_same_address,
    "backward": of_a_backward_after_other_forwards,
    "compiled": of_a_buffer_of_compiled_code,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_result_is_that_of_the_tensor_given(way: str) -> None:
    assert WAYS[way]()


def test_lists_of_what_is_gone_or_older_are_written_again(written: list[bool]) -> None:
    assert of_freed_tensors()
    assert written == [False, True, True, True, True, True]
    assert len(kept._entries) == 1
    written.clear()
    assert of_values_changed_in_place()
    # The first into what the last one above left.
    assert written == [True] * 4


def test_lists_of_what_is_alive_stay(written: list[bool]) -> None:
    tensors, maps = inputs(), [document(n) for n in (5, 11, 31)]
    first = [attend(tensors, at) for at in maps]
    assert written == [False] * 3
    for at, out in zip(maps, first, strict=True):
        assert torch.equal(attend(tensors, at), out)
    assert written == [False] * 3


def test_the_oldest_that_is_gone_is_written_again(written: list[bool]) -> None:
    """Each tensor is alive until after the next call, as one that is prepared ahead."""
    tensors, before = inputs(), None
    for step in range(6):
        at = document(7 + step)
        assert agree(attend(tensors, at), expected(tensors, at))
        before = at
    assert before is not None
    assert written == [False, False, True, True, True, True]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let bound calls ask for the stream, and whether it is captured."""
    real = kept.Bound.__init__

    def init(self: Any, *given: Any, **more: Any) -> None:
        real(self, *given, **more)
        self._index = 0

    monkeypatch.setattr(kept.Bound, "__init__", init)


def test_maps_of_a_step_that_are_alive_together(written: list[bool]) -> None:
    """Those of the next step write into what they leave, whatever else stays alive."""
    tensors, own = inputs(), document(1)
    attend(tensors, own)
    for step in range(4):
        written.clear()
        maps = [document(10 * step + n) for n in range(4)]
        for at in maps:
            assert agree(attend(tensors, at), expected(tensors, at))
        del at
    assert written == [True] * 4
    assert len(kept._entries) <= 6


def test_no_list_is_written_again_on_another_stream(
    monkeypatch: pytest.MonkeyPatch, written: list[bool]
) -> None:
    """Kernels of one stream may still read what another one would write."""
    stream = 1
    monkeypatch.setattr(kept._torch, "is_capturing", lambda: False)
    monkeypatch.setattr(kept._torch, "current_stream", lambda index: stream)
    on_a_gpu(monkeypatch)
    tensors = inputs()
    attend(tensors, document(3))
    written.clear()
    for number in (7, 12):
        attend(tensors, document(number))
    assert written == [True, True]
    written.clear()
    stream = 2
    for number in (19, 20):
        attend(tensors, document(number))
    assert written == [False, True]
    stream = 1  # what it had is gone since
    attend(tensors, document(14))
    assert written == [False, True, False]


def test_each_stream_has_lists_of_its_own(
    monkeypatch: pytest.MonkeyPatch, written: list[bool]
) -> None:
    """Of one tensor, too: what another stream makes may not be there yet."""
    stream = 1
    monkeypatch.setattr(kept._torch, "is_capturing", lambda: False)
    monkeypatch.setattr(kept._torch, "current_stream", lambda index: stream)
    on_a_gpu(monkeypatch)
    tensors, maps = inputs(), [document(n) for n in range(2)]
    for at in maps:
        attend(tensors, at)
    written.clear()
    for at in maps:
        attend(tensors, at)
    assert written == []
    stream = 2
    attend(tensors, maps[1])
    assert written == [False]
    # One of the first stream's is gone, and is older than the last.
    monkeypatch.setattr(kept, "_LOOKED_AT", 0)
    del maps[0], at
    alive = [document(n) for n in range(20, 26)]
    for at in alive:
        attend(tensors, at)
    assert written == [False] * 7


def test_what_is_written_again_depends_on_the_new_tensor() -> None:
    tensors = inputs()
    for number in range(4):
        at = document(number)
        attend(tensors, at)
    (entry,) = kept._entries.values()
    assert [each.number for each in entry.storages] == [kept._torch.storage_number(at)]
    assert not kept._torch.are_any_gone(entry.storages)
    del at
    assert kept._torch.are_any_gone(entry.storages)


def test_nothing_is_kept_or_written_again_in_a_graph(
    monkeypatch: pytest.MonkeyPatch, written: list[bool]
) -> None:
    capturing = False
    monkeypatch.setattr(kept._torch, "is_capturing", lambda: capturing)
    monkeypatch.setattr(kept._torch, "current_stream", lambda index: 1)
    on_a_gpu(monkeypatch)
    tensors, at = inputs(), document(7)
    attend(tensors, at)
    entries = dict(kept._entries)
    written.clear()
    capturing = True
    for given in (at, at, document(9)):
        assert agree(attend(tensors, given), expected(tensors, given))
    assert written == [False] * 3
    assert kept._entries == entries


def test_a_launch_that_fails_leaves_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs()
    attend(tensors, document(9))
    gc.collect()
    from pyfa.backends import BACKENDS

    runtime = BACKENDS["emulator"].runtime
    real, fails = type(runtime).run, [True]

    def run(self: Any, step: Any, *given: Any) -> None:
        if "block_lists" in step.plan.kernel and fails:
            fails.clear()
            raise RuntimeError("out of luck")
        real(self, step, *given)

    monkeypatch.setattr(type(runtime), "run", run)
    at = document(15)
    with pytest.raises(RuntimeError, match="luck"):
        attend(tensors, at)
    for _ in range(2):
        assert agree(attend(tensors, at), expected(tensors, at))
    assert kept._bytes == sum(entry.size for entry in kept._entries.values())


def test_what_is_dropped_while_it_is_written_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As another thread may drop it, for the cache's limits."""
    from pyfa.backends import BACKENDS

    tensors = inputs()
    attend(tensors, document(9))
    runtime = type(BACKENDS["emulator"].runtime)
    real, drops = runtime.run, True

    def run(self: Any, step: Any, *given: Any) -> None:
        if "block_lists" in step.plan.kernel and drops:
            kept.clear()
        real(self, step, *given)

    monkeypatch.setattr(runtime, "run", run)
    for number in (15, 16, 18, 17, 16, 15, 19, 20, 22, 21):
        drops = number < 19
        at = document(number)
        for _ in range(1 + number % 2):
            assert agree(attend(tensors, at), expected(tensors, at))
        del at
    assert kept._bytes == sum(entry.size for entry in kept._entries.values())


def test_threads_with_maps_of_their_own() -> None:
    tensors = inputs()
    attend(tensors, document(3))
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(12):
            at = document(5 + 7 * number + step)
            if not agree(attend(tensors, at), expected(tensors, at)):
                wrong.append(f"{number}: {step}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert kept._bytes == sum(entry.size for entry in kept._entries.values())


def test_what_is_dropped_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound call that made lists does not keep them beyond the cache's limits."""
    tensors, maps = inputs(), [document(n) for n in range(5, 13)]
    monkeypatch.setattr(kept, "_MOST", 3)
    for at in maps:
        attend(tensors, at)
    assert len(kept._entries) == 3
    kept.clear()
    gc.collect()
    held = [x for x in gc.get_objects() if isinstance(x, blocks.Lists)]
    assert held == []
    assert agree(attend(tensors, maps[0]), expected(tensors, maps[0]))


def test_lists_of_inexact_masks_depend_on_no_tensor(written: list[bool]) -> None:
    tensors = inputs()
    outs = []
    for length in (9, 13):
        at = document(length).float()
        out = pyfa.attention(
            *tensors, mask_mod=lambda b, h, i, j, at=at: at[i] * 0.3 == at[j] * 0.3,
            backend="emulator",
        )  # fmt: skip
        assert agree(out, expected(tensors, at))
        outs.append(out)
    assert len(kept._entries) == 1
    assert written == []


def test_eager_calls_keep_lists_beside_those_of_operators(written: list[bool]) -> None:
    assert of_a_buffer_of_compiled_code()
    tensors, at = inputs(), document(9)
    attend(tensors, at)
    written.clear()
    for _ in range(2):
        assert agree(attend(tensors, at), expected(tensors, at))
    assert written == []


# ---- planted faults ------------------------------------------------------------------------------


def _skips_the_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kept.Bound._other

    def skips(self: Any, *given: Any) -> Any:
        return self._last.made if self._last.made is not None else real(self, *given)

    monkeypatch.setattr(kept.Bound, "_other", skips)


def _without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unchanged(tuple):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, tuple) and self[0] == other[0]

        __hash__ = tuple.__hash__

    real = kept.Bound._other
    monkeypatch.setattr(
        kept.Bound, "_other",
        lambda self, tensors, stream, state: real(self, tensors, stream, Unchanged(state)),
    )  # fmt: skip


def _by_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept._torch, "storage_number", lambda x: 1)
    monkeypatch.setattr(kept._torch, "are_any_gone", lambda refs: False)


def _writes_what_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a tensor's lists is written again while a backward may ask for them, which
    finds them where they were."""
    known: dict[Any, Any] = {}
    real = kept.Bound._other

    def other(self: Any, tensors: Any, stream: int, state: Any) -> Any:
        place = (self._key, stream, *state)
        if place not in known:
            known[place] = real(self, tensors, stream, state)
        return known[place]

    def last(self: Any, stream: int) -> Any:
        return self._last if self._last.state is not None else None

    monkeypatch.setattr(kept.Bound, "_other", other)
    monkeypatch.setattr(kept.Bound, "_gone", last)


def _counts_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "is_uncounted", lambda: False)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a new tensor has the last one's lists": (_skips_the_rebuild, "freed"),
    "values changed in place have the older lists": (_without_versions, "changed in place"),
    "a storage is known by its address": (_by_address_alone, "freed"),
    "what is alive is written": (_writes_what_is_alive, "in turn"),
    "what a backward needs is written": (_writes_what_is_alive, "backward"),
    "compiled code's changes are taken for counted": (_counts_in_compiled_code, "compiled"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, way = FAULTS[fault]
    plant(monkeypatch)
    assert not WAYS[way]()
