"""What workers run: attention on a rank's own terms."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import workers
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import pyfa
from pyfa.distributed import local_positions, ring_attention, shard, ulysses_attention, unshard

FUNCTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}
SENDING = ("batch_isend_irecv", "all_to_all_single", "broadcast")


def tensors(rows: int = 16, heads: int = 6, dim: int = 8, **options: Any) -> list[torch.Tensor]:
    """This rank's q, k and v."""
    return [torch.randn(2, rows, heads, dim, **options) for _ in "qkv"]


def differing(
    size: int, rank: int, changed: dict[str, Any], options: dict[str, Any], dim: int
) -> tuple[str, str, int]:
    """An error's kind and words, and how much was sent, where ``rank`` has something ``changed``.

    ``dim``: a head_dim that no other test has, or the ranks would know these arguments.
    """
    group = workers.group(size)
    options = {"rows": 16, "heads": 6, "kind": "ring", **options}
    if dist.get_rank() == rank:
        options |= changed
    made = {name: options.pop(name) for name in ("rows", "heads", "dtype") if name in options}
    made["requires_grad"] = options.pop("requires_grad", False)
    q, k, v = tensors(**made, dim=dim)
    return _told(FUNCTIONS[options.pop("kind")], q, k, v, group=group, **options)


def refused(size: int) -> tuple[str, str, int]:
    """The same for dropout under a mask whose corner no block has."""
    q, (k, v, _) = tensors(24)[0], tensors(16)
    group = workers.group(size)
    return _told(ring_attention, q, k, v, group=group, causal=True, dropout_p=0.5, seed=1)


def of_float8(size: int) -> tuple[str, str, int]:
    """The same for 16-bit queries over keys in float8."""
    q, k, v = (x.half() for x in tensors(16))
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    return _told(ring_attention, q, k, v, group=workers.group(size))


def _told(function: Any, *args: Any, **options: Any) -> tuple[str, str, int]:
    sent: list[str] = []
    originals = {name: getattr(dist, name) for name in SENDING}
    for name, original in originals.items():
        setattr(dist, name, _noting(sent, original))
    try:
        function(*args, **options)
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error), len(sent)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return "", "", len(sent)


def _noting(sent: list[str], original: Any) -> Any:
    def noted(*args: Any, **options: Any) -> Any:
        sent.append(original.__name__)
        return original(*args, **options)

    return noted


def elements_received(size: int, options: dict[str, Any]) -> int:
    """How many elements of keys and values this rank receives in a forward."""
    counts, original = [], dist.irecv

    def noted(x: torch.Tensor, *args: Any, **others: Any) -> Any:
        counts.append(x.numel())
        return original(x, *args, **others)

    # P2POp goes by the function's identity.
    before = dist.distributed_c10d._check_op
    dist.distributed_c10d._check_op = lambda op: None
    dist.irecv = noted
    try:
        ring_attention(*tensors(), group=workers.group(size), **options)
    finally:
        dist.irecv, dist.distributed_c10d._check_op = original, before
    return sum(counts)


def attend(size: int, options: dict[str, Any], backward: bool = True, kind: str = "ring") -> bytes:
    """The bits of out and gradients of one call."""
    torch.manual_seed(dist.get_rank())
    q, k, v = tensors(dtype=torch.bfloat16, requires_grad=True)
    out = FUNCTIONS[kind](q, k, v, group=workers.group(size), **options)
    if not backward:
        time.sleep(3600)
    out.sum().backward()
    results = (out.detach(), q.grad, k.grad, v.grad)
    return b"".join(x.view(torch.int16).numpy().tobytes() for x in results if x is not None)


def times_asked(size: int) -> list[int]:
    """How often ranks compare their arguments in some calls, of a group and of a mesh."""
    import whole

    found = []
    mesh = whole.mesh(2, 2)
    for how in ({"group": workers.group(size)}, {"mesh": mesh}):
        # A head_dim that no other test has.
        first, second = tensors(dim=50, heads=4), tensors(dim=51, heads=4)
        asked: list[str] = []
        original = dist.all_gather_object
        dist.all_gather_object = _noting(asked, original)
        try:
            for qkv in (first, second, first, second, first):
                ring_attention(*qkv, causal=True, **how)
        finally:
            dist.all_gather_object = original
        found.append(len(asked))
    return found


def outside(size: int) -> str:
    """What a rank is told that does not belong to the group or mesh."""
    import whole

    said = []
    for how in ({"group": workers.group(size)}, {"mesh": whole.mesh(1, size)}):
        try:
            ring_attention(*tensors(), **how)
        except ValueError as error:
            said.append(str(error).split(";")[0])
    return " and ".join(said)


def hang() -> None:
    time.sleep(3600)


def drawn_seed(size: int) -> float:
    """How far a call without a seed is from one process with the seed that rank 0 draws."""
    group = workers.group(size)
    torch.manual_seed(7)
    whole = tensors(16 * size)
    local = [shard(x, group=group) for x in whole]
    torch.manual_seed(dist.get_rank())
    out = ring_attention(*local, group=group, dropout_p=0.5)
    torch.manual_seed(0)
    expected = pyfa.attention(*whole, dropout_p=0.5)
    return float((out - shard(expected, group=group)).abs().max())


def modes(size: int) -> dict[str, float]:
    """How far ways to call it are from the plain one."""
    group = workers.group(size)
    torch.manual_seed(dist.get_rank())
    q, k, v = (x.requires_grad_() for x in tensors())
    out = ring_attention(q, k, v, group=group, causal=True)
    plain = torch.autograd.grad(out.square().sum(), (q, k, v))
    with torch.no_grad():
        found = {"no_grad": ring_attention(q, k, v, group=group, causal=True)}

    def run(*qkv: torch.Tensor) -> torch.Tensor:
        return ring_attention(*qkv, group=group, causal=True)

    again = checkpoint(run, q, k, v, use_reentrant=False)
    grads = torch.autograd.grad(again.square().sum(), (q, k, v))
    errors = {name: float((x - out).abs().max()) for name, x in found.items()}
    for name, one, other in zip("qkv", grads, plain, strict=True):
        errors[f"checkpointed d{name}"] = float((one - other).abs().max())
    with torch.autocast("cpu", torch.bfloat16):
        halved = ring_attention(q, k, v, group=group, causal=True)
    errors["autocast"] = 0.0 if halved.dtype == torch.bfloat16 else 1.0
    return errors


def compiled(size: int) -> float:
    """How far ``torch.compile`` is from the plain call before it."""
    group = workers.group(size)
    torch.manual_seed(dist.get_rank())
    q, k, v = (x.requires_grad_() for x in tensors())

    def run(*qkv: torch.Tensor) -> torch.Tensor:
        return ring_attention(*qkv, group=group, causal=True)

    plain = run(q, k, v)
    torch.compiler.reset()  # what was compiled for another number of ranks
    return float((torch.compile(run, backend="eager")(q, k, v) - plain).abs().max())


def there_and_back(size: int, sharding: str, length: int, packed: bool) -> tuple[bool, ...]:
    """unshard(shard(x)) is x, positions are those of the rows, in any dimension."""
    group = workers.group(size)
    how = {"group": group, "sharding": sharding}
    x = torch.arange(3 * length * 2).reshape(3, length, 2)
    lengths = {"cu_seqlens": [0, length // 3, length]} if packed else {}
    part = shard(x, **how, **lengths)
    whole = {} if packed else {"seqlen": length}
    back = unshard(part, **how, **whole, **lengths)
    first = shard(x[0], dim=0, **how, **lengths)
    counted = torch.arange(length)
    if packed:
        counted[length // 3 :] -= length // 3
    positions = local_positions(length, **how, **lengths)
    return (
        torch.equal(back, x),
        torch.equal(first, part[0]),
        torch.equal(positions, shard(counted, dim=0, **how, **lengths)),
    )


def in_context_parallel(size: int) -> float:
    """How far out is from one process' where PyTorch's context parallel cuts the buffers."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    torch.manual_seed(0)
    mesh = DeviceMesh("cpu", list(range(size)))
    buffers = tensors(16 * size)
    expected = pyfa.attention(*buffers, causal=True)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        out = ring_attention(*buffers, mesh=mesh, causal=True)
    (whole,) = context_parallel_unshard(mesh, [out], [1])
    return float((whole - expected).abs().max())
