"""The kernels of a call, one after the other."""

import cutlass.cute as cute


@cute.jit
def after_the_kernel_before():
    """First of all in every kernel: what is launched next may come onto the SM, where it waits here, and what this one
    reads is there.  (The first kernel of a call is launched after all that came before, and does not wait.)"""
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
