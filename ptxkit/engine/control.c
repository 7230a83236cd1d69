/* Control flow: which lanes of a warp run where.
 *
 * Lanes that a branch parts become splits of their warp; they meet again at the branch's immediate post-dominator (a Join). All splits
 * of a warp make progress, so lanes may wait for each other.
 */
#include "control.h"
#include "clock.h"
#include "findings.h"

/* ---- splits and joins --------------------------------------------------------------------------------------------------- */

s32 new_join(Warp *w, s32 pc, u32 expected, s32 outer) {
    s32 j = 0;
    while (j < w->njoins && w->join[j].open) j++;
    if (j == w->njoins) {
        w->njoins = w->njoins ? 2 * w->njoins : 8;
        w->join = realloc(w->join, (size_t)w->njoins * sizeof *w->join);
        for (s32 k = j; k < w->njoins; k++) w->join[k].open = false;
    }
    w->join[j] = (Join){.pc = pc, .lands = pc, .outer = outer, .expected = expected, .open = true};
    return j;
}

static void remove_split(Warp *w, s32 k) {
    w->split[k] = w->split[--w->nsplits];
    if (w->current >= w->nsplits) w->current = 0;
}

void add_split(Warp *w, s32 pc, u32 lanes, s32 join) {
    w->split[w->nsplits++] = (Split){.pc = pc, .lanes = lanes, .join = join};
}

/* The current split keeps these lanes alone; the others, for which the guard of its instruction does not hold, go on. */
void leave_others(Warp *w, u32 lanes) {
    Split *s = current_split(w);
    u32 others = s->lanes & ~lanes;
    s->lanes &= lanes;
    if (!others) return;
    add_split(w, s->pc + 1, others, s->join);
    settle(w, w->nsplits - 1);
}

void free_call(Call *c) {
    if (!c) return;
    free(c->registers);
    free(c->local);
    free(c);
}

/* A join whose lanes have all come, or exited, lets them go on together. */
static void complete_join(Warp *w, s32 j) {
    while (j >= 0) {
        Join *joint = &w->join[j];
        u32 lanes = joint->arrived & w->live;
        if (!joint->open || (joint->expected & w->live) != lanes) return;
        joint->open = false;
        free_call(joint->call);
        s32 outer = joint->outer;
        if (lanes && outer >= 0 && w->join[outer].pc == joint->lands)
            w->join[outer].arrived |= lanes;
        else if (lanes) {
            add_split(w, joint->lands, lanes, outer);
            return;
        }
        j = outer;
    }
}

void arrive(Warp *w, s32 k) {
    const Split *s = &w->split[k];
    s32 j = s->join;
    w->join[j].arrived |= s->lanes;
    remove_split(w, k);
    complete_join(w, j);
}

void go_to(Warp *w, s32 pc) {
    Split *s = current_split(w);
    s->pc = pc;
    s->ticket = 0;
    s->blocked = s->gathering = false;
    settle(w, w->current);
}

/* Lanes of the current split have returned from their call; the others go on. */
void return_lanes(Warp *w, u32 lanes) {
    Split *s = current_split(w);
    s32 j = s->join;
    w->join[j].arrived |= lanes;
    s->lanes &= ~lanes;
    s->ticket = 0;
    s->blocked = s->gathering = false;
    if (s->lanes)
        s->pc++;
    else
        remove_split(w, w->current);
    complete_join(w, j);
}

/* The join where the lanes of a split meet again that part at a branch. */
static s32 join_of(Warp *w, const Ins *i, const Split *s) {
    const bool met = s->join >= 0 && w->join[s->join].pc == i->join;
    return met || i->join < 0 ? s->join : new_join(w, i->join, s->lanes, s->join);
}

/* The split that takes a branch may have moved in the array: it is the one with these lanes. */
static Outcome branched(Warp *w, const Ins *i, u32 lanes, s32 target) {
    for (s32 k = 0; k < w->nsplits; k++)
        if (w->split[k].lanes == lanes && w->split[k].pc == i->index) w->current = k;
    go_to(w, target);
    return JUMPED;
}

/* bra: the lanes that come here take it. */
static Outcome op_bra(Warp *w, const Ins *i, u32 lanes) {
    Split *s = current_split(w);
    u32 stay = s->lanes & ~lanes;
    s32 target = (s32)i->mod[BRA_TARGET];
    if (!stay) {
        go_to(w, target);
        return JUMPED;
    }
    s32 join = s->join = join_of(w, i, s), fall = s->pc + 1;
    s->lanes = lanes;
    add_split(w, fall, stay, join);
    settle(w, w->nsplits - 1);
    return branched(w, i, lanes, target);
}

/* brx.idx: operand 0 is the index. */
static Outcome op_brx(Warp *w, const Ins *i, u32 lanes) {
    Split *s = current_split(w);
    const u32 *index = R32(w, i->arg[0]);
    u32 rest = lanes, at_first = 0, first = index[first_lane(lanes)];
    for (; rest; rest &= rest - 1)
        if (index[first_lane(rest)] == first) at_first |= 1u << first_lane(rest);
    if (first >= (u32)i->mod[BRX_COUNT]) {
        find(w, i, first_lane(lanes), BAD_OPERAND, 0, 0, "branch index %u of %d targets", first, (int)i->mod[BRX_COUNT]);
        stop(w->machine);
        return YIELD;
    }
    s32 target = (s32)i->mod[BRX_FIELDS + first];
    u32 stay = s->lanes & ~at_first;
    if (!stay) {
        go_to(w, target);
        return JUMPED;
    }
    /* Lanes with another index run the same instruction again; lanes that the guard excludes go on behind it. */
    s32 join = s->join = join_of(w, i, s);
    u32 again = lanes & ~at_first, off = s->lanes & ~lanes;
    s->lanes = at_first;
    if (again) add_split(w, i->index, again, join);
    if (off) {
        add_split(w, i->index + 1, off, join);
        settle(w, w->nsplits - 1);
    }
    return branched(w, i, at_first, target);
}

static Outcome op_exit(Warp *w, const Ins *i, u32 lanes) {
    (void)i;
    Split *s = current_split(w);
    w->live &= ~lanes;
    s->lanes &= ~lanes;
    s32 join = s->join;
    if (!s->lanes)
        remove_split(w, w->current);
    else
        s->pc++;
    complete_join(w, join);
    for (s32 j = 0; j < w->njoins; j++) complete_join(w, j);
    for (s32 k = 0; k < w->nsplits; k++) w->split[k].gathering = false;
    machine_event(w->machine);
    return JUMPED;
}

static Outcome op_nop(Warp *w, const Ins *i, u32 lanes) {
    (void)w, (void)i, (void)lanes;
    return NEXT;
}

static Outcome op_nanosleep(Warp *w, const Ins *i, u32 lanes) {
    (void)i, (void)lanes;
    enum { NANOSECONDS = 100 }; /* whatever it asks for: it may sleep for less */
    if (w->time) wake_at(w, w->time->start + NANOSECONDS * w->machine->time->p->gigahertz);
    return YIELD;
}

static Outcome op_trap(Warp *w, const Ins *i, u32 lanes) {
    find(w, i, first_lane(lanes), BAD_OPERAND, 0, 0, "the program trapped");
    stop(w->machine);
    return YIELD;
}

const HandlerEntry control_handlers[] = {
    {"bra", op_bra}, {"brx", op_brx}, {"exit", op_exit}, {"nop", op_nop}, {"nanosleep", op_nanosleep}, {"trap", op_trap}, {0},
};
