"""``pyfa explain --model``: a table of a model's attention layers on a device, which need not be in
this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from . import model_config
from .console import print_json, print_table, print_text, size
from .model_config import Attention
from .plan import seconds
from .problem import kernels_of

if TYPE_CHECKING:
    import torch

    from ..dispatch import Explanation
    from ..traffic import Model, Shape

_SEQLEN = 8192
_NOTE = """\
"bytes" and "at least" are sums over the layers of a row. "64/8 heads" are query and KV heads.
"bytes" counts each input read once and each output written once. "at least" is the time of kernels
that reach the vendor's peak figures, with tiles and DRAM bytes computed by formula. It is a bound,
not a prediction or a measurement. Only attention is counted: no projections, no MLP, no
communication."""


class Row(NamedTuple):
    """The layers with the same attention, in one phase, on one GPU.

    ``answer`` is None if pyfa does not support this attention, and ``why`` says why. Otherwise
    ``why`` has the reasons of the backends before the chosen one.
    """

    phase: str
    attention: Attention
    shape: Shape
    answer: Explanation | None
    model: Model
    why: list[str]

    @property
    def kernel(self) -> str:
        """Return the file or function that would run."""
        plan = self._plan
        return "none" if plan is None or self.answer is None else f"{plan.kernel}"

    @property
    def plan(self) -> str:
        """Return the kernel with its constants."""
        return "" if self._plan is None else str(self._plan)

    @property
    def _plan(self) -> Any:
        if self.answer is None:
            return None
        found = [x.plan for x in self.answer.answers if x.backend == self.answer.chosen]
        return found[0] if found else None

    @property
    def _moved(self) -> int:
        """Return the compulsory bytes of one layer."""
        return self.model.compulsory["forward"]

    @property
    def moved(self) -> int:
        """Return the compulsory bytes of all its layers."""
        return self.attention.layers * self._moved

    @property
    def least(self) -> tuple[float, str]:
        """Return the least seconds of all its layers and what bounds them, by the kernel's tiles if
        they are known, else for any kernel."""
        from ..traffic.roofline import bound

        model = self.model
        tiled = model.costs.get(("tiled", "forward"))
        if tiled is None:
            any_kernel = bound(model.device, model.dtype, model.flops["forward"], self._moved)
            return self.attention.layers * any_kernel.seconds, any_kernel.by
        return self.attention.layers * tiled.seconds, tiled.by

    def as_dict(self) -> dict[str, Any]:
        time, by = self.least
        return {
            "phase": self.phase,
            "attention": self.attention._asdict(),
            "shape": self.shape._asdict(),
            "chosen": None if self.answer is None else self.answer.chosen,
            "plan": self.plan or None,
            "why": self.why,
            "bytes": self.moved,
            "flops": self.attention.layers * self.model.flops["forward"],
            "bound_by": by,
            "at_least_seconds": time,
        }


def run(options: argparse.Namespace) -> int:
    """Run the command; status 0 even if no backend can run a layer, because that is an answer."""
    import torch

    model = model_config.load(options.model)
    prompt, keys = options.seqlen or (model.tokens or _SEQLEN,) * 2
    if not options.batch or not prompt or prompt > keys:
        raise ValueError(
            "--seqlen, --batch: expected 1 or more, and with two lengths, as in 512,8192, no more "
            f"new tokens than tokens in all; got --seqlen {prompt},{keys} --batch {options.batch}"
        )
    dtype: torch.dtype = getattr(torch, options.dtype)
    if dtype.itemsize == 1:
        raise ValueError("--dtype: expected float16, bfloat16 or float32 with --model")
    rows = []
    for phase, attentions, queries in (
        ("prefill" if model.decode else "forward", model.prefill, prompt),
        ("decode", model.decode, 1),
    ):
        for each in attentions:
            part = _shared_out(each, options.tp)
            rows.append(_row(phase, part, options, queries, keys, dtype))
    cache = cache_bytes(model, options.batch, keys, options.tp, dtype.itemsize)
    if options.json:
        data = {
            "model": {"name": model.name, "family": model.family},
            "batch": options.batch, "prompt": prompt, "keys": keys, "tp": options.tp,
            "dtype": options.dtype, "device": rows[0].model.device.name,
            "rows": [row.as_dict() for row in rows], "cache_bytes": cache,
        }  # fmt: skip
        print_json("explain", data)
    else:
        _print(model, options, rows, (prompt, keys), cache)
    return 0


def cache_bytes(
    model: model_config.Model, batch: int, keys: int, tp: int, itemsize: int
) -> dict[str, int]:
    """Return the bytes of the cache on each GPU: as needed by the layers, and with every token in
    every layer."""
    totals = {"needed": 0, "every_token": 0, "per_token": 0}
    for each in model.decode:
        part = _shared_out(each, tp)
        token = part.layers * part.cached * itemsize
        kept = keys if part.window is None else min(keys, part.window)
        totals["needed"] += batch * kept * token
        totals["every_token"] += batch * keys * token
        totals["per_token"] += token
    return totals


def _shared_out(each: Attention, tp: int) -> Attention:
    """Return the share of one of ``tp`` GPUs: heads are divided, with at least one KV head each."""
    if tp < 1 or each.heads_q % tp:
        raise ValueError(f"--tp: expected a divisor of {each.heads_q} query heads; got {tp}")
    if each.latent:  # the latent vector belongs to all heads
        heads_k = 1 if each.values_in_keys else each.heads_k // tp
        return each._replace(heads_q=each.heads_q // tp, heads_k=heads_k)
    if each.heads_k % tp and tp % each.heads_k:
        raise ValueError(
            f"--tp: expected a divisor or a multiple of {each.heads_k} key heads; got {tp}"
        )
    heads_k = max(1, each.heads_k // tp)
    cached = each.cached // each.heads_k * heads_k
    return each._replace(heads_q=each.heads_q // tp, heads_k=heads_k, cached=cached)


def _row(
    phase: str, each: Attention, options: argparse.Namespace, queries: int, keys: int,
    dtype: torch.dtype,
) -> Row:  # fmt: skip
    import torch

    import pyfa

    from .. import device as devices
    from ..traffic import Shape, model

    place = torch.device("cuda" if options.device is None and torch.cuda.is_available() else "cpu")

    def tensor(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(sizes[-1], dtype=dtype, device=place).expand(sizes)

    causal = each.causal and queries > 1
    left = -1 if each.window is None else each.window - 1
    arguments: dict[str, Any] = {
        "causal": causal,
        "window": None if left < 0 else (left, 0),
        "softcap": each.softcap,
    }
    if each.sinks:
        arguments["sinks"] = tensor(each.heads_q, dtype=torch.float32)
    if phase == "decode":
        arguments["cache_seqlens"] = tensor(options.batch, dtype=torch.int32)
    q = tensor(options.batch, queries, each.heads_q, each.head_dim)
    k = tensor(options.batch, keys, each.heads_k, each.head_dim)
    latent = phase == "decode" and each.values_in_keys
    if latent:  # attention_latent, whose kernels read V as part of K
        v, arguments["latent"] = k[..., : each.head_dim_v], True
    else:
        v = tensor(options.batch, keys, each.heads_k, each.head_dim_v)
    shape = Shape(
        options.batch, queries, keys, each.heads_q, each.heads_k, each.head_dim, each.head_dim_v,
        left, 0 if causal or left >= 0 else -1, dtype.itemsize, latent,
    )  # fmt: skip
    try:
        answer = pyfa.explain(q, k, v, device=options.device, **arguments)
    except ValueError as error:
        named = devices.by_name(options.device) if options.device else devices.of(place)
        bare = model(shape, named, options.dtype)
        return Row(phase, each, shape, None, bare, [str(error), "the bound is that of any kernel"])
    kernels, _ = kernels_of(answer, shape, False)
    costs = model(shape, answer.problem.device, options.dtype, kernels)
    why: list[str] = []
    able = [one.backend for one in answer.answers if one.plan is not None]
    for one in answer.answers:
        if one.backend == answer.chosen:
            why.extend(one.plan.notes if one.plan is not None else ())
            others = [name for name in able if name != one.backend]
            if others:
                why.append(f"{' and '.join(others)} could also run it")
            break
        why.extend(f"not {one.backend}: {reason}" for reason in one.reasons)
    return Row(phase, each, shape, answer, costs, why)


def _print(
    model: model_config.Model, options: argparse.Namespace, rows: list[Row],
    lengths: tuple[int, int], cache: dict[str, int],
) -> None:  # fmt: skip
    prompt, keys = lengths
    device = rows[0].model.device
    gpus = f", one of {options.tp} GPUs" if options.tp > 1 else ""
    tokens = f"{prompt} tokens" if prompt == keys else f"{prompt} of {keys} tokens"
    print(f"{model.name} ({model.family}) on {device.name or device.arch}{gpus}: "
          f"batch {options.batch}, {tokens}, {options.dtype}")  # fmt: skip
    print()
    table = []
    for number, row in enumerate(rows, 1):
        time, by = row.least
        table.append([
            str(number), row.phase, f"{row.attention.name} ({row.attention.layers})",
            _described(row), row.answer.chosen or "none" if row.answer else "none", row.kernel,
            size(row.moved), by or "–", seconds(time),
        ])  # fmt: skip
    head = ["", "phase", "layers", "attention", "backend", "kernel", "bytes", "bound by",
            "at least"]  # fmt: skip
    print_table(head, table)
    for phase in dict.fromkeys(row.phase for row in rows):
        some = [row for row in rows if row.phase == phase]
        moved, time = sum(row.moved for row in some), sum(row.least[0] for row in some)
        print(f"{phase}: {size(moved)}, at least {seconds(time)} in all")
    print()
    for number, row in enumerate(rows, 1):
        if row.plan:
            print(f"{number}: {row.plan}")
        for reason in row.why:
            print(f"{number}: {reason}")
    if model.decode:
        print()
        least = f"cache: {size(cache['needed'])}"
        if cache["needed"] != cache["every_token"]:
            whole = size(cache["every_token"])
            least += f" ({whole} if layers with a window also keep every token)"
        print(f"{least}; {size(cache['per_token'])} per token, all layers together")
    print()
    print_text(_NOTE)


def _described(row: Row) -> str:
    each = row.attention
    dims = f"{each.head_dim}" if each.head_dim == each.head_dim_v else (
        f"{each.head_dim}/{each.head_dim_v}")  # fmt: skip
    parts = [f"{each.heads_q}/{each.heads_k} heads, head_dim {dims}"]
    if each.causal and row.shape.seqlen_q > 1:
        parts.append("causal")
    if each.window is not None:
        parts.append(f"window {each.window}")
    if each.softcap:
        parts.append(f"softcap {each.softcap:g}")
    if each.sinks:
        parts.append("sinks")
    return ", ".join(parts)
