"""Compile every Triton plan for every arch, without a GPU: registers, spills, shared memory.

    python benchmarks/triton_resources.py [--arch gfx942,sm_90a] [--only forward] [--json FILE]

Exit code 1 where a kernel does not compile, asks for more shared memory than a block may have, or
a forward kernel for gfx942 spills.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pyfa import bench, mods
from pyfa.backends.triton import plans, resources, specs
from pyfa.backends.triton.specs import Spec, Variant
from pyfa.device import DEVICES, Device
from pyfa.problem import Problem

ARCH_NAMES = (
    "gfx90a", "gfx942", "gfx950", "gfx1100", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100",
)  # fmt: skip
HEAD_DIMS = (64, 128, 256, 512)


def device_of(arch: str) -> Device:
    """Return a device of ``arch`` for planning: a named one, or else one with nothing but the
    arch."""
    named = (device for device in DEVICES.values() if device.arch == arch)
    return next(named, Device(arch, arch, 0, 1, 0.0, 0, 0, 0, 0.0))


def problem_of(
    arch: str, head_dim: int, dtype: str, *features: str, rows: int = 4096, keys: int = 4096,
    heads_k: int = 16, page_size: int = 0,
) -> Problem:  # fmt: skip
    """Return a problem of sixteen query heads that leads to one of the plans."""
    return Problem(
        4, rows, keys, 16, heads_k, head_dim, head_dim, dtype, frozenset(features),
        device_of(arch), rows == keys, page_size=page_size,
    )  # fmt: skip


def specs_of(arch: str) -> Iterator[tuple[str, Spec]]:
    """Return every plan of ``arch`` with its kernels, by name."""
    general, biased = Variant(general=True), Variant(general=True, bias="fp32")
    for dtype in ("bfloat16", "float16", "float32"):
        for head_dim in HEAD_DIMS:
            problem = problem_of(arch, head_dim, dtype, "causal", "backward")
            plan = dict(plans.plan(problem, "triton").constants)
            label = f"{plan['dtype']} d{head_dim}"
            yield f"{label} forward", specs.forward_spec(plan, Variant(), False)
            for role in specs.keys_roles(plan):
                yield f"{label} {role}", specs.keys_spec(plan, Variant(), role)
            yield f"{label} dq", specs.rows_spec(plan, Variant())
            decode = problem_of(arch, head_dim, dtype, "gqa", rows=1, keys=65536, heads_k=4)
            plan_d = dict(plans.plan(decode, "triton").constants)
            yield f"{label} decode", specs.forward_spec(plan_d, Variant(), True)
            if dtype != "bfloat16":
                continue
            long = dict(plans.plan(problem_of(arch, head_dim, dtype, rows=16384, keys=16384),
                                   "triton").constants)  # fmt: skip
            yield f"{label} forward long full", specs.forward_spec(long, Variant(), False)
            yield f"{label} forward general", specs.forward_spec(plan, general, False)
            with_bias = dict(plans.plan(problem_of(arch, head_dim, dtype, "bias"),
                                        "triton").constants)  # fmt: skip
            yield f"{label} forward bias", specs.forward_spec(with_bias, biased, False)
            dropped = plan | {"dropout": True}
            yield f"{label} forward dropout", specs.forward_spec(dropped, Variant(), False)
            paged = problem_of(arch, head_dim, dtype, "gqa", "paged", rows=1, keys=65536,
                               heads_k=4, page_size=16)  # fmt: skip
            plan_p = dict(plans.plan(paged, "triton").constants)
            yield f"{label} decode paged", specs.forward_spec(plan_p, Variant(), True)
            for role in specs.keys_roles(plan):
                yield f"{label} {role} general", specs.keys_spec(dropped, biased, role)
            yield f"{label} dq general", specs.rows_spec(dropped, biased, True)
            yield f"{label} bias gradient", specs.bias_spec(dropped, biased, False, True)
            yield f"{label} row state", specs.state_spec(plan)
            yield f"{label} combine", specs.combine_spec(plan_d, 1)
    for head_dim in HEAD_DIMS:
        yield from float8_specs_of(arch, head_dim)
        yield from listed_specs_of(arch, head_dim)
    yield from latent_specs_of(arch)


def latent_specs_of(arch: str) -> Iterator[tuple[str, Spec]]:
    """Return forward and decode of heads of 576 with values of 512, which are K's first elements in
    latent attention."""
    for kind, features in (("wide", ("dv",)), ("latent", ("dv", "latent"))):
        for role, rows, heads_k in (("forward", 4096, 16), ("decode", 1, 1)):
            problem = problem_of(arch, 576, "bfloat16", "causal", *features, rows=rows,
                                 heads_k=heads_k)  # fmt: skip
            plan = dict(plans.plan(replace(problem, head_dim_v=512), "triton").constants)
            spec = specs.forward_spec(plan, Variant(), role == "decode")
            yield f"{plan['dtype']} d576 {kind} {role}", spec


def listed_specs_of(arch: str, head_dim: int) -> Iterator[tuple[str, Spec]]:
    """Return the kernels that visit tiles by the block lists of a mask_mod."""
    digest, _ = mods.resolve(None, _documents, torch.device("cpu"))
    problem = problem_of(arch, head_dim, "bfloat16", "mask_mod", "backward")
    plan = dict(plans.plan(replace(problem, mods=digest), "triton").constants)
    label = f"{plan['dtype']} d{head_dim}"
    yield f"{label} forward listed", specs.forward_spec(plan, Variant(), False, listed=True)
    for role in specs.keys_roles(plan):
        yield f"{label} {role} listed", specs.keys_spec(plan, Variant(), role, listed=True)
    yield f"{label} dq listed", specs.rows_spec(plan, Variant(), listed=True)


def _documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 1000 == kv_idx // 1000) & (q_idx >= kv_idx)


def float8_specs_of(arch: str, head_dim: int) -> Iterator[tuple[str, Spec]]:
    """Return float8 forward with each kind of scale, and decode with a float8 cache and 16-bit
    queries."""
    for dtype in (name for name, archs in plans.FLOAT8.items() if arch in archs):
        problem = problem_of(arch, head_dim, dtype, "causal", "fp8")
        plan = dict(plans.plan(replace(problem, dtype_out="bfloat16"), "triton").constants)
        decode = problem_of(arch, head_dim, "bfloat16", "gqa", "fp8", rows=1, keys=65536, heads_k=4)
        plan_d = dict(plans.plan(replace(decode, dtype_k=dtype), "triton").constants)
        for scaled in (1, 2, 3):
            variant = Variant(scaled=scaled)
            label = f"{plan['dtype']} d{head_dim} scales {scaled}"
            yield f"{label} forward", specs.forward_spec(plan, variant, False)
            yield f"{label} decode", specs.forward_spec(plan_d, variant, True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=",".join(ARCH_NAMES))
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    rows, bad = [], 0
    print(f"{'arch':8} {'kernel':34} {'registers':>9} {'spill B':>8} {'shared':>8} {'limit':>8}")
    for arch in arguments.arch.split(","):
        for name, spec in specs_of(arch):
            if arguments.only not in name:
                continue
            begin = time.perf_counter()
            try:
                found = resources.measure(spec, arch)
            except Exception as error:
                print(f"{arch:8} {name:34} {str(error).splitlines()[0][:80]}", flush=True)
                bad += 1
                continue
            flags = []
            if found.block_limit and found.shared_bytes > found.block_limit:
                flags.append("too much shared memory")
            if arch == "gfx942" and "forward" in name and found.spill_bytes:
                flags.append("spills")
            bad += len(flags)
            print(
                f"{arch:8} {name:34} {found.registers:9} {found.spill_bytes:8}"
                f" {found.shared_bytes:8} {found.block_limit:8}  {', '.join(flags)}",
                flush=True,
            )
            seconds = round(time.perf_counter() - begin, 2)
            rows.append({"arch": arch, "kernel": name, **found._asdict(), "seconds": seconds})
    if arguments.json:
        Path(arguments.json).write_text(bench.to_text(rows) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
