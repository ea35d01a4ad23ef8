#pragma once
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace timelyfreeze {

// What the graph holds its nodes by: a shared_ptr up to torch 2.12, an intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

// `Pointer` is a parameter so that only the branch for this torch has to compile.
template <class Pointer>
Pointer hold(torch::autograd::Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return Pointer(node, [](auto* dead) { deleteNode(dead); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

template <class T, class... Args>
NodePtr make_node(Args&&... args) {
  return hold<NodePtr>(new T(std::forward<Args>(args)...));
}

}  // namespace timelyfreeze
