/* The schedule: every warp of every resident cluster gets its turns, until all have ended. */
#pragma once
#include "machine.h"

void run_machine(Machine *m);

/* Functions that the schedule with a clock uses, too. */
void add_cluster(Machine *m);
void retire(Warp *w); /* its last lanes have exited */
void report_limit(Machine *m);
