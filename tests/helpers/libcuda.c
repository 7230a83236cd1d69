/* A driver that writes down what it is asked for.  Built against NVIDIA's own header, which fixes every layout. */
#include <cuda.h>
#include <string.h>
#include <unistd.h>

struct launch {
    unsigned grid[3], block[3], shared, attributes;
    CUstream stream;
    CUfunction function;
    CUlaunchAttribute attribute[4];
    unsigned char params[512];
    unsigned size;
} launches[256];
struct map {
    int dtype, rank, interleave, swizzle, promotion, fill;
    void *address, *destination;
    cuuint64_t dims[5], strides[5];
    cuuint32_t box[5], steps[5];
} map;
int launched, loaded, made_current, settings[16][4], settled, device, answer, cc = 90;
unsigned sizes[64], parameters, delay;       /* of the kernel that is launched; microseconds */
char image[17], name[64];
static __thread int current;

CUresult cuCtxGetDevice(CUdevice *found) {
    *found = device;
    return answer;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    current = context == (CUcontext)(0x3000L + device);
    made_current += current;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice dev) {
    *context = (CUcontext)(0x3000L + dev);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? cc / 10
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? cc % 10
                                                                         : -1;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char **found) {
    *found = code == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : NULL;
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values, unsigned count,
                           CUlibraryOption *more, void **more_values, unsigned more_count) {
    memcpy(image, code, sizeof image - 1);
    loaded++;
    *library = (CUlibrary)0x1000L;
    return options || values || count || more || more_values || more_count ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *symbol) {
    strncpy(name, symbol, sizeof name - 1);
    *kernel = (CUkernel)0x7fff12345678L;     /* more than 32 bits */
    return library == (CUlibrary)0x1000L ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice dev) {
    int all[] = {attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                 attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, value, dev};
    memcpy(settings[settled++], all, sizeof all);
    return kernel == (CUkernel)0x7fff12345678L ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **params, void **extra) {
    if (answer == CUDA_ERROR_INVALID_CONTEXT && current)
        answer = CUDA_SUCCESS;
    if (answer || extra)
        return answer ? answer : CUDA_ERROR_INVALID_VALUE;
    if (delay)
        usleep(delay);
    struct launch *l = &launches[__atomic_fetch_add(&launched, 1, __ATOMIC_SEQ_CST)];
    *l = (struct launch){{c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ},
                         c->sharedMemBytes, c->numAttrs, c->hStream, function};
    for (unsigned i = 0; i < c->numAttrs; i++)
        l->attribute[i] = c->attrs[i];
    for (unsigned i = 0; i < parameters; i++) {
        memcpy(l->params + l->size, params[i], sizes[i]);
        l->size += sizes[i];
    }
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *found, CUtensorMapDataType dtype, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    map = (struct map){dtype, rank, interleave, swizzle, promotion, fill, address, found};
    memcpy(map.dims, dims, rank * sizeof *dims);
    memcpy(map.strides, strides, (rank - 1) * sizeof *strides);
    memcpy(map.box, box, rank * sizeof *box);
    memcpy(map.steps, steps, rank * sizeof *steps);
    for (int i = 0; i < 128; i++)
        ((unsigned char *)found)[i] = i;
    return CUDA_SUCCESS;
}
