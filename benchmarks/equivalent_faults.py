"""List planted faults that change no result, each with the reason.

``of_source`` has those in the source of CUDA kernels. A fault is found by parts that the plan's
name has, parts that it must not have, the line without its indentation, and the line that replaces
it. Where only one of several equal lines is meant, those in front of it stand above it.
``of_code`` has those in one instruction of a gfx942 code object. A fault is found by the first
digits of the code object's digest, the address, and the first word of the changed instruction.
``of_python`` has those in the torch backend, by file, line and the line that replaces it, as
``ast.unparse`` writes them. A reason holds for all inputs that the API accepts, not only for those
of the cases.
"""

from __future__ import annotations

import numpy as np

_MASKED = "tiles that need no mask get one, which hides nothing"
_TOGETHER = (
    "how many heads run side by side, the same number in every block: an order, and so speed"
)
_CLEARS = (
    "rows that are in use are cleared as well; the kernel that writes them runs after this one"
)
# fmt: off
_SOURCE: tuple[tuple[tuple[str, ...], tuple[str, ...], str, str, str], ...] = (
    ((".cu",), ("BANDED=1",),
     "if (BANDED && p.attention_chunk)",
     "if (BANDED || p.attention_chunk)",
     "a plan without BANDED never has a chunk"),
    (("sm80/attn_fwd.cu",), (),
     "if (first < seen.all_low || first + BLOCK_K > seen.all_high) mask(w, s, first);",
     "if (first < seen.all_low || first + BLOCK_K >= seen.all_high) mask(w, s, first);",
     _MASKED),
    (("sm90/attn_bwd.cu",), ("BANDED=1",),
     "seen.all_low = (int)min(max(last - right, 0ll), (long long)s.rows);",
     "seen.all_low = (int)max(max(last - right, 0ll), (long long)s.rows);",
     _MASKED),
    (("sm90/attn_bwd.cu",), (),
     "w.all_low = own.first_key + BLOCK_K > s.keys ? s.rows : seen.all_low;",
     "w.all_low = own.first_key + BLOCK_K >= s.keys ? s.rows : seen.all_low;",
     _MASKED),
    (("sm90/attn_bwd.cu",), (),
     "bool masked = p.window_left >= 0 || p.window_right >= 0;",
     "bool masked = p.window_left > 0 || p.window_right >= 0;",
     _TOGETHER),
    (("sm90/attn_bwd.cu",), (),
     "return (p.cu_seqlens_q || p.seqused_q) && (tile + 1) * BLOCK_Q > s.rows;",
     "return (p.cu_seqlens_q || p.seqused_q) || (tile + 1) * BLOCK_Q > s.rows;",
     "those who copy and those who clear ask the same function; of a tile inside the sequence no "
     "row is cleared (clear_rows begins behind the tile), and of one that ends a dense tensor the "
     "zeros of TMA become zeros"),
    (("sm90/attn_bwd.cu",), ("DETERMINISTIC=1",),
     "Seen seen = rows_seeing(p, s, own.first_key, min(own.first_key + BLOCK_K, s.keys) - 1);",
     "Seen seen = rows_seeing(p, s, own.first_key, max(own.first_key + BLOCK_K, s.keys) - 1);",
     "the last key counts for seen.high and seen.all_low alone: more tiles of rows are visited, "
     "and more get a mask, which hides the block's keys from all rows that do not see them"),
    (("sm90/",), (),
     "setmaxnreg_inc<kConsumerRegisters>();",
     "",
     "a number of registers is no value: ptxas gives the consumers those of the launch and spills "
     "the others, which is speed"),
    (("sm90/attn_latent.cu",), (),
     "if (t > 0 && t == b.tiles) {\nissue_others(t - 1);\nfinish_others();",
     "",
     "where a consumer has nothing more to do: nobody waits for the stage of the last tile, and "
     "ptxas, which finds sums read without a wait, waits behind every product"),
    (("sm90/",), ("INVARIANT=1",),
     "raised = __any_sync(kAllLanes, !(sums[0] <= kMostSum && sums[1] <= kMostSum));",
     "raised = __any_sync(kAllLanes, !(sums[0] < kMostSum && sums[1] <= kMostSum));",
     "at a sum of exactly 256 bases are raised a tile earlier, which changes no more of a row's "
     "result than its rounding (row.h)"),
    (("sm80/attn_fwd.cu",), ("BANDED=1",),
     "seen.all_low = (int)min(max(last + left, 0ll), (long long)s.keys);",
     "seen.all_low = (int)max(max(last + left, 0ll), (long long)s.keys);",
     _MASKED),
    (("cuda/gaps.cu",), (),
     "clear((unsigned short *)p.out + batch * p.out_batch + row * p.out_row, p.out_head, "
     "p.heads_q,",
     "clear((unsigned short *)p.out + batch + p.out_batch + row * p.out_row, p.out_head, "
     "p.heads_q,",
     "only packed tensors have such rows: offsets come with seqused_q, and with seqused_k in every "
     "call that has a gradient here; so both factors are 0"),
    (("cuda/gaps.cu",), (),
     "(int_at(p.cu_seqlens_q, middle) <= row ? low : high) = middle;",
     "(int_at(p.cu_seqlens_q, middle) < row ? low : high) = middle;",
     "a sequence's first row counts as one behind the rows of the sequence before: " + _CLEARS),
    (("cuda/row_sums.cu",), (),
     "if (of_keys && p.counter) place = end - 1 - id;",
     "if (of_keys || p.counter) place = end - 1 - id;",
     "blocks of a section get its tiles in the reverse order, each of them one: speed"),
    (("sm80/attn_decode.cu",), (),
     "bool exists = begin_ + n * kStride + row < stop_;",
     "bool exists = begin_ + n * kStride + row <= stop_;",
     "the place of a key beyond the end is that of the last one (look): it is copied once more, "
     "and hidden like the zeros"),
    (("sm90/attn_fwd.cu",), (),
     "if (!kFloat8 && valid < BLOCK_K && (PAGE_ROWS || p.cu_seqlens_k || p.seqused_k)) {",
     "if (!kFloat8 && valid <= BLOCK_K && (PAGE_ROWS || p.cu_seqlens_k || p.seqused_k)) {",
     "with all keys of a tile valid there is nothing to clear"),
    (("sm80/attn_decode.cu", "TEAM=1 "), (),
     "if (TEAM == 1 || first < b.stop)",
     "if (TEAM == 1 && first < b.stop)",
     "with a team of one warp no step is beyond the end: they are counted from its own first key"),
    (("sm90/attn_fwd.cu",), ("BANDED=1",),
     "Seen seen = keys_seen(p, s, row, min(row + rows_of_block(p), s.rows) - 1);",
     "Seen seen = keys_seen(p, s, row, max(row + rows_of_block(p), s.rows) - 1);",
     "more tiles are visited, whose keys the mask hides from all rows of the block"),
    (("sm90/attn_latent.cu",), (),
     "if (first_packed_row >= packed_rows) return;",
     "if (first_packed_row > packed_rows) return;",
     "a block that begins behind the last row has queries of 0, and nothing of it is stored"),
    (("sm90/attn_latent.cu",), (),
     "bool exists = packed_row < b.packed_rows && panel * 64 + unit * kUnit < p.head_dim;",
     "bool exists = packed_row <= b.packed_rows && panel * 64 + unit * kUnit < p.head_dim;",
     "the place of a packed row behind the last one is that of the last one (row_of, head_of): it "
     "is read once more, and nothing of it is stored"),
    (("sm80/attn_fwd.cu",), (),
     "store_shared(notes, Bases{(const char *)p.k + 2 * k, (const char *)p.v + 2 * v});\n"
     "__syncwarp();",
     "",
     "all lanes of the warp store the same bytes to the warp's own notes, and each has stored them "
     "before it loads them"),
    (("sm80/attn_fwd.cu",), (),
     "store_shared(notes + 32, owner);\n__syncwarp();",
     "",
     "all lanes of the warp store the same bytes to the warp's own notes, and each has stored them "
     "before it loads them"),
)
# fmt: on

_DIVISION = (
    "the second correction of an integer division, which numerators below 2^31 do not need "
    "(worst_quotient)"
)
_TIE = "only the choice between two equally near bf16 values, on exact ties of their rounding"
_FIRST = "the first of two corrections of a division; where they are equal the second one makes it"
_SIZES = "a bias has elements of 1, 2 or 4 bytes: more than 3 of them are 4"
_BYTES = "the table is of bytes: the high words of its bounds are 0"
_LEFT_OPEN = "a tile that is left open is visited with a mask, which hides what a row does not see"
_SIGN = "the sign of an index or of a number of heads, which is 0"
_DROPOUT = (
    "dropout keeps a word below the threshold; only a random word equal to it, 1 in 2^32, differs"
)
_TANH = "tanh has two formulas that agree within rounding where |x| is the edge itself"
_EQUAL = "the larger, or the smaller, of two equal numbers is either of them"
_AWAITED = (
    "the kernel's own wait for all loads (`loaded`), which the compiler does not know of, lies "
    "between the loads of the queries and this one"
)
_POINTS = (
    "asks one row of eight wrongly whether it sees a key. That a tile is seen is also found by the "
    "others: the first row that sees a key is the tile's first, or the key's own, and then the key "
    "before is its own row's. That all of it is seen is found less often: "
    f"{_MASKED}"
)
_MULTIPLES = (
    "differs only where a head_dim is no multiple of 8; such heads are padded before a kernel runs"
)
_FIRST_THREAD = (
    "compared is the first lane's thread, a multiple of 64, with one less than such a multiple"
)
_ONE_TURN = "this dimension's index is a head or a sequence, one number: its loop has one turn"
_UNKNOWN = (
    "nothing is known of the range, as where it has too many elements: tiles are asked point by "
    "point, or get a mask"
)
_IN_FRONT = (
    "what lies in front of the first row or tile that is seen is visited as well; the mask of each "
    "score hides it"
)
_BEHIND = "writes what fills a list behind its count, which no kernel reads (lists.h)"
_NO_WINDOW = "attention_latent has no window: every key is inside of its bounds"
_HALVES = "the last of six exchanges: all lanes of the other half hold the same bounds"
_CODE: dict[tuple[str, int, int], str] = {
    ("bc3b566455d8", 0x2384, 0xB58300FF): _FIRST_THREAD,
    ("c4307fec6016", 0xAF20, 0x7D9C4442): _DROPOUT,
    ("6dbfc7207df9", 0x9FE8, 0x7D9C5448): _DROPOUT,
    ("719d2e429b59", 0x2AD0, 0xD1C80010): _TIE,
    ("bd87198ffbad", 0x631C, 0xD1FF0000): _TIE,
    ("2891b6429b07", 0x1BDC, 0xDC508900):
        "the changed field is the data register, which a load does not have",
    ("3939a8754db0", 0x1680, 0xBF080304): _FIRST,
    ("7b57cc356fa3", 0x5B98, 0xD043016A): _TANH,
    ("ee7e51823273", 0x1A34, 0xBF890009): _CLEARS,
    ("ee7e51823273", 0x19A8, 0xBF058204):
        "with two sequences rows of the second count as rows of the first, beyond its length: "
        + _CLEARS,
    ("ee7e51823273", 0x1DB0, 0x7D921E08): _DIVISION,
    ("087aa7c1964b", 0x1690, 0x81078107): _DIVISION,
    ("18a6c7ad5f6f", 0x1C2C, 0xBF08000A): _DIVISION,
    ("7b57cc356fa3", 0x1F40, 0xBF080406): _DIVISION,
    ("ee7e51823273", 0x1C68, 0xD1FF000F):
        "the terms are the high words of an index's sign and of a head stride; pyfa makes these "
        "tensors itself, with strides from 0 to 2^32, so that all are 0",
    ("719d2e429b59", 0x28D8, 0xBF800000):
        "no branch leads here; on the one path the wait at 0x2898 is for the same counter, and no "
        "load comes between them",
    ("e404b70e459a", 0x19BC, 0xBF800000):
        "it waits for cache_batch_idx and cache_leftpad, which no call with a gradient has; what "
        "was loaded before has the wait at 0x1974",
    ("113800027462", 0x39D4, 0xBF0B9904): _MULTIPLES,
    ("e842649d3eff", 0x1A84, 0xD0E1001E):
        "the number of rows for which all keys of a tile are inside the window becomes 0 or "
        "negative: tiles that need no mask get one, which hides nothing",
    ("d7ef7c24313e", 0x87DC, 0xD1DE0001):
        "v_div_fixup looks at the divisor for 0, inf, NaN and its sign; the sum of a row that sees "
        "a key is at least 1 and finite, or NaN, which the quotient then is already",
    ("18a6c7ad5f6f", 0x3694, 0x7DD40480):
        "rows that are aligned are stored piece by piece and others at once: the same bytes, and "
        "global stores need no alignment",
    ("48c1e980f945", 0x3820, 0xBF880002):
        "the other branch is for keys in front of the first one, which no tile has; with no lane "
        "in it both ways do nothing",
    ("ec01796b98b9", 0x17F8, 0x7D9A0280):
        "the three other lanes that hold the row store the same gradient of its sink; each has "
        "loaded the sum before any of them stores",
    ("3eb9c8d08d39", 0x5970, 0xD1E20003):
        "the first tile's ratio of scales, times exp2 of the lowest float, which is 0, or times "
        "sums that are still 0",
    ("7aab0f0ebd01", 0x1F14, 0x220A069F):
        "both signs are 0: that of a head, and that of v3, which is only set once, to 0",
    ("e2bc5b4852e2", 0x29F4, 0xBF02801A):
        "window_left of -1 is read as 2^32 - 1, which is no bound either; with a window more tiles "
        "are visited, whose keys it hides",
    ("0cfa9b01ed32", 0x9584, 0x7C8C5328): _EQUAL,
    ("1545f8e974b8", 0x297C, 0xD3D9401E):
        "a31 is 0 since 0x295c, which every lane here has executed, and a30 becomes 0 anyway",
    ("ccc109f24911", 0x334C, 0xBF800000): _AWAITED,
    ("36ea91010b74", 0x41E0, 0xD043016A): _TANH,
    ("32e49c3861a0", 0x1F5C, 0x7D8C3B02): _POINTS,
    ("67c9b1e7ae10", 0x1CD0, 0xD2850002):
        "only packed tensors have such rows in a call with a gradient, and they count as one batch "
        "entry: batch is 0",
    ("705ca0f6d98a", 0x1CC8, 0xD1000002):
        "the table is of bytes, so that the lower bound becomes 0: less is known, and tiles are "
        "asked point by point or get a mask",
    ("3944a0423cba", 0x1848, 0x7DCC0016): _EQUAL,
    ("06d0e38d3a7c", 0x1AA4, 0xBF05801D):
        "attention_latent has no window: window_left is -1",
    ("347c4d7b1f4d", 0x269C, 0x7D8C0A21): _MULTIPLES,
    ("f6d8f86dea23", 0x1D44, 0xD87E0010):
        "the first lane of each 16 stores, and the eight lanes of which it reads one hold the same "
        "sum",
    ("50f562a297d7", 0x3B14, 0x7D865E84):
        "the element read in addition is the first of the other half of the head, and is not used",
    ("471acdaccadc", 0x54C0, 0xB68D00B9): _MULTIPLES,
    ("7abbddb3a8eb", 0x1FE0, 0xBF03C105):
        "window_right of -1 is read as 2^32 - 1 and a shift, which is no bound either",
    ("ccc109f24911", 0x3248, 0xBF800000): _AWAITED,
    ("71640c498165", 0x2210, 0x180E0707):
        "one point of four is asked in another row of a table of blocks of 64; the others are in "
        "the same block and find what is seen. That all is seen is found less often: " + _MASKED,
    ("32e49c3861a0", 0x2084, 0xD0C10016): _POINTS,
    ("71640c498165", 0x1B54, 0xBF8900C6): _UNKNOWN,
    # Of seed 1.
    ("7ab818302686", 0x4274, 0xBF038313): _SIZES,
    ("06d0e38d3a7c", 0x5460, 0x7C8D55C9): _EQUAL,
    ("ae8e994c6019", 0x518C, 0x7D9D4C15): _DROPOUT,
    ("772b34a53fc0", 0x1860, 0xB59001FF): _FIRST_THREAD,
    ("acf07efba6ca", 0x1EFC, 0xD1C80015): _TIE,
    ("705ca0f6d98a", 0x1BC4, 0xD87E0008): _BYTES,
    ("7aab0f0ebd01", 0x4690, 0xBF080003): _FIRST,
    ("06d0e38d3a7c", 0x3178, 0xBF800000): _AWAITED,
    ("ccc109f24911", 0x6F0C, 0xD1C80007): _TIE,
    ("ccc109f24911", 0x3768, 0xD0460006): _EQUAL,
    ("9bea5bd36173", 0x1690, 0xBF081221): _DIVISION,
    ("6e3cff929222", 0x1B04, 0x92101013): _SIGN,
    ("ca2f14e55cb8", 0x1928, 0xBF081215): _DIVISION,
    ("6d853b6fe2df", 0x1A00, 0x9202230B): _SIGN,
    ("3944a0423cba", 0x17E4, 0xBF083304): _FIRST,
    ("6bded87916ed", 0x1994, 0xBF080406): _DIVISION,
    ("11cba3577d07", 0x98F0, 0xD043016A): _TANH,
    ("f9154cb36da2", 0x1E80, 0xBF058006): _IN_FRONT,
    ("32e49c3861a0", 0x1BE0, 0xD86C0040): _LEFT_OPEN,
    ("e6a9436cd890", 0x1E5C, 0xD86C0080): _LEFT_OPEN,
    ("a910b100343d", 0x1EE0, 0xBF870003): _LEFT_OPEN,
    ("d02169065a65", 0x19B4, 0xD0C30008): _MULTIPLES,
    # Of seed 4.
    ("347c4d7b1f4d", 0x2200, 0x7C8C0523): _EQUAL,
    ("7aab0f0ebd01", 0x27EC, 0x7E2C0302):
        "the cosines behind the last pair, of which nothing is stored",
    ("9484df9a1451", 0x5464, 0x0AAC9D4E):
        "the first estimate of a quotient, which the two steps behind it correct",
    # Of seeds 11 and 12.
    ("d73c5c925a29", 0x7C50, 0x7DC64880): _EQUAL,
    ("32e49c3861a0", 0x1874, 0xBF021E1F):
        "one more round where the number of tiles is a multiple of 512: it has no tiles",
    ("69c9f4ef486f", 0x59E0, 0x96082107):
        "the high word of dv's head stride times a head; pyfa makes dv, whose heads are head_dim_v "
        "apart",
    ("f7ad574c526e", 0x2788, 0xBF89FE9D): _LEFT_OPEN,
    ("26c42edac527", 0x1A4C, 0x7E16030B): _ONE_TURN,
    ("ca3e19e4f120", 0x239C, 0xBF03C109):
        "window_right of -1 is read as 2^32 - 1, which is no bound either",
    ("3cfde8b50566", 0x2044, 0xBF850043): _LEFT_OPEN,
    ("d02169065a65", 0x1AC4, 0x7C8C0323): _EQUAL,
    ("0407d7dadbe9", 0x1A48, 0x7E16030B): _ONE_TURN,
    ("67c9b1e7ae10", 0x1BC4, 0xD2860000):
        "the second step of a reciprocal, without which it has 22 bits; two corrections follow, "
        "and the numerator, the pieces of 16 bytes in a row of all heads, has 22 bits up to 64 MB",
    ("ccc109f24911", 0x34D0, 0xBF033130): _NO_WINDOW,
    ("67c9b1e7ae10", 0x19D0, 0xDC508004):
        "a row is taken for one of an earlier sequence, beyond whose length it lies: " + _CLEARS,
    ("6ef25b16fbe6", 0x41F8, 0xD285003A): "the signs of two places, both of which are 0",
    ("67c9b1e7ae10", 0x1D90, 0x7D921E08): _FIRST,
    ("6c8188f8da5b", 0x2A70, 0xBF840017): _IN_FRONT,
    ("7ab818302686", 0x5654, 0x7D9C7407): _DROPOUT,
    ("7a3ca7a3788f", 0x9454, 0xD285002B):
        "a place's sign times a stride, and the stride's high word before it: pyfa makes dbias, "
        "whose rows are fewer than 2^32 elements apart; both products are 0",
    ("772b34a53fc0", 0x18B8, 0xD0CD0000): "the other lanes store the same number",
    ("0407d7dadbe9", 0x1C28, 0xD87E0010): _BYTES,
    ("772b34a53fc0", 0x2494, 0xBF89FE5B): _LEFT_OPEN,
    ("ccc109f24911", 0x36B4, 0xD0C1000C): _NO_WINDOW,
    ("71640c498165", 0x2658, 0xBF890051): _BEHIND,
    ("b0ff6d312b4e", 0x6314, 0xB68A0079): _MULTIPLES,
    ("8c7e7592f8b8", 0x1E50, 0xBF890051): _BEHIND,
    ("7aab0f0ebd01", 0x1C2C, 0xBF08000A): _DIVISION,
    ("67d9027d78b0", 0x5F78, 0xD043016A): _TANH,
    ("06d0e38d3a7c", 0x6128, 0x7D920815): _FIRST,
    ("9bfbea36209c", 0x1EB4, 0x7DCC1900): _EQUAL,
    ("0e7ef4695bb3", 0x78DC, 0xBF038310): _SIZES,
    ("72e2ea34ff84", 0x603C, 0xBF038307): _SIZES,
    ("67c9b1e7ae10", 0x1C0C, 0x7D921E07): _FIRST,
    # Of seed 14.
    ("adf1d1a22c20", 0x2884, 0xBF028023): _IN_FRONT,
    ("50f562a297d7", 0x30AC, 0x7E080302):
        "the sines behind the last pair, of which nothing is stored",
    ("62c94fb9a2a6", 0x69A8, 0xBF03830A): _SIZES,
    ("fe8574c727e9", 0x1CE8, 0x22100E9F): "the sign of a truth value, which is 0",
    ("772b34a53fc0", 0x1710, 0xBF08050C): _DIVISION,
    ("d7c042566799", 0x2420, 0xBF890013): _BEHIND,
    ("ece00d9cb0e4", 0x1864, 0xBF08120D): _FIRST,
    ("6d853b6fe2df", 0x1868, 0xBF08100A): _FIRST,
    ("6e4a4d3bcd0f", 0x188C, 0xBF8900F2): _UNKNOWN,
    ("67c9b1e7ae10", 0x194C, 0x00080F04):
        "the remainder becomes 0, so that no second correction follows: " + _DIVISION,
    ("347c4d7b1f4d", 0x1ADC, 0x7C8C0F23): _EQUAL,
    ("67c9b1e7ae10", 0x1658, 0x280A040D): "a division of 64 bits where one of 32 would do",
    ("9bfbea36209c", 0x1B40, 0x7DC61902): _EQUAL,
    ("80ae669b317f", 0x3538, 0x9213483B): _SIGN,
    ("51f57350849d", 0x1818, 0xB59000FF): _FIRST_THREAD,
    ("06d0e38d3a7c", 0x4544, 0x7D936615): _FIRST,
    ("3cfde8b50566", 0x221C, 0x683C051C):
        "a point of eight is asked at another place of its block, whose mask hides a third of the "
        "points that each of the eight asks",
    ("71640c498165", 0x2338, 0x7D821280):
        "3 is added to the rest of a division by 3 if it is positive, not if it is negative: only "
        "whether the rest is 0 counts",
    ("9749ea624710", 0x1864, 0xBF08120D): _FIRST,
    ("f75fe22c970c", 0x1928, 0xBF081215): _DIVISION,
    ("50f562a297d7", 0x45B0, 0x7E020280): "only the first thread is here, whose number is 0",
    ("295bc20bf452", 0x1FD0, 0xBF023823):
        "a workgroup that begins where the rows end owns none, and stores nothing",
    ("991a382ed1d2", 0xB3B0, 0xBF038332): _SIZES,
    ("d02169065a65", 0x2130, 0x7C8C0702): _EQUAL,
    ("dbafb40c2083", 0x227C, 0x68383A90):
        "two points of eight stay in the first block of 64 rows; the other six ask each block of "
        "64, of which a table has one state",
    ("32e49c3861a0", 0x1C78, 0x7D8C1102): _POINTS,
    ("7ab818302686", 0x1F70, 0xBF800000):
        "a call with seqused_k and a gradient has cu_seqlens_k, whose load is waited for behind "
        "all loads before it; the load after it has a wait of its own",
    ("f527adb81629", 0x17B4C, 0xD87E0080):
        "the first exchange is with lane ^ 48 instead of lane ^ 16, the second with lane ^ 32: "
        "after both each of a column's four lanes has the maximum of all",
    ("b0e7eb9a2c04", 0x5FDC, 0x7C8C4B24): _EQUAL,
    ("122fb50464ab", 0x17A8, 0x81810300):
        "the mask_mod asks for neither b nor h: of one table every number is below the number of "
        "tiles, and the quotient is 0",
    ("e50954283920", 0x20B0, 0xD87E0010): _HALVES,
    ("2930f7ed3841", 0x20D4, 0xD87E0010): _HALVES,
    ("0cfa988f86b6", 0x1D9C, 0x7D8C5B02): _POINTS,
    ("71640c498165", 0x1F9C, 0x3A080A80):
        "the high word of one minus a truth value: 0 before and after, as is the register that is "
        "written instead",
    ("5cd11b0746a8", 0x1D4C, 0x7DC8042C): _UNKNOWN,
    ("b715d0bde374", 0x1E7C, 0xBF890030): _BEHIND,
    ("ccc109f24911", 0x341C, 0xBF800000): _AWAITED,
    ("ccc109f24911", 0x32B0, 0xBF800000): _AWAITED,
    ("ccc109f24911", 0x7FB8, 0x7C8D9300): _EQUAL,
    ("7aab0f0ebd01", 0x1CF4, 0xBF800000):
        "both ways to it have the same wait, and no load comes after it",
    ("90e49b7dcda6", 0x1FCC, 0xBF080205): _DIVISION,
    ("ccc109f24911", 0x1BF8, 0xBF0B1005):
        "the parts of the keys become longer, and the last ones may have none: splits of another "
        "size, which changes no result but its rounding",
    ("d02169065a65", 0x19BC, 0xD0C3000A): _MULTIPLES,
    ("d02169065a65", 0x19B4, 0xD0C40008): _MULTIPLES,
    ("ece00d9cb0e4", 0x1964, 0xBF081221): _DIVISION,
    ("ca2f14e55cb8", 0x1868, 0xBF08120A): _FIRST,
    ("3944a0423cba", 0x1F3C, 0x7DC61502): _EQUAL,
    ("7aab0f0ebd01", 0x3480, 0xBF800000):
        "the wait for the sines, before it, is for all loads, and no load comes between them",
    ("5ba0d43790c6", 0x5468, 0xBF038326): _SIZES,
}  # fmt: skip

_SIZE = "another size of tiles, which changes no result but its rounding"
_PYTHON: dict[tuple[str, str, str], str] = {
    ("tiled.py",
     "self.step_q = min(256, max(32, budget >> 9))",
     "self.step_q = max(256, max(32, budget >> 9))"): _SIZE,
    ("tiled.py",
     "self.step_k = min(512, max(64, budget // self.step_q))",
     "self.step_k = max(512, max(64, budget // self.step_q))"): _SIZE,
    ("tiled.py",
     "_TILE_SCORES = {'cpu': 1 << 20, 'cuda': 1 << 25}",
     "_TILE_SCORES = {'cpu': 1 << 20, 'cuda': 2 << 25}"): _SIZE,
    ("tiled.py",
     "if dsinks is not None and call.sinks is not None:",
     "if dsinks is not None or call.sinks is not None:"):
        "there are gradients of sinks where there are sinks",
    ("tiled.py",
     "column, last = ((distance + row[:, None]).expand(batch, 1, -1, -1), mask.shape[-1] - 1)",
     "column, last = ((distance + row[:, None]).expand(batch, 1, -1, -1), mask.shape[-2] - 1)"):
        "a tree_mask is square",
    ("tiled.py",
     "if call.q.device.type != 'cpu' or not blocks.is_exact(blocks.mask_of(call)):",
     "if call.q.device.type != 'cpu' and (not blocks.is_exact(blocks.mask_of(call))):"):
        "explain, which alone asks, says of a mask_mod that is not exact that every tile is "
        "visited, whatever the answer is",
    ("philox.py",
     "return draw < int((1.0 - p) * 2 ** 32)",
     "return draw <= int((1.0 - p) * 2 ** 32)"): _DROPOUT,
}  # fmt: skip


def of_source(plan: str, old: str, new: str, in_front: str = "") -> str:
    """Why this change of a line is equivalent, "" where nobody has shown it. ``in_front``: the
    lines in front of it."""
    lines = f"\n{in_front}\n{old}"
    for parts, absent, before, after, why in _SOURCE:
        fits = all(part in plan for part in parts) and not any(part in plan for part in absent)
        if fits and lines.endswith(f"\n{before}") and after == new:
            return why
    return ""


def of_python(file: str, old: str, new: str) -> str:
    """Why this change of a line is equivalent, "" where nobody has shown it."""
    return _PYTHON.get((file, old, new), "")


def of_code(digest: str, pc: int, low: int) -> str:
    """Why this change of an instruction is equivalent, "" where nobody has shown it."""
    return _CODE.get((digest[:12], pc, low), "")


def worst_quotient(divisors: np.ndarray) -> float:
    """From which numerator on LLVM's 32-bit division by these can need its second correction.

    Its estimate of 2^32 / d is an integer z: the reciprocal in float32, which v_rcp_iflag_f32 gives
    to 1 ulp, times 0x4f7ffffe, and one Newton step in integers. The quotient n z / 2^32 is below
    n / d by n (2^32 / d - z) / 2^32; while that is below 1, one correction is enough.
    """
    exact = np.float32(1.0) / divisors.astype(np.float32)
    largest = 0.0
    d = divisors.astype(np.uint64)
    for toward in (exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(2))):
        scaled = toward.astype(np.float32) * np.uint32(0x4F7FFFFE).view(np.float32)
        first = np.minimum(scaled.astype(np.float64), 2.0**32 - 1).astype(np.uint64)
        rest = (np.uint64(1 << 32) - d * first % np.uint64(1 << 32)) % np.uint64(1 << 32)
        z = (first + (first * rest >> np.uint64(32))) % np.uint64(1 << 32)
        largest = max(largest, float((2.0**32 / d.astype(np.float64) - z.astype(np.float64)).max()))
    return 2.0**32 / largest
