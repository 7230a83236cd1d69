/* A matrix A of which half is zero: 16 rows of it, given without the zeros, and metadata that says where they are. */
#pragma once
#include "machine.h"

typedef enum { DENSE, SPARSE, SPARSE_ORDERED } Sparse;
typedef struct {
    const u32 *word; /* [lane] */
    u32 first;       /* the first lane of a group of four that has metadata */
    u32 bits;        /* bits of an element */
    bool ordered;    /* the indices of a chunk ascend */
} Metadata;

bool spread_sparse(Warp *w, const Ins *i, const Metadata *m, u32 depth, const u32 *from, u32 *to); /* to[row][k], zeroed before; false after a finding */
