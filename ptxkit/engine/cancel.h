/* What the end of a launch asks of clusterlaunchcontrol. */
#pragma once
#include "machine.h"

void cancel_at_end(Machine *m);
