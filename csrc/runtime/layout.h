#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/transport.h"

namespace timelyfreeze {

// What a receiver must know of a packet before its tensors come: shapes, strides, dtypes, flags and the spec. It
// travels as text, and two packets look alike if and only if their texts are equal.
struct Layout {
  struct Entry {
    bool defined = false;
    bool requires_grad = false;
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };
  std::vector<Entry> entries;
  bool has_flags = false;
  std::string spec;

  [[nodiscard]] std::string to_text() const;
  static Layout from_text(const std::string& text);
};

// The packet's layout; its tensors are replaced by what is sent in their place: dense, in memory order, without conj or
// neg bits. Throws c10::TypeError for what cannot travel.
Layout lay_out(Packet& packet);

// The tensor's memory as one contiguous row.
at::Tensor as_row(const at::Tensor& tensor);

// An empty tensor for an entry that is defined.
at::Tensor make_empty(const Layout::Entry& entry, c10::Device device);

}  // namespace timelyfreeze
