/* Device functions that run: what a join keeps of a call. */
#pragma once
#include "machine.h"

void free_call(Call *c); /* NULL: of a branch */
