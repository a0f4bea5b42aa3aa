// The gradients of a call that made one node of autograd's graph.

#pragma once

#include "call_gradients.h"

namespace astray {

using Tensors = torch::autograd::variable_list;

// The gradients of a call that made one node. The node runs once in a backward pass, with all gradients that arrive,
// and has then computed all that it sends. Arriving gradients are recorded as the node got them, after the user's hooks
// on the output have changed them. Where the backward pass ends at the output (`torch.autograd.grad` with respect to
// it), there is no row.
class NodeGradients : public PendingGradients {
public:
    struct Route {
        size_t index;
        Ref path;
    };

    NodeGradients(PyObject *engine, PyObject *call, std::vector<Route> arrives, std::vector<Route> sends)
        : PendingGradients(engine, call), arrives_(std::move(arrives)), sends_(std::move(sends)) {}

    void ran(const Tensors &computed, const Tensors &arrived) {
        attempt([&] {
            std::optional<int64_t> seq;
            for (const Route &route : arrives_) record_route(seq, Role::input, route, arrived);
            for (const Route &route : sends_) record_route(seq, Role::output, route, computed);
        });
    }

private:
    void record_route(std::optional<int64_t> &seq, Role role, const Route &route, const Tensors &gradients) {
        if (route.index < gradients.size() && gradients[route.index].defined())  // else an output that was not used
            record(seq, role, route.path, gradients[route.index]);
    }

    const std::vector<Route> arrives_, sends_;
};

}  // namespace astray
