#include "runtime/layout.h"

#include <ATen/ops/empty_strided.h>

#include <cstring>
#include <stdexcept>

namespace timelyfreeze {
namespace {

void put(std::string& text, int64_t number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof number);  // all ranks of a job are of one byte order
}

// Reads numbers one after the other.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  int64_t number() {
    int64_t value = 0;
    if (position_ + sizeof value > text_.size()) throw std::runtime_error("a message's header is too short");
    std::memcpy(&value, text_.data() + position_, sizeof value);
    position_ += sizeof value;
    return value;
  }
  [[nodiscard]] std::string rest() const { return text_.substr(position_); }

 private:
  const std::string& text_;
  size_t position_ = 0;
};

at::Tensor prepared(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(
      tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested() && !tensor.is_meta(),
      "a tensor between ranks: expected a dense one, got layout ", tensor.layout(), " of type ", tensor.toString(),
      ". Call .to_dense() in the stage that returns it.");
  const at::Tensor plain = tensor.resolve_conj().resolve_neg();
  return plain.is_non_overlapping_and_dense() ? plain : plain.contiguous();
}

}  // namespace

std::string Layout::to_text() const {
  std::string text;
  put(text, static_cast<int64_t>(entries.size()));
  put(text, has_flags ? 1 : 0);
  for (const Entry& entry : entries) {
    put(text, entry.defined ? 1 : 0);
    put(text, entry.requires_grad ? 1 : 0);
    put(text, static_cast<int64_t>(entry.dtype));
    put(text, static_cast<int64_t>(entry.sizes.size()));
    for (const int64_t size : entry.sizes) put(text, size);
    for (const int64_t stride : entry.strides) put(text, stride);
  }
  return text + spec;
}

Layout Layout::from_text(const std::string& text) {
  Reader reader(text);
  Layout layout;
  layout.entries.resize(static_cast<size_t>(reader.number()));
  layout.has_flags = reader.number() != 0;
  for (Entry& entry : layout.entries) {
    entry.defined = reader.number() != 0;
    entry.requires_grad = reader.number() != 0;
    entry.dtype = static_cast<at::ScalarType>(reader.number());
    entry.sizes.resize(static_cast<size_t>(reader.number()));
    entry.strides.resize(entry.sizes.size());
    for (int64_t& size : entry.sizes) size = reader.number();
    for (int64_t& stride : entry.strides) stride = reader.number();
  }
  layout.spec = reader.rest();
  return layout;
}

Layout lay_out(Packet& packet) {
  Layout layout;
  layout.has_flags = !packet.requires_grad.empty();
  layout.spec = packet.spec;
  for (size_t i = 0; i < packet.tensors.size(); ++i) {
    Layout::Entry& entry = layout.entries.emplace_back();
    entry.requires_grad = layout.has_flags && packet.requires_grad[i];
    at::Tensor& tensor = packet.tensors[i];
    entry.defined = tensor.defined();
    if (!entry.defined) continue;
    tensor = prepared(tensor);
    entry.dtype = tensor.scalar_type();
    entry.sizes = tensor.sizes().vec();
    entry.strides = tensor.strides().vec();
  }
  return layout;
}

at::Tensor as_row(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }

at::Tensor make_empty(const Layout::Entry& entry, c10::Device device) {
  return at::empty_strided(entry.sizes, entry.strides, at::TensorOptions().dtype(entry.dtype).device(device));
}

}  // namespace timelyfreeze
