"""Built kernels on disk: one build for all who ask, and no trust in what was read."""

import contextlib
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
import types
import warnings

import pytest

from kda.tools.commands import probes
from ptxkit.compile import store
from ptxkit.compile.store import Store, digest

pytestmark = pytest.mark.compiler


@pytest.fixture
def kept(tmp_path):
    return Store(tmp_path / "cache")


def builder(calls, entry=None):
    def build():
        calls.append(1)
        return entry or {"ptx": b".version 9.0\n", "cubin": bytes(range(256)), "empty": b""}

    return build


def file_of(kept, key):
    return kept.folder / key[:2] / f"{key}.kernel"


def test_a_second_request_reads_what_the_first_one_built(kept):
    calls = []
    first = kept.fetch(digest("a"), builder(calls))
    assert Store(kept.folder).fetch(digest("a"), builder(calls)) == first == builder([])()
    assert len(calls) == 1


def test_keys_keep_entries_apart(kept):
    calls = []
    kept.fetch(digest("a"), builder(calls))
    kept.fetch(digest("b"), builder(calls))
    assert len(calls) == 2


@pytest.mark.parametrize("cut", [0, 5, 30, 60, -1])
def test_a_truncated_entry_is_built_again(kept, cut):
    calls, key = [], digest("a")
    whole = kept.fetch(key, builder(calls))
    path = file_of(kept, key)
    path.write_bytes(path.read_bytes()[:cut])
    assert kept.fetch(key, builder(calls)) == whole
    assert kept.fetch(key, builder(calls)) == whole
    assert len(calls) == 2


def test_one_flipped_bit_anywhere_is_noticed(kept):
    calls, key = [], digest("a")
    kept.fetch(key, builder(calls))
    path = file_of(kept, key)
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        path.write_bytes(good[:position] + bytes([good[position] ^ 16]) + good[position + 1 :])
        before = len(calls)
        kept.fetch(key, builder(calls))
        assert len(calls) == before + 1, f"byte {position} of {len(good)} changed and nobody noticed"


def test_a_failed_build_leaves_nothing_behind_and_can_be_repeated(kept):
    def fail():
        raise OSError("ptxas ran out of memory")

    with pytest.raises(OSError, match="ptxas"):
        kept.fetch(digest("a"), fail)
    calls = []
    assert kept.fetch(digest("a"), builder(calls)) and len(calls) == 1
    assert not list(kept.folder.rglob("*.part"))


def test_a_forgotten_entry_is_built_again(kept):
    calls = []
    for _ in range(2):
        kept.fetch(digest("a"), builder(calls))
        kept.forget(digest("a"))
    assert len(calls) == 2


def build_slowly(folder, log):
    def build():
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return {"who": str(os.getpid()).encode()}

    return Store(folder).fetch(digest("shared"), build)["who"]


def test_processes_that_ask_at_once_build_once(tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        builders = set(pool.starmap(build_slowly, [(tmp_path / "cache", log)] * 8))
    assert log.read_text() == "built\n" and len(builders) == 1


def test_a_folder_that_cannot_be_written_means_one_warning_and_no_cache(tmp_path):
    (tmp_path / "file").write_text("in the way")  # root may write anywhere but not below a file
    kept, calls = Store(tmp_path / "file" / "cache"), []
    with pytest.warns(RuntimeWarning, match="KDA_CACHE_DIR") as warned:
        for _ in range(3):
            assert kept.fetch(digest("a"), builder(calls)) == builder([])()
    assert len(calls) == 3 and len(warned) == 1


@pytest.mark.parametrize(("name", "levels"), [("a", 1200), ("a" * 200, 30)], ids=["many levels", "too long a path"])
def test_a_folder_of_many_levels_is_made_or_refused(tmp_path, monkeypatch, name, levels):
    folder, calls = tmp_path.joinpath(*[name] * levels), []
    monkeypatch.setenv("KDA_CACHE_DIR", str(folder))
    with pytest.warns(RuntimeWarning, match="File name too long") if len(name) > 1 else contextlib.nullcontext():
        for _ in range(2):
            Store().fetch(digest("a"), builder(calls))
    assert len(calls) == (2 if len(name) > 1 else 1)
    subprocess.run(["rm", "-rf", tmp_path / name], check=True)                  # pytest's own way calls itself


def test_the_folder_may_lie_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KDA_CACHE_DIR", "~/built")
    Store().fetch(digest("a"), builder([]))
    assert [*(tmp_path / "built").rglob("*.kernel")] and probes.cache_path() == str(tmp_path / "built")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc, in which nobody can make a folder")
def test_a_folder_that_cannot_be_made_is_named_with_where_it_would_be_and_who_asked_for_it(monkeypatch):
    monkeypatch.setenv("KDA_CACHE_DIR", "/proc/x")
    assert not store.writable("/proc/x")
    with pytest.warns(RuntimeWarning) as warned:
        Store().fetch(digest("a"), builder([]))
    assert str(warned[0].message) == (
        "kda cannot keep built kernels in /proc/x, as KDA_CACHE_DIR=/proc/x asks: that folder cannot be created in "
        "/proc (No such file or directory). Each process builds its own. Set KDA_CACHE_DIR to a folder that can be "
        "created and written."
    )


def test_entries_of_a_read_only_folder_are_still_read(kept, monkeypatch):
    calls, key = [], digest("a")
    kept.fetch(key, builder(calls))

    def refuse(*arguments, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store.os, "mkdir", refuse)
    monkeypatch.setattr(store.os, "utime", refuse)
    monkeypatch.setattr(store.tempfile, "NamedTemporaryFile", refuse)
    assert kept.fetch(key, builder(calls)) and len(calls) == 1
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert kept.fetch(digest("new"), builder(calls)) and len(calls) == 2


def test_a_full_disk_means_one_warning_and_leaves_nothing_behind(kept):
    resource = pytest.importorskip("resource")
    calls, before = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # bytes of any file
    try:
        with pytest.warns(RuntimeWarning, match=r"cannot keep built kernels .* KDA_CACHE_DIR") as warned:
            for _ in range(2):
                assert kept.fetch(digest("a"), builder(calls)) == builder([])()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(calls) == 2 and len(warned) == 1
    assert not [path for path in kept.folder.rglob("*") if path.suffix in (".part", ".kernel")]


# ---- who is trusted

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")


def give_away(path, monkeypatch):
    """Let the file belong to somebody else."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:  # only root can: we are somebody else
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def is_refused(kept, key, match):
    """Check that nothing is read, that there is one warning, and that what is built stays in memory."""
    calls, before = [], sorted(kept.folder.rglob("*"))
    with pytest.warns(RuntimeWarning, match=match) as warned:
        for _ in range(2):
            assert kept.fetch(key, builder(calls)) == builder([])()
    assert len(calls) == 2 and len(warned) == 1 and sorted(kept.folder.rglob("*")) == before


@posix
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_is_not_read(kept, mode):
    kept.fetch(digest("a"), lambda: {"ptx": b"evil"})
    kept.folder.chmod(mode)
    is_refused(Store(kept.folder), digest("never built"), "can be written")
    is_refused(kept, digest("a"), rf"{kept.folder} can be written by others .*{mode:04o}.*chmod go-w.*KDA_CACHE_DIR")
    kept.folder.chmod(0o700)
    assert kept.fetch(digest("a"), builder([])) == {"ptx": b"evil"}


@posix
def test_a_subfolder_that_others_may_write_is_not_read(kept):
    kept.fetch(digest("a"), lambda: {"ptx": b"evil"})
    file_of(kept, digest("a")).parent.chmod(0o777)
    is_refused(kept, digest("a"), "can be written by others")
    file_of(kept, digest("a")).unlink()
    is_refused(Store(kept.folder), digest("a"), "can be written by others")


@posix
def test_another_users_folder_is_not_read(kept, monkeypatch):
    kept.fetch(digest("a"), lambda: {"ptx": b"evil"})
    give_away(kept.folder, monkeypatch)
    is_refused(kept, digest("a"), r"belongs to user \d+; set KDA_CACHE_DIR to a folder of your own")


@posix
def test_a_link_to_the_folder_is_followed_if_it_is_ours(kept, tmp_path, monkeypatch):
    kept.fetch(digest("a"), builder([]))
    link = tmp_path / "link"
    link.symlink_to(kept.folder)
    calls = []
    assert Store(link).fetch(digest("a"), builder(calls)) and not calls
    kept.folder.chmod(0o777)
    is_refused(Store(link), digest("a"), "can be written")
    kept.folder.chmod(0o700)
    give_away(link, monkeypatch)
    is_refused(Store(link), digest("a"), "belongs to user")


@posix
@pytest.mark.parametrize("harm", ["written by all", "given away", "a link"])
def test_an_entry_that_others_may_have_written_is_built_again_and_replaced(kept, tmp_path, monkeypatch, harm):
    if harm == "given away" and os.geteuid():
        pytest.skip("only root can give one file away")
    key, path, calls = digest("a"), file_of(kept, digest("a")), []
    kept.fetch(key, lambda: {"ptx": b"evil"})
    if harm == "written by all":
        path.chmod(0o666)
    elif harm == "given away":
        give_away(path, monkeypatch)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert kept.fetch(key, builder(calls)) == kept.fetch(key, builder(calls)) == builder([])()
    assert len(calls) == 1 and len(warned) == (harm != "a link")
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600 and path.stat().st_uid == os.geteuid()


@posix
def test_what_root_keeps_for_all_is_read(kept, monkeypatch):
    if os.geteuid():
        pytest.skip("needs root")
    kept.folder.mkdir(mode=0o755)
    first = kept.fetch(digest("a"), builder([]))
    path = file_of(kept, digest("a"))
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o644, 0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    calls = []
    assert kept.fetch(digest("a"), builder(calls)) == first and not calls


@posix
def test_folders_and_files_are_made_for_this_user_alone(kept):
    before = os.umask(0)
    try:
        kept.fetch(digest("a"), builder([]))
    finally:
        os.umask(before)
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in [kept.folder, *kept.folder.rglob("*")]}
    assert modes[""] == 0o700 and modes[".kernel"] == 0o600


@posix
def test_a_shared_disk_is_as_good_as_any_for_a_folder_of_our_own(tmp_path):
    shared = tmp_path / "scratch"
    shared.mkdir()
    shared.chmod(0o1777)  # as /tmp
    kept, calls = Store(shared / "mine"), []
    kept.fetch(digest("a"), builder(calls))
    assert kept.fetch(digest("a"), builder(calls)) and len(calls) == 1


def test_an_entry_under_another_s_name_is_noticed(kept):
    kept.fetch(digest("a"), lambda: {"ptx": b"of a"})
    other = file_of(kept, digest("b"))
    other.parent.mkdir(exist_ok=True)
    file_of(kept, digest("a")).rename(other)
    assert kept.fetch(digest("b"), lambda: {"ptx": b"of b"}) == {"ptx": b"of b"}


def test_a_foreign_file_in_an_entry_s_place_is_noticed(kept):
    key, path = digest("a"), file_of(kept, digest("a"))
    path.parent.mkdir(parents=True)
    for make in (path.mkdir, lambda: path.write_bytes(b"\x7fELF" * 100), lambda: os.mkfifo(path)):
        make()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")  # a folder cannot be replaced
            assert kept.fetch(key, builder([])) == builder([])()
        path.rmdir() if path.is_dir() else path.unlink()


# ---- what is there


def test_entries_tell_what_they_are_and_when_they_were_used(kept):
    kept.fetch(digest("a"), builder([]), about={"kernel": "scan", "arch": "sm90"})
    kept.fetch(digest("b"), builder([]))
    file_of(kept, digest("b")).write_bytes(b"damaged")
    os.utime(file_of(kept, digest("a")), (1000, 1000))
    entries = {entry.key: entry for entry in kept.entries()}
    assert entries[digest("a")].about["kernel"] == "scan" and entries[digest("a")].about["seconds"] >= 0
    assert entries[digest("a")].used == 1000 and entries[digest("b")].about is None
    kept.find(digest("a"))
    assert next(e for e in kept.entries() if e.key == digest("a")).used > 1000


def test_what_dead_processes_left_is_swept_away_and_nothing_else(kept):
    kept.fetch(digest("a"), builder([]))
    folder = file_of(kept, digest("a")).parent
    for name, age in (("old.part", 7200), ("new.part", 0), ("old.lock", 7200), ("old.txt", 7200)):
        (folder / name).write_text("1234")
        os.utime(folder / name, (time.time() - age,) * 2)
    os.utime(file_of(kept, digest("a")).with_suffix(".lock"), (1, 1))
    assert kept.sweep() == 8
    assert not (folder / "old.part").exists() and not (folder / "old.lock").exists()
    assert (folder / "new.part").exists() and (folder / "old.txt").exists()
    assert file_of(kept, digest("a")).with_suffix(".lock").exists()


def unfinished(kept, key, age):
    """Return a file that a process, which still runs, has begun to write."""
    path = file_of(kept, key).with_name("begun.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.flock(file, fcntl.LOCK_EX)\n"
         "file.write(bytes(9)); file.flush(); print(flush=True); input()", path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    writer.stdout.readline()
    os.utime(path, (time.time() - age,) * 2)
    return path, writer


@pytest.mark.parametrize("sweep", [lambda kept: kept.sweep(), lambda kept: kept.fetch(digest("a"), builder([]))])
def test_what_a_killed_process_left_goes_with_the_next_build_and_what_is_being_written_stays(kept, sweep):
    kept.folder.mkdir(mode=0o700)
    path, writer = unfinished(kept, digest("a"), age=120)
    path.parent.chmod(0o700)
    sweep(kept)
    assert path.exists()
    kept.forget(digest("a"))
    writer.kill()
    writer.communicate()
    sweep(kept)
    assert not path.exists()


def test_the_environment_says_where_kernels_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path))
    assert store.cache_folder() == tmp_path == store.default().folder
    monkeypatch.setenv("KDA_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(store.sys, "platform", "linux")
    assert store.cache_folder() == tmp_path / "xdg" / "kda"


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    for name in ("KDA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pathlib.Path, "expanduser", homeless)
    calls = []
    with pytest.warns(RuntimeWarning, match="KDA_CACHE_DIR"):
        Store().fetch(digest("a"), builder(calls))
    assert len(calls) == 1


def test_no_two_lists_of_parts_share_a_key():
    parts = [
        ("ab",), ("a", "b"), (b"ab",), ("", "ab"), (("a", "b"),), (["ab"],), (1,), ("1",), (1.0,), (True,), (None,),
        ({"a": "b"},), (),
    ]
    assert len({digest(*each) for each in parts}) == len(parts)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_a_key_refuses_what_it_cannot_name():
    with pytest.raises(TypeError, match="text, bytes, numbers"):
        digest(object())


def test_sources_change_with_any_file_of_a_package(tmp_path):
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "kernel.py").write_text("x = 1")
    package = types.ModuleType("package")
    package.__file__, package.__path__ = str(tmp_path / "__init__.py"), [str(tmp_path)]
    before = store.sources(package)
    assert store.sources(package) == before
    (tmp_path / "kernel.py").write_text("x = 2")
    assert store.sources(package) != before
