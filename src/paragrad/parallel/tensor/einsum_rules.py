"""Functions as an einsum says them: every dimension has a letter, and a letter is divided in
all operands that have it.

What lacks a divided letter is copied (its gradient is summed), a plain operand that has it is
sliced, and where the result lacks it, it is a sum over ranks. So columns and rows of a linear
layer, channels of a convolution, heads of an attention and what works element by element are
one rule: the letters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from paragrad.engine.rng.random_kernels import Box, boxed
from paragrad.parallel.sharding.autograd_collectives import Line
from paragrad.parallel.sharding.partition import to_be_alike
from paragrad.parallel.sharding.sharded_tensor import (
    UNKNOWN,
    Cut,
    Divided,
    changes,
    divided,
    piece,
    rule,
    whole,
)

Letters = Sequence[Hashable]  # one for each dimension; None: it cannot be divided


@dataclass
class Operand:
    """A tensor, or None where there is none."""

    value: Tensor | None
    letters: Letters

    def __post_init__(self) -> None:
        self.letters = tuple(self.letters)

    def cuts(self) -> Iterator[tuple[Hashable, int, Cut]]:
        if isinstance(self.value, Divided):
            for dim, cut in self.value.cuts.items():
                yield self.letters[dim], dim, cut


def spread(
    run: Callable[..., Any],
    operands: Sequence[Operand],
    out: Letters,
    columns: Sequence[tuple[int, Hashable]] = (),
    first: bool = False,
    bias: Operand | None = None,
    after: Mapping[Any, Cut] | None = None,
) -> Any:
    """run(*local operands), with what travels before and after.

    columns: where nothing is divided yet, and it is being found out what to divide: of which
    operand along which letter; first: the first operand's letters stay divided as they are, and
    no others (it is changed in place); bias: is given to run last, or, where the result is a
    sum over ranks, added to that: then run gets None;  after: of letters that the result has in
    other pieces, how.
    """
    out = tuple(out)
    for each in operands if columns else ():
        if summed := [
            dim
            for letter, dim, cut in each.cuts()
            if letter not in out and not cut.line.manner.pairs
        ]:
            each.value = whole(each.value, summed) if each.value is not None else None
    if not any(True for each in operands for _ in each.cuts()):
        _divide(operands, columns)
    cuts = _kept(operands, out, first)
    made = run(
        *(fitted(each, cuts) for each in operands),
        *(
            []
            if bias is None
            else [None if any(letter not in out for letter in cuts) else fitted(bias, cuts)]
        ),
    )
    sums = [cut.line for letter, cut in cuts.items() if letter not in out]
    for line in sums:
        made = line.added(made)
    if sums and bias is not None and bias.value is not None:
        made = made + _broadcast(
            fitted(bias, {letter: cut for letter, cut in cuts.items() if letter in out}),
            bias,
            out,
            made.dtype,
        )
    after = {**cuts, **(after or {})}
    found = {dim: after[letter] for dim, letter in enumerate(out) if letter in cuts}
    return tree_map_only(Tensor, lambda each: divided(each, found), made) if found else made


def _divide(operands: Sequence[Operand], columns: Sequence[tuple[int, Hashable]]) -> None:
    for at, letter in columns:
        value = operands[at].value
        if (
            isinstance(value, Divided)
            and value.asking
            and value.asking.divide(value, operands[at].letters.index(letter), "outputs")
        ):
            return


def _broadcast(tensor: Tensor | None, bias: Operand, out: Letters, dtype: torch.dtype) -> Any:
    """A bias in the dimensions of the result, and its type (under autocast)."""
    assert tensor is not None
    after = len(out) - 1 - out.index(bias.letters[-1])
    return tensor.view(*tensor.shape, *(1 for _ in range(after))).to(dtype)


def _kept(operands: Sequence[Operand], out: Letters, first: bool) -> dict[Hashable, Cut]:
    """The letters that are divided, and how: one for each line of ranks. One that the result
    has comes before one that is summed over, then that of the largest operand.
    """
    found: dict[Hashable, Cut] = {}
    sizes: dict[Hashable, int] = {}
    for each in operands[:1] if first else operands:
        for letter, _, cut in each.cuts():
            if letter is None:
                continue
            assert each.value is not None
            before = found.setdefault(letter, cut)
            sizes[letter] = max(sizes.get(letter, 0), each.value.numel())
            if not cut.alike(before) and cut.line is before.line:
                cut.line.wish(to_be_alike(before.pieces, cut.pieces))
    lines: dict[Line, Hashable] = {}
    for letter, cut in sorted(
        found.items(), key=lambda item: (item[0] not in out, -sizes[item[0]])
    ):
        kept = lines.setdefault(cut.line, letter)
        if kept != letter and letter not in out and cut.line.planning is not None:
            cut.line.planning.reconsider(found[kept].pieces)
    return {letter: found[letter] for letter in found if lines[found[letter].line] == letter}


def fitted(operand: Operand, cuts: Mapping[Any, Cut], must: bool = False) -> Tensor | None:
    """The local part of an operand where these letters are divided; None of none, and where it
    must be divided so as it is.
    """
    value = operand.value
    letters = operand.letters
    if value is None:
        return None
    strange = [dim for letter, dim, cut in operand.cuts() if not cut.alike(cuts.get(letter))]
    value = whole(value, strange) if strange else value
    for letter, cut in cuts.items():
        dim = letters.index(letter) if letter in letters else None
        if isinstance(value, Divided) and dim in value.cuts:
            continue
        if dim is not None and value.shape[dim] == cut.pieces.size:
            if isinstance(value, Divided) and value.asking and value.asking.follow(value, dim, cut):
                continue
            if must:
                return None
            value = divided(
                piece(_local(value), dim, cut), {**getattr(value, "cuts", {}), dim: cut}
            )
        else:
            value = divided(cut.line.copied(_local(value)), getattr(value, "cuts", {}))
    return _local(value)


def _local(value: Tensor) -> Tensor:
    return value.local if isinstance(value, Divided) else value


# ---- element by element ----------------------------------------------------------------------
@rule("each element")
def each_element(func: Any, *args: Any, **kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if "out" in kwargs or (len(leaves) == 1 and func.__name__ == "where"):
        return UNKNOWN
    in_place = changes(func.__name__)
    changed = args[0] if in_place else None
    if in_place and not (isinstance(changed, Divided) and changed.cuts):
        return UNKNOWN
    dims = max(leaves[at].dim() for at in places)

    def run(*tensors: Any) -> Any:
        for at, tensor in zip(places, tensors, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, spec)
        return func(*args, **kwargs)

    if not in_place:
        _met(leaves, places)
    operands = [Operand(leaves[at], range(dims - leaves[at].dim(), dims)) for at in places]
    out = spread(run, operands, range(dims), first=in_place)
    if in_place:
        assert isinstance(changed, Divided)
        changed.__dict__["local"] = out.local
        return changed
    return out


def _met(leaves: list[Any], places: list[int]) -> None:
    """A divided value and a plain one of its size, such as what goes around a layer and what
    came out of it: one of them has to change, and where the line says so it is the divided
    one.
    """
    plain = [
        leaves[at]
        for at in places
        if not isinstance(leaves[at], Divided) and leaves[at].requires_grad
    ]
    for at in places:
        x = leaves[at]
        if (
            isinstance(x, Divided)
            and any(cut.line.manner.gathers for cut in x.cuts.values())
            and any(each.numel() >= x.numel() for each in plain)
        ):
            leaves[at] = whole(x)


@rule("_weight_norm")
def weight_norm(func: Any, v: Tensor, g: Tensor, dim: int = 0) -> Any:
    letters = tuple("o" if at == dim else None for at in range(v.dim()))
    if isinstance(v, Divided) and not set(v.cuts) <= {dim}:
        others = tuple(at for at in range(v.dim()) if at != dim)
        return v * (g / v.square().sum(others, keepdim=True).sqrt())
    return spread(lambda a, b: func(a, b, dim), [Operand(v, letters), Operand(g, letters)], letters)


# ---- products --------------------------------------------------------------------------------
@rule("linear", decides=True)
def linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.dim() != 2 or input.dim() == 0:
        return UNKNOWN
    rest = range(input.dim() - 1)
    # of which less travels
    if not isinstance(weight, Divided) and weight.numel() > input.numel():
        input = whole(input, [input.dim() - 1])
    if (
        input.dim() == 2
        and isinstance(input, Divided)
        and 0 in input.cuts
        and input.cuts[0].line.manner.dense
    ):
        input = whole(input, [0])
    operands = [Operand(input, (*rest, "i")), Operand(weight, "oi")]
    return spread(func, operands, (*rest, "o"), [(1, "o")], bias=Operand(bias, "o"))


@rule("addmm", "addmv", decides=True)
def addmm(
    func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    if (beta, alpha) != (1, 1) or func.__name__ == "addmv":
        return _added(input, mat1 @ mat2, beta, alpha)

    def run(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
        return torch.mm(a, b) if c is None else torch.addmm(c, a, b)

    return spread(
        run,
        [Operand(mat1, "ri"), Operand(mat2, "io")],
        "ro",
        [(1, "o")],
        bias=Operand(input, "ro"[2 - input.dim() :]),
    )


@rule("baddbmm", decides=True)
def baddbmm(
    func: Any, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    return _added(input, torch.bmm(batch1, batch2), beta, alpha)


def _added(input: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """Where beta is 0 torch does not look at the input, which may be empty memory."""
    return alpha * product if beta == 0 else beta * input.to(product.dtype) + alpha * product


@rule("matmul", "__matmul__", "mm", "bmm", "mv", "dot", decides=True)
def matmul(func: Any, input: Tensor, other: Tensor) -> Any:
    dims = max(input.dim(), other.dim(), 2)

    def letters(tensor: Tensor, own: tuple[str, str]) -> Letters:
        return (*range(dims - tensor.dim(), dims - 2), *own) if tensor.dim() > 1 else ("k",)

    one = letters(input, ("r", "k"))
    two = letters(other, ("k", "c"))
    out = (
        *range(dims - 2),
        *(["r"] if input.dim() > 1 else []),
        *(["c"] if other.dim() > 1 else []),
    )
    return spread(
        torch.matmul,
        [Operand(input, one), Operand(other, two)],
        out,
        [(1, "c")] if other.dim() == 2 else (),
    )


@rule("__rmatmul__", decides=True)
def rmatmul(func: Any, second: Tensor, first: Tensor) -> Any:
    return matmul(func, first, second)


@rule("einsum", decides=True)
def einsum(func: Any, equation: str, *operands: Any, **_: Any) -> Any:
    tensors = (
        list(operands[0])
        if len(operands) == 1 and isinstance(operands[0], list | tuple)
        else list(operands)
    )
    text = equation.replace(" ", "")
    if "." in text:
        return UNKNOWN
    given, arrow, out = text.partition("->")
    letters = given.split(",")
    if not arrow:
        out = "".join(sorted(letter for letter in set(given) - {","} if given.count(letter) == 1))
    if any(len(set(each)) != len(each) for each in letters):
        return UNKNOWN
    columns = [
        (at, letter)
        for at, each in enumerate(letters)
        for letter in each
        if letter in out and given.count(letter) == 1
    ]
    return spread(
        lambda *given: torch.einsum(equation, *given),
        [Operand(tensor, each) for tensor, each in zip(tensors, letters, strict=True)],
        out,
        columns,
    )


@rule("scaled_dot_product_attention")
def attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Heads, and whatever else stands before positions and features."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(times, -3)
        value = value.repeat_interleave(times, -3)
    dims = max(each.dim() for each in (query, key, value))

    def letters(tensor: Tensor) -> Letters:
        return (*range(dims - tensor.dim(), dims - 2), None, None)

    out = (*range(dims - 2), None, None)
    operands = [Operand(each, letters(each)) for each in (query, key, value)]
    if attn_mask is not None:
        operands.append(Operand(attn_mask, letters(attn_mask)))
    boxed = boxes(_kept(operands, out, False), out) if dropout_p else None

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return drawn_in(boxed, lambda: func(q, k, v, mask, dropout_p, is_causal, scale=scale))

    return spread(run, operands, out)


# ---- random numbers: those of the whole tensor's elements ------------------------------------
def boxes(cuts: dict[Any, Cut], out: Letters) -> Box:
    """Of a result, where in the whole one this rank's elements are: by dimension (its size,
    ranges).
    """
    return {
        dim: (cuts[letter].pieces.size, tuple(cuts[letter].pieces.ranges(cuts[letter].line.rank)))
        for dim, letter in enumerate(out)
        if letter in cuts
    }


def drawn_in(box: Box | None, call: Callable[[], Any]) -> Any:
    if not box:
        return call()
    with boxed(box):
        return call()


RANDOM = (
    "dropout",
    "dropout_",
    "feature_dropout",
    "feature_dropout_",
    "alpha_dropout",
    "alpha_dropout_",
    "feature_alpha_dropout",
    "feature_alpha_dropout_",
    "native_dropout",
    "bernoulli",
    "rand_like",
    "randn_like",
    "randint_like",
    "rrelu",
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
)


@rule(*RANDOM)
def random(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if (
        not isinstance(x, Divided)
        or not x.cuts
        or any(isinstance(each, Divided) for each in (*args, *kwargs.values()))
    ):
        return UNKNOWN
    cuts: dict[Any, Cut] = dict(x.cuts)
    # of samples and channels
    drawn = {dim: cut for dim, cut in cuts.items() if dim < 2 or "feature" not in func.__name__}
    made = drawn_in(boxes(drawn, range(x.dim())), lambda: func(x.local, *args, **kwargs))
    if func.__name__.endswith("_"):
        x.__dict__["local"] = made
        return x
    return tree_map_only(Tensor, lambda each: divided(each, cuts), made)
