"""The C++ that the kernels share.

`loop` is a kernel that runs a body many times between two readings of the SM's clock. Its first pass is short and
fills the instruction cache; the second is the one that counts. Every warp notes its own start and end, so that the
time of a CTA is from the first start to the last end.
"""

from __future__ import annotations

PRELUDE = r"""
typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct alignas(64) Map { char bytes[128]; };          // a tensor map
struct alignas(16) Four { u32 x, y, z, w; };

#define LANE (threadIdx.x & 31)
#define WARP (threadIdx.x >> 5)
#define INLINE static __device__ __forceinline__

INLINE u64 clocks() { u64 t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory"); return t; }
INLINE u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory"); return t; }
#ifdef NANOSECONDS                                    // the one clock that all SMs share
INLINE u64 now() { return nanoseconds(); }
#else
INLINE u64 now() { return clocks(); }
#endif
INLINE u32 smid() { u32 s; asm volatile("mov.u32 %0, %%smid;" : "=r"(s)); return s; }
INLINE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
INLINE u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

INLINE void note(u64* spans, u64 start, u64 end) {    // [CTA][warp] of (start, end)
  if (LANE == 0) {
    u64 at = (u64)blockIdx.x * ((blockDim.x + 31) / 32) + WARP;
    spans[2 * at] = start;
    spans[2 * at + 1] = end;
  }
}

INLINE void sync_all() { asm volatile("bar.sync 0;" ::: "memory"); }
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}
INLINE void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
INLINE void expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
INLINE void arrive_remote(u32 bar) {                  // an address of the cluster's shared memory
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory");
}
INLINE u32 remote(u32 local, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local), "r"(rank));
  return there;
}
INLINE void wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;\n}"
               :: "r"(bar), "r"(parity) : "memory");
}
INLINE void wait_cluster(u32 bar, u32 parity) {       // sees what threads of other CTAs have released
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
               "@!p bra AGAIN;\n}" :: "r"(bar), "r"(parity) : "memory");
}
INLINE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
INLINE Four load(const Four* p) {                     // through L2, not L1
  Four x;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
  return x;
}
INLINE void commit_bulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
INLINE void load_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
extern __shared__ __align__(1024) unsigned char smem[];
"""

WARM = 2                                     # trips of the pass that fills the caches


def kernel(body: str, params: str = "", threads: int = 1024, outside: str = "") -> str:
    """Return a kernel called k that is given `spans` and `out`, and whatever `params` names."""
    more = f", {params}" if params else ""
    return f"""{PRELUDE}{outside}
extern "C" __global__ void __launch_bounds__({threads}, 1) k(u64* spans, u32* out{more}) {{
{body}
}}
"""


def loop(
    body: str, setup: str = "", finish: str = "", params: str = "", threads: int = 1024, outside: str = "",
    drain: str = "",
) -> str:
    """`body` `n` times between two clocks; `setup` before, `finish` behind, `drain` at the end of the timed region."""
    more = f"int n{', ' + params if params else ''}"
    return kernel(
        f"""
  {setup}
  u64 start = 0, end = 0;
  #pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {{
    int trips = pass ? n : {WARM};
    sync_all();
    start = now();
    #pragma unroll 1
    for (int i = 0; i < trips; ++i) {{
{body}
    }}
    {drain}
    end = now();
  }}
  {finish if "note(" in finish else "note(spans, start, end); " + finish}
""",
        more,
        threads,
        outside,
    )


def registers(constraint: str, names: list[str]) -> str:
    """Return the operands of an asm statement: registers("=r", ["a", "b"]) is `"=r"(a), "=r"(b)`."""
    return ", ".join(f'"{constraint}"({name})' for name in names)


def asm(ptx: str, outs: str = "", ins: str = "") -> str:
    """Return a statement that the compiler keeps, and keeps in its place."""
    return f'      asm volatile("{ptx}" : {outs} : {ins} : "memory");'
