/* What the schedule and the end of a warp ask of wgmma. */
#pragma once
#include "machine.h"

Outcome op_wgmma(Warp *w, const Ins *i, u32 lanes); /* it looks after its registers itself */
void wgmma_at_exit(Warp *w);
