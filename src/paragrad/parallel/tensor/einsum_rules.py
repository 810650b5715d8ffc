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

from paragrad.engine.rng.random_kernels import DrawBox, use_draw_box
from paragrad.parallel.sharding.autograd_collectives import AxisGroup
from paragrad.parallel.sharding.partition import constrain_to_equal
from paragrad.parallel.sharding.sharded_tensor import (
    NO_RULE,
    ShardedTensor,
    Sharding,
    gather_whole,
    is_in_place,
    register_rule,
    slice_local,
    wrap_local,
)

Letters = Sequence[Hashable]  # one for each dimension; None: it cannot be divided


@dataclass
class Operand:
    """A tensor, or None where there is none."""

    value: Tensor | None
    letters: Letters

    def __post_init__(self) -> None:
        self.letters = tuple(self.letters)

    def iterate_shardings(self) -> Iterator[tuple[Hashable, int, Sharding]]:
        if isinstance(self.value, ShardedTensor):
            for dim, cut in self.value.shardings.items():
                yield self.letters[dim], dim, cut


def apply_einsum_rule(
    compute: Callable[..., Any],
    operands: Sequence[Operand],
    output_letters: Letters,
    columns: Sequence[tuple[int, Hashable]] = (),
    keep_first: bool = False,
    bias: Operand | None = None,
    output_shardings: Mapping[Any, Sharding] | None = None,
) -> Any:
    """run(*local operands), with what travels before and after.

    columns: where nothing is divided yet, and it is being found out what to divide: of which
    operand along which letter; first: the first operand's letters stay divided as they are, and
    no others (it is changed in place); bias: is given to run last, or, where the result is a
    sum over ranks, added to that: then run gets None;  after: of letters that the result has in
    other pieces, how.
    """
    output_letters = tuple(output_letters)
    for each in operands if columns else ():
        if summed := [
            dim
            for letter, dim, cut in each.iterate_shardings()
            if letter not in output_letters and not cut.group.options.pairs
        ]:
            each.value = gather_whole(each.value, summed) if each.value is not None else None
    if not any(True for each in operands for _ in each.iterate_shardings()):
        _decide_columns(operands, columns)
    cuts = _choose_letters(operands, output_letters, keep_first)
    made = compute(
        *(fit_operand(each, cuts) for each in operands),
        *(
            []
            if bias is None
            else [
                None
                if any(letter not in output_letters for letter in cuts)
                else fit_operand(bias, cuts)
            ]
        ),
    )
    sums = [cut.group for letter, cut in cuts.items() if letter not in output_letters]
    for line in sums:
        made = line.add_partial_results(made)
    if sums and bias is not None and bias.value is not None:
        made = made + _broadcast_bias(
            fit_operand(
                bias, {letter: cut for letter, cut in cuts.items() if letter in output_letters}
            ),
            bias,
            output_letters,
            made.dtype,
        )
    output_shardings = {**cuts, **(output_shardings or {})}
    found = {
        dim: output_shardings[letter] for dim, letter in enumerate(output_letters) if letter in cuts
    }
    return tree_map_only(Tensor, lambda each: wrap_local(each, found), made) if found else made


def _decide_columns(operands: Sequence[Operand], columns: Sequence[tuple[int, Hashable]]) -> None:
    for at, letter in columns:
        value = operands[at].value
        if (
            isinstance(value, ShardedTensor)
            and value.decider
            and value.decider.decide_sharding(value, operands[at].letters.index(letter), "outputs")
        ):
            return


def _broadcast_bias(tensor: Tensor | None, bias: Operand, out: Letters, dtype: torch.dtype) -> Any:
    """A bias in the dimensions of the result, and its type (under autocast)."""
    assert tensor is not None
    after = len(out) - 1 - out.index(bias.letters[-1])
    return tensor.view(*tensor.shape, *(1 for _ in range(after))).to(dtype)


def _choose_letters(
    operands: Sequence[Operand], out: Letters, keep_first: bool
) -> dict[Hashable, Sharding]:
    """The letters that are divided, and how: one for each line of ranks. One that the result
    has comes before one that is summed over, then that of the largest operand.
    """
    found: dict[Hashable, Sharding] = {}
    sizes: dict[Hashable, int] = {}
    for each in operands[:1] if keep_first else operands:
        for letter, _, cut in each.iterate_shardings():
            if letter is None:
                continue
            assert each.value is not None
            before = found.setdefault(letter, cut)
            sizes[letter] = max(sizes.get(letter, 0), each.value.numel())
            if not cut.is_same_sharding(before) and cut.group is before.group:
                cut.group.add_constraints(constrain_to_equal(before.partition, cut.partition))
    lines: dict[AxisGroup, Hashable] = {}
    for letter, cut in sorted(
        found.items(), key=lambda item: (item[0] not in out, -sizes[item[0]])
    ):
        kept = lines.setdefault(cut.group, letter)
        if kept != letter and letter not in out and cut.group.decider is not None:
            cut.group.decider.reconsider_sources(found[kept].partition)
    return {letter: found[letter] for letter in found if lines[found[letter].group] == letter}


def fit_operand(
    operand: Operand, shardings: Mapping[Any, Sharding], required: bool = False
) -> Tensor | None:
    """The local part of an operand where these letters are divided; None of none, and where it
    must be divided so as it is.
    """
    value = operand.value
    letters = operand.letters
    if value is None:
        return None
    strange = [
        dim
        for letter, dim, cut in operand.iterate_shardings()
        if not cut.is_same_sharding(shardings.get(letter))
    ]
    value = gather_whole(value, strange) if strange else value
    for letter, cut in shardings.items():
        dim = letters.index(letter) if letter in letters else None
        if isinstance(value, ShardedTensor) and dim in value.shardings:
            continue
        if dim is not None and value.shape[dim] == cut.partition.size:
            if (
                isinstance(value, ShardedTensor)
                and value.decider
                and value.decider.follow_sharding(value, dim, cut)
            ):
                continue
            if required:
                return None
            value = wrap_local(
                slice_local(_get_local(value), dim, cut),
                {**getattr(value, "shardings", {}), dim: cut},
            )
        else:
            value = wrap_local(
                cut.group.copy_to_ranks(_get_local(value)), getattr(value, "shardings", {})
            )
    return _get_local(value)


def _get_local(value: Tensor) -> Tensor:
    return value.local if isinstance(value, ShardedTensor) else value


# ---- element by element ----------------------------------------------------------------------
@register_rule("each element")
def apply_elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if "out" in kwargs or (len(leaves) == 1 and func.__name__ == "where"):
        return NO_RULE
    in_place = is_in_place(func.__name__)
    changed = args[0] if in_place else None
    if in_place and not (isinstance(changed, ShardedTensor) and changed.shardings):
        return NO_RULE
    dims = max(leaves[at].dim() for at in places)

    def run(*tensors: Any) -> Any:
        for at, tensor in zip(places, tensors, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, spec)
        return func(*args, **kwargs)

    if not in_place:
        _gather_mixed_operands(leaves, places)
    operands = [Operand(leaves[at], range(dims - leaves[at].dim(), dims)) for at in places]
    out = apply_einsum_rule(run, operands, range(dims), keep_first=in_place)
    if in_place:
        assert isinstance(changed, ShardedTensor)
        changed.__dict__["local"] = out.local
        return changed
    return out


def _gather_mixed_operands(leaves: list[Any], places: list[int]) -> None:
    """A divided value and a plain one of its size, such as what goes around a layer and what
    came out of it: one of them has to change, and where the line says so it is the divided
    one.
    """
    plain = [
        leaves[at]
        for at in places
        if not isinstance(leaves[at], ShardedTensor) and leaves[at].requires_grad
    ]
    for at in places:
        x = leaves[at]
        if (
            isinstance(x, ShardedTensor)
            and any(cut.group.options.gathers_mixed for cut in x.shardings.values())
            and any(each.numel() >= x.numel() for each in plain)
        ):
            leaves[at] = gather_whole(x)


@register_rule("_weight_norm")
def apply_weight_norm(func: Any, v: Tensor, g: Tensor, dim: int = 0) -> Any:
    letters = tuple("o" if at == dim else None for at in range(v.dim()))
    if isinstance(v, ShardedTensor) and not set(v.shardings) <= {dim}:
        others = tuple(at for at in range(v.dim()) if at != dim)
        return v * (g / v.square().sum(others, keepdim=True).sqrt())
    return apply_einsum_rule(
        lambda a, b: func(a, b, dim), [Operand(v, letters), Operand(g, letters)], letters
    )


# ---- products --------------------------------------------------------------------------------
@register_rule("linear", decides=True)
def apply_linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.dim() != 2 or input.dim() == 0:
        return NO_RULE
    rest = range(input.dim() - 1)
    # of which less travels
    if not isinstance(weight, ShardedTensor) and weight.numel() > input.numel():
        input = gather_whole(input, [input.dim() - 1])
    if (
        input.dim() == 2
        and isinstance(input, ShardedTensor)
        and 0 in input.shardings
        and input.shardings[0].group.options.dense
    ):
        input = gather_whole(input, [0])
    operands = [Operand(input, (*rest, "i")), Operand(weight, "oi")]
    return apply_einsum_rule(func, operands, (*rest, "o"), [(1, "o")], bias=Operand(bias, "o"))


@register_rule("addmm", "addmv", decides=True)
def apply_addmm(
    func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    if (beta, alpha) != (1, 1) or func.__name__ == "addmv":
        return _scale_and_add(input, mat1 @ mat2, beta, alpha)

    def run(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
        return torch.mm(a, b) if c is None else torch.addmm(c, a, b)

    return apply_einsum_rule(
        run,
        [Operand(mat1, "ri"), Operand(mat2, "io")],
        "ro",
        [(1, "o")],
        bias=Operand(input, "ro"[2 - input.dim() :]),
    )


@register_rule("baddbmm", decides=True)
def apply_baddbmm(
    func: Any, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    return _scale_and_add(input, torch.bmm(batch1, batch2), beta, alpha)


def _scale_and_add(input: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """Where beta is 0 torch does not look at the input, which may be empty memory."""
    return alpha * product if beta == 0 else beta * input.to(product.dtype) + alpha * product


@register_rule("matmul", "__matmul__", "mm", "bmm", "mv", "dot", decides=True)
def apply_matmul(func: Any, input: Tensor, other: Tensor) -> Any:
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
    return apply_einsum_rule(
        torch.matmul,
        [Operand(input, one), Operand(other, two)],
        out,
        [(1, "c")] if other.dim() == 2 else (),
    )


@register_rule("__rmatmul__", decides=True)
def apply_rmatmul(func: Any, second: Tensor, first: Tensor) -> Any:
    return apply_matmul(func, first, second)


@register_rule("einsum", decides=True)
def apply_einsum(func: Any, equation: str, *operands: Any, **_: Any) -> Any:
    tensors = (
        list(operands[0])
        if len(operands) == 1 and isinstance(operands[0], list | tuple)
        else list(operands)
    )
    text = equation.replace(" ", "")
    if "." in text:
        return NO_RULE
    given, arrow, out = text.partition("->")
    letters = given.split(",")
    if not arrow:
        out = "".join(sorted(letter for letter in set(given) - {","} if given.count(letter) == 1))
    if any(len(set(each)) != len(each) for each in letters):
        return NO_RULE
    columns = [
        (at, letter)
        for at, each in enumerate(letters)
        for letter in each
        if letter in out and given.count(letter) == 1
    ]
    return apply_einsum_rule(
        lambda *given: torch.einsum(equation, *given),
        [Operand(tensor, each) for tensor, each in zip(tensors, letters, strict=True)],
        out,
        columns,
    )


@register_rule("scaled_dot_product_attention")
def apply_attention(
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
    boxed = find_local_boxes(_choose_letters(operands, out, False), out) if dropout_p else None

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return draw_in_box(boxed, lambda: func(q, k, v, mask, dropout_p, is_causal, scale=scale))

    return apply_einsum_rule(run, operands, out)


# ---- random numbers: those of the whole tensor's elements ------------------------------------
def find_local_boxes(shardings: dict[Any, Sharding], output_letters: Letters) -> DrawBox:
    """Of a result, where in the whole one this rank's elements are: by dimension (its size,
    ranges).
    """
    return {
        dim: (
            shardings[letter].partition.size,
            tuple(shardings[letter].partition.list_ranges(shardings[letter].group.rank)),
        )
        for dim, letter in enumerate(output_letters)
        if letter in shardings
    }


def draw_in_box(box: DrawBox | None, function: Callable[[], Any]) -> Any:
    if not box:
        return function()
    with use_draw_box(box):
        return function()


RANDOM_FUNCTIONS = (
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


@register_rule(*RANDOM_FUNCTIONS)
def apply_random(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if (
        not isinstance(x, ShardedTensor)
        or not x.shardings
        or any(isinstance(each, ShardedTensor) for each in (*args, *kwargs.values()))
    ):
        return NO_RULE
    cuts: dict[Any, Sharding] = dict(x.shardings)
    # of samples and channels
    drawn = {dim: cut for dim, cut in cuts.items() if dim < 2 or "feature" not in func.__name__}
    made = draw_in_box(
        find_local_boxes(drawn, range(x.dim())), lambda: func(x.local, *args, **kwargs)
    )
    if func.__name__.endswith("_"):
        x.__dict__["local"] = made
        return x
    return tree_map_only(Tensor, lambda each: wrap_local(each, cuts), made)
