/* Warps that spin for ever. */
#pragma once
#include "machine.h"

bool spins_for_ever(Machine *m); /* asked from time to time while no asynchronous work is left: can nobody ever do anything new? */
void note_turn(Warp *w);         /* a warp's turn has ended, in which it ran */
void report_livelock(Machine *m);
void forget_turns(Warp *w);
