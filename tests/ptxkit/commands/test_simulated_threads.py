"""`ptxkit simulate` on scripts with threads: each of them sees the simulated GPU, as it would see a real one."""

import sys
import textwrap
import threading

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")

import ptxkit
from ptxkit import launches, scripts
from ptxkit.capturing.gpu.threads import followed

pytestmark = pytest.mark.simulated

HEAD = '''
import asyncio, contextvars, ctypes, threading
from concurrent.futures import ThreadPoolExecutor

import torch
from cuda.bindings import driver

PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 x)
{ .reg .b32 %r<3>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
ld.global.b32 %r2, [%rd3]; add.u32 %r2, %r2, %r2; st.global.b32 [%rd3], %r2; ret; }
"""


def twice(x):
    _, module = driver.cuModuleLoadData(PTX.encode())
    _, function = driver.cuModuleGetFunction(module, b"twice")
    driver.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, 0, ((x.data_ptr(),), (ctypes.c_uint64,)), 0)
    return x


def work(n):
    assert torch.cuda.is_available() and torch.cuda.current_device() == 0
    x = twice(torch.full((64,), n, dtype=torch.int32, device="cuda"))
    assert x.is_cuda and x.tolist() == [2 * n] * 64
    return n
'''
WAYS = {
    "threads at once": """
        found = []
        threads = [threading.Thread(target=lambda n=n: found.append(work(n))) for n in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert sorted(found) == [0, 1, 2, 3], found
    """,
    "a class of threads, one of which starts another": """
        ended = threading.Event()
        class Worker(threading.Thread):
            def run(self):
                work(1)
                if self.name == "last":
                    ended.set()
                else:
                    Worker(name="last").start()
        Worker().start()
        assert ended.wait(60)
    """,
    "an executor": """
        with ThreadPoolExecutor(2) as executor:
            assert [*executor.map(work, range(4))] == [0, 1, 2, 3]
    """,
    "asyncio.to_thread": """
        async def main():
            return await asyncio.gather(*(asyncio.to_thread(work, n) for n in range(3)))
        assert asyncio.run(main()) == [0, 1, 2]
    """,
    "a thread that ends behind the script": """
        def late():
            threading.Event().wait(0.05)
            work(1)
        threading.Thread(target=late).start()
    """,
    "an executor that nobody shuts down": """
        executor = ThreadPoolExecutor(1)
        assert executor.submit(work, 1).result() == 1
    """,
    "a daemon that never ends": """
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        work(1)
    """,
}
LAUNCHES = dict(zip(WAYS, (4, 2, 4, 3, 1, 1, 1)))


def simulated(tmp_path, body, **options):
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    return scripts.run(script, arch="sm_90a", **options)


@pytest.mark.parametrize("way", WAYS)
def test_a_thread_of_the_script_sees_the_gpu(tmp_path, way):
    begin = threading.Thread.start
    result = simulated(tmp_path, WAYS[way], schedules=3)
    assert result.failed is None and not result.findings and not result.varying
    assert [run.kernel for run in result.session.runs] == ["twice"] * LAUNCHES[way]
    assert threading.Thread.start is begin


def test_each_thread_has_a_current_stream_and_no_context_of_another(tmp_path):
    assert simulated(tmp_path, """
        word, found = contextvars.ContextVar("word", default="none"), []
        word.set("main's")
        def look():
            found.append((torch.cuda.current_stream() == torch.cuda.default_stream(), word.get()))
            torch.cuda.set_stream(torch.cuda.Stream())
        with torch.cuda.stream(torch.cuda.Stream()) as stream:
            mine = torch.cuda.current_stream()
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            assert torch.cuda.current_stream() == mine != torch.cuda.default_stream()
        assert found == [(True, "none")], found
    """).failed is None


def test_while_a_launch_is_simulated_other_threads_have_their_gpu_and_their_launches_wait(tmp_path, monkeypatch):
    simulate, inside, most = launches.launch, [], []
    (tmp_path / "beside.py").write_text("import threading\nbegun, answered = threading.Event(), threading.Event()\n")

    def watched(*arguments, **options):
        beside = sys.modules["beside"]
        inside.append(None)
        most.append(len(inside))
        beside.begun.set()
        assert beside.answered.wait(60)
        run = simulate(*arguments, **options)
        inside.pop()
        return run

    monkeypatch.setattr(launches, "launch", watched)
    try:
        result = simulated(tmp_path, """
            import beside
            first = threading.Thread(target=work, args=(1,))
            first.start()
            assert beside.begun.wait(60)
            second = threading.Thread(target=work, args=(2,))
            second.start()
            second.join(0.5)                 # time enough to come in beside the first, if it did not wait
            sees = torch.cuda.is_available()
            beside.answered.set()
            first.join()
            second.join()
            assert sees
        """)
    finally:
        sys.modules.pop("beside", None)
    assert result.failed is None and most == [1, 1]


def test_a_finding_of_a_launch_in_a_thread_is_reported(tmp_path):
    racy = HEAD.replace("st.global.b32 [%rd3], %r2", "st.global.b32 [%rd1], %r1")
    (tmp_path / "racy.py").write_text(racy + """
def wrong():
    twice(torch.ones(64, dtype=torch.int32, device="cuda"))

thread = threading.Thread(target=wrong)
thread.start()
thread.join()
""")
    result = scripts.run(tmp_path / "racy.py", arch="sm_90a")
    assert result.failed is None and {each.kind for each in result.findings} == {"race-lanes", "race-write-write"}


def test_a_thread_that_the_application_starts_sees_the_machine_as_it_is(monkeypatch):
    from ptxkit.compile.launching import launch_sink

    seen = []
    watched = compile("""
def start(look):
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
""", "a module", "exec")
    for module in ("ptxkit.somewhere", "somebody's"):
        names = {"__name__": module, "threading": threading}
        exec(watched, names)
        with ptxkit.capture(arch="sm_90a") as session, followed(session):
            names["start"](lambda: seen.append(launch_sink()))
            assert launch_sink() is session
        assert seen.pop() is (None if module == "ptxkit.somewhere" else session)
