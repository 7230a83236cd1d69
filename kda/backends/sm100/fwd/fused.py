"""fwd/gate to fwd/output in one kernel: a cluster of two CTAs walks the chunks of C = 32 rows of one sequence and value
head after the other, each CTA with half of the columns of the state, and makes every second chunk's operands, for both.
K = V is 128 or 64.

  KT = TB^T @ kg   A2 = A_qk @ TB       TB = A_inv b:                            fwd/prepare.py
  X = v - kE @ S                                                                 fwd/chain.py
  S = 2^gc_last S + KT^T @ X
  o = qg @ S + A2 @ X

So two products stand between a state and the next one, and o is behind them.

  warps  role     does
  0-3    CHAIN    has S (K, V / 2) in tensor memory, a thread a row of 128 or half of a row of 64.  warp 0: issues
                  products; warps 0, 1: X, and rows of v two chunks ahead; warps 2, 3: o of the chunk before
  4-7,   PREPARE  chunks 4 i + rank, into stage rank;  of the eight, warps 0-3: the product of pairs (warp 0 the
  16-19           inverse, warps 2, 3 A2), warps 4-7: KT, and the tile to both CHAINs
  8-15   PREPARE  chunks 4 i + 2 + rank, into stage 2 + rank

If sequences are cut (`cut`), a cluster walks over each segment twice: with v from 0 (the first segment from the state
that enters the sequence), and, except for the first segment, with v = 0 from the identity.  That walk yields
`response`, the rows of o of a state that enters the segment, and M, by which that state is multiplied.
common/cute/compose.py goes from state to state, fwd/join.py adds what o has of them.

Clusters have equal shares of all walks, in pieces (parts/walks.py): a walk that a share ends within goes on in the
cluster behind, which is given the state, in float32, through memory.  A flag, `crossed`, says that it is there: a
thread of CHAIN sets it.  So no bit depends on the number of clusters.

`keeps`, of a call whose gradients are recorded: sequences are found in the table of segments, and tiles, r and states
go to memory with the bits that fwd/operands.py and fwd/record.py give them.

Chunks are counted through all that a cluster walks over: chunk c is in stage c mod 4, which group (c >> 1) & 1 of CTA
c & 1 fills.  PREPAREs do not wait for the end of the piece before, and CHAIN requests the next one's first rows of v
during the last chunks of a piece.

  pipeline, barrier       arrivals                         waits           says
  full, each stage        1 of PREPARE with the bytes of   CHAIN           a tile is there: kE, qg, KT, A2, 2^gc_last
                          the copy, its warp 4; in its
                          own CTA without bytes
  out                     1 of CHAIN, a commit             CHAIN           -X is there, S was read
  added                   1 of CHAIN, a commit             CHAIN           where one product makes pairs: S has KT^T @ X
  o_done                  1 of CHAIN, a commit             CHAIN           S and o are there; X and the tile were read
  empty, each group       8 of CHAIN, a lane of each warp  PREPARE         no warp reads the stage any more; the copy is
                          of both CTAs, in the CTA that                    done
                          makes the stage's tiles; 1 of
                          PREPARE, a lane of its warp 4,
                          where tiles are kept: the copy
                          to memory has read it, too
  pairs_done, each group  1 of PREPARE, a commit           PREPARE         the product of pairs is there
  KT_done, each group     1 of PREPARE, a commit           PREPARE         KT is in tensor memory
  STATE_ROUNDED           128                              CHAIN           S is in shared memory, 2^gc_last S in tensor
                                                                           memory; before a piece: CHAIN is done with
                                                                           the one before; the next one is known, and
                                                                           rows of v are there; a state that crosses is
  X_THERE                 128                              CHAIN           for warps 0 and 1: -X is in shared memory,
                                                                           and rows of v of the next chunk; warps 2 and
                                                                           3 arrive: o of the chunk before was read from
                                                                           tensor memory
  GROUP                   256, of each group               PREPARE         as barrier 0 of fwd/operands.py
  GROUP_FIRST_FOUR        128, of each group               warps 0 to 3    A_kk is there; TB is
                                                           of PREPARE
  GROUP_TILE              256, of each group               PREPARE         where one product makes pairs, for warps 0
                                                                           and 4: kE, qg, kg are there
  GROUP_LAST_SIX          192, of each group               warps 2 to 7    KT and A2 are in the tile, for warp 4
                                                           of PREPARE

  shared memory: configs.shared_memory, 222 KiB, or 122 of K = 64;  tensor memory: configs.Columns, all there are
  allocated, so that they begin at 0.  A product of M = 64 rows takes half the lanes of its columns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint8, Uint32
from cutlass.memory import SmemAllocator

from ...common.cute.barriers import initialise, mbarriers_among
from ...common.cute.copies import field_at, fields_at, store
from ...common.cute.entry import Entry, permit_early_launch, wait_for_the_kernel_before
from ...common.cute.tile import C, swizzle_128B
from ..configs import CTA_PIPELINES, CTAS, FIRST_PRODUCER, GROUPS, TMEM, FusedConfig
from ..parts import umma
from ..parts.teams import place_of
from ..parts.walks import Share, cluster_count, cluster_index, end_of_sequences
from .chain import Consumer
from .prepare import Producer


class Fused(Entry):
    def __init__(self, config: FusedConfig):
        self.c = config
        self.producer, self.consumer, self.share = Producer(config), Consumer(config), Share(config)

    @cute.kernel
    def kernel(self, x):
        if cutlass.const_expr(self.c.cut):
            permit_early_launch()                                              # for compose: all clusters are there
        if cutlass.const_expr(self.c.pdl):
            wait_for_the_kernel_before()
        rank, warp = cute.arch.block_idx()[0] % CTAS, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        struct = self.c.struct
        shared = SmemAllocator().allocate_array(Uint8, struct.end, byte_alignment=1024)
        barriers = mbarriers_among(fields_at(shared, struct), CTA_PIPELINES)
        if cute.arch.thread_idx()[0] == 0:
            self.initialise(shared, barriers)
            base = (shared.toint().to(Uint32) & 0x3FFFF) >> 4
            store(field_at(shared, struct.base_desc), [base])
        with cute.arch.elect_one():
            store(field_at(shared, struct.places) + warp, [place_of(warp)])
        if warp == 0:
            umma.allocate(field_at(shared, struct.tmem), TMEM)
        if warp == 1:
            self.share.publish(x, shared, cluster_index(self.c), cluster_count(self.c))
        self.store_minus_one(field_at(shared, struct.minus_one))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        umma.fence_after_thread_sync()                                         # after the allocation
        if warp < FIRST_PRODUCER:
            self.consumer.walk_share(x, shared, barriers, rank)
        else:
            self.producer.produce(x, shared, barriers, rank)
            if cutlass.const_expr(self.c.packed):
                self.producer.clear(x, end_of_sequences(self.c, x))
        umma.fence_before_thread_sync()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            umma.free(TMEM)

    def initialise(self, shared, barriers):
        """One thread initialises mbarriers; the fence makes this known to the cluster's other CTA and to copies."""
        initialise(barriers, self.c.cta_pipelines)
        for group in range(GROUPS):
            s = fields_at(shared + group * self.c.memory.group.bytes, self.c.memory.group)
            initialise(s, self.c.group_pipelines)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def store_minus_one(self, to):
        """[-1; 0] (2 C, C), across: row j of 2 C elements has -1 at j; 1 where X is not negated."""
        found = Float32(1.0 if self.c.keeps else -1.0)
        row, piece = cute.arch.thread_idx()[0] >> 3, cute.arch.thread_idx()[0] & 7
        if row < C:
            one = [found if piece * 8 + e == row else Float32(0.0) for e in range(8)]
            store(to + swizzle_128B(row, piece * 8, C) // 2, one)
        # redundant: each product that reads this also follows the proxy fence of rows of v
        cute.arch.fence_proxy("async.shared", space="cta")


build = Fused.build
