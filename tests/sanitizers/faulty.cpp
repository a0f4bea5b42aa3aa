// What a sanitizer has to find, and what it must not: `test_faults.py` runs each of these in a process of its own.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

namespace {

long number = 0;
std::vector<long> numbers;
char from[4096], to[4096];

// Meets other threads without any order between what they have done before and what they do behind it.
class Meeting {
public:
    explicit Meeting(int threads) : missing_(threads) {}
    void wait() {
        missing_.fetch_sub(1, std::memory_order_relaxed);
        while (missing_.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
    }

private:
    std::atomic<int> missing_;
};

template <class One, class Other>
void at_once(One one, Other other) {
    std::thread first(one), second(other);
    first.join();
    second.join();
}

PyObject *nothing() {
    Py_INCREF(Py_None);
    return Py_None;
}

// ---- of the thread sanitizer ---------------------------------------------------------------------------------------

PyObject *race(PyObject *, PyObject *) {
    Meeting meeting(2);
    const auto add = [&] {
        meeting.wait();
        ++number;
    };
    at_once(add, add);
    return nothing();
}

// To be called by two threads of Python.
PyObject *race_without_the_interpreter(PyObject *, PyObject *) {
    static Meeting meeting(2);
    Py_BEGIN_ALLOW_THREADS
    meeting.wait();
    ++number;
    Py_END_ALLOW_THREADS
    return nothing();
}

PyObject *race_of_copies(PyObject *, PyObject *) {
    Meeting meeting(2);
    volatile size_t size = sizeof to;
    const auto copy = [&] {
        meeting.wait();
        std::memcpy(to, from, size);
    };
    at_once(copy, copy);
    return nothing();
}

PyObject *use_what_another_thread_frees(PyObject *, PyObject *) {
    Meeting meeting(2);
    auto *object = new long(1);
    const auto use = [&] {
        *object = 2;
        meeting.wait();
    };
    const auto free = [&] {
        meeting.wait();
        delete object;
    };
    at_once(use, free);
    return nothing();
}

// No fault, by as many threads as like: each holds the interpreter.
PyObject *with_the_interpreter(PyObject *, PyObject *) {
    numbers.push_back(++number);
    if (numbers.size() > 100) std::vector<long>().swap(numbers);
    return nothing();
}

// ---- of the others -------------------------------------------------------------------------------------------------

PyObject *read_behind_the_end(PyObject *, PyObject *) {
    const std::vector<long> few(3);
    volatile size_t count = 4;
    long sum = 0;
    for (size_t i = 0; i < count; ++i) sum += few.data()[i];
    return PyLong_FromLong(sum);
}

PyObject *overflow(PyObject *, PyObject *) {
    volatile int most = std::numeric_limits<int>::max();
    return PyLong_FromLong(most + 1);
}

PyMethodDef methods[] = {
    {"race", race, METH_NOARGS, nullptr},
    {"race_without_the_interpreter", race_without_the_interpreter, METH_NOARGS, nullptr},
    {"race_of_copies", race_of_copies, METH_NOARGS, nullptr},
    {"use_what_another_thread_frees", use_what_another_thread_frees, METH_NOARGS, nullptr},
    {"with_the_interpreter", with_the_interpreter, METH_NOARGS, nullptr},
    {"read_behind_the_end", read_behind_the_end, METH_NOARGS, nullptr},
    {"overflow", overflow, METH_NOARGS, nullptr},
    {},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "faulty", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_faulty() { return PyModule_Create(&definition); }
