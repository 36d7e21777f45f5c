// silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weight in one pass, float32 inside, rounded once.
// Rows are independent of each other, whatever their number and the number of threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

using torch::headeronly::BFloat16;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int64_t kValuesPerTask = 16384;

void swiglu_row(const BFloat16* gate, const BFloat16* up, float* out, int64_t width, float limit, float weight) {
  for (int64_t i = 0; i < width; ++i) {
    const float g = std::min(static_cast<float>(gate[i]), limit);
    const float u = std::clamp(static_cast<float>(up[i]), -limit, limit);
    out[i] = g / (1.0f + std::exp(-g)) * u * weight;
  }
}

// gate_up [R, 2 I] bfloat16 (gate first), row_weight [R] float32 or none, out [R, I] float32; all contiguous.
void swiglu(Tensor gate_up, double limit, std::optional<Tensor> row_weight, Tensor out) {
  STD_TORCH_CHECK(gate_up.dim() == 2 && gate_up.scalar_type() == ScalarType::BFloat16,
                  "swiglu: gate_up has to be a matrix of bfloat16");
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  STD_TORCH_CHECK(gate_up.size(1) == 2 * width, "swiglu: gate_up has ", gate_up.size(1), " columns, expected an even number");
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == rows && out.size(1) == width, "swiglu: out has another shape");
  STD_TORCH_CHECK(!row_weight || (row_weight->dim() == 1 && row_weight->size(0) == rows &&
                                  row_weight->scalar_type() == ScalarType::Float),
                  "swiglu: row_weight has to be float32, one value for each of ", rows, " rows");

  const auto* in = static_cast<const BFloat16*>(gate_up.const_data_ptr());
  const auto* weight = row_weight ? static_cast<const float*>(row_weight->const_data_ptr()) : nullptr;
  auto* to = static_cast<float*>(out.mutable_data_ptr());
  const int64_t rows_per_task = 1 + kValuesPerTask / (width + 1);
  torch::stable::parallel_for(0, rows, rows_per_task, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const BFloat16* gate = in + 2 * row * width;
      swiglu_row(gate, gate + width, to + row * width, width, static_cast<float>(limit), weight ? weight[row] : 1.0f);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(deepinfer_acme, library) {
  library.def("swiglu(Tensor gate_up, float limit, Tensor? row_weight, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer_acme, CPU, library) { library.impl("swiglu", TORCH_BOX(&swiglu)); }
