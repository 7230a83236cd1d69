/* Accesses to the shared memory of other CTAs of the cluster: they must be over when that CTA ends. */
#pragma once
#include "machine.h"

void note_visit(Warp *w, const Ins *i, Cta *owner); /* by a thread itself: copies end with an mbarrier's phase */
void visits_at_exit(Cta *owner); /* its last threads have exited */
void free_visits(Cta *owner);
