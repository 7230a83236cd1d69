/* Loads, stores, atomics and addresses.
 *
 * A generic address names its space by its top byte; global memory is the host's own, shared addresses are 32 bits with the CTA's rank
 * in the cluster above bit 24. Whatever is touched is checked first: the space's bounds, the alignment, the history.
 */
#include "memory.h"
#include "clock.h"
#include "findings.h"
#include "knowledge.h"
#include "numerics.h"
#include "visits.h"

/* ---- places ------------------------------------------------------------------------------------------------------------- */

Cta *cta_at(Cluster *c, u32 address) {
    if (c->machine->launch->arch < 90) return &c->cta[0];
    u32 rank = address >> 24;
    return rank < (u32)c->nctas ? &c->cta[rank] : NULL;
}

u8 *shared_bytes(Warp *w, const Ins *i, int lane, u32 address, u64 n, u64 align, Cta **cta, u32 *offset) {
    const Launch *launch = w->machine->launch;
    u32 start = launch->arch >= 90 ? address & 0xffffff : address;
    Cta *owner = launch->arch >= 90 ? cta_at(w->cluster, address) : w->cta;
    if (!owner) {
        find(w, i, lane, OUT_OF_BOUNDS, address, n, "shared address 0x%x names CTA %u of a cluster of %d", address, address >> 24, w->cluster->nctas);
        return NULL;
    }
    if (!lies_within(start, n, launch->shared_base, launch->shared_end - launch->shared_base)) {
        find(w, i, lane, OUT_OF_BOUNDS, address, n, "%llu bytes at shared address 0x%x; the CTA has 0x%x to 0x%x", (unsigned long long)n, start,
             launch->shared_base, launch->shared_end);
        return NULL;
    }
    if (start & (align - 1)) {
        find(w, i, lane, MISALIGNED, address, n, "shared address 0x%x is not a multiple of %llu", start, (unsigned long long)align);
        return NULL;
    }
    if (owner->exited && owner != w->cta) { /* what a CTA has sent off from its own memory ends before that is given away */
        find(w, i, lane, PEER_EXITED, address, n, "shared memory of CTA rank %d, which has exited", owner->rank);
        return NULL;
    }
    *cta = owner;
    *offset = start;
    return owner->shared + start;
}

u8 *global_bytes(Warp *w, const Ins *i, int lane, u64 address, u64 n, u64 align, bool write, Region **region) {
    Region *r = region_at(w->machine->launch, address);
    if (!r || !lies_within(address, n, r->address, r->size)) {
        Finding *f = find(w, i, lane, OUT_OF_BOUNDS, address, n, "%s", "");
        if (f && f->count == 1) { /* Python names the nearest tensor */
            f->space = SPACE_GLOBAL;
            f->detail[0] = r ? r->label : -1;
            f->detail[1] = r ? (s64)(address - r->address) : 0;
            f->detail[2] = r ? (s64)r->size : 0;
            f->detail[3] = write;
        }
        return NULL;
    }
    if (address & (align - 1)) {
        find(w, i, lane, MISALIGNED, address, n, "global address 0x%llx is not a multiple of %llu", (unsigned long long)address,
             (unsigned long long)align);
        return NULL;
    }
    if (write && !r->writable) {
        Finding *f = find(w, i, lane, OUT_OF_BOUNDS, address, n, "a write to memory that may only be read");
        if (f && f->count == 1) f->space = SPACE_GLOBAL, f->detail[0] = r->label;
        return NULL;
    }
    *region = r;
    return r->host + (address - r->address);
}

const u8 *param_bytes(Warp *w, u64 offset, u64 n) {
    const Launch *launch = w->machine->launch;
    return lies_within(offset, n, 0, launch->params_size) ? launch->params + offset : NULL;
}

bool shared_read(Warp *w, const Ins *i, const Access *a, u32 address, void *to, u64 n, u64 align) {
    Cta *cta;
    u32 offset;
    u8 *p = shared_bytes(w, i, a->lane, address, n, align, &cta, &offset);
    if (!p) {
        memset(to, 0xff, n);
        return false;
    }
    if (!a->async) note_visit(w, i, cta);
    if (cta->shared_history) bytes_read(cta->shared_history, offset, n, a, shared_address(cta, offset));
    memcpy(to, p, n);
    counter(w, i)->shared_read += n;
    return true;
}

static void guard_mbarriers(Warp *w, const Ins *i, int lane, Cta *cta, u32 offset, u64 n) {
    for (u32 k = offset / 8; k <= (offset + n - 1) / 8; k++)
        if (cta->mbarrier[k] && cta->mbarrier[k]->live)
            find(w, i, lane, MBARRIER_OVERWRITTEN, shared_address(cta, k * 8), 8, "a store to the live mbarrier at shared address 0x%x", k * 8);
}

bool shared_write(Warp *w, const Ins *i, const Access *a, u32 address, const void *from, u64 n, u64 align) {
    Cta *cta;
    u32 offset;
    u8 *p = shared_bytes(w, i, a->lane, address, n, align, &cta, &offset);
    if (!p) return false;
    guard_mbarriers(w, i, a->lane, cta, offset, n);
    if (!a->async) note_visit(w, i, cta);
    if (cta->shared_history) bytes_written(cta->shared_history, offset, n, a, shared_address(cta, offset), p, from);
    if (memcmp(p, from, n)) w->machine->progress++;
    memcpy(p, from, n);
    counter(w, i)->shared_written += n;
    return true;
}

static void touch(Region *r, u64 address, u64 n, u8 how) { /* sectors of the address space, so that pieces of one are one */
    for (u64 s = address / 32; s <= (address + n - 1) / 32; s++) r->touched[s - r->address / 32] |= how;
}

enum { GONE = 2, LINE = 128 }; /* of a byte that is written: it was discarded since; bytes that are discarded at a time */

/* A read of global memory that nothing has written since it was allocated, or discarded: whether a result depends on the
   former, Python finds out. */
static void read_unwritten(Warp *w, const Ins *i, int lane, const Region *r, u64 address, u64 n) {
    for (int flag = 0; flag <= GONE; flag += GONE) {
        const u8 *first = memchr(r->written + (address - r->address), flag, n);
        if (!first) continue;
        Finding *f = find(w, i, lane, flag == GONE ? DISCARDED : UNWRITTEN, r->address + (u64)(first - r->written), n, "%s", "");
        if (f) f->space = SPACE_GLOBAL;
    }
}

bool global_read(Warp *w, const Ins *i, const Access *a, u64 address, void *to, u64 n, u64 align) {
    Region *r;
    u8 *p = global_bytes(w, i, a->lane, address, n, align, false, &r);
    if (!p) {
        memset(to, 0xff, n);
        return false;
    }
    if (w->machine->launch->checks) region_history(r, address - r->address, n, a, NULL, NULL, false);
    if (r->written && w->machine->launch->checks) read_unwritten(w, i, a->lane, r, address, n);
    memcpy(to, p, n);
    touch(r, address, n, 1);
    counter(w, i)->global_read += n;
    return true;
}

bool global_write(Warp *w, const Ins *i, const Access *a, u64 address, const void *from, u64 n, u64 align) {
    Region *r;
    u8 *p = global_bytes(w, i, a->lane, address, n, align, true, &r);
    if (!p) return false;
    if (w->machine->launch->checks) region_history(r, address - r->address, n, a, p, from, true);
    if (memcmp(p, from, n)) w->machine->progress++;
    memcpy(p, from, n);
    if (r->written) memset(r->written + (address - r->address), 1, n);
    touch(r, address, n, 2);
    counter(w, i)->global_written += n;
    return true;
}

/* What the bytes are afterwards is not known: nobody may read them before they are written. */
static void discard(Warp *w, const Ins *i, const Access *a, u64 address) {
    u8 unknown[LINE];
    Region *r;
    u8 *p = global_bytes(w, i, a->lane, address, LINE, LINE, true, &r);
    if (!p) return;
    memset(unknown, 0xff, LINE);
    if (w->machine->launch->checks) region_history(r, address - r->address, LINE, a, p, unknown, true);
    memcpy(p, unknown, LINE);
    if (r->written) memset(r->written + (address - r->address), GONE, LINE);
}

/* ---- counting ----------------------------------------------------------------------------------------------------------- */

/* 4-byte banks; a pass serves 32 lanes of 4 bytes, 16 of 8 or 8 of 16. Lanes that want the same word share a pass. */
void count_wavefronts(Warp *w, const Ins *i, u32 lanes, const u32 *address, u32 bytes, bool write) {
    Counter *c = counter(w, i);
    u64 before = c->wavefronts;
    int together = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    (void)write;
    for (int first = 0; first < LANES; first += together) {
        u32 words[32][32];
        int used[32] = {0}, passes = 0, distinct = 0;
        for (int l = first; l < first + together; l++) {
            if (!lane_in(lanes, l)) continue;
            for (u32 b = 0; b < (bytes < 4 ? 4 : bytes); b += 4) {
                u32 word = (address[l] + b) / 4, bank = word % 32;
                int k = 0;
                while (k < used[bank] && words[bank][k] != word) k++;
                if (k == used[bank]) {
                    if (k < 32) words[bank][used[bank]++] = word;
                    distinct++;
                }
                if (used[bank] > passes) passes = used[bank];
            }
        }
        c->wavefronts += passes;
        c->wavefronts_needed += (distinct + 31) / 32;
    }
    clock_shared(w, c->wavefronts - before);
}

void count_sectors(Warp *w, const Ins *i, u32 lanes, const u64 *address, u32 bytes) {
    u64 sector[LANES * 4];
    int n = 0;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        for (u64 s = address[l] / 32; s <= (address[l] + bytes - 1) / 32 && n < LANES * 4; s++) {
            int k = n - 1;
            while (k >= 0 && sector[k] != s) k--;
            if (k < 0) sector[n++] = s;
        }
    }
    counter(w, i)->sectors += n;
    clock_global(w, i, sector, n);
}

/* ---- ld and st ---------------------------------------------------------------------------------------------------------- */

typedef enum { GENERIC, GLOBAL, SHARED, LOCAL, PARAM } Space;
enum { SEM_WEAK, SEM_RELAXED, SEM_ACQUIRE, SEM_RELEASE, SEM_ACQ_REL };

/* operands: the values, then the address */

static Space space_of(Space named, u64 *address) { /* a generic address becomes one of its space */
    if (named != GENERIC) return named;
    int top = (int)(*address >> 56);
    if (top == WINDOW_SHARED || top == WINDOW_LOCAL || top == WINDOW_PARAM) *address &= 0x00ffffffffffffffu;
    return top == WINDOW_SHARED ? SHARED : top == WINDOW_LOCAL ? LOCAL : top == WINDOW_PARAM ? PARAM : GLOBAL;
}

static u8 *local_bytes(Warp *w, const Ins *i, int lane, u64 address, u64 n, u64 align) {
    u64 size = w->machine->program->local_bytes;
    if (!lies_within(address, n, 0, size) || address & (align - 1)) {
        find(w, i, lane, address & (align - 1) ? MISALIGNED : OUT_OF_BOUNDS, address, n, "%llu bytes at local address 0x%llx of %llu",
             (unsigned long long)n, (unsigned long long)address, (unsigned long long)size);
        return NULL;
    }
    return w->local + lane * size + address;
}

static u64 sync_key(Warp *w, Space space, u64 address) {
    return space == SHARED ? window(WINDOW_SHARED) | (u64)(w->cluster->serial & 0xffffff) << 32 | (u32)address : address;
}

static void put_element(Warp *w, s32 reg, int l, const u8 *from, u32 bytes, bool is_signed) {
    if (reg < 0) return;
    if (bytes == 16) {
        memcpy(&R64(w, reg)[2 * l], from, 16);
    } else if (bytes == 8) {
        memcpy(&R64(w, reg)[l], from, 8);
    } else {
        u32 x = 0;
        memcpy(&x, from, bytes);
        if (is_signed && bytes < 4) x = (u32)((s32)(x << (32 - 8 * bytes)) >> (32 - 8 * bytes));
        R32(w, reg)[l] = x;
    }
}

static void get_element(const Warp *w, s32 reg, int l, u8 *to, u32 bytes) {
    if (bytes == 16)
        memcpy(to, &R64(w, reg)[2 * l], 16);
    else if (bytes == 8)
        memcpy(to, &R64(w, reg)[l], 8);
    else
        memcpy(to, &R32(w, reg)[l], bytes);
}

static void put_values(Warp *w, const Ins *i, int l, const u8 *value) { /* into registers, which may be wider than the elements */
    const s64 *m = i->mod;
    u32 bytes = (u32)m[ACCESS_BYTES];
    for (u32 e = 0; e < m[ACCESS_COUNT]; e++) {
        s32 reg = i->arg[e];
        if (reg >= 0 && m[ACCESS_DECLARED] > 4 && bytes < m[ACCESS_DECLARED]) {
            u64 x[2] = {0};
            memcpy(x, value + e * bytes, bytes);
            if (m[ACCESS_SIGNED]) x[0] = (u64)((s64)(x[0] << (64 - 8 * bytes)) >> (64 - 8 * bytes)), x[1] = -(x[0] >> 63);
            memcpy(w->regs + reg + l * m[ACCESS_DECLARED], x, (size_t)m[ACCESS_DECLARED]);
        } else
            put_element(w, reg, l, value + e * bytes, bytes, m[ACCESS_SIGNED]);
    }
}

static void get_values(const Warp *w, const Ins *i, int l, u8 *value) {
    const s64 *m = i->mod;
    u32 bytes = (u32)m[ACCESS_BYTES];
    for (u32 e = 0; e < m[ACCESS_COUNT]; e++) {
        if (m[ACCESS_DECLARED] > 4 && bytes < m[ACCESS_DECLARED])
            memcpy(value + e * bytes, w->regs + i->arg[e] + l * m[ACCESS_DECLARED], bytes);
        else
            get_element(w, i->arg[e], l, value + e * bytes, bytes);
    }
}

/* The lanes whose access to shared or global memory is counted, and where that was. */
typedef struct {
    u32 in_global, in_shared, shared[LANES];
    u64 global[LANES];
} Touched;

static inline void touch_lane(Touched *t, Space space, int l, u64 address) {
    if (space == SHARED)
        t->shared[l] = (u32)address, t->in_shared |= 1u << l;
    else
        t->global[l] = address, t->in_global |= 1u << l;
}

static inline void count_touched(Warp *w, const Ins *i, const Touched *t, u32 n, bool write) {
    if (t->in_shared) count_wavefronts(w, i, t->in_shared, t->shared, n, write);
    if (t->in_global) count_sectors(w, i, t->in_global, t->global, n);
}

static inline bool access_bytes(Warp *w, const Ins *i, const Access *a, Space space, u64 address, u8 *value, u32 n, bool write) {
    if (space == SHARED) return write ? shared_write(w, i, a, (u32)address, value, n, n) : shared_read(w, i, a, (u32)address, value, n, n);
    return write ? global_write(w, i, a, address, value, n, n) : global_read(w, i, a, address, value, n, n);
}

static void access_private(Warp *w, const Ins *i, int l, Space space, u64 address, u8 *value, u32 n, bool write) { /* .local and .param */
    if (space == LOCAL) {
        u8 *p = local_bytes(w, i, l, address, n, n);
        if (p) memcpy(write ? p : value, write ? value : p, n);
    } else if (write)
        find(w, i, l, OUT_OF_BOUNDS, address, n, "a store to parameters");
    else {
        const u8 *p = param_bytes(w, address, n);
        if (p)
            memcpy(value, p, n);
        else
            find(w, i, l, OUT_OF_BOUNDS, address, n, "%u bytes at offset %llu of %u bytes of parameters", n, (unsigned long long)address,
                 w->machine->launch->params_size);
    }
}

static inline __attribute__((always_inline)) Outcome load_or_store(Warp *w, const Ins *i, u32 lanes, bool write) {
    const s64 *m = i->mod;
    u32 n = (u32)m[ACCESS_BYTES] * (u32)m[ACCESS_COUNT];
    Touched touched;
    touched.in_global = touched.in_shared = 0;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u64 address = address_operand(w, i, (int)m[ACCESS_COUNT], ACCESS_ADDRESS, l);
        Space space = space_of(m[ACCESS_SPACE], &address);
        u8 value[128];
        if (write)
            get_values(w, i, l, value);
        else
            memset(value, 0xff, sizeof value);
        if (space == SHARED || space == GLOBAL) {
            Access a = warp_access(w, i, l, space == SHARED ? SPACE_SHARED : SPACE_GLOBAL);
            a.scope = m[ACCESS_SEM] ? (u8)m[ACCESS_SCOPE] : WEAK;
            if (access_bytes(w, i, &a, space, address, value, n, write)) touch_lane(&touched, space, l, address);
            if (m[ACCESS_SEM] && write) publish(w, sync_key(w, space, address), m[ACCESS_SEM] == SEM_RELEASE, false);
            if (m[ACCESS_SEM] && !write) observe(w, sync_key(w, space, address), m[ACCESS_SEM] == SEM_ACQUIRE);
        } else
            access_private(w, i, l, space, address, value, n, write);
        if (!write) put_values(w, i, l, value);
    }
    count_touched(w, i, &touched, n, write);
    return m[ACCESS_SEM] ? YIELD : NEXT;
}

static Outcome op_ld(Warp *w, const Ins *i, u32 lanes) { return load_or_store(w, i, lanes, false); }
static Outcome op_st(Warp *w, const Ins *i, u32 lanes) { return load_or_store(w, i, lanes, true); }

/* st.bulk: operands: address, bytes */
static Outcome op_st_bulk(Warp *w, const Ins *i, u32 lanes) {
    enum { PIECE = 512 };
    static const u8 zeros[PIECE];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u64 address = address_operand(w, i, 0, ST_BULK_TO, l), n = R64(w, i->arg[1])[l];
        if (i->mod[ST_BULK_TO + PLACE_GENERIC] && address >> 56 != WINDOW_SHARED) {
            find(w, i, l, OUT_OF_BOUNDS, address, n, "generic address 0x%llx is not in shared memory", (unsigned long long)address);
            continue;
        }
        if (n % 8 || n > 1 << 24) {
            find(w, i, l, BAD_OPERAND, address, n, "%llu bytes: st.bulk takes a multiple of 8, at most 16,777,216", (unsigned long long)n);
            continue;
        }
        Access a = warp_access(w, i, l, SPACE_SHARED);
        for (u64 offset = 0; offset < n; offset += PIECE)
            if (!shared_write(w, i, &a, (u32)(address + offset), zeros, n - offset < PIECE ? n - offset : PIECE, 8)) break;
    }
    return NEXT;
}

/* discard: operand: address */
static Outcome op_discard(Warp *w, const Ins *i, u32 lanes) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u64 address = address_operand(w, i, 0, DISCARD_ADDRESS, l);
        if (space_of(i->mod[DISCARD_SPACE], &address) != GLOBAL) {
            find(w, i, l, OUT_OF_BOUNDS, address, LINE, "discard of what is not in global memory");
            continue;
        }
        Access a = warp_access(w, i, l, SPACE_GLOBAL);
        discard(w, i, &a, address);
    }
    return NEXT;
}

/* ---- atom and red ------------------------------------------------------------------------------------------------------- */

static u64 combine_integer(AtomicOp op, AtomicType t, u64 old, u64 x) {
    bool wide = t == T_U64 || t == T_S64;
    bool less = t == T_S32 ? (s32)x < (s32)old : t == T_S64 ? (s64)x < (s64)old : wide ? x < old : (u32)x < (u32)old;
    switch (op) {
    case AT_ADD: return old + x;
    case AT_MIN: return less ? x : old;
    case AT_MAX: return less ? old : x;
    case AT_AND: return old & x;
    case AT_OR: return old | x;
    case AT_XOR: return old ^ x;
    case AT_INC: return (u32)old >= (u32)x ? 0 : old + 1;
    case AT_DEC: return !(u32)old || (u32)old > (u32)x ? x : old - 1;
    default: return x;
    }
}

static float combine_float(AtomicOp op, float old, float x) {
    if (op == AT_ADD) return old + x;
    if (op == AT_EXCH) return x;
    if (old != old) return x;
    if (x != x) return old;
    bool less = x < old || (x == old && float_bits(x) >> 31);
    return (op == AT_MIN) == less ? x : old;
}

static u16 combine_16(AtomicOp op, AtomicType t, u16 old, u16 x) {
    if (t == T_F16) return float_to_half(combine_float(op, half_to_float(old), half_to_float(x)));
    return float_to_bf16(combine_float(op, bf16_to_float(old), bf16_to_float(x)));
}

/* One element in place; f32 addition flushes subnormals only where the caller says so (ftz). */
void combine(AtomicOp op, AtomicType t, const u8 *old, const u8 *x, u8 *result, bool ftz) {
    u64 a = 0, b = 0, r;
    u32 bytes = t == T_U64 || t == T_S64 || t == T_F64 ? 8 : t == T_F16 || t == T_BF16 || t == T_B16 ? 2 : t == T_B128 ? 16 : 4;
    if (bytes == 16) {
        memcpy(result, x, 16); /* exch; cas has been decided */
        return;
    }
    memcpy(&a, old, bytes);
    memcpy(&b, x, bytes);
    if (op == AT_EXCH)
        r = b;
    else if (t == T_F32) {
        float fa = bits_float((u32)a), fb = bits_float((u32)b);
        float sum = ftz ? flush(combine_float(op, flush(fa), flush(fb))) : combine_float(op, fa, fb);
        r = sum != sum ? 0x7fffffffu : float_bits(sum);
    } else if (t == T_F64)
        r = double_bits(bits_double(a) + bits_double(b));
    else if (t == T_F16 || t == T_BF16)
        r = combine_16(op, t, (u16)a, (u16)b);
    else if (t == T_F16X2 || t == T_BF16X2) {
        AtomicType half = t == T_F16X2 ? T_F16 : T_BF16;
        r = combine_16(op, half, (u16)a, (u16)b) | (u64)combine_16(op, half, (u16)(a >> 16), (u16)(b >> 16)) << 16;
    } else
        r = combine_integer(op, t, a, b);
    memcpy(result, &r, bytes);
}

/* operands: destination (or -1) for each element, address, value for each element, [new value of cas] */

static Outcome op_atom(Warp *w, const Ins *i, u32 lanes) {
    const s64 *m = i->mod;
    u32 bytes = (u32)m[ATOM_BYTES], count = (u32)m[ATOM_COUNT], n = bytes * count;
    Touched touched;
    touched.in_global = touched.in_shared = 0;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u64 address = address_operand(w, i, (int)count, ATOM_ADDRESS, l);
        Space space = space_of(m[ATOM_SPACE], &address);
        u8 old[32], value[32], result[32];
        if (space != SHARED && space != GLOBAL) {
            find(w, i, l, UNSUPPORTED, address, n, "an atomic on local memory or parameters");
            continue;
        }
        Access a = warp_access(w, i, l, space == SHARED ? SPACE_SHARED : SPACE_GLOBAL);
        a.scope = (u8)m[ATOM_SCOPE];
        if (!access_bytes(w, i, &a, space, address, old, n, false)) continue;
        for (u32 e = 0; e < count; e++) {
            get_element(w, i->arg[count + 1 + e], l, value + e * bytes, bytes);
            if (m[ATOM_OP] == AT_CAS) {
                u8 replacement[16];
                get_element(w, i->arg[2 * count + 1], l, replacement, bytes);
                memcpy(result, memcmp(old, value, bytes) ? old : replacement, bytes);
            } else
                combine(m[ATOM_OP], m[ATOM_TYPE], old + e * bytes, value + e * bytes, result + e * bytes, m[ATOM_TYPE] == T_F32 && space == GLOBAL);
        }
        observe(w, sync_key(w, space, address), m[ATOM_SEM] == SEM_ACQUIRE || m[ATOM_SEM] == SEM_ACQ_REL);
        access_bytes(w, i, &a, space, address, result, n, true);
        touch_lane(&touched, space, l, address);
        publish(w, sync_key(w, space, address), m[ATOM_SEM] == SEM_RELEASE || m[ATOM_SEM] == SEM_ACQ_REL, true);
        for (u32 e = 0; e < count; e++) put_element(w, i->arg[e], l, old + e * bytes, bytes, false);
    }
    count_touched(w, i, &touched, n, true);
    return YIELD;
}

/* ---- addresses ---------------------------------------------------------------------------------------------------------- */

/* mapa d, a, rank: the same place in another CTA of the cluster; a rank that is none is found out when the address is used. */
static Outcome op_mapa(Warp *w, const Ins *i, u32 lanes) {
    const u32 *rank = R32(w, i->arg[2]);
    EACH_LANE(lanes, {
        u32 offset = (i->mod[MAPA_WIDE] ? (u32)R64(w, i->arg[1])[l] : R32(w, i->arg[1])[l]) & 0xffffff;
        u32 mapped = rank[l] << 24 | offset;
        if (i->mod[MAPA_WIDE])
            R64(w, i->arg[0])[l] = i->mod[MAPA_GENERIC] ? window(WINDOW_SHARED) | mapped : mapped;
        else
            R32(w, i->arg[0])[l] = mapped;
    });
    return NEXT;
}

/* getctarank d, a */
static Outcome op_getctarank(Warp *w, const Ins *i, u32 lanes) {
    EACH_LANE(lanes, {
        u32 address = i->mod[GETCTARANK_WIDE] ? (u32)R64(w, i->arg[1])[l] : R32(w, i->arg[1])[l];
        R32(w, i->arg[0])[l] = address >> 24;
    });
    return NEXT;
}

/* isspacep p, a */
static Outcome op_isspacep(Warp *w, const Ins *i, u32 lanes) {
    u32 bits = 0;
    const u64 *a = R64(w, i->arg[1]);
    for (int l = 0; l < LANES; l++) {
        bool in = (int)(a[l] >> 56) == (int)i->mod[ISSPACEP_WINDOW];
        if (i->mod[ISSPACEP_OWN_CTA]) in = in && cta_at(w->cluster, (u32)a[l]) == w->cta;
        bits |= (u32)in << l;
    }
    set_pred(w, i->arg[0], lanes, bits);
    return NEXT;
}

const HandlerEntry memory_handlers[] = {
    {"st_bulk", op_st_bulk}, {"ld", op_ld}, {"st", op_st}, {"discard", op_discard}, {"atom", op_atom}, {"mapa", op_mapa}, {"getctarank", op_getctarank}, {"isspacep", op_isspacep}, {0},
};
