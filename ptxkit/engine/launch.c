/* A launch from start to end, the table of all handlers, and the functions that Python calls. */
#include "cancel.h"
#include "clock.h"
#include "clocked.h"
#include "clusters.h"
#include "findings.h"
#include "history.h"
#include "knowledge.h"
#include "schedule.h"

#include <fenv.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- programs ----------------------------------------------------------------------------------------------------------- */

extern const HandlerEntry calls_handlers[], functions_handlers[], control_handlers[], memory_handlers[], barriers_handlers[], scalar_handlers[], moves_handlers[],
    collectives_handlers[], copies_handlers[], tma_handlers[], cancel_handlers[], matrix_handlers[], wmma_handlers[], wgmma_handlers[], tmem_handlers[], tcgen05_handlers[];
static const HandlerEntry *const families[] = {
    calls_handlers,  functions_handlers,
    control_handlers, memory_handlers, barriers_handlers, scalar_handlers, moves_handlers, collectives_handlers,
    copies_handlers, tma_handlers,    cancel_handlers,   matrix_handlers,  wmma_handlers, wgmma_handlers,        tmem_handlers,
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

EXPORT void simulate(Launch *launch) {
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV); /* subnormals count, whatever the caller's thread flushes */
    Machine m = {.launch = launch, .program = launch->program, .events = 1, .progress = 1};
    m.random = launch->seed * 0x9e3779b97f4a7c15u | 1;
    m.total_clusters = 1;
    for (int d = 0; d < 3; d++) m.total_clusters *= launch->grid[d] / launch->cluster[d];
    if (launch->clock) run_clocked(&m);
    run_machine(&m);
    while (m.clusters) {
        Cluster *c = m.clusters;
        m.clusters = c->next;
        end_cluster(c);
    }
    cancel_at_end(&m);
    free_sync_variables(&m);
    for (s32 k = 0; k < launch->nregions; k++) {
        note_left(&launch->regions[k]); /* if the region is asked for it */
        free_pages(&launch->regions[k]);
    }
    free_histories();
    fesetenv(&callers);
}

EXPORT void free_records(TraceRecord *records) { free(records); } /* those of a clock's setting */

EXPORT u64 sizes(s32 which) { /* lets Python check its own idea of these records */
    const u64 all[] = {sizeof(Launch), sizeof(Finding), sizeof(Counter), sizeof(Region), sizeof(InsRecord), sizeof(ConstantRecord), sizeof(Timing), sizeof(ClockSetting),
                       sizeof(TraceRecord)};
    return which < (s32)(sizeof all / sizeof *all) ? all[which] : 0;
}
