"""Pieces of PTX that the tests of asynchronous copies share. %r20: shared memory, %r21: the mbarrier behind BARRIER bytes of it."""

from assembly import kernel

BARRIER = 32768
THREADS = 64
FILLER = 0xEE  # what shared memory holds before a copy, in every byte


def frame(body, maps=0, **options):
    """A kernel as assembly.kernel makes it, with tensor maps map1, map2, ... as its first parameters."""
    text = kernel(PROLOGUE + body, shared=BARRIER + 64, **options)
    params = "".join(f".param .align 64 .b8 map{n}[128], " for n in range(1, maps + 1))
    text = text.replace(".visible .entry k(", f".visible .entry k({params}")
    return text.replace(", )", ")")


PROLOGUE = f"""
    mov.u32 %r20, smem;
    add.u32 %r21, %r20, {BARRIER};
    setp.ne.u32 %p1, %r0, 0;
"""


def each_word(name, size, do):
    """Runs `do` with %r30 on 0, 4, 8, ... below size: the CTA's threads take turns."""
    return f"""
    shl.b32 %r30, %r0, 2;
{name}:
    setp.ge.u32 %p3, %r30, {size};
    @%p3 bra {name}_DONE;
    add.u32 %r31, %r20, %r30;
    cvt.u64.u32 %rd21, %r30;
    add.s64 %rd21, %rd1, %rd21;
    {do}
    add.u32 %r30, %r30, {4 * THREADS};
    bra {name};
{name}_DONE:
"""


def fill_shared(size):
    """Shared memory holds FILLER, and the async proxy may overwrite it."""
    return each_word("FILL", size, f"st.shared.u32 [%r31], {FILLER * 0x01010101};") + "fence.proxy.async.shared::cta;\nbar.sync 0;\n"


def load_shared(size, name="IN"):
    """From the tensor at %rd1 to shared memory, by generic loads and stores."""
    return each_word(name, size, "ld.global.u32 %r32, [%rd21];\n    st.shared.u32 [%r31], %r32;")


def store_shared(size, name="OUT"):
    """From shared memory to the tensor at %rd1, by generic loads and stores."""
    return each_word(name, size, "ld.shared.u32 %r32, [%r31];\n    st.global.u32 [%rd21], %r32;")


def make_barrier(arrivals=1):
    """Thread 0 makes the mbarrier, everybody knows of it."""
    return f"""
    @%p1 bra MADE;
    mbarrier.init.shared::cta.b64 [%r21], {arrivals};
    fence.mbarrier_init.release.cluster;
MADE:
    bar.sync 0;
"""


def expect(size):
    return f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], {size};"


def wait(parity=0, name="WAIT"):
    return f"""
{name}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r21], {parity};
    @!%p2 bra {name};
"""


def by_thread_0(body, name="ONE"):
    return f"    @%p1 bra {name};\n    {body}\n{name}:\n"
