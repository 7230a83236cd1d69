/* Warps that wait, for ever or not. */
#pragma once
#include "machine.h"

bool give_up_a_wait(Machine *m); /* a try_wait may return false after a while: once for each state of the machine */
void report_wait(Warp *w);       /* reports what its splits wait for, for ever */
void report_deadlock(Machine *m);
