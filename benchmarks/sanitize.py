"""Run Compute Sanitizer over conformance cases of the cuda backend.

``python benchmarks/sanitize.py [--cases 200] [--jobs 4] [--seconds 300] [--tools memcheck,…]
[--save]``. PyTorch's caching allocator is off, so every tensor is a separate allocation, and the
cases put guard zones around their tensors. Cases are a sample, by hash, of those of the full level
with at most 300 rows and keys; ``--jobs`` processes of each tool share them. A tool's report counts
if it names one of pyfa's kernels. Of other reports, the number and the first one are shown. Once
the time is over, a process begins no further case. The cases left over are reported, and make the
exit status 1. ``--save`` writes ``results/sanitizer_cuda.json``.

On Hopper with its own tiles, only cases that run on Hopper's kernels are drawn, and latent decode:
first those that add a kernel or a feature that no earlier case has, and some whose grids are larger
than the device, in which the forward's blocks take work tiles from a counter. The result is
``sanitizer_cuda_sm_90.json``. The tools are then memcheck and initcheck, because racecheck hardly
supports TMA, mbarriers and wgmma. ``PYFA_ARCH_TILES=sm_80`` draws from all cases, for sm80's
kernels.

Racecheck does not understand barriers among only some warps of a block, and reports races that they
prevent. The backward has such barriers: one warp passes its P to another by bar.arrive and bar.sync
of 64 threads. So racecheck runs twice: on the kernels as they are, and with these barriers replaced
by barriers of the whole block, which every warp passes equally often and in the same order. Only
the second run counts. The ``deterministic`` backward is left out of it, because it has other
barriers of the block in between.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import machine

from pyfa import device
from pyfa.backends import BACKENDS
from pyfa.backends.cuda import code, plans
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.native import backward
from pyfa.conformance import grid, runner
from pyfa.conformance.cases import Case, dense, packed
from pyfa.conformance.report import PASSED, REFUSED
from pyfa.device import Device
from pyfa.plan import Plan
from pyfa.problem import Problem

TOOLS = ("memcheck", "initcheck", "racecheck", "racecheck-widened")
OWN_TOOLS = ("memcheck", "initcheck")
_WIDENED = "-widened"
# Barriers of some warps: what they are in the source, and those of the block.
_SOME = re.compile(r'asm volatile\("bar\.(?:arrive|sync) %0, %1;"[^;]*;')
_WHOLE = "barrier();"
KERNELS = re.compile(
    r"\b(attn_fwd|attn_bwd|attn_decode|attn_latent|combine|append|gaps|row_sums|dq_convert|"
    r"block_lists|tile_bounds)\b"
)
_LONGEST = 300
# Always with Hopper's own kernels. More blocks than an H100 or an H200 has SMs, 132: most of these
# twice as many and more. And what is in no short case.
LARGE_GRIDS = (
    dense(200, 97, heads_q=72, heads_k=72, causal=True, backward=True, deterministic=True),
    dense(130, 97, heads_q=72, heads_k=8, head_dim=128, backward=True),
    dense(257, 257, heads_q=198, heads_k=198),  # tiles of 96 keys
    dense(60, 97, heads_q=300, heads_k=300),  # blocks of one warpgroup
    packed(
        ((129, 0, 150), (33, 65, 200)),
        "varlen",
        heads_q=60,
        heads_k=60,
        head_dim=128,
        dtype="float16",
        causal=True,
        backward=True,
    ),
    dense(
        130,
        97,
        heads_q=68,
        heads_k=68,
        head_dim=192,
        head_dim_v=128,
        backward=True,
        deterministic=True,
    ),
    dense(130, 150, heads_q=68, heads_k=4, head_dim=256, window=(17, 5)),
    dense(130, 97, heads_q=68, heads_k=68, head_dim=96, softcap=5.0),
    dense(130, 97, heads_q=68, heads_k=68, head_dim=128, softcap=5.0),
)
RARE = (
    dense(150, 200, head_dim=192, head_dim_v=128, causal=True, backward=True),
    dense(150, 200, head_dim=192, head_dim_v=128, softcap=5.0, backward=True),
    dense(150, 200, head_dim=192, head_dim_v=128, softcap=5.0, backward=True, deterministic=True),
    dense(150, 200, head_dim=192, window=(17, 5), backward=True, deterministic=True),
    dense(150, 200, head_dim=192, softcap=5.0, backward=True),
    dense(150, 200, head_dim=192, softcap=5.0, backward=True, deterministic=True),
    dense(150, 200, head_dim=256, causal=True, backward=True, deterministic=True),
    dense(150, 200, head_dim=256, softcap=5.0, backward=True, deterministic=True),
)
# Tiles that follow from the grid.
BY_GRID = (
    dense(33, 33, head_dim=192, head_dim_v=128, backward=True),
    dense(33, 97, head_dim=192, head_dim_v=128, causal=True, sinks=True, backward=True),
    dense(33, 97, head_dim=256, causal=True, sinks=True, backward=True),
    dense(257, 97, sinks=True, backward=True),
    dense(197, 97, heads_q=12, heads_k=12, sinks=True, backward=True),
    dense(33, 33, head_dim=128, sinks=True, backward=True),
    dense(33, 33, heads_q=68, heads_k=68, head_dim=96),
    dense(77, 77, heads_q=40, heads_k=40, head_dim=96),
    dense(77, 97, heads_q=40, heads_k=40, head_dim=96),
    dense(77, 97, heads_q=40, heads_k=40, head_dim=256),
    dense(77, 197, heads_q=72, heads_k=72),
    dense(33, 97, heads_q=136, heads_k=136, head_dim=96),
)
# Blocks that go through several chunks and merge them, and take a second work tile: they keep what
# chunks came to in shared memory, or above head_dim 128 in global memory. And pages of 48 keys,
# which are copied in parts.
CHUNKS = (
    dense(65, 1100, heads_q=68, heads_k=4, causal=True, batch_invariant=True),
    packed(
        ((65, 65), (1100, 1031)),
        "kvcache",
        heads_q=68,
        heads_k=4,
        head_dim=128,
        page_size=8,
        batch_invariant=True,
    ),
    dense(65, 2100, heads_q=68, heads_k=4, head_dim=256, batch_invariant=True),
    packed(((65, 65), (300, 170)), "kvcache", causal=True, page_size=48),
)
# Latent decode of few heads, which runs sm80's kernel with Hopper's tiles: two warps in a team, and
# one.
FEW_HEADS = tuple(
    packed(
        ((1, 1, 1), (300, 0, 33)),
        "latent",
        heads_q=heads,
        heads_k=1,
        head_dim=576,
        head_dim_v=512,
        scale=192**-0.5,
        page_size=16,
        num_splits=splits,
    )
    for heads, splits in ((16, 1), (5, 2))
)
# A plan of the backward for each score term alone, and of the forward for some.
_TERMS: tuple[dict[str, Any], ...] = (
    {"softcap": 5.0},
    {"alibi": "heads"},
    {"bias": "full"},
    {"dropout_p": 0.1},
    {"sinks": True},
    {"softcap": 5.0, "alibi": "heads"},
)
ONE_TERM = tuple(
    dense(
        150, 200, head_dim=dim, head_dim_v=dim_v, backward=True, deterministic=deterministic, **term
    )
    for dim, dim_v in ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
    for deterministic in (False, True)
    for term in _TERMS
) + tuple(
    dense(150, 200, head_dim=dim, head_dim_v=dim_v, **term)
    for dim, dim_v in ((96, 96), (512, 512), (576, 512))
    for term in (*_TERMS[:2], {"softcap": 5.0, "alibi": "heads"})
)
_SUMMARY = re.compile(r"(ERROR SUMMARY|RACECHECK SUMMARY): .*")
# A block of the log that reports something, as opposed to what the tool says of itself.
_REPORT = re.compile(r"\b(Invalid|Misaligned|Uninitialized|Error|Warning|Program hit|hazard)\b")
_RAN, _KERNEL = "ran: ", "kernel: "
_LAST_CASE = 20.0  # seconds for what a process has begun when its time is over


def facts() -> Device:
    """Of the device that the cases run on."""
    return device.of(runner.device_of("cuda"))


def has_own(where: Device) -> bool:
    """Whether it runs Hopper's own kernels."""
    return plans.runs_sm90(where.arch)


def own_plans(case: Case, where: Device) -> list[Plan]:
    """Hopper's own kernels that ``case`` gets, in both number formats alike."""
    problem = Problem(
        case.batch, max(case.lengths_q, default=0), max(case.lengths_k, default=0), case.heads_q,
        case.heads_k, case.head_dim, case.head_dim_v, "bfloat16", case.features, where,
        square=case.lengths_q == case.lengths_k, page_size=case.page_size,
        aligned=case.layout not in ("unaligned", "gapped"),
        positive=case.scale is None or case.scale > 0.0,
    ).bucketed()  # fmt: skip
    backend = BACKENDS["cuda"]
    if backend.why_not(problem):
        return []
    found = [backend.plan(problem)]
    # Those with mods are compiled for them.
    if case.backward and not case.features & {"score_mod", "mask_mod"}:
        found.append(backward.plans_for(TARGET, "cuda", problem)[1])
    return [plan for plan in found if "/sm90/" in plan.kernel]


def chosen(count: int, where: Device) -> list[Case]:
    """So many cases for a device."""
    return (by_coverage(where) if has_own(where) else by_hash())[:count]


@functools.cache
def by_coverage(where: Device) -> list[Case]:
    """The cases of Hopper's own kernels, those first that bring what none before had. And latent
    decode, which has Hopper's tiles."""
    cases = by_hash()
    always = (*LARGE_GRIDS, *RARE, *BY_GRID, *CHUNKS, *ONE_TERM)
    own = [case for case in (*always, *cases) if own_plans(case, where)]
    seen: set[object] = set()
    first = []
    for case in own:
        brings = {*own_plans(case, where), *case.features} - seen
        if brings or case in always:
            first.append(case)
            seen |= brings
    return list(dict.fromkeys((*FEW_HEADS, *first, *own)))


@functools.cache
def by_hash() -> list[Case]:
    """Cases that are short and that the backend takes, those first whose names hash smallest."""
    backend = BACKENDS["cuda"]
    cases = grid.cases("full", backend.FEATURES, backend.DTYPES)
    short = [
        case
        for case in cases
        if case.features <= backend.FEATURES
        and case.dtype in backend.DTYPES
        and max((*case.lengths_q, *case.lengths_k), default=0) <= _LONGEST
    ]
    return sorted(short, key=lambda case: hashlib.sha256(case.name.encode()).digest())


def widen() -> None:
    """From now on kernels of this process have only barriers of all of a block's warps."""
    original = code.source_of
    code.source_of = lambda plan: widened(original(plan))


def widened(source: str) -> str:
    """A source whose barriers are all of a whole block."""
    return _SOME.sub(_WHOLE, source)


def is_ours(block: str, kernels: re.Pattern[str] = KERNELS) -> bool:
    """Whether a block of a tool's log reports something of one of pyfa's kernels."""
    return bool(_REPORT.search(block) and kernels.search(block))


def run(cases: list[Case], widened: bool, until: float) -> None:
    """The cases, in this process: a line of each as soon as it has run, and of new kernels."""
    backend, kernels = BACKENDS["cuda"], set[str]()
    where = runner.device_of("cuda")
    if widened:
        widen()
    for case in cases:
        if time.monotonic() > until:
            return
        result = runner.run_case(backend, case, where)
        said = " | ".join(result.messages).strip().replace("\n", " ")[-300:]
        print(f"{_RAN}{result.status} {result.name} {said}", flush=True)
        for kernel in set(backend.kernel_digests()) - kernels:
            print(f"{_KERNEL}{kernel}", flush=True)
            kernels.add(kernel)


def sanitized(tool: str, share: int, options: argparse.Namespace, until: float) -> dict[str, Any]:
    """What ``tool`` reports of the cases of a share."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    with tempfile.TemporaryDirectory() as folder:
        log, said = Path(folder) / "log", Path(folder) / "said"
        with said.open("w") as file:
            process = subprocess.Popen(
                [sanitizer, "--tool", tool.removesuffix(_WIDENED), "--report-api-errors", "no",
                 "--max-connections", "100", "--log-file", str(log), sys.executable, __file__,
                 "--cases", str(options.cases), "--jobs", str(options.jobs),
                 "--share", str(share), "--until", str(until),
                 "--run", "widened" if tool.endswith(_WIDENED) else "as-is"],
                env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(max(0.0, until - time.monotonic()) + _LAST_CASE)
            except subprocess.TimeoutExpired:
                # The program is the tool's child.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
        lines = said.read_text(errors="replace").splitlines()
        text = log.read_text(errors="replace") if log.exists() else ""
    ran = [line.removeprefix(_RAN) for line in lines if line.startswith(_RAN)]
    blocks = [block.strip() for block in re.split(r"(?m)^=========\s*$", text)]
    reports = [block for block in blocks if _REPORT.search(block)]
    ours = [block for block in reports if KERNELS.search(block)]
    others = [block for block in reports if not KERNELS.search(block)]
    summary = _SUMMARY.search(text)
    return {
        "tool": tool,
        "cases": dict(collections.Counter(line.split()[0] for line in ran)),
        "kernels": [line.removeprefix(_KERNEL) for line in lines if line.startswith(_KERNEL)],
        "failed": [line for line in ran if line.split()[0] not in (PASSED, REFUSED)],
        "not_run": len(part_of(options, share, tool.endswith(_WIDENED))) - len(ran),
        "of_our_kernels": len(ours),
        "first": [block[:2000] for block in ours[:1]],
        "of_others": len(others),
        "first_of_others": [block[:2000] for block in others[:1]],
        "ended": [summary[0] if summary else f"status {status}: {' '.join(lines[-3:])[-300:]}"],
    }


def part_of(options: argparse.Namespace, share: int, widened: bool) -> list[Case]:
    """The cases of a share, each of which has some of every kind."""
    cases = chosen(options.cases, facts())
    return [case for case in cases if not (widened and case.deterministic)][share :: options.jobs]


def together(tool: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The shares of one tool as one."""
    mine = [part for part in parts if part["tool"] == tool]
    found: dict[str, Any] = {"tool": tool, "cases": collections.Counter()}
    for part in mine:
        found["cases"].update(part["cases"])
        for name in ("kernels", "failed", "not_run", "of_our_kernels", "first", "of_others",
                     "first_of_others", "ended"):  # fmt: skip
            found[name] = found[name] + part[name] if name in found else part[name]
    for name in ("first", "first_of_others"):
        found[name] = "".join(found[name][:1])
    found["kernels"] = sorted(set(found["kernels"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=4, help="processes of each tool")
    parser.add_argument("--seconds", type=float, default=300.0, help="then no case is begun")
    parser.add_argument("--tools", default="", help=f"{', '.join(TOOLS)}; or synccheck")
    parser.add_argument("--save", action="store_true")
    parser.add_argument(
        "--run", choices=("as-is", "widened"), help="only run the cases, without a tool"
    )
    parser.add_argument("--share", type=int, default=0, help="of the cases that are run")
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        widened = options.run == "widened"
        run(part_of(options, options.share, widened), widened, options.until)
        return 0
    begin = time.monotonic()
    until, own = begin + options.seconds, has_own(facts())
    tools = options.tools.split(",") if options.tools else OWN_TOOLS if own else TOOLS
    parts: list[dict[str, Any]] = []
    with ThreadPoolExecutor(len(tools) * options.jobs) as pool:
        under_way = [
            pool.submit(sanitized, tool, share, options, until)
            for share in range(options.jobs)
            for tool in tools
        ]
        for done in as_completed(under_way):
            parts.append(done.result())
            unsaid = ("first", "first_of_others", "kernels")
            told = {name: x for name, x in parts[-1].items() if name not in unsaid}
            print(f"{time.monotonic() - begin:4.0f} s {told}", flush=True)
    found = [together(tool, parts) for tool in tools]
    for each in found:
        print({name: x if name != "kernels" else len(x) for name, x in each.items()})
    if options.save:
        seconds = round(time.monotonic() - begin)
        results = {
            "cases": options.cases, "jobs": options.jobs, "seconds": seconds,
            "tiles": os.environ.get("PYFA_ARCH_TILES", "the device's own"), "tools": found,
        }  # fmt: skip
        print(machine.save("sanitizer_cuda_sm_90" if own else "sanitizer_cuda", results))
    counted = [each for each in found if each["tool"] != "racecheck"]
    bad = any(each["of_our_kernels"] for each in counted)
    bad = bad or any("SUMMARY" not in ended for each in found for ended in each["ended"])
    return int(bad or any(each["failed"] or each["not_run"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
