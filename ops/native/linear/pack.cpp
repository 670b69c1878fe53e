// The ops that write packed linear weights and read their rows. pack_linear packs a matrix. packed_rows reads rows
// back, so an embedding that shares the output layer's weight needs no second copy.
#include "linear/give_rows.h"
#include "linear/pack_columns.h"
#include "linear/tasks.h"

namespace ostinato::linear {
namespace {

// pack_linear(Tensor(a!) packed, Tensor weight, SymInt first_row) -> ()
void pack_linear(Call& call) {
  const Tensor packed = call.tensor();
  const Tensor weight = call.tensor();
  const int64_t first_row = call.integer();
  const int64_t elements = elements_per_step(weight.dtype);
  OSTINATO_CHECK(elements != 0 && weight.dim == 2 && is_contiguous(weight, 1),
                 "a weight to pack must be a float32 or bfloat16 matrix with contiguous rows");
  OSTINATO_CHECK(packed.dtype == weight.dtype && packed.dim == 4,
                 "packed must have the dtype of the weight and four dimensions");
  const PackedWeight target(packed, packed.sizes[0] * kPanel, weight.sizes[1]);
  const int64_t end_row = first_row + weight.sizes[0];
  OSTINATO_CHECK(first_row >= 0 && end_row <= target.panels * kPanel, "rows ", first_row, " to ", end_row,
                 " do not fit into ", target.panels, " panels");
  const int64_t element_bytes = 4 / elements;
  const int64_t row_bytes = weight.strides[0] * element_bytes;
  const int64_t panel_units = target.steps * kPanel;
  const int64_t first_panel = first_row / kPanel, panels = ceil_divide(end_row, kPanel) - first_panel;
  divide_conversion(call.threads(), NumParts{panels}, panels * panel_units * 4).for_each([&](int64_t part) {
    const int64_t panel = first_panel + part, begin = std::max(panel * kPanel, first_row);
    const int columns = static_cast<int>(std::min((panel + 1) * kPanel, end_row) - begin);
    pack_columns(weight.as<char>() + (begin - first_row) * row_bytes, row_bytes, columns,
                 weight.sizes[1] * element_bytes, target.steps,
                 packed.as<uint32_t>() + panel * panel_units + begin % kPanel);
  });
}

// packed_rows(Tensor weight, Tensor ids, SymInt out_features, SymInt in_features) -> Tensor
void packed_rows(Call& call) {
  const Tensor weight = call.tensor();
  const Tensor ids = call.tensor();
  const int64_t out_features = call.integer();
  const int64_t in_features = call.integer();
  const PackedWeight packed(weight, out_features, in_features);
  const int64_t row_bytes = in_features * (4 / elements_per_step(weight.dtype));
  const int64_t whole_steps = row_bytes / 4;
  give_rows(call, ids, out_features, in_features, weight.dtype, packed.steps * 64, [&](int64_t id, char* target) {
    const uint32_t* units = packed.panel(id / kPanel) + id % kPanel;
    for (int64_t step = 0; step < whole_steps; ++step) std::memcpy(target + step * 4, units + step * kPanel, 4);
    std::memcpy(target + whole_steps * 4, units + whole_steps * kPanel, row_bytes - whole_steps * 4);
  });
}

}  // namespace

OSTINATO_KERNEL(pack_linear, pack_linear);
OSTINATO_KERNEL(packed_rows, packed_rows);

}  // namespace ostinato::linear
