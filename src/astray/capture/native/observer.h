// What observes the tensors of a recording: native code of the adapter, or a Python object with its methods, which tests
// use.

#pragma once

#include "rows.h"

namespace astray {

// Each `observe` returns whether the tensor holds NaN or infinities, if that is known and requested.
class NativeObserver {
public:
    virtual bool observe(const Row &row, PyObject *tensor) = 0;
    // The same for one whose memory may not have been filled yet.
    virtual bool observe_unread(const Row &row, PyObject *tensor) = 0;
    // A call has written into this tensor, perhaps without changing its version counter; `written`: it may be filled
    // now.
    virtual void changed(PyObject *tensor) = 0;
    virtual void written(PyObject *tensor) = 0;

protected:
    ~NativeObserver() = default;
};

// Returns the native code of an observer; nullptr for a Python object. Set when the module is made.
inline NativeObserver *(*find_native_observer)(PyObject *observer);

class ObserverHandle {
public:
    template <class Visit>
    void each(Visit visit) {
        visit(observer_);
    }

    void use(PyObject *observer) {
        observer_ = Ref::shared(observer);
        native_ = find_native_observer(observer);
    }
    NativeObserver *native() const { return native_; }

    bool observe(const Row &row, PyObject *tensor) const {
        return native_ ? native_->observe(row, tensor) : ask("observe", row, tensor);
    }
    bool observe_unread(const Row &row, PyObject *tensor) const {
        return native_ ? native_->observe_unread(row, tensor) : ask("observe_unread", row, tensor);
    }
    void written(PyObject *tensor) const {
        if (native_) native_->written(tensor);
        else notify("written", tensor);
    }
    void changed(PyObject *tensor) const {
        if (native_) native_->changed(tensor);
        else notify("changed", tensor);
    }

private:
    bool ask(const char *method, const Row &row, PyObject *tensor) const {
        return call_method(observer_, interned(method).get(), to_object(row.seq).get(), name_of(row.role), row.path,
                           tensor)
                   .get() == Py_True;
    }
    void notify(const char *method, PyObject *tensor) const { call_method(observer_, interned(method).get(), tensor); }

    Ref observer_;
    NativeObserver *native_ = nullptr;
};

}  // namespace astray
