/* The tensor core of tcgen05: mma, cp, shift, and commit, which tells an mbarrier of their end.
 *
 * One thread sends an operation off; it runs in the queue of its CTA (cta_group::1) or of its pair (::2: the even CTA's), in order, but for
 * products that a seed lets pass others, and as late as possible. Its accesses are the async proxy's, left under the thread's warp
 * (BY_TENSOR) and the operation's number. It follows all that its sender knew, and every earlier operation of the queue that the sender
 * knew to have been sent (as fences order it, where it touches tensor memory). commit hands on what follows from the end of its thread's
 * operations; it does not release what the thread has done besides.
 * Factors of a row (mma.block_scale): those of rows r, r + 32, ... lie in lane r, one column after the other, and once more in each slab of 32
 * lanes; a column's four bytes are factors of neighbours in K.
 * Not documented, and decided here: how D rounds (mma.c); an f16 D leaves poison in the upper half of its cells; shift moves the slab of
 * 32 lanes that its address names; factors that differ between slabs are a finding.
 */
#include "tmem.h"
#include "barriers.h"
#include "clock.h"
#include "findings.h"
#include "knowledge.h"
#include "mma.h"
#include "numerics.h"
#include "products.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

/* ---- the queue ---------------------------------------------------------------------------------------------------------- */

static Issuer *issuer_of(Warp *w, int lane) {
    Issuer **slot = &tmem_of(w->cta)->issuer[w->index * LANES + lane];
    if (!*slot) {
        *slot = calloc(1, sizeof **slot);
        (*slot)->done = new_knowledge(w->cluster);
    }
    return *slot;
}

static Work *send(Warp *w, const Ins *i, int lane, int group, void (*run)(Work *), const void *data, size_t n) {
    Issuer *t = issuer_of(w, lane);
    if (t->count == t->room) {
        t->room = t->room ? 2 * t->room : 16;
        t->sent = realloc(t->sent, t->room * sizeof *t->sent);
    }
    t->queue = queue_of(w->cta, group);
    t->sent[t->count].clock = warp_clock(w);
    t->sent[t->count++].number = next_number(w);
    Work *work = send_work(w, i, lane, t->queue, run, n);
    work->kind = BY_TENSOR;
    work->clock = w->async_clock[BY_TENSOR];
    memcpy(work->data, data, n);
    if (w->time) work->duration = w->machine->time->p->tensor_short;
    return work;
}

static u32 sent_by(const Issuer *t, u32 clock) { /* the last operation that its warp sent up to this clock; 0: none */
    const s32 known = HOW_MANY(t->count, t->sent[n].clock <= clock);
    return known ? t->sent[known - 1].number : 0;
}

/* When its turn comes an operation follows its thread's earlier ones, and those in the queue that its sender knew of. */
static void begin(Work *work) {
    Warp *w = work->warp;
    Cluster *c = w->cluster;
    const Queue *queue = issuer_of(w, work->lane)->queue;
    knows_of(&work->know, actor_of(w, BY_TENSOR), work->clock);
    for (s32 rank = w->cta->rank & ~1; rank <= (w->cta->rank | 1) && rank < c->nctas; rank++) {
        Cta *cta = &c->cta[rank];
        const Tmem *t = cta->tmem;
        for (s32 n = 0; t && n < cta->nwarps * LANES; n++) {
            const Warp *sender = &cta->warp[n / LANES];
            const Issuer *other = t->issuer[n];
            if (!other || other->queue != queue || sender == w) continue;
            u32 actor = actor_of(sender, BY_TENSOR), *ordered = work->know.clock[BEFORE_TENSOR], fenced = ordered[actor_of(sender, SENT_TO_TENSOR) & 0xffff];
            u32 before = ordered[actor & 0xffff];
            knows_of(&work->know, actor, sent_by(other, work->know.clock[SEEN][sender->actor]));
            ordered[actor & 0xffff] = fenced > before ? fenced : before;
        }
    }
}

/* An operation that has ended is handed on by commit without a tcgen05.fence::before_thread_sync. */
static void end(Work *work) {
    fence_view(work->warp->cluster, &work->know, BEFORE_SYNC, BEFORE_TENSOR);
    learn(work->warp->cluster, &issuer_of(work->warp, work->lane)->done, &work->know);
}

static Access tensor_access(Work *work, HistorySpace space) { return work_access(work, actor_of(work->warp, BY_TENSOR), work->clock, space); }

/* A finding that quotes a descriptor, and ends the launch. */
static __attribute__((format(printf, 7, 8))) bool refuse(Warp *w, const Ins *i, int lane, FindingKind kind, const char *name, u64 descriptor,
                                                         const char *format, ...) {
    char text[120];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    find(w, i, lane, kind, descriptor, 0, "%s 0x%llx: %s", name, (unsigned long long)descriptor, text);
    stop(w->machine);
    return false;
}

/* ---- matrices in shared memory ------------------------------------------------------------------------------------------ */

typedef struct {
    u8 width, mask, shift; /* bytes of a row of the atom, 0 without swizzle; address bits 7.. & mask are added, without carry, at shift */
    bool valid, wide_atom; /* wide: the swizzle moves 32 bytes, and an atom has 4 rows of K */
} Swizzle;
static const Swizzle swizzles[8] = {
    [0] = {.valid = true},           [1] = {128, 3, 5, true, true}, [2] = {128, 7, 4, true, false},
    [4] = {64, 3, 4, true, false},   [6] = {32, 1, 4, true, false},
};

typedef struct {
    const Swizzle *swizzle;
    u32 start, lbo, sbo;
    bool mn_major;
} Matrix;

static bool read_descriptor(Warp *w, const Ins *i, int lane, const char *name, u64 d, Matrix *m) {
    m->swizzle = &swizzles[d >> 61];
    m->start = (u32)(d & 0x3fff) << 4;
    m->lbo = (u32)(d >> 16 & 0x3fff) << 4;
    m->sbo = (u32)(d >> 32 & 0x3fff) << 4;
    m->mn_major = false;
    if ((d >> 46 & 7) != 1) return refuse(w, i, lane, BAD_DESCRIPTOR, name, d, "bits 46-48 are %d; they must be 0b001", (int)(d >> 46 & 7));
    if (d >> 49 & 7)
        return refuse(w, i, lane, BAD_DESCRIPTOR, name, d, "base offset (bits 49-51) %d; it must be 0, as no other is documented",
                      (int)(d >> 49 & 7));
    if (d >> 52 & 1) return refuse(w, i, lane, UNSUPPORTED, name, d, "bit 52, an absolute leading address, is for K of 48 bytes alone");
    if (d >> 53 & 0xff) return refuse(w, i, lane, BAD_DESCRIPTOR, name, d, "bits 53-60 are 0x%x; they must be 0", (int)(d >> 53 & 0xff));
    if (!m->swizzle->valid)
        return refuse(w, i, lane, BAD_DESCRIPTOR, name, d, "swizzle (bits 61-63) %d; there are 0 none, 1 and 2 128B, 4 64B, 6 32B", (int)(d >> 61));
    return true;
}

/* Address of the 16 bytes that start at row or column mn (MN-major: byte x of them) and at byte kb of K (MN-major: at k). */
static u32 group_address(const Matrix *m, u32 mn, u32 k) {
    u32 width = m->swizzle->width, rows = m->swizzle->wide_atom ? 4 : 8, address = m->start;
    if (m->mn_major)
        address += width ? mn / width * m->lbo + mn % width + k % rows * width + k / rows * m->sbo : mn / 16 * m->sbo + k % 8 * 16 + k / 8 * m->lbo;
    else
        address += mn / 8 * m->sbo + (width ? mn % 8 * width + k : mn % 8 * 16 + k / 16 * m->lbo);
    return address ^ (address >> 7 & m->swizzle->mask) << m->swizzle->shift;
}

/* Elements in shared memory come in groups of 16 bytes; those of 4 and 6 bits leave the end of their group empty. */
typedef struct { u8 bytes, bits, container, of_group; } Element; /* container: the lowest bit of a 4- or 6-bit element in a byte of tensor memory */
static const Element elements[] = {
    [MT_F16] = {2, 16, 0, 8},  [MT_BF16] = {2, 16, 0, 8}, [MT_TF32] = {4, 32, 0, 4}, [MT_E4M3] = {1, 8, 0, 16}, [MT_E5M2] = {1, 8, 0, 16},
    [MT_E2M3] = {1, 6, 1, 16}, [MT_E3M2] = {1, 6, 1, 16}, [MT_E2M1] = {1, 4, 2, 16}, [MT_U8] = {1, 8, 0, 16},   [MT_S8] = {1, 8, 0, 16},
};
static const Element packed_e2m1 = {1, 4, 0, 32}; /* in kind::mxf4 and mxf4nvf4 */
enum { GROUP = 16, K_BYTES = 32, MOST_M = 256, MOST_N = 256, MOST_K = 64, MOST_FACTORS = 4 };

static void unpack(const Element *e, const u8 *bytes, u32 n, u32 *to) { /* elements one after the other; 3 bytes past the last are read */
    u32 mask = e->bits == 32 ? FULL : (1u << e->bits) - 1;
    for (u32 k = 0, bit = 0; k < n; k++, bit += e->bits) {
        u32 x;
        memcpy(&x, bytes + bit / 8, sizeof x);
        to[k] = x >> bit % 8 & mask;
    }
}

static void read_group(Work *work, const Access *a, const Cta *cta, u32 address, const Element *e, u32 *to) {
    u8 bytes[GROUP + sizeof(u32)];
    u32 n = e->of_group;
    shared_read(work->warp, work->ins, a, shared_address(cta, address), bytes, n * e->bits / 8, GROUP);
    unpack(e, bytes, n, to);
}

/* Rows of A, or columns of B, from one CTA: to[rows][K] */
static void gather(Work *work, const Cta *cta, const Matrix *m, const Element *e, u32 rows, u32 *to) {
    Access a = tensor_access(work, SPACE_SHARED);
    u32 n = e->of_group, k = K_BYTES / GROUP * n;
    if (!m->mn_major) {
        for (u32 mn = 0; mn < rows; mn++)
            for (u32 kb = 0; kb < K_BYTES; kb += GROUP) read_group(work, &a, cta, group_address(m, mn, kb), e, to + mn * k + kb / GROUP * n);
        return;
    }
    for (u32 column = 0; column < k; column++)
        for (u32 mn = 0; mn < rows; mn += n) {
            u32 group[GROUP];
            read_group(work, &a, cta, group_address(m, mn * e->bytes, column), e, group);
            for (u32 x = 0; x < n; x++) to[(mn + x) * k + column] = group[x];
        }
}

/* ---- mma: what the descriptors say -------------------------------------------------------------------------------------- */

/* operands: D, A (address or descriptor), B, idesc, predicate, zero-column mask (-1), words of the lane mask, or addresses of factors */
enum { ARG_D, ARG_A, ARG_B, ARG_IDESC, ARG_P, ARG_ZERO, ARG_MASK };
typedef enum { KIND_F16, KIND_TF32, KIND_F8F6F4, KIND_I8, KIND_MXF8F6F4, KIND_MXF4, KIND_MXF4NVF4, KINDS } MmaKind;
enum { TYPES = 6, NO_TYPE = -1 };
static const s8 input_types[KINDS][TYPES] = { /* [kind][code in idesc] */
    [KIND_F16] = {MT_F16, MT_BF16, NO_TYPE, NO_TYPE, NO_TYPE, NO_TYPE},
    [KIND_TF32] = {NO_TYPE, NO_TYPE, MT_TF32, NO_TYPE, NO_TYPE, NO_TYPE},
    [KIND_F8F6F4] = {MT_E4M3, MT_E5M2, NO_TYPE, MT_E2M3, MT_E3M2, MT_E2M1},
    [KIND_I8] = {MT_U8, MT_S8, NO_TYPE, NO_TYPE, NO_TYPE, NO_TYPE},
    [KIND_MXF8F6F4] = {MT_E4M3, MT_E5M2, NO_TYPE, MT_E2M3, MT_E3M2, MT_E2M1},
    [KIND_MXF4] = {NO_TYPE, MT_E2M1, NO_TYPE, NO_TYPE, NO_TYPE, NO_TYPE},
    [KIND_MXF4NVF4] = {NO_TYPE, MT_E2M1, NO_TYPE, NO_TYPE, NO_TYPE, NO_TYPE},
};
static const s8 output_types[3] = {MT_F16, MT_F32, MT_S32};

/* Row r of a CTA's part of D lies in lane r, or 32 (r / 16) + r % 16 if spread; D's columns are cut in parts, each some lanes further. */
typedef struct {
    int group, m;
    bool ws, spread;
    u8 parts, stride;
} Layout;
static const Layout layouts[] = {
    {2, 256, false, false, 1, 0}, /* A */
    {2, 128, false, false, 2, 64}, /* B */
    {1, 128, false, false, 1, 0}, /* D */
    {1, 128, true, false, 1, 0},  /* D */
    {1, 64, true, false, 2, 64},  /* E */
    {1, 64, false, true, 1, 0},   /* F */
    {1, 32, true, false, 4, 32},  /* G */
};

typedef struct {
    const Layout *layout;
    MatrixType a_type, b_type, d_type;
    Matrix a, b;
    u32 m, n, k, d_address, a_address;
    bool a_in_tmem, accumulate, negate_a, negate_b, saturate;
    int scale; /* the old D is multiplied with 2^-scale */
    u32 disabled[8];
    u64 zero_mask;
    const Element *a_element, *b_element;
    u32 factors, factors_at[2], factor_byte[2]; /* how many a row has; where those of A and B are: the column, and the first byte there */
    MatrixType factor_type;
    Footprint footprint;
} Mma;

static u32 bits(u32 x, int low, int count) { return x >> low & ((1u << count) - 1); }

static bool allowed_n(const Mma *m, MmaKind kind) {
    if (m->layout->ws) return m->n == 64 || m->n == 128 || m->n == 256;
    u32 step = m->layout->group == 2 ? (kind == KIND_I8 ? 32 : 16) : kind == KIND_I8 && m->n > 32 ? 16 : 8;
    u32 group_step = GROUP * m->layout->group;
    if (m->b.mn_major && m->b_element->bytes == 1 && step < group_step) step = group_step;
    return m->n >= step && m->n <= MOST_N && m->n % step == 0;
}

/* Reads what all formats share: the signs, the order of A and B, N; then M. */
static bool read_shape(Warp *w, const Ins *i, int lane, u32 d, Mma *m) {
    MmaKind kind = i->mod[TCGEN05_MMA_KIND];
    int group = (int)i->mod[TCGEN05_MMA_GROUP];
    bool ws = i->mod[TCGEN05_MMA_WS];
    m->negate_a = bits(d, 13, 1);
    m->negate_b = bits(d, 14, 1);
    m->a.mn_major = bits(d, 15, 1);
    m->b.mn_major = bits(d, 16, 1);
    m->n = bits(d, 17, 6) << 3;
    m->k = K_BYTES / GROUP * m->a_element->of_group;
    for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++)
        if (layouts[k].group == group && layouts[k].ws == ws && layouts[k].m == (int)m->m && !(m->factors && layouts[k].spread)) m->layout = &layouts[k];
    if (!m->layout)
        return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "M=%u; it may be %s", m->m,
                      ws ? "32, 64 or 128" : group == 2 ? "128 or 256" : m->factors ? "128" : "64 or 128");
    if (!allowed_n(m, kind)) return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "N=%u is not allowed by kind, cta_group and transpose", m->n);
    return true;
}

/* idesc of the kinds with factors */
static bool read_scaled_idesc(Warp *w, const Ins *i, int lane, u32 d, Mma *m) {
    MmaKind kind = i->mod[TCGEN05_MMA_KIND];
    bool wide = kind == KIND_MXF8F6F4;
    u32 a = bits(d, 7, 3), b = bits(d, 10, wide ? 3 : 2);
    if (bits(d, 2, 1)) return refuse(w, i, lane, UNSUPPORTED, "idesc", d, "a sparse A (bit 2) is not simulated");
    if (bits(d, 31, 1) && !wide) return refuse(w, i, lane, UNSUPPORTED, "idesc", d, "K of 96 (bit 31) is not simulated");
    if (d & (0x0700004b | (wide ? 1u << 31 : 1u << 12)))
        return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "bits 0, 1, 3, 6, %s and 24-26 must be 0", wide ? "31" : "12");
    if (a >= TYPES || b >= TYPES || input_types[kind][a] == NO_TYPE || input_types[kind][b] == NO_TYPE)
        return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "types %u of A and %u of B (bits 7-12) are none of this kind", a, b);
    m->a_type = input_types[kind][a];
    m->b_type = input_types[kind][b];
    m->a_element = wide ? &elements[m->a_type] : &packed_e2m1;
    m->b_element = wide ? &elements[m->b_type] : &packed_e2m1;
    m->d_type = MT_F32;
    m->factor_type = bits(d, 23, 1) ? MT_UE8M0 : MT_UE4M3;
    if (m->factor_type == MT_UE4M3 && !(kind == KIND_MXF4NVF4 && m->factors == 4))
        return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "factors of ue4m3 (bit 23 is 0) are for kind::mxf4nvf4 with four of a row alone");
    m->factor_byte[0] = bits(d, 29, 2);
    m->factor_byte[1] = bits(d, 4, 2);
    for (int k = 0; k < 2; k++)
        if (m->factor_byte[k] % m->factors)
            return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "the factors of %c begin at byte %u (bits %s); with %u of a row it is a multiple of that", "AB"[k],
                          m->factor_byte[k], k ? "4-5" : "29-30", m->factors);
    m->m = bits(d, 27, 2) << 7;
    return read_shape(w, i, lane, d, m);
}

static bool read_idesc(Warp *w, const Ins *i, int lane, u32 d, Mma *m) {
    MmaKind kind = i->mod[TCGEN05_MMA_KIND];
    bool ws = i->mod[TCGEN05_MMA_WS];
    u32 a = bits(d, 7, 3), b = bits(d, 10, 3), to = bits(d, 4, 2);
    if (bits(d, 2, 1)) return refuse(w, i, lane, UNSUPPORTED, "idesc", d, "a sparse A (bit 2) is not simulated");
    if (bits(d, 6, 1) || bits(d, 23, 1) || bits(d, 29, 1)) return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "bits 6, 23 and 29 must be 0");
    if (bits(d, 30, 2) && !ws) return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "a shift of B (bits 30-31) is for .ws alone");
    if (bits(d, 3, 1) && kind != KIND_I8) return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "saturation (bit 3) is for kind::i8 alone");
    if (bits(d, 13, 2) && kind == KIND_I8) return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "kind::i8 cannot negate (bits 13, 14)");
    if (a >= TYPES || b >= TYPES || input_types[kind][a] == NO_TYPE || input_types[kind][b] == NO_TYPE)
        return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "types %u of A and %u of B (bits 7-12) are none of this kind", a, b);
    m->a_type = input_types[kind][a];
    m->b_type = input_types[kind][b];
    bool halves = kind == KIND_F8F6F4 || (kind == KIND_F16 && m->a_type == MT_F16 && m->b_type == MT_F16);
    if (kind == KIND_I8 ? to != 2 : to != 1 && !(to == 0 && halves))
        return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", d, "D of type %u (bits 4-5) with A of type %u and B of %u in this kind", to, a, b);
    m->d_type = output_types[to];
    m->saturate = bits(d, 3, 1);
    m->a_element = &elements[m->a_type];
    m->b_element = &elements[m->b_type];
    m->m = bits(d, 24, 5) << 4;
    return read_shape(w, i, lane, d, m);
}

static bool read_matrix(Warp *w, const Ins *i, int lane, const char *name, u64 descriptor, const Element *e, Matrix *m) {
    bool mn_major = m->mn_major;
    if (!read_descriptor(w, i, lane, name, descriptor, m)) return false;
    m->mn_major = mn_major;
    if (mn_major && e->bits < 8) return refuse(w, i, lane, BAD_DESCRIPTOR, name, descriptor, "elements of %d bits cannot be transposed", e->bits);
    if (m->swizzle->wide_atom != (mn_major && e->bytes == 4))
        return refuse(w, i, lane, BAD_DESCRIPTOR, name, descriptor, "128B swizzle of 32B atoms is for transposed 32-bit elements, and they need it");
    return true;
}

static bool read_addresses(Warp *w, const Ins *i, int lane, Mma *m) {
    u32 d_lane = m->d_address >> 16;
    if (d_lane && !(m->layout->spread && d_lane == 16)) {
        find(w, i, lane, TMEM_MISUSE, m->d_address, 0, "D of M=%u starts in lane %u; it may start in %s", m->m, d_lane,
             m->layout->spread ? "0 or 16" : "0");
        return false;
    }
    if (!m->a_in_tmem) return true;
    if (m->a.mn_major) return refuse(w, i, lane, BAD_DESCRIPTOR, "idesc", R32(w, i->arg[ARG_IDESC])[lane], "A in tensor memory cannot be transposed");
    if (m->layout->ws && m->layout->parts > 1) {
        find(w, i, lane, UNSUPPORTED, m->a_address, 0, ".ws with M=%u and A in tensor memory: where A lies is not documented", m->m);
        stop(w->machine);
        return false;
    }
    if (m->a_address >> 16 != d_lane) {
        find(w, i, lane, TMEM_MISUSE, m->a_address, 0, "A starts in lane %u and D in lane %u; it must be the same", m->a_address >> 16, d_lane);
        return false;
    }
    return true;
}

/* Bits 30 and 31 are the first byte once more, where compilers keep it. */
static bool read_factor_addresses(Warp *w, const Ins *i, int lane, Mma *m) {
    for (int k = 0; k < 2; k++) {
        u32 address = R32(w, i->arg[ARG_MASK + k])[lane] + (u32)i->mod[k ? TCGEN05_MMA_FACTORS_B_OFFSET : TCGEN05_MMA_FACTORS_A_OFFSET];
        m->factors_at[k] = address & 0xffff;
        if (address >> 16 & 0x3fff) {
            find(w, i, lane, TMEM_MISUSE, address, 0, "the factors of %c start in lane %u; they start in 0, and lie in all lanes", "AB"[k], address >> 16 & 0x3fff);
            return false;
        }
    }
    return true;
}

static bool read_mma(Warp *w, const Ins *i, int lane, Mma *m) {
    u32 idesc = R32(w, i->arg[ARG_IDESC])[lane];
    m->a_in_tmem = i->mod[TCGEN05_MMA_A_IN_TMEM];
    m->accumulate = lane_in(*PRED(w, i->arg[ARG_P]), lane) != i->mod[TCGEN05_MMA_NEGATED];
    m->scale = (int)i->mod[TCGEN05_MMA_SCALE];
    m->d_address = R32(w, i->arg[ARG_D])[lane] + (u32)i->mod[TCGEN05_MMA_D_OFFSET];
    if (m->a_in_tmem) m->a_address = R32(w, i->arg[ARG_A])[lane] + (u32)i->mod[TCGEN05_MMA_A_OFFSET];
    m->factors = (u32)i->mod[TCGEN05_MMA_FACTORS];
    for (int k = 0; k < i->mod[TCGEN05_MMA_MASK_WORDS]; k++) m->disabled[k] = R32(w, i->arg[ARG_MASK + k])[lane];
    if (i->arg[ARG_ZERO] >= 0) m->zero_mask = R64(w, i->arg[ARG_ZERO])[lane];
    if (!(m->factors ? read_scaled_idesc : read_idesc)(w, i, lane, idesc, m)) return false;
    if (m->factors && !read_factor_addresses(w, i, lane, m)) return false;
    if (m->scale && m->d_type == MT_F16)
        return refuse(w, i, lane, UNSUPPORTED, "idesc", idesc, "scale-input-d of an f16 D: its rounding is not documented");
    if (m->zero_mask >> 56 & 0x3f)
        return refuse(w, i, lane, UNSUPPORTED, "zero-column mask", m->zero_mask, "a column shift (bits 56-61) is not simulated");
    if (!m->a_in_tmem && !read_matrix(w, i, lane, "A descriptor", R64(w, i->arg[ARG_A])[lane], m->a_element, &m->a)) return false;
    return read_matrix(w, i, lane, "B descriptor", R64(w, i->arg[ARG_B])[lane], m->b_element, &m->b) && read_addresses(w, i, lane, m);
}

static void read_footprint(Mma *m) { /* of each CTA */
    Footprint *f = &m->footprint;
    u32 halves = !m->layout->spread ? BOTH_HALVES : m->d_address >> 16 ? SECOND_HALF : FIRST_HALF;
    u32 rows[] = {m->m / (u32)m->layout->group, m->n};
    static const char *const factors[] = {"the factors of A", "the factors of B"};
    f->d = (Accumulator){m->d_address, m->m, m->n, m->k};
    f->area[f->areas++] = (Area){"D", m->d_address & 0xffff, m->n / m->layout->parts, halves};
    if (m->a_in_tmem) f->area[f->areas++] = (Area){"A", m->a_address & 0xffff, K_BYTES / 4, halves};
    for (int k = 0; m->factors && k < 2; k++)
        f->area[f->areas++] = (Area){factors[k], m->factors_at[k], (rows[k] + SLAB - 1) / SLAB, BOTH_HALVES};
}

/* ---- mma: its run ------------------------------------------------------------------------------------------------------- */

static u32 tile_a[MOST_M * MOST_K], tile_b[MOST_N * MOST_K], tile_d[MOST_M * MOST_N];
static u32 factors_a[MOST_M * MOST_FACTORS], factors_b[MOST_N * MOST_FACTORS];

/* Returns the lane in which a row of D's part lies; *cta is the index of its CTA in the pair. */
static u32 lane_of(const Mma *m, u32 row, u32 part, int *cta) {
    u32 rows = m->m / m->layout->group, r = row % rows;
    *cta = (int)(row / rows);
    return (m->d_address >> 16) + (m->layout->spread ? 32 * (r / 16) + r % 16 : r) + part * m->layout->stride;
}

/* Columns of B that count as zero. A sub-mask for each part of the columns: from a starting value on, runs of use + 1 zeros and skip + 1
 * ones take turns; the first few bits are dropped. */
static void zero_columns(const Mma *m) {
    u64 d = m->zero_mask;
    u32 per = m->n / m->layout->parts, run[2] = {(u32)(d >> 48 & 0xff) + 1, (u32)(d >> 40 & 0xff) + 1};
    if (!(d >> 39 & 1)) return;
    for (u32 part = 0; part < m->layout->parts; part++) {
        u32 value = d >> (32 + part) & 1, left = run[value];
        s32 drop = d >> (8 * part) & 0xff;
        for (s32 column = -drop; column < (s32)per; column++) {
            if (column >= 0 && value) memset(tile_b + (part * per + (u32)column) * m->k, 0, m->k * sizeof *tile_b);
            if (!--left) left = run[value = !value];
        }
    }
}

static void read_tmem_a(Work *work, const Mma *m, Cta *const ctas[], u32 part) { /* a CTA's A lies in the lanes of its D; [row][k] */
    const Element *e = m->a_element;
    Access a = tensor_access(work, SPACE_TMEM);
    for (u32 row = 0; row < m->m; row++) {
        u32 word[K_BYTES / 4 + 1];
        int c;
        u32 lane = lane_of(m, row, part, &c);
        tmem_read(ctas[c], &a, lane, m->a_address & 0xffff, K_BYTES / 4, word);
        Element container = {e->bytes, 8 * e->bytes, 0, e->of_group};
        unpack(e->of_group > GROUP ? e : &container, (const u8 *)word, m->k, tile_a + row * m->k);
        for (u32 k = 0; e->container && k < m->k; k++) tile_a[row * m->k + k] = tile_a[row * m->k + k] >> e->container & ((1u << e->bits) - 1);
    }
}

/* Factors of one CTA's rows of A (which 0), or of all columns of B (1): to[row][factor] */
static void read_factors(Work *work, const Mma *m, Cta *cta, int which, u32 rows, u32 *to) {
    enum { MOST_WORDS = MOST_N / SLAB };
    Access a = tensor_access(work, SPACE_TMEM);
    u32 words = (rows + SLAB - 1) / SLAB, held[SLAB][MOST_WORDS], word[MOST_WORDS];
    u32 used = (u32)((1ull << 8 * m->factors) - 1) << 8 * m->factor_byte[which];
    bool same = true;
    for (u32 lane = 0; lane < TMEM_LANES; lane++) {
        tmem_read(cta, &a, lane, m->factors_at[which], words, lane < SLAB ? held[lane] : word);
        for (u32 k = 0; lane >= SLAB && k < words; k++) same &= k * SLAB + lane % SLAB >= rows || !((held[lane % SLAB][k] ^ word[k]) & used);
    }
    if (!same)
        find(work->warp, work->ins, work->lane, TMEM_MISUSE, m->factors_at[which], 4ull * words, "the factors of %c differ between the slabs of %d lanes", "AB"[which], SLAB);
    for (u32 row = 0; row < rows; row++)
        for (u32 e = 0; e < m->factors; e++) to[row * m->factors + e] = held[row % SLAB][row / SLAB] >> 8 * (m->factor_byte[which] + e) & 0xff;
}

static bool enabled(const Mma *m, int cta, u32 lane) { return !lane_in(m->disabled[4 * cta + lane / 32], lane % 32); }

static void move_d(Work *work, const Mma *m, Cta *const ctas[], u32 part, Transfer transfer) {
    Access a = tensor_access(work, SPACE_TMEM);
    u32 columns = m->n / m->layout->parts;
    for (u32 row = 0; row < m->m; row++) {
        int c;
        u32 lane = lane_of(m, row, part, &c);
        if (enabled(m, c, lane)) transfer(ctas[c], &a, lane, m->d_address & 0xffff, columns, tile_d + row * columns);
    }
}

static void read_d(Work *work, const Mma *m, Cta *const ctas[], u32 part) {
    u32 cells = m->m * (m->n / m->layout->parts);
    memset(tile_d, 0, cells * sizeof *tile_d);
    move_d(work, m, ctas, part, tmem_read);
    for (u32 k = 0; m->scale && k < cells; k++) tile_d[k] = float_bits(ldexpf(bits_float(tile_d[k]), -m->scale));
}

static void multiply_part(Work *work, const Mma *m, Cta *const ctas[], u32 part) {
    u32 columns = m->n / m->layout->parts;
    if (m->a_in_tmem) read_tmem_a(work, m, ctas, part);
    if (m->accumulate) read_d(work, m, ctas, part);
    Tile tile = {.arch = work->warp->machine->launch->arch, .a = m->a_type, .b = m->b_type, .d = m->d_type, .m = m->m, .n = columns, .k = m->k,
                 .A = tile_a, .B = tile_b + part * columns * m->k, .C = m->accumulate ? tile_d : NULL, .D = tile_d,
                 .negate_a = m->negate_a, .negate_b = m->negate_b, .saturate = m->saturate};
    Scales scales = {.type = m->factor_type, .block = m->factors ? (int)(m->k / m->factors) : 0, .a = factors_a, .b = factors_b + part * columns * m->factors};
    if (m->factors) tile.scales = &scales;
    multiply_tile(&tile);
    for (u32 k = 0; m->d_type == MT_F16 && k < m->m * columns; k++) tile_d[k] |= POISON_HALF;
    move_d(work, m, ctas, part, tmem_write);
}

static void run_mma(Work *work) {
    Warp *w = work->warp;
    const Mma *m = (const Mma *)work->data;
    Cta *ctas[2];
    const Footprint *f = &m->footprint;
    int group = tensor_ctas(w, work->ins, work->lane, m->layout->group, ctas);
    for (int c = 0; c < group; c++) {
        for (s32 k = 0; k < f->areas; k++)
            if (!tmem_held(w, work->ins, work->lane, ctas[c], f->area[k].column, f->area[k].columns, &work->know, f->area[k].name)) return;
        note_product(work, ctas[c], f);
    }
    begin(work);
    for (int c = 0; c < group; c++) {
        if (!m->a_in_tmem) gather(work, ctas[c], &m->a, m->a_element, m->m / group, tile_a + c * (m->m / group) * m->k);
        gather(work, ctas[c], &m->b, m->b_element, m->n / group, tile_b + c * (m->n / group) * m->k);
    }
    zero_columns(m);
    for (int c = 0; m->factors && c < group; c++) {
        u32 rows = m->m / (u32)group;
        read_factors(work, m, ctas[c], 0, rows, factors_a + (u32)c * rows * m->factors);
        read_factors(work, m, ctas[c], 1, m->n, factors_b);
    }
    for (u32 part = 0; part < m->layout->parts; part++) multiply_part(work, m, ctas, part);
    counter(w, work->ins)->flops += 2ull * m->m * m->n * m->k;
    end(work);
}

/* Clocks of the tensor core of each CTA: half of it idles where M is less than 128 rows a CTA. */
static double clocks_of(const Mma *m, double rate) {
    u32 rows = m->m / m->layout->group, bits = GROUP * 8 / m->a_element->of_group;
    return (double)(rows < 128 ? 128 : rows) * m->n * m->k * bits / 16 / rate;
}

static double operand_bytes(const Mma *m) { /* that each CTA reads from shared memory */
    return (double)((m->a_in_tmem ? 0 : m->m) + m->n) / m->layout->group * K_BYTES;
}

static bool stays_ahead(const Work *earlier, const Work *later) {
    const Footprint *a = &((const Mma *)earlier->data)->footprint, *b = &((const Mma *)later->data)->footprint;
    if (earlier->run != run_mma || kept_in_order(&a->d, &b->d)) return true;
    return footprints_meet(a, b) && !later->warp->machine->launch->strict; /* not in the manual, but on hardware */
}

/* The schedule lets the last of a queue pass some of the products before it, of those that need not stay ahead. */
static void overtake(Queue *q, Work *work) {
    Work **first = &q->first, *before = NULL; /* behind the last one that stays ahead; the one right before it */
    u32 passable = 0;
    for (Work **next = first; *next != work; next = &(*next)->next) {
        before = *next;
        passable++;
        if (stays_ahead(before, work)) first = &before->next, passable = 0;
    }
    u32 waits_for = (u32)((work->warp->machine->random ^ work->clock * 0x9e3779b97f4a7c15u) >> 33) % (passable + 1);
    if (waits_for == passable) return;
    while (waits_for--) first = &(*first)->next;
    before->next = NULL;
    q->last = before;
    work->next = *first;
    *first = work;
}

static Outcome op_mma(Warp *w, const Ins *i, u32 lanes) {
    Cta *ctas[2];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Mma m = {0};
        if (!tensor_ctas(w, i, l, (int)i->mod[TCGEN05_MMA_GROUP], ctas)) return YIELD;
        if (!read_mma(w, i, l, &m)) continue;
        read_footprint(&m);
        Work *work = send(w, i, l, m.layout->group, run_mma, &m, sizeof m);
        if (w->machine->launch->seed && !w->time) overtake(queue_of(w->cta, m.layout->group), work);
        if (!w->time) continue;
        work->duration = clocks_of(&m, w->machine->time->p->tensor_rate);
        work->operands = operand_bytes(&m);
    }
    return NEXT;
}

/* ---- cp ----------------------------------------------------------------------------------------------------------------- */

/* Row r goes to lane spread (r / block) + r % block, and once more every `stride` lanes; a row has groups of 16 bytes. */
typedef struct { u8 rows, groups, block, spread, copies, stride; } CopyShape;
static const CopyShape copy_shapes[] = {
    {128, 2, 128, 0, 1, 0}, /* 128x256b */
    {128, 1, 128, 0, 1, 0}, /* 128x128b */
    {4, 2, 1, 32, 1, 0},    /* 4x256b */
    {64, 1, 64, 0, 2, 64},  /* 64x128b.warpx2::02_13 */
    {64, 1, 32, 64, 2, 32}, /* 64x128b.warpx2::01_23 */
    {32, 1, 32, 0, 4, 32},  /* 32x128b.warpx4 */
};
/* source elements: as they are, 6 bits, 4 bits */
static const Element copy_formats[] = {{4, 32, 0, 4}, {1, 6, 1, 16}, {1, 4, 2, 16}};

typedef struct {
    const CopyShape *shape;
    const Element *format;
    Matrix source;
    u32 lane, column;
    int group;
} Copy;

static u32 copy_lane(const Copy *c, u32 row, u32 copy) {
    const CopyShape *s = c->shape;
    return c->lane + row / s->block * s->spread + row % s->block + copy * s->stride;
}

static void run_cp(Work *work) {
    const Copy *c = (const Copy *)work->data;
    const CopyShape *s = c->shape;
    Cta *ctas[2];
    int group = tensor_ctas(work->warp, work->ins, work->lane, c->group, ctas);
    begin(work);
    Access from = tensor_access(work, SPACE_SHARED), to = tensor_access(work, SPACE_TMEM);
    for (int n = 0; n < group; n++) {
        if (!tmem_held(work->warp, work->ins, work->lane, ctas[n], c->column, 4 * s->groups, &work->know, "the destination")) return;
        for (u32 row = 0; row < s->rows; row++)
            for (u32 g = 0; g < s->groups; g++) {
                u32 element[GROUP], word[4] = {0};
                read_group(work, &from, ctas[n], group_address(&c->source, row, GROUP * g), c->format, element);
                for (u32 k = 0; k < GROUP / c->format->bytes; k++)
                    word[k * c->format->bytes / 4] |= element[k] << (c->format->container + 8 * (k * c->format->bytes % 4));
                for (u32 copy = 0; copy < s->copies; copy++) tmem_write(ctas[n], &to, copy_lane(c, row, copy), c->column + 4 * g, 4, word);
            }
    }
    end(work);
}

/* operands: taddr, descriptor */
static Outcome op_cp(Warp *w, const Ins *i, u32 lanes) {
    Cta *ctas[2];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 taddr = R32(w, i->arg[0])[l] + (u32)i->mod[TCGEN05_CP_OFFSET];
        u64 d = R64(w, i->arg[1])[l];
        Copy c = {.shape = &copy_shapes[i->mod[TCGEN05_CP_SHAPE]], .format = &copy_formats[i->mod[TCGEN05_CP_FORMAT]], .lane = taddr >> 16,
                  .column = taddr & 0xffff, .group = (int)i->mod[TCGEN05_CP_GROUP]};
        if (!tensor_ctas(w, i, l, c.group, ctas) || !read_descriptor(w, i, l, "source", d, &c.source)) return YIELD;
        if (c.source.swizzle->wide_atom) {
            refuse(w, i, l, BAD_DESCRIPTOR, "source", d, "128B swizzle of 32B atoms is for transposed 32-bit matrices of an mma");
            return YIELD;
        }
        u32 last = copy_lane(&c, c.shape->rows - 1, c.shape->copies - 1);
        if (last >= TMEM_LANES) {
            find(w, i, l, TMEM_MISUSE, taddr, 0, "a copy to lane %u reaches lane %u; there are %d", c.lane, last, TMEM_LANES);
            continue;
        }
        send(w, i, l, c.group, run_cp, &c, sizeof c);
    }
    return NEXT;
}

/* ---- shift -------------------------------------------------------------------------------------------------------------- */

typedef struct {
    u32 lane, column;
    int group;
} Shift;
enum { SHIFTED_COLUMNS = 8 };

static void run_shift(Work *work) {
    const Shift *s = (const Shift *)work->data;
    Cta *ctas[2];
    int group = tensor_ctas(work->warp, work->ins, work->lane, s->group, ctas);
    begin(work);
    Access a = tensor_access(work, SPACE_TMEM);
    for (int n = 0; n < group; n++) {
        if (!tmem_held(work->warp, work->ins, work->lane, ctas[n], s->column, SHIFTED_COLUMNS, &work->know, "the matrix")) return;
        for (u32 lane = s->lane; lane < s->lane + SLAB - 1; lane++) {
            u32 word[SHIFTED_COLUMNS];
            tmem_read(ctas[n], &a, lane + 1, s->column, SHIFTED_COLUMNS, word);
            tmem_write(ctas[n], &a, lane, s->column, SHIFTED_COLUMNS, word);
        }
    }
    end(work);
}

/* operand: taddr */
static Outcome op_shift(Warp *w, const Ins *i, u32 lanes) {
    Cta *ctas[2];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 taddr = R32(w, i->arg[0])[l] + (u32)i->mod[TCGEN05_SHIFT_OFFSET];
        Shift s = {.lane = taddr >> 16, .column = taddr & 0xffff, .group = (int)i->mod[TCGEN05_SHIFT_GROUP]};
        if (!tensor_ctas(w, i, l, s.group, ctas)) return YIELD;
        if (s.lane % SLAB || s.lane >= TMEM_LANES) {
            find(w, i, l, TMEM_MISUSE, taddr, 0, "lane %u; it must be 0, 32, 64 or 96", s.lane);
            continue;
        }
        send(w, i, l, s.group, run_shift, &s, sizeof s);
    }
    return NEXT;
}

/* ---- commit ------------------------------------------------------------------------------------------------------------- */

typedef struct {
    u32 address, ranks; /* ranks: CTAs to tell, as bits */
} Commit;

/* Its initialisation must be ordered before the commit, which reads it through the generic proxy. That read leaves no trace: when the
 * wait for it is over, the barrier may be invalidated. */
static void check_initialised(Work *work, const Cta *cta, u32 offset) {
    Cell cells[8];
    if (!cta->shared_history) return;
    copy_cells(cta->shared_history, offset, 8, cells);
    for (int k = 0; k < 8; k++) cells[k].reader = cells[k].reader_clock = 0;
    Access a = tensor_access(work, SPACE_SHARED);
    a.async = false;
    history_read(cells, 8, &a, shared_address(cta, offset));
}

static void arrive_at(Work *work, u32 address, const Knowledge *done) {
    Warp *w = work->warp;
    Cta *cta;
    u32 offset;
    if (!shared_bytes(w, work->ins, work->lane, address, 8, 8, &cta, &offset)) return;
    Mbarrier *b = cta->mbarrier[offset / 8];
    if (!b || !b->live) {
        find(w, work->ins, work->lane, BAD_MBARRIER, address, 8, "there is no mbarrier at shared address 0x%x%s", offset,
             b ? ": it has been invalidated" : "");
        stop(w->machine);
        return;
    }
    check_initialised(work, cta, offset);
    mbarrier_fenced(b, w, work->ins, work->lane, &work->know);
    mbarrier_arrive(b, w, work->ins, work->lane, 1, done);
}

static void run_commit(Work *work) {
    const Commit *c = (const Commit *)work->data;
    begin(work);
    for (u32 rest = c->ranks; rest; rest &= rest - 1)
        arrive_at(work, (u32)__builtin_ctz(rest) << 24 | (c->address & 0xffffff), &issuer_of(work->warp, work->lane)->done);
}

/* operands: address of the mbarrier, mask of CTAs (-1: the address's own) */
static Outcome op_commit(Warp *w, const Ins *i, u32 lanes) {
    Cta *ctas[2];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest), group = (int)i->mod[TCGEN05_COMMIT_GROUP];
        u64 address = address_operand(w, i, 0, TCGEN05_COMMIT_MBARRIER, l);
        if (!tensor_ctas(w, i, l, group, ctas)) return YIELD;
        if (i->mod[TCGEN05_COMMIT_MBARRIER + PLACE_GENERIC] && address >> 56 != WINDOW_SHARED && address >> 32) { /* Triton 3.6 widens a shared address; it works on silicon */
            find(w, i, l, OUT_OF_BOUNDS, address, 8, "the mbarrier must lie in shared memory; generic address 0x%llx does not",
                 (unsigned long long)address);
            continue;
        }
        Commit c = {.address = (u32)address, .ranks = i->arg[1] >= 0 ? R32(w, i->arg[1])[l] & 0xffff : 1u << ((u32)address >> 24 & 31)};
        Work *work = send(w, i, l, group, run_commit, &c, sizeof c);
        work->duration = 0;
        if (w->time) work->tail = w->machine->time->p->tensor_latency;
    }
    return NEXT;
}

const HandlerEntry tcgen05_handlers[] = {
    {"tcgen05_mma", op_mma}, {"tcgen05_cp", op_cp}, {"tcgen05_shift", op_shift}, {"tcgen05_commit", op_commit}, {0},
};
