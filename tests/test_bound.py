"""A call that comes again runs what was bound for it, which must not show."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import pyfa
from pyfa import _torch, binding, bound, dispatch, ops
from pyfa import request as requests
from pyfa.backends.base import OtherAlignment

pytestmark = pytest.mark.usefixtures("fresh_calls")


@pytest.fixture
def long_ways(calls_of: Callable[[Any, str], list[Any]]) -> list[Any]:
    """The calls that were checked and normalized, which repeated ones are not."""
    return calls_of(requests, "dense")


def inputs(requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 12, 2, 8, requires_grad=requires_grad) for _ in range(3)]


def kept() -> int:
    return sum(len(alike) for alike in binding.calls.known.values())


def results(**options: Any) -> tuple[torch.Tensor, ...]:
    """Output, LSE where asked for, and the gradients through both."""
    q, k, v = inputs()
    found = pyfa.attention(q, k, v, **options)
    outputs = found if isinstance(found, tuple) else (found,)
    loss = sum((x.square().sum() for x in outputs), torch.zeros(()))
    return (*outputs, *torch.autograd.grad(loss, (q, k, v)))


@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}, {"window": (3, 1)}])
def test_the_second_call_gives_what_the_first_gave(
    options: dict[str, Any], long_ways: list[Any]
) -> None:
    first = results(**options)
    for _ in range(2):
        for again, before in zip(results(**options), first, strict=True):
            assert torch.equal(again, before)
    assert kept() == len(long_ways) == 1


def test_with_and_without_gradients_are_two_calls() -> None:
    results(causal=True)
    with torch.no_grad():
        assert not pyfa.attention(*inputs(), causal=True).requires_grad
    results(causal=True)
    results(causal=True, deterministic=True)
    assert kept() == 3


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def watched_by_vmap(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.func.vmap(lambda x: pyfa.attention(x, k, v))(q[None])


def dual(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return pyfa.attention(forward_ad.make_dual(q.detach(), q.detach()), k, v)


def negative(x: torch.Tensor) -> torch.Tensor:
    found = torch.view_as_complex(torch.stack([x, -x], -1)).conj().imag
    assert found.is_neg()
    return found


def dense_again(x: torch.Tensor) -> torch.Tensor:
    """Another layout of the same shape."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "dtype": lambda q, k, v: pyfa.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()),
    "shape of v": lambda q, k, v: pyfa.attention(q, k, v[..., :4]),
    "heads": lambda q, k, v: pyfa.attention(q, k[:, :, :1], v[:, :, :1]),
    "stride of q": lambda q, k, v: pyfa.attention(dense_again(q), k, v),
    "stride of v": lambda q, k, v: pyfa.attention(q, k, dense_again(v)),
    "device": lambda q, k, v: pyfa.attention(q.to("meta"), k, v),
    "requires_grad": lambda q, k, v: pyfa.attention(q, k, v.detach().requires_grad_()),
    "subclass": lambda q, k, v: pyfa.attention(torch.nn.Parameter(q), k, v),
    "negative": lambda q, k, v: pyfa.attention(negative(q), k, v),
    "autocast": lambda q, k, v: under(torch.autocast("cpu", torch.bfloat16), q, k, v),
    "mode": lambda q, k, v: under(_Mode(), q, k, v),
    "context": lambda q, k, v: under(pyfa.use_backend("torch"), q, k, v),
    "inference mode": lambda q, k, v: under(torch.inference_mode(), q, k, v),
    "vmap": watched_by_vmap,
    "dual": dual,
    "no tensor": lambda q, k, v: pyfa.attention(q.numpy(), k, v),  # type: ignore[arg-type]
    "unhashable": lambda q, k, v: pyfa.attention(q, k, v, window=[2, 1]),  # type: ignore[arg-type]
    "option": lambda q, k, v: pyfa.attention(q, k, v, softcap=2.0),
    "unknown": lambda q, k, v: pyfa.attention(q, k, v, sofcap=2.0),
}


def under(context: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    with context:
        return pyfa.attention(q, k, v)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (TypeError, ValueError, NotImplementedError) as error:
        return type(error), str(error)


# Those whose ``Call`` is another one, or of other tensors.
OTHER_CALLS = {
    "dtype", "shape of v", "heads", "stride of q", "stride of v", "device", "requires_grad",
    "autocast", "mode", "context", "inference mode", "unhashable", "option",
}  # fmt: skip


def poison(*given: Any) -> Any:
    raise AssertionError("another call ran this one's")


def check_others(other: Callable[..., Any], expected: Any, q: Any, k: Any, v: Any) -> None:
    for _ in range(2):
        found = outcome(lambda: other(q, k, v))
        if isinstance(expected, torch.Tensor):
            assert found.requires_grad == expected.requires_grad
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        else:
            assert found == expected


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_differs_is_another_call(other: Callable[..., Any]) -> None:
    """Twice, with the entry of the first in place, and with what it would run poisoned."""
    q, k, v = inputs(requires_grad=False)
    expected = outcome(lambda: other(q, k, v))
    binding.calls.clear()
    bound.calls.clear()
    pyfa.attention(q, k, v)
    ((entry,),) = binding.calls.known.values()
    entry.run = poison
    bound.calls.clear()  # where some of the others are this very call, once they are checked
    check_others(other, expected, q, k, v)
    with pytest.raises(AssertionError, match="ran this one's"):
        pyfa.attention(q, k, v)


@pytest.mark.parametrize("name", sorted(OTHER_CALLS))
def test_what_differs_is_another_checked_call(name: str) -> None:
    """The same of the table behind the checks."""
    q, k, v = inputs(requires_grad=False)
    expected = outcome(lambda: OTHERS[name](q, k, v))
    binding.calls.clear()
    bound.calls.clear()
    pyfa.attention(q, k, v)
    ((entry,),) = bound.calls.known.values()
    entry.run = poison
    binding.calls.clear()
    check_others(OTHERS[name], expected, q, k, v)
    with pytest.raises(AssertionError, match="ran this one's"):
        pyfa.attention(q, k, v)


@pytest.mark.parametrize("context", [torch.no_grad, deterministic])
def test_modes_matter_where_a_gradient_is_required(context: Any, long_ways: list[Any]) -> None:
    q, k, v = inputs()
    pyfa.attention(q, k, v)
    with context():
        assert pyfa.attention(q, k, v).requires_grad == torch.is_grad_enabled()
    assert pyfa.attention(q, k, v).requires_grad
    assert len(long_ways) == 2
    plain = [x.detach() for x in (q, k, v)]
    pyfa.attention(*plain)
    with context():
        pyfa.attention(*plain)
    assert len(long_ways) == 3


def test_calls_that_take_turns_are_all_found_again(long_ways: list[Any]) -> None:
    """Modes, layouts, gradients, shapes, options: each goes the long way once."""
    q, k, v = inputs(requires_grad=False)
    calls: list[Callable[[], Any]] = [
        lambda: pyfa.attention(q, k, v),
        lambda: under(torch.inference_mode(), q, k, v),
        lambda: pyfa.attention(dense_again(q), k, v),
        lambda: pyfa.attention(q, k, v.detach().requires_grad_()),
        lambda: pyfa.attention(q[:, :7], k, v),
        lambda: pyfa.attention(q, k, v, causal=True),
    ]
    for _ in range(3):
        for call in calls:
            call()
    assert len(long_ways) == len(calls)


def test_a_tensor_that_comes_twice_is_found_again(long_ways: list[Any]) -> None:
    q, k, v = inputs(requires_grad=False)
    for _ in range(3):
        for tensors in ((q, k, v), (q, k, k), (q, q, q)):
            pyfa.attention(*tensors)
    assert len(long_ways) <= 2


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "_MOST", 5)
    q, k, v = inputs(requires_grad=False)
    for rows in range(1, 12):
        pyfa.attention(q[:, :rows], k, v)
    assert len(binding.calls.known) <= 5
    wide = torch.randn(2, 12, 2, 64)
    for start in range(20):
        pyfa.attention(wide[..., :8].as_strided((2, 12, 2, 8), (1536, 128, 40 + start, 1)), k, v)
    assert max(len(alike) for alike in binding.calls.known.values()) <= bound._MOST_ALIKE


def test_tensors_are_not_kept() -> None:
    tensors = inputs()
    torch.autograd.grad(pyfa.attention(*tensors).sum(), tensors)
    torch.autograd.grad(pyfa.attention(*tensors).sum(), tensors)
    gone = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_the_backward_runs_where_its_forward_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    prepare = dispatch.prepare

    def noted(call: Any, wanted: str, *rest: Any) -> Any:
        ran.append(wanted)
        return prepare(call, wanted, *rest)

    for module in (bound, ops):  # which ask for a forward and for a backward
        monkeypatch.setattr(module, "prepare", noted)
    for turn in range(2):
        q, k, v = inputs()
        with pyfa.use_backend("torch"):
            out = pyfa.attention(q, k, v)
        # Nobody is asked for a call that is bound, forward or backward.
        assert ran == ["torch"] * (2 if turn else 1)
        out.sum().backward()
        assert ran == ["torch"] * 2


def test_a_second_derivative_is_refused_again() -> None:
    results()
    q, k, v = inputs()
    (grad,) = torch.autograd.grad(pyfa.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_a_backend_binds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told whether the LSE is wanted; the first call and later ones run what it gives."""
    asked: list[bool] = []

    def bind(self: Any, plan: Any, call: Any, append: Any, with_lse: bool) -> Callable[..., Any]:
        asked.append(with_lse)
        return lambda q, k, v: [q * 0 + 1, q[..., 0].transpose(1, 2) * 0 + 2]

    monkeypatch.setattr(type(dispatch.BACKENDS["torch"]), "bind", bind)
    q, k, v = inputs(requires_grad=False)
    for _ in range(3):
        assert torch.equal(pyfa.attention(q, k, v), torch.ones_like(q))
    assert asked == [False]
    for _ in range(2):
        out, lse = pyfa.attention(q, k, v, return_lse=True)
        assert torch.equal(lse, torch.full((2, 2, 12), 2.0))
        assert torch.equal(out, torch.ones_like(q))
    assert asked == [False, True]
    for _ in range(2):
        pyfa.attention(q.requires_grad_(), k, v)
    assert asked == [False, True, True]


class Backwards:
    """What the torch backend was asked to bind, and how often what it gave was run."""

    def __init__(self) -> None:
        self.bound = self.ran = self.refused = 0


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> Backwards:
    """What the torch backend binds for aligned tensors refuses others, as kernels do."""
    noted = Backwards()
    backend = type(dispatch.BACKENDS["torch"])
    real = backend.bind_backward

    def on_16(tensors: Any) -> bool:
        return not any(x.data_ptr() % 16 for x in tensors if x is not None)

    def bind_backward(self: Any, plan: Any, saved: Any, bias_grad: bool) -> Any:
        noted.bound += 1
        found, aligned = real(self, plan, saved, bias_grad), on_16((saved.dout,))

        def run(*given: Any) -> Any:
            if on_16(given[:1]) is not aligned:
                noted.refused += 1
                raise OtherAlignment
            noted.ran += 1
            return found(*given)

        return run

    monkeypatch.setattr(backend, "bind_backward", bind_backward)
    return noted


def gradients(dout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> Any:
    out, lse = pyfa.attention(q, k, v, return_lse=True)
    given = dout(out)
    if isinstance(given, tuple):
        return torch.autograd.grad((out, lse), (q, k, v), given, **how)
    return torch.autograd.grad(out, (q, k, v), given, **how)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    ("dout", "how", "binds"),
    [
        (lambda out: torch.ones(()).expand(out.shape), {}, 1),
        (lambda out: dense_again(torch.ones_like(out)), {}, 1),
        (lambda out: misaligned(torch.ones_like(out)), {}, 1),
        # Nothing is kept for what is copied before it reaches a backend.
        (lambda out: negative(torch.ones_like(out)), {}, 3),
        (lambda out: (torch.ones_like(out), torch.zeros(2, 2, 12)), {}, 1),
        # By the operator: where a graph is asked for, its calls are other ones.
        (torch.ones_like, {"create_graph": True}, 1),
    ],
    ids=["expanded", "strided", "misaligned", "negative", "dlse", "graph"],
)
@pytest.mark.parametrize("plain_first", [False, True])
def test_backwards_of_another_kind(
    backwards: Backwards, dout: Any, how: dict[str, Any], binds: int, plain_first: bool
) -> None:
    """Each is bound once, whichever came first, and gives what it gives by itself."""
    tensors = inputs()
    expected = gradients(torch.ones_like, *tensors)
    assert (backwards.bound, backwards.ran) == (1, 1)
    if not plain_first:
        binding.calls.clear()
        bound.calls.clear()
    backwards.bound = backwards.ran = 0
    for _ in range(3):
        for x, y in zip(gradients(dout, *tensors, **how), expected, strict=True):
            torch.testing.assert_close(x, y)
    assert backwards.ran == 3
    assert backwards.bound <= binds
    for _ in range(2):
        for x, y in zip(gradients(torch.ones_like, *tensors), expected, strict=True):
            torch.testing.assert_close(x, y)
    assert backwards.ran == 5
    assert backwards.bound <= binds + (not plain_first)


def test_alignments_that_take_turns_are_all_found_again(backwards: Backwards) -> None:
    tensors = inputs()
    expected = gradients(torch.ones_like, *tensors)
    for _ in range(3):
        for dout in (torch.ones_like, lambda out: misaligned(torch.ones_like(out))):
            for x, y in zip(gradients(dout, *tensors), expected, strict=True):
                torch.testing.assert_close(x, y)
    assert backwards.bound == 2


def test_kinds_of_gradients_are_bounded(backwards: Backwards) -> None:
    tensors = inputs()
    expected = gradients(torch.ones_like, *tensors)
    widths = range(8, 20)
    for width in widths:
        for _ in range(2):
            found = gradients(
                lambda out, width=width: torch.ones(2, 12, 2, width)[..., :8], *tensors
            )
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y)
    ((entry,),) = binding.calls.known.values()
    assert [len(each) for each in entry.backwards.values()] == [ops._MOST_BACKWARDS, 0]
    # Those that are kept once, the others each time: contiguous was the first of them.
    kept_once = ops._MOST_BACKWARDS
    assert backwards.bound == kept_once + 2 * (len(widths) - kept_once)


def test_threads_share_what_is_found(long_ways: list[Any]) -> None:
    tensors = [[x * n for x in inputs(requires_grad=False)] for n in range(1, 5)]
    expected = [pyfa.attention(*each) for each in tensors]
    failures: list[int] = []

    def work(mine: int) -> None:
        q, k, v = tensors[mine]
        for _ in range(100):
            if not torch.equal(pyfa.attention(q, k, v), expected[mine]):
                failures.append(mine)

    threads = [threading.Thread(target=work, args=(n % 4,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(long_ways) == 1


def test_guards_that_are_made_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are PyTorch's own, and not public."""
    monkeypatch.setattr(_torch, "TensorGuards", lambda *tensors: None)
    q, k, v = (x.detach() for x in inputs())
    assert bound.guard((q, k, v), {}) is None
    fitting = bound.Fitting((q, k, v), {})
    for _ in range(3):
        assert fitting.fits(q + 1, k, v)
        assert not fitting.fits(q[:1], k, v)
        assert not fitting.fits(q.double(), k, v)


def test_two_ways_to_ask_for_one_call_are_both_found_again(long_ways: list[Any]) -> None:
    """The numbers may be of other types: None and the default, 1 and 1.0."""
    tensors = inputs(requires_grad=False)
    ways: list[dict[str, Any]] = [{}, {"scale": 8**-0.5}, {"softcap": 0}, {"window": (None, None)}]
    expected = pyfa.attention(*tensors)
    for _ in range(3):
        for options in ways:
            torch.testing.assert_close(pyfa.attention(*tensors, **options), expected)
    assert len(long_ways) == len(ways)


def test_an_aligned_bias_does_not_stay_with_a_misaligned_one(long_ways: list[Any]) -> None:
    """What is bound for a misaligned bias may be slower, and would also run an aligned one."""
    q, k, v = inputs(False)
    bias = torch.randn(2, 2, 12, 12)
    first = pyfa.attention(q, k, v, bias=misaligned(bias))
    for aligned in (True, False, False, True, True):
        out = pyfa.attention(q, k, v, bias=bias if aligned else misaligned(bias))
        assert torch.equal(out, first)
        if aligned:
            (slot,) = binding.calls._slots.values()
            assert slot.bound.aligned[1]
    assert kept() == len(long_ways) == 2
