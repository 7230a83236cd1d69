"""Kernels of a call that overlap: programmatic dependent launches, of those whose configuration says `pdl`."""

import cutlass.cute as cute


@cute.jit
def permit_early_launch():
    """The next kernel, if it is launched so, may come onto the SM now and wait there."""
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def wait_for_the_kernel_before():
    """First of all in a kernel that is launched so: what it reads is there."""
    cute.arch.griddepcontrol_wait()
