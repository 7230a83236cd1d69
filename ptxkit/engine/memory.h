/* Addresses of every space, and accesses with their history kept. */
#pragma once
#include "history.h"

enum { WINDOW_SHARED = 0x02, WINDOW_LOCAL = 0x03, WINDOW_PARAM = 0x04 }; /* top byte of generic addresses; 0: global */
static inline u64 window(int top) { return (u64)top << 56; }
/* shared_bytes, global_bytes and param_bytes return where the bytes are, or NULL after a finding. */
Cta *cta_at(Cluster *c, u32 shared_address); /* found by the rank in bits 24-31; NULL: no such CTA */
static inline u32 shared_address(const Cta *cta, u32 offset) { return (cta->machine->launch->arch >= 90 ? (u32)cta->rank << 24 : 0) | offset; }
/* n bytes of shared memory at a 32-bit cluster address; *cta and *offset get the CTA and the offset in its memory. */
u8 *shared_bytes(Warp *w, const Ins *i, int lane, u32 address, u64 n, u64 align, Cta **cta, u32 *offset);
u8 *global_bytes(Warp *w, const Ins *i, int lane, u64 address, u64 n, u64 align, bool write, Region **region);
/* These copy the bytes and note the access in their history: a read copies to `to`, a write from `from`. */
bool shared_read(Warp *w, const Ins *i, const Access *a, u32 address, void *to, u64 n, u64 align);
bool shared_write(Warp *w, const Ins *i, const Access *a, u32 address, const void *from, u64 n, u64 align);
bool global_read(Warp *w, const Ins *i, const Access *a, u64 address, void *to, u64 n, u64 align);
bool global_write(Warp *w, const Ins *i, const Access *a, u64 address, const void *from, u64 n, u64 align);
const u8 *param_bytes(Warp *w, u64 offset, u64 n);
/* atomics and reductions: one element; f32 addition flushes subnormals only where the caller says so (ftz) */
typedef enum { AT_ADD, AT_MIN, AT_MAX, AT_AND, AT_OR, AT_XOR, AT_EXCH, AT_CAS, AT_INC, AT_DEC } AtomicOp;
typedef enum { T_U32, T_S32, T_U64, T_S64, T_F32, T_F64, T_F16, T_BF16, T_B16, T_B128, T_F16X2, T_BF16X2 } AtomicType;
void combine(AtomicOp op, AtomicType t, const u8 *old, const u8 *x, u8 *result, bool ftz);
/* shared-memory passes of a warp's access: lanes' 32-bit addresses, bytes a lane */
void count_wavefronts(Warp *w, const Ins *i, u32 lanes, const u32 *address, u32 bytes, bool write);
void count_sectors(Warp *w, const Ins *i, u32 lanes, const u64 *address, u32 bytes);
