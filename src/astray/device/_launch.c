// Launches a compiled kernel through the CUDA driver: what `launcher` uses in place of Triton's own launcher.
//
// The driver library is opened at run time and the few functions needed of it are declared here, so that this builds
// without CUDA's headers and loads on machines without a card. A kernel takes 64-bit arguments only (addresses and
// integers), so that packing is the same for all.
//
// A launch allocates nothing and raises nothing that the state of the device could cause: it returns a number. It
// releases the GIL although it takes 2 µs, because it blocks once about a thousand launches wait on the stream, and what
// the card then waits for may be work that another Python thread has yet to submit.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_launch.h"

#ifdef _WIN32
#include <windows.h>
#define DRIVER "nvcuda.dll"
#else
#include <dlfcn.h>
#define DRIVER "libcuda.so.1"
#endif

enum { kPlainShared = 48 * 1024 };  // bytes of shared memory that a kernel gets without an attribute

// What `launch` returns besides the driver's own numbers, which are positive.
enum { kLaunched = 0, kCapturing = -1 };

// Constants of the driver's interface.
typedef struct CUctx_st *Context;
typedef struct CUmod_st *Module;
typedef struct CUfunc_st *Function;
typedef struct CUstream_st *Stream;
enum { kInvalidValue = 1, kCaptureImplicit = 906 };
enum { kCaptureRelaxed = 2 };
enum { kMaxDynamicShared = 8 };
#if defined(_WIN32)
#define DRIVER_API __stdcall
#else
#define DRIVER_API
#endif

static struct {
    int(DRIVER_API *cuInit)(unsigned flags);
    int(DRIVER_API *cuDeviceGet)(int *device, int ordinal);
    int(DRIVER_API *cuDevicePrimaryCtxRetain)(Context *, int device);
    int(DRIVER_API *cuCtxGetCurrent)(Context *);
    int(DRIVER_API *cuCtxPushCurrent_v2)(Context);
    int(DRIVER_API *cuCtxPopCurrent_v2)(Context *);
    int(DRIVER_API *cuModuleLoadData)(Module *, const void *image);
    int(DRIVER_API *cuModuleGetFunction)(Function *, Module, const char *name);
    int(DRIVER_API *cuModuleUnload)(Module);
    int(DRIVER_API *cuFuncSetAttribute)(Function, int attribute, int value);
    int(DRIVER_API *cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                    unsigned shared, Stream, void **arguments, void **extra);
    int(DRIVER_API *cuStreamIsCapturing)(Stream, int *status);
    int(DRIVER_API *cuThreadExchangeStreamCaptureMode)(int *mode);
    int(DRIVER_API *cuGetErrorName)(int, const char **);
} driver;

#define DRIVER_FUNCTION(name) {#name, (void **)&driver.name}
static const struct {
    const char *name;
    void **at;
} kDriverFunctions[] = {
    DRIVER_FUNCTION(cuInit),
    DRIVER_FUNCTION(cuDeviceGet),
    DRIVER_FUNCTION(cuDevicePrimaryCtxRetain),
    DRIVER_FUNCTION(cuCtxGetCurrent),
    DRIVER_FUNCTION(cuCtxPushCurrent_v2),
    DRIVER_FUNCTION(cuCtxPopCurrent_v2),
    DRIVER_FUNCTION(cuModuleLoadData),
    DRIVER_FUNCTION(cuModuleGetFunction),
    DRIVER_FUNCTION(cuModuleUnload),
    DRIVER_FUNCTION(cuFuncSetAttribute),
    DRIVER_FUNCTION(cuLaunchKernel),
    DRIVER_FUNCTION(cuStreamIsCapturing),
    DRIVER_FUNCTION(cuThreadExchangeStreamCaptureMode),
    DRIVER_FUNCTION(cuGetErrorName),
};
enum { kDriverFunctionCount = sizeof kDriverFunctions / sizeof *kDriverFunctions };

typedef struct {
    PyObject_HEAD
    Context context;
    Function function;
    unsigned threads, shared;
    int arguments, hidden;  // those of the caller, and those the compiler appended, which are null
} Kernel;

static PyTypeObject *kernel_type;

// ---- the driver ----------------------------------------------------------------------------------------------------

#ifdef _WIN32
static void *open_library(const char *path) { return (void *)LoadLibraryA(path); }
static void *find_symbol(void *library, const char *name) { return (void *)GetProcAddress((HMODULE)library, name); }
#else
static void *open_library(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static void *find_symbol(void *library, const char *name) { return dlsym(library, name); }
#endif

// Fills `driver` from a library, wholly or not at all. The library stays open, as torch keeps it open anyway.
static int open_driver(const char *path) {
    void *found[kDriverFunctionCount];
    void *library = open_library(path);
    if (!library) {
        PyErr_Format(PyExc_OSError, "The CUDA driver %s cannot be opened.", path);
        return 0;
    }
    for (int i = 0; i < kDriverFunctionCount; ++i) {
        found[i] = find_symbol(library, kDriverFunctions[i].name);
        if (!found[i]) {
            PyErr_Format(PyExc_OSError, "The CUDA driver %s has no function %s.", path, kDriverFunctions[i].name);
            return 0;
        }
    }
    for (int i = 0; i < kDriverFunctionCount; ++i) memcpy(kDriverFunctions[i].at, &found[i], sizeof found[i]);
    return 1;
}

static int is_open(void) { return driver.cuLaunchKernel != NULL; }

static const char *error_name(int code) {
    const char *name = NULL;
    if (driver.cuGetErrorName(code, &name) != 0 || !name) return "an error the driver has no name for";
    return name;
}

// open(path)
static PyObject *py_open(PyObject *self, PyObject *path) {
    (void)self;
    const char *text = PyUnicode_AsUTF8AndSize(path, NULL);
    if (!text || !open_driver(text)) return NULL;
    Py_RETURN_NONE;
}

// relax(): from now on no driver call of this thread breaks a graph capture on another thread.
static PyObject *py_relax(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    int mode = kCaptureRelaxed;
    if (is_open() || open_driver(DRIVER)) driver.cuThreadExchangeStreamCaptureMode(&mode);
    PyErr_Clear();  // without a driver there is nothing to break
    Py_RETURN_NONE;
}

// ---- loading -------------------------------------------------------------------------------------------------------

// Calls the driver and records which function it was and what it returned.
#define FAILS(function, ...) (*step = #function, (code = driver.function(__VA_ARGS__)) != 0)

// Loads a kernel into the device's primary context, the one torch uses, and leaves this thread's context as it was.
static int load_kernel(const char *binary, const char *name, int ordinal, Kernel *kernel, const char **step) {
    int code, device, mode = kCaptureRelaxed;
    Context popped;
    Module module;
    if (FAILS(cuInit, 0) || FAILS(cuDeviceGet, &device, ordinal) ||
        FAILS(cuDevicePrimaryCtxRetain, &kernel->context, device) || FAILS(cuCtxPushCurrent_v2, kernel->context))
        return code;
    // Loading may allocate, which would end a graph capture that is under way on any thread of the program, were this
    // thread not in the relaxed mode.
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    if (!FAILS(cuModuleLoadData, &module, binary) &&
        (FAILS(cuModuleGetFunction, &kernel->function, module, name) ||
         (kernel->shared > kPlainShared &&
          FAILS(cuFuncSetAttribute, kernel->function, kMaxDynamicShared, (int)kernel->shared))))
        driver.cuModuleUnload(module);
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    driver.cuCtxPopCurrent_v2(&popped);
    return code;
}

// load(binary, name, device, threads, shared, arguments, hidden) -> Kernel
static PyObject *py_load(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *binary;
    const char *name, *step;
    int device, threads, shared, arguments, hidden;
    if (!PyArg_ParseTuple(args, "Ssiiiii", &binary, &name, &device, &threads, &shared, &arguments, &hidden)) return NULL;
    if (arguments < 0 || hidden < 0 || arguments + hidden > kMaxArguments) {
        PyErr_Format(PyExc_ValueError, "%s takes %d + %d arguments; the launcher passes at most %d.", name, arguments,
                     hidden, kMaxArguments);
        return NULL;
    }
    if (!is_open() && !open_driver(DRIVER)) return NULL;
    Kernel *kernel = (Kernel *)PyType_GenericAlloc(kernel_type, 0);
    if (!kernel) return NULL;
    kernel->threads = (unsigned)threads;
    kernel->shared = (unsigned)shared;
    kernel->arguments = arguments;
    kernel->hidden = hidden;
    const char *image = PyBytes_AsString(binary);
    int code;
    Py_BEGIN_ALLOW_THREADS;
    code = load_kernel(image, name, device, kernel, &step);
    Py_END_ALLOW_THREADS;
    if (code) {
        PyErr_Format(PyExc_RuntimeError, "%s gave %s (%d) for kernel %s on device %d.", step, error_name(code), code,
                     name, device);
        Py_DECREF(kernel);
        return NULL;
    }
    return (PyObject *)kernel;
}

// ---- launching -----------------------------------------------------------------------------------------------------

static int launch(const Kernel *kernel, unsigned programs, Stream stream, uint64_t *words) {
    void *places[kMaxArguments];
    Context current = NULL, popped;
    int status = 0;
    // A thread that has done no GPU work has no context, and the user's current device may be another one.
    int code = driver.cuCtxGetCurrent(&current);
    const int elsewhere = current != kernel->context;
    if (code || (elsewhere && (code = driver.cuCtxPushCurrent_v2(kernel->context)))) return code;
    code = driver.cuStreamIsCapturing(stream, &status);
    if (code == kCaptureImplicit || (!code && status)) {
        // The first: this is the null stream, and it would wait for a stream that is being captured.
        code = kCapturing;
    } else if (!code) {
        for (int i = 0; i < kernel->arguments + kernel->hidden; ++i) places[i] = &words[i];
        code = driver.cuLaunchKernel(kernel->function, programs, 1, 1, kernel->threads, 1, 1, kernel->shared, stream,
                                     places, NULL);
    }
    if (elsewhere) driver.cuCtxPopCurrent_v2(&popped);
    return code;
}

static int is_kernel(PyObject *object) { return Py_TYPE(object) == kernel_type; }

static int words_of(PyObject *object) { return is_kernel(object) ? ((const Kernel *)object)->arguments : -1; }

static int launch_words(PyObject *self, uint64_t programs, uint64_t stream, uint64_t words[kMaxArguments]) {
    const Kernel *kernel = (const Kernel *)self;
    for (int i = 0; i < kernel->hidden; ++i) words[kernel->arguments + i] = 0;
    if (programs == 0) return kLaunched;
    if (programs > INT32_MAX) return kInvalidValue;  // the most a grid may hold
    int code;
    Py_BEGIN_ALLOW_THREADS;
    code = launch(kernel, (unsigned)programs, (Stream)(uintptr_t)stream, words);
    Py_END_ALLOW_THREADS;
    return code;
}

// Kernel.launch(programs, stream, *arguments) -> 0, -1 while the stream is being captured, or the driver's error
static PyObject *kernel_launch(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    const Kernel *kernel = (const Kernel *)self;
    uint64_t values[2 + kMaxArguments];  // programs, stream, arguments, hidden arguments
    if (nargs != 2 + kernel->arguments) {
        PyErr_Format(PyExc_TypeError, "A launch of this kernel takes 2 + %d arguments, not %zd.", kernel->arguments, nargs);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < nargs; ++i) {
        values[i] = PyLong_AsUnsignedLongLongMask(args[i]);  // addresses from 2^63 on and negative integers alike
        if (values[i] == UINT64_MAX && PyErr_Occurred()) return NULL;
    }
    return PyLong_FromLong(launch_words(self, values[0], values[1], values + 2));
}

// Kernel.explain(code) -> text
static PyObject *kernel_explain(PyObject *self, PyObject *number) {
    (void)self;
    const long code = PyLong_AsLong(number);
    if (code == -1 && PyErr_Occurred()) return NULL;
    if (code == kLaunched) return PyUnicode_FromString("launched");
    if (code == kCapturing) return PyUnicode_FromString("not launched: the stream is being captured into a CUDA graph");
    return PyUnicode_FromFormat("the CUDA driver answered %s (%ld)", error_name((int)code), code);
}

static void kernel_dealloc(PyObject *self) {
    // The module stays loaded: the kernel may still be running, and unloading would wait for it.
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

// ---- slots ---------------------------------------------------------------------------------------------------------

static PyTypeObject *slots_type;

static int are_slots(PyObject *object) { return Py_TYPE(object) == slots_type; }

// Slots(most, partials, rows_at, table_at)
static PyObject *slots_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    long long most, partials;
    unsigned long long rows_at, table_at;
    if (!PyArg_ParseTuple(args, "LLKK", &most, &partials, &rows_at, &table_at)) return NULL;
    Slots *self = (Slots *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->most = most;
    self->partials = partials;
    self->rows_at = rows_at;
    self->table_at = table_at;
    self->lock = PyThread_allocate_lock();
    if (self->lock) return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void slots_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyThread_type_lock lock = ((Slots *)object)->lock;
    if (lock) PyThread_free_lock(lock);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *slots_acquire(PyObject *object, PyObject *none) {
    PyThread_type_lock lock = ((Slots *)object)->lock;
    (void)none;
    if (!PyThread_acquire_lock(lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS;
        PyThread_acquire_lock(lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS;
    }
    Py_INCREF(object);
    return object;
}

static PyObject *slots_release(PyObject *object, PyObject *args) {
    PyThread_type_lock lock = ((Slots *)object)->lock;
    (void)args;
    PyThread_acquire_lock(lock, NOWAIT_LOCK);  // so that releasing it when it is not held does no harm
    PyThread_release_lock(lock);
    Py_RETURN_NONE;
}

static PyObject *slots_locked(PyObject *object, PyObject *none) {
    PyThread_type_lock lock = ((Slots *)object)->lock;
    (void)none;
    if (!PyThread_acquire_lock(lock, NOWAIT_LOCK)) Py_RETURN_TRUE;
    PyThread_release_lock(lock);
    Py_RETURN_FALSE;
}

// open(number): the next segment
static PyObject *slots_open(PyObject *object, PyObject *number) {
    Slots *self = (Slots *)object;
    const long long value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) return NULL;
    self->number = value;
    self->count = self->used = 0;
    Py_RETURN_NONE;
}

// take(programs, slots=1) -> the first slot
static PyObject *slots_take(PyObject *object, PyObject *args) {
    Slots *self = (Slots *)object;
    long long programs, slots = 1;
    if (!PyArg_ParseTuple(args, "L|L", &programs, &slots)) return NULL;
    const long long first = self->count;
    self->count += slots;
    self->used += programs;
    return PyLong_FromLongLong(first);
}

static PyObject *get_stream(PyObject *object, void *closure) {
    const Slots *self = (Slots *)object;
    (void)closure;
    if (self->has_stream) return PyLong_FromUnsignedLongLong(self->stream);
    Py_RETURN_NONE;
}

static int set_stream(PyObject *object, PyObject *value, void *closure) {
    Slots *self = (Slots *)object;
    (void)closure;
    const int there = value && value != Py_None;
    const unsigned long long stream = there ? PyLong_AsUnsignedLongLong(value) : 0;
    if (PyErr_Occurred()) return -1;
    self->stream = stream;
    self->has_stream = (char)there;
    return 0;
}

static PyMemberDef kSlotsMembers[] = {
    {"number", T_LONGLONG, offsetof(Slots, number), READONLY, NULL},
    {"count", T_LONGLONG, offsetof(Slots, count), READONLY, NULL},
    {"used", T_LONGLONG, offsetof(Slots, used), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef kSlotsMethods[] = {
    {"__enter__", slots_acquire, METH_NOARGS, NULL}, {"__exit__", slots_release, METH_VARARGS, NULL},
    {"locked", slots_locked, METH_NOARGS, NULL},     {"open", slots_open, METH_O, NULL},
    {"take", slots_take, METH_VARARGS, NULL},              {NULL, NULL, 0, NULL},
};

static PyGetSetDef kSlotsGetSet[] = {{"stream", get_stream, set_stream, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot kSlotsSlots[] = {
    {Py_tp_new, (void *)slots_new},  {Py_tp_dealloc, (void *)slots_dealloc}, {Py_tp_methods, kSlotsMethods},
    {Py_tp_members, kSlotsMembers}, {Py_tp_getset, kSlotsGetSet},          {0, NULL},
};

static PyType_Spec kSlotsSpec = {"astray.device._launch.Slots", sizeof(Slots), 0, Py_TPFLAGS_DEFAULT, kSlotsSlots};

// ---- the module ----------------------------------------------------------------------------------------------------

static const Launching kLaunching = {are_slots, words_of, launch_words};

static PyMethodDef kKernelMethods[] = {
    {"launch", (PyCFunction)(void (*)(void))kernel_launch, METH_FASTCALL, NULL},
    {"explain", kernel_explain, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kKernelSlots[] = {
    {Py_tp_methods, kKernelMethods},
    {Py_tp_dealloc, (void *)kernel_dealloc},
    {0, NULL},
};

static PyType_Spec kKernelSpec = {
    "astray.device._launch.Kernel", sizeof(Kernel), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    kKernelSlots,
};

static PyMethodDef kMethods[] = {
    {"open", py_open, METH_O, NULL},
    {"load", py_load, METH_VARARGS, NULL},
    {"relax", py_relax, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "astray.device._launch", NULL, -1, kMethods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__launch(void) {
    PyObject *module = PyModule_Create(&kModule);
    if (!module) return NULL;
    kernel_type = (PyTypeObject *)PyType_FromSpec(&kKernelSpec);
    slots_type = (PyTypeObject *)PyType_FromSpec(&kSlotsSpec);
    PyObject *capsule = PyCapsule_New((void *)&kLaunching, LAUNCHING, NULL);
    const int done = kernel_type && slots_type && capsule &&
                     !PyModule_AddObjectRef(module, "Kernel", (PyObject *)kernel_type) &&
                     !PyModule_AddObjectRef(module, "Slots", (PyObject *)slots_type) &&
                     !PyModule_AddObjectRef(module, "launching", capsule) &&
                     !PyModule_AddIntConstant(module, "MAX_ARGUMENTS", kMaxArguments) &&
                     !PyModule_AddStringConstant(module, "DRIVER", DRIVER);
    Py_XDECREF(capsule);
    if (!done) Py_CLEAR(module);
    return module;
}
