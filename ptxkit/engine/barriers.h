/* The mbarriers that copies and tensor cores tell of their end. */
#pragma once
#include "machine.h"

Mbarrier *mbarrier_at(Warp *w, const Ins *i, int lane, u32 address, bool must_live); /* finding if there is none */
/* A lane arrives, by itself or by what it has sent off; from may be NULL (relaxed). */
void mbarrier_arrive(Mbarrier *b, const Warp *w, const Ins *i, int lane, u32 count, const Knowledge *from);
/* A finding: a lane arrives in the phase after the one that its instruction's other lanes have arrived in. */
void mbarrier_too_few(const Mbarrier *b, Warp *w, const Ins *i, int lane);
void mbarrier_complete_tx(Mbarrier *b, const Warp *w, const Ins *i, int lane, s64 bytes);
/* A finding if a copy or a commit, or another CTA than its own, knows of no fence behind its initialisation. */
void mbarrier_fenced(const Mbarrier *b, Warp *w, const Ins *i, int lane, const Knowledge *know);
void free_cta_barriers(Cta *cta);
Outcome op_try_wait(Warp *w, const Ins *i, u32 lanes);
bool barriers_explain_block(Warp *w, const Ins *i, int lane, char *text, size_t size); /* false if the instruction is none of its own */
