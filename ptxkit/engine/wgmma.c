/* wgmma.
 *
 * Each of a warpgroup's four warps computes its 16 rows of D when it issues the instruction, and leaves in the history that its group
 * of wgmmas reads the operands in shared memory, through the async proxy. Until a wait_group covers the group, the registers of D and
 * of A are in flight: to use them is a finding. A register used by anything else since the last wgmma.fence needs another fence.
 */
#include "wgmma.h"
#include "clock.h"
#include "findings.h"
#include "knowledge.h"
#include "memory.h"
#include "mma.h"
#include "registers.h"
#include "sparse.h"

/* ---- what a warp has issued --------------------------------------------------------------------------------------------- */

enum { RECENT = 16 };

typedef struct {
    u64 issued, trace;    /* wgmmas, and a digest of them: all four warps run the same ones */
    s32 last;             /* instruction */
    u32 waited[RECENT];   /* for each group: the last one that the warp had waited for when it issued this one */
} Issued;

static Issued *issued_by(Warp *w) {
    if (!w->wgmma) w->wgmma = calloc(1, sizeof(Issued));
    return w->wgmma;
}

/* ---- operands in shared memory ------------------------------------------------------------------------------------------ */

typedef struct {
    u32 start, leading, stride; /* bytes */
    u32 span;                   /* 16-byte pieces in a row of the swizzle's pattern: 1, 2, 4, 8 */
    bool along_rows;            /* MN-major: a piece holds elements of several rows (columns of B) at one k */
} Operand;

static u64 uniform_descriptor(Warp *w, const Ins *i, s32 reg) {
    const u64 *d = R64(w, reg);
    for (int l = 1; l < LANES; l++)
        if (d[l] != d[0]) {
            find(w, i, l, BAD_DESCRIPTOR, 0, 0, "matrix descriptor 0x%llx in lane %d, 0x%llx in lane 0", (unsigned long long)d[l], l,
                 (unsigned long long)d[0]);
            break;
        }
    return d[0];
}

static bool uniform_predicate(Warp *w, const Ins *i, s32 reg, bool negated) {
    u32 p = *PRED(w, reg) ^ (negated ? FULL : 0);
    if (p && p != FULL) find(w, i, 0, BAD_OPERAND, 0, 0, "scale-d is not the same in all lanes: %08x", p);
    return p & 1;
}

static Operand operand_of(Warp *w, const Ins *i, u64 descriptor, bool along_rows) {
    static const u32 spans[] = {1, 8, 4, 2}; /* layout 0: no swizzle, 1: 128 bytes, 2: 64, 3: 32 */
    Operand o = {.start = (descriptor & 0x3fff) << 4, .leading = (descriptor >> 16 & 0x3fff) << 4, .stride = (descriptor >> 32 & 0x3fff) << 4,
                 .span = spans[descriptor >> 62], .along_rows = along_rows};
    u32 base = descriptor >> 49 & 7, repeat = 128 * o.span;
    if (base)
        find(w, i, 0, BAD_DESCRIPTOR, o.start, 0, "matrix descriptor 0x%llx has base offset %u; only 0 is supported",
             (unsigned long long)descriptor, base);
    else if (o.span > 1 && (o.start & (repeat - 1)) >> 7)
        find(w, i, 0, BAD_DESCRIPTOR, o.start, 0, "a %u-byte swizzle repeats every %u bytes: matrix start 0x%x is not in its first 128 bytes",
             16 * o.span, repeat, o.start);
    return o;
}

/* Where the 16 bytes lie that hold row r (column of B) at k: bytes are counted within the instruction's tile. */
static u32 piece_address(const Operand *o, u32 r, u32 k, u32 bytes) {
    u32 each = 16 / bytes, off;
    if (!o->along_rows)
        off = r % 8 * 16 * o->span + r / 8 * o->stride + k / each * (o->span == 1 ? o->leading : 16);
    else if (o->span > 1)
        off = r % (each * o->span) * bytes + r / (each * o->span) * o->leading + k % 8 * 16 * o->span + k / 8 * o->stride;
    else
        off = r / each * o->stride + k % 8 * 16 + k / 8 * o->leading;
    u32 address = o->start + off;
    return address ^ (address >> 3 & (o->span - 1) << 4);
}

static void spread(const u8 *piece, u32 bytes, u32 *to, u32 step) { /* 16 bytes as one element a word, `step` words apart */
    for (u32 e = 0; e < 16 / bytes; e++) to[e * step] = bytes == 1 ? piece[e] : bytes == 2 ? ((const u16 *)piece)[e] : ((const u32 *)piece)[e];
}

/* Elements [rows][depth] from row `first` on, one a word. */
static void read_operand(Warp *w, const Ins *i, const Access *a, const Operand *o, u32 first, u32 rows, u32 depth, u32 bytes, u32 *to) {
    u32 each = 16 / bytes, row_step = o->along_rows ? each : 1, k_step = o->along_rows ? 1 : each;
    for (u32 r = 0; r < rows; r += row_step)
        for (u32 k = 0; k < depth; k += k_step) {
            _Alignas(16) u8 piece[16];
            shared_read(w, i, a, shared_address(w->cta, piece_address(o, first + r, k, bytes)), piece, sizeof piece, 16);
            spread(piece, bytes, to + r * depth + k, o->along_rows ? depth : 1);
        }
}

/* ---- fragments: lane 4g + t --------------------------------------------------------------------------------------------- */

/* A: a register holds 4/bytes neighbours in k; registers go down 8 rows first, then along k. */
static void gather_a(const Warp *w, const s32 *reg, u32 depth, u32 bytes, u32 *to) {
    u32 each = 4 / bytes;
    for (u32 r = 0; r < depth * 16 / LANES / each; r++)
        for (u32 l = 0; l < LANES; l++)
            for (u32 e = 0; e < each; e++) {
                u32 row = l / 4 + 8 * (r & 1), k = l % 4 * each + e + 4 * each * (r >> 1);
                to[row * depth + k] = R32(w, reg[r])[l] >> 8 * bytes * e & (bytes == 4 ? FULL : (1u << 8 * bytes) - 1);
            }
}

/* D: element n of a lane is at row g + 8 (n >> 1 & 1), column 8 (n >> 2) + 2t + (n & 1); f16 packs two in a register. */
static u32 *d_place(u32 *d, u32 columns, u32 n, u32 l) {
    return &d[(l / 4 + 8 * (n >> 1 & 1)) * columns + 8 * (n >> 2) + 2 * (l % 4) + (n & 1)];
}

static void gather_d(const Warp *w, const s32 *reg, u32 columns, bool packed, u32 *d) {
    for (u32 n = 0; n < columns / 2; n++) {
        const u32 *x = R32(w, reg[packed ? n / 2 : n]);
        for (u32 l = 0; l < LANES; l++) *d_place(d, columns, n, l) = packed ? x[l] >> 16 * (n & 1) & 0xffff : x[l];
    }
}

static void scatter_d(const Warp *w, const s32 *reg, u32 columns, bool packed, u32 *d) {
    for (u32 n = 0; n < columns / 2; n += packed ? 2 : 1) {
        u32 *x = R32(w, reg[packed ? n / 2 : n]);
        for (u32 l = 0; l < LANES; l++) {
            x[l] = *d_place(d, columns, n, l);
            if (packed) x[l] |= *d_place(d, columns, n + 1, l) << 16;
        }
    }
}

/* ---- wgmma.mma_async ---------------------------------------------------------------------------------------------------- */

/* D's registers, A's registers or its descriptor, B's descriptor, scale-d; of a sparse A its metadata */
enum { ROWS = 16, MAX_COLUMNS = 256, MAX_DEPTH = 64 };

static u32 element_bytes(MatrixType t) { return t == MT_TF32 ? 4 : t == MT_F16 || t == MT_BF16 ? 2 : 1; }

static void check_warpgroup(Warp *w, const Ins *i, u32 lanes) {
    s32 first = w->index & ~3;
    if (first + 4 > w->cta->nwarps)
        find(w, i, 0, GROUP_MISUSE, 0, 0, "wgmma needs four warps, of which the first is a multiple of 4; the CTA has %d warps", w->cta->nwarps);
    else if (lanes != FULL)
        find(w, i, 0, BAD_LANE, 0, 0, "wgmma needs all 32 lanes; %08x take part", lanes);
}

static void check_registers(Warp *w, const Ins *i, Registers *r) {
    const s64 *m = i->mod;
    if (!r->fenced) {
        find(w, i, 0, REGISTER_IN_FLIGHT, 0, 0, "the first wgmma runs without a wgmma.fence before it");
        return;
    }
    for (s32 k = 0; k < m[WGMMA_REGISTERS_D] + m[WGMMA_REGISTERS_A]; k++) {
        bool is_a = k >= m[WGMMA_REGISTERS_D];
        const RegisterState *s = &r->state[i->arg[k] / SLOT];
        const Ins *other = s->clock ? &w->machine->program->ins[s->ins] : NULL;
        if (s->touched > r->fence) /* compilers move copies of registers behind the fence; between two wgmmas they do not */
            find(w, i, 0, s->touched > s->taken && s->taken > r->fence ? REGISTER_IN_FLIGHT : REGISTER_UNFENCED, 0, 0,
                 "%s register was used, and no wgmma.fence has run since", is_a ? "an A" : "an accumulator");
        if (!other) continue;
        bool same_shape = other->mod[WGMMA_N] == m[WGMMA_N] && other->mod[WGMMA_DEPTH] == m[WGMMA_DEPTH] && other->mod[WGMMA_D] == m[WGMMA_D];
        if (is_a ? s->use == WRITTEN : s->use == READ || !same_shape) report_register(w, i, s, is_a ? "reads, as A," : "writes");
    }
}

static void take_registers(Warp *w, const Ins *i, Registers *r, u32 clock) {
    s32 nd = (s32)i->mod[WGMMA_REGISTERS_D], na = (s32)i->mod[WGMMA_REGISTERS_A];
    in_flight_add(w, i->arg, nd, BY_WGMMA, WRITTEN, i->index, clock);
    in_flight_add(w, i->arg + nd, na, BY_WGMMA, READ, i->index, clock);
    for (s32 k = 0; k < nd + na; k++) r->state[i->arg[k] / SLOT].taken = w->issued;
}

static void trace(Issued *r, const Ins *i, u64 a, u64 b) {
    const u64 seen[] = {(u64)i->index, a, b};
    for (int k = 0; k < 3; k++) r->trace = (r->trace ^ seen[k]) * 0x9e3779b97f4a7c15u, r->trace ^= r->trace >> 29;
    r->issued++;
    r->last = i->index;
}

Outcome op_wgmma(Warp *w, const Ins *i, u32 lanes) {
    const s64 *m = i->mod;
    s32 nd = (s32)m[WGMMA_REGISTERS_D], na = (s32)m[WGMMA_REGISTERS_A];
    const s32 *d = i->arg, *a = i->arg + nd, *rest = a + (na ? na : 1);
    u32 columns = (u32)m[WGMMA_N], depth = (u32)m[WGMMA_DEPTH], bytes = element_bytes((MatrixType)m[WGMMA_A]), given = m[WGMMA_SPARSE] ? depth / 2 : depth;
    u32 clock = w->async_clock[BY_WGMMA] + 1; /* the open group */
    Registers *r = registers_of(w);
    check_warpgroup(w, i, lanes);
    check_registers(w, i, r);

    u32 A[ROWS * MAX_DEPTH], B[MAX_COLUMNS * MAX_DEPTH], D[ROWS * MAX_COLUMNS];
    Access access = warp_access(w, i, 0, SPACE_SHARED);
    access.async = true;
    access.actor = actor_of(w, BY_WGMMA);
    access.clock = clock;
    u64 a_descriptor = na ? 0 : uniform_descriptor(w, i, a[0]), b_descriptor = uniform_descriptor(w, i, rest[0]);
    if (na)
        gather_a(w, a, given, bytes, A);
    else {
        Operand o = operand_of(w, i, a_descriptor, m[WGMMA_ROWS_A]);
        read_operand(w, i, &access, &o, (w->index & 3) * ROWS, ROWS, given, bytes, A);
    }
    if (m[WGMMA_SPARSE]) {
        u32 half[ROWS * MAX_DEPTH / 2];
        memcpy(half, A, sizeof half);
        memset(A, 0, sizeof A);
        if (!spread_sparse(w, i, &(Metadata){R32(w, rest[2]), (u32)m[WGMMA_FIRST], 8 * bytes, false}, depth, half, A)) return NEXT;
    }
    u64 read = counter(w, i)->shared_read;
    Operand o = operand_of(w, i, b_descriptor, m[WGMMA_ROWS_B]);
    if (!o.along_rows && o.span > 1 && depth * bytes > 16 * o.span)
        find(w, i, 0, BAD_DESCRIPTOR, o.start, 0, "a row of B has %u bytes; a %u-byte swizzle is too narrow for them", depth * bytes, 16 * o.span);
    read_operand(w, i, &access, &o, 0, columns, depth, bytes, B);
    if (w->index & 3) counter(w, i)->shared_read = read; /* the four warps share one reading of B */

    bool add = uniform_predicate(w, i, rest[1], m[WGMMA_NEGATE_SCALE]);
    if (add) gather_d(w, d, columns, m[WGMMA_D] == MT_F16, D);
    multiply_tile(&(Tile){.arch = 90, .wgmma = true, .a = (MatrixType)m[WGMMA_A], .b = (MatrixType)m[WGMMA_B], .d = (MatrixType)m[WGMMA_D], .m = ROWS,
                          .n = (int)columns, .k = (int)depth, .A = A, .B = B, .C = add ? D : NULL, .D = D, .negate_a = m[WGMMA_NEGATE_A],
                          .negate_b = m[WGMMA_NEGATE_B], .saturate = m[WGMMA_SATURATE]});
    scatter_d(w, d, columns, m[WGMMA_D] == MT_F16, D);
    take_registers(w, i, r, clock);
    Issued *issued = issued_by(w);
    trace(issued, i, a_descriptor, b_descriptor);
    issued->waited[clock % RECENT] = w->know.clock[SEEN][access.actor & 0xffff];
    counter(w, i)->flops += 2ull * ROWS * columns * given;
    clock_wgmma(w, i);
    return NEXT;
}

/* ---- fence, commit_group, wait_group ------------------------------------------------------------------------------------ */

static Outcome op_fence(Warp *w, const Ins *i, u32 lanes) {
    check_warpgroup(w, i, lanes);
    registers_fenced(w);
    return NEXT;
}

static Outcome op_commit(Warp *w, const Ins *i, u32 lanes) {
    check_warpgroup(w, i, lanes);
    w->async_clock[BY_WGMMA]++;
    clock_wgmma_commit(w, w->async_clock[BY_WGMMA]);
    machine_event(w->machine);
    return NEXT;
}

/* A group is over when all four warps have issued it; what they had waited for until then is over, too. */
static bool wait_for_peers(Warp *w, u32 group) {
    if ((w->index & ~3) + 4 > w->cta->nwarps) return true;
    Warp *first = w - (w->index & 3);
    for (Warp *peer = first; peer < first + 4; peer++)
        if (peer->live && peer->async_clock[BY_WGMMA] < group) return false;
    for (Warp *peer = first; peer < first + 4; peer++) {
        const Issued *r = peer->wgmma;
        if (r && peer->async_clock[BY_WGMMA] + 1 < group + RECENT) knows_of(&w->know, actor_of(peer, BY_WGMMA), r->waited[group % RECENT]);
    }
    return true;
}

static Outcome op_wait(Warp *w, const Ins *i, u32 lanes) {
    check_warpgroup(w, i, lanes);
    u32 committed = w->async_clock[BY_WGMMA], stay = (u32)i->mod[WGMMA_WAIT_STAY];
    if (committed <= stay) return NEXT;
    if (!wait_for_peers(w, committed - stay)) return BLOCK;
    knows_of(&w->know, actor_of(w, BY_WGMMA), committed - stay);
    in_flight_remove(w, BY_WGMMA, committed - stay);
    clock_wgmma_wait(w, committed - stay);
    return YIELD;
}

/* The first warp of a warpgroup looks at the other three, while all still have their state. */
static void compare_warpgroup(Warp *w) {
    if (w->index & 3 || w->index + 4 > w->cta->nwarps || w->machine->launch->stopped) return;
    const Issued none = {0}, *mine = w->wgmma ? w->wgmma : &none;
    for (s32 n = 1; n < 4; n++) {
        const Issued *other = w[n].wgmma ? w[n].wgmma : &none;
        if (other->issued == mine->issued && other->trace == mine->trace) continue;
        const Ins *i = &w->machine->program->ins[mine->issued >= other->issued ? mine->last : other->last];
        find(w, i, 0, GROUP_MISUSE, 0, 0, "the warps of a warpgroup must run the same wgmmas on the same matrices: warp %d ran %llu, warp %d %llu%s",
             w->index, (unsigned long long)mine->issued, w->index + n, (unsigned long long)other->issued,
             mine->issued == other->issued ? " others" : "");
        return;
    }
}

void wgmma_at_exit(Warp *w) {
    compare_warpgroup(w);
    const Registers *r = w->registers;
    for (s32 k = 0; r && k < r->count && !w->machine->launch->stopped; k++) {
        const RegisterState *s = &r->state[r->flying[k] / SLOT];
        if (s->kind != BY_WGMMA) continue;
        find(w, &w->machine->program->ins[s->ins], 0, GROUP_MISUSE, 0, 0, "the warp ended without a wgmma.wait_group for it");
        break;
    }
    free(w->wgmma);
    w->wgmma = NULL;
}

const HandlerEntry wgmma_handlers[] = {
    {"wgmma", op_wgmma}, {"wgmma_fence", op_fence}, {"wgmma_commit", op_commit}, {"wgmma_wait", op_wait}, {0},
};
