// CPU kernel of ostinato::paged_attention: writes the step's keys and values, then attends.
//
// The arithmetic of a row is fixed by the row's own context alone. Tiles of 64 keys and partitions of 256 lie at
// absolute positions. Each partition runs its own online softmax, and partitions are merged in order, whether one thread
// or many computed them. Keys that a row does not see do not change its state. So the bits of a row do not depend on
// the batch, the chunk, the tile or the number of threads.
#include "attention/attend.h"
#include "attention/cache_write.h"
#include "core/kernel.h"

#include <torch/headeronly/version.h>

#include <cstdlib>

namespace ostinato::attention {
namespace {

constexpr int64_t kMaxWindow = 1 << 30;  // longer than any context, so it stands for no window

void check_metadata(const Problem& p, int64_t table_width) {
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    OSTINATO_CHECK(p.slot_mapping[token] >= 0 && p.slot_mapping[token] < p.num_blocks * p.block_size,
                   "paged_attention: slot_mapping[", token, "] = ", p.slot_mapping[token],
                   " is outside of the cache's ", p.num_blocks * p.block_size, " slots");
  }
  OSTINATO_CHECK(p.query_start_loc[0] == 0, "paged_attention: query_start_loc must begin with 0");
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    const int64_t queries = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
    const int64_t length = p.seq_lens[seq];
    OSTINATO_CHECK(queries >= 0 && p.query_start_loc[seq + 1] <= p.num_tokens,
                   "paged_attention: query_start_loc must not fall, and must stay within ", p.num_tokens,
                   " tokens, sequence ", seq);
    if (queries == 0) continue;
    OSTINATO_CHECK(queries <= length && length <= table_width * p.block_size,
                   "paged_attention: seq_lens[", seq, "] = ", length, " must be in [", queries, ", ",
                   table_width * p.block_size, "]");
    if (p.visible_ends != nullptr) {
      for (int64_t row = p.query_start_loc[seq]; row < p.query_start_loc[seq + 1]; ++row) {
        OSTINATO_CHECK(p.visible_ends[row] <= length, "paged_attention: visible_ends[", row, "] = ",
                       p.visible_ends[row], " is beyond the ", length, " keys of its sequence");
      }
    }
    for (int64_t i = 0; i * p.block_size < length; ++i) {
      const int64_t block = p.block_table[seq * p.block_table_stride + i];
      OSTINATO_CHECK(block >= 0 && block < p.num_blocks,
                     "paged_attention: block_table[", seq, ", ", i, "] = ", block, " is outside of the cache's ",
                     p.num_blocks, " blocks");
    }
  }
}

Cache cache_of(const Tensor& x) {
  const int64_t size = element_size(x.dtype);
  return {x.as<char>(), x.strides[0] * size, x.strides[1] * size};
}

void check_tensors(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                   const Tensor& v_cache) {
  OSTINATO_CHECK(q.dim == 3 && k.dim == 3 && v.dim == 3 && k_cache.dim == 4 && v_cache.dim == 4,
                 "paged_attention: q, k, v must be [T, H, D] and the caches [num_blocks, Hkv, block_size, D]");
  const bool has_bytes = k_cache.dtype == DType::int8;
  OSTINATO_CHECK(q.dtype == k.dtype && q.dtype == v.dtype && (has_bytes || q.dtype == k_cache.dtype) &&
                     v_cache.dtype == k_cache.dtype,
                 "paged_attention: q, k, v and the caches must have one dtype, or the caches int8");
  const int64_t head_dim = q.sizes[2], value_dim = v.sizes[2], scale_bytes = has_bytes ? kScaleBytes : 0;
  for (const int64_t size : {head_dim, value_dim}) {
    OSTINATO_CHECK(size % 8 == 0 && size >= 8 && size <= kMaxHeadDim,
                   "paged_attention: head_dim must be a multiple of 8 up to 256, got ", size);
  }
  OSTINATO_CHECK(k_cache.sizes[2] % kMinGroup == 0, "paged_attention: block_size must be a multiple of 8, got ",
                 k_cache.sizes[2]);
  for (const Tensor* x : {&k, &v}) {
    OSTINATO_CHECK(x->sizes[0] == q.sizes[0] && x->sizes[1] == k_cache.sizes[1],
                   "paged_attention: k and v must be [T, Hkv, D] with q's T and the cache's Hkv");
  }
  OSTINATO_CHECK(k.sizes[2] == head_dim, "paged_attention: k needs q's head_dim");
  for (int i = 0; i < 3; ++i) {
    OSTINATO_CHECK(k_cache.sizes[i] == v_cache.sizes[i], "paged_attention: the caches differ in shape");
  }
  OSTINATO_CHECK(k_cache.sizes[3] == head_dim + scale_bytes && v_cache.sizes[3] == value_dim + scale_bytes &&
                     q.sizes[1] % k.sizes[1] == 0,
                 "paged_attention: the caches need the head_dim of k and of v (int8: 4 more), and q's heads a "
                 "multiple of k's");
  for (const Tensor* x : {&q, &k, &v, &k_cache, &v_cache}) {
    OSTINATO_CHECK(x->strides[x->dim - 1] == 1, "paged_attention: the last dimension must be contiguous");
  }
  for (const Tensor* x : {&k, &v}) {
    for (int i = 0; i < 2; ++i) {
      OSTINATO_CHECK(x->sizes[i] <= 1 || x->strides[i] % 2 == 0, "paged_attention: strides of k and v must be even");
    }
  }
  for (const Tensor* x : {&k_cache, &v_cache}) {
    OSTINATO_CHECK(x->strides[2] == x->sizes[3], "paged_attention: a head's part of a block must be contiguous");
  }
}

// Checks an optional tensor [heads] float32.
void check_per_head(const Tensor& x, const char* name, int64_t heads) {
  if (!x.exists()) return;
  OSTINATO_CHECK(x.dtype == DType::float32 && x.dim == 1 && x.sizes[0] == heads && (heads == 1 || x.strides[0] == 1),
                 "paged_attention: ", name, " must be float32 [", heads, "], contiguous");
}

Problem describe_problem(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                         const Tensor& v_cache) {
  Problem p{};
  p.num_tokens = q.sizes[0];
  p.num_blocks = k_cache.sizes[0];
  p.num_heads = static_cast<int>(q.sizes[1]);
  p.num_kv_heads = static_cast<int>(k.sizes[1]);
  p.group = p.num_heads / p.num_kv_heads;
  p.head_dim = static_cast<int>(q.sizes[2]);
  p.value_dim = static_cast<int>(v.sizes[2]);
  p.block_size = static_cast<int>(k_cache.sizes[2]);
  p.element_bytes = q.dtype == DType::float32 ? 4 : 2;
  p.has_byte_cache = k_cache.dtype == DType::int8;
  const int unit = p.has_byte_cache ? 1 : p.element_bytes, scale = p.has_byte_cache ? kScaleBytes : 0;
  p.key_bytes = p.head_dim * unit + scale;
  p.value_bytes = p.value_dim * unit + scale;
  p.q = rows_of(q);
  p.k = rows_of(k);
  p.v = rows_of(v);
  p.k_cache = cache_of(k_cache);
  p.v_cache = cache_of(v_cache);
  return p;
}

LogitScaling scaling_of(double scale, double soft_cap) {
  constexpr double log2_e = 1.4426950408889634;
  if (soft_cap == 0.0) return {static_cast<float>(scale * log2_e), 0.0f};
  return {static_cast<float>(scale / soft_cap), static_cast<float>(soft_cap * log2_e)};
}

// The schema's last argument is `str backend`. A call for a backend other than "cpu" goes to the Python kernel.
constexpr int kBackendArgument = 16;

bool is_for_this_backend(StableIValue argument) {
  const char* name;
  torch_string_c_str(reinterpret_cast<StringHandle>(argument), &name);
  return std::strcmp(name, "cpu") == 0;
}

void paged_attention(Call& call) {
  const Tensor q = call.tensor(), k = call.tensor(), v = call.tensor();
  const Tensor k_cache = call.tensor(), v_cache = call.tensor();
  const Tensor query_start_loc = call.tensor(), seq_lens = call.tensor(), block_table = call.tensor();
  const Tensor slot_mapping = call.tensor();
  call.tensor();  // plan: this kernel has none
  const Tensor visible_ends = call.optional_tensor();
  const double scale = call.number();
  const int64_t window = call.integer();
  const double soft_cap = call.number();
  const Tensor alibi_slopes = call.optional_tensor(), sinks = call.optional_tensor();
  call.text();

  check_tensors(q, k, v, k_cache, v_cache);
  check_per_head(alibi_slopes, "alibi_slopes", q.sizes[1]);
  check_per_head(sinks, "sinks", q.sizes[1]);
  OSTINATO_CHECK(query_start_loc.dtype == DType::int32 && seq_lens.dtype == DType::int32 &&
                     block_table.dtype == DType::int32 && slot_mapping.dtype == DType::int64,
                 "paged_attention: query_start_loc, seq_lens, block_table must be int32, slot_mapping int64");
  OSTINATO_CHECK(block_table.dim == 2 && block_table.strides[1] == 1 && query_start_loc.strides[0] == 1 &&
                     seq_lens.strides[0] == 1 && slot_mapping.strides[0] == 1 &&
                     query_start_loc.sizes[0] == seq_lens.sizes[0] + 1 &&
                     block_table.sizes[0] == seq_lens.sizes[0] && slot_mapping.sizes[0] == q.sizes[0],
                 "paged_attention: metadata must be query_start_loc [S+1], seq_lens [S], block_table [S, B], "
                 "slot_mapping [T], contiguous");
  Problem p = describe_problem(q, k, v, k_cache, v_cache);
  p.num_seqs = seq_lens.sizes[0];
  p.query_start_loc = query_start_loc.as<int32_t>();
  p.seq_lens = seq_lens.as<int32_t>();
  p.block_table = block_table.as<int32_t>();
  p.block_table_stride = block_table.strides[0];
  p.slot_mapping = slot_mapping.as<int64_t>();
  OSTINATO_CHECK(!visible_ends.exists() ||
                     (visible_ends.dtype == DType::int32 && visible_ends.dim == 1 && visible_ends.strides[0] == 1 &&
                      visible_ends.sizes[0] == q.sizes[0]),
                 "paged_attention: visible_ends must be int32 [T], contiguous");
  p.visible_ends = !visible_ends.exists() ? nullptr : visible_ends.as<int32_t>();
  p.scaling = scaling_of(scale, soft_cap);
  p.alibi_slopes = !alibi_slopes.exists() ? nullptr : alibi_slopes.as<float>();
  p.sinks = !sinks.exists() ? nullptr : sinks.as<float>();
  p.threads = call.threads();
  p.window = std::abs(window) > kMaxWindow ? 0 : static_cast<int>(window);
  check_metadata(p, block_table.sizes[1]);
  const int64_t out_sizes[] = {q.sizes[0], q.sizes[1], v.sizes[2]};
  const Tensor out = call.empty(out_sizes, 3, q.dtype);
  p.out = out.as<char>();

  OSTINATO_CHECK(q.dtype == DType::float32 || q.dtype == DType::float16 || q.dtype == DType::bfloat16,
                 "paged_attention: dtype must be float32, bfloat16 or float16");
  write_cache(p, q.dtype);
  zero_padding(p);
  attend_in(q.dtype, p);
  call.give(out);
}

void boxed_paged_attention(StableIValue* stack, uint64_t, uint64_t);
OSTINATO_BOXED_KERNEL(paged_attention, boxed_paged_attention, paged_attention);

void boxed_paged_attention(StableIValue* stack, uint64_t, uint64_t) {
  if (!is_for_this_backend(stack[kBackendArgument])) {
    require_ok(torch_call_dispatcher("ostinato::paged_attention_in_python", "", stack, TORCH_ABI_VERSION),
               "run the chosen attention backend");
    return;
  }
  Call call(stack);
  registration_of_paged_attention.kernel.load(std::memory_order_relaxed)(call);
}

}  // namespace
}  // namespace ostinato::attention
