/* Asynchronous copies without a tensor map: cp.async, cp.async.bulk, cp.reduce.async.bulk, st.async, red.async, and their groups.
 *
 * cp.async is of the generic proxy, all others are of the async proxy. A copy that an mbarrier tracks is done when that mbarrier's
 * phase ends; the others belong to groups of the lane that sent them. A group's clock counts the commits of the whole warp, and so does
 * cp.async.mbarrier.arrive: what came before one of these has an earlier clock than what comes after.
 */
#include "copies.h"
#include "clock.h"
#include "findings.h"
#include "knowledge.h"
#include "visits.h"

/* ---- where copies land -------------------------------------------------------------------------------------------------- */

bool shared_operand(Warp *w, const Ins *i, int k, int m, int l, u32 *address) {
    u64 a = address_operand(w, i, k, m, l);
    *address = (u32)a;
    if (!i->mod[m + PLACE_GENERIC] || a >> 56 == WINDOW_SHARED) return true;
    find(w, i, l, OUT_OF_BOUNDS, a, 0, "generic address 0x%llx is not in shared memory", (unsigned long long)a);
    return false;
}

static bool find_landing(Warp *w, const Ins *i, int l, u32 address, u32 barrier, const Target *target, u64 bytes, Landings *found) {
    Cta *cta;
    u32 offset;
    if (bytes && !shared_bytes(w, i, l, address, bytes, target->align, &cta, &offset)) return false;
    Mbarrier *b = mbarrier_at(w, i, l, barrier, true);
    if (!b) return false;
    if (b->cta == w->cta) mbarrier_fenced(b, w, i, l, &w->know);
    found->landing[found->count++] = (Landing){address, b};
    return true;
}

bool find_landings(Warp *w, const Ins *i, int l, const Target *t, u64 bytes, Landings *found) {
    found->count = 0;
    u32 named = t->barrier >> 24, ctas = (1u << w->cluster->nctas) - 1;
    if (t->mask == ALL) {
        u32 rank = t->address >> 24;
        if (t->pair ? rank / 2 != named / 2 : rank != named) {
            find(w, i, l, BAD_MBARRIER, t->barrier, 8, "the copy lands in CTA %u of the cluster, its mbarrier is in CTA %u%s", rank, named,
                 t->pair ? ", which is not its peer" : "");
            return false;
        }
        return find_landing(w, i, l, t->address, t->barrier, t, bytes, found);
    }
    if (!t->mask || (u32)t->mask & ~ctas) {
        find(w, i, l, BAD_OPERAND, 0, 0, "multicast to CTAs 0x%x of a cluster of %d", t->mask, w->cluster->nctas);
        return false;
    }
    for (u32 rest = t->mask; rest; rest &= rest - 1) {
        u32 rank = __builtin_ctz(rest), hears = t->pair ? (rank & ~1u) | (named & 1) : rank;
        if (!find_landing(w, i, l, rank << 24 | (t->address & 0xffffff), hears << 24 | (t->barrier & 0xffffff), t, bytes, found)) return false;
    }
    return true;
}

Access tracked_access(Work *work, const Mbarrier *b, HistorySpace space) {
    return work_access(work, (work->warp->cluster->serial & 0xffff) << 16 | b->actor, mbarrier_next_clock(b), space);
}

/* Shared memory of a CTA that has ended; NULL: it has not. Its own stores may still read there: kernels that run on silicon leave them. */
static u8 *ended_cta(Work *work, u32 address, u64 bytes, bool write, Granule **history, u32 *offset) {
    Warp *w = work->warp;
    const Cta *cta = cta_at(w->cluster, address);
    if (!cta || !cta->exited) return NULL;
    *offset = address & 0xffffff;
    if (work->kind != BY_CP_ASYNC && (write || cta != w->cta))
        find(w, work->ins, work->lane, PEER_EXITED, address, bytes, "CTA %d of the cluster ended while this copy from or to it was under way",
             cta->rank);
    *history = cta->shared_history;
    return cta->shared + *offset;
}

bool copy_from_shared(Work *work, const Access *a, u32 address, void *to, u64 bytes) {
    Granule *history;
    u32 offset;
    const u8 *p = ended_cta(work, address, bytes, false, &history, &offset);
    if (!p) return shared_read(work->warp, work->ins, a, address, to, bytes, 1);
    if (history) bytes_read(history, offset, bytes, a, address);
    memcpy(to, p, bytes);
    return true;
}

bool copy_to_shared(Work *work, const Access *a, u32 address, const void *from, u64 bytes) {
    Granule *history;
    u32 offset;
    u8 *p = ended_cta(work, address, bytes, true, &history, &offset);
    if (!p) return shared_write(work->warp, work->ins, a, address, from, bytes, 1);
    if (history) bytes_written(history, offset, bytes, a, address, p, from);
    memcpy(p, from, bytes);
    return true;
}

void landed(Work *work, Mbarrier *b, s64 bytes) {
    if (b->live)
        mbarrier_complete_tx(b, work->warp, work->ins, work->lane, bytes);
    else
        find(work->warp, work->ins, work->lane, BAD_MBARRIER, shared_address(b->cta, b->address), 8,
             "the mbarrier at shared address 0x%x was invalidated while it tracked this copy", b->address);
}

void land(Work *work, const Landing *to, const u8 *data, u64 bytes) {
    Access a = tracked_access(work, to->barrier, SPACE_SHARED);
    if (bytes) copy_to_shared(work, &a, to->address, data, bytes);
    landed(work, to->barrier, bytes);
}

/* An H200's copy engine keeps subnormals of f32, whatever the manual says; only maps of f32.ftz flush them. */
void combine_all(AtomicOp op, AtomicType t, u32 element, const u8 *old, u8 *x, u64 bytes, bool ftz) {
    for (u64 k = 0; k < bytes; k += element) combine(op, t, old + k, x + k, x + k, ftz);
}

/* ---- groups ------------------------------------------------------------------------------------------------------------- */

static void commit(Warp *w, Groups *g, ActorKind kind, u32 lanes) {
    u32 clock = open_clock(w, kind);
    EACH_LANE(lanes, { g->clock[l][g->committed[l]++ % GROUPS_KEPT] = clock; });
    w->async_clock[kind] = clock;
}

/* The clock of the newest group that a lane waits for, if only the n newest may stay pending; 0: there is none. */
static u32 awaited(const Groups *g, int l, u32 n) { return g->committed[l] > n ? g->clock[l][(g->committed[l] - n - 1) % GROUPS_KEPT] : 0; }

void join_group(Work *work, int l) {
    Warp *w = work->warp;
    work->kind = BY_BULK_WRITE;
    work->clock = open_clock(w, BY_BULK_WRITE);
    work->lanes |= 1u << l;
    w->bulk.sent[l] = w->bulk.committed[l] + 1;
    w->bulk.ins[l] = work->ins->index;
}

/* Shared memory lives as long as its CTA: each thread waits at least until its copies have read it. */
void bulk_groups_at_exit(const Cta *cta) {
    if (!cta->machine->launch->checks) return;
    for (s32 n = 0; n < cta->nwarps; n++) {
        Warp *w = &cta->warp[n];
        const Groups *g = &w->bulk;
        for (int l = 0; l < LANES; l++)
            if (g->sent[l] > g->awaited[l])
                find(w, &w->machine->program->ins[g->ins[l]], l, COPY_AT_EXIT, 0, 0, "this thread has not waited for its bulk group");
    }
}

static Outcome op_bulk_commit(Warp *w, const Ins *i, u32 lanes) {
    (void)i;
    commit(w, &w->bulk, BY_BULK_WRITE, lanes);
    return NEXT;
}

static Outcome op_bulk_wait(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 clock = awaited(&w->bulk, l, (u32)i->mod[BULK_WAIT_STAY]);
        if (!clock) continue;
        u32 group = w->bulk.committed[l] - (u32)i->mod[BULK_WAIT_STAY];
        if (w->bulk.awaited[l] < group) w->bulk.awaited[l] = group;
        run_groups(w, BY_BULK_WRITE, l, clock, i->mod[BULK_WAIT_READ]);
        if (w->time && !i->mod[BULK_WAIT_READ]) wake_at(w, w->time->bulk_end);
        knows_of(&w->know, actor_of(w, BY_BULK_READ), clock);
        if (!i->mod[BULK_WAIT_READ]) knows_of(&w->know, actor_of(w, BY_BULK_WRITE), clock);
    }
    return NEXT;
}

/* ---- cp.async ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    u32 lanes, size;
    u32 to[LANES], read[LANES]; /* bytes read; the others become zeros */
    u64 from[LANES];
} SmallCopies;

/* cp.async is of the generic proxy: knowing that it is done is no fence towards the async proxy. */
static void knows_cp_async(const Warp *w, Knowledge *k, u32 clock) {
    u32 *known = &k->clock[SEEN][actor_of(w, BY_CP_ASYNC) & 0xffff];
    if (*known < clock) *known = clock;
}

static void run_cp_async(Work *work) {
    const SmallCopies *c = (const SmallCopies *)work->data;
    Warp *w = work->warp;
    for (u32 rest = c->lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u8 value[16] = {0};
        Access a = work_access(work, actor_of(w, BY_CP_ASYNC), work->clock, SPACE_GLOBAL);
        a.async = false;
        a.lane = l;
        if (c->read[l]) global_read(w, work->ins, &a, c->from[l], value, c->read[l], c->size);
        a.space = SPACE_SHARED;
        copy_to_shared(work, &a, c->to[l], value, c->size);
    }
}

/* operands: shared, global, bytes to read (-1: all), a predicate that ignores the source (-1: none) */
static Outcome op_cp_async(Warp *w, const Ins *i, u32 lanes) {
    u32 size = (u32)i->mod[CP_ASYNC_BYTES], reading = 0;
    SmallCopies c = {.size = size};
    u32 ignored = i->arg[3] >= 0 ? *PRED(w, i->arg[3]) ^ (i->mod[CP_ASYNC_NEGATED] ? FULL : 0) : 0;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 bytes = i->arg[2] >= 0 ? R32(w, i->arg[2])[l] : size, offset;
        Cta *cta;
        Region *region;
        if (lane_in(ignored, l)) bytes = 0;
        if (bytes > size) {
            find(w, i, l, BAD_OPERAND, 0, 0, "a copy of %u bytes reads %u: the source may be the shorter one, not the longer", size, bytes);
            continue;
        }
        c.from[l] = address_operand(w, i, 1, CP_ASYNC_SOURCE, l);
        c.read[l] = bytes;
        if (!shared_operand(w, i, 0, CP_ASYNC_TO, l, &c.to[l]) || !shared_bytes(w, i, l, c.to[l], size, size, &cta, &offset)) continue;
        if (bytes && !global_bytes(w, i, l, c.from[l], bytes, size, false, &region)) continue;
        if (cta != w->cta) {
            find(w, i, l, BAD_OPERAND, c.to[l], size, "cp.async writes its own CTA's shared memory, not that of CTA %d", cta->rank);
            continue;
        }
        c.lanes |= 1u << l;
        if (bytes) reading |= 1u << l;
    }
    if (!c.lanes) return NEXT;
    count_wavefronts(w, i, c.lanes, c.to, size, true);
    if (reading) count_sectors(w, i, reading, c.from, size);
    Work *work = send_work(w, i, first_lane(c.lanes), NULL, run_cp_async, sizeof c);
    work->kind = BY_CP_ASYNC;
    work->clock = open_clock(w, BY_CP_ASYNC);
    work->finish = clock_copied(w);
    memcpy(work->data, &c, sizeof c);
    return NEXT;
}

static Outcome op_cp_async_commit(Warp *w, const Ins *i, u32 lanes) {
    (void)i;
    commit(w, &w->cp_async, BY_CP_ASYNC, lanes);
    return NEXT;
}

static Outcome op_cp_async_wait(Warp *w, const Ins *i, u32 lanes) {
    if (i->mod[CP_ASYNC_WAIT_ALL]) commit(w, &w->cp_async, BY_CP_ASYNC, lanes);
    u32 newest = 0;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        u32 clock = awaited(&w->cp_async, first_lane(rest), (u32)i->mod[CP_ASYNC_WAIT_STAY]);
        if (clock > newest) newest = clock;
    }
    if (!newest) return NEXT;
    run_groups(w, BY_CP_ASYNC, ALL, newest, false);
    knows_cp_async(w, &w->know, newest);
    return NEXT;
}

typedef struct {
    u32 lanes;
    Mbarrier *barrier[LANES];
} Arrivals;

static void run_arrivals(Work *work) {
    const Arrivals *a = (const Arrivals *)work->data;
    run_groups(work->warp, BY_CP_ASYNC, ALL, work->clock, false);
    const Mbarrier *ended = NULL; /* the one whose phase an earlier lane of this instruction has ended */
    for (u32 rest = a->lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Mbarrier *b = a->barrier[l];
        if (!b->live) {
            landed(work, b, 0);
            continue;
        }
        if (b == ended) mbarrier_too_few(b, work->warp, work->ins, l);
        u64 phase = b->phase;
        knows_cp_async(work->warp, &b->arriving, work->clock);
        mbarrier_arrive(b, work->warp, work->ins, l, 1, NULL);
        if (b->phase != phase) ended = b;
    }
}

/* cp.async.mbarrier.arrive: arrives when all that the lane has sent off is done. operand: mbarrier */
static Outcome op_cp_async_arrive(Warp *w, const Ins *i, u32 lanes) {
    enum { MOST_PENDING = (1 << 20) - 1 };
    Arrivals a = {0};
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 address;
        Mbarrier *b = shared_operand(w, i, 0, CP_ASYNC_ARRIVE_MBARRIER, l, &address) ? mbarrier_at(w, i, l, address, true) : NULL;
        if (!b) continue;
        if (!i->mod[CP_ASYNC_ARRIVE_NOINC] && ++b->pending > MOST_PENDING)
            find(w, i, l, BAD_MBARRIER, address, 8, "more than %d arrivals pending at the mbarrier at shared address 0x%x", MOST_PENDING, b->address);
        a.barrier[l] = b;
        a.lanes |= 1u << l;
    }
    if (!a.lanes) return NEXT;
    Work *work = send_work(w, i, first_lane(a.lanes), NULL, run_arrivals, sizeof a);
    work->clock = w->async_clock[BY_CP_ASYNC] = open_clock(w, BY_CP_ASYNC);
    if (w->time) work->finish = w->time->copies_end > work->sent ? w->time->copies_end : work->sent;
    memcpy(work->data, &a, sizeof a);
    return NEXT;
}

/* ---- cp.async.bulk ------------------------------------------------------------------------------------------------------ */

typedef struct {
    Landings to;
    u64 global;
    u32 shared, size, byte_mask;
    s32 op, type, element;
} Bulk;

static bool bulk_size(Warp *w, const Ins *i, int operand, int l, u32 *size) {
    *size = R32(w, i->arg[operand])[l];
    if (*size % 16 == 0) return true;
    find(w, i, l, BAD_OPERAND, 0, *size, "a bulk copy of %u bytes: the size must be a multiple of 16", *size);
    return false;
}

static bool own_shared(Warp *w, const Ins *i, int l, u32 address, u32 size, const char *what) {
    Cta *cta = w->cta;
    u32 offset;
    if (size && !shared_bytes(w, i, l, address, size, 16, &cta, &offset)) return false;
    if (cta == w->cta) return true;
    find(w, i, l, BAD_OPERAND, address, size, "the %s is in CTA %d of the cluster; .shared::cta is the CTA's own, %d", what, cta->rank, w->cta->rank);
    return false;
}

static Work *send_bulk(Warp *w, const Ins *i, int l, void (*run)(Work *), const Bulk *bulk) {
    Work *work = send_work(w, i, l, NULL, run, sizeof *bulk);
    memcpy(work->data, bulk, sizeof *bulk);
    return work;
}

static void run_bulk_load(Work *work) {
    const Bulk *c = (const Bulk *)work->data;
    u8 *data = malloc(c->size + 1);
    Access a = tracked_access(work, c->to.landing[0].barrier, SPACE_GLOBAL);
    if (c->size) global_read(work->warp, work->ins, &a, c->global, data, c->size, 16);
    add_sectors(work->warp, work->ins, c->global, c->size);
    for (s32 k = 0; k < c->to.count; k++) land(work, &c->to.landing[k], data, c->size);
    free(data);
}

/* global to shared. operands: destination, source, size, mbarrier, CTAs of a multicast (-1) */
static Outcome op_bulk_load(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Bulk c = {.global = address_operand(w, i, 1, BULK_LOAD_SOURCE, l)};
        Target t = {.mask = i->arg[4] >= 0 ? (s32)(R32(w, i->arg[4])[l] & 0xffff) : ALL, .align = 16};
        Region *region;
        if (!bulk_size(w, i, 2, l, &c.size) || !shared_operand(w, i, 0, BULK_LOAD_TO, l, &t.address)) continue;
        if (!shared_operand(w, i, 3, BULK_LOAD_MBARRIER, l, &t.barrier)) continue;
        if (i->mod[BULK_LOAD_OWN_CTA] && !own_shared(w, i, l, t.address, c.size, "destination")) continue;
        if (c.size && !global_bytes(w, i, l, c.global, c.size, 16, false, &region)) continue;
        if (find_landings(w, i, l, &t, c.size, &c.to)) send_bulk(w, i, l, run_bulk_load, &c)->finish = clock_bulk(w, i, c.global, c.size, false);
    }
    return NEXT;
}

static void run_bulk_send(Work *work) {
    const Bulk *c = (const Bulk *)work->data;
    const Landing *to = &c->to.landing[0];
    u8 *data = malloc(2 * (u64)c->size + 1), *old = data + c->size;
    Access a = tracked_access(work, to->barrier, SPACE_SHARED);
    if (c->size) copy_from_shared(work, &a, c->shared, data, c->size);
    if (c->op != PLAIN) {
        a.scope = SCOPE_GPU;
        if (c->size && copy_from_shared(work, &a, to->address, old, c->size)) {
            combine_all(c->op, c->type, c->element, old, data, c->size, false);
            copy_to_shared(work, &a, to->address, data, c->size);
        }
        landed(work, to->barrier, c->size);
    } else
        land(work, to, data, c->size);
    free(data);
}

/* a CTA's shared memory to another's. operands: destination, source, size, mbarrier */
static Outcome op_bulk_send(Warp *w, const Ins *i, u32 lanes) {
    const s64 *reduction = i->mod + BULK_SEND_REDUCTION;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Bulk c = {.op = (s32)reduction[REDUCTION_OP], .type = (s32)reduction[REDUCTION_TYPE], .element = (s32)reduction[REDUCTION_BYTES]};
        Target t = {.mask = ALL, .align = 16};
        if (!bulk_size(w, i, 2, l, &c.size) || !shared_operand(w, i, 0, BULK_SEND_TO, l, &t.address)) continue;
        if (!shared_operand(w, i, 1, BULK_SEND_SOURCE, l, &c.shared)) continue;
        if (!shared_operand(w, i, 3, BULK_SEND_MBARRIER, l, &t.barrier) || !own_shared(w, i, l, c.shared, c.size, "source")) continue;
        if (cta_at(w->cluster, t.address) == w->cta) {
            find(w, i, l, BAD_OPERAND, t.address, c.size, "from .shared::cta to .shared::cluster the destination must be another CTA's");
            continue;
        }
        if (!find_landings(w, i, l, &t, c.size, &c.to)) continue;
        send_bulk(w, i, l, run_bulk_send, &c)->finish = clock_to_peer(w, i, c.size);
        note_copy(w, i, l, c.to.landing[0].barrier);
    }
    return NEXT;
}

static void write_masked(Work *work, const Access *a, const Bulk *c, const u8 *data) { /* bit k of the mask: byte k of each 16 */
    for (u32 offset = 0; offset < c->size;) {
        u32 n = 0;
        while (offset + n < c->size && c->byte_mask >> (offset + n) % 16 & 1) n++;
        if (n) global_write(work->warp, work->ins, a, c->global + offset, data + offset, n, 1);
        offset += n ? n : 1;
    }
}

static void run_bulk_store(Work *work) {
    const Bulk *c = (const Bulk *)work->data;
    Warp *w = work->warp;
    u8 *data = malloc(2 * (u64)c->size + 1), *old = data + c->size;
    Access from = work_access(work, actor_of(w, BY_BULK_READ), work->clock, SPACE_SHARED);
    Access to = work_access(work, actor_of(w, BY_BULK_WRITE), work->clock, SPACE_GLOBAL);
    if (c->size && copy_from_shared(work, &from, c->shared, data, c->size)) {
        if (c->op != PLAIN) {
            to.scope = SCOPE_GPU;
            global_read(w, work->ins, &to, c->global, old, c->size, 16);
            combine_all(c->op, c->type, c->element, old, data, c->size, false);
        }
        if (c->byte_mask == 0xffff)
            global_write(w, work->ins, &to, c->global, data, c->size, 16);
        else
            write_masked(work, &to, c, data);
        add_sectors(w, work->ins, c->global, c->size);
    }
    free(data);
}

/* shared to global; lanes that ask for one and the same copy get one, as on silicon. operands: destination, source, size, byte mask (-1) */
static Outcome op_bulk_store(Warp *w, const Ins *i, u32 lanes) {
    const s64 *reduction = i->mod + BULK_STORE_REDUCTION;
    Work *sent = NULL;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Bulk c = {.global = address_operand(w, i, 0, BULK_STORE_TO, l), .op = (s32)reduction[REDUCTION_OP],
                  .type = (s32)reduction[REDUCTION_TYPE], .element = (s32)reduction[REDUCTION_BYTES]};
        c.byte_mask = i->arg[3] >= 0 ? R32(w, i->arg[3])[l] & 0xffff : 0xffff;
        Region *region;
        if (!bulk_size(w, i, 2, l, &c.size) || !shared_operand(w, i, 1, BULK_STORE_SOURCE, l, &c.shared)) continue;
        if (!own_shared(w, i, l, c.shared, c.size, "source")) continue;
        if (c.size && !global_bytes(w, i, l, c.global, c.size, 16, true, &region)) continue;
        const Bulk *other = sent ? (const Bulk *)sent->data : NULL;
        if (other && c.op == PLAIN && other->global == c.global && other->shared == c.shared && other->size == c.size &&
            other->byte_mask == c.byte_mask) {
            join_group(sent, l);
            continue;
        }
        join_group(sent = send_bulk(w, i, l, run_bulk_store, &c), l);
        sent->finish = clock_bulk(w, i, c.global, c.size, true);
        sent->read = clock_read(w);
    }
    return NEXT;
}

/* operands: source, size. Its only effect: an address that cannot be. */
static Outcome op_bulk_prefetch(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 size;
        Region *region;
        if (bulk_size(w, i, 1, l, &size) && size) global_bytes(w, i, l, address_operand(w, i, 0, BULK_PREFETCH_SOURCE, l), size, 16, false, &region);
    }
    return NEXT;
}

/* ---- st.async and red.async --------------------------------------------------------------------------------------------- */

typedef struct {
    u32 lanes, bytes;
    s32 op, type;
    u8 scope;
    struct {
        Landing to;
        u8 value[32];
    } lane[LANES];
} Stores;

static void run_stores(Work *work) {
    Stores *s = (Stores *)work->data;
    for (u32 rest = s->lanes; rest; rest &= rest - 1) {
        int l = work->lane = first_lane(rest);
        const Landing *to = &s->lane[l].to;
        u8 old[32];
        Access a = tracked_access(work, to->barrier, SPACE_SHARED);
        a.scope = s->scope;
        if (s->op == PLAIN || copy_from_shared(work, &a, to->address, old, s->bytes)) {
            if (s->op != PLAIN) combine(s->op, s->type, old, s->lane[l].value, s->lane[l].value, false);
            copy_to_shared(work, &a, to->address, s->lane[l].value, s->bytes);
        }
        landed(work, to->barrier, s->bytes);
    }
}

/* operands: address, mbarrier, values */
static Outcome op_st_async(Warp *w, const Ins *i, u32 lanes) {
    u32 element = (u32)i->mod[ST_ASYNC_BYTES], count = (u32)i->mod[ST_ASYNC_COUNT];
    Stores s = {.bytes = element * count, .op = (s32)i->mod[ST_ASYNC_OP], .type = (s32)i->mod[ST_ASYNC_TYPE], .scope = (u8)i->mod[ST_ASYNC_SCOPE]};
    if (w->cluster->nctas == 1) {
        find(w, i, first_lane(lanes), BAD_OPERAND, 0, 0, "it needs a cluster of more than one CTA");
        return NEXT;
    }
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Target t = {.mask = ALL, .align = s.bytes};
        Landings to;
        if (!shared_operand(w, i, 0, ST_ASYNC_TO, l, &t.address) || !shared_operand(w, i, 1, ST_ASYNC_MBARRIER, l, &t.barrier)) continue;
        if (!find_landings(w, i, l, &t, s.bytes, &to)) continue;
        if (s.op != PLAIN && to.landing[0].barrier->cta == w->cta) {
            find(w, i, l, BAD_OPERAND, t.address, s.bytes, "red.async acts on the shared memory of another CTA than its own");
            continue;
        }
        s.lane[l].to = to.landing[0];
        for (u32 e = 0; e < count; e++) {
            const u8 *value = element == 8 ? (u8 *)&R64(w, i->arg[2 + e])[l] : (u8 *)&R32(w, i->arg[2 + e])[l];
            memcpy(s.lane[l].value + e * element, value, element);
        }
        s.lanes |= 1u << l;
    }
    if (!s.lanes) return NEXT;
    Work *work = send_work(w, i, first_lane(s.lanes), NULL, run_stores, sizeof s);
    work->finish = clock_to_peer(w, i, (u64)s.bytes * __builtin_popcount(s.lanes));
    memcpy(work->data, &s, sizeof s);
    return NEXT;
}

const HandlerEntry copies_handlers[] = {
    {"cp_async", op_cp_async}, {"cp_async_commit", op_cp_async_commit}, {"cp_async_wait", op_cp_async_wait}, {"cp_async_arrive", op_cp_async_arrive},
    {"bulk_load", op_bulk_load}, {"bulk_send", op_bulk_send}, {"bulk_store", op_bulk_store}, {"bulk_prefetch", op_bulk_prefetch},
    {"bulk_commit", op_bulk_commit}, {"bulk_wait", op_bulk_wait}, {"st_async", op_st_async}, {0},
};
