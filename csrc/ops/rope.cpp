// Rotary positions, plain and on a packed query-key-value projection; formula and bytes in kernels/rope.h.
#include "kernels/rope.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "ops/checks.h"
#include "ops/differentiable.h"
#include "ops/fused.h"
#include "ops/stream.h"

namespace timelyfreeze::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;

void check_tables(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines, int64_t length,
                  int64_t width, int64_t offset) {
  TORCH_CHECK_VALUE(width > 0 && width % 2 == 0, "rope: expected an even width of the heads, got ", width, ".");
  for (const at::Tensor& table : {cosines, sines}) {
    TORCH_CHECK_VALUE(table.dim() == 2 && table.size(1) == width / 2 && table.size(0) >= offset + length,
                      "rope: cos and sin: expected [at least ", offset + length, " positions, ", width / 2, "], got ",
                      table.sizes(), ".");
    TORCH_CHECK_TYPE(table.scalar_type() == at::kFloat, "rope: cos and sin: expected float32, got ",
                     c10::toString(table.scalar_type()), ". Call .float() on the tables.");
    TORCH_CHECK_VALUE(!table.requires_grad(), "rope: cos and sin: expected tables that do not require grad.");
    TORCH_CHECK_VALUE(table.device() == x.device(), "rope: cos and sin: expected device ", x.device(), ", got ",
                      table.device(), ".");
  }
  TORCH_CHECK_VALUE(offset >= 0, "rope: offset: expected 0 or more, got ", offset, ".");
}

// Turns `in` into `out`, both [batch, heads, length, width] with contiguous features; copies where there are no tables.
void turn(const at::Tensor& in_any, const at::Tensor& out, const at::Tensor& cosines, const at::Tensor& sines,
          int64_t offset, bool inverse) {
  const at::Tensor in = in_any.stride(3) == 1 ? in_any : in_any.contiguous();
  kernels::RopeShape shape;
  shape.batch = in.size(0);
  shape.heads = in.size(1);
  shape.length = in.size(2);
  shape.width = in.size(3);
  shape.offset = offset;
  shape.inverse = inverse;
  shape.dtype = dtype_of(in, "rope");
  if (in.numel() == 0) return;
  const kernels::Heads from{in.const_data_ptr(), in.stride(0), in.stride(1), in.stride(2)};
  const kernels::Heads to{out.mutable_data_ptr(), out.stride(0), out.stride(1), out.stride(2)};
  const at::Tensor cos = contiguous_or_undefined(cosines);
  const at::Tensor sin = contiguous_or_undefined(sines);
  const auto* cos_data = static_cast<const float*>(data_or_null(cos));
  const auto* sin_data = static_cast<const float*>(data_or_null(sin));
  if (in.is_cpu()) {
    kernels::rope_cpu(shape, from, to, cos_data, sin_data);
  } else {
    const CudaLaunch launch(in);
    kernels::rope_cuda(shape, from, to, cos_data, sin_data, launch.stream());
    launch.check();
  }
}

// Memory goes [batch, length, heads, width], as projections write it and attention's output is read.
at::Tensor new_heads(const at::Tensor& like, int64_t batch, int64_t heads, int64_t length, int64_t width) {
  return at::empty({batch, length, heads, width}, like.options()).transpose(1, 2);
}

at::Tensor rope_turn(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines, int64_t offset,
                     bool inverse) {
  TORCH_CHECK_VALUE(x.dim() == 4, "rope: expected [batch, heads, length, width], got shape ", x.sizes(), ".");
  check_tables(x, cosines, sines, x.size(2), x.size(3), offset);
  const at::Tensor out = new_heads(x, x.size(0), x.size(1), x.size(2), x.size(3));
  turn(x, out, cosines, sines, offset, inverse);
  return out;
}

struct Packed {
  at::Tensor q, k, v;  // views
};

Packed unpack(const at::Tensor& qkv, int64_t num_heads, int64_t num_kv_heads) {
  const int64_t total = num_heads + 2 * num_kv_heads;
  TORCH_CHECK_VALUE(qkv.dim() == 3 && num_heads > 0 && num_kv_heads > 0 && qkv.size(2) % total == 0,
                    "rope_qkv: expected [batch, length, (num_heads + 2 num_kv_heads) width] with ", num_heads, " and ",
                    num_kv_heads, " heads, got shape ", qkv.sizes(), ".");
  const at::Tensor heads = qkv.view({qkv.size(0), qkv.size(1), total, qkv.size(2) / total}).transpose(1, 2);
  return {heads.narrow(1, 0, num_heads), heads.narrow(1, num_heads, num_kv_heads),
          heads.narrow(1, num_heads + num_kv_heads, num_kv_heads)};
}

// -> packed as `qkv`, q and k turned. The values are copied: were they a view of `qkv`, attention would keep all of
// that for them, next to q and k.
at::Tensor rope_qkv_forward(const at::Tensor& qkv_in, const at::Tensor& cosines, const at::Tensor& sines,
                            int64_t num_heads, int64_t num_kv_heads, int64_t offset) {
  const at::Tensor qkv = qkv_in.contiguous();
  const Packed in = unpack(qkv, num_heads, num_kv_heads);
  check_tables(qkv, cosines, sines, in.q.size(2), in.q.size(3), offset);
  const at::Tensor turned = at::empty_like(qkv);
  const Packed out = unpack(turned, num_heads, num_kv_heads);
  turn(in.q, out.q, cosines, sines, offset, false);
  turn(in.k, out.k, cosines, sines, offset, false);
  turn(in.v, out.v, at::Tensor(), at::Tensor(), 0, false);
  return turned;
}

at::Tensor rope_qkv_backward(const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                             const at::Tensor& cosines, const at::Tensor& sines, int64_t offset) {
  const int64_t total = dq.size(1) + dk.size(1) + dv.size(1);
  at::Tensor dqkv = at::empty({dq.size(0), dq.size(2), total * dq.size(3)}, dq.options());
  const Packed packed = unpack(dqkv, dq.size(1), dk.size(1));
  turn(dq, packed.q, cosines, sines, offset, /*inverse=*/true);
  turn(dk, packed.k, cosines, sines, offset, /*inverse=*/true);
  turn(dv, packed.v, at::Tensor(), at::Tensor(), 0, false);
  return dqkv;
}

// Linear in x, so its own backward can be differentiated.
struct Rope : Function<Rope> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cosines,
                            const at::Tensor& sines, int64_t offset, bool inverse) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op = find_operator<decltype(rope_turn)>("timelyfreeze::rope_turn");
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["inverse"] = inverse;
    ctx->save_for_backward({cosines, sines});
    return op.call(x, cosines, sines, offset, inverse);
  }

  static at::Tensor turned(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines, int64_t offset,
                           bool inverse) {
    return Rope::apply(x, cosines, sines, offset, inverse);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto tables = ctx->get_saved_variables();
    const at::Tensor dx = Rope::apply(grads[0], tables[0], tables[1], ctx->saved_data["offset"].toInt(),
                                      !ctx->saved_data["inverse"].toBool());
    return {dx, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct RopeQkv : Function<RopeQkv> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& qkv, const at::Tensor& cosines,
                               const at::Tensor& sines, int64_t num_heads, int64_t num_kv_heads, int64_t offset) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op = find_operator<decltype(rope_qkv_forward)>("timelyfreeze::rope_qkv_forward");
    ctx->saved_data["offset"] = offset;
    ctx->save_for_backward({cosines, sines});
    const Packed made = unpack(op.call(qkv, cosines, sines, num_heads, num_kv_heads, offset), num_heads, num_kv_heads);
    return {made.q, made.k, made.v};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto tables = ctx->get_saved_variables();
    const int64_t offset = ctx->saved_data["offset"].toInt();
    variable_list result(6);
    if (at::GradMode::is_enabled()) {
      const at::Tensor dq = Rope::apply(grads[0], tables[0], tables[1], offset, true);
      const at::Tensor dk = Rope::apply(grads[1], tables[0], tables[1], offset, true);
      result[0] = at::cat({dq, dk, grads[2]}, 1).transpose(1, 2).flatten(2);
      return result;
    }
    static const auto op = find_operator<decltype(rope_qkv_backward)>("timelyfreeze::rope_qkv_backward");
    result[0] = op.call(grads[0], grads[1], grads[2], tables[0], tables[1], offset);
    return result;
  }
};

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> rope_qkv(const at::Tensor& qkv, const at::Tensor& cosines,
                                                        const at::Tensor& sines, int64_t num_heads,
                                                        int64_t num_kv_heads, int64_t offset) {
  const auto made = RopeQkv::apply(qkv, cosines, sines, num_heads, num_kv_heads, offset);
  return {made[0], made[1], made[2]};
}

TORCH_LIBRARY_FRAGMENT(timelyfreeze, m) {
  m.def("rope_turn(Tensor x, Tensor cosines, Tensor sines, int offset, bool inverse) -> Tensor");
  m.def(
      "rope_qkv_forward(Tensor qkv, Tensor cosines, Tensor sines, int num_heads, int num_kv_heads, int offset) -> "
      "Tensor");
  m.def("rope_qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cosines, Tensor sines, int offset) -> Tensor");
}
TORCH_LIBRARY_IMPL(timelyfreeze, CPU, m) {
  m.impl("rope_turn", &rope_turn);
  m.impl("rope_qkv_forward", &rope_qkv_forward);
  m.impl("rope_qkv_backward", &rope_qkv_backward);
}
TORCH_LIBRARY_IMPL(timelyfreeze, CUDA, m) {
  m.impl("rope_turn", &rope_turn);
  m.impl("rope_qkv_forward", &rope_qkv_forward);
  m.impl("rope_qkv_backward", &rope_qkv_backward);
}

TORCH_LIBRARY_IMPL(timelyfreeze, Autograd, m) { m.impl("rope_turn", &Rope::turned); }

}  // namespace timelyfreeze::ops
