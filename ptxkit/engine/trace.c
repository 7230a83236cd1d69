#include "trace.h"
#include "clock.h"

static void record(const Cta *cta, TraceRecord r) {
    Clock *c = cta->machine->time;
    ClockSetting *p = c->p;
    if (r.ends <= r.begins) return;
    r.sm = cta->cluster->slot * cta->cluster->nctas + cta->rank;
    r.cta = (s32)cta->linear;
    if (p->nrecords == c->trace_room) {
        c->trace_room = c->trace_room ? 2 * c->trace_room : 1 << 12;
        p->records = realloc(p->records, c->trace_room * sizeof *p->records);
    }
    p->records[p->nrecords++] = r;
}

static bool traced(const Cta *cta) { return cta->machine->time && cta->machine->time->p->traced; }

void trace_warp(const Warp *w, TraceKind kind, s32 ins, s32 row, double begins, double ends) {
    if (traced(w->cta)) record(w->cta, (TraceRecord){.kind = kind, .warp = w->index, .ins = ins, .row = row, .begins = begins, .ends = ends});
}

void trace_barrier(const Cta *cta, TraceKind kind, s32 ins, s32 row, double begins, double ends) {
    if (traced(cta)) record(cta, (TraceRecord){.kind = kind, .warp = -1, .ins = ins, .row = row, .begins = begins, .ends = ends});
}
