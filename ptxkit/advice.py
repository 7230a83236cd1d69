"""What orders two accesses: the instructions that a race lacks, by the kinds of the two.

Each sentence names who has to run what. The kind of the earlier access decides what completes it (COMPLETION, of
asynchronous work), the distance of the two decides what hands the order on (HANDING_ON), and a write by the generic
proxy before an access by the async proxy needs a fence as well.
"""

from __future__ import annotations

WARP = 0  # the numbers are the engine's ActorKind; beyond the last: a copy that an mbarrier tracks
COMPLETION = {
    1: "{other} runs cp.async.commit_group and cp.async.wait_group",
    2: "the thread of {other} that started the copy runs cp.async.bulk.commit_group and cp.async.bulk.wait_group",
    3: "the thread of {other} that started the copy runs cp.async.bulk.commit_group and cp.async.bulk.wait_group.read",
    4: "{other} runs wgmma.commit_group and wgmma.wait_group",
    6: "{other} runs tcgen05.wait::ld",
    7: "{other} runs tcgen05.wait::st",
}
ATOMIC = "; or, where a number is read, changed and written back, one atomic (red, atom) does that"
TENSOR = 5
BY_MBARRIER = 9
HANDING_ON = {
    "cta": "{other} and {this} meet at a barrier (bar.sync), or {other} arrives on an mbarrier "
    "(mbarrier.arrive) and {this} waits for that phase (mbarrier.try_wait)",
    "cluster": "{other} and {this} meet at the cluster's barrier (barrier.cluster.arrive.release, then "
    "barrier.cluster.wait.acquire), or {other} arrives on an mbarrier with .release.cluster and {this} waits for that "
    "phase with .acquire.cluster",
    "grid": "{other} releases a flag in global memory (st, red or atom with .release.gpu) and {this} acquires it "
    f"(ld or atom with .acquire.gpu) until it is set{ATOMIC}; or the two go into kernels that run one after the other",
}


def of_a_race(distance, actor, this, other, *, fence=False, tensor=False):
    """Say how to order an access by `this` after the earlier one by `other`.

    distance: "warp" (one warp issued both), "cta", "cluster" or "grid"; actor: the engine's kind of the earlier
    access; fence: that was a generic write, and this access is the async proxy's; tensor: it is tensor memory.
    """
    if actor == TENSOR:
        waits = f"before its own access {this} waits for that phase (mbarrier.try_wait)"
        after = ", then runs tcgen05.fence::after_thread_sync" if tensor else ""
        return f"{other} runs tcgen05.commit after it, to an mbarrier, and {waits}{after}"
    if actor == BY_MBARRIER:
        return f"before its own access {this} waits for the phase that the copy completes (mbarrier.try_wait)"
    steps = [COMPLETION[actor].format(other=other)] if actor in COMPLETION else []
    if fence:
        steps.append(f"{other} runs fence.proxy.async after its write")
    if distance != "warp":
        steps += [f"{other} runs tcgen05.fence::before_thread_sync"] if tensor else []
        steps.append(HANDING_ON[distance].format(this=this, other=other))
        steps += [f"{this} runs tcgen05.fence::after_thread_sync"] if tensor else []
    return "; then ".join(steps) or None


# asynchronous work runs late in the simulator, so the access that it met may be one that should have waited for it
EITHER = "if that access should come first: {first}; if this one should: {last}"
PROXY = "{other} runs fence.proxy.async after its write and before what orders the two (a barrier, an arrival)"
LANES = "run bar.warp.sync (__syncwarp) between the two"
OF_ITS_OWN = "; or, where each should have an element of its own, the index is corrected"
ONE_ADDRESS = "give each lane an address of its own, or let one lane do it"
OUTSIDE = "correct the index or the strides, or let lanes that have no element there skip the access (by a mask, an if)"
FREED = "hold the tensor for as long as kernels are launched with its address: an address alone keeps no memory"
OF_KIND = {  # by the engine's FindingKind: what does not depend on who did the other access
    2: "align the address to the size of the access, or use smaller accesses",
    3: "write it first; if a copy or another warp fills it, wait for that before this",
    11: "compare who arrives with what is waited for: an arrival on every path, the count, the bytes, the parity",
    12: "change what the loop reads on every path: release the lock, set the flag; CTAs may run one after another",
    13: "let all lanes of the warp reach it, on one path",
    14: "name in the mask exactly the lanes that run it",
    28: "the lanes run bar.warp.sync (__syncwarp) after that access and before one of them arrives or releases",
    30: "run griddepcontrol.wait before this access",
    34: "write it first, by a kernel or by torch (zeros instead of empty); or let nobody read it",
    35: "run tcgen05.commit after the earlier one, and wait for that phase (mbarrier.try_wait) before this one; or "
    "give each columns of its own",
    36: "hardware orders these, so nothing needs to change; the manual asks for .release.cluster on the arrival and "
    ".acquire.cluster on the wait, which cost a fence of all memory each time",
    31: "run tcgen05.wait::ld.sync.aligned between the two",
}
AT_EXIT = (  # for a copy in a bulk group; for one that an mbarrier tracks
    "the thread commits it (cp.async.bulk.commit_group) and runs cp.async.bulk.wait_group.read before it exits",
    "the CTA that waits for the phase (mbarrier.try_wait) then meets this one at the cluster's barrier "
    "(barrier.cluster.arrive.release, then barrier.cluster.wait.acquire), or arrives on an mbarrier of this one with "
    ".release.cluster, for which a thread here waits before it exits",
)
