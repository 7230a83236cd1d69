/* A launch from start to end: clusters made and unmade, findings kept, and the entry that Python calls. */
#include "machine.h"

#include <fenv.h>
#include <stdarg.h>
#include <stdio.h>

void run_machine(Machine *m);   /* warps.c */
void free_reader_sets(void);    /* history.c */

#define EXPORT __attribute__((visibility("default")))
enum { MBARRIERS_OF_A_CTA = 128 };

/* ---- findings ----------------------------------------------------------------------------------------------------------- */

Finding *find_at(Machine *m, FindingKind kind, const Warp *w, int lane, s32 ins, s32 other_ins, u64 address, u64 size) {
    Launch *launch = m->launch;
    static s32 last; /* the one that was asked for last time is mostly asked for again */
    for (s32 n = 0; n <= launch->nfindings; n++) {
        s32 k = n ? n - 1 : last;
        if (k >= launch->nfindings) continue;
        Finding *f = &launch->findings[k];
        bool same_place = f->ins == ins && f->other_ins == other_ins;
        bool same_warp = kind != DEADLOCK && kind != DIVERGED ? true : f->cta == (s32)w->cta->linear && f->warp == w->index;
        if (f->kind == (s32)kind && same_place && same_warp) {
            last = k;
            f->count++;
            return f;
        }
    }
    if (launch->nfindings == launch->max_findings) return NULL;
    Finding *f = &launch->findings[launch->nfindings++];
    *f = (Finding){.kind = kind, .ins = ins, .other_ins = other_ins, .cta = (s32)w->cta->linear, .warp = w->index, .lane = lane,
                   .other_actor = -1, .address = address, .size = size, .count = 1};
    if (launch->fatal >> kind & 1) launch->stopped = 1;
    return f;
}

Finding *find(Warp *w, const Ins *i, int lane, FindingKind kind, u64 address, u64 size, const char *format, ...) {
    Finding *f = find_at(w->machine, kind, w, lane, i->index, -1, address, size);
    if (f && f->count == 1) {
        va_list values;
        va_start(values, format);
        vsnprintf(f->text, sizeof f->text, format, values);
        va_end(values);
    }
    return f;
}

void stop(Machine *m) { m->launch->stopped = 1; }

/* ---- registers at the start --------------------------------------------------------------------------------------------- */

static u64 linear_id(const u32 id[3], const u32 size[3]) { return id[0] + (u64)size[0] * (id[1] + (u64)size[1] * id[2]); }

static u64 source_value(const Warp *w, const ConstantRecord *r, int l) {
    const Launch *launch = w->machine->launch;
    const Cta *cta = w->cta;
    const u32 *block = launch->block, *size = launch->cluster;
    u32 t = w->index * LANES + l;
    u32 tid[3] = {t % block[0], t / block[0] % block[1], t / (block[0] * block[1])};
    u32 at[3] = {cta->rank % size[0], cta->rank / size[0] % size[1], cta->rank / (size[0] * size[1])};
    s32 s = r->source;
    u32 below = (1u << l) - 1;
    switch (s) {
    case SR_TID_X: case SR_TID_Y: case SR_TID_Z: return tid[s - SR_TID_X];
    case SR_NTID_X: case SR_NTID_Y: case SR_NTID_Z: return block[s - SR_NTID_X];
    case SR_CTAID_X: case SR_CTAID_Y: case SR_CTAID_Z: return cta->id[s - SR_CTAID_X];
    case SR_NCTAID_X: case SR_NCTAID_Y: case SR_NCTAID_Z: return launch->grid[s - SR_NCTAID_X];
    case SR_CLUSTERID_X: case SR_CLUSTERID_Y: case SR_CLUSTERID_Z: return w->cluster->id[s - SR_CLUSTERID_X];
    case SR_NCLUSTERID_X: case SR_NCLUSTERID_Y: case SR_NCLUSTERID_Z: return launch->grid[s - SR_NCLUSTERID_X] / size[s - SR_NCLUSTERID_X];
    case SR_CLUSTER_CTAID_X: case SR_CLUSTER_CTAID_Y: case SR_CLUSTER_CTAID_Z: return at[s - SR_CLUSTER_CTAID_X];
    case SR_CLUSTER_NCTAID_X: case SR_CLUSTER_NCTAID_Y: case SR_CLUSTER_NCTAID_Z: return size[s - SR_CLUSTER_NCTAID_X];
    case SR_CLUSTER_CTARANK: return cta->rank;
    case SR_CLUSTER_NCTARANK: return w->cluster->nctas;
    case SR_IS_EXPLICIT_CLUSTER: return w->cluster->nctas > 1;
    case SR_LANEID: return l;
    case SR_WARPID: return w->index;
    case SR_NWARPID: return 64;
    case SR_SMID: return (w->cluster->serial - 1) * w->cluster->nctas % launch->sms + cta->rank;
    case SR_NSMID: return launch->sms;
    case SR_GRIDID: return 1;
    case SR_LANEMASK_EQ: return 1u << l;
    case SR_LANEMASK_LE: return below | 1u << l;
    case SR_LANEMASK_LT: return below;
    case SR_LANEMASK_GE: return (u32)~below;
    case SR_LANEMASK_GT: return (u32) ~(below | 1u << l);
    case SR_TOTAL_SMEM: case SR_AGGR_SMEM: return launch->shared_end - launch->shared_base;
    case SR_DYNAMIC_SMEM: return r->value;
    case SR_SHARED_ADDRESS: return shared_address(cta, (u32)r->value);
    default: return r->value;
    }
}

static void fill_constants(Warp *w) {
    const Program *p = w->machine->program;
    for (s32 k = 0; k < p->nconstants; k++) {
        const ConstantRecord *r = &p->constants[k];
        if (r->width == 0) *PRED(w, r->offset) = r->value ? FULL : 0;
        for (int l = 0; l < LANES; l++) {
            if (r->width == 4) R32(w, r->offset)[l] = (u32)source_value(w, r, l);
            if (r->width == 8) R64(w, r->offset)[l] = source_value(w, r, l);
            if (r->width == 16) R64(w, r->offset)[2 * l] = r->value, R64(w, r->offset)[2 * l + 1] = r->value2;
        }
    }
}

/* ---- clusters ----------------------------------------------------------------------------------------------------------- */

enum { POISON = 0xff }; /* not a number in every float format, and no address */

static void start_warp(Cta *cta, s32 index) {
    Machine *m = cta->machine;
    const Launch *launch = m->launch;
    Warp *w = &cta->warp[index];
    u32 threads = launch->block[0] * launch->block[1] * launch->block[2], here = threads - index * LANES;
    w->machine = m;
    w->cta = cta;
    w->cluster = cta->cluster;
    w->index = index;
    w->actor = cta->rank * cta->nwarps + index;
    w->born = w->live = here >= LANES ? FULL : (1u << here) - 1;
    w->regs = aligned_alloc(64, (m->program->register_bytes + 63) & ~63ull);
    memset(w->regs, POISON, m->program->register_bytes);
    if (m->program->local_bytes) {
        w->local = malloc(m->program->local_bytes * LANES);
        memset(w->local, POISON, m->program->local_bytes * LANES);
    }
    fill_constants(w);
    w->split[0] = (Split){.pc = 0, .lanes = w->live, .join = -1};
    w->nsplits = 1;
    w->know = new_knowledge(cta->cluster);
    w->know.clock[SEEN][w->actor] = 1;
    w->max_registers = launch->max_registers;
}

static void start_cta(Cluster *c, s32 rank) {
    Machine *m = c->machine;
    const Launch *launch = m->launch;
    Cta *cta = &c->cta[rank];
    const u32 *size = launch->cluster;
    cta->machine = m;
    cta->cluster = c;
    cta->rank = rank;
    cta->id[0] = c->id[0] * size[0] + rank % size[0];
    cta->id[1] = c->id[1] * size[1] + rank / size[0] % size[1];
    cta->id[2] = c->id[2] * size[2] + rank / (size[0] * size[1]);
    cta->linear = linear_id(cta->id, launch->grid);
    cta->nwarps = cta->running = c->nwarps / c->nctas;
    cta->shared = aligned_alloc(1024, (launch->shared_end + 1023) & ~1023u);
    memset(cta->shared, POISON, launch->shared_end);
    if (launch->checks) cta->shared_history = calloc(launch->shared_end + 1, sizeof(Cell));
    cta->mbarrier = calloc(launch->shared_end / 8 + 1, sizeof *cta->mbarrier);
    cta->tensor_queue = new_queue(c, true);
    cta->warp = calloc(cta->nwarps, sizeof(Warp));
    for (s32 n = 0; n < cta->nwarps; n++) start_warp(cta, n);
}

Cluster *start_cluster(Machine *m) {
    const Launch *launch = m->launch;
    Cluster *c = calloc(1, sizeof *c);
    u32 clusters[3], threads = launch->block[0] * launch->block[1] * launch->block[2];
    for (int d = 0; d < 3; d++) clusters[d] = launch->grid[d] / launch->cluster[d];
    u64 n = m->next_cluster++;
    c->machine = m;
    c->serial = (u32)m->next_cluster;
    c->id[0] = n % clusters[0];
    c->id[1] = n / clusters[0] % clusters[1];
    c->id[2] = n / ((u64)clusters[0] * clusters[1]);
    c->nctas = launch->cluster[0] * launch->cluster[1] * launch->cluster[2];
    c->nwarps = c->nctas * ((threads + LANES - 1) / LANES);
    c->width = KINDS_OF_ACTOR * c->nwarps;
    c->capacity = c->width + MBARRIERS_OF_A_CTA * c->nctas;
    c->running = c->nctas;
    c->queues.next = c->queues.previous = &c->queues;
    c->cta = calloc(c->nctas, sizeof(Cta));
    for (s32 t = 0; t < c->nctas; t++) start_cta(c, t);
    m->launch->launched_clusters++;
    return c;
}

static void end_warp(Warp *w) {
    wgmma_at_exit(w);
    free(w->regs);
    free(w->local);
    free_knowledge(w->cluster, &w->know);
    free_knowledge(w->cluster, &w->released);
    free_knowledge(w->cluster, &w->to_acquire);
    free(w->met);
}

void end_cluster(Cluster *c) {
    for (s32 t = 0; t < c->nctas; t++) {
        Cta *cta = &c->cta[t];
        tmem_at_exit(cta);
        for (s32 n = 0; n < cta->nwarps; n++) end_warp(&cta->warp[n]);
        free_cta_barriers(cta);
        free(cta->warp);
        free(cta->shared);
        free(cta->shared_history);
        free(cta->mbarrier);
    }
    free_knowledge(c, &c->gathering);
    free_knowledge(c, &c->done);
    for (Queue *q = c->queues.next, *next; q != &c->queues; q = next) {
        next = q->next;
        for (Work *work = q->first, *after; work; work = after) {
            after = work->next;
            free_knowledge(c, &work->know);
            free(work);
        }
        free(q);
    }
    free_spare_knowledge(c);
    free(c->cta);
    free(c);
}

/* ---- programs ----------------------------------------------------------------------------------------------------------- */

extern const HandlerEntry calls_handlers[], warps_handlers[], memory_handlers[], barriers_handlers[], scalar_handlers[], collectives_handlers[],
    copies_handlers[], tma_handlers[], cancel_handlers[], matrix_handlers[], wgmma_handlers[], tmem_handlers[], tcgen05_handlers[];
static const HandlerEntry *const families[] = {
    calls_handlers,
    warps_handlers,  memory_handlers, barriers_handlers, scalar_handlers,  collectives_handlers,
    copies_handlers, tma_handlers,    cancel_handlers,   matrix_handlers,  wgmma_handlers,        tmem_handlers,
    tcgen05_handlers,
};
enum { FAMILIES = sizeof families / sizeof *families };

/* The name of the n-th handler; NULL past the last. Python binds opcodes by these names. */
EXPORT const char *handler_name(s32 n) {
    for (int f = 0; f < FAMILIES; f++)
        for (const HandlerEntry *e = families[f]; e->name; e++)
            if (!n--) return e->name;
    return NULL;
}

static Handler handler_at(s32 n) {
    for (int f = 0; f < FAMILIES; f++)
        for (const HandlerEntry *e = families[f]; e->name; e++)
            if (!n--) return e->run;
    return NULL;
}

EXPORT Program *new_program(const InsRecord *records, s32 count, const s32 *args, s32 nargs, const s64 *mods, s32 nmods,
                     const ConstantRecord *constants, s32 nconstants, u64 register_bytes, u64 local_bytes) {
    Program *p = calloc(1, sizeof *p);
    p->count = count;
    p->register_bytes = register_bytes;
    p->local_bytes = local_bytes;
    p->ins = calloc(count, sizeof *p->ins);
    p->args = malloc((nargs + 1) * sizeof *args);
    p->mods = malloc((nmods + 1) * sizeof *mods);
    memcpy(p->args, args, nargs * sizeof *args);
    memcpy(p->mods, mods, nmods * sizeof *mods);
    ConstantRecord *kept = malloc((nconstants + 1) * sizeof *kept);
    memcpy(kept, constants, nconstants * sizeof *kept);
    p->constants = kept;
    p->nconstants = nconstants;
    for (s32 k = 0; k < count; k++) {
        const InsRecord *r = &records[k];
        p->ins[k] = (Ins){.run = handler_at(r->handler), .arg = p->args + r->arg, .mod = p->mods + r->mod, .nargs = r->nargs,
                          .guard = r->guard, .negate = r->negate, .join = r->join, .gather = r->gather, .index = k};
    }
    return p;
}

EXPORT void free_program(Program *p) {
    free(p->ins);
    free(p->args);
    free(p->mods);
    free((void *)p->constants);
    free(p);
}

/* ---- the entry ---------------------------------------------------------------------------------------------------------- */

static void free_pages(Region *r) {
    if (!r->pages) return;
    for (u64 p = 0; p * PAGE < r->size; p++) free(r->pages[p]);
    free(r->pages);
    r->pages = NULL;
}

void cancel_at_end(Machine *m); /* cancel.c: clusterlaunchcontrol */

EXPORT void simulate(Launch *launch) {
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV); /* subnormals count, whatever the caller's thread flushes */
    Machine m = {.launch = launch, .program = launch->program, .events = 1, .progress = 1};
    m.random = launch->seed * 0x9e3779b97f4a7c15u | 1;
    m.total_clusters = 1;
    for (int d = 0; d < 3; d++) m.total_clusters *= launch->grid[d] / launch->cluster[d];
    run_machine(&m);
    while (m.clusters) {
        Cluster *c = m.clusters;
        m.clusters = c->next;
        end_cluster(c);
    }
    cancel_at_end(&m);
    free_sync_variables(&m);
    free_reader_sets();
    for (s32 k = 0; k < launch->nregions; k++) {
        if (launch->triggered) note_left(&launch->regions[k]);
        free_pages(&launch->regions[k]);
    }
    fesetenv(&callers);
}

EXPORT u64 sizes(s32 which) { /* so that Python can check its own idea of these records */
    const u64 all[] = {sizeof(Launch), sizeof(Finding), sizeof(Counter), sizeof(Region), sizeof(InsRecord), sizeof(ConstantRecord)};
    return which < (s32)(sizeof all / sizeof *all) ? all[which] : 0;
}
