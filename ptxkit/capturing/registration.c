/* What nvcc registers of a file's kernels, and the launch configuration between <<< and >>>: capturing/host.py. */
#include <stddef.h>
enum { MOST = 4096 };
int ptxkit_registered;
const void *ptxkit_hosts[MOST];
const char *ptxkit_kernels[MOST];
void **__cudaRegisterFatBinary(void *image) { static void *handle; (void)image; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { (void)handle; return 1; }
void __cudaRegisterVar(void **h, char *host, char *device, const char *name, int e, size_t n, int c, int g) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name) {
    if (ptxkit_registered == MOST) return;
    ptxkit_hosts[ptxkit_registered] = host;
    ptxkit_kernels[ptxkit_registered++] = name;
}
typedef struct { unsigned x, y, z; } Dim3;
static struct { Dim3 grid, block; size_t shared; void *stream; } pushed[64];
static int depth;
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    pushed[depth].grid = grid, pushed[depth].block = block, pushed[depth].shared = shared;
    pushed[depth++].stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void *stream) {
    depth--;
    *grid = pushed[depth].grid, *block = pushed[depth].block, *shared = pushed[depth].shared;
    *(void **)stream = pushed[depth].stream;
    return 0;
}
