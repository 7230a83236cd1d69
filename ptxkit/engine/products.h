/* The order of matrix products (tcgen05.mma). The PTX manual keeps two in order only if they have one accumulator and one shape. */
#pragma once
#include "tmem.h"

enum { AREAS = 4, HALVES = 2, FIRST_HALF = 1, SECOND_HALF = 2, BOTH_HALVES = 3 };
typedef struct {
    const char *name; /* D, A, ... */
    u32 column, columns;
    u32 halves;       /* of the lanes of each slab: the first 16, the others */
} Area;
typedef struct { u32 address, m, n, k; } Accumulator; /* of D, and the shape of what is added to it */
typedef struct {
    Accumulator d;
    Area area[AREAS]; /* in tensor memory: D, then what is read */
    s32 areas;
} Footprint;

bool kept_in_order(const Accumulator *a, const Accumulator *b);
bool footprints_meet(const Footprint *a, const Footprint *b); /* does one of them write what the other one reads or writes? */
/* A product runs in a CTA: a finding if it meets another one with which it is not kept in order, and whose end its sender did not know of. */
void forget_products(Tmem *t, u32 column, u32 columns); /* they are freed */
void note_product(Work *work, Cta *cta, const Footprint *f);
