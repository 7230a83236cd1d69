/* What the lanes of a warp do together: shfl, vote, match, redux, elect; and activemask.
 *
 * A .sync handler runs once for the lanes that came with the same mask; lanes of the mask that have exited are not among them.
 */
#include "findings.h"
#include "numerics.h"

/* ---- shfl --------------------------------------------------------------------------------------------------------------- */

enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };

/* The lane that lane l reads, and whether it lies in l's segment; outside, a lane reads itself. */
static int shfl_source(int mode, int l, u32 b, u32 c, bool *inside) {
    int by = b & 31, clamp = c & 31, segment = c >> 8 & 31;
    int lowest = l & segment, highest = lowest | (clamp & ~segment), from;
    switch (mode) {
    case SHFL_UP: from = l - by, *inside = from >= highest; break;
    case SHFL_DOWN: from = l + by, *inside = from <= highest; break;
    case SHFL_BFLY: from = l ^ by, *inside = from <= highest; break;
    default: from = lowest | (by & ~segment), *inside = from <= highest;
    }
    return *inside ? from : l;
}

/* d, p, a, b, c, mask */
static Outcome op_shfl(Warp *w, const Ins *i, u32 lanes) {
    const u32 *b = R32(w, i->arg[3]), *c = R32(w, i->arg[4]);
    u32 a[LANES], bits = 0;
    memcpy(a, R32(w, i->arg[2]), sizeof a); /* d may be a */
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        bool inside;
        int from = shfl_source((int)i->mod[SHFL_MODE], l, b[l], c[l], &inside);
        if (!lane_in(lanes, from))
            find(w, i, l, BAD_LANE, 0, 0, "lane %d reads lane %d, which takes no part in it (lanes %08x do)", l, from, lanes);
        if (i->arg[0] >= 0) R32(w, i->arg[0])[l] = a[from];
        bits |= (u32)inside << l;
    }
    set_pred(w, i->arg[1], lanes, bits);
    return NEXT;
}

/* ---- vote, elect, activemask -------------------------------------------------------------------------------------------- */

enum { VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT };

/* d, a, mask */
static Outcome op_vote(Warp *w, const Ins *i, u32 lanes) {
    u32 votes = (i->mod[VOTE_NEGATED] ? ~*PRED(w, i->arg[1]) : *PRED(w, i->arg[1])) & lanes;
    bool all = votes == lanes;
    if (i->mod[VOTE_MODE] == VOTE_BALLOT) {
        if (i->arg[0] >= 0) EACH_LANE(lanes, { R32(w, i->arg[0])[l] = votes; });
        return NEXT;
    }
    bool answer = i->mod[VOTE_MODE] == VOTE_ALL ? all : i->mod[VOTE_MODE] == VOTE_ANY ? votes != 0 : all || !votes;
    set_pred(w, i->arg[0], lanes, answer ? FULL : 0);
    return NEXT;
}

/* d, p, mask: the lowest lane is the elected one */
static Outcome op_elect(Warp *w, const Ins *i, u32 lanes) {
    u32 elected = (u32)first_lane(lanes);
    if (i->arg[0] >= 0) EACH_LANE(lanes, { R32(w, i->arg[0])[l] = elected; });
    set_pred(w, i->arg[1], lanes, 1u << elected);
    return NEXT;
}

static Outcome op_activemask(Warp *w, const Ins *i, u32 lanes) {
    EACH_LANE(lanes, { R32(w, i->arg[0])[l] = lanes; });
    return NEXT;
}

/* ---- match -------------------------------------------------------------------------------------------------------------- */

static u64 lane_value(const Warp *w, s32 reg, bool wide, int l) { return wide ? R64(w, reg)[l] : R32(w, reg)[l]; }

/* d, p, a, mask */
static Outcome op_match(Warp *w, const Ins *i, u32 lanes) {
    u32 equal[LANES];
    bool all = true;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        equal[l] = 0;
        for (u32 others = lanes; others; others &= others - 1) {
            int o = first_lane(others);
            if (lane_value(w, i->arg[2], i->mod[MATCH_WIDE], o) == lane_value(w, i->arg[2], i->mod[MATCH_WIDE], l)) equal[l] |= 1u << o;
        }
        all = all && equal[l] == lanes;
    }
    if (i->arg[0] >= 0) EACH_LANE(lanes, { R32(w, i->arg[0])[l] = !i->mod[MATCH_ALL] || all ? equal[l] : 0; });
    set_pred(w, i->arg[1], lanes, all ? FULL : 0);
    return NEXT;
}

/* ---- redux -------------------------------------------------------------------------------------------------------------- */

enum { REDUX_ADD, REDUX_MIN, REDUX_MAX, REDUX_AND, REDUX_OR, REDUX_XOR };
enum { REDUX_U32, REDUX_S32, REDUX_F32 };

static u32 reduce_integer(int op, bool is_signed, u32 a, u32 b) {
    bool less = is_signed ? (s32)b < (s32)a : b < a;
    switch (op) {
    case REDUX_ADD: return a + b;
    case REDUX_MIN: return less ? b : a;
    case REDUX_MAX: return less ? a : b;
    case REDUX_AND: return a & b;
    case REDUX_OR: return a | b;
    default: return a ^ b;
    }
}

static bool is_nan(u32 x) { return (x & 0x7fffffff) > 0x7f800000; }

/* f32 as integers of the same order, -0 below +0 */
static s32 ordered(u32 x) { return x >> 31 ? (s32)~(x & 0x7fffffff) : (s32)x; }

static u32 reduce_float(int op, bool propagate_nan, u32 a, u32 b) {
    if (is_nan(a) || is_nan(b)) return propagate_nan || (is_nan(a) && is_nan(b)) ? 0x7fffffff : is_nan(a) ? b : a;
    return (op == REDUX_MIN) == (ordered(b) < ordered(a)) ? b : a;
}

/* d, a, mask */
static Outcome op_redux(Warp *w, const Ins *i, u32 lanes) {
    const u32 *a = R32(w, i->arg[1]);
    u32 ignored = i->mod[REDUX_ABS] ? 0x80000000u : 0, first = a[first_lane(lanes)] & ~ignored;
    u32 result = i->mod[REDUX_TYPE] == REDUX_F32 && is_nan(first) ? 0x7fffffff : first;
    for (u32 rest = lanes & (lanes - 1); rest; rest &= rest - 1) {
        u32 next = a[first_lane(rest)] & ~ignored;
        result = i->mod[REDUX_TYPE] == REDUX_F32 ? reduce_float((int)i->mod[REDUX_OP], i->mod[REDUX_NAN], result, next)
                                        : reduce_integer((int)i->mod[REDUX_OP], i->mod[REDUX_TYPE] == REDUX_S32, result, next);
    }
    if (i->arg[0] >= 0) EACH_LANE(lanes, { R32(w, i->arg[0])[l] = result; });
    return NEXT;
}

const HandlerEntry collectives_handlers[] = {
    {"shfl", op_shfl},   {"vote", op_vote},   {"elect", op_elect}, {"activemask", op_activemask},
    {"match", op_match}, {"redux", op_redux}, {0},
};
