"""The arguments of a kernel, declared once: the parameter that the kernel reads them from, what the compiler is told of
them, and the order in which a launch passes them.  No compiler and no torch: a kept kernel needs neither.

    class ComposeArguments(Arguments):
        M = tensor("float32")                # (segments, HV, K, K)
        h0 = tensor(dtype_from="h0")         # (N, HV, K, V), of the dtype that the configuration names
        segments = number("int32")           # of a sequence

In a kernel `x.M` is a pointer and `x.segments` a number; `draft.launch(config, grid, segments=2, M=M)` describes a
launch (routine.py).  A kernel of Triton reads what its signature names of the arguments of its family, in any order
(triton_recipes.py).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .limits import MAX_THREADS, Limited

if TYPE_CHECKING:
    from ptxkit.compile.kernel import Bound, Kernel

MAX_SHARED = 227 * 1024                      # bytes of shared memory that a CTA may have, on any arch; some have less
TILE_ALIGNMENT = 1024                        # bytes: a part of memory begins where a tile may
MAX_CLUSTER = 8                              # CTAs of a cluster that every GPU with clusters runs


Source: TypeAlias = str | Callable[[Any], Any]    # "prepare.g_dtype": a field of the configuration, or what reads it


class Argument(NamedTuple):
    """A tensor's address, or a number."""

    is_tensor: bool
    dtype: str | None                        # the type of its elements where the configuration names none
    dtype_from: Source                       # what names its dtype
    needs: Source | bool                     # whether there is such a tensor
    divisible: Source | bool                 # whether Triton is told that it is a multiple of 16

    def dtype_in(self, config: Any) -> str | None:
        """Return its dtype.  None: there is no such tensor, and None is what a kernel of Triton has in its place."""
        return (self.read("dtype_from", config) or self.dtype) if self.read("needs", config) else None

    def read(self, field: str, config: Any) -> Any:
        """Return what the configuration says of a field, or the field itself where it needs none."""
        source = getattr(self, field)
        if isinstance(source, str) and source:
            return operator.attrgetter(source)(config)
        return source(config) if callable(source) else source


def tensor(
    dtype: str | None = "float32", dtype_from: Source = "", needs: Source | bool = True,
    divisible: Source | bool = True,
) -> Any:
    """Declare a tensor.  Without any dtype, the configuration's field of its name has it."""
    return Argument(True, dtype, dtype_from, needs, divisible)


def number(dtype: str, divisible: Source | bool = False) -> Any:
    return Argument(False, dtype, "", True, divisible)


class Arguments:
    """A subclass is a frozen dataclass with the declared fields, tensors first; a subclass of that adds others."""

    declared: Mapping[str, Argument] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        more = {name: value if value.dtype or value.dtype_from else value._replace(dtype_from=name)
                for name, value in vars(cls).items() if isinstance(value, Argument)}
        cls.declared = {**cls.declared, **more}
        kinds = [argument.is_tensor for argument in cls.declared.values()]
        assert kinds == sorted(kinds, reverse=True), f"{cls.__name__}: a tensor is declared after a number"
        for name in more:
            delattr(cls, name)
        cls.__annotations__ = dict.fromkeys(more, Any)
        dataclasses.dataclass(frozen=True)(cls)

    @classmethod
    def and_more(cls, name: str, **others: Argument) -> type[Arguments]:
        """Return the arguments of another kernel, which has these and others."""
        declared = sorted({**cls.declared, **others}.items(), key=lambda item: not item[1].is_tensor)
        return type(name, (Arguments,), dict(declared))

    @classmethod
    def replacing(cls, name: str, **others: Mapping[str, Argument]) -> type[Arguments]:
        """Return the arguments of another kernel, which has others in the places of some of these, or none."""
        declared = {}                        # type: ignore[var-annotated]
        for n, argument in cls.declared.items():
            declared |= others.get(n, {n: argument})
        return type(name, (Arguments,), declared)

    @classmethod
    def tensor_names(cls) -> list[str]:
        return [name for name, argument in cls.declared.items() if argument.is_tensor]

    @classmethod
    def number_names(cls) -> list[str]:
        return [name for name, argument in cls.declared.items() if not argument.is_tensor]


class KernelConfig(Limited):
    """What a kernel is built for, and how it is launched: a subclass has `threads`, `shared` bytes and `arguments`."""

    arguments: type[Arguments]
    if TYPE_CHECKING:                        # attributes or properties

        @property
        def threads(self) -> int: ...

        @property
        def shared(self) -> int: ...

        @property
        def cluster(self) -> tuple[int, int, int] | int: ...

        @property
        def pdl(self) -> bool: ...

        @property
        def launch_options(self) -> Mapping[str, Any]: ...

        @property
        def roles(self) -> Mapping[str, range]: ...

        @property
        def pipelines(self) -> tuple[Any, ...]: ...

        @property
        def meetings(self) -> tuple[Any, ...]: ...

    else:
        cluster = 1
        pdl = False                          # programmatic: it may start before the previous kernel has ended
        launch_options = MappingProxyType({})    # options of the DSL's launch that change the code
        roles = MappingProxyType({})         # the warps of a CTA by role, if they differ
        pipelines = meetings = ()            # where they wait for each other (cute/barriers.py)

    def broken_limits(self) -> Iterator[str]:
        clusters = math.prod(self.cluster) if isinstance(self.cluster, tuple) else self.cluster
        for what, found, most in (
            ("threads of a CTA", self.threads, MAX_THREADS), ("bytes of shared memory", self.shared, MAX_SHARED),
            ("CTAs of a cluster", clusters, MAX_CLUSTER),
        ):
            if found > most:
                yield f"there are at most {most:,} {what}; found {found:,}"

    def bound(self, kernel: Kernel, grid: tuple[int, int, int], **numbers: float) -> Bound:
        """Return the launch of a kernel that was built for this, without its tensors."""
        values = [numbers.pop(name) for name in self.arguments.number_names()]
        assert not numbers, f"{type(self).__name__} has no numbers {sorted(numbers)}"
        return kernel.bound(
            grid, *values, block=self.threads, cluster=self.cluster, dynamic_shared=self.shared, pdl=self.pdl,
            config=self,
        )
