/* A CTA's shared memory goes to another one when its last threads exit. What warps of its cluster have done there by then must be
 * known to one of its own, or nothing keeps it from coming later.
 */
#include "visits.h"
#include "findings.h"
#include "knowledge.h"

#include <stdio.h>

typedef struct {
    u32 clock; /* of the warp at its last visit; 0: none */
    s32 ins;
} Visit;

void note_visit(Warp *w, const Ins *i, Cta *owner) {
    if (owner == w->cta || !w->machine->launch->checks) return;
    if (!owner->visits) owner->visits = calloc(w->cluster->nwarps, sizeof(Visit));
    ((Visit *)owner->visits)[w->actor] = (Visit){warp_clock(w), i->index};
}

static bool known(const Cta *owner, const Warp *visitor, u32 clock) {
    for (s32 n = 0; n < owner->nwarps; n++)
        if (owner->warp[n].know.clock[SEEN][visitor->actor] >= clock) return true;
    return false;
}

void visits_at_exit(Cta *owner) {
    const Visit *visits = owner->visits;
    if (!visits) return;
    Cluster *c = owner->cluster;
    for (s32 n = 0; n < c->nwarps; n++) {
        const Warp *w = &c->cta[n / owner->nwarps].warp[n % owner->nwarps];
        if (!visits[n].clock || known(owner, w, visits[n].clock)) continue;
        Finding *f = find_at(owner->machine, VISIT_UNORDERED, w, 0, visits[n].ins, -1, 0, 0);
        if (f && f->count == 1)
            snprintf(f->text, sizeof f->text, "in shared memory of CTA rank %d, whose end nothing orders after this: it may come too late", owner->rank);
    }
}

void free_visits(Cta *owner) { free(owner->visits); }
