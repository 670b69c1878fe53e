// CPU kernel of ostinato::cross_attention: every row attends to keys and values that the cache already holds.
//
// Each row is a sequence of one query for the worker of paged attention. Rows with a common block table share the items
// of its partitions (shared_keys.h), so that a prompt of several rows reads the keys once.
#include "attention/attend.h"
#include "core/kernel.h"

#include <cstring>

namespace ostinato::attention {
namespace {

void check_cross_tensors(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& seq_lens,
                         const Tensor& block_table) {
  OSTINATO_CHECK(q.dim == 3 && k_cache.dim == 4 && v_cache.dim == 4,
                 "cross_attention: q must be [T, H, D] and the caches [num_blocks, Hkv, block_size, D]");
  const bool has_bytes = k_cache.dtype == DType::int8;
  OSTINATO_CHECK((has_bytes || q.dtype == k_cache.dtype) && v_cache.dtype == k_cache.dtype,
                 "cross_attention: q and the caches must have one dtype, or the caches int8");
  OSTINATO_CHECK(q.dtype == DType::float32 || q.dtype == DType::float16 || q.dtype == DType::bfloat16,
                 "cross_attention: dtype must be float32, bfloat16 or float16");
  const int64_t head_dim = q.sizes[2];
  OSTINATO_CHECK(head_dim % 8 == 0 && head_dim >= 8 && head_dim <= kMaxHeadDim,
                 "cross_attention: head_dim must be a multiple of 8 up to 256, got ", head_dim);
  OSTINATO_CHECK(k_cache.sizes[2] % kMinGroup == 0, "cross_attention: block_size must be a multiple of 8, got ",
                 k_cache.sizes[2]);
  for (int i = 0; i < 4; ++i) {
    OSTINATO_CHECK(k_cache.sizes[i] == v_cache.sizes[i], "cross_attention: the caches differ in shape");
  }
  OSTINATO_CHECK(k_cache.sizes[3] == head_dim + (has_bytes ? kScaleBytes : 0) && q.sizes[1] % k_cache.sizes[1] == 0,
                 "cross_attention: the caches need q's head_dim (int8: 4 more), and q's heads a multiple of theirs");
  for (const Tensor* x : {&q, &k_cache, &v_cache}) {
    OSTINATO_CHECK(x->strides[x->dim - 1] == 1, "cross_attention: the last dimension must be contiguous");
  }
  for (const Tensor* x : {&k_cache, &v_cache}) {
    OSTINATO_CHECK(x->strides[2] == x->sizes[3], "cross_attention: a head's part of a block must be contiguous");
  }
  OSTINATO_CHECK(seq_lens.dtype == DType::int32 && block_table.dtype == DType::int32 && seq_lens.dim == 1 &&
                     block_table.dim == 2 && seq_lens.sizes[0] == q.sizes[0] && block_table.sizes[0] == q.sizes[0] &&
                     (q.sizes[0] <= 1 || seq_lens.strides[0] == 1) && block_table.strides[1] == 1,
                 "cross_attention: seq_lens [T] and block_table [T, E] must be int32, contiguous");
}

void check_rows(const Problem& p, int64_t table_width) {
  for (int64_t row = 0; row < p.num_tokens; ++row) {
    const int64_t length = p.seq_lens[row];
    OSTINATO_CHECK(length >= 1 && length <= table_width * p.block_size, "cross_attention: seq_lens[", row,
                   "] = ", length, " must be in [1, ", table_width * p.block_size, "]");
    for (int64_t i = 0; i * p.block_size < length; ++i) {
      const int64_t block = p.block_table[row * p.block_table_stride + i];
      OSTINATO_CHECK(block >= 0 && block < p.num_blocks, "cross_attention: block_table[", row, ", ", i, "] = ", block,
                     " is outside of the cache's ", p.num_blocks, " blocks");
    }
  }
}

Cache cross_cache_of(const Tensor& x) {
  const int64_t size = element_size(x.dtype);
  return {x.as<char>(), x.strides[0] * size, x.strides[1] * size};
}

// The schema's last argument is `str backend`. A call for a backend other than "cpu" goes to the Python kernel.
constexpr int kCrossBackendArgument = 6;

// cross_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, Tensor block_table, float scale, str backend)
void cross_attention(Call& call) {
  const Tensor q = call.tensor(), k_cache = call.tensor(), v_cache = call.tensor();
  const Tensor seq_lens = call.tensor(), block_table = call.tensor();
  const double scale = call.number();
  call.text();
  check_cross_tensors(q, k_cache, v_cache, seq_lens, block_table);
  Problem p{};
  p.num_tokens = p.num_seqs = q.sizes[0];
  p.num_blocks = k_cache.sizes[0];
  p.num_heads = static_cast<int>(q.sizes[1]);
  p.num_kv_heads = static_cast<int>(k_cache.sizes[1]);
  p.group = p.num_heads / p.num_kv_heads;
  p.head_dim = p.value_dim = static_cast<int>(q.sizes[2]);
  p.block_size = static_cast<int>(k_cache.sizes[2]);
  p.element_bytes = static_cast<int>(element_size(q.dtype));
  p.has_byte_cache = k_cache.dtype == DType::int8;
  p.key_bytes = p.value_bytes = p.has_byte_cache ? p.head_dim + kScaleBytes : p.head_dim * p.element_bytes;
  p.q = rows_of(q);
  p.k_cache = cross_cache_of(k_cache);
  p.v_cache = cross_cache_of(v_cache);
  int32_t* starts = call.workspace<int32_t>(p.num_tokens + 1);
  for (int64_t row = 0; row <= p.num_tokens; ++row) starts[row] = static_cast<int32_t>(row);
  p.query_start_loc = starts;
  p.seq_lens = seq_lens.as<int32_t>();
  p.block_table = block_table.as<int32_t>();
  p.block_table_stride = block_table.strides[0];
  p.scaling = {static_cast<float>(scale * 1.4426950408889634), 0.0f};  // logits to base 2, without a cap
  p.threads = call.threads();
  check_rows(p, block_table.sizes[1]);
  const Tensor out = call.empty(q.sizes, 3, q.dtype);
  p.out = out.as<char>();
  attend_in(q.dtype, p);
  call.give(out);
}

void boxed_cross_attention(StableIValue* stack, uint64_t, uint64_t);
OSTINATO_BOXED_KERNEL(cross_attention, boxed_cross_attention, cross_attention);

void boxed_cross_attention(StableIValue* stack, uint64_t, uint64_t) {
  const char* backend;
  torch_string_c_str(reinterpret_cast<StringHandle>(stack[kCrossBackendArgument]), &backend);
  if (std::strcmp(backend, "cpu") != 0) {
    require_ok(torch_call_dispatcher("ostinato::cross_attention_in_python", "", stack, TORCH_ABI_VERSION),
               "run the chosen attention backend");
    return;
  }
  Call call(stack);
  registration_of_cross_attention.kernel.load(std::memory_order_relaxed)(call);
}

}  // namespace
}  // namespace ostinato::attention
