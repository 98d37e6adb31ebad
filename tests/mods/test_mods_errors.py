"""A mod that cannot be computed is refused by an error that names the line and what to write."""

import linecache
import math
import re

import numpy
import pytest
import torch

import pyfa

q = torch.zeros(1, 4, 2, 8)
table = torch.zeros(4)
seen: list[int] = []


class Holder:
    value = 0


def _helper(i, j):
    if i > j:  # wrong: branch in a function that the mod calls
        return i
    return j


def _branch(b, h, i, j):
    if i > j:  # wrong
        return i < 3
    return i < 4


def _and(b, h, i, j):
    return i > j and i < 3  # wrong


def _helped(b, h, i, j):
    return _helper(i, j) > 2


def _item(b, h, i, j):
    return j < table[0].item()  # wrong


def _integer(b, h, i, j):
    return i - j  # returned


def _row(b, h, i, j):
    return table == i  # wrong


def _part(s, b, h, i, j):
    return s + table[None, i]  # wrong


def _float_index(s, b, h, i, j):
    return s + table[i / 2]  # wrong


def _operator(s, b, h, i, j):
    return torch.special.erfinv(s)  # wrong


def _in_place(s, b, h, i, j):
    s += 1  # wrong
    return s


def _written(b, h, i, j):
    table[0] = 1  # wrong
    return i > j


def _added(s, b, h, i, j):
    table.add_(1)  # wrong
    return s


def _row_added(s, b, h, i, j):
    table[1:].mul_(2)  # wrong
    return s


def _out(s, b, h, i, j):
    torch.exp(torch.ones(4), out=table)  # wrong
    return s


def _kept(b, h, i, j):
    seen.append(1)
    return i > j


def _attribute(b, h, i, j):
    Holder.value = 1  # wrong
    return i > j


def _global(b, h, i, j):
    global seen
    seen = []  # wrong
    return i > j


def _random(s, b, h, i, j):
    return s + torch.rand(())  # wrong


def _large(s, b, h, i, j):
    for n in range(600):
        s = s * 1.5 + j * n
    return s


def _narrow(b, h, i, j):
    small = table.to(torch.uint8)
    return small[i] - small[j] > 3  # wrong


def _complex(s, b, h, i, j):
    return s + table.to(torch.complex64)[i].real  # wrong


def _chained(b, h, i, j):
    return 0 <= i - j < 5  # wrong


def _built_in(s, b, h, i, j):
    return max(s, 0.0)  # wrong


def _of_math(s, b, h, i, j):
    return s + math.sin(i)  # wrong


def _of_numpy(s, b, h, i, j):
    return s + numpy.sin(i)  # wrong


def _listed(s, b, h, i, j):
    return s + [1.0, 2.0][h]  # wrong


def _looped(s, b, h, i, j):
    for n in range(i):  # wrong
        s = s + n
    return s


def _beyond(s, b, h, i, j):
    return s + table[9]  # wrong


def _keyed(s, b, h, i, j):
    return s + {0: 1.0}[h]  # wrong


def _text(s, b, h, i, j):
    return "score"


WRONG = {
    _branch: "a branch .*; use torch.where",
    _and: "use torch.where, `&`, `|`, `~`",
    _helped: "a branch .*; use torch.where",
    _chained: "chained comparison.*use torch.where, `&`",
    _built_in: "`max`.*torch.maximum",
    _of_math: "a function of math.*torch's functions",
    _of_numpy: "a function of numpy.*torch's functions",
    _listed: "the index of a list or an array; capture a torch tensor",
    _looped: r"`range\(\)`",
    _beyond: "raises IndexError: index 9 is out of bounds",
    _keyed: "raises KeyError",
    _item: "capture a Python number",
    _integer: "returns torch.int32, expected torch.bool; compare it",
    _row: "index every dimension",
    _part: "expected one integer for each dimension",
    _float_index: "convert it by .int()",
    _operator: "erfinv.*they have arithmetic",
    _in_place: "changes a tensor in place.*torch.where",
    _written: "may only return a value",
    _added: "changes a captured tensor in place .add_.*change the tensor before the call",
    _row_added: "changes a captured tensor in place .mul_",
    _out: "changes a captured tensor in place .exp",
    _kept: "changes a list, dict or set",
    _attribute: "assigns to an attribute",
    _global: "assigns to a global",
    _random: "draws random numbers.*draw them before the call",
    _large: "more than 512 operations; precompute",
    _narrow: "uint8.*convert with .int()",
    _complex: "complex",
    _text: "returns str, expected a floating-point number",
}


@pytest.mark.parametrize("mod", WRONG, ids=lambda mod: mod.__name__)
def test_the_error_names_the_line(mod):
    kind = "score_mod" if mod.__code__.co_argcount == 5 else "mask_mod"
    with pytest.raises(ValueError, match=WRONG[mod]) as error:
        pyfa.attention(q, q, q, **{kind: mod})
    found = re.match(rf"{kind} {mod.__name__}, (.*):(\d+): ", str(error.value))
    assert found, str(error.value)
    assert found[1] == __file__
    line = linecache.getline(found[1], int(found[2]))
    first = mod.__code__.co_firstlineno
    assert "wrong" in line or int(found[2]) == first, line
    if mod not in (_integer, _large, _kept, _text):
        assert "wrong" in line


def test_a_mod_may_change_what_it_made_itself():
    def mod(s, b, h, i, j):
        own = torch.ones(4)
        own.add_(table).mul_(2)
        other = torch.tensor([1.0, 2.0])
        other += 1
        return s + own[i] + other[h]

    pyfa.attention(q, q, q, score_mod=mod)
    assert torch.equal(table, torch.zeros(4))


def test_what_is_no_function():
    with pytest.raises(TypeError, match="score_mod: expected a function; got int"):
        pyfa.attention(q, q, q, score_mod=3)


def test_a_captured_tensor_elsewhere():
    other = torch.zeros(4, device="meta")
    with pytest.raises(ValueError, match="captures a tensor on meta, expected cpu, where q is"):
        pyfa.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + other[j])


def test_too_many_captured_tensors():
    many = [torch.zeros(4) for _ in range(9)]
    with pytest.raises(ValueError, match="capture 9 tensors, expected at most 8"):
        pyfa.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + sum(x[j] for x in many))


def test_a_wrong_number_of_arguments():
    expected = r"score_mod <lambda>, .*test_mods_errors.py:\d+: takes \(s, b\), expected \(score, b"
    with pytest.raises(TypeError, match=expected):
        pyfa.attention(q, q, q, score_mod=lambda s, b: s)
    expected = r"takes \(s, b, h, i, j\), expected \(b, h, q_idx, kv_idx\)"
    with pytest.raises(TypeError, match=expected):
        pyfa.attention(q, q, q, mask_mod=lambda s, b, h, i, j: s)
    pyfa.attention(q, q, q, score_mod=lambda s, b, h, i, j, more=1.0: s * more)
