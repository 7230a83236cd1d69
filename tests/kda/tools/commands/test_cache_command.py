"""`kda cache`: what is listed, what is removed, and what is left alone."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kda.calls import node
from kda.cli import cli
from kda.tools.commands.probes import look_at_cache
from kda.tools.commands.stale import judge
from ptxkit.compile import extension, launch_list, recipes
from ptxkit.compile.store import Store, digest
from ptxkit.engine import build

DAY = 86400


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "cache"))
    return Store(tmp_path / "cache")


def keep(kept, name, days=0, size=2048, **about):
    kept.fetch(digest(name), lambda: {"ptx": bytes(size)}, about)
    os.utime(path_of(kept, name), (time.time() - days * DAY,) * 2)


def path_of(kept, name):
    return kept.folder / digest(name)[:2] / f"{digest(name)}.kernel"


def fill(kept):
    """Store two kernels in use, one of older source, one unreadable, one of no backend, and the simulator's engine."""
    now = {"module": "kda.backends.reference.kernels", "source": recipes.source("kda.backends.reference.kernels")}
    keep(kept, "new", kernel="scan", arch="sm90", **now)
    keep(kept, "unused", days=40, kernel="scan", arch="sm80", **now)
    keep(kept, "old", days=3, kernel="scan", arch="sm90", **now | {"source": "of another day"})
    keep(kept, "other", kernel="axpy", arch="sm80")
    keep(kept, "engine", kernel="engine", arch="x86_64", module=build.__name__, source=build.source())
    path_of(kept, "damaged").parent.mkdir(exist_ok=True)
    path_of(kept, "damaged").write_bytes(bytes(1000))
    return kept


def left(kept):
    return {name for name in ("new", "unused", "old", "other", "engine", "damaged") if path_of(kept, name).exists()}


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, ["cache", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_list_counts_kernels_by_backend_arch_and_name(kept):
    fill(kept)
    first, summary, header, *rows = run("list", "-v").splitlines()
    assert first == f"{kept.folder}: 6 entries, 12 KiB"
    assert [row.split() for row in rows[:-3]] == [
        ["others", "sm80", "axpy", "1", "2", "KiB", "today"],
        ["reference", "sm80", "scan", "1", "2", "KiB", "40", "days", "ago"],
        ["reference", "sm90", "scan", "2", "5", "KiB", "today", "1"],
        ["simulator", "x86_64", "engine", "1", "2", "KiB", "today"],
        ["unreadable", "-", "-", "1", "1", "KiB", "today", "1"],
    ]
    assert [row.partition(":")[0] for row in rows[-3:]] == ["simulator", "others", "unreadable"]
    assert header.split() == ["whose", "arch", "kernel", "entries", "size", "last", "used", "stale"]
    assert summary.startswith("Stale: 2 (1 other source, 1 unreadable); `kda cache clean` frees")
    assert run() == run("list")
    *_, more = table = run().splitlines()
    assert ["reference", "sm90", "1", "2"] in [row.split()[:4] for row in table] and more == "-v prints each kernel."


def test_the_list_of_an_empty_cache_is_one_line(kept):
    assert run() == f"{kept.folder}: 0 entries, 0 KiB\n"


def test_the_json_holds_every_entry(kept):
    found = json.loads(run("--json"))
    assert (found["command"], found["exit"], found["entries"]) == ("cache", 0, [])
    fill(kept)
    entries = {entry["key"]: entry for entry in json.loads(run("--json"))["entries"]}
    assert entries[digest("old")] | {"used": 0, "built": 0, "seconds": 0} == {
        "key": digest("old"), "backend": "reference", "arch": "sm90", "kernel": "scan",
        "bytes": path_of(kept, "old").stat().st_size, "used": 0, "built": 0, "seconds": 0,
        "status": "stale", "why": "other source",
    }
    named = [(entries[digest(name)]["backend"], entries[digest(name)]["kernel"]) for name in ("engine", "damaged")]
    assert named == [(None, "engine"), (None, None)]
    assert entries[digest("damaged")]["status"] == "unreadable" and entries[digest("new")]["status"] == "current"


def test_the_path_is_printed(kept):
    assert run("path") == f"{kept.folder}\n"
    assert json.loads(run("path", "--json"))["folder"] == str(kept.folder)


@pytest.mark.parametrize(("options", "stays"), [
    ((), {"new", "unused", "other", "engine"}),
    (("--stale",), {"new", "unused", "other", "engine"}),
    (("--older-than", "30"), {"new", "old", "other", "engine"}),
    (("--older-than", "2.5"), {"new", "other", "engine"}),
    (("--all",), set()),
])
def test_cleaning_removes_what_was_named_and_what_cannot_be_read(kept, options, stays):
    fill(kept)
    (kept.folder / "ab").mkdir(exist_ok=True)
    foreign = [kept.folder / "notes.txt", kept.folder / "ab" / "notes.txt", kept.folder / "x.kernel"]
    for path in foreign:
        path.write_text("mine")
    said = json.loads(run("clean", *options, "--json"))
    assert left(kept) == stays
    assert (said["removed"], said["left"]) == (6 - len(stays), len(stays))
    assert all(path.exists() for path in foreign)
    assert len(list(kept.folder.rglob("*.lock"))) == len(stays)


def test_cleaning_says_what_it_freed(kept):
    assert run("clean") == f"{kept.folder}: 0 entries removed, 0 KiB; 0 left\n"
    fill(kept)
    assert run("clean") == f"{kept.folder}: 2 entries removed, 3 KiB; 4 left; --all removes them, too\n"
    assert run("clean", "--stale") == f"{kept.folder}: 0 entries removed, 0 KiB; 4 left\n"


@pytest.mark.parametrize("arguments", [["--all"], ["list", "--stale"], ["clean", "--all", "--stale"], ["clear"]])
def test_a_wrong_use_is_refused_and_removes_nothing(kept, arguments):
    fill(kept)
    run(*arguments, code=2)
    assert len(left(kept)) == 6


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
def test_a_folder_that_is_not_trusted_is_a_finding_and_left_alone(kept):
    fill(kept)
    kept.folder.chmod(0o777)
    assert "not used" in run(code=1) and "chmod go-w" in run(code=1)
    assert "nothing is removed" in run("clean", "--all", code=1) and len(left(kept)) == 6
    assert "mode 0777" in json.loads(run("--json", code=1))["distrusted"]


def test_the_doctor_sees_what_is_stale_unreadable_or_not_trusted(kept):
    fill(kept)
    found = look_at_cache()
    assert (found.unreadable, found.stale, found.distrusted) == (1, path_of(kept, "old").stat().st_size, "")
    if hasattr(os, "geteuid"):
        kept.folder.chmod(0o777)
        assert "can be written by others" in look_at_cache().distrusted


def test_a_file_that_no_key_names_is_called_unreadable_and_removed(kept):
    keep(kept, "new")
    foreign, misplaced = kept.folder / "ab" / "foreign.kernel", kept.folder / "ab" / path_of(kept, "new").name
    foreign.parent.mkdir()
    foreign.write_bytes(b"somebody's")
    misplaced.write_bytes(path_of(kept, "new").read_bytes())
    statuses = [entry["status"] for entry in json.loads(run("list", "--json"))["entries"]]
    assert sorted(statuses) == ["current", "unreadable", "unreadable"]
    assert "2 entries removed" in run("clean") and "0 entries removed" in run("clean")
    assert not foreign.exists() and not misplaced.exists() and path_of(kept, "new").exists()


def test_a_file_that_cannot_be_removed_is_said_to_stay(kept, monkeypatch):
    fill(kept)
    unlink = Path.unlink

    def refusing(path, **options):
        if path == path_of(kept, "old"):
            raise PermissionError(path)
        return unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refusing)
    said = run("clean", code=1)
    assert "1 entry removed" in said and "5 left" in said and "1 entry cannot be removed" in said
    assert left(kept) == {"new", "unused", "old", "other", "engine"}


@pytest.mark.parametrize("source", [{}, {"source": "of another version"}], ids=["of the first versions", "another"])
def test_an_engine_that_another_version_built_is_stale(kept, source):
    keep(kept, "engine", kernel="engine", arch="x86_64", module=build.__name__, source=build.source())
    keep(kept, "old", kernel="engine", arch="x86_64", module=build.__name__, **source)
    assert "Stale: 1 (1 other source)" in run()
    assert "1 entry removed" in run("clean") and left(kept) == {"engine"}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_a_new_engine_is_current(monkeypatch, kept):
    monkeypatch.setattr(build, "_built", lambda texts: b"a library")
    build.library()
    (entry,) = kept.entries()
    assert judge()(entry.about) is None


@pytest.fixture
def extension_entry(kept, tmp_path, monkeypatch):
    """A module in C, as it is kept: its source lies in a package, and no compiler runs."""
    monkeypatch.setattr(extension, "_built", lambda *_: b"a library")
    monkeypatch.setattr(extension, "_imported", lambda *_: None)
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "outer" / "inner" / "lists.c"
    source.parent.mkdir(parents=True)
    for folder in (source.parent, source.parent.parent):
        (folder / "__init__.py").touch()
    source.write_text("int run(void);")
    extension.module("launch_list", source, "cc", ())
    return source


def test_a_module_in_c_is_current_until_its_source_changes(kept, extension_entry):
    (entry,) = kept.entries()
    assert entry.about["file"] == "outer/inner/lists.c" and judge()(entry.about) is None
    _, _, row, says, _ = run().splitlines()
    assert row.split()[0] == "host" and says.startswith("host: modules in C")
    assert run("clean").endswith("0 entries removed, 0 KiB; 1 left; --all removes them, too\n")
    extension_entry.write_text("long run(void);")
    assert judge()(entry.about) == "other source"
    extension_entry.unlink()
    assert judge()(entry.about) == judge()(entry.about | {"file": "gone/lists.c"}) == "source that is gone"
    assert judge()({name: x for name, x in entry.about.items() if name != "file"}) == "other source"


@pytest.mark.parametrize("source, program", [(launch_list.SOURCE, launch_list), (node.SOURCE, node)],
                         ids=["a list of launches", "the node of autograd"])
def test_the_modules_that_kda_builds_are_found_again_in_its_packages(kept, monkeypatch, source, program):
    monkeypatch.setattr(extension, "_built", lambda *_: b"a library")
    monkeypatch.setattr(extension, "_imported", lambda *_: None)
    extension.module("anything", source, "cc", ())
    (entry,) = kept.entries()
    assert entry.about["file"] == f"{program.__name__.rpartition('.')[0].replace('.', '/')}/{source.name}"
    assert judge()(entry.about) is None


def test_what_kernels_are_built_from_is_read_once_however_many_there_are(kept, monkeypatch):
    fill(kept)
    reads, source = [], recipes.source
    monkeypatch.setattr(recipes, "source", lambda *modules: reads.append(modules) or source(*modules))
    run()
    assert reads == [("kda.backends.reference.kernels",)]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_the_engine_is_one_entry_in_terminals_of_any_width_and_language(monkeypatch):
    found = set()
    for columns, language in (("80", "C"), ("120", "C"), ("200", "de_DE.UTF-8")):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("LC_ALL", language)
        found.add((build._native(), build._answers("-dumpfullversion")))
    assert len(found) == 1 and "march" in next(iter(found))[0]


def test_a_folder_that_cannot_be_written_is_said_to_keep_nothing_new(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    first, second = run().splitlines()
    assert "0 entries" in first and "cannot be written" in second and "kda doctor cache.dir" in second
