"""Built kernels on disk: one file a key, checked whenever it is read, written once by whoever comes first.

An entry is a few named byte strings (PTX, cubin, a host object). Its file holds a magic line, the SHA-256 of
everything after it, a JSON line with names and sizes, and the bytes. Files appear by an atomic rename, so a reader
sees a whole entry or none; a damaged one fails its digest and is built again. The folder is $KDA_CACHE_DIR, or `kda`
in the user's cache folder; deleting it costs nothing but time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

MAGIC = b"kda built kernel 1\n"
Entry = dict[str, bytes]


def cache_folder() -> Path:
    """$KDA_CACHE_DIR, else what the platform calls the user's cache folder."""
    if folder := os.environ.get("KDA_CACHE_DIR"):
        return Path(folder)
    try:
        if sys.platform == "darwin":
            return Path("~/Library/Caches/kda").expanduser()
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser() / "kda" / "cache"
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kda"
    except RuntimeError:                                                     # a user without a home
        return Path(os.devnull) / "kda"                                      # nothing can be kept: the store says so


def digest(*parts: object) -> str:
    """The key of a build: one name for everything that it depends on.

    Parts are strings, bytes, numbers, None, and tuples, lists and dicts of these.
    """
    found = hashlib.sha256()
    _feed(found, parts)
    return found.hexdigest()


def sources(*places: ModuleType | Path) -> str:
    """One name for the source of modules, files and folders; a package stands for every .py file in it."""
    found = {}
    for number, place in enumerate(places):
        root = place if isinstance(place, Path) else Path(place.__file__)
        if hasattr(place, "__path__"):
            root = root.parent
        for path in root.rglob("*.py") if root.is_dir() else [root]:
            found[f"{number}/{path.relative_to(root.parent).as_posix()}"] = path.read_bytes()
    return digest(found)


def _feed(found, part: object) -> None:
    """Every part goes in with its kind and its size, so that no two lists of parts spell the same bytes."""
    if isinstance(part, dict):
        found.update(b"dict %d " % len(part))
        for key in sorted(part):
            _feed(found, key)
            _feed(found, part[key])
    elif isinstance(part, list | tuple):
        found.update(b"list %d " % len(part))
        for each in part:
            _feed(found, each)
    elif isinstance(part, bytes):
        found.update(b"bytes %d " % len(part) + part)
    elif part is None or isinstance(part, str | int | float | bool):
        text = repr(part).encode()
        found.update(b"text %d " % len(text) + text)
    else:
        raise TypeError(f"a key is made of text, bytes, numbers, None and lists or dicts of them; found {part!r}")


class Store:
    """A folder of entries.  `fetch` is all that a door needs."""

    def __init__(self, folder: str | os.PathLike | None = None):
        self.folder = Path(folder) if folder is not None else cache_folder()
        self._warned = False

    def fetch(self, key: str, build: Callable[[], Mapping[str, bytes]]) -> Entry:
        """The entry called `key`; `build` makes it where it is missing or damaged.

        Processes that ask at once wait for one of them to build.  Where nothing can be written, everything is built
        anew, after one warning.
        """
        if (entry := self._read(key)) is None:
            with self._locked(key):
                if (entry := self._read(key)) is None:                       # nobody built it while this one waited
                    entry = dict(build())
                    self._write(key, entry)
        return entry

    def find(self, key: str) -> Entry | None:
        """The entry called `key`, if it is there and whole."""
        return self._read(key)

    def forget(self, key: str) -> None:
        """An entry that reads well and still does not work is dropped."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.kernel"

    def _read(self, key: str) -> Entry | None:
        try:
            raw = self._path(key).read_bytes()
        except OSError:
            return None
        body = raw[len(MAGIC) + 32 :]
        if raw[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != raw[len(MAGIC) : len(MAGIC) + 32]:
            return None
        line, _, rest = body.partition(b"\n")
        entry, at = {}, 0
        for name, size in json.loads(line):
            entry[name] = rest[at : at + size]
            at += size
        return entry

    def _write(self, key: str, entry: Entry) -> None:
        sizes = json.dumps([(name, len(data)) for name, data in entry.items()])
        body = sizes.encode() + b"\n" + b"".join(entry.values())
        path, temporary = self._path(key), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
                temporary = file.name
                file.write(MAGIC + hashlib.sha256(body).digest() + body)
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._warn(error)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Alone among processes and threads.  Without locks (no folder, no fcntl) a kernel may be built twice."""
        with contextlib.ExitStack() as held:
            try:
                import fcntl

                path = self._path(key).with_suffix(".lock")
                path.parent.mkdir(parents=True, exist_ok=True)
                file = held.enter_context(open(path, "ab"))
                with contextlib.suppress(OSError):                           # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)                         # let go when the file is closed
            except ImportError:
                pass
            except OSError as error:
                self._warn(error)
            yield

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"kda cannot keep built kernels in {self.folder} ({error.strerror or error}): each process builds its "
                "own. Set KDA_CACHE_DIR to a folder that can be written.",
                RuntimeWarning,
                stacklevel=4,
            )


_STORES: dict[Path, Store] = {}


def default() -> Store:
    """The store of this user; one object a folder, so that it warns once."""
    folder = cache_folder()
    return _STORES.setdefault(folder, Store(folder))
