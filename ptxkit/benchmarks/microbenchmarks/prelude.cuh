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
    u64 place = (u64)blockIdx.x * ((blockDim.x + 31) / 32) + WARP;
    spans[2 * place] = start;
    spans[2 * place + 1] = end;
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
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(local), "r"(rank));
  return mapped;
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
