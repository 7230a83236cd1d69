"""Copies to shared memory that end later, and what says so."""

import cutlass.cute as cute
from cutlass import Int32, Uint32


ONCE = "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
OFTEN = "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"


def bulk_copy_once(to, source, size, full):
    """The same of what nothing reads again: it leaves L2 first."""
    cute.arch.inline_ptx(
        "{.reg .b64 policy; " + ONCE + " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}], policy;}",
        read_only_args=[to.toint().to(Uint32), source.toint(), Int32(size), full.toint().to(Uint32)],
    )


def copy_16_bytes_once(address, to):
    cute.arch.inline_ptx(
        "{.reg .b64 policy; " + ONCE + " cp.async.cg.shared.global.L2::cache_hint [{$r0}], [{$r1}], 16, policy;}",
        read_only_args=[to.toint().to(Uint32), address]
    )


def bulk_store_often(to, source, size):
    cute.arch.inline_ptx(
        "{.reg .b64 policy; " + OFTEN + " cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [{$r0}], [{$r1}], {$r2}, policy;}",
        read_only_args=[to.toint(), source.toint().to(Uint32), Int32(size)],
    )


def store_16_once(to, words):
    cute.arch.inline_ptx(
        "st.global.cs.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};".replace("{{", "{ {").replace("}}", "} }"), read_only_args=[to.toint(), *words]
    )


def store_16_often(to, words):
    cute.arch.inline_ptx(
        "{.reg .b64 policy; " + OFTEN + " st.global.L2::cache_hint.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} }, policy;}", read_only_args=[to.toint(), *words]
    )


def bulk_copy(to, source, size, full):
    """Begin a copy to shared memory, whose bytes the barrier counts."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[to.toint().to(Uint32), source.toint(), Int32(size), full.toint().to(Uint32)],
    )


def bulk_store(to, source, size):
    """Copy to global memory; the copy joins this thread's current group of copies."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[to.toint(), source.toint().to(Uint32), Int32(size)],
    )


def copy_16_bytes_later(address, to):
    """Begin a copy of 16 bytes of global memory to shared memory."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[to.toint().to(Uint32), address]
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


def prefetch(address):
    """Prefetch 128 bytes of global memory into L2."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
