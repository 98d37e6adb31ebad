"""Compulsory bytes of attention, for any algorithm: each input read once, each output written
once."""

from __future__ import annotations

from .shape import Shape

FLOAT_BYTES = 4  # of LSE, delta and partial results
FORWARD_READS, FORWARD_WRITES = ("q", "k", "v"), ("out", "lse")
BACKWARD_READS = ("q", "k", "v", "out", "dout", "lse")
BACKWARD_WRITES = ("dq", "dk", "dv")


def tensor_bytes(shape: Shape) -> dict[str, int]:
    """Return the bytes of every tensor of forward and backward, by name; ``s`` is one matrix of all
    scores."""
    rows = shape.batch * shape.seqlen_q * shape.heads_q
    keys = shape.batch * shape.seqlen_k * shape.heads_k
    q, out = rows * shape.head_dim * shape.itemsize, rows * shape.head_dim_v * shape.itemsize
    k, v = keys * shape.head_dim * shape.itemsize, keys * shape.head_dim_v * shape.itemsize
    if shape.latent:
        v = 0  # it comes with k
    scores = shape.lines * shape.seqlen_q * shape.seqlen_k * shape.itemsize
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
