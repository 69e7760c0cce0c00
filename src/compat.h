#pragma once

// What differs between the versions of torch that brim supports.

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace brim::compat {

using torch::autograd::Node;

/// How autograd holds its nodes: std::shared_ptr up to torch 2.12, c10::intrusive_ptr from 2.13 on.
using NodePtr = decltype(torch::autograd::Edge::function);

#if TORCH_VERSION_MINOR <= 12
template <class N>
using PtrTo = std::shared_ptr<N>;

template <class N, class... Args>
[[nodiscard]] PtrTo<N> make_node(Args&&... args) {
  // deleteNode takes deep graphs apart without recursion.
  return PtrTo<N>(new N(std::forward<Args>(args)...), torch::autograd::deleteNode);
}

[[nodiscard]] inline NodePtr pointer_to(Node& node) { return node.getptr(); }
#else
template <class N>
using PtrTo = c10::intrusive_ptr<N>;

template <class N, class... Args>
[[nodiscard]] PtrTo<N> make_node(Args&&... args) {
  return c10::make_intrusive<N>(std::forward<Args>(args)...);
}

[[nodiscard]] inline NodePtr pointer_to(Node& node) { return NodePtr::reclaim_copy(&node); }
#endif

static_assert(std::is_same_v<PtrTo<Node>, NodePtr>);

/// Whether the object of Python that stands for a tensor, or for its memory, counts as one of those
/// that use it. Of versions in which it always does: in others, it does while Python code holds it.
template <class Impl>
[[nodiscard]] std::size_t counted_by_python(const Impl& impl) {
  if constexpr (requires { impl.pyobj_slot()->load_pyobj(); }) {
    return impl.pyobj_slot()->load_pyobj() != nullptr ? 1 : 0;
  } else {
    return 0;
  }
}

}  // namespace brim::compat
