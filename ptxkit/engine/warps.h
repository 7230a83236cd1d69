/* A warp's turn, and what its splits are at. */
#pragma once
#include "machine.h"

bool run_warp(Warp *w, u64 quantum); /* did anything run? */
bool pick_split(Warp *w);            /* makes one that can run the current one; false: there is none */
u32 passing(const Warp *w, const Split *s, const Ins *i); /* the lanes that its guard lets run it */

/* Where lanes go: for branches and calls. */
s32 new_join(Warp *w, s32 pc, u32 expected, s32 outer); /* its index */
void add_split(Warp *w, s32 pc, u32 lanes, s32 join);
void leave_others(Warp *w, u32 lanes); /* the current split keeps these lanes; its others go on, behind an instruction that their guard skips */
void settle(Warp *w, s32 k); /* a split that stands at its join has arrived */
void go_to(Warp *w, s32 pc); /* the current one */
void return_lanes(Warp *w, u32 lanes);
void finish(Warp *w, s32 k, Outcome o); /* an instruction of split k, unless its handler has moved it */
