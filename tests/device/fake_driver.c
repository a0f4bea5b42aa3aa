// A CUDA driver without a card: writes down how it is called, and answers what a test has told it to.
//
// Built by test_launcher.py. `-DWITHOUT_LAUNCH` leaves out the launching, as a library that is not the driver would.

#include <stdint.h>
#include <stdio.h>
#include <string.h>

char calls[1 << 16];  // one call a line
uint64_t current;     // this thread's own context
uint64_t pushed;      // the one pushed over it
uint64_t loaded;      // modules that were not unloaded
int mode;             // this thread's capture mode
int status;           // what cuStreamIsCapturing finds
int capture_answer;   // what it returns
char failing[64];     // the function that fails
int failure;          // what it returns then
int words;            // how many arguments cuLaunchKernel writes down
volatile int blocked, arrived, released;  // whether cuLaunchKernel waits, that it does so now, and until when

static int answer(const char *function) { return strcmp(function, failing) ? 0 : failure; }

#define NOTE(...) snprintf(calls + strlen(calls), sizeof calls - strlen(calls), __VA_ARGS__)

int cuInit(unsigned flags) { return (void)flags, answer("cuInit"); }

int cuDeviceGet(int *device, int ordinal) {
    *device = 100 + ordinal;
    return answer("cuDeviceGet");
}

int cuDevicePrimaryCtxRetain(uint64_t *context, int device) {
    *context = (uint64_t)device * 10;
    return answer("cuDevicePrimaryCtxRetain");
}

int cuCtxGetCurrent(uint64_t *context) {
    *context = pushed ? pushed : current;
    return answer("cuCtxGetCurrent");
}

int cuCtxPushCurrent_v2(uint64_t context) {
    NOTE("push %d\n", (int)context);
    if (answer("cuCtxPushCurrent_v2")) return failure;
    pushed = context;
    return 0;
}

int cuCtxPopCurrent_v2(uint64_t *context) {
    NOTE("pop\n");
    *context = pushed;
    pushed = 0;
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *other) {
    const int before = mode;
    mode = *other;
    *other = before;
    return 0;
}

int cuModuleLoadData(uint64_t *module, const char *image) {
    NOTE("load %.8s mode %d\n", image, mode);
    if (answer("cuModuleLoadData")) return failure;
    *module = 7;
    ++loaded;
    return 0;
}

int cuModuleUnload(uint64_t module) { return --loaded, (void)module, 0; }

int cuModuleGetFunction(uint64_t *function, uint64_t module, const char *name) {
    NOTE("function %s of %d\n", name, (int)module);
    *function = 8;
    return answer("cuModuleGetFunction");
}

int cuFuncSetAttribute(uint64_t function, int attribute, int value) {
    NOTE("attribute %d of %d = %d\n", attribute, (int)function, value);
    return answer("cuFuncSetAttribute");
}

int cuStreamIsCapturing(uint64_t stream, int *result) {
    (void)stream;
    *result = status;
    return capture_answer;
}

int cuGetErrorName(int code, const char **name) {
    if (code != 700) return 1;
    *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
    return 0;
}

#ifndef WITHOUT_LAUNCH
int cuLaunchKernel(uint64_t function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, uint64_t stream, uint64_t **arguments, void **extra) {
    NOTE("launch %d grid %u %u %u block %u %u %u shared %u stream %llx extra %d:", (int)function, x, y, z, threads, ty,
         tz, shared, (unsigned long long)stream, extra != NULL);
    for (int i = 0; i < words; ++i) NOTE(" %llx", (unsigned long long)*arguments[i]);
    NOTE("\n");
    // Long enough for any thread that may run; a caller that keeps the others from running gets an error in the end.
    arrived = 1;
    for (uint64_t i = 0; blocked && !released; ++i)
        if (i > UINT64_C(20000000000)) return 702;
    return answer("cuLaunchKernel");
}
#endif
