/* Moves between registers, the logic of predicates, and clocks: the scalar handlers that no row of a table describes. */
#include "scalar.h"
#include "clock.h"

/* and, or, xor, not, mov of predicates: arg d, a, b (-1: none) */
static Outcome predicate_logic(Warp *w, const Ins *i, u32 lanes) {
    const u32 a = source_predicate(w, i->arg[1], i->mod[PREDICATES_NEGATE_A]), b = source_predicate(w, i->arg[2], i->mod[PREDICATES_NEGATE_B]);
    const u32 r = joined(a, i->mod[PREDICATES_COMBINE], b);
    set_pred(w, i->arg[0], lanes, i->mod[PREDICATES_NEGATE] ? ~r : r);
    return NEXT;
}

/* lop3.and, lop3.or: arg d (-1: none), p, a, b, c, table, q */
static Outcome lop3_test(Warp *w, const Ins *i, u32 lanes) {
    const u32 *A = R32(w, i->arg[2]), *B = R32(w, i->arg[3]), *C = R32(w, i->arg[4]), *E = R32(w, i->arg[5]);
    u32 d[LANES], bits = 0;
    EVERY_LANE({
        d[l] = look_up(A[l], B[l], C[l], E[l]);
        bits |= (u32)(d[l] != 0) << l;
    })
    set_pred(w, i->arg[1], lanes, joined(bits, i->mod[LOP3_COMBINE], source_predicate(w, i->arg[6], i->mod[LOP3_NEGATED])));
    if (i->arg[0] >= 0) EACH_LANE(lanes, { R32(w, i->arg[0])[l] = d[l]; });
    return NEXT;
}

/* ---- moves -------------------------------------------------------------------------------------------------------------- */

static Outcome mov_b128(Warp *w, const Ins *i, u32 lanes) {
    u64 *D = R64(w, i->arg[0]);
    const u64 *A = R64(w, i->arg[1]);
    EACH_LANE(lanes, {
        const u64 low = A[2 * l];
        const u64 high = A[2 * l + 1];
        D[2 * l] = low;
        D[2 * l + 1] = high;
    });
    return NEXT;
}

/* {a, b} to one register of twice the width and back; an item of -1 goes nowhere. arg: the whole, then its items from the lowest. */
static Outcome pack_b16(Warp *w, const Ins *i, u32 lanes) {
    RESULT(u32, i->arg[0]);
    const u32 *A = R32(w, i->arg[1]), *B = R32(w, i->arg[2]);
    EVERY_LANE(to[l] = (A[l] & 0xffff) | B[l] << 16;)
    MERGE();
    return NEXT;
}
static Outcome pack_b32(Warp *w, const Ins *i, u32 lanes) {
    RESULT(u64, i->arg[0]);
    const u32 *A = R32(w, i->arg[1]), *B = R32(w, i->arg[2]);
    EVERY_LANE(to[l] = A[l] | (u64)B[l] << 32;)
    MERGE();
    return NEXT;
}
static Outcome unpack_b16(Warp *w, const Ins *i, u32 lanes) {
    const u32 *A = R32(w, i->arg[0]);
    for (int k = 0; k < 2; k++) {
        if (i->arg[1 + k] < 0) continue;
        RESULT(u32, i->arg[1 + k]);
        EVERY_LANE(to[l] = A[l] >> 16 * k & 0xffff;)
        MERGE();
    }
    return NEXT;
}
static Outcome unpack_b32(Warp *w, const Ins *i, u32 lanes) {
    const u64 *A = R64(w, i->arg[0]);
    for (int k = 0; k < 2; k++) {
        if (i->arg[1 + k] < 0) continue;
        RESULT(u32, i->arg[1 + k]);
        EVERY_LANE(to[l] = (u32)(A[l] >> 32 * k);)
        MERGE();
    }
    return NEXT;
}
/* Returns the word of an item in a lane; pack_any and unpack_any take items of any size. */
static inline u8 *word_of(const Warp *w, s32 offset, s64 bytes, int l) {
    return w->regs + offset + l * (bytes > 8 ? 16 : bytes > 4 ? 8 : 4);
}
static Outcome pack_any(Warp *w, const Ins *i, u32 lanes) {
    const s64 size = i->mod[PACK_BYTES], count = i->mod[PACK_COUNT];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        const int l = first_lane(rest);
        u64 whole[2] = {0, 0};
        for (s64 k = 0; k < count; k++) memcpy((u8 *)whole + k * size, word_of(w, i->arg[1 + k], size, l), size);
        memcpy(word_of(w, i->arg[0], size * count, l), whole, size * count < 4 ? 4 : size * count);
    }
    return NEXT;
}
static Outcome unpack_any(Warp *w, const Ins *i, u32 lanes) {
    const s64 size = i->mod[PACK_BYTES], count = i->mod[PACK_COUNT];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        const int l = first_lane(rest);
        u8 whole[16];
        memcpy(whole, word_of(w, i->arg[0], size * count, l), size * count);
        for (s64 k = 0; k < count; k++) {
            u64 item[2] = {0, 0};
            memcpy(item, whole + k * size, size);
            if (i->arg[1 + k] >= 0) memcpy(word_of(w, i->arg[1 + k], size, l), item, size < 4 ? 4 : size);
        }
    }
    return NEXT;
}

/* %clock and the like, without a clock in instructions: arg d */
static Outcome read_clock(Warp *w, const Ins *i, u32 lanes) {
    const u64 clocks = w->time ? (u64)w->time->start : w->machine->ran;
    const u64 now = (w->time && i->mod[CLOCK_NANOSECONDS] ? (u64)(w->time->start / w->machine->time->p->gigahertz) : clocks) >> i->mod[CLOCK_SHIFT];
    if (i->mod[CLOCK_WIDE])
        EACH_LANE(lanes, { R64(w, i->arg[0])[l] = now; });
    else
        EACH_LANE(lanes, { R32(w, i->arg[0])[l] = (u32)now; });
    return NEXT;
}

/* An instruction on registers wider than its types. arg: the wide destination and its stand-in, the wide source and its stand-in (-1: as it
 * is), then the instruction's own; mod: the instruction's own follow. */
static Outcome through_wide_registers(Warp *w, const Ins *i, u32 lanes) {
    Ins inner = *i;
    inner.arg = i->arg + 4;
    inner.mod = i->mod + THROUGH_WIDE_FIELDS;
    if (i->arg[2] >= 0) {
        const u64 *from = R64(w, i->arg[2]);
        u32 *to = R32(w, i->arg[3]);
        EVERY_LANE({ to[l] = (u32)from[l]; })
    }
    const Outcome o = scalar_handlers[i->mod[THROUGH_WIDE_HANDLER]].run(w, &inner, lanes);
    if (i->arg[0] >= 0) {
        const u32 *from = R32(w, i->arg[1]);
        const bool is_signed = i->mod[THROUGH_WIDE_SIGNED];
        EACH_LANE(lanes, { R64(w, i->arg[0])[l] = is_signed ? (u64)(s64)(s32)from[l] : from[l]; });
    }
    return o;
}

const HandlerEntry moves_handlers[] = {
    {"predicate_logic", predicate_logic}, {"lop3_test", lop3_test}, {"mov_b128", mov_b128}, {"pack_b16", pack_b16}, {"pack_b32", pack_b32},
    {"unpack_b16", unpack_b16}, {"unpack_b32", unpack_b32}, {"pack_any", pack_any}, {"unpack_any", unpack_any}, {"read_clock", read_clock},
    {"through_wide_registers", through_wide_registers}, {0},
};
