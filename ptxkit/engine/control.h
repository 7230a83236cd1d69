/* Where lanes go: for branches and calls. */
#pragma once
#include "machine.h"

s32 new_join(Warp *w, s32 pc, u32 expected, s32 outer); /* its index */
void add_split(Warp *w, s32 pc, u32 lanes, s32 join);
void leave_others(Warp *w, u32 lanes); /* the current split keeps these lanes; its others go on, behind an instruction that their guard skips */
void arrive(Warp *w, s32 k); /* a split stands at its join */
static inline void settle(Warp *w, s32 k) { /* it may */
    const Split *s = &w->split[k];
    if (s->join >= 0 && w->join[s->join].pc == s->pc) arrive(w, k);
}
void go_to(Warp *w, s32 pc); /* the current one */
void return_lanes(Warp *w, u32 lanes);

/* A device function that runs, of which its join is the owner: functions.c. */
struct Call {
    const Ins *i;
    const s64 *target;
    u8 *registers, *local; /* NULL: not saved */
};
void free_call(Call *c); /* NULL: the join is a branch's */
