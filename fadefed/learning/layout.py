"""The flat parameter vector and its layout: which slice is which tensor."""

import math
from dataclasses import dataclass

from fadefed.messages import Array


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors that make up a flat vector of length `size`, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """d, the length of the flat vector."""
        return sum(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slice of the flat vector that holds each tensor."""
        ends, start = [], 0
        for size in self.sizes:
            ends.append(slice(start, start + size))
            start += size
        return tuple(ends)

    def split(self, flat: Array) -> dict[str, Array]:
        """Views of `flat` [..., d], one per tensor: [..., *shape]."""
        return {
            name: flat[..., part].reshape(*flat.shape[:-1], *shape)
            for name, shape, part in zip(self.names, self.shapes, self.slices, strict=True)
        }
