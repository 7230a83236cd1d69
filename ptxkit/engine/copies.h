/* What the asynchronous copies share: operands in shared memory, the groups of a lane, and where a copy lands. */
#pragma once
#include "barriers.h"
#include "memory.h"

/* An address operand of shared memory: register arg[k], and the fields of PLACE from mod[m] on. */
bool shared_operand(Warp *w, const Ins *i, int k, int m, int l, u32 *address); /* false after a finding */

/* Work that has not been committed to a group belongs to the group with this clock. */
static inline u32 open_clock(const Warp *w, ActorKind kind) { return w->async_clock[kind] + 1; }

void join_group(Work *work, int l); /* the bulk group that lane l has open: the copy is that lane's, too */
void bulk_groups_at_exit(const Cta *cta); /* its last threads have exited */

/* Where a copy lands: shared memory, and the mbarrier that hears of it. A multicast lands at the same offset in several CTAs. */
enum { MOST_CTAS = 16 };
typedef struct {
    u32 address;
    Mbarrier *barrier;
} Landing;
typedef struct {
    s32 count;
    Landing landing[MOST_CTAS];
} Landings;

typedef struct {
    u32 address, barrier; /* what the instruction names */
    s32 mask;             /* CTAs of a multicast; ALL: the one that the address names */
    bool pair;            /* .cta_group::2: the mbarrier may lie in the CTA's peer */
    u32 align;
} Target;

bool find_landings(Warp *w, const Ins *i, int l, const Target *target, u64 bytes, Landings *found); /* false after a finding */
Access tracked_access(Work *work, const Mbarrier *b, HistorySpace space); /* the access of a copy that the mbarrier tracks */
/* Like shared_read and shared_write; a CTA that has ended meanwhile is a finding, and what the copy races with still shows. */
bool copy_from_shared(Work *work, const Access *a, u32 address, void *to, u64 bytes);
bool copy_to_shared(Work *work, const Access *a, u32 address, const void *from, u64 bytes);
void landed(Work *work, Mbarrier *b, s64 bytes);
void land(Work *work, const Landing *to, const u8 *data, u64 bytes); /* writes the data and tells the mbarrier */

enum { PLAIN = -1 }; /* in the place of an AtomicOp: a copy */
/* x := op(old, x), element by element, as a copy that reduces does it */
void combine_all(AtomicOp op, AtomicType t, u32 element, const u8 *old, u8 *x, u64 bytes, bool ftz);

static inline void add_sectors(Warp *w, const Ins *i, u64 address, u64 bytes) {
    if (bytes) counter(w, i)->sectors += (address + bytes - 1) / 32 - address / 32 + 1;
}
