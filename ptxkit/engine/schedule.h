/* The schedule: every warp of every resident cluster gets its turns, until all have ended. */
#pragma once
#include "machine.h"

void run_machine(Machine *m);

/* What the schedule with a clock shares with it. */
Warp *warp_after(const Machine *m, Warp *w); /* through all resident clusters, from NULL to NULL */
void add_cluster(Machine *m);
void retire(Warp *w);                        /* its last lanes have exited */
bool give_up_a_wait(Machine *m);             /* a try_wait may return false after a while: once for each state of the machine */
void report_wait(Warp *w);                   /* reports a deadlock */
void report_deadlock(Machine *m);
void report_limit(Machine *m);
