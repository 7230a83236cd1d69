/* wmma: matrices of a warp in fragments of an order of our own (isa/wmma.py).
 *
 * Element e of lane l is number l * (elements of a lane) + e of the matrix, counted along the rows of A, C and D and the columns of B, and
 * modulo the matrix's size.
 */
#include "findings.h"
#include "memory.h"
#include "mma.h"
#include "numerics.h"

enum { MOST = 16 * 16 * 4 }; /* elements of a matrix of bits: 8 x 128 */

/* ---- load and store ----------------------------------------------------------------------------------------------------- */

/* arg: the fragment, the address, the stride in elements */
enum { IN_GENERIC, IN_GLOBAL, IN_SHARED };

typedef struct {
    u64 address;
    u32 bits, shift; /* the element's bits, and where they begin in the register */
    s32 reg;
} Element;

static bool agreed(Warp *w, const Ins *i, u32 lanes) {
    const s64 *m = i->mod;
    s32 address = (s32)m[WMMA_MOVE_REGISTERS], stride = i->arg[address + 1];
    bool same = lanes == FULL;
    for (int l = 1; same && l < LANES; l++)
        same = R32(w, stride)[l] == R32(w, stride)[0] &&
               address_operand(w, i, address, WMMA_MOVE_ADDRESS, l) == address_operand(w, i, address, WMMA_MOVE_ADDRESS, 0);
    if (!same) find(w, i, first_lane(lanes), BAD_LANE, 0, 0, "all 32 lanes must run it, with the same address and stride");
    return same;
}

static u64 base_of(const Warp *w, const Ins *i, bool *shared) {
    const s64 *m = i->mod;
    u64 address = address_operand(w, i, (int)m[WMMA_MOVE_REGISTERS], WMMA_MOVE_ADDRESS, 0);
    *shared = m[WMMA_MOVE_SPACE] == IN_SHARED || (m[WMMA_MOVE_SPACE] == IN_GENERIC && address >> 56 == WINDOW_SHARED);
    return *shared ? (u32)address : address;
}

/* The piece of memory that holds element e of lane l: a byte, or a whole element. */
static Element element_at(const Warp *w, const Ins *i, u64 base, int l, u32 e) {
    const s64 *m = i->mod;
    u32 bits = (u32)m[WMMA_MOVE_BITS], word = bits > 32 ? bits : 32, each = word / bits, of_lane = (u32)m[WMMA_MOVE_REGISTERS] * each;
    u32 rows = (u32)m[WMMA_MOVE_ROWS], columns = (u32)m[WMMA_MOVE_COLUMNS], n = ((u32)l * of_lane + e) % (rows * columns);
    u32 row = m[WMMA_MOVE_IS_B] ? n % rows : n / columns, column = m[WMMA_MOVE_IS_B] ? n / rows : n % columns;
    u64 stride = R32(w, i->arg[m[WMMA_MOVE_REGISTERS] + 1])[0];
    u64 index = m[WMMA_MOVE_BY_COLUMNS] ? column * stride + row : row * stride + column;
    return (Element){.address = base + index * bits / 8, .bits = bits, .shift = bits * (e % each), .reg = i->arg[e / each]};
}

static u32 step_of(u32 bits) { return bits < 8 ? 8 / bits : 1; } /* narrower elements move a byte at a time */

static Outcome op_wmma_load(Warp *w, const Ins *i, u32 lanes) {
    const s64 *m = i->mod;
    bool shared;
    if (!agreed(w, i, lanes)) return NEXT;
    u64 base = base_of(w, i, &shared), address[LANES];
    u32 bits = (u32)m[WMMA_MOVE_BITS], bytes = bits < 8 ? 1 : bits / 8, of_lane = (u32)m[WMMA_MOVE_REGISTERS] * ((bits > 32 ? bits : 32) / bits), place[LANES];
    for (u32 e = 0; e < of_lane; e += step_of(bits)) {
        for (int l = 0; l < LANES; l++) {
            Access a = warp_access(w, i, l, shared ? SPACE_SHARED : SPACE_GLOBAL);
            Element x = element_at(w, i, base, l, e);
            u64 value = 0;
            if (shared)
                shared_read(w, i, &a, (u32)x.address, &value, bytes, bytes);
            else
                global_read(w, i, &a, x.address, &value, bytes, bytes);
            address[l] = x.address, place[l] = (u32)x.address;
            if (bits == 64)
                R64(w, x.reg)[l] = value;
            else
                R32(w, x.reg)[l] = (x.shift ? R32(w, x.reg)[l] : 0) | (u32)value << x.shift;
        }
        if (shared)
            count_wavefronts(w, i, FULL, place, bytes, false);
        else
            count_sectors(w, i, FULL, address, bytes);
    }
    return NEXT;
}

static Outcome op_wmma_store(Warp *w, const Ins *i, u32 lanes) {
    const s64 *m = i->mod;
    bool shared;
    if (!agreed(w, i, lanes)) return NEXT;
    u64 base = base_of(w, i, &shared), address[LANES];
    u32 bits = (u32)m[WMMA_MOVE_BITS], bytes = bits / 8, of_lane = (u32)m[WMMA_MOVE_REGISTERS] * ((bits > 32 ? bits : 32) / bits), place[LANES];
    for (u32 e = 0; e < of_lane; e++) {
        for (int l = 0; l < LANES; l++) {
            Access a = warp_access(w, i, l, shared ? SPACE_SHARED : SPACE_GLOBAL);
            Element x = element_at(w, i, base, l, e);
            u64 value = bits == 64 ? R64(w, x.reg)[l] : R32(w, x.reg)[l] >> x.shift;
            if (shared)
                shared_write(w, i, &a, (u32)x.address, &value, bytes, bytes);
            else
                global_write(w, i, &a, x.address, &value, bytes, bytes);
            address[l] = x.address, place[l] = (u32)x.address;
        }
        if (shared)
            count_wavefronts(w, i, FULL, place, bytes, true);
        else
            count_sectors(w, i, FULL, address, bytes);
    }
    return NEXT;
}

/* ---- mma ---------------------------------------------------------------------------------------------------------------- */

/* arg: fragments of D, A, B, C */

static void unpack(const Warp *w, const s32 *reg, u32 registers, u32 bits, u32 count, u32 *to) {
    u32 each = 32 / bits, mask = bits == 32 ? FULL : (1u << bits) - 1;
    for (u32 n = 0; n < count && n < LANES * registers * each; n++) {
        u32 l = n / (registers * each), e = n % (registers * each);
        to[n] = R32(w, reg[e / each])[l] >> bits * (e % each) & mask;
    }
}

static bool whole(Warp *w, const Ins *i, u32 lanes) {
    if (lanes != FULL) find(w, i, first_lane(lanes), BAD_LANE, 0, 0, "it needs all 32 lanes; %08x take part", lanes);
    return lanes == FULL;
}

static Outcome op_wmma(Warp *w, const Ins *i, u32 lanes) {
    const s64 *m = i->mod;
    static u32 A[MOST], B[MOST], D[MOST]; /* B by columns: [n][k] */
    if (!whole(w, i, lanes)) return NEXT;
    const s32 *d = i->arg, *a = d + m[WMMA_REGISTERS_D], *b = a + m[WMMA_REGISTERS_A], *c = b + m[WMMA_REGISTERS_B];
    u32 rows = (u32)m[WMMA_M], columns = (u32)m[WMMA_N], depth = (u32)m[WMMA_K], bits = (u32)m[WMMA_BITS];
    MatrixType of_d = (MatrixType)m[WMMA_D], of_c = (MatrixType)m[WMMA_C];
    unpack(w, a, (u32)m[WMMA_REGISTERS_A], bits, rows * depth, A);
    unpack(w, b, (u32)m[WMMA_REGISTERS_B], bits, columns * depth, B);
    unpack(w, c, (u32)m[WMMA_REGISTERS_C], of_c == MT_F16 ? 16 : 32, rows * columns, D);
    MatrixType sums = of_d == MT_S32 ? MT_S32 : of_d == MT_F16 && of_c == MT_F16 ? MT_F16 : MT_F32;
    for (u32 n = 0; sums == MT_F32 && of_c == MT_F16 && n < rows * columns; n++) D[n] = float_bits(half_to_float((u16)D[n]));
    multiply_tile(&(Tile){.arch = w->machine->launch->arch, .by_warp = true, .a = (MatrixType)m[WMMA_AB], .b = (MatrixType)m[WMMA_AB], .d = sums, .m = (int)rows,
                          .n = (int)columns, .k = (int)depth, .A = A, .B = B, .C = D, .D = D, .saturate = m[WMMA_SATURATE], .exclusive = m[WMMA_EXCLUSIVE]});
    for (u32 n = 0; sums == MT_F32 && of_d == MT_F16 && n < rows * columns; n++) D[n] = float_to_half(bits_float(D[n]));
    u32 each = of_d == MT_F16 ? 2 : 1, of_lane = (u32)m[WMMA_REGISTERS_D] * each;
    for (u32 n = 0; n < rows * columns; n++) {
        u32 *to = &R32(w, d[n % of_lane / each])[n / of_lane], shift = 16 * (n % each);
        *to = each == 1 ? D[n] : (*to & ~(0xffffu << shift)) | D[n] << shift;
    }
    counter(w, i)->flops += 2ull * rows * columns * depth;
    return NEXT;
}

/* f64 of 8 x 8 x 4: a chain of fused multiply-adds along k; a lane has one element of A and B, and two neighbours of C and D */
static Outcome op_wmma_f64(Warp *w, const Ins *i, u32 lanes) {
    enum { N = 8, K = 4 };
    double result[LANES * 2];
    if (!whole(w, i, lanes)) return NEXT;
    const s32 *d = i->arg, *a = d + 2, *b = a + 1, *c = b + 1;
    for (u32 n = 0; n < LANES * 2; n++) {
        double sum = bits_double(R64(w, c[n % 2])[n / 2]);
        for (u32 k = 0; k < K; k++) sum = fma(bits_double(R64(w, a[0])[n / N * K + k]), bits_double(R64(w, b[0])[n % N * K + k]), sum);
        result[n] = sum;
    }
    for (u32 n = 0; n < LANES * 2; n++) R64(w, d[n % 2])[n / 2] = double_bits(result[n]);
    counter(w, i)->flops += 2ull * N * N * K;
    return NEXT;
}

const HandlerEntry wmma_handlers[] = {
    {"wmma_load", op_wmma_load}, {"wmma_store", op_wmma_store}, {"wmma", op_wmma}, {"wmma_f64", op_wmma_f64}, {0},
};
