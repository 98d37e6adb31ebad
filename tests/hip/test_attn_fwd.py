"""The HIP forward kernel, run in the emulator: right as it is, and caught when it is broken."""

from dataclasses import replace

import pytest
import torch
import turns
from planted import faults_found

import pyfa
from pyfa import codeobject, dispatch, emulator
from pyfa.backends.base import OtherAlignment
from pyfa.backends.common import splits
from pyfa.backends.common.calls import GENERAL, PLAIN
from pyfa.backends.hip import code, forward, samples
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import combine
from pyfa.backends.native import forward as native_forward
from pyfa.backends.native.tiles import gfx942
from pyfa.conformance.cases import Case
from pyfa.problem import Call, tensors_of

# Between them: rows and keys past the edges of tiles and workgroups, grouped heads, values whose
# rounding shows, maxima that move, every score term, and every way that keys can lie.
CASES = {
    "plain": Case(dtype="bfloat16", lengths_q=(130,), lengths_k=(200,), heads_q=4, heads_k=2),
    "causal": Case(dtype="float16", lengths_q=(270,), lengths_k=(225,), causal=True),
    "offset": Case(dtype="bfloat16", lengths_q=(70,), lengths_k=(257,), recipe="offset"),
    "growing": Case(
        dtype="float16", lengths_q=(129,), lengths_k=(250,), causal=True, recipe="growing"
    ),
    "window": Case(lengths_q=(140,), lengths_k=(260,), window=(70, 20)),
    # Workgroups of 256 rows, which the others use with pages and with score terms only.
    "256 rows": Case(lengths_q=(300,), lengths_k=(330,), window=(-1, 40), heads_q=2, heads_k=1),
    "256 rows, 128": Case(
        dtype="float16", lengths_q=(300,), lengths_k=(330,), window=(150, -1), head_dim=128,
        recipe="growing",
    ),
    "128 rows, 128": Case(
        lengths_q=(300,), lengths_k=(330,), causal=True, head_dim=128, heads_q=2, heads_k=1,
    ),
    "256 rows, 192": Case(
        lengths_q=(300,), lengths_k=(330,), window=(150, -1), head_dim=192,
        head_dim_v=192, recipe="growing",
    ),
    "128 rows, 192": Case(
        dtype="float16", lengths_q=(300,), lengths_k=(330,), window=(100, 20), head_dim=192,
        head_dim_v=128, heads_q=2, heads_k=1,
    ),
    "terms": Case(
        lengths_q=(70,), lengths_k=(150,), softcap=3.0, alibi="batch", bias="full", sinks=True
    ),
    # A term alone: what products begin with, and what hides the scores that they leave.
    "bias": Case(lengths_q=(140,), lengths_k=(200,), bias="full", sinks=True, heads_q=2, heads_k=1),
    "bias, 128": Case(
        dtype="bfloat16", lengths_q=(70,), lengths_k=(264,), bias="full", causal=True, head_dim=128,
    ),
    "shared bias": Case(
        dtype="bfloat16", lengths_q=(140,), lengths_k=(200,), bias="keys_like_q", heads_q=2,
        heads_k=1,
    ),
    "bool bias": Case(
        dtype="bfloat16", lengths_q=(140, 140), lengths_k=(328, 328), bias="bool", sinks=True,
        heads_q=2, heads_k=1,
    ),
    "bool bias, 96": Case(
        kind="varlen", dtype="float16", lengths_q=(33, 0, 70), lengths_k=(200, 9, 300), head_dim=96,
        head_dim_v=96, bias="heads_bool", window=(150, 20), heads_q=4, heads_k=2, used_q=True,
    ),
    "bool bias, 128": Case(
        dtype="float16", lengths_q=(300,), lengths_k=(264,), bias="heads_bool", causal=True,
        head_dim=128, recipe="growing",
    ),
    "bool bias, NaN": Case(
        dtype="bfloat16", lengths_q=(33,), lengths_k=(140,), bias="bool", hostile="k=nan",
    ),
    "bool bias, inf": Case(
        dtype="float16", lengths_q=(33,), lengths_k=(140,), bias="bool", hostile="k=inf",
    ),
    "shared bool bias": Case(
        dtype="float16", lengths_q=(40, 40), lengths_k=(268, 268), bias="sequences_bool",
        heads_q=2, heads_k=1,
    ),
    "float32 bias": Case(
        lengths_q=(140,), lengths_k=(200,), bias="heads", sinks=True, heads_q=2, heads_k=1,
    ),
    "float32 bias, 128": Case(
        dtype="float16", lengths_q=(70,), lengths_k=(264,), bias="heads", causal=True, head_dim=128,
    ),
    "shared float32 bias": Case(
        dtype="float16", lengths_q=(140,), lengths_k=(200,), bias="keys", heads_q=2, heads_k=1,
    ),
    "ALiBi": Case(
        dtype="bfloat16", lengths_q=(140,), lengths_k=(201,), alibi="batch", window=(-1, 90),
    ),
    # Scores on both sides of 0, and some that the softcap flattens.
    "softcap": Case(
        lengths_q=(140,), lengths_k=(200,), softcap=2.0, scale=0.3, sinks=True, heads_q=2,
        heads_k=1,
    ),
    "softcap, 256": Case(
        dtype="float16", lengths_q=(140,), lengths_k=(201,), softcap=3.0, scale=0.2, causal=True,
        head_dim=256,
    ),
    "softcap, window": Case(
        dtype="bfloat16", lengths_q=(140,), lengths_k=(260,), softcap=40.0, window=(70, 20),
        recipe="growing", head_dim=128,
    ),
    "softcap of NaN": Case(
        lengths_q=(65,), lengths_k=(97,), softcap=5.0, causal=True, hostile="k=nan",
    ),
    "dropout": Case(lengths_q=(66,), lengths_k=(130,), dropout_p=0.2),
    "split": Case(dtype="float16", lengths_q=(80,), lengths_k=(600,), sinks=True),
    "varlen": Case(
        kind="varlen", lengths_q=(70, 0, 300), lengths_k=(70, 5, 99), used_q=True, used_k=True,
        slack=3, head_dim=56, head_dim_v=48, heads_q=3, heads_k=1, layout="strided",
    ),
    "varlen 96": Case(
        kind="varlen", lengths_q=(70, 0, 300), lengths_k=(70, 5, 99), used_q=True, used_k=True,
        slack=3, head_dim=80, head_dim_v=72, heads_q=3, heads_k=1, layout="strided",
    ),
    "heads": Case(lengths_q=(130,), lengths_k=(40,), heads_q=16, heads_k=8),
    "paged": Case(
        kind="kvcache", lengths_q=(70, 70), lengths_k=(150, 99), page_size=16, leftpad=True,
        slack=2, causal=True,
    ),
    "paged, 128": Case(
        kind="kvcache", lengths_q=(70, 70), lengths_k=(150, 99), head_dim=104, page_size=5,
    ),
    # Pages of whole groups of 16 keys: ends in groups and in pages, pages that end in tiles.
    "groups": Case(
        kind="kvcache", dtype="bfloat16", lengths_q=(70, 70), lengths_k=(250, 99), page_size=16,
        heads_q=4, heads_k=2, slack=2, causal=True,
    ),
    "groups, 128": Case(
        kind="varlen", dtype="float16", lengths_q=(33, 0, 270), lengths_k=(200, 9, 333),
        head_dim=104, page_size=48, used_q=True, window=(150, 20),
    ),
    "groups, 256": Case(
        kind="kvcache", dtype="float16", lengths_q=(130,), lengths_k=(201,), head_dim=256,
        page_size=16, heads_q=2, heads_k=1, layout="strided",
    ),
    "groups, split": Case(
        kind="kvcache", dtype="bfloat16", lengths_q=(80,), lengths_k=(600,), head_dim=128,
        page_size=80, num_splits=3, sinks=True, recipe="growing",
    ),
}  # fmt: skip

# Each: the case that shows it, the exact snippet, what it becomes.
FAULTS = {
    "mask off by one": ("causal", "key > c.last_key[n] ||", "key > c.last_key[n] + 1 ||"),
    "window off by one": ("window", "key < c.first_key[n]", "key + 1 < c.first_key[n]"),
    "full tiles misjudged": ("window", "first < c.seen.all_low ||", ""),
    "keys of the first tile skipped": ("window", "begin = seen.low /", "begin = seen.all_low /"),
    "accumulator not rescaled": ("growing", "o[t][n] *= factor[n];", ";"),
    "sum not rescaled": ("growing", "row[n].total *= factor;", ";"),
    "maximum of half a row": ("growing", "M::column_max(largest[n])", "largest[n]"),
    "sum of half a row": ("plain", "M::column_sum(rows[n].total)", "rows[n].total"),
    "base that lags too far": ("growing", ": 8.0f;", ": 800.0f;"),
    "accumulator rescaled late": (
        "growing", "kLate && slot == kKeySlots)", "kLate && slot == kKeySlots + 1)",
    ),
    "last tile not rescaled": ("growing", "state.rescale.apply(state.o);\n  for (", "for ("),
    "barrier before the last products dropped": (
        "plain", "barrier();\n      ahead.read_keys", "ahead.read_keys",
    ),
    "keys not awaited there": (
        "256 rows", "loads_arrived();\n      barrier();\n      ahead", "barrier();\n      ahead",
    ),
    "barrier after a tile dropped": (
        "terms", "  loads_arrived();\n  barrier();\n}", "  loads_arrived();\n}",
    ),
    "maxima of the first keys": ("growing", "kAllKeyBeats - 2 -", "kAllKeyBeats + 400 -"),
    "one probability outside the sum": (
        "plain", "state.row[e.n].total += made[i];", "if (i != 5) state.row[e.n].total += made[i];",
    ),
    "probabilities left out": ("plain", ": kLastNeed - 1;", ": kLastNeed * 2;"),
    "barrier after the first keys dropped": (
        "plain", "barrier();  // the next load overwrites", "// the next load overwrites",
    ),
    "swizzle of K on one side": ("plain", "((unit ^ (key & 7)) * 16)", "(unit * 16)"),
    "V's second row over its first": ("plain", "to + place[i][1], odd", "to + place[i][0], odd"),
    "V's keys in memory's order": ("plain", "return n / 4 * depth + n % 4;", "return n;"),
    "read beyond the sequence": (
        "varlen", "(there - 1) * row_bytes + width", "there * row_bytes + width",
    ),
    "read beyond the head": ("varlen", "width(head.head_dim * kSize)", "width(512)"),
    "rows beyond the sequence stored": ("varlen", "if (row >= c.s.rows) continue;", ""),
    "first row of a sequence forgotten": ("varlen", "s.row0 = int_at(p.cu_seqlens_q, batch);", ""),
    "wrong key head": ("plain", "work.head / (p.heads_q / p.heads_k)", "work.head % p.heads_k"),
    "P truncated": ("offset", "__builtin_amdgcn_perm(b + 0x8000, a + 0x8000,",
                    "__builtin_amdgcn_perm(b, a,"),
    "LSE in base 2": ("plain", "(base + log2(total)) * kLn2", "(base + log2(total))"),
    "scale forgotten": (
        "plain", "SCORE_MOD ? p.scale * kLog2E : kLog2E", "SCORE_MOD ? kLog2E : kLog2E",
    ),
    "softcap's factor forgotten": ("terms", "return t * terms.softcap;", "return t;"),
    "ALiBi of the other sign": ("terms", "return -terms.slope", "return terms.slope"),
    "slopes of the first sequence": ("terms", "batch * p.slopes_batch + head", "head + 1"),
    "bias of the first row": ("terms", "+ row * p.bias_row", ""),
    "a bias in place of its products": ("bias", "first && !kAdds ?", "first ?"),
    "bias not over the scale": ("bias", "s[t][n][r] = inverse * (kBytes", "s[t][n][r] = (kBytes"),
    **{f"{fault}, {case}": (case, *changed)
       for case in ("bias, 128", "bool bias, 128")
       for fault, changed in {
           "bias of the tile before": (
               "addend.load(now, state.key(first + 2 * BLOCK_K));",
               "addend.load(now, state.key(first + BLOCK_K));",
           ),
           "bias of the second tile's keys": (
               "addend.load(odd, state.key(begin + BLOCK_K));",
               "addend.load(odd, state.key(begin));",
           ),
       }.items()},
    **{f"{fault} of a bool bias": ("bool bias", *changed) for fault, changed in {
        "row's step": ("row_bytes = (int)c.p.bias_row;", "row_bytes = (int)c.p.bias_row + 4;"),
        "next row": ("offset = M::column() * row_bytes", "offset = (M::column() ^ 1) * row_bytes"),
        "other lane's keys": ("M::part() * kUnitBytes", "(M::part() ^ 1) * kUnitBytes"),
        "first products' keys": ("offset + t * MMA, 0, 0", "offset, 0, 0"),
        "last keys": ("row_bytes + left : 0", "row_bytes + left / 16 * 16 : 0"),
        "last row": ("(rows - 1) * row_bytes + left :", "(rows - 2) * row_bytes + left :"),
        "next row's four": ("bytes[i / 2 % 2][i / 4 + i % 2 * 2]",
                            "bytes[i / 2 % 2][i / 4 + (i ^ 1) % 2 * 2]"),
        "wrong lane": ("(lane_index() ^ MMA) * 4", "(lane_index() ^ 1) * 4"),
        "unsent bits": ("M::part() ? own : own >> 4", "own"),
        "own bits only": ("(other & 0x0f0f0f0f) << 4", "(own & 0x0f0f0f0f) << 4"),
        "neighboring keys": ("+ i % 4 * 8, 1)", "+ (i % 4 ^ 1) * 8, 1)"),
        "confused fours": ("i / 8 * 4 + t * 2 +", "i / 8 * 4 + (t ^ 1) * 2 +"),
        "hidden keys": ("& kept ^ hidden", "& ~kept ^ hidden"),
        "first tile": ("kHides && pair < kPairs", "kHides && pair < 0"),
        "later tiles": ("      state.addend.hide(next, pair);\n", ""),
    }.items()},
    "largest of hidden scores": (
        "bool bias, inf",
        "state.addend.hide(next, pair);\n      raise_largest(next, pair, largest);",
        "raise_largest(next, pair, largest);\n      state.addend.hide(next, pair);",
    ),
    "a bool bias that is added": (
        "bool bias, NaN", "(__builtin_bit_cast(int, x) ^ hidden) & kept ^ hidden);",
        "~kept & hidden) + x;",
    ),
    "a bool bias of the first head": (
        "bool bias, 128", "head * p.bias_head + row", "row",
    ),
    "a bool bias of the first sequence": (
        "shared bool bias", "batch * p.bias_batch + head", "head",
    ),
    "a bool bias that rows share, in rows": (
        "shared bool bias", "row_bytes = (int)c.p.bias_row;", "row_bytes = (int)c.p.seqlen_k;",
    ),
    "a bool bias of the first rows": (
        "bool bias, 96", "state.addend.begin(c, wave_row);", "state.addend.begin(c, first_row);",
    ),
    "bias of neighboring keys": ("bias", "(t * MMA + 8 * j) * kBytes",
                                 "(t * MMA + 4 * j) * kBytes"),
    "a bias that rows share not loaded": (
        "shared bias", "rows > 0 ? (rows - 1) * row_bytes + left * kBytes",
        "row_bytes > 0 ? (rows - 1) * row_bytes + left * kBytes",
    ),
    "a bias that rows share, in rows": (
        "shared bias", "row_bytes = (int)c.p.bias_row *", "row_bytes = (int)c.p.seqlen_k *",
    ),
    "bias of the first wavefront's rows": (
        "bias", "state.addend.begin(c, wave_row);", "state.addend.begin(c, first_row);",
    ),
    "bias of the row before": ("bias", "(n * MMA + M::column()) * row_bytes",
                               "(n * MMA + M::column() ^ 1) * row_bytes"),
    "float32 bias of a key in two": (
        "float32 bias", "4 * j + i] = four[i];", "4 * j + i] = four[i & 2];",
    ),
    "float32 bias not over the scale": (
        "float32 bias", "s[t][n][r] = inverse * (kBytes", "s[t][n][r] = (kBytes",
    ),
    "float32 bias of the tile before": (
        "float32 bias, 128", "addend.load(now, state.key(first + 2 * BLOCK_K), t);",
        "addend.load(now, state.key(first + BLOCK_K), t);",
    ),
    "float32 bias that ends with 2 bytes a key": (
        "float32 bias, 128", "row_bytes + left * kBytes : 0", "row_bytes + left * 2 : 0",
    ),
    "float32 bias of keys at 2 bytes": (
        "shared float32 bias", "buffer(base + key * kBytes,", "buffer(base + key * 2,",
    ),
    "a float32 bias that rows share, in rows": (
        "shared float32 bias", "row_bytes = (int)c.p.bias_row *", "row_bytes = (int)c.p.seqlen_k *",
    ),
    "ALiBi of the next row": ("ALiBi", "M::row(0) - c.row[n] - c.s.shift",
                              "M::row(0) - c.row[n] - 1 - c.s.shift"),
    "ALiBi of keys in a row": ("ALiBi", "(float)(t * MMA + r / 4 * 8 + r % 4)",
                               "(float)(t * MMA + r)"),
    "ALiBi not over the scale": ("ALiBi", "head, 0).slope / c.p.scale", "head, 0).slope"),
    "ALiBi of the tile before": (
        "ALiBi", "addend.start(now, state.key(first + 2 * BLOCK_K));",
        "addend.start(now, state.key(first + BLOCK_K));",
    ),
    "softcap of half the scores": ("softcap", "kCaps ? 2.0f * kLog2E *", "kCaps ? kLog2E *"),
    "softcap of half its size": (
        "softcap, 256", "to_base_2[n] = 2.0f * kLog2E * p.softcap",
        "to_base_2[n] = kLog2E * p.softcap",
    ),
    "softcap of scores without their scale": (
        "softcap", "(p.scale / p.softcap)", "(1.0f / p.softcap)",
    ),
    "softcap not added to the LSE": ("softcap, 256", "if (kCaps) base +=", "if (false) base +="),
    "softcap of masked scores": (
        "softcap, 256", "key > c.last_key[n] || key < c.first_key[n] ? -INFINITY_F : x",
        "key > c.last_key[n] || key < c.first_key[n] ? -1.0f : x",
    ),
    "softcap that takes NaN for a number": (
        "softcap of NaN", "reciprocal(-1.0f - x)", "reciprocal(__builtin_fminf(-1.0f - x, -1.0f))",
    ),
    "the first tile's last scores without softcap": (
        "softcap", "kCaps && pair < kPairs; ++pair", "kCaps && pair < kPairs - 1; ++pair",
    ),
    "a pair of scores without softcap": (
        "softcap, window", "state.cap.begin(next, pair);",
        "if (pair != 5) state.cap.begin(next, pair);",
    ),
    "maxima of scores before the softcap": (
        "softcap, window", "of_values -= 2;", "of_values += 1;",
    ),
    "sink forgotten": ("terms", "p.sinks && p.use_sinks &&", "false &&"),
    "sink in every part": ("split", "&& c.work.part == 0", ""),
    "parts that overlap": ("split", "begin += work.part * share;", "begin += 0;"),
    "dropout bits of the next keys": ("dropout", "philox(key / 4,", "philox(key / 4 + 1,"),
    "dropout not scaled": ("dropout", "inverse *= p.dropout_scale;", ";"),
    "sum after dropout": (
        "dropout", "i, p);\n        if (kLate",
        "i, p);\n        for (int k = 0; k < 4; ++k)"
        "\n          if (!(p[e.slice][e.n][k / 2] >> k % 2 * 16 & 0xffff))"
        "\n            state.row[e.n].total -= made[i - 3 + k];\n        if (kLate",
    ),
    "padding before the keys forgotten": ("paged", "key + kept.word(kPadding));", "key);"),
    "page's rows confused": ("paged", "place.row = found.row;", "place.row = position;"),
    "quotient by the page size 1 less": ("paged", "if (row >= size) {", "if (row > size) {"),
    "pages of the first sequence": (
        "paged", "return (const int *)p.page_table + s.batch * p.page_table_batch",
        "return (const int *)p.page_table",
    ),
    "pages of the tile before": (
        "paged", "k.look(pages, next_k,", "k.look(pages, next_k - BLOCK_K,",
    ),
    "values where keys are": ("paged", "v.arrive(pages, 1)", "v.arrive(pages, 0)"),
    "one key for both halves": (
        "paged", "lane_index() < kLanes / 2 ? first : second", "true ? first : second",
    ),
    "keys of the wavefront before": (
        "paged, 128", "at.uniform(key(i, 0)), width,", "at.uniform(key(i, 0) ^ 1), width,",
    ),
    "values of the key before": (
        "paged, 128", "step(i % kUnit);\n    if constexpr",
        "step(i % kUnit ^ 1);\n    if constexpr",
    ),
    "rows beyond the head": (
        "paged, 128", "width_k(p.head_dim * kSize)", "width_k(p.head_dim * 3)",
    ),
    **{f"{fault}, {case}": (case, *changed) for fault, (cases, *changed) in {
        "group's place in the tile": (("groups",), "wide_product(group, row_bytes)", "0"),
        "keys of the first group": (("groups",), "kGroups * kGroup;", "1;"),
        "groups of 32": (
            ("groups", "groups, 128", "groups, 256"), "return i * kKeysALoad / kGroup;",
            "return i * kKeysALoad / (2 * kGroup) * 2;",
        ),
        "values of the first group": (
            ("groups", "groups, 256"), "groups.kOfValues + values.group(task)", "groups.kOfValues",
        ),
        "values where keys are": (("groups",), "groups.at(groups.kOfValues +", "groups.at("),
        "values of the next tile": (
            ("groups, split",), "of_values[task] = next_values[task];\n      next_values[task] =",
            "next_values[task] = of_values[task] =",
        ),
        "pages of the tile before": (
            ("groups",), "    now.page += step.page + (now.row >= size);\n", "",
        ),
        "a page that has ended": (
            ("groups, 128", "groups, split"), "step.page + (now.row >= size);", "step.page;",
        ),
        "rows beyond the page": (
            ("groups, 128",), "    now.row = min(now.row, now.row - size);\n", "",
        ),
        "rows of the page's first group": (
            ("groups, 128",), " + wide_product(place.row, row_bytes);", ";",
        ),
        "groups of another step": (
            ("groups, 256",), "divide_by_pages(keys,", "divide_by_pages(kLanes,",
        ),
        "addresses of the tile before": (
            ("groups",), "    if (beat == kBeats - 2) in.arrive();\n", "",
        ),
        "bases of the tile before": (
            ("groups, 128",), "    if (beat == kBeats - 1) in.place();\n", "",
        ),
        "keys beyond the end of a page": (("groups",), "min(left, keys)", "keys"),
        "keys beyond the end of a group": (
            ("groups", "groups, 256"), "min(left, keys)", "(min(left, keys) + 15) / 16 * 16",
        ),
        "pages beyond the last": (
            ("groups, 256",), "table[min(now.page, last)]", "table[now.page]",
        ),
        "the last page too early": (
            ("groups",), "divide_by_pages(end - 1,", "divide_by_pages(end - 65,",
        ),
    }.items() for case in cases},
    **{f"{name}, {rows}": (rows, *fault)
       for rows in ("256 rows", "256 rows, 128", "128 rows, 128", "256 rows, 192", "128 rows, 192")
       for name, fault in {
           "barrier before the last products dropped": (
               "barrier();\n      ahead.read_keys", "ahead.read_keys",
           ),
           "barrier after the first keys dropped": (
               "barrier();  // the next load overwrites", "// the next load overwrites",
           ),
           "rows of the first wavefronts again": (
               "first_row + wave_index() * kRows", "first_row + wave_index() % 3 * kRows",
           ),
           "blocks of 512 rows": ("find_work<false, kBlockQ>", "find_work<false, 512>"),
       }.items()},
    "keys loaded as by 8 wavefronts": (
        "128 rows, 128", "KeyLoads<BLOCK_K, HEAD_DIM, WAVES>", "KeyLoads<BLOCK_K, HEAD_DIM, 8>",
    ),
    "keys loaded as by 8 wavefronts, 192": (
        "128 rows, 192", "KeyLoads<BLOCK_K, HEAD_DIM, WAVES>", "KeyLoads<BLOCK_K, HEAD_DIM, 8>",
    ),
    "queries of one step in a slot of two": (
        "128 rows, 192", "b = q[n][slot * kStepsASlot + step]", "b = q[n][slot + step]",
    ),
    "workgroups of one die only": ("heads", "id % dies * (pairs / dies)", "0 * (pairs / dies)"),
}  # fmt: skip


# One plan of every pair of head dims, in every score class once.
PLANS = [
    plan
    for plan in forward.all_plans("hip")
    if dict(plan.constants)["DTYPE"] != forward.FLOAT8_CODE
]
SAMPLE = PLANS[::5]

# Other cases run the same code at other head dims.
NIGHT = (
    "varlen 96", "bias, 128", "bool bias, 96", "float32 bias, 128", "128 rows, 192",
    "256 rows, 192", "256 rows, 128", "bool bias, 128", "groups, 128", "groups, 256",
    "softcap, window",
)  # fmt: skip


@pytest.mark.parametrize("case", turns.cases(CASES, NIGHT))
def test_sound(case):
    assert not faults_found([CASES[case]])


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    case, snippet, other = FAULTS[fault]
    plant(forward.KERNEL, snippet, other)
    assert faults_found([CASES[case]])


@pytest.mark.night
@pytest.mark.parametrize("case", ["plain", "causal", "growing", "split"])
def test_products_of_16_rows(case, monkeypatch, nothing_bound):
    """The other shape of the matrix instruction, which no plan has yet: hardware has to choose. One
    dtype: each takes 15 s to compile."""
    tiles = {pair: tiles._replace(mma=16) for pair, tiles in gfx942.FORWARD.items()}
    monkeypatch.setattr(gfx942, "TILES", gfx942.TILES._replace(forward=tiles))
    monkeypatch.setattr(dispatch, "_prepared", {})
    assert not faults_found([replace(CASES[case], dtype="bfloat16")])


def test_packed_without_sequences():
    """Rows to spare and no sequence: nothing to launch."""
    q = torch.ones(3, 2, 64, dtype=torch.bfloat16)
    offsets = torch.zeros(1, dtype=torch.int32)
    out, lse = pyfa.attention_varlen(
        q, q, q, offsets, offsets, 100, 100, return_lse=True, backend="emulator"
    )
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("plan", SAMPLE, ids=str)
def test_resources(plan):
    """No spill, no scratch, room for every wavefront of the plan, code object v5.

    ``code.build`` refuses spills and LDS beyond 64 KB of every plan that is compiled.
    """
    data = code.load(plan, "gfx942").data
    parsed = codeobject.parse(data)
    kernel = parsed.kernel("attn_fwd")
    waves_a_simd = dict(plan.constants)["WAVES"] // 4
    assert parsed.version == 5
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgprs + kernel.agprs <= 512 // waves_a_simd
    assert kernel.lds_bytes <= 65536
    assert not kernel.dynamic_stack
    # exp2 and log2 are one instruction each, registers are addressed by name, and nothing goes to
    # memory but what was asked for.
    names = set(emulator.load(data).code.names)
    assert "v_exp_f32" in names
    slow = ("ldexp", "cmpswap", "gpr_idx", "scratch_", "movrel")
    assert not [name for name in names if any(part in name for part in slow)]


PAGED = [plan for plan in PLANS if dict(plan.constants).get("PAGED")]


@pytest.mark.parametrize("plan", turns.cases(PAGED, PAGED[1:]), ids=str)
def test_pages_do_not_wait_for_lds(plan):
    """A flat load also counts as one of LDS: every read from LDS would wait for it."""
    names = emulator.load(code.load(plan, "gfx942").data).code.names
    assert not [name for name in names if name.startswith("flat_")]


def test_at_most_96_plans():
    assert len(PLANS) <= 96


@pytest.mark.parametrize(
    ("score", "options"),
    [
        (forward.BIAS, {"bias": torch.zeros(1, 2, 40, 72, dtype=torch.bfloat16)}),
        (forward.FLOAT32_BIAS, {"bias": torch.zeros(1, 2, 40, 72)}),
        (forward.FLOAT32_BIAS, {"bias": torch.zeros(1, 1, 1, 72)}),
        (GENERAL, {"bias": torch.zeros(1, 2, 40, 73)[..., 1:]}),  # not on 16 bytes
        (GENERAL, {"bias": torch.zeros(1, 2, 40, 72, dtype=torch.float16)}),  # the other format
        (forward.BIAS, {"bias": torch.zeros(1, 2, 1, 72, dtype=torch.bfloat16)}),  # rows share it
        (GENERAL, {"bias": torch.zeros(1, 2, 40, 72, dtype=torch.bfloat16), "scale": -0.1}),
        (forward.BOOL_BIAS, {"bias": torch.ones(1, 2, 40, 72, dtype=torch.bool), "causal": True}),
        (forward.BOOL_BIAS, {"bias": torch.ones(1, 1, 1, 72, dtype=torch.bool)}),
        (forward.BOOL_BIAS, {"bias": torch.ones(40, 88, dtype=torch.bool)[None, None, :, 16:]}),
        (GENERAL, {"bias": torch.ones(40, 76, dtype=torch.bool)[None, None, :, 4:]}),
        (GENERAL, {"bias": torch.ones(40, 73, dtype=torch.bool)[None, None, :, :72]}),
        (GENERAL, {"bias": torch.ones(72, 40, dtype=torch.bool).T[None, None]}),
        (GENERAL, {"bias": torch.ones(1, 1, 40, 1, dtype=torch.bool)}),
        (GENERAL, {"bias": torch.ones(1, 2, 40, 72, dtype=torch.bool), "softcap": 9.0}),
        (GENERAL, {"bias": torch.ones(1, 2, 40, 72, dtype=torch.bool), "scale": -0.1}),
        (forward.ALIBI, {"alibi_slopes": torch.ones(2), "causal": True}),
        (forward.SOFTCAP, {"softcap": 256.0, "window": (20, 0)}),
        (GENERAL, {"softcap": 257.0}),
        (GENERAL, {"softcap": 9.0, "scale": -0.1}),
        (GENERAL, {"alibi_slopes": torch.ones(2), "softcap": 9.0}),
        (GENERAL, {"alibi_slopes": torch.ones(2), "batch_invariant": True}),
    ],
)
def test_a_term_alone_has_plans_of_its_own(score, options):
    q, k = (torch.zeros(1, n, 2, 64, dtype=torch.bfloat16) for n in (40, 72))
    answer = pyfa.explain(q, k, k, device="MI300X", **options)
    constants = dict(answer.answers[0].plan.constants)
    assert constants["SCORE"] == score


@pytest.mark.parametrize(
    ("softcap", "score"), [(256.0, forward.SOFTCAP), (300.0, GENERAL), (2.0, forward.SOFTCAP)]
)
def test_a_prepared_plan_is_that_of_the_softcap(softcap, score):
    """Calls that differ in nothing else."""
    call = samples._call({"HEAD_DIM": 64, "HEAD_DIM_V": 64, "DTYPE": 1}, 40, 72)
    prepared = dispatch.prepare(call._replace(softcap=softcap), "emulator", False, False)
    assert dict(prepared.plan.constants)["SCORE"] == score


def test_a_bias_whose_keys_are_no_whole_fours_has_a_general_plan():
    """Its rows lie on 16 bytes, but a load of four keys would end behind its memory."""
    q, k = (torch.zeros(1, n, 2, 64, dtype=torch.bfloat16) for n in (40, 66))
    bias = torch.zeros(1, 2, 40, 72, dtype=torch.bfloat16)[..., :66]
    answer = pyfa.explain(q, k, k, bias=bias, device="MI300X")
    assert dict(answer.answers[0].plan.constants)["SCORE"] == GENERAL


def _bool_bias(rows: int, keys: int) -> torch.Tensor:
    return torch.arange(rows * keys).view(1, 1, rows, keys) % 7 < 4


@pytest.mark.parametrize(
    "bias",
    [
        _bool_bias(70, 288)[..., 48:248],  # in part of wider rows
        _bool_bias(1, 200).expand(2, 1, 70, 200),
        _bool_bias(70, 200).expand(2, 2, 70, 200),
        _bool_bias(4, 70 * 200).view(2, 2, 70, 200),
        _bool_bias(70, 4 * 200).view(1, 70, 4, 200)[:, :, :2].transpose(1, 2),
    ],
)
def test_strides_of_a_boolean_bias(bias):
    q, k, v = (torch.randn(2, n, 2, 64, dtype=torch.bfloat16) for n in (70, 200, 200))
    given = bias, bias.expand(2, 2, 70, 200).clone(memory_format=torch.contiguous_format)
    one, other = (pyfa.attention(q, k, v, bias=x, backend="emulator") for x in given)
    assert torch.equal(one, other)
    scores = {
        dict(pyfa.explain(q, k, v, bias=x, device="MI300X").answers[0].plan.constants)["SCORE"]
        for x in given
    }
    assert scores == {forward.BOOL_BIAS}


def test_a_boolean_bias_at_another_address(nothing_bound):
    """A call that is bound to one on 16 bytes is bound anew, to the general plan."""
    q, k, v = (torch.randn(1, n, 2, 64, dtype=torch.bfloat16) for n in (40, 72, 72))
    rows = _bool_bias(1, 40 * 72 + 16).flatten()
    aligned, odd = (rows[n:][: 40 * 72].view(1, 1, 40, 72) for n in (0, 3))
    expected = pyfa.attention(q, k, v, bias=odd, backend="emulator")
    nothing_bound()
    pyfa.attention(q, k, v, bias=aligned, backend="emulator")
    assert torch.equal(pyfa.attention(q, k, v, bias=odd, backend="emulator"), expected)
    wanted = {"SCORE": forward.BOOL_BIAS, "HEAD_DIM": 64, "DTYPE": 1}
    plan = next(plan for plan in PLANS if wanted.items() <= dict(plan.constants).items())
    call = Call(q, k, v, max_seqlen_q=40, max_seqlen_k=72, bias=aligned)
    run = native_forward.bind(Launcher(EmulatorRuntime((0,))), plan, call)
    run(*tensors_of(call))
    with pytest.raises(OtherAlignment):
        run(*tensors_of(call._replace(bias=odd)))


@pytest.mark.parametrize(
    ("score", "paged", "page_size", "options"),
    [
        *((PLAIN, forward.WHOLE_GROUPS, size, {"causal": True}) for size in (16, 48, 256)),
        *((PLAIN, forward.ANY_PAGES, size, {"causal": True}) for size in (1, 8, 24, 100)),
        (PLAIN, forward.ANY_PAGES, 16, {"cache_leftpad": torch.zeros(1, dtype=torch.int32)}),
        (GENERAL, forward.ANY_PAGES, 16, {"softcap": 9.0}),
        (GENERAL, forward.ANY_PAGES, 16, {"scale": -0.1}),
        (GENERAL, forward.ANY_PAGES, 16, {"batch_invariant": True}),
    ],
)
def test_pages_have_plain_plans(score, paged, page_size, options):
    q = torch.zeros(1, 90, 2, 128, dtype=torch.bfloat16)
    cache = torch.zeros(8, page_size, 2, 128, dtype=torch.bfloat16)
    pages = {
        "page_table": torch.zeros(1, 8, dtype=torch.int32),
        "cache_seqlens": torch.full((1,), 8 * page_size, dtype=torch.int32),
    }
    answer = pyfa.explain(q, cache, cache, device="MI300X", **pages, **options)
    constants = dict(answer.answers[0].plan.constants)
    assert (constants["SCORE"], constants["PAGED"]) == (score, paged)


def test_a_cache_with_pages_of_another_size_is_planned_anew(nothing_bound):
    """The same keys in pages of 16, 24 and 48 keys."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator).half() for n in (70, 192, 192))
    want = pyfa.attention(q, k, v, causal=True, backend="emulator")
    lengths = torch.full((1,), 192, dtype=torch.int32)
    for size in (48, 24, 16, 24, 48):
        order = torch.randperm(192 // size, generator=generator)
        table = torch.argsort(order).int()[None]
        pages = (x.view(-1, size, 2, 64)[order].contiguous() for x in (k, v))
        out = pyfa.attention_kvcache(
            q, *pages, cache_seqlens=lengths, page_table=table, causal=True, backend="emulator"
        )
        assert torch.equal(out, want)


@pytest.mark.night
def test_two_builds_are_equal():
    """One of them as other tests have it, often from another process. On a pull request
    ``test_bundle`` asks the same of two kernels."""
    plan = forward.all_plans("hip")[0]
    assert code.build(plan, "gfx942") == code.compiled(plan, "gfx942").data


# What `benchmarks/mi300x_rounds.py` finds worth it, and not: heads of so many keys, 128 wide.
@pytest.mark.parametrize(
    ("heads", "keys", "parts"),
    [
        (5, 16384, 5),  # 320 blocks of 304 places: 5 parts end after 6 fifths, not after 2 rounds
        (3, 13312, 5),  # 156 blocks, more than half of the places: 5 parts take 3 fifths
        (20, 4096, 1),  # 320 blocks of 64 tiles: merging would take what it gains
        (64, 16384, 1),  # 13.5 rounds: 4 % at most
        (40, 2048, 1),  # 1.05 rounds, but merging would take what it gains
        (8, 16384, 1),  # 1.7 rounds
        (152, 512, 1),  # a round that is full
    ],
)
def test_grids_whose_last_round_is_far_from_full_are_split(heads, keys, parts):
    (rounds,) = {TARGET.block_of(plan).rounds for plan in forward.all_plans("hip")
                 if dict(plan.constants)["HEAD_DIM"] == 128
                 and dict(plan.constants)["DTYPE"] == 1}  # fmt: skip
    grid = heads * keys // 256, keys, 304, heads * keys, splits.FREE
    assert splits.of_prefill(*grid, rounds) == parts
    # Under a mask blocks end at different times: only what fits once is split.
    assert splits.of_prefill(*grid, None) == 1


@pytest.mark.parametrize("causal", [False, True])
def test_what_the_rounds_ask_for_is_what_runs(causal, monkeypatch, nothing_bound):
    """And only of blocks that are alike. Two blocks of 768 keys, which fit once in 3 parts."""
    asked, merged, partials = [], [], combine.partials

    def two(blocks, keys, places, rows, costs, parts):
        asked.append((blocks, keys, places, rows, parts))
        return 2

    def seen(call, num_splits, chunks):
        merged.append(num_splits)
        return partials(call, num_splits, chunks)

    monkeypatch.setattr(splits, "over_rounds", two)
    monkeypatch.setattr(combine, "partials", seen)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator).half() for n in (200, 768, 768))
    out = pyfa.attention(q, k, v, causal=causal, backend="emulator")
    mask = torch.ones(200, 768, dtype=torch.bool).tril(568) if causal else None
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.float().transpose(1, 2) for x in (q, k, v)), attn_mask=mask
    )
    assert torch.allclose(out.float(), want.transpose(1, 2), atol=2e-3)
    assert asked == ([] if causal else [(2, 768, 304, 200, 3)])
    assert merged == ([3] if causal else [2])


@pytest.mark.parametrize("units", [304, 80, 38])
@pytest.mark.parametrize("workgroups", [1, 7, 30, 64, 400])
def test_small_grids_are_split_to_fill_the_device(units, workgroups):
    """An MI300X, a device of 80 CUs, one XCD in CPX mode: at most a workgroup a CU, and more than
    half of them busy where the keys are long enough."""

    def split(workgroups, keys):
        return splits.within_a_round(workgroups, keys, units, 0, splits.FREE)

    parts = split(workgroups, 65536)
    assert parts == 1 or units / 2 < workgroups * parts <= units
    assert (parts == 1) == (workgroups > units / 2)
    assert split(workgroups, 200) == 1
    assert split(1, 1024) == 4
