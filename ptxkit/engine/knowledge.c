/* Who is ordered after whom: vector clocks, and what hands them on.
 *
 * An access is ordered after an earlier one if its actor knows that one's clock. Knowledge spreads by releases and acquires: a
 * barrier, an mbarrier's phase or a published address gathers what its releasers know and hands it to those who acquire.
 * Lanes of a warp share a clock. A lane that releases or sends off something speaks for itself, and for the others up to when they
 * last met.
 */
#include "knowledge.h"

Knowledge new_knowledge(Cluster *c) {
    Knowledge k = {0};
    bool has_tensor_memory = c->machine->launch->arch >= 100;
    int views = has_tensor_memory ? VIEWS : BEFORE_SYNC; /* without it, its views are SEEN */
    size_t bytes = ((size_t)views * c->capacity + 2 * c->nwarps) * sizeof(u32);
    u32 *clocks = c->spare ? c->spare : malloc(bytes);
    if (c->spare) c->spare = *(void **)c->spare;
    memset(clocks, 0, bytes);
    for (int v = 0; v < VIEWS; v++) k.clock[v] = clocks + (v < views ? (size_t)v * c->capacity : 0);
    k.met = clocks + (size_t)views * c->capacity;
    k.lanes = k.met + c->nwarps;
    return k;
}

void free_spare_knowledge(Cluster *c) {
    while (c->spare) {
        void *next = *(void **)c->spare;
        free(c->spare);
        c->spare = next;
    }
}

static void free_foreign(Foreign *f) {
    while (f) {
        Foreign *next = f->next;
        free(f->clock[0]);
        free(f);
        f = next;
    }
}

void free_knowledge(Cluster *c, Knowledge *k) {
    if (k->clock[0]) {
        *(void **)k->clock[0] = c->spare;
        c->spare = k->clock[0];
    }
    free_foreign(k->foreign);
    memset(k, 0, sizeof *k);
}

static void join(u32 *restrict to, const u32 *restrict from, s32 n) {
    for (s32 i = 0; i < n; i++) to[i] = to[i] > from[i] ? to[i] : from[i];
}

static void learn_foreign(Foreign **list, u32 serial, u32 *const clock[VIEWS], s32 width) {
    Foreign *f = *list;
    while (f && f->serial != serial) f = f->next;
    if (!f) {
        f = calloc(1, sizeof *f);
        f->serial = serial;
        f->next = *list;
        *list = f;
    }
    if (f->width < width) {
        u32 *wider = calloc((size_t)VIEWS * width, sizeof(u32));
        for (int v = 0; v < VIEWS; v++)
            if (f->width) memcpy(wider + (size_t)v * width, f->clock[v], f->width * sizeof(u32));
        free(f->clock[0]);
        for (int v = 0; v < VIEWS; v++) f->clock[v] = wider + (size_t)v * width;
        f->width = width;
    }
    for (int v = 0; v < VIEWS; v++) join(f->clock[v], clock[v], width);
}

/* Who knows of a later clock knows of those lanes; and of those that the other one knows of, unless they all have met since. */
static void join_lanes(s32 nwarps, Knowledge *restrict k, const Knowledge *restrict from) {
    for (s32 w = 0; w < nwarps; w++) {
        u32 seen = k->clock[SEEN][w], other_seen = from->clock[SEEN][w];
        bool later = other_seen > seen;
        u32 met = later ? from->met[w] : k->met[w], lanes = later ? from->lanes[w] : k->lanes[w];
        u32 others = later ? k->lanes[w] : from->lanes[w], until = later ? seen : other_seen;
        k->lanes[w] = lanes | (until > met ? others : 0);
        k->met[w] = k->met[w] > from->met[w] ? k->met[w] : from->met[w];
    }
}

void learn(Cluster *c, Knowledge *k, const Knowledge *from) {
    if (k == from) return;
    k->grid_ahead |= from->grid_ahead;
    join_lanes(c->nwarps, k, from);
    for (int v = 0; v < VIEWS_HANDED_ON; v++) join(k->clock[v], from->clock[v], c->width);
    for (Foreign *f = from->foreign; f; f = f->next) learn_foreign(&k->foreign, f->serial, f->clock, f->width);
}

void copy_knowledge(Cluster *c, Knowledge *k, const Knowledge *from) {
    for (int v = 0; v < VIEWS; v++) memcpy(k->clock[v], from->clock[v], c->width * sizeof(u32));
    memcpy(k->met, from->met, 2 * c->nwarps * sizeof(u32));
    free_foreign(k->foreign);
    k->foreign = NULL;
    k->grid_ahead = from->grid_ahead;
    for (Foreign *f = from->foreign; f; f = f->next) learn_foreign(&k->foreign, f->serial, f->clock, f->width);
}

void tick(Warp *w) { w->know.clock[SEEN][w->actor]++; }

void speak_for_lanes(Warp *w) {
    w->know.lanes[w->actor] = w->acting;
    w->know.met[w->actor] = w->live & ~w->acting ? w->lanes_met : warp_clock(w);
}

static void some_meet(Warp *w, u32 lanes) {
    u32 all[LANES] = {0};
    if (!w->met) w->met = calloc(LANES, sizeof *w->met);
    for (int other = 0; other < LANES; other++) {
        EACH_LANE(lanes, { all[other] = w->met[l][other] > all[other] ? w->met[l][other] : all[other]; });
        if (lane_in(lanes, other)) all[other] = warp_clock(w);
    }
    EACH_LANE(lanes, { memcpy(w->met[l], all, sizeof all); });
}

void lanes_meet(Warp *w, u32 lanes) {
    if (w->live & ~lanes)
        some_meet(w, lanes);
    else
        w->lanes_met = warp_clock(w);
}

void release_to(Warp *w, Knowledge *object) {
    speak_for_lanes(w);
    learn(w->cluster, object, &w->know);
    tick(w);
}

/* An acquire may tell a warp about its own lanes. It orders them then, too: all of them, or none. */
static void hear_of_itself(Warp *w, u32 clock) {
    if (w->lanes_met < clock) w->lanes_met = clock;
}

void acquire_from(Warp *w, const Knowledge *object) {
    hear_of_itself(w, w->live & ~object->lanes[w->actor] ? object->met[w->actor] : object->clock[SEEN][w->actor]);
    learn(w->cluster, &w->know, object);
}

void knows_of(Knowledge *k, u32 actor, u32 clock) {
    u32 index = actor & 0xffff;
    for (int v = 0; v < VIEWS; v++)
        if (v != BEFORE_SYNC && k->clock[v][index] < clock) k->clock[v][index] = clock;
}

void fence_view(const Cluster *c, Knowledge *k, int view, int from) { join(k->clock[view], k->clock[from], c->width); }
/* ---- publishing through memory ------------------------------------------------------------------------------------------ */

typedef struct SyncVariable SyncVariable;
struct SyncVariable {
    u64 key;
    Foreign *known; /* for every cluster, also the one that wrote it */
    bool grid_ahead;
    SyncVariable *next;
};
enum { SYNC_BUCKETS = 1024 };

static SyncVariable *sync_variable(Machine *m, u64 key, bool make) {
    SyncVariable **table = m->sync_variables;
    if (!table) {
        if (!make) return NULL;
        table = m->sync_variables = calloc(SYNC_BUCKETS, sizeof *table);
    }
    SyncVariable **bucket = &table[(key * 0x9e3779b97f4a7c15u) >> 54];
    for (SyncVariable *s = *bucket; s; s = s->next)
        if (s->key == key) return s;
    if (!make) return NULL;
    SyncVariable *s = calloc(1, sizeof *s);
    s->key = key;
    s->next = *bucket;
    return *bucket = s;
}

void free_sync_variables(Machine *m) {
    SyncVariable **table = m->sync_variables;
    if (!table) return;
    for (int b = 0; b < SYNC_BUCKETS; b++)
        for (SyncVariable *s = table[b], *next; s; s = next) {
            next = s->next;
            free_foreign(s->known);
            free(s);
        }
    free(table);
    m->sync_variables = NULL;
}

void publish(Warp *w, u64 key, bool release, bool keep) {
    const Knowledge *k = release ? &w->know : w->has_released ? &w->released : NULL;
    SyncVariable *s = sync_variable(w->machine, key, k != NULL);
    if (s && !keep) {
        free_foreign(s->known);
        s->known = NULL;
        s->grid_ahead = false;
    }
    if (k) {
        s->grid_ahead |= k->grid_ahead;
        learn_foreign(&s->known, w->cluster->serial & 0xffff, k->clock, w->cluster->width);
        for (Foreign *f = k->foreign; f; f = f->next) learn_foreign(&s->known, f->serial, f->clock, f->width);
    }
    if (release) tick(w);
}

static void learn_published(Warp *w, Knowledge *k, const SyncVariable *s) {
    k->grid_ahead |= s->grid_ahead;
    for (Foreign *f = s->known; f; f = f->next)
        if (f->serial == (w->cluster->serial & 0xffff)) {
            for (int v = 0; v < VIEWS_HANDED_ON; v++) join(k->clock[v], f->clock[v], f->width);
            join(k->met, f->clock[SEEN], w->cluster->nwarps); /* it counts as if all lanes had spoken */
            if (k == &w->know) hear_of_itself(w, f->clock[SEEN][w->actor]);
        } else
            learn_foreign(&k->foreign, f->serial, f->clock, f->width);
}

void observe(Warp *w, u64 key, bool acquire) {
    const SyncVariable *s = sync_variable(w->machine, key, false);
    if (!s || !s->known) return;
    if (acquire) {
        learn_published(w, &w->know, s);
        return;
    }
    if (!w->to_acquire.clock[0]) w->to_acquire = new_knowledge(w->cluster);
    learn_published(w, &w->to_acquire, s);
    w->has_to_acquire = true;
}

void fence_release(Warp *w) {
    if (!w->released.clock[0]) w->released = new_knowledge(w->cluster);
    speak_for_lanes(w);
    copy_knowledge(w->cluster, &w->released, &w->know);
    w->has_released = true;
    tick(w);
}

void fence_acquire(Warp *w) {
    if (w->has_to_acquire) acquire_from(w, &w->to_acquire);
}
