"""Blocks of one problem against the reference of the whole, by the conformance rule.

python block_cases.py BACKEND
"""

from __future__ import annotations

import json
import sys

import torch

from pyfa import reference
from pyfa.conformance.inputs import near_normal, score_sizes
from pyfa.conformance.tolerances import judge, judge_lse
from pyfa.dispatch import prepare
from pyfa.problem import Call

BATCH, HEADS, HEADS_K, LENGTH, DIM = 2, 4, 2, 96, 32
# The block: of the second sequence the last two heads, rows and keys that lie beside each other.
ROWS, KEYS, SEQUENCE, HEAD = (48, 80), (32, 64), 1, 2
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
CASES: dict[str, dict[str, object]] = {
    "causal": {"window_right": 0},
    "window": {"window_left": 25, "window_right": 0},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi, window": {"alibi_slopes": SLOPES, "window_left": 20, "window_right": 3},
    "dropout": {"dropout_p": 0.3},
    "dropout, all": {
        "dropout_p": 0.3, "alibi_slopes": SLOPES, "window_left": 40, "window_right": 9,
    },
}  # fmt: skip


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dout of the whole."""
    heads = {"q": HEADS, "k": HEADS_K, "v": HEADS_K, "dout": HEADS}
    shapes = {name: (BATCH, LENGTH, n, DIM) for name, n in heads.items()}
    return [near_normal(f"block/{name}", shape).to(dtype) for name, shape in shapes.items()]


def sliced(x: torch.Tensor, rows: tuple[int, int], head: int) -> torch.Tensor:
    return x[SEQUENCE : SEQUENCE + 1, slice(*rows), head:]


def failures(backend: str) -> list[str]:
    """What is wrong with the blocks of ``backend``."""
    found = []
    for dtype in (torch.float32, torch.bfloat16) if backend != "emulator" else (torch.bfloat16,):
        q, k, v, dout = tensors(dtype)
        seed = torch.tensor([1234567890123])
        for name, terms in CASES.items():
            terms = terms | ({"seed": seed} if "dropout_p" in terms else {})
            lengths = {"max_seqlen_q": LENGTH, "max_seqlen_k": LENGTH}
            whole = Call(q, k, v, scale=DIM**-0.5, **lengths, **terms)
            # The block's keys alone, in the whole: all others are hidden.
            block = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)
            block[..., slice(*ROWS), slice(*KEYS)] = True
            whole = whole._replace(bias=block)
            found += [f"{name} {dtype}: {each}" for each in _wrong(backend, whole, dout, terms)]
    return found


def _wrong(backend: str, whole: Call, dout: torch.Tensor, terms: dict[str, object]) -> list[str]:
    """The messages of one case; ``whole`` hides all but the block."""
    refs = reference.gradients(whole, dout)
    naives = reference.gradients(whole, dout, dtype=whole.q.dtype)
    slopes = whole.alibi_slopes
    call = whole._replace(
        q=sliced(whole.q, ROWS, HEAD),
        k=sliced(whole.k, KEYS, HEAD // 2),
        v=sliced(whole.v, KEYS, HEAD // 2),
        bias=None,
        alibi_slopes=None if slopes is None else slopes[HEAD:],
        max_seqlen_q=ROWS[1] - ROWS[0],
        max_seqlen_k=KEYS[1] - KEYS[0],
        q_start=ROWS[0],
        k_start=KEYS[0],
        head_start=HEAD,
        batch_start=SEQUENCE,
    )
    # What is ready for the same shapes at another place is not for this block.
    prepare(call._replace(q_start=0, k_start=0), backend, True, False)
    prepared = prepare(call, backend, True, False)
    out, lse = prepared.forward(call)
    grads = prepared.backward(call, out, lse, sliced(dout, ROWS, HEAD).contiguous())
    lse_ref = refs["lse"][SEQUENCE : SEQUENCE + 1, HEAD:, slice(*ROWS)]
    largest = float(lse_ref[lse_ref.isfinite()].abs().max())
    parts = list(zip(whole.q, whole.k, whole.v, strict=True))
    checks = [judge_lse(lse, lse_ref, call.q, *score_sizes(parts, whole))]
    for name, x, rows, head in (
        ("out", out, ROWS, HEAD),
        ("dq", grads.dq, ROWS, HEAD),
        ("dk", grads.dk, KEYS, HEAD // 2),
        ("dv", grads.dv, KEYS, HEAD // 2),
    ):
        ref, naive = (sliced(results[name], rows, head) for results in (refs, naives))
        gradient = name != "out"
        check = judge(name, x, ref, naive, gradient=gradient, largest_lse=largest)
        checks.append(check)
    spec_out, _ = reference.attention(call)
    checks.append(judge("out", spec_out.to(out.dtype), sliced(refs["out"], ROWS, HEAD), spec_out))
    return [check.message for check in checks if not check.passed]


def merge_failures() -> list[str]:
    """Where Triton's merging of outputs is not what PyTorch's is, or writes elsewhere."""
    from pyfa.backends.triton.merge import merge

    found = []
    for batch, rows, heads, dim in ((2, 7, 3, 40), (1, 33, 4, 128), (1, 1, 1, 1), (2, 20, 5, 256)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            whole = torch.randn(batch, rows + 4, heads + 1, dim)
            total = whole[:, 2 : 2 + rows, :heads]
            part = torch.randn(batch, rows, heads, dim).to(dtype)
            kept, added = torch.rand(2, batch, heads, rows)
            expected = whole.clone()
            weights = (x.transpose(1, 2)[..., None] for x in (kept, added))
            expected[:, 2 : 2 + rows, :heads].mul_(next(weights)).addcmul_(part, next(weights))
            merge(total, part, kept, added)
            if not torch.allclose(whole, expected, rtol=2**-22, atol=2**-22):
                found.append(f"merge {(batch, rows, heads, dim)} {dtype}")
    return found


if __name__ == "__main__":
    print(json.dumps(failures(sys.argv[1]) + merge_failures()))
