/* Who is ordered after whom: vector clocks of actors. */
#pragma once
#include "machine.h"

struct Foreign {
    u32 serial;
    s32 width;
    u32 *clock[VIEWS];
    Foreign *next;
};

Knowledge new_knowledge(Cluster *c);
void free_knowledge(Cluster *c, Knowledge *k);
void free_spare_knowledge(Cluster *c);
void learn(Cluster *c, Knowledge *k, const Knowledge *from);       /* k := join(k, from) */
void copy_knowledge(Cluster *c, Knowledge *k, const Knowledge *from);
static inline u32 actor_of(const Warp *w, ActorKind kind) { return (w->cluster->serial & 0xffff) << 16 | (kind * w->cluster->nwarps + w->actor); }
static inline u32 warp_clock(const Warp *w) { return w->know.clock[SEEN][w->actor]; }
void lanes_meet(Warp *w, u32 lanes);                               /* bar.warp.sync, or a barrier: memory between them is ordered */
void speak_for_lanes(Warp *w);                                     /* w->know says what its acting lanes release */
void tick(Warp *w);                                                /* its later accesses are not covered by what it knew until now */
void release_to(Warp *w, Knowledge *object);                       /* object learns what the warp knows; the warp ticks */
void acquire_from(Warp *w, const Knowledge *object);
void knows_of(Knowledge *k, u32 actor, u32 clock);                 /* asynchronous work in the knower's own cluster is done */
void fence_view(const Cluster *c, Knowledge *k, int view, int from); /* view := join(view, from) */
void publish(Warp *w, u64 key, bool release, bool keep);            /* a strong write; keep: an atomic goes on the sequence before it */
void observe(Warp *w, u64 key, bool acquire);                       /* a strong read */
void fence_release(Warp *w);
void fence_acquire(Warp *w);
void free_sync_variables(Machine *m);

/* Does this knowledge, of an actor of cluster c, cover that clock of an actor, in a view? */
static inline bool knows(const Cluster *c, const Knowledge *k, int view, u32 actor, u32 clock) {
    if (actor == GRID_AHEAD) return k->grid_ahead;
    if (actor >> 16 == (c->serial & 0xffff)) return k->clock[view][actor & 0xffff] >= clock;
    for (const Foreign *f = k->foreign; f; f = f->next)
        if (f->serial == actor >> 16) return (s32)(actor & 0xffff) < f->width && f->clock[view][actor & 0xffff] >= clock;
    return false;
}
