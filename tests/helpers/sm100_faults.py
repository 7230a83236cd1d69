"""Faults planted into the Blackwell kernels, by the file of kda/backends that each stands in."""

from kernel_faults import SPACE, faults, faults_of_the_queue, initialises

RESULTS = "            if i > 0:\n                self.store_results(x, shared, who, i - 1, chunk - 1, warp, thread)\n"
ARRIVES = "            umma.fence_before_thread_sync()\n            X_THERE.arrive()\n"
LATE_O = f"{RESULTS}{ARRIVES}", f"{ARRIVES}{RESULTS}"

FORWARD = faults({"common/cute/rows": {
    "the product does not see the operands": (
        "long", "proxy", f'space="cta")\n            self.team.meet_for_product(){39 * SPACE}# operands of',
        'space="cta") if False else 0\n            self.team.meet_for_product()  # operands of'
    ),
    "sums of groups are read before all are there": (
        "long", "race-write-read", f"self.team.meet(){51 * SPACE}# the sums of each", "pass  # each"
    ),
    "a row of no token decays": ("tail", "wrong answer", 'Float32(float("inf"))', "Float32(2.0)"),
    "operands across blocks are written over those within": (
        "any gate", "race-read-write", "self.tensor_core.wait_until_read(0)"
    ),
    "kE and qg are written over operands across blocks": ("any gate", "race-read-write", "self.tensor_core.wait(1)"),
    "the second half of a block does not know what the first one lost": (
        "fast", "wrong answer", "self.load_channels(sums, of_block)]", "[top] * self.pairs]"
    ),
    "a block's second half looks before the first one has summed": (
        "any gate", "race-write-read", f"self.team.meet(){55 * SPACE}# the sums over first", "# first"
    ),
}, "sm100/fwd/fused": {
    "a stage is handed back before both CTAs have read it": (
        "long", "race-write-read", *initialises("empty", 4, "self.c.group_pipelines")
    ),
    "the neighbour is not told of the mbarriers": ("long", "mbarrier-fence", "cute.arch.mbarrier_init_fence()"),
    "tensor memory is not given back": ("long", "tmem-leak", "            umma.free(TMEM)", "            pass"),
    "a CTA is gone before the neighbour is done": (
        "long", "peer-exited", "cute.arch.cluster_arrive()\n        cute.arch.cluster_wait()\n        if warp == 0:",
        "if warp == 0:"
    ),
}, "sm100/fwd/chain": {
    "the neighbour's group does not hear that a stage is free": (
        "long", "deadlock", "group.empty), chunk & 1)", "group.empty), cute.arch.block_idx()[0] % CTAS)"
    ),
    "-v of the next chunk is made over o that was not read": ("long", "race-read-write", *LATE_O),
    "rows of v are read before they are there": (
        "long", "race-write-read", "cp_async_wait_group(1)", "cp_async_wait_group(3)"
    ),
    "X is read before both warps have written it": ("long", "race-write-read", "X_THERE.sync()"),
    "what is added is read before it is there": ("long", "race-write-read", "wait(barriers.added, parity)"),
    "o is read before all of it is there": ("long", "race-write-read", "wait(barriers.o_done, chunk & 1)"),
    "of any gate, S is read before all that is added is there": (
        "any gate", "race-write-read", "wait(barriers.o_done, chunk & 1)"
    ),
    "the next tile is read before it is there": (
        "long", "race-write-read or uninitialised",
        "wait(barriers.full + stage_of(chunk + 1, RING), phase_of(chunk + 1, RING))"
    ),
    "a piece of the state is used before it is there": (
        "long", "tcgen05-wait", "words = umma.arrived(requested)", "words = requested"
    ),
    "the state is read before all of it is rounded": (
        "long", "race-write-read", "STATE_ROUNDED.sync()\n        if warp == 0:", "if warp == 0:"
    ),
    "the state's products do not follow its stores": (
        "long", "tcgen05-fence", "umma.fence_before_thread_sync()\n            X_THERE.arrive()", "X_THERE.arrive()"
    ),
    "X is read in no order with its products": (
        "long", "tcgen05-fence", "wait(barriers.out, parity)\n            umma.fence_after_thread_sync()",
        "wait(barriers.out, parity)"
    ),
    "2^gc_last S is not there yet when more is added": (
        "long", "race-write-read", "        umma.wait_for_stores()\n\n    def kept", "\n    def kept"
    ),
    "what is added to the state is taken from it": (
        "long", "wrong answer", "negated=minus)         # -KT", "negated=False)         # -KT"
    ),
    "[-X; o] of both parities in one place": (
        "long", "race-read-write", "return self.c.tmem.out + (chunk & 1) * self.c.columns", "return self.c.tmem.out"
    ),
    "half of a row of the state is the other half": (
        "64", "wrong answer", "return (thread >> 4 & 1) * self.own_columns if",
        "return (thread >> 4 & 1 ^ 1) * self.own_columns if"
    ),
}, "sm100/fwd/prepare": {
    "a token of none is left as it is": ("packed", "wrong answer", "warp, x.T,", "warp, x.T - 1,"),
    "A2 is made before TB is there": (
        "long", "race-read-write", f"self.team.meet_first_four(){44 * SPACE}# TB", "# TB"
    ),
    "KT is made before all of kg is there": (
        "long", "race-write-read", "needs_kg = self.team.warp() == 0 and", "needs_kg = self.team.warp() < 0 and"
    ),
    "kE and qg leave before all of them are there": (
        "long", "race-write-read", "meet_for_tile(self.team.warp() == SENDER or", "meet_for_tile(False or"
    ),
    "a tile is handed over before all of KT is there": (
        "long", "race-write-read", f"self.team.meet_last_six(){42 * SPACE}# KT", "pass  # KT"
    ),
    "a tile is handed over before A2 is there": (
        "long", "race-write-read",
        "            self.A_qk_times_TB(acc, TA)\n"
        '            cute.arch.fence_proxy("async.shared", space="cta")\n'
        "            self.team.arrive_for_last_six()\n",
        "            self.team.arrive_for_last_six()\n            self.A_qk_times_TB(acc, TA)\n"
        '            cute.arch.fence_proxy("async.shared", space="cta")\n'
    ),
    "a piece is another before all are done with it": (
        "walk", "race-read-write", f"self.team.meet(){55 * SPACE}# all have", "# all have"
    ),
    "a piece is read before it is there": (
        "walk", "uninitialised", f"self.team.meet(){55 * SPACE}# the item", "# the item"
    ),
    "dt_bias is that of the head before": (
        "heads", "wrong answer", "self.rows.store_bias(head_rows, ",
        "self.rows.store_bias(head_rows._replace(bias=x.dt_bias), "
    ),
    "a stage's phase is that of its sequence alone": (
        "walk", "race-write-read", "phase_of(before + chunk, RING)", "phase_of(chunk, RING)"
    ),
}, "common/cute/inverse": {
    "columns of 8 rows are read before all lanes have them": (
        "long", "race-lanes", f"cute.arch.sync_warp(){50 * SPACE}# columns of 8", "# columns of 8"
    ),
}, "common/cute/pairs": {
    "pairs across blocks count as those across wider ones": (
        "any gate", "wrong answer", "apart >> number - 1 == 1 if", "apart >> number == 1 if"
    ),
}, "sm100/parts/umma": {
    "rows of 64 bytes are read as rows of 128": ("64", "wrong answer", "row = min(2 * elements, ROW)", "row = ROW"),
}})

SHARES = faults({"common/cute/share": {
    "a state is read before it is there": (
        "shares", "race-write-read or uninitialised", "while crossed == 0:\n", "while crossed == 7:\n"
    ),
    "one thread says for all that the state is there": (
        "shares", "race-write-read", f"team.sync(){60 * SPACE}# all have stored"
    ),
    "the flag orders nothing": ("shares", "race-write-read", 'sem="release"', 'sem="relaxed"'),
    "the flag is read without an order": ("shares", "race-write-read", 'sem="acquire"', 'sem="relaxed"'),
    "threads do not wait for the one that waits": (
        "shares", "race-write-read or uninitialised", f"team.sync(){60 * SPACE}# all may read"
    ),
    "what another cluster goes on with is walked last": (
        "whole", "deadlock", "return limit if limit < end else slot", "return slot"
    ),
}, "sm100/fwd/chain": {
    "a cluster waits for the one behind": (
        "shares", "deadlock", "self.enter_share(x, self.share.cluster(shared) - 1,",
        "self.enter_share(x, self.share.cluster(shared) + 1,"
    ),
    "the next piece is found while the one before is read": (
        "shares", "race-read-write", f"STATE_ROUNDED.sync(){47 * SPACE}# all are done", "pass  # all are done"
    ),
    "the next piece is read before it is found": (
        "shares", "race-write-read", f"STATE_ROUNDED.sync(){47 * SPACE}# the next piece", "pass  # the next piece"
    ),
    "rows of the next piece are those of this one": (
        "shares", "wrong answer", "who ^ Int32(ends)", "who"
    ),
    "states of a walk that a share cut are counted from the cut": (
        "states", "wrong answer", "until = skipped * x.every - piece.skipped", "until = Int32(0)"
    ),
    "states of a piece lie where those of its walk begin": (
        "states", "wrong answer", "locate_walk(c, x, piece.walk).n) + skipped", "locate_walk(c, x, piece.walk).n)"
    ),
}, "sm100/parts/walks": {
    "a piece's chunks end where the walk ends": ("shares", "wrong answer", "cutlass.min(left, within)", "left"),
    "shares are empty between two parts of a walk": (
        "fewer chunks than clusters", "livelock", "cutlass.min(Int64(clusters), all_slots)", "Int64(clusters)"
    ),
    "a piece is looked at before all lanes have it": (
        "shares", "race-lanes", f"cute.arch.sync_warp(){50 * SPACE}# all may", "# all may"
    ),
    "a piece is replaced while lanes look at it": (
        "shares", "race-lanes", f"cute.arch.sync_warp(){50 * SPACE}# all lanes", "# all lanes"
    ),
    "a sequence without tokens is left out": (
        "few tokens", "wrong answer", "item = found + cluster_count(self.c)", "item = found + 2 * cluster_count(self.c)"
    ),
    "every cluster begins with the same walk without tokens": (
        "packed", "wrong answer", "put_nothing(shared, slot, cluster)", "put_nothing(shared, slot, cluster * 0)"
    ),
}})

SEGMENTS = faults({"sm100/fwd/chain": {
    "a first segment begins with nothing": ("long", "wrong answer", "if segment == 0:", "if segment < 0:"),
    "all segments begin with the state that enters the sequence": (
        "long", "wrong answer", "if segment == 0:", "if segment >= 0:"
    ),
    "M is not transposed": ("long", "wrong answer", "rank, thread, True)", "rank, thread, False)"),
    "the second walk has v": (
        "long", "wrong answer", "v, o = Int64(0), x.response", "v, o = v, x.response"
    ),
    "second walks write o": ("long", "wrong answer", "x.response.toint() + skipped", "o"),
}, "common/cute/join": {
    "the last rows of o are left": ("long", "wrong answer", "if lane_rows[r] < rows:", "if lane_rows[r] < rows - 1:"),
    "the state is read before all of it is there": (
        "long", "race-write-read", "            cute.arch.sync_threads()\n", ""
    ),
}, "common/cute/compose": {
    "the segment before is left out": ("long", "wrong answer", "begin + 1, end + 1", "begin + 1, end"),
}, "common/cute/segments": {
    "a segment's tokens are another's": ("long", "wrong answer", "return begin + first,", "return begin,"),
}})

RECORDED = faults({"sm100/fwd/operands": {
    "T' is read before it is there": ("operands", "race-read-write", f"self.team.meet(){55 * SPACE}# T'", "# T'"),
    "a tile leaves before all of it is there": (
        "operands", "race-write-read", f"self.team.meet(){55 * SPACE}# the tile", "# the tile"
    ),
    "a tile leaves as the copy does not see it": (
        "operands", "proxy", 'cute.arch.fence_proxy("async.shared", space="cta")'
    ),
    "the ones of T' stay": ("operands", "wrong answer", ", strict=True", ""),
    "kE is not negated": ("operands", "wrong answer", ", negated_kE=True", ""),
    "T' has no ones where it is multiplied": (
        "operands", "wrong answer", "if cutlass.const_expr(m == step)", "if cutlass.const_expr(False)"
    ),
    "A_qk has no b": ("operands", "wrong answer", "x * of_keys[e] for", "x for"),
    "kE leaves before all of it is there": (
        "any gate", "race-write-read", f"self.team.meet(){51 * SPACE}# kE", "pass  # kE"
    ),
    "tensor memory is given back before pairs were read": (
        "operands", "tcgen05-fence", "umma.fence_before_thread_sync()"
    ),
    "tensor memory is given back before pairs by halving were read": (
        "any gate", "tcgen05-fence", "umma.fence_before_thread_sync()"
    ),
}, "sm100/parts/pairs": {
    "products across blocks in one place": (
        "any gate", "wrong answer", "return load_one(self.tmem) + number * C", "return load_one(self.tmem)"
    ),
    "tensor memory is taken to begin at column 0": (
        "operands", "tmem", "return load_one(self.tmem) + number * C", "return 0 * load_one(self.tmem) + number * C"
    ),
}, "sm100/fwd/prepare": {
    "a kept tile is overwritten before it was sent": (
        "one kernel", "race-read-write",
        "cute.arch.cp_async_bulk_wait_group(0, read=True)\n                    cute", "cute"
    ),
    "b is left out of kg": (
        "one kernel", "wrong answer", "head_rows.lower_bound, of_k, acq", "head_rows.lower_bound, None, acq"
    ),
    "tiles of a head are kept as another's": (
        "one kernel, packed", "race-write-write",
        "* x.HV + piece.head\n                tiles", "* x.HV\n                tiles"
    ),
}, "sm100/fwd/chain": {
    "pieces of a kept row stand in each other's place": ("one kernel", "wrong answer", "& 1 == 1\n", "& 1 == 0\n"),
    "states of odd chunks are kept": ("one kernel", "wrong answer", "who) + i) & 1 == 0:", "who) + i) & 1 == 1:"),
    "every second state of a piece is kept, not of its walk": (
        "shared", "wrong answer", "(self.share.skipped(shared, who) + i) & 1", "i & 1"
    ),
    "r is kept where o is": (
        "one kernel", "race-write-write", "Int32(FirstRow.R) if warp", "Int32(FirstRow.O) if warp"
    ),
}, "sm100/bwd/walk": {
    "dh is multiplied before all is rounded": ("back", "race-write-read", "IMAGE_THERE.sync()"),
    "dv is multiplied before all have it": ("back", "race-write-read", "ROWS_THERE.sync()"),
    "what is added to dh does not follow its stores": (
        "back", "tcgen05-fence", "umma.fence_before_thread_sync()\n            IMAGE_THERE", "IMAGE_THERE"
    ),
    "products do not see rows of do": ("back", "proxy", 'cute.arch.fence_proxy("async.shared", space="cta")'),
    "dv is read before it is there": ("back", "uninitialised", "cute.arch.mbarrier_wait(s.out, turn & 1)"),
    "dh is read before all is added": (
        "back", "race-write-read", "cute.arch.mbarrier_wait(s.added, turn & 1 ^ 1)\n            umma", "umma"
    ),
    "the last dh is not kept": ("back", "wrong answer", "(i & 1) == 1 or j == 0", "(i & 1) == 1"),
    "T' instead of A2": ("back", "wrong answer", "self.tile.TA.offset + A2)", "self.tile.TA.offset)"),
    "tensor memory is not given back": ("back", "tmem-leak", "umma.free(c.allocated, self.begin)"),
}, "sm100/parts/state": {
    "an image is written while it is copied": (
        "up", "race-read-write",
        "sent them, until images were read.\"\"\"\n        cute.arch.cp_async_bulk_wait_group(0, read=True)",
        'sent them, until images were read."""\n        pass'
    ),
    "a stage is filled before it was read": (
        "up", "race-read-write", "cute.arch.mbarrier_wait(s.empty + stage, phase ^ 1)"
    ),
    "S is not there yet when more is added": (
        "up", "race-write-read", "        umma.wait_for_stores()\n        cute", "        cute"
    ),
    "rows of v of another swizzle": ("up", "wrong answer", "(r & 7) * 16", "(r & 6) * 32 % 128"),
    "of 64 channels two threads have one quarter of a row": (
        "up, 64", "race-lanes", "of_warp + (thread >> 4 & 1) * self.own_columns if", "of_warp if"
    ),
    "of 64 channels tensor memory is taken to begin at column 0": (
        "up, 64", "tmem", "self.begin = umma.first_column(self.c, s)", "self.begin = 0"
    ),
    "of 64 channels half of the rows of dv are the other half's": (
        "back, 64", "wrong answer", " + (warp >> 2) * of_half", ""
    ),
}, "sm100/fwd/record": {
    "X is multiplied before all have it": ("up", "race-write-read", "ROWS_THERE.sync()"),
    "r and o are overwritten before they are read": (
        "up", "race-read-write", "cute.arch.mbarrier_wait(s.read + (i + 1 & 1), i + 1 >> 1 & 1 ^ 1)"
    ),
    "r and o are read before they are there": (
        "up", "uninitialised", "cute.arch.mbarrier_wait(s.done + (i & 1), i >> 1 & 1)"
    ),
    "r and o leave before all lanes have them": (
        "up", "race-lanes", f"cute.arch.sync_warp(){46 * SPACE}# the warp's columns are", "# are"
    ),
    "of 64 channels some rows of r and o do not leave": (
        "up, 64", "wrong answer", "(lane & 6) + (lane >> 3 & 1)", "(lane & 6)"
    ),
    "r and o of odd and even chunks in one place": ("up", "race-read-write", "OUT = 2 * C ", "OUT = 0 "),
    "M is not transposed": (
        "segments", "wrong answer", "self.leave(x.M, p * x.HV + head, True)", "self.leave(x.M, p * x.HV + head, False)"
    ),
    "M is walked for with v": ("segments", "uninitialised", "if not of_M:", "if True:"),
}})

BACKWARD = faults({"sm100/bwd/grads": {
    "G is read before it is there": ("long", "race-write-read", f"self.warps.sync(){54 * SPACE}# G is there"),
    "products read values that are on their way": (
        "long", "proxy", f'cute.arch.fence_proxy("async.shared", space="cta"){17 * SPACE}# LOAD\'s copies, for',
        "pass  #"
    ),
    "G is read before its product is done": (
        "long", "uninitialised", "cute.arch.mbarrier_wait(s.products, i & 1)\n", "pass\n"
    ),
    "dh r^T comes from h": (
        "long", "wrong answer", "s.base_desc, struct.dh.offset, r", "s.base_desc, struct.h.offset, r"
    ),
    "rows above their block decay": ("long", "wrong answer", "self.rescale((down,), b, ratio, n, range(n))"),
    "what a block passes on does not decay": (
        "long", "wrong answer", "b, ratio, n + 1, range(n + 1, self.blocks))", "b, ratio, n + 1, range(0))"
    ),
    "of 64 channels dv r^T lies where do r^T does": (
        "64", "uninitialised", "(columns.G + umma.HALF_LANES)", "columns.G"
    ),
    "of 64 channels products are taken to begin at column 0": (
        "64", "tmem", "return umma.first_column(self.c, self) + self.warp()", "return self.warp()"
    ),
    "of 64 channels tensor memory is not given back": (
        "64", "tmem-leak", "umma.free(self.c.allocated, umma.first_column(self.c, s))"
    ),
    "values are replaced while a product reads them": ("long", "deadlock", *initialises("values_empty", 1)),
}, "common/cute/grads/load": {
    "an item is taken for the one before": (
        "long", "wrong answer", "store(s.places + (i & PLACES", "store(s.places + (i + 1 & PLACES"
    ),
}, "sm100/bwd/load": {
    "1 / |q| and 1 / |k| are those of other tokens": ("long", "wrong answer", "+ odd + place", "+ odd + (2 - place)"),
}, "sm100/bwd/rows": {
    "2^x comes back from another step": (
        "long", "wrong answer", "first = self.columns.decays + 2 * STEP * b", "first = self.columns.decays"
    ),
    "slopes come back from another step": (
        "long", "wrong answer", "self.kept(self.columns.slopes + STEP * b)", "self.kept(self.columns.slopes)"
    ),
    "the next item's products overwrite what is read": (
        "long", "tcgen05-fence", f"umma.fence_before_thread_sync(){40 * SPACE}# warp 0 issues", "pass  #"
    ),
    "dk keeps what points along k": (
        "long", "wrong answer", "packed.fused(packed.from_bf16(y[w]), less[w // HALVES], found[w])", "found[w]"
    ),
    "a gate gains what a key loses": ("long", "wrong answer", "packed.negative(row[2])", "row[2]"),
}})

REVERSE = faults({"common/cute/grads/queue": faults_of_the_queue("one grid", "race-read-write"), "sm100/bwd/reverse": {
    "PUBLISH is told of dh before memory has it": (
        "one grid", "race-write-read", "wait_group(0)", "wait_group(0, read=True)", 2
    ),
    "dh comes over a tile that is still to be read": (
        "one grid", "race-read-write", "cute.arch.mbarrier_wait(s.full + next_stage, next_phase)", "pass", 2
    ),
    "halves of dh come over one tile": ("one grid", "wrong answer", "image + n * half,", "image,"),
    "a walk counts its turns from its beginning": ("two walks", "deadlock", "turn += place.steps", "turn += 0"),
    "a walk counts its items from its beginning": ("two walks", "deadlock", "before += place.pairs", "before += 0"),
    "items come where a walk still reads": ("two walks", "race-read-write", "cute.arch.sync_threads()", "pass", 2),
    "the walk does not know that tensor memory is there": (
        "one grid", "tcgen05-fence", f"umma.fence_after_thread_sync(){41 * SPACE}# tensor", "pass  #"
    ),
}, "sm100/bwd/walk": {
    "an item is announced before its second chunk has been walked over": (
        "one grid", "race-write-read",
        "if (i & 1) == 1 and j > 0:\n                    self.announce(s, before + place.pairs - 1 - (i + 1 >> 1))",
        "if (i & 1) == 1 or j == 0:\n                    self.announce(s, before + place.pairs - 1 - (i >> 1))", 2
    ),
}})
