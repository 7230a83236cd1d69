#include "products.h"
#include "findings.h"
#include "knowledge.h"
#include "work.h"

#include <stdio.h>

/* The latest product that wrote a column, or read it; clock 0: none has. */
typedef struct {
    const char *name; /* as what */
    Accumulator d;
    u32 actor, clock;
    s32 ins;
} Product;
struct Column { Product writer, reader; };

bool kept_in_order(const Accumulator *a, const Accumulator *b) { return a->address == b->address && a->m == b->m && a->n == b->n && a->k == b->k; }

static bool areas_meet(const Area *a, const Area *b) {
    return a->halves & b->halves && a->column < b->column + b->columns && b->column < a->column + a->columns;
}

bool footprints_meet(const Footprint *a, const Footprint *b) {
    for (s32 k = 0; k < a->areas; k++)
        if (areas_meet(&a->area[k], &b->area[0])) return true;
    for (s32 k = 1; k < b->areas; k++)
        if (areas_meet(&b->area[k], &a->area[0])) return true;
    return false;
}

static bool met(Work *work, const Accumulator *d, const Area *area, const Product *other) {
    const Warp *w = work->warp;
    if (!other->clock || kept_in_order(d, &other->d) || knows(w->cluster, &work->know, SEEN, other->actor, other->clock)) return false;
    Finding *f = find_at(w->machine, PRODUCTS_UNORDERED, w, work->lane, work->ins->index, other->ins, area->column, 0);
    if (f && f->count == 1)
        snprintf(f->text, sizeof f->text, "%s of M=%u N=%u K=%u, columns %u to %u, meets %s of M=%u N=%u K=%u with D at 0x%x", area->name, d->m,
                 d->n, d->k, area->column, area->column + area->columns - 1, other->name, other->d.m, other->d.n, other->d.k, other->d.address);
    return true;
}

/* Looks at, or notes (if look is false), what a product does to the columns of an area. */
static bool visit(Work *work, Tmem *t, const Footprint *f, const Area *area, bool look) {
    bool writes = area == f->area;
    Product this = {area->name, f->d, actor_of(work->warp, BY_TENSOR), work->clock, work->ins->index};
    for (u32 half = 0; half < HALVES; half++)
        for (u32 c = area->column; area->halves >> half & 1 && c < area->column + area->columns; c++) {
            Column *column = &t->products[half * TMEM_COLUMNS + c];
            if (look && (met(work, &f->d, area, &column->writer) || (writes && met(work, &f->d, area, &column->reader)))) return true;
            if (!look) *(writes ? &column->writer : &column->reader) = this;
        }
    return false;
}

void forget_products(Tmem *t, u32 column, u32 columns) {
    for (u32 half = 0; t->products && half < HALVES; half++) memset(&t->products[half * TMEM_COLUMNS + column], 0, columns * sizeof *t->products);
}

void note_product(Work *work, Cta *cta, const Footprint *f) {
    Tmem *t = cta->tmem;
    if (!t->history) return;
    if (!t->products) t->products = calloc(HALVES * TMEM_COLUMNS, sizeof *t->products);
    bool found = false;
    for (s32 k = 0; k < f->areas && !found; k++) found = visit(work, t, f, &f->area[k], true);
    for (s32 k = 0; k < f->areas; k++) visit(work, t, f, &f->area[k], false);
}
