"""The public functions: they check arguments, compare them between ranks, exchange rows for heads,
and run the ring."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import request as requests
from .. import validate
from ..request import Backends, Request, Shared
from ..validate import Window
from .heads import to_heads, to_rows
from .pieces import check, mask_of
from .ring import Job, RingAttention
from .shards import Lengths, Place, Sharding, check_rows, lengths_of, place
from .transfer import agree

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    sharding: Sharding = "zigzag",
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_k: Lengths | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Backends = None,
    **unknown: object,
) -> Result:
    """Compute exact attention of a sequence that is split over several ranks.

    Each rank passes its own rows of q (B, S, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv), as
    ``shard`` returns them. Returns this rank's rows of out (B, S, H, Dv) in q's dtype and, with
    ``return_lse``, of the LSE (B, H, S), float32. q, k and v are float16, bfloat16 or float32, and
    receive gradients. The number of ranks changes results only by rounding. It does not change the
    positions that dropout drops.

    Parameters
    ----------
    group, mesh
        A process group, or a ``DeviceMesh`` of one or two dimensions: ``DeviceMesh("cuda", ranks,
        mesh_dim_names=("ring", "heads"))``. The ring runs along the first dimension; ranks along
        the second divide the heads among themselves, as in ``ulysses_attention``. Put nodes along
        the first dimension and the GPUs of a node along the second.
    sharding
        "zigzag": the sequence is cut into 2·ranks chunks, and rank r holds chunks r and 2·ranks − 1
        − r, which balances the work of a causal mask. "contiguous": each rank holds one chunk.
    seqlen_q, seqlen_k
        The full lengths, if they differ from this rank's rows times the number of ranks.
    cu_seqlens_q, cu_seqlens_k
        The offsets (batch + 1,) of the whole packed batch. q, k and v are then (rows, H, D), each
        sequence is cut separately, and the LSE is (H, rows). The host reads the offsets, so pass a
        list or a CPU tensor. ``cu_seqlens_k`` is ``cu_seqlens_q`` by default.
    sinks
        (H,), the same on every rank. Each rank gets the part of the gradient that comes from its
        own rows. Sum it over the ranks, like the gradient of any parameter.
    seed
        Must be the same on all ranks. With None, the first rank draws a seed and sends it to the
        others.

    Notes
    -----
    The other arguments are as in ``pyfa.attention`` and must be the same on all ranks. ``bias``,
    ``score_mod``, ``mask_mod``, ``attention_chunk``, window bounds below −1, ``pyfa.Edge(-1)`` and
    float8 are not supported.

    A wrong argument raises a ``ValueError`` or ``TypeError`` that names it. If ranks pass different
    arguments, every rank raises ``ValueError`` before any data is sent. If no backend can run the
    attention of this rank's queries over one part of the keys, ``UnsupportedProblem`` is raised. If
    another rank died or did not answer within the group's timeout, ``RankError`` is raised (with
    NCCL only if ``TORCH_NCCL_BLOCKING_WAIT=1``).

    Sources: Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889. Zigzag:
    Llama 3, arXiv:2407.21783. A mesh of two dimensions: Fang and Zhao 2024, USP, arXiv:2405.07719.
    """
    if unknown:
        known = inspect.signature(ring_attention).parameters
        validate.refuse_unknown("ring_attention", unknown, known)
    where = place("ring_attention", group, mesh, sharding)
    shared = Shared(
        causal, window, scale, softcap, None, alibi_slopes, sinks, dropout_p, seed, None, None,
        deterministic, return_lse, backend,
    )  # fmt: skip
    seqlens, offsets = (seqlen_q, seqlen_k), (cu_seqlens_q, cu_seqlens_k)
    return _attention(where, q, k, v, shared, seqlens, offsets)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_k: Lengths | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Backends = None,
    **unknown: object,
) -> Result:
    """Compute attention like ``ring_attention``, but with all-to-all communication: each rank
    computes some heads of the whole sequence.

    Arguments, results and errors are those of ``ring_attention``, except that there is no
    ``sharding`` and ``mesh`` has one dimension. Split rows with ``shard(...,
    sharding="contiguous")``. A packed batch is split as one sequence: do not pass its offsets to
    ``shard``. H must be a multiple of the number of ranks. Hk must be a multiple or a divisor of
    it; with fewer KV heads than ranks, several ranks get the same KV head.

    Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509.
    """
    if unknown:
        known = inspect.signature(ulysses_attention).parameters
        validate.refuse_unknown("ulysses_attention", unknown, known)
    where = place("ulysses_attention", group, mesh, "contiguous")
    if where.heads.group is not None:
        validate.wrong("mesh", "one dimension", "2 dimensions, which are for ring_attention")
    where = Place(where.heads, where.ring, False)
    shared = Shared(
        causal, window, scale, softcap, None, alibi_slopes, sinks, dropout_p, seed, None, None,
        deterministic, return_lse, backend,
    )  # fmt: skip
    seqlens, offsets = (seqlen_q, seqlen_k), (cu_seqlens_q, cu_seqlens_k)
    return _attention(where, q, k, v, shared, seqlens, offsets)


class _Asked(NamedTuple):
    """A call with valid arguments, and the lengths of the whole sequences."""

    request: Request
    packed: bool
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    arguments: dict[str, object]  # in which all ranks must agree


def _attention(
    where: Place,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shared: Shared,
    seqlens: tuple[int | None, int | None],
    offsets: tuple[Lengths | None, Lengths | None],
) -> Result:
    rings = (where.heads, where.ring)
    with _current(q):
        try:
            asked = _asked(where, q, k, v, shared, seqlens, offsets)
        except (TypeError, ValueError) as error:
            agree(rings, {}, error)
            raise
        agree(rings, asked.arguments)
    call, heads = asked.request.call, where.heads
    queries, keys = (where.layout(each) for each in (asked.lengths_q, asked.lengths_k))
    q, k, v = (x.resolve_neg() for x in call[:3])  # kernels go by addresses
    slopes, sinks = call.alibi_slopes, call.sinks
    each = q.shape[-2] // heads.size
    begin, end = each * heads.rank, each * (heads.rank + 1)
    rows_q, rows_k = (each.rows(where.ring.rank) for each in (queries, keys))
    if heads.size > 1:
        copies = max(1, heads.size // k.shape[-2])
        if copies > 1:
            k, v = (x.repeat_interleave(copies, -2) for x in (k, v))
        q = to_heads(q, heads, rows_q)
        k, v = (to_heads(x, heads, rows_k) for x in (k, v))
        slopes = None if slopes is None else slopes[..., begin:end]
        sinks = None if sinks is None else sinks[begin:end]
    seed = call.seed
    if seed is not None and shared.seed is None:
        for ring in rings:
            if ring.size > 1:
                with ring.step("the seed"):
                    dist.broadcast(seed, ring.known_as(0), ring.group)
    # The job that autograd keeps holds no tensor that autograd should save, or free, itself.
    nothing = q.new_empty(0)
    call = call._replace(
        q=nothing, k=nothing, v=nothing, alibi_slopes=slopes, sinks=None, seed=seed,
        head_start=begin,
    )  # fmt: skip
    job = Job(where.ring, queries, keys, asked.packed, call, *asked.request[1:3])
    out, lse = RingAttention.apply(q, k, v, sinks, job)  # type: ignore[no-untyped-call]
    if heads.size > 1:
        out = to_rows(out, heads, rows_q)
        if call.return_lse:
            lse = to_rows(lse.transpose(-1, -2)[..., None], heads, rows_q)
            lse = lse[..., 0].transpose(-1, -2)
    return (out, lse) if call.return_lse else out


def _current(q: object) -> AbstractContextManager[object]:
    """Make q's GPU the current one in the block; ranks compare their arguments on it."""
    if isinstance(q, torch.Tensor) and q.is_cuda:
        return torch.cuda.device(q.device)
    return nullcontext()


def _asked(
    where: Place,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shared: Shared,
    seqlens: tuple[int | None, int | None],
    offsets: tuple[Lengths | None, Lengths | None],
) -> _Asked:
    validate.a_tensor("q", q)
    packed = offsets[0] is not None
    if offsets[0] is not None:
        of_q = lengths_of("cu_seqlens_q", offsets[0])
        of_k = of_q if offsets[1] is None else lengths_of("cu_seqlens_k", offsets[1])
        if len(of_k) != len(of_q):
            validate.wrong("cu_seqlens_k", f"{len(of_q)} sequences, as cu_seqlens_q", len(of_k))
        for side, length in zip("qk", seqlens, strict=True):
            if length is not None:
                validate.wrong(f"seqlen_{side}", "None with cu_seqlens_q", length)
        # The blocks bring offsets of their own.
        none = torch.zeros(len(of_q) + 1, dtype=torch.int32, device=q.device)
        request = requests.varlen(q, k, v, shared, none, none, max(of_q, default=0), 0)
        request = request._replace(call=request.call._replace(cu_seqlens_q=None, cu_seqlens_k=None))
    else:
        if offsets[1] is not None:
            validate.wrong("cu_seqlens_q", "offsets (batch + 1,), as cu_seqlens_k", None)
        request = requests.dense(q, k, v, shared)
        of_q, of_k = (
            (x.shape[1] * where.ranks() if n is None else validate.length(f"seqlen_{side}", n),)
            for side, n, x in zip("qk", seqlens, (q, k), strict=True)
        )
    call = request.call
    if call.window_shift:
        raise NotImplementedError("window: a negative bound, in attention over several ranks")
    q, k, v = call[:3]
    for name, x in (("q", q), ("k", k)):
        if x.itemsize == 1:
            validate.wrong(name, "float16, bfloat16 or float32", x)
    check_rows("q", q.shape[-3], where, of_q)
    check_rows("k", k.shape[-3], where, of_k)
    ranks, heads_k = where.heads.size, k.shape[-2]
    if q.shape[-2] % ranks:
        validate.wrong(
            "q",
            f"a number of heads that is a multiple of {ranks}, the number of ranks",
            q.shape[-2],
        )
    if heads_k % ranks and ranks % heads_k:
        validate.wrong(
            "k", f"a number of heads that is a multiple or a divisor of {ranks}", heads_k
        )
    check(where.layout(of_q), where.layout(of_k), mask_of(call), packed)
    arguments: dict[str, object] = {
        "the function": where.ring.name,
        "mesh": (where.ring.size, ranks),
        "sharding": where.zigzag,
        "q": _kind(q),
        "k": _kind(k),
        "v": _kind(v),
        "cu_seqlens_q" if packed else "seqlen_q": of_q,
        "cu_seqlens_k" if packed else "seqlen_k": of_k,
        "window": (call.window_left, call.window_right),
        "scale": call.scale,
        "softcap": call.softcap,
        "alibi_slopes": None if call.alibi_slopes is None else tuple(call.alibi_slopes.shape),
        "sinks": call.sinks is not None,
        "dropout_p": call.dropout_p,
        "seed": call.dropout_p > 0.0 and shared.seed is not None,
        "requires_grad": request.needs_grad,
        "return_lse": call.return_lse,
    }
    return _Asked(request, packed, of_q, of_k, arguments)


def _kind(x: torch.Tensor) -> str:
    """Return the properties of a tensor that are the same on all ranks."""
    batch = "" if x.dim() == 3 else f"{x.shape[0]}, "
    return f"({batch}rows, {x.shape[-2]}, {x.shape[-1]}) {x.dtype}"
