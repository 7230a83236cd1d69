"""Built kernels on disk: one file per key, checked at every read, written once by the first process that needs it.

An entry is a few named byte strings (PTX, cubin, a host object) and a few words about them. Its file holds a magic
line, the SHA-256 of its key and everything after it, a JSON line with words, names and sizes, and the bytes. Files
appear by an atomic rename, so a reader sees a whole entry or none; a damaged entry, or one under another name, fails
its digest and is built again. The folder is $PTXKIT_CACHE_DIR, or `ptxkit` in the user's cache folder, with
the application's name in place of ptxkit (application.py); deleting it
costs nothing but time.

Trust. A built kernel is code that will run, so an entry is read only if no other user than this one and root can have
written it: the folder, its subfolder and the file belong to one of the two, and neither group nor others may write to
them; a symbolic link to the folder belongs to one of the two, and an entry is never a link. The open file is checked,
so it cannot be exchanged in between. Parent folders do not matter (such as a shared disk, or /tmp): a user who can
replace the folder cannot create files that belong to this user. If the folder breaks the rule, nothing is read, one
warning says what to do, and kernels are built in memory; an entry that breaks it in a folder that does not is written
again. Folders are created for this user only. A folder with wider permissions (mode 0755, of root, for all users of a
machine) keeps them for new files. On file systems without owners the rule cannot be checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from .. import application

MAGIC = b"ptxkit built kernel 1\n"
LEFT_BEHIND = 3600                           # seconds after which an unfinished file is abandoned
UNLOCKED = 60                                # the same if its writer no longer holds a lock on it
SOURCES = {".py", ".cu", ".cuh"}             # suffixes of the files that kernels are written in
Entry = dict[str, bytes]


class StoredKernel(NamedTuple):
    """A file of the store."""

    key: str
    path: Path
    bytes: int
    used: float                              # when it was last fetched
    about: Mapping[str, Any] | None          # what its builder said of it, "seconds" and "built"; None if damaged


def cache_folder() -> Path:
    """$PTXKIT_CACHE_DIR, else what the platform calls the user's cache folder."""
    program = application.current()
    try:
        if folder := program.setting("CACHE_DIR"):
            return Path(folder).expanduser()
        if sys.platform == "darwin":
            return Path("~/Library/Caches", program.name).expanduser()
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser() / program.name / "cache"
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / program.name
    except RuntimeError:                                                     # a user without a home
        return Path(os.devnull) / program.name                                 # nothing can be kept: the store says so


def digest(*parts: object) -> str:
    """Return the key of a build: one name for all that it depends on, of text, bytes, numbers, None and collections."""
    hasher = hashlib.sha256()
    _feed(hasher, parts)
    return hasher.hexdigest()


def sources(*places: ModuleType | Path) -> str:
    """Return one name for the source of modules, files and folders; a package stands for all of SOURCES in it."""
    contents = {}
    for number, place in enumerate(places):
        root = place if isinstance(place, Path) else Path(str(place.__file__))
        if hasattr(place, "__path__"):
            root = root.parent
        for path in (p for p in root.rglob("*") if p.suffix in SOURCES) if root.is_dir() else [root]:
            contents[f"{number}/{path.relative_to(root.parent).as_posix()}"] = path.read_bytes()
    return digest(contents)


def _feed(hasher, part: object) -> None:
    """Every part goes in with its kind and its size, so that no two lists of parts spell the same bytes."""
    if isinstance(part, dict):
        hasher.update(b"dict %d " % len(part))
        for key in sorted(part):
            _feed(hasher, key)
            _feed(hasher, part[key])
    elif isinstance(part, list | tuple):
        hasher.update(b"list %d " % len(part))
        for each in part:
            _feed(hasher, each)
    elif isinstance(part, bytes):
        hasher.update(b"bytes %d " % len(part) + part)
    elif part is None or isinstance(part, str | int | float | bool):
        text = repr(part).encode()
        hasher.update(b"text %d " % len(text) + text)
    else:
        raise TypeError(f"a key is made of text, bytes, numbers, None and lists or dicts of them; found {part!r}")


def exposed(status: os.stat_result) -> str | None:
    """Return why others than this user and root could have written a file or folder; None where they could not."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode):
        return f"can be written by others than its owner (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def distrusted(folder: Path) -> str | None:
    """Return why nothing is read from a folder (the docstring above), with the way out; None if it is trusted."""
    variable = application.current().variable("CACHE_DIR")
    for status in (os.lstat(folder), os.stat(folder)):
        if why := exposed(status):
            way_out = "" if "belongs" in why else f"`chmod go-w {folder}` if no other user has written there, or "
            return f"{folder} {why}; {way_out}set {variable} to a folder of your own"
    return None


def existing(folder: str | os.PathLike) -> str:
    """Return the folder itself, or the nearest of its parents that exists."""
    place = os.path.abspath(folder)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    return place


def _make(folder: Path) -> None:
    """Create a folder and its parents one after the other: Path.mkdir calls itself, once for each of them."""
    place = existing(folder)
    for name in os.path.relpath(os.path.abspath(folder), place).split(os.sep):
        place = os.path.join(place, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(place)


def writable(folder: str | os.PathLike) -> bool:
    """Whether files can be kept in a folder, which may have to be made first."""
    place = existing(folder)
    return os.path.isdir(place) and os.access(place, os.R_OK | os.W_OK | os.X_OK) and accepts_files(place)


def accepts_files(folder: str) -> bool:
    """Try to make a file without a name: rights alone say nothing of a read-only disk or of /proc, nor to root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


class Store:
    """A folder of entries.  `fetch` is all that a door needs."""

    def __init__(self, folder: str | os.PathLike | None = None):
        self.folder = Path(folder) if folder is not None else cache_folder()
        self._warned: set[str] = set()

    def fetch(
        self, key: str, build: Callable[[], Mapping[str, bytes]], about: Mapping[str, Any] | None = None
    ) -> Entry:
        """Return the entry called `key`; `build` makes it where it is missing or damaged.

        Processes that ask at once wait for one of them to build.  Where nothing can be written, everything is built
        anew, after one warning.  `about` says what it is, in JSON, to whoever lists the store.
        """
        if (entry := self.find(key)) is None:
            with self._locked(key):
                if (entry := self.find(key)) is None:                        # no other process built it meanwhile
                    began = time.monotonic()
                    entry = dict(build())
                    seconds = round(time.monotonic() - began, 3)
                    self._write(key, entry, {**(about or {}), "seconds": seconds, "built": int(time.time())})
        return entry

    def find(self, key: str) -> Entry | None:
        """Return the entry called `key`, if it is there, whole and trusted."""
        path = self._path(key)
        try:
            trusted = self._trusts(self.folder) and self._trusts(path.parent)
            if trusted and (parsed := _parsed(key, self._read(path))) is not None:
                with contextlib.suppress(OSError):
                    os.utime(path)                                           # tells sweeps that it is in use
                return parsed[1]
        except OSError:
            pass
        return None

    def forget(self, key: str) -> bool:
        """Drop an entry: an old one, or one that reads well and still does not work.  Whether it is gone."""
        return self.remove(self._path(key))

    def remove(self, path: Path) -> bool:
        """Drop a file of `entries` and its lock.  Returns whether it is gone."""
        for file in (path.with_suffix(".lock"), path):
            with contextlib.suppress(OSError):  # whoever waits for the lock builds it again
                file.unlink()
        return not os.path.lexists(path)

    def distrusted(self) -> str | None:
        """Return why nothing is read there; None if it is, or if there is no folder yet."""
        try:
            return distrusted(self.folder)
        except OSError:
            return None

    def entries(self) -> Iterator[StoredKernel]:
        """Yield every entry, damaged and misplaced ones as well; reading them does not count as use."""
        for path in sorted(self.folder.glob("[0-9a-f][0-9a-f]/*.kernel")):
            with contextlib.suppress(OSError):
                status = path.lstat()
                raw = self._read(path)
                parsed = _parsed(path.stem, raw) if path == self._path(path.stem) else None
                yield StoredKernel(path.stem, path, status.st_size, status.st_mtime, parsed and parsed[0])

    def sweep(self) -> int:
        """Remove files of dead processes; returns their bytes."""
        freed = sum(map(_sweep_unfinished, self.folder.glob("[0-9a-f][0-9a-f]")))
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*.lock"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if time.time() - status.st_mtime > LEFT_BEHIND and not path.with_suffix(".kernel").exists():
                    path.unlink()
                    freed += status.st_size
        return freed

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.kernel"

    def _trusts(self, folder: Path) -> bool:
        """Whether the file may be read; raises OSError if it cannot be."""
        if why := distrusted(folder):
            self._warn(f"{application.current().name} does not use the built kernels in {self.folder}: {why}")
        return why is None

    def _read(self, path: Path) -> bytes:
        """Return the file's contents; nothing if it is not trusted."""
        flags = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
        with open(os.open(path, os.O_RDONLY | sum(flags)), "rb") as file:
            status = os.fstat(file.fileno())
            if why := exposed(status):
                self._warn(f"{application.current().name} rebuilds kernels whose file in {self.folder} {why}")
            return file.read() if why is None and stat.S_ISREG(status.st_mode) else b""

    def _write(self, key: str, entry: Entry, about: Mapping[str, Any]) -> None:
        parts = [(name, len(data)) for name, data in entry.items()]
        body = json.dumps({"about": about, "parts": parts}).encode() + b"\n" + b"".join(entry.values())
        path, temporary = self._path(key), None
        try:
            if not self._made(path.parent):
                return
            _sweep_unfinished(path.parent)
            mode = stat.S_IMODE(os.stat(self.folder).st_mode)
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
                temporary = file.name
                _lock(file, wait=False)
                file.write(_head(key, body) + body)
            os.chmod(temporary, mode & 0o644)
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._cannot_keep(error)

    def _made(self, subfolder: Path) -> bool:
        """Make what is missing of the folders; whether they are trusted."""
        if not self.folder.is_dir():
            _make(self.folder.parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
        if not self._trusts(self.folder):
            return False
        with contextlib.suppress(FileExistsError):
            os.mkdir(subfolder, stat.S_IMODE(os.stat(self.folder).st_mode) & 0o755)
        return self._trusts(subfolder)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Exclude other processes and threads.  Without locks (no folder, no fcntl) a kernel may be built twice."""
        with contextlib.ExitStack() as held:
            try:
                path = self._path(key).with_suffix(".lock")
                if self._made(path.parent):
                    _lock(held.enter_context(open(path, "ab")))
            except OSError as error:
                self._cannot_keep(error)
            yield

    def _cannot_keep(self, error: OSError) -> None:
        program = application.current()
        variable, folder = program.variable("CACHE_DIR"), program.setting("CACHE_DIR")
        named = f", as {variable}={folder} asks" if folder and cache_folder() == self.folder else ""
        why = error.strerror or str(error)
        if (place := existing(self.folder)) != os.path.abspath(self.folder):
            why = f"that folder cannot be created in {place} ({why})"
        self._warn(
            f"{program.name} cannot keep built kernels in {self.folder}{named}: {why}. Each process builds its own. "
            f"Set {variable} to a folder that can be created and written"
        )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text + ".", RuntimeWarning, stacklevel=5)


def _lock(file: IO[bytes], wait: bool = True) -> bool:
    """Lock a file until it is closed.  False if another has it, or where there are no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except (ImportError, OSError):                                           # some network file systems have none
        return False


def _sweep_unfinished(folder: Path) -> int:
    """Remove files whose writers died; returns their bytes."""
    freed = 0
    for path in folder.glob("*.part"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            status = os.fstat(file.fileno())
            age = time.time() - status.st_mtime
            if age > LEFT_BEHIND or (age > UNLOCKED and _lock(file, wait=False)):
                path.unlink()
                freed += status.st_size
    return freed


def _head(key: str, body: bytes) -> bytes:
    return MAGIC + hashlib.sha256(key.encode() + body).digest()


def _parsed(key: str, raw: bytes) -> tuple[dict[str, Any], Entry] | None:
    """Return a file's words about an entry, and the entry; None if it is damaged or under another name."""
    body = raw[len(MAGIC) + 32 :]
    if raw[: len(MAGIC) + 32] != _head(key, body):
        return None
    line, _, rest = body.partition(b"\n")
    header = json.loads(line)
    entry, offset = {}, 0
    for name, size in header["parts"]:
        entry[name] = rest[offset : offset + size]
        offset += size
    return header["about"], entry


_STORES: dict[Path, Store] = {}


def default() -> Store:
    """Return the store of this user; one object a folder, so that it warns once."""
    folder = cache_folder()
    return _STORES.setdefault(folder, Store(folder))
