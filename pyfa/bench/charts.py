"""Draws pictures as SVG with matplotlib: rooflines, lines over the sequence length, heat maps.

Everything but data is drawn in ``INK``. ``svg`` replaces this color by the color of the surrounding
text, so pictures fit light and dark pages. ``standing_alone`` makes a file that fits both.
"""

from __future__ import annotations

import html
import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..device import Device

INK = "#5f6b7a"
# Okabe and Ito's, which the color-blind tell apart; without black, which a dark page swallows.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")
_MARKERS = "osD^vPX*"
# The order of the peers, which gives each peer the same color in every picture.
_PEERS = ("pyfa", "flash", "cudnn", "flex", "fa3", "fa4", "efficient", "naive")
# For a picture in a file: text and background, in light and in dark. It has a ground of its own
# because a page may be dark where the reader's system is light.
_ALONE = (
    "<style>svg { color: #1c2430; background: #ffffff }"
    " @media (prefers-color-scheme: dark) { svg { color: #e4e8ee; background: #0d1117 } }</style>"
)
# Make the picture as large as its contents: a title may be wider than its axes.
_WHOLE: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.1}
_SUFFIXES = (".png", ".svg", ".pdf")
Points = Sequence[tuple[float, float]]


def require(what: str) -> None:
    """Raise ``ValueError`` if ``what`` needs pictures and matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{what} needs matplotlib, which the extra bench has: "
            "pip install 'pyfa-attention[bench]'"
        )


def check_name(path: Path) -> None:
    """Raise ``ValueError`` if no picture can be written to ``path``."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: expected a name that ends in {', '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.absolute().parent}")


def figure(columns: int = 1, height: float = 3.4, width: float = 5.6) -> tuple[Figure, list[Axes]]:
    """Make a figure of ``columns`` axes side by side. ``height`` and ``width`` are the size of one
    of them in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = dict.fromkeys(inked, INK) | {"font.size": 9}
    with rc_context(settings):
        made = Figure(figsize=(width * columns, height), layout="constrained")
        axes = [made.add_subplot(1, columns, index + 1) for index in range(columns)]
    for each in axes:
        each.set_facecolor("none")
        each.spines[["top", "right"]].set_visible(False)
        each.grid(True, color=INK, alpha=0.2, linewidth=0.5)
    return made, axes


def lines(
    axes: Axes,
    series: Mapping[str, Points],
    x: str,
    y: str,
    title: str,
    log_y: bool = True,
) -> None:
    """Draw one line per name of ``series``, over an axis of powers of two."""
    for index, (name, points) in enumerate(series.items()):
        at, values = [p[0] for p in points], [p[1] for p in points]
        axes.plot(at, values, label=name, markersize=4, linewidth=1.4, **_style(name, index))
    axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    shown = sorted({p[0] for points in series.values() for p in points})
    axes.set_xticks(shown, [_short(value) for value in shown], rotation=45 if len(shown) > 6 else 0)
    axes.minorticks_off()
    _name(axes, x, y, title)
    _legend(axes)


def roofline(
    axes: Axes, device: Device, dtype: str, points: Mapping[str, tuple[float, float]], title: str
) -> None:
    """Draw the device's roof, and the given points (FLOP/byte, FLOP/s), on logarithmic axes."""
    peak, bandwidth = device.matrix_flops(dtype), device.bandwidth
    ridge = peak / bandwidth
    low = min([ridge / 8, *(at / 4 for at, _ in points.values() if at > 0)])
    high = max([ridge * 16, *(at * 2 for at, _ in points.values())])
    roof = [(low, low * bandwidth), (ridge, peak), (high, peak)]
    axes.plot([p[0] for p in roof], [p[1] / 1e12 for p in roof], color=INK, linewidth=1.6)
    axes.axvline(ridge, color=INK, linewidth=0.8, linestyle=":")
    text = f"ridge {ridge:.0f} FLOP/byte"
    axes.text(ridge * 1.1, low * bandwidth / 1e12, text, color=INK, fontsize=8)
    for index, (name, (at, speed)) in enumerate(points.items()):
        axes.plot(
            [at], [speed / 1e12], linestyle="none", markersize=7, label=name, **_style(name, index)
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    _name(axes, "FLOP per byte of memory", "TFLOP/s", title)
    _legend(axes)


def heat_map(
    axes: Axes, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]],
    title: str,
) -> None:  # fmt: skip
    """Draw ratios: those above 1 in blue, those below 1 in orange. A cell with NaN stays empty."""
    import math

    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    colors = LinearSegmentedColormap.from_list("ratio", [COLORS[1], "#f4f4f4", COLORS[0]])
    axes.imshow(values, cmap=colors, norm=LogNorm(0.25, 4.0), aspect="auto")  # type: ignore[arg-type, unused-ignore]
    axes.grid(False)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if not math.isnan(value):
                # On a saturated cell white, else black: neither depends on the page's color.
                tone = "#ffffff" if abs(math.log(value)) > 0.9 else "#111111"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=tone)
    axes.set_title(title, fontsize=10, color=INK)


def bars(axes: Axes, values: Mapping[str, float], x: str, title: str) -> None:
    """Draw one horizontal bar per name of ``values``."""
    axes.barh(list(values), list(values.values()), color=COLORS[0], height=0.6)
    axes.invert_yaxis()
    _name(axes, x, "", title)


def against(axes: Axes, name: str, points: Points) -> None:
    """Draw a point for each pair of a modeled and a measured figure."""
    index = len(axes.lines)
    at, values = [p[0] for p in points], [p[1] for p in points]
    axes.plot(at, values, linestyle="none", markersize=6, label=name, **_style(name, index))


def finish_against(axes: Axes, x: str, y: str, title: str) -> None:
    """Set up the axes of ``against``, and draw the diagonal on which model and measurement
    agree."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axline((1.0, 1.0), (10.0, 10.0), color=INK, linewidth=0.9, linestyle=":")
    _name(axes, x, y, title)
    _legend(axes)


def svg(made: Figure, name: str, title: str = "") -> str:
    """Return the figure as an ``<svg>`` element, as wide as its container and in the color of its
    text.

    ``name`` differs for each figure of a page and is the prefix of its identifiers. ``title`` is
    the description that screen readers read.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    # Text stays text, and the same figure gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        made.savefig(file, format="svg", transparent=True, metadata={"Date": None}, **_WHOLE)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"(<svg[^>]*?) (?:height|width)=\"[^\"]*\"", r"\1", text, count=1)
    text = re.sub(r"(<svg[^>]*?) (?:height|width)=\"[^\"]*\"", r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Drops ids that nothing refers to, and adds a description.
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    said = html.escape(title or name)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{said}" ', 1)
    text = text.replace(">", f"><title>{said}</title>", 1)
    return text.replace(INK, "currentColor")


def standing_alone(element: str) -> str:
    """Return the result of ``svg`` as the text of a file: it has a size of its own, and its colors
    follow the reader's light or dark theme."""
    opening = element[: element.index(">") + 1]
    sizes = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', opening)
    assert sizes is not None
    sized = opening.replace("<svg ", f'<svg width="{sizes[1]}pt" height="{sizes[2]}pt" ', 1)
    return sized + _ALONE + element[len(opening) :]


def save(made: Figure, path: Path) -> None:
    """Write the figure to a file, on a white background."""
    made.savefig(path, dpi=150, facecolor="white", **_WHOLE)


def _style(name: str, index: int) -> dict[str, Any]:
    """Return a peer's own style, with another marker if the name has a suffix (``naive, computed``,
    ``pyfa:triton``). Other names get styles by ``index``: as many as there are colors times
    markers."""
    peer = re.split(r"[:,]", name)[0]
    if peer in _PEERS:
        index = _PEERS.index(peer) + (len(COLORS) if name != peer else 0)
    turn, color = divmod(index, len(COLORS))
    return {"color": COLORS[color], "marker": _MARKERS[(color + turn) % len(_MARKERS)]}


def _legend(axes: Axes) -> None:
    """Draw the legend next to the axes, where it hides nothing."""
    axes.legend(
        fontsize=8, frameon=False, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )


def _name(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.set_title(title, fontsize=10, color=INK)


def _short(value: Any) -> str:
    return f"{value / 1024:.0f}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
