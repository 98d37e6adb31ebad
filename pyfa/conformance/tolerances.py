"""The rule that bounds the error of every result. No other tolerance is used.

ref is the reference in float64 on the same inputs. naive is the same formula computed by eager
PyTorch in the problem's own dtype. The error of naive is the yardstick: a kernel may round
differently from eager PyTorch, but must not be much worse. First, NaN and ±inf must be at the same
positions as in ref. Then these bounds apply to the other, finite elements of the output and of each
gradient (one ulp is that of the tensor's dtype at max|ref|):

    max |x − ref|   ≤ f · max |naive − ref| + 4 ulp        f = 2, and 3 for gradients and softcap
    mean |x − ref|  ≤ 1.5 · mean yardstick

(a) The yardstick of the mean is the larger of naive's mean error and the mean error of ref rounded
to the tensor's dtype. No result can be better than correctly rounded, while naive can be exact by
chance if few terms are added (one key, equal values). Without this term a perfect kernel would
fail. The largest P of a row is 1 in naive. In a kernel it is exp of the difference of two
float32 products, and with scores of 2²³·eps or more (65,536 in bfloat16, 8,192 in float16) it may
be a number that is rounded to 16 bits. For such scores the yardsticks of an output are at least its
error if the rounding of this P has its largest error.

K and V of a group of query heads have gradients that a kernel may sum from parts in their dtype, as
FlashAttention-2 does, one per query head at most. Rounding the parts adds about the same error as
rounding the sum. The yardstick of their mean is at least √2 times the error of the rounded ref.

(b) Backward recomputes P = exp(s − L) from the LSE L, which is stored in float32. Rounding changes
L by at most 2⁻²⁴·|L|. Because dP/P = −dL, this changes every P of the row by the same relative
amount, and with P every term of the gradient sums. naive keeps its probabilities and does not have
this error. The bounds of gradients therefore get an additional 2⁻²⁴·max|L|, times max|ref| for the
maximum and times mean|ref| for the mean. For 16-bit dtypes this term is negligible (|L| = 16 gives
1e-6). For float32 it is about as large as the rest of the bound.

(c) A kernel has two errors that naive may not have. First, it sums float32 products in its own
order, and no order is the only correct one: with few rows, for example, naive sums in 64 lanes.
Second, backward computes δ = rowsum(dO∘O) from the output as forward stored it, so in dP − δ the
errors of the two terms differ. naive computes both terms from one product.

``recompute.py`` therefore computes a second float64 result that contains these errors: δ comes from
the stored output and, for float32, each score has the error of a sum in order. The yardstick, for
maximum and mean, is the larger of naive's error and the error of this second result. The second
result matters in three cases: for float32; if V has a large mean; and if gradients cancel (a row
that sees one key, sinks, a bias per row). The stored output has more than the error of the last
rounding. In 16 bits, ``recompute.py`` rounds P before the product with V, as matrix units need it:
if V has a large mean, this moves the output by up to one ulp, and with head_dim 1 the δ of a row is
a single product. In the median gradient of the quick level this adds 0.2 % to the bound of the mean
and nothing to that of the maximum. For float32, the stored output has the error of eager attention:
summing over the keys adds 9 times the error of the last rounding with 270 equal keys. See also (h).

A 16-bit gradient has two independent errors: one from the rounding of P and dS (which naive has,
too), and one from δ. The yardstick of its mean is the root of the sum of their squares. (If scores
are equal, the two errors are about equal, and each alone would be 1.4 times too small.)

(d) In float32 all elements of a row share the errors of the row's scores. A mean over n rows of D
elements is therefore a mean of n independent numbers, not of n·D. The mean of n half-normal errors
has a relative standard deviation of √(π/2 − 1)/√n. For the ratio of two such means it is √2 times
as large: 1.07/√n. Float32 tensors get three standard deviations as *noise*: the factor 1.5 becomes
1.5·(1 + 3.2/√n), where n counts the rows of ref that are not 0 throughout (for sinks the elements).
In 16 bits each element of the output is rounded independently, and the factor does not change.
Equal rows are an exception: with a head_dim of 1 their mean is a single number, which is a matter
of chance. The recipe "growing", whose rows would be equal, therefore needs a head_dim of 8 or
more.

(e) A 16-bit gradient gets the same noise, where n is the number of independent numbers in naive's
error. The error comes from the rounding of dS. A row of dQ is a sum over the keys that it sees, so
it has as many independent numbers as there are different keys: only one if it sees one key or equal
keys. Rows with hardly any error do not count in a mean. Therefore n is the product of two numbers:
(Σr)²/Σr² of the rows' mean errors r, and tr(C)²/tr(C²) of the error's second moments C along
head_dim. For two sequences of 65 rows and 97 keys with two heads, n is 8,000 to 9,600, and the
noise 3.5 %; for two rows that see one key, n is 2. For a bias or sinks each element is a separate
sum and counts as a row.

(f) Float8 queries: eager PyTorch does not support them, so naive computes in float32 on the scaled
inputs and rounds P to float8's 4 significant bits, however small P is. A kernel on 8-bit matrix
units has three more errors. The yardstick, for maximum and mean, is the larger of naive's error and
the error of ``float8.recomputed_out``, which contains all three:

- *The base.* Where a row sees only one key, or where one key has nearly all of its weight, naive's
  P is exact. A kernel's P is exact, too, if its base (the number that it subtracts from the scores)
  is the row's maximum. But a base may lag behind the maximum, and scales per block of V multiply P.
  Then the largest P is rounded like any other, by 2⁻⁶ to 2⁻⁵ of itself on average. As in (a), an
  exact yardstick would be a matter of chance, so P is rounded relative to another base in each row,
  spread evenly from 1 to 2. With scales per block of V, the largest P of all rows that one key
  dominates may have the same error, so each row's base is one for which this error is largest.
- *The range.* A P becomes 0 if it is less than about 2⁻¹⁸ (2⁻¹⁷·⁸ to 2⁻¹⁸·⁸) of the largest P in
  its tile of 128 keys or in any later tile. Tiles may begin anywhere, so this is the largest among
  the later keys and the 127 keys before it. If the value vector that belongs to the largest P is 0,
  the whole output may become 0. A kernel that loses larger probabilities, or those of tiles after
  that of the largest P, fails.
- *The sums.* The matrix unit keeps 14 bits of a sum of products. If a row sees two keys and their
  scores are several hundred, this may change P by more than rounding to 4 bits does.

Only a few float8 cases of the suite have scores so large that the last two errors matter. All
elements of a row share the error of its largest P, so the mean gets the noise of (e). Float8 keys
with 16-bit queries are compared with eager attention in the queries' dtype.

(g) A GPU may replace numbers below 2⁻¹²⁶, the smallest normal float32, by 0. Both bounds therefore
get an additional 2⁻¹²⁶ for each term of a sum.

(h) For a float32 output, naive's error may be too small as a yardstick. With few rows it may be
small by chance. Moreover, naive sums over the keys in several lanes, while a kernel sums in order:
with head_dim 1 and 75 keys, the kernel's mean error is twice naive's. ``recompute.out_deviation``
therefore computes a standard deviation σ for each element, from the roundings of scores and of sums
in order. The yardstick of the mean is at least √(2/π)·σ, the mean of normally distributed errors.
In the bound of the maximum, f · max |naive − ref| is at least 3.5 times the largest σ. For the
median float32 case of the quick level, this makes the maximum's bound 9 % larger and the mean's 10
%.

A 16-bit gradient of sinks has one number per head, and the error of naive may be small by chance,
too. Eager attention rounds what each row adds to the gradient, exp(sink − L)·(dLSE − δ), to 16
bits, and δ has the roundings of the stored output. ``recompute.sinks_deviation`` computes σ from
these roundings. Over 120 problems, the root of the mean square of naive's error is 2 to 8 σ.

Float32 gradients of q, k, v and sinks have a σ as well (``recompute.gradients_deviation``): from
the errors of P and of dS, and from sums in order over the keys for dq, over the rows of all heads
of a group for dk and dv, and over all rows for sinks. If a sum of 640 rows is large, its roundings
alone reach several ulps of the largest element. For the median float32 gradient of the quick level,
σ changes neither bound. On average it makes them 3 % larger. If the error of a score may take it
across a kink of a score_mod, where the slope jumps, σ contains the jump.

A float32 output's σ affects gradients, too. The stored output in (c) has an error of at least σ. In
exp(sink − L) no score shares the error of L, so a gradient of sinks has the whole error that L gets
from scores summed in order.

Every backend computes the LSE in float32 from unrounded scores. Its bounds are:

    16-bit inputs:  |x − ref| ≤ 1e-3 + 2⁻²⁰ · max|score|
    float8 queries: the same + the row's slack from 14-bit sums of products
    rotary:         the same + the row's slack from elements near a tie, rounded either way
    float32:        |x − ref| ≤ 4 ulp(max|ref|) + max(√D · 2⁻²³ · max(scale·Σ|q||k|), in order)

The slack of a row is an additional error that is allowed there. Hopper's matrix unit keeps only 14
bits when it adds up float8 products; ``float8.py`` derives the slack that results. ``rotary.py``
derives the slack of rotated rows in 16 and 8 bits.

For float32, the LSE changes by at most as much as the scores do. A dot product has D additions.
Each rounds its partial sum, which is at most Σ|q||k|, by at most 2⁻²⁴ of it. These roundings are
independent, so their sum has a standard deviation of at most √(D/3)·2⁻²⁴·Σ|q||k|. The bound
2·√D·2⁻²⁴·Σ|q||k| is 3.5 standard deviations. The bound uses Σ|q||k| and not |score|, because the
products of a score may cancel to 0.

If all products are equal, the roundings between two powers of two are equal, too, and not
independent. For example, a sum of 192 products of 8·scale and 8 is off by 2e-3, in eager attention
and in a kernel: 1.4 times the bound above. So the bound is at least *in order*: the largest error
of a float32 score that is summed in order after its q was multiplied by the scale
(``recompute.error_in_order``).

The 4 ulp cover exp, the sum, log, and the last addition. A score_mod multiplies the error of a
score by its slope. If the slope is more than 1, |score| and Σ|q||k| are multiplied by the slope,
too.
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
# The mean of |x| of normal x, in standard deviations; and how many of them no error exceeds.
HALF_NORMAL = math.sqrt(2.0 / math.pi)
DEVIATIONS = 3.5
# The smallest normal float32: a GPU may take less for 0.
FLUSHED = 2.0**-126
# The message of a check without a yardstick.
OVERFLOWS = "the case is badly made: naive is not finite where ref is"


@dataclass(frozen=True)
class Check:
    """The errors of one tensor and their bounds. ``message`` says why the check failed, or is "" if
    it did not."""

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
        """Return the larger of the two quotients error / bound. It is at most 1 if the rule
        holds."""
        return max(_ratio(self.max_error, self.max_bound), _ratio(self.mean_error, self.mean_bound))


def _ratio(error: float, bound: float) -> float:
    if error == 0.0:
        return 0.0
    return error / bound if bound > 0.0 else math.inf


def ulp(value: float, dtype: torch.dtype) -> float:
    """Return the distance between neighboring numbers of ``dtype`` at the magnitude ``value``."""
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
    deviation: torch.Tensor | None = None,
    gradient: bool = False,
    softcap: bool = False,
    float8: bool = False,
    largest_lse: float = 0.0,
    terms: int = 1,
    grouped: bool = False,
) -> Check:
    """Check ``x`` by the rule of this module. ``ref``, ``naive`` and ``recomputed`` have the shape
    of ``x``.

    For a gradient, pass the largest finite |LSE| as ``largest_lse``, and ``recomputed`` (paragraph
    (c)). For float32 results, pass ``recomputed`` and ``deviation`` (paragraph (h)). For the
    output of float8 queries, set ``float8`` and pass ``recomputed`` (paragraph (f)). ``terms`` is
    the largest number of terms of an element (paragraph (g)). ``grouped``: several query heads have
    a part in a gradient of K or V (paragraph (a)).
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
    yardstick_of = recomputed if float8 and recomputed is not None else naive
    independent = _independent(torch.where(finite, yardstick_of - ref, 0.0), shared or float8)
    x, ref, naive = x[finite], ref[finite], naive[finite]
    if not bool(naive.isfinite().all()):
        return Check(name, message=OVERFLOWS)
    error, naive_error = (x - ref).abs(), (naive - ref).abs()
    rounded_error = (ref.to(dtype).double() - ref).abs()
    again_error = torch.zeros(1) if recomputed is None else (recomputed[finite] - ref).abs()
    largest, mean = float(ref.abs().max()), float(ref.abs().mean())
    factor = LOOSE_FACTOR if gradient or softcap else OUT_FACTOR
    from_lse = 2.0**-24 * largest_lse if gradient else 0.0
    yardstick = max(float(naive_error.max()), float(again_error.max()))
    means = [float(x.mean()) for x in (naive_error, again_error, rounded_error)]
    if grouped and name in ("dk", "dv"):
        means[2] *= math.sqrt(2.0)
    strayed = 0.0
    if deviation is not None:
        strayed = DEVIATIONS * float(deviation[finite].max())
        means.append(HALF_NORMAL * float(deviation[finite].mean()))
    noise = 0.0
    if dtype == torch.float32:
        noise = MEAN_NOISE / math.sqrt(rows)
    elif gradient:
        means[0] = math.hypot(means[0], means[1])
        noise = MEAN_NOISE / math.sqrt(independent)
    elif float8:
        noise = MEAN_NOISE / math.sqrt(independent)
    return _checked(
        name,
        float(error.max()),
        max(factor * yardstick, strayed)
        + MAX_ULPS * ulp(largest, dtype)
        + from_lse * largest
        + terms * FLUSHED,
        float(error.mean()),
        MEAN_FACTOR * (1.0 + noise) * max(means) + from_lse * mean + terms * FLUSHED,
    )


def judge_lse(
    x: torch.Tensor,
    ref: torch.Tensor,
    q: torch.Tensor,
    score_size: float,
    product_size: float,
    slack: torch.Tensor | None = None,
    in_order: float = 0.0,
) -> Check:
    """Check the LSE ``x`` (float32) against ``ref``.

    ``score_size`` is the largest |score|, ``product_size`` the largest scale·Σ|q||k|. ``slack`` is
    an additional bound per row, for float8 queries and rotary. ``in_order`` is the largest error
    of a float32 score that is summed in order.
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
        bound = MAX_ULPS * ulp(largest, torch.float32) + max(summed, in_order)
    else:
        bound = 1e-3 + 2.0**-20 * score_size
    if slack is not None:
        # The row that is nearest to what it may be off by, or beyond.
        allowed = bound + slack[finite]
        worst = int((error / allowed).argmax())
        return _checked("lse", float(error[worst]), float(allowed[worst]), 0.0, 0.0)
    return _checked("lse", float(error.max()), bound, float(error.mean()), bound)


def judge_rotated(x: torch.Tensor, ref: torch.Tensor) -> Check:
    """Check rotated keys in a cache against the reference, both in the cache's dtype.

    Rotary in float32 rounds two products and their sum. If |cos|, |sin| ≤ 1, the error is at most
    2⁻²²·max|x|. It may change the final rounding to the neighboring number, so one ulp of the value
    is added.
    """
    dtype, x, ref = x.dtype, x.double(), ref.double()
    largest = float(ref.abs().max())
    error = float((x - ref).abs().max())
    bound = 2.0**-22 * largest + ulp(largest, dtype)
    return _checked("k_cache", error, bound, error, bound)


def _independent(error: torch.Tensor, shared: bool) -> float:
    """Return the number of independent numbers in ``error`` (e). ``shared``: the rows of (…, D)
    share errors."""
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
    """Return a message if NaN or an infinity is at different positions in the two tensors; "" if
    not."""
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
