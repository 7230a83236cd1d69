/* The last accesses of every byte of memory and of every cell of tensor memory, and whether a new one is ordered after them.
 *
 * An access is ordered after an earlier one if its actor knows that one's clock. An access of the async proxy asks for more: an
 * earlier write by the generic proxy must have been fenced (views FENCED_*). So does an access to tensor memory: threads' tcgen05
 * operations are ordered by fences on both sides of what synchronises the threads (BEFORE_*). Two lanes of a warp that touch a byte
 * must have met in between (bar.warp.sync, or a barrier).
 */
#include "findings.h"
#include "history.h"
#include "knowledge.h"

enum { MANY_READERS = 0xffffffffu };

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

/* Does an access to tensor memory need no fence after the last synchronisation? Only dealloc's access is synchronous. */
static bool before_tensor(const Access *a, u32 index, u32 clock) {
    return a->know->clock[BEFORE_TENSOR][index] >= clock || (!a->async && a->know->clock[BEFORE_SYNC][index] >= clock);
}

/* Is this access ordered after an earlier one, which it knows of, by a lane of a warp of this cluster? */
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

/* Do two strong accesses include each other's threads in their scopes? */
static bool morally_strong(const Access *a, u8 own_scope, u32 actor, u8 scope) {
    if (!scope || !own_scope) return false;
    if ((scope >= SCOPE_CLUSTER || actor == a->actor) && (own_scope >= SCOPE_CLUSTER || actor == a->actor)) return true;
    return actor >> 16 == a->actor >> 16 && a->cluster->nctas == 1;
}

static Order order_after(const Access *a, u32 actor, u32 clock, u8 lane, u8 async, u8 scope, s32 ins, bool earlier_was_write) {
    if (actor == GRID_AHEAD) return a->know->grid_ahead ? ORDERED : GRIDS_UNORDERED;
    if (morally_strong(a, a->scope, actor, scope)) return ORDERED;
    if (!knows(a->cluster, a->know, SEEN, actor, clock)) return UNORDERED;
    if (a->space == SPACE_TMEM) return before_tensor(a, actor & 0xffff, clock) ? ORDERED : TENSOR_UNORDERED;
    if (actor == a->actor && async) return ORDERED;
    bool by_lane = !async && (actor & 0xffff) < (u32)a->cluster->nwarps && actor >> 16 == a->actor >> 16;
    Order lanes = by_lane ? after_lane(a, actor & 0xffff, clock, lane, ins) : ORDERED;
    if (lanes != ORDERED || actor == a->actor) return lanes;
    if (a->async && !async && earlier_was_write && !knows(a->cluster, a->know, a->space == SPACE_GLOBAL ? FENCED_GLOBAL : FENCED_SHARED, actor, clock))
        return UNFENCED;
    return ORDERED;
}

/* Names the instruction that would order this access's tcgen05 operation after another one; it knows that the other one has been sent off. */
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
        bool same_cluster = actor >> 16 == (a->cluster->serial & 0xffff), of_a_warp = index < KINDS_OF_ACTOR * nwarps;
        f->space = a->space;
        f->actor = (a->actor & 0xffff) < KINDS_OF_ACTOR * nwarps ? (a->actor & 0xffff) / nwarps : KINDS_OF_ACTOR;
        if (actor != GRID_AHEAD) {
            f->other_actor = of_a_warp ? index / nwarps : KINDS_OF_ACTOR;
            f->other_warp = of_a_warp ? (s32)(index % nwarps) : -1;
            f->other_cluster = same_cluster ? (s32)a->cluster->serial - 1 : m->total_clusters <= 0xffff ? (s32)(actor >> 16) - 1 : -1;
        }
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

static u32 new_set(void) { /* a set of one cell */
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

static void drop_set(u32 set) { /* one of its cells lets go of it */
    if (--sets[set].cells) return;
    sets[set].count = 0;
    free_sets[nfree_sets++] = set;
}

static void free_reader_sets(void) {
    for (u32 i = 0; i < nsets; i++) free(sets[i].reader);
    free(sets);
    free(free_sets);
    sets = NULL;
    free_sets = NULL;
    nsets = room_for_sets = nfree_sets = 0;
}

/* The lane that has read; SEVERAL if another lane of its warp has read since the two last met. */
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

static u32 own_set(u32 set) { /* a set with the same readers for one cell alone */
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

/* Returns the readers since the last write; `one` is room for a single reader. */
static const Reader *readers_of(const Cell *c, Reader *one, s32 *count) {
    if (c->reader == MANY_READERS) {
        *count = sets[c->reader_clock].count;
        return sets[c->reader_clock].reader;
    }
    *one = (Reader){c->reader, c->reader_clock, c->reader_ins, c->reader_lane, c->reader_async, c->reader_scope};
    *count = c->reader_clock != 0;
    return one;
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
    bool covered = !c->reader_clock || c->reader == a->actor || (c->reader_async != 1 && knows(a->cluster, a->know, SEEN, c->reader, c->reader_clock));
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

/* Neighbours mostly have the same history: what became of the last one is then copied, unless it was worth a finding. */
typedef struct {
    Cell before, after;
    bool usable;
} Repeat;

static inline bool same_cell(const Cell *a, const Cell *b) {
    u64 x[4], y[4];
    _Static_assert(sizeof *a == sizeof x, "a cell has 32 bytes");
    memcpy(x, a, sizeof x);
    memcpy(y, b, sizeof y);
    return !((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3]));
}

static inline bool repeated(Repeat *r, Cell *c) {
    if (r->usable && same_cell(c, &r->before)) {
        bool had = c->reader == MANY_READERS, has = r->after.reader == MANY_READERS;
        if ((had || has) && (!had || !has || c->reader_clock != r->after.reader_clock)) {
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

/* Such an order is not worth a finding for each byte: at most it is a note. */
static bool is_clean(Order o) { return o == ORDERED || o == LANES_NOT_MET || o == TENSOR_UNORDERED; }

static Order after_writer(const Access *a, const Cell *c) {
    if (!c->writer_clock) return ORDERED;
    return order_after(a, c->writer, c->writer_clock, c->writer_lane, c->writer_async, c->writer_scope, c->writer_ins, true);
}

/* Reports what the read of a byte (or cell) breaks; the access has n of them. Returns whether the read is clean. */
static bool check_read(const Cell *c, const Access *a, u64 address, u64 n) {
    bool initialised = c->written || a->space == SPACE_GLOBAL;
    if (!initialised) {
        const Warp *w = &a->cta->warp[a->warp];
        Finding *f = find_at(a->cluster->machine, UNINITIALISED, w, a->lane, a->ins, -1, address, n);
        if (f) f->space = a->space;
    }
    Order o = after_writer(a, c);
    if (o == UNORDERED && c->rewritten) o = ORDERED; /* it may follow the other writer of this value */
    if (o != ORDERED) conflict(a, o, RACE_WRITE_READ, c->writer, c->writer_clock, c->writer_ins, c->writer_lane, address);
    return initialised && is_clean(o);
}

/* Reads a cell that stands for `bytes` bytes with one history; if the first byte is not clean, all are checked. */
static inline void read_cell(Repeat *last, Cell *c, u64 bytes, const Access *a, u64 address, u64 n) {
    if (repeated(last, c)) return;
    bool clean = check_read(c, a, address, n);
    for (u64 k = 1; k < bytes && !clean; k++) check_read(c, a, address + k, n);
    remember_read(c, a, false);
    repeat(last, c, clean);
}

void history_read(Cell *cell, u64 n, const Access *a, u64 address) {
    Repeat last = {.usable = false};
    for (u64 k = 0; k < n; k++) read_cell(&last, &cell[k], 1, a, address + k, n);
}

/* Is this access ordered after all readers since the last write? */
static bool after_readers(const Access *a, const Cell *c, u64 address) {
    Reader one;
    s32 count;
    const Reader *readers = readers_of(c, &one, &count);
    bool clean = true;
    for (s32 i = 0; i < count; i++) {
        const Reader *r = &readers[i];
        bool wrote = r->async == REWRITES;
        Order o = order_after(a, r->actor, r->clock, r->lane, r->async == 1, r->scope, r->ins, false);
        if (wrote && r->actor == a->actor && r->clock == a->clock && r->ins == (u32)a->ins && r->lane != a->lane) o = LANES_UNORDERED;
        if (o == ORDERED) continue;
        conflict(a, o, wrote ? RACE_WRITE_WRITE : RACE_READ_WRITE, r->actor, r->clock, r->ins, r->lane, address);
        clean = clean && is_clean(o);
    }
    return clean;
}

/* Has this thread read what the last writer wrote, by a strong read? Then observation orders that write, though not what came before it,
 * ahead of what the thread does next: a lock is reset by whoever has seen the count of the others. */
static bool has_observed(const Access *a, const Cell *c) {
    Reader one;
    s32 count;
    const Reader *readers = readers_of(c, &one, &count);
    for (s32 i = 0; i < count; i++) {
        const Reader *r = &readers[i];
        bool same_thread = r->actor == a->actor && (r->lane == a->lane || r->clock <= a->lanes_met);
        if (same_thread && !r->async && morally_strong(a, r->scope, c->writer, c->writer_scope)) return true;
    }
    return false;
}

static bool check_write(const Cell *c, const Access *a, u64 address, bool same_value) {
    Order o = after_writer(a, c);
    if (o == UNORDERED && !a->async && has_observed(a, c)) o = ORDERED;
    bool same_instruction = c->writer_clock && c->writer == a->actor && c->writer_clock == a->clock && c->writer_ins == (u32)a->ins;
    if (o == ORDERED && same_instruction && c->writer_lane != a->lane && !a->async && !a->scope)
        o = LANES_UNORDERED; /* two lanes of one instruction */
    if (o != ORDERED && !(same_value && o != UNFENCED))
        conflict(a, o, RACE_WRITE_WRITE, c->writer, c->writer_clock, c->writer_ins, c->writer_lane, address);
    return after_readers(a, c, address) && is_clean(o);
}

/* `same` has a bit for each byte: whether the byte keeps its value */
static inline void write_cell(Repeat *last, Cell *c, u64 bytes, const Access *a, u64 address, u32 same) {
    if (repeated(last, c)) return;
    bool clean = check_write(c, a, address, same & 1);
    for (u64 k = 1; k < bytes && !clean; k++) check_write(c, a, address + k, same >> k & 1);
    forget_readers(c);
    c->writer = a->actor;
    c->writer_clock = a->clock;
    c->writer_ins = a->ins;
    c->writer_lane = a->lane;
    c->writer_async = a->async || a->in_either;
    c->writer_scope = a->scope;
    c->written = 1;
    c->rewritten = 0;
    repeat(last, c, clean);
}

static void rewrite_cell(Repeat *last, Cell *c, const Access *a) { /* nothing changes: it only must not be changed meanwhile */
    if (repeated(last, c)) return;
    if (after_writer(a, c) != ORDERED) c->rewritten = 1;
    remember_read(c, a, true);
    repeat(last, c, true);
}

void history_write(Cell *cell, u64 n, const Access *a, u64 address) {
    Repeat last = {.usable = false};
    for (u64 k = 0; k < n; k++) write_cell(&last, &cell[k], 1, a, address + k, 0);
}

/* ---- bytes ---------------------------------------------------------------------------------------------------------------- */

/* The history of GRANULE bytes is one cell as long as accesses have them all; else it is split into one for each byte. Full accesses
 * make it one again. */
typedef Cell SplitCells[GRANULE];
enum { WHOLE = (1 << GRANULE) - 1 };
#define SPLIT 0xfffffffeu /* in the place of a writer: its clock is the index of a split */
static SplitCells *splits;
static u32 nsplits, room_for_splits, *free_splits, nfree_splits;

static Cell *split_cells(Granule *g) { /* the cells of its bytes */
    Cell *whole = &g->cell;
    if (whole->writer == SPLIT) return splits[whole->writer_clock];
    if (!nfree_splits && nsplits == room_for_splits) {
        room_for_splits = room_for_splits ? 2 * room_for_splits : 4096;
        splits = realloc(splits, room_for_splits * sizeof *splits);
        free_splits = realloc(free_splits, room_for_splits * sizeof *free_splits);
    }
    u32 index = nfree_splits ? free_splits[--nfree_splits] : nsplits++;
    for (int k = 0; k < GRANULE; k++) splits[index][k] = *whole;
    if (whole->reader == MANY_READERS) sets[whole->reader_clock].cells += GRANULE - 1;
    *whole = (Cell){.writer = SPLIT, .writer_clock = index};
    return splits[index];
}

static void unite(Granule *g) { /* a split one, if its bytes have the same history by now */
    u32 index = g->cell.writer_clock;
    const Cell *c = splits[index];
    for (int k = 1; k < GRANULE; k++)
        if (!same_cell(c, &c[k])) return;
    if (c->reader == MANY_READERS) sets[c->reader_clock].cells -= GRANULE - 1;
    g->cell = *c;
    free_splits[nfree_splits++] = index;
}

void free_histories(void) {
    free_reader_sets();
    free(splits);
    free(free_splits);
    splits = NULL;
    free_splits = NULL;
    nsplits = room_for_splits = nfree_splits = 0;
}

void copy_cells(const Granule *granule, u64 offset, u64 n, Cell *to) {
    for (u64 k = offset; k < offset + n; k++) {
        const Cell *c = &granule[k / GRANULE].cell;
        *to++ = c->writer == SPLIT ? splits[c->writer_clock][k % GRANULE] : *c;
    }
}

void forget_bytes(Granule *granule, u64 bytes) {
    if (nsets == nfree_sets && nsplits == nfree_splits) return;
    for (u64 g = 0; g < granules(bytes); g++) {
        bool split = granule[g].cell.writer == SPLIT;
        Cell *c = split ? splits[granule[g].cell.writer_clock] : &granule[g].cell;
        for (int k = 0; k < (split ? GRANULE : 1); k++) forget_readers(&c[k]);
        if (split) free_splits[nfree_splits++] = granule[g].cell.writer_clock;
    }
}

void bytes_read(Granule *granule, u64 offset, u64 n, const Access *a, u64 address) {
    Repeat last = {.usable = false};
    for (u64 end = offset + n, first = offset; offset < end;) {
        Granule *g = &granule[offset / GRANULE];
        u64 from = offset % GRANULE, piece = GRANULE - from < end - offset ? GRANULE - from : end - offset;
        if (piece == GRANULE && g->cell.writer != SPLIT)
            read_cell(&last, &g->cell, GRANULE, a, address + (offset - first), n);
        else {
            Cell *c = split_cells(g);
            for (u64 k = 0; k < piece; k++) read_cell(&last, &c[from + k], 1, a, address + (offset - first) + k, n);
            if (piece == GRANULE) unite(g);
        }
        offset += piece;
    }
}

void bytes_written(Granule *granule, u64 offset, u64 n, const Access *a, u64 address, const u8 *old_value, const u8 *new_value) {
    Repeat last = {.usable = false}, rewriting = {.usable = false};
    bool may_rewrite = a->space == SPACE_GLOBAL && !a->async && !a->scope;
    for (u64 end = offset + n, first = offset; offset < end;) {
        Granule *g = &granule[offset / GRANULE];
        u64 from = offset % GRANULE, piece = GRANULE - from < end - offset ? GRANULE - from : end - offset, done = offset - first;
        u32 same = 0;
        for (u64 k = 0; old_value && k < piece; k++) same |= (u32)(old_value[done + k] == new_value[done + k]) << k;
        if (piece == GRANULE && g->cell.writer != SPLIT && (!may_rewrite || !same || same == WHOLE)) {
            if (may_rewrite && same)
                rewrite_cell(&rewriting, &g->cell, a);
            else
                write_cell(&last, &g->cell, GRANULE, a, address + done, same);
        } else {
            Cell *c = split_cells(g) + from;
            for (u64 k = 0; k < piece; k++)
                if (may_rewrite && same >> k & 1)
                    rewrite_cell(&rewriting, &c[k], a);
                else
                    write_cell(&last, &c[k], 1, a, address + done + k, same >> k & 1);
            if (piece == GRANULE) unite(g);
        }
        offset += piece;
    }
}

/* ---- grids that may run side by side (griddepcontrol) ---------------------------------------------------------------------- */

static u64 pages_of(const Region *r) { return (r->address % GRANULE + r->size) / PAGE + 1; }
static u64 skew(const Region *r) { return r->address % GRANULE; } /* granules lie at multiples of their size */

void note_grid_ahead(Region *r, u64 page) {
    for (u64 k = 0; k < PAGE; k++) {
        u64 offset = page * PAGE + k - skew(r); /* far too large before the region */
        u8 ahead = offset < r->size ? r->ahead[offset] : 0;
        if (!ahead) continue;
        Cell *c = &split_cells(&r->pages[page][k / GRANULE])[k % GRANULE];
        if (ahead & AHEAD_WRITES) c->writer = GRID_AHEAD, c->writer_clock = 1, c->writer_ins = (u32)-1;
        if (ahead & AHEAD_READS) c->reader = GRID_AHEAD, c->reader_clock = 1, c->reader_ins = (u32)-1;
    }
    for (u64 k = 0; k < PAGE / GRANULE; k++)
        if (r->pages[page][k].cell.writer == SPLIT) unite(&r->pages[page][k]);
}

void note_left(Region *r) {
    for (u64 k = 0; r->left && k < r->size; k++) {
        u64 position = k + skew(r);
        const Granule *page = r->pages ? r->pages[position / PAGE] : NULL;
        if (!page) {
            k = (position | (PAGE - 1)) - skew(r);
            continue;
        }
        Cell c;
        copy_cells(page, position % PAGE, 1, &c);
        if (c.writer_clock && c.writer != GRID_AHEAD) r->left[k] |= AHEAD_WRITES;
        if (c.reader_clock && c.reader != GRID_AHEAD) r->left[k] |= AHEAD_READS;
        if (c.reader == MANY_READERS) r->left[k] |= AHEAD_READS;
    }
}

void region_history(Region *r, u64 offset, u64 n, const Access *a, const u8 *old_value, const u8 *new_value, bool write) {
    u64 address = r->address + offset;
    if (!r->pages) r->pages = calloc(pages_of(r), sizeof *r->pages);
    for (offset += skew(r); n;) {
        u64 page = offset / PAGE, in_page = offset % PAGE, piece = PAGE - in_page < n ? PAGE - in_page : n;
        if (!r->pages[page]) {
            r->pages[page] = calloc(PAGE / GRANULE, sizeof(Granule));
            if (r->ahead) note_grid_ahead(r, page);
        }
        if (write)
            bytes_written(r->pages[page], in_page, piece, a, address, old_value, new_value);
        else
            bytes_read(r->pages[page], in_page, piece, a, address);
        offset += piece;
        address += piece;
        n -= piece;
        if (old_value) old_value += piece, new_value += piece;
    }
}

void free_pages(Region *r) {
    if (!r->pages) return;
    for (u64 p = 0; p < pages_of(r); p++) free(r->pages[p]);
    free(r->pages);
    r->pages = NULL;
}
