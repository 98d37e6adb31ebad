"""Bytes of attention's tensors: the compulsory traffic of any algorithm, in which each input is
read once and each output written once, and the peak memory of standard and of tiled attention."""

from __future__ import annotations

from ..shape import Shape

FLOAT_BYTES = 4  # of LSE, delta and partial results
FORWARD_READS, FORWARD_WRITES = ("q", "k", "v"), ("out", "lse")
BACKWARD_READS = ("q", "k", "v", "out", "dout", "lse")
BACKWARD_WRITES = ("dq", "dk", "dv")
_INPUTS, _GRADIENTS = ("q", "k", "v", "out"), ("dout", "dq", "dk", "dv")


def tensor_bytes(shape: Shape) -> dict[str, int]:
    """Return the bytes of every tensor of forward and backward, by name; ``s`` is one matrix of all
    scores."""
    rows = shape.batch * shape.seqlen_q * shape.heads_q
    keys = shape.batch * shape.seqlen_k * shape.heads_k
    q, out = rows * shape.head_dim * shape.itemsize, rows * shape.head_dim_v * shape.itemsize
    k, v = keys * shape.head_dim * shape.itemsize, keys * shape.head_dim_v * shape.itemsize
    if shape.latent:
        v = 0  # it comes with k
    scores = shape.batch_heads * shape.seqlen_q * shape.seqlen_k * shape.itemsize
    state = rows * FLOAT_BYTES
    return {
        "q": q, "k": k, "v": v, "out": out, "lse": state, "delta": state,
        "dout": out, "dq": q, "dk": k, "dv": v, "s": scores,
        "dq_sum": rows * shape.head_dim * FLOAT_BYTES,
    }  # fmt: skip


def read_once(shape: Shape) -> dict[str, int]:
    """Return ``tensor_bytes`` with only the keys and values that some query sees."""
    sizes = tensor_bytes(shape)
    begin, end = shape.keys_seen(0, shape.seqlen_q - 1) if shape.seqlen_q else (0, 0)
    for name in ("k", "v"):
        sizes[name] = sizes[name] // max(1, shape.seqlen_k) * (end - begin)
    return sizes


def compulsory_bytes(shape: Shape, backward: bool = False) -> int:
    """Return the compulsory bytes of a forward with its LSE, or of a backward. Compare with ncu's
    ``dram__bytes.sum``.

    A 16-bit forward with N queries and keys of one head moves 8·N·d bytes and 4·N of LSE: 4.2 MB
    for N = 4096, d = 128. A key that is masked for every query is not counted.
    """
    reads = BACKWARD_READS if backward else FORWARD_READS
    writes = BACKWARD_WRITES if backward else FORWARD_WRITES
    once, sizes = read_once(shape), tensor_bytes(shape)
    return sum(once[name] for name in reads) + sum(sizes[name] for name in writes)


def splits_bytes(shape: Shape, splits: int) -> int:
    """Return the bytes of the partial results of a forward with ``splits``, as allocated."""
    rows = shape.batch_heads * shape.seqlen_q
    return rows * splits * (shape.head_dim_v + 1) * FLOAT_BYTES if splits > 1 else 0


def standard_bytes(shape: Shape, training: bool = False) -> int:
    """Return the peak bytes of eager attention, without the mask's own matrix.

    Forward: S and P exist at the same time. Training: autograd keeps P; while dS is computed, P, dP
    and dS exist, in addition to inputs, output and gradients.
    """
    sizes = tensor_bytes(shape)
    if training:
        return _sum(sizes, *_INPUTS, *_GRADIENTS) + 3 * sizes["s"]
    return _sum(sizes, *_INPUTS) + 2 * sizes["s"]


def tiled_bytes(shape: Shape, training: bool = False, splits: int = 1, sums: bool = False) -> int:
    """Return the peak bytes of kernels that keep S on chip: inputs, output, LSE, and partial
    results of split keys.

    Training adds the gradients, two floats per row that backward keeps (delta, and the LSE in base
    2) and, with ``sums``, dQ in float32.
    """
    sizes = tensor_bytes(shape)
    forward = _sum(sizes, *_INPUTS, "lse") + splits_bytes(shape, splits)
    if not training:
        return forward
    kept = 2 * sizes["delta"] + (sizes["dq_sum"] if sums else 0)
    return max(forward, _sum(sizes, *_INPUTS, *_GRADIENTS, "lse") + kept)


def _sum(sizes: dict[str, int], *names: str) -> int:
    return sum(sizes[name] for name in names)
