"""What no case executes of a code object, and the reasons.

A way in is a branch that was executed and never went to one of its sides. Code that was not
executed is only reached by ways in. So it has a reason if each of its ways in has one: a rule of
``RULES`` that names the source line of the branch, or of the code to which it leads, and says why
no case goes there. A rule is keyed by the text of the line: addresses and numbers of lines change
with every edit.

A rule is *refuted* by a code object in which each branch of its line went both ways. Then the code
can be executed after all, and the rule has to go.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from source_lines import Place

from pyfa.backends.native.plans import name_of
from pyfa.emulator.decode import Code
from pyfa.plan import Plan

NEVER, TOO_LARGE, OTHER_DEVICE, ANOTHER_TEST = KINDS = (
    "never", "too large", "other device", "another test"
)  # fmt: skip
# Of 2^64 / 2^32 and more, in the code that LLVM writes for a division of 64 bits where the numbers
# do not fit into 32: 0x5f7ffffc, a float just below 2^64.
_DIVISION = "0x5f7ffffc"


class Rule(NamedTuple):
    """``of``: the plans of which it holds, by kernel and constants ("attn_bwd OWNS=1"), none for
    all; ``lines``: how the source line begins, then each line that calls it; ``machine``: a part of
    an instruction behind the branch; ``condition``: the comparison before it, as a pattern;
    ``kind``: NEVER for code that no accepted call reaches, TOO_LARGE for code that only calls
    beyond the emulator reach, OTHER_DEVICE for code that no call reaches on an MI300X, for which
    the emulator stands, ANOTHER_TEST for code that a unit test runs in the emulator."""

    kind: str
    reason: str
    of: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    machine: str = ""
    condition: str = ""


_QUOTIENT = "if ((by & (by - 1)) == 0) return x >>"  # kernels/hip/device.h
_PLACE = (_QUOTIENT, "unsigned place = quotient(id, dies), first = quotient(place, blocks);")
# The tiles of decode that a plan takes only for so few rows that one workgroup has all of them.
_ONE_BLOCK = (
    *(f"attn_decode HEAD_DIM={dim} TILES=1" for dim in (64, 96, 128, 192, 256)),
    *(f"attn_decode HEAD_DIM={dim} TILES=2" for dim in (64, 96, 128)),
)
_TANH_INLINE = (
    "attn_decode TILES=4",
    "attn_decode HEAD_DIM_V=192 KEY_DTYPE=2 TILES=2",
    "attn_decode HEAD_DIM=256 KEY_DTYPE=2 TILES=2",
)
_BACKWARD = ("attn_bwd", "attn_bwd_onepass", "bias_grad", "row_sums", "dq_convert")
RULES: tuple[Rule, ...] = (
    Rule(TOO_LARGE, "a 64-bit division of numbers of 2^32 and more", machine=_DIVISION),
    Rule(NEVER, "no backward has a cache", _BACKWARD, ("if (p.cache_leftpad)",)),
    Rule(NEVER, "no backward has a cache", _BACKWARD, ("if (p.cache_batch_idx)",)),
    Rule(NEVER, "pages have plans of their own", ("attn_fwd PAGED=0",), ("if (p.page_table)",)),
    Rule(NEVER, "a bool bias has no gradient", ("bias_grad",),
         ("bits = *(const unsigned char *)at;",)),
    Rule(NEVER, "the bias is known to be there", ("attn_bwd", "bias_grad"),
         ("terms.bias = p.bias_type == kNoBias", "Terms at = terms_of(again, c.s.batch, head,")),
    *(Rule(NEVER, "rows are those of one head", ("attn_bwd OWNS=1",), (f"if ({step} && --pass.",))
      for step in ("++step == pass.steps", "__builtin_expect(++step == pass.steps, 0)")),
    Rule(NEVER, "head dims are padded to multiples of 8", ("combine",),
         ("if (p.head_dim_v % kWide == 0) {",)),
    Rule(NEVER, "only a part of several is empty", ("attn_decode",),
         ('asm volatile("" : "+s"(x));', "(pin_scalar(x), ...);", "pin_scalars(partial_out,",
          "Results(params_again(), s, part).store_lse(")),
    Rule(NEVER, "a wavefront that has keys has a group of them", ("attn_decode STAGES=1",),
         ("if (kFloat8 || groups >= kStages) {",)),
    Rule(NEVER, "a wavefront that has keys has a group of them",
         ("attn_decode STAGES=3", "attn_decode STAGES=4"),
         ("if (i < groups) load(group[i]",), condition=r"s_cmp_lg_u32 s\d+, 0"),
    # Behind the tanh of one score comes the branch of the next one.
    *(Rule(NEVER, "a softcap is one of all scores", of,
           (line, "return capped(terms, qk, derivative) + alibi("),
           condition=r"v_cmp_lt_f32_e64 vcc, \|v\d+\|, s\d+")
      for of, line in ((("attn_decode",), "float s = qk * terms.scale;"),
                       (_TANH_INLINE, "if (terms.softcap > 0.0f) s ="))),
    *(Rule(NEVER, "attention_latent has one KV head", ("attn_decode LATENT=1",), (_QUOTIENT, line))
      for line in ("unsigned group = quotient(p.heads_q, p.heads_k);",
                   "unsigned sequence = quotient(pair, heads);")),
    # Of the devices with gfx942, only MI300A has dies whose number is not a power of two: 6, or 2
    # in a partition. The emulator stands for MI300X.
    Rule(OTHER_DEVICE, "MI300X has 8 dies", ("attn_decode",),
         (_QUOTIENT, "unsigned pairs = heads * batch, shares = pairs * parts, whole = quotient(")),
    Rule(OTHER_DEVICE, "MI300X has 8 dies, and one workgroup has all rows of a sequence",
         _ONE_BLOCK, _PLACE),
    Rule(OTHER_DEVICE, "MI300X has 8 dies", ("attn_decode",), _PLACE),
    # A workgroup has at most 64 rows, so what is hidden from some of them and not from all is at
    # most 63 keys at either end. Groups of a wavefront are 64 keys apart. So of the groups in this
    # loop, which leaves the last ones, only a wavefront's first one is masked.
    Rule(NEVER, "tiles between the first and the last ones have no mask", ("attn_decode",),
         ("if (first >= b.all_low", "finish(s, shared, p, sequence", "step(state",
          "advance(group[i]")),
    # tests/compat/test_query_values.py
    Rule(ANOTHER_TEST, "attention_latent has no softcap, but flash-attention's qv has",
         ("attn_decode LATENT=1",), ("if (b.general) {",)),
    *(Rule(ANOTHER_TEST, "attention_latent has no window, packing, padding or batch index, but "
           "flash-attention's qv has", ("attn_latent", "attn_decode LATENT=1"), (line,))
      for line in ("if (p.window_left >= 0)", "if (p.cu_seqlens_q)", "if (p.cu_seqlens_k)",
                   "s.rows = p.seqused_q ?", "if (p.cache_leftpad)", "if (p.cache_batch_idx)")),
    *(Rule(NEVER, "a cache has no dropout", ("attn_fwd SCORE=2",), (line,))
      for line in ("if (p.cache_leftpad)", "if (p.cache_batch_idx)")),
    Rule(NEVER, "keys in pages are not packed", ("attn_fwd PAGED=1",), ("if (p.cu_seqlens_k)",)),
    # In the first step of two, and in one behind them, the tile that comes next is an odd one.
    Rule(NEVER, "the scales of new tiles are loaded at even ones", ("attn_fwd SCORE=0",),
         ("if (tile % kLanes == 0)", "if (kPlain)", "return descale.of(",
          "if (kFloat8) scales = state.scales_of(")),
    Rule(NEVER, "there is no further type of bias", ("bias_grad",),
         ("if (row < p.seqlen_q) store_element(",), condition=r"s_cmp_eq_u32 s\d+, 4"),
)  # fmt: skip

# Of an instruction behind a jump or an end to which no branch leads.
NOWHERE = Rule(NEVER, "nothing leads there")


class Way(NamedTuple):
    """The branch at instruction ``branch`` never went to instruction ``to``."""

    branch: int
    to: int


class Left(NamedTuple):
    """``count`` instructions of a code object that are reached by these ``ways`` alone."""

    ways: tuple[Way, ...]
    count: int


def following(code: Code, index: int) -> tuple[int, ...]:
    """Return the instructions that may come after the one at ``index``."""
    name = code.names[index]
    if name == "s_endpgm":
        return ()
    target = int(code.instructions["imm"][index])
    if name == "s_branch":
        return (target,)
    return (index + 1, target) if name.startswith("s_cbranch") else (index + 1,)


def left(code: Code, executed: Collection[int]) -> list[Left]:
    """Return what is not among the addresses ``executed``, by the ways that lead there."""
    ran = [int(pc) in executed for pc in code.instructions["pc"]]
    ways_to: dict[int, list[Way]] = collections.defaultdict(list)
    for index, was in enumerate(ran):
        if was:
            for to in following(code, index):
                if not ran[to]:
                    way = Way(index, to)
                    for reached in _reached(code, ran, to):
                        ways_to[reached].append(way)
    sums = collections.Counter(tuple(ways_to[index]) for index, was in enumerate(ran) if not was)
    return [Left(ways, count) for ways, count in sums.items()]


def _reached(code: Code, ran: Sequence[bool], begin: int) -> set[int]:
    found, waiting = {begin}, [begin]
    while waiting:
        for to in following(code, waiting.pop()):
            if not ran[to] and to not in found:
                found.add(to)
                waiting.append(to)
    return found


class Explained:
    """The rules of one code object: which hold for which of its branches."""

    def __init__(
        self, plan: Plan, code: Code, places: Sequence[Place], rules: Sequence[Rule] | None = None
    ) -> None:
        self.code, self.places = code, places
        words = {name_of(plan), *(f"{name}={value}" for name, value in plan.constants)}
        rules = RULES if rules is None else rules
        self.rules = [
            rule for rule in rules
            if not rule.of or any(words.issuperset(each.split()) for each in rule.of)
        ]  # fmt: skip

    def reason(self, left: Left) -> Rule | None:
        """Return the rule of the first way in if all ways in have one."""
        rules = [self._rule_of(way) for way in left.ways]
        return next(iter(rules), NOWHERE) if all(rules) else None

    def way_in(self, left: Left) -> str:
        """Return the source line of the first branch without a rule and, where that is inlined, of
        the call."""
        way = next(way for way in left.ways if not self._rule_of(way))
        return " ← ".join(self._lines(way.branch, -1)[:2])

    def _rule_of(self, way: Way) -> Rule | None:
        return next((rule for rule in self.rules if self._is_of(rule, way)), None)

    def refuted(self, executed: Collection[int]) -> list[Rule]:
        """Return the rules whose branches all went both ways."""
        at = [int(pc) in executed for pc in self.code.instructions["pc"]]
        closed = dict[Rule, bool]()
        for way in self._branches():
            for rule in self.rules:
                if at[way.branch] and self._is_of(rule, way):
                    closed[rule] = closed.get(rule, False) or not at[way.to]
        return [rule for rule, has_closed in closed.items() if not has_closed]

    def _branches(self) -> Iterator[Way]:
        for index, name in enumerate(self.code.names):
            if name.startswith("s_cbranch"):
                for to in following(self.code, index):
                    yield Way(index, to)

    def _is_of(self, rule: Rule, way: Way) -> bool:
        if rule.machine:
            return any(rule.machine in text for text in self._block(way.to))
        if rule.condition and not re.fullmatch(rule.condition, self._comparison(way.branch)):
            return False
        return any(
            len(lines) >= len(rule.lines) and all(map(str.startswith, lines, rule.lines))
            for lines in (self._lines(way.branch, -1), self._lines(way.to, 1))
        )

    def _lines(self, index: int, step: int) -> tuple[str, ...]:
        """Return the lines of the instruction, or of the next one that has any."""
        while 0 <= index < len(self.places) - 1 and not self.places[index].lines:
            index += step
        return self.places[index].lines

    def _comparison(self, branch: int) -> str:
        """Return the last comparison before the branch."""
        texts = (place.text for place in reversed(self.places[:branch]))
        return next((text for text in texts if "_cmp_" in text), "")

    def _block(self, index: int) -> Iterator[str]:
        """Yield the instructions from ``index`` to the next branch."""
        for place in self.places[index:]:
            yield place.text
            if place.text.startswith(("s_cbranch", "s_branch", "s_endpgm")):
                return
