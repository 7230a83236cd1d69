/* Control flow: which lanes of a warp run, and one instruction of theirs.
 *
 * Lanes that a branch parts become splits of their warp; they meet again at the branch's immediate post-dominator (a Join). All splits
 * of a warp make progress, so lanes may wait for each other. A blocked instruction runs again after an event.
 */
#include "warps.h"
#include "clock.h"
#include "findings.h"
#include "functions.h"
#include "registers.h"
#include "wgmma.h"

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

void settle(Warp *w, s32 k) { /* a split that stands at its join has arrived */
    Split *s = &w->split[k];
    s32 j = s->join;
    if (j < 0 || w->join[j].pc != s->pc) return;
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

/* bra: the lanes that come here take it; mod[0] is the target. */
static Outcome op_bra(Warp *w, const Ins *i, u32 lanes) {
    Split *s = current_split(w);
    u32 stay = s->lanes & ~lanes;
    s32 target = (s32)i->mod[0];
    if (!stay) {
        go_to(w, target);
        return JUMPED;
    }
    s32 join = s->join, fall = s->pc + 1;
    if (join < 0 || w->join[join].pc != i->join) join = i->join < 0 ? join : new_join(w, i->join, s->lanes, s->join);
    s->lanes = lanes;
    s->join = join;
    add_split(w, fall, stay, join);
    settle(w, w->nsplits - 1);
    /* the split that took the branch may have moved in the array: it is the one with these lanes */
    for (s32 k = 0; k < w->nsplits; k++)
        if (w->split[k].lanes == lanes && w->split[k].pc == i->index) w->current = k;
    go_to(w, target);
    return JUMPED;
}

/* brx.idx: operand 0 is the index, mod[...] the targets. */
static Outcome op_brx(Warp *w, const Ins *i, u32 lanes) {
    Split *s = current_split(w);
    const u32 *index = R32(w, i->arg[0]);
    u32 rest = lanes, at_first = 0, first = index[first_lane(lanes)];
    for (; rest; rest &= rest - 1)
        if (index[first_lane(rest)] == first) at_first |= 1u << first_lane(rest);
    if (first >= (u32)i->mod[0]) {
        find(w, i, first_lane(lanes), BAD_OPERAND, 0, 0, "branch index %u of %d targets", first, (int)i->mod[0]);
        stop(w->machine);
        return YIELD;
    }
    s32 target = (s32)i->mod[1 + first];
    u32 stay = s->lanes & ~at_first;
    if (!stay) {
        go_to(w, target);
        return JUMPED;
    }
    /* lanes with another index run the same instruction again; guarded-off lanes fall through */
    s32 join = s->join;
    if (join < 0 || w->join[join].pc != i->join) join = i->join < 0 ? join : new_join(w, i->join, s->lanes, s->join);
    u32 again = lanes & ~at_first, off = s->lanes & ~lanes;
    s->lanes = at_first;
    s->join = join;
    if (again) add_split(w, i->index, again, join);
    if (off) {
        add_split(w, i->index + 1, off, join);
        settle(w, w->nsplits - 1);
    }
    for (s32 k = 0; k < w->nsplits; k++)
        if (w->split[k].lanes == at_first && w->split[k].pc == i->index) w->current = k;
    go_to(w, target);
    return JUMPED;
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
    if (w->time) wake_at(w, w->time->at + NANOSECONDS * w->machine->time->p->gigahertz);
    return YIELD;
}

static Outcome op_trap(Warp *w, const Ins *i, u32 lanes) {
    find(w, i, first_lane(lanes), BAD_OPERAND, 0, 0, "the program trapped");
    stop(w->machine);
    return YIELD;
}

const HandlerEntry warps_handlers[] = {
    {"bra", op_bra}, {"brx", op_brx}, {"exit", op_exit}, {"nop", op_nop}, {"nanosleep", op_nanosleep}, {"trap", op_trap}, {0},
};

/* ---- one instruction ---------------------------------------------------------------------------------------------------- */

u32 passing(const Warp *w, const Split *s, const Ins *i) {
    if (i->guard < 0) return s->lanes;
    u32 p = *PRED(w, i->guard);
    return s->lanes & (i->negate ? ~p : p);
}

static Outcome run_counted(Warp *w, const Ins *i, u32 lanes) {
    Counter *c = counter(w, i);
    w->machine->ran++;
    if (!current_split(w)->blocked) { /* one that waits is run again and again, but counts once */
        c->issued++;
        c->lanes += __builtin_popcount(lanes);
        w->issued++;
    }
    w->acting = lanes;
    if (w->nin_flight && i->run != op_wgmma) registers_touched(w, i);
    if (!w->time) return i->run(w, i, lanes);
    bool was_blocked = current_split(w)->blocked;
    if (was_blocked)
        clock_again(w);
    else
        clock_issue(w, i);
    Outcome o = i->run(w, i, lanes);
    clock_done(w, i, was_blocked, o == BLOCK);
    return o;
}

void finish(Warp *w, s32 k, Outcome o) { /* takes a split on whose handler did not move it */
    Split *s = &w->split[k];
    if (o == JUMPED) return;
    if (o == BLOCK) {
        s->blocked = true;
        s->seen = w->machine->events;
        return;
    }
    s->blocked = s->gathering = false;
    s->ticket = 0;
    s->pc++;
    settle(w, k);
}

/* The same of all splits at an instruction that have some of these lanes. */
static void finish_all(Warp *w, s32 pc, u32 lanes, Outcome o) {
    for (s32 k = 0; k < w->nsplits;) {
        if (w->split[k].pc == pc && w->split[k].lanes & lanes) {
            finish(w, k, o);
            k = 0; /* a split that arrived at its join has left the array */
        } else
            k++;
    }
}

static bool skip(Warp *w, const Ins *i) { /* its guard holds for no lane */
    if (w->time) clock_skip(w, i);
    finish(w, w->current, NEXT);
    return true;
}

/* .aligned: all live lanes run it together, from whatever splits they come in: a compiler may give parts of a warp different paths to one
 * instruction, and the hardware lets them meet there. */
static bool step_aligned(Warp *w, const Ins *i) {
    u32 here = 0;
    if (!passing(w, current_split(w), i)) return skip(w, i);
    for (s32 k = 0; k < w->nsplits; k++)
        if (w->split[k].pc == i->index) here |= passing(w, &w->split[k], i);
    if (here != w->live) {
        current_split(w)->gathering = true;
        return true;
    }
    Outcome o = run_counted(w, i, here);
    if (o == BLOCK || w->nsplits == 1)
        finish(w, w->current, o);
    else
        finish_all(w, i->index, here, o);
    return o != BLOCK && o != YIELD;
}

/* .sync with a mask of lanes: those come together here from whatever splits they are in, and each mask's lanes act as one. */
static bool step_sync(Warp *w, const Ins *i) {
    const s32 pc = current_split(w)->pc;
    u32 taking = passing(w, current_split(w), i), here = 0;
    if (!taking) return skip(w, i);
    for (s32 k = 0; k < w->nsplits; k++)
        if (w->split[k].pc == pc) here |= passing(w, &w->split[k], i);
    const u32 *mask = R32(w, i->arg[i->mod[0]]);
    for (u32 before = 0; before != taking;) { /* whole splits, and all lanes that their masks name */
        before = taking;
        u32 named = 0;
        for (u32 rest = taking; rest; rest &= rest - 1) {
            int l = first_lane(rest);
            if (!lane_in(mask[l], l)) {
                find(w, i, l, BAD_LANE, 0, 0, "lane %d is not in its own mask %08x", l, mask[l]);
                stop(w->machine);
                return false;
            }
            named |= mask[l];
        }
        if (named & w->live & ~here) {
            current_split(w)->gathering = true;
            return true;
        }
        for (s32 k = 0; k < w->nsplits; k++)
            if (w->split[k].pc == pc && (passing(w, &w->split[k], i) & named)) taking |= passing(w, &w->split[k], i);
    }
    for (u32 rest = taking; rest;) {
        u32 group = 0;
        for (u32 r = rest; r; r &= r - 1)
            if (mask[first_lane(r)] == mask[first_lane(rest)]) group |= 1u << first_lane(r);
        run_counted(w, i, group);
        rest &= ~group;
    }
    finish_all(w, pc, taking, NEXT);
    return true;
}

static bool step(Warp *w) { /* false: the warp's turn is over */
    const Ins *i = &w->machine->program->ins[current_split(w)->pc];
    if (i->gather == 1) return step_aligned(w, i);
    if (i->gather == 2) return step_sync(w, i);
    u32 lanes = passing(w, current_split(w), i);
    if (!lanes) return skip(w, i);
    Outcome o = run_counted(w, i, lanes);
    finish(w, w->current, o);
    return o == NEXT || o == JUMPED;
}

static bool can_run(const Machine *m, const Split *s) { return !s->gathering && (!s->blocked || s->seen != m->events); }

bool pick_split(Warp *w) {
    for (s32 k = 0; k < w->nsplits; k++) {
        s32 at = (w->current + k) % w->nsplits;
        if (can_run(w->machine, &w->split[at])) {
            w->current = at;
            return true;
        }
    }
    return false;
}

bool run_warp(Warp *w, u64 quantum) {
    bool ran = false;
    while (quantum-- && w->nsplits && pick_split(w) && !w->machine->launch->stopped) {
        ran = true;
        if (!step(w)) {
            if (w->nsplits) w->current = (w->current + 1) % w->nsplits;
            break;
        }
    }
    return ran;
}
