"""The one rule that every result is held to. There is no other slack anywhere.

ref is the reference in float64 on the same inputs; naive is the same formula computed eagerly in
the problem's own dtype, and so the yardstick: a kernel may round differently from eager PyTorch,
but not be much worse. First the places of NaN and ±inf must be those of ref. Then, over the finite
rest of the output and of each gradient, with ulp that of the tensor's dtype at max|ref|:

    max |x − ref|   ≤ f · max |naive − ref| + 4 ulp        f = 2, and 3 for gradients and softcap
    mean |x − ref|  ≤ 1.5 · mean yardstick

(a) The mean's yardstick is the larger of naive's mean error and that of ref rounded to the tensor's
dtype. Nothing can be better than correctly rounded, while naive is exact by luck where few terms
are added (one key, equal values): without this a perfect kernel would fail.

(b) Backward recomputes P = exp(s − L) from an LSE stored in float32. Half an ulp of L is at most
2⁻²⁴·|L|, and dP/P = −dL, so every P of the row, and with it every term of the gradient sums, is off
by that factor. naive keeps its probabilities and does not pay. Gradients therefore get
2⁻²⁴·max|L| times max|ref| on the maximum and times mean|ref| on the mean: nothing for 16-bit types
(|L| = 16 gives 1e-6), about as much as the rest for float32.

(c) Sums in float32 have no order that is right, and backward starts from what forward stored. naive
pays for neither: with few rows its products are summed in 64 lanes, and it forms both sides of each
cancellation from one product. ``recompute.py`` says what the float64 result becomes when δ comes
from the output as stored in its dtype and, for float32, when each score is off by what summing it
in order does. The yardstick, on the maximum and on the mean, is the larger of naive's error and
that one's. It matters where V has a large mean, where gradients cancel (a row that sees one key,
sinks, a bias per row), and for float32. A 16-bit gradient has both errors, naive's from the
rounding of P and dS and that of δ: independent of each other, so on the mean the root of the sum of
their squares. (Where scores are equal the two are alike, and each alone is 1.4 times too small.)

(d) In float32 all elements of a row share the errors of its scores, so a mean over n rows is one
of n independent numbers and not of n·D. The mean of n half-normal errors strays from what it is
expected to be by √(π/2 − 1)/√n of it, the ratio of two such means by √2 times that: 1.07/√n.
Float32 tensors get three of these, 1.5·(1 + 3.2/√n), where n counts the rows of ref that are not 0
throughout (for sinks the elements). In 16 bits each element of the output is rounded on its own;
nothing more.

(e) A 16-bit gradient gets the same 3.2/√n, with n the independent numbers that naive's error is
made of. It comes from the rounding of dS, and a row of dQ is a sum of the keys that it sees: as
many numbers as there are different keys, one where it sees one key or all are equal. And rows with
hardly any error count for nothing in a mean. n is (Σr)²/Σr² of the rows' mean errors r, times
tr(C)²/tr(C²) of the error's second moments C along head_dim: 8,000 to 9,600 and so 3.5 % for two
sequences of 65 rows and 97 keys and two heads, 2 where two rows see one key. Of a bias or of sinks
each element is a sum of its own, and counts as a row.

(f) Float8 queries: eager PyTorch has none, so naive is float32 on the scaled inputs with P rounded
to float8's 4 significant bits, wherever in the range it lies. A kernel whose P loses what is far
below the largest is not excused. Float8 keys under 16-bit queries are held to eager attention in
the queries' dtype.

LSE, which every backend computes in float32 from unrounded scores:

    16-bit inputs:  |x − ref| ≤ 1e-3 + 2⁻²⁰ · max|score|
    float8 queries: the same + what 14 bits of every sum of products make of the row's LSE
    float32:        |x − ref| ≤ 4 ulp(max|ref|) + √D · 2⁻²³ · max(scale·Σ|q||k|)

Hopper's matrix unit adds up float8 products in no more bits; ``float8.py`` derives from that how
far each row may be off.

The LSE moves by at most as much as the scores do. Each of the D additions of a dot product rounds
its partial sum, which is at most Σ|q||k|, by at most 2⁻²⁴ of it, and these roundings are
independent: their sum has a standard deviation of at most √(D/3)·2⁻²⁴·Σ|q||k|, and 2·√D·2⁻²⁴ is
3.5 of them. It must be Σ|q||k| and not |score|, which may cancel to nothing. 4 ulp are for exp, the
sum, log, and the last addition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

OUT_FACTOR = 2.0
LOOSE_FACTOR = 3.0
MEAN_FACTOR = 1.5
MAX_ULPS = 4.0
# Three standard deviations of the ratio of two means of n errors, times √n.
MEAN_NOISE = 3.0 * math.sqrt(2.0 * (math.pi / 2.0 - 1.0))


@dataclass(frozen=True)
class Check:
    """One tensor's errors beside what the rule allows. ``message`` says why it failed, else ""."""

    name: str
    max_error: float = 0.0
    max_bound: float = 0.0
    mean_error: float = 0.0
    mean_bound: float = 0.0
    message: str = ""

    @property
    def passed(self) -> bool:
        return not self.message

    @property
    def ratio(self) -> float:
        """The larger of error / bound: at most 1 where the rule holds."""
        return max(_ratio(self.max_error, self.max_bound), _ratio(self.mean_error, self.mean_bound))


def _ratio(error: float, bound: float) -> float:
    if error == 0.0:
        return 0.0
    return error / bound if bound > 0.0 else math.inf


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance between neighbours of ``dtype`` at magnitude ``value``."""
    info = torch.finfo(dtype)
    exponent = math.frexp(max(abs(value), info.tiny))[1] - 1
    return info.eps * 2.0**exponent


def judge(
    name: str,
    x: torch.Tensor,
    ref: torch.Tensor,
    naive: torch.Tensor,
    *,
    recomputed: torch.Tensor | None = None,
    gradient: bool = False,
    softcap: bool = False,
    largest_lse: float = 0.0,
) -> Check:
    """``x`` against the rule. The dtype is that of ``x``; ref, naive and recomputed are alike.

    A gradient comes with the largest finite |LSE|; ``recomputed`` may be left out for an output.
    """
    dtype, x, naive = x.dtype, x.double(), naive.double()
    wrong = _special_places(x, ref)
    if wrong:
        return Check(name, message=wrong)
    finite = ref.isfinite()
    if not bool(finite.any()):
        return Check(name)
    nonzero = ref != 0.0
    rows = max(1, int((nonzero.any(-1) if ref.dim() > 1 else nonzero).sum()))
    shared = name in ("dq", "dk", "dv")
    independent = _independent(torch.where(finite, naive - ref, 0.0), shared)
    x, ref, naive = x[finite], ref[finite], naive[finite]
    if not bool(naive.isfinite().all()):
        return Check(name, message="the case is badly made: naive is not finite where ref is")
    error, naive_error = (x - ref).abs(), (naive - ref).abs()
    rounded_error = (ref.to(dtype).double() - ref).abs()
    again_error = torch.zeros(1) if recomputed is None else (recomputed[finite] - ref).abs()
    largest, mean = float(ref.abs().max()), float(ref.abs().mean())
    factor = LOOSE_FACTOR if gradient or softcap else OUT_FACTOR
    from_lse = 2.0**-24 * largest_lse if gradient else 0.0
    yardstick = max(float(naive_error.max()), float(again_error.max()))
    means = [float(x.mean()) for x in (naive_error, again_error, rounded_error)]
    noise = 0.0
    if dtype == torch.float32:
        noise = MEAN_NOISE / math.sqrt(rows)
    elif gradient:
        means[0] = math.hypot(means[0], means[1])
        noise = MEAN_NOISE / math.sqrt(independent)
    return _checked(
        name,
        float(error.max()),
        factor * yardstick + MAX_ULPS * ulp(largest, dtype) + from_lse * largest,
        float(error.mean()),
        MEAN_FACTOR * (1.0 + noise) * max(means) + from_lse * mean,
    )


def judge_lse(
    x: torch.Tensor,
    ref: torch.Tensor,
    q: torch.Tensor,
    score_size: float,
    product_size: float,
    slack: torch.Tensor | None = None,
) -> Check:
    """The LSE ``x`` (float32) against ``ref``; ``score_size``: the largest |score|;
    ``product_size``: the largest scale·Σ|q||k|; ``slack``: of each row, for float8 queries.
    """
    wrong = _special_places(x.double(), ref)
    if wrong:
        return Check("lse", message=wrong)
    finite = ref.isfinite()
    if not bool(finite.any()):
        return Check("lse")
    error = (x.double()[finite] - ref[finite]).abs()
    if q.dtype == torch.float32:
        largest = float(ref[finite].abs().max())
        summed = math.sqrt(q.shape[-1]) * 2.0**-23 * product_size
        bound = MAX_ULPS * ulp(largest, torch.float32) + summed
    else:
        bound = 1e-3 + 2.0**-20 * score_size
    if slack is not None:
        # The row that is nearest to what it may be off by, or beyond.
        allowed = bound + slack[finite]
        worst = int((error / allowed).argmax())
        return _checked("lse", float(error[worst]), float(allowed[worst]), 0.0, 0.0)
    return _checked("lse", float(error.max()), bound, float(error.mean()), bound)


def judge_rotated(x: torch.Tensor, ref: torch.Tensor) -> Check:
    """Rotated keys in a cache, both in its dtype.

    Rotary in float32 rounds two products and their sum: at most 2⁻²²·max|x| for |cos|, |sin| ≤ 1.
    That may tip the final rounding to the neighbour, so one ulp of the value is added.
    """
    dtype, x, ref = x.dtype, x.double(), ref.double()
    largest = float(ref.abs().max())
    error = float((x - ref).abs().max())
    bound = 2.0**-22 * largest + ulp(largest, dtype)
    return _checked("k_cache", error, bound, error, bound)


def _independent(error: torch.Tensor, shared: bool) -> float:
    """How many independent numbers ``error`` is made of (e); ``shared``: by the rows of (…, D)."""
    error = error.reshape(-1, error.shape[-1] if shared else 1)
    largest = float(error.abs().max())
    if largest == 0.0:
        return 1.0
    error = error / largest  # whose squares could be subnormal
    rows = error.abs().mean(-1)
    moments = error.T @ error
    many_rows = float(rows.sum().square() / rows.square().sum())
    return many_rows * float(moments.trace().square() / moments.square().sum())


def _checked(
    name: str, max_error: float, max_bound: float, mean_error: float, mean_bound: float
) -> Check:
    reasons = []
    # Negated, so that a NaN that slipped through fails.
    if not max_error <= max_bound:
        reasons.append(f"{name}: max error {max_error:.3e}, allowed {max_bound:.3e}")
    if not mean_error <= mean_bound:
        reasons.append(f"{name}: mean error {mean_error:.3e}, allowed {mean_bound:.3e}")
    return Check(name, max_error, max_bound, mean_error, mean_bound, "; ".join(reasons))


def _special_places(x: torch.Tensor, ref: torch.Tensor) -> str:
    """Where NaN or an infinity stands in one and not in the other; "" where they agree."""
    if x.shape != ref.shape:
        return f"shape {tuple(x.shape)}, expected {tuple(ref.shape)}"
    kinds = (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf))
    for label, test in kinds:
        have, want = test(x), test(ref)
        if not torch.equal(have, want):
            extra, lost = int((have & ~want).sum()), int((want & ~have).sum())
            first = tuple((have != want).nonzero()[0].tolist())
            return f"{label}: {extra} where none belongs, {lost} missing, first at {first}"
    return ""
