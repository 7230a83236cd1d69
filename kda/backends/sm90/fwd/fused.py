"""fwd/gate to fwd/output in one kernel: a cluster of CTAs walks the chunks of one sequence and value head, and what
`prepare` would hand to `chain` through memory goes from shared memory to shared memory.

CTAs 0 and 1 have 64 columns of the state each; where V = 64, CTA 0 has all, alone or in a cluster of two.  All CTAs
make tiles for those that walk (parts/handover.py): a group of eight warps does what prepare's CTA does
(parts/making.py).

  cluster of  warps       role     does
  1, 2, 4     0-3         CHAIN    where a CTA walks, as in fwd/chain.py; but in clusters of four its rows of v, too
  1           4-11        PREPARE  as in fwd/prepare.py, chunks 2 i
              12-19       PREPARE  chunks 2 i + 1
  2           4-11        PREPARE  chunks 4 i + rank
              12-19       PREPARE  chunks 4 i + 2 + rank
  4           4-11        PREPARE  in CTAs 0 and 1 chunks 6 i + 4 + rank, in 2 and 3 chunks 6 i + rank - 2
              12-19       PREPARE  in CTAs 2 and 3, chunks 6 i + rank
              12          RELAY    in CTAs 0 and 1: credit for stages of this CTA, to those who fill them
              13; 0, 1    INVERSE  in CTAs 0 and 1 of the one group, in 2 and 3 of each
              14          LOAD     in CTAs 0 and 1: rows of v (parts/values.py)
              15          STORE    in CTAs 0 and 1: rows of o

Registers: 192 of CHAIN and 72 of all others; in blocks of 8 rows 160 and 80.

A group waits for its tile when it has issued its product, with operands of the state in registers (in blocks of 8 rows:
before its sums). In CTAs alone and clusters of two its warps 0 and 1 compute the inverse, each of the 16 rows of A_kk
that it has, and warp 1 what joins both, while the others wait at the sums of the next chunk, with rows that they have
loaded. Registers of warps 0 and 1 cannot hold their next rows beside an inverse: they request them as soon as they have
their product, each to those rows of X that only its part of the product reads (in blocks of 8 rows, warps 6 and 7
prefetch them into L2). `staged`, default of clusters of four and of blocks of 8 rows: as soon as products are computed,
all eight warps request their next rows, which go where the operands were (parts/making.py).

  pipeline, barrier       arrivals                             waits           says
  a CTA alone, or a cluster of two:
  full, each stage        1 of PREPARE with the bytes of the   CHAIN           a tile is there
                          copy, its warp 1; in its own CTA
                          without bytes
  empty, each stage       4 or 8 of CHAIN, a lane of each      PREPARE         no warp reads the stage any more, in any
                          warp of each CTA that walks, in the                  CTA, and the copy is done
                          CTA that makes the stage's tiles; 1
                          of PREPARE, where tiles are kept:
                          the copy to memory has read it, too
  a cluster of four:
  full, each stage        1 of RELAY with the bytes of the     CHAIN           a tile and v are there
                          copy, or INVERSE in its own CTA,
                          without bytes; 32 of LOAD, each
                          lane with its pieces of v
  read, each stage        4 of CHAIN, a lane of each warp      RELAY, LOAD     tile and v were read in this CTA
  written, each o         4 of CHAIN, a lane of each warp      STORE           o (and r) of a chunk is in shared memory
  taken, each o           1 of STORE, a lane                   CHAIN           it was read
  credit, each group      2 of RELAY, of both CTAs that walk   INVERSE         the stage of its next tile is free in
                                                                               both
  solved, each group      1 of INVERSE, a lane                 PREPARE         INVERSE needs A_kk and b no more
  empty, 2 of each group  2 of RELAY, of both CTAs that walk;  PREPARE         both CTAs have read what was last in a
                          1 of INVERSE, where tiles are kept:                  tile
                          the copy to memory has read it, too
  stored, each stage      1 of STORE, a lane                   LOAD            where tiles are kept: r was read, which
                                                                               lies where v was
  both:
  CHAIN                   128                                  CHAIN           rows of v and o are in shared memory, in
                                                                               clusters of two; a state that crosses is
  GROUP                   256, of each group                   PREPARE         as at prepare's sync_threads; dt_bias is
                                                                               there; operands of pairs were read
  WHOLE_GROUP             256, of each group                   PREPARE         all but a half of TB is there, for warp 1
  WHOLE_GROUP_INVERSE     288, of each group                   PREPARE,        all but TB is there, for INVERSE
                                                               INVERSE
  GROUP_PRODUCT           192, of each group                   warps 0 to 3,   in blocks of 8 rows: Y was read, where 6
                                                               6 and 7 of      and 7 write
                                                               PREPARE

A flag in memory, `crossed`, says that the state that enters a share is there: a thread of the CHAIN before sets it.
The cluster meets twice: first mbarriers are initialised, and CHAIN's warp 0 has published the share; last, the
neighbour reads nothing here any more, and copies nothing here.  A CTA alone meets first only.

`wrapped`, where walks outnumber the clusters that run at once, and in CTAs alone: a cluster has an equal share of all
of them, in pieces (parts/share.py), and the roles go on from piece to piece without a pause: a chunk's stage is that of
its number among all chunks of the share. A piece's state comes from the cluster before, by memory, or goes to the one
behind.

`keeps`, of a call whose gradients are recorded: b is on keys, and each tile also goes to memory, by a copy of the warp
that hands it over.  CHAIN leaves r of a chunk where its v was, from where it goes to memory as o does, and brings the
state of every second chunk there itself, 16 columns by each warp.  The bits are those of prepare and chain.  CHAIN also
stores the states that enter chunks, where a call returns them (`h`) or some of them go to a pool (`checkpoints`).

The roles share the launch's 640 x 96 registers: a separate LOAD warp would need a whole warpgroup and leave CHAIN only
136.

The PREPAREs of all CTAs clear tokens outside every sequence at the end.

  shared memory: configs.FusedConfig.struct; at K = 128 a tile has 29 KiB, a group's operands, sums and A_kk 37, or 41
  in blocks of 8 rows, where what blocks have lies in Y and operands across 16 rows in the tile
    CTA alone                2 x (tile + 37), v 4 x 4.5, o 2 x 4.5 KiB           159 KiB, or 167
    cluster of two           2 x (2 tiles + 37), v and o                         217, or 225
    of four, CTAs 0 and 1    tile + 37, stages 4 x 29, v and o                   209, or 213
    of four, CTAs 2 and 3    2 x (2 tiles + 37)                                  190, or 198, of the same
  one that keeps has 8 KiB more, of columns of a state; in clusters of two and blocks of 8 rows they do not fit
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...common.cute.async_copies import prefetch
from ...common.cute.barriers import initialise, mbarriers_among
from ...common.cute.copies import allocate, field_at, load_one, store
from ...common.cute.entry import Entry, wait_for_the_kernel_before
from ...common.cute.gate import beta_from
from ...common.cute.rings import stage_of
from ...common.cute.segments import clear_tokens, place_of_checkpoint, place_of_segment
from ...common.cute.tile import LEAST_BUSY, WARP_ROWS, WARPS, C
from ..configs import CHAIN, COLUMNS, FIRST_PRODUCER, LOAD, PITCH_V, RELAY, RING, STORE, TILES, WALKING, FusedConfig
from ..parts.chunk import ChunkMaker
from ..parts.halves import StateInHalves
from ..parts.handover import OwnStages, RelayedStages, is_complete, wait_unless
from ..parts.making import INVERTERS, LAST_INVERTER, Work, form_of
from ..parts.share import Crossing, PlaceOfPiece, Share, chunks_of
from ..parts.teams import MakerGroup
from ..parts.values import MovedByChain, MovedByHelpers


def way_of(config: FusedConfig) -> OwnStages | RelayedStages:
    return RelayedStages(config) if config.helped else OwnStages(config)


class Producer:
    """PREPARE: a group of eight warps."""

    def __init__(self, config: FusedConfig):
        self.c, self.struct, self.wrapped = config.prepare, config.group, config.wrapped
        self.makers, self.staged, self.helped = config.makers, config.staged, config.helped
        self.inverters_ahead, self.requests = config.inverters_ahead, config.staged or config.inverters_ahead
        self.keeps = config.keeps
        self.share, self.way = Share(config.chain), way_of(config)
        self.team = MakerGroup()
        self.chunk = ChunkMaker(config.prepare, self.team, shared=True)
        self.form = form_of(config, self.chunk)

    def work_of(self, s, rank, group):
        """Where a group works."""
        struct, base = self.struct, s.groups + group * self.struct.bytes
        fields = [field_at(base, getattr(struct, name)) for name in ("X", "Y", "sums", "A_kk", "columns", "b", "gate")]
        places = field_at(base, struct.places) if self.keeps and self.helped else None
        return Work(rank, group, base, *fields[:-1], fields[:2], fields[-1], places)

    @cute.jit
    def produce(self, x, s, ring, rank, begin, tokens, head, kept):
        """Every so many-th chunk of the sequence, or of all that the cluster walks."""
        group = self.team.number()
        work = self.work_of(s, rank, group)
        if self.team.warp() == LEAST_BUSY:
            for turn in cutlass.range_constexpr(TILES if self.helped else 1):
                tile = self.way.tile(work.base, rank, group, Int32(turn))
                self.chunk.inverse.zeros(work.columns, field_at(tile, self.chunk.tile.TB))
                if cutlass.const_expr(self.c.K < 128):                         # copied with the rest, and never read
                    behind = field_at(tile, self.chunk.tile.decay) + (self.c.K + 2 * cute.arch.lane_idx())
                    store(behind, [Float32(0.0)] * 2)
        if cutlass.const_expr(not self.wrapped):
            self.make(x, ring, work, begin, tokens, head, kept.number, 0)
        else:
            slot, left = self.share.first(s.share)
            before, n, looked_up = Int32(0), Int32(0), Boolean(True)
            while left > 0:
                head, n, begin, tokens, _, _, piece = self.share.piece(x, s.share, slot, looked_up, head, n)
                chunks = chunks_of(tokens)
                self.make(x, ring, work, begin, tokens, head, piece.number, before)
                slot, looked_up = self.share.after(s.share, slot, chunks)
                left, before = left - chunks, before + chunks
        if cutlass.const_expr(self.keeps and not self.helped):
            if self.team.warp() == LAST_INVERTER:
                cute.arch.cp_async_bulk_wait_group(0, read=True)               # the copy has read the last tile

    @cute.jit
    def make(self, x, ring, work, begin, tokens, head, number, before):
        """The group's chunks of a piece, the first of which has this number among all, before which so many were
        made."""
        first, step = self.way.first(work.rank, work.group, before), self.way.step
        self.form.begin(x, work, begin, head)
        rows_of_piece = self.chunk.gate.rows_of_head(x, begin, head) if self.inverters_ahead else None
        if cutlass.const_expr(self.requests):
            if first * C < tokens:
                self.request(x, work, rows_of_piece, begin, first, tokens, head)
        for chunk in cutlass.range(first, (tokens + C - 1) // C, step, unroll=1):
            rows = cutlass.min(tokens - chunk * C, C)
            head_rows = self.rows_of_chunk(x, rows_of_piece, begin, chunk, head)
            turn = self.way.turn(before + chunk)
            tile = self.way.tile(work.base, work.rank, work.group, turn)
            chunk_work = work
            if cutlass.const_expr(self.keeps):
                chunk_work = work._replace(b=work.b + (turn & 1) * C)
            beta, rows_made = self.form.rows(x, chunk_work, head_rows, rows)
            self.way.wait_for_inverse(ring, work.group, turn)
            if cutlass.const_expr(not self.keeps):
                if self.team.warp() == LEAST_BUSY:
                    work.b[cute.arch.lane_idx()] = beta_from(beta, self.c.beta, rows, cute.arch.lane_idx())
            acquire = functools.partial(self.acquire, x, ring, work, turn, number + chunk, head)
            self.form.operands(x, chunk_work, tile, rows, acquire, *rows_made)
            ahead = (chunk + step) * C < tokens                                # the piece has another of its chunks
            if cutlass.const_expr(self.inverters_ahead):
                if ahead:
                    self.request(x, work, rows_of_piece, begin, chunk + step, tokens, head)
            if cutlass.const_expr(not self.helped):
                if self.team.warp() < INVERTERS:
                    self.solve_half(work, tile)
            self.form.finish(work)
            if cutlass.const_expr(self.staged):
                self.form.operands_were_read()                                 # X and Y
                if ahead:
                    self.request(x, work, rows_of_piece, begin, chunk + step, tokens, head)
            elif cutlass.const_expr(not self.inverters_ahead):
                if self.team.warp() >= WARPS - INVERTERS and ahead:
                    row = (chunk + step) * C + WARP_ROWS * (self.team.warp() - (WARPS - INVERTERS))
                    self.prefetch_rows(x, begin + row, tokens - row, head)     # from the first one of an inverter on
            if cutlass.const_expr(not self.helped):
                if self.team.warp() == LAST_INVERTER:
                    self.complete(work, tile)
                    kept_at = self.kept_at(x, number + chunk, head) if cutlass.const_expr(self.keeps) else None
                    self.way.hand_over(ring, tile, work.group, work.rank, kept_at)

    @cute.jit
    def acquire(self, x, ring, work, turn, number, head):
        """The group may write to its tile; in clusters of four, INVERSE has read where to keep the last one there."""
        self.way.acquire(ring, work.rank, work.group, turn, self.team.warp() == LAST_INVERTER)
        if cutlass.const_expr(self.keeps and self.helped):
            if self.team.warp() == LEAST_BUSY:
                work.places[self.way.second(work.rank, turn)] = self.kept_at(x, number, head).toint()

    def places_of_inverse(self, work, tile):
        return work.A_kk, work.columns, field_at(tile, self.chunk.tile.TB)

    def b_of_inverse(self, work):
        return None if self.keeps else work.b

    def solve_half(self, work, tile):
        """16 rows of the inverse, by each of two warps of PREPARE."""
        places, first = self.places_of_inverse(work, tile), C // INVERTERS * self.team.warp()
        self.chunk.inverse.half(*places, self.b_of_inverse(work), first)

    def complete(self, work, tile):
        """The rest of it, by one of them; all of the tile is there then."""
        places, b = self.places_of_inverse(work, tile), self.b_of_inverse(work)
        self.chunk.inverse.join(*places, b, lambda: self.form.wait(work.group))
        cute.arch.fence_proxy("async.shared", space="cta")                     # TB is in the tile
        cute.arch.sync_warp()

    def kept_at(self, x, number, head):
        """Where the tile of a chunk is kept, of all the call's chunks."""
        return x.tiles + (Int64(number) * x.HV + head) * self.chunk.tile.bytes

    @cute.jit
    def invert(self, s, ring, rank, group, chunks):
        """INVERSE, one warp, of a group's chunks among so many."""
        work = self.work_of(s, rank, group)
        for c in cutlass.range(self.way.first_of_all(rank, group), chunks, self.way.step, unroll=1):
            turn = self.way.turn(c)
            tile = self.way.tile(work.base, rank, group, turn)
            self.form.wait(group)                                              # A_kk is there, and all but TB
            self.chunk.inverse.solve(*self.places_of_inverse(work, tile), None, self.b_of_inverse(work))
            cute.arch.fence_proxy("async.shared", space="cta")                 # TB is in the tile
            cute.arch.sync_warp()
            self.way.hand_over(s, ring, tile, c, group, rank, turn, work.places)

    def request(self, x, work, rows_of_piece, begin, chunk, tokens, head):
        head_rows = self.rows_of_chunk(x, rows_of_piece, begin, chunk, head)
        self.form.request(x, work, head_rows, cutlass.min(tokens - chunk * C, C))

    def rows_of_chunk(self, x, rows_of_piece, begin, chunk, head):
        if self.inverters_ahead:
            return self.chunk.gate.later(rows_of_piece, chunk * C, x.H, x.HV)
        return self.chunk.gate.rows_of_head(x, begin + chunk * C, head)        # takes fewer registers there

    @cute.jit
    def prefetch_rows(self, x, first, rows, head):
        """The four rows of q, k and g from `first` on, of as many as there are, into L2: 24 lanes have a line of 128
        bytes."""
        lane = cute.arch.lane_idx()
        of_q = head // (x.HV // x.H) if cutlass.const_expr(self.c.grouped) else head
        of_g = lane >= 16
        source = x.k.toint() if lane >= 8 else x.q.toint()
        source = x.g.toint() if of_g else source
        heads, head = (x.HV if of_g else x.H), (head if of_g else of_q)
        size = Int32(x.g.dtype.width // 8 if of_g else 2) * self.c.K
        row = cutlass.min(lane >> 1 & 3, rows - 1)
        has_line = lane < (16 if cutlass.const_expr(self.c.per_head) else 24)   # g per head has no line of its own
        if cutlass.const_expr(self.c.K < 128):                                 # rows of bfloat16 have one line
            has_line = has_line and (lane & 1) * 128 < size
        if has_line:
            prefetch(source + ((first + row) * heads + head) * size + (lane & 1) * 128)

    def clear(self, x, end, head):
        """Clears o of tokens outside every sequence, a row per warp."""
        group = self.team.number()
        rank, y, z = cute.arch.block_idx()
        n, N, heads = z, cute.arch.grid_dim()[2], Int32(1)
        if self.wrapped:
            n, N, heads = y, cute.arch.grid_dim()[1], x.HV
        warp = self.way.place_of_all(n, rank, group) * WARPS + self.team.warp()
        clear_tokens(x, self.c.V, Int32(end) + warp, N * (self.makers * WARPS), head, heads)

    @cute.jit
    def hand_through(self, x, cluster, clusters, rank):
        """The states of sequences of no tokens, which no cluster walks."""
        c = self.share.c
        element = self.way.place(rank, self.team.number()) * (32 * WARPS) + self.team.thread()
        for n in cutlass.range(cluster, x.N, clusters, unroll=1):
            _, _, tokens, _, _ = place_of_segment(c, x, n, 0, 1, 0)
            if tokens == 0:
                first, size = Int64(n) * x.HV * (c.K * c.V), x.HV * (c.K * c.V)
                for i in cutlass.range(element, size, self.makers * 32 * WARPS, unroll=1):
                    entering = Float32(0.0)
                    if cutlass.const_expr(c.h0):
                        entering = load_one(x.h0 + (first + i)).to(Float32)
                    store(x.ht + (first + i), [entering])


class Consumer:
    """CHAIN: a state's walk over tiles that the cluster makes."""

    def __init__(self, config: FusedConfig):
        self.c, self.way = config.chain, way_of(config)
        self.values = MovedByHelpers(config) if config.helped else MovedByChain(config)
        self.state, self.share, self.crossing = StateInHalves(config), Share(config.chain), Crossing(config.chain)

    @cute.jit
    def walk_share(self, x, s, ring, cluster, rank):
        """All pieces of walks that are the cluster's."""
        slot, left = self.share.first(s.share)
        walked, head, n, looked_up = Int32(0), Int32(0), Int32(0), Boolean(True)
        while left > 0:
            head, n, begin, tokens, enters, leaves, piece = self.share.piece(x, s.share, slot, looked_up, head, n)
            S = self.state.zero()
            if enters:
                self.crossing.enter(x, cluster - 1, rank, S, CHAIN)
            else:
                if cutlass.const_expr(self.c.h0):
                    self.state.load(x.h0, n * x.HV + head, rank, self.c.V, self.c.v_first, S)
            first_v = (begin * x.HV + head) * self.c.V + rank * COLUMNS
            self.walk(x, S, s, ring, first_v, rank, tokens, head, piece, walked)
            if leaves:
                self.crossing.leave(x, cluster, rank, S, CHAIN)
            else:
                if cutlass.const_expr(self.c.ht):
                    self.state.store(x.ht, n * x.HV + head, rank, self.c.V, self.c.v_first, S)
            chunks = chunks_of(tokens)
            slot, looked_up = self.share.after(s.share, slot, chunks)
            left, walked = left - chunks, walked + chunks

    def beside_state(self, ring, c):
        """While the state after chunk c is computed: say that its o is there, and whether the next tile is."""
        self.values.o_is_there(ring, c)
        stages = self.way.stages
        return is_complete(ring.full + stage_of(c + 1, stages), (c + 1) // stages & 1)

    @cute.jit
    def walk(self, x, S, s, ring, first_v, rank, tokens, head, kept, walked=0):
        """Walk over `tokens` tokens, after `walked` chunks."""
        operand, steps, stages = self.state.operand(S), chunks_of(tokens), self.way.stages
        until = self.way.until_own(rank, walked)
        thread_place = self.values.begin(x, s, first_v, tokens, walked)
        stored_at = place_of_checkpoint(self.c, x, kept.number, Int32(0), steps)
        is_there = Int32(0)
        for i in cutlass.range(steps, unroll=1):
            c = walked + i
            stage, phase = stage_of(c, stages), c // stages & 1                # counted: a shift is 0.5% slower
            tile = self.way.tile_of(s, stage, rank, until)
            rows_of_v = s.v + stage_of(c, RING) * (C * PITCH_V)
            if cutlass.const_expr(self.c.h):
                if kept.skipped + i & self.c.every - 1 == 0:
                    number = kept.state + (kept.skipped + i) // self.c.every
                    place = Int64(number) * x.HV + head
                    if cutlass.const_expr(self.c.has_r):
                        self.state.keep(x.h + place * (self.c.K * self.c.V), operand, rank, s.kept)
                    else:
                        self.state.store(x.h, place, rank, self.c.V, self.c.v_first, S)
            if cutlass.const_expr(self.c.checkpoints is not None):
                if stored_at >= 0:
                    self.state.store(x.pool + stored_at, head, rank, self.c.V, self.c.v_first, S)
                stored_at = place_of_checkpoint(self.c, x, kept.number, i + 1, steps)    # in time for the next chunk
            words_of_v = None
            if cutlass.const_expr(self.values.early):
                words_of_v = self.state.load_v(rows_of_v)
            wait_unless(is_there, ring.full + stage, phase)
            if cutlass.const_expr(not self.values.early):
                words_of_v = self.state.load_v(rows_of_v)
            PO = self.state.issue_PO_and_round(operand, S, tile)
            self.values.beside_product(x, s, thread_place, ring, i, tokens, walked)
            rows_of_o = self.values.place_of_o(s, i, walked) if cutlass.const_expr(self.c.has_o) else None
            beside = functools.partial(self.beside_state, ring, c)
            is_there = self.state.update_in_halves(S, operand, PO, tile, words_of_v, rows_of_v, rows_of_o, beside)
            self.way.hand_back(ring, stage)
            until = self.way.after(until)
        self.values.end(x, s, thread_place, steps, tokens, walked)


class Fused(Entry):
    def __init__(self, config: FusedConfig):
        self.c, self.way = config, way_of(config)
        self.producer, self.consumer = Producer(config), Consumer(config)

    @cute.kernel
    def kernel(self, x):
        c = self.c.chain
        rank, y, n = cute.arch.block_idx()
        head, cluster, clusters = y, y, cute.arch.grid_dim()[1]
        if cutlass.const_expr(self.c.pdl):
            wait_for_the_kernel_before()
        begin, tokens, kept = Int64(0), Int32(0), None
        if cutlass.const_expr(not self.c.wrapped):
            _, begin, tokens, number, state = place_of_segment(c, x, n, x.chunks, 1, 0)
            kept = PlaceOfPiece(number, Int32(0), state)
        s = allocate(self.c.struct)
        ring = mbarriers_among(s, self.c.pipelines)
        if cute.arch.thread_idx()[0] == 0:
            initialise(s, self.c.pipelines)
            if cutlass.const_expr(self.c.ctas > 1):                            # no copy arrives at those of a CTA alone
                cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.c.wrapped):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                self.producer.share.publish(x, s.share, cluster, clusters)
        self.meet()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(not self.c.helped):
            if warp < FIRST_PRODUCER:
                if cutlass.const_expr(self.c.walking == self.c.ctas) or rank < self.c.walking:
                    self.chain(x, s, ring, cluster, rank, begin, tokens, head, n, kept)
            else:
                cute.arch.setmaxregister_decrease(self.c.registers[1])
                self.prepare(x, s, ring, cluster, clusters, rank, begin, tokens, head, kept)
        else:
            if rank < WALKING and warp < FIRST_PRODUCER:
                self.chain(x, s, ring, cluster, rank, begin, tokens, head, n, kept)
            else:
                cute.arch.setmaxregister_decrease(self.c.registers[1])
                group = self.way.inverts(rank, warp)
                if group >= 0:
                    self.producer.invert(s, ring, rank, group, self.chunks(s, tokens))
                elif rank < WALKING and warp >= FIRST_PRODUCER + WARPS:
                    self.help(x, s, ring, rank, begin, tokens, head, warp)
                elif warp >= FIRST_PRODUCER:
                    self.prepare(x, s, ring, cluster, clusters, rank, begin, tokens, head, kept)
        if cutlass.const_expr(self.c.ctas > 1):
            self.meet()

    def meet(self):
        """All warps of the cluster."""
        if self.c.ctas == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def chain(self, x, s, ring, cluster, rank, begin, tokens, head, n, kept):
        c = self.c.chain
        cute.arch.setmaxregister_increase(self.c.registers[0])
        if self.c.wrapped:
            self.consumer.walk_share(x, s, ring, cluster, rank)
        else:
            S = self.consumer.state.zero()
            if c.h0:
                self.consumer.state.load(x.h0, n * x.HV + head, rank, c.V, c.v_first, S)
            first_v = (begin * x.HV + head) * c.V + rank * COLUMNS
            self.consumer.walk(x, S, s, ring, first_v, rank, tokens, head, kept)
            if c.ht:
                self.consumer.state.store(x.ht, n * x.HV + head, rank, c.V, c.v_first, S)

    def prepare(self, x, s, ring, cluster, clusters, rank, begin, tokens, head, kept):
        c = self.c.chain
        self.producer.produce(x, s, ring, rank, begin, tokens, head, kept)
        if c.packed:
            _, begin, tokens, _, _ = place_of_segment(c, x, self.sequences(x) - 1, 0, 1, 0)
            self.producer.clear(x, begin + tokens, 0 if self.c.wrapped else head)
        if self.c.wrapped and c.packed and c.ht:
            self.producer.hand_through(x, cluster, clusters, rank)

    @cute.jit
    def help(self, x, s, ring, rank, begin, tokens, head, warp):
        """RELAY, LOAD and STORE of a cluster of four."""
        if warp == RELAY:
            self.way.relay(ring, rank, self.chunks(s, tokens))
        elif warp == LOAD:
            self.consumer.values.help(x, s, ring, rank, begin, tokens, head, self.consumer.values.load)
        elif warp == STORE:
            self.consumer.values.help(x, s, ring, rank, begin, tokens, head, self.consumer.values.store)

    def chunks(self, s, tokens):
        """Return the number of chunks that the cluster walks."""
        chunks = chunks_of(tokens)
        if self.c.wrapped:
            _, chunks = self.producer.share.first(s.share)
        return chunks

    def sequences(self, x):
        return x.N if self.c.wrapped else cute.arch.grid_dim()[2]


build = Fused.build
