"""Reads and writes folders of checkpoints: files of safetensors, their index, and a config.json.

A file is checked before anything is read from it.  What is wrong ends a program with one line that names the file, says
what it must be and what it is, and what to do.
"""

from __future__ import annotations

import ctypes
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000                 # bytes, as for the library safetensors
PIECE = 1 << 24                              # bytes that are copied at once


def damaged(path: Path, what: str) -> SystemExit:
    return SystemExit(f"{path} is no complete safetensors file: {what}. Copy it again.")


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return what a file of safetensors says of its tensors, and where their bytes begin."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        if begin > size:
            raise damaged(path, "the header is longer than the file")
        if begin > LARGEST_HEADER:
            raise damaged(path, f"a header has at most {LARGEST_HEADER} bytes; found {begin}")
        text = file.read(begin - 8)
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise damaged(path, f"its header is not an object of JSON, but {reprlib.repr(header)}")
    header.pop("__metadata__", None)
    for name, about in header.items():
        if fault := fault_of(name, about):
            raise damaged(path, fault)
    end = 0
    for start, stop, name in sorted((*about["data_offsets"], name) for name, about in header.items()):
        if start != end:
            raise damaged(path, f"{name!r} begins at byte {start} of the data; the tensor before it ends at {end}")
        end = stop
    if begin + end != size:
        raise damaged(path, f"its tensors have {end} bytes; found {size - begin}")
    return header, begin


def fault_of(name: str, about: Any) -> str | None:
    """Return what is wrong with the description of a tensor in a header, or None."""
    if not name.isprintable():
        return f"{name!r} is no name of a tensor"
    fields = about if isinstance(about, dict) else {}
    described: list[Any] = [fields.get(field) for field in ("dtype", "shape", "data_offsets")]
    dtype, shape, offsets = described
    numbers = all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in (shape, offsets))
    if not (isinstance(dtype, str) and numbers and len(offsets) == 2):
        return f"{name!r} needs a dtype, a shape and two data_offsets; found {reprlib.repr(about)}"
    if dtype in DTYPES and offsets[1] - offsets[0] != DTYPES[dtype].itemsize * math.prod(shape):
        return f"{name!r}, {dtype} of shape {reprlib.repr(shape)}, cannot have data_offsets {reprlib.repr(offsets)}"
    return None


def json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"{path} is not JSON: {error}. Copy it again.") from None


def config_of(path: Path) -> dict[str, Any]:
    """Return the config of a model of text, which is a part of that of a multimodal one."""
    if not path.parent.is_dir():
        raise SystemExit(f"{path.parent} is no folder. Give the folder of a checkpoint.")
    if not path.is_file():
        raise SystemExit(f"{path.parent} has no config.json, which says what the gate of its layers is. "
                         "Copy it there, too.")
    config = json_of(path)
    text = config.get("text_config", config) if isinstance(config, dict) else config
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        raise SystemExit(f"{path} must be an object of JSON with a model_type, or with a text_config that has one; "
                         f"found {reprlib.repr(text)}. Copy it again.")
    return text


def files_of(folder: Path) -> dict[Path, set[str] | None]:
    """Return the files of weights, each with the tensors that the index places there, or None if there is no index."""
    if not (path := folder / INDEX).is_file():
        return dict.fromkeys(sorted(folder.glob("*.safetensors")))
    index = json_of(path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(map(is_name_of_file, places.values())):
        raise SystemExit(f"{path} must be an object of JSON whose weight_map has a file for each tensor; found "
                         f"{reprlib.repr(index)}. Copy it again.")
    files: dict[Path, set[str] | None] = {folder / file: set() for file in sorted({*places.values()})}
    if missing := [file.name for file in files if not file.is_file()]:
        raise SystemExit(f"{path} names {len(files)} files; {', '.join(missing[:3])} "
                         f"{'is' if len(missing) == 1 else 'are'} missing{', and more' * (len(missing) > 3)}. "
                         "Copy the whole checkpoint.")
    for name, file in places.items():
        files[folder / file].add(name)  # type: ignore[union-attr]
    return files


def is_name_of_file(name: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and name == Path(name).name and name.endswith(".safetensors")


class Entry(NamedTuple):
    """A tensor that is to be written: its bytes are read when they are."""

    dtype: str
    shape: list[int]
    size: int                                # bytes
    pieces: Callable[[], Iterable[bytes]]


class Checkpoint(Mapping):
    """The tensors of a folder by name; each is read when it is asked for."""

    def __init__(self, folder: Path):
        self.where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path, placed in files_of(folder).items():
            header, begin = header_of(path)
            if placed is not None and (lost := sorted(placed - header.keys())):
                raise SystemExit(f"{path} must have {reprlib.repr(lost[0])}, which {INDEX} places there; found "
                                 f"{len(header)} other tensors. Copy the whole checkpoint again.")
            for name, about in header.items():
                if placed is not None and name not in placed:
                    continue
                if name in self.where:
                    raise SystemExit(f"{path} has {reprlib.repr(name)}, and so has {self.where[name][0].name}. Keep "
                                     f"the files of one checkpoint in the folder, or its {INDEX}.")
                self.where[name] = path, begin, about
        if not self.where:
            found = "has no *.safetensors" if folder.is_dir() else "is no folder"
            raise SystemExit(f"{folder} {found}. Give the folder of a checkpoint.")

    def __getitem__(self, name: str) -> torch.Tensor:
        path, _, about = self.where[name]
        if about["dtype"] not in DTYPES:
            raise SystemExit(f"{path}: {name!r} is {reprlib.repr(about['dtype'])}; a layer takes {', '.join(DTYPES)}. "
                             "Dequantise it before.")
        if 0 in about["shape"]:
            raise SystemExit(f"{path}: {name!r} has no elements: its shape is {reprlib.repr(about['shape'])}. "
                             "Copy the file again, or write it with all weights.")
        read = bytearray(b"".join(self.pieces(name)))
        return torch.frombuffer(read, dtype=DTYPES[about["dtype"]]).view(about["shape"])

    def __iter__(self):
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name: self[name] for name in self if name.startswith(prefix)}

    def shape(self, name: str) -> list[int]:
        _, _, about = self.where[name]
        return about["shape"]

    def pieces(self, name: str) -> Iterable[bytes]:
        path, begin, about = self.where[name]
        start, end = about["data_offsets"]
        with path.open("rb") as file:
            file.seek(begin + start)
            for place in range(start, end, PIECE):
                yield file.read(min(PIECE, end - place))

    def entry(self, name: str) -> Entry:
        """Return a tensor of any dtype as it is, to be written again."""
        _, _, about = self.where[name]
        start, end = about["data_offsets"]
        return Entry(about["dtype"], about["shape"], end - start, lambda: self.pieces(name))


def entry_of(x: torch.Tensor) -> Entry:
    def pieces() -> Iterable[bytes]:
        held = x.detach().cpu().contiguous()
        yield ctypes.string_at(held.data_ptr(), size)

    size = x.numel() * x.element_size()
    return Entry(NAMES[x.dtype], [*x.shape], size, pieces)


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor that has nan or infinity."""
    return next((name for name, x in tensors.items() if not x.isfinite().all()), None)


def save(tensors: Mapping[str, torch.Tensor | Entry], path: Path) -> int:
    """Write a file of safetensors; return how many bytes its tensors have."""
    entries = {name: x if isinstance(x, Entry) else entry_of(x) for name, x in tensors.items()}
    header, offset = {}, 0
    for name, entry in entries.items():
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, offset + entry.size]}
        offset += entry.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries.values():
            file.writelines(entry.pieces())
    return offset


def write_index(files: Mapping[str, Iterable[str]], size: int, folder: Path) -> None:
    """Write the index of files with tensors of these names, which have so many bytes together."""
    places = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=1))
