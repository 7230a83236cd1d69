/* The schedule: every warp of every resident cluster gets its turns, until all have ended. */
#pragma once
#include "machine.h"

void run_machine(Machine *m);
