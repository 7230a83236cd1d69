/* The time of a launch: when warps issue, when units are free, when memory answers.
 *
 * An instruction issues when its warp, its scheduler and the queues of its units let it; it begins when its operands are there, too, and
 * its results follow after a latency, or when memory answers. PTX is in the order of its author, not in that of ptxas, which moves loads
 * away from their uses: so an instruction may issue up to a window of clocks before its operands are there. What synchronises is
 * ORDERED: it waits for all before it. Nothing reserves a slot in the future: a warp that cannot issue moves its time, and whoever is
 * first then goes first.
 */
#include "clock.h"

#include <math.h>

enum { SECTOR = 32, SECTORS_OF_A_LINE = 4 };

static double latest(double a, double b) { return a > b ? a : b; }

static double take(Unit *u, double from, double busy) { /* when the unit begins */
    double begins = latest(from, u->free);
    u->free = begins + busy;
    u->busy += busy;
    return begins;
}

/* ---- a launch and its warps --------------------------------------------------------------------------------------------- */

Clock *new_clock(Machine *m) {
    const u32 *size = m->launch->cluster;
    Clock *c = calloc(1, sizeof *c);
    c->p = m->launch->clock;
    c->nsms = (s32)(c->p->slots * size[0] * size[1] * size[2]);
    c->sm = calloc(c->nsms, sizeof *c->sm);
    for (s32 k = 0; k < c->nsms; k++) c->sm[k].tag = calloc(c->p->l1_lines + 1, sizeof(u64));
    c->room = 1 << 16;
    c->sector = calloc(c->room, sizeof *c->sector);
    c->region = calloc(m->launch->nregions + 1, sizeof *c->region);
    return c;
}

void free_clock(Machine *m) {
    Clock *c = m->time;
    double *busy = c->p->busy;
    for (s32 k = 0; k < c->nsms; k++) {
        const Sm *s = &c->sm[k];
        for (int q = 0; q < 4; q++) {
            for (int u = 0; u < PIPES; u++) busy[u] += s->pipe[q][u].busy / 4 / c->nsms;
            busy[UNIT_ISSUE] += s->issue[q].busy / 4 / c->nsms;
        }
        busy[UNIT_SHARED] += s->shared.busy / c->nsms;
        busy[UNIT_TMA] += s->tma.busy / c->nsms;
        busy[UNIT_TCGEN05] += s->tcgen05.busy / c->nsms;
        free(s->tag);
    }
    busy[UNIT_L2] = c->l2.busy;
    busy[UNIT_HBM] = c->hbm.busy;
    free(c->sm);
    free(c->sector);
    free(c->region);
    free(c);
    m->time = NULL;
}

void clock_start_warp(Warp *w) {
    const Clock *c = w->machine->time;
    if (!c) return;
    Sm *s = sm_of(w);
    WarpTime *t = w->time = calloc(1, sizeof *t);
    t->begun = t->now = t->last = c->now + c->p->start;
    t->ready = calloc(c->p->nregisters + 1, sizeof *t->ready);
    t->early = calloc(c->p->nregisters + 1, sizeof *t->early);
    t->why = calloc(c->p->nregisters + 1, 1);
    t->quarter = s->warps++ % 4;
}

void clock_end_warp(Warp *w) {
    WarpTime *t = w->time;
    if (!t) return;
    double *sums = w->machine->launch->clock->warps + w->index * OF_A_WARP;
    for (int k = 0; k < STALLS; k++) sums[k] += t->stalls[k];
    sums[STALLS] += t->slots;
    sums[STALLS + 1] += t->now - t->begun;
    free(t->ready);
    free(t->early);
    free(t->why);
    free(t);
    w->time = NULL;
}

/* ---- one instruction ---------------------------------------------------------------------------------------------------- */

static const Timing *timing_of(const Warp *w, const Ins *i) { return &w->machine->time->p->timing[i->index]; }

static void stalled(Warp *w, const Ins *i, int why, double from, double until) {
    double clocks = until - from;
    w->machine->time->p->stalls[i->index * STALLS + why] += clocks;
    w->time->stalls[why] += clocks;
    trace_warp(w, TRACE_STALL, i->index, why, from, until);
}

static void hold(Warp *w, const Ins *i, int why, double until, double *from) {
    if (until <= *from) return;
    stalled(w, i, why, *from, until);
    *from = until;
}

/* When all operands of an instruction are ready; *why is the stall of a warp that waits for the last of them. Results count, too: a result
 * must not come before that of an earlier instruction in the same register. */
static double operands_at(const Warp *w, const Timing *c, int *why) {
    const WarpTime *t = w->time;
    const s32 *registers = w->machine->time->p->registers + c->first;
    double ready = 0;
    for (s32 k = 0; k < c->nsources + c->nresults; k++) {
        double operand = t->ready[registers[k]] - (k < c->nsources ? 0 : c->latency);
        if (operand > ready) ready = operand, *why = t->why[registers[k]];
    }
    if (c->flags & ORDERED && t->last > ready) ready = t->last, *why = t->last_why;
    return ready;
}

static void results_at(Warp *w, const Timing *c, double ready) {
    const s32 *results = w->machine->time->p->registers + c->first + c->nsources;
    for (s32 k = 0; k < c->nresults; k++) w->time->ready[results[k]] = w->time->early[results[k]] = ready, w->time->why[results[k]] = (u8)c->stall;
}

bool clock_settled(Warp *w, const Ins *i) {
    const ClockSetting *p = w->machine->time->p;
    const Sm *s = sm_of(w);
    const Timing *c = timing_of(w, i);
    WarpTime *t = w->time;
    int why = STALL_WAIT, q = t->quarter;
    double operands = operands_at(w, c, &why), from = t->now;
    hold(w, i, why, operands - (c->flags & ORDERED ? 0 : p->window), &from);
    const double queue[] = {p->queue_fma, p->queue_alu, p->queue_special, p->queue_mio, p->queue_registers};
    for (int k = 0; k < PIPE_TENSOR; k++)
        if (c->busy[k]) hold(w, i, k == PIPE_MIO ? STALL_MIO : STALL_MATH, s->pipe[q][k].free - queue[k], &from);
    if (c->flags & THROUGH_SHARED) hold(w, i, STALL_MIO, s->shared.free - p->queue_shared, &from);
    if (c->issue) hold(w, i, STALL_NOT_SELECTED, s->issue[q].free, &from);
    if (from <= t->now) return true;
    t->now = from;
    return false;
}

static double take_shared(Warp *w, const Ins *i, double passes) { /* when they begin */
    double begins = take(&sm_of(w)->shared, w->time->slot, passes);
    trace_warp(w, TRACE_SHARED, i->index, 0, begins, begins + passes);
    return begins;
}

static void occupy_slot(Warp *w, const Ins *i, const Timing *c) {
    WarpTime *t = w->time;
    take(&sm_of(w)->issue[t->quarter], t->now, c->issue);
    trace_warp(w, TRACE_ISSUE, i->index, 0, t->now, t->now + c->issue);
    t->slots += c->issue;
    t->slot = t->now;
    t->now += c->issue;
}

/* A load begins where ptxas would put it: behind the last instruction that it may not pass, as soon as its address is there, and no further
 * ahead than registers are free for what it brings. */
static double hoisted_to(WarpTime *t, const ClockSetting *p, const Timing *c, double from) {
    const u64 room = (u64)p->ahead_registers;
    if (room && t->nloaded + c->nresults > room) {
        u64 oldest = t->nloaded + c->nresults - room - 1;
        from = latest(from, oldest < t->nloaded ? t->loaded_at[oldest % REGISTERS_AHEAD] : t->slot);
    }
    for (s32 k = 0; k < c->nresults; k++) t->loaded_at[t->nloaded++ % REGISTERS_AHEAD] = t->slot;
    return room ? from : latest(from, t->slot);
}

static double early_at(const Warp *w, const Timing *c) { /* when its operands would be there, had all moved ahead that may */
    const s32 *registers = w->machine->time->p->registers + c->first;
    double early = w->time->region;
    for (s32 k = 0; k < c->nsources; k++) early = latest(early, w->time->early[registers[k]]);
    return early;
}

void clock_issue(Warp *w, const Ins *i) {
    Clock *clock = w->machine->time;
    Sm *s = sm_of(w);
    const Timing *c = timing_of(w, i);
    WarpTime *t = w->time;
    int why = STALL_WAIT;
    double start = operands_at(w, c, &why), early = early_at(w, c);
    occupy_slot(w, i, c);
    start = latest(start, t->slot);
    for (int k = 0; k < PIPES; k++) /* the backlog counts from the slot, so that no gap before a late operand is lost */
        if (c->busy[k]) {
            double begins = take(&s->pipe[t->quarter][k], t->slot, c->busy[k]);
            if (k == PIPE_TENSOR) trace_warp(w, TRACE_TENSOR, i->index, t->quarter, begins, begins + c->busy[k]);
            start = latest(start, begins);
        }
    if (c->operands) take_shared(w, i, c->operands);
    if (c->flags & HOISTED) start = hoisted_to(t, clock->p, c, early);
    t->start = start;
    if (c->flags & (ORDERED | BARS_LOADS)) t->region = start;
    if (start > t->last) t->last = start, t->last_why = (u8)why;
    if (c->flags & ORDERED) { /* a wgmma waits for the tensor core, too */
        double from = t->now;
        hold(w, i, STALL_MATH, start, &from);
        t->now = from;
    }
    if (c->hold) {
        double from = t->now;
        hold(w, i, c->stall, latest(start, t->slot) + c->hold, &from);
        t->now = from;
    }
    t->loaded = t->passes = t->wake = 0;
    results_at(w, c, start + c->latency);
    if (!(c->flags & ORDERED) && early < start) {
        const s32 *results = clock->p->registers + c->first + c->nsources;
        for (s32 k = 0; k < c->nresults; k++) t->early[results[k]] = early + c->latency;
    }
    clock->now = latest(clock->now, c->flags & ORDERED ? start : t->slot);
    clock->acting = w->cta;
}

void clock_skip(Warp *w, const Ins *i) {
    if (timing_of(w, i)->flags & ORDERED) w->time->region = w->time->now;
    occupy_slot(w, i, timing_of(w, i));
    w->machine->time->now = latest(w->machine->time->now, w->time->slot);
}

void clock_again(Warp *w) {
    w->time->wake = 0;
    w->machine->time->acting = w->cta;
}

void clock_done(Warp *w, const Ins *i, bool was_blocked, bool blocked) {
    const Clock *clock = w->machine->time;
    const Timing *c = timing_of(w, i);
    WarpTime *t = w->time;
    if (blocked) return;
    if (t->passes) {
        double begins = take_shared(w, i, t->passes);
        if (!(c->flags & STORES)) t->loaded = latest(t->loaded, latest(begins, t->start) + t->passes * clock->p->shared_pass + clock->p->shared_latency);
    }
    if (t->loaded) results_at(w, c, t->loaded);
    double until = latest(t->wake, was_blocked ? clock->now : 0);
    if (until <= t->now) return;
    stalled(w, i, c->stall, t->now, until);
    t->now = until;
    if (c->flags & ORDERED) t->region = until;
    if (until > t->last) t->last = until, t->last_why = (u8)c->stall;
    results_at(w, c, until);
}

/* ---- memory ------------------------------------------------------------------------------------------------------------- */

/* A sector of the host's memory as one of the launch's: each region begins a line of its own, as a GPU allocates it. */
static u64 sector_of(const Machine *m, u64 sector) {
    Clock *c = m->time;
    const Region *r = region_at(m->launch, sector * SECTOR + SECTOR - 1);
    if (!r) return sector;
    u64 *number = &c->region[r - m->launch->regions];
    if (!*number) *number = ++c->regions;
    return *number << 40 | (sector - r->address / SECTOR);
}

static u64 place_of(const Clock *c, u64 sector) {
    u64 index = (sector * 0x9e3779b97f4a7c15u >> 20) & (c->room - 1);
    while (c->sector[index] && c->sector[index] != sector + 1) index = (index + 1) & (c->room - 1);
    return index;
}

static bool first_touch(Clock *c, u64 sector) {
    u64 index = place_of(c, sector);
    if (c->sector[index]) return false;
    c->sector[index] = sector + 1;
    if (2 * ++c->sectors < c->room) return true;
    u64 *old = c->sector, n = c->room;
    c->sector = calloc(c->room *= 2, sizeof *c->sector);
    for (u64 k = 0; k < n; k++)
        if (old[k]) c->sector[place_of(c, old[k] - 1)] = old[k];
    free(old);
    return true;
}

/* A sector through the L2, and through HBM if the launch has not touched it before: when it has come; a write: when it has gone. */
static double through_l2(Clock *c, double from, u64 sector, bool store) {
    const ClockSetting *p = c->p;
    double done = take(&c->l2, from, SECTOR / p->l2_rate) + SECTOR / p->l2_rate + (store ? 0 : p->l2_latency);
    if (!first_touch(c, sector)) return done;
    return latest(done, take(&c->hbm, from, SECTOR / p->hbm_rate) + SECTOR / p->hbm_rate + (store ? 0 : p->hbm_latency));
}

double clock_operands(const Warp *w, double from, double bytes) {
    double clocks = bytes / w->machine->time->p->operand_rate;
    return take(&sm_of(w)->shared, from, clocks) + clocks;
}

void clock_shared(Warp *w, u64 passes) {
    if (w->time) w->time->passes += (double)passes;
}

static bool in_l1(Clock *c, Sm *s, u64 sector) { /* it is afterwards */
    if (!c->p->l1_lines) return false;
    u64 line = sector / SECTORS_OF_A_LINE, bit = 1u << sector % SECTORS_OF_A_LINE, *tag = &s->tag[(line * 0x9e3779b97f4a7c15u >> 30) % c->p->l1_lines];
    bool hit = *tag >> 4 == line && *tag & bit;
    *tag = (*tag >> 4 == line ? *tag : line << 4) | bit;
    return hit;
}

void clock_global(Warp *w, const Ins *i, const u64 *sector, int n) {
    if (!w->time) return;
    Clock *c = w->machine->time;
    Sm *s = sm_of(w);
    WarpTime *t = w->time;
    bool store = timing_of(w, i)->flags & STORES, past = timing_of(w, i)->flags & (STORES | PAST_L1);
    double begins = take_shared(w, i, latest(n / (double)SECTORS_OF_A_LINE, 1));
    double from = t->start < t->slot ? t->start + (begins - t->slot) : latest(t->start, begins);
    for (int k = 0; k < n; k++) {
        u64 which = sector_of(w->machine, sector[k]);
        double done = !past && in_l1(c, s, which) ? from + c->p->l1_latency : through_l2(c, from, which, store);
        if (!store) t->loaded = latest(t->loaded, done);
    }
}

/* ---- copies ------------------------------------------------------------------------------------------------------------- */

double clock_arrival(const Cta *cta) {
    const Clock *c = cta->machine->time;
    return c ? c->now + (c->acting && c->acting != cta ? c->p->remote_arrival : 0) : 0;
}

double clock_copied(Warp *w) {
    WarpTime *t = w->time;
    if (!t) return 0;
    double done = latest(t->loaded, t->start) + w->machine->time->p->cp_async_latency;
    t->copies_end = latest(t->copies_end, done);
    return done;
}

static double take_tma(Warp *w, const Ins *i, double clocks) { /* when they begin */
    double begins = take(&sm_of(w)->tma, latest(w->time->start, w->machine->time->now), clocks);
    trace_warp(w, TRACE_TMA, i->index, 0, begins, begins + clocks);
    return begins;
}

double clock_bulk(Warp *w, const Ins *i, u64 address, u64 bytes, bool store) {
    if (!w->time) return 0;
    Clock *c = w->machine->time;
    const ClockSetting *p = c->p;
    double begins = take_tma(w, i, bytes / (store ? p->tma_store_rate : p->tma_rate)) + (store ? 0 : p->tma_latency), done = begins;
    for (u64 s = address / SECTOR; bytes && s <= (address + bytes - 1) / SECTOR; s++) done = latest(done, through_l2(c, begins, sector_of(w->machine, s), store));
    return done + (store ? p->tma_latency : 0);
}

double clock_read(const Warp *w) { return w->time ? sm_of(w)->tma.free + w->machine->time->p->tma_latency : 0; }

void clock_await(Warp *w, double read, double done, bool only_read) {
    if (!w->time) return;
    w->time->bulk_end = latest(w->time->bulk_end, done); /* who waits for the whole copy later finds it gone from its queue */
    wake_at(w, only_read ? read : done);
}

double clock_to_peer(Warp *w, const Ins *i, u64 bytes) {
    if (!w->time) return 0;
    const ClockSetting *p = w->machine->time->p;
    double clocks = bytes / p->dsmem_rate;
    return take_tma(w, i, clocks) + clocks + p->dsmem_latency;
}

/* ---- wgmma, and tensor memory ------------------------------------------------------------------------------------------- */

void clock_wgmma(Warp *w, const Ins *i) {
    WarpTime *t = w->time;
    if (!t) return;
    const Timing *c = timing_of(w, i);
    t->tensor_end = latest(t->tensor_end, t->start) + c->busy[PIPE_TENSOR] + c->latency; /* a chain of its own */
    t->steps++;
}

void clock_wgmma_commit(Warp *w, u32 group) {
    WarpTime *t = w->time;
    if (!t) return;
    const ClockSetting *p = w->machine->time->p;
    t->group_end[group % GROUPS_KEPT] = t->tensor_end + p->wgmma_latency + (t->steps == 1 ? p->wgmma_alone : 0);
    t->steps = 0;
}

void clock_wgmma_wait(Warp *w, u32 group) {
    if (w->time) wake_at(w, w->time->group_end[group % GROUPS_KEPT]);
}

void clock_tmem(Warp *w, u32 columns, bool store) {
    WarpTime *t = w->time;
    if (!t) return;
    const ClockSetting *p = w->machine->time->p;
    double *end = store ? &t->stores_end : &t->loads_end, clocks = columns * p->tmem_column;
    t->loaded = take(&sm_of(w)->tmem[w->index % 4][store], t->start, clocks) + clocks + p->tmem_latency;
    *end = latest(*end, t->loaded);
}
