/* A warp's turn, and what its splits are at. */
#pragma once
#include "machine.h"

bool run_warp(Warp *w, u64 quantum); /* did anything run? */
bool pick_split(Warp *w);            /* makes one that can run the current one; false: there is none */
u32 passing(const Warp *w, const Split *s, const Ins *i); /* the lanes that its guard lets run it */
void finish(Warp *w, s32 k, Outcome o); /* an instruction of split k, unless its handler has moved it */
