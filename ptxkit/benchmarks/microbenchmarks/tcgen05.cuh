INLINE void clear_columns(u32 tmem, u32 word, u32 columns) {   // a warp's lanes, from column 0
  #pragma unroll 1
  for (u32 c = 0; c < columns; ++c)
    asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" :: "r"(tmem + c), "r"(word) : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}
INLINE u32 first_column(u32 tmem) {
  u32 x;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(x) : "r"(tmem) : "memory");
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  return x;
}
