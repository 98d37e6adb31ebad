"""Pictures of the ready-made masks. Each is drawn from the line of code in its caption."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable

import torch

from pyfa import masks, scores

SIZE = 32
IDS = torch.bucketize(torch.arange(SIZE), torch.tensor([11, 18]), right=True)
FIRST, LAST = torch.tensor([0, 12, 12, 20]), torch.tensor([12, 20, 32, 32])
GLOBAL = torch.zeros(SIZE, dtype=torch.bool)
GLOBAL[[0, 20]] = True
TABLE = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]])

# The line of code in the caption, and the values of its tensors.
PICTURES: dict[str, dict[str, torch.Tensor]] = {
    "masks.causal()": {},
    "masks.sliding(6)": {},
    "masks.sliding(4, 4)": {},
    "masks.dilated(12, 12, step=3)": {},
    "masks.streaming(3, 6)": {},
    "masks.padding(lengths)": {"lengths": torch.tensor([23])},
    "masks.documents(ids)": {"ids": IDS},
    "masks.documents(ids, masks.sliding(2, 2))": {"ids": IDS},
    "masks.prefix(9)": {},
    "masks.shared_prefix(8, answers)": {"answers": (torch.arange(SIZE) - 8) // 8},
    "masks.tree(parents)": {"parents": torch.tensor([-1, *(n // 2 for n in range(SIZE - 1))])},
    "masks.global_tokens(is_global, masks.sliding(2, 2))": {"is_global": GLOBAL},
    "masks.media(begins, ends, 8)": {"begins": FIRST, "ends": LAST},
    "masks.block_diffusion(16, 4)": {},
    "masks.natten((32,), 9)": {},
    "masks.natten((4, 8), 3)": {},
    "masks.natten((2, 4, 4), (2, 3, 3))": {},
    "masks.sliding_tile((2, 4), 4, (1, 3))": {},
    "masks.spatial(8)": {},
    "masks.temporal(8)": {},
    "masks.blocks(table, 8, 8)": {"table": TABLE},
    "masks.all_of(masks.causal(), masks.not_(masks.sliding(3)))": {},
    "masks.any_of(masks.sliding(3), masks.temporal(8))": {},
}


def seen(line: str) -> torch.Tensor:
    """Return which keys each query sees under the mask of ``line``: (32 queries, 32 keys)."""
    mask = eval(line, {"masks": masks, **PICTURES[line]})
    zero = torch.zeros((), dtype=torch.int64)
    rows, keys = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    return torch.as_tensor(mask(zero, zero, rows, keys)).expand(SIZE, SIZE)


def picture(line: str) -> str:
    """Return an SVG of the mask of ``line``: a path around the keys that each query sees."""
    path = ""
    for row, cells in enumerate(seen(line).tolist()):
        column = 0
        while column < SIZE:
            end = column
            while end < SIZE and cells[end]:
                end += 1
            if end > column:
                path += f"M{column} {row}h{end - column}v1h{column - end}z"
            column = max(end, column + 1)
    said = html.escape(f"{line}: {said_of(line)}".replace("``", ""), quote=True)
    return (
        f'<svg viewBox="-0.5 -0.5 {SIZE + 1} {SIZE + 1}" role="img" aria-label="{said}">'
        f'<rect class="frame" x="0" y="0" width="{SIZE}" height="{SIZE}"/>'
        f'<path class="seen" d="{path}"/></svg>'
    )


def said_of(line: str) -> str:
    """Return a description of the mask of ``line``: the first sentence of its docstring."""
    name = line.removeprefix("masks.").partition("(")[0]
    said = _first_sentence(getattr(masks, name)).removeprefix("Return ")
    return said[0].upper() + said[1:]


def _first_sentence(function: Callable[..., object]) -> str:
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _as_html(text: str) -> str:
    return re.sub("``(.+?)``", r"<code>\1</code>", html.escape(text))


def patterns() -> str:
    """Return each picture with its line of code and a description of the mask."""
    figures = [
        f"<figure>{picture(line)}<figcaption><code>{html.escape(line)}</code><br>"
        f"{_as_html(said_of(line))}.</figcaption></figure>"
        for line in PICTURES
    ]
    return '<div class="patterns">\n' + "\n".join(figures) + "\n</div>"


def score_functions() -> str:
    """Return a row for each function that returns a score_mod."""
    lines = ["| function | effect of its `score_mod` |", "| --- | --- |"]
    for name in (each for each in scores.__all__ if each != "alibi_slopes"):
        signature = str(inspect.signature(getattr(scores, name))).partition(" ->")[0]
        names = [x.partition(":")[0] for x in signature.strip("()").split(", ")]
        said = _first_sentence(getattr(scores, name)).replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{name}({', '.join(names)})` | {said}. |")
    return "\n".join(lines)


PARTS: dict[str, Callable[..., str]] = {"patterns": patterns, "score_functions": score_functions}
