"""How each kernel is specialized: argument types, constants, alignment, options. Also compiles
them.

Kernels are compiled from an explicit signature instead of from sample arguments, so the code object
is the same with a GPU (``runtime``) and without one (ahead of time, for any arch).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ... import mods
from ...blocks import Tiles
from ...mods.emit_triton import POINTERS
from . import backward, bias_grad, decode, forward, lists
from .common import INTERPRETED
from .modifiers import functions_of
from .plans import BYTES

Constants = Mapping[str, Any]


class Variant(NamedTuple):
    """Properties of the tensors that a plan leaves open.

    ``bias``: its dtype in Triton's words, "" for none. ``bias_rows``: its rows are contiguous and
    16-byte aligned. ``wide``: offsets inside a tile exceed 31 bits. ``tf32``: torch allows it.
    ``scaled``: the kind of float8 scales, as in ``forward``.
    """

    general: bool = False
    bias: str = ""
    bias_rows: bool = False
    wide: bool = False
    tf32: bool = False
    scaled: int = 0


class Spec(NamedTuple):
    """A kernel with all that Triton needs to compile it."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisors: dict[str, int]
    options: dict[str, Any]


# Rows and keys of a tile of the bias gradient. Not hot: fits every arch.
BIAS_TILE = 32
# Tiles of a program that looks at all points of them.
TILES_AT_ONCE = 16

_INT32 = ("CU_Q", "CU_K", "USED_Q", "USED_K", "PAGES", "BATCH_IDX", "LEFTPAD")
_FLOAT32 = ("LSE", "BASE", "PART_LSE", "PARTS", "DELTA", "DLSE", "DOTS_PTR", "ALIBI", "SINKS")
_INPUTS = ("Q", "K", "V", "DOUT", "OUT", "DQ", "DK", "DV")
# For mods: the table of sizes and strides, and the captured tensors. Without mods, compiled in as
# None.
_CAPTURED = ("MOD_INFO", *(f"C{slot}" for slot in range(mods.MOST_CAPTURED)))
_FLOATS = ("scale", "softcap", "keep_scale")
# Arguments of kernels that visit by block lists: the lists, the strides between them, and their
# length. In other kernels they are compiled in as None.
_LISTS = ("LIST_COUNTS", "LIST_ENTRIES", "LIST_B", "LIST_H", "LIST_MOST")
# Arguments for float8 scales: pointers, strides and rows per scale. Without scales they are
# compiled in as None.
_K_SCALES = ("K_SCALE", "V_SCALE", "K_SCALE_B", "K_SCALE_H", "K_SCALE_ROWS")
# For plans with chunks or windows with a negative bound; otherwise compiled in as None.
_BANDS = ("WINDOW_SHIFT", "CHUNK")
_Q_SCALES = ("Q_SCALE", "Q_SCALE_B", "Q_SCALE_H", "Q_SCALE_ROWS")


def _bias_code(plan: Constants, variant: Variant) -> int:
    """Return 0 for no bias, 1 for a float bias, 2 for a boolean one, 3 for a mask over the new
    rows."""
    if not variant.bias:
        return 0
    return 3 if plan["tree"] else 2 if variant.bias == "u8" else 1


def _type(name: str, plan: Constants, bias: str) -> str:
    kind: str = plan["dtype"]
    if name in ("K", "V"):
        return f"*{plan['dtype_k']}"
    if name == "OUT":
        return f"*{plan['dtype_out']}"
    if name in _INPUTS:
        return f"*{kind}"
    if name in _FLOAT32 or name in ("K_SCALE", "V_SCALE", "Q_SCALE"):
        return "*fp32"
    if name in _INT32 or name in ("LIST_COUNTS", "LIST_ENTRIES"):
        return "*i32"
    if name == "STATES":
        return "*u8"
    if name in ("BIAS_PTR", "DBIAS"):
        return f"*{bias or kind}"
    if name == "SEED":
        return "*i64"
    if name in _CAPTURED:
        slot = _CAPTURED.index(name) - 1
        return POINTERS[mods.of(plan["mods"]).kinds[slot][0]] if slot >= 0 else "*i32"
    if name in _FLOATS:
        return "fp32"
    if name == "threshold":
        return "u32"
    return "i64" if name.startswith("stride_") or name[1:-1] == "_SCALE_" else "i32"


def _spec(
    function: Any,
    plan: Constants,
    variant: Variant,
    constants: dict[str, Any],
    divisors: dict[str, int],
    options: dict[str, Any],
    **types: str,
) -> Spec:
    assert not constants.keys() & {*_BANDS}, "names of another kernel's own"
    constants = dict(constants) | ({} if plan["banded"] else dict.fromkeys(_BANDS))
    if variant.bias and variant.bias_rows:
        constants["stride_bias_j"] = 1
        divisors = (
            divisors
            | {"BIAS_PTR": 16}
            | dict.fromkeys(("stride_bias_b", "stride_bias_h", "stride_bias_i"), 8)
        )
    names = function.arg_names
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name) or _type(name, plan, variant.bias)
        for name in names
    }
    constants = {name: constants[name] for name in names if name in constants}
    divisors = {name: n for name, n in divisors.items() if name in signature and n > 1}
    return Spec(function, signature, constants, divisors, options)


def _divisors(plan: Constants) -> dict[str, int]:
    """Return the known divisor of each pointer (in bytes), stride and width (in elements)."""
    d, dv = plan["div_d"], plan["div_dv"]
    result: dict[str, int] = {}
    for x in "qkv":
        bytes_of = BYTES[plan["dtype" if x == "q" else "dtype_k"]]
        result |= {f"stride_{x}{axis}": 16 // bytes_of if plan["aligned"] else 1 for axis in "bsh"}
        result[x.upper()] = 16 if plan["aligned"] else bytes_of
    for name, divisor in (("o", dv), ("g", dv), ("dv", dv), ("dq", d), ("dk", d)):
        result |= {f"stride_{name}{axis}": divisor for axis in "bsh"}
    # Made here, or checked and else copied: torch's allocator aligns to 512 bytes.
    result |= dict.fromkeys(("OUT", "DOUT", "DQ", "DK", "DV", "LSE", "BASE", "DELTA", "PARTS"), 16)
    result |= {"stride_sb": 4, "stride_sh": 4}
    return result | {"head_dim": d, "head_dim_v": dv, "stride_o_split": dv}


def _options(plan: Constants, role: str, variant: Variant) -> dict[str, Any]:
    stages = plan[f"{role}_stages"]
    # Tiles of the bias are staged too, and take as much as a tile of K in float32.
    stages = max(1, stages - 1) if variant.bias else stages
    options = {"num_warps": plan[f"{role}_warps"], "num_stages": stages}
    if plan.get(f"{role}_matrix"):
        options["matrix_instr_nonkdim"] = plan[f"{role}_matrix"]
    if plan.get(f"{role}_waves"):
        options["waves_per_eu"] = plan[f"{role}_waves"]
    return options


def _common(plan: Constants, variant: Variant, role: str, listed: bool = False) -> dict[str, Any]:
    return {
        **({} if listed else dict.fromkeys(_LISTS)),
        "BLOCK_M": plan[f"{role}_block_m"],
        "BLOCK_N": plan[f"{role}_block_n"],
        "BLOCK_D": plan["block_d"],
        "BLOCK_E": plan["block_e"],
        "BLOCK_DV": plan["block_dv"],
        "EVEN_D": plan["even_d"],
        "EVEN_E": plan["even_e"],
        "EVEN_DV": plan["even_dv"],
        "GENERAL": variant.general,
        "BIAS": _bias_code(plan, variant),
        "DROPOUT": plan["dropout"],
        "ORDERED": plan["ordered"],
        "PAGED": plan[f"{role}_paged"],
        "WIDE": variant.wide,
        "TMA": plan[f"{role}_tma"] and not variant.wide and plan[f"{role}_paged"] == 0,
        "DIES": plan["dies"],
        "PRECISION": "tf32" if variant.tf32 else "ieee",
        **_mods(plan),
    }


def _mods(plan: Constants) -> dict[str, Any]:
    return functions_of(plan["mods"]) | dict.fromkeys(_CAPTURED[_pointers(plan) :])


def _pointers(plan: Constants) -> int:
    """Return how many of ``_CAPTURED`` are used."""
    captured = len(mods.of(plan["mods"]).kinds) if plan["mods"] else 0
    return 1 + captured if captured else 0


def states_spec(plan: Constants, tiles: Tiles) -> Spec:
    """Return the spec of the kernel that looks at all points of tiles of this size."""
    constants = {"ROWS": tiles.rows, "KEYS": tiles.keys, "AT_ONCE": TILES_AT_ONCE, **_mods(plan)}
    return _spec(lists.tile_states, plan, Variant(), constants, {}, {"num_warps": 4})


def forward_spec(plan: Constants, variant: Variant, split: bool, listed: bool = False) -> Spec:
    constants = _common(plan, variant, "fwd", listed)
    constants |= {"PACK": plan["pack"], "SPLIT": split, "AHEAD": split and plan["ahead"]}
    constants |= {"SCALED": variant.scaled, "SHARED_V": plan["shared_v"]}
    if not variant.scaled:
        constants |= dict.fromkeys(_K_SCALES)
    if not variant.scaled or BYTES[plan["dtype"]] > 1:
        constants |= dict.fromkeys(_Q_SCALES)
    types = {"OUT": "*fp32"} if split else {}
    return _spec(
        forward.attention_forward, plan, variant, constants, _divisors(plan),
        _options(plan, "fwd", variant), **types,
    )  # fmt: skip


def combine_spec(plan: Constants, lines: int) -> Spec:
    """Return the spec for ``lines`` pairs per program: 1 in decode, which has many splits and few
    rows, else 16."""
    # 16 tiles of 128 float32 values are 64 bytes for each of 128 lanes.
    constants = {"LINES": lines, "AT_ONCE": 16 // lines, "BLOCK_DV": plan["block_dv"]}
    constants["AHEAD"] = plan["ahead"]
    options = {"num_warps": 4} | ({"launch_pdl": True} if plan["ahead"] else {})
    return _spec(decode.combine, plan, Variant(), constants, _divisors(plan), options)


def state_lines(plan: Constants) -> int:
    """Return the rows per program of the row state kernel: 2,048 elements, 16 per lane
    with warps of 32 lanes and 8 with wavefronts of 64."""
    lines: int = 2048 // plan["block_dv"]
    return lines


def state_spec(plan: Constants) -> Spec:
    constants = {"LINES": state_lines(plan), "BLOCK_DV": plan["block_dv"], "DIES": plan["dies"]}
    return _spec(backward.row_state, plan, Variant(), constants, _divisors(plan), {"num_warps": 4})


def keys_roles(plan: Constants) -> tuple[str, ...]:
    """Return the kernels that compute dK and dV: one for both, or one each."""
    return ("dk", "dv") if "dv_block_m" in plan else ("dk",)


def keys_spec(plan: Constants, variant: Variant, role: str = "dk", listed: bool = False) -> Spec:
    constants = _common(plan, variant, role, listed)
    constants |= {"WITH_DK": role == "dk", "WITH_DV": role == "dv" or "dv_block_m" not in plan}
    # Gradients of pages are summed in float32 before they are rounded.
    types = {"DK": "*fp32", "DV": "*fp32"} if plan[f"{role}_paged"] else {}
    return _spec(
        backward.grad_keys, plan, variant, constants, _divisors(plan),
        _options(plan, role, variant), **types,
    )  # fmt: skip


def rows_spec(plan: Constants, variant: Variant, dots: bool = False, listed: bool = False) -> Spec:
    constants = _common(plan, variant, "dq", listed) | {"DOTS": dots}
    return _spec(
        backward.grad_rows, plan, variant, constants, _divisors(plan),
        _options(plan, "dq", variant),
    )  # fmt: skip


def bias_spec(plan: Constants, variant: Variant, all_rows: bool, all_keys: bool) -> Spec:
    constants = _common(plan, variant, "dq")
    constants |= {
        "BLOCK_M": BIAS_TILE,
        "BLOCK_N": BIAS_TILE,
        # Whether a page holds whole tiles was asked of other tiles.
        "PAGED": min(1, plan["dq_paged"]),
        "ALL_ROWS": all_rows,
        "ALL_KEYS": all_keys,
    }
    constants = {name: constants[name] for name in bias_grad.grad_bias.arg_names
                 if name in constants}  # fmt: skip
    options = {"num_warps": 4, "num_stages": 1}
    return _spec(bias_grad.grad_bias, plan, variant, constants, _divisors(plan), options)


def compile_for(spec: Spec, target: GPUTarget) -> Any:
    """Compile with Triton; needs no GPU."""
    names = list(spec.signature)
    attributes = {
        (names.index(name),): [["tt.divisibility", divisor]]
        for name, divisor in spec.divisors.items()
        if spec.signature[name] != "constexpr"
    }
    source = ASTSource(spec.function, spec.signature, spec.constants, attributes)
    # Said, because the default changes with Triton 3.10: exp2(qk · factor − base) wants one fma.
    options = spec.options | {"enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def target_of(arch: str) -> GPUTarget:
    """Return Triton's name for one of pyfa's archs."""
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 32 if int(arch[3:-2]) >= 10 else 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_").removesuffix("a")), 32)


__all__ = ["INTERPRETED", "Spec", "Variant", "compile_for", "target_of"]
