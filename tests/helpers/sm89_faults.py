"""Faults planted into the float32 kernels, by the file of kda/backends that each stands in."""

from kernel_faults import faults

FORWARD = faults({"sm89/parts/pairs.cuh": {
    "a token does not read what it wrote": (
        "long", "wrong answer", "pairs[9 * j] = fmaf(q[j], k[j], pairs[9 * j]);", ""
    ),
    "the decay of a row is that of the row before": ("long", "wrong answer", "x *= decay[i];", "x *= decay[i - 1];"),
    "a half takes the decay of the wrong side": (
        "long", "wrong answer", "second ? around.before : around.after", "second ? around.after : around.before"
    ),
}, "sm89/parts/products.cuh": {
    "lo is left out": ("long", "wrong answer", "mma(small, a.lo, b.hi);", ""),
    "hi is cut, and lo as well": ("long", "wrong answer", "+ 0x1000u) & 0xffffe000u", ") & 0xfffff000u"),
}, "sm89/parts/stream.cuh": {
    "the tensor core adds it all up": ("long", "drift", "if (n % 2)  // two", "if (n == COUNT - 1)  // two"),
    "an operand is read before it is there": ("long", "race-read-write", "wait<1>();", "wait<2>();"),
    "operands of the next chunk are those of this": ("long", "wrong answer", "(of_next ? by : 0)", "0"),
}, "sm89/fwd/prepare.cu": {
    "slices are not kept apart": (
        "long", "race-read-write", "    __syncthreads();  // totals are there, and the slice before was multiplied\n",
        ""
    ),
    "decayed rows are read before they are there": (
        "long", "race-write-read", "    __syncthreads();  // decayed rows are there\n", ""
    ),
    "v is read before it is there": ("long", "race-write-read", "  __syncthreads();  // v is there\n", ""),
    "v overwrites A": ("128", "race-read-write", "  __syncthreads();  // A was read: v takes its place\n", ""),
    "rows past the end of a sequence": (
        "long", "out-of-bounds", "const bool has_row = 8 * warp + r < rows;",
        "const bool has_row = 8 * warp + r < rows + 1;"
    ),
    "a head has the bias of the first one": (
        "per head", "wrong answer", "x.dt_bias[head * GATES", "x.dt_bias[0"
    ),
    "tokens of no sequence keep what was there": ("packed", "wrong answer", "o && r < C", "o && r < 0"),
}, "sm89/parts/inverse.cuh": {
    "blocks are joined before they are there": (
        "long", "race-read-write", "  __syncthreads();  // the diagonal blocks are there\n", ""
    ),
    "a joined block with the wrong sign": ("long", "wrong answer", "-1.0f, l);", "1.0f, l);"),
}, "sm89/fwd/chain.cu": {
    "columns of A_qk behind the diagonal are read": ("long", "wrong answer", "0, row / 16}", "1, 3}"),
    "the state is read before it is there": (
        "long", "race-read-write", "    __syncthreads();  // the state is there, v_new was read\n", ""
    ),
    "v_new is read before it is there": (
        "long", "race-read-write", "    __syncthreads();  // v_new is there, the state was read\n", ""
    ),
    "the state does not decay": (
        "long", "wrong answer", "fmaf(S.value[m][n][i], decay[m][i / 2], added", "(S.value[m][n][i] + added"
    ),
}, "sm89/parts/places.cuh": {
    "a sequence begins with the chunk of its neighbour": (
        "packed", "wrong answer", "(i64)cu_seqlens[n + 1] - begin, first_chunk[n]}",
        "(i64)cu_seqlens[n + 1] - begin, n}"
    ),
}})

BACKWARD = faults({"sm89/bwd/chain.cu": {
    "the first do is read before it is there": (
        "bounded", "race-write-read", "  __syncthreads();  // the first do is there\n", ""
    ),
    "dh is read before it is there": (
        "long", "race-read-write", "    __syncthreads();  // dh and A_qk^T @ do are there, dv_new was read\n", ""
    ),
    "dv_new is read before it is there": (
        "long", "race-read-write",
        "    __syncthreads();  // dv_new, the next do and qg^T @ do are there; dh and A_qk^T @ do were read\n", ""
    ),
    "the next do overwrites this": (
        "long", "race-write-read", "of_do.share(s.d_o[1 - now])", "of_do.share(s.d_o[now])"
    ),
    "what w gives back is added": ("long", "wrong answer", "S.value[m][n][i] -= taken", "S.value[m][n][i] += taken"),
    "dh without its scale": ("long", "wrong answer", "x.scale * added[n].sum[i]", "added[n].sum[i]"),
}, "sm89/bwd/wy.cu": {
    "P is read before it is there": ("long", "race-read-write", "    __syncthreads();  // P is there\n", ""),
    "a slice overwrites the one before": (
        "128", "race-read-write", "    __syncthreads();  // the slice before was read\n", ""
    ),
    "dA_kk with the wrong sign": ("long", "wrong answer", "? -1.0f : scale", "? 1.0f : scale"),
    "half of the columns are in db": ("long", "wrong answer", "s.db[0][i] + s.db[1][i]", "2 * s.db[0][i]"),
}, "sm89/bwd/intra.cu": {
    "slices of states are not waited for": (
        "long", "race-read-write", "load(e0 + SLICE), wait<1>();", "load(e0 + SLICE), wait<2>();"
    ),
    "results of a level are read before they are there": (
        "long", "race-read-write", "  __syncthreads();  // results are there\n", ""
    ),
    "matrices overwrite what is read": ("long", "race-read-write", "    __syncthreads();  // and was read\n", ""),
    "decays inside 8 rows gain nothing": ("long", "wrong answer", "sum += pairs[i], dg2[i] += sum;", ";"),
    "decays of other warps' rows are left out": (
        "long", "wrong answer", "if (i > warp) others +=", "if (i > 8) others +="
    ),
    "the last decay gains nothing": ("long", "wrong answer", "float others = through_last;", "float others = 0.0f;"),
    "the diagonal is left out": ("long", "wrong answer", "minus[j] = fmaf(on, qn[j], minus[j]);", ""),
}, "sm89/bwd/norms.cu": {
    "the l2norm is left out": ("long", "wrong answer", "fmaf(-y[i], along, dy[i])", "dy[i]"),
    "a slice of K is left out of the gate of a head": (
        "per head", "wrong answer", "share < SHARES - 1;", "share < SHARES - 2;"
    ),
    "one value head of two": ("long", "wrong answer", "j < group; ++j) dy", "j < 1; ++j) dy"),
}, "sm89/bwd/sums.cu": {
    "the bias of a head has the sums of its rate": ("per head", "wrong answer", "sum += of[1]", "sum += of[0]"),
    "a chunk is left out of the sums": ("long", "wrong answer", "c < all;", "c < all - 1;"),
}})
