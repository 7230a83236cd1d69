/* The registers that asynchronous work has: to use them before it is over is a finding. */
#include "registers.h"
#include "findings.h"
#include "knowledge.h"

#include <stdio.h>

Registers *registers_of(Warp *w) {
    if (!w->registers) {
        Registers *r = w->registers = calloc(1, sizeof *r);
        r->state = calloc(w->machine->program->register_bytes / SLOT + 1, sizeof *r->state);
    }
    return w->registers;
}

static void count_flying(Warp *w, const Registers *r) { w->nin_flight = r->count + r->fenced; }

static void fly(Registers *r, s32 offset, ActorKind kind, Use use, s32 ins, u32 clock) {
    RegisterState *s = &r->state[offset / SLOT];
    if (!s->clock) {
        if (r->count == r->room) r->flying = realloc(r->flying, (r->room = r->room ? 2 * r->room : 256) * sizeof *r->flying);
        r->flying[r->count++] = offset;
    }
    s->clock = clock;
    s->kind = (u8)kind;
    s->use = (u8)use;
    s->ins = ins;
}

void in_flight_add(Warp *w, const s32 *offsets, s32 count, ActorKind kind, Use use, s32 ins, u32 clock) {
    Registers *r = registers_of(w);
    for (s32 k = 0; k < count; k++)
        if (offsets[k] >= 0) fly(r, offsets[k], kind, use, ins, clock);
    count_flying(w, r);
}

void registers_fenced(Warp *w) {
    Registers *r = registers_of(w);
    r->fenced = true;
    r->fence = w->issued;
    count_flying(w, r);
}

void in_flight_remove(Warp *w, ActorKind kind, u32 clock) {
    Registers *r = w->registers;
    if (!r) return;
    s32 kept = 0;
    for (s32 k = 0; k < r->count; k++) {
        RegisterState *s = &r->state[r->flying[k] / SLOT];
        if (s->kind == kind && s->clock <= clock)
            s->clock = 0;
        else
            r->flying[kept++] = r->flying[k];
    }
    r->count = kept;
    count_flying(w, r);
}
void report_register(Warp *w, const Ins *i, const RegisterState *s, const char *what) {
    Finding *f = find_at(w->machine, REGISTER_IN_FLIGHT, w, 0, i->index, s->ins, 0, 0);
    if (f && f->count == 1)
        snprintf(f->text, sizeof f->text, "%s %s register of a wgmma that no wgmma.wait_group has waited for", what,
                 s->use == READ ? "an A" : "an accumulator");
}

/* On silicon the data has come: the use waits for it. But only wait::ld says so, and orders anything after the load. */
static void load_used(Warp *w, const Ins *i, const RegisterState *load) {
    u32 *ordered = &w->know.clock[BEFORE_TENSOR][actor_of(w, BY_TMEM) & 0xffff], before = *ordered;
    knows_of(&w->know, actor_of(w, BY_TMEM), load->clock);
    *ordered = before;
    find_at(w->machine, LOAD_NOT_AWAITED, w, 0, i->index, load->ins, 0, 0);
}

void registers_touched(Warp *w, const Ins *i) {
    Registers *r = w->registers;
    for (s32 k = 0; k < i->nargs; k++) {
        if (i->arg[k] < 0) continue;
        RegisterState *s = &r->state[i->arg[k] / SLOT];
        s->touched = w->issued;
        if (!s->clock) continue;
        if (s->kind == BY_TMEM)
            load_used(w, i, s);
        else
            report_register(w, i, s, "uses");
    }
}

void registers_at_exit(Warp *w) {
    Registers *r = w->registers;
    if (!r) return;
    free(r->state);
    free(r->flying);
    free(r);
    w->registers = NULL;
}
