/* Tensor copies: cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, their prefetch, and the tensor maps that tell them what to do.
 *
 * A copy moves a box of a tensor, row by row: a row is a run of the innermost dimension, contiguous in global memory. In shared memory
 * the rows lie one after the other, a swizzle's span apart if there is one; the swizzle then permutes the 16-byte pieces of each span
 * by the bits of the address. Elements outside the tensor arrive as zeros, or as NaN, and are left out of a store. The mbarrier hears
 * of all bytes of the box, inside the tensor or not. In im2col mode a row is a pixel: some channels of one place of an image. Pixels follow
 * each other through a bounding box, whose corners are told from those of the image, and then through that of the next image; what is
 * copied lies a filter's offset away from each. Elements of 4 and 6 bits are packed in global memory; in shared memory 16 of them may
 * have 16 bytes, of which the mbarrier does not count the padding (as CUTLASS and Triton expect).
 */
#include "copies.h"
#include "clock.h"
#include "findings.h"
#include "knowledge.h"
#include "numerics.h"

enum { MODE_TILE, MODE_ROWS, MODE_PIXELS }; /* a box; gather4 and scatter4; im2col */
enum { MOST_RANK = 5, MAP_BYTES = 128, MAP_USED = 64, MAP_ALIGN = 64, TILE_ALIGN = 128, GATHERED_ROWS = 4 };

/* ---- the tensor map ----------------------------------------------------------------------------------------------------- */

/* Where a field lies: its first bit, the distance to that of the next dimension, how many dimensions have one, its width; the value is
 * (bits << shift) + plus. All lie in the first 64 bytes; what the others hold does not matter. */
typedef enum {
    F_ADDRESS, F_RANK, F_TYPE, F_INTERLEAVE, F_SWIZZLE, F_DIM, F_STRIDE, F_STRIDE_HIGH, F_BOX, F_STEP, F_ATOMICITY, F_FILL,
    F_TF32, F_L2, F_LARGE, F_SWIZZLE_96B, F_IM2COL, F_LOWER, F_UPPER, F_PIXELS, F_MARK, FIELDS, /* F_MARK: the DSL's host code sets it; no meaning is known */
} FieldName;
static const struct {
    u16 bit, pitch;
    u8 count, width, shift, plus;
} FIELD[FIELDS] = {
    [F_ADDRESS] = {0, 0, 1, 64, 0, 0},    [F_RANK] = {68, 0, 1, 3, 0, 1},          [F_TYPE] = {71, 0, 1, 4, 0, 0},
    [F_INTERLEAVE] = {75, 0, 1, 2, 0, 0}, [F_SWIZZLE] = {77, 0, 1, 2, 0, 0},       [F_DIM] = {256, 32, 5, 32, 0, 1},
    [F_STRIDE] = {96, 32, 4, 32, 4, 0},   [F_STRIDE_HIGH] = {224, 4, 4, 4, 36, 0}, [F_BOX] = {440, 8, 5, 8, 0, 1},
    [F_STEP] = {416, 3, 5, 3, 0, 1},      [F_ATOMICITY] = {83, 0, 1, 2, 0, 0},     [F_FILL] = {79, 0, 1, 1, 0, 0},
    [F_TF32] = {80, 0, 1, 1, 0, 0},       [F_L2] = {81, 0, 1, 2, 0, 0},            [F_LARGE] = {85, 0, 1, 1, 0, 0},
    /* All dimensions between the first and the last share the bits of F_LOWER, and those of F_UPPER. */
    [F_IM2COL] = {64, 0, 1, 1, 0, 0},     [F_LOWER] = {448, 0, 1, 16, 0, 0},       [F_UPPER] = {464, 0, 1, 16, 0, 0},
    [F_PIXELS] = {480, 0, 1, 10, 0, 1},   /* in im2col maps alone: they lie where others have a box; F_BOX 0 is the channels of a pixel */
    [F_SWIZZLE_96B] = {86, 0, 1, 1, 0, 0}, [F_MARK] = {65, 0, 1, 1, 0, 0},
};

static u64 field_mask(FieldName f) { return ~0ull >> (64 - FIELD[f].width); }

static u64 get_field(const u64 *map, FieldName f, int dimension) {
    u32 bit = FIELD[f].bit + dimension * FIELD[f].pitch;
    return ((map[bit / 64] >> bit % 64 & field_mask(f)) << FIELD[f].shift) + FIELD[f].plus;
}

static void put_field(u64 *map, FieldName f, int dimension, u64 value) {
    u32 bit = FIELD[f].bit + dimension * FIELD[f].pitch;
    u64 mask = field_mask(f) << bit % 64;
    map[bit / 64] = (map[bit / 64] & ~mask) | ((value - FIELD[f].plus) >> FIELD[f].shift << bit % 64 & mask);
}

static bool has_unknown_bits(const u64 *map) { /* then it is something else, or was never written */
    u64 known[8] = {0};
    for (int f = 0; f < FIELDS; f++)
        for (int d = 0; d < FIELD[f].count; d++) {
            u32 bit = FIELD[f].bit + d * FIELD[f].pitch;
            known[bit / 64] |= field_mask(f) << bit % 64;
        }
    for (int k = 0; k < 8; k++)
        if (map[k] & ~known[k]) return true;
    return false;
}

/* Element types by the map's number, with what a reduction of them is (T_B16: there is none). tf32 is f32 and a field of its own. */
enum { MT_F32_FTZ = 8 };
static const struct {
    const char *name;
    u8 bits;
    bool is_float;
    AtomicType atomic;
    u8 held; /* bits in shared memory */
} TYPE[] = {
    {"u8", 8, false, T_B16, 8}, {"u16", 16, false, T_B16, 16}, {"u32", 32, false, T_U32, 32}, {"s32", 32, false, T_S32, 32},
    {"u64", 64, false, T_U64, 64}, {"s64", 64, false, T_S64, 64}, {"f16", 16, true, T_F16, 16}, {"f32", 32, true, T_F32, 32},
    {"f32.ftz", 32, true, T_F32, 32}, {"f64", 64, true, T_F64, 64}, {"bf16", 16, true, T_BF16, 16},
    {"b4x16", 4, false, T_B16, 4}, {"b4x16_p64", 4, false, T_B16, 8}, {"b6x16_p32", 6, false, T_B16, 8},
};
enum { TYPES = sizeof TYPE / sizeof *TYPE, OF_PADDED = 16, PADDED_BOX = 128, PADDED_ALIGN = 32 }; /* padded types: bytes of 16 elements, ... */
static bool is_padded(s32 type) { return TYPE[type].bits != TYPE[type].held; }

/* The element types that each tensor reduction takes: a bit for each AtomicType. */
#define IN(t) (1u << (t))
static const u32 REDUCIBLE[] = {
    [AT_ADD] = IN(T_U32) | IN(T_S32) | IN(T_U64) | IN(T_F32) | IN(T_F16) | IN(T_BF16),
    [AT_MIN] = IN(T_U32) | IN(T_S32) | IN(T_U64) | IN(T_S64) | IN(T_F16) | IN(T_BF16),
    [AT_MAX] = IN(T_U32) | IN(T_S32) | IN(T_U64) | IN(T_S64) | IN(T_F16) | IN(T_BF16),
    [AT_AND] = IN(T_U32) | IN(T_S32) | IN(T_U64),
    [AT_OR] = IN(T_U32) | IN(T_S32) | IN(T_U64),
    [AT_XOR] = IN(T_U32) | IN(T_S32) | IN(T_U64),
    [AT_INC] = IN(T_U32),
    [AT_DEC] = IN(T_U32),
};

/* A swizzle flips address bits: a ^ (a >> shift & mask); piece: bytes that stay together. The number is the map's swizzle, and 3 + its
 * atomicity for those of 128 bytes. */
typedef struct {
    const char *name;
    u32 span, shift, mask, flip, piece;
} Swizzle;
static const Swizzle SWIZZLE[] = {
    {"none", 0, 0, 0, 0, 16},
    {"32B", 32, 3, 0x10, 0, 16},
    {"64B", 64, 3, 0x30, 0, 16},
    {"128B", 128, 3, 0x70, 0, 16},
    {"128B in atoms of 32B", 128, 2, 0x60, 0, 16},
    {"128B in atoms of 32B, 8B flipped", 128, 2, 0x60, 8, 8},
    {"128B in atoms of 64B", 128, 1, 0x40, 0, 16},
    {"96B", 96, 3, 0x10, 0, 16},
};
enum { SWIZZLE_128B = 3, SWIZZLE_96B = 7 };

static u32 swizzled(const Swizzle *s, u32 a) { return a ^ (a >> s->shift & s->mask) ^ (a >> 4 & s->flip); }

typedef struct {
    u64 address, dim[MOST_RANK], stride[MOST_RANK];
    u32 box[MOST_RANK], step[MOST_RANK], pixels;
    s32 lower[MOST_RANK], upper[MOST_RANK]; /* im2col: the first and the last coordinate inside the bounding box */
    s32 rank, type, swizzle;
    bool fill_nan, tf32, im2col;
} TensorMap;

/* The corner of a dimension: 16 bits are shared out among those between channels and images, the first of them lowest. */
static s32 corner(const u64 *map, FieldName f, int rank, int d) {
    int width = 16 / (rank - 2);
    u32 bits = (u32)get_field(map, f, 0) >> (d - 1) * width << (32 - width);
    return (s32)bits >> (32 - width);
}

static TensorMap decode(const u64 *map) {
    TensorMap m = {.address = get_field(map, F_ADDRESS, 0), .rank = (s32)get_field(map, F_RANK, 0), .type = (s32)get_field(map, F_TYPE, 0)};
    m.swizzle = (s32)get_field(map, F_SWIZZLE, 0);
    if (m.swizzle == SWIZZLE_128B) m.swizzle += (s32)get_field(map, F_ATOMICITY, 0);
    if (get_field(map, F_SWIZZLE_96B, 0)) m.swizzle = SWIZZLE_96B;
    m.fill_nan = get_field(map, F_FILL, 0);
    m.tf32 = get_field(map, F_TF32, 0);
    m.im2col = get_field(map, F_IM2COL, 0);
    m.pixels = (u32)get_field(map, F_PIXELS, 0);
    for (int d = 0; d < m.rank && d < MOST_RANK; d++) {
        m.dim[d] = get_field(map, F_DIM, d);
        m.box[d] = (u32)get_field(map, F_BOX, d);
        m.step[d] = d ? (u32)get_field(map, F_STEP, d) : 1; /* the innermost dimension is never strided */
        m.stride[d] = d ? get_field(map, F_STRIDE, d - 1) + get_field(map, F_STRIDE_HIGH, d - 1) : 0;
    }
    for (int d = 1; m.im2col && d < m.rank - 1 && d < MOST_RANK - 1; d++) {
        m.lower[d] = corner(map, F_LOWER, m.rank, d);
        m.upper[d] = (s32)m.dim[d] - 1 + corner(map, F_UPPER, m.rank, d);
    }
    return m;
}

/* The 128 bytes at a generic address. The copy engine reads them by a proxy of its own: what this kernel wrote there must be fenced. It
 * leaves no trace, because two different waits can prove that a map has been read. */
static bool read_map(Warp *w, const Ins *i, int l, u64 address, u64 *map) {
    int top = (int)(address >> 56);
    u64 offset = address & 0x00ffffffffffffffu;
    if (top == WINDOW_PARAM && offset % MAP_ALIGN) {
        find(w, i, l, MISALIGNED, address, MAP_BYTES, "a tensor map at byte %llu of the parameters: it must be aligned to %d",
             (unsigned long long)offset, MAP_ALIGN);
        return false;
    }
    if (top == WINDOW_PARAM) {
        const u8 *p = param_bytes(w, offset, MAP_BYTES);
        if (p)
            memcpy(map, p, MAP_BYTES);
        else
            find(w, i, l, OUT_OF_BOUNDS, address, MAP_BYTES, "a tensor map at byte %llu of the parameters", (unsigned long long)offset);
        return p != NULL;
    }
    if (top) {
        find(w, i, l, BAD_TENSOR_MAP, address, MAP_BYTES,
             "a tensor map at generic address 0x%llx: it may lie in parameters, constants or global memory", (unsigned long long)address);
        return false;
    }
    Region *r;
    const u8 *p = global_bytes(w, i, l, address, MAP_BYTES, MAP_ALIGN, false, &r);
    if (!p) return false;
    if (w->machine->launch->checks) {
        Access a = warp_access(w, i, l, SPACE_GLOBAL);
        a.async = true;
        a.actor = actor_of(w, BY_BULK_READ);
        a.clock = 0;
        region_history(r, address - r->address, MAP_BYTES, &a, NULL, NULL, false);
    }
    memcpy(map, p, MAP_BYTES);
    return true;
}

/* ---- the tile ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    TensorMap map;
    Landings to;                   /* where a load lands */
    u32 shared;                    /* source of a store */
    s32 op;                        /* a store's: AtomicOp or PLAIN */
    s32 start[MOST_RANK];
    int mode;
    s32 row[GATHERED_ROWS];        /* gather4, scatter4: each row's coordinate in dimension 1 */
    s32 offset[MOST_RANK];         /* im2col's */
    u32 count[MOST_RANK];          /* elements taken along each dimension */
    u32 rows, row_bytes, pitch;    /* in shared memory; pitch: from a row to the next */
    u32 counted;                   /* bytes of a row in global memory, which the mbarrier counts */
} Tile;

typedef struct {
    u64 address;   /* where byte `from` is */
    u32 from, to;  /* bytes of the row inside the tensor */
} Row;

/* im2col: where pixel r lies. */
static void pixel_of(const Tile *t, u32 r, s64 *pixel) {
    const TensorMap *m = &t->map;
    int images = m->rank - 1;
    for (int d = 1; d <= images; d++) pixel[d] = t->start[d];
    while (r--) {
        int d = 1;
        for (; d < images && (pixel[d] += m->step[d]) > m->upper[d]; d++) pixel[d] = m->lower[d];
        if (d == images) pixel[d] += m->step[d];
    }
    for (int d = 1; d < images; d++) pixel[d] += t->offset[d];
}

static Row row_of(const Tile *t, u32 r) {
    const TensorMap *m = &t->map;
    u32 bits = TYPE[m->type].bits;
    s64 first = t->start[0] < 0 ? -(s64)t->start[0] : 0, last = (s64)m->dim[0] - t->start[0];
    if (last > (s64)t->count[0]) last = t->count[0];
    bool inside = first < last;
    u64 address = m->address + (u64)((t->start[0] + first) * bits / 8);
    s64 pixel[MOST_RANK];
    if (t->mode == MODE_PIXELS) pixel_of(t, r, pixel);
    for (int d = 1; d < m->rank; d++) {
        s64 c = t->mode == MODE_PIXELS ? pixel[d] : t->mode == MODE_ROWS ? t->row[r] : t->start[d] + (s64)(r % t->count[d]) * m->step[d];
        inside &= c >= 0 && c < (s64)m->dim[d];
        address += c * m->stride[d];
        if (t->mode == MODE_TILE) r /= t->count[d];
    }
    return inside ? (Row){address, (u32)first * bits / 8, (u32)(last * bits + 7) / 8} : (Row){0, 0, 0};
}

#define REFUSE(...) return find(w, i, l, BAD_TENSOR_MAP, address, MAP_BYTES, __VA_ARGS__), false

static bool is_sound(Warp *w, const Ins *i, int l, u64 address, const u64 *raw, const TensorMap *m, int rank, int mode) {
    if (has_unknown_bits(raw) || m->rank > MOST_RANK || m->type >= TYPES || (!m->im2col && m->pixels > 1)) REFUSE("these 128 bytes are no tensor map");
    if (m->rank != rank) REFUSE("a tensor map of rank %d for coordinates of rank %d", m->rank, rank);
    if (m->im2col != (mode == MODE_PIXELS))
        REFUSE("a tensor map for %s in a copy in %s mode", m->im2col ? "im2col" : "boxes", m->im2col ? "tile" : "im2col");
    for (int d = 1; m->im2col && d < m->rank - 1; d++)
        if (m->lower[d] > m->upper[d]) REFUSE("a bounding box from %d to %d in dimension %d: it is empty", m->lower[d], m->upper[d], d);
    if (get_field(raw, F_INTERLEAVE, 0)) REFUSE("an interleaved tensor map is not simulated");
    if (m->address % 16) REFUSE("the tensor at 0x%llx is not aligned to 16 bytes", (unsigned long long)m->address);
    const Swizzle *s = &SWIZZLE[m->swizzle];
    bool sub_byte = TYPE[m->type].bits < 8;
    u32 inner = m->box[0] * TYPE[m->type].held / 8, arch = w->machine->launch->arch;
    u32 needed = m->swizzle == SWIZZLE_96B ? 103 : m->swizzle > SWIZZLE_128B || sub_byte ? 100 : 90;
    if (is_padded(m->type) && (m->box[0] != PADDED_BOX || m->dim[0] % PADDED_BOX || m->address % PADDED_ALIGN))
        REFUSE("%s takes boxes of %d elements of a dimension 0 that is a multiple of as many, and a tensor aligned to %d bytes; this has %u of %llu",
               TYPE[m->type].name, PADDED_BOX, PADDED_ALIGN, m->box[0], (unsigned long long)m->dim[0]);
    if (sub_byte && m->dim[0] % 2) REFUSE("a dimension 0 of %llu elements of %u bits: not whole bytes", (unsigned long long)m->dim[0], TYPE[m->type].bits);
    if (inner % 16) REFUSE("a box row of %u bytes: it must be a multiple of 16", inner);
    if (s->span && inner > s->span) REFUSE("a box row of %u bytes is longer than the span of swizzle %s", inner, s->name);
    if (arch < needed || (m->swizzle == SWIZZLE_96B && arch > needed))
        REFUSE("%s %s needs sm_%u", sub_byte ? "type" : "swizzle", sub_byte ? TYPE[m->type].name : s->name, needed);
    if (m->fill_nan && !TYPE[m->type].is_float) REFUSE("a fill with NaN for elements of type %s", TYPE[m->type].name);
    if (mode == MODE_ROWS && m->box[1] != 1) REFUSE("gather4 and scatter4 take a box of one row, this one has %u", m->box[1]);
    return true;
}

/* The tile that a lane names: map in arg[k] (place at mod[k_place]), coordinates from arg[c] on, of im2col then `offsets` offsets. */
static bool find_tile(Warp *w, const Ins *i, int l, int k, int k_place, int c, int rank, int mode, int offsets, Tile *t) {
    u64 raw[MAP_BYTES / 8], address = address_operand(w, i, k, k_place, l);
    if (!read_map(w, i, l, address, raw)) return false;
    t->map = decode(raw);
    if (!is_sound(w, i, l, address, raw, &t->map, rank, mode)) return false;
    const TensorMap *m = &t->map;
    t->mode = mode;
    for (int d = 0; d < rank; d++) t->start[d] = (s32)R32(w, i->arg[c + d])[l];
    for (int k = 0; k < offsets; k++) t->offset[1 + k] = R32(w, i->arg[c + rank + k])[l] & 0xffff;
    for (int d = 1; mode == MODE_PIXELS && d < rank - 1; d++)
        if (t->start[d] < m->lower[d] || t->start[d] > m->upper[d])
            find(w, i, l, BAD_OPERAND, 0, 0, "coordinate %d of dimension %d is outside of the bounding box, which is from %d to %d", t->start[d], d,
                 m->lower[d], m->upper[d]);
    for (int r = 0; mode == MODE_ROWS && r < GATHERED_ROWS; r++) t->row[r] = (s32)R32(w, i->arg[c + 1 + r])[l];
    t->rows = 1;
    for (int d = 0; d < rank; d++) {
        t->count[d] = mode == MODE_ROWS && d == 1 ? GATHERED_ROWS : (m->box[d] + m->step[d] - 1) / m->step[d];
        if (d) t->rows *= t->count[d];
    }
    if (mode == MODE_PIXELS) t->rows = m->pixels;
    u32 bits = TYPE[m->type].bits, span = SWIZZLE[m->swizzle].span;
    t->row_bytes = t->count[0] * TYPE[m->type].held / 8;
    t->counted = t->count[0] * bits / 8;
    t->pitch = t->row_bytes > span ? t->row_bytes : span;
    if (t->start[0] * (s64)bits % 128 || (is_padded(m->type) && t->start[0] % PADDED_BOX))
        find(w, i, l, MISALIGNED, address, MAP_BYTES, "coordinate %d of dimension 0 is %lld bytes from the tensor's start: not a multiple of 16%s",
             t->start[0], t->start[0] * (long long)bits / 8, is_padded(m->type) ? ", or of 128 elements" : "");
    return true;
}

static int offsets_of(s64 rank, s64 mode) { return mode == MODE_PIXELS ? (int)rank - 2 : 0; }

/* ---- loads -------------------------------------------------------------------------------------------------------------- */

static void fill_row(const TensorMap *m, u8 *row, u32 bytes) {
    u16 fill = m->fill_nan ? 0x7ff7 : 0;
    for (u32 k = 0; k < bytes; k += 2) memcpy(row + k, &fill, 2);
}

/* tf32 is rounded on its way in, to nearest even at 10 bits of mantissa; a NaN becomes the canonical one, cut. f32.ftz is not touched: it
 * matters to reductions alone. So does an H200. */
static void convert_row(const TensorMap *m, u8 *row, u32 bytes) {
    for (u32 k = 0; m->tf32 && k < bytes; k += 4) {
        u32 x;
        memcpy(&x, row + k, 4);
        if ((x & 0x7f800000) != 0x7f800000)
            x = (x + 0xfff + (x >> 13 & 1)) & 0xffffe000;
        else if (x & 0x7fffff)
            x = 0x7fffe000;
        memcpy(row + k, &x, 4);
    }
}

/* Rows that fill their pitch are one run of bytes; of shorter ones only the pieces are written. */
static void land_tile(Work *work, const Tile *t, const Landing *to, const u8 *image) {
    const Swizzle *s = &SWIZZLE[t->map.swizzle];
    Access a = tracked_access(work, to->barrier, SPACE_SHARED);
    if (t->pitch == t->row_bytes) copy_to_shared(work, &a, to->address, image, (u64)t->rows * t->pitch);
    for (u32 r = 0; t->pitch != t->row_bytes && r < t->rows; r++)
        for (u32 b = 0; b < t->row_bytes; b += s->piece) {
            u32 place = swizzled(s, to->address + r * t->pitch + b) - to->address;
            copy_to_shared(work, &a, to->address + place, image + place, s->piece);
        }
    landed(work, to->barrier, t->rows * t->counted);
}

/* Sixteen elements after each other get 16 bytes; what they leave is poison. */
static void spread_row(const Tile *t, u8 *row) {
    u32 packed = OF_PADDED * TYPE[t->map.type].bits / 8;
    for (u32 group = t->row_bytes / OF_PADDED; is_padded(t->map.type) && group--;) {
        memmove(row + group * OF_PADDED, row + group * packed, packed);
        memset(row + group * OF_PADDED + packed, 0xff, OF_PADDED - packed);
    }
}

static void run_load(Work *work) {
    const Tile *t = (const Tile *)work->data;
    const Swizzle *s = &SWIZZLE[t->map.swizzle];
    u32 offset = t->to.landing[0].address & 0xffffff;
    u8 *image = malloc((u64)t->rows * t->pitch), *row = malloc(t->row_bytes), *line = image;
    Access a = tracked_access(work, t->to.landing[0].barrier, SPACE_GLOBAL);
    for (u32 r = 0; r < t->rows; r++, offset += t->pitch, line += t->pitch) {
        Row in = row_of(t, r);
        u32 n = in.to - in.from;
        if (n < t->counted) fill_row(&t->map, row, t->counted);
        if (n) {
            global_read(work->warp, work->ins, &a, in.address, row + in.from, n, 1);
            add_sectors(work->warp, work->ins, in.address, n);
            convert_row(&t->map, row + in.from, n);
        }
        spread_row(t, row);
        for (u32 b = 0; b < t->row_bytes; b += s->piece) memcpy(line + (swizzled(s, offset + b) - offset), row + b, s->piece);
    }
    for (s32 k = 0; k < t->to.count; k++) land_tile(work, t, &t->to.landing[k], image);
    free(image);
    free(row);
}

static double tile_done(Warp *w, const Ins *i, const Tile *t, bool store) {
    double done = 0;
    for (u32 r = 0; w->time && r < t->rows; r++) {
        Row in = row_of(t, r);
        double row_done = clock_bulk(w, i, in.address, in.to - in.from, store);
        if (row_done > done) done = row_done;
    }
    return done;
}

/* operands: destination, map, mbarrier, CTAs of a multicast (-1), coordinates */
static Outcome op_tma_load(Warp *w, const Ins *i, u32 lanes) {
    int rank = (int)i->mod[TMA_LOAD_RANK], mode = (int)i->mod[TMA_LOAD_MODE];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Tile t = {0};
        Target target = {.mask = i->arg[3] >= 0 ? (s32)(R32(w, i->arg[3])[l] & 0xffff) : ALL, .pair = i->mod[TMA_LOAD_PAIR], .align = TILE_ALIGN};
        if (!shared_operand(w, i, 0, TMA_LOAD_TO, l, &target.address)) continue;
        if (!shared_operand(w, i, 2, TMA_LOAD_MBARRIER, l, &target.barrier)) continue;
        if (!find_tile(w, i, l, 1, TMA_LOAD_MAP, 4, rank, mode, offsets_of(rank, mode), &t)) continue;
        if (i->mod[TMA_LOAD_OWN_CTA] && cta_at(w->cluster, target.address) != w->cta) {
            find(w, i, l, BAD_OPERAND, target.address, 0, "the destination is in another CTA; .shared::cta is the CTA's own");
            continue;
        }
        if (!find_landings(w, i, l, &target, t.rows * t.pitch, &t.to)) continue;
        Work *work = send_work(w, i, l, NULL, run_load, sizeof t);
        work->finish = tile_done(w, i, &t, false);
        memcpy(work->data, &t, sizeof t);
    }
    return NEXT;
}

/* ---- stores and reductions ---------------------------------------------------------------------------------------------- */

/* The bytes of a row that are inside the tensor. A row that fills its pitch, or has no swizzle, is read at once. */
static bool read_row(Work *work, const Tile *t, u32 r, Row in, u8 *row, u8 *line) {
    const Swizzle *s = &SWIZZLE[t->map.swizzle];
    Access a = work_access(work, actor_of(work->warp, BY_BULK_READ), work->clock, SPACE_SHARED);
    u32 address = t->shared + r * t->pitch;
    bool at_once = in.to - in.from == t->pitch || !s->span;
    if (at_once && !copy_from_shared(work, &a, address + in.from, line + in.from, in.to - in.from)) return false;
    for (u32 b = in.from, next; b < in.to; b = next) {
        next = (b / s->piece + 1) * s->piece;
        if (next > in.to) next = in.to;
        u32 place = swizzled(s, address + b) - address;
        if (!at_once && !copy_from_shared(work, &a, address + place, line + place, next - b)) return false;
        memcpy(row + b, line + place, next - b);
    }
    return true;
}

static void run_store(Work *work) {
    const Tile *t = (const Tile *)work->data;
    Warp *w = work->warp;
    u8 *row = malloc(3 * (u64)t->pitch), *line = row + t->pitch, *old = line + t->pitch;
    Access a = work_access(work, actor_of(w, BY_BULK_WRITE), work->clock, SPACE_GLOBAL);
    if (t->op != PLAIN) a.scope = SCOPE_GPU;
    for (u32 r = 0; r < t->rows; r++) {
        Row in = row_of(t, r);
        u32 n = in.to - in.from;
        if (!n) continue;
        if (!read_row(work, t, r, in, row, line)) break;
        if (t->op != PLAIN && global_read(w, work->ins, &a, in.address, old, n, 1))
            combine_all(t->op, TYPE[t->map.type].atomic, TYPE[t->map.type].bits / 8, old, row + in.from, n, t->map.type == MT_F32_FTZ);
        global_write(w, work->ins, &a, in.address, row + in.from, n, 1);
        add_sectors(w, work->ins, in.address, n);
    }
    free(row);
}

/* If several lanes ask for the same store, it happens once, as on silicon. */
static bool same_store(const Tile *a, const Tile *b) {
    return a->op == PLAIN && a->shared == b->shared && !memcmp(&a->map, &b->map, sizeof a->map) && !memcmp(a->start, b->start, sizeof a->start) &&
           !memcmp(a->row, b->row, sizeof a->row);
}

/* operands: source, map, coordinates */
static Outcome op_tma_store(Warp *w, const Ins *i, u32 lanes) {
    Work *sent = NULL;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        Tile t = {.op = (s32)i->mod[TMA_STORE_OP]};
        Cta *cta;
        u32 offset;
        if (!shared_operand(w, i, 0, TMA_STORE_SOURCE, l, &t.shared)) continue;
        if (!find_tile(w, i, l, 1, TMA_STORE_MAP, 2, (int)i->mod[TMA_STORE_RANK], (int)i->mod[TMA_STORE_MODE], 0, &t)) continue;
        if (t.op != PLAIN && !(REDUCIBLE[t.op] & IN(TYPE[t.map.type].atomic))) {
            find(w, i, l, BAD_TENSOR_MAP, address_operand(w, i, 1, TMA_STORE_MAP, l), MAP_BYTES, "there is no such reduction of elements of type %s",
                 TYPE[t.map.type].name);
            continue;
        }
        if (is_padded(t.map.type)) {
            find(w, i, l, BAD_TENSOR_MAP, address_operand(w, i, 1, TMA_STORE_MAP, l), MAP_BYTES, "%s is for loads; its stores are not simulated",
                 TYPE[t.map.type].name);
            continue;
        }
        if (!shared_bytes(w, i, l, t.shared, t.rows * t.pitch, TILE_ALIGN, &cta, &offset)) continue;
        if (cta != w->cta) {
            find(w, i, l, BAD_OPERAND, t.shared, 0, "the source is in CTA %d of the cluster; .shared::cta is the CTA's own, %d", cta->rank,
                 w->cta->rank);
            continue;
        }
        for (int d = 0; t.mode != MODE_PIXELS && d < t.map.rank; d++)
            if (t.start[d] < 0)
                find(w, i, l, BAD_OPERAND, 0, 0, "a store starts at coordinate %d of dimension %d: it must not be negative", t.start[d], d);
        if (sent && same_store(&t, (const Tile *)sent->data)) {
            join_group(sent, l);
            continue;
        }
        sent = send_work(w, i, l, NULL, run_store, sizeof t);
        join_group(sent, l);
        sent->finish = tile_done(w, i, &t, true);
        sent->read = clock_read(w);
        memcpy(sent->data, &t, sizeof t);
    }
    return NEXT;
}

/* operands: map, coordinates. Its only effect: a map that cannot be. */
static Outcome op_tma_prefetch(Warp *w, const Ins *i, u32 lanes) {
    int rank = (int)i->mod[TMA_PREFETCH_RANK], mode = (int)i->mod[TMA_PREFETCH_MODE];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        Tile t = {0};
        find_tile(w, i, first_lane(rest), 0, TMA_PREFETCH_MAP, 1, rank, mode, offsets_of(rank, mode), &t);
    }
    return NEXT;
}

/* ---- tensor maps that a kernel makes ------------------------------------------------------------------------------------ */

enum { IN_ANY = 0, IN_GLOBAL = 1, IN_SHARED = 2 };

static bool map_in_memory(Warp *w, const Ins *i, const Access *from, u64 address, u64 *map, bool write) {
    u64 n = MAP_USED, align = MAP_ALIGN; /* kernels leave the other half as it was */
    if (from->space == SPACE_SHARED)
        return write ? shared_write(w, i, from, (u32)address, map, n, align) : shared_read(w, i, from, (u32)address, map, n, align);
    return write ? global_write(w, i, from, address, map, n, align) : global_read(w, i, from, address, map, n, align);
}

/* tensormap.replace numbers types and swizzles in its own way: 11, 12 are tf32 and tf32.ftz, 13 to 15 the packed ones; 4 is 96B. Its rank is one less. */
static void replace_field(u64 *map, FieldName f, int dimension, u64 value) {
    if (f == F_TYPE) {
        bool tf32 = value == 11 || value == 12, packed = value > 12;
        put_field(map, F_TF32, 0, tf32);
        put_field(map, F_TYPE, 0, tf32 ? value - 4 : packed ? value - 2 : value);
    } else if (f == F_SWIZZLE) {
        put_field(map, F_SWIZZLE_96B, 0, value == 4);
        put_field(map, F_SWIZZLE, 0, value % 4);
    } else if (f == F_STRIDE) {
        put_field(map, F_STRIDE, dimension, value);
        put_field(map, F_STRIDE_HIGH, dimension, value);
    } else
        put_field(map, f, dimension, f == F_RANK ? value + 1 : value);
}

/* operands: address, value */
static Outcome op_tensormap_replace(Warp *w, const Ins *i, u32 lanes) {
    u64 least = (u64)i->mod[TENSORMAP_REPLACE_LEAST], most = (u64)i->mod[TENSORMAP_REPLACE_MOST];
    u64 multiple = (u64)i->mod[TENSORMAP_REPLACE_MULTIPLE];
    s64 space = i->mod[TENSORMAP_REPLACE_SPACE];
    for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u64 map[MAP_BYTES / 8], address = address_operand(w, i, 0, TENSORMAP_REPLACE_MAP, l);
        u64 value = i->mod[TENSORMAP_REPLACE_WIDE] ? R64(w, i->arg[1])[l] : R32(w, i->arg[1])[l];
        if (value < least || value > most || value % multiple) {
            find(w, i, l, BAD_TENSOR_MAP, address, MAP_BYTES, "the value %llu: it must be %llu to %llu and a multiple of %llu",
                 (unsigned long long)value, (unsigned long long)least, (unsigned long long)most, (unsigned long long)multiple);
            continue;
        }
        bool shared = space == IN_SHARED || (space == IN_ANY && address >> 56 == WINDOW_SHARED);
        Access a = warp_access(w, i, l, shared ? SPACE_SHARED : SPACE_GLOBAL);
        if (!map_in_memory(w, i, &a, address, map, false)) continue;
        replace_field(map, (FieldName)i->mod[TENSORMAP_REPLACE_FIELD], (int)i->mod[TENSORMAP_REPLACE_DIMENSION], value);
        map_in_memory(w, i, &a, address, map, true);
    }
    return NEXT;
}

/* tensormap.cp_fenceproxy: the warp copies a map from shared to global memory and releases it to the copy engine.
 * operands: destination, source */
static Outcome op_tensormap_copy(Warp *w, const Ins *i, u32 lanes) {
    int l = first_lane(lanes);
    u64 map[MAP_BYTES / 8];
    Access from = warp_access(w, i, l, SPACE_SHARED), to = warp_access(w, i, l, SPACE_GLOBAL);
    if (!map_in_memory(w, i, &from, address_operand(w, i, 1, TENSORMAP_COPY_SOURCE, l), map, false)) return NEXT;
    if (!map_in_memory(w, i, &to, address_operand(w, i, 0, TENSORMAP_COPY_TO, l), map, true)) return NEXT;
    Cta *cta;
    Region *r;
    u32 offset;
    const u8 *unused = shared_bytes(w, i, l, (u32)address_operand(w, i, 1, TENSORMAP_COPY_SOURCE, l) + MAP_USED, MAP_USED, MAP_ALIGN, &cta, &offset);
    u8 *copied = global_bytes(w, i, l, address_operand(w, i, 0, TENSORMAP_COPY_TO, l) + MAP_USED, MAP_USED, MAP_ALIGN, true, &r);
    if (unused && copied) memcpy(copied, unused, MAP_USED);
    for (s32 a = 0; a < w->cluster->width; a++)
        if (w->know.clock[FENCED_GLOBAL][a] < w->know.clock[SEEN][a]) w->know.clock[FENCED_GLOBAL][a] = w->know.clock[SEEN][a];
    fence_release(w);
    return NEXT;
}

const HandlerEntry tma_handlers[] = {
    {"tma_load", op_tma_load}, {"tma_store", op_tma_store}, {"tma_prefetch", op_tma_prefetch},
    {"tensormap_replace", op_tensormap_replace}, {"tensormap_copy", op_tensormap_copy}, {0},
};
