/* Fragments of matrices in a warp's registers: ldmatrix, stmatrix, movmatrix, mma.sync. Lane l = 4g + t throughout.
 *
 * mma.sync: a register holds 32/bits neighbours in k of A or B. Registers of A go down 8 rows first (where m is 16), then along k;
 * those of B along k, column g. Of a sparse A the fragment holds half of it, which metadata puts in its place. Element n of C and D is at row g + 8 (n >> 1), column 2t + (n & 1); f16 packs two in a register.
 */
#include "findings.h"
#include "memory.h"
#include "mma.h"
#include "sparse.h"
#include "numerics.h"

#include <math.h>

static bool whole_warp(Warp *w, const Ins *i, u32 lanes) {
    if (lanes != FULL) find(w, i, first_lane(lanes), BAD_LANE, 0, 0, "it needs all 32 lanes; %08x take part", lanes);
    return lanes == FULL;
}

/* ---- ldmatrix, stmatrix ------------------------------------------------------------------------------------------------- */

/* operands: the registers, then the address */
typedef enum { B16, B16_TRANSPOSED, B8_LOAD, B8_STORE } Form;
enum { ROW = 16 }; /* bytes */

/* Byte b of register r of lane l. Rows are counted through all matrices: lane n gives the address of row n. */
static u8 *fragment_byte(u8 (*rows)[ROW], Form form, int r, int l, int b) {
    int g = l >> 2, t = l & 3;
    switch (form) {
    case B16: return &rows[8 * r + g][4 * t + b];
    case B16_TRANSPOSED: return &rows[8 * r + 2 * t + (b >> 1)][2 * g + (b & 1)];
    case B8_LOAD: return &rows[16 * (r >> 1) + 4 * t + b][g + 8 * (r & 1)];       /* 16 rows of 16 in two registers */
    case B8_STORE: return &rows[8 * r + 2 * t + (b & 1)][g + 8 * (b >> 1)];       /* 8 rows of 16 in one */
    }
    __builtin_unreachable();
}

/* The lanes' 32-bit shared addresses; false after a finding. */
static bool row_addresses(Warp *w, const Ins *i, u32 *address) {
    for (int l = 0; l < i->mod[MATRIX_MOVE_ROWS]; l++) {
        u64 operand = address_operand(w, i, (int)i->mod[MATRIX_MOVE_COUNT], MATRIX_MOVE_ROW, l);
        if (i->mod[MATRIX_MOVE_ROW + PLACE_GENERIC] && operand >> 56 != WINDOW_SHARED) {
            find(w, i, l, OUT_OF_BOUNDS, operand, ROW, "generic address 0x%llx is not in shared memory", (unsigned long long)operand);
            return false;
        }
        address[l] = (u32)operand;
    }
    return true;
}

/* Sixteen packed elements of a row become a byte each; padding follows them. */
static void unpack_row(u8 *row, u32 bits) {
    u8 packed[ROW + sizeof(u32)] = {0};
    memcpy(packed, row, 2 * bits);
    for (u32 e = 0; e < ROW; e++) {
        u32 word;
        memcpy(&word, packed + e * bits / 8, sizeof word);
        row[e] = (u8)(word >> e * bits % 8 & ((1u << bits) - 1));
    }
}

static u32 first_lanes(s64 n) { return n == LANES ? FULL : (1u << n) - 1; }

static Outcome op_ldmatrix(Warp *w, const Ins *i, u32 lanes) {
    u32 address[LANES];
    u8 rows[LANES][ROW];
    if (!whole_warp(w, i, lanes) || !row_addresses(w, i, address)) return NEXT;
    for (int l = 0; l < i->mod[MATRIX_MOVE_ROWS]; l++) {
        Access a = warp_access(w, i, l, SPACE_SHARED);
        u32 bits = (u32)i->mod[MATRIX_MOVE_BITS];
        shared_read(w, i, &a, address[l], rows[l], bits ? 2 * bits : ROW, ROW);
        if (bits) unpack_row(rows[l], bits);
    }
    count_wavefronts(w, i, first_lanes(i->mod[MATRIX_MOVE_ROWS]), address, ROW, false);
    for (int r = 0; r < i->mod[MATRIX_MOVE_COUNT]; r++)
        for (int l = 0; l < LANES; l++) {
            u8 value[4];
            for (int b = 0; b < 4; b++) value[b] = *fragment_byte(rows, (Form)i->mod[MATRIX_MOVE_FORM], r, l, b);
            if (i->arg[r] >= 0) memcpy(&R32(w, i->arg[r])[l], value, 4);
        }
    return NEXT;
}

static Outcome op_stmatrix(Warp *w, const Ins *i, u32 lanes) {
    u32 address[LANES];
    u8 rows[LANES][ROW];
    if (!whole_warp(w, i, lanes) || !row_addresses(w, i, address)) return NEXT;
    for (int r = 0; r < i->mod[MATRIX_MOVE_COUNT]; r++)
        for (int l = 0; l < LANES; l++)
            for (int b = 0; b < 4; b++) *fragment_byte(rows, (Form)i->mod[MATRIX_MOVE_FORM], r, l, b) = (u8)(R32(w, i->arg[r])[l] >> 8 * b);
    for (int l = 0; l < i->mod[MATRIX_MOVE_ROWS]; l++) {
        Access a = warp_access(w, i, l, SPACE_SHARED);
        shared_write(w, i, &a, address[l], rows[l], ROW, ROW);
    }
    count_wavefronts(w, i, first_lanes(i->mod[MATRIX_MOVE_ROWS]), address, ROW, true);
    return NEXT;
}

/* d, a: an 8x8 matrix of 16 bits, transposed */
static Outcome op_movmatrix(Warp *w, const Ins *i, u32 lanes) {
    u8 rows[8][ROW];
    if (!whole_warp(w, i, lanes)) return NEXT;
    for (int l = 0; l < LANES; l++) memcpy(&rows[l >> 2][4 * (l & 3)], &R32(w, i->arg[1])[l], 4);
    for (int l = 0; l < LANES; l++) {
        u8 *to = (u8 *)&R32(w, i->arg[0])[l];
        for (int b = 0; b < 4; b++) to[b] = *fragment_byte(rows, B16_TRANSPOSED, 0, l, b);
    }
    return NEXT;
}

/* ---- mma.sync ----------------------------------------------------------------------------------------------------------- */

/* operands: registers of D, A, B, C; then metadata, and factors */
enum { COLUMNS = 8, MAX_ROWS = 16, MAX_DEPTH = 256, MAX_SCALES = 4 };

/* to[row][k] of a matrix of 8 or 16 rows (columns of B); elements of 4 and 6 bits may lie `shift` bits up in containers of 8 */
static void gather(const Warp *w, const s32 *reg, s32 registers, u32 down, u32 depth, u32 bits, u32 shift, u32 *to) {
    u32 each = 32 / bits, mask = bits == 32 ? FULL : (1u << bits) - 1;
    for (u32 r = 0; r < (u32)registers; r++)
        for (u32 l = 0; l < LANES; l++)
            for (u32 e = 0; e < each; e++)
                to[(l / 4 + 8 * (r % down)) * depth + l % 4 * each + e + 4 * each * (r / down)] = (R32(w, reg[r])[l] >> bits * e & mask) >> shift;
}

/* Factors of A (rows g and g + 8 in the lower and the upper thread of a pair) or of B (column g in one thread of four). arg: the register
 * with them, byte, thread. */
static bool gather_scales(Warp *w, const Ins *i, const s32 *arg, u32 count, bool of_a, u32 *to) {
    u32 byte = R32(w, arg[1])[0] & 0xffff, thread = R32(w, arg[2])[0] & 0xffff;
    if (byte % count || byte + count > MAX_SCALES || thread >= (of_a ? 2 : 4)) {
        find(w, i, 0, BAD_OPERAND, 0, 0, "byte %u and thread %u select no factors of %c; byte is a multiple of %u below 4, thread below %d", byte, thread,
             of_a ? 'A' : 'B', count, of_a ? 2 : 4);
        return false;
    }
    for (u32 row = 0; row < (of_a ? MAX_ROWS : COLUMNS); row++) {
        u32 word = R32(w, arg[0])[of_a ? row % 8 * 4 + 2 * thread + row / 8 : row * 4 + thread];
        for (u32 e = 0; e < count; e++) to[row * count + e] = word >> 8 * (byte + e) & 0xff;
    }
    return true;
}

static u32 *accumulator(const Warp *w, const s32 *reg, u32 n, u32 l, bool packed, u32 *shift) {
    *shift = packed ? 16 * (n & 1) : 0;
    return &R32(w, reg[packed ? n / 2 : n])[l];
}

static Outcome op_mma(Warp *w, const Ins *i, u32 lanes) {
    const s64 *m = i->mod;
    u32 A[MAX_ROWS * MAX_DEPTH], B[COLUMNS * MAX_DEPTH], D[MAX_ROWS * COLUMNS], shift;
    u32 scales_a[MAX_ROWS * MAX_SCALES], scales_b[COLUMNS * MAX_SCALES];
    u32 rows = (u32)m[FRAGMENTS_ROWS], depth = (u32)m[FRAGMENTS_DEPTH], bits = (u32)m[MMA_BITS], count = (u32)m[MMA_SCALES];
    bool packed = m[FRAGMENTS_D] == MT_F16;
    const s32 *d = i->arg, *a = d + m[FRAGMENTS_REGISTERS_D], *b = a + m[FRAGMENTS_REGISTERS_A], *c = b + m[FRAGMENTS_REGISTERS_B];
    if (!whole_warp(w, i, lanes)) return NEXT;
    gather(w, a, (s32)m[FRAGMENTS_REGISTERS_A], rows / 8, m[MMA_SPARSE] ? depth / 2 : depth, bits, (u32)m[MMA_SHIFT_A], A);
    if (m[MMA_SPARSE]) {
        u32 half[MAX_ROWS * MAX_DEPTH / 2];
        memcpy(half, A, sizeof half);
        memset(A, 0, sizeof A);
        Metadata metadata = {R32(w, c[m[FRAGMENTS_REGISTERS_D]]), (u32)m[MMA_FIRST], bits, m[MMA_SPARSE] == SPARSE_ORDERED};
        if (!spread_sparse(w, i, &metadata, depth, half, A)) return NEXT;
    }
    gather(w, b, (s32)m[FRAGMENTS_REGISTERS_B], 1, depth, bits, (u32)m[MMA_SHIFT_B], B);
    const s32 *scale = c + m[FRAGMENTS_REGISTERS_D] + (m[MMA_SPARSE] ? 1 : 0);
    Scales scales = {.type = (MatrixType)m[MMA_SCALE_TYPE], .block = count ? (int)(depth / count) : 0, .a = scales_a, .b = scales_b};
    if (count && !(gather_scales(w, i, scale, count, true, scales_a) && gather_scales(w, i, scale + 3, count, false, scales_b))) return NEXT;
    for (u32 n = 0; n < rows / 4; n++)
        for (u32 l = 0; l < LANES; l++) {
            u32 x = *accumulator(w, c, n, l, packed, &shift) >> shift;
            D[(l / 4 + 8 * (n >> 1)) * COLUMNS + 2 * (l % 4) + (n & 1)] = packed ? x & 0xffff : x;
        }
    multiply_tile(&(Tile){.arch = w->machine->launch->arch, .by_warp = true, .a = (MatrixType)m[FRAGMENTS_A], .b = (MatrixType)m[FRAGMENTS_B], .d = (MatrixType)m[FRAGMENTS_D],
                          .m = (int)rows, .n = COLUMNS, .k = (int)depth, .A = A, .B = B, .C = D, .D = D, .saturate = m[FRAGMENTS_SATURATE],
                          .exclusive = m[MMA_EXCLUSIVE], .scales = count ? &scales : NULL});
    for (u32 n = 0; n < rows / 4; n++)
        for (u32 l = 0; l < LANES; l++) {
            u32 *to = accumulator(w, d, n, l, packed, &shift), value = D[(l / 4 + 8 * (n >> 1)) * COLUMNS + 2 * (l % 4) + (n & 1)];
            *to = packed ? (*to & ~(0xffffu << shift)) | value << shift : value;
        }
    counter(w, i)->flops += 2ull * rows * COLUMNS * (m[MMA_SPARSE] ? depth / 2 : depth);
    return NEXT;
}

/* f64: a chain of fused multiply-adds along k; one element in each 64-bit register */
static Outcome op_mma_f64(Warp *w, const Ins *i, u32 lanes) {
    const s64 *m = i->mod;
    double A[MAX_ROWS][MAX_DEPTH], B[COLUMNS][MAX_DEPTH], D[MAX_ROWS][COLUMNS];
    u32 rows = (u32)m[FRAGMENTS_ROWS], depth = (u32)m[FRAGMENTS_DEPTH], down = rows / 8;
    const s32 *d = i->arg, *a = d + m[FRAGMENTS_REGISTERS_D], *b = a + m[FRAGMENTS_REGISTERS_A], *c = b + m[FRAGMENTS_REGISTERS_B];
    if (!whole_warp(w, i, lanes)) return NEXT;
    for (u32 l = 0; l < LANES; l++) {
        for (u32 r = 0; r < m[FRAGMENTS_REGISTERS_A]; r++) A[l / 4 + 8 * (r % down)][l % 4 + 4 * (r / down)] = bits_double(R64(w, a[r])[l]);
        for (u32 r = 0; r < m[FRAGMENTS_REGISTERS_B]; r++) B[l / 4][l % 4 + 4 * r] = bits_double(R64(w, b[r])[l]);
        for (u32 n = 0; n < rows / 4; n++) D[l / 4 + 8 * (n >> 1)][2 * (l % 4) + (n & 1)] = bits_double(R64(w, c[n])[l]);
    }
    for (u32 row = 0; row < rows; row++)
        for (u32 k = 0; k < depth; k++)
            for (u32 n = 0; n < COLUMNS; n++) D[row][n] = fma(A[row][k], B[n][k], D[row][n]);
    for (u32 l = 0; l < LANES; l++)
        for (u32 n = 0; n < rows / 4; n++) R64(w, d[n])[l] = double_bits(D[l / 4 + 8 * (n >> 1)][2 * (l % 4) + (n & 1)]);
    counter(w, i)->flops += 2ull * rows * COLUMNS * depth;
    return NEXT;
}

const HandlerEntry matrix_handlers[] = {
    {"ldmatrix", op_ldmatrix}, {"stmatrix", op_stmatrix}, {"movmatrix", op_movmatrix}, {"mma", op_mma}, {"mma_f64", op_mma_f64}, {0},
};
