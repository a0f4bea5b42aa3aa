// The module `astray.capture._calls`: the native half of the taps.

#include "calls.h"

static PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "astray.capture._calls", NULL, -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__calls(void) {
    PyObject *module = PyModule_Create(&kModule);
    if (!module) return NULL;
    if (add_calls(module) < 0 || add_walk(module) < 0 || add_structures(module) < 0 || add_taking(module) < 0 ||
        add_modules(module) < 0 || add_endings(module) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
