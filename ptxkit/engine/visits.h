/* Accesses to a CTA's shared memory that end by an order across the cluster: they must be over when that CTA ends. */
#pragma once
#include "machine.h"

void note_visit(Warp *w, const Ins *i, Cta *owner); /* a thread itself visits the memory of another CTA */
void note_copy(Warp *w, const Ins *i, int l, const Mbarrier *b); /* a copy that the mbarrier tracks reads the warp's CTA's memory */
void visits_at_exit(Cta *owner); /* its last threads have exited */
void free_visits(Cta *owner);
