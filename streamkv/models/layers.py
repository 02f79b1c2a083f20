"""The layers models are made of: parameters by name, computed through the op vocabulary.

A layer owns its `Parameter`s and, when it is fused, which checkpoint tensors make it. It never
sees a tensor, so it never imports torch. Invariant: `parameters()` lists each weight once, and
module names equal checkpoint names.

Shapes: T tokens, K in_features, N out_features, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..ops import Handle, Ops, Parameter


class Linear:
    """x [T, K] -> [T, N]. Several `parts` (checkpoint name -> rows of N) are computed as one."""

    def __init__(
        self, name: str, in_features: int, parts: Mapping[str, int], *, bias: bool
    ) -> None:
        out_features = sum(parts.values())
        self.weight = Parameter(
            name=f"{name}.weight",
            shape=(out_features, in_features),
            parts=tuple((f"{part}.weight", (rows, in_features)) for part, rows in parts.items()),
        )
        self.bias = None
        if bias:
            self.bias = Parameter(
                name=f"{name}.bias",
                shape=(out_features,),
                parts=tuple((f"{part}.bias", (rows,)) for part, rows in parts.items()),
            )

    def __call__(self, ops: Ops, x: Handle) -> Handle:
        return ops.linear(x, self.weight, self.bias)

    def parameters(self) -> Iterator[Parameter]:
        yield self.weight
        if self.bias is not None:
            yield self.bias


class RMSNorm:
    """x [T, H] -> [T, H]; with a residual it adds first and returns the new residual too."""

    def __init__(self, name: str, hidden_size: int, eps: float) -> None:
        self.weight = plain_parameter(f"{name}.weight", (hidden_size,))
        self.eps = eps

    def __call__(self, ops: Ops, x: Handle) -> Handle:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, ops: Ops, x: Handle, residual: Handle) -> tuple[Handle, Handle]:
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

    def parameters(self) -> Iterator[Parameter]:
        yield self.weight


def plain_parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    """A weight that is one checkpoint tensor of the same name."""
    return Parameter(name=name, shape=shape, parts=((name, shape),))
