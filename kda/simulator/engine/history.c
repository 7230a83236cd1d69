/* Who is ordered after what: vector clocks for actors, and the last accesses of every byte.
 *
 * An access is ordered after an earlier one if its actor knows that one's clock. Knowledge spreads by releases and acquires: a
 * barrier, an mbarrier's phase or a published address gathers what its releasers know and hands it to those who acquire.
 * An access of the async proxy asks for more: an earlier write by the generic proxy must have been fenced (views FENCED_*). So does an
 * access to tensor memory: threads' tcgen05 operations are ordered by fences on both sides of what synchronises the threads (BEFORE_*).
 * Lanes of a warp share a clock, and two lanes that touch a byte must have met in between (bar.warp.sync, or a barrier). A lane that
 * releases or sends off something speaks for itself, and for the others up to when they last met.
 */
#include "machine.h"

enum { MANY_READERS = 0xffffffffu };

struct Foreign {
    u32 serial;
    s32 width;
    u32 *clock[VIEWS];
    Foreign *next;
};

/* ---- knowledge ---------------------------------------------------------------------------------------------------------- */

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

/* What an acquire tells a warp of its own lanes orders them, too: all of them, or none. */
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

static bool knows(const Access *a, int view, u32 actor, u32 clock) {
    if (actor == GRID_AHEAD) return a->know->grid_ahead;
    if (actor >> 16 == (a->cluster->serial & 0xffff)) return a->know->clock[view][actor & 0xffff] >= clock;
    for (Foreign *f = a->know->foreign; f; f = f->next)
        if (f->serial == actor >> 16) return (s32)(actor & 0xffff) < f->width && f->clock[view][actor & 0xffff] >= clock;
    return false;
}

/* ---- publishing through memory ------------------------------------------------------------------------------------------ */

typedef struct SyncVariable SyncVariable;
struct SyncVariable {
    u64 key;
    Foreign *known; /* of all clusters alike */
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
            join(k->met, f->clock[SEEN], w->cluster->nwarps); /* as if all lanes had spoken */
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

/* ---- accesses ----------------------------------------------------------------------------------------------------------- */

Access warp_access(Warp *w, const Ins *i, int lane, HistorySpace space) {
    return (Access){.cluster = w->cluster, .cta = w->cta, .know = &w->know, .actor = actor_of(w, BY_WARP), .clock = warp_clock(w),
                    .lanes_met = w->lanes_met, .ins = i->index, .warp = w->index, .lane = lane, .space = space};
}

Access work_access(Work *work, u32 actor, u32 clock, HistorySpace space) {
    Warp *w = work->warp;
    return (Access){.cluster = w->cluster, .cta = w->cta, .know = &work->know, .actor = actor, .clock = clock,
                    .ins = work->ins->index, .warp = w->index, .lane = work->lane, .async = true, .space = space};
}

typedef enum { ORDERED, UNORDERED, UNFENCED, LANES_UNORDERED, LANES_NOT_MET, TENSOR_UNORDERED, GRIDS_UNORDERED } Order;
enum { SEVERAL = 0xff }; /* in the place of a reader's lane */

/* Of an access to tensor memory, which only dealloc makes synchronously: needs it no fence behind the last synchronisation. */
static bool before_tensor(const Access *a, u32 index, u32 clock) {
    return a->know->clock[BEFORE_TENSOR][index] >= clock || (!a->async && a->know->clock[BEFORE_SYNC][index] >= clock);
}

/* After an access of a lane of a warp of this cluster, which this one knows of. */
static Order after_lane(const Access *a, u32 warp, u32 clock, u8 lane, s32 ins) {
    const Warp *w = &a->cta->warp[a->warp];
    if (warp != (u32)w->actor || a->know != &w->know) {
        u32 lanes = a->know->lanes[warp];
        return clock <= a->know->met[warp] || (lane == SEVERAL ? lanes == FULL : lane_in(lanes, lane)) ? ORDERED : LANES_NOT_MET;
    }
    bool collective = a->async; /* wgmma: all lanes take part */
    if (lane == a->lane || collective || clock <= w->lanes_met) return ORDERED;
    if (w->met && lane != SEVERAL && clock <= w->met[a->lane][lane]) return ORDERED;
    return clock != a->clock ? LANES_NOT_MET : ins != a->ins ? LANES_UNORDERED : ORDERED;
}

static Order order_after(const Access *a, u32 actor, u32 clock, u8 lane, u8 async, u8 scope, s32 ins, bool earlier_was_write) {
    if (actor == GRID_AHEAD) return a->know->grid_ahead ? ORDERED : GRIDS_UNORDERED;
    if (scope && a->scope && (scope >= SCOPE_CLUSTER || actor == a->actor) && (a->scope >= SCOPE_CLUSTER || actor == a->actor))
        return ORDERED;
    if (scope && a->scope && actor >> 16 == a->actor >> 16 && a->cluster->nctas == 1) return ORDERED;
    if (!knows(a, SEEN, actor, clock)) return UNORDERED;
    if (a->space == SPACE_TMEM) return before_tensor(a, actor & 0xffff, clock) ? ORDERED : TENSOR_UNORDERED;
    if (actor == a->actor && async) return ORDERED;
    bool by_lane = !async && (actor & 0xffff) < (u32)a->cluster->nwarps && actor >> 16 == a->actor >> 16;
    Order lanes = by_lane ? after_lane(a, actor & 0xffff, clock, lane, ins) : ORDERED;
    if (lanes != ORDERED || actor == a->actor) return lanes;
    if (a->async && !async && earlier_was_write && !knows(a, a->space == SPACE_GLOBAL ? FENCED_GLOBAL : FENCED_SHARED, actor, clock))
        return UNFENCED;
    return ORDERED;
}

/* What would order a tcgen05 operation of this access after another one that it knows to have been sent off. */
static const char *missing_between(const Access *a, u32 index, u32 clock) {
    const Cluster *c = a->cluster;
    u32 kind = index / c->nwarps, n = index % c->nwarps, sent = SENT_TO_TENSOR * c->nwarps + n, each = c->nwarps / c->nctas;
    const Warp *other = &c->cta[n / each].warp[n % each];
    if (kind != BY_TENSOR && other->know.clock[BEFORE_TENSOR][index] < clock) return kind == BY_TMEM ? "tcgen05.wait::ld" : "tcgen05.wait::st";
    const u32 *passed = a->know->clock[BEFORE_SYNC];
    bool handed_on = passed[index] >= clock || (kind == BY_TENSOR && passed[sent] >= clock);
    return handed_on ? "tcgen05.fence::after_thread_sync" : "tcgen05.fence::before_thread_sync";
}

static void conflict(const Access *a, Order order, FindingKind race, u32 actor, u32 other_clock, s32 other_ins, u8 other_lane, u64 address) {
    Machine *m = a->cluster->machine;
    const Warp *w = &a->cta->warp[a->warp];
    static const FindingKind kinds[] = {[UNFENCED] = PROXY_RACE, [LANES_UNORDERED] = LANE_RACE, [LANES_NOT_MET] = LANES_APART,
                                        [TENSOR_UNORDERED] = TENSOR_UNFENCED, [GRIDS_UNORDERED] = GRIDS_RACE};
    Finding *f = find_at(m, order == UNORDERED ? race : kinds[order], w, a->lane, a->ins, other_ins, address, 1);
    if (f && f->count == 1) {
        u32 index = actor & 0xffff, nwarps = a->cluster->nwarps;
        if (order == TENSOR_UNORDERED) strcpy(f->text, missing_between(a, index, other_clock));
        bool here = actor >> 16 == (a->cluster->serial & 0xffff);
        f->space = a->space;
        f->other_actor = here ? (index < KINDS_OF_ACTOR * nwarps ? index / nwarps : KINDS_OF_ACTOR) : -1;
        f->detail[0] = here && index < KINDS_OF_ACTOR * nwarps ? (s64)(index % nwarps) : -1;
        f->detail[1] = other_lane;
        f->detail[2] = a->async;
        f->detail[3] = race;
    }
}

/* Sets of readers: some bytes are read by several actors between two writes. Neighbours share one, as long as they have the same readers. */
typedef struct {
    u32 actor, clock, ins;
    u8 lane, async, scope;
} Reader;
typedef struct {
    Reader *reader;
    s32 count, room, cells;
} ReaderSet;
static ReaderSet *sets;
static u32 nsets, room_for_sets, *free_sets, nfree_sets;

static u32 new_set(void) { /* of one cell */
    if (nfree_sets) {
        sets[free_sets[--nfree_sets]].cells = 1;
        return free_sets[nfree_sets];
    }
    if (nsets == room_for_sets) {
        room_for_sets = room_for_sets ? 2 * room_for_sets : 4096;
        sets = realloc(sets, room_for_sets * sizeof *sets);
        free_sets = realloc(free_sets, room_for_sets * sizeof *free_sets);
        memset(sets + nsets, 0, (room_for_sets - nsets) * sizeof *sets);
    }
    sets[nsets].cells = 1;
    return nsets++;
}

static void drop_set(u32 set) { /* by one of its cells */
    if (--sets[set].cells) return;
    sets[set].count = 0;
    free_sets[nfree_sets++] = set;
}

void free_reader_sets(void) {
    for (u32 i = 0; i < nsets; i++) free(sets[i].reader);
    free(sets);
    free(free_sets);
    sets = NULL;
    free_sets = NULL;
    nsets = room_for_sets = nfree_sets = 0;
}

/* Of two lanes of a warp that have not met in between it is not the last one alone that has read. */
static u8 reader_lane(const Access *a, u32 reader, u32 clock, u8 lane) {
    return reader == a->actor && lane != a->lane && clock > a->lanes_met && !a->async ? SEVERAL : a->lane;
}

static void add_reader(ReaderSet *s, const Access *a, Reader r) {
    for (s32 i = 0; i < s->count; i++)
        if (s->reader[i].actor == r.actor) {
            r.lane = reader_lane(a, r.actor, s->reader[i].clock, s->reader[i].lane);
            s->reader[i] = r;
            return;
        }
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 4;
        s->reader = realloc(s->reader, s->room * sizeof *s->reader);
    }
    s->reader[s->count++] = r;
}

static u32 own_set(u32 set) { /* the same for one cell alone */
    if (sets[set].cells == 1) return set;
    u32 copy = new_set();
    ReaderSet *to = &sets[copy];
    const ReaderSet *from = &sets[set];
    if (to->room <= from->count) to->reader = realloc(to->reader, (to->room = from->count + 4) * sizeof *to->reader);
    memcpy(to->reader, from->reader, from->count * sizeof *to->reader);
    to->count = from->count;
    drop_set(set);
    return copy;
}

static void forget_readers(Cell *c) {
    if (c->reader == MANY_READERS) drop_set(c->reader_clock);
    c->reader = 0;
    c->reader_clock = 0;
}

enum { REWRITES = 2 }; /* in the place of `async`: a reader that has written the value that was there */

static inline __attribute__((always_inline)) void remember_read(Cell *c, const Access *a, bool rewrites) {
    u8 how = rewrites ? REWRITES : a->async;
    Reader now = {a->actor, a->clock, a->ins, a->lane, how, a->scope};
    if (c->reader == MANY_READERS) {
        c->reader_clock = own_set(c->reader_clock);
        add_reader(&sets[c->reader_clock], a, now);
        return;
    }
    bool covered = !c->reader_clock || c->reader == a->actor || (c->reader_async != 1 && knows(a, SEEN, c->reader, c->reader_clock));
    if (!covered) {
        Reader before = {c->reader, c->reader_clock, c->reader_ins, c->reader_lane, c->reader_async, c->reader_scope};
        u32 set = new_set();
        add_reader(&sets[set], a, before);
        add_reader(&sets[set], a, now);
        c->reader = MANY_READERS;
        c->reader_clock = set;
        return;
    }
    c->reader_lane = reader_lane(a, c->reader, c->reader_clock, c->reader_lane);
    c->reader = a->actor;
    c->reader_clock = a->clock;
    c->reader_ins = a->ins;
    c->reader_async = how;
    c->reader_scope = a->scope;
}

/* Neighbouring bytes mostly have the same history: what became of the last one is then copied, unless it was worth a finding. */
typedef struct {
    Cell before, after;
    bool usable;
} Repeat;

static bool repeated(Repeat *r, Cell *c) {
    if (r->usable && !memcmp(c, &r->before, sizeof *c)) {
        bool had = c->reader == MANY_READERS, has = r->after.reader == MANY_READERS;
        if (!had || !has || c->reader_clock != r->after.reader_clock) {
            if (has) sets[r->after.reader_clock].cells++;
            if (had) drop_set(c->reader_clock);
        }
        *c = r->after;
        return true;
    }
    r->before = *c;
    return false;
}

static void repeat(Repeat *r, const Cell *c, bool clean) {
    r->after = *c;
    r->usable = clean;
}

/* Worth no finding for each byte: a note, mostly. */
static bool is_clean(Order o) { return o == ORDERED || o == LANES_NOT_MET || o == TENSOR_UNORDERED; }

static Order after_writer(const Access *a, const Cell *c) {
    if (!c->writer_clock) return ORDERED;
    return order_after(a, c->writer, c->writer_clock, c->writer_lane, c->writer_async, c->writer_scope, c->writer_ins, true);
}

void history_read(Cell *cell, u64 n, const Access *a, u64 address) {
    Repeat last = {.usable = false};
    for (u64 k = 0; k < n; k++) {
        Cell *c = &cell[k];
        if (repeated(&last, c)) continue;
        bool there = c->written || a->space == SPACE_GLOBAL;
        if (!there) {
            const Warp *w = &a->cta->warp[a->warp];
            Finding *f = find_at(a->cluster->machine, UNINITIALISED, w, a->lane, a->ins, -1, address + k, n);
            if (f) f->space = a->space;
        }
        Order o = after_writer(a, c);
        if (o == UNORDERED && c->rewritten) o = ORDERED; /* it may follow the other writer of this value */
        if (o != ORDERED) conflict(a, o, RACE_WRITE_READ, c->writer, c->writer_clock, c->writer_ins, c->writer_lane, address + k);
        remember_read(c, a, false);
        repeat(&last, c, there && is_clean(o));
    }
}

/* After the readers since the last write; they are forgotten. */
static bool after_readers(const Access *a, Cell *c, u64 address) {
    Reader one = {c->reader, c->reader_clock, c->reader_ins, c->reader_lane, c->reader_async, c->reader_scope}, *readers = &one;
    s32 count = c->reader_clock != 0;
    if (c->reader == MANY_READERS) {
        readers = sets[c->reader_clock].reader;
        count = sets[c->reader_clock].count;
    }
    bool clean = true;
    for (s32 i = 0; i < count; i++) {
        Reader *r = &readers[i];
        bool wrote = r->async == REWRITES;
        Order o = order_after(a, r->actor, r->clock, r->lane, r->async == 1, r->scope, r->ins, false);
        if (wrote && r->actor == a->actor && r->clock == a->clock && r->ins == (u32)a->ins && r->lane != a->lane) o = LANES_UNORDERED;
        if (o == ORDERED) continue;
        conflict(a, o, wrote ? RACE_WRITE_WRITE : RACE_READ_WRITE, r->actor, r->clock, r->ins, r->lane, address);
        clean = clean && is_clean(o);
    }
    forget_readers(c);
    return clean;
}

void history_write(Cell *cell, u64 n, const Access *a, u64 address, const u8 *old_value, const u8 *new_value) {
    Repeat last = {.usable = false}, rewriting = {.usable = false};
    for (u64 k = 0; k < n; k++) {
        Cell *c = &cell[k];
        bool same_value = old_value && new_value && old_value[k] == new_value[k];
        if (same_value && a->space == SPACE_GLOBAL && !a->async && !a->scope) { /* nothing changes: it only must not be changed meanwhile */
            if (repeated(&rewriting, c)) continue;
            if (after_writer(a, c) != ORDERED) c->rewritten = 1;
            remember_read(c, a, true);
            repeat(&rewriting, c, true);
            continue;
        }
        if (repeated(&last, c)) continue;
        Order o = after_writer(a, c);
        bool same_instruction = c->writer_clock && c->writer == a->actor && c->writer_clock == a->clock && c->writer_ins == (u32)a->ins;
        if (o == ORDERED && same_instruction && c->writer_lane != a->lane && !a->async && !a->scope)
            o = LANES_UNORDERED; /* two lanes of one instruction */
        if (o != ORDERED && !(same_value && o != UNFENCED))
            conflict(a, o, RACE_WRITE_WRITE, c->writer, c->writer_clock, c->writer_ins, c->writer_lane, address + k);
        bool clean = after_readers(a, c, address + k) && is_clean(o);
        c->writer = a->actor;
        c->writer_clock = a->clock;
        c->writer_ins = a->ins;
        c->writer_lane = a->lane;
        c->writer_async = a->async;
        c->writer_scope = a->scope;
        c->written = 1;
        c->rewritten = 0;
        repeat(&last, c, clean);
    }
}

/* ---- grids that may run side by side (griddepcontrol) ---------------------------------------------------------------------- */

void note_grid_ahead(Region *r, u64 page) {
    const u8 *ahead = r->ahead + page * PAGE;
    u64 n = r->size - page * PAGE < PAGE ? r->size - page * PAGE : PAGE;
    for (u64 k = 0; k < n; k++) {
        Cell *c = &r->pages[page][k];
        if (ahead[k] & AHEAD_WRITES) c->writer = GRID_AHEAD, c->writer_clock = 1, c->writer_ins = (u32)-1;
        if (ahead[k] & AHEAD_READS) c->reader = GRID_AHEAD, c->reader_clock = 1, c->reader_ins = (u32)-1;
    }
}

void note_left(Region *r) {
    for (u64 k = 0; r->left && k < r->size; k++) {
        const Cell *c = r->pages && r->pages[k / PAGE] ? &r->pages[k / PAGE][k % PAGE] : NULL;
        if (!c) {
            k |= PAGE - 1;
            continue;
        }
        if (c->writer_clock && c->writer != GRID_AHEAD) r->left[k] |= AHEAD_WRITES;
        if (c->reader_clock && c->reader != GRID_AHEAD) r->left[k] |= AHEAD_READS;
        if (c->reader == MANY_READERS) r->left[k] |= AHEAD_READS;
    }
}
