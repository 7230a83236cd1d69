/* Warps that wait, for ever or not. */
#pragma once
#include "machine.h"

/* A try_wait may return false after a while, once for each state of the machine; or a cluster moves to where it finds columns. */
bool give_up_a_wait(Machine *m);
void report_wait(Warp *w);       /* reports what its splits wait for, for ever */
void report_deadlock(Machine *m);
