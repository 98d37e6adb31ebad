"""One side of ``pyfa demo`` in a process of its own, so that its peak memory is its own.

``python -m pyfa.cli.measure SPEC`` runs attention forward and backward as ``Spec`` says. It writes
the results of one head next to the spec and prints its measurements as a line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import pyfa

RESULTS = ("out", "dq", "dk", "dv")
_WARM_UP_SEQLEN = 128
_MOST_RUNS = 30


@dataclass(frozen=True)
class Spec:
    """The task: ``side`` is ``pyfa`` or ``naive``; the head's results go to ``results``."""

    side: str
    device: str
    seqlen: int
    heads: int
    head_dim: int
    dtype: str
    causal: bool
    seconds: float
    results: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Measured:
    """Medians over ``runs``, and the first run's peak memory beyond the inputs."""

    forward: float
    backward: float
    runs: int
    extra_bytes: int


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(spec: Spec, seqlen: int) -> Inputs:
    """Return q, k, v and the gradient of the output, the same in every process and on every
    device."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, seqlen, spec.heads, spec.head_dim)
    dtype = getattr(torch, spec.dtype)
    q, k, v, dout = (
        torch.randn(shape, generator=generator).to(spec.device, dtype) for _ in range(4)
    )
    return q, k, v, dout


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Compute attention by the formula: all scores, then softmax, then the values."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    score = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        score = score.masked_fill(later, -torch.inf)
    out: torch.Tensor = score.softmax(-1) @ v
    return out.transpose(1, 2)


def once(spec: Spec, data: Inputs) -> tuple[float, float, list[torch.Tensor]]:
    """Return the seconds of forward and of backward, and out, dq, dk, dv."""
    q, k, v, dout = (x.detach() for x in data)
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    _wait(spec)
    begin = time.perf_counter()
    if spec.side == "naive":
        out = naive(*leaves, causal=spec.causal)
    else:
        result = pyfa.attention(*leaves, causal=spec.causal)
        assert isinstance(result, torch.Tensor)
        out = result
    _wait(spec)
    middle = time.perf_counter()
    grads = torch.autograd.grad(out, leaves, dout)
    _wait(spec)
    return middle - begin, time.perf_counter() - middle, [out.detach(), *grads]


def measure(spec: Spec) -> Measured:
    """Warm up on a short sequence, record the peak memory of the first run, then repeat and time it
    for ``spec.seconds``."""
    once(spec, inputs(spec, _WARM_UP_SEQLEN))
    data = inputs(spec, spec.seqlen)
    before = _reset_peak(spec)
    forward, backward, results = once(spec, data)
    extra = _peak(spec) - before
    head = {name: x[:, :, :1].cpu().clone() for name, x in zip(RESULTS, results, strict=True)}
    torch.save(head, spec.results)
    del results
    forwards, backwards = [forward], [backward]
    while sum(forwards) + sum(backwards) < spec.seconds and len(forwards) <= _MOST_RUNS:
        forward, backward, _ = once(spec, data)
        forwards.append(forward)
        backwards.append(backward)
    # The first run touches memory that later ones find mapped: it counts where it is the only one.
    rest = slice(1 if len(forwards) > 1 else 0, None)
    return Measured(
        statistics.median(forwards[rest]),
        statistics.median(backwards[rest]),
        len(forwards[rest]),
        max(0, extra),
    )


def _wait(spec: Spec) -> None:
    if spec.device == "cuda":
        torch.cuda.synchronize()


def _reset_peak(spec: Spec) -> int:
    """Reset the peak counter; return the bytes in use now."""
    if spec.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
        return _status("VmRSS")
    return _peak(spec)


def _peak(spec: Spec) -> int:
    if spec.device == "cuda":
        return torch.cuda.max_memory_allocated()
    with suppress(OSError):
        return _status("VmHWM")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Spec(**json.loads(Path(sys.argv[1]).read_text()))))))
