#pragma once
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace timelyfreeze {

// What the graph holds its nodes by: a shared_ptr up to torch 2.12, an intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class... Args>
NodePtr make_node(Args&&... args) {
  auto* node = new T(std::forward<Args>(args)...);
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return NodePtr(node, [](auto* dead) { deleteNode(dead); });
  } else {
    return NodePtr::unsafe_steal_from_new(node);
  }
}

}  // namespace timelyfreeze
