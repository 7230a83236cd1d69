"""Built kernels on disk: one build for all who ask, and no trust in what was read."""

import multiprocessing
import os
import pathlib
import time
import types

import pytest

from kda.compile import store
from kda.compile.store import Store, digest


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


def test_entries_of_a_read_only_folder_are_still_read(kept, monkeypatch):
    calls, key = [], digest("a")
    kept.fetch(key, builder(calls))

    def refuse(*arguments, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    monkeypatch.setattr(store.tempfile, "NamedTemporaryFile", refuse)
    assert kept.fetch(key, builder(calls)) and len(calls) == 1
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert kept.fetch(digest("new"), builder(calls)) and len(calls) == 2


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
        ("ab",),
        ("a", "b"),
        (b"ab",),
        ("", "ab"),
        (("a", "b"),),
        (["ab"],),
        (1,),
        ("1",),
        (1.0,),
        (True,),
        (None,),
        ({"a": "b"},),
        (),
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
