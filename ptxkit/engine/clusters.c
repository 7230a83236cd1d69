/* Clusters, their CTAs and warps: made, and unmade. */
#include "clusters.h"
#include "barriers.h"
#include "clock.h"
#include "control.h"
#include "findings.h"
#include "knowledge.h"
#include "loops.h"
#include "memory.h"
#include "registers.h"
#include "tmem.h"
#include "visits.h"
#include "wgmma.h"

#include <stdio.h>

enum { MBARRIERS_OF_A_CTA = 128, WARPS_TOGETHER = 4 /* registers are given to so many at once */ };

/* ---- registers at the start --------------------------------------------------------------------------------------------- */

static u64 linear_id(const u32 id[3], const u32 size[3]) { return id[0] + (u64)size[0] * (id[1] + (u64)size[1] * id[2]); }

static u64 source_value(const Warp *w, const ConstantRecord *r, int l) {
    const Launch *launch = w->machine->launch;
    const Cta *cta = w->cta;
    const u32 *block = launch->block, *size = launch->cluster;
    u32 t = w->index * LANES + l;
    u32 tid[3] = {t % block[0], t / block[0] % block[1], t / (block[0] * block[1])};
    u32 position[3] = {cta->rank % size[0], cta->rank / size[0] % size[1], cta->rank / (size[0] * size[1])};
    s32 s = r->source;
    u32 below = (1u << l) - 1;
    switch (s) {
    case SR_TID_X: case SR_TID_Y: case SR_TID_Z: return tid[s - SR_TID_X];
    case SR_NTID_X: case SR_NTID_Y: case SR_NTID_Z: return block[s - SR_NTID_X];
    case SR_CTAID_X: case SR_CTAID_Y: case SR_CTAID_Z: return cta->id[s - SR_CTAID_X];
    case SR_NCTAID_X: case SR_NCTAID_Y: case SR_NCTAID_Z: return launch->grid[s - SR_NCTAID_X];
    case SR_CLUSTERID_X: case SR_CLUSTERID_Y: case SR_CLUSTERID_Z: return w->cluster->id[s - SR_CLUSTERID_X];
    case SR_NCLUSTERID_X: case SR_NCLUSTERID_Y: case SR_NCLUSTERID_Z: return launch->grid[s - SR_NCLUSTERID_X] / size[s - SR_NCLUSTERID_X];
    case SR_CLUSTER_CTAID_X: case SR_CLUSTER_CTAID_Y: case SR_CLUSTER_CTAID_Z: return position[s - SR_CLUSTER_CTAID_X];
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
        u64 value = source_value(w, r, 0);
        bool by_lane = (r->source >= SR_TID_X && r->source <= SR_TID_Z) || r->source == SR_LANEID ||
                       (r->source >= SR_LANEMASK_EQ && r->source <= SR_LANEMASK_GT);
        for (int l = 0; l < LANES; l++) {
            if (by_lane) value = source_value(w, r, l);
            if (r->width == 4) R32(w, r->offset)[l] = (u32)value;
            if (r->width == 8) R64(w, r->offset)[l] = value;
            if (r->width == 16) R64(w, r->offset)[2 * l] = r->value, R64(w, r->offset)[2 * l + 1] = r->value2;
        }
    }
}

/* ---- clusters ----------------------------------------------------------------------------------------------------------- */

enum { POISON = 0xff }; /* not a number in every float format, and no address */

static void give_memory(Warp *w) { /* registers and local memory; where the host has no more, that ends the launch */
    Machine *m = w->machine;
    u64 registers = (m->program->register_bytes + 63) & ~63ull, local = m->program->local_bytes * LANES; /* program.py has limited the size */
    w->regs = aligned_alloc(64, registers);
    w->local = local ? malloc(local) : NULL;
    if (!w->regs || (local && !w->local)) {
        Finding *f = find_at(m, UNSUPPORTED, w, 0, 0, -1, 0, registers + local);
        if (f) snprintf(f->text, sizeof f->text, "this machine has no memory left for a warp's registers and .local memory, %llu bytes",
                        (unsigned long long)(registers + local));
        stop(m);
        return;
    }
    memset(w->regs, POISON, registers);
    if (local) memset(w->local, POISON, local);
    fill_constants(w);
}

static void start_warp(Cta *cta, s32 index) {
    Machine *m = cta->machine;
    const Launch *launch = m->launch;
    Warp *w = &cta->warp[index];
    u32 threads = launch->block[0] * launch->block[1] * launch->block[2], remaining = threads - index * LANES;
    w->machine = m;
    w->cta = cta;
    w->cluster = cta->cluster;
    w->index = index;
    w->actor = cta->rank * cta->nwarps + index;
    w->born = w->live = remaining >= LANES ? FULL : (1u << remaining) - 1;
    give_memory(w);
    w->split[0] = (Split){.pc = 0, .lanes = w->live, .join = -1};
    w->nsplits = 1;
    w->know = new_knowledge(cta->cluster);
    w->know.clock[SEEN][w->actor] = 1;
    w->max_registers = launch->max_registers;
    clock_start_warp(w);
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
    cta->register_pool = (s32)(-(u32)cta->nwarps % WARPS_TOGETHER) * launch->max_registers; /* those of absent warps */
    cta->shared = aligned_alloc(1024, (launch->shared_end + 1023) & ~1023u);
    memset(cta->shared, POISON, launch->shared_end);
    if (launch->checks) cta->shared_history = calloc(granules(launch->shared_end) + 1, sizeof(Granule));
    cta->mbarrier = calloc(launch->shared_end / 8 + 1, sizeof *cta->mbarrier);
    cta->tensor_queue = new_queue(c, true);
    cta->warp = calloc(cta->nwarps, sizeof(Warp));
    for (s32 n = 0; n < cta->nwarps; n++) start_warp(cta, n);
}

static u32 clusters_in(const Machine *m, s32 slot) {
    u32 n = 0;
    for (const Cluster *c = m->clusters; c; c = c->next) n += c->slot == slot && !c->apart;
    return n;
}

static s32 first_slot_with_room(const Machine *m) { /* SMs are filled one after the other, as a large grid fills them */
    s32 slot = 0;
    while (clusters_in(m, slot) >= m->launch->clusters_sm) slot++;
    return slot;
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
    c->slot = m->time ? m->time->next_slot : first_slot_with_room(m);
    c->cta = calloc(c->nctas, sizeof(Cta));
    for (s32 t = 0; t < c->nctas; t++) start_cta(c, t);
    m->launch->launched_clusters++;
    return c;
}

static void end_warp(Warp *w) {
    clock_end_warp(w);
    wgmma_at_exit(w);
    registers_at_exit(w);
    forget_turns(w);
    free(w->regs);
    free(w->local);
    free_knowledge(w->cluster, &w->know);
    free_knowledge(w->cluster, &w->released);
    free_knowledge(w->cluster, &w->to_acquire);
    free(w->met);
    for (s32 j = 0; j < w->njoins; j++)
        if (w->join[j].open) free_call(w->join[j].call);
    free(w->join);
}

void end_cluster(Cluster *c) {
    for (s32 t = 0; t < c->nctas; t++) {
        Cta *cta = &c->cta[t];
        tmem_at_exit(cta);
        for (s32 n = 0; n < cta->nwarps; n++) end_warp(&cta->warp[n]);
        free_cta_barriers(cta);
        free(cta->warp);
        free(cta->shared);
        if (cta->shared_history) forget_bytes(cta->shared_history, c->machine->launch->shared_end);
        free(cta->shared_history);
        free_visits(cta);
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
