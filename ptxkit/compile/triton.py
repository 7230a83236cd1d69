"""The interface to Triton (3.6 to 3.9): a @triton.jit function and types of its arguments to a kernel, without a GPU.

`build` returns what the store keeps of a recipe (fetching.py); `compile` builds any function, whose result Triton keeps
on disk itself. A kernel has the arguments of the source in order, constants left out, then two pointers that
Triton adds: global scratch and profile scratch.
"""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import driver, store
from .code import addresses, dim3
from .driver import LaunchShape
from .errors import BuildError, MissingCompilerError
from .kernel import Bound, Kernel
from .launching import launch_sink, tensor_map
from .recipes import Constant, imported, source, triton_version
from .repairs import repaired
from .target import Target, parse

FORMAT = "triton 2"  # version of the entries; it changes when the meaning of their contents does
# Variables with which Triton, LLVM or ptxas give other code for the same source.
VARIABLES = (
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3", "DISABLE_MMA_V5", "DISABLE_PTXAS_OPT",
    "LLVM_EXTRACT_DI_LOCAL_VARIABLES", "LLVM_PASS_PLUGIN_PATH", "PTXAS_OPTIONS", "TRITON_DISABLE_LINE_INFO",
    "TRITON_ENABLE_ASAN", "TRITON_F32_DEFAULT", "TRITON_FORCE_DISABLE_FP_FUSION", "TRITON_INSTRUMENTATION_MODE",
    "TRITON_LIBDEVICE_PATH", "TRITON_OVERRIDE_ARCH", "TRITON_PLUGIN_PATHS", "TRITON_PTXAS_BLACKWELL_PATH",
    "TRITON_PTXAS_PATH",
)
# CUtensorMapDataType by the number that Triton's metadata holds (PTX's own order).
_MAP_DTYPES = {
    0: "uint8", 1: "uint16", 2: "uint32", 3: "int32", 4: "uint64", 5: "int64", 6: "float16", 7: "float32",
    8: "float32_ftz", 9: "float64", 10: "bfloat16", 13: "16u4_align8b", 14: "16u4_align16b",
}
_MAP_SWIZZLES = (0, 32, 64, 128)


@dataclass(frozen=True, eq=False, repr=False)
class Recipe:
    """One kernel to be built; hashable.  Recipes are equal if they read alike: 1, 1.0 and True are three constants."""

    function: str                            # "kernels.fwd.prepare:prepare"
    signature: Mapping[str, Any]             # argument -> Triton's type: "*bf16", "i32", a tuple for a tuple
    constants: Mapping[str, Constant] = field(default_factory=dict)          # values of its tl.constexpr arguments
    _: KW_ONLY
    target: Any                              # a Target, or its name: a Target from then on
    divisible: Iterable[str] = ()            # arguments that will always be multiples of 16
    options: Mapping[str, Constant] = field(default_factory=dict)            # Triton's: num_warps, num_stages, maxnreg
    door = __name__

    def __post_init__(self) -> None:
        for name, value in {**self.constants, **self.options}.items():
            if not isinstance(value, Constant):
                raise BuildError(
                    f"{self.function}: {name} must be an int, a float, a bool, a str or None, so that the kernel can "
                    f"be found on disk; found {type(value).__name__} {value!r:.60}."
                )
        for name in ("signature", "constants", "options"):
            mapping = {key: _frozen(value) for key, value in sorted(getattr(self, name).items())}
            object.__setattr__(self, name, MappingProxyType(mapping))
        object.__setattr__(self, "divisible", tuple(sorted(self.divisible)))
        object.__setattr__(self, "target", parse(self.target) if isinstance(self.target, str) else self.target)

    @classmethod
    def read(cls, text: str) -> Recipe:
        """The recipe with this `text`."""
        return cls(**json.loads(text))

    @functools.cached_property
    def text(self) -> str:
        """The recipe's fields on one line of JSON."""
        fields = {"function": self.function, "target": self.target.name, "divisible": self.divisible}
        mappings = {name: dict(getattr(self, name)) for name in ("signature", "constants", "options")}
        return json.dumps(fields | mappings)

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.partition(":")[2]

    @functools.cached_property
    def key(self) -> str:
        """Its name in the store: a digest of the recipe and of all that a build of it depends on."""
        changed = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
        return store.digest(FORMAT, triton_version(), changed, repairs(), self._source, self.text)

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """What its entry says about it."""
        known = {"kernel": self.name, "arch": self.target.name, "module": self.module, "recipe": self.text}
        return known | {"source": self._source, "triton": triton_version()}

    @functools.cached_property
    def _source(self) -> str:
        return source(self.module)

    def build(self) -> store.Entry:
        return build(self)

    @staticmethod
    def opened(entry: store.Entry) -> Kernel:
        return opened(entry)

    @staticmethod
    def dynamic_shared(kernel: Any) -> int:
        return kernel.dynamic_shared

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Recipe({self.text})"

    def __reduce__(self):
        return Recipe.read, (self.text,)


@functools.cache
def repairs() -> str:
    """One name for what is done to the PTX of kernels."""
    return store.sources(Path(__file__).with_name("repairs.py"))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class TritonKernel(Kernel):
    """A kernel that also knows Triton's types, its number of threads and the shared memory that it needs."""

    signature: tuple[Any, ...] = ()          # a type for each argument of a launch; a tuple for a tuple
    names: tuple[str, ...] = ()              # the name of each argument
    num_warps: int = 4
    num_ctas: int = 1                        # CTAs of a cluster; the grid counts clusters
    dynamic_shared: int = 0
    scratch: int = 0                         # bytes of global scratch a CTA
    scratch_align: int = 1
    maps: tuple[Mapping[str, Any], ...] = ()  # how Triton lowered each tensor descriptor
    divisible: tuple[int, ...] = ()          # arguments that were promised to be multiples of 16
    pdl: bool = False
    cooperative: bool = False

    def launch(self, grid: Sequence[int] | int, *args: Any, stream: int | None = None) -> Any:  # type: ignore[override]
        """Run it on `grid` programs, with the arguments of the source less its constants."""
        if len(args) != len(self.signature):
            names = ", ".join(self.names)
            raise BuildError(f"{self.name} needs {len(self.names)} arguments ({names}); found {len(args)}. Pass each.")
        x, y, z = dim3(grid)
        grid = (x * self.num_ctas, y, z)
        scratch = self._scratch(args, x * y * z, stream) if self.scratch else 0
        flat = [*(args if self._plain else flatten(self.signature, args, iter(self.maps))), scratch, 0]
        values = addresses(flat)                                             # 0: no scratch memory for a profile
        self.hold(values if self._plain else addresses(args))
        if (sink := launch_sink()) is None:
            return driver.launch(self, grid, self._shape, values, flat, stream)
        tensors = dict(_tensors(zip(self.names, args)))
        tensors |= {"global scratch": scratch} if self.scratch else {}
        return sink.launch(self._described(grid, self._shape, values, flat, tensors, stream=stream))

    def bound(self, grid: Sequence[int] | int, **numbers: Any) -> Bound:       # type: ignore[override]
        """Return launches on `grid` programs that differ in tensors alone: those of `tensors`, in order."""
        if self.scratch or not self._plain:
            raise BuildError(f"{self.name} takes tuples, descriptors or floats of 16 bits, or needs memory of its own: "
                             "launch it with all of its arguments.")
        tensors = [i for i, kind in enumerate(self.signature) if kind.startswith("*")]
        values = [0 if i in tensors else numbers[name] for i, name in enumerate(self.names)]
        self.hold(values)
        x, y, z = dim3(grid)
        aligned = set(self.divisible) & set(tensors)
        return Bound(self, (x * self.num_ctas, y, z), [*values, 0, 0], tensors, self._shape, aligned=aligned)

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names of the arguments that are tensors."""
        return tuple(name for name, kind in zip(self.names, self.signature) if kind.startswith("*"))

    def hold(self, values: Sequence[Any]) -> None:
        """Check that the arguments are as promised."""
        bits = 0
        try:
            for i in self.divisible:
                bits |= values[i]
            if not bits & 15:
                return
        except TypeError:                                                    # a value is not even a whole number
            pass
        i = next(i for i in self.divisible if not isinstance(values[i], int) or values[i] % 16)
        found = f"{values[i]:#x}" if isinstance(values[i], int) else f"{type(values[i]).__name__} {values[i]!r:.60}"
        raise BuildError(
            f"{self.name} was built for a {self.names[i]} that is a multiple of 16; found {found}. "
            "Pass an aligned tensor, or build it without that promise."
        )

    @functools.cached_property
    def _shape(self) -> LaunchShape:
        return LaunchShape(
            (32 * self.num_warps, 1, 1), (self.num_ctas, 1, 1), self.dynamic_shared, self.pdl, self.cooperative
        )

    @functools.cached_property
    def _plain(self) -> bool:
        """Whether arguments go to the kernel as they are."""
        return not any(isinstance(k, tuple) or k in ("fp16", "bf16") or "tensordesc" in k for k in self.signature)

    def _scratch(self, args: Sequence[Any], programs: int, stream: int | None) -> Any:
        """Memory that the kernel uses for itself (tensor maps made on the device); let go of once it is launched."""
        import torch

        _, first = next(_tensors(zip(self.names, args)))
        size = programs * self.num_ctas * self.scratch
        memory = torch.empty(size + self.scratch_align, dtype=torch.int8, device=first.device)
        if stream is not None:
            memory.record_stream(torch.cuda.ExternalStream(stream))
        return memory[-memory.data_ptr() % self.scratch_align :][:size]


# What an entry of the store contains beside PTX and cubin.
_KEPT = tuple(sorted({f.name for f in fields(TritonKernel)} - {f.name for f in fields(Kernel)}))


def compile(
    fn: Any,
    signature: Mapping[str, Any],
    constants: Mapping[str, Any] | None = None,
    *,
    target: str | Target,
    divisible: Iterable[str] = (),
    **options: Any,
) -> TritonKernel:
    """Build `fn` for `target`.

    `signature` gives Triton's type of each argument by name ("*bf16", "i32", "fp32"); `constants` the values of its
    tl.constexpr arguments.  `divisible` names arguments that will always be multiples of 16 (addresses, strides).
    `options` are Triton's: num_warps, num_stages, num_ctas, maxnreg, ...
    """
    triton = load()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = parse(target) if isinstance(target, str) else target
    constants, names = dict(constants or {}), list(fn.arg_names)
    if unknown := {*signature, *constants, *divisible} - set(names):
        raise BuildError(f"{fn.__name__} has no argument {', '.join(sorted(unknown))}; it has {', '.join(names)}.")
    if missing := [n for n in names if n not in signature and n not in constants]:
        raise BuildError(f"{fn.__name__}: no type for {', '.join(missing)}. Name it in `signature` or in `constants`.")
    types = {n: "constexpr" if n in constants else signature[n] for n in names}
    promised = {(names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    gpu, options = GPUTarget("cuda", 10 * target.cc[0] + target.cc[1], 32), {"enable_fp_fusion": True} | options
    try:
        source = ASTSource(fn, types, {(names.index(n),): value for n, value in constants.items()}, promised)
        built = triton.compile(source, target=gpu, options=options)
        asm = with_repairs(built.asm, triton.__version__, gpu, options)
    except Exception as error:
        failure = f"Triton {triton.__version__} cannot build {fn.__name__} for {target.spelling}"
        raise BuildError(f"{failure}: {error}") from error
    return of(asm, built.metadata, types, target, divisible)


def with_repairs(asm: Mapping[str, Any], version: str, gpu: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """What Triton built, or PTX that was repaired and what its ptxas makes of that."""
    ptx = repaired(asm["ptx"], version)
    if ptx == asm["ptx"]:
        return asm
    from triton.compiler.compiler import make_backend

    backend = make_backend(gpu)
    return {"ptx": ptx, "cubin": backend.make_cubin(ptx, {}, backend.parse_options(dict(options)), gpu.arch)}


def of(
    asm: Mapping[str, Any], metadata: Any, types: Mapping[str, Any], target: Target, divisible: Iterable[str] = ()
) -> TritonKernel:
    """A kernel out of what Triton returns or keeps: texts, metadata, the type of each argument of the source."""
    names = tuple(name for name, kind in types.items() if kind != "constexpr")
    return TritonKernel.of(
        metadata.name,
        asm["ptx"],
        asm.get("cubin"),
        target,
        signature=tuple(types[name] for name in names),
        names=names,
        num_warps=metadata.num_warps,
        num_ctas=metadata.num_ctas,
        dynamic_shared=metadata.shared,
        scratch=metadata.global_scratch_size,
        scratch_align=metadata.global_scratch_align,
        maps=tuple(metadata.tensordesc_meta or ()),
        divisible=tuple(names.index(name) for name in divisible),
        pdl=metadata.launch_pdl,
        cooperative=metadata.launch_cooperative_grid,
    )


def build(recipe: Recipe) -> store.Entry:
    """Build the kernel of a recipe in this process: what the store keeps of it."""
    load()
    options: dict[str, Any] = {"divisible": recipe.divisible, **recipe.options}
    kernel = compile(imported(recipe.function), recipe.signature, recipe.constants, target=recipe.target, **options)
    about = {name: getattr(kernel, name) for name in ("name", *_KEPT)} | {"target": kernel.target.name}
    return {"ptx": kernel.ptx.encode(), "cubin": kernel.cubin, "kernel": json.dumps(about).encode()}  # type: ignore[dict-item]


def opened(entry: store.Entry) -> TritonKernel:
    """Return the kernel that `build` left in the store."""
    about = json.loads(entry["kernel"])
    fields = {name: _tupled(about[name]) for name in _KEPT}
    return TritonKernel.of(about["name"], entry["ptx"].decode(), entry["cubin"], parse(about["target"]), **fields)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def flatten(signature: Sequence[Any], args: Sequence[Any], maps: Iterator[Mapping[str, Any]]) -> list[Any]:
    """Arguments in the kernel's form: tuples flattened, constants dropped, descriptors split."""
    if len(signature) != len(args):
        raise BuildError(f"a tuple of {len(signature)} arguments {tuple(signature)} was given {len(args)}.")
    flat: list[Any] = []
    for kind, arg in zip(signature, args):
        if isinstance(kind, tuple):
            flat += flatten(kind, arg, maps)
        elif kind.startswith("tensordesc"):
            flat += _descriptor(arg, next(maps, None))
        elif kind != "constexpr":
            flat.append(_value(kind, arg))
    return flat


def _value(kind: str, arg: Any) -> Any:
    """Floats of 16 bits become bytes here; the PTX calls both kinds .b8[2]."""
    if kind == "bf16":
        return struct.pack("<f", arg)[2:]                                    # cut, as Triton's own launcher does
    return struct.pack("<e", arg) if kind == "fp16" else arg


def _descriptor(arg: Any, lowered: Mapping[str, Any] | None) -> list[Any]:
    """A host tensor descriptor: a tensor map where Triton uses the copy engine, else its parts; then sizes again."""
    sizes = [*arg.shape, *arg.strides]
    if not lowered:
        flags = [arg.padding == "nan", *([arg.round_f32_to_tf32] if hasattr(arg, "round_f32_to_tf32") else [])]
        return [arg.base, *sizes, *flags, *sizes]
    if lowered["elem_type"] not in _MAP_DTYPES:
        known = ", ".join(f"{n} ({name})" for n, name in _MAP_DTYPES.items())
        dtype = lowered["elem_type"]
        raise BuildError(f"a tensor descriptor of element type {dtype} cannot be launched. Use one of {known}.")
    size, rounded = lowered["elem_size"], getattr(arg, "round_f32_to_tf32", False)
    dims, box, im2col = list(arg.shape)[::-1], list(lowered["block_size"])[::-1], {}
    if lowered.get("fp4_padded"):
        dims[0] *= 2                         # the tensor has bytes, the map their halves
    if lowered.get("is_im2col"):
        if launch_sink() is None:
            raise BuildError("ptxkit.compile.triton launches no descriptor in im2col mode on a GPU; a capture runs it.")
        im2col = _image(arg, pixels=box.pop())
    described = tensor_map(
        address=arg.base.data_ptr(),
        dtype="tfloat32" if rounded else _MAP_DTYPES[lowered["elem_type"]],
        dims=dims,
        strides=[size * s for s in arg.strides[:-1]][::-1],
        box=box,
        swizzle=_MAP_SWIZZLES[lowered["swizzle"]],
        fill=arg.padding,
        **im2col,
    )
    return [described, *sizes]


def _image(arg: Any, pixels: int) -> dict[str, Any]:
    """What a map in im2col mode says besides."""
    corners = {"lower": arg.pixel_box_lower_corner, "upper": arg.pixel_box_upper_corner}
    steps = arg.element_strides or [1] * len(arg.shape)
    return {name: list(corner)[::-1] for name, corner in corners.items()} | {
        "pixels": pixels,
        "element_strides": list(steps)[::-1],
    }


def _tensors(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The tensors among arguments, in tuples and behind descriptors as well."""
    for name, arg in named:
        if isinstance(arg, tuple | list):
            yield from _tensors((f"{name}[{i}]", each) for i, each in enumerate(arg))
        elif hasattr(tensor := getattr(arg, "base", arg) if hasattr(arg, "block_shape") else arg, "data_ptr"):
            yield name, tensor


def load() -> Any:
    """The triton module."""
    try:
        import triton
        import triton.compiler
    except ImportError as error:
        raise MissingCompilerError("building a Triton kernel", "triton", "pip install triton") from error
    return triton
