/* A CTA's shared memory goes to another one when its last threads exit. What warps of its cluster have done there by then, and what
 * copies read there, must be known to one of its own, or nothing keeps it from coming later.
 */
#include "visits.h"
#include "findings.h"
#include "knowledge.h"

typedef struct {
    u32 clock; /* the actor's at its last visit; 0: none */
    s32 ins;
    Warp *warp;
    int lane;
} Visit;

static void note(Cta *owner, s32 actor, Visit visit) {
    if (!owner->machine->launch->checks) return;
    if (!owner->visits) owner->visits = calloc(owner->cluster->capacity, sizeof(Visit));
    ((Visit *)owner->visits)[actor] = visit;
}

void note_visit(Warp *w, const Ins *i, Cta *owner) {
    if (owner != w->cta) note(owner, w->actor, (Visit){warp_clock(w), i->index, w, 0});
}

void note_copy(Warp *w, const Ins *i, int l, const Mbarrier *b) {
    note(w->cta, b->actor, (Visit){mbarrier_next_clock(b), i->index, w, l});
}

static bool known(const Cta *owner, s32 actor, u32 clock) {
    for (s32 n = 0; n < owner->nwarps; n++)
        if (owner->warp[n].know.clock[SEEN][actor] >= clock) return true;
    return false;
}

void visits_at_exit(Cta *owner) {
    const Visit *visits = owner->visits;
    if (!visits) return;
    for (s32 actor = 0; actor < owner->cluster->width; actor++) {
        const Visit *v = &visits[actor];
        if (!v->clock || known(owner, actor, v->clock)) continue;
        const Ins *i = &owner->machine->program->ins[v->ins];
        if (v->warp->cta != owner)
            find(v->warp, i, v->lane, VISIT_UNORDERED, 0, 0,
                 "in shared memory of CTA rank %d, whose end nothing orders after this: it may come too late", owner->rank);
        else {
            Finding *f = find(v->warp, i, v->lane, COPY_AT_EXIT, 0, 0, "no thread of this CTA knows that the mbarrier's phase has ended");
            if (f) f->detail[0] = true;
        }
    }
}

void free_visits(Cta *owner) { free(owner->visits); }
