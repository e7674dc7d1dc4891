/* A stand-in for CUDA's driver, for tests/kernels/test_copies.py: it notes a batch of copies, and makes them.

   With -DCUDA_12 it has the call as CUDA 12.8 declares it, with -DCUDA_13 as CUDA 13 does. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST 64

typedef struct {
    int source_order, source_hint[2], target_hint[2];
    unsigned flags;
} Attributes;

int answer; /* of the next calls */
size_t failed_copy = SIZE_MAX;
size_t calls, count, first_copy, attribute_count, sizes[MOST];
uint64_t targets[MOST], sources[MOST];
Attributes attributes;
void *stream;

#if defined(CUDA_12) || defined(CUDA_13)
static int batch(uint64_t *to, uint64_t *from, size_t *bytes, size_t copies, Attributes *given, size_t *firsts,
                 size_t kinds, void *on) {
    calls++;
    count = copies;
    first_copy = firsts[0];
    attribute_count = kinds;
    attributes = given[0];
    stream = on;
    if (answer || copies > MOST)
        return answer ? answer : 1;
    for (size_t i = copies; i--;) { /* a batch has no order */
        targets[i] = to[i];
        sources[i] = from[i];
        sizes[i] = bytes[i];
        memmove((void *)to[i], (void *)from[i], bytes[i]);
    }
    return 0;
}
#endif

#ifdef CUDA_12
int cuMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *bytes, size_t copies, Attributes *given,
                       size_t *firsts, size_t kinds, size_t *failed, void *on) {
    *failed = failed_copy;
    return batch(to, from, bytes, copies, given, firsts, kinds, on);
}
#endif

#ifdef CUDA_13
int cuMemcpyBatchAsync_v2(uint64_t *to, uint64_t *from, size_t *bytes, size_t copies, Attributes *given,
                          size_t *firsts, size_t kinds, void *on) {
    return batch(to, from, bytes, copies, given, firsts, kinds, on);
}
#endif

int cuGetErrorName(int error, const char **name) {
    *name = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : NULL;
    return *name ? 0 : 1;
}
