"""What CUDA lets a module declare and a launch ask for, whatever the GPU; sizes are bytes."""

GRID = (2**31 - 1, 65_535, 65_535)  # CTAs along x, y and z
BLOCK = (1024, 1024, 64)  # threads along x, y and z
THREADS = 1024  # threads of a CTA
REGISTERS = 255  # registers of a thread
LOCAL = 512 << 10  # .local memory of a thread
CONSTANT = 64 << 10  # .const variables of a module
PARAMETERS = 32_764  # parameters of a kernel, all together
GLOBAL = 1 << 36  # .global variables of a module: the memory of the simulated GPUs
ADDRESSES = 1 << 47  # bytes that have an address
