"""How fast the simulator is with the backends' kernels, on one core of this machine.

    python -m benchmarks.simulator

Prints what `python -m ptxkit.benchmarks.simulator` does, and the time of the parts of a forward and backward (130
tokens, 2 heads) of each backend: seconds of user and system CPU, the best of a few.
"""

from kda.tools.verify.cases import make_inputs
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit.benchmarks import simulator
from ptxkit.compile.target import parse

BACKENDS = {"sm90": "sm_90a", "sm100": "sm_100a", "triton": "sm_90a"}


def main():
    simulator.main()
    case = make_inputs(T=130, H=1, HV=2, K=128, V=128, gate="bounded")
    for backend, arch in BACKENDS.items():
        door = SimulatedDoor(backend, parse(arch))
        parts = simulator.parts(lambda: door.call(case, True))  # noqa: B023
        assert not door.findings, door.findings[0]
        named = "".join(f"  {part} {seconds:.3f}" for part, seconds in parts.items())
        print(f"{f'{backend}, forward and backward, seconds':44}{named}")


if __name__ == "__main__":
    main()
