"""The layers models are made of: parameters by name, computed through the op vocabulary.

A layer owns its `Parameter`s and, when it is fused, which checkpoint tensors make it. It never
sees a tensor, so it never imports torch. Invariant: `parameters()` lists each weight once, and
module names equal checkpoint names.

Shapes: T tokens, K in_features, N out_features, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..ops import Handle, Ops, Parameter


class _Projection:
    """The weight and bias of a product; several `parts` (checkpoint name -> rows of N) are one."""

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        is_paired: bool = False,
    ) -> None:
        out_features = sum(parts.values())
        self.weight = Parameter(
            name=f"{name}.weight",
            shape=(out_features, in_features),
            parts=tuple((f"{part}.weight", (rows, in_features)) for part, rows in parts.items()),
            is_paired=is_paired,
        )
        self.bias = None
        if bias:
            self.bias = Parameter(
                name=f"{name}.bias",
                shape=(out_features,),
                parts=tuple((f"{part}.bias", (rows,)) for part, rows in parts.items()),
            )

    def parameters(self) -> Iterator[Parameter]:
        yield self.weight
        if self.bias is not None:
            yield self.bias


class Linear(_Projection):
    """x [T, K] -> [T, N], added to a residual if there is one."""

    def __call__(self, ops: Ops, x: Handle, residual: Handle | None = None) -> Handle:
        return ops.linear(x, self.weight, self.bias, residual)


class GatedLinear(_Projection):
    """x [T, K] -> [T, I]: silu(gate(x)) * up(x), computed as one."""

    def __init__(
        self, name: str, in_features: int, gate: str, up: str, width: int, *, bias: bool
    ) -> None:
        super().__init__(name, in_features, {gate: width, up: width}, bias=bias, is_paired=True)

    def __call__(self, ops: Ops, x: Handle) -> Handle:
        return ops.linear_silu_mul(x, self.weight, self.bias)


class RMSNorm:
    """x [T, H] -> [T, H]."""

    def __init__(self, name: str, hidden_size: int, eps: float) -> None:
        self.weight = plain_parameter(f"{name}.weight", (hidden_size,))
        self.eps = eps

    def __call__(self, ops: Ops, x: Handle) -> Handle:
        return ops.rms_norm(x, self.weight, self.eps)

    def parameters(self) -> Iterator[Parameter]:
        yield self.weight


def plain_parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    """A weight that is one checkpoint tensor of the same name."""
    return Parameter(name=name, shape=shape, parts=((name, shape),))
