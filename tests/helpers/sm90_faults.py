"""Faults planted into the Hopper kernels, by the file of kda/backends that each stands in, and the calls that notice
them."""

from cute_calls import RAGGED
from kernel_faults import SPACE, faults, faults_of_the_queue, initialises
from sm90_forms import ALONE, CUT, FEW, FLOAT32, FOUR, PAIR, REVERSE, SMALL, SOME, STREAM, TWO_KERNELS, Call, Form

LONG = dict(V=64, T=390, HV=2)
CALLS = {
    "two kernels": Call(TWO_KERNELS, dict(T=260, **SMALL)),
    "pair": Call(PAIR, dict(T=390)),
    "pair, packed": Call(PAIR, dict(padding=9, **RAGGED)),
    "shares": Call(Form(2, 2), dict(T=130, HV=3)),
    "four": Call(FOUR, dict(T=650)),
    "any_gate": Call(PAIR, dict(T=390, gate="softplus")),
    "alone": Call(ALONE, LONG),
    "alone, shares": Call(Form(1, 7), dict(V=64, T=70, HV=8)),
    "few chunks": Call(Form(1, 5), dict(V=64, **FEW)),
    "one_walks": Call(PAIR, LONG),
    "K_64": Call(PAIR, dict(K=64, T=390)),
    "stream": Call(STREAM._replace(makers=1), dict(T=650)),
    "stream_of_segments": Call(Form(segments=2, makers=1), dict(T=300)),
    # the states that enter chunks
    "states": Call(Form(2, 2), dict(HV=3, states=True, **SOME)),
    # what is kept for a backward: by one kernel, and A_qk and A_inv by two
    "kept": Call(PAIR, dict(T=390)),
    "kept, shares": Call(Form(2, 4), CUT),
    "kept by four": Call(FOUR, dict(T=650)),
    "products": Call(TWO_KERNELS, dict(lengths=(60, 70), **SMALL)),
    # a backward that makes all of it again
    "gradients": Call(TWO_KERNELS, dict(T=150)),
    "gradients, packed": Call(TWO_KERNELS, dict(padding=70, HV=2, **RAGGED)),
    "gradients, 64 channels": Call(TWO_KERNELS, dict(T=150, **SMALL)),
    "gradients, softplus": Call(TWO_KERNELS, dict(T=150, gate="softplus", regime="fast")),
    "gradients, given decays": Call(
        TWO_KERNELS, dict(T=70, gate="given", beta="given", l2norm=False, saturated=True)
    ),
    "gradients, one grid": Call(REVERSE, dict(T=150, HV=2)),
    "gradients, float32": Call(TWO_KERNELS, dict(T=70, gate="softplus", **FLOAT32)),
    "gradients, one gate per head": Call(TWO_KERNELS, dict(T=150, gate_per_head=True, **SMALL)),
}

FAULTS = faults(name="{case}: {says}", files={"common/cute/teams": {
    "the inverse begins before A_kk is there": (
        "two kernels", "race-write-read", "        FIRST_FOUR.sync()", "        pass"
    ),
}, "sm90/bwd/grads": {
    "G is read before it is there": ("gradients", "race-write-read", f"self.warps.sync(){54 * SPACE}# G is there"),
    "the product does not see G": (
        "gradients", "proxy", 'first + n)\n        cute.arch.fence_proxy("async.shared", space="cta")', "first + n)"
    ),
    "values are replaced while a product reads them": ("gradients", "deadlock", *initialises("values_empty", 1)),
    "rows are given back with a row's gradient missing": (
        "gradients", "race-write-read", *initialises("rows_done", "self.c.math_warps - 1")
    ),
    "G1 stands where G2 should": (
        "gradients, 64 channels", "wrong answer", "self.store_G(s, G[n], first + n)", "self.store_G(s, G[0], first + n)"
    ),
    "what a block passes on does not decay": (
        "gradients", "wrong answer", "flat[2][8 * b + j] * back[j // 2 % 2]", "flat[2][8 * b + j] * x.one"
    ),
}, "common/cute/grads/queue": faults_of_the_queue("gradients, one grid", "race-write-read"), "sm90/bwd/reverse": {
    "PUBLISH is told of dh before memory has it": (
        "gradients, one grid", "race-write-read", "wait_group(0)", "wait_group(0, read=True)", 2
    ),
    "dh comes over a tile that is still to be read": (
        "gradients, one grid", "race-read-write", "cute.arch.mbarrier_wait(s.full + following, its_phase)", "pass", 2
    ),
    "values come where a walk still reads": (
        "gradients, one grid", "race-read-write or race-write-write", "cute.arch.sync_threads()\n\n", "pass\n\n", 2
    ),
}, "sm90/bwd/walk": {
    "dv adds to dh": ("gradients", "wrong answer", "words[w] ^ Uint32(0x80008000)", "words[w]"),
    "dh does not decay": ("gradients", "wrong answer", "        self.state.decay(S, tile)\n", ""),
    "dh is sent before all have put theirs": (
        "gradients", "race-write-read", f"self.state.meet(){46 * SPACE}# dh is", "pass  # dh is"
    ),
}, "sm90/fwd/chain": {
    "a stage is handed back before all have read it": (
        "two kernels", "deadlock", *initialises("empty", 1, "c.pipelines")
    ),
    "o goes to the rows of the chunk after": (
        "two kernels", "wrong answer", "rows_of_r, thread_place, i - 1)", "rows_of_r, thread_place, i)"
    ),
}, "sm90/fwd/fused": {
    "TB leaves before it is there": (
        "pair", "proxy", 'cute.arch.fence_proxy("async.shared", space="cta")                     # TB is in the tile'
    ),
    "copies do not see kE": (
        "any_gate", "proxy",
        'cute.arch.fence_proxy("async.shared", space="cta")                     # TB is in the tile', "pass  #"
    ),
    "a CTA is gone before the neighbour is done": (
        "pair", "peer-exited", "        if cutlass.const_expr(self.c.ctas > 1):\n            self.meet()\n", ""
    ),
    "the neighbour's barrier is not there yet": (
        "pair", "race-write-read", "self.meet()\n        warp =", "cute.arch.sync_threads()\n        warp ="
    ),
    "copies are not told of the mbarriers": ("pair", "mbarrier-fence", "cute.arch.mbarrier_init_fence()"),
    "a stage is handed back before both CTAs have read it": ("pair", "race-write-read", *initialises("empty", 4)),
    "a tile is overwritten before both CTAs have read it": ("four", "race-read-write", *initialises("empty", 1), 2),
    "credit comes before the stage was read": ("four", "race-read-write", *initialises("read", 1), 2),
    "CHAIN does not wait for all of v": ("four", "mbarrier", *initialises("full", 1)),
    "the one that does not walk waits for a CHAIN of its own": (
        "one_walks", "deadlock", *initialises("empty", "4 * self.c.ctas")
    ),
    "a share is read before it is there": (
        "shares", "race-read-write",
        "self.producer.share.publish(x, s.share, cluster, clusters)\n        self.meet()\n",
        "self.producer.share.publish(x, s.share, cluster, clusters)\n"
    ),
    "stages begin at 0 again": (
        "shares", "deadlock", "self.make(x, ring, work, begin, tokens, head, piece.number, before)",
        "self.make(x, ring, work, begin, tokens, head, piece.number, 0)"
    ),
    "mbarriers are not there yet, alone": (
        "alone", "race-read-write", "    cute.arch.sync_threads()\n        else:", "    pass\n        else:", 1
    ),
    "the CTA that walks is gone before the other is done": (
        "one_walks", "peer-exited", "        if cutlass.const_expr(self.c.ctas > 1):\n            self.meet()\n", ""
    ),
    "behind the decays of K = 64 nothing was ever written": (
        "K_64", "uninitialised", "                    store(behind, [Float32(0.0)] * 2)\n", "                    pass\n"
    ),
    "states of a walk that a share cut are counted from the cut": (
        "states", "wrong states", "number = kept.state + (kept.skipped + i) // self.c.every",
        "number = kept.state + i // self.c.every"
    ),
    "every state is one chunk late": (
        "states", "wrong states", "if kept.skipped + i & self.c.every - 1 == 0:", "if kept.skipped + i & 1 == 1:"
    ),
    "heads lie the other way round": (
        "states", "wrong states", "place = Int64(number) * x.HV + head",
        "place = Int64(number) * x.HV + x.HV - 1 - head"
    ),
    "nobody waits for the copy of the last tile": (
        "kept", "copy-at-exit", "cute.arch.cp_async_bulk_wait_group(0, read=True)"
    ),
    "b of a chunk comes where b of the last one is read": (
        "kept", "race-read-write", "work.b + (turn & 1) * C", "work.b", 2
    ),
    "a state that a share begins with counts from there": (
        "kept, shares", "wrong answer", "if kept.skipped + i & self.c.every - 1 == 0:", "if i & self.c.every - 1 == 0:"
    ),
    "tiles of a share lie where those of the walk begin": (
        "kept, shares", "wrong answer", "tokens, head, piece.number, before)",
        "tokens, head, piece.number - piece.skipped, before)"
    ),
}, "sm90/fwd/pairs": {
    "rows of A_kk without b": ("products", "wrong answer", "of_row = b[i // 2 % 2]", "of_row = Float32(1.0)"),
    "the other half's A_inv is not waited for": (
        "products", "race-read-write", "arrive_when_copied(s.full)", "cute.arch.mbarrier_arrive(s.full)"
    ),
    "A_kk is read before it is there": ("products", "race-write-read", "A_KK_THERE.sync()"),
    "rows of the next sequence are written": ("products", "race-write-read", "if row + 8 * r < tokens:", "if row < C:"),
}, "sm90/fwd/prepare": {
    "nothing clears the right of the diagonal": ("products", "wrong answer", "if number & 1 == 0:", "if number < 0:"),
    "kg of any gate lacks b": (
        "gradients, softplus", "wrong answer", "of_k = load(s.b + rows.first_row(), GROUP_ROWS)"
    ),
}, "sm90/fwd/stream": {
    "tiles are read before they are there": ("stream", "race-read-write", "while ready == 0:", "while ready == 2:", 2),
    "the flag is set before the copy has ended": (
        "stream", "race-write-read", "            cute.arch.cp_async_bulk_wait_group(0)\n", "", 2
    ),
    "the next step is made before the copy has read this one": (
        "stream", "race-read-write", "cute.arch.mbarrier_wait(field_at(work.base, self.struct.taken), turn & 1 ^ 1)",
        "pass", 2
    ),
    "pairs of the next chunk come before INVERSE has read those of this one": (
        "stream", "race-read-write",
        "cute.arch.mbarrier_wait(field_at(work.base, self.struct.solved), before & 1 ^ 1)\n"
        "        if",
        "if", 2
    ),
    "chunks are joined before their inverses are there": (
        "stream", "race-write-read",
        "            cute.arch.mbarrier_wait(solved, before & 1 ^ 1)\n            self.steps.finish",
        "            self.steps.finish"
    ),
    "a step of one chunk is joined before its inverse is there": (
        "stream", "race-write-read", "                    cute.arch.mbarrier_wait(solved, before & 1 ^ 1)\n", ""
    ),
    "rows leave before they are scaled": ("stream", "race-write-read", "            SCALED.sync(group)\n", ""),
    "zeros come before all have read TB_b": (
        "stream", "race-read-write",
        "            JOINED.sync(group)\n            self.steps.complete(a, a + self.tile.bytes)\n",
        "            self.steps.complete(a, a + self.tile.bytes)\n            JOINED.sync(group)\n"
    ),
    "rows of a second chunk are requested to where the first one has its own": (
        "stream", "race-write-write", "self.request(x, self.of_half(work, 1), item, 1)",
        "self.request(x, work, item, 1)"
    ),
    "the step leaves before it is whole": ("stream", "race-write-read", "            JOINED.sync(group)\n", ""),
    "a stage is overwritten before CHAIN has read it": (
        "stream", "race-write-write", "cute.arch.mbarrier_wait(read + stage, phase ^ 1)\n            with", "with", 2
    ),
    "o is overwritten before STORE has read it": (
        "stream", "race-read-write",
        'cute.arch.mbarrier_wait(self.field(shared, "taken") + place, phase_of(i, OUTPUTS) ^ 1)', "pass", 2
    ),
    "STORE reads o before it is there": (
        "stream", "uninitialised", "cute.arch.mbarrier_wait(written + place, phase_of(i, OUTPUTS))"
    ),
    "o is put where STORE reads it before its product is done": (
        "stream", "register-in-flight", "wait_group(1)\n            self.hand_back",
        "wait_group(2)\n            self.hand_back"
    ),
    "all segments begin with the state that enters the sequence": (
        "stream_of_segments", "wrong answer", "if walk.segment == 0:", "if walk.segment >= 0:"
    ),
    "M begins with nothing": ("stream_of_segments", "wrong answer", "self.state.identity(S, walk.strip)"),
    "M is not transposed": (
        "stream_of_segments", "wrong answer", "walk.strip, c.K, True, S)", "walk.strip, c.K, False, S)"
    ),
    "zeros of M's walk are read before they are there": (
        "stream_of_segments", "race-write-read", "                cute.arch.mbarrier_arrive(full + stage)\n",
        "                arrive_when_copied(full + stage)\n"
    ),
    "a segment's steps are elsewhere": (
        "stream_of_segments", "out-of-bounds", "step + skipped // TOKENS", "step + skipped // C"
    ),
}, "sm90/parts/chunk": {
    "what blocks have overwrites an operand": (
        "any_gate", "race-read-write", "self.team.wait_for_product()", "pass", 2
    ),
    "kE overwrites an operand": (
        "any_gate", "race-read-write", "            else:\n                self.team.meet()", "", 2
    ),
    "b lies on rows": ("gradients", "wrong answer", "thread(), self.c.b_on_keys, number)", "thread(), False, number)"),
}, "sm90/parts/handover": {
    "the neighbour's group does not hear that a stage is free": (
        "pair", "deadlock", ", peer_cta_rank_in_cluster=stage & 1", ""
    ),
    "a lane hands a stage back before the others have read it": (
        "pair", "race-lanes",
        "cute.arch.sync_warp()\n"
        "        with cute.arch.elect_one():\n"
        "            if self.c.ctas == 1",
        "with cute.arch.elect_one():\n            if self.c.ctas == 1"
    ),
    "a tile leaves before its stage is free": (
        "four", "race-read-write", "cute.arch.mbarrier_wait(ring.credit + group, turn & 1)", "pass", 2
    ),
    "RELAY tells the wrong CTA": (
        "four", "deadlock", "credit + maker.group, peer_cta_rank_in_cluster=maker.rank",
        "credit + maker.group, peer_cta_rank_in_cluster=maker.rank & 1"
    ),
    "pairs of the next chunk come before INVERSE has read those of this one": (
        "four", "race-read-write", "cute.arch.mbarrier_wait(ring.solved + group, turn & 1 ^ 1)", "pass", 2
    ),
    "a tile is made before CHAIN has read the last one, alone": (
        "alone", "race-read-write", "cute.arch.mbarrier_wait(empty, turn & 1 ^ 1)"
    ),
    "the CTA that walks is not told of the other's tiles": (
        "one_walks", "deadlock", "            else:\n                self.copy(tile, full, Int32(0))\n", ""
    ),
    "a tile is overwritten before memory has it": (
        "kept", "race-read-write", "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n", ""
    ),
    "a tile is overwritten before memory has it, in fours": (
        "kept by four", "race-read-write", "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n", ""
    ),
}, "sm90/parts/making": {
    "INVERSE reads pairs before they are there": (
        "four", "race-write-read", "(WHOLE_GROUP_INVERSE if self.helped else WHOLE_GROUP).sync(group)", "pass"
    ),
    "operands of the state overwrite those that CHAIN reads": (
        "pair", "race-read-write", "        acquire()\n        for", "        for"
    ),
    "rows are requested before the product has read its operands": (
        "four", "race-read-write", "def operands_were_read(self):\n        self.team.meet()",
        "def operands_were_read(self):\n        pass", 2
    ),
    "rows of an inverter are read before they are there": (
        "pair", "race-write-read", "cute.arch.cp_async_wait_group(0)", "pass", 2
    ),
    "rows of an inverter are requested to where the product of the other reads": (
        "pair", "race-read-write", "row * self.team.warp()", "row * (self.team.warp() + 1)"
    ),
    "rate and dt_bias are read before they are there": (
        "pair", "race-write-read", f"self.team.meet(){55 * SPACE}# rate", "pass  #"
    ),
    "the tile leaves before kE is there": (
        "any_gate", "race-write-read", "(WHOLE_GROUP_INVERSE if self.helped else WHOLE_GROUP).sync(group)", "pass"
    ),
    "dt_bias is read before it is there": (
        "any_gate", "race-write-read", f"self.team.meet(){51 * SPACE}# dt_bias", "pass  #", 2
    ),
    "rows are read before they are there": (
        "four", "race-write-write", "cute.arch.cp_async_wait_group(0)", "cute.arch.cp_async_wait_group(1)"
    ),
}, "common/cute/share": {
    "a state is read before it is there": (
        "shares", "race-write-read", "while crossed == 0:\n", "while crossed == 7:\n"
    ),
    "one thread says for all that the state is there": (
        "shares", "race-write-read", f"team.sync(){60 * SPACE}# all have stored"
    ),
    "the flag orders nothing": ("shares", "race-write-read", 'sem="release"', 'sem="relaxed"'),
    "the flag is read without an order": ("shares", "race-write-read", 'sem="acquire"', 'sem="relaxed"'),
    "threads do not wait for the one that waits": (
        "shares", "race-write-read", f"team.sync(){60 * SPACE}# all may read"
    ),
    "states of V = 64 cross where those of 128 would": (
        "alone, shares", "out-of-bounds or race-write-write", "x.edges + (Int64(cluster * self.strips + rank)",
        "x.edges + (Int64(cluster * 2 + rank)"
    ),
}, "sm90/parts/share": {
    "a piece's chunks end where the walk ends": ("shares", "wrong answer", "cutlass.min(left, within)", "left"),
    "shares are empty between two parts of a walk": (
        "few chunks", "livelock", "if all_slots < clusters:", "if all_slots < 0:"
    ),
}, "sm90/parts/state": {
    "a state that grows where it should decay": (
        "two kernels", "wrong answer", "+ e] * d[e // 4 * 2 + e % 2]", "+ e] / d[e // 4 * 2 + e % 2]"
    ),
    "columns of a state are read before all lanes have put theirs": (
        "kept", "race-lanes", f"cute.arch.sync_warp(){46 * SPACE}# 16 columns are there"
    ),
    "columns of a state are put before all lanes have read the last": (
        "kept", "race-lanes", f"cute.arch.sync_warp(){42 * SPACE}# those before were read"
    ),
    "the sender does not see dh": (
        "gradients", "proxy",
        "lane_column, operand, half)\n"
        '        cute.arch.fence_proxy("async.shared", space="cta")',
        "lane_column, operand, half)"
    ),
}, "sm90/parts/steps": {
    "A2 is made where KT is": (
        "stream", "race-write-write", "self.put_rows(field_at(a, self.tile.TB), rows, A2)",
        "self.put_rows(field_at(a, self.tile.KG), rows, A2)"
    ),
    "parts of a step are read before all have made theirs": (
        "stream", "race-write-read", f"        self.team.meet(){55 * SPACE}# KT_a is there", "        # KT_a is there"
    ),
    "kE is overwritten before all have read it": (
        "stream", "race-read-write", f"        self.team.meet(){55 * SPACE}# G is there", "        # G is there", 2
    ),
}, "sm90/parts/teams": {
    "groups meet at one barrier": (
        "pair", "race-write-read", "        GROUP.sync(self.number())", "        GROUP.sync()"
    ),
}, "sm90/parts/values": {
    "rows of v are overwritten before they are read": (
        "pair", "race-read-write", "i + RING - 1, tokens, walked)     # where all", "i + RING, tokens, walked)  #"
    ),
    "rows of v are read before they are there": (
        "pair", "race-write-read", "cp_async_wait_group(behind)", "cp_async_wait_group(RING)"
    ),
    "rows of o are stored before they are there": (
        "pair", "race-write-read", f"CHAIN.sync(){55 * SPACE}# o of the last", "pass  #", 2
    ),
    "v is overwritten before CHAIN has read it": (
        "four", "race-write-write", "cute.arch.mbarrier_wait(read + stage, phase_of(c, RING) ^ 1)", "pass", 2
    ),
    "LOAD does not say that v is there": ("four", "deadlock", "arrive_when_copied(ring.full + stage)"),
    "STORE reads o before it is there": (
        "four", "uninitialised", "cute.arch.mbarrier_wait(ring.written + place, phase_of(c, OUTPUTS))"
    ),
    "o is overwritten before STORE has read it": (
        "four", "race-read-write",
        "cute.arch.mbarrier_wait(ring.taken + stage_of(c, OUTPUTS), phase_of(c, OUTPUTS) ^ 1)", "pass", 2
    ),
    "v comes where r still is": (
        "kept", "race-read-write",
        "            if i > 0:\n"
        "                self.store(x, s, thread_place, i - 1, walked)\n"
        "            self.request(x, s, thread_place, i + RING - 1, tokens, walked)\n"
        "        else",
        "            self.request(x, s, thread_place, i + RING - 1, tokens, walked)\n"
        "            if i > 0:\n"
        "                self.store(x, s, thread_place, i - 1, walked)\n"
        "        else"
    ),
    "LOAD looks at who has read v, not r": (
        "kept by four", "race-read-write", "ring.stored if cutlass.const_expr(self.c.has_r) else ring.read",
        "ring.read", 2
    ),
}, "common/cute/grads/gate": {
    "dt_bias has no share of dA_log": (
        "gradients", "wrong answer", "return of_A + gates.bias[r] * of_bias if", "return of_A if"
    ),
    "decays have no floor": ("gradients, given decays", "wrong answer", "fast.at_least(found, FLOOR)", "found"),
    "a softplus gate has the slope of none": ("gradients, softplus", "wrong answer", "slope = gain * sigmoid"),
    "a float32 gate reads no token but the first": (
        "gradients, float32", "wrong answer",
        "fast.row(first, last_token(self.token(b, t), tokens), x.HV * Int32(4 * self.c.K))",
        "fast.row(first, Int32(0), x.HV * Int32(4 * self.c.K))"
    ),
    "all tokens have the logit of the first": (
        "gradients, one gate per head", "wrong answer", "x.HV * Int32(x.g.dtype.width // 8))", "Int32(0))"
    ),
    "every channel has a bias of its own": (
        "gradients, one gate per head", "out-of-bounds or wrong answer",
        "if self.c.bias and self.c.per_head:", "if False:"
    ),
}, "common/cute/training": {
    "a place is overwritten before all of LOAD have read it": (
        "gradients, one grid", "race-read-write", "PLACES = 4", "PLACES = 2"
    ),
}, "common/cute/grads/load": {
    "tokens past the end have a gate": ("gradients", "wrong answer", "if tokens < TOKENS:", "if tokens < 0:"),
    "tokens of no sequence keep what was in memory": (
        "gradients, packed", "wrong answer", "self.clear(x, begin, -tokens, head)", "pass"
    ),
    "tokens of 64 channels are as far apart as those of 128": (
        "gradients, 64 channels", "race-write-write", "self.apart = LOADERS // self.pieces", "self.apart = 8"
    ),
}, "common/cute/grads/rows": {
    "partial sums overwrite G that is read": (
        "gradients", "race-read-write", f"self.warps.sync(){54 * SPACE}# G was read"
    ),
    "a token's own dv counts": ("gradients", "wrong answer", "STEP * part - n - EACH", "STEP * part - EACH"),
    "later blocks of tokens count": (
        "gradients", "wrong answer", "(diagonal[w] | before) & some for", "(diagonal[w] | before) for"
    ),
    "no gate learns of the state that leaves": (
        "gradients", "wrong answer", "found + factor * through_state[r]", "found"
    ),
    "dq and dk keep what points along q and k": ("gradients", "wrong answer", "found[j] = found[j] - y[j] * along[t]"),
    "a block meets the tokens of its neighbour": (
        "gradients, softplus", "wrong answer", "[word, Uint32(0)] if block", "[word, word] if block"
    ),
    "decays of a block are counted from its end": (
        "gradients, softplus", "wrong answer", "before = -of_lane if a & 1 == 0 else Float32(0.0)", "before = -of_lane"
    ),
    "the lanes of a step's second block decay as those of its first": (
        "gradients, softplus", "wrong answer", "return values[0] if self.lane() & 2 == 0 else values[1]",
        "return values[0]"
    ),
    "dg has not the sums of all warps": (
        "gradients, one gate per head", "wrong answer", "in cutlass.range_constexpr(self.c.math_warps):",
        "in cutlass.range_constexpr(self.c.math_warps - 1):"
    ),
    "dg has one half of a warp's channels": (
        "gradients, one gate per head", "wrong answer", "total = dg[at_element(0, 0, t)] + dg[at_element(0, 1, t)]",
        "total = dg[at_element(0, 0, t)]"
    ),
    "sums of warps are read before they are there": (
        "gradients, one gate per head", "race-write-read", f"self.warps.sync(){54 * SPACE}# projections are there"
    ),
    "warps write to one place": (
        "gradients, one gate per head", "race-write-write", "s.dg_of_warps + self.warp() * TOKENS", "s.dg_of_warps + 0"
    ),
    "dbeta is times b": (
        "gradients, given decays", "wrong answer", "db = (over_K if b == SMALLEST_B else b_db) * fast.reciprocal(b)",
        "db = b_db"
    ),
}, "common/cute/inverse": {
    "A_inv is kept with b": (
        "products", "wrong answer", "self.put_whole(whole, column, row, values)",
        "self.put_whole(whole, column, row, [x * self.b_of(b, column) for x in values])"
    ),
    "a half begins before its rows of A_kk are there": (
        "pair", "race-lanes", f"cute.arch.sync_warp(){50 * SPACE}# rows of A_kk are there", "pass"
    ),
    "a half is merged before its blocks are there": (
        "pair", "race-lanes", f"cute.arch.sync_warp(){50 * SPACE}# columns of its blocks are there", "pass"
    ),
    "halves are joined before the second one is there": (
        "pair", "race-lanes", f"cute.arch.sync_warp(){50 * SPACE}# columns of Y are there", "pass"
    ),
    "halves are joined before the first one is there": ("pair", "race-write-read", "        meet() ", "        # "),
    "a half has the b of the other one": (
        "pair", "wrong answer", "self.b_of(b, column), self.b_of(b, row)", "self.b_of(b, lane), self.b_of(b, row)"
    ),
}, "common/cute/join": {
    "the last rows of o are left": (
        "stream_of_segments", "wrong answer", "if lane_rows[r] < rows:", "if lane_rows[r] < rows - 1:"
    ),
    "channels of edge lie as they are counted": (
        "stream_of_segments", "wrong answer", "row = place_of_channel(channel)", "row = channel"
    ),
    "edge is read before all of it is there": (
        "stream_of_segments", "race-write-read", "            cute.arch.sync_threads()\n", ""
    ),
}, "common/cute/entry": {
    "the kernel ahead is not waited for": ("pair, packed", "race-grids", "cute.arch.griddepcontrol_wait()"),
}, "common/cute/pairs": {
    "a token does not read what it wrote": (
        "two kernels", "wrong answer", "if column <= row else", "if column < row else"
    ),
    "the product does not see the operands": (
        "two kernels", "proxy",
        'cute.arch.fence_proxy("async.shared", space="cta")\n'
        "        self.team.meet_for_product()   ",
        "self.team.meet_for_product()"
    ),
    "kg lacks b": ("gradients", "wrong answer", "kb = self.gate.times(kb, of_k[r])"),
}, "common/cute/rows": {
    "the sum over a first warp is read before it is there": (
        "any_gate", "race-write-read", f"self.team.meet(){55 * SPACE}# the sums over first", "pass  #", 2
    ),
}, "common/cute/segments": {
    "a token of none is left as it is": ("pair, packed", "wrong answer", "first, x.T,", "first, x.T - 1,"),
    "a segment's tokens are another's": (
        "stream_of_segments", "wrong answer", "return begin + first,", "return begin,"
    ),
}, "common/cute/shares": {
    "sums of each warp are read before they are there": (
        "gradients, one gate per head", "race-write-read or uninitialised",
        f"cute.arch.sync_threads(){43 * SPACE}# sums of each warp are there"
    ),
    "shares that lie where h was are looked for beside each other": (
        "gradients, one grid", "wrong answer", "row * self.c.pitch", "row * self.c.K"
    ),
    "the bias of a head has the sum of its first warp": (
        "gradients, one gate per head", "wrong answer", "self.sum_of_warps(s.of_bias, 32)", "s.of_bias[0]"
    ),
}, "common/cute/tables": {
    "a chunk does not know its number": (
        "products", "wrong answer", "length - j * rows, rows), j)", "length - j * rows, rows), 0)"
    ),
}})
