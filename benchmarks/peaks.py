"""Compute the peak memory by ``pyfa plan``, without the caller's tensors."""

from __future__ import annotations

from pyfa import cli
from pyfa.cli import problem
from pyfa.traffic import tensor_bytes

WAYS = {"naive": "standard", "pyfa": "tiled"}


def beyond_inputs(
    side: str,
    kind: str,
    seqlen: int,
    heads: int,
    head_dim: int,
    causal: bool,
    dtype: str = "bfloat16",
    device: str | None = None,
) -> int:
    """Peak bytes beyond q, k, v and, in training, dO, of one sequence.

    By the kernels of the backend that runs, here or on a named device: whether dQ adds up in
    float32 is theirs to say.
    """
    training = kind == "training"
    arguments = [
        "plan", "--seqlen", str(seqlen), "--heads", str(heads), "--head-dim", str(head_dim),
        "--dtype", dtype, *(["--causal"] if causal else []),
        *(["--features", "backward"] if training else []),
        *(["--device", device] if device else []),
    ]  # fmt: skip
    _, found, _ = problem.modeled(cli.parser().parse_args(arguments))
    given = ("q", "k", "v", *(("dout",) if training else ()))
    sizes = tensor_bytes(found.shape)
    return found.peak_bytes[WAYS[side], kind] - sum(sizes[name] for name in given)
