/* A warp's turn: its splits run one instruction after another. A blocked instruction runs again after an event. */
#include "warps.h"
#include "clock.h"
#include "control.h"
#include "findings.h"
#include "registers.h"
#include "wgmma.h"

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

/* Finishes the instruction for all splits that stand at it and have some of these lanes. */
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
    u32 gathered = 0;
    if (!passing(w, current_split(w), i)) return skip(w, i);
    for (s32 k = 0; k < w->nsplits; k++)
        if (w->split[k].pc == i->index) gathered |= passing(w, &w->split[k], i);
    if (gathered != w->live) {
        current_split(w)->gathering = true;
        return true;
    }
    Outcome o = run_counted(w, i, gathered);
    if (o == BLOCK || w->nsplits == 1)
        finish(w, w->current, o);
    else
        finish_all(w, i->index, gathered, o);
    return o != BLOCK && o != YIELD;
}

/* .sync with a mask of lanes: those come together here from whatever splits they are in, and each mask's lanes act as one. */
static bool step_sync(Warp *w, const Ins *i) {
    const s32 pc = current_split(w)->pc;
    u32 taking = passing(w, current_split(w), i), gathered = 0;
    if (!taking) return skip(w, i);
    for (s32 k = 0; k < w->nsplits; k++)
        if (w->split[k].pc == pc) gathered |= passing(w, &w->split[k], i);
    const u32 *mask = R32(w, i->arg[i->mod[MEMBERS_MASK]]);
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
        if (named & w->live & ~gathered) {
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
        s32 index = (w->current + k) % w->nsplits;
        if (can_run(w->machine, &w->split[index])) {
            w->current = index;
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
