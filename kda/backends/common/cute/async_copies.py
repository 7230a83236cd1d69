"""Copies to shared memory that end later, and what says so."""

import cutlass.cute as cute
from cutlass import Int32, Uint32


def said_to_L2(instruction: str, operands: str, last: bool) -> str:
    """Return an instruction; `last`: what it reads nobody reads again, so it is the first to leave L2."""
    if not last:
        return f"{instruction} {operands};"
    policy = ".reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
    return f"{{{policy} {instruction}.L2::cache_hint {operands}, policy;}}"


def bulk_copy(to, source, size, full, last: bool = False):
    """Begin a copy to shared memory, whose bytes the barrier counts."""
    instruction = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    cute.arch.inline_ptx(
        said_to_L2(instruction, "[{$r0}], [{$r1}], {$r2}, [{$r3}]", last),
        read_only_args=[to.toint().to(Uint32), source.toint(), Int32(size), full.toint().to(Uint32)],
    )


def bulk_store(to, source, size):
    """Copy to global memory; the copy joins this thread's current group of copies."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[to.toint(), source.toint().to(Uint32), Int32(size)],
    )


def copy_16_bytes_later(address, to, last: bool = False):
    """Begin a copy of 16 bytes of global memory to shared memory."""
    cute.arch.inline_ptx(
        said_to_L2("cp.async.cg.shared.global", "[{$r0}], [{$r1}], 16", last),
        read_only_args=[to.toint().to(Uint32), address],
    )


def arrive_when_copied(full):
    """Arrive once at the barrier when this thread's copies of 16 bytes so far have ended."""
    cute.arch.inline_ptx(
        "cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", read_only_args=[full.toint().to(Uint32)]
    )


def bulk_copy_to_neighbour(source, to, size, full, rank):
    """Copy to the shared memory of another CTA of the cluster, whose barrier counts the bytes."""
    cute.arch.inline_ptx(
        "{.reg .b32 to, full; mapa.shared::cluster.u32 to, {$r1}, {$r4}; mapa.shared::cluster.u32 full, {$r3}, {$r4}; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [{$r0}], {$r2}, [full];}",
        read_only_args=[
            source.toint().to(Uint32), to.toint().to(Uint32), Int32(size), full.toint().to(Uint32), Int32(rank)
        ],
    )


def discard(address):
    """L2 need not write 128 bytes to memory: nobody reads them before they are written."""
    cute.arch.inline_ptx("discard.global.L2 [{$r0}], 128;", read_only_args=[address])


def prefetch(address):
    """Prefetch 128 bytes of global memory into L2."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
