/* The schedule: every warp of every resident cluster gets its turns, until all have ended. */
#pragma once
#include "machine.h"

void run_machine(Machine *m);

/* What the schedule with a clock shares with it. */
void add_cluster(Machine *m);
void retire(Warp *w); /* its last lanes have exited */
void report_limit(Machine *m);
