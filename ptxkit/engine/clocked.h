/* The schedule of a launch that is asked for its time. */
#pragma once
#include "machine.h"

void run_clocked(Machine *m); /* the first clusters, in detail; run_machine runs the others */
