"""Results of a GPU held to the one rule, against the specification on the CPU."""

from __future__ import annotations

import torch

from pyfa import reference, request
from pyfa.conformance.tolerances import judge
from pyfa.request import Shared


def attention_failures(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    found: dict[str, torch.Tensor],
    dout: torch.Tensor,
    **options,
) -> list[str]:
    """What fails of ``found``: out, dq, dk, dv of dense attention with ``options``.

    The tensors may be slices of larger ones; a result may cover only the last rows.
    """
    q, k, v, dout = (x.detach().cpu() for x in (q, k, v, dout))
    call = request.dense(q, k, v, Shared(**options)).call
    ref, naive = (
        reference.gradients(call, dout, dtype=dtype) for dtype in (torch.float64, q.dtype)
    )
    failures = []
    for name, x in found.items():
        last = slice(ref[name].shape[1] - x.shape[1], None)
        check = judge(
            name, x.detach().cpu(), ref[name][:, last], naive[name][:, last], gradient=name != "out"
        )
        failures += [check.message] if check.message else []
    return failures
