/* Tensor memory: 128 lanes x 512 columns of 32-bit cells for each CTA, who holds its columns, and who has sent work to the tensor core. */
#pragma once
#include "memory.h"

enum { TMEM_LANES = 128, TMEM_COLUMNS = 512, TMEM_UNIT = 32, TMEM_UNITS = TMEM_COLUMNS / TMEM_UNIT, SLAB = 32, SLABS = 4 };
#define POISON_HALF 0xffff0000u /* the upper half of a cell where its content is not documented */

/* What one thread has sent to the tensor core of its CTA, or of its pair. The numbers count its warp's operations (BY_TENSOR). */
typedef struct {
    Queue *queue;
    struct Sent { u32 clock, number; } *sent; /* in order; clock: the warp's when it sent the operation */
    s32 count, room;
    Knowledge done; /* what follows from the end of the operations that have run: commit hands it on */
} Issuer;

typedef struct {
    u32 columns; /* 0: none starts here */
    s32 warp, ins;
    u32 number;  /* among its warp's operations (SENT_TO_TENSOR) */
} Allocation;

/* What a warp asks the allocator for. It waits until there is room, and with cta_group::2 until a warp of the peer asks for the same. */
typedef enum { ALLOCATE, DEALLOCATE, WISHES } Wish;
typedef struct {
    bool open;
    u32 column, columns;
    s32 warp, ins;
    u64 granted; /* how many wishes of this kind have been */
    u32 result;  /* first column of the latest one */
} Request;

typedef struct Column Column; /* products.c */
typedef struct {
    u32 word[TMEM_LANES][TMEM_COLUMNS];
    Cell *history;                     /* [lane][column]; NULL without checks */
    Allocation allocation[TMEM_UNITS]; /* [the first of its units of 32 columns] */
    u32 held;                          /* a bit for each unit */
    u32 last_columns;                  /* columns of the latest allocation; 0: none yet */
    bool relinquished;
    Request request[WISHES];
    Column *products; /* [half of a slab's lanes][column]; NULL: none has run */
    Issuer **issuer; /* [thread of the CTA]; NULL: has sent nothing */
} Tmem;

Tmem *tmem_of(Cta *cta); /* made when first asked for */
/* The CTAs that an instruction with .cta_group::1 or ::2 acts on, even rank first; 0 after a finding. */
int tensor_ctas(Warp *w, const Ins *i, int lane, int group, Cta *ctas[2]);
static inline Queue *queue_of(Cta *cta, int group) { return (group == 2 ? &cta->cluster->cta[cta->rank & ~1] : cta)->tensor_queue; }
/* Are these columns allocated, and does the CTA still run? A finding if not, or if `know` does not order it after the allocation. `what`: D,
 * A, the source, ... */
bool tmem_held(Warp *w, const Ins *i, int lane, const Cta *cta, u32 column, u32 columns, const Knowledge *know, const char *what);
u32 next_number(Warp *w); /* the number of an operation that the warp sends to the tensor core, or of an allocation */
/* n cells of a lane, which the caller knows to be held */
typedef void (*Transfer)(Cta *cta, const Access *a, u32 lane, u32 column, u32 n, u32 *value);
void tmem_read(Cta *cta, const Access *a, u32 lane, u32 column, u32 n, u32 *value);
void tmem_write(Cta *cta, const Access *a, u32 lane, u32 column, u32 n, u32 *value);
void tmem_at_exit(Cta *cta); /* leaks, and frees */
/* Nobody can go on. A grid of no more CTAs than there are SMs has one on each: so a cluster that waits for columns of one that waits for
 * something else gets SMs of its own. False: none does, or the grid is larger. */
bool tmem_move_apart(Machine *m);
bool tmem_explain_block(Warp *w, const Ins *i, char *text, size_t size); /* false if the instruction is none of its own */
