/* Metadata of sparse products: mma.sp, and each warp's 16 rows of wgmma.mma_async.sp. */
#include "sparse.h"
#include "findings.h"

enum { ROWS = 16 };

/* The 4 bits of metadata of each chunk of a row: two indices of 2 bits, the lower one first. Of 16- and 32-bit elements a lane has 16 bits
 * of row g, and above them 16 of row g + 8; the next lane has the columns after those. Of smaller ones it has 32 bits of a row: of row g,
 * the next lane of row g + 8, and the two after those have the columns that follow. */
static u32 indices(const Metadata *m, u32 row, u32 chunk) {
    u32 g = row % 8, high = row / 8;
    if (m->bits >= 16) return m->word[4 * g + m->first + chunk / 4] >> (16 * high + 4 * (chunk % 4)) & 15;
    return m->word[4 * g + m->first + 2 * (chunk / 8) + high] >> 4 * (chunk % 8) & 15;
}

/* An index counts elements, of 4 bits pairs of them; of 32 bits both make one index. */
bool spread_sparse(Warp *w, const Ins *i, const Metadata *m, u32 depth, const u32 *from, u32 *to) {
    u32 bits = m->bits, chunk = bits == 32 ? 2 : bits == 4 ? 8 : 4, together = bits == 4 ? 2 : 1;
    for (u32 row = 0; row < ROWS; row++)
        for (u32 c = 0; c < depth / chunk; c++) {
            u32 found = indices(m, row, c), index[2] = {found & 3, found >> 2};
            if (bits == 32 ? found != 0x4 && found != 0xe : index[0] == index[1] || (m->ordered && index[0] > index[1])) {
                find(w, i, 0, BAD_OPERAND, 0, 0, "metadata 0x%x of row %u, columns %u to %u: %s", found, row, c * chunk, (c + 1) * chunk - 1,
                     bits == 32 ? "it must be 0x4 or 0xe" : index[0] == index[1] ? "both indices are the same" : "the indices are not in order");
                return false;
            }
            for (u32 e = 0; e < chunk / 2; e++) {
                u32 column = bits == 32 ? found == 0xe : index[e / together] * together + e % together;
                to[row * depth + c * chunk + column] = from[row * depth / 2 + c * chunk / 2 + e];
            }
        }
    return true;
}
