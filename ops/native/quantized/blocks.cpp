// block_values: the integers of the blocks of a GGUF file, as bytes [blocks, values].
#include "linear/tasks.h"
#include "quantized/blocks.h"

#include <string>

namespace ostinato::linear {
namespace {

// block_values(Tensor blocks, str type, SymInt added) -> Tensor
void block_values(Call& call) {
  const Tensor blocks = call.tensor();
  const std::string name = call.text();
  const int64_t added = call.integer();
  const BlockType& type = block_type(name, blocks, 2);
  const int64_t count = blocks.sizes[0];
  const int64_t sizes[] = {count, type.values};
  const Tensor out = call.empty(sizes, 2, DType::uint8);
  const uint8_t* source = blocks.as<uint8_t>();
  uint8_t* target = out.as<uint8_t>();
  divide_conversion(call.threads(), NumParts{count}, count * type.values).run([&](int64_t begin, int64_t end) {
    type.unpack(source, begin, end, static_cast<uint8_t>(added), target);
  });
  call.give(out);
}

}  // namespace

OSTINATO_KERNEL(block_values, block_values);

}  // namespace ostinato::linear
