"""``pyfa demo``: attention on this machine, compared with naive attention.

Each side runs in a process of its own at two lengths, to show time, peak memory and its growth. One
head of the results is compared with float64.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import usage
from .console import print_json, print_table, print_text, progress, size

if TYPE_CHECKING:
    import torch

    from .console import Progress
    from .measure import Measured, Spec

_SEQLEN, _HEADS, _HEAD_DIM = 8192, 8, 64
_SHORTEST = 256
_SECONDS = 3.0  # of runs per side and length; naive attention may need more for a single one
# Scores, probabilities and their gradients, of which about three are alive at once.
_NAIVE_COPIES = 3.5
_REFERENCE_ROWS = 512


@dataclass(frozen=True)
class Side:
    """One side at one length, with its measurements."""

    name: str
    seqlen: int
    measured: Measured

    @property
    def seconds(self) -> float:
        return self.measured.forward + self.measured.backward


@dataclass(frozen=True)
class Error:
    """The largest error of one result on both sides, and the rule's verdict on pyfa's."""

    name: str
    pyfa: float
    naive: float
    allowed: float
    message: str


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "demo",
        "time attention on this machine against naive attention",
        "Run attention forward and backward on this machine's best backend, and compare it with "
        "naive attention: time, peak memory and error. This takes about a minute on two cores.",
        "pyfa demo",
        "pyfa demo --seqlen 4096 --no-causal",
    )
    parser.add_argument(
        "--seqlen", type=int, default=_SEQLEN, metavar="S", help=f"tokens, {_SHORTEST} or more"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="input dtype (default: float32 on a CPU, bfloat16 on a GPU)",
    )
    parser.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a causal mask, or none (default: causal)",
    )
    usage.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; status 1 if an error exceeds the conformance bound or pyfa is slower."""
    import torch

    import pyfa

    from . import emulated
    from .measure import Spec, inputs

    if options.seqlen < _SHORTEST:
        raise ValueError(f"--seqlen: expected {_SHORTEST} or more; got {options.seqlen}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    spec = Spec(
        "pyfa", device, options.seqlen, _HEADS, _HEAD_DIM, dtype, options.causal, _SECONDS, ""
    )
    seqlen = _fitting(spec)
    note = "" if seqlen == spec.seqlen else f"naive attention of {spec.seqlen} tokens does not fit"
    spec = replace(spec, seqlen=seqlen)
    q, k, v, _ = inputs(spec, _SHORTEST)
    answer = pyfa.explain(q.requires_grad_(), k, v, causal=spec.causal)
    chosen = answer.chosen
    if chosen is None:
        raise ValueError("no backend can run this attention here: see pyfa explain")
    plan = next(one.plan for one in answer.answers if one.backend == chosen)
    assert plan is not None
    with progress("demo") as show:
        sides, errors = _measure_all(spec, show)
    checks = {
        "errors within the conformance rule": not any(error.message for error in errors),
        "faster than naive attention": sides[0].seconds < sides[1].seconds,
    }
    mi300x = emulated.collect()
    if "message" in mi300x:
        checks["MI300X machine code within the conformance rule"] = not mi300x["message"]
    data = {
        "problem": f"1 × {seqlen} × {_HEADS} × {_HEAD_DIM}, {dtype}, "
        f"{'causal, ' if spec.causal else ''}forward and backward",
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "backend": chosen,
        "plan": plan.kernel,
        "note": note,
        "sides": [asdict(side) for side in sides],
        "errors": [asdict(error) for error in errors],
        "emulated": mi300x,
        "checks": checks,
    }
    if options.json:
        print_json("demo", data)
    else:
        _print(data, sides, errors)
        emulated.show(mi300x)
    return 0 if all(checks.values()) else 1


def _measure_all(spec: Spec, show: Progress) -> tuple[list[Side], list[Error]]:
    """Measure pyfa and naive at the full length and at half of it, and the errors at the full
    length."""
    sides: list[Side] = []
    errors: list[Error] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seqlen in (spec.seqlen, spec.seqlen // 2):
            for side in ("pyfa", "naive"):
                show(len(sides), 5, f"{side}, {seqlen} tokens")
                one = replace(spec, side=side, seqlen=seqlen, results=f"{folder}/{side}.pt")
                sides.append(Side(side, seqlen, _run_side(one, folder)))
            if not errors:
                errors = _errors(spec, folder)
        show(5, 5, "")
    return sides, errors


def _run_side(spec: Spec, folder: Path) -> Measured:
    from .measure import Measured

    path = folder / "spec.json"
    spec.save(path)
    command = [sys.executable, "-m", "pyfa.cli.measure", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:] or [f"it ended with {ended.returncode}"]
        raise ValueError(f"the {spec.side} side failed at {spec.seqlen} tokens: {last[0]}")
    return Measured(**json.loads(ended.stdout.splitlines()[-1]))


def _errors(spec: Spec, folder: Path) -> list[Error]:
    """Compare both sides' results of one head with float64, by the rule of the conformance
    suite."""
    import torch

    from ..conformance import tolerances

    truth, largest_lse = _reference_head(spec)
    ours, plain = (
        torch.load(folder / f"{side}.pt", weights_only=True) for side in ("pyfa", "naive")
    )
    errors = []
    for name, ref in truth.items():
        check = tolerances.judge(
            name,
            ours[name],
            ref,
            plain[name],
            gradient=name != "out",
            largest_lse=largest_lse,
        )
        naive_error = float((plain[name].double() - ref).abs().max())
        errors.append(Error(name, check.max_error, naive_error, check.max_bound, check.message))
    return errors


def _reference_head(spec: Spec) -> tuple[dict[str, torch.Tensor], float]:
    """Compute out, dq, dk, dv of the first head and its largest |LSE|, with ``reference.py`` in
    blocks.

    With the causal mask a block of rows sees the keys up to the end of the block, which aligns the
    mask.
    """

    from .. import reference
    from ..problem import Call
    from .measure import inputs

    q, k, v, dout = (x[:, :, :1].double() for x in inputs(replace(spec, device="cpu"), spec.seqlen))
    sums = {"out": q * 0, "dq": q * 0, "dk": q * 0, "dv": q * 0}
    largest_lse = 0.0
    for begin in range(0, spec.seqlen, _REFERENCE_ROWS):
        rows = slice(begin, min(begin + _REFERENCE_ROWS, spec.seqlen))
        keys = slice(0, rows.stop if spec.causal else spec.seqlen)
        call = Call(
            q[:, rows],
            k[:, keys],
            v[:, keys],
            max_seqlen_q=rows.stop - rows.start,
            max_seqlen_k=keys.stop,
            scale=spec.head_dim**-0.5,
            window_right=0 if spec.causal else -1,
        )
        part = reference.gradients(call, dout[:, rows])
        for name, place in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
            sums[name][:, place] += part[name]
        largest_lse = max(largest_lse, float(part["lse"].abs().max()))
    return sums, largest_lse


def _print_what(data: dict[str, Any]) -> None:
    where = data["device"] if data["device"] != "CPU" else f"this CPU, {data['threads']} threads"
    print_text(f"attention {data['problem']}, on {where}")
    print_text(
        f"compared: pyfa (backend {data['backend']}, plan: {data['plan']}) and naive attention"
    )
    if data["plan"] == "sdpa":
        print_text("note: plan sdpa is PyTorch's own fused attention, which pyfa calls here")
    if data["note"]:
        print_text(f"note: {data['note']} in memory here")
    print()


def _print(data: dict[str, Any], sides: list[Side], errors: list[Error]) -> None:
    _print_what(data)
    rows = []
    for side in sides:
        took = side.measured
        times = [f"{took.forward:.4f} s", f"{took.backward:.4f} s"]
        rows.append([str(side.seqlen), side.name, *times, size(took.extra_bytes)])
    print_table(["tokens", "", "forward", "backward", "extra memory"], rows)
    print()
    rows = []
    for error in errors:
        figures = (error.pyfa, error.naive, error.allowed)
        rows.append([error.name, *(f"{figure:.2e}" for figure in figures), error.message])
    print_table(["error against float64", "pyfa", "naive", "allowed for pyfa", ""], rows)
    print()
    ours, plain, ours_half, plain_half = sides
    less = plain.measured.extra_bytes / max(1, ours.measured.extra_bytes)
    print(f"naive needs {plain.seconds / ours.seconds:.1f} × the time and {less:.0f} × the memory")
    growth = [
        long.measured.extra_bytes / max(1, short.measured.extra_bytes)
        for long, short in ((ours, ours_half), (plain, plain_half))
    ]
    print(f"twice the tokens need {growth[0]:.1f} × the memory with pyfa, {growth[1]:.1f} × naive")
    for name, good in data["checks"].items():
        print(f"{name}: {'yes' if good else 'NO'}")
    print_text(
        "(extra memory: the peak beyond the inputs, results included; errors: over one head)"
    )


def _fitting(spec: Spec) -> int:
    """Return the longest length, halving from ``spec.seqlen``, whose naive scores fit in memory."""
    import torch

    if spec.device == "cuda":
        room = torch.cuda.mem_get_info()[0]
    else:
        room = _available()
    width = getattr(torch, spec.dtype).itemsize
    seqlen = spec.seqlen
    while seqlen > _SHORTEST and _NAIVE_COPIES * width * spec.heads * seqlen**2 > room:
        seqlen //= 2
    return seqlen


def _available() -> int:
    """Return the bytes that a new process may still use, as far as the system reports it."""
    room = sys.maxsize
    for path, field in (("/proc/meminfo", "MemAvailable:"), ("/sys/fs/cgroup/memory.max", "")):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if field and line.startswith(field):
                room = min(room, int(line.split()[1]) * 1024)
            elif not field and line.isdigit():
                room = min(room, int(line))
    return room
